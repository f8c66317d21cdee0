"""The programs of a run, lowered from shapes alone and compiled for devices that need not be there.

They are the programs that a run compiles, from the same functions: nothing here rebuilds a model or
an update. Nothing runs, either: on a mesh of devices that can only be compiled for, the first
operation would fail.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.algorithms.algorithm import stream_names
from tunix_lite.learner.optim import make_optimizer, opt_state_shapes
from tunix_lite.learner.policy import STORED, Policy, make_policy, scoring_program
from tunix_lite.learner.step import make_train_step
from tunix_lite.models import attention, decoder, weights
from tunix_lite.models.lora import acting_params, adapter_weights
from tunix_lite.models.quantize import STORAGE, stored_table
from tunix_lite.parallel.collectives import CollectiveTotal, collectives, grouped
from tunix_lite.parallel.mesh import gathered_sharding, sharding, use_rules
from tunix_lite.planning.resolved import Case, shelf
from tunix_lite.rollout.programs import PromptCache, SamplerSpec, Slots, at_home, make_programs
from tunix_lite.types import RowBatch, TrainState

PROGRAMS = ("update", "scoring", "prefill", "decode")
# which tokens end a completion changes no program's size
NO_END, NO_PAD = (1,), 0
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of one program. Bytes are those of one device."""

    name: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int  # of the results, what lies where arguments lay
    temp_bytes: int
    code_bytes: int
    collectives: tuple[CollectiveTotal, ...] = ()
    compile_seconds: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """All that is on the device while it runs, but for what others have there."""
        return self.argument_bytes + self.added_bytes

    @property
    def added_bytes(self) -> int:
        """What it takes beside its arguments: temporaries, and results that do not lie in their
        place."""
        return self.temp_bytes + self.output_bytes - self.alias_bytes + self.code_bytes


class DoesNotFit(ValueError):
    """The compiler itself says so: a TPU's knows how much memory there is."""

    def __init__(self, name: str, needed_bytes: int | None, said: str):
        super().__init__(said)
        self.name, self.needed_bytes, self.said = name, needed_bytes, said


def compiled(
    name: str, compile_it: Callable, mesh_shape: dict[str, int], code_on_device: bool = False
) -> Compiled:
    """What the program that compile_it() gives says of itself. Raises DoesNotFit."""
    began = time.perf_counter()
    try:
        done = compile_it()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise DoesNotFit(name, *_needed(str(error))) from error
    return of_executable(name, done, mesh_shape, time.perf_counter() - began, code_on_device)


def of_executable(
    name: str, done, mesh_shape: dict[str, int], seconds: float = 0.0, code_on_device=False
) -> Compiled:
    """Of what `lowered.compile()` gave. code_on_device: whether its code takes of the same memory,
    as on TPUs."""
    sizes = done.memory_analysis()
    found = (
        grouped(collectives(done.as_text(), mesh_shape))
        if np.prod(list(mesh_shape.values())) > 1
        else []
    )
    return Compiled(
        name,
        sizes.argument_size_in_bytes,
        sizes.output_size_in_bytes,
        sizes.alias_size_in_bytes,
        sizes.temp_size_in_bytes,
        sizes.generated_code_size_in_bytes if code_on_device else 0,
        tuple(found),
        seconds,
    )


def _needed(message: str) -> tuple[int | None, str]:
    """The bytes that would have been needed, and the sentence that says so."""
    size = r"\(?([\d.]+)([KMGT])i?B?\)?"
    match = re.search(
        rf"(?:[Uu]sed|HLO temporaries) {size} (?:of|exceeds available HBM) {size}", message
    )
    if match is None:
        return None, message.strip().splitlines()[0][:200]
    number, unit, of, of_unit = match.groups()
    return int(float(number) * UNITS[unit]), f"{number} {unit}iB of {of} {of_unit}iB"


# ---- shapes, placed on the current mesh


@dataclass(frozen=True)
class Shapes:
    """What a run holds between its programs, as ShapeDtypeStructs with places."""

    state: TrainState
    frozen: dict | None
    reference: dict | None  # what the KL term is taken to; under LoRA the frozen base itself

    def acting(self, case: Case):
        return acting_params(self.frozen, self.state.params, case.lora)


def abstract(case: Case) -> Shapes:
    """The state of a run, its frozen base and its reference, on the current mesh."""
    table, storage = decoder.weights(case.cfg), STORED[case.run.training.mixed_precision]
    if case.lora is None:
        frozen, params = None, weights.shapes(stored_table(table, storage))
    else:
        frozen = weights.shapes(stored_table(table, case.lora.base))
        params = weights.shapes(adapter_weights(table, case.lora), STORAGE[storage])
    reference = None
    if case.run.algorithm.needs_reference:
        reference = _copy_to_score(params, case) if frozen is None else frozen
        if case.copies_adapters:
            reference = acting_params(frozen, params, case.lora)
    optimizer = make_optimizer(case.run.optimizer, case.run.training.max_steps)
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding((), ()))
    return Shapes(TrainState(step, params, opt_state_shapes(optimizer, params)), frozen, reference)


def _copy_to_score(params, case: Case):
    copied = jax.eval_shape(partial(decoder.copy_to_score, cfg=case.cfg, dtype=case.dtype), params)
    return placed(copied, jax.tree.map(lambda x: x.sharding, params))


def placed(shapes, places):
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places
    )


def batch_shapes(case: Case) -> RowBatch:
    """The batch in rows of an update; of packed rows as many, and as wide, as could ever come."""
    algorithm = case.run.algorithm
    values = _values_before_scoring(case)
    if algorithm.needs_reference:
        values.append("ref_logprobs")
    streams = stream_names(algorithm)
    return case.rows.shapes(case.batch.sequences, sum(case.lengths), values, streams)


def scored_batch_shapes(case: Case) -> RowBatch:
    """The batch in rows that the scorer of the reference reads."""
    values = _values_before_scoring(case)
    return case.rows.shapes(case.batch.sequences, sum(case.lengths), values)


def _values_before_scoring(case: Case) -> list[str]:
    """The fields of float32 that a batch has when it is scored."""
    if case.run.algorithm.needs_demonstrations:
        return ["loss_weight"]
    return ["loss_weight", "advantages", "old_logprobs"]


# ---- the programs


def lowered(case: Case, shapes: Shapes) -> dict[str, Callable]:
    """By name, what lowers each program of the run: () -> a lowered program. The mesh of `case` is
    the current one."""
    found = {"update": partial(_update, case, shapes)}
    if case.run.algorithm.needs_reference:
        score = scoring_program(policy_of(case).scores, case.rows)
        found["scoring"] = lambda: score.lower(shapes.reference, scored_batch_shapes(case))
    if case.samples:
        found |= {
            "prefill": partial(_prefill, case, shapes),
            "decode": partial(_decode, case, shapes),
        }
    return found


def policy_of(case: Case) -> Policy:
    """What can be asked of the run's policy without weights: to score."""
    run = case.run
    scoring = {"remat": run.training.remat, "attend": attention.IMPLEMENTATIONS[case.attention]}
    scoring["reduce_dtype"] = jnp.dtype(run.training.reduce_dtype)
    scoring["tp_reduce_dtype"] = jnp.dtype(run.training.tp_reduce_dtype)
    return make_policy(
        case.cfg, None, run.learning_temperature, case.dtype, None, case.rows, **scoring
    )


def train_step_of(case: Case) -> Callable:
    """The run's update, as step.make_train_step makes it."""
    run = case.run
    optimizer, every = (
        make_optimizer(run.optimizer, run.training.max_steps),
        run.training.sync_gradients_every,
    )
    parts = case.rows.num_parts
    return make_train_step(
        policy_of(case), run.algorithm, optimizer, parts, case.lora, run.seed, every
    )


def update_arguments(case: Case, shapes: Shapes) -> tuple:
    return shapes.state, shapes.frozen, batch_shapes(case)


def _update(case: Case, shapes: Shapes):
    arguments = update_arguments(case, shapes)
    return train_step_of(case).program(*arguments).lower(*arguments)


def _sampling(case: Case, shapes: Shapes):
    """The programs of the rollout, and the weights as they want them."""
    run = case.run
    chunk = min(run.rollout.chunk, run.generation.max_new_tokens)
    int8 = run.rollout.cache == "int8"
    tp_reduce_dtype = jnp.dtype(run.training.tp_reduce_dtype)
    spec = SamplerSpec(
        case.cfg, run.generation, NO_END, NO_PAD, case.dtype, chunk, int8, tp_reduce_dtype
    )
    programs = make_programs(spec)
    acting = shapes.acting(case)
    places = decoder.per_layer_shardings(jax.tree.map(lambda x: x.sharding, acting), case.cfg)
    places = jax.tree.map(gathered_sharding, places) if case.weights == "gathered" else places
    per_layer_params = jax.eval_shape(
        partial(decoder.per_layer_params, cfg=case.cfg, dtype=case.dtype), acting
    )
    return programs, placed(per_layer_params, places)


def _prefill(case: Case, shapes: Shapes):
    programs, per_layer_params = _sampling(case, shapes)
    block, width, room = shelf(case)
    waiting = _at_home(jax.eval_shape(lambda: programs.make_prompt_cache(room)), "prompts")
    tokens, lengths = (
        jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((block, width), (block,))
    )
    return programs.prefill.lower(
        waiting, per_layer_params, tokens, lengths, jax.ShapeDtypeStruct((), jnp.int32)
    )


def _decode(case: Case, shapes: Shapes):
    programs, per_layer_params = _sampling(case, shapes)
    slots = _at_home(jax.eval_shape(lambda: programs.make_slots(case.slots)), "batch")
    return programs.decode.lower(slots, per_layer_params, jax.ShapeDtypeStruct((), jnp.float32))


def _at_home(shapes: Slots | PromptCache, rows_axis: str) -> Slots | PromptCache:
    """The shapes, placed where the programs of the rollout place the arrays."""

    def place(x: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(axes, x.shape))

    with use_rules("rollout"):
        return at_home(shapes, rows_axis, place)
