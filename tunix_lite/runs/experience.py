"""Experience: what an update learns from, and where it comes from."""

from dataclasses import dataclass
from typing import Protocol

import jax

from tunix_lite.errors import RunFailed, error_context
from tunix_lite.runs.learner import Learner
from tunix_lite.runs.session import Session
from tunix_lite.types import Batch, Graded, Metrics, Params, RowBatch


@dataclass(frozen=True)
class Experience:
    """A batch to learn from.

    Example: with algorithm.updates_per_rollout=2 the same completions are handed out for two
    updates: first with updates_left=2, then with updates_left=1.
    """

    # the batch in rows on the mesh: what the update takes
    rows: RowBatch
    # the same as the algorithm made it, [B, T] on the host
    batch: Batch
    # of collecting: rewards, completions, time/rollout; {} where the batch is handed out again
    metrics: Metrics
    # completions with their rewards; None where nothing was sampled, as in SFT
    graded: Graded | None
    # updates that learn from it, this one included
    updates_left: int


class ExperienceSource(Protocol):
    """Where the loop gets its experience from."""

    def take(self, step: int, params: Params) -> Experience:
        """What update number `step` (from 0) learns from. Raises RunFailed, naming the step, if
        data, rewards or the algorithm's batch are wrong; StopRun if a signal ends it.

        params: what the policy samples with now, adapters attached to their base. The next update
        donates them: who samples beside an update copies them first.
        """
        ...


class FreshExperience:
    """Completions are sampled with the current weights, once in algorithm.updates_per_rollout
    updates; in between, the same batch is handed out again."""

    def __init__(self, session: Session, learner: Learner):
        self._run = session.run
        self._task = session.task
        self._long_prompts = session.task.long_prompts
        self._num_prompts = session.parts.batch.prompts
        self._rows = session.parts.rows
        self._policy = learner.policy
        self._seed_key = learner.seed_key
        self._held: Experience | None = None

    def take(self, step: int, params: Params) -> Experience:
        """See ExperienceSource. Seed and step alone decide on data and random numbers."""
        algorithm = self._run.algorithm
        updates = algorithm.updates_per_rollout
        if step % updates:
            return self._again(updates - step % updates)

        # Collect: examples of the task, completions of the policy, rewards, advantages.
        key = jax.random.fold_in(self._seed_key, step)
        with error_context(f"step {step + 1}", RunFailed):
            examples, dropped = self._task.batch(self._num_prompts, self._run.seed, step // updates)
            batch, metrics, graded = algorithm.collect(
                self._policy, self._task.at_step(step), params, examples, key
            )
        if self._long_prompts == "drop":
            metrics["prompts/dropped"] = dropped

        # Lay out: sequences become rows of a fixed width, divided over the mesh.
        with error_context(f"step {step + 1}", RunFailed):
            rows, _ = self._rows.lay_out(batch)
        self._held = Experience(rows, batch, metrics, graded, updates)
        return self._held

    def _again(self, updates_left: int) -> Experience:
        held = self._held
        assert held is not None, "a run begins and resumes where a rollout begins"
        return Experience(held.rows, held.batch, {}, held.graded, updates_left)
