"""Experience: the data that an update learns from, and its source."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np

from tunix_lite.algorithms.sampling import chosen_completions, sampler_for
from tunix_lite.basics.errors import RunFailed, error_context
from tunix_lite.basics.types import (
    Batch,
    Graded,
    Metrics,
    Params,
    RowBatch,
    TrainState,
    policy_part,
)
from tunix_lite.distributed.stopping import COMPILATION
from tunix_lite.runs.evaluate import Evaluated, evaluate, rollout_sizes
from tunix_lite.runs.learner import Learner
from tunix_lite.runs.overlap import Drawn
from tunix_lite.runs.sampling_progress import SamplingProgress
from tunix_lite.runs.session import Session

# the batch of a rollout, its metrics, and the graded completions (None: there are none)
Collected = tuple[Batch, Metrics, Graded | None]

# added to the seed of the data order for each further round of prompts
SEED_OF_NEXT_ROUND = 0x9E3779B1


@dataclass(frozen=True)
class Experience:
    """A batch to learn from. Example: with algorithm.updates_per_rollout=2 the same completions are
    handed out for two updates: first with updates_left=2, then with updates_left=1."""

    # the batch in rows on the mesh, which the update takes
    rows: RowBatch
    # the same as the algorithm made it, [B, T] on the host; with algorithm.mini_batches, a part
    batch: Batch
    # metrics of collecting: rewards, completions, time/rollout; {} for a batch handed out again
    metrics: Metrics
    # the completions of `batch` with their rewards; None where nothing was sampled, as in SFT
    graded: Graded | None
    # updates that learn from it, this one included
    updates_left: int
    # False for a batch that is handed out again
    is_fresh: bool


class ExperienceSource(Protocol):
    """Gives the loop its experience."""

    def compile_ahead(self, state: TrainState) -> None:
        """Compiles the programs of sampling before the first step. Nothing is sampled here."""
        ...

    def take(self, step: int, params: Params) -> Experience:
        """Returns the experience of update number `step` (from 0). Raises RunFailed, naming the
        step, if data, rewards or the algorithm's batch are wrong; StopRun if a signal ends it.
        params: what the policy samples with now, adapters attached to their base. The next update
        donates them: who samples beside an update copies them first."""
        ...

    def beside_update(self) -> Metrics:
        """Call it once the update has been started. What the host and the devices can do for later
        updates meanwhile is done; metrics of it."""
        ...

    def evaluate(self, params: Params, patience: float) -> Evaluated:
        """Evaluates the policy on evaluation.num_examples held-out examples.
        patience: seconds until it reports progress. Raises RunFailed if a reward fails, StopRun if
        a signal ends it. params: as of `take`."""
        ...


class TaskExperience:
    """Completions are sampled once in algorithm.updates_per_rollout updates, with the current
    weights (or as rollout.overlap has it); in between, the same batch is handed out again, or the
    next mini-batch of it."""

    def __init__(self, session: Session, learner: Learner):
        self._session = session
        self._learner = learner
        self._algorithm = session.run.algorithm
        self._updates = self._algorithm.updates_per_rollout
        # prompts of a rollout, and the seed of each of its rounds. Later rounds are of other
        # shuffles, so that the first one goes through the data in the same order whether others
        # follow or not.
        needs = session.run.algorithm.needs
        self._num_mini_batches = needs.mini_batches
        self._num_prompts = session.parts.batch.prompts * needs.mini_batches
        steps = range(0, needs.rounds * SEED_OF_NEXT_ROUND, SEED_OF_NEXT_ROUND)
        self._seeds = [(session.run.seed + more) % 2**32 for more in steps]
        self._sample = sampler_for(self._algorithm)
        # where examples and completions come from, and what goes on beside an update
        self._draw: Callable[[int, Params], Drawn] = self.draw
        # without anything to do, no metrics: {}
        self._beside: Callable[[], Metrics] = dict
        if learner.overlap is not None:
            self._draw = learner.overlap.draw
            self._beside = learner.overlap.beside_update
        elif needs.reads_ahead:
            self._beside = self.read_ahead
        # what the updates of a rollout learn from, and the step of the first of them
        self._collected: Collected | None = None
        self._step = 0
        # what the next rollout gives; None: it is not collected yet
        self._ahead: Collected | None = None

    def compile_ahead(self, state: TrainState) -> None:
        """See ExperienceSource."""
        learner = self._learner
        # SFT without evaluations samples nothing
        if not learner.resolved.has_rollouts and learner.overlap is None:
            return
        self._session.console.busy("compiling the sampler…")
        with self._session.stopping.uninterruptible(COMPILATION):
            learner.compile_sampler(state)

    def take(self, step: int, params: Params) -> Experience:
        """See ExperienceSource. Seed and step alone decide on data and random numbers."""
        update = step % self._updates
        with error_context(f"step {step + 1}", RunFailed):
            # Collect: completions of the policy, rewards, advantages. It is there for later
            # updates: a run begins, and resumes, where a rollout begins.
            if not update:
                self._collected = self._ahead or self.collect(step, params)
                self._ahead = None
                self._step = step
            batch, metrics, graded = self._collected
            if self._num_mini_batches > 1:
                batch, graded = self.mini_batch(update)

            # Lay out: sequences become rows of a fixed width, divided over the mesh.
            rows, _ = self._learner.resolved.rows.lay_out(batch)
        return Experience(
            rows,
            batch,
            {} if update else metrics,
            graded,
            updates_left=self._updates - update,
            is_fresh=not update,
        )

    def evaluate(self, params: Params, patience: float) -> Evaluated:
        """See ExperienceSource."""
        session = self._session
        settings = session.run.evaluation
        counts = rollout_sizes(settings.num_examples, settings.num_samples)
        with SamplingProgress(session.console, counts, patience=patience) as progress:
            task = session.task
            examples = task.held_out(settings.num_examples)
            return evaluate(
                self._learner.policy,
                task,
                policy_part(params),
                examples,
                self._learner.seed_key,
                settings.num_samples,
                settings.temperature,
                progress,
                task.references(examples),
            )

    def beside_update(self) -> Metrics:
        """See ExperienceSource."""
        return self._beside()

    def collect(self, step: int, params: Params | None) -> Collected:
        """Examples of the task, completions of the policy, rewards, advantages."""
        policy = self._learner.policy
        examples, groups = self._draw(step, params)
        batch, metrics = self._algorithm.batch_of(
            policy, self._session.task, params, examples, groups
        )
        if policy.compare is not None:
            batch = policy.compare(batch)
        return batch, metrics, None if groups is None else groups.graded

    def draw(self, step: int, params: Params | None) -> Drawn:
        """The examples of all rounds of a rollout, and their completions."""
        task = self._session.task
        examples = [
            example
            for seed in self._seeds
            for example in task.batch(self._num_prompts, seed, step // self._updates)
        ]
        # by step, so that a run that resumes draws what it would have drawn
        key = jax.random.fold_in(self._learner.seed_key, step)
        return examples, self._sample(self._learner.policy, task, params, examples, key)

    def mini_batch(self, update: int) -> tuple[Batch, Graded | None]:
        """The part of the rollout that this one of its updates learns from."""
        batch, _, graded = self._collected
        mini_batches = np.split(np.arange(len(batch.tokens)), self._num_mini_batches)
        rows = mini_batches[update % self._num_mini_batches]
        graded = None if graded is None else chosen_completions([graded], rows)
        return jax.tree.map(lambda x: x[rows], batch), graded

    def read_ahead(self) -> Metrics:
        """Makes the batch of the next rollout, of an algorithm that asks nothing of the policy."""
        step = self._step + self._updates
        if step < self._session.run.training.max_steps:
            # `take` says what is wrong with it, after this update
            with contextlib.suppress(ValueError):
                self._ahead = self.collect(step, None)
        return {}
