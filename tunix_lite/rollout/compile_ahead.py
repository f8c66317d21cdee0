"""Compiles all programs that the rollouts of one size can need, before the first of them begins.

A rollout pads its prompts to one of a few widths, and its cache has one of a few numbers of
columns. Which of them a batch takes depends on its lengths. A run compiles them all at its start,
so that none of its steps waits for the compiler.

A program is lowered for shapes alone, with the shardings that the programs before it give their
results. A later call of the program finds it compiled.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tunix_lite.parallel.compiling import check_wanted, compiled_together
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout.engine import APPEND_WIDTHS, Engine, append_calls
from tunix_lite.rollout.programs import PromptCache, Slots


def compile_rollout(engine: Engine) -> Slots:
    """Compiles all programs of rollouts that have an engine of this size, whose weights may be
    shapes. Returns the shapes of slots with all columns."""
    programs = engine.programs
    spec = programs.spec
    params = engine.per_layer_params
    block = engine.block_sizes[-1]
    number = jax.ShapeDtypeStruct((), jnp.int32)

    # The prompts. A prompt cache is placed as the first width leaves it.
    def prefilled(prompt_cache: PromptCache, width: int) -> PromptCache:
        tokens = jax.ShapeDtypeStruct((block, width), jnp.int32)
        lengths = jax.ShapeDtypeStruct((block,), jnp.int32)
        return results(programs.prefill, prompt_cache, params, tokens, lengths, number)

    empty = results(programs.make_prompt_cache, block * engine.cache_blocks)
    prompt_cache = prefilled(empty, engine.widths[0])

    # The slots, for every number of columns.
    stopped = jax.ShapeDtypeStruct((engine.num_slots,), jnp.int32)
    temperature = jax.ShapeDtypeStruct((), jnp.float32)
    options = (spec.cuts_off(engine.temperature), False)

    def decoded(columns: int) -> Slots:
        slots = results(programs.make_slots, engine.num_slots, columns)
        slots = results(programs.admit, slots, prompt_cache, engine.queue, number, stopped)
        slots, _ = results(programs.decode, slots, params, temperature, *options)
        return results(programs.admit, slots, prompt_cache, engine.queue, number, stopped)

    # Where conversations go on, the cache has all columns from the start.
    length = spec.max_length
    longest = length if spec.holds else spec.generation.max_prompt_length
    least = kv_cache.columns_in_use(longest, length)
    sizes = [columns for columns in kv_cache.column_sizes(length) if columns >= least]
    slots_of = [partial(decoded, columns) for columns in sizes]
    further = [partial(prefilled, prompt_cache, width) for width in engine.widths[1:]]
    every = compiled_together(slots_of + further)[: len(sizes)]

    # What gives slots another number of columns.
    for slots in every:
        for kind, kv in dict(zip(spec.cfg.kinds, slots.cache)).items():
            for columns in sizes:
                wanted = kv_cache.num_columns(spec.cfg, kind, columns)
                if wanted != kv.k.shape[2]:
                    results(programs.resize_layer, kv, wanted)
    return every[sizes.index(length)]


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


def compile_append(engine: Engine, slots: Slots) -> Slots:
    """Compiles the program that appends tokens to slots. Returns the shapes of the slots after
    it."""
    for width in APPEND_WIDTHS:
        call = append_calls({0: ([0] * width, 1)}, engine.num_slots)[0]
        slots = results(engine.programs.append, slots, engine.per_layer_params, *call)
    return slots


def compile_rewind(engine: Engine, slots: Slots) -> None:
    """Compiles the program that takes back tokens behind a stop text."""
    programs = engine.programs
    tokens = jax.ShapeDtypeStruct((engine.chunk, engine.num_slots), jnp.int32)
    num_kept = jax.ShapeDtypeStruct((engine.num_slots,), jnp.int32)
    results(programs.rewind, slots, results(programs.save, slots), tokens, num_kept)
