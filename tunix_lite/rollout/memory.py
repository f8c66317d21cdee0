"""Counts the bytes that sampling takes on a device, and chooses whole or sharded weights for it."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tunix_lite.distributed.allgather import allgather_values
from tunix_lite.models import decoder
from tunix_lite.models.architecture import Architecture
from tunix_lite.parallel.mesh import (
    AXES,
    axis_size,
    current_rules,
    elements_on_device,
    gathered_sharding,
    use_rules,
)
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout.engine import prompt_cache_blocks, prompt_widths
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.types import Params

# The share of free memory that weights, cache and prompts may take: the rest is for temporaries.
USABLE = 0.9
# The share of the host's free memory that offloaded caches may take, all of them together.
OFFLOADED_SHARE = 0.25


@dataclass(frozen=True)
class SamplingMemory:
    """Counts the bytes of sampling from its sizes on a mesh. Nothing here lives on a device.

    Example: `SamplingMemory(cfg, jnp.bfloat16, GenerationConfig(), RolloutConfig(), 64, ((16, 4),),
    {"fsdp": 4, "tp": 1}, ShardingConfig().table("rollout")).cache_bytes()`.
    """

    cfg: Architecture
    # dtype of the computation
    dtype: DTypeLike
    generation: GenerationConfig
    rollout: RolloutConfig
    # sequences decoded at once, a multiple of fsdp
    num_slots: int
    # (prompts, completions of each) of the rollouts to come
    rollouts: tuple[tuple[int, int], ...]
    # sizes by axis name
    mesh_shape: dict[str, int]
    # the sharding rules while sampling
    rules: dict[str, str | None]

    @property
    def chunk(self) -> int:
        """Tokens that each slot decodes in one call."""
        return min(self.rollout.chunk, self.generation.max_new_tokens)

    @property
    def prompt_cache(self) -> tuple[int, int, int]:
        """(prompts read together, tokens of the widest, prompts in the prompt cache at most).

        Of the rollouts to come the one with the most counts; zeros if there are none.
        """
        widths = prompt_widths(self.generation.max_prompt_length)
        caches = []
        for num_prompts, num_generations in self.rollouts:
            block, blocks = prompt_cache_blocks(
                num_prompts,
                num_generations,
                widths,
                self.num_slots,
                self.generation.max_new_tokens,
                self.chunk,
                self.mesh_shape["fsdp"],
            )
            caches.append((block, widths[0], block * blocks))
        return max(caches, key=lambda sizes: sizes[2], default=(0, 0, 0))

    def cache_bytes(self) -> int:
        """Bytes that a device holds of the slots' keys and values."""
        length = self.generation.max_prompt_length + self.generation.max_new_tokens
        return self._kv_bytes(self.num_slots, length, "batch")

    def prompt_bytes(self) -> int:
        """Bytes that a device holds of the prompt cache: keys and values of prompts that wait."""
        _, _, num_prompts = self.prompt_cache
        return self._kv_bytes(num_prompts, self.generation.max_prompt_length, "prompts")

    def offloaded_bytes(self) -> int:
        """Bytes that a host holds of one offloaded slot: the keys and values of all heads, and the
        newest token's hidden state."""
        length = self.generation.max_prompt_length + self.generation.max_new_tokens
        int8 = self.rollout.cache == "int8"
        tp = self.mesh_shape["tp"]
        shapes = kv_cache.cache_shapes(self.cfg, 1, length, self.dtype, int8, tp)
        return kv_cache.tree_bytes(shapes) + self.cfg.embed_dim * jnp.dtype(self.dtype).itemsize

    def offloading(self, num_conversations: int, host_bytes: int | None) -> "Offloading":
        """Decides what becomes of slots whose conversations wait for an environment.

        num_conversations: of one rollout. host_bytes: memory that is free on the host; None: nobody
        knows.
        """
        without_slot = max(0, num_conversations - self.num_slots)
        room = None if host_bytes is None else int(OFFLOADED_SHARE * host_bytes)
        return Offloading(self.rollout.waiting, self.offloaded_bytes(), without_slot, room)

    def _kv_bytes(self, rows: int, length: int, rows_axis: str) -> int:
        int8 = self.rollout.cache == "int8"
        tp = self.mesh_shape["tp"]
        shapes = kv_cache.cache_shapes(self.cfg, rows, length, self.dtype, int8, tp)
        # Layers of one kind have the same shapes: few of them differ.
        bytes_of_shape: dict[tuple, int] = {}
        total = 0
        for x in jax.tree.leaves(shapes):
            key = (x.shape, x.dtype)
            if key not in bytes_of_shape:
                axes = kv_cache.logical_axes(x, rows_axis)
                held = elements_on_device(x.shape, axes, self.mesh_shape, self.rules)
                bytes_of_shape[key] = held * x.dtype.itemsize
            total += bytes_of_shape[key]
        return total


@dataclass(frozen=True)
class Offloading:
    """Decides what becomes of slots whose conversations wait for environments: they keep their
    places, or some of their caches are offloaded to the host.

    Example: `Offloading("auto", slot_bytes=2**20, without_slot=12, room_bytes=2**23).most` is 8.
    """

    # the setting rollout.waiting
    waiting: str
    # host memory of one offloaded slot
    slot_bytes: int
    # conversations of a rollout beyond its slots: no more are ever offloaded
    without_slot: int
    # host memory that all offloaded slots may take; None: unknown
    room_bytes: int | None

    @property
    def num_that_fit(self) -> int | None:
        """Offloaded slots that a host has room for; None: unknown."""
        return None if self.room_bytes is None else self.room_bytes // self.slot_bytes

    @property
    def most(self) -> int | None:
        """Slots that are offloaded at once, at most; None: that depends on the host. `park` ignores
        host memory; `auto` respects it."""
        if self.waiting == "hold" or not self.without_slot:
            return 0
        if self.waiting == "park":
            return self.without_slot
        return None if self.num_that_fit is None else min(self.without_slot, self.num_that_fit)

    @property
    def most_bytes(self) -> int:
        """Returns the bytes of all offloaded slots on a host, at most."""
        most = self.without_slot if self.most is None else self.most
        return most * self.slot_bytes


def free_host_bytes() -> int:
    """Memory that is free on this host."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def choose_weights(
    params: Params,
    cfg: Architecture,
    dtype: DTypeLike,
    generation: GenerationConfig,
    rollout: RolloutConfig,
    num_slots: int,
    rollouts: Sequence[tuple[int, int]],
) -> tuple[str, str]:
    """gathered or sharded, and in words why, for these weights on the current mesh.

    What else stays on the devices while sampling, such as the optimizer's state, must be there by
    now: the devices are asked how much is free. All hosts must ask. rollouts: as in SamplingMemory.
    """
    mesh_shape = {axis: axis_size(axis) for axis in AXES}
    with use_rules("rollout"):
        rules = current_rules()
    memory = SamplingMemory(
        cfg, dtype, generation, rollout, num_slots, tuple(rollouts), mesh_shape, rules
    )
    return weights_that_fit(memory, lambda: gathered_bytes(params, cfg, dtype), least_free_bytes)


def weights_that_fit(
    memory: SamplingMemory, weight_bytes: Callable[[], int], free_bytes: Callable[[], int]
) -> tuple[str, str]:
    """Chooses gathered or sharded sampling weights, and says why: gathered where the weights fit
    beside the cache and the waiting prompts.

    weight_bytes() are those of the weights on a device, whole over fsdp; free_bytes() the memory
    that is free there, on the fullest device. Neither is called where the settings or one device
    decide.
    """
    setting = memory.rollout.weights
    if setting != "auto":
        return setting, f"weights {setting}, as rollout.weights says"
    if memory.mesh_shape["fsdp"] == 1:
        return "gathered", "each device has all weights, as fsdp is 1"

    weights = weight_bytes()
    cache = memory.cache_bytes()
    prompts = memory.prompt_bytes()
    free = free_bytes()
    fits = weights + cache + prompts <= USABLE * free
    choice = "gathered" if fits else "sharded"
    sizes = (
        f"{weights / 1e6:,.0f} MB of weights, {cache / 1e6:,.0f} MB of cache and "
        f"{prompts / 1e6:,.0f} MB of prompts {'fit' if fits else 'do not fit'}"
    )
    room = f"{USABLE:.0%} of {free / 1e6:,.0f} MB free"
    return choice, f"weights {choice} over fsdp, since {sizes} into {room}"


def gathered_bytes(params: Params, cfg: Architecture, dtype: DTypeLike) -> int:
    """Bytes a device holds of these weights as sampling uses them, gathered over fsdp."""
    shapes = jax.eval_shape(partial(decoder.per_layer_params, cfg=cfg, dtype=dtype), params)
    shardings = decoder.per_layer_shardings(jax.tree.map(lambda x: x.sharding, params), cfg)

    def size(x: jax.ShapeDtypeStruct, sharding: Any) -> int:
        return math.prod(gathered_sharding(sharding).shard_shape(x.shape)) * x.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, shapes, shardings)))


def least_free_bytes() -> int:
    """Memory that is free on the fullest device of all hosts. All of them must ask."""
    return min(allgather_values(free_bytes()))


def free_bytes() -> int:
    """Memory that is free on this host's fullest device; pretend devices of a CPU share the
    host's."""
    devices = jax.local_devices()
    stats = [device.memory_stats() for device in devices]
    if any(s is None or "bytes_limit" not in s for s in stats):
        return free_host_bytes() // len(devices)
    return min(s["bytes_limit"] - s["bytes_in_use"] for s in stats)
