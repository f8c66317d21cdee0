"""Tokens are drawn from the distribution that settings describe: chi-squares against float64 numpy, fixed seeds."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_params, set_mesh

from tunix_lite.learner.policy import token_logprobs
from tunix_lite.models import attention, decoder
from tunix_lite.models.architecture import Architecture
from tunix_lite.rollout import sampling
from tunix_lite.rollout.generate import make_generate, make_prepare
from tunix_lite.rollout.programs import Programs, SamplerSpec
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig

COUNT = 20_000
SCORES = np.array([2.0, 0.5, -1.0, 0.0, 1.75, -0.25, 1.0, -2.0])
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32, 15: 37.70}  # p = 0.001, by freedom

SETTINGS = {
    "temperature": (GenerationConfig(temperature=0.7), {0, 1, 2, 3, 4, 5, 6, 7}),
    "top_k": (GenerationConfig(top_k=3), {0, 4, 6}),
    # the best three hold 0.80 of all, and with the fourth 0.88
    "top_p": (GenerationConfig(top_p=0.85), {0, 4, 6, 1}),
    # at least 0.3 of the best: scores of at least 2 + ln 0.3 = 0.796
    "min_p": (GenerationConfig(min_p=0.3), {0, 4, 6}),
    # of what the best four hold, the best two have 0.75 and with the third 0.906
    "top_k and top_p": (GenerationConfig(top_k=4, top_p=0.9), {0, 4, 6}),
    # scores / 2: 1, 0.875, 0.5, 0.25, 0 ...; at least 1 + ln 0.4 = 0.084
    "temperature and min_p": (GenerationConfig(temperature=2.0, min_p=0.4), {0, 4, 6, 1}),
}


def exact(scores, generation: GenerationConfig) -> tuple[np.ndarray, np.ndarray]:
    """What is drawn from, and softmax(scores / temperature): token by token, in float64."""
    whole = np.asarray(scores, np.float64) / generation.temperature
    left = whole.copy()
    if generation.top_k:
        left[[np.sum(left > score) >= generation.top_k for score in left]] = -np.inf
    p = softmax(left)
    # in: those with less than top_p before them
    left[[generation.top_p < 1 and p[p > q].sum() >= generation.top_p for q in p]] = -np.inf
    left[p < generation.min_p * p.max()] = -np.inf
    return softmax(left), softmax(whole)


def softmax(scores):
    p = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def chi_square(tokens, p) -> float:
    """Raises if a token was drawn that has no probability."""
    counts = np.bincount(tokens, minlength=len(p))
    assert not counts[p == 0].any()
    counts, expected = counts[p > 0], (len(tokens) * p)[p > 0]
    assert expected.min() > 5, "too few draws for a chi-square"
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.fixture(scope="module")
def draw():
    """20000 draws from SCORES: tokens, logprobs, full_logprobs."""
    set_mesh(1, 1)
    keys = sampling.row_keys(
        jnp.broadcast_to(jax.random.key(0), COUNT), np.arange(COUNT) // 100, np.arange(COUNT) % 100
    )
    many = partial(jnp.broadcast_to, shape=(COUNT, len(SCORES)))

    def draw(generation, temperature=None):
        temperature = np.float32(generation.temperature if temperature is None else temperature)
        cutoffs = (generation.top_k, generation.top_p, generation.min_p) if generation.has_cutoffs else None
        drawn = jax.jit(partial(sampling.draw, cutoffs=cutoffs))
        return [np.asarray(x) for x in drawn(many(np.float32(SCORES)), keys, np.full(COUNT, 3), temperature)]

    return draw


# make wide has each cut-off alone
ALONE = ("top_k", "top_p", "min_p")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.wide) if n in ALONE else n for n in SETTINGS])
def test_draws_follow_the_distribution_that_settings_describe(draw, name):
    generation, kept = SETTINGS[name]
    p, whole = exact(SCORES, generation)
    assert set(np.flatnonzero(p)) == kept, "by hand"
    tokens, logprobs, full_logprobs = draw(generation)
    assert set(tokens) == kept
    if len(kept) > 1:
        assert chi_square(tokens, p) < CRITICAL[len(kept) - 1]
    np.testing.assert_allclose(logprobs, np.log(p[tokens]), atol=1e-5)
    np.testing.assert_allclose(full_logprobs, np.log(whole[tokens]), atol=1e-5)


def test_temperature_0_takes_the_best_token_that_is_left_and_says_how_likely_it_is_at_1(draw):
    tokens, logprobs, full_logprobs = draw(GenerationConfig(top_k=3), temperature=0.0)
    _, whole = exact(SCORES, GenerationConfig())  # nothing is cut off: it changes no token
    assert set(tokens) == {0} and whole.argmax() == 0
    np.testing.assert_allclose(logprobs, np.log(whole[0]), atol=1e-5)
    np.testing.assert_allclose(full_logprobs, np.log(whole[0]), atol=1e-5)


def kept_in_float64(row, top_k=0, top_p=1.0, min_p=0.0) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens are left, and of which of them float32 cannot know: whether less than top_p comes before them."""
    row = np.float64(row)
    kept, doubtful = row > -np.inf, np.zeros(len(row), bool)
    if top_k and top_k < len(row):
        kept &= row >= np.sort(row)[-top_k]
    if top_p < 1:
        values, which, counts = np.unique(np.where(kept, row, -np.inf), return_inverse=True, return_counts=True)
        p = np.exp(values - values[-1]) * counts
        before = (1 - np.cumsum(p) / p.sum())[which]
        kept, doubtful = kept & (before < top_p), kept & (np.abs(before - top_p) < 1e-6)
    return kept & (row >= row.max() + (np.log(min_p) if min_p else -np.inf)), doubtful


def some_scores(kind: str) -> np.ndarray:
    """Of one shape, so that little is compiled."""
    rng = np.random.default_rng(1)
    if kind == "ties":  # of bfloat16, which has 8 bits: some 100 values in 400 tokens
        return np.asarray(jnp.asarray(rng.normal(0, 1, (64, 400)), jnp.bfloat16), np.float32)
    if kind == "impossible tokens":
        scores = rng.normal(0, 3, (64, 400)).astype(np.float32)
        return np.where(rng.random(scores.shape) < np.linspace(0, 0.98, 64)[:, None], -np.inf, scores) + scores * 0
    if kind == "around zero":  # both zeros, and the least numbers that processors do not take for zero
        return rng.choice(np.float32([0.0, -0.0, 1.3e-38, -1.3e-38, 1e-30, -1e-30, 3e-7, -3e-7]), (64, 400))
    if kind == "far apart":
        return (rng.normal(0, 1, (64, 400)) * np.logspace(-3, 30, 64)[:, None]).astype(np.float32)
    return rng.normal(0, 3, {"one token": (4, 1), "a vocabulary": (1, 262_144)}[kind]).astype(np.float32)


CUTS = [dict(top_k=40), dict(top_p=0.95), dict(min_p=0.02), dict(top_k=40, top_p=0.9, min_p=0.05)]


@pytest.mark.parametrize("kind", ["ties", "impossible tokens", "around zero", "far apart", "one token", "a vocabulary"])
def test_what_is_left_is_what_float64_leaves_whatever_the_scores(kind):
    scores = some_scores(kind)
    scores[:, 0] = np.where(np.isfinite(scores[:, 0]), scores[:, 0], 0.0)  # one token can be drawn
    for cut in CUTS[-1:] if kind == "a vocabulary" else CUTS:
        got = np.isfinite(jax.jit(partial(sampling._apply_cutoffs, **cut))(scores))
        expected, doubtful = map(np.array, zip(*(kept_in_float64(row, **cut) for row in scores)))
        assert doubtful.sum() <= 0.01 * expected.sum(), "too much is left open"
        np.testing.assert_array_equal(got | doubtful, expected | doubtful, err_msg=str(cut))
        assert got.any(axis=1).all()


@pytest.mark.parametrize("mesh", [pytest.param((1, 1), marks=pytest.mark.wide), (2, 2)], ids=str)
def test_decoding_sorts_no_vocabulary_and_gathers_none_over_tp(mesh):
    """In the compiled text of a chunk: no sort, no TopK, and of no collective a result with a row of the vocabulary."""
    set_mesh(*mesh)
    wide = replace(CFG, vocab_size=4096)
    cut = GenerationConfig(4, 2, top_k=50, top_p=0.9, min_p=0.1)
    programs = Programs(SamplerSpec(wide, cut, (), 0, jnp.float32, 2))
    per_layer_params = make_prepare(wide, jnp.float32, True)(random_params(wide))
    slots = programs.make_slots(4)
    text = programs.decode.lower(slots, per_layer_params, np.float32(1), True).compile().as_text()
    assert not re.search(r"(?i)\bsort\(|topk", text)
    results = re.findall(r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(", text)
    assert bool(results) == (mesh != (1, 1))
    shapes = [
        [int(n) for n in dims.split(",") if n] for result in results for dims in re.findall(r"\[([\d,]*)\]", result)
    ]
    assert max([dim for shape in shapes for dim in shape], default=0) < 1024, results


# ---- a whole rollout

CFG = Architecture(8, 1, 16, 2, 1, 8, 24, pattern=("global",), query_scale=8)
CUT = GenerationConfig(4, 2, temperature=1.5, top_k=4)
PROMPT = [5, 2, 7]
DRAWS = 4096


@pytest.fixture(scope="module")
def params():
    set_mesh(1, 1)
    return random_params(CFG, seed=3)


@pytest.fixture(scope="module")
def rollout(params):
    """Two tokens after one prompt, 4096 times, in 64 slots."""
    set_mesh(1, 1)
    generate = make_generate(CFG, CUT, (), 0, rollout=RolloutConfig(64, 2))
    return generate(params, [PROMPT], jax.random.key(1), DRAWS)


@jax.jit
def last_scores(params, tokens):
    hidden = decoder.forward(params, CFG, tokens, attention.one_sequence_per_row(tokens >= 0))[0]
    return decoder.logits(params, CFG, hidden[0, -1])


def scores_after(params, tokens) -> np.ndarray:
    return np.asarray(last_scores(params, np.array([tokens])), np.float64)


def test_pairs_of_tokens_follow_the_distribution_of_pairs(params, rollout):
    """The noise of the second is not that of the first: their chi-square is one of 4 * 4 cells."""
    first, second = rollout.tokens[:, 4:].T
    p_first, _ = exact(scores_after(params, PROMPT), CUT)
    assert chi_square(first, p_first) < CRITICAL[3]
    pairs = np.zeros((8, 8))
    for token in np.flatnonzero(p_first):
        p_second, _ = exact(scores_after(params, [*PROMPT, token]), CUT)
        pairs[token] = p_first[token] * p_second
        rows = np.flatnonzero(first == token)
        np.testing.assert_allclose(rollout.logprobs[rows, 4], np.log(p_first[token]), atol=1e-5)
        np.testing.assert_allclose(rollout.logprobs[rows, 5], np.log(p_second[second[rows]]), atol=1e-5)
    assert (pairs > 0).sum() == 16
    assert chi_square(first * 8 + second, pairs.ravel()) < CRITICAL[15]


def test_whole_logprobs_are_the_trainers_where_tokens_are_cut_off(params, rollout):
    rows = slice(0, 256)
    score = jax.jit(partial(token_logprobs, cfg=CFG, temperature=1.5))
    scored = score(params, rollout.tokens[rows], rollout.token_mask[rows])
    np.testing.assert_allclose(rollout.full_logprobs[rows, 4:], scored[:, 4:], atol=1e-4)
    assert np.abs(rollout.logprobs - rollout.full_logprobs)[rows, 4:].max() > 0.1
