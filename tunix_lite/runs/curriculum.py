"""The curriculum of a run: its draws, the grades that it learns from, and its state at a
checkpoint.

With the state of the checkpoint, a run that goes on draws what it would have drawn.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tunix_lite.tasks.curriculum import (
    CurriculumConfig,
    CurriculumState,
    draw_prompts,
    record_groups,
    source_of_level,
    state_metrics,
)
from tunix_lite.tasks.processes import same_on_all
from tunix_lite.tasks.task import Task
from tunix_lite.types import Graded, Metrics


@dataclass
class RunCurriculum:
    """Chooses the prompts of each rollout, and learns from its grades which to choose next.

    Example: `begin(step, task)`, then `batch` for each round, then `end`, which returns metrics.
    """

    settings: CurriculumConfig
    # the states after the newest rollout and before it
    state: CurriculumState
    before: CurriculumState
    # the step that the newest rollout began with; -1 before the first one
    began: int = -1
    # that rollout's groups: (example, right, all); its examples: drawn, passed over, refilled
    groups: list[tuple[dict, int, int]] = field(default_factory=list)
    counts: list[tuple[int, int, int]] = field(default_factory=list)
    num_prompts: int = 1

    def begin(self, step: int, task: Task) -> Task:
        """A rollout begins, for the updates from number `step` on. Returns the task that tells the
        curriculum of its grades."""
        self.before = self.state
        self.began = step
        self.groups.clear()
        self.counts.clear()
        return replace(task, on_graded=self.record)

    def batch(
        self, task: Task, count: int, seed: int, number: int = 0
    ) -> tuple[list[dict], int]:
        """The next examples for round `number` of this rollout, and how many were dropped for their
        length. Raises ValueError, on all processes, as Task.batch does."""
        level = self.before.level
        source = source_of_level(task.config.source, self.settings, level)
        train = source.train
        stream = f"{level}.{number}"
        look = task.look if task.leaves_out else None

        def take() -> tuple:
            drawn = draw_prompts(self.settings, self.before, train, count, seed, stream, look)
            counts = (len(drawn.examples), drawn.passed_over, drawn.refilled)
            return drawn.examples, drawn.position, counts, drawn.unfit

        examples, position, counts, too_long = same_on_all(task.processes, take)
        self.counts.append(counts)
        self.num_prompts = len(train)
        self.state = replace(self.state, positions=self.state.positions | {stream: position})
        return examples, too_long

    def record(self, graded: Graded) -> None:
        """Takes note of all that was graded; completions that were dropped do not count."""
        G = graded.num_generations
        for first in range(0, len(graded.examples), G):
            valid_rows = [row for row in range(first, first + G) if not graded.dropped[row]]
            if valid_rows:
                right = sum(bool(graded.correct[row]) for row in valid_rows)
                self.groups.append((graded.examples[valid_rows[0]], right, len(valid_rows)))

    def end(self, say: Callable[[str], None]) -> Metrics:
        """Ends the rollout: its grades count from here on. Returns metrics of it. say: gets a line
        where a new level begins."""
        self.state = record_groups(self.settings, self.state, self.groups)
        level = self.state.level
        if level > self.before.level:
            levels = self.settings.levels
            say(f"curriculum: level {level + 1} of {len(levels)} begins, {levels[level]}")
        metrics = state_metrics(self.settings, self.state, self.num_prompts)
        if self.settings.judges_prompts:
            drawn, passed_over, refilled = (sum(one) for one in zip(*self.counts))
            looked_at = drawn + passed_over - refilled
            metrics["curriculum/passed_over"] = (passed_over - refilled) / looked_at
            metrics["curriculum/refilled"] = refilled
        return metrics

    def at(self, step: int) -> dict:
        """The state that belongs to the weights after `step` updates, as JSON has it."""
        return (self.before if step <= self.began else self.state).as_json()
