"""`tunix-lite plan model=gemma3_1b target=v5e-16 mesh=all`: what fits, and how fast it is."""

import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from tunix_lite.commands import program
from tunix_lite.config import RunConfig
from tunix_lite.distributed.host_memory import take_gpu_memory
from tunix_lite.errors import ConfigError, error_context
from tunix_lite.parallel.mesh import resolve_mesh_shape
from tunix_lite.planning import plan as planning
from tunix_lite.planning import report
from tunix_lite.planning.advice import advice
from tunix_lite.planning.machine import Machine, devices_of, find_machine
from tunix_lite.planning.plan import Plan
from tunix_lite.planning.report import Plans
from tunix_lite.planning.resolved import find_model


@dataclass(frozen=True)
class PlanConfig:
    """For which devices to plan, and how closely to look."""

    # Devices to plan for, here or not, such as h100x8 or v5e-16. attached: those of this machine.
    target: str = "attached"
    # Meshes to plan: run (model.mesh_shape), or all, which ranks every fsdp x tp that divides model
    # and batch.
    mesh: str = "run"
    # true estimates by formulas within seconds. false compiles the program for the devices.
    analytic: bool = False
    # Most meshes to compile with mesh=all. The others are estimated.
    compile_most: int = 4
    # Folder for plan.md and plan.json. null uses outputs/<project_name>/plan-<target>.
    out: str | None = None

    def __post_init__(self):
        if self.mesh not in ("run", "all"):
            raise ValueError(f"mesh={self.mesh!r}; it is run, for model.mesh_shape, or all")
        if self.compile_most < 1:
            raise ValueError(
                f"compile_most={self.compile_most} must be at least 1; analytic=true compiles "
                "nothing"
            )


def main() -> None:
    # The compilers for devices that are not there print warnings about that.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # Of an attached GPU, plan with the memory that a run would have.
    take_gpu_memory()
    program.run_command("plan", PlanConfig, plan)


def plan(run: RunConfig, settings: PlanConfig) -> None:
    """Makes the plans, writes plan.md and plan.json, and prints a short form of them."""
    if settings.target != "attached":
        # Nothing runs on a device. jax's CUDA package cannot compile without a GPU's driver either,
        # unless CUDA is none of the platforms that jax may use.
        jax.config.update("jax_platforms", "cpu")
    found = make_plans(run, settings, sys.argv[1:])
    folder = Path(
        settings.out or Path("outputs") / run.project_name / f"plan-{settings.target}"
    ).expanduser()
    report.write(found, folder)
    print("\n".join([*report.short_form(found), "", f"written to {folder}/plan.md and plan.json"]))


def make_plans(run: RunConfig, settings: PlanConfig, words: list[str]) -> Plans:
    """Makes a plan for each mesh, the best first.

    words: the command line, which is repeated with what would fit, if no plan fits. Raises
    ConfigError if the settings are wrong, or if no mesh divides the model and the batch.
    """
    machine = find_machine(settings.target)
    cfg, lora = find_model(run.model)
    meshes = _meshes(run, settings, machine)
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
        reasons = "; ".join(
            f"fsdp={sizes['fsdp']} tp={sizes['tp']}: {why}" for sizes, why in refused
        )
        raise ConfigError(
            f"mesh=all: no mesh of {machine.num_devices} devices divides the model and the batch: "
            f"{reasons}"
        )

    # The best ones are compiled, which may change their order.
    plans.sort(key=lambda plan: plan.rank)
    if not settings.analytic:
        devices = devices_of(machine)
        most = settings.compile_most
        plans[:most] = [planning.with_compiled(plan, devices, _say) for plan in plans[:most]]
        plans.sort(key=lambda plan: plan.rank)
    return _advised(Plans(tuple(plans), tuple(refused)), settings, words)


def _meshes(run: RunConfig, settings: PlanConfig, machine: Machine) -> list[dict[str, int]]:
    """The meshes to plan for, as {"fsdp": 4, "tp": 2}."""
    count = machine.num_devices
    if settings.mesh == "all":
        return planning.meshes(count)
    with error_context("model.mesh_shape"):
        try:
            return [resolve_mesh_shape(run.model.mesh_shape, count)]
        except ValueError as error:
            # The message is about the devices that jax sees; a target has others.
            text = str(error)
            if machine.name != "attached":
                of_target = f"target {machine.name} has {count} devices"
                text = text.replace(f"jax sees {count}", of_target)
            raise ValueError(text) from error


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _advised(plans: Plans, settings: PlanConfig, words: list[str]) -> Plans:
    """The plans, and if none fits, with a command that would.

    What is advised is compiled too, unless the plan is analytic.
    """
    if any(plan.fits is not False for plan in plans.plans):
        return plans

    def compile_again(changed: Plan) -> Plan:
        if settings.analytic:
            return changed
        return planning.with_compiled(changed, devices_of(changed.machine), _say)

    overrides, found = advice(plans.plans[0], compile_again)
    peak = (
        f"{report.gib(found.peak_bytes)} of {report.gib(found.machine.capacity)} GiB, "
        f"{report.source(found)}"
    )
    if found.fits:
        return replace(
            plans, command=command_that_fits(words, overrides), change=f"would fit, with {peak}:"
        )
    least = "nothing makes it smaller"
    if overrides:
        least = f"the least is {peak}, with {' '.join(overrides)}"
    return replace(
        plans, change=f"nothing that was tried fits, and a larger target is needed: {least}"
    )


def command_that_fits(words: list[str], overrides: tuple[str, ...]) -> str:
    """The same command line with these overrides in it."""
    new = {text.partition("=")[0]: text for text in overrides}
    kept = [word for word in words if word.partition("=")[0] not in new]
    if any(text.startswith("model.mesh_shape=") for text in overrides):
        kept = [word for word in kept if word != "mesh=all"]
    return shlex.join(["tunix-lite", "plan", *kept, *overrides])
