"""A kind of layer: attention without rotary positions."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from tunix_lite.models import decoder
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.layer_kind import LayerKind, Surroundings


def mix(x_BTD: jax.Array, w: dict, cfg: Architecture, around: Surroundings) -> tuple:
    """Attention with all angles at zero."""
    sin, cos = around.angles
    around = replace(around, angles=(jnp.zeros_like(sin), jnp.ones_like(cos)))
    return decoder.attention_part(x_BTD, w, cfg, around)


UNROTATED = LayerKind(decoder.attention_weights, mix)
