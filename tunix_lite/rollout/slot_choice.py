"""rollout.num_slots=auto: of the numbers of slots that fit into memory, the fastest by the clock.
Slots never change tokens, so the clock may choose."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

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
    seconds_of: Callable[[CompletionSampler, Params], Callable[[int], float]] | None = None,
) -> tuple[int, str]:
    """The slots for these weights on the current mesh, and in words why. All hosts must ask, and
    take what the first process measured. Figures stay beside the programs that jax keeps, so the
    next run of these shapes measures nothing. sampler_of(gathered or sharded) makes the sampler.
    seconds_of: as `decode_seconds`, which None means."""
    least = replace(memory, num_slots=memory.mesh_shape["fsdp"])
    weights, _ = choose_weights(params, least)
    needed = copy_bytes(params, memory, weights == "gathered")
    sizes = slots_that_fit(memory, needed, min(allgather_values(free_bytes())))
    if len(sizes) == 1:
        return sizes[0], "the only number of slots that fits"

    # What an earlier run measured with the same programs on the same devices.
    about = (memory, sizes, weights, jax.devices()[0].device_kind, jax.__version__)
    name = f"slots-{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}.json"
    folder = jax.config.jax_compilation_cache_dir
    file = Path(folder) / name if folder else None
    rates = {}
    with suppress(OSError, ValueError, AttributeError):
        read = json.loads(file.read_text()) if file else {}
        rates = {int(size): float(rate) for size, rate in read.items() if int(size) in sizes}
    rates = {int(size): rate for size, rate in allgather_values(rates)[0].items()}
    how = "measured before" if rates else "measured"
    if not rates:
        seconds = (seconds_of or decode_seconds)(sampler_of(weights), params)
        rates = measured_rates(sizes, seconds)
        if file and jax.process_index() == 0:
            with suppress(OSError):
                file.write_text(json.dumps(rates))
    figures = ", ".join(f"{size}: {rate:,.0f}" for size, rate in rates.items())
    return max(rates, key=rates.get), f"the fastest; tokens/s of decoding {how}: {figures}"


def measured_rates(sizes: Sequence[int], seconds: Callable[[int], float]) -> dict[int, float]:
    """Tokens a second by number of slots, from the fewest on, until more slots are slower.
    seconds(slots): those of one token in each slot."""
    rates: dict[int, float] = {}
    for size in sorted(sizes):
        # all processes must stop at the same number
        rate = size / allgather_values(seconds(size))[0]
        is_slower = any(rate < other for other in rates.values())
        rates[size] = rate
        if is_slower:
            break
    return rates


def decode_seconds(sampler: CompletionSampler, params: Params) -> Callable[[int], float]:
    """Returns a function that measures the seconds of one token in each of so many slots. Slots
    that hold no sequence take as long as full ones."""
    programs = sampler.programs
    weights = sampler.prepare(params)
    temperature = np.float32(programs.spec.generation.temperature)
    cuts_off = programs.spec.cuts_off(temperature)

    def seconds(num_slots: int) -> float:
        slots = programs.make_slots(num_slots, programs.spec.max_length)
        took = []
        for _ in range(3):
            began = time.perf_counter()
            slots, _ = programs.decode(slots, weights, temperature, cuts_off)
            jax.block_until_ready(slots)
            took.append(time.perf_counter() - began)
        # the first call compiles, and other programs of the machine may disturb one
        return min(took[1:]) / programs.spec.chunk

    return seconds
