"""What to change in a run that does not fit: overrides, each tried before it is named."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tunix_lite.config import ConfigError, RunConfig
from tunix_lite.parallel.mesh import as_text
from tunix_lite.planning.case import find_model, micro_batches_to_try, with_micro_batch
from tunix_lite.planning.hardware import slice_shapes
from tunix_lite.planning.machine import Machine, find_machine
from tunix_lite.planning.plan import Plan, estimated

MOST_NODES = 64  # of GPUs, that are tried


@dataclass(frozen=True)
class Trial:
    """One change: the overrides that say it, and the run and the machine that they make."""

    overrides: tuple[str, ...]
    run: RunConfig
    machine: Machine
    sizes: dict[str, int]


def advice(plan: Plan, fits: Callable[[Plan], bool] = bool) -> tuple[tuple[str, ...], Plan] | None:
    """The first change with which the run fits, and the plan of it; None if none is known.

    Single changes first, in the order of what they cost; then several, as few as do; then more devices. fits: asked of
    an estimate that fits, for whoever can look closer, by compiling it.
    """
    for trial in _trials(plan):
        if (found := _fitting(trial)) is not None and fits(found):
            return trial.overrides, found
    return None


def _fitting(trial: Trial) -> Plan | None:
    """The trial's plan by estimate, if it fits."""
    try:
        cfg, lora = find_model(trial.run.model)
        found = estimated(trial.run, trial.machine, cfg, lora, trial.sizes)
    except ConfigError:  # such as a mesh that does not divide the model
        return None
    return found if found.fits else None


def _trials(plan: Plan) -> Iterator[Trial]:
    start = Trial((), plan.case.run, plan.machine, plan.case.sizes)
    yield from (trial for make in (*CHANGES, _tensor_parallel) for trial in make(start))
    if (together := _few(start)) is not None:
        yield together
    for machine in _larger(plan.machine):
        sizes = {"fsdp": machine.num_devices // plan.case.sizes["tp"], "tp": plan.case.sizes["tp"]}
        larger = replace(start, machine=machine, sizes=sizes, overrides=(f"target={machine.name}", _mesh(sizes)))
        yield larger
        if (together := _few(larger)) is not None:
            yield together


def _few(start: Trial) -> Trial | None:
    """Changes in order until they fit together, and then without those that are not needed."""
    for count in range(2, len(CHANGES) + 1):
        if _fitting(_together(start, CHANGES[:count])) is not None:
            break
    else:
        return None
    makers = list(CHANGES[:count])
    for make in reversed(CHANGES[:count]):
        fewer = [other for other in makers if other is not make]
        if _fitting(_together(start, fewer)) is not None:
            makers = fewer
    return _together(start, makers)


def _together(start: Trial, makers: Sequence[Callable]) -> Trial:
    for make in makers:
        start = (list(make(start)) or [start])[-1]
    return start


def _merged(overrides: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, ...]:
    """Overrides with others put over them."""
    said = {text.partition("=")[0]: text for text in (*overrides, *new)}
    return tuple(said.values())


def _with(trial: Trial, section: str, **settings: Any) -> Trial:
    """The trial with settings of `section`, training, rollout or model.lora, changed."""
    names = tuple(f"{section}.{name}={'null' if value is None else value}" for name, value in settings.items())
    run, overrides = trial.run, _merged(trial.overrides, names)
    if section == "model.lora":
        changed = replace(run, model=replace(run.model, lora=replace(run.model.lora, **settings)))
    else:
        changed = replace(run, **{section: replace(getattr(run, section), **settings)})
    return replace(trial, run=changed, overrides=overrides)


def _rollout(trial: Trial) -> Iterator[Trial]:
    """Weights that stay divided while sampling: slower, and no second copy."""
    if trial.run.rollout.weights != "sharded" and trial.sizes["fsdp"] > 1:
        yield _with(trial, "rollout", weights="sharded")


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
        longest = trial.run.generation.max_prompt_length + trial.run.generation.max_new_tokens
        if (settings.micro_batch_tokens or longest + 1) > longest:
            yield _with(trial, "training", micro_batch_tokens=longest)
        return
    sizes = micro_batches_to_try(trial.run, trial.sizes["fsdp"])
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
        yield _with(trial, "model.lora", **({} if lora.rank or lora.adapter else {"rank": 16}), base="nf4")


def _tensor_parallel(trial: Trial) -> Iterator[Trial]:
    """Other meshes of the same devices, with more of tp."""
    devices, tp = trial.machine.num_devices, trial.sizes["tp"]
    for more in (n for n in range(tp + 1, devices + 1) if devices % n == 0):
        sizes = {"fsdp": devices // more, "tp": more}
        yield replace(trial, sizes=sizes, overrides=_merged(trial.overrides, (_mesh(sizes),)))


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
        counts = [n for n in (2, 4, node) if n > now] + [node * n for n in range(2, MOST_NODES + 1) if node * n > now]
        names = [f"{kind.name}x{count}" for count in counts]
    yield from map(find_machine, names)


def _mesh(sizes: dict[str, int]) -> str:
    return f"model.mesh_shape={as_text((tuple(sizes.values()), tuple(sizes)))}"


CHANGES = (_rollout, _remat, _half, _micro_batch, _half_params, _adapters, _quantised)  # the cheapest first
