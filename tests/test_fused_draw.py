"""The kernel that multiplies with the head and draws: against float64 sums, plain products, and published numbers."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import set_mesh

from tunix_lite.kernels import fused_draw
from tunix_lite.models.architecture import Architecture

SIZES = {"num_layers": 1, "embed_dim": 48, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "mlp_dim": 48}
SIZES |= {"window": None, "pattern": ("global",), "query_scale": 32}
# Three pieces of the vocabulary, of which the last is not full.
CAPPED = Architecture(vocab_size=300, final_softcap=3.0, **SIZES)


def row_keys(count: int) -> tuple[jax.Array, jax.Array]:
    """Keys and positions of so many rows."""
    return jax.random.split(jax.random.key(3), count), jnp.arange(count) * 5


def noise(keys: jax.Array, positions: jax.Array, vocab_size: int) -> np.ndarray:
    """Row after row, as JAX draws it."""
    folded = [jax.random.fold_in(key, position) for key, position in zip(keys, positions)]
    return np.stack([np.float64(jax.random.gumbel(key, (vocab_size,))) for key in folded])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    above = logits - logits.max(axis=-1, keepdims=True)
    return above - np.log(np.exp(above).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("seed", [0, 2**31 + 7])
@pytest.mark.parametrize("count", [7, 70_000])
def test_the_noise_is_that_of_jax(seed, count):
    key = jax.random.fold_in(jax.random.key(seed), 12)
    found = fused_draw.gumbel(tuple(jax.random.key_data(key)), jnp.arange(count, dtype=jnp.uint32))
    # A CPU's log may differ in its last bit.
    np.testing.assert_allclose(found, jax.random.gumbel(key, (count,)), rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize("rows_at_once", [16, 64], ids=["two programs of rows", "one"])
def test_tokens_and_log_probabilities_are_those_of_sums_in_float64(rows_at_once, monkeypatch):
    """20 rows, a soft cap of 3, and three temperatures; at 0 the best token, with log-probabilities of temperature 1."""
    monkeypatch.setattr(fused_draw, "MOST_ROWS", rows_at_once)
    set_mesh(1, 1)
    rng = np.random.default_rng(0)
    hidden, table = rng.normal(size=(20, 48)).astype(np.float32), rng.normal(0, 0.3, (300, 48)).astype(np.float32)
    keys, positions = row_keys(20)
    draw = jax.jit(partial(fused_draw.fused_draw, CAPPED, interpret=True))
    logits = 3 * np.tanh(np.float64(hidden) @ np.float64(table).T / 3)
    for temperature in (1.0, 0.6, 0.0):
        tokens, logprobs = draw(hidden, table, keys, positions, np.float32(temperature))
        scaled = logits / (temperature or 1.0)
        scores = scaled + (noise(keys, positions, 300) if temperature else 0)
        np.testing.assert_array_equal(tokens, scores.argmax(axis=-1))
        expected = np.take_along_axis(log_softmax(scaled), scores.argmax(axis=-1)[:, None], axis=1)[:, 0]
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_the_first_of_equal_tokens_wins_and_the_last_one_stands_for_nan():
    """Tokens 128 to 255, the second piece, have the logit -inf. The others are equal in row 0; in row 1 the best are tokens
    40 and 290, in two pieces. Row 2 has a NaN, and row 3 is best at the last token."""
    set_mesh(1, 1)
    hidden, table = np.zeros((4, 48), np.float32), np.zeros((300, 48), np.float32)
    hidden[:, 3], table[128:256, 3] = 1, -np.inf
    hidden[1, 0], table[[40, 290], 0] = 2, 1
    hidden[2, 1] = np.nan
    hidden[3, 2], table[299, 2] = 1, 5
    draw = jax.jit(partial(fused_draw.fused_draw, replace(CAPPED, final_softcap=None), interpret=True))
    tokens, logprobs = draw(hidden, table, *row_keys(4), np.float32(0))
    np.testing.assert_array_equal(tokens, [0, 40, 299, 299])
    expected = [-np.log(172), 2 - np.log(2 * np.exp(2) + 170), np.nan, 5 - np.log(np.exp(5) + 171)]
    np.testing.assert_allclose(logprobs, expected, rtol=1e-6)


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="there Triton itself compiles while lowering")
def test_as_lowered_for_a_gpu_no_array_has_the_size_of_the_logits():
    set_mesh(1, 1)
    V, D, B = 262_144, 1152, 64
    cfg = replace(CAPPED, vocab_size=V, embed_dim=D)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((B, D), (V, D))]
    keys = jax.eval_shape(lambda: row_keys(B))
    traced = jax.jit(partial(fused_draw.fused_draw, cfg)).trace(*shapes, *keys, jnp.float32(1))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__gpu$xla.gpu.triton" in text
    assert f"tensor<{B}x{V // 128}xf32>" in text and f"tensor<{B}x{V}x" not in text
