"""Other settings of a plan by the predicted time of a step: slots, micro-batches, packing and
recomputation.

None of them changes what is learned, rounding apart. Each is estimated by formulas; where the plan
itself was timed, its phases say by how much the formulas are off on this machine.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tunix_lite.config import RunConfig
from tunix_lite.errors import ConfigError
from tunix_lite.learner.rows import PACKING
from tunix_lite.planning.forecast import Costs, Forecast, forecast
from tunix_lite.planning.lengths import Lengths
from tunix_lite.planning.plan import Plan, assemble_plan, estimated
from tunix_lite.planning.resolved import ResolvedRun, with_micro_batch

# Settings that are shown.
SHOWN = 6
# Micro-batch sizes that are tried, beside the one at hand.
MOST_SIZES = 3


@dataclass(frozen=True)
class Choice:
    """One way to run the same training, and what it would take.

    Example: Choice(("rollout.num_slots=32",), forecast, 2**30).
    """

    overrides: tuple[str, ...]
    forecast: Forecast
    peak_bytes: int


def choices(plan: Plan, lengths: Lengths, costs_of: Callable[[ResolvedRun], Costs]) -> list[Choice]:
    """The plan as it is and others that fit, the fastest first; [] if the plan is not predicted.

    costs_of(resolved): by formulas, of one setting.
    """
    if plan.forecast is None:
        return []
    base = forecast(plan.resolved, lengths, costs_of(plan.resolved))
    found = [Choice((), plan.forecast, plan.peak_bytes)]
    for overrides, trial in _trials(plan):
        if trial.fits is False or trial.is_near_the_limit:
            continue
        raw = forecast(trial.resolved, lengths, costs_of(trial.resolved))
        scaled = scaled_by(raw, base, plan.forecast)
        found.append(Choice(overrides, scaled, trial.peak_bytes))
    found.sort(key=lambda choice: choice.forecast.step_seconds)
    return found[:SHOWN]


def scaled_by(raw: Forecast, base: Forecast, known: Forecast) -> Forecast:
    """An estimate, each phase times the ratio that a setting has which is estimated (base) and
    known better (known)."""

    def ratio(name: str) -> float:
        below = base.seconds.get(name, 0.0)
        return known.seconds.get(name, 0.0) / below if below else 1.0

    seconds = {name: took * ratio(name) for name, took in raw.seconds.items()}
    return replace(raw, seconds=seconds, source=f"{raw.source}, scaled by: {known.source}")


def _trials(plan: Plan) -> Iterator[tuple[tuple[str, ...], Plan]]:
    """(overrides, plan by formulas) of each setting that can be."""
    run = plan.resolved.run
    known = replace(run, model=replace(run.model, architecture=plan.resolved.cfg))
    for overrides, changed in _changes(plan, known):
        try:
            mesh_shape = plan.resolved.mesh_shape
            lora = plan.resolved.lora
            trial = estimated(changed, plan.machine, plan.resolved.cfg, lora, mesh_shape)
        except ConfigError:
            continue
        # A GPU's kernels may not take these rows.
        if trial.resolved.attention == plan.resolved.attention:
            yield overrides, assemble_plan(plan.machine, trial.resolved, {})


def _changes(plan: Plan, run: RunConfig) -> Iterator[tuple[tuple[str, ...], RunConfig]]:
    """One setting changed at a time."""
    training = run.training

    # Slots: a quarter, a half, twice.
    if not run.algorithm.needs_demonstrations:
        most = plan.resolved.batch.sequences
        now = plan.resolved.slots
        for slots in sorted({now // 4, now // 2, 2 * now} - {0, now}):
            if slots <= most and slots % plan.resolved.mesh_shape["fsdp"] == 0:
                changed = replace(run, rollout=replace(run.rollout, num_slots=slots))
                yield (f"rollout.num_slots={slots}",), changed

    # Micro-batches, of rows that are not packed: the sizes next to the one at hand.
    if training.packing == "none":
        now = plan.resolved.batch.micro_batch_size
        sizes = [size for size in plan.resolved.micro_batches_to_try() if size != now]
        nearest = sorted(sizes, key=lambda size: max(size / now, now / size))[:MOST_SIZES]
        for size in nearest:
            words = (f"training.micro_batch_size={size}",)
            if training.gradient_accumulation_steps is not None:
                words += ("training.gradient_accumulation_steps=null",)
            yield words, with_micro_batch(run, size)

    # Packing.
    for packing in PACKING:
        if packing == training.packing:
            continue
        unset = {"micro_batch_size": None, "gradient_accumulation_steps": None}
        changed = replace(training, packing=packing, **unset)
        words = (f"training.packing={packing}",)
        for name in unset:
            words += (f"training.{name}=null",) if getattr(training, name) is not None else ()
        yield words, replace(run, training=changed)

    # Recomputation.
    for remat in ("none", "dots", "block"):
        if remat != training.remat:
            yield (
                (f"training.remat={remat}",),
                replace(run, training=replace(training, remat=remat)),
            )
