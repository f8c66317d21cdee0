"""Keys and values already computed: one {k, v} per layer, head-major [B, K, S, H].

Head-major, and one array per layer, because that is the layout in which decoding updates it in place on a GPU.
"""

import jax
import jax.numpy as jnp

from tunix_lite.models.decoder import ModelConfig
from tunix_lite.parallel.mesh import constrain

AXES = ("batch", "kv_heads", "seq", "head_dim")


def empty_cache(cfg: ModelConfig, rows: int, columns: int, dtype) -> list[dict]:
    """An empty cache for `rows` sequences of up to `columns` tokens."""
    shape = (rows, cfg.num_kv_heads, columns, cfg.head_dim)
    return [{name: constrain(jnp.zeros(shape, dtype), *AXES) for name in "kv"} for _ in cfg.kinds]


def repeat_rows(cache: list[dict], times: int) -> list[dict]:
    """Each row `times` in a row: a prompt's cache, for all completions of its group."""
    return jax.tree.map(lambda x: constrain(jnp.repeat(x, times, axis=0), *AXES), cache)
