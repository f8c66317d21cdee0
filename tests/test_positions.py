"""Rotary angles are exact at every position."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_lite.models import decoder
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
    found = jax.jit(partial(decoder.rope_angles, cfg, kind=kind))(positions)
    angle = positions[..., None, None].astype(np.float64) * frequencies(cfg, kind)
    for got, wanted in zip(found, (np.sin(angle), np.cos(angle))):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2.0**-23)
