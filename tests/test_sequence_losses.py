"""A loss with a mean over each completion, the GSPO of docs/extend: one number and one gradient in every layout.

What is right comes from the formulas, sequence by sequence, in float64: nothing of the package but the weights' names.
"""

import importlib.util
import math
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import set_mesh

sys.path.append(str(Path(__file__).parent / "eight_devices"))  # the formulas, and an update that is divided somehow
import exactness_worker
from exactness_worker import MODELS, SEQUENCES, Way
from test_exactness import difference, expected, pulled

FILE = Path(__file__).parents[1] / "docs" / "extend" / "example" / "gspo.py"
CLIP = {"clip_low": 0.02, "clip_high": 0.03}  # as many are clipped as not


@cache
def gspo():
    """The class of the page, from its file."""
    spec = importlib.util.spec_from_file_location("gspo", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GSPO(**CLIP)


@cache
def of_the_formulas():
    """(batch, loss, gradients): the groups' advantages sum to zero, so a mean over a row of them would be none."""
    known = expected("plain")
    rng, counts = np.random.default_rng(1), known.batch.loss_weight > 0
    lengths = counts.sum(axis=1, keepdims=True)
    weight = np.where(counts, 1 / np.maximum(lengths, 1) / SEQUENCES, 0).astype(np.float32)
    advantages = rng.normal(size=(SEQUENCES // 4, 4))
    advantages = (advantages - advantages.mean(axis=1, keepdims=True)).reshape(-1, 1).astype(np.float32)
    noise = np.where(counts, rng.normal(0, 0.3, counts.shape), 0)
    noise -= noise.sum(axis=1, keepdims=True) / np.maximum(lengths, 1)
    away = noise + rng.choice([-0.06, -0.01, 0.01, 0.06], (SEQUENCES, 1))  # on both sides of both bounds
    old = np.where(counts, known.logprobs - away, 1e30).astype(np.float32)  # what does not count never matters
    batch = replace_all(known.batch, weight, advantages, old)

    losses, slopes = 0.0, np.zeros(counts.shape)
    clipped = 0
    for b in range(SEQUENCES):
        real = counts[b]
        if not real.any():
            continue
        ratio = math.exp(np.mean(known.logprobs[b, real] - np.float64(old[b, real])))
        A = float(advantages[b, 0])
        bounded = min(max(ratio, 1 - CLIP["clip_low"]), 1 + CLIP["clip_high"])
        share = float(np.float64(weight[b, real]).sum())  # 1 / SEQUENCES, of float32 weights
        losses -= share * min(ratio * A, bounded * A)
        if ratio * A <= bounded * A:
            slopes[b, real] = -share * ratio * A / real.sum()
        else:
            clipped += 1
    assert 3 <= clipped <= SEQUENCES - 4

    with jax.enable_x64(True), jax.set_mesh(set_mesh(1, 1)):
        trained, base = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), MODELS["plain"].arrays())
        of_each = [
            pulled(trained, base, batch.tokens[b][mask], slopes[b][mask][1:], MODELS["plain"])[1]
            for b, mask in enumerate(np.asarray(batch.token_mask))
        ]
        grads = jax.tree.map(lambda *xs: np.sum([np.asarray(x) for x in xs], axis=0), *of_each)
    return batch, losses, grads


def replace_all(batch, weight, advantages, old):
    wide = np.broadcast_to(advantages, weight.shape).astype(np.float32)
    return replace(batch, loss_weight=weight, advantages=wide, old_logprobs=old, ref_logprobs=None)


FEW = [Way(4, 1, 2, "none"), Way(2, 2, 4, "sequences"), Way(4, 1, 2, "prefix")]
ALL = [
    Way(fsdp, tp, parts, packing)
    for packing in ("none", "sequences", "prefix")
    for fsdp, tp in ((1, 1), (4, 1), (2, 2))
    for parts in (1, 2, 4)
]
ALL += [Way(4, 1, 4, packing, sync_every=2) for packing in ("sequences", "prefix")]
WAYS = FEW + [pytest.param(way, marks=pytest.mark.wide) for way in ALL if way not in FEW]


def named(way: Way) -> str:
    return f"{way.packing}-{way.fsdp}x{way.tp}-{way.parts}" + (f"-sync{way.sync_every}" if way.sync_every > 1 else "")


@pytest.mark.parametrize("way", WAYS, ids=named)
def test_a_mean_over_a_completion_is_the_same_in_every_layout(way):
    batch, loss, grads = of_the_formulas()
    devices = jax.devices()[: way.fsdp * way.tp]
    found = exactness_worker.update(MODELS["plain"], way, batch, devices, gspo())
    np.testing.assert_allclose(found.metrics["train/loss"], loss, rtol=1e-5, atol=1e-7)
    assert difference(found.grads, grads) < 1e-5
