"""MXFP4, in which gpt-oss is published: 32 neighbours share a power of two, and each is one of 16
levels in half a byte. Source: OCP Microscaling Formats (MX) 1.0."""

import jax.numpy as jnp
import numpy as np

# Elements that share a scale.
BLOCK = 32
# A sign, two bits of exponent and one of mantissa, by code.
_LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
LEVELS = np.concatenate([_LEVELS, -_LEVELS])


def dequantised(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Values in bfloat16, which holds them all: [..., G * 32].

    blocks [..., G, 16]: two codes in a byte, uint8, the first in the low half. scales [..., G]: the
    exponent of two plus 127, uint8.
    """
    pairs = np.stack([LEVELS[blocks & 15], LEVELS[blocks >> 4]], axis=-1)
    values = pairs.reshape(*scales.shape, BLOCK)
    scaled = np.ldexp(values, scales.astype(np.int32)[..., None] - 127)
    return scaled.reshape(*scales.shape[:-1], -1).astype(jnp.bfloat16)
