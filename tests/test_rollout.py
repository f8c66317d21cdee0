"""What sampling must get right, whatever else changes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from conftest import EOS, NEW, PROMPT, ragged_prompts, random_params

from tunix_lite.models import decoder
from tunix_lite.policy import token_logprobs
from tunix_lite.rollout import sampling
from tunix_lite.rollout.engine import Generation, make_generate
from tunix_lite.types import Prompts


def test_sampler_and_trainer_agree_on_logprobs(policy, params, rollout):
    scored = policy.logprobs(params, rollout.tokens, rollout.token_mask)
    gap = jnp.abs(jnp.where(rollout.completion_mask, scored - rollout.logprobs, 0.0))
    assert float(gap.max()) < 1e-4
    assert float(jnp.abs(rollout.logprobs).max()) > 0.5, "the model has no opinions; this test shows nothing"


def test_greedy_equals_decoding_without_a_cache(cfg, params, generate):
    prompts = ragged_prompts(4)
    got = generate(params, prompts, jax.random.key(0), 1, temperature=0.0)
    for row in range(4):
        tokens = list(prompts.tokens[row][prompts.token_mask[row]])
        for _ in range(NEW):
            fixed = np.array([tokens + [0] * (PROMPT + NEW - len(tokens))])  # one shape: compiled once
            mask = np.arange(PROMPT + NEW)[None] < len(tokens)
            hidden = jax.jit(decoder.forward, static_argnums=1)(params, cfg, fixed, mask)
            tokens.append(int(jnp.argmax(decoder.logits(params, cfg, hidden[0, len(tokens) - 1]))))
            if tokens[-1] in EOS:
                break
        np.testing.assert_array_equal(np.asarray(got.tokens[row])[np.asarray(got.token_mask[row])], tokens)


def test_the_end_of_sequence_token_is_part_of_the_completion(rollout):
    tokens, mask = np.asarray(rollout.tokens), np.asarray(rollout.completion_mask)
    finished = np.asarray(rollout.finished)
    assert 0 < finished.sum() < len(finished), "the test needs completions that finish and some that do not"
    for row, keep, done in zip(tokens, mask, finished):
        completion = row[keep]
        assert (completion[-1] in EOS) == done
        assert not set(completion[:-1]) & set(EOS)
        assert done or len(completion) == NEW


def test_a_row_holds_its_prompt_then_its_completion_then_padding(rollout):
    prompts = ragged_prompts(5)
    np.testing.assert_array_equal(np.asarray(rollout.tokens)[::4, :PROMPT], prompts.tokens)
    np.testing.assert_array_equal(np.asarray(rollout.token_mask)[::4, :PROMPT], prompts.token_mask)
    assert not np.asarray(rollout.completion_mask)[:, :PROMPT].any()
    assert (np.asarray(rollout.tokens)[~np.asarray(rollout.token_mask)] == 0).all()


def test_noise_differs_between_steps_and_repeats_on_rerun(generate, params):
    """Tunix D2: its sampler drew the same noise at every step."""
    seed_key, prompts = jax.random.key(0), ragged_prompts(3)
    step_0, again, step_1 = (
        np.asarray(generate(params, prompts, jax.random.fold_in(seed_key, step), 4).tokens) for step in (0, 0, 1)
    )
    np.testing.assert_array_equal(step_0, again)
    assert (step_0 != step_1).any(axis=1).mean() > 0.5
    groups = step_0.reshape(3, 4, -1)
    assert all(len({tuple(row) for row in group}) > 1 for group in groups), "generations of a prompt must differ"


def test_a_completion_does_not_depend_on_how_many_others_are_sampled(cfg, params, generate):
    prompts, key = ragged_prompts(5), jax.random.key(3)
    many = np.asarray(generate(params, prompts, key, 4).tokens).reshape(5, 4, -1)
    few = np.asarray(generate(params, Prompts(prompts.tokens[:2], prompts.token_mask[:2]), key, 3).tokens)
    np.testing.assert_array_equal(few.reshape(2, 3, -1), many[:2, :3])


def test_draws_follow_the_softmax_at_the_given_temperature():
    scores, temperature, count = jnp.array([2.0, 0.5, -1.0, 0.0]), 0.7, 20_000
    keys = sampling.row_keys(jax.random.key(0), 100, count // 100)
    tokens, logprobs = sampling.draw(jnp.broadcast_to(scores, (count, 4)), keys, 3, jnp.float32(temperature))
    expected = np.exp(np.array([2.0, 0.5, -1.0, 0.0]) / temperature)
    expected /= expected.sum()
    counts = np.bincount(np.asarray(tokens), minlength=4)
    chi_square = ((counts - count * expected) ** 2 / (count * expected)).sum()
    assert chi_square < 16.27  # 3 degrees of freedom, p = 0.001
    np.testing.assert_allclose(np.asarray(logprobs), np.log(expected)[np.asarray(tokens)], rtol=1e-5)


def test_lengths_that_are_no_multiple_of_a_chunk_are_kept_exactly(cfg, params):
    for new in (1, 2, 18):
        generate = make_generate(cfg, Generation(PROMPT, new), eos_ids=(999,), pad_id=0)
        rollout = generate(params, ragged_prompts(2), jax.random.key(0), 1)
        assert rollout.tokens.shape == (2, PROMPT + new)
        np.testing.assert_array_equal(np.asarray(rollout.completion_mask).sum(axis=1), new)
        assert not np.asarray(rollout.finished).any()


def test_the_compiled_programs_of_a_rollout_do_not_grow(cfg, generate, params):
    generate(params, ragged_prompts(5), jax.random.key(0), 4)
    with jax.log_compiles(False), _count_compiles() as compiles:
        for step in range(3):
            generate(random_params(cfg, seed=step), ragged_prompts(5, seed=step), jax.random.key(step), 4)
    assert not [name for name in compiles if "decode_chunk" in name or "prefill" in name]


class _count_compiles:
    def __enter__(self):
        import logging

        self.names, self.handler = [], logging.Handler()
        self.handler.emit = lambda record: self.names.append(record.getMessage())
        self.logger = logging.getLogger("jax")
        self.logger.addHandler(self.handler)
        jax.config.update("jax_log_compiles", True)
        return self.names

    def __exit__(self, *_):
        jax.config.update("jax_log_compiles", False)
        self.logger.removeHandler(self.handler)


def test_padding_on_either_side_does_not_change_a_logprob(cfg, params):
    tokens = np.arange(4, 16)[None]
    score = jax.jit(partial(token_logprobs, cfg=cfg))
    bare = score(params, tokens, np.ones_like(tokens, bool))
    for left, right in ((5, 0), (0, 5), (2, 3)):
        pad = ((0, 0), (left, right))
        padded = score(params, np.pad(tokens, pad), np.pad(np.ones_like(tokens, bool), pad))
        np.testing.assert_allclose(padded[:, left + 1 : left + 12], bare[:, 1:], atol=2e-6)
