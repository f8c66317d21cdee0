"""Scores over the vocabulary, block by block: what the formulas give in float64, and never all of them at once."""

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import set_mesh
from exactness_worker import FAST

from tunix_lite.models import vocabulary
from tunix_lite.models.vocabulary import num_blocks, token_scores
from tunix_lite.parallel.mesh import put

B, M, V, D = 8, 12, 44, 8


@dataclass(frozen=True)
class Case:
    """A way to work off the vocabulary."""

    mesh: tuple[int, int]
    at_once: int | None  # scores at once
    blocks: int  # that this gives
    softcap: float | None = None
    temperature: float = 1.0


CASES = [
    Case((1, 1), None, 1),
    Case((1, 1), B * M * V // 3, 4, softcap=2.0, temperature=0.7),  # 3 are wanted, and 4 divide 44
    Case(
        (2, 4), B * M * 11 // 2 // 5 + 1, 5, softcap=2.0, temperature=0.7
    ),  # 5 of size 3 for 11: the last is only padding
    Case((2, 4), B * M * 11 // 2 // 2, 2),  # 2 of size 6 for 11: padding at the end of the last
]


def arrays():
    rng = np.random.default_rng(0)
    hidden, table = rng.normal(size=(B, M, D)), rng.normal(size=(V, D)) * 0.4
    targets = rng.integers(0, V, (B, M))
    targets[0, :4] = 0, V - 1, 10, 11  # at the edges of a part
    slopes = rng.normal(size=(2, B, M))
    return *(x.astype(np.float32) for x in (hidden, table)), targets.astype(np.int32), slopes.astype(np.float32)


def by_formulas(case: Case, hidden, table, targets, slopes):
    """Both results, and what slopes of both make of hidden and table; in float64, all scores at once."""
    hidden, table, (g, e) = hidden.astype(np.float64), table.astype(np.float64), slopes.astype(np.float64)
    raw = hidden @ table.T
    capped = raw if case.softcap is None else case.softcap * np.tanh(raw / case.softcap)
    logs = capped / case.temperature - np.log(np.exp(capped / case.temperature).sum(-1, keepdims=True))
    p, one_hot = np.exp(logs), np.eye(V)[targets]
    entropy = -(p * logs).sum(-1)
    slope = g[..., None] * (one_hot - p) - e[..., None] * p * (logs + entropy[..., None])
    slope *= (1 if case.softcap is None else 1 - (capped / case.softcap) ** 2) / case.temperature
    of_table = np.einsum("bmv,bmd->vd", slope, hidden)
    return (logs * one_hot).sum(-1), entropy, slope @ table, of_table


def program(case: Case):
    """(hidden, table, targets, slopes) -> both results, and the gradients of hidden and table."""

    def run(hidden, table, targets, slopes):
        def scores(hidden, table):
            scored = token_scores(hidden, table, targets, case.softcap, case.temperature)
            return scored.logprobs, scored.entropy

        found, pull = jax.vjp(scores, hidden, table)
        return *found, *pull((slopes[0], slopes[1]))

    return run


def placed(hidden, table, targets, slopes):
    batch = ("batch", "seq")
    return (
        put(hidden, *batch, "act_embed"),
        put(table, "vocab", "embed"),
        put(targets, *batch),
        put(slopes, "seq", *batch),
    )


def close(got, wanted, bound=1e-6):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted)
    assert np.linalg.norm(got - wanted) < bound * np.linalg.norm(wanted)


def prepared(case: Case, monkeypatch):
    set_mesh(*case.mesh)
    if case.at_once is not None:
        monkeypatch.setattr(vocabulary, "SCORES_AT_ONCE", case.at_once)
    fsdp, tp = case.mesh
    assert num_blocks(V // tp, B * M // fsdp) == case.blocks


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_and_their_gradients_are_those_of_the_formulas(case, monkeypatch):
    prepared(case, monkeypatch)
    compiled = jax.jit(program(case)).lower(*placed(*arrays())).compile(compiler_options=FAST)
    for got, wanted in zip(compiled(*placed(*arrays())), by_formulas(case, *arrays()), strict=True):
        assert got.dtype == jnp.float32
        close(got, wanted)
    # all scores at once, on a device: only where they are one block
    fsdp, tp = case.mesh
    sizes = [
        np.prod([int(n) for n in dims.split(",")]) for dims in re.findall(r"\bf32\[([\d,]+)\]", compiled.as_text())
    ]
    assert (max(sizes) >= B * M * V // fsdp // tp) == (case.blocks == 1)


@pytest.mark.parametrize(
    "vocabulary_size, tokens, at_once, blocks",
    [
        (262144, 4096, 2**24, 64),  # Gemma 3, four rows of 1024
        (262144, 1, 2**24, 1),
        (151936, 8192, 2**24, 128),  # Qwen 3: 75 are wanted, and 151936 is 2^7 times a prime
        (11, 10, 25, 5),  # 11 is prime: cut as wanted, and padded
        (11, 10, 7, 11),  # 16 are wanted, and a block has a token at least
        (32000, 2**24 + 1, 2**24, 32000),
    ],
)
def test_blocks_divide_the_vocabulary_where_they_can(vocabulary_size, tokens, at_once, blocks, monkeypatch):
    monkeypatch.setattr(vocabulary, "SCORES_AT_ONCE", at_once)
    assert num_blocks(vocabulary_size, tokens) == blocks


@pytest.mark.parametrize("mesh", [(1, 1), (2, 4)])
def test_scores_that_are_all_high_cost_no_digits(mesh):
    """1000 on every score changes neither result; as logsumexp less the mean score, both would be off by 1e-4."""
    set_mesh(*mesh)
    rng = np.random.default_rng(1)
    levels = rng.integers(-64, 64, (V, D)) / 16  # sums of products that float32 holds exactly, with 1000 as well
    table = np.concatenate([levels, np.full((V, 8), 125.0)], axis=1).astype(np.float32)
    hidden = np.concatenate([rng.integers(-8, 8, (B, M, D)) / 8, np.ones((B, M, 8))], axis=2).astype(np.float32)
    targets = rng.integers(0, V, (B, M)).astype(np.int32)
    logs = hidden[..., :D].astype(np.float64) @ levels.T
    logs -= np.log(np.exp(logs).sum(-1, keepdims=True))
    arrays = placed(hidden, table, targets, np.zeros((2, B, M), np.float32))
    found = jax.jit(lambda h, w, t, _: token_scores(h, w, t, None, 1.0))(*arrays)
    np.testing.assert_allclose(found.entropy, -(np.exp(logs) * logs).sum(-1), atol=2e-6)
    np.testing.assert_allclose(found.logprobs, np.take_along_axis(logs, targets[..., None], -1)[..., 0], atol=2e-6)
