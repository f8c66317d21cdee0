"""Rollouts that overlap with learning: completions that go on over an update, and what is remembered of them."""

import jax
import numpy as np
import pytest
from conftest import EOS, NEW, PROMPT, ragged_prompts, random_params, set_mesh

from tunix_lite.rollout.carry import OpenCompletion, make_carry_sampler, rollout_of
from tunix_lite.rollout.engine import make_generate
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig

WIDE = pytest.mark.wide
GROUPS = 4
GENERATIONS = 2
KEY = jax.random.key(3)


def of_cfg(make, cfg, slots=4, chunk=4, **changes):
    generation = GenerationConfig(PROMPT, NEW, **changes)
    return make(cfg, generation, EOS, 0, rollout=RolloutConfig(num_slots=slots, chunk=chunk))


def begun(step=0):
    return [OpenCompletion(step, p, g) for p in range(GROUPS) for g in range(GENERATIONS)]


def asked(steps=(0,)):
    return {(step, p): prompt for step in steps for p, prompt in enumerate(ragged_prompts(GROUPS))}


def after_chunks(count):
    """Enough is there once so many chunks were read; `is_enough` is asked once before the first one."""
    asked_before = iter([*[False] * count, *[True] * 99])
    return lambda ended: next(asked_before)


def carried_on(sampler, params, completions, chunks):
    """What two rollouts with the same weights come to, the first of which ends after some chunks."""
    usual = (GROUPS, GENERATIONS)
    first, metrics = sampler.go_on(params, completions, asked(), KEY, 0, after_chunks(chunks), usual)
    assert sum(one.is_under_way for one in first) >= 2
    assert metrics["rollout/carried"] == 0
    return first, *sampler.go_on(params, first, asked(), KEY, 1, lambda ended: ended.all(), usual)


@pytest.mark.parametrize("mesh", [(1, 1), pytest.param((2, 2), marks=WIDE)], ids=str)
def test_a_completion_that_goes_on_draws_what_it_would_have_drawn(cfg, mesh):
    """The weights do not change here, so the update in between must change nothing."""
    set_mesh(*mesh)
    params = random_params(cfg)
    generate = of_cfg(make_generate, cfg)
    whole = generate(params, ragged_prompts(GROUPS), jax.random.fold_in(KEY, 0), GENERATIONS)
    first, after, metrics = carried_on(of_cfg(make_carry_sampler, cfg), params, begun(), chunks=3)
    found = rollout_of(after, ragged_prompts(GROUPS), GenerationConfig(PROMPT, NEW), 0, {})
    np.testing.assert_array_equal(found.tokens, whole.tokens)
    np.testing.assert_array_equal(found.finish, whole.finish)
    np.testing.assert_allclose(found.logprobs, whole.logprobs, atol=1e-5)

    # what was drawn before the update has version 0, what was drawn after it version 1
    for one, then in zip(after, first):
        drawn = len(then.tokens)
        assert one.versions == (0,) * drawn + (1,) * (len(one.tokens) - drawn)
    carried = [(one, p) for one in first for p in [asked()[one.group]] if one.is_under_way]
    assert metrics["rollout/carried"] == len(carried)
    assert metrics["rollout/reread_tokens"] == sum(len(p) + len(one.tokens) for one, p in carried)
