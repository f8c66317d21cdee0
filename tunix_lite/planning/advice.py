"""What to change in a run that does not fit: overrides, each tried before it is named."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tunix_lite.config import RunConfig
from tunix_lite.errors import ConfigError
from tunix_lite.parallel.mesh import as_text
from tunix_lite.planning.batch_size import lengths_of, plan_batch
from tunix_lite.planning.hardware import slice_shapes
from tunix_lite.planning.machine import Machine, find_machine
from tunix_lite.planning.plan import Plan, estimated
from tunix_lite.planning.resolved import (
    find_model,
    micro_batches_to_try,
    with_micro_batch,
)

# of GPUs, that are tried
MOST_NODES = 64


@dataclass(frozen=True)
class Trial:
    """One change: the overrides that say it, and the run and the machine that they make."""

    overrides: tuple[str, ...]
    run: RunConfig
    machine: Machine
    mesh_shape: dict[str, int]


def advice(
    plan: Plan, look: Callable[[Plan], Plan] = lambda plan: plan
) -> tuple[tuple[str, ...], Plan]:
    """The first change with which the run fits, and the plan of it; if there is none, the least
    that it gets down to.

    Single changes first, in the order of what they cost; then several, as few as do; then more
    devices. look: makes of an estimate that fits a plan that knows more, by compiling it.
    """
    start = Trial((), plan.resolved.run, plan.machine, plan.resolved.mesh_shape)
    for trial in _trials(start):
        found = _estimate(trial)
        if found is not None and found.fits and (found := look(found)).fits:
            return trial.overrides, found
    least = _few(start)
    found = _estimate(least)
    return least.overrides, look(found) if found.fits else found


def _estimate(trial: Trial) -> Plan | None:
    """None for what cannot be, such as a mesh that does not divide the model."""
    try:
        return estimated(trial.run, trial.machine, *find_model(trial.run.model), trial.mesh_shape)
    except ConfigError:
        return None


def _peak(trial: Trial) -> float:
    found = _estimate(trial)
    return math.inf if found is None else found.peak_bytes


def _trials(start: Trial) -> Iterator[Trial]:
    yield from (trial for make in (*CHANGES, _tensor_parallel) for trial in make(start))
    yield _few(start)
    for machine in _larger(start.machine):
        tp = start.mesh_shape["tp"]
        mesh_shape = {"fsdp": machine.num_devices // tp, "tp": tp}
        overrides = (f"target={machine.name}", _mesh(mesh_shape))
        larger = replace(start, machine=machine, mesh_shape=mesh_shape, overrides=overrides)
        if _estimate(larger) is not None:
            yield larger
            yield _few(larger)


def _few(start: Trial) -> Trial:
    """Changes in order until they fit together, or all that do not make it larger; then none that
    is not needed, and none further than it must go."""
    makers, peak, room = [], _peak(start), start.machine.capacity or 0
    for make in CHANGES:
        if (now := _peak(_together(start, [*makers, make]))) <= peak:
            makers, peak = [*makers, make], now
        if peak <= room:
            break
    room = max(room, peak)
    for make in reversed(makers):
        fewer = [other for other in makers if other is not make]
        makers = fewer if _peak(_together(start, fewer)) <= room else makers
    for i, make in enumerate(makers):
        ways = list(make(start)) or [start]
        start = next(
            (way for way in ways if _peak(_together(way, makers[i + 1 :])) <= room), ways[-1]
        )
    return start


def _together(start: Trial, makers: Sequence[Callable]) -> Trial:
    """Each change as far as it goes."""
    for make in makers:
        start = (list(make(start)) or [start])[-1]
    return start


def _merged(overrides: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, ...]:
    """Overrides with others put over them."""
    said = {text.partition("=")[0]: text for text in (*overrides, *new)}
    return tuple(said.values())


def _with(trial: Trial, section: str, **settings: Any) -> Trial:
    """The trial with settings of `section`, training, rollout or model.lora, changed."""
    names = tuple(
        f"{section}.{name}={'null' if value is None else value}" for name, value in settings.items()
    )
    run, overrides = trial.run, _merged(trial.overrides, names)
    if section == "model.lora":
        changed = replace(run, model=replace(run.model, lora=replace(run.model.lora, **settings)))
    else:
        changed = replace(run, **{section: replace(getattr(run, section), **settings)})
    return replace(trial, run=changed, overrides=overrides)


def _rollout(trial: Trial) -> Iterator[Trial]:
    """Weights that stay divided while sampling: slower, and no second copy."""
    if trial.run.rollout.weights != "sharded" and trial.mesh_shape["fsdp"] > 1:
        yield _with(trial, "rollout", weights="sharded")


def _slots(trial: Trial) -> Iterator[Trial]:
    """Half as many sequences sampled at once, and again: slower, and less cache."""
    fsdp = trial.mesh_shape["fsdp"]
    slots = trial.run.rollout.slots(plan_batch(trial.run, fsdp).sequences, fsdp)
    while (slots := slots // 2 // fsdp * fsdp) >= fsdp:
        yield _with(trial, "rollout", num_slots=slots)


def _cache(trial: Trial) -> Iterator[Trial]:
    if trial.run.rollout.cache != "int8":
        yield _with(trial, "rollout", cache="int8")


def _remat(trial: Trial) -> Iterator[Trial]:
    if trial.run.training.remat != "block":
        yield _with(trial, "training", remat="block")


def _half(trial: Trial) -> Iterator[Trial]:
    if trial.run.training.mixed_precision == "fp32":
        yield _with(trial, "training", mixed_precision="bf16")


def _half_params(trial: Trial) -> Iterator[Trial]:
    if trial.run.training.mixed_precision != "bf16_params":
        yield _with(trial, "training", mixed_precision="bf16_params")


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
    for size in (size for size in sizes if size < now):
        derived = with_micro_batch(trial.run, size).training.gradient_accumulation_steps
        yield _with(trial, "training", micro_batch_size=size, gradient_accumulation_steps=derived)


def _adapters(trial: Trial) -> Iterator[Trial]:
    if not trial.run.model.lora.rank and trial.run.model.lora.adapter is None:
        yield _with(trial, "model.lora", rank=16)


def _quantised(trial: Trial) -> Iterator[Trial]:
    lora = trial.run.model.lora
    if lora.base != "nf4":
        yield _with(
            trial, "model.lora", **({} if lora.rank or lora.adapter else {"rank": 16}), base="nf4"
        )


def _tensor_parallel(trial: Trial) -> Iterator[Trial]:
    """Other meshes of the same devices, with more of tp."""
    devices, tp = trial.machine.num_devices, trial.mesh_shape["tp"]
    for more in (n for n in range(tp + 1, devices + 1) if devices % n == 0):
        mesh_shape = {"fsdp": devices // more, "tp": more}
        overrides = _merged(trial.overrides, (_mesh(mesh_shape),))
        yield replace(trial, mesh_shape=mesh_shape, overrides=overrides)


def _larger(machine: Machine) -> Iterator[Machine]:
    """The same accelerator, more of it."""
    kind, now = machine.hardware, machine.num_devices
    if kind is None or machine.name == "attached":
        return
    if kind.platform == "tpu":
        counts = [count for count in slice_shapes(kind) if now < count <= 64 * now]
        names = [f"{kind.name}-{count * kind.chip.cores}" for count in counts]
    else:
        node = kind.host_devices
        counts = [n for n in (2, 4, node) if n > now] + [
            node * n for n in range(2, MOST_NODES + 1) if node * n > now
        ]
        names = [f"{kind.name}x{count}" for count in counts]
    yield from map(find_machine, names)


def _mesh(mesh_shape: dict[str, int]) -> str:
    return f"model.mesh_shape={as_text((tuple(mesh_shape.values()), tuple(mesh_shape)))}"


# The cheapest first.
CHANGES = (
    _rollout,
    _slots,
    _cache,
    _remat,
    _half,
    _micro_batch,
    _half_params,
    _adapters,
    _quantised,
)
