"""How large sampling is on a device, and whether the weights can be whole there while it lasts."""

import math
import os
from collections.abc import Sequence
from functools import partial

import jax

from tunix_lite.distributed.allgather import allgather_values
from tunix_lite.models import decoder
from tunix_lite.models.decoder import Architecture
from tunix_lite.parallel.mesh import axis_size, gathered_sharding, sharding, use_rules
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout.scheduler import prompt_cache_blocks, prompt_widths
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig

# of what is free: the rest is for temporaries
USABLE = 0.9


def choose_weights(
    params,
    cfg: Architecture,
    dtype,
    generation: GenerationConfig,
    rollout: RolloutConfig,
    num_slots: int,
    asked: Sequence[tuple[int, int]],
) -> tuple[str, str]:
    """gathered or sharded, and in words why. gathered where it fits on every host, beside the cache
    and the prompts that wait.

    What else stays on the devices while sampling, such as the optimizer's state, must be there by
    now: what is free is asked of them. asked: (prompts, completions of each) of the rollouts to
    come; the largest shelf counts.
    """
    if rollout.weights != "auto":
        return rollout.weights, f"weights {rollout.weights}, as rollout.weights says"
    if axis_size("fsdp") == 1:
        return "gathered", "weights whole on every device, as fsdp is 1"
    weights, cache = (
        gathered_bytes(params, cfg, dtype),
        cache_bytes(cfg, dtype, generation, rollout, num_slots),
    )
    shelf = max(
        (prompt_cache_bytes(cfg, dtype, generation, rollout, num_slots, *each) for each in asked),
        default=0,
    )
    free = free_bytes()
    fits = all(allgather_values(weights + cache + shelf <= USABLE * free))
    choice = "gathered" if fits else "sharded"
    sizes = (
        f"{weights / 1e6:,.0f} MB of them, {cache / 1e6:,.0f} MB of cache and {shelf / 1e6:,.0f} "
        "MB of prompts "
    )
    sizes += "fit" if fits else "do not fit"
    room = f"{USABLE:.0%} of {free / 1e6:,.0f} MB free"
    return choice, f"weights {choice} over fsdp: whole, {sizes} into {room}"


def gathered_bytes(params, cfg: Architecture, dtype) -> int:
    """Bytes a device holds of the weights as sampling wants them, gathered over fsdp."""
    shapes = jax.eval_shape(partial(decoder.per_layer_params, cfg=cfg, dtype=dtype), params)
    places = decoder.per_layer_shardings(jax.tree.map(lambda x: x.sharding, params), cfg)
    sizes = jax.tree.map(lambda x, place: _bytes(x, gathered_sharding(place)), shapes, places)
    return sum(jax.tree.leaves(sizes))


def cache_bytes(
    cfg: Architecture, dtype, generation: GenerationConfig, rollout: RolloutConfig, num_slots: int
) -> int:
    """Bytes a device holds of the slots' keys and values, on the current mesh."""
    length = generation.max_prompt_length + generation.max_new_tokens
    return _rows_bytes(cfg, dtype, rollout, num_slots, length, "batch")


def prompt_cache_bytes(
    cfg: Architecture,
    dtype,
    generation: GenerationConfig,
    rollout: RolloutConfig,
    num_slots: int,
    prompts: int,
    times: int,
) -> int:
    """Bytes a device holds of prompts that have been read and wait, each for `times`
    completions."""
    new, width = generation.max_new_tokens, generation.max_prompt_length
    block, room = prompt_cache_blocks(
        prompts, times, prompt_widths(width), num_slots, new, min(rollout.chunk, new)
    )
    return _rows_bytes(cfg, dtype, rollout, block * room, width, "prompts")


def _rows_bytes(
    cfg: Architecture, dtype, rollout: RolloutConfig, rows: int, length: int, axis: str
) -> int:
    with use_rules("rollout"):
        empty = partial(
            kv_cache.empty_cache, cfg, rows, length, dtype, rollout.cache == "int8", axis
        )
        cache = jax.eval_shape(empty)
        return sum(
            _bytes(x, sharding((axis, *kv_cache.AXES[1:])[: x.ndim], x.shape))
            for x in jax.tree.leaves(cache)
        )


def free_bytes() -> int:
    """Memory that is free on this host's fullest device; pretend devices of a CPU share the
    host's."""
    devices = jax.local_devices()
    stats = [device.memory_stats() for device in devices]
    if any(s is None or "bytes_limit" not in s for s in stats):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)
    return min(s["bytes_limit"] - s["bytes_in_use"] for s in stats)


def _bytes(x, place) -> int:
    return math.prod(place.shard_shape(x.shape)) * x.dtype.itemsize
