"""The programs of a run, lowered from shapes alone and compiled for devices that need not be there.

They are the programs that a run compiles, from the same functions: nothing here rebuilds a model or
an update. Nothing runs, either: on a mesh of devices that can only be compiled for, the first
operation would fail.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tunix_lite.algorithms.algorithm import Generate, batch_fields, stream_names
from tunix_lite.learner.comparison import FrozenComparer, description_program, with_divergence
from tunix_lite.learner.optim import make_optimizer, opt_state_shapes
from tunix_lite.learner.policy import STORED, Policy, make_policy
from tunix_lite.learner.rows import row_shapes
from tunix_lite.learner.scoring import on_every_device, scoring_program
from tunix_lite.learner.step import TrainStep
from tunix_lite.models import attention, decoder, weights
from tunix_lite.models.lora import acting_params, adapter_weights
from tunix_lite.models.quantize import STORAGE, stored_table
from tunix_lite.parallel.collectives import CollectiveTotal, collectives, grouped
from tunix_lite.parallel.compiler_options import update_options
from tunix_lite.parallel.compiling import compiled_once
from tunix_lite.parallel.mesh import gathered_sharding, make_mesh, set_rules, sharding, use_rules
from tunix_lite.planning.kernels import Kernel, kernels
from tunix_lite.planning.resolved import ResolvedRun
from tunix_lite.planning.sizes import tables
from tunix_lite.rollout.conversations import chunk_of_turns
from tunix_lite.rollout.extend import EXTEND_WIDTHS, extend_calls, make_turn_programs
from tunix_lite.rollout.programs import (
    Programs,
    PromptCache,
    SamplerSpec,
    Slots,
    at_home,
    make_programs,
)
from tunix_lite.rollout.rewind import longest_chunk
from tunix_lite.types import Params, RowBatch, TrainState

PROGRAMS = ("update", "scoring", "prefill", "decode")
# which tokens end a completion, or pad one, changes no program's size
NO_END = (1,)
NO_PAD = 0
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of one program. Bytes are those of one device.

    Example: compiled("update", compile_it, {"fsdp": 4, "tp": 1}).peak_bytes.
    """

    name: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int  # of the results, what lies where arguments lay
    temp_bytes: int
    code_bytes: int
    collectives: tuple[CollectiveTotal, ...] = ()
    compile_seconds: float = 0.0
    # what a device starts in one call; planning.roofline predicts the time of them
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
        super().__init__(message)
        self.name = name
        self.needed_bytes = needed_bytes
        self.message = message


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
    name: str,
    done: jax.stages.Compiled,
    mesh_shape: dict[str, int],
    seconds: float = 0.0,
    code_on_device: bool = False,
) -> Compiled:
    """Of what `lowered.compile()` gave. code_on_device: whether its code takes of the same memory,
    as on TPUs."""
    sizes = done.memory_analysis()
    text = done.as_text()
    is_divided = np.prod(list(mesh_shape.values())) > 1
    found = grouped(collectives(text, mesh_shape)) if is_divided else []
    return Compiled(
        name,
        sizes.argument_size_in_bytes,
        sizes.output_size_in_bytes,
        sizes.alias_size_in_bytes,
        sizes.temp_size_in_bytes,
        sizes.generated_code_size_in_bytes if code_on_device else 0,
        tuple(found),
        seconds,
        tuple(kernels(text, mesh_shape)),
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
    """What a run holds between its programs, as ShapeDtypeStructs with shardings.

    Example: with mesh_of_run(resolved, devices): abstract(resolved).state.params.
    """

    state: TrainState
    # the base under adapters; None: all weights train
    frozen: Params | None
    # what the KL term is taken to, under LoRA the frozen base itself; None: no KL term
    reference: Params | None
    # by name, those of the algorithm that score
    frozen_models: dict[str, Params]

    def acting(self, resolved: ResolvedRun) -> Params:
        """What the policy samples with."""
        return acting_params(self.frozen, self.state.params, resolved.lora)


@contextlib.contextmanager
def mesh_of_run(resolved: ResolvedRun, devices: list) -> Iterator[None]:
    """Inside, the run's mesh over these devices is the current one. The run's sharding rules become
    those of the process, and stay so."""
    set_rules(resolved.run.sharding)
    mesh_shape = resolved.mesh_shape
    with jax.set_mesh(make_mesh((tuple(mesh_shape.values()), tuple(mesh_shape)), devices)):
        yield


def abstract(resolved: ResolvedRun) -> Shapes:
    """The state of a run, its frozen base and its reference, on the current mesh."""
    # What is stored of the weights.
    table = decoder.weights(resolved.cfg)
    storage = STORED[resolved.run.training.mixed_precision]
    if resolved.lora is None:
        frozen = None
        params = weights.shapes(stored_table(table, storage))
    else:
        frozen = weights.shapes(stored_table(table, resolved.lora.base))
        params = weights.shapes(adapter_weights(table, resolved.lora), STORAGE[storage])

    # The reference: a copy in the type of the computation, or the base.
    reference = None
    if resolved.run.algorithm.needs_reference:
        reference = _copy_to_score(params, resolved) if frozen is None else frozen
        if resolved.copies_adapters:
            reference = acting_params(frozen, params, resolved.lora)

    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding((), ()))
    opt_state = opt_state_shapes(optimizer_of(resolved), params)
    frozen_models = {
        name: weights.shapes(stored_table(decoder.weights(model.cfg), model.storage))
        for name, model in resolved.frozen_models.items()
    }
    return Shapes(TrainState(step, params, opt_state), frozen, reference, frozen_models)


def _copy_to_score(params: Params, resolved: ResolvedRun) -> Params:
    copy = partial(decoder.copy_to_score, cfg=resolved.cfg, dtype=resolved.dtype)
    return placed(jax.eval_shape(copy, params), jax.tree.map(lambda x: x.sharding, params))


def placed(shapes: Any, shardings: Any) -> Any:
    """A tree of shapes with the shardings of another tree like it."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def batch_shapes(resolved: ResolvedRun) -> RowBatch:
    """The batch in rows of an update; of packed rows as many, and as wide, as could ever come."""
    algorithm = resolved.run.algorithm
    values = ["loss_weight", *batch_fields(algorithm)]
    rows = _row_shapes(resolved, values, stream_names(algorithm))
    # what comparing adds to it
    teacher = resolved.teacher
    if teacher is None:
        return rows
    theirs = resolved.frozen_models[teacher.comparison.model]
    table = stored_table(decoder.weights(theirs.cfg), theirs.storage)
    return teacher.shapes(rows, decoder.output_table(table, theirs.cfg), resolved.dtype)


def scored_batch_shapes(resolved: ResolvedRun) -> RowBatch:
    """The batch in rows that scorers read: of its values only the weights of tokens."""
    return _row_shapes(resolved, ["loss_weight"])


def _row_shapes(resolved: ResolvedRun, values: list[str], *streams: Any) -> RowBatch:
    longest = sum(resolved.lengths)
    return row_shapes(resolved.rows, resolved.batch.sequences, longest, values, *streams)


# ---- the policy and the update of a run, in a plan and when it trains


def optimizer_of(resolved: ResolvedRun) -> optax.GradientTransformation:
    """The run's optimizer."""
    max_steps = resolved.run.training.max_steps
    return make_optimizer(resolved.optimizer, max_steps, tables(resolved).trained)


def policy_of(
    resolved: ResolvedRun,
    generate: Generate | None = None,
    reference: Params | None = None,
    frozen_models: dict[str, Params] | None = None,
) -> Policy:
    """The run's policy. generate: how it samples, None where it only scores. reference: the frozen
    params of the KL term, None where there is none or it is not loaded. frozen_models: those of the
    algorithm, which become scorers by their names; None where they are not loaded."""
    training = resolved.run.training
    policy = make_policy(
        resolved.cfg,
        generate,
        resolved.run.learning_temperature,
        resolved.dtype,
        reference,
        resolved.rows,
        remat=training.remat,
        attend=attention.IMPLEMENTATIONS[resolved.attention],
        reduce_dtype=jnp.dtype(training.reduce_dtype),
        tp_reduce_dtype=jnp.dtype(training.tp_reduce_dtype),
        scan_layers=training.scan_layers,
    )
    others = {
        name: policy_of(resolved.as_scorer(name), reference=params).scorers["reference"]
        for name, params in (frozen_models or {}).items()
    }
    policy = replace(policy, scorers={**policy.scorers, **others})
    return policy if resolved.teacher is None else _comparing(policy, resolved, frozen_models)


def _comparing(
    policy: Policy, resolved: ResolvedRun, frozen_models: dict[str, Params] | None
) -> Policy:
    """The policy that is compared with its teacher: by `scores`, and by `compare` if the teacher is
    loaded."""
    # the update needs no more than what travels with the batch
    teacher = resolved.teacher
    name = teacher.comparison.model
    policy = replace(policy, scores=with_divergence(policy.scores, teacher))
    if frozen_models is None:
        return policy
    # the table stays where it is, on the mesh
    params = frozen_models[name]
    table = None
    if not teacher.comparison.top_k:
        cfg = resolved.frozen_models[name].cfg
        table = teacher.vocabulary_of(decoder.output_table(params, cfg))
    describe = _description(resolved, name)
    comparer = FrozenComparer(
        params, table, policy.scorers[name].rows, compiled_once(describe.lower)
    )
    return replace(policy, compare=comparer)


def _description(resolved: ResolvedRun, name: str) -> jax.stages.Wrapped:
    """What is kept of the teacher's distributions, of a batch in rows."""
    theirs = resolved.as_scorer(name)
    describe = description_program(policy_of(theirs).scores, resolved.teacher)
    return on_every_device(describe, theirs.rows)


def train_step_of(resolved: ResolvedRun, policy: Policy | None = None) -> TrainStep:
    """The run's update; policy: None means one that only scores."""
    training = resolved.run.training
    return TrainStep(
        policy_of(resolved) if policy is None else policy,
        resolved.run.algorithm,
        optimizer_of(resolved),
        resolved.rows.num_parts,
        resolved.lora,
        resolved.run.seed,
        training.sync_gradients_every,
        update_options(training.scan_layers),
    )


# ---- the programs


def lowered(resolved: ResolvedRun, shapes: Shapes) -> dict[str, Callable[[], Any]]:
    """By name, what lowers each program of the run: () -> a lowered program. The mesh of the run is
    the current one."""
    found = {"update": partial(_update, resolved, shapes)}
    if resolved.scores:
        score = scoring_program(policy_of(resolved).scores, resolved.rows)
        under = shapes.acting(resolved) if shapes.reference is None else shapes.reference
        found["scoring"] = lambda: score.lower(under, scored_batch_shapes(resolved))
    for name, params in shapes.frozen_models.items():
        found[name] = partial(_frozen_scoring, resolved, name, params)
    if resolved.has_rollouts:
        found["prefill"] = partial(_prefill, resolved, shapes)
        found["decode"] = partial(_decode, resolved, shapes)
    if resolved.carries:
        found["reread"] = partial(_extend, resolved, shapes)
    if resolved.converses:
        found["extend"] = partial(_extend, resolved, shapes)
    if resolved.may_park:
        found["read_slot"] = partial(_read_slot, resolved, shapes)
        found["write_slot"] = partial(_write_slot, resolved, shapes)
    if resolved.converses and resolved.run.generation.stop:
        found["save"] = partial(_save, resolved, shapes)
        found["rewind"] = partial(_rewind, resolved, shapes)
    return found


def _frozen_scoring(resolved: ResolvedRun, name: str, params: Params) -> Any:
    if resolved.compares(name):
        shapes = scored_batch_shapes(resolved.as_scorer(name))
        return _description(resolved, name).lower(params, shapes)
    theirs = resolved.as_scorer(name)
    score = scoring_program(policy_of(theirs).scores, theirs.rows)
    return score.lower(params, scored_batch_shapes(theirs))


def update_arguments(
    resolved: ResolvedRun, shapes: Shapes
) -> tuple[TrainState, Params | None, RowBatch]:
    """(state, frozen, batch in rows) of the update, as shapes."""
    return shapes.state, shapes.frozen, batch_shapes(resolved)


def _update(resolved: ResolvedRun, shapes: Shapes) -> Any:
    arguments = update_arguments(resolved, shapes)
    return train_step_of(resolved).program(*arguments).lower(*arguments)


def _sampling(resolved: ResolvedRun, shapes: Shapes) -> tuple[Programs, Any]:
    """The programs of the rollout, and the weights by layer, placed as they read them."""
    run = resolved.run
    acting = shapes.acting(resolved)
    mesh = jax.tree.leaves(acting)[0].sharding.mesh
    spec = SamplerSpec(
        resolved.cfg,
        run.generation,
        NO_END,
        NO_PAD,
        resolved.dtype,
        resolved.sampling_memory.chunk,
        run.rollout.cache == "int8",
        jnp.dtype(run.training.tp_reduce_dtype),
        holds=resolved.converses,
        on_cpu=mesh.devices.flat[0].platform == "cpu",
        **run.rollout.kernels,
    )
    join_qkv = decoder.joins_qkv(acting, resolved.dtype, mesh)
    by_layer = partial(
        decoder.per_layer_params, cfg=resolved.cfg, dtype=resolved.dtype, join_qkv=join_qkv
    )
    shardings = jax.tree.map(lambda x: x.sharding, acting)
    shardings = decoder.per_layer_shardings(shardings, resolved.cfg, join_qkv)
    if resolved.sampling_weights == "gathered":
        shardings = jax.tree.map(gathered_sharding, shardings)
    if resolved.converses and run.generation.stop:
        spec = replace(spec, chunk=longest_chunk(spec))
    if resolved.converses:
        spec = replace(spec, chunk=chunk_of_turns(spec.chunk, run.conversation.max_turn_tokens))
    return make_programs(spec), placed(jax.eval_shape(by_layer, acting), shardings)


def _prefill(resolved: ResolvedRun, shapes: Shapes) -> Any:
    programs, layered = _sampling(resolved, shapes)
    block, width, num_prompts = resolved.sampling_memory.prompt_cache
    waiting = jax.eval_shape(lambda: programs.make_prompt_cache(num_prompts))
    return programs.prefill.lower(
        _at_home(waiting, "prompts"),
        layered,
        jax.ShapeDtypeStruct((block, width), jnp.int32),
        jax.ShapeDtypeStruct((block,), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )


def _decode(resolved: ResolvedRun, shapes: Shapes) -> Any:
    programs, layered = _sampling(resolved, shapes)
    temperature = jax.ShapeDtypeStruct((), jnp.float32)
    return programs.decode.lower(_slots_of(resolved, programs), layered, temperature)


def _slots_of(resolved: ResolvedRun, programs: Programs) -> Slots:
    return _at_home(jax.eval_shape(lambda: programs.make_slots(resolved.slots)), "batch")


def _extend(resolved: ResolvedRun, shapes: Shapes) -> Any:
    """What appends an environment's answer to slots, or reads completions again that are carried
    over an update, for the widest piece."""
    programs, layered = _sampling(resolved, shapes)
    longest = [0] * EXTEND_WIDTHS[-1]
    call = extend_calls({0: (longest, 1)}, resolved.slots)[0]
    arrays = (call.rows, call.tokens, call.counts, call.limits)
    extend = make_turn_programs(programs).extend
    return extend.lower(_slots_of(resolved, programs), layered, *arrays)


def _read_slot(resolved: ResolvedRun, shapes: Shapes) -> Any:
    """What copies the slot of a conversation that is parked."""
    programs, _ = _sampling(resolved, shapes)
    row = jax.ShapeDtypeStruct((), jnp.int32)
    return make_turn_programs(programs).read_slot.lower(_slots_of(resolved, programs), row)


def _write_slot(resolved: ResolvedRun, shapes: Shapes) -> Any:
    """What puts a parked conversation into a slot."""
    programs, _ = _sampling(resolved, shapes)
    slots = _slots_of(resolved, programs)
    row = jax.ShapeDtypeStruct((), jnp.int32)
    turn_programs = make_turn_programs(programs)
    parked = jax.eval_shape(turn_programs.read_slot, slots, row)
    # from the host: placed by the program itself
    parked = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), parked)
    return turn_programs.write_slot.lower(slots, parked, row)


def _save(resolved: ResolvedRun, shapes: Shapes) -> Any:
    """What keeps the columns that a chunk may overwrite, so that a stop text can take it back."""
    programs, _ = _sampling(resolved, shapes)
    return make_turn_programs(programs).save.lower(_slots_of(resolved, programs))


def _rewind(resolved: ResolvedRun, shapes: Shapes) -> Any:
    """What takes back what was drawn behind a stop text."""
    programs, _ = _sampling(resolved, shapes)
    slots = _slots_of(resolved, programs)
    turn_programs = make_turn_programs(programs)
    tokens = jax.ShapeDtypeStruct((programs.spec.chunk, resolved.slots), jnp.int32)
    kept = jax.ShapeDtypeStruct((resolved.slots,), jnp.int32)
    saved = turn_programs.save.lower(slots).out_info
    saved = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), saved)
    return turn_programs.rewind.lower(slots, saved, tokens, kept)


def _at_home(shapes: Slots | PromptCache, rows_axis: str) -> Slots | PromptCache:
    """The shapes, placed where the programs of the rollout place the arrays."""

    def place(x: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(axes, x.shape))

    with use_rules("rollout"):
        return at_home(shapes, rows_axis, place)
