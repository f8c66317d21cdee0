"""rollout.num_slots=auto: of the numbers of slots that fit into memory, the fastest by the clock.
Slots never change tokens, so the clock may choose."""

import time
from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np

from tunix_lite.basics.types import Params
from tunix_lite.distributed.allgather import allgather_values
from tunix_lite.rollout.generate import CompletionSampler
from tunix_lite.rollout.memory import (
    SamplingMemory,
    choose_weights,
    copy_bytes,
    free_bytes,
    slots_that_fit,
)


def choose_slots(
    memory: SamplingMemory,
    params: Params,
    sampler_of: Callable[[str], CompletionSampler],
) -> tuple[int, str]:
    """The slots for these weights on the current mesh, and in words why. All hosts must ask, and
    take what the first process measured. sampler_of(gathered or sharded) makes the sampler."""
    least = replace(memory, num_slots=memory.mesh_shape["fsdp"])
    weights, _ = choose_weights(params, least)
    needed = copy_bytes(params, memory, weights == "gathered")
    sizes = slots_that_fit(memory, needed, min(allgather_values(free_bytes())))
    if len(sizes) == 1:
        return sizes[0], "the only number of slots that fits"

    seconds = decode_seconds(sampler_of(weights), params)
    # tokens a second by number of slots, from the fewest on, until more are slower
    rates: dict[int, float] = {}
    best = 0.0
    for size in sorted(sizes):
        # all processes must stop at the same number
        rates[size] = size / allgather_values(seconds(size))[0]
        if rates[size] < best:
            break
        best = rates[size]
    figures = ", ".join(f"{size}: {rate:,.0f}" for size, rate in rates.items())
    return max(rates, key=rates.get), f"the fastest; tokens/s of decoding: {figures}"


def decode_seconds(sampler: CompletionSampler, params: Params) -> Callable[[int], float]:
    """Returns a function that measures the seconds of one token in each of so many slots. Slots
    that hold no sequence take as long as full ones."""
    programs = sampler.programs
    weights = sampler.prepare(params)
    temperature = np.float32(programs.spec.generation.temperature)
    cuts_off = programs.spec.cuts_off(temperature)

    def seconds(num_slots: int) -> float:
        slots = programs.make_slots(num_slots, programs.spec.max_length)
        chunks = []
        # The first call compiles. Of two more the better counts: other programs may run beside.
        for _ in range(3):
            began = time.perf_counter()
            slots, _ = programs.decode(slots, weights, temperature, cuts_off)
            jax.block_until_ready(slots)
            chunks.append(time.perf_counter() - began)
        return min(chunks[1:]) / programs.spec.chunk

    return seconds
