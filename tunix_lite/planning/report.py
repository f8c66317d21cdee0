"""A plan as people read it: one screen of text, plan.md with everything, plan.json for programs."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from tunix_lite.algorithms.algorithm import num_mini_batches
from tunix_lite.models import decoder, weights
from tunix_lite.planning.choices import Choice
from tunix_lite.planning.compare_run import PredictedRow
from tunix_lite.planning.forecast import Forecast
from tunix_lite.planning.hardware import GiB
from tunix_lite.planning.machine import Machine
from tunix_lite.planning.plan import ESTIMATE, ESTIMATE_MARGIN, Phase, Plan
from tunix_lite.planning.programs import Compiled

# of plan.json
VERSION = 1
# of hardware that is not in the table
UNKNOWN = "unknown"
# of the forecast of a task with an environment
SINGLE_TURNS = (
    "of single turns: the answers of the environment, and the seconds it takes, are not in it"
)
# meshes on one screen
SHOWN = 12


@dataclass(frozen=True)
class Plans:
    """All meshes that were looked at, the best first.

    Example: Plans((best, second), refused=(({"fsdp": 1, "tp": 3}, "tp=3 does not divide ..."),)).
    """

    plans: tuple[Plan, ...]
    refused: tuple[tuple[dict, str], ...] = ()  # meshes that cannot be, and why
    command: str | None = None  # one with which the best would fit, where it does not
    # what that does, and how much it was found to need; or that nothing would fit
    change: str | None = None
    # other settings of the best, the fastest first
    choices: tuple[Choice, ...] = ()
    # what the machine was measured to do; "": it is in the table
    measured: str = ""


def _all(plan: Plan | Plans) -> Plans:
    return plan if isinstance(plan, Plans) else Plans((plan,))


# ---- one screen


def short_form(plan: Plan | Plans) -> list[str]:
    """The plan as lines of plain text; its tables are at most 100 columns wide."""
    plans = _all(plan)
    best = plans.plans[0]
    lines = [*_head(best), ""]
    if len(plans.plans) > 1:
        lines += [*_meshes(plans.plans), ""]
    if plans.refused:
        lines += [*_refused(plans.refused), ""]
    lines += [f"{_mesh(best)}, GiB on a device:", *_phases(best), ""]
    lines += [
        f"{best.machine.name}: {verdict(best)}",
        *([speed(best)] if best.fits is not False else []),
    ]
    if best.forecast is not None:
        lines += forecast_lines(best.forecast, plans.measured)
        if best.resolved.converses:
            lines.append("  " + SINGLE_TURNS)
    lines += choice_lines(plans.choices)
    lines += [f"  {message}" for message in best.refused]
    lines += [plans.change] if plans.change else []
    lines += [f"  {plans.command}"] if plans.command else []
    return lines


def _head(plan: Plan) -> list[str]:
    resolved = plan.resolved
    machine = plan.machine
    kind = "" if machine.hardware is None else f" ({machine.hardware.kinds[0]})"
    count = weights.num_params(decoder.weights(resolved.cfg))
    training = resolved.run.training
    lora = resolved.lora
    trains = "all of them train"
    if lora is not None:
        trains = f"adapters of rank {lora.rank} train on a {lora.base} base"
    prompt, new = resolved.lengths
    return [
        f"devices    {machine.num_devices} of {machine.name}{kind}, {_room(machine)}",
        f"model      {count:,} parameters, {trains}, {training.mixed_precision}, remat "
        f"{training.remat}",
        f"batch      {resolved.batch}, of {prompt} + {new} tokens",
        *([f"packing    {resolved.packing_reason}"] if resolved.packing_reason else []),
        f"sampling   {resolved.slots} slots, weights {resolved.sampling_weights}; attention while "
        f"training: {resolved.attention}",
        *_parking(plan),
    ]


def _parking(plan: Plan) -> list[str]:
    """What becomes of the slots of conversations that wait, in a line; [] without conversations."""
    found = plan.parking
    if found is None:
        return []
    count = f"{plan.resolved.num_conversations} in {plan.resolved.slots} slots"
    fit = "" if found.num_that_fit is None else f", {found.num_that_fit:,} fit"
    each = f"{mebibytes(found.slot_bytes)} MiB each"
    if found.most is None:
        does = f"up to {found.without_slot:,} that wait are parked, if a host has room ({each})"
    elif found.most:
        total = f"{mebibytes(found.most_bytes)} MiB of each host"
        does = f"up to {found.most:,} that wait are parked in {total} ({each}{fit})"
    elif found.without_slot and found.waiting == "auto":
        does = f"those that wait hold their slots, as no host has room ({each})"
    else:
        does = "those that wait hold their slots"
    return [f"talks      {count}; {does}"]


def _room(machine: Machine) -> str:
    if machine.capacity is None:
        return "memory not known"
    return f"{gib(machine.capacity)} GiB each ({machine.capacity_is})"


def _meshes(plans: tuple[Plan, ...]) -> list[str]:
    # Predicted, and what is possible at best.
    heads = ("mesh", "peak GiB", "fits", "predicted s", "step s >=", "tokens/s <=", "memory is")
    rows = [heads]
    for plan in plans[:SHOWN]:
        fits = {True: "yes", False: "no", None: "?"}[plan.fits]
        cells = (
            gib(plan.peak_bytes),
            fits,
            "-" if plan.forecast is None else three_digits(plan.forecast.step_seconds),
            three_digits(plan.step_seconds),
            three_digits(plan.tokens_per_second),
        )
        rows.append((_mesh(plan), *cells, source(plan)))
    more = [f"  and {len(plans) - SHOWN} more in plan.md"] if len(plans) > SHOWN else []
    return [*columns(rows), *more]


def _refused(refused: tuple[tuple[dict, str], ...]) -> list[str]:
    more = [f"  and {len(refused) - SHOWN} more in plan.md"] if len(refused) > SHOWN else []
    return [*(f"  {_sizes(sizes)} cannot be: {why}" for sizes, why in refused[:SHOWN]), *more]


def _phases(plan: Plan) -> list[str]:
    rows = [("phase", "resident", "adds", "peak", "bound s", "by", "sends GB", "memory is")]
    for phase in plan.phases:
        peak = plan.resident_bytes + phase.added_bytes
        sizes = (gib(plan.resident_bytes), gib(phase.added_bytes), gib(peak))
        rows.append((phase.name, *sizes, *_speed(phase), source(phase)))
    resume = gib(plan.resume_bytes)
    rows.append(("resume", resume, gib(0), resume, "-", "-", "-", "by formula"))
    return columns(rows)


def _speed(phase: Phase) -> tuple[str, str, str]:
    if phase.bound is None:
        return "-", "-", "-"
    return (
        three_digits(phase.bound.seconds),
        phase.bound.limit or UNKNOWN,
        f"{phase.bound.all_sent_bytes / 1e9:,.2f}",
    )


def source(of: Plan | Phase) -> str:
    """Where its bytes come from, in words."""
    return f"an {ESTIMATE}" if of.source == ESTIMATE else of.source


def verdict(plan: Plan) -> str:
    """Whether it fits, and by how much."""
    peak = f"{gib(plan.peak_bytes)} GiB ({plan.fullest.name}, {source(plan)})"
    capacity = plan.machine.capacity
    if plan.fits is None:
        return f"peak {peak}; how much there is, nobody knows"
    if not plan.fits:
        return f"does not fit: peak {peak} of {gib(capacity)}"
    margin = ""
    if plan.is_near_the_limit:
        margin = f"; an estimate may be wrong by {ESTIMATE_MARGIN:.0%}, and less than that is free"
    return f"fits: peak {peak} of {gib(capacity)}, {plan.peak_bytes / capacity:.0%}{margin}"


def speed(plan: Plan) -> str:
    """What it can reach at best."""
    if plan.step_seconds is None:
        return "speed: unknown, as the peak of this hardware is not known"
    rate = plan.tokens_per_second
    devices = plan.machine.num_devices
    took = f"a step takes at least {three_digits(plan.step_seconds)} s"
    return f"speed: {took}: at most {rate:,.0f} tokens/s, {rate / devices:,.0f} a device"


def forecast_lines(found: Forecast, measured: str = "") -> list[str]:
    """The predicted step: phases, tokens/s, hours and the price."""
    parts = "1 micro-batch" if found.parts == 1 else f"{found.parts} micro-batches"
    phases = ", ".join(f"{name} {three_digits(seconds)}" for name, seconds in found.seconds.items())
    lines = [
        f"predicted: a step takes {three_digits(found.step_seconds)} s: {phases}",
        f"  {found.tokens_per_second:,.0f} tokens/s; {found.decode_steps} decode steps, slots "
        f"{found.slot_use:.0%} in use; {parts}",
        f"  {found.num_steps} steps take {duration(found.hours)}{price_text(found)}, without "
        "starting and evaluating",
        f"  {found.source}",
        f"  lengths {found.lengths}",
    ]
    return [*lines, f"  {measured}"] if measured else lines


def compared_lines(rows: list[PredictedRow]) -> list[str]:
    """Predicted against measured, phase by phase."""
    cells = [("", "predicted", "measured", "off by")]
    for row in rows:
        took = "-" if row.measured is None else three_digits(row.measured)
        off = "-" if row.off is None else f"{row.off:+.0%}"
        cells.append((row.name, three_digits(row.predicted), took, off))
    return columns(cells)


def price_text(found: Forecast) -> str:
    """Of the whole run; "" if no price is given."""
    if found.price is None:
        return ""
    return f" and cost {found.price:,.2f}, at {found.price_per_hour:,.2f} an hour"


def duration(hours: float) -> str:
    """Hours, or minutes where they are few."""
    return f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:,.1f} min"


def choice_lines(choices: tuple[Choice, ...]) -> list[str]:
    """Other settings that fit, by the predicted time of a step."""
    if not choices:
        return []
    rows = [("step s", "peak GiB", "with")]
    for choice in choices:
        step = three_digits(choice.forecast.step_seconds)
        rows.append((step, gib(choice.peak_bytes), " ".join(choice.overrides) or "(as it is)"))
    title = "other settings, the fastest first (their times and memory are estimates):"
    return [title, *columns(rows)]


def gib(size: float) -> str:
    """Bytes in GiB."""
    return f"{size / GiB:.2f}"


def mebibytes(size: float) -> str:
    """Bytes in MiB."""
    return f"{size / 2**20:,.2f}"


def three_digits(value: float | None) -> str:
    """To three digits."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _mesh(plan: Plan) -> str:
    return " ".join(f"{axis}={size}" for axis, size in plan.resolved.mesh_shape.items())


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
        for row in rows
    ]


# ---- files


def write(plan: Plan | Plans, folder: str | Path) -> None:
    """plan.md and plan.json into `folder`, which is made if it is not there."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.md").write_text(as_markdown(plan))
    (folder / "plan.json").write_text(json.dumps(as_dict(plan), indent=2) + "\n")


def as_markdown(plan: Plan | Plans) -> str:
    plans = _all(plan)
    lines = ["# Plan", "", "```text", *short_form(plans), "```", ""]
    for one in plans.plans:
        lines += [
            f"## {_mesh(one)}",
            "",
            f"{verdict(one)}.",
            "",
            f"{speed(one)}.",
            "",
            *_parts(one),
            *_programs(one),
        ]
    if plans.refused:
        lines += [
            "## Meshes that cannot be",
            "",
            *(f"- {_sizes(sizes)}: {why}" for sizes, why in plans.refused),
            "",
        ]
    return "\n".join(lines)


def _sizes(sizes: dict) -> str:
    return " ".join(f"{axis}={size}" for axis, size in sizes.items())


def _parts(plan: Plan) -> list[str]:
    """What lies on a device in each phase, by part."""
    lines = ["| phase | part | GiB | is |", "|---|---|---|---|"]
    lines += [
        f"| always | {part} | {gib(size)} | by formula |" for part, size in plan.resident.items()
    ]
    for phase in plan.phases:
        lines += [
            f"| {phase.name} | {part} | {gib(size)} | {phase.source} |"
            for part, size in phase.adds.items()
        ]
    lines += [
        f"| device that only samples | {part} | {gib(size)} | by formula |"
        for part, size in plan.apart.items()
    ]
    lines.append(
        f"| resume | a checkpoint, read where it stays | {gib(plan.resume_bytes)} | by formula |"
    )
    lines += [
        "",
        "| phase | TFLOP, all devices | GB read, a device | GB sent, a device | seconds at least | "
        "bound by |",
    ]
    lines += ["|---|---|---|---|---|---|"]
    for phase in (phase for phase in plan.phases if phase.bound is not None):
        bound = phase.bound
        moved = f"{bound.read_bytes / 1e9:,.2f} | {bound.all_sent_bytes / 1e9:,.2f}"
        took = f"{three_digits(bound.seconds)} | {bound.limit or UNKNOWN}"
        lines.append(f"| {phase.name} | {bound.flops / 1e12:,.2f} | {moved} | {took} |")
    return [*lines, ""]


def _programs(plan: Plan) -> list[str]:
    """What the compiler said of each program, and what each call of it sends."""
    if not plan.programs:
        return []
    lines = ["| program | arguments GiB | results beside | temporary | code | compiled in s |"]
    lines += ["|---|---|---|---|---|---|"]
    for program in plan.programs.values():
        beside = program.output_bytes - program.alias_bytes
        sizes = (program.argument_bytes, beside, program.temp_bytes, program.code_bytes)
        lines.append(
            f"| {program.name} | {' | '.join(map(gib, sizes))} | {program.compile_seconds:.0f} |"
        )
    lines += [
        "",
        "| program | collective | axis | times | buffers, MB | sent, MB |",
        "|---|---|---|---|---|---|",
    ]
    for program in plan.programs.values():
        for g in program.collectives:
            moved = f"{g.total_bytes / 1e6:,.2f} | {g.sent_bytes / 1e6:,.2f}"
            times = f"{g.count}{'' if g.count_known else ' at least'}"
            lines.append(f"| {program.name} | {g.kind} | {g.axis} | {times} | {moved} |")
    return [*lines, ""]


def as_dict(plan: Plan | Plans) -> dict:
    """plan.json: bytes are those of one device, seconds and tokens those of a bound."""
    plans = _all(plan)
    machine = plans.plans[0].machine
    return {
        "version": VERSION,
        "target": machine.name,
        "hardware": machine.hardware and machine.hardware.name,
        "devices": machine.num_devices,
        "capacity_bytes": machine.capacity,
        "plans": [_plan_dict(one) for one in plans.plans],
        "refused": [{"mesh": sizes, "reason": why} for sizes, why in plans.refused],
        "command_that_fits": plans.command,
        "advice": plans.change,
        **_predicted_dict(plans),
    }


def _predicted_dict(plans: Plans) -> dict:
    """What only a plan with a forecast has; a run writes plan.json without."""
    if all(plan.forecast is None for plan in plans.plans):
        return {}
    return {
        "choices": [_choice_dict(one) for one in plans.choices],
        "measured": plans.measured or None,
    }


def _plan_dict(plan: Plan) -> dict:
    forecast = {} if plan.forecast is None else {"forecast": _forecast_dict(plan.forecast)}
    return {
        "mesh": plan.resolved.mesh_shape,
        **({"device_that_only_samples": plan.apart} if plan.apart else {}),
        "batch": str(plan.resolved.batch),
        "prompts_of_rollout": plan.resolved.batch.prompts
        * num_mini_batches(plan.resolved.run.algorithm),
        "packing": plan.resolved.rows.packing,
        "slots": plan.resolved.slots,
        **_parking_dict(plan),
        "sampling_weights": plan.resolved.sampling_weights,
        "attention": plan.resolved.attention,
        "source": plan.source,
        "fits": plan.fits,
        "peak_bytes": plan.peak_bytes,
        "peak_phase": plan.fullest.name,
        "resume_peak_bytes": plan.resume_bytes,
        "resident_bytes": plan.resident,
        "phases": [dataclasses.asdict(phase) for phase in plan.phases],
        "programs": [_program_dict(program) for program in plan.programs.values()],
        "refused_by_the_compiler": list(plan.refused),
        "step_seconds": plan.step_seconds,
        "tokens_per_second": plan.tokens_per_second,
        **forecast,
    }


def _parking_dict(plan: Plan) -> dict:
    """Only of a run with conversations."""
    found = plan.parking
    if found is None:
        return {}
    return {
        "conversations": plan.resolved.num_conversations,
        "parking": {
            "slot_bytes": found.slot_bytes,
            "most": found.most,
            "most_bytes": found.most_bytes,
            "num_that_fit": found.num_that_fit,
        },
    }


def _program_dict(program: Compiled) -> dict:
    """Without its kernels, of which there are thousands."""
    found = dataclasses.asdict(dataclasses.replace(program, kernels=()))
    return {name: value for name, value in found.items() if name != "kernels"}


def _forecast_dict(found: Forecast) -> dict:
    derived = {
        "step_seconds": found.step_seconds,
        "tokens_per_second": found.tokens_per_second,
        "hours": found.hours,
        "price": found.price,
    }
    return dataclasses.asdict(found) | derived


def _choice_dict(choice: Choice) -> dict:
    return {
        "overrides": list(choice.overrides),
        "peak_bytes": choice.peak_bytes,
        "step_seconds": choice.forecast.step_seconds,
    }
