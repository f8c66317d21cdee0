"""At the start of a run: how much of each device's memory it will take."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax

from tunix_lite.basics.errors import ConfigError
from tunix_lite.basics.types import Params, RowBatch, TrainState
from tunix_lite.learner.policy import Policy
from tunix_lite.learner.rows import RowLayout, at_every_width
from tunix_lite.learner.update import TrainStep
from tunix_lite.models.lora import acting_params
from tunix_lite.parallel.mesh import part_of_mesh
from tunix_lite.planning.advice import advice
from tunix_lite.planning.estimate import MemoryEstimate
from tunix_lite.planning.hardware import GiB, attached_machine
from tunix_lite.planning.plan import (
    COMPILED,
    Plan,
    compile_plan,
)
from tunix_lite.settings.resolved_parts import (
    batch_shapes,
    scored_batch_shapes,
)
from tunix_lite.settings.resolved_run import ResolvedRun


def plan_of_this_run(
    resolved: ResolvedRun,
    policy: Policy,
    train_step: TrainStep,
    state: TrainState,
    frozen: Params | None,
) -> Plan:
    """The plan of a run that is about to start on the attached devices. It compiles the programs
    that learn, for every width that a batch may have: the run will use them. Raises ConfigError if
    the compiler refuses one, but for packed rows: batches as they come may fit."""

    def every_width(
        compile_it: Callable[[RowBatch], jax.stages.Compiled],
        shapes: RowBatch,
        rows: RowLayout,
    ) -> jax.stages.Compiled:
        # all of them are compiled now, since a step that compiles later would look as if it hung
        widest, *_ = [compile_it(x) for x in at_every_width(shapes, rows)]
        return widest

    compile_update = partial(train_step.compile, state, frozen)
    programs = {
        "update": partial(every_width, compile_update, batch_shapes(resolved), resolved.rows)
    }
    scorers: dict[str, Callable[[RowBatch], jax.stages.Compiled]] = {}
    acting = acting_params(frozen, state.params, resolved.lora)
    if "reference" in policy.scorers:
        scorers["scoring"] = policy.scorers["reference"].compiled
    elif resolved.scores:
        scorers["scoring"] = partial(policy.rescore.compiled, acting)
    if policy.values is not None:
        scorers["values"] = partial(policy.values.compiled, acting)
    for name in resolved.frozen_models:
        scorers[name] = policy.scorers[name].compiled
    for name, compile_it in scorers.items():
        is_frozen = name in resolved.frozen_models
        theirs = resolved.as_scorer(name) if is_frozen else resolved
        with part_of_mesh(theirs.mesh_shape):
            shapes = scored_batch_shapes(theirs)
        programs[name] = partial(every_width, compile_it, shapes, theirs.rows)
    plan = compile_plan(attached_machine(), resolved, programs)
    if plan.refused and resolved.rows.packing == "none":
        raise ConfigError(
            f"the run does not fit: {'; '.join(plan.refused)}; `tunix-lite plan` says what would, "
            "such as a smaller training.micro_batch_size"
        )
    return plan


def check_at_rest(resolved: ResolvedRun, say: Callable[[str], None]) -> None:
    """Checks before anything is loaded the bytes that are known exactly: those that stay on a
    device, and while sampling the weights, the cache and the prompts that wait."""
    machine = attached_machine()
    chosen = MemoryEstimate(resolved).with_sampling_choices(machine.capacity)
    plan = compile_plan(machine, chosen, {})
    # what a formula may get wrong must not refuse a run
    known = ("weights to sample", "cache", "prompts")
    phases = [
        replace(phase, adds={name: phase.adds.get(name, 0) for name in known})
        for phase in plan.phases
    ]
    check_fits(replace(plan, phases=tuple(phases)), say)


def check_fits(plan: Plan, say: Callable[[str], None]) -> None:
    """Raises ConfigError, with what would fit, where the plan of a run does not;
    training.memory_check=warn says it. Of packed rows, planned at their fullest, only sampling
    counts."""
    capacity = plan.machine.capacity
    if capacity is None:
        return

    problems = []
    # devices that only sample have a limit of their own
    needed = sum(plan.apart.values())
    if needed > capacity:
        problems.append(
            f"rollout.mesh_shape: sampling needs {needed / GiB:.2f} GiB of {capacity / GiB:.2f} on "
            "a device of its own, by formula; a larger tp there, rollout.weights=sharded or a "
            "smaller rollout.num_slots takes less"
        )

    # The phase at the peak.
    is_packed = plan.resolved.rows.packing != "none"
    counted = {phase.name: phase.added_bytes for phase in plan.phases}
    if is_packed:
        counted = {name: size if name == "rollout" else 0 for name, size in counted.items()}
    name = max(counted, key=counted.get)
    peak = plan.resident_bytes + counted[name]
    if peak > capacity:
        # What would make it fit, by formulas: nothing is compiled for it. The hub is not asked
        # again for the architecture.
        model = replace(plan.resolved.run.model, architecture=plan.resolved.cfg)
        run = replace(plan.resolved.run, model=model)
        overrides, changed = advice(replace(plan, resolved=replace(plan.resolved, run=run)))
        size = f"{changed.peak_bytes / GiB:.2f} GiB"
        with_them = f", with {' '.join(overrides)}" if overrides else ""
        remedy = f"it would fit, by an estimate of {size}{with_them}"
        if not changed.fits:
            remedy = (
                f"nothing that was tried fits here, the least by an estimate is {size}{with_them}; "
                "a smaller model, a shorter generation.max_new_tokens or a larger "
                "model.mesh_shape takes less"
            )
        problems.append(
            f"the run does not fit: {peak / GiB:.2f} GiB of {capacity / GiB:.2f} a device, "
            f"{(peak - capacity) / GiB:.2f} too much ({plan.resident_bytes / GiB:.2f} all the "
            f"time and {counted[name] / GiB:.2f} for {name}); {remedy}"
        )
    for problem in problems:
        if plan.resolved.run.training.memory_check != "warn":
            raise ConfigError(f"{problem}; or training.memory_check=warn starts it anyway")
        say(f"{problem}; it starts all the same, as training.memory_check=warn says")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a device had no memory left, as XLA says it."""
    if error is None:
        return False
    is_so = any(word in str(error) for word in ("RESOURCE_EXHAUSTED", "Out of memory"))
    return is_so or is_out_of_memory(error.__cause__)


def memory_line(plan: Plan) -> str:
    """The plan of a run in one line, for its start."""
    capacity = plan.machine.capacity
    is_packed = plan.resolved.rows.packing != "none"
    fullest = " with rows at their fullest" if is_packed else ""
    fits = f": DOES NOT FIT{fullest}, see `tunix-lite plan`" if plan.fits is False else ""
    how = "at most" if plan.phases[-1].source == COMPILED else "by formula"
    room = "" if capacity is None else f" of {capacity / GiB:.2f}"
    peak = f"memory: {plan.peak_bytes / GiB:.2f}{room} GiB a device {how}{fits}"
    if plan.apart:
        peak += f", {sum(plan.apart.values()) / GiB:.2f} on one that only samples"
    return f"{peak} (plan.json)"
