"""The head of a reward model or of a critic: one number for each token, score . h + bias, in
float32, in place of the logits. Its weights stand beside those of the decoder."""

import jax
import jax.numpy as jnp

from tunix_lite.basics.types import Params
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.rounding import wide
from tunix_lite.models.weights import Weight, zeros
from tunix_lite.parallel.mesh import gather

# Names of the weights, which stand at the top of the parameters.
HEAD = ("score", "score_bias")
_AXES = ("embed",)


def scalar_head(cfg: Architecture, with_bias: bool) -> dict[str, Weight]:
    """The weights of the head, by name: `score` [D] and, with a bias, `score_bias` [1]. Both begin
    at zero, and stay float32 in a frozen model: all that the decoder has found is in one number."""
    head = {"score": Weight((cfg.embed_dim,), _AXES, zeros, inputs=0, is_exact=True)}
    if with_bias:
        head["score_bias"] = Weight((1,), ("norm",), zeros, inputs=0, is_exact=True)
    return head


def scalar_scores(params: Params, hidden_BTD: jax.Array) -> jax.Array:
    """The number of each token, [B, T] float32. hidden_BTD: after the final norm, as
    decoder.forward gives it."""
    hidden = wide(hidden_BTD)
    score_D = gather(params["score"].astype(hidden.dtype), _AXES)
    # A product in float32 would have fewer bits on accelerators, and a sum over D has all.
    scores_BT = jnp.sum(hidden * score_D, axis=-1)
    bias = params.get("score_bias")
    if bias is None:
        return scores_BT
    return scores_BT + bias.astype(hidden.dtype)
