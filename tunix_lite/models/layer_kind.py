"""A kind of layer: how its tokens learn of each other. `Architecture.pattern` names the kinds;
norms and feed-forward are the same for all (decoder.block)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from tunix_lite.models.architecture import Architecture
from tunix_lite.models.attention import AttentionMeta
from tunix_lite.models.weights import Weight

# sin and cos of the rotary angles, [B, T, 1, H/2] each; with Yarn.query_growth also the factors of
# the queries, [B, T, 1, 1]
Angles = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Surroundings:
    """What the tokens of a layer can look at, in training and in sampling.

    Example: Surroundings(products, angles, attend_fn), all that attention reads.
    """

    # decoder.Products: multiplies activations with weights
    products: Any
    angles: Angles
    # (q_BTNH, k_BTKH, v_BTKH) -> (attended [B, T, N, H], what the layer keeps); of q alone where
    # the layer reads the keys and values of another one; with sinks_N where the layer has some
    attend_fn: Callable[..., tuple[jax.Array, Any]]
    # True: attend_fn norms and turns queries and keys, and gets the weights and the angles, too
    attend_norms: bool = False
    # the sequences of the rows; a token whose segment is 0 is none, and changes no state
    sequences: AttentionMeta | None = None
    # the state of each row after the tokens before; None: all sequences begin in these rows
    state: Any = None
    # the layer's own input of the tokens, [B, T, per_layer_dim], if it has one
    per_layer: jax.Array | None = None
    # the experts of the tokens, [B, T, k]; -1: those that the router chooses
    routes: jax.Array | None = None


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer: one of decoder.LAYER_KINDS, or your own by its dotted path.

    Example: LayerKind(decoder.attention_weights, decoder.attention_part), which is attention.
    """

    # the weights that mix tokens, by name
    weights: Callable[[Architecture], dict[str, Weight]]
    # (normed hidden states [B, T, D], weights, cfg, surroundings) -> (what is added to the residual
    # stream, [B, T, D]; what the layer keeps while sampling)
    mix: Callable[..., tuple[jax.Array, Any]]
    # (cfg, rows, dtype of the computation) -> the shapes of the state of so many sequences, as
    # arrays [rows, heads, ...] of four dims; None: it keeps keys and values
    state_shapes: Callable[..., Any] | None = None
