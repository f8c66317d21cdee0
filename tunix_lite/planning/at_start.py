"""At the start of a run: as large a micro-batch as fits, and how much of each device's memory the
run will take."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from tunix_lite.errors import ConfigError
from tunix_lite.learner.policy import Policy
from tunix_lite.learner.rows import at_every_width
from tunix_lite.models.lora import acting_params
from tunix_lite.planning import estimate, hardware
from tunix_lite.planning.advice import advice, savings
from tunix_lite.planning.hardware import GiB
from tunix_lite.planning.machine import Machine, attached_machine
from tunix_lite.planning.plan import (
    COMPILED,
    Phase,
    Plan,
    assemble_plan,
    compile_plan,
    largest_micro_batch,
)
from tunix_lite.planning.programs import compiled, update_arguments
from tunix_lite.resolved.parts import abstract, batch_shapes, scored_batch_shapes, train_step_of
from tunix_lite.resolved.run import ResolvedRun
from tunix_lite.types import Params, RowBatch, TrainState


def choose_micro_batch(
    resolved: ResolvedRun, say: Callable[[str], None]
) -> tuple[ResolvedRun, Callable]:
    """The run with the largest micro-batch whose update, compiled, fits the attached devices; and
    that update, ready to train.

    The run's mesh is the current one. Raises ConfigError if not even one sequence fits, or how much
    memory there is is not known.
    """
    machine = attached_machine()
    if machine.capacity is None:
        raise ConfigError(
            "training.micro_batch_size=auto: how much memory this device has is not known; give a "
            "number"
        )
    updates = {}

    def peak_bytes(size: int) -> int:
        sized = resolved.with_micro_batch(size)
        chosen = estimate.choose_sampling_weights(sized, machine.capacity)
        sized = replace(sized, sampling_weights=chosen)
        updates[size] = train_step_of(sized)
        compile_it = partial(updates[size].compile, *update_arguments(sized, abstract(sized)))
        is_tpu = machine.platform == "tpu"
        update = compiled("update", compile_it, sized.mesh_shape, is_tpu)
        peak = assemble_plan(machine, sized, {"update": update}).peak_bytes
        room = f"{machine.capacity / GiB:.2f} a device"
        say(f"micro_batch_size={size}: {peak / GiB:.2f} GiB of {room}")
        return peak

    try:
        size = largest_micro_batch(resolved.micro_batches_to_try(), peak_bytes, machine.capacity)
    except ValueError as error:
        raise ConfigError(
            f"training.micro_batch_size=auto: {error}; `tunix-lite plan` says what would fit"
        ) from error
    return resolved.with_micro_batch(size), updates[size]


def training_programs(
    resolved: ResolvedRun,
    policy: Policy,
    train_step: Callable,
    state: TrainState,
    frozen: Params | None,
) -> dict[str, Callable[[], Any]]:
    """By name, what compiles the programs that learn: for every width that a batch may have, so
    that each finds its programs compiled. They return that of the widest."""
    compile_update = partial(train_step.compile, state, frozen)
    programs = {"update": partial(_at_every_width, compile_update, resolved, batch_shapes)}
    if "reference" in policy.scorers:
        score = policy.scorers["reference"].compiled
        programs["scoring"] = partial(_at_every_width, score, resolved, scored_batch_shapes)
    elif resolved.scores:
        acting = acting_params(frozen, state.params, resolved.lora)
        score = partial(policy.rescore.compiled, acting)
        programs["scoring"] = partial(_at_every_width, score, resolved, scored_batch_shapes)
    for name in resolved.frozen_models:
        compares = resolved.compares(name)
        score = policy.compare.compiled if compares else policy.scorers[name].compiled
        theirs = resolved.as_scorer(name)
        programs[name] = partial(_at_every_width, score, theirs, scored_batch_shapes)
    return programs


def _at_every_width(
    compile_it: Callable[[RowBatch], Any],
    resolved: ResolvedRun,
    shapes: Callable[[ResolvedRun], RowBatch],
) -> Any:
    """compile_it(rows) for every width of the rows; what it gives for the widest."""
    widest, *_ = [compile_it(rows) for rows in at_every_width(shapes(resolved), resolved.rows)]
    return widest


def plan_of_this_run(resolved: ResolvedRun, programs: dict[str, Callable[[], Any]]) -> Plan:
    """The plan of a run that is about to start on the attached devices; programs: those of
    `training_programs`.

    Raises ConfigError if the compiler refuses a program. Of packed rows it may: batches as they
    come may fit.
    """
    plan = compile_plan(attached_machine(), resolved, programs)
    if plan.refused and resolved.rows.packing == "none":
        raise ConfigError(
            f"the run does not fit: {'; '.join(plan.refused)}; `tunix-lite plan` says what would, "
            "such as a smaller training.micro_batch_size"
        )
    return plan


def check_at_rest(resolved: ResolvedRun, say: Callable[[str], None]) -> None:
    """Before anything is loaded: `check_fits` of what is known exactly, whatever the compiler will
    say.

    That is what stays on a device, and while sampling the weights, the cache and the prompts that
    wait.
    """
    machine = attached_machine()
    chosen = estimate.choose_sampling_weights(resolved, machine.capacity)
    plan = compile_plan(machine, replace(resolved, sampling_weights=chosen), {})

    def only_exact(phase: Phase) -> Phase:
        if phase.name != "rollout":
            return replace(phase, adds={})
        exact = {part: size for part, size in phase.adds.items() if part != "temporary"}
        return replace(phase, adds=exact)

    check_fits(replace(plan, phases=tuple(only_exact(phase) for phase in plan.phases)), say)


def check_fits(plan: Plan, say: Callable[[str], None]) -> None:
    """Raises ConfigError, with what would fit, where the plan of a run does not;
    training.memory_check=warn says it.

    Of packed rows only sampling counts: their update and scoring are planned at their fullest, and
    batches as they come may fit. How much memory there is may not be known: then nothing is
    checked.
    """
    is_packed = plan.resolved.rows.packing != "none"

    def counted_bytes(phase: Phase) -> int:
        return 0 if is_packed and phase.name != "rollout" else phase.added_bytes

    check_apart_fits(plan, say)

    # The phase at the peak.
    phase = max(plan.phases, key=counted_bytes)
    added = counted_bytes(phase)
    peak = plan.resident_bytes + added
    capacity = plan.machine.capacity
    if capacity is None or peak <= capacity:
        return

    # What is too much, and what to do.
    parts = f"{plan.resident_bytes / GiB:.2f} all the time and {added / GiB:.2f} for {phase.name}"
    over = (
        f"{peak / GiB:.2f} GiB of {capacity / GiB:.2f} a device, {(peak - capacity) / GiB:.2f} too "
        f"much ({parts})"
    )
    _refuse(plan, f"the run does not fit: {over}; {_remedy(plan)}", say)


def _refuse(plan: Plan, problem: str, say: Callable[[str], None]) -> None:
    """Raises ConfigError with the problem; training.memory_check=warn says it."""
    if plan.resolved.run.training.memory_check != "warn":
        raise ConfigError(f"{problem}; or training.memory_check=warn starts it anyway")
    say(f"{problem}; it starts all the same, as training.memory_check=warn says")


def check_apart_fits(plan: Plan, say: Callable[[str], None]) -> None:
    """Raises ConfigError if a device that only samples (rollout.mesh_shape) cannot hold it;
    training.memory_check=warn says it."""
    capacity = plan.machine.capacity
    needed = sum(plan.apart.values())
    if capacity is None or needed <= capacity:
        return
    _refuse(
        plan,
        f"rollout.mesh_shape: sampling needs {needed / GiB:.2f} GiB of {capacity / GiB:.2f} on a "
        "device of its own, by formula; a larger tp there, rollout.weights=sharded or a smaller "
        "rollout.num_slots takes less",
        say,
    )


def _remedy(plan: Plan) -> str:
    """What would make it fit, by formulas: nothing is compiled for it."""
    # The hub is not asked again for the architecture of one of its models.
    run = plan.resolved.run
    known = replace(run, model=replace(run.model, architecture=plan.resolved.cfg))
    overrides, found = advice(replace(plan, resolved=replace(plan.resolved, run=known)))

    size = f"{found.peak_bytes / GiB:.2f} GiB"
    if found.fits:
        return f"it would fit, by an estimate of {size}, with {' '.join(overrides)}"
    least = f"the least by an estimate is {size}"
    if overrides:
        least += f", with {' '.join(overrides)}"
    return (
        f"nothing that was tried fits here, {least}; a smaller model, a shorter "
        "generation.max_new_tokens or a larger model.mesh_shape takes less"
    )


def out_of_memory_lines(resolved: ResolvedRun) -> list[str]:
    """What to try after a device ran out of memory, by formulas, the cheapest change first."""
    # The hub is not asked again, and the devices may not answer.
    run = replace(resolved.run, model=replace(resolved.run.model, architecture=resolved.cfg))
    known = replace(resolved, run=run)
    device = jax.local_devices()[0]
    limit = hardware.memory_limit(device)
    kind = hardware.of_device(device)
    machine = Machine("attached", device.platform, jax.device_count(), kind, limit, "")
    plan = assemble_plan(machine, known, {})
    lines = ["out of memory; what takes less, by an estimate, the cheapest first:"]
    for overrides, size in savings(plan):
        shown = f"{size / GiB:.2f} GiB" if size >= GiB / 100 else f"{size / 2**20:.2f} MiB"
        lines.append(f"  {' '.join(overrides)}   ({shown} a device less)")
    return lines if len(lines) > 1 else []


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a device had no memory left, as XLA says it."""
    while error is not None:
        if "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error):
            return True
        error = error.__cause__
    return False


# Share of a device's memory below which nobody has to know what takes it. Formulas have been up to
# a quarter too low.
PLENTY = 0.5


def has_plenty(plan: Plan) -> bool:
    """Whether the plan leaves so much memory that details do not matter."""
    capacity = plan.machine.capacity
    return capacity is not None and plan.peak_bytes < PLENTY * capacity


def memory_line(plan: Plan) -> str:
    """The plan of a run in one line, for its start."""
    phases = ", ".join(f"{phase.name} {phase.added_bytes / GiB:.2f}" for phase in plan.phases)
    room = "" if plan.machine.capacity is None else f" of {plan.machine.capacity / GiB:.2f}"
    fits = ""
    if plan.fits is False:
        is_packed = plan.resolved.rows.packing != "none"
        fullest = " with rows at their fullest" if is_packed else ""
        fits = f": DOES NOT FIT{fullest}, see `tunix-lite plan`"
    how = "at most" if plan.phases[-1].source == COMPILED else "by formula"
    peak = f"memory: {plan.peak_bytes / GiB:.2f}{room} GiB a device {how}{fits}"
    if plan.apart:
        peak += f", {sum(plan.apart.values()) / GiB:.2f} on one that only samples"
    if has_plenty(plan):
        return f"{peak} (plan.md)"
    return (
        f"{peak} ({plan.resident_bytes / GiB:.2f} for weights and optimizer, and {phases}; "
        f"update {plan.phases[-1].source}; plan.md)"
    )
