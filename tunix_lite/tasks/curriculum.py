"""Curricula: which prompts are asked, by how often the policy has solved them so far.

A curriculum is a function of grades alone, which are the same on all processes, and of seed and
position in the data. Its state is a file in each checkpoint: a run that goes on draws what it would
have drawn.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

import numpy as np

from tunix_lite.tasks.processes import same_on_all
from tunix_lite.tasks.sources import digest, order_of
from tunix_lite.tasks.task import Task
from tunix_lite.types import Graded, Metrics


@dataclass(frozen=True)
class CurriculumConfig:
    """Chooses the prompts that are asked by their pass rate: the share of right ones of all
    completions that were sampled for a prompt so far. By default all are asked alike.

    Example: CurriculumConfig(drop_at=0.9) asks no prompt again that was solved 9 of 10 times.
    """

    # Pass rate, such as 0.9, at which a prompt is not asked again. null drops no prompt.
    drop_at: float | None = None
    # Range of pass rates, such as [0.2,0.8]. Prompts outside it are asked less often. [] treats all
    # alike.
    band: tuple[float, ...] = ()
    # How often prompts outside `band` are asked, as a share from 0 to 1 of the others.
    outside: float = 0.25
    # Completions of a prompt that are needed before its pass rate counts.
    min_completions: int = 8

    def __post_init__(self):
        if self.drop_at is not None and not 0 < self.drop_at <= 1:
            raise ValueError(
                f"drop_at={self.drop_at} is a pass rate above 0, at most 1; or null"
            )
        if self.band and not (len(self.band) == 2 and 0 <= self.band[0] <= self.band[1] <= 1):
            raise ValueError(
                f"band={list(self.band)}: two pass rates, such as [0.2,0.8]; or []"
            )
        if not 0 <= self.outside <= 1:
            raise ValueError(f"outside={self.outside} is a share, from 0 to 1")
        if self.min_completions < 1:
            raise ValueError(f"min_completions={self.min_completions} must be at least 1")
        for name, other, is_there in (
            ("outside", "band", bool(self.band)),
            ("min_completions", "drop_at or band", self.is_on),
        ):
            value = getattr(self, name)
            if value != getattr(CurriculumConfig, name) and not is_there:
                raise ValueError(
                    f"{name}={value} would change nothing without {other}; leave it out"
                )

    @property
    def is_on(self) -> bool:
        """True if the curriculum changes anything."""
        return self.drop_at is not None or bool(self.band)

    def drops(self, right: int, judged: int) -> bool:
        """True if a prompt is not asked again; right: of `judged` completions."""
        known = self.drop_at is not None and judged >= self.min_completions
        return known and right / judged >= self.drop_at

    def share(self, right: int, judged: int) -> float:
        """Returns how often a prompt is asked where the data have it, 0 to 1."""
        if judged < self.min_completions:
            return 1.0
        if self.drops(right, judged):
            return 0.0
        is_outside = self.band and not self.band[0] <= right / judged <= self.band[1]
        return self.outside if is_outside else 1.0

    def words(self) -> str:
        """Describes the curriculum for people."""
        parts = []
        if self.drop_at is not None:
            parts.append(f"prompts with a pass rate of {self.drop_at:g} or more are dropped")
        if self.band:
            low, high = self.band
            parts.append(
                f"those outside of {low:g} to {high:g} are asked {self.outside:g} times"
            )
        parts.append(f"after {self.min_completions} completions of a prompt")
        return ", ".join(parts)


@dataclass(frozen=True)
class CurriculumState:
    """State of a curriculum at some step of a run.

    Example: CurriculumState(rates={"5feceb66ffc86f38": (8, 8)}) knows one prompt, always solved.
    """

    # position in the data, by round of a rollout
    positions: dict[str, int] = field(default_factory=dict)
    # (right completions, all completions), by digest of the example
    rates: dict[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, saved: dict) -> "CurriculumState":
        """The state of a checkpoint. Raises ValueError for anything else."""
        try:
            positions = {key: (value, 0) for key, value in saved["positions"].items()}
            for pair in (*positions.values(), *saved["rates"].values()):
                if [type(count) for count in pair] != [int, int] or min(pair) < 0:
                    raise TypeError(f"{str(pair)[:40]} is no count")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the state of a curriculum ({error!r})") from error
        return cls(
            saved["positions"], {key: tuple(rate) for key, rate in saved["rates"].items()}
        )


class _Draw(NamedTuple):
    """Prompts to ask, and what was passed over for them.

    Example: draw_prompts(...).examples, a batch of rows of data.
    """

    examples: list[dict]
    # position at which the next draw begins
    position: int
    # examples not asked for their pass rate, those among them that are asked all the same since
    # there are no others, and examples that cannot be taken
    passed_over: int
    refilled: int
    unfit: int


def draw_prompts(
    settings: CurriculumConfig,
    rates: dict[str, tuple[int, int]],
    position: int,
    examples: Sequence[dict],
    count: int,
    seed: int,
    look: Callable[[dict], str] | None = None,
) -> _Draw:
    """The next `count` examples in the order of `seed`, without those that are not asked now.

    look: why an example is left out; None: none is. A batch looks at each example at most once.
    If too few are asked, the first that were passed over are asked all the same. Raises ValueError
    if too few are taken.
    """
    order = order_of(examples, seed)
    num_examples = len(examples)
    chosen: list[dict] = []
    passed: list[dict] = []
    unfit: list[str] = []
    # each example once, until all were seen; through fewer than `count`, though they come again
    few = num_examples < count
    end = position + (count if few else 2 * num_examples)
    seen: set[int] = set()
    while len(chosen) < count and position < end and (few or len(seen) < num_examples):
        place = int(order[position])
        position += 1
        if place in seen and not few:
            continue
        seen.add(place)
        example = examples[place]
        if look is not None and (why := look(example)):
            unfit.append(why)
            continue
        share = settings.share(*rates.get(digest(example), (0, 0))) if rates else 1.0
        # by chance, but the same in every process and after every resume
        is_asked = share == 1 or np.random.default_rng((seed, position - 1)).random() < share
        (chosen if is_asked else passed).append(example)
    refilled = passed[: count - len(chosen)]
    if len(chosen) + len(refilled) < count:
        raise ValueError(
            f"of {num_examples:,} training prompts too few can be taken, and a batch takes "
            f"{count}; the first that cannot: {unfit[0]}"
        )
    return _Draw(chosen + refilled, position, len(passed), len(refilled), len(unfit))


@dataclass
class Curriculum:
    """Chooses the prompts of each rollout, and learns from its grades which to choose next.

    Example: `begin(step, task)`, then `batch` for each round, then `end`, which returns metrics.
    """

    settings: CurriculumConfig
    # the states after the newest rollout and before it
    state: CurriculumState
    before: CurriculumState = field(init=False)
    # the step that the newest rollout began with; -1 before the first one
    began: int = field(init=False, default=-1)
    # that rollout's groups: (example, right, all); its draws
    groups: list[tuple[dict, int, int]] = field(init=False, default_factory=list)
    draws: list[_Draw] = field(init=False, default_factory=list)
    num_prompts: int = field(init=False, default=1)

    def __post_init__(self):
        self.before = self.state

    def begin(self, step: int, task: Task) -> Task:
        """A rollout begins, for the updates from number `step` on. Returns the task that tells the
        curriculum of its grades."""
        self.before = self.state
        self.began = step
        self.groups.clear()
        self.draws.clear()
        return replace(task, on_graded=self.record)

    def batch(
        self, task: Task, count: int, seed: int, number: int = 0
    ) -> tuple[list[dict], int]:
        """The next examples for round `number` of this rollout, and how many were dropped for their
        length. Raises ValueError, on all processes, as Task.batch does."""
        train = task.config.source.train
        key = str(number)
        drawn = same_on_all(
            task.processes,
            lambda: draw_prompts(
                self.settings,
                self.before.rates,
                self.before.positions.get(key, 0),
                train,
                count,
                seed,
                task.look if task.leaves_out else None,
            ),
        )
        self.draws.append(drawn)
        self.num_prompts = len(train)
        self.state = replace(
            self.state, positions=self.state.positions | {key: drawn.position}
        )
        return drawn.examples, drawn.unfit

    def record(self, graded: Graded) -> None:
        """Takes note of all that was graded; completions that were dropped do not count."""
        G = graded.num_generations
        for first in range(0, len(graded.examples), G):
            valid_rows = [row for row in range(first, first + G) if not graded.dropped[row]]
            right = sum(bool(graded.correct[row]) for row in valid_rows)
            self.groups.append((graded.examples[first], right, len(valid_rows)))

    def end(self) -> Metrics:
        """Ends the rollout: its grades count from here on. Returns metrics of it."""
        rates = dict(self.state.rates)
        for example, right, judged in self.groups:
            key = digest(example)
            before = rates.get(key, (0, 0))
            rates[key] = (before[0] + right, before[1] + judged)
        self.state = replace(self.state, rates=rates)
        refilled = sum(draw.refilled for draw in self.draws)
        not_asked = sum(draw.passed_over for draw in self.draws) - refilled
        drawn = sum(len(draw.examples) for draw in self.draws)
        dropped = sum(self.settings.drops(*rate) for rate in rates.values())
        return {
            "curriculum/dropped": dropped / self.num_prompts,
            "curriculum/passed_over": not_asked / (drawn + not_asked),
            "curriculum/refilled": refilled,
        }

    def at(self, step: int) -> dict:
        """The state that belongs to the weights after `step` updates, as JSON has it."""
        return asdict(self.before if step <= self.began else self.state)
