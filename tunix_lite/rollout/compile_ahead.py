"""Compiles all programs that the rollouts of one size can need, before the first of them begins.

A rollout pads its prompts to one of a few widths, and its cache has one of a few numbers of
columns. Which of them a batch takes depends on its lengths. A run compiles them all at its start,
so that none of its steps waits for the compiler.

A program is lowered for shapes alone, with the shardings that the programs before it give their
results. A later call of the program finds it compiled.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tunix_lite.parallel.compiling import check_wanted, compiled_together
from tunix_lite.parallel.mesh import axis_size
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout.engine import (
    APPEND_WIDTHS,
    append_calls,
    empty_queue,
    prompt_cache_blocks,
    prompt_widths,
    queue_length,
)
from tunix_lite.rollout.programs import Programs, PromptCache, Slots
from tunix_lite.types import Params


@dataclass(frozen=True)
class RolloutSize:
    """Sizes that give a rollout its shapes, beside the lengths of its sequences.

    Example: RolloutSize(num_prompts=16, num_generations=4, num_slots=64).
    """

    num_prompts: int
    num_generations: int
    num_slots: int
    temperature: float = 1.0
    # requests of the queue, if they may be more than those of these prompts
    most_requests: int = 0


def compile_rollout(programs: Programs, per_layer_params: Params, size: RolloutSize) -> Slots:
    """Compiles all programs of rollouts of this size, for these weights. Returns the shapes of
    slots with all columns."""
    spec = programs.spec
    generation = spec.generation
    widths = prompt_widths(generation.max_prompt_length)
    block, cache_blocks = prompt_cache_blocks(
        size.num_prompts,
        size.num_generations,
        widths,
        size.num_slots,
        generation.max_new_tokens,
        spec.chunk,
        axis_size("fsdp"),
    )

    # The prompts. A prompt cache is placed as the first width leaves it.
    prompt_cache = results(programs.make_prompt_cache, block * cache_blocks)
    number = jax.ShapeDtypeStruct((), jnp.int32)

    def prefilled(prompt_cache: PromptCache, width: int) -> PromptCache:
        tokens = jax.ShapeDtypeStruct((block, width), jnp.int32)
        lengths = jax.ShapeDtypeStruct((block,), jnp.int32)
        return results(programs.prefill, prompt_cache, per_layer_params, tokens, lengths, number)

    prompt_cache = prefilled(prompt_cache, widths[0])
    requests = max(size.num_prompts * size.num_generations, size.most_requests)
    queue = empty_queue(queue_length(requests), spec.per_request)

    # The slots, for every number of columns.
    options = (spec.cuts_off(size.temperature), False)
    stopped = jax.ShapeDtypeStruct((size.num_slots,), jnp.int32)
    temperature = jax.ShapeDtypeStruct((), jnp.float32)

    def decoded(columns: int) -> Slots:
        slots = results(programs.make_slots, size.num_slots, columns)
        slots = results(programs.admit, slots, prompt_cache, queue, number, stopped)
        slots, _ = results(programs.decode, slots, per_layer_params, temperature, *options)
        return results(programs.admit, slots, prompt_cache, queue, number, stopped)

    sizes = _columns(programs)
    slots_of = [partial(decoded, columns) for columns in sizes]
    further = [partial(prefilled, prompt_cache, width) for width in widths[1:]]
    every = compiled_together(slots_of + further)[: len(sizes)]
    for slots in every:
        _compile_resize(programs, slots, sizes)
    return every[sizes.index(spec.max_length)]


def results(program: Any, *arguments: Any) -> Any:
    """Compiles a program under jit for these arguments, arrays or their shapes. Returns the shapes
    of its results, placed as it places them."""
    check_wanted()
    lowered = program.lower(*arguments)
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        lowered.out_info,
        lowered.compile().output_shardings,
    )


def as_shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    """The shape of an array, with its place."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _columns(programs: Programs) -> list[int]:
    """The columns that a cache may have: all, where conversations go on."""
    length = programs.spec.max_length
    if programs.spec.holds:
        return [length]
    least = kv_cache.columns_in_use(programs.spec.generation.max_prompt_length, length)
    return [columns for columns in kv_cache.column_sizes(length) if columns >= least]


def _compile_resize(programs: Programs, slots: Slots, sizes: list[int]) -> None:
    """Compiles the program that gives the slots another number of columns."""
    spec = programs.spec
    for kind, kv in dict(zip(spec.cfg.kinds, slots.cache)).items():
        for columns in sizes:
            wanted = kv_cache.num_columns(spec.cfg, kind, columns)
            if wanted != kv.k.shape[2]:
                results(programs.resize_layer, kv, wanted)


def compile_append(programs: Programs, slots: Slots, per_layer_params: Params) -> Slots:
    """Compiles the program that appends tokens to slots. Returns the shapes of the slots after
    it."""
    num_slots = len(slots.requests)
    for width in APPEND_WIDTHS:
        call = append_calls({0: ([0] * width, 1)}, num_slots)[0]
        slots = results(programs.append, slots, per_layer_params, *call)
    return slots


def compile_rewind(programs: Programs, slots: Slots, chunk: int) -> None:
    """Compiles the program that takes back tokens behind a stop text, of chunks of so many
    tokens."""
    num_slots = len(slots.requests)
    tokens = jax.ShapeDtypeStruct((chunk, num_slots), jnp.int32)
    num_kept = jax.ShapeDtypeStruct((num_slots,), jnp.int32)
    results(programs.rewind, slots, results(programs.save, slots), tokens, num_kept)
