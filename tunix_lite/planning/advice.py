"""What to change in a run that does not fit: overrides, each tried before it is named."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from tunix_lite.basics.errors import ConfigError
from tunix_lite.parallel.mesh import as_text
from tunix_lite.planning.hardware import Machine, find_machine
from tunix_lite.planning.plan import ESTIMATE_MARGIN, Plan, estimated
from tunix_lite.settings.batch_size import plan_batch
from tunix_lite.settings.config import RunConfig
from tunix_lite.settings.resolved_run import find_model

# Nodes of GPUs that are tried at most, and the factor by which a target may grow.
_MOST_NODES = 64


@dataclass(frozen=True)
class _Trial:
    """A run with some changes: their overrides, and the run and the machine that they make."""

    overrides: tuple[str, ...]
    run: RunConfig
    machine: Machine
    mesh_shape: dict[str, int]

    def plan(self) -> Plan | None:
        """Its plan by formulas; None for what cannot be, such as a mesh that divides nothing."""
        try:
            cfg, lora = find_model(self.run.model)
            return estimated(self.run, self.machine, cfg, lora, self.mesh_shape)
        except ConfigError:
            return None

    def peak(self) -> float:
        plan = self.plan()
        return math.inf if plan is None else plan.peak_bytes

    def with_settings(self, section: str, **settings: str | int | bool | None) -> "_Trial":
        """Changes settings of `section`: training, rollout or model.lora."""
        overrides = dict(text.split("=", 1) for text in self.overrides)
        for name, value in settings.items():
            overrides.pop(f"{section}.{name}", None)
            overrides[f"{section}.{name}"] = "null" if value is None else value
        if section == "model.lora":
            settings = {"lora": replace(self.run.model.lora, **settings)}
            section = "model"
        run = replace(self.run, **{section: replace(getattr(self.run, section), **settings)})
        texts = tuple(f"{name}={value}" for name, value in overrides.items())
        return replace(self, run=run, overrides=texts)

    def with_mesh(self, machine: Machine, tp: int) -> "_Trial":
        sizes = {"fsdp": machine.num_devices // tp, "tp": tp}
        mesh = f"model.mesh_shape={as_text((tuple(sizes.values()), tuple(sizes)))}"
        target = () if machine == self.machine else (f"target={machine.name}",)
        overrides = (*target, mesh)
        return replace(self, machine=machine, mesh_shape=sizes, overrides=overrides)


# (trial) -> the same with one setting changed, a little first and then further.
_Change = Callable[[_Trial], Iterator[_Trial]]


def advice(
    plan: Plan, refine: Callable[[Plan], Plan] = lambda plan: plan
) -> tuple[tuple[str, ...], Plan]:
    """The overrides with which the run fits, and the plan of it; or the least that it gets down to.
    Single changes first, the cheapest first; then several, as few as do; then more devices. An
    estimate must leave ESTIMATE_MARGIN free. refine(estimate that fits) -> a plan that knows
    more."""
    start = _Trial((), plan.resolved.run, plan.machine, plan.resolved.mesh_shape)
    for trial in _trials(start):
        changed = trial.plan()
        if changed is not None and changed.fits:
            changed = refine(changed)
            if changed.fits and not changed.is_near_the_limit:
                return trial.overrides, changed

    # Nothing fits: what needs the least.
    least = _few_changes(start)
    changed = least.plan()
    return least.overrides, refine(changed) if changed.fits else changed


def _trials(start: _Trial) -> Iterator[_Trial]:
    """What is tried, one after the other."""
    for make in _CHANGES:
        yield from make(start)
    # Other meshes of the same devices, with more of tp.
    count = start.machine.num_devices
    tp = start.mesh_shape["tp"]
    more = [size for size in range(tp + 1, count + 1) if count % size == 0]
    yield from (start.with_mesh(start.machine, size) for size in more)
    yield _few_changes(start)

    # The same accelerator, more of it.
    kind = start.machine.hardware
    if kind is None or start.machine.name == "attached":
        return
    if kind.platform == "tpu":
        names = {n: f"{kind.name}-{n * kind.chip.cores}" for n in kind.slices}
    else:
        counts = [2, 4, *(kind.host_devices * n for n in range(1, _MOST_NODES + 1))]
        names = {n: f"{kind.name}x{n}" for n in counts}
    for size, name in names.items():
        if count < size <= _MOST_NODES * max(count, kind.host_devices):
            larger = start.with_mesh(find_machine(name), tp)
            if larger.plan() is not None:
                yield larger
                yield _few_changes(larger)


def _few_changes(start: _Trial) -> _Trial:
    """Changes in order until they fit, or all that make it no larger; each as far as it must go."""
    # What is proposed by an estimate leaves some memory free.
    capacity = int((1 - ESTIMATE_MARGIN) * (start.machine.capacity or 0))
    taken: list[tuple[_Change, int]] = []
    trial = start
    peak = start.peak()
    for make in _CHANGES:
        steps = [*make(trial)]
        # a change that makes it larger is none of a remedy
        if steps and (changed := steps[-1].peak()) <= peak:
            taken.append((make, len(steps)))
            trial = steps[-1]
            peak = changed
        if peak <= capacity:
            break

    # Take them back as far as the run still fits, the most costly first.
    # where nothing fits, no change may cost more than the least that was reached
    limit = max(capacity, peak)
    for i, (make, count) in reversed([*enumerate(taken)]):
        for fewer in range(count):
            back = [*taken[:i], (make, fewer), *taken[i + 1 :]]
            if _applied(start, back).peak() <= limit:
                taken = back
                break
    return _applied(start, taken)


def _applied(trial: _Trial, taken: list[tuple[_Change, int]]) -> _Trial:
    """Each change as many steps as it is to go, or as it has."""
    for make, count in taken:
        *_, trial = [trial, *islice(make(trial), count)]
    return trial


def _changed_to(
    section: str,
    where: Callable[[_Trial], bool] = lambda trial: True,
    **settings: str | bool,
) -> _Change:
    """These settings of a section, unless it has them already. where: the trials it is for."""

    def change(trial: _Trial) -> Iterator[_Trial]:
        # advice that changes nothing would be tried, and compiled, for nothing
        now = getattr(trial.run, section)
        if where(trial) and any(
            getattr(now, name) != value for name, value in settings.items()
        ):
            yield trial.with_settings(section, **settings)

    return change


def _slots(trial: _Trial) -> Iterator[_Trial]:
    """Half as many sequences sampled at once, and again: slower, and less cache."""
    fsdp = trial.mesh_shape["fsdp"]
    slots = trial.run.rollout.slots(plan_batch(trial.run, fsdp).sequences, fsdp)
    while slots // 2 >= fsdp:
        slots = slots // 2 // fsdp * fsdp
        yield trial.with_settings("rollout", num_slots=slots)


def _micro_batch(trial: _Trial) -> Iterator[_Trial]:
    """Every size below the one at hand, and as many as follow from it."""
    settings = trial.run.training
    if settings.packing != "none":
        longest = sum(trial.run.generation.lengths)
        if (settings.micro_batch_tokens or longest + 1) > longest:
            yield trial.with_settings("training", micro_batch_tokens=longest)
        return
    fsdp = trial.mesh_shape["fsdp"]
    every = settings.sync_gradients_every
    fewest = replace(settings, micro_batch_size=None, gradient_accumulation_steps=every)
    per_shard = plan_batch(replace(trial.run, training=fewest), fsdp).sequences // fsdp
    # others would leave a rest, and a micro-batch of another size is another program
    divisors = [size for size in range(per_shard, 0, -1) if per_shard % size == 0]
    sizes = [size for size in divisors if (per_shard // size) % every == 0]
    now = settings.micro_batch_size or sizes[0]
    for size in sizes:
        if size < now:
            # both settings are advised, or an old number of steps would contradict the size
            yield trial.with_settings(
                "training", micro_batch_size=size, gradient_accumulation_steps=None
            )


def _adapters(trial: _Trial, **more: str) -> Iterator[_Trial]:
    lora = trial.run.model.lora
    rank = {} if lora.rank or lora.adapter else {"rank": 16}
    if any(getattr(lora, name) != value for name, value in (rank | more).items()):
        yield trial.with_settings("model.lora", **rank, **more)


# The cheapest first. Weights that stay divided while sampling are slower, and no second copy.
_CHANGES = (
    _changed_to("rollout", lambda trial: trial.mesh_shape["fsdp"] > 1, weights="sharded"),
    _slots,
    _changed_to("rollout", cache="int8"),
    _changed_to("training", scan_layers=True),
    _changed_to("training", remat="block"),
    _changed_to(
        "training",
        lambda trial: trial.run.training.mixed_precision == "fp32",
        mixed_precision="bf16",
    ),
    _micro_batch,
    _changed_to("training", mixed_precision="bf16_params"),
    _adapters,
    partial(_adapters, base="nf4"),
)
