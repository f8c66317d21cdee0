"""`tunix-lite plan model=gemma3_1b target=v5e-16 mesh=all`: what fits, and how fast it is."""

import operator
import os
import shlex
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

import jax
import numpy as np

from tunix_lite.basics.errors import ConfigError, RunFailed, error_context
from tunix_lite.basics.untrusted import as_path, read_object
from tunix_lite.commands import program
from tunix_lite.distributed.host_memory import prepare_gpu
from tunix_lite.parallel.mesh import as_text, resolve_mesh_shape
from tunix_lite.planning import plan as planning
from tunix_lite.planning.advice import advice
from tunix_lite.planning.forecast import forecast
from tunix_lite.planning.hardware import devices_of, find_machine
from tunix_lite.planning.lengths import Lengths
from tunix_lite.planning.plan import Plan
from tunix_lite.planning.plans import Plans, columns, gib, source
from tunix_lite.report.evidence import read_evidence, read_overrides
from tunix_lite.settings.config import RunConfig
from tunix_lite.settings.resolved_run import find_model

# the best plan first
_RANK = operator.attrgetter("rank")
# Most meshes that are compiled with mesh=all: each may take minutes.
_COMPILED = 4
# Steps at the start of a run that compile, and are not compared with a plan.
_FIRST_STEPS = 2
# What changes neither the memory nor the time of a step, and may differ from the run compared with.
_NO_MATTER = (
    "project_name",
    "hydra.",
    "seed",
    "resume",
    "evaluation.",
    "tracking.",
    "runtime.",
)


@dataclass(frozen=True)
class PlanConfig:
    """For which devices to plan, and how closely to look."""

    # conf/command/plan.yaml explains each setting
    target: str = "attached"
    mesh: str = "run"
    analytic: bool = False
    lengths_of: str | None = None
    verify: str | None = None
    out: str | None = None

    def __post_init__(self):
        if self.mesh not in ("run", "all"):
            raise ValueError(f"mesh={self.mesh!r}; it is run, for model.mesh_shape, or all")
        if self.verify and (self.mesh, self.lengths_of) != ("run", None):
            raise ValueError(
                "verify=RUN takes the mesh and the lengths of that run; leave mesh and lengths_of "
                "out"
            )


def main() -> None:
    # The compilers for devices that are not there print warnings about that.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # Of an attached GPU, plan with the memory that a run would have.
    prepare_gpu()
    program.run_command("plan", PlanConfig, plan)


def plan(run: RunConfig, settings: PlanConfig) -> None:
    """Makes the plans, writes plan.json, and prints a short form of them. Raises
    RunFailed, after that, if none fits."""
    if settings.target != "attached":
        # Nothing runs on a device. jax's CUDA package cannot compile without a GPU's driver either,
        # unless CUDA is none of the platforms that jax may use.
        jax.config.update("jax_platforms", "cpu")
    # A wrong folder is refused before minutes of compiling.
    lengths = Lengths()
    name = "lengths_of" if settings.verify is None else "verify"
    if (run_folder := getattr(settings, name)) is not None:
        with error_context(f"{name}={run_folder}"):
            lengths = recorded_lengths(run_folder)
    if settings.verify is not None:
        check_same_overrides(settings.verify, sys.argv[1:])
    target = f"plan-{settings.target}"
    folder = Path(settings.out or Path("outputs") / run.project_name / target).expanduser()
    # the folder is made later, below the first one that exists
    there = next(one for one in (folder, *folder.absolute().parents) if os.path.exists(one))
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(f"out={folder}: {there} is no folder that can be written")
    made = make_plans(run, settings, sys.argv[1:])
    plans = sorted((_with_forecast(plan, lengths) for plan in made.plans), key=_RANK)
    made = replace(made, plans=tuple(plans))
    made.write(folder)
    lines = [*made.short_form(), ""]
    if settings.verify is not None:
        lines += [*verified(plans[0], settings.verify), ""]
    print("\n".join([*lines, f"written to {folder}/plan.json"]))
    best = plans[0]
    if best.fits is False:
        # The last line is then the command that fits.
        if made.command is not None:
            sys.exit(program.EXIT_FAILED)
        raise RunFailed(
            f"nothing fits {best.machine.name}: the least is {gib(best.peak_bytes)} of "
            f"{gib(best.machine.capacity)} GiB a device"
        )


def _with_forecast(plan: Plan, lengths: Lengths) -> Plan:
    """What is not compiled, or does not fit, has no forecast, nor has a device that is not in the
    table."""
    hardware = plan.machine.hardware
    if not plan.programs or plan.fits is False or hardware is None:
        return plan
    return replace(plan, forecast=forecast(plan.resolved, plan.programs, lengths, hardware))


def recorded_lengths(folder: str) -> Lengths:
    """The lengths of a run by its samples and metrics. Raises ValueError where it recorded none."""
    run = read_evidence(as_path(folder))
    tokens = [row["tokens"] for row in run.sampled if isinstance(row.get("tokens"), list)]
    completions = tuple(len(row) for row in tokens if row)
    if not completions:
        raise ValueError("there are no samples with tokens, such as samples/step_000020.jsonl")

    # Prompts are not kept as tokens, but how many tokens were read is.
    file = run.folder / "plan.json"
    plans = read_object(file).get("plans") if file.is_file() else None
    first = plans[0] if isinstance(plans, list) and plans else None
    prompts = first.get("prompts_of_rollout") if isinstance(first, dict) else None
    read = run.series("rollout/prefill_tokens")
    if not read or type(prompts) is not int or prompts < 1:
        raise ValueError(
            "metrics.jsonl has no rollout/prefill_tokens, or plan.json no number of prompts, so "
            "the length of the prompts is not known"
        )
    return Lengths(
        completions=completions, mean_prompt=read.mean / prompts, recorded_by=folder
    )


def check_same_overrides(folder: str, words: list[str]) -> None:
    """Raises ConfigError, with the command to paste, if the run was started with other settings
    than those among these words of the command line."""
    started = read_overrides(as_path(folder), []) or []
    of_plan = ("-", *(f"{field.name}=" for field in fields(PlanConfig)))
    here = [word for word in words if "=" in word and not word.startswith(of_plan)]
    # where it wrote, and how it reported, changes no plan
    ours = {one for one in here if not one.startswith(_NO_MATTER)}
    there = [one for one in started if not one.startswith(_NO_MATTER)]
    if ours != set(there):
        others = [word for word in words if word not in here]
        raise ConfigError(
            f"verify={folder}: the run was started with other settings: "
            f"{shlex.join(['tunix-lite', 'plan', *others, *there])}"
        )


def verified(plan: Plan, folder: str) -> list[str]:
    """The plan against what the run in this folder measured: lines of a table. Seconds are medians
    over the steps after the first two, which compile."""
    run = read_evidence(as_path(folder))
    both = {"memory/peak_gb": (plan.peak_bytes / 1e9, run.series("memory/peak_gb").largest)}
    if plan.forecast is not None:
        seconds = plan.forecast.seconds
        predicted = {
            "time/rollout": seconds.get("prefill", 0.0) + seconds.get("decode", 0.0),
            "time/update": seconds["update"],
            "time/step": plan.forecast.step_seconds,
        }
        for name, value in predicted.items():
            steps = run.series(name).values[_FIRST_STEPS:]
            both[name] = (value, np.median(steps) if len(steps) else np.nan)
    rows = [("", "predicted", "measured", "off by")]
    for name, (value, took) in both.items():
        # nan: the run has no such number, or no step after the first two
        measured = off = "-"
        if took > 0:
            measured = f"{took:.3g}"
            off = f"{value / took - 1:+.0%}"
        rows.append((name, f"{value:.3g}", measured, off))
    return columns(rows)


def _compiled(plan: Plan) -> Plan:
    return planning.with_compiled(plan, devices_of(plan.machine), program.say)


def make_plans(run: RunConfig, settings: PlanConfig, words: list[str]) -> Plans:
    """Makes a plan for each mesh, the best first. words: the command line, to repeat with what
    would fit. Raises ConfigError if settings are wrong, or no mesh divides model and batch."""
    if run.rollout.mesh_shape is not None:
        raise ConfigError(
            f"rollout.mesh_shape={as_text(run.rollout.mesh_shape)}: this command plans for the "
            "devices of one mesh; leave it out, or start the run, whose plan.json has both"
        )
    machine = find_machine(settings.target)
    cfg, lora = find_model(run.model)
    count = machine.num_devices
    meshes = planning.meshes(count) if settings.mesh == "all" else []
    try:
        meshes = meshes or [resolve_mesh_shape(run.model.mesh_shape, count)]
    except ValueError as error:
        # The message is about the devices that jax sees; a target has others.
        text = str(error)
        if machine.name != "attached":
            text = text.replace(
                f"jax sees {count}", f"target {machine.name} has {count} devices"
            )
        raise ConfigError(f"model.mesh_shape: {text}") from error

    # A mesh may take only some of the devices.
    machine = replace(machine, num_devices=meshes[0]["fsdp"] * meshes[0]["tp"])

    # Estimates for all meshes; those that divide nothing are refused.
    plans = []
    refused = []
    for sizes in meshes:
        try:
            plans.append(planning.estimated(run, machine, cfg, lora, sizes))
        except ConfigError as error:
            if settings.mesh != "all":
                raise
            refused.append((sizes, str(error)))
    if not plans:
        reasons = (f"fsdp={sizes['fsdp']} tp={sizes['tp']}: {why}" for sizes, why in refused)
        raise ConfigError(
            f"mesh=all: no mesh of {machine.num_devices} devices divides the model and the batch: "
            f"{'; '.join(reasons)}"
        )

    # The best ones are compiled, which may change their order.
    plans.sort(key=_RANK)
    if not settings.analytic:
        plans[:_COMPILED] = map(_compiled, plans[:_COMPILED])
        plans.sort(key=_RANK)
    return _advised(Plans(tuple(plans), tuple(refused)), settings, words)


def _advised(plans: Plans, settings: PlanConfig, words: list[str]) -> Plans:
    """The plans, and if none fits, with a command that would. What is advised is compiled too,
    unless the plan is analytic."""
    # the best is the first
    if plans.plans[0].fits is not False:
        return plans
    again = [] if settings.analytic else [_compiled]
    overrides, found = advice(plans.plans[0], *again)
    peak = f"{gib(found.peak_bytes)} of {gib(found.machine.capacity)} GiB, {source(found)}"
    if found.fits:
        change = f"would fit, with {peak}:"
        if found.is_near_the_limit:
            margin = f"{planning.ESTIMATE_MARGIN:.0%}"
            change = f"may fit, with {peak}, which may be wrong by {margin}:"
        # the same command line with these overrides in it
        new = {text.partition("=")[0] for text in overrides}
        kept = [word for word in words if word.partition("=")[0] not in new]
        if "model.mesh_shape" in new:
            # one mesh is advised, and the command is for that
            kept = [word for word in kept if word != "mesh=all"]
        command = shlex.join(["tunix-lite", "plan", *kept, *overrides])
        return replace(plans, command=command, change=change)
    least = "nothing makes it smaller"
    if overrides:
        least = f"the least is {peak}, with {' '.join(overrides)}"
    change = f"nothing that was tried fits, and a larger target is needed: {least}"
    return replace(plans, change=change)
