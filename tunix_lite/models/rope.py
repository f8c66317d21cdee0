"""Rotary positions: the angles of tokens, and heads that turn by them."""

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.models.architecture import Architecture
from tunix_lite.models.layer_kind import Angles
from tunix_lite.models.rounding import stored, wide

# Kinds of layers whose queries and keys turn.
ROTATED = {"local", "global"}


def rope_angles_by_kind(cfg: Architecture, positions_BT: jax.Array) -> dict[str, Angles]:
    """`rope_angles`, by kind of attention. Layers of other kinds may read those of global ones."""
    kinds = dict.fromkeys(kind if kind in ROTATED else "global" for kind in cfg.pattern)
    return {kind: rope_angles(cfg, positions_BT, kind) for kind in kinds}


def rope_angles(
    cfg: Architecture,
    positions_BT: jax.Array,
    kind: str,
) -> Angles:
    """sin and cos of the rotary angles, [B, T, 1, elements of a head that turn / 2] each, float32;
    with Yarn.query_growth the factors of the queries come third, [B, T, 1, 1]."""
    frequency, amplitude = cfg.rope(kind)
    positions_BT11 = positions_BT[..., None, None]
    # With 64 bits the angle has digits enough.
    if jnp.asarray(frequency).dtype == jnp.float64:
        sin, cos = jnp.sin(positions_BT11 * frequency), jnp.cos(positions_BT11 * frequency)
    else:
        # float32 has no digits for a large angle: at 131,072 radians it is off by 0.008. So the
        # angle is the nearest quarter of a turn and a rest of at most pi/4, exact by integers.
        turn = turned(positions_BT11, frequency / (2 * np.pi))
        quarter = (turn + np.uint32(2**29)) >> 30
        rest = (turn - (quarter << 30)).astype(jnp.int32) * np.float32(2 * np.pi / 2**32)
        sin = jnp.sin(rest)
        cos = jnp.cos(rest)
        is_odd = quarter % 2 == 1
        sin, cos = jnp.where(is_odd, cos, sin), jnp.where(is_odd, sin, cos)
        is_left = (quarter == 1) | (quarter == 2)
        sin, cos = jnp.where(quarter >= 2, -sin, sin), jnp.where(is_left, -cos, cos)
    if amplitude != 1:
        sin, cos = sin * amplitude, cos * amplitude
    if cfg.yarn is not None and cfg.yarn.query_growth:
        times = positions_BT11 // cfg.yarn.original_positions
        return sin, cos, 1 + cfg.yarn.query_growth * jnp.log1p(times.astype(sin.dtype))
    return sin, cos


def turned(positions: jax.Array, turns: np.ndarray) -> jax.Array:
    """positions * turns without the whole turns, in 2^-32 of a turn, uint32. turns: float64."""
    # The turns of one token with 64 bits after the point, in two words. uint32 drops what is above
    # its 32 bits: whole turns.
    scaled = turns % 1 * 2.0**32
    high = scaled.astype(np.uint32)
    low = (scaled % 1 * 2.0**32).astype(np.uint32)
    count = positions.astype(jnp.uint32)
    # What count * low carries into the word above, by halves of words, as no type has 64 bits. The
    # lowest of the four products is left out: it is less than one unit.
    count_high = count >> 16
    count_low = count & 0xFFFF
    carried = (count_low * (low >> 16) >> 16) + (count_high * (low & 0xFFFF) >> 16)
    return count * high + count_high * (low >> 16) + carried


def rope(x_BTNH: jax.Array, angles: Angles) -> jax.Array:
    """x with rotary positions: i and i + half of the first elements of a head turn together."""
    sin, cos = angles
    num_turned = 2 * sin.shape[-1]
    if num_turned < x_BTNH.shape[-1]:
        # the rest of the head knows no positions
        x_BTNH, rest = jnp.split(x_BTNH, [num_turned], axis=-1)
        return jnp.concatenate([rope(x_BTNH, angles), rest], axis=-1)
    first, second = jnp.split(wide(x_BTNH), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return stored(turned, x_BTNH.dtype)
