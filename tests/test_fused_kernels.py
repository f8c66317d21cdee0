"""The kernels that multiply with the weights of layers while decoding: against sums in float64 and plain products."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import decode_random, set_mesh

from tunix_lite.kernels import decode_products, fused_draw
from tunix_lite.kernels.decode_attention import fused_attend
from tunix_lite.kernels.decode_products import FusedProducts, _Tile
from tunix_lite.models import attention, decoder, rope
from tunix_lite.models.architecture import Architecture, Yarn
from tunix_lite.models.decoder import Products
from tunix_lite.models.kernel_choice import check_fused
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout.cache import KV
from tunix_lite.rollout.generate import make_sampler
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.settings.compose import compose
from tunix_lite.settings.resolved_run import _check_decode_kernels

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


# ---- attention of one step


OF_HEADS = {"vocab_size": 64, "num_layers": 2, "embed_dim": 32, "num_heads": 6, "num_kv_heads": 2, "head_dim": 32}
OF_HEADS |= {"mlp_dim": 48, "window": 6, "pattern": ("local", "global"), "query_scale": 32}
# Three query heads a key head, with the norms of queries and keys, and a ring of 6 columns.
GEMMA3 = Architecture(**OF_HEADS)
GEMMA2 = Architecture(**OF_HEADS | {"qk_norm": False, "attn_softcap": 5.0, "num_heads": 2})
QWEN2 = Architecture(**OF_HEADS | {"qk_norm": False, "qkv_bias": True, "norm_plus_one": False, "num_heads": 4})


def assert_layer_same(cfg: Architecture) -> None:
    """Of the cache and the hidden states."""
    plain, fused = (decode_random(cfg, LENGTHS, fused=fused)[3] for fused in (False, True))
    assert np.abs(plain[1]).max() > 0.1
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(fused), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


# An empty sequence, one within the window, one over two blocks of columns, and one that ends in the last column.
LENGTHS = [0, 4, 66, 68]


def test_the_kernel_equals_the_steps_of_a_layer_one_after_the_other():
    """Norms, rotation, the two writes, and attention to the columns in use, of a ring and of a longer cache."""
    set_mesh(1, 1)
    rng = np.random.default_rng(2)
    newest_B = jnp.array(LENGTHS)
    q_BNH, k_BKH, v_BKH = (rng.normal(size=(4, heads, 32)).astype(np.float32) for heads in (6, 2, 2))
    norms = tuple(rng.normal(size=32).astype(np.float32) for _ in range(2))
    for kind, columns in (("local", 6), ("global", 70)):
        old = KV(*(rng.normal(size=(4, 2, columns, 32)).astype(np.float32) for _ in range(2)))
        sin, cos = rope.rope_angles(GEMMA3, newest_B[:, None], kind)

        # Step by step.
        q_BTNH, k_BTKH = (
            rope.rope(decoder.norm(x[:, None], scale, GEMMA3), (sin, cos)) for x, scale in zip((q_BNH, k_BKH), norms)
        )
        new = kv_cache.to_cache_format(k_BTKH, v_BKH[:, None], int8=False)
        kv = jax.tree.map(jnp.asarray, old).with_token(new, newest_B)
        mask_B1C = kv_cache.attended_columns(GEMMA3, kind, newest_B, columns)[:, None]
        expected = attention.attend(GEMMA3, q_BTNH, kv.k, kv.v, mask_B1C)[:, 0]

        angles = (sin[:, 0, 0], cos[:, 0, 0])
        attend = jax.jit(partial(fused_attend, GEMMA3, interpret=True))
        found = attend(q_BNH, k_BKH, v_BKH, norms, angles, newest_B, old.k, old.v)
        for one, other in zip(found, (expected, kv.k, kv.v), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("cfg", [GEMMA3, GEMMA2, QWEN2], ids=["norms", "soft cap", "biases"])
def test_decoding_with_the_fused_kernel_equals_plain_products(cfg):
    set_mesh(1, 1)
    assert_layer_same(cfg)


@pytest.mark.wide
def test_each_device_decodes_its_own_slots_and_heads():
    set_mesh(2, 2)
    assert_layer_same(GEMMA3)


# ---- the draw


OF_DRAW = {"num_layers": 1, "embed_dim": 48, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "mlp_dim": 48}
OF_DRAW |= {"window": None, "pattern": ("global",), "query_scale": 32}
# Three pieces of the vocabulary, of which the last is not full.
CAPPED = Architecture(vocab_size=300, final_softcap=3.0, **OF_DRAW)


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


# ---- the switch


OTHERS = (
    *(replace(CFG, attn_gate=True), replace(CFG, rope_share=0.75), replace(CFG, qk_norm_whole=True, pre_norms=False)),
    *(
        replace(CFG, value_norm=True),
        replace(CFG, yarn=Yarn(4.0, 16, query_growth=0.1)),
        replace(CFG, layer_scalar=True),
    ),
    replace(CFG, pattern=("global", "unrotated")),
)
GIVEN = {"cfg": CFG, "dtype": jnp.bfloat16, "platform": "cuda", "tp": 1}


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"platform": "cpu"}, "they run on NVIDIA GPUs, not on cpu"),
        ({"int8": True}, "they read no int8 cache, and rollout.cache is int8"),
        ({"plain_weights": False}, "they multiply with plain weights, and these have LoRA adapters or are quantised"),
        ({"tp": 4}, "they need a tp that divides the 2 key heads, and it is 4"),
        ({"cfg": replace(CFG, head_dim=96)}, "they take heads of 32, 64, 128 or 256, and head_dim is 96"),
        ({"cfg": replace(CFG, embed_dim=40)}, "they sum over multiples of 16 numbers, and embed_dim is 40"),
        ({"tp": 2, "cfg": replace(CFG, mlp_dim=48)}, "they sum over multiples of 16 numbers, and mlp_dim over tp is 2"),
        *(({"cfg": cfg}, "they compute attention without gate") for cfg in OTHERS),
        ({"has_cutoffs": True}, "they draw from all tokens, and generation.top_k, top_p or min_p cuts some off"),
    ],
)
def test_what_the_kernels_cannot_do_is_one_line(changes, reason):
    check_fused(**GIVEN)
    with pytest.raises(ValueError) as error:
        check_fused(**GIVEN | changes)
    text = str(error.value)
    assert text.startswith(f"kernels=fused: {reason}") and text.endswith("; use auto or xla")


@pytest.mark.parametrize(
    "option, value",
    [
        ("jax_default_prng_impl", "rbg"),
        ("jax_threefry_partitionable", False),
    ],
)
def test_another_generator_is_refused(option, value):
    before = getattr(jax.config, option)
    jax.config.update(option, value)
    try:
        with pytest.raises(ValueError, match="they draw the noise of JAX's default generator, and jax.config has"):
            check_fused(**GIVEN)
    finally:
        jax.config.update(option, before)


def test_a_sampler_on_a_cpu_refuses_them_before_it_computes_anything():
    set_mesh(1, 1)
    how = RolloutConfig(kernels="fused")
    sample = make_sampler(CFG, GenerationConfig(6, 4), (95,), 0, rollout=how)
    with pytest.raises(ValueError, match="kernels=fused: they run on NVIDIA GPUs, not on cpu"):
        next(sample({}, [[1]], jax.random.key(0)))


def test_a_run_with_adapters_or_cut_offs_refuses_them_before_it_starts():
    settings = ["model=gemma3_1b", "training.mixed_precision=bf16", "rollout.kernels=fused"]
    run = compose(settings)
    cfg = run.model.architecture
    _check_decode_kernels(run, cfg, "cuda", 1)
    cut = replace(run, generation=replace(run.generation, top_p=0.9))
    adapted, int8 = (compose([*settings, more]) for more in ("model.lora.rank=8", "rollout.cache=int8"))
    for other, reason in ((cut, "draw from all"), (adapted, "these have LoRA"), (int8, "read no int8")):
        with pytest.raises(ValueError, match=reason):
            _check_decode_kernels(other, cfg, "cuda", 1)
