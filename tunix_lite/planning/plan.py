"""A run on a target, by estimates and compiled programs. A step has phases, one after the other:
rollout, scoring (by the reference of the KL term), update. On a device there is what is resident,
and what the phase at hand adds; the plan fits if the largest sum does."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax

from tunix_lite.basics.errors import ConfigError
from tunix_lite.models import attention
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.lora import LoraConfig
from tunix_lite.planning.estimate import MemoryEstimate
from tunix_lite.planning.forecast import Forecast
from tunix_lite.planning.hardware import Machine
from tunix_lite.planning.packing_choice import with_packing
from tunix_lite.planning.programs import Compiled, DoesNotFit, compiled, lowered
from tunix_lite.settings.config import RunConfig
from tunix_lite.settings.resolved_parts import abstract, mesh_of_run
from tunix_lite.settings.resolved_run import ResolvedRun, resolve_run

# where the bytes of a phase come from
COMPILED = "compiled"
ESTIMATE = "estimate"
# Of the memory, what an estimate leaves free where it proposes a setting.
ESTIMATE_MARGIN = 0.1
# Steps of a plan whose training.epochs nobody has counted.
_STEPS_OF_EPOCHS = 1_000
# programs whose memory is that of the rollout
_SAMPLING_PROGRAMS = ("prefill", "decode", "append", "rewind")
# the part of what is resident that is code
_PROGRAMS = "programs"
# what the compiler has freed, as far as a phase does not take it
_COMPILER = "freed by the compiler"


@dataclass(frozen=True)
class Phase:
    """One phase of a step on one device, in bytes.
    Example: Phase("rollout", "estimate", {"cache": 2**30, "prompts": 2**20}).added_bytes."""

    name: str
    source: str  # compiled or estimate
    adds: dict[str, int]  # to what is resident, by part

    @property
    def added_bytes(self) -> int:
        return sum(self.adds.values())


@dataclass(frozen=True)
class Plan:
    """One run on one mesh of a machine.
    Example: compile_plan(attached_machine(), resolved, programs).peak_bytes."""

    machine: Machine
    resolved: ResolvedRun
    resident: dict[str, int]  # bytes of a device, by part
    phases: tuple[Phase, ...]
    programs: dict[str, Compiled] = field(default_factory=dict)
    refused: tuple[str, ...] = ()  # by the compiler: which program, and what it said
    # bytes of a device that only samples (rollout.mesh_shape), by part; {}: there is none
    apart: dict[str, int] = field(default_factory=dict)
    # how long a step will take; None: nothing is predicted, as nothing was compiled
    forecast: Forecast | None = None

    @property
    def resident_bytes(self) -> int:
        return sum(self.resident.values())

    @property
    def peak_bytes(self) -> int:
        return self.resident_bytes + max(phase.added_bytes for phase in self.phases)

    @property
    def resume_bytes(self) -> int:
        """The peak of resuming: the state is read where it stays, before any program."""
        return self.resident_bytes - self.resident.get(_PROGRAMS, 0)

    @property
    def evaluation_bytes(self) -> int | None:
        """The peak of `tunix-lite evaluate` on a CPU with the rollout of this plan; None: it has
        none, or is of another device. It makes its own weights of those that were loaded, which it
        frees before it compiles."""
        adds = next((phase.adds for phase in self.phases if phase.name == "rollout"), {})
        copy = adds.get("weights to sample")
        if copy is None or "process" not in self.resident:
            return None
        loaded = sum(self.resident.get(part, 0) for part in ("parameters", "frozen base"))
        beside = self.resident[_PROGRAMS] + sum(adds.values()) - copy
        return self.resident["process"] + copy + max(loaded, beside)

    @property
    def fullest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.added_bytes)

    @property
    def fits(self) -> bool | None:
        """None: nobody knows how much memory there is."""
        if self.refused:
            return False
        return (
            None if self.machine.capacity is None else self.peak_bytes <= self.machine.capacity
        )

    @property
    def source(self) -> str:
        return COMPILED if all(phase.source == COMPILED for phase in self.phases) else ESTIMATE

    @property
    def rank(self) -> tuple:
        """Sorts plans that fit first: those with a forecast, the fastest first, and then the others
        as those that do not fit, the smallest first."""
        seconds = math.inf if self.forecast is None else self.forecast.step_seconds
        return self.fits is False, seconds, self.peak_bytes

    @property
    def is_near_the_limit(self) -> bool:
        """Whether it fits only by an estimate, with less room than that may be wrong by."""
        if not self.fits or self.machine.capacity is None or self.fullest.source == COMPILED:
            return False
        return self.peak_bytes > (1 - ESTIMATE_MARGIN) * self.machine.capacity


def assemble_plan(
    machine: Machine,
    resolved: ResolvedRun,
    done: dict[str, Compiled],
    refused: Sequence[DoesNotFit] = (),
) -> Plan:
    """The plan of a run: what is compiled of it as compiled, the rest by formula."""
    estimate = MemoryEstimate(resolved)
    resident = estimate.resident()
    # The code of all programs stays loaded.
    code = sum(program.code_bytes for program in done.values())
    code = code if done else estimate.code()
    with_code = resident | ({_PROGRAMS: code} if code else {})
    if machine.process_bytes:
        count = jax.local_device_count()
        tokenizer = estimate.tokenizer_bytes() // count
        with_code["process"] = machine.process_bytes + tokenizer
        with_code[_PROGRAMS] = estimate.code_in_process() // count

    # The phases of a step, in their order.
    made = {}
    if resolved.has_rollouts:
        adds = estimate.rollout()
        made["rollout"] = ESTIMATE, adds
        if "decode" in done and "prefill" in done:
            # Both programs read the one copy, which is counted once. The prompt cache is there
            # while decoding, and the slots are while prompts are read.
            copy = adds["weights to sample"]
            sampling = [done[name] for name in _SAMPLING_PROGRAMS if name in done]
            made["rollout"] = (
                COMPILED,
                {
                    "weights to sample": copy,
                    "cache": done["decode"].argument_bytes - copy,
                    "prompts": done["prefill"].argument_bytes - copy,
                    "temporary": max(one.added_bytes - one.code_bytes for one in sampling),
                },
            )
    scored = {"scoring": resolved.scores, "values": resolved.needs.critic is not None}
    for name in [*resolved.frozen_models, *(name for name in scored if scored[name])]:
        made[name] = _scoring(name, resolved, done, resident)
    if (update := done.get("update")) is None:
        made["update"] = ESTIMATE, estimate.update()
    else:
        others = {"reference", *resolved.frozen_models}
        arguments = sum(size for name, size in resident.items() if name not in others)
        arguments += estimate.teacher_table()
        # by formula, and the compiler may have found a way with less
        gradients = min(estimate.gradient_bytes(), update.temp_bytes)
        parts = {"batch": max(0, update.argument_bytes - arguments), "gradients": gradients}
        beside = update.temp_bytes - gradients + update.results_beside_bytes
        made["update"] = COMPILED, parts | {"activations": beside}
    if resolved.samples_beside_update:
        source, adds = made["update"]
        # the devices hold both while one waits for the other
        sampling = sum(made["rollout"][1].values())
        made["update"] = source, adds | {"sampling beside it": sampling}

    # What the compiler has freed is given back before a phase, or the phase takes it.
    for name, (source, adds) in made.items():
        left = machine.compiler_bytes - sum(adds.values())
        if left > 0:
            made[name] = source, adds | {_COMPILER: left}

    # A refused program needs what its compiler names, if it does.
    for error in refused:
        name = "rollout" if error.name in _SAMPLING_PROGRAMS else error.name
        if name in made and error.needed_bytes is not None:
            added = error.needed_bytes - sum(with_code.values())
            # a refused program needs no less than the formula says
            added = max(added, sum(made[name][1].values()))
            made[name] = COMPILED, {"all it needs, as the compiler says": added}

    phases = tuple(Phase(name, *source_adds) for name, source_adds in made.items())
    messages = tuple(map(str, refused))
    apart = estimate.apart(machine.capacity)
    return Plan(machine, resolved, with_code, phases, done, messages, apart)


def _scoring(
    name: str, resolved: ResolvedRun, done: dict[str, Compiled], resident: dict[str, int]
) -> tuple[str, dict[str, int]]:
    """Scoring by a frozen model of the algorithm; as `scoring`, by the reference or policy; as
    `values`, by the critic."""
    program = done.get(name)
    is_frozen = name in resolved.frozen_models
    if program is None:
        if is_frozen and resolved.compares(name):
            return ESTIMATE, MemoryEstimate(resolved).describing(name)
        return ESTIMATE, MemoryEstimate(
            resolved.as_scorer(name) if is_frozen else resolved
        ).scoring()
    # What it is given of the weights: its own, the reference, or what samples now.
    names = ["frozen base"] if resolved.lora else ["parameters"]
    if is_frozen or resolved.copies_reference:
        names = [name if is_frozen else "reference"]
    elif resolved.lora and not resolved.needs.reference:
        names.append("parameters")
    if name == "values":
        layers = [] if resolved.needs.critic.is_own else ["parameters"]
        names = [*(["frozen base"] if resolved.lora else []), *layers, "critic"]
    return COMPILED, {
        "batch": max(0, program.argument_bytes - sum(resident[name] for name in names)),
        "temporary": program.added_bytes - program.code_bytes,
    }


def with_choices(
    run: RunConfig,
    machine: Machine,
    cfg: Architecture,
    lora: LoraConfig | None,
    mesh_shape: dict[str, int],
) -> ResolvedRun:
    """The run on a mesh of this machine, with the choice that it would make itself, where sampling
    keeps the weights. Raises ConfigError if the mesh does not divide model or batch."""
    if run.training.epochs is not None:
        # nobody has counted the rows
        run = replace(run, training=replace(run.training, max_steps=_STEPS_OF_EPOCHS))
    resolved = with_packing(
        run, lambda run: resolve_run(run, cfg, lora, mesh_shape, machine.platform)
    )
    return MemoryEstimate(resolved).with_sampling_choices(machine.capacity)


def estimated(
    run: RunConfig,
    machine: Machine,
    cfg: Architecture,
    lora: LoraConfig | None,
    mesh_shape: dict[str, int],
) -> Plan:
    """Plans by formulas alone. Raises ConfigError as `with_choices` does."""
    return assemble_plan(machine, with_choices(run, machine, cfg, lora, mesh_shape), {})


def with_compiled(
    plan: Plan, devices: list, say: Callable[[str], None] = lambda text: None
) -> Plan:
    """The same plan, its programs compiled for these devices. The run's sharding rules become those
    of the process. Raises ConfigError."""
    resolved = plan.resolved
    platform = plan.machine.platform
    if (resolved.attention, platform) == ("cudnn", "cuda"):
        # said before minutes of compiling
        width = resolved.rows.width or sum(resolved.lengths)
        if attention.obstacle("cudnn", resolved.cfg, platform, resolved.dtype, width, False):
            raise ConfigError(
                "training.attention=cudnn: cuDNN's kernel can be lowered only where cuDNN is "
                "installed, and here it is not; training.attention=xla would do, or an estimate: "
                "analytic=true"
            )
    sizes = " ".join(f"{axis}={size}" for axis, size in resolved.mesh_shape.items())

    def compile_it(name: str, lower: Callable[[], Any]) -> Any:
        say(f"compiling {name} for {sizes}…")
        return lower().compile()

    with mesh_of_run(resolved, devices):
        programs = {
            name: partial(compile_it, name, lower)
            for name, lower in lowered(resolved, abstract(resolved)).items()
        }
        return compile_plan(plan.machine, resolved, programs)


def compile_plan(
    machine: Machine, resolved: ResolvedRun, programs: dict[str, Callable[[], Any]]
) -> Plan:
    """The plan of a run with these programs compiled, each by a call; the rest by formula."""
    done = {}
    refused = []
    # elsewhere code lies in the memory of the host, or is too little to count
    code_on_device = machine.platform == "tpu"
    for name, compile_it in programs.items():
        try:
            done[name] = compiled(name, compile_it, resolved.mesh_shape, code_on_device)
        except DoesNotFit as error:
            refused.append(error)
    return assemble_plan(machine, resolved, done, refused)


def meshes(num_devices: int) -> list[dict[str, int]]:
    """Every (fsdp, tp) of so many devices."""
    return [
        {"fsdp": num_devices // tp, "tp": tp}
        for tp in range(1, num_devices + 1)
        if num_devices % tp == 0
    ]
