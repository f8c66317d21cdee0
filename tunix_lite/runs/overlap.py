"""Rollouts that overlap with learning (rollout.overlap). What an update gets depends on seed,
steps, chunks and tokens, never on the clock. A checkpoint holds the completions in flight, so that
a resumed run learns from what it would have learned from."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from tunix_lite.algorithms.algorithm import Generate
from tunix_lite.algorithms.groups import Groups
from tunix_lite.basics.errors import error_context
from tunix_lite.basics.types import Metrics, Params, Prompts, Rollout, policy_part
from tunix_lite.parallel.compiling import stopwatch
from tunix_lite.rollout.generate import GenerateFunction, make_sampler, to_the_end
from tunix_lite.rollout.partial import OpenCompletion, PartialSampler, rollout_of
from tunix_lite.runs.in_flight import InFlight, RolloutInFlight, in_flight_from
from tunix_lite.runs.separate_sampling import (
    SeparateSampling,
    arguments_of_sampler,
)
from tunix_lite.runs.session import Session
from tunix_lite.tasks.processes import SharedError
from tunix_lite.tracking.checkpoint import Checkpoints

# the examples of an update, and their completions; None: it learns from demonstrations
Drawn = tuple[list[dict], Groups | None]


class _BatchesInFlight(dict[int, tuple[list[dict], Prompts]]):
    """The examples and prompts of each step that completions in flight belong to.
    Example: `examples, prompts = _BatchesInFlight(session)[3]`: 16 of each."""

    def __init__(self, session: Session):
        algorithm = session.run.algorithm
        # examples of a rollout, and its updates
        self.count = session.parts.batch.prompts * algorithm.needs.mini_batches
        self._updates = algorithm.updates_per_rollout
        self._session = session

    def __missing__(self, step: int) -> tuple[list[dict], Prompts]:
        task = self._session.task
        seed = self._session.run.seed
        examples = task.batch(self.count, seed, step // self._updates)
        # a grader takes neighbours that are one object for one group
        self[step] = [dict(example) for example in examples], task.prompts(examples)
        return self[step]

    def keep(self, steps: set[int]) -> None:
        """Forgets the batches of all other steps."""
        for step in self.keys() - steps:
            del self[step]


class PartialRollouts:
    """rollout.overlap=carry: more prompts are in flight than an update needs. The update starts
    once its groups are complete, and the completions under way go on with the new weights. It gives
    runs/experience.py its completions, and runs/watch.py the arrays for a checkpoint.
    Example: `PartialRollouts(session, sampler, InFlight([], 0)).draw(0, params)`."""

    def __init__(self, session: Session, sampler: PartialSampler, start: InFlight):
        run = session.run
        self._session = session
        self._sampler = sampler
        self._updates = run.algorithm.updates_per_rollout
        self._generations = run.algorithm.num_generations
        self._behind = run.rollouts_behind
        self._batches = _BatchesInFlight(session)
        self._between_chunks = session.stopping.check_between_chunks
        self._pad_id = session.task.tokenizer.pad_id
        self._seed_key = jax.random.key(run.seed)
        # in flight after the newest rollout, and before it; the step of that rollout
        self._after = start
        self._before = start
        self._began = -1

    def at(self, step: int) -> dict[str, np.ndarray]:
        """Returns the rollouts in flight after `step` updates, as arrays for a checkpoint."""
        return (self._before if step <= self._began else self._after).as_arrays()

    def compile_ahead(self, generate: GenerateFunction, params: Params, **about: Any) -> None:
        """Compiles all that sampling for updates can need. generate: of the policy. about: of the
        run's conversations."""
        in_flight = (self._behind + 1) * self._batches.count * self._generations
        self._sampler.compile_ahead(params, self._batches.count, self._generations, in_flight)

    def draw(self, step: int, params: Params) -> Drawn:
        """Returns the examples of update number `step` (from 0) and their completions. Those that
        are missing are sampled with `params`, and more for later updates."""
        self._before = self._after
        self._began = step
        last = step + self._behind * self._updates
        new_steps = range(self._before.next_step, last + 1, self._updates)
        waiting = [
            OpenCompletion(new, p, g)
            for new in new_steps
            for p in range(self._batches.count)
            for g in range(self._generations)
        ]
        completions = [*self._before.completions, *waiting]
        steps = {one.step for one in completions}
        prompts = {
            (of, p): prompt for of in steps for p, prompt in enumerate(self._batches[of][1])
        }

        # Sample until the update has its groups.
        groups = np.array([one.group for one in completions])
        now = step // self._updates
        shape = (-1, self._generations)
        first = [one.versions[0] if one.versions else step for one in completions]
        oldest = np.reshape(first, shape).min(axis=1) // self._updates

        def take(has_ended: np.ndarray) -> list[int] | None:
            """[N] bool, which completions have ended -> the places of the groups to take."""
            is_whole = has_ended.reshape(shape).all(axis=1)
            return groups_to_take(oldest, is_whole, self._batches.count, now, self._behind)

        completions, metrics = self._sampler.go_on(
            policy_part(params),
            completions,
            prompts,
            self._seed_key,
            step,
            lambda has_ended: take(has_ended) is not None,
            (self._batches.count, self._generations),
            self._between_chunks,
        )
        chosen = take(np.array([one.reason is not None for one in completions]))
        is_taken = np.isin(np.arange(len(groups)) // self._generations, chosen)
        taken = []
        left = []
        for completion, is_mine in zip(completions, is_taken):
            if is_mine:
                taken.append(completion)
            else:
                left.append(completion)
        self._after = InFlight(left, max(last + self._updates, self._before.next_step))

        of_groups = [one.group for one in taken[:: self._generations]]
        examples = [self._batches[of][0][p] for of, p in of_groups]
        # examples of steps that are over would stay for ever
        self._batches.keep({one.step for one in left})
        generation = self._sampler.generation
        in_order = [prompts[group] for group in of_groups]
        rollout = rollout_of(taken, in_order, generation, self._pad_id, {})
        if self._behind:
            metrics |= _staleness_metrics(rollout, step)
        else:
            # nothing can be carried where all that is drawn is taken
            for name in ("rollout/carried", "rollout/reread_tokens"):
                del metrics[name]
        task = self._session.task
        grader = task.grader(examples, self._generations)
        for row, mask in enumerate(rollout.completion_mask):
            grader.submit(row, rollout.tokens[row][mask].tolist())
        rollout = rollout.replace(metrics=metrics)
        graded = grader.results(rollout)
        return examples, Groups.of(rollout, graded, self._generations)

    def beside_update(self) -> Metrics:
        """Returns no metrics: all was sampled before."""
        return {}


def groups_to_take(
    oldest: Sequence[int],
    is_whole: Sequence[bool],
    count: int,
    now: int,
    staleness: int,
) -> list[int] | None:
    """The places of `count` whole groups that rollout `now` hands out; None: more must end first.

    oldest: the rollout in which each group began, `now` for those that had not begun. Those that
    began first are taken first. Enough of the older ones must be among them that none of what stays
    can become older than `staleness` rollouts; with at most count * (staleness + 1) groups in
    flight that is always possible."""
    began = np.asarray(oldest)
    whole = np.flatnonzero(is_whole)
    if len(whole) < count:
        return None
    taken = whole[np.argsort(began[whole], kind="stable")][:count]
    for later in range(staleness):
        # those that no rollout after now + later may take
        due = began + staleness <= now + later
        if due[taken].sum() < due.sum() - count * later:
            return None
    return sorted(taken.tolist())


def _staleness_metrics(rollout: Rollout, step: int) -> Metrics:
    """Measures how many updates old the tokens are that update number `step` learns from."""
    ages = step - rollout.versions[rollout.completion_mask]
    return {
        "rollout/staleness_mean": float(ages.mean()),
        "rollout/staleness_max": int(ages.max()),
    }


class OneStepOffPolicy:
    """rollout.overlap=one_step: the batch of the next rollout is sampled, with the weights before
    the updates of this one, while the devices compute the first of them. One thread starts all
    programs, in one order: the first chunks of sampling, the update, the other chunks. Their
    results do not depend on that order: no array that changes is shared."""

    def __init__(
        self,
        session: Session,
        generate: Generate,
        start: InFlight | RolloutInFlight,
        apart: SeparateSampling | None = None,
    ):
        """generate: of the policy. apart: samples where sampling has devices of its own; None: the
        policy does."""
        run = session.run
        self._session = session
        self._generate = generate
        self._apart = apart
        self._updates = run.algorithm.updates_per_rollout
        self._generations = run.algorithm.num_generations
        self._batches = _BatchesInFlight(session)
        self._seed_key = jax.random.key(run.seed)
        # the rollout that waits for its update, and the one before; None: there is none
        self._after: RolloutInFlight | None = None
        self._before: RolloutInFlight | None = None
        # samples the rest of the rollout that was begun beside this update
        self._under_way: Callable[[], RolloutInFlight] | None = None
        # why the next rollout failed beside an update; raised where that rollout is needed
        self._failed: SharedError | None = None
        self._began = -1

        # The rollout that waited in a checkpoint. Its grades are computed again.
        if isinstance(start, RolloutInFlight):
            examples, _ = self._batches[start.step]
            grader = self._session.task.grader(examples, self._generations)
            for row, tokens in enumerate(start.last_turns):
                grader.submit(row, tokens)
            self._before = self._after = replace(start, grader=grader)

    def at(self, step: int) -> dict[str, np.ndarray]:
        """See PartialRollouts."""
        held = self._before if step <= self._began else self._after
        return (held or InFlight([], step)).as_arrays()

    def compile_ahead(self, generate: GenerateFunction, params: Params, **about: Any) -> None:
        """See PartialRollouts."""
        samples = generate if self._apart is None else self._apart
        samples.compile_ahead(params, self._batches.count, self._generations, **about)

    def draw(self, step: int, params: Params) -> Drawn:
        """See PartialRollouts. Raises what went wrong beside the update before."""
        if self._failed is not None:
            raise self._failed
        self._before = self._after
        self._began = step
        held = self._before or self._start_rollout(step, step, params)()
        following = step + self._updates
        # before the update, which donates the weights that it samples with
        self._under_way = self._start_rollout(following, step, params)
        examples, _ = self._batches[step]
        self._batches.keep({following})
        rollout = held.rollout.replace(metrics=_staleness_metrics(held.rollout, step))
        graded = held.grader.results(rollout)
        return examples, Groups.of(rollout, graded, self._generations)

    def beside_update(self) -> Metrics:
        """Finishes the sampling that was begun, while the devices compute the update; returns its
        metrics. The updates after the first one of a rollout have nothing beside them."""
        if self._under_way is None:
            return {}
        under_way, self._under_way = self._under_way, None
        try:
            self._after = under_way()
        except SharedError as error:
            # An environment failed. The update is made, and its state is to be saved first.
            self._after = None
            self._failed = error
            return {}
        return self._after.rollout.metrics

    def _start_rollout(
        self, step: int, version: int, params: Params
    ) -> Callable[[], RolloutInFlight]:
        """Starts the rollout of a step with the current weights: its first chunk is read, and the
        next ones are on the devices. Completions are graded from the moment they end. Returns what
        samples the rest."""
        elapsed = stopwatch()
        key = jax.random.fold_in(self._seed_key, step)
        examples, prompts = self._batches[step]
        task = self._session.task
        grader = task.grader(examples, self._generations)
        options = {
            "on_finished": grader.submit,
            "partner": task.partner(examples, self._generations),
        }
        arguments = (params, prompts, key, self._generations)
        if self._apart is not None:
            steps = self._apart.steps(*arguments, **options)
        else:
            steps = self._generate(*arguments, stepwise=True, **options)
        # From here on it has weights of its own: the update donates `params`.
        next(steps)
        until_update = elapsed()

        def sampled() -> RolloutInFlight:
            elapsed = stopwatch()
            rollout = to_the_end(steps)
            seconds = {"time/rollout": until_update, "time/rollout_beside_update": elapsed()}
            versions = np.where(rollout.completion_mask, version, -1).astype(np.int32)
            rollout = rollout.replace(versions=versions, metrics=rollout.metrics | seconds)
            return RolloutInFlight(step, version, rollout, grader)

        return sampled


# what gives a run its completions where rollouts overlap with learning
Overlap = PartialRollouts | OneStepOffPolicy


def overlap_of(session: Session, generate: Generate) -> Overlap | None:
    """Restores the overlapping rollouts of a run whose state is loaded; None without overlap.
    generate: of the policy.
    Raises ConfigError if the checkpoint lacks them."""
    run = session.run
    step = int(session.state.step)
    overlap = run.rollout.overlap
    if overlap == "none" or (overlap == "one_step" and not run.rollout.is_stale):
        return None

    # What was in flight; nothing if the run begins here or resumes with other settings.
    start = InFlight([], step)
    resume_from = session.parts.resume_from
    if resume_from is not None and not (run.resume.force and session.parts.differs):
        with error_context("resume"):
            arrays = Checkpoints(resume_from).in_flight(step)
            if arrays is None and run.rollout.is_stale:
                raise ValueError(
                    f"step {step} of {resume_from} has no completions in flight; "
                    "resume.force=true begins with none"
                )
            if arrays is not None:
                start = in_flight_from(arrays)
    if overlap == "one_step":
        return OneStepOffPolicy(session, generate, start, SeparateSampling.of(session))
    arguments = arguments_of_sampler(session.parts.resolved, session.task.tokenizer)
    sampler = make_sampler(*arguments)
    return PartialRollouts(session, PartialSampler(sampler), start)
