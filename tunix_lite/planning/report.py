"""A plan as people read it: one screen of text, plan.md with every part, plan.json for programs."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from tunix_lite.models import decoder, weights
from tunix_lite.planning.forecast import Forecast, PredictedRow
from tunix_lite.planning.hardware import GiB
from tunix_lite.planning.plan import ESTIMATE, ESTIMATE_MARGIN, Phase, Plan
from tunix_lite.planning.programs import Compiled

# of plan.json
VERSION = 1
# of hardware that is not in the table
UNKNOWN = "unknown"
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


def _all(plan: Plan | Plans) -> Plans:
    return plan if isinstance(plan, Plans) else Plans((plan,))


# ---- one screen


def short_form(plan: Plan | Plans) -> list[str]:
    """The plan as lines of plain text; its tables are at most 100 columns wide."""
    plans = _all(plan)
    best = plans.plans[0]
    lines = [*_head(best), ""]
    if len(plans.plans) > 1:
        lines += [*_meshes(plans.plans), *_left_out(plans.plans), ""]
    if plans.refused:
        lines += [f"  {_sizes(sizes)} cannot be: {why}" for sizes, why in plans.refused[:SHOWN]]
        lines += [*_left_out(plans.refused), ""]
    lines += [f"{_sizes(best.resolved.mesh_shape)}, GiB on a device:", *_phases(best), ""]
    lines += [f"{best.machine.name}: {verdict(best)}"]
    lines += [speed(best)] if best.fits is not False else []
    if best.forecast is not None:
        lines += forecast_lines(best.forecast)
        if best.resolved.converses:
            lines.append("  of single turns: what the environment does is not in it")
    lines += [f"  {message}" for message in best.refused]
    lines += [plans.change] if plans.change else []
    lines += [f"  {plans.command}"] if plans.command else []
    return lines


def _left_out(rows: tuple) -> list[str]:
    return [f"  and {len(rows) - SHOWN} more in plan.md"] if len(rows) > SHOWN else []


def _head(plan: Plan) -> list[str]:
    resolved = plan.resolved
    machine = plan.machine
    kind = "" if machine.hardware is None else f" ({machine.hardware.kinds[0]})"
    room = "memory not known"
    if machine.capacity is not None:
        room = f"{gib(machine.capacity)} GiB each ({machine.capacity_is})"
    count = weights.num_params(decoder.weights(resolved.cfg))
    training = resolved.run.training
    lora = resolved.lora
    trains = "all of them train"
    if lora is not None:
        trains = f"adapters of rank {lora.rank} train on a {lora.base} base"
    prompt, new = resolved.lengths
    why = f" ({resolved.precision_reason})" if resolved.precision_reason else ""
    attention = f"attention while training: {resolved.attention}"
    lines = {
        "devices": f"{machine.num_devices} of {machine.name}{kind}, {room}",
        "model": f"{count:,} parameters, {trains}, {training.mixed_precision}{why}, remat "
        f"{training.remat}",
        "batch": f"{resolved.batch}, of {prompt} + {new} tokens",
        "packing": resolved.packing_reason,
        "sampling": f"{resolved.slots} slots, weights {resolved.sampling_weights}; {attention}",
        "talks": _parking(plan),
    }
    return [f"{name:<11}{text}" for name, text in lines.items() if text]


def _parking(plan: Plan) -> str:
    """Says what becomes of the slots of conversations that wait; "" without conversations."""
    parking = plan.parking
    if parking is None:
        return ""
    count = f"{plan.resolved.num_conversations} in {plan.resolved.slots} slots"
    fit = "" if parking.num_that_fit is None else f", {parking.num_that_fit:,} fit"
    each = f"{parking.slot_bytes / 2**20:,.2f} MiB each"
    does = "those that wait hold their slots"
    if parking.most is None:
        waiting = f"up to {parking.without_slot:,} that wait are parked"
        does = f"{waiting}, if a host has room ({each})"
    elif parking.most:
        total = f"{parking.most_bytes / 2**20:,.2f} MiB of each host"
        does = f"up to {parking.most:,} that wait are parked in {total} ({each}{fit})"
    elif parking.without_slot and parking.waiting == "auto":
        does += f", as no host has room ({each})"
    return f"{count}; {does}"


def _meshes(plans: tuple[Plan, ...]) -> list[str]:
    # Predicted, and what is possible at best.
    rows = [("mesh", "peak GiB", "fits", "predicted s", "step s >=", "tokens/s <=", "memory is")]
    for plan in plans[:SHOWN]:
        fits = {True: "yes", False: "no", None: "?"}[plan.fits]
        predicted = "-" if plan.forecast is None else three_digits(plan.forecast.step_seconds)
        bound = (three_digits(plan.step_seconds), three_digits(plan.tokens_per_second))
        peak = gib(plan.peak_bytes)
        rows.append((_sizes(plan.resolved.mesh_shape), peak, fits, predicted, *bound, source(plan)))
    return columns(rows)


def _phases(plan: Plan) -> list[str]:
    rows = [("phase", "resident", "adds", "peak", "bound s", "by", "sends GB", "memory is")]
    for phase in plan.phases:
        bound = phase.bound
        speeds = ("-", "-", "-")
        if bound is not None:
            sent = f"{bound.all_sent_bytes / 1e9:,.2f}"
            speeds = (three_digits(bound.seconds), bound.limit or UNKNOWN, sent)
        peak = plan.resident_bytes + phase.added_bytes
        sizes = map(gib, (plan.resident_bytes, phase.added_bytes, peak))
        rows.append((phase.name, *sizes, *speeds, source(phase)))
    resume = gib(plan.resume_bytes)
    rows.append(("resume", resume, gib(0), resume, "-", "-", "-", "by formula"))
    return columns(rows)


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
    """The speed that it can reach at best."""
    if plan.step_seconds is None:
        return "speed: unknown, as the peak of this hardware is not known"
    rate = plan.tokens_per_second
    rates = f"{rate:,.0f} tokens/s, {rate / plan.machine.num_devices:,.0f} a device"
    return f"speed: a step takes at least {three_digits(plan.step_seconds)} s: at most {rates}"


def forecast_lines(forecast: Forecast) -> list[str]:
    """The predicted step: phases, tokens/s, hours and the price."""
    parts = f"{forecast.parts} micro-batch{'' if forecast.parts == 1 else 'es'}"
    seconds = forecast.seconds.items()
    phases = ", ".join(f"{name} {three_digits(value)}" for name, value in seconds)
    hours = forecast.hours
    took = f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:,.1f} min"
    if forecast.price is not None:
        took += f" and cost {forecast.price:,.2f}, at {forecast.price_per_hour:,.2f} an hour"
    speed = f"{forecast.tokens_per_second:,.0f} tokens/s"
    return [
        f"predicted: a step takes {three_digits(forecast.step_seconds)} s: {phases}",
        f"  {speed}; {forecast.decode_steps} decode steps; {parts}",
        f"  {forecast.num_steps} steps take {took}, without starting and evaluating",
        f"  {forecast.source}",
        f"  lengths {forecast.lengths}",
    ]


def compared_lines(rows: list[PredictedRow]) -> list[str]:
    """Predicted against measured, phase by phase."""
    cells = [("", "predicted", "measured", "off by")]
    for row in rows:
        took = "-" if row.measured is None else three_digits(row.measured)
        off = "-" if row.off is None else f"{row.off:+.0%}"
        cells.append((row.name, three_digits(row.predicted), took, off))
    return columns(cells)


def gib(size: float) -> str:
    """Bytes in GiB."""
    return f"{size / GiB:.2f}"


def three_digits(value: float | None) -> str:
    """To three digits."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _sizes(sizes: dict) -> str:
    return " ".join(f"{axis}={size}" for axis, size in sizes.items())


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    """A table as lines."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    cells = [[cell.ljust(width) for cell, width in zip(row, widths)] for row in rows]
    return ["  " + "  ".join(row).rstrip() for row in cells]


# ---- files


def write(plan: Plan | Plans, folder: str | Path) -> None:
    """plan.md and plan.json into `folder`, which is made if it is not there."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.md").write_text(as_markdown(plan))
    (folder / "plan.json").write_text(json.dumps(as_dict(plan), indent=2) + "\n")


def as_markdown(plan: Plan | Plans) -> str:
    """plan.md: the short form, and for each mesh what lies on a device and what is sent."""
    plans = _all(plan)
    lines = ["# Plan", "", "```text", *short_form(plans), "```", ""]
    for one in plans.plans:
        lines += [f"## {_sizes(one.resolved.mesh_shape)}", "", f"{verdict(one)}.", ""]
        lines += [f"{speed(one)}.", "", *_markdown_table(_parts(one))]
        lines += _markdown_table(_collectives(one))
    if plans.refused:
        lines += ["## Meshes that cannot be", ""]
        lines += [*(f"- {_sizes(sizes)}: {why}" for sizes, why in plans.refused), ""]
    return "\n".join(lines)


def _markdown_table(rows: list[tuple[str, ...]]) -> list[str]:
    """The first row is the head; nothing is written of it alone."""
    if len(rows) < 2:
        return []
    head, *lines = [f"| {' | '.join(row)} |" for row in rows]
    return [head, f"|{'---|' * len(rows[0])}", *lines, ""]


def _parts(plan: Plan) -> list[tuple[str, ...]]:
    """The parts of memory of a device in each phase."""
    groups = [("always", plan.resident, "by formula")]
    groups += [(phase.name, phase.adds, phase.source) for phase in plan.phases]
    groups.append(("device that only samples", plan.apart, "by formula"))
    resume = {"a checkpoint, read where it stays": plan.resume_bytes}
    groups.append(("resume", resume, "by formula"))
    return [("phase", "part", "GiB", "is")] + [
        (name, part, gib(size), source)
        for name, sizes, source in groups
        for part, size in sizes.items()
    ]


def _collectives(plan: Plan) -> list[tuple[str, ...]]:
    """The bytes that each call of a compiled program sends."""
    rows = [("program", "collective", "axis", "times", "sent, MB")]
    for program in plan.programs.values():
        for group in program.collectives:
            times = f"{group.count}{'' if group.count_known else ' at least'}"
            sent = f"{group.sent_bytes / 1e6:,.2f}"
            rows.append((program.name, group.kind, group.axis, times, sent))
    return rows


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
    }


def _plan_dict(plan: Plan) -> dict:
    resolved = plan.resolved
    values = {
        "mesh": resolved.mesh_shape,
        "batch": str(resolved.batch),
        "prompts_of_rollout": resolved.batch.prompts * resolved.run.algorithm.needs.mini_batches,
        "packing": resolved.rows.packing,
        "slots": resolved.slots,
        "sampling_weights": resolved.sampling_weights,
        "attention": resolved.attention,
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
    }
    if plan.apart:
        values["device_that_only_samples"] = plan.apart
    if plan.parking is not None:
        values["conversations"] = resolved.num_conversations
        names = ("slot_bytes", "most", "most_bytes", "num_that_fit")
        values["parking"] = {name: getattr(plan.parking, name) for name in names}
    if plan.forecast is not None:
        names = ("step_seconds", "tokens_per_second", "hours", "price")
        derived = {name: getattr(plan.forecast, name) for name in names}
        values["forecast"] = dataclasses.asdict(plan.forecast) | derived
    return values


def _program_dict(program: Compiled) -> dict:
    """Without its kernels, of which there are thousands."""
    values = dataclasses.asdict(dataclasses.replace(program, kernels=()))
    return {name: value for name, value in values.items() if name != "kernels"}
