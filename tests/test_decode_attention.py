"""The fused kernel of decoding against plain products, and against float64 sums by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import decode_random, set_mesh

from tunix_lite.kernels.decode_attention import fused_attend
from tunix_lite.models import attention, decoder, rope
from tunix_lite.models.architecture import Architecture
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout.cache import KV

SIZES = {"vocab_size": 64, "num_layers": 2, "embed_dim": 32, "num_heads": 6, "num_kv_heads": 2, "head_dim": 32}
SIZES |= {"mlp_dim": 48, "window": 6, "pattern": ("local", "global"), "query_scale": 32}
# Three query heads a key head, with the norms of queries and keys, and a ring of 6 columns.
GEMMA3 = Architecture(**SIZES)
GEMMA2 = Architecture(**SIZES | {"qk_norm": False, "attn_softcap": 5.0, "num_heads": 2})
QWEN2 = Architecture(**SIZES | {"qk_norm": False, "qkv_bias": True, "norm_plus_one": False, "num_heads": 4})


def assert_same(cfg: Architecture) -> None:
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
    assert_same(cfg)


@pytest.mark.wide
def test_each_device_decodes_its_own_slots_and_heads():
    set_mesh(2, 2)
    assert_same(GEMMA3)
