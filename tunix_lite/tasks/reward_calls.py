"""Outcomes of rewards: collected from all processes, and read by completion."""

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait

import numpy as np

from tunix_lite.rewards.scores import Score, from_json
from tunix_lite.tasks.processes import Processes, SharedError, unlike_the_first
from tunix_lite.workers.pool import FAILURES
from tunix_lite.workers.process import Outcome

# seconds between two checks whether the run is to end, while grades are waited for
LOOK_SECONDS = 0.2


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
    return [
        read_values(everyone[call % count][0][call // count]) for call in range(len(futures))
    ]


def read_values(outcomes: dict[str, Outcome]) -> dict[str, Outcome]:
    """The outcomes of a call with their values as `to_json` was given them."""
    return {name: (kind, from_json(value)) for name, (kind, value) in outcomes.items()}


def _results(
    futures: tuple[Future, ...], gives_up: Callable[[], bool]
) -> list[dict[str, Outcome]] | None:
    """The results in the order of calls; None if gives_up() is true before all are there. Raises
    the error of a call, without waiting for the others."""
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
    """The value that a function gives each completion, [B] float64; nan where it failed."""
    of_function = (one[name] for one in outcomes)
    return np.array([np.nan if failed else value for failed, value in of_function], np.float64)


def dropped_of(kinds_BN: np.ndarray, on_error: str) -> tuple[np.ndarray, np.ndarray]:
    """Tells which completions nothing is learned from, and which of those are unscorable; [B] bool
    each.

    kinds_BN: of the outcomes of all rewards. A completion that every reward skips is unscorable.
    """
    unscorable_B = (kinds_BN == "unscorable").any(axis=1) | (kinds_BN == "skip").all(axis=1)
    failed_B = np.isin(kinds_BN, FAILURES).any(axis=1)
    return unscorable_B | (failed_B & (on_error == "drop")), unscorable_B


def reasons_of(outcomes: dict[str, Outcome]) -> dict[str, str]:
    """Explains, by function, why it failed on a completion or found no answer in it."""
    reasons = {}
    for name, (kind, how) in outcomes.items():
        if kind:
            reasons[name] = f"{kind}: {how}" if how else kind
        elif isinstance(how, Score):
            reasons[name] = f"{how.kind}: {how.why}"
    return reasons
