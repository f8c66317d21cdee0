"""Experience: the data that an update learns from, and its source."""

from dataclasses import dataclass, replace
from typing import Protocol

import jax
import numpy as np

from tunix_lite.algorithms.groups import chosen_completions
from tunix_lite.distributed.stopping import COMPILATION
from tunix_lite.errors import RunFailed, error_context
from tunix_lite.runs.evaluate import Evaluated, evaluate, rollout_sizes
from tunix_lite.runs.learner import Learner
from tunix_lite.runs.moving_reference import moving_reference
from tunix_lite.runs.overlap import Drawn
from tunix_lite.runs.sampling_progress import SamplingProgress
from tunix_lite.runs.session import Session
from tunix_lite.tasks.task import Task
from tunix_lite.types import Batch, Graded, Metrics, Params, RowBatch, TrainState

# added to the seed of the data order for each further round of prompts
SEED_OF_NEXT_ROUND = 0x9E3779B1


@dataclass(frozen=True)
class Experience:
    """A batch to learn from.

    Example: with algorithm.updates_per_rollout=2 the same completions are handed out for two
    updates: first with updates_left=2, then with updates_left=1.
    """

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
        donates them: who samples beside an update copies them first.
        """
        ...

    def beside_update(self) -> Metrics:
        """Call it once the update has been started. What the host and the devices can do for later
        updates meanwhile is done; metrics of it."""
        ...

    def evaluate(self, step: int, params: Params, patience: float) -> Evaluated:
        """Evaluates the policy after `step` updates on evaluation.num_examples held-out examples.
        patience: seconds until it reports progress. Raises RunFailed if a reward fails, StopRun if
        a signal ends it.

        params: as of `take`.
        """
        ...


# the result of collecting: the batch, metrics, and the graded completions if there are any
Collected = tuple[Batch, Metrics, Graded | None]


class FreshExperience:
    """Completions are sampled once in algorithm.updates_per_rollout updates, with the current
    weights (or as rollout.overlap has it); in between, the same batch is handed out again, or the
    next mini-batch of it."""

    def __init__(self, session: Session, learner: Learner):
        self._algorithm = session.run.algorithm
        self._seed = session.run.seed
        self._task = session.task
        self._leaves_out = session.task.leaves_out
        self._mini_batches = session.run.algorithm.needs.mini_batches
        self._rounds = session.run.algorithm.needs.rounds
        self._num_prompts = session.parts.batch.prompts * self._mini_batches
        self._rows = session.parts.rows
        self._policy = learner.policy
        self._curriculum = learner.curriculum
        self._overlap = learner.overlap
        self._console = session.console
        self._stopping = session.stopping
        self._evaluation = session.run.evaluation
        self._learner = learner
        self._moving = moving_reference(session)
        self._seed_key = learner.seed_key
        self._collected: Collected | None = None
        self._held: Experience | None = None

    def compile_ahead(self, state: TrainState) -> None:
        """See ExperienceSource."""
        if not self._learner.resolved.has_rollouts and self._overlap is None:
            return
        self._console.busy("compiling the sampler…")
        with self._stopping.uninterruptible(COMPILATION):
            self._learner.compile_sampler(state)

    def take(self, step: int, params: Params) -> Experience:
        """See ExperienceSource. Seed and step alone decide on data and random numbers."""
        updates = self._algorithm.updates_per_rollout
        update = step % updates
        with error_context(f"step {step + 1}", RunFailed):
            # Collect: examples of the task, completions of the policy, rewards, advantages.
            if update == 0:
                self._collected = self._collect(step, step // updates, params)
            # Lay out: sequences become rows of a fixed width, divided over the mesh.
            if update == 0 or self._mini_batches > 1:
                self._held = self._lay_out(update % self._mini_batches)
        # it is there: a run begins, and resumes, where a rollout begins
        metrics = self._held.metrics if update == 0 else {}
        return replace(self._held, metrics=metrics, updates_left=updates - update)

    def beside_update(self) -> Metrics:
        """See ExperienceSource."""
        return {} if self._overlap is None else self._overlap.beside_update()

    def evaluate(self, step: int, params: Params, patience: float) -> Evaluated:
        """See ExperienceSource."""
        settings = self._evaluation
        counts = rollout_sizes(settings.num_examples, settings.num_samples)
        with SamplingProgress(self._console, counts, patience=patience) as progress:
            return evaluate(
                self._learner.policy,
                self._task.at_step(step),
                params,
                self._seed_key,
                settings.num_examples,
                settings.num_samples,
                settings.temperature,
                progress,
            )

    def _collect(self, step: int, rollout: int, params: Params) -> Collected:
        key = jax.random.fold_in(self._seed_key, step)
        self._policy = self._moving.follow(self._policy, step, params)
        policy, task, examples, example_metrics = self._source(step, rollout, params)
        batch, metrics, graded = self._algorithm.collect(policy, task, params, examples, key)
        return batch, metrics | self._curriculum.end(self._console.say) | example_metrics, graded

    def _source(self, step: int, rollout: int, params: Params) -> Drawn:
        """Returns the policy to sample from, its task and examples, and metrics of these."""
        task = self._curriculum.begin(step, self._task.at_step(step))
        if self._overlap is not None:
            return self._overlap.draw(step, self._policy, task, params)
        return self._policy, task, *self._examples(task, rollout)

    def _examples(self, task: Task, rollout: int) -> tuple[list[dict], Metrics]:
        """The examples of all rounds, and how many were passed over, if any may be.

        Examples of later rounds are those of other shuffles, so that the first round goes through
        the data in the same order whether others follow or not.
        """
        examples = []
        dropped = 0
        for r in range(self._rounds):
            seed = (self._seed + r * SEED_OF_NEXT_ROUND) % 2**32
            more, unfit = self._curriculum.batch(task, self._num_prompts, seed, rollout, r)
            examples += more
            dropped += unfit
        return examples, {"prompts/dropped": dropped} if self._leaves_out else {}

    def _lay_out(self, part: int) -> Experience:
        """Mini-batch number `part` in rows; without mini-batches the whole batch."""
        batch, metrics, graded = self._collected
        if self._mini_batches > 1:
            batch, graded = self._mini_batch(batch, graded, part)
        laid_out, _ = self._rows.lay_out(batch)
        # `take` says how many updates are left
        return Experience(laid_out, batch, metrics, graded, updates_left=1)

    def _mini_batch(
        self, batch: Batch, graded: Graded | None, part: int
    ) -> tuple[Batch, Graded | None]:
        rows = np.split(np.arange(len(batch.tokens)), self._mini_batches)[part]
        graded = None if graded is None else chosen_completions([graded], rows)
        return jax.tree.map(lambda x: x[rows], batch), graded
