"""The RMS norm, computed in float32 at least (arXiv:1910.07467)."""

import jax
import jax.numpy as jnp

from tunix_lite.models.architecture import Architecture
from tunix_lite.models.rounding import stored, wide
from tunix_lite.models.weights import Weight, ones, zeros


def norm_weight(cfg: Architecture, size: int) -> Weight:
    """The scale of a norm over `size` elements."""
    return Weight((size,), ("norm",), zeros if cfg.norm_plus_one else ones, inputs=0)


def norm(
    x: jax.Array,
    scale: jax.Array | None,
    cfg: Architecture,
) -> jax.Array:
    """RMS norm over the last dim, times the scale (1 + scale for Gemma 2 and 3), if there is
    one."""
    x_wide = wide(x)
    mean_square = jnp.mean(x_wide**2, axis=-1, keepdims=True)
    normed = x_wide * jax.lax.rsqrt(mean_square + cfg.norm_eps)
    if scale is None:
        return stored(normed, x.dtype)
    # as Gemma computes it: 1 + scale would be rounded in bfloat16
    scale = scale.astype(x_wide.dtype)
    return stored(normed * (1 + scale if cfg.norm_plus_one else scale), x.dtype)
