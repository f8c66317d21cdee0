"""At the start of a run: as large a micro-batch as fits, and what the run will take of each
device's memory."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tunix_lite.config import RunConfig
from tunix_lite.errors import ConfigError
from tunix_lite.learner.policy import Policy
from tunix_lite.models.source import FoundModel
from tunix_lite.parallel.mesh import current_mesh
from tunix_lite.planning import estimate
from tunix_lite.planning.advice import advice
from tunix_lite.planning.hardware import GiB
from tunix_lite.planning.machine import attached
from tunix_lite.planning.plan import Plan, largest_micro_batch, put_together, read, settled
from tunix_lite.planning.programs import (
    abstract,
    batch_shapes,
    compiled,
    scored_batch_shapes,
    train_step_of,
    update_arguments,
)
from tunix_lite.planning.resolved import Case, micro_batches_to_try, slots_of, with_micro_batch


def choose_micro_batch(
    run: RunConfig, model: FoundModel, say: Callable[[str], None]
) -> tuple[RunConfig, Callable]:
    """The run with the largest micro-batch whose update, compiled, fits the devices; and that
    update, ready to train.

    model: has cfg and lora. Raises ConfigError if not even one sequence fits.
    """
    machine, sizes, tried = attached(), dict(current_mesh().shape), {}
    if machine.capacity is None:
        raise ConfigError(
            "training.micro_batch_size=auto: how much memory this device has is not known; give a "
            "number"
        )

    def peak_of(size: int) -> int:
        case = settled(with_micro_batch(run, size), machine, model.cfg, model.lora, sizes)
        arguments, tried[size] = update_arguments(case, abstract(case)), train_step_of(case)
        update = compiled(
            "update", lambda: tried[size].compiled(*arguments), sizes, machine.platform == "tpu"
        )
        peak = put_together(machine, case, {"update": update}).peak_bytes
        say(
            f"micro_batch_size={size}: {peak / GiB:.2f} GiB of {machine.capacity / GiB:.2f} a "
            "device"
        )
        return peak

    try:
        size = largest_micro_batch(
            micro_batches_to_try(run, sizes["fsdp"]), peak_of, machine.capacity
        )
    except ValueError as error:
        raise ConfigError(
            f"training.micro_batch_size=auto: {error}; `tunix-lite plan` says what would fit"
        ) from error
    return with_micro_batch(run, size), tried[size]


def training_programs(
    case: Case, policy: Policy, train_step: Callable, state, frozen
) -> dict[str, Callable]:
    """What compiles the programs that learn, for the widest batch that can come; batches as wide
    find them ready."""
    batch = batch_shapes(case)
    programs = {"update": partial(train_step.compiled, state, frozen, batch)}
    if "reference" in policy.scorers:
        scorer = policy.scorers["reference"]
        programs["scoring"] = partial(scorer.compiled, scored_batch_shapes(case))
    return programs


def plan_of_this_run(case: Case, programs: dict[str, Callable]) -> Plan:
    """The plan of a run that is about to start on the attached devices.

    programs: those of `training_programs`.

    Raises ConfigError if the compiler refuses one. Of packed rows it may: what is compiled here is
    the widest that can come, and batches as they come may fit.
    """
    plan = read(attached(), case, programs)
    if plan.refused and case.rows.packing == "none":
        raise ConfigError(
            f"does not fit: {'; '.join(plan.refused)}; `tunix-lite plan` says what would"
        )
    return plan


def check_at_rest(case: Case, say: Callable[[str], None]) -> None:
    """Before anything is loaded: `check_fits` of what is known exactly, whatever the compiler will
    say.

    That is what stays on a device, and while sampling the weights, the cache and the prompts that
    wait.
    """
    machine, fsdp = attached(), case.sizes["fsdp"]
    case = replace(case, slots=slots_of(case.run, case.batch, fsdp))
    plan = read(machine, replace(case, weights=estimate.choose_weights(case, machine.capacity)), {})
    known = [
        {
            part: size
            for part, size in phase.adds.items()
            if phase.name == "rollout" and part != "temporary"
        }
        for phase in plan.phases
    ]
    check_fits(
        replace(
            plan, phases=tuple(replace(phase, adds=adds) for phase, adds in zip(plan.phases, known))
        ),
        say,
    )


def check_fits(plan: Plan, say: Callable[[str], None]) -> None:
    """Raises ConfigError, with what would fit, where the plan of a run does not;
    training.memory_check=warn says it.

    Of packed rows only sampling counts: their update and scoring are planned at their fullest, and
    batches as they come may fit. How much memory there is may not be known: then nothing is
    checked.
    """
    packed, capacity = plan.case.rows.packing != "none", plan.machine.capacity
    phase = max(
        plan.phases,
        key=lambda phase: 0 if packed and phase.name != "rollout" else phase.added_bytes,
    )
    added = 0 if packed and phase.name != "rollout" else phase.added_bytes
    peak = plan.resident_bytes + added
    if capacity is None or peak <= capacity:
        return
    parts = f"{plan.resident_bytes / GiB:.2f} all the time and {added / GiB:.2f} for {phase.name}"
    over = (
        f"{peak / GiB:.2f} GiB of {capacity / GiB:.2f} a device, {(peak - capacity) / GiB:.2f} too "
        f"much ({parts})"
    )
    problem = f"the run does not fit: {over}; {_remedy(plan)}"
    if plan.case.run.training.memory_check == "warn":
        say(f"{problem}; it starts all the same, as training.memory_check=warn says")
        return
    raise ConfigError(f"{problem}; or training.memory_check=warn starts it all the same")


def _remedy(plan: Plan) -> str:
    """What would make it fit, by formulas: nothing is compiled for it."""
    run = plan.case.run
    # of a hub model, not to ask again
    known = replace(run, model=replace(run.model, architecture=plan.case.cfg))
    overrides, found = advice(replace(plan, case=replace(plan.case, run=known)))
    takes = f"{found.peak_bytes / GiB:.2f} GiB"
    if found.fits:
        return f"it would fit, by an estimate of {takes}, with {' '.join(overrides)}"
    least = f"the least by an estimate is {takes}" + (
        f", with {' '.join(overrides)}" if overrides else ""
    )
    return f"nothing that was tried fits here, {least}"


def memory_line(plan: Plan) -> str:
    """The plan of a run in one line, for its start."""
    phases = ", ".join(f"{phase.name} {phase.added_bytes / GiB:.2f}" for phase in plan.phases)
    of = "" if plan.machine.capacity is None else f" of {plan.machine.capacity / GiB:.2f}"
    fullest = "" if plan.case.rows.packing == "none" else " with rows at their fullest"
    fits = {True: "", False: f": DOES NOT FIT{fullest}, see `tunix-lite plan`", None: ""}[plan.fits]
    return (
        f"memory: {plan.peak_bytes / GiB:.2f}{of} GiB a device at most{fits} "
        f"({plan.resident_bytes / GiB:.2f} all the "
        f"time, and {phases}; update {plan.phases[-1].source}; plan.md)"
    )
