"""MXFP4, in which gpt-oss is published: 32 neighbours share a power of two, and each is one of 16
levels in half a byte. Source: OCP Microscaling Formats (MX) 1.0."""

import jax.numpy as jnp
import numpy as np

# Elements that share a scale.
BLOCK = 32


def dequantised(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Values in bfloat16, which holds them all: [..., G * 32].

    blocks [..., G, 16]: two codes in a byte, uint8, the first in the low half. scales [..., G]: the
    exponent of two plus 127, uint8.
    """
    pairs = np.stack([blocks & 15, blocks >> 4], axis=-1)
    codes = pairs.reshape(*scales.shape, BLOCK)
    values = codes.view(jnp.float4_e2m1fn).astype(np.float32)
    factors = scales.view(jnp.float8_e8m0fnu).astype(np.float32)
    scaled = values * factors[..., None]
    return scaled.reshape(*scales.shape[:-1], -1).astype(jnp.bfloat16)
