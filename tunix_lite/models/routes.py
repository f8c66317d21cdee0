"""Recorded routes: the experts that each token took in each layer. They travel with the tokens as
[..., L * k] ids, the k of the first layer first: uint8 up to 256 experts, else uint16.

No token takes an expert twice. So two equal ids say that nothing is recorded, and that the router
chooses: no id is spent on it, and zeros are tokens without routes. With one expert per token a
second, other id stands beside each.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.models.architecture import Architecture


def no_routes(cfg: Architecture, *shape: int) -> np.ndarray:
    """Routes of so many tokens, of which none is recorded: of one of Qwen3-30B-A3B, 384 zeros."""
    dtype = np.uint8 if cfg.experts.count <= 256 else np.uint16
    return np.zeros((*shape, cfg.num_layers * max(2, cfg.experts.per_token)), dtype)


def recorded(ids_LBTk: jax.Array, cfg: Architecture) -> jax.Array:
    """Routes [B, T, L * k] of the experts that tokens took."""
    if cfg.experts.per_token == 1:
        ids_LBTk = jnp.concatenate([ids_LBTk, (ids_LBTk + 1) % cfg.experts.count], axis=-1)
    ids_BTLk = jnp.moveaxis(ids_LBTk, 0, 2).astype(no_routes(cfg).dtype)
    return ids_BTLk.reshape(*ids_BTLk.shape[:2], -1)


def replayed(routes_BTK: jax.Array | None, cfg: Architecture) -> jax.Array | None:
    """The experts [L, B, T, k] that these routes say, int32; -1 where none are recorded. None: none
    are given."""
    if routes_BTK is None:
        return None
    by_layer = routes_BTK.reshape(*routes_BTK.shape[:2], cfg.num_layers, -1)
    ids_LBTk = jnp.moveaxis(by_layer, 2, 0)
    is_recorded = ids_LBTk[..., :1] != ids_LBTk[..., 1:2]
    taken = ids_LBTk[..., : cfg.experts.per_token].astype(jnp.int32)
    return jnp.where(is_recorded, taken, -1)
