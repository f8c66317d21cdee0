"""Decides whether the fused kernels can decode a model: they do all of it, or none."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tunix_lite.models import decoder
from tunix_lite.models.architecture import Architecture

# Tensor cores multiply at least 16 rows with 16 columns; Triton takes powers of two.
FEWEST = 16
PIECE = 128  # tokens of the vocabulary that a program of fused_draw scores


def check_fused(
    cfg: Architecture,
    dtype: DTypeLike,
    platform: str,
    tp: int,
    int8: bool = False,
    plain_weights: bool = True,
    has_cutoffs: bool = False,
) -> None:
    """Raises ValueError, with the first reason, where the kernels cannot decode this.
    plain_weights: without adapters, and not quantised."""

    def refuse(is_so: object, reason: str) -> None:
        if is_so:
            raise ValueError(f"kernels=fused: they {reason}; use auto or xla")

    refuse(platform not in ("gpu", "cuda"), f"run on NVIDIA GPUs, not on {platform}")
    is_wide = jnp.dtype(dtype).itemsize > 4
    refuse(is_wide, f"compute in float32 or bfloat16, not in {jnp.dtype(dtype).name}")
    refuse(int8, "read no int8 cache, and rollout.cache is int8")
    lora = "multiply with plain weights, and these have LoRA adapters or are quantised"
    refuse(not plain_weights, lora)

    # The shape of the model.
    has_growth = cfg.yarn is not None and cfg.yarn.query_growth
    others = "attn_gate attn_sinks experts layer_scalar out_bias per_layer_dim qk_norm_whole"
    has_others = any(getattr(cfg, name) for name in (*others.split(), "value_norm"))
    is_plain = cfg.rope_share == 1 and decoder.stack_of_layers(cfg)[0] is None
    is_plain = is_plain and not has_others and not has_growth
    attends = (
        "compute attention without gate, rotated as a whole, and the model has other layers"
    )
    refuse(not is_plain, attends)
    H = cfg.head_dim
    is_odd = H & (H - 1) or not 32 <= H <= 256
    refuse(is_odd, f"take heads of 32, 64, 128 or 256, and head_dim is {H}")
    group = cfg.num_heads // cfg.num_kv_heads
    most = f"take up to {FEWEST} query heads of one key head, and the model has {group}"
    refuse(group > FEWEST, most)
    whole = f"need a tp that divides the {cfg.num_kv_heads} key heads, and it is {tp}"
    refuse(cfg.num_kv_heads % tp, whole)
    heads = ("num_heads x head_dim over tp", cfg.num_heads * H // tp)
    sizes = (("embed_dim", cfg.embed_dim), heads, ("mlp_dim over tp", cfg.mlp_dim // tp))
    for name, size in sizes:
        refuse(size % FEWEST, f"sum over multiples of {FEWEST} numbers, and {name} is {size}")

    # The draw.
    cut = "draw from all tokens, and generation.top_k, top_p or min_p cuts some off"
    refuse(has_cutoffs, cut)
    config = jax.config
    defaults = (
        config.jax_default_prng_impl == "threefry2x32",
        config.jax_threefry_partitionable,
    )
    is_default = all(defaults) and not config.jax_high_dynamic_range_gumbel
    refuse(
        not is_default, "draw the noise of JAX's default generator, and jax.config has another"
    )
