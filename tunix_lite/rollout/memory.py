"""Counts the bytes that sampling takes on a device, and chooses whole or sharded weights for it."""

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.typing import DTypeLike

from tunix_lite.basics.types import Params
from tunix_lite.distributed.allgather import allgather_values
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.layer_by_layer import per_layer_shapes
from tunix_lite.parallel.mesh import (
    AXES,
    axis_size,
    current_platform,
    current_rules,
    elements_on_device,
    use_rules,
)
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout.engine import prompt_cache_blocks
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig, round_up_to_shards

# The share of free memory that weights, cache and prompts may take: the rest is for temporaries.
_USABLE = 0.9


@dataclass(frozen=True)
class SamplingMemory:
    """Counts the bytes of sampling from its sizes on a mesh. Nothing here lives on a device.
    Example: `SamplingMemory.here(cfg, jnp.float32, GenerationConfig(), RolloutConfig(), 64,
    ((16, 4),)).cache_bytes()`."""

    cfg: Architecture
    # dtype of the computation
    dtype: DTypeLike
    generation: GenerationConfig
    rollout: RolloutConfig
    num_slots: int  # sequences decoded at once, a multiple of fsdp
    # (prompts, completions of each) of the rollouts to come
    rollouts: Sequence[tuple[int, int]]
    mesh_shape: dict[str, int]  # sizes by axis name
    rules: dict[str, str | None]  # the sharding rules while sampling
    on_cpu: bool = False  # whether the devices are CPUs

    @classmethod
    def here(cls, *about: Any) -> "SamplingMemory":
        """The memory of sampling on the current mesh. about: the fields up to `rollouts`."""
        with use_rules("rollout"):
            rules = current_rules()
        sizes = {axis: axis_size(axis) for axis in AXES}
        return cls(*about, sizes, rules, current_platform() == "cpu")

    @property
    def chunk(self) -> int:
        """Tokens that each slot decodes in one call."""
        return min(self.rollout.chunk, self.generation.max_new_tokens)

    @property
    def prompt_cache(self) -> tuple[int, int, int]:
        """(prompts read together, tokens of the widest, prompts in the prompt cache) of the largest
        rollout."""
        fsdp = self.mesh_shape["fsdp"]
        caches = []
        for size in self.rollouts:
            block, blocks = prompt_cache_blocks(
                self.generation, self.chunk, *size, self.num_slots, fsdp, self.on_cpu
            )
            caches.append((block, self.generation.max_prompt_length, block * blocks))
        return max(caches, key=lambda sizes: sizes[2], default=(0, 0, 0))

    def cache_bytes(self) -> int:
        """Bytes that a device holds of the slots' keys and values."""
        length = self.generation.max_prompt_length + self.generation.max_new_tokens
        return self._kv_bytes(self.num_slots, length, "batch")

    def prompt_bytes(self) -> int:
        """Bytes that a device holds of the prompt cache: keys and values of prompts that wait."""
        _, _, num_prompts = self.prompt_cache
        return self._kv_bytes(num_prompts, self.generation.max_prompt_length, "prompts")

    def _kv_bytes(self, rows: int, length: int, rows_axis: str) -> int:
        int8 = self.rollout.cache == "int8"
        tp = self.mesh_shape["tp"]
        layers = kv_cache.cache_shapes(self.cfg, rows, length, self.dtype, int8, tp)
        # Layers of one kind have the same shapes: few of them differ.
        shapes = Counter(jax.tree.leaves(layers))
        total = 0
        for x, count in shapes.items():
            axes = kv_cache.logical_axes(x, rows_axis)
            held = elements_on_device(x.shape, axes, self.mesh_shape, self.rules)
            total += count * held * x.dtype.itemsize
        return total


def choose_weights(params: Params, memory: SamplingMemory) -> tuple[str, str]:
    """gathered or sharded, and in words why, for these weights on the current mesh. All hosts must
    ask, when all else that stays on the devices is there."""

    # on the fullest device of all hosts
    return weights_that_fit(
        memory,
        lambda: copy_bytes(params, memory, gather=True),
        lambda: min(allgather_values(free_bytes())),
    )


def copy_bytes(params: Params, memory: SamplingMemory, gather: bool) -> int:
    """Bytes on a device of the weights as sampling reads them. gather: whole over fsdp."""
    shapes = per_layer_shapes(params, memory.cfg, memory.dtype, gather=gather)
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(shapes)
    )


def slots_that_fit(memory: SamplingMemory, weight_bytes: int, free_bytes: int) -> list[int]:
    """The numbers of slots among which num_slots=auto chooses, the most first: all that
    `memory` has, a half, a quarter and so on. Of those that fit beside the weights the first
    three, as each has programs of its own; the least if none fits."""
    fsdp = memory.mesh_shape["fsdp"]
    sizes = [memory.num_slots]
    while sizes[-1] > fsdp:
        sizes.append(round_up_to_shards(sizes[-1] // 2, fsdp))

    def fits(num_slots: int) -> bool:
        of_slots = replace(memory, num_slots=num_slots)
        needed = weight_bytes + of_slots.cache_bytes() + of_slots.prompt_bytes()
        return needed <= _USABLE * free_bytes

    return ([size for size in sizes if fits(size)] or sizes[-1:])[:3]


def weights_that_fit(
    memory: SamplingMemory, weight_bytes: Callable[[], int], free_bytes: Callable[[], int]
) -> tuple[str, str]:
    """gathered where the weights fit beside cache and prompts, else sharded; and why."""
    setting = memory.rollout.weights
    if setting != "auto":
        return setting, f"weights {setting}, as rollout.weights says"
    if memory.mesh_shape["fsdp"] == 1:
        return "gathered", "each device has all weights, as fsdp is 1"

    weights = weight_bytes()
    cache = memory.cache_bytes()
    prompts = memory.prompt_bytes()
    free = free_bytes()
    fits = weights + cache + prompts <= _USABLE * free
    choice = "gathered" if fits else "sharded"
    sizes = (
        f"{weights / 1e6:,.0f} MB of weights, {cache / 1e6:,.0f} MB of cache and "
        f"{prompts / 1e6:,.0f} MB of prompts {'fit' if fits else 'do not fit'}"
    )
    room = f"{_USABLE:.0%} of {free / 1e6:,.0f} MB free"
    return choice, f"weights {choice} over fsdp, since {sizes} into {room}"


def free_bytes() -> int:
    """Memory that is free on this host's fullest device."""
    devices = jax.local_devices()
    stats = [device.memory_stats() for device in devices]
    if any(s is None or "bytes_limit" not in s for s in stats):
        # Devices that are CPUs report no limit: they share the free pages of the host.
        pages = os.sysconf("SC_AVPHYS_PAGES")
        return pages * os.sysconf("SC_PAGE_SIZE") // len(devices)
    return min(s["bytes_limit"] - s["bytes_in_use"] for s in stats)
