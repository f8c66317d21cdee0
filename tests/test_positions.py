"""Rotary angles are exact at every position, and with them the scores of long rows."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_params, set_mesh

from tunix_lite.models import attention, decoder, rope
from tunix_lite.models.architecture import Architecture, RopeScaling

# No layer has a window here: "local" layers have one that is longer than every row.
LLAMA3 = Architecture(
    64, 2, 32, 4, 2, 16, 48, pattern=("local", "global"), window=2**20, query_scale=16, post_norms=False,
    norm_plus_one=False, activation="silu", embed_scale=False, rope_theta_local=100.0, rope_theta_global=5e5,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
)  # fmt: skip
LINEAR = replace(
    LLAMA3, post_norms=True, norm_plus_one=True, rope_theta_local=1e4, rope_theta_global=1e6, rope_scaling=RopeScaling(8.0)
)  # fmt: skip
BOTH = pytest.mark.parametrize("cfg", [LLAMA3, LINEAR], ids=["llama3", "linear"])


def frequencies(cfg: Architecture, kind: str) -> np.ndarray:
    """Radians a token, as the papers write them: theta^(-2i/H), and what Llama 3.1 makes of them."""
    theta = cfg.rope_theta_local if kind == "local" else cfg.rope_theta_global
    plain = np.array([theta ** (-2 * i / cfg.head_dim) for i in range(cfg.head_dim // 2)])
    if kind == "local":
        return plain
    if cfg.rope_scaling.original_positions is None:
        return plain / 8
    wavelength = 2 * np.pi / plain
    smooth = (8192 / wavelength - 1) / (4 - 1)
    between = (1 - smooth) * plain / 8 + smooth * plain
    return np.where(wavelength < 8192 / 4, plain, np.where(wavelength > 8192, plain / 8, between))


@pytest.mark.parametrize("kind", ["local", "global"])
@BOTH
def test_sine_and_cosine_are_exact_to_float32_at_every_position(cfg, kind):
    """To a last place of 1 (2^-23): a product of float32 is off by 0.0002 at 4,096 and by 0.008 at 131,072."""
    positions = np.r_[0:70_000, 131_000:131_073, 2**20, 2**26 - 1].astype(np.int32)[None]
    found = jax.jit(partial(rope.rope_angles, cfg, kind=kind))(positions)
    angle = positions[..., None, None].astype(np.float64) * frequencies(cfg, kind)
    for got, wanted in zip(found, (np.sin(angle), np.cos(angle))):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2.0**-23)


# ---- whole models


def scores(params, cfg, tokens, positions):
    """The logits by the formulas, [T, V], in the dtype of the weights."""

    def rms(x, scale):
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + scale if cfg.norm_plus_one else scale)

    def turned(x, kind):
        angle = positions[:, None, None] * frequencies(cfg, kind)
        first, second = jnp.split(x, 2, axis=-1)
        sin, cos = np.sin(angle), np.cos(angle)
        return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], -1)

    after = rms if cfg.post_norms else lambda x, _: x
    x = params["embed"][tokens]
    for i, kind in enumerate(cfg.kinds):
        w = {"attn_post_norm": None, "mlp_post_norm": None}
        w |= {name: stacked[i] for name, stacked in params["layers"].items()}
        normed = rms(x, w["attn_norm"])
        q, k, v = (jnp.einsum("td,dnh->tnh", normed, w[name]) for name in "qkv")
        q, k = turned(rms(q, w["q_norm"]), kind), turned(rms(k, w["k_norm"]), kind)
        k, v = (jnp.repeat(x, cfg.num_heads // cfg.num_kv_heads, axis=1) for x in (k, v))
        of_pairs = jnp.einsum("tnh,snh->nts", q, k) / np.sqrt(cfg.query_scale)
        seen = positions[:, None] >= positions
        attended = jnp.einsum("nts,snh->tnh", jax.nn.softmax(jnp.where(seen, of_pairs, -np.inf)), v)
        x = x + after(jnp.einsum("tnh,nhd->td", attended, w["o"]), w["attn_post_norm"])
        normed = rms(x, w["mlp_norm"])
        x = x + after((jax.nn.silu(normed @ w["gate"]) * (normed @ w["up"])) @ w["down"], w["mlp_post_norm"])
    return rms(x, params["final_norm"]) @ params["embed"].T


def mean_loss(logits, tokens):
    return -jax.nn.log_softmax(logits)[jnp.arange(len(tokens) - 1), tokens[1:]].mean()


def distance(got, wanted) -> float:
    """Norm of the difference, in norms of what is wanted."""
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True))
    squares = [
        np.sum([(np.asarray(a, np.float64) - b) ** 2, np.asarray(b) ** 2], axis=tuple(range(1, b.ndim + 1)))
        for a, b in pairs
    ]
    return float(np.sqrt(np.divide(*np.sum(squares, axis=0))))


@BOTH
@pytest.mark.parametrize(
    "positions",
    [np.arange(0, 131_072, 769), pytest.param(np.arange(4096), marks=pytest.mark.wide)],
    ids=["up to 131,072", "all of 4,096"],
)
def test_logits_and_gradients_of_long_rows_are_those_of_float64(cfg, positions):
    """By norm to a few roundings of float32 (6e-8 each). With angles in float32, it was 1e-5 and 7e-4."""
    set_mesh(1, 1)
    params = jax.tree.map(np.asarray, random_params(cfg, scale=0.2))
    if not cfg.norm_plus_one:
        params = jax.tree_util.tree_map_with_path(lambda path, x: x + ("norm" in jax.tree_util.keystr(path)), params)
    tokens = np.random.default_rng(1).integers(0, cfg.vocab_size, len(positions))
    row = attention.AttentionMeta(positions[None].astype(np.int32), np.ones((1, len(positions)), np.int32))

    def loss(score, params):
        logits = score(params)
        return mean_loss(logits, tokens), logits

    def both(score, params):
        (_, logits), grads = jax.jit(jax.value_and_grad(partial(loss, score), has_aux=True))(params)
        return np.asarray(logits), jax.tree.map(np.asarray, grads)

    found = both(lambda p: decoder.logits(p, cfg, decoder.forward(p, cfg, tokens[None], row))[0], params)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64), params)
        wanted = both(lambda p: scores(p, cfg, tokens, positions), wide)
    off = [distance(got, right) for got, right in zip(found, wanted)]
    assert off[0] < 1e-6 and off[1] < 2e-6, off
