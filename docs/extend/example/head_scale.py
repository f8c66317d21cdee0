"""A kind of layer: attention whose heads learn how sharply they look."""

from dataclasses import replace

import jax

from tunix_lite.models import decoder
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.layer_kind import LayerKind, Surroundings
from tunix_lite.models.weights import Weight


def weights(cfg: Architecture) -> dict[str, Weight]:
    """The weights of attention, and a number for each query head."""
    start = jax.nn.initializers.normal(0.1)
    scale = Weight((cfg.num_heads,), ("heads",), start, inputs=0)
    return decoder.attention_weights(cfg) | {"head_scale": scale}


def mix(x_BTD: jax.Array, w: dict, cfg: Architecture, around: Surroundings) -> tuple:
    """Attention, with the queries of head n times 1 + head_scale[n]."""

    def attend(q_BTNH: jax.Array, *keys_and_values: jax.Array) -> tuple:
        factor_N1 = 1 + w["head_scale"][:, None].astype(q_BTNH.dtype)
        return around.attend_fn(q_BTNH * factor_N1, *keys_and_values)

    return decoder.attention_part(x_BTD, w, cfg, replace(around, attend_fn=attend))


HEAD_SCALE = LayerKind(weights, mix)
