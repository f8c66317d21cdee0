"""A plan as people read it: one screen of text, and plan.json with every part."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

from tunix_lite.basics.plain_text import counted
from tunix_lite.models import decoder, weights
from tunix_lite.models.sizes import shape_line
from tunix_lite.planning.hardware import GiB
from tunix_lite.planning.plan import ESTIMATE, ESTIMATE_MARGIN, Phase, Plan

# of plan.json
_VERSION = 1
# meshes on one screen
_SHOWN = 12


@dataclass(frozen=True)
class Plans:
    """All meshes that were looked at, the best first. Example: Plans((best, second),
    refused=(({"fsdp": 1, "tp": 3}, "tp=3 does not divide ..."),))."""

    plans: tuple[Plan, ...]
    refused: tuple[tuple[dict, str], ...] = ()  # meshes that cannot be, and why
    command: str | None = None  # one with which the best would fit, where it does not
    # what that does, and how much it was found to need; or that nothing would fit
    change: str | None = None

    def short_form(self) -> list[str]:
        """The plans as lines of plain text; their tables are at most 100 columns wide."""
        best = self.plans[0]
        resolved = best.resolved
        machine = best.machine
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
        has_rule = resolved.run.model.target_params is not None
        lines = [
            f"devices    {machine.num_devices} of {machine.name}{kind}, {room}",
            f"model      {count:,} parameters, {trains}, {training.mixed_precision}{why}, remat "
            f"{training.remat}",
            *([f"shape      {shape_line(resolved.cfg)}"] if has_rule else []),
            f"batch      {resolved.batch}, of {prompt} + {new} tokens",
            *([f"packing    {resolved.packing_reason}"] if resolved.packing_reason else []),
            f"sampling   {resolved.slots} slots, weights {resolved.sampling_weights}; attention "
            f"while training: {resolved.attention}",
            "",
        ]
        if len(self.plans) > 1:
            rows = [("mesh", "peak GiB", "fits", "predicted s", "memory is")]
            for one in self.plans[:_SHOWN]:
                fits = {True: "yes", False: "no", None: "?"}[one.fits]
                predicted = _three_digits(one.forecast.step_seconds) if one.forecast else "-"
                mesh = _sizes(one.resolved.mesh_shape)
                rows.append((mesh, gib(one.peak_bytes), fits, predicted, source(one)))
            lines += [*columns(rows), *_more(self.plans), ""]
        if self.refused:
            lines += [
                f"  {_sizes(sizes)} cannot be: {why}" for sizes, why in self.refused[:_SHOWN]
            ]
            lines += [*_more(self.refused), ""]

        # The best one: its phases, whether it fits, and how fast it is.
        rows = [("phase", "resident", "adds", "peak", "memory is")]
        for phase in best.phases:
            peak = best.resident_bytes + phase.added_bytes
            sizes = map(gib, (best.resident_bytes, phase.added_bytes, peak))
            rows.append((phase.name, *sizes, source(phase)))
        lines += [f"{_sizes(best.resolved.mesh_shape)}, GiB on a device:", *columns(rows), ""]
        peak = f"{gib(best.peak_bytes)} GiB ({best.fullest.name}, {source(best)})"
        capacity = best.machine.capacity
        if best.fits is None:
            verdict = f"peak {peak}; how much there is, nobody knows"
        elif not best.fits:
            verdict = f"does not fit: peak {peak} of {gib(capacity)}"
        else:
            verdict = f"fits: peak {peak} of {gib(capacity)}, {best.peak_bytes / capacity:.0%}"
        if best.is_near_the_limit:
            margin = f"{ESTIMATE_MARGIN:.0%}"
            verdict += f"; an estimate may be wrong by {margin}, and less than that is free"
        lines += [f"{best.machine.name}: {verdict}"]
        if (step := best.forecast) is not None:
            parts = "1 micro-batch" if step.parts == 1 else f"{step.parts} micro-batches"
            phases = ", ".join(
                f"{name} {_three_digits(s)}" for name, s in step.seconds.items()
            )
            hours = (
                f"{step.hours:,.1f} h" if step.hours >= 1 else f"{60 * step.hours:,.1f} min"
            )
            lines += [
                f"predicted: a step takes {_three_digits(step.step_seconds)} s: {phases}",
                f"  {step.tokens_per_second:,.0f} tokens/s; {step.decode_steps} decode steps; "
                f"{parts}",
                f"  {counted(step.num_steps, 'step')} take {hours}, without starting and "
                "evaluating",
                f"  {step.source}",
                f"  {step.lengths}",
            ]
            if best.resolved.converses:
                lines.append("  of single turns: what the environment does is not in it")
        lines += [f"  {message}" for message in best.refused]
        lines += [self.change] if self.change else []
        return lines + ([f"  {self.command}"] if self.command else [])

    def write(self, folder: Path) -> None:
        """plan.json into `folder`, which is made if it is not there."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.json").write_text(json.dumps(self.as_dict(), indent=2) + "\n")

    def as_dict(self) -> dict:
        """plan.json: bytes are those of one device."""
        machine = self.plans[0].machine
        plan_dicts = []
        for one in self.plans:
            # Without their kernels, of which there are thousands.
            programs = [
                dataclasses.asdict(dataclasses.replace(p, kernels=()))
                for p in one.programs.values()
            ]
            for program in programs:
                del program["kernels"]
            described = {
                "mesh": one.resolved.mesh_shape,
                "batch": str(one.resolved.batch),
                "prompts_of_rollout": one.resolved.batch.prompts
                * one.resolved.needs.mini_batches,
                "packing": one.resolved.rows.packing,
                "slots": one.resolved.slots,
                "sampling_weights": one.resolved.sampling_weights,
                "attention": one.resolved.attention,
                "source": one.source,
                "fits": one.fits,
                "peak_bytes": one.peak_bytes,
                "peak_phase": one.fullest.name,
                "resume_peak_bytes": one.resume_bytes,
                "resident_bytes": one.resident,
                "phases": [dataclasses.asdict(phase) for phase in one.phases],
                "programs": programs,
                "refused_by_the_compiler": list(one.refused),
            }
            if one.evaluation_bytes is not None:
                described["evaluation_peak_bytes"] = one.evaluation_bytes
            if one.apart:
                described["device_that_only_samples"] = one.apart
            if one.resolved.converses:
                described["conversations"] = max(
                    math.prod(each) for each in one.resolved.rollouts
                )
            if one.forecast is not None:
                names = ("step_seconds", "tokens_per_second", "hours")
                derived = {name: getattr(one.forecast, name) for name in names}
                described["forecast"] = dataclasses.asdict(one.forecast) | derived
            plan_dicts.append(described)
        return {
            "version": _VERSION,
            "target": machine.name,
            "hardware": machine.hardware and machine.hardware.name,
            "devices": machine.num_devices,
            "capacity_bytes": machine.capacity,
            "plans": plan_dicts,
            "refused": [{"mesh": sizes, "reason": why} for sizes, why in self.refused],
            "command_that_fits": self.command,
            "advice": self.change,
        }


def _more(meshes: tuple) -> list[str]:
    return [f"  and {len(meshes) - _SHOWN} more in plan.json"] if len(meshes) > _SHOWN else []


def source(of: Plan | Phase) -> str:
    """Where its bytes come from, in words."""
    return f"an {ESTIMATE}" if of.source == ESTIMATE else of.source


def gib(size: float) -> str:
    """Bytes in GiB."""
    return f"{size / GiB:.2f}"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _sizes(sizes: dict) -> str:
    return " ".join(f"{axis}={size}" for axis, size in sizes.items())


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
