"""The programs of a run, lowered from shapes alone by the functions that a run uses, and compiled
for devices that need not be there. Nothing runs: on such devices the first operation would fail."""

import functools
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from tunix_lite.basics.types import Params, policy_part
from tunix_lite.learner.critic import token_values
from tunix_lite.learner.policy import on_every_device, scoring_program
from tunix_lite.models.layer_by_layer import are_for_cpu, per_layer_shapes
from tunix_lite.parallel.collectives import CollectiveTotal, collectives, grouped
from tunix_lite.parallel.mesh import part_of_mesh, sharding, use_rules
from tunix_lite.planning.kernels import Kernel, kernels
from tunix_lite.rollout.engine import APPEND_WIDTHS, append_calls
from tunix_lite.rollout.generate import make_sampler
from tunix_lite.rollout.programs import (
    Programs,
    PromptCache,
    Slots,
    at_home,
)
from tunix_lite.settings.resolved_parts import (
    Shapes,
    batch_shapes,
    description_of,
    policy_of,
    scored_batch_shapes,
    train_step_of,
)
from tunix_lite.settings.resolved_run import ResolvedRun

# which tokens end a completion, or pad one, changes no program's size
NO_END = (1,)
_NO_PAD = 0
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of one program. Bytes are those of one device.
    Example: compiled("update", compile_it, {"fsdp": 4, "tp": 1}).peak_bytes."""

    name: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int  # of the results, what lies where arguments lay
    temp_bytes: int
    code_bytes: int
    collectives: tuple[CollectiveTotal, ...] = ()
    compile_seconds: float = 0.0
    # what a device starts in one call; planning.kernels predicts the time of them
    kernels: tuple[Kernel, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """All that is on the device while it runs, but for what others have there."""
        return self.argument_bytes + self.added_bytes

    @property
    def added_bytes(self) -> int:
        """What it takes beside its arguments: temporaries, and results that do not lie in their
        place."""
        return self.temp_bytes + self.results_beside_bytes + self.code_bytes

    @property
    def results_beside_bytes(self) -> int:
        """Results that do not lie where arguments lay."""
        return self.output_bytes - self.alias_bytes


class DoesNotFit(ValueError):
    """The compiler itself says so: a TPU's knows how much memory there is."""

    def __init__(self, name: str, needed_bytes: int | None, message: str):
        super().__init__(f"{name}: {message}")
        self.name = name
        self.needed_bytes = needed_bytes


def compiled(
    name: str,
    compile_it: Callable[[], jax.stages.Compiled],
    mesh_shape: dict[str, int],
    code_on_device: bool = False,
) -> Compiled:
    """Reads memory and collectives of a compiled program. code_on_device: whether its code takes of
    the same memory, as on TPUs. Raises DoesNotFit."""
    began = time.perf_counter()
    try:
        done = compile_it()
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        if "RESOURCE_EXHAUSTED" not in message:
            raise
        # the bytes that would have been needed, and the sentence that says so
        size = r"\(?([\d.]+)([KMGT])i?B?\)?"
        match = re.search(
            rf"(?:[Uu]sed|HLO temporaries) {size} (?:of|exceeds available HBM) {size}", message
        )
        if match is None:
            first_line = message.strip().splitlines()[0]
            raise DoesNotFit(name, None, first_line[:200]) from error
        number, unit, of, of_unit = match.groups()
        needed = int(float(number) * _UNITS[unit])
        text = f"{number} {unit}iB of {of} {of_unit}iB"
        raise DoesNotFit(name, needed, text) from error
    seconds = time.perf_counter() - began
    sizes = done.memory_analysis()
    text = done.as_text()
    # one device sends nothing
    is_divided = math.prod(mesh_shape.values()) > 1
    return Compiled(
        name,
        sizes.argument_size_in_bytes,
        sizes.output_size_in_bytes,
        sizes.alias_size_in_bytes,
        sizes.temp_size_in_bytes,
        sizes.generated_code_size_in_bytes if code_on_device else 0,
        tuple(grouped(collectives(text, mesh_shape))) if is_divided else (),
        seconds,
        tuple(kernels(text, mesh_shape)),
    )


# (): a lowered program
Lower = Callable[[], jax.stages.Lowered]


def lowered(resolved: ResolvedRun, shapes: Shapes) -> dict[str, Lower]:
    """By name, what lowers each program of the run. The mesh of the run is the current one."""

    def update() -> jax.stages.Lowered:
        arguments = (shapes.state, shapes.frozen, batch_shapes(resolved))
        return train_step_of(resolved).program(*arguments).lower(*arguments)

    def score(of: ResolvedRun, params: Params) -> jax.stages.Lowered:
        program = scoring_program(policy_of(of).scores, of.rows)
        return program.lower(params, scored_batch_shapes(of))

    def frozen_model(name: str, params: Params) -> jax.stages.Lowered:
        theirs = resolved.as_scorer(name)
        if not resolved.compares(name):
            with part_of_mesh(theirs.mesh_shape):
                return score(theirs, params)
        return description_of(resolved, name).lower(params, scored_batch_shapes(theirs))

    programs: dict[str, Lower] = {"update": update}
    if resolved.scores:
        acting = policy_part(shapes.acting(resolved))
        under = acting if shapes.reference is None else shapes.reference
        programs["scoring"] = partial(score, resolved, under)
    if resolved.needs.critic is not None:
        of_rows = partial(token_values, policy_of(resolved).scores, resolved.needs.critic)
        values = on_every_device(of_rows, resolved.rows)
        of_both = (shapes.acting(resolved), scored_batch_shapes(resolved))
        programs["values"] = partial(values.lower, *of_both)
    for name, params in shapes.frozen_models.items():
        programs[name] = partial(frozen_model, name, params)
    if not resolved.has_rollouts:
        return programs
    row = _of_shape()

    @functools.cache
    def made() -> tuple[Programs, Params]:
        """The programs of the rollout, and the weights by layer, placed as they read them."""
        run = resolved.run
        how = (resolved.cfg, run.generation, NO_END, _NO_PAD, resolved.dtype, run.rollout)
        sums = jnp.dtype(run.training.tp_reduce_dtype)
        sampler = make_sampler(*how, tp_reduce_dtype=sums)
        if resolved.converses:
            sampler = sampler.of_turns(run.conversation.max_turn_tokens)
        acting = policy_part(shapes.acting(resolved))
        mesh = jax.tree.leaves(acting)[0].sharding.mesh
        gather = resolved.sampling_weights == "gathered"
        on_cpu = are_for_cpu(acting, resolved.dtype, mesh, gather)
        shapes_of = (acting, resolved.cfg, resolved.dtype, gather, on_cpu)
        return sampler.programs, per_layer_shapes(*shapes_of)

    def slots() -> Slots:
        return _at_home(jax.eval_shape(lambda: made()[0].make_slots(resolved.slots)), "batch")

    def prefill() -> jax.stages.Lowered:
        programs, layered = made()
        block, width, num_prompts = resolved.sampling_memory.prompt_cache
        waiting = jax.eval_shape(lambda: programs.make_prompt_cache(num_prompts))
        routes = programs.spec.no_routes(block, width)
        inputs = (layered, _of_shape(block, width), _of_shape(block), row, routes)
        return programs.prefill.lower(_at_home(waiting, "prompts"), *inputs)

    def decode() -> jax.stages.Lowered:
        programs, layered = made()
        temperature = jax.ShapeDtypeStruct((), jnp.float32)
        # with them decoding sorts the vocabulary, which takes memory of its own
        has_cutoffs = programs.spec.cuts_off(programs.spec.generation.temperature)
        return programs.decode.lower(slots(), layered, temperature, has_cutoffs)

    def append() -> jax.stages.Lowered:
        # The widest piece of an answer, or of a completion that is read again after an update.
        longest = [0] * APPEND_WIDTHS[-1]
        call = append_calls({0: (longest, 1)}, resolved.slots)[0]
        programs, layered = made()
        routes = programs.spec.no_routes(*call[1].shape)
        return programs.append.lower(slots(), layered, *call, routes)

    def rewind() -> jax.stages.Lowered:
        return made()[0].rewind.lower(slots(), _of_shape(resolved.slots))

    # The programs of the rollout.
    programs |= {"prefill": prefill, "decode": decode}
    if resolved.carries or resolved.converses:
        programs["append"] = append
    if resolved.converses and resolved.run.generation.stop:
        programs["rewind"] = rewind
    return programs


def _of_shape(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _at_home(shapes: Slots | PromptCache, rows_axis: str) -> Slots | PromptCache:
    """The shapes, placed where the programs of the rollout place the arrays."""

    def place(x: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(axes, x.shape))

    with use_rules("rollout"):
        return at_home(shapes, rows_axis, place)
