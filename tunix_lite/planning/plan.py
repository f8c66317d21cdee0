"""What fits, what it moves and how fast it can be: a run on a target, of estimates and compiled
programs.

A step has phases, one after the other: rollout, scoring (by the reference of the KL term), update.
On a device there is what is resident, and what the phase at hand adds; the plan fits if the largest
sum does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import jax

from tunix_lite.config import RunConfig
from tunix_lite.models.decoder import Architecture
from tunix_lite.models.lora import LoraConfig
from tunix_lite.parallel.mesh import make_mesh
from tunix_lite.planning import estimate, speed
from tunix_lite.planning.hardware import GiB
from tunix_lite.planning.machine import Machine
from tunix_lite.planning.programs import Compiled, DoesNotFit, abstract, compiled, lowered
from tunix_lite.planning.resolved import (
    ResolvedRun,
    check_can_be_lowered,
    chooses_micro_batch,
    resolve_run,
    micro_batches_to_try,
    with_micro_batch,
)
from tunix_lite.planning.speed import Bound

COMPILED, ESTIMATE = "compiled", "estimate"
# the part of what is resident that is code
PROGRAMS = "programs"


@dataclass(frozen=True)
class Phase:
    """One phase of a step on one device, in bytes."""

    name: str
    source: str  # compiled or estimate
    adds: dict[str, int]  # to what is resident, by part
    # None: not a part of a step, as sampling is where nothing but evaluation samples
    bound: Bound | None = None

    @property
    def added_bytes(self) -> int:
        return sum(self.adds.values())


@dataclass(frozen=True)
class Plan:
    """One run on one mesh of a machine."""

    machine: Machine
    resolved: ResolvedRun
    resident: dict[str, int]  # bytes of a device, by part
    phases: tuple[Phase, ...]
    programs: dict[str, Compiled] = field(default_factory=dict)
    refused: tuple[str, ...] = ()  # by the compiler: which program, and what it said

    @property
    def resident_bytes(self) -> int:
        return sum(self.resident.values())

    @property
    def peak_bytes(self) -> int:
        return self.resident_bytes + max(phase.added_bytes for phase in self.phases)

    @property
    def resume_bytes(self) -> int:
        """The peak of resuming: the state is read where it stays, before any program, so nothing
        comes on top of it."""
        return sum(size for part, size in self.resident.items() if part != PROGRAMS)

    @property
    def fullest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.added_bytes)

    @property
    def fits(self) -> bool | None:
        """None: nobody knows how much memory there is."""
        if self.refused:
            return False
        return None if self.machine.capacity is None else self.peak_bytes <= self.machine.capacity

    @property
    def source(self) -> str:
        return COMPILED if all(phase.source == COMPILED for phase in self.phases) else ESTIMATE

    @property
    def step_seconds(self) -> float | None:
        """The least that a step takes; None if the hardware is not known."""
        seconds = [phase.bound.seconds for phase in self.phases if phase.bound is not None]
        return None if None in seconds else sum(seconds)

    @property
    def tokens_per_second(self) -> float | None:
        """At most, of prompts and completions at their longest, as a run's perf/tokens_per_second
        counts them."""
        tokens = self.resolved.batch.sequences * sum(self.resolved.lengths)
        return None if self.step_seconds is None else tokens / self.step_seconds

    @property
    def rank(self) -> tuple:
        """Sorts what fits first, and then the fastest; of what does not fit, the smallest."""
        if self.fits is False:
            return True, self.peak_bytes
        return False, self.step_seconds or 0.0, self.peak_bytes


def assemble_plan(
    machine: Machine, resolved: ResolvedRun, done: dict[str, Compiled], refused: Sequence[DoesNotFit] = ()
) -> Plan:
    """The plan of a resolved: what is compiled of it as compiled, the rest by formula."""
    resident = estimate.resident(resolved)
    if code := sum(program.code_bytes for program in done.values()):
        # all stay loaded
        resident[PROGRAMS] = code
    bounds = speed.bounds(resolved, machine.hardware, done)
    makers = {"rollout": _rollout, "scoring": _scoring, "update": _update}
    there = {"rollout": resolved.samples, "scoring": resolved.run.algorithm.needs_reference, "update": True}
    phases = [
        Phase(name, *makers[name](resolved, done), bounds.get(name)) for name in makers if there[name]
    ]
    for error in refused:
        phases = [_as_refused(phase, error, resident) for phase in phases]
    return Plan(
        machine, resolved, resident, tuple(phases), done, tuple(f"{e.name}: {e.said}" for e in refused)
    )


def _as_refused(phase: Phase, error: DoesNotFit, resident: dict[str, int]) -> Phase:
    """The phase of a program that its compiler refuses: with what that says it would take, where it
    says so."""
    mine = {"prefill": "rollout", "decode": "rollout"}.get(error.name, error.name) == phase.name
    if not mine or error.needed_bytes is None:
        return phase
    added = max(error.needed_bytes - sum(resident.values()), phase.added_bytes)
    return replace(phase, adds={"all it needs, as the compiler says": added}, source=COMPILED)


def _update(resolved: ResolvedRun, done: dict[str, Compiled]) -> tuple[str, dict[str, int]]:
    if (program := done.get("update")) is None:
        return ESTIMATE, estimate.update(resolved)
    resident, gradients = (
        estimate.resident(resolved),
        min(estimate.gradient_bytes(resolved), program.temp_bytes),
    )
    arguments = sum(size for name, size in resident.items() if name != "reference")
    activations = program.temp_bytes - gradients + program.output_bytes - program.alias_bytes
    batch = max(0, program.argument_bytes - arguments)
    return COMPILED, {"batch": batch, "gradients": gradients, "activations": activations}


def _scoring(resolved: ResolvedRun, done: dict[str, Compiled]) -> tuple[str, dict[str, int]]:
    if (program := done.get("scoring")) is None:
        return ESTIMATE, estimate.scoring(resolved)
    reference = estimate.resident(resolved)["reference" if resolved.copies_reference else "frozen base"]
    batch = max(0, program.argument_bytes - reference)
    return COMPILED, {"batch": batch, "temporary": program.added_bytes - program.code_bytes}


def _rollout(resolved: ResolvedRun, done: dict[str, Compiled]) -> tuple[str, dict[str, int]]:
    """The shelf is there while decoding, and the slots are while prompts are read."""
    adds = estimate.rollout(resolved)
    if "decode" not in done or "prefill" not in done:
        return ESTIMATE, adds
    prefill, decode, copy = done["prefill"], done["decode"], adds["weights to sample"]
    temporary = max(program.added_bytes - program.code_bytes for program in (prefill, decode))
    cache, waiting = (program.argument_bytes - copy for program in (decode, prefill))
    return COMPILED, {
        "weights to sample": copy,
        "cache": cache,
        "prompts": waiting,
        "temporary": temporary,
    }


# ---- making plans


def with_choices(
    run: RunConfig,
    machine: Machine,
    cfg: Architecture,
    lora: LoraConfig | None,
    sizes: dict[str, int],
) -> ResolvedRun:
    """The run on a mesh, with the choices that it would make itself: the micro-batch, and
    sampling's weights."""
    if not chooses_micro_batch(run):
        resolved = resolve_run(run, cfg, lora, sizes, machine.platform)
        return replace(resolved, weights=estimate.choose_weights(resolved, machine.capacity))
    sized = {}
    for size in micro_batches_to_try(run, sizes["fsdp"]):
        sized[size] = with_choices(with_micro_batch(run, size), machine, cfg, lora, sizes)
        if assemble_plan(machine, sized[size], {}).fits is not False:
            break
    return sized[min(sized)]


def estimated(
    run: RunConfig, machine: Machine, cfg: Architecture, lora: LoraConfig | None, sizes
) -> Plan:
    """By formulas alone: needs no device. Raises ConfigError if the mesh does not divide the model
    or the batch."""
    return assemble_plan(machine, with_choices(run, machine, cfg, lora, sizes), {})


def with_compiled(
    plan: Plan, devices: list, say: Callable[[str], None] = lambda text: None
) -> Plan:
    """The same plan, its programs compiled for these devices. Raises ConfigError for what cannot be
    lowered here."""
    resolved, machine = plan.resolved, plan.machine
    check_can_be_lowered(resolved, machine.platform)

    def compile_it(name: str, lower: Callable):
        say(f"compiling {name} for fsdp={resolved.mesh_shape['fsdp']} tp={resolved.mesh_shape['tp']}…")
        return lower().compile()

    with jax.set_mesh(make_mesh((tuple(resolved.mesh_shape.values()), tuple(resolved.mesh_shape)), devices)):
        programs = lowered(resolved, abstract(resolved))
        return read(
            machine,
            resolved,
            {name: partial(compile_it, name, lower) for name, lower in programs.items()},
        )


def compile_plan(machine: Machine, resolved: ResolvedRun, programs: dict[str, Callable]) -> Plan:
    """The plan of a resolved, as these programs say when they are compiled, each by a call; the rest by
    formula."""
    done, refused = {}, []
    for name, compile_it in programs.items():
        try:
            done[name] = compiled(
                name, compile_it, resolved.mesh_shape, code_on_device=machine.platform == "tpu"
            )
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


def largest_micro_batch(
    candidates: Sequence[int], compile_one: Callable[[int], int], limit_bytes: int
) -> int:
    """The first of the candidates, which descend, whose peak fits into limit_bytes.

    compile_one(n) -> peak bytes; where the compiler itself refuses, it raises. Raises ValueError,
    with the numbers, if none fits.
    """
    tried = []
    for size in candidates:
        try:
            peak = compile_one(size)
        except (DoesNotFit, jax.errors.JaxRuntimeError) as error:
            if not isinstance(error, DoesNotFit) and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            tried.append(f"{size}: refused by the compiler")
            continue
        if peak <= limit_bytes:
            return size
        tried.append(f"{size}: {peak / GiB:.2f} GiB")
    raise ValueError(
        f"no micro-batch fits into {limit_bytes / GiB:.2f} GiB "
        f"({', '.join(tried) or 'none was tried'})"
    )
