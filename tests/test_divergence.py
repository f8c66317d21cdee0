"""How far two models are apart over the vocabulary: float64 numpy, whatever is cut up and however it is divided."""

import re

import jax
import numpy as np
import pytest
from conftest import set_mesh

from tunix_lite.models import vocabulary
from tunix_lite.models.divergence import Kind, head_divergence
from tunix_lite.models.vocabulary import head_spec
from tunix_lite.parallel.mesh import put

B, M, V, D, E = 4, 6, 44, 8, 6
KINDS = [Kind("forward"), Kind("reverse"), Kind("jensen_shannon", 0.5), Kind("jensen_shannon", 0.1)]
# a way: the mesh, and scores at once (None: one block)
WAYS = [((1, 1), None), ((2, 2), B * M * 22 // 2 // 5 + 1)]
CAPS = (2.0, 30.0)
TEMPERATURE = 0.7


def arrays():
    rng = np.random.default_rng(0)
    hidden, table = rng.normal(size=(B, M, D)), rng.normal(size=(V, D)) * 0.6
    theirs, their_table = rng.normal(size=(B, M, E)) * 2, rng.normal(size=(V, E))
    slopes = rng.normal(size=(B, M))
    return tuple(x.astype(np.float32) for x in (hidden, table, theirs, their_table, slopes))


def logprobs(hidden, table, cap):
    raw = np.asarray(hidden, np.float64) @ np.asarray(table, np.float64).T
    scores = cap * np.tanh(raw / cap) / TEMPERATURE
    top = scores.max(-1, keepdims=True)
    return scores - top - np.log(np.exp(scores - top).sum(-1, keepdims=True))


def by_the_formula(kind: Kind, ours, theirs):
    """KL as the papers write it, of log-probabilities [..., n] in float64."""
    p, q = np.exp(ours), np.exp(theirs)
    if kind.name == "forward":
        return (q * (theirs - ours)).sum(-1)
    if kind.name == "reverse":
        return (p * (ours - theirs)).sum(-1)
    m = np.log(kind.mix * q + (1 - kind.mix) * p)
    return kind.mix * (q * (theirs - m)).sum(-1) + (1 - kind.mix) * (p * (ours - m)).sum(-1)


def value(kind: Kind, hidden, table, theirs, their_table):
    return by_the_formula(kind, logprobs(hidden, table, CAPS[0]), logprobs(theirs, their_table, CAPS[1]))


def program(kind: Kind):
    """(arrays) -> the divergence. It is differentiated, too: test_comparison.py and tests/conformance compare
    gradients."""

    def run(hidden, table, theirs, their_table, slopes):
        specs = [head_spec(V, cap, TEMPERATURE) for cap in CAPS]

        def of(hidden, table):
            return head_divergence(kind, specs[0], hidden, table, specs[1], theirs, their_table)

        result, pull = jax.vjp(of, hidden, table)
        return result, pull(slopes)

    return run


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_divergence_is_that_of_the_formulas_and_needs_no_table_of_all_scores(way, monkeypatch):
    mesh, at_once = way
    set_mesh(*mesh)
    if at_once is not None:
        monkeypatch.setattr(vocabulary, "SCORES_AT_ONCE", at_once)
    given = arrays()
    batch, table = ("batch", "seq", "act_embed"), ("vocab", "embed")
    axes = (batch, table, batch, table, batch[:2])
    placed = [put(x, *names) for x, names in zip(given, axes)]
    for kind in KINDS if at_once is None else KINDS[1:3]:
        compiled = jax.jit(program(kind)).lower(*placed).compile()
        found, _ = compiled(*placed)
        np.testing.assert_allclose(found, value(kind, *given[:4]), rtol=2e-5, atol=1e-6)
        # in blocks, the logits of all tokens never exist together, of one model or of both
        whole = B * M * V // (mesh[0] * mesh[1])
        shapes = re.findall(r"\bf32\[([\d,]+)\]", compiled.as_text())
        largest = max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)
        assert (largest >= whole) == (at_once is None)
