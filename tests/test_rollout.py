"""What sampling must get right, whatever else changes."""

import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import EOS, random_params, set_mesh

from tunix_lite.models import attention, decoder, weights
from tunix_lite.models.architecture import Architecture
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout import engine, generate, memory
from tunix_lite.rollout.generate import Request, make_generate, make_sampler
from tunix_lite.rollout.programs import Programs, SamplerSpec
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig

# ---- one queue, many ways to work it off

LONG, ROOM = 12, 34  # prompts longer than the window of 5; more room than the longest chunk
LENGTHS = (12, 2, 7, 3, 9, 1, 8)  # four wide ones: no block mixes widths, in whatever order they are asked
GROUP, END = 2, (1,)


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    """Prompts are read two at a time, 6 or 12 tokens wide, so that seven of them take the prompt cache's four rows twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "MIN_PROMPT_WIDTH", 6)
        patch.setattr(engine, "TOKENS_PER_PREFILL", 2 * LONG)
        yield


def prompts_of(lengths, vocab_size: int = 32, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, vocab_size, length).tolist() for length in lengths]


def sampler(cfg, slots: int | None, chunk: int, generation=None, eos=END, **more):
    generation = GenerationConfig(LONG, ROOM) if generation is None else generation
    return make_sampler(cfg, generation, eos, 0, rollout=RolloutConfig(slots, chunk, **more))


def all_of(steps) -> tuple[list[Request], dict]:
    """The completions in order, and the metrics."""
    touched = {}
    while True:
        try:
            touched |= {(completion.prompt, completion.generation): completion for completion in next(steps)}
        except StopIteration as end:
            return [touched[place] for place in sorted(touched)], end.value


def tokens_of(completions) -> list[list[int]]:
    return [completion.tokens for completion in completions]


@pytest.fixture(scope="module")
def two_layers(cfg):
    """A local layer and a global one."""
    return replace(cfg, num_layers=2)


@pytest.fixture(scope="module")
def medium(two_layers):
    set_mesh(1, 1)
    return random_params(two_layers)


@pytest.fixture(scope="module")
def four_slots(two_layers):
    set_mesh(1, 1)
    return sampler(two_layers, slots=4, chunk=4)


@pytest.fixture(scope="module")
def sampled(four_slots, medium):
    set_mesh(1, 1)
    return all_of(four_slots(medium, prompts_of(LENGTHS), jax.random.key(5), GROUP))


@pytest.fixture(scope="module")
def greedy(four_slots, medium):
    set_mesh(1, 1)
    return all_of(four_slots(medium, prompts_of(LENGTHS), jax.random.key(5), GROUP, temperature=0.0))


@pytest.fixture(scope="module")
def score(two_layers, medium):
    """Scores of the tokens of completions by the whole sequences, without a cache: for each completion [tokens, V]."""
    rows = len(LENGTHS) * GROUP
    forward = jax.jit(
        lambda params, tokens, mask: decoder.logits(
            params, two_layers, decoder.forward(params, two_layers, tokens, attention.one_sequence_per_row(mask))[0]
        )
    )

    def score(prompts, completions):
        whole = [prompts[completion.prompt] + completion.tokens for completion in completions]
        tokens, mask = np.zeros((rows, LONG + ROOM), np.int32), np.zeros((rows, LONG + ROOM), bool)
        for i, row in enumerate(whole):
            tokens[i, : len(row)], mask[i, : len(row)] = row, True
        scores = np.asarray(forward(medium, tokens, mask), np.float64)
        starts = [len(prompts[completion.prompt]) - 1 for completion in completions]
        return [scores[i, start : start + len(a.tokens)] for i, (start, a) in enumerate(zip(starts, completions))]

    return score


def log_softmax(scores):
    scores = scores - scores.max(axis=-1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))


def check_ends(completions):
    for completion in completions:
        assert not set(completion.tokens[:-1]) & set(END)
        assert (completion.tokens[-1] in END, completion.reason) in ((True, "eos"), (False, "length"))
        assert completion.reason == "eos" or len(completion.tokens) == ROOM


def test_a_queue_of_ragged_prompts_is_decoded_greedily_as_without_a_cache(greedy, score):
    """Each token is the best one after those before it: by induction that is what cache-free decoding says."""
    completions, _ = greedy
    assert len(completions) == len(LENGTHS) * GROUP > 4, "more requests than slots"
    check_ends(completions)
    for completion, scores in zip(completions, score(prompts_of(LENGTHS), completions)):
        assert completion.tokens == scores.argmax(axis=-1).tolist()
        whole = log_softmax(scores)[np.arange(len(scores)), completion.tokens]
        np.testing.assert_allclose(completion.logprobs, whole, atol=1e-5)
    assert len({tuple(tokens) for tokens in tokens_of(completions)}) > 3, "the model says one thing; this shows little"


def test_a_drawn_token_is_a_function_of_key_prompt_generation_and_position_alone(sampled, score):
    """The best of cache-free scores plus Gumbel noise from a key that is folded three times."""
    completions, _ = sampled
    check_ends(completions)
    reasons = [completion.reason for completion in completions]
    assert {"eos", "length"} == set(reasons), reasons

    @jax.jit
    def noise(prompt, generation, position):
        key = jax.random.key(5)
        for number in (prompt, generation, position):
            key = jax.random.fold_in(key, number)
        return jax.random.gumbel(key, (32,))

    for completion, scores in zip(completions, score(prompts_of(LENGTHS), completions)):
        noisy = scores + [noise(completion.prompt, completion.generation, t) for t in range(len(scores))]
        assert completion.tokens == noisy.argmax(axis=-1).tolist()
        whole = log_softmax(scores)[np.arange(len(scores)), completion.tokens]
        np.testing.assert_allclose(completion.logprobs, whole, atol=1e-5)
        assert completion.logprobs == completion.full_logprobs  # nothing is cut off


@pytest.mark.parametrize("lengths", [LENGTHS, (12, 2, 7, 3, 9, 1, 5)])
def test_the_order_of_the_queue_changes_no_token_and_no_bit_of_a_logprob(four_slots, medium, lengths):
    """Prompts are read two at a time. Of the second lengths three are wide and four narrow: an odd number of either is
    left over in any order."""
    prompts, found = prompts_of(lengths), []
    for order in (range(7), (5, 0, 3, 6, 1, 4, 2)):
        asked = [prompts[p] for p in order]
        completions, _ = all_of(four_slots(medium, asked, jax.random.key(5), GROUP, indices=order))
        found.append({(one.index, one.generation): (one.tokens, one.logprobs, one.reason) for one in completions})
    assert found[0] == found[1]


WAYS = {
    "one slot, tp": dict(mesh=(1, 2), slots=1, chunk=8),
    "a slot for everyone, token by token": dict(mesh=(2, 1), slots=16, chunk=1),
    "long chunks, both axes, weights divided": dict(mesh=(2, 2), slots=6, chunk=32, weights="sharded"),
    "more tp than key heads": dict(mesh=(1, 4), slots=4, chunk=8),
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if "both" in way else pytest.mark.wide) for way in WAYS], ids=list(WAYS)
)
def test_slots_chunk_mesh_and_place_of_the_weights_change_no_token(two_layers, sampled, greedy, way):
    """The reference: four slots, chunks of four tokens, one device."""
    options = dict(WAYS[way])
    set_mesh(*options.pop("mesh"))
    sample, params, prompts = sampler(two_layers, **options), random_params(two_layers), prompts_of(LENGTHS)
    completions, _ = all_of(sample(params, prompts, jax.random.key(5), GROUP))
    assert tokens_of(completions) == tokens_of(sampled[0])
    for got, expected in zip(completions, sampled[0]):
        assert got.reason == expected.reason
        np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)
    completions, _ = all_of(sample(params, prompts, jax.random.key(5), GROUP, temperature=0.0))
    assert tokens_of(completions) == tokens_of(greedy[0])


def test_a_cache_that_grows_changes_no_token(two_layers, medium, sampled, greedy, monkeypatch):
    """Prompts of up to 12 tokens and completions of up to 34: 16 columns, 32 and all 46; a window of 5 beside it."""
    monkeypatch.setattr(kv_cache, "MIN_COLUMNS", 16)
    widths, start_chunk = set(), engine.Engine.start_chunk

    def watched(scheduler):
        start_chunk(scheduler)
        widths.add(scheduler.slots.cache[-1].k.shape[2])

    monkeypatch.setattr(engine.Engine, "start_chunk", watched)
    sample = sampler(two_layers, slots=4, chunk=4)
    for expected, temperature in ((sampled, 1.0), (greedy, 0.0)):
        completions, _ = all_of(sample(medium, prompts_of(LENGTHS), jax.random.key(5), GROUP, temperature))
        assert tokens_of(completions) == tokens_of(expected[0])
        for got, other in zip(completions, expected[0]):
            np.testing.assert_allclose(got.logprobs, other.logprobs, atol=1e-5)
    assert widths == {16, 32, 46}


# ---- who ends when: a model of one layer, two slots, chunks of two tokens


class Letters:
    """A tokenizer of two letters a token, out of a, b, c, d; so a stop text may begin inside a token."""

    def decode(self, tokens, skip_special=True) -> str:
        return "".join("abcd"[t % 4] + "abcd"[t // 4 % 4] for t in tokens)

    def stream(self, skip_special=True):
        return SimpleNamespace(feed=self.decode)


BRIEF = GenerationConfig(LONG, 8)
ENDS = replace(BRIEF, stop=("ad", "cbc"), stop_token_ids=(9, 17))
EITHER = (2, 30)  # eos


@pytest.fixture(scope="module")
def one_layer(cfg):
    return replace(cfg, num_layers=1, pattern=("global",), tied=False)


@pytest.fixture(scope="module")
def small(one_layer):
    set_mesh(1, 1)
    return random_params(one_layer, scale=0.5)


@pytest.fixture(scope="module")
def two_slots(one_layer):
    set_mesh(1, 1)
    return sampler(one_layer, slots=2, chunk=2, generation=BRIEF, eos=())


MANY = (3, 1, 2, 5, 4, 1)  # lengths of prompts, all of one width: the queue is in their order


@pytest.mark.parametrize(
    "limits, chunks",
    [
        # chunk 1: a, b b    2: c c, b b    3: d d, b b    4: d
        ((1, 6, 2, 3), 4),
        # a a, b b    c c, d d    and one that was started before the first had been read: the price of not waiting
        ((2, 2, 2, 2), 3),
        # a a, b    a a, c c    a a, c c    c c; when the first is read, the third waits no more
        ((6, 1, 6), 4),
    ],
)
def test_slots_are_refilled_as_in_a_schedule_by_hand(two_slots, small, limits, chunks):
    prompts, steps = prompts_of(MANY[: len(limits)]), 2 * chunks
    completions, metrics = all_of(two_slots(small, prompts, jax.random.key(0), limits=limits))
    assert [len(completion.tokens) for completion in completions] == list(limits)
    assert metrics["rollout/decode_steps"] == steps
    assert metrics["rollout/slot_use"] == pytest.approx(sum(limits) / (2 * steps))
    assert metrics["rollout/prefill_tokens"] == sum(MANY[: len(limits)])


def test_limits_and_times_are_those_of_each_completion(two_slots, small):
    limits = [3, 1, 8, 2, 5, 7, 1, 1, 4, 8, 6, 2]
    begins = time.perf_counter()
    completions, metrics = all_of(two_slots(small, prompts_of(MANY), jax.random.key(0), 2, limits=limits))
    whole = time.perf_counter() - begins
    assert [len(completion.tokens) for completion in completions] == limits
    assert {completion.reason for completion in completions} == {"length"}
    began, ended = np.array([(completion.began, completion.ended) for completion in completions]).T
    assert (began > 0).all() and (began <= ended).all() and ended.max() <= metrics["time/rollout"] <= whole
    assert (np.diff(began) >= 0).all(), "the queue is taken in order"
    assert began[2] > began[0] and began[2] >= ended[1], "the third waits for a slot"
    free, _ = all_of(two_slots(small, prompts_of(MANY), jax.random.key(0), 2))
    assert tokens_of(completions) == [whole.tokens[:limit] for whole, limit in zip(free, limits)]


@pytest.fixture(scope="module")
def unstopped(two_slots, small):
    """48 completions of 8 tokens that nothing ends, as `ended_by_hand` wants them."""
    set_mesh(1, 1)
    return all_of(two_slots(small, prompts_of(MANY), jax.random.key(1), 8))[0]


def ended_by_hand(tokens: list[int], eos, generation) -> tuple[list[int], str]:
    """The shortest beginning that has ended."""
    for count in range(1, len(tokens) + 1):
        said = tokens[:count]
        if said[-1] in eos:
            return said, "eos"
        if said[-1] in generation.stop_token_ids or any(text in Letters().decode(said) for text in generation.stop):
            return said, "stop"
    return tokens, "length"


@pytest.fixture(scope="module")
def ending(one_layer):
    """Completions end in all ways."""
    return sampler(one_layer, slots=3, chunk=5, generation=ENDS, eos=EITHER)


def test_a_completion_ends_at_the_first_token_that_ends_it(ending, small, unstopped):
    """Tokens that a chunk drew after a stop text are dropped."""
    steps = ending(small, prompts_of(MANY), jax.random.key(1), 8, tokenizer=Letters())
    completions, _ = all_of(steps)
    expected = [ended_by_hand(whole.tokens, EITHER, ENDS) for whole in unstopped]
    assert [(completion.tokens, completion.reason) for completion in completions] == expected
    for completion, whole in zip(completions, unstopped):
        np.testing.assert_allclose(completion.logprobs, whole.logprobs[: len(completion.tokens)], atol=1e-5)
    by_text = [tokens for tokens, reason in expected if reason == "stop" and tokens[-1] not in ENDS.stop_token_ids]
    by_token = [tokens for tokens, reason in expected if reason == "stop" and tokens[-1] in ENDS.stop_token_ids]
    assert len(by_text) > 2 and len(by_token) > 1 and {"eos", "length"} < {reason for _, reason in expected}
    assert any(len(tokens) % 5 for tokens in by_text), "none ends within a chunk"
    assert any(Letters().decode(tokens[-1:]) not in ENDS.stop for tokens in by_text), "none spans tokens"


def test_the_host_leaves_alone_what_it_gave_to_a_program(ending, small, monkeypatch):
    """jax reads a host array when the program runs, which may be after the host has read the next chunk. Hosts that
    are not equally fast would then give unequal arrays to one program."""
    given, fill = [], engine.Engine.fill

    def watched(scheduler):
        def recorded(*args):
            given.extend((arg, arg.copy()) for arg in jax.tree.leaves(args) if isinstance(arg, np.ndarray))
            return admit(*args)

        admit, scheduler.programs.admit = scheduler.programs.admit, recorded
        fill(scheduler)
        scheduler.programs.admit = admit

    monkeypatch.setattr(engine.Engine, "fill", watched)
    all_of(ending(small, prompts_of(MANY), jax.random.key(1), 8, tokenizer=Letters()))
    assert len(given) > 10 and any((array >= 0).any() for array, _ in given), "nothing was stopped"
    for array, as_given in given:
        np.testing.assert_array_equal(array, as_given)


def test_a_completion_is_handed_over_as_soon_as_it_has_ended(two_slots, small, monkeypatch):
    """Limits (1, 6, 2, 3) in two slots, chunks of two: the schedule above ends them in chunks 1, 3, 2 and 4."""
    chunks, absorb = [], engine.Engine.absorb
    monkeypatch.setattr(engine.Engine, "absorb", lambda self, chunk: chunks.append(chunk) or absorb(self, chunk))
    monkeypatch.setattr(generate, "make_sampler", lambda *_: two_slots)
    brief = make_generate(two_slots.programs.spec.cfg, BRIEF, (), 0)
    prompts, calls, alone, grown = prompts_of(MANY[:4]), [], {}, []

    def on_chunk(requests, ended):
        grown.append(sorted(request.prompt for request in requests))
        alone.update(ended)

    rollout = brief(
        small, prompts, jax.random.key(0), limits=[1, 6, 2, 3], on_chunk=on_chunk,
        on_finished=lambda row, tokens: calls.append((len(chunks), row, list(tokens))),
    )  # fmt: skip
    assert grown == [[0, 1], [1, 2], [1, 3], [3]]
    for row in range(4):
        for name in ("tokens", "token_mask", "completion_mask", "logprobs", "finish", "full_logprobs", "seconds"):
            np.testing.assert_array_equal(getattr(alone[row], name)[0], getattr(rollout, name)[row])
    assert [(chunk, row, len(tokens)) for chunk, row, tokens in calls] == [(1, 0, 1), (2, 2, 2), (3, 1, 6), (4, 3, 3)]
    for _, row, tokens in calls:
        assert rollout.tokens[row][rollout.completion_mask[row]].tolist() == tokens
    np.testing.assert_array_equal(rollout.finish, 0)  # length
    assert (rollout.seconds[:, 0] <= rollout.seconds[:, 1]).all()
    assert (np.argsort(rollout.seconds[:, 1]) == [0, 2, 1, 3]).all()


# ---- what it refuses


@pytest.mark.parametrize(
    "prompts, options, message",
    [
        ([], {}, "there are no prompts to continue"),
        ([[5], []], {}, "prompt 2 of 2 has 0 tokens; it takes 1 to max_prompt_length=12"),
        ([[5] * 13], {}, "prompt 1 of 1 has 13 tokens; it takes 1 to max_prompt_length=12"),
        ([[5], [6, 32, 7]], {}, "prompt 2 of 2 holds token 32, and the model has tokens 0 to 31"),
        ([[6, 32]], {"tokenizer": Letters()}, "prompt 1 of 1 holds token 32, .* is not this model's, 'cbaa'"),
        ([[5], [6]], {"limits": [3]}, "1 limits for 2 completions"),
    ],
)
def test_what_cannot_be_continued_is_named(two_slots, small, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        next(two_slots(small, prompts, jax.random.key(0), **options))


@pytest.mark.parametrize("tokenizer, text", [(None, ": the weights"), (Letters(), ", 'cbcd': the weights")])
def test_scores_that_are_no_numbers_are_an_error_that_names_the_prompt(two_slots, small, tokenizer, text):
    """The embedding of token 30 is damaged, and only the third prompt holds it."""
    damaged = small | {"embed": small["embed"].at[30].set(np.nan)}
    prompts = [[5, 6], [7], [6, 30], [8]]
    steps = two_slots(damaged, prompts, jax.random.key(0), limits=[1] * 4, tokenizer=tokenizer)
    message = f"not finite at token 1 or a little later of completion 1 of prompt 3{text}"
    with pytest.raises(FloatingPointError, match=message):
        all_of(steps)


# ---- keys and values


def test_int8_keys_are_at_most_half_a_scale_off_and_a_third_of_the_bytes(cfg):
    """Per head of a token: 8 codes and a scale of 4 bytes instead of 8 * 4; with a head of 256 in bf16, 260 for 512."""
    k, v = np.random.default_rng(0).normal(size=(2, 3, 2, 7, 8)) * np.logspace(-3, 3, 7)[:, None]
    k[0, 0, 0] = 0  # padding
    quantized = kv_cache.quantize_kv(jnp.float32(k), jnp.float32(v))
    codes_k, codes_v, scales_k, scales_v = map(np.asarray, jax.tree.leaves(quantized))
    for x, codes, scales in ((k, codes_k, scales_k), (v, codes_v, scales_v)):
        np.testing.assert_allclose(scales, np.abs(x).max(axis=-1) / 127, rtol=1e-6)
        off = np.abs(codes.astype(np.float64) * scales[..., None] - x)
        assert codes.dtype == np.int8 and (off <= (0.5 + 1e-4) * scales[..., None]).all()

    def size(cfg, dtype, int8):
        return sum(
            x.size * x.dtype.itemsize
            for x in jax.tree.leaves(jax.eval_shape(lambda: kv_cache.empty_cache(cfg, 3, 20, dtype, int8)))
        )

    assert size(cfg, jnp.float32, True) * 32 == size(cfg, jnp.float32, False) * 12
    gemma = Architecture(262_144, 26, 1152, 4, 1, 256, 6912)
    assert size(gemma, jnp.bfloat16, True) * 512 == size(gemma, jnp.bfloat16, False) * 260


def test_an_int8_cache_moves_logprobs_by_little(two_layers, medium, score):
    prompts = prompts_of(LENGTHS)
    sample = sampler(two_layers, 4, 4, cache="int8")
    completions, _ = all_of(sample(medium, prompts, jax.random.key(5), GROUP))
    check_ends(completions)
    gaps = [
        np.abs(completion.logprobs - log_softmax(scores)[np.arange(len(scores)), completion.tokens])
        for completion, scores in zip(completions, score(prompts, completions))
    ]
    first = np.array([gap[0] for gap in gaps])
    rest = np.concatenate([gap[1:] for gap in gaps])
    assert first.max() < 1e-5, "prompts are read at full precision"
    assert 1e-4 < rest.mean() < 0.01 and rest.max() < 0.1  # measured: 0.004 and 0.04


# ---- where the weights are


def test_weights_are_gathered_if_they_the_cache_and_the_prompts_fit_into_nine_tenths_of_what_is_free(cfg, monkeypatch):
    """Where settings or one device do not say. 2 devices over fsdp, float32. A slot's keys and values: 2 * 2 heads * 8 * 4 bytes for each of 5 + 46 + 5 tokens;
    each device has two of the four slots, and of the prompts that wait all four, of 5 + LONG + 5 tokens."""

    def chosen(params, **settings):
        how = (GenerationConfig(LONG, ROOM), RolloutConfig(**settings), 4, [(2, 2), (4, 1)])
        return memory.choose_weights(params, memory.SamplingMemory.here(cfg, jnp.float32, *how))

    assert chosen(None, weights="sharded") == ("sharded", "weights sharded, as rollout.weights says")
    assert chosen(None) == ("gathered", "each device has all weights, as fsdp is 1")
    set_mesh(2, 1)
    params = random_params(cfg)
    needed = 4 * weights.num_params(decoder.weights(cfg)) + 2 * 128 * (5 + 46 + 5) + 4 * 128 * (5 + LONG + 5)
    for free, choice in ((needed / 0.9 + 10, "gathered"), (needed / 0.9 - 10, "sharded")):
        monkeypatch.setattr(memory, "free_bytes", lambda free=free: free)
        got, why = chosen(params)
        assert got == choice and choice in why and ("do not fit" in why) == (choice == "sharded")
    assert memory.free_bytes() > 0


@pytest.mark.parametrize("gather", [True, False])
def test_gathered_weights_are_whole_on_every_shard_and_others_stay_divided(cfg, gather):
    set_mesh(2, 2)
    per_layer_params = generate.make_prepare(cfg, jnp.float32, gather)(random_params(cfg))
    places = [set(leaf.sharding.spec) for leaf in jax.tree.leaves(per_layer_params)]
    assert any("tp" in place for place in places)
    assert any("fsdp" in place for place in places) != gather


def test_on_a_cpu_weights_are_made_for_sampling_matrix_by_matrix(cfg, monkeypatch):
    """In the order in which most can run at once, joined queries, keys and values of all layers are there twice."""
    set_mesh(1, 1)
    cfg = replace(cfg, num_layers=8, pattern=("global",))
    made = []
    jit = jax.jit
    monkeypatch.setattr(generate.jax, "jit", lambda *call, **how: made.append(jit(*call, **how)) or made[-1])
    params = random_params(cfg)
    layers = generate.make_prepare(cfg, jnp.float32, True)(params)["layers"]
    temporaries = made[-1].lower(params).compile().memory_analysis().temp_size_in_bytes
    joined = layers[0]["qkv"].values.nbytes
    assert joined == 4 * 16 * (4 + 2 * 2) * 8 and temporaries < 3 * joined


def test_decoding_updates_the_cache_in_place(cfg):
    programs = Programs(SamplerSpec(cfg, GenerationConfig(96, 4000), EOS, 0, jnp.float32, chunk=4))
    slots = programs.make_slots(2)
    per_layer_params = generate.make_prepare(cfg, jnp.float32, True)(random_params(cfg))
    memory = programs.decode.lower(slots, per_layer_params, np.float32(1)).compile().memory_analysis()
    cache = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(slots.cache))
    assert cache == 2 * 4 * 2 * 2 * 8 * (4096 + 2 * 5), "keys and values, float32, 2 rows, 2 heads of 8; two rings of 5"
    assert memory.alias_size_in_bytes >= cache
    assert memory.temp_size_in_bytes < 0.3 * cache  # of which the attention scores of one layer


def test_a_program_traces_one_layer_of_each_kind(cfg, monkeypatch):
    """Tracing takes most of the time of a call whose programs are kept, and the layers of a kind are alike."""
    cfg = replace(cfg, num_layers=6, pattern=("local", "local", "global"))
    programs = Programs(SamplerSpec(cfg, GenerationConfig(8, 24), EOS, 0, jnp.float32, chunk=4))
    layers = generate.make_prepare(cfg, jnp.float32, True)(random_params(cfg))
    slots, prompts, pair = programs.make_slots(2), programs.make_prompt_cache(2), np.full(2, 3)
    traced = []
    block = decoder.block
    monkeypatch.setattr(decoder, "block", lambda *given: traced.append(1) or block(*given))
    for program, *given in (
        (programs.prefill, prompts, layers, np.full((2, 8), 5), pair, 0),
        (programs.append, slots, layers, np.arange(2), np.full((2, 8), 5), pair, pair),
        (programs.decode, slots, layers, np.float32(1)),
    ):
        traced.clear()
        text = program.lower(*given).as_text()
        assert len(traced) == 2
        # of each kind a function, which is called for every layer
        assert text.count("call @layer") == 6
        assert text.count("func private @layer") == 2
