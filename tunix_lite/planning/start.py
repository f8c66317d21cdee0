"""At the start of a run: as large a micro-batch as fits, and what the run will take of each device's memory."""

from collections.abc import Callable
from pathlib import Path

from tunix_lite.config import ConfigError, RunConfig
from tunix_lite.planning import report
from tunix_lite.planning.case import Case, micro_batches_to_try, with_micro_batch
from tunix_lite.planning.hardware import GiB
from tunix_lite.planning.machine import attached
from tunix_lite.planning.plan import Plan, for_run, largest_micro_batch, put_together, settled
from tunix_lite.planning.programs import abstract, batch_shapes, compiled, lowered, of_executable
from tunix_lite.rollout.settings import RolloutConfig


def fitting(run: RunConfig, cfg, lora, mesh, say: Callable[[str], None]) -> RunConfig:
    """The run with training.micro_batch_size=auto as the largest number whose update, compiled, fits the devices.

    Raises ConfigError if not even one sequence does.
    """
    if run.training.micro_batch_size != "auto":
        return run
    machine = attached()
    if machine.capacity is None:
        raise ConfigError("training.micro_batch_size=auto: how much memory this device has is not known; give a number")

    def peak_of(size: int) -> int:
        case = settled(with_micro_batch(run, size), machine, cfg, lora, dict(mesh.shape))
        update = lowered(case, abstract(case))["update"]()
        plan = put_together(machine, case, {"update": compiled("update", update, mesh, machine.platform == "tpu")})
        say(f"micro_batch_size={size}: {plan.peak_bytes / GiB:.2f} GiB of {machine.capacity / GiB:.2f} a device")
        return plan.peak_bytes

    try:
        size = largest_micro_batch(micro_batches_to_try(run, mesh.shape["fsdp"]), peak_of, machine.capacity)
    except ValueError as error:
        raise ConfigError(f"training.micro_batch_size=auto: {error}; `tunix-lite plan` says what would fit") from error
    return with_micro_batch(run, size)


def foresee(
    run: RunConfig, cfg, lora, mesh, parts, rollout: RolloutConfig, train_step, state, frozen, folder: Path
) -> Plan:
    """Compiles the update, which the first step then finds ready; writes plan.md and plan.json.

    Where rows are packed, how many tokens count in them is only known with the first batch: then all is estimated.
    """
    sizes, done = dict(mesh.shape), {}
    case = Case(run, cfg, lora, sizes, parts.batch, parts.rows, rollout.num_slots, parts.attention[0], rollout.weights)
    if parts.rows.packing == "none":
        update = train_step.compiled(state, frozen, batch_shapes(case, run.algorithm.needs_reference))
        done["update"] = of_executable("update", update, sizes, code_on_device=attached().platform == "tpu")
    arguments = parts.rows, parts.batch, rollout.num_slots, rollout.weights
    plan = for_run(run, cfg, lora, mesh, *arguments, done, parts.attention[0])
    report.write(plan, folder)
    return plan


def in_short(plan: Plan) -> str:
    """The plan of a run in one line, for its start."""
    phases = ", ".join(f"{phase.name} {phase.added_bytes / GiB:.2f}" for phase in plan.phases)
    of = "" if plan.machine.capacity is None else f" of {plan.machine.capacity / GiB:.2f}"
    fits = {True: "", False: ": DOES NOT FIT, see `tunix-lite plan`", None: ""}[plan.fits]
    return (
        f"memory: {plan.peak_bytes / GiB:.2f}{of} GiB a device at most{fits} ({plan.resident_bytes / GiB:.2f} all the "
        f"time, and {phases}; update {plan.phases[-1].source}; plan.md)"
    )
