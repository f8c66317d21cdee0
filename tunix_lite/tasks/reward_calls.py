"""Calls rewards on the completions of a batch, shared between processes, and collects the
outcomes."""

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait

import numpy as np

from tunix_lite.rewards.completion import CompletionText
from tunix_lite.rewards.scores import Score, from_json
from tunix_lite.tasks.processes import Processes, SharedError, unlike_the_first
from tunix_lite.tasks.sources import digest
from tunix_lite.workers.pool import FAILURES, IS_NONE, Pool
from tunix_lite.workers.process import Outcome

# seconds between two checks whether the run is to end, while grades are waited for
LOOK_SECONDS = 0.2


class RewardCalls:
    """Calls the functions of `pool` on completions as they end; `examples` has one entry each.

    There is a call for each completion and, for functions of a group, one for each group of
    `num_generations` that stand side by side. Calls are numbered in this order, and divided over
    the processes of the run.
    """

    def __init__(
        self,
        pool: Pool,
        group_names: list[str],
        examples: list[dict],
        processes: Processes,
        num_generations: int = 1,
    ):
        self.pool = pool
        self.examples = examples
        # row -> its text
        self.completions: dict[int, CompletionText] = {}
        self._processes = processes
        self._group_names = group_names
        self._names = [name for name in pool.functions if name not in group_names]
        self.num_generations = num_generations
        # the rows of each group
        rows = list(range(len(examples)))
        firsts = rows[::num_generations]
        self.groups = [rows[first : first + num_generations] for first in firsts]
        # number of a call -> its outcomes; None: another process makes it
        self._futures: dict[int, Future | None] = {}

    def submit(self, row: int, completion: CompletionText) -> None:
        """Calls the functions on a completion and, if it is the last of its group, on the group."""
        self.completions[row] = completion
        self._call(row, completion, row, self._names)
        group = row // self.num_generations
        rows = self.groups[group]
        if self._group_names and all(other in self.completions for other in rows):
            completions = [self.completions[other] for other in rows]
            self._call(len(self.examples) + group, completions, row, self._group_names)

    def _call(self, number: int, completion: str | list[str], row: int, names: list[str]) -> None:
        is_ours = number % self._processes.count == self._processes.index
        example = self.examples[row]
        self._futures[number] = self.pool.submit(completion, example, names) if is_ours else None

    def outcome_now(self, row: int) -> dict[str, Outcome] | None:
        """The outcomes for a completion, by function, if they have come; None: they have not, or
        another process calls its functions, or one failed in a way that ends the run."""
        group = row // self.num_generations
        numbers = [row, len(self.examples) + group] if self._group_names else [row]
        futures = [self._futures.get(number) for number in numbers]
        if any(future is None or not future.done() or future.exception() for future in futures):
            return None
        own = _read_values(futures[0].result())
        of_group = _read_values(futures[1].result()) if self._group_names else {}
        return own | self._of_member(of_group, self.groups[group].index(row))

    def outcomes(self, look: Callable[[], None] | None = None) -> list[dict[str, Outcome]]:
        """Waits for all calls of all processes. Returns the outcomes of each call, by function.

        look: called now and then while it waits. Raises SharedError if a reward failed and
        rewards.on_error=raise, or if processes graded other completions; StopRun if the run was
        asked to stop while it waited.
        """
        completions = [self.completions[row] for row in range(len(self.examples))]
        futures = tuple(self._futures[number] for number in sorted(self._futures))
        graded = digest([self.examples, completions])
        return shared_outcomes(futures, graded, self._processes, look)

    def of_completions(self, outcomes: list[dict[str, Outcome]]) -> list[dict[str, Outcome]]:
        """Returns the outcomes for each completion, with its part of the outcomes of a group's
        call."""
        count = len(self.examples)
        completion_outcomes = [dict(one) for one in outcomes[:count]]
        for rows, of_group in zip(self.groups, outcomes[count:]):
            for place, row in enumerate(rows):
                completion_outcomes[row] |= self._of_member(of_group, place)
        return completion_outcomes

    def _of_member(self, of_group: dict[str, Outcome], place: int) -> dict[str, Outcome]:
        """Returns the outcomes of a group's call for the completion at this place in the group."""
        own = {}
        for name, (kind, values) in of_group.items():
            if kind:
                own[name] = (kind, values)
            elif values[place] is None:
                own[name] = (self.pool.settings.on_none, IS_NONE)
            else:
                own[name] = ("", values[place])
        return own

    def first_failure(self, outcomes: list[dict[str, Outcome]]) -> str:
        """Describes the first failure: `reward 'short' is nan for the completion '...'`. If nothing
        failed, the first completion that a reward did not score; "" if all were scored."""
        kinds = {kind for one in outcomes for kind, _ in one.values()}
        shown = kinds.intersection(FAILURES) or kinds - {""}
        texts = [str(self.completions[row]) for row in range(len(self.examples))]
        of_groups = [[texts[row] for row in rows] for rows in self.groups]
        failures = (
            self.pool.describe_failure(name, outcome, called_on)
            for called_on, one in zip([*texts, *of_groups], outcomes)
            for name, outcome in one.items()
            if outcome[0] in shown
        )
        return next(failures, "")


def shared_outcomes(
    futures: tuple[Future | None, ...],
    graded: str,
    processes: Processes,
    look: Callable[[], None] | None = None,
) -> list[dict[str, Outcome]]:
    """Returns the outcome of each call, by whichever process. Raises ValueError on all if one of
    them does.

    graded: a digest of it, which must be the same everywhere; held-out examples are compared
    nowhere else. look: called now and then while it waits.
    """
    stopping = processes.stopping

    def gives_up() -> bool:
        if look is not None:
            look()
        return stopping is not None and stopping.is_requested()

    own: list | None = []
    error = None
    try:
        own = _results(tuple(future for future in futures if future is not None), gives_up)
    except ValueError as failed:
        error = str(failed)

    # every process raises, or stops, or none does
    everyone = processes.share([own, error, graded])
    if stopping is not None:
        stopping.stop_if(any(theirs is None for theirs, *_ in everyone))
    errors = [error for _, error, _ in everyone if error is not None]
    if errors:
        raise SharedError(errors[0])
    others = unlike_the_first([theirs for *_, theirs in everyone])
    if others:
        raise SharedError(
            f"{others} graded other prompts or completions than process 0: do all hosts have the "
            "same data files and the same tokenizer?"
        )
    count = len(everyone)
    return [_read_values(everyone[call % count][0][call // count]) for call in range(len(futures))]


def _read_values(outcomes: dict[str, Outcome]) -> dict[str, Outcome]:
    return {name: (kind, from_json(value)) for name, (kind, value) in outcomes.items()}


def _results(
    futures: tuple[Future, ...], gives_up: Callable[[], bool]
) -> list[dict[str, Outcome]] | None:
    """Returns the results in the order of calls, whatever that of the workers is; None if
    gives_up() is true before all are there.

    Raises the error of a call, without waiting for the others.
    """
    left = set(futures)
    while left:
        done, left = wait(futures, timeout=LOOK_SECONDS, return_when=FIRST_EXCEPTION)
        if any(future.exception() for future in done):
            break
        if left and gives_up():
            return None
    for future in (future for future in futures if future in done):
        future.result()
    return [future.result() for future in futures]


# ---- outcomes as arrays


def values_of(outcomes: list[dict[str, Outcome]], name: str) -> np.ndarray:
    """Returns the value that a function gives each completion, [B] float64; nan where it failed or
    said None."""
    of_function = (one[name] for one in outcomes)
    return np.array([np.nan if failed else value for failed, value in of_function], np.float64)


def texts_of(outcomes: list[dict[str, Outcome]], name: str) -> list[str | None]:
    """Returns the text that a function reads out of each completion; None where it failed."""
    return [None if failed else value for failed, value in (one[name] for one in outcomes)]


def kinds_of(outcomes: list[dict[str, Outcome]], names: list[str]) -> np.ndarray:
    """The kind of each outcome ("": a value), [B, len(names)]."""
    return np.array([[one[name][0] for name in names] for one in outcomes])


def dropped_of(kinds_BN: np.ndarray, on_error: str) -> tuple[np.ndarray, np.ndarray]:
    """Tells which completions nothing is learned from, and which of those are unscorable; [B] bool
    each.

    kinds_BN: of the outcomes of all rewards. A completion that every reward skips is unscorable.
    """
    unscorable_B = (kinds_BN == "unscorable").any(axis=1) | (kinds_BN == "skip").all(axis=1)
    failed_B = np.isin(kinds_BN, FAILURES).any(axis=1)
    return unscorable_B | (failed_B & (on_error == "drop")), unscorable_B


def reasons_of(outcomes: dict[str, Outcome]) -> dict[str, str]:
    """Explains, by function, why it failed on a completion or found no answer in it: {"reward
    'near'": "error: ..."}."""
    reasons = {}
    for name, (kind, how) in outcomes.items():
        if kind:
            reasons[name] = f"{kind}: {how}" if how else kind
        elif isinstance(how, Score):
            reasons[name] = f"{how.kind}: {how.why}"
    return reasons
