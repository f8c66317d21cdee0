"""Experience: the data that an update learns from, and its source."""

import contextlib
from dataclasses import dataclass, replace
from typing import Protocol

import jax
import numpy as np

from tunix_lite.algorithms.groups import chosen_completions
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
from tunix_lite.runs.sampling_progress import SamplingProgress
from tunix_lite.runs.session import Session

# The result of collecting: the batch, metrics, and the graded completions if there are any.
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

    def evaluate(self, step: int, params: Params, patience: float) -> Evaluated:
        """Evaluates the policy after `step` updates on evaluation.num_examples held-out examples.
        patience: seconds until it reports progress. Raises RunFailed if a reward fails, StopRun if
        a signal ends it. params: as of `take`."""
        ...


class FreshExperience:
    """Completions are sampled once in algorithm.updates_per_rollout updates, with the current
    weights (or as rollout.overlap has it); in between, the same batch is handed out again, or the
    next mini-batch of it."""

    def __init__(self, session: Session, learner: Learner):
        self._session = session
        self._learner = learner
        self._algorithm = session.run.algorithm
        self._needs = session.run.algorithm.needs
        self._collected: Collected | None = None
        # an update to come, and what was collected for it beside another
        self._ahead: tuple[int, Collected] | None = None
        self._held: Experience | None = None
        # the update that it was collected for
        self._step = 0

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
        updates = self._algorithm.updates_per_rollout
        parts = self._needs.mini_batches
        update = step % updates
        with error_context(f"step {step + 1}", RunFailed):
            # Collect: completions of the policy, rewards, advantages.
            if update == 0:
                self._step, self._collected = self._ahead or (None, None)
                if self._step != step:
                    self._step = step
                    self._collected = self._collect(step, step // updates, params)

            # Lay out: sequences become rows of a fixed width, divided over the mesh; the next
            # mini-batch, or without mini-batches the whole batch.
            if update == 0 or parts > 1:
                batch, metrics, graded = self._collected
                if parts > 1:
                    rows = np.split(np.arange(len(batch.tokens)), parts)[update % parts]
                    graded = None if graded is None else chosen_completions([graded], rows)
                    batch = jax.tree.map(lambda x: x[rows], batch)
                laid_out, _ = self._learner.resolved.rows.lay_out(batch)
                self._held = Experience(laid_out, batch, metrics, graded, updates)
        # it is there: a run begins, and resumes, where a rollout begins
        metrics = self._held.metrics if update == 0 else {}
        return replace(self._held, metrics=metrics, updates_left=updates - update)

    def beside_update(self) -> Metrics:
        """See ExperienceSource."""
        overlap = self._learner.overlap
        if overlap is not None:
            return overlap.beside_update()
        next_step = self._step + self._algorithm.updates_per_rollout
        self._ahead = None
        if self._needs.reads_ahead and next_step < self._session.run.training.max_steps:
            rollout = next_step // self._algorithm.updates_per_rollout
            # `take` says what is wrong with it, after this update
            with contextlib.suppress(ValueError):
                self._ahead = next_step, self._collect(next_step, rollout, None)
        return {}

    def evaluate(self, step: int, params: Params, patience: float) -> Evaluated:
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

    def _collect(self, step: int, rollout: int, params: Params | None) -> Collected:
        """Examples of the task, completions of the policy, rewards, advantages."""
        session = self._session
        overlap = self._learner.overlap
        task = session.task

        # What was sampled beside earlier updates, or the examples of all rounds. Those of later
        # rounds are of other shuffles, so that the first one goes through the data in the same
        # order whether others follow or not.
        if overlap is not None:
            policy, task, examples = overlap.draw(step, self._learner.policy, task, params)
        else:
            policy = self._learner.policy
            num_prompts = session.parts.batch.prompts * self._needs.mini_batches
            examples = []
            for r in range(self._needs.rounds):
                seed = (session.run.seed + r * SEED_OF_NEXT_ROUND) % 2**32
                examples += task.batch(num_prompts, seed, rollout)

        # by step, so that a run that resumes draws what it would have drawn
        key = jax.random.fold_in(self._learner.seed_key, step)
        return self._algorithm.collect(policy, task, params, examples, key)
