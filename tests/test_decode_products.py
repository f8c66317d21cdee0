"""The kernels that multiply with the weights of layers while decoding: against sums in float64 and plain products."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import decode_random, set_mesh

from tunix_lite.kernels import decode_products
from tunix_lite.kernels.decode_products import FusedProducts, _Tile
from tunix_lite.models import decoder
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.decoder import Products

# 80 and 48 columns are no multiple of a tile's; 21 rows neither. The vocabulary is drawn from in three pieces.
CFG = Architecture(
    vocab_size=300,
    num_layers=2,
    embed_dim=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    mlp_dim=80,
    window=None,
    pattern=("global",),
    query_scale=32,
)
ROWS = 21
FUSED = FusedProducts(interpret=True)


def layer(dtype=jnp.float32, scale: float = 0.3) -> dict:
    rng = np.random.default_rng(0)
    table = decoder.layer_weights(CFG)
    return {name: jnp.asarray(rng.normal(0, scale, one.shape), dtype) for name, one in table.items()}


def inputs(*shape: int, dtype=jnp.float32, rows: int = ROWS) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(rows, 1, *shape)), dtype)


# ---- the products


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_sums_are_those_of_float64(parts, monkeypatch):
    """With any number of parts, of rows and columns that fill no tile."""
    set_mesh(1, 1)
    monkeypatch.setattr(decode_products, "_tile_of", lambda *_, **__: _Tile(16, 32, parts))
    x, w = inputs(256), jnp.asarray(np.random.default_rng(2).normal(size=(256, 48)), jnp.float32)
    found = jax.jit(FUSED.down)(x, {"down": w})
    np.testing.assert_allclose(found[:, 0], np.float64(x[:, 0]) @ np.float64(w), atol=1e-4)


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_gate_and_up_are_multiplied_after_the_activation(activation):
    set_mesh(1, 1)
    x, w = inputs(48), layer()
    found = jax.jit(partial(FUSED.gated, activation=activation))(x, w)
    x, gate, up = (np.float64(one) for one in (x[:, 0], w["gate"], w["up"]))
    gate = x @ gate
    half = {
        "gelu": (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) / 2,
        "silu": 1 / (1 + np.exp(-gate)),
    }
    np.testing.assert_allclose(found[:, 0], gate * half[activation] * (x @ up), atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_each_product_is_the_plain_one(dtype):
    set_mesh(1, 1)
    w, x = layer(dtype), inputs(48, dtype=dtype)
    attended, hidden = inputs(4, 32, dtype=dtype), inputs(80, dtype=dtype)

    def all_of(products):
        return (*products.qkv(x, w), products.out(attended, w), products.gated(x, w, "gelu"), products.down(hidden, w))

    # a sum in another order may be rounded to a neighbour
    near = {"rtol": 2.0**-8, "atol": 2.0**-8} if dtype == jnp.bfloat16 else {"atol": 2e-5}
    for plain, fused in zip(jax.jit(partial(all_of, Products()))(), jax.jit(partial(all_of, FUSED))(), strict=True):
        assert plain.shape == fused.shape and plain.dtype == fused.dtype
        np.testing.assert_allclose(np.float32(fused), np.float32(plain), **near)


def assert_same(cfg: Architecture) -> None:
    plain, fused = (decode_random(cfg, fused=fused) for fused in (False, True))
    np.testing.assert_array_equal(plain[0], fused[0])
    for one, other in zip(plain[1:3], fused[1:3], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_decoding_draws_the_tokens_of_plain_products():
    """With a head of its own."""
    set_mesh(1, 1)
    assert_same(replace(CFG, tied=False))


@pytest.mark.wide
def test_over_a_mesh_each_device_multiplies_what_it_holds_and_draws_for_its_slots_from_its_part_of_the_vocabulary():
    """Biases as in Qwen 2.5, no norms after the parts of a layer, and a soft cap."""
    set_mesh(2, 2)
    cfg = replace(CFG, mlp_dim=64, qkv_bias=True, post_norms=False, activation="silu")
    assert_same(replace(cfg, final_softcap=3.0))


# ---- what it is for


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="there Triton itself compiles while lowering")
def test_as_lowered_for_a_gpu_gate_and_up_are_not_written_in_float32():
    set_mesh(1, 1)
    B, D, F = 256, 1152, 6912
    x, gate = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((B, 1, D), (D, F)))
    gated = jax.jit(partial(FusedProducts().gated, activation="gelu"))
    text = gated.trace(x, {"gate": gate, "up": gate}).lower(lowering_platforms=("cuda",)).as_text()
    assert "__gpu$xla.gpu.triton" in text
    assert f"tensor<{B}x{F}xbf16>" in text and f"{F}xf32>" not in text
