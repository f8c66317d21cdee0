"""What to change in a run that does not fit: overrides, each tried before it is named."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tunix_lite.config import RunConfig
from tunix_lite.errors import ConfigError
from tunix_lite.parallel.mesh import as_text
from tunix_lite.planning.hardware import slice_shapes
from tunix_lite.planning.machine import Machine, find_machine
from tunix_lite.planning.plan import ESTIMATE_MARGIN, Plan, estimated
from tunix_lite.resolved.batch_size import lengths_of, plan_batch
from tunix_lite.resolved.run import find_model, micro_batches_to_try, with_micro_batch

# of GPUs, that are tried
MOST_NODES = 64


@dataclass(frozen=True)
class Trial:
    """A run with some changes: their overrides, and the run and the machine that they make.

    Example: `Trial(("training.remat=block",), run, machine, {"fsdp": 4, "tp": 1})`.
    """

    overrides: tuple[str, ...]
    run: RunConfig
    machine: Machine
    mesh_shape: dict[str, int]


# (trial) -> the same with one setting changed, a little first and then further.
Change = Callable[[Trial], Iterator[Trial]]


def advice(
    plan: Plan, refine: Callable[[Plan], Plan] = lambda plan: plan
) -> tuple[tuple[str, ...], Plan]:
    """The first change with which the run fits, and the plan of it; if there is none, the least
    that it gets down to.

    Single changes first, the cheapest first; then several, as few as do; then more devices. An
    estimate must leave ESTIMATE_MARGIN of the memory free. refine(estimate that fits) -> a plan
    that knows more, by compiling it.
    """
    start = _start(plan)
    for trial in _trials(start):
        changed = _estimate(trial)
        if changed is not None and changed.fits:
            changed = refine(changed)
            if changed.fits and not changed.is_near_the_limit:
                return trial.overrides, changed

    # Nothing fits: what needs the least.
    least = _few_changes(start)
    changed = _estimate(least)
    return least.overrides, refine(changed) if changed.fits else changed


def _start(plan: Plan) -> Trial:
    return Trial((), plan.resolved.run, plan.machine, plan.resolved.mesh_shape)


def savings(plan: Plan) -> list[tuple[tuple[str, ...], int]]:
    """Single changes that take less memory, by an estimate: (overrides, bytes less on a device).

    The cheapest first; of each only its first step. A larger mesh is not among them.
    """
    start = Trial((), plan.resolved.run, plan.machine, plan.resolved.mesh_shape)
    now = _peak(start)
    found = []
    for make in CHANGES:
        trial = next(iter(make(start)), None)
        peak = now if trial is None else _peak(trial)
        if trial is not None and peak < now:
            found.append((trial.overrides, int(now - peak)))
    return found


def larger_micro_batch(plan: Plan) -> tuple[tuple[str, ...], Plan] | None:
    """The overrides of the largest micro-batch that fits by an estimate, and the plan with it.

    None where the update is one micro-batch, where more than half of the memory is taken, or on a
    CPU, which a larger one makes no faster. No number of the run depends on it.
    """
    machine = plan.machine
    if machine.platform == "cpu" or not machine.capacity or plan.peak_bytes > machine.capacity / 2:
        return None
    best = None
    least = plan.resolved.rows.num_parts
    for trial in _larger_micro_batches(_start(plan), plan):
        changed = _estimate(trial)
        if changed is None or not changed.fits or changed.is_near_the_limit:
            break
        if changed.resolved.rows.num_parts < least:
            best = trial.overrides, changed
            least = changed.resolved.rows.num_parts
    return best


def _larger_micro_batches(start: Trial, plan: Plan) -> Iterator[Trial]:
    """Every size above the one at hand, the smallest first."""
    rows = plan.resolved.rows
    if rows.packing == "none":
        now = plan.resolved.batch.micro_batch_size
        sizes = micro_batches_to_try(start.run, start.mesh_shape["fsdp"])
        yield from (_sized(start, size) for size in reversed(sizes) if size > now)
        return
    tokens = rows.rows_per_part * rows.width
    whole = rows.num_parts * tokens
    while rows.num_parts > 1 and tokens < whole:
        tokens *= 2
        yield _with(start, "training", micro_batch_tokens=tokens)


def _sized(trial: Trial, size: int) -> Trial:
    """With micro-batches of this size, and as many as follow from it."""
    count = with_micro_batch(trial.run, size).training.gradient_accumulation_steps
    return _with(trial, "training", micro_batch_size=size, gradient_accumulation_steps=count)


def _estimate(trial: Trial) -> Plan | None:
    """None for what cannot be, such as a mesh that does not divide the model."""
    try:
        return estimated(trial.run, trial.machine, *find_model(trial.run.model), trial.mesh_shape)
    except ConfigError:
        return None


def _peak(trial: Trial) -> float:
    plan = _estimate(trial)
    return math.inf if plan is None else plan.peak_bytes


def _trials(start: Trial) -> Iterator[Trial]:
    """What is tried, one after the other."""
    for make in (*CHANGES, _tensor_parallel):
        yield from make(start)
    yield _few_changes(start)
    for machine in _larger(start.machine):
        tp = start.mesh_shape["tp"]
        mesh_shape = {"fsdp": machine.num_devices // tp, "tp": tp}
        overrides = (f"target={machine.name}", _mesh(mesh_shape))
        larger = replace(start, machine=machine, mesh_shape=mesh_shape, overrides=overrides)
        if _estimate(larger) is not None:
            yield larger
            yield _few_changes(larger)


def _few_changes(start: Trial) -> Trial:
    """Changes in order until they fit together, or all that do not make it larger; then none that
    is not needed, and none further than it must go."""
    # Add changes, each as far as it goes.
    makers = []
    peak = _peak(start)
    # What is proposed by an estimate leaves some memory free.
    capacity = int((1 - ESTIMATE_MARGIN) * (start.machine.capacity or 0))
    for make in CHANGES:
        changed = _peak(_all_changes(start, [*makers, make]))
        if changed <= peak:
            makers.append(make)
            peak = changed
        if peak <= capacity:
            break

    # Leave out those that are not needed, the most costly first.
    limit = max(capacity, peak)
    for make in reversed(makers):
        fewer = [other for other in makers if other is not make]
        if _peak(_all_changes(start, fewer)) <= limit:
            makers = fewer

    # Take each only as far as it must go.
    for i, make in enumerate(makers):
        ways = list(make(start)) or [start]
        enough = (way for way in ways if _peak(_all_changes(way, makers[i + 1 :])) <= limit)
        start = next(enough, ways[-1])
    return start


def _all_changes(start: Trial, makers: Sequence[Change]) -> Trial:
    """Each change as far as it goes."""
    for make in makers:
        start = [start, *make(start)][-1]
    return start


def _merged(overrides: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, ...]:
    """Overrides with others put over them."""
    by_key = {text.partition("=")[0]: text for text in (*overrides, *new)}
    return tuple(by_key.values())


def _with(trial: Trial, section: str, **settings: Any) -> Trial:
    """The trial with settings of `section`, training, rollout or model.lora, changed."""
    names = tuple(
        f"{section}.{name}={'null' if value is None else value}" for name, value in settings.items()
    )
    run = trial.run
    if section == "model.lora":
        settings = {"lora": replace(run.model.lora, **settings)}
        section = "model"
    changed = replace(run, **{section: replace(getattr(run, section), **settings)})
    return replace(trial, run=changed, overrides=_merged(trial.overrides, names))


def _changed_to(
    section: str, where: Callable[[Trial], bool] = lambda trial: True, **settings: Any
) -> Change:
    """These settings of a section, unless it has them already. where: the trials it is for."""

    def change(trial: Trial) -> Iterator[Trial]:
        now = getattr(trial.run, section)
        if where(trial) and any(getattr(now, name) != value for name, value in settings.items()):
            yield _with(trial, section, **settings)

    return change


def _is_float32(trial: Trial) -> bool:
    return trial.run.training.mixed_precision == "fp32"


def _slots(trial: Trial) -> Iterator[Trial]:
    """Half as many sequences sampled at once, and again: slower, and less cache."""
    fsdp = trial.mesh_shape["fsdp"]
    slots = trial.run.rollout.slots(plan_batch(trial.run, fsdp).sequences, fsdp)
    while slots // 2 >= fsdp:
        slots = slots // 2 // fsdp * fsdp
        yield _with(trial, "rollout", num_slots=slots)


def _micro_batch(trial: Trial) -> Iterator[Trial]:
    """Every size below the one at hand."""
    settings = trial.run.training
    if settings.packing != "none":
        longest = sum(lengths_of(trial.run))
        if (settings.micro_batch_tokens or longest + 1) > longest:
            yield _with(trial, "training", micro_batch_tokens=longest)
        return
    sizes = micro_batches_to_try(trial.run, trial.mesh_shape["fsdp"])
    now = settings.micro_batch_size if isinstance(settings.micro_batch_size, int) else sizes[0]
    for size in sizes:
        if size < now:
            yield _sized(trial, size)


def _adapters(trial: Trial, **more: str) -> Iterator[Trial]:
    lora = trial.run.model.lora
    rank = {} if lora.rank or lora.adapter else {"rank": 16}
    if any(getattr(lora, name) != value for name, value in (rank | more).items()):
        yield _with(trial, "model.lora", **rank, **more)


def _tensor_parallel(trial: Trial) -> Iterator[Trial]:
    """Other meshes of the same devices, with more of tp."""
    devices = trial.machine.num_devices
    for more in range(trial.mesh_shape["tp"] + 1, devices + 1):
        if devices % more:
            continue
        mesh_shape = {"fsdp": devices // more, "tp": more}
        overrides = _merged(trial.overrides, (_mesh(mesh_shape),))
        yield replace(trial, mesh_shape=mesh_shape, overrides=overrides)


def _larger(machine: Machine) -> Iterator[Machine]:
    """The same accelerator, more of it."""
    kind = machine.hardware
    now = machine.num_devices
    if kind is None or machine.name == "attached":
        return
    if kind.platform == "tpu":
        counts = [count for count in slice_shapes(kind) if count <= 64 * now]
    else:
        node = kind.host_devices
        counts = [2, 4, *(node * n for n in range(1, MOST_NODES + 1))]
    for count in counts:
        is_tpu = kind.platform == "tpu"
        if count > now:
            name = f"{kind.name}-{count * kind.chip.cores}" if is_tpu else f"{kind.name}x{count}"
            yield find_machine(name)


def _mesh(mesh_shape: dict[str, int]) -> str:
    return f"model.mesh_shape={as_text((tuple(mesh_shape.values()), tuple(mesh_shape)))}"


# The cheapest first. Weights that stay divided while sampling are slower, and no second copy.
CHANGES = (
    _changed_to("rollout", lambda trial: trial.mesh_shape["fsdp"] > 1, weights="sharded"),
    _slots,
    _changed_to("rollout", cache="int8"),
    _changed_to("training", scan_layers=True),
    _changed_to("training", remat="block"),
    _changed_to("training", _is_float32, mixed_precision="bf16"),
    _micro_batch,
    _changed_to("training", mixed_precision="bf16_params"),
    _adapters,
    partial(_adapters, base="nf4"),
)
