"""Curricula: which prompts are asked, by how often the policy has solved them so far.

A curriculum is a function of grades alone, which are the same on all processes, and of seed and
position in the data. Its state is kept with each checkpoint (runs/curriculum.py).
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tunix_lite.tasks.fitting import Look
from tunix_lite.tasks.sources import Source, digest, order_of
from tunix_lite.types import Metrics


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
    # Task settings by level, easiest first: [{max_terms: 3}, {max_terms: 4}]. [] has one level.
    levels: tuple[dict, ...] = ()
    # Pass rate of the current level at which the next level starts, above 0, at most 1.
    rise_at: float = 0.7
    # Newest prompts of a level over which its pass rate is measured.
    over_prompts: int = 64

    def __post_init__(self):
        if self.drop_at is not None and not 0 < self.drop_at <= 1:
            raise ValueError(
                f"drop_at={self.drop_at} is a pass rate above 0, at most 1; or null"
            )
        if self.band and not (len(self.band) == 2 and 0 <= self.band[0] <= self.band[1] <= 1):
            raise ValueError(f"band={list(self.band)}: two pass rates, such as [0.2,0.8]; or []")
        if not 0 <= self.outside <= 1:
            raise ValueError(f"outside={self.outside} is a share, from 0 to 1")
        if not 0 < self.rise_at <= 1:
            raise ValueError(f"rise_at={self.rise_at} is a pass rate above 0, at most 1")
        for name in ("min_completions", "over_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

        # A setting that would change nothing is refused.
        needs = {
            "outside": ("band", bool(self.band)),
            "min_completions": ("drop_at or band", self.judges_prompts),
            "rise_at": ("levels", bool(self.levels)),
            "over_prompts": ("levels", bool(self.levels)),
        }
        defaults = {item.name: item.default for item in dataclasses.fields(self)}
        for name, (other, is_there) in needs.items():
            value = getattr(self, name)
            if value != defaults[name] and not is_there:
                raise ValueError(
                    f"{name}={value} would change nothing without {other}; leave it out"
                )

    @property
    def judges_prompts(self) -> bool:
        """True if the pass rate of each prompt counts."""
        return self.drop_at is not None or bool(self.band)

    @property
    def is_on(self) -> bool:
        """True if the curriculum changes anything."""
        return self.judges_prompts or bool(self.levels)

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
        if self.levels:
            parts.append(
                f"{len(self.levels)} levels, the next one at a pass rate of {self.rise_at:g} over "
                f"{self.over_prompts} prompts"
            )
        if self.drop_at is not None:
            parts.append(f"prompts with a pass rate of {self.drop_at:g} or more are dropped")
        if self.band:
            low, high = self.band
            parts.append(
                f"those outside of {low:g} to {high:g} are asked {self.outside:g} times"
            )
        if self.judges_prompts:
            parts.append(f"after {self.min_completions} completions of a prompt")
        return ", ".join(parts)


@dataclass(frozen=True)
class CurriculumState:
    """State of a curriculum at some step of a run.

    Example: CurriculumState(rates={"5feceb66ffc86f38": (8, 8)}) knows one prompt, always solved.
    """

    # counted from 0
    level: int = 0
    # (right completions, all completions) of each of the newest prompts of the level
    recent: tuple[tuple[int, int], ...] = ()
    # position in the data, by level and round, such as "0.0"
    positions: dict[str, int] = field(default_factory=dict)
    # (right completions, all completions), by digest of the example
    rates: dict[str, tuple[int, int]] = field(default_factory=dict)

    def as_json(self) -> dict:
        """The state as JSON has it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, saved: dict, levels: int) -> "CurriculumState":
        """The state that `as_json` wrote. levels: of the settings. Raises ValueError."""
        try:
            state = cls(
                _count(saved["level"]),
                tuple(_pair(item) for item in saved["recent"]),
                {str(key): _count(item) for key, item in saved["positions"].items()},
                {str(key): _pair(item) for key, item in saved["rates"].items()},
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not the state of a curriculum ({error!r})") from error
        if state.level >= max(levels, 1):
            raise ValueError(f"level {state.level + 1} of a curriculum with {levels} levels")
        return state


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{str(value)[:40]} is no count")
    return value


def _pair(value: list) -> tuple[int, int]:
    right, judged = value
    return _count(right), _count(judged)


@dataclass(frozen=True)
class Draw:
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
    state: CurriculumState,
    examples: Sequence[dict],
    count: int,
    seed: int,
    stream: str,
    look: Callable[[dict], Look] | None = None,
) -> Draw:
    """The next `count` examples in the order of `seed`, without those that are not asked now.

    stream: the key in state.positions. look: whether an example is taken; None: all are. A batch
    looks at each example at most once. If too few are asked, the first that were passed over are
    asked all the same. Raises ValueError if too few are taken.
    """
    order = order_of(examples, seed)
    num_examples = len(examples)
    position = state.positions.get(stream, 0)
    chosen: list[dict] = []
    passed: list[dict] = []
    unfit: list[Look] = []
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
        if look is not None and not (taken := look(example)).fits:
            unfit.append(taken)
        elif is_asked(settings, state, example, seed, position - 1):
            chosen.append(example)
        else:
            passed.append(example)
    refilled = passed[: count - len(chosen)]
    if len(chosen) + len(refilled) < count:
        raise ValueError(
            f"of {len(examples):,} training prompts too few can be taken, and a batch takes "
            f"{count}; the first that cannot: {unfit[0].why}"
        )
    return Draw(chosen + refilled, position, len(passed), len(refilled), len(unfit))


def is_asked(
    settings: CurriculumConfig, state: CurriculumState, example: dict, seed: int, position: int
) -> bool:
    """True if an example is asked at this position of the data: always, never, or by chance."""
    if not state.rates:
        return True
    share = settings.share(*state.rates.get(digest(example), (0, 0)))
    if share in (0.0, 1.0):
        return share == 1.0
    return np.random.default_rng((seed, position)).random() < share


def record_groups(
    settings: CurriculumConfig,
    state: CurriculumState,
    groups: Iterable[tuple[dict, int, int]],
) -> CurriculumState:
    """The state after groups of the current level: (example, right completions, all of them)."""
    recent = list(state.recent)
    rates = dict(state.rates)
    for example, right, judged in groups:
        recent.append((right, judged))
        if settings.judges_prompts:
            key = digest(example)
            before = rates.get(key, (0, 0))
            rates[key] = (before[0] + right, before[1] + judged)
    recent = recent[-settings.over_prompts :] if settings.levels else []
    state = replace(state, recent=tuple(recent), rates=rates)
    rises = len(recent) == settings.over_prompts and pass_rate(recent) >= settings.rise_at
    if rises and state.level + 1 < len(settings.levels):
        return replace(state, level=state.level + 1, recent=())
    return state


def pass_rate(groups: Iterable[tuple[int, int]]) -> float:
    """The share of right completions; 0 where there are none."""
    groups = list(groups)
    judged = sum(judged for _, judged in groups)
    return sum(right for right, _ in groups) / judged if judged else 0.0


def state_metrics(
    settings: CurriculumConfig, state: CurriculumState, num_prompts: int
) -> Metrics:
    """Metrics of what is known. num_prompts: those to train on."""
    metrics: Metrics = {}
    if settings.judges_prompts:
        dropped = sum(settings.drops(*rate) for rate in state.rates.values())
        metrics["curriculum/dropped"] = dropped / num_prompts
    if settings.levels:
        metrics["curriculum/level"] = state.level + 1
        metrics["curriculum/level_pass_rate"] = pass_rate(state.recent)
    return metrics


def source_of_level(source: Source, settings: CurriculumConfig, level: int) -> Source:
    """The source with the settings of a level, counted from 0. Raises ValueError."""
    if not settings.levels:
        return source
    changes = settings.levels[level]
    known = [one.name for one in dataclasses.fields(source) if one.init]
    if unknown := changes.keys() - {*known}:
        raise ValueError(f"task.source has no {sorted(unknown)[0]}; it has {', '.join(known)}")
    values = {key: tuple(x) if isinstance(x, list) else x for key, x in changes.items()}
    for key, value in values.items():
        # nothing is known of the type of a setting that is None so far
        current = getattr(source, key)
        allowed = (int, float) if isinstance(current, float) else type(current)
        is_mixed_up = isinstance(value, bool) != isinstance(current, bool)
        if current is not None and (is_mixed_up or not isinstance(value, allowed)):
            kind = type(current).__name__
            raise ValueError(f"{key}={value!r}: expected {kind}, such as {key}: {current!r}")
    return replace(source, **values)
