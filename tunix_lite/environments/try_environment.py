"""Tries an environment once before a run compiles anything: what fails always is found in a
second, not after the first rollout."""

from dataclasses import replace
from typing import Any, NamedTuple

from tunix_lite.environments.pool import EnvironmentPool
from tunix_lite.environments.settings import ConversationConfig

COMPLETION = "The answer is 7."
# that a call may take here; one that takes longer is not judged
SECONDS = 5.0
# failures that stay
FOR_GOOD = ("error", "not_a_turn", "crash")


class Tried(NamedTuple):
    """Result of a try: how the environment fails, in words ("": it does not); the prompt with which
    it begins (None: that of the task); and its answer to a made-up completion (None: nothing that
    is read).

    Example: Tried("", "Guess a number.", "Higher.").
    """

    failing: str = ""
    prompt: str | list[dict] | None = None
    answer: str | list[dict] | None = None


def try_environment(environment: Any, example: dict, settings: ConversationConfig) -> Tried:
    """Tries an environment with an example and a made-up completion.

    It is called in a process of its own, which ends with the call. Raises ValueError if that
    process cannot start.

    Example: Tried("the environment failed with KeyError: 'secret' (my_game.py, line 3) for the
    example {'question': '2 + 2'}").
    """
    own = replace(
        settings,
        on_error="zero",
        workers=min(settings.workers, 1),
        timeout=min(settings.timeout, SECONDS),
    )
    with EnvironmentPool(environment, own) as pool:
        first, *others = pool.replay(0, example, [COMPLETION])
        last = others[-1] if others else first
        if last.failure:
            return Tried(last.message if last.failure in FOR_GOOD else "")
        prompt = None if first.turn is None else first.turn.observation
        return Tried("", prompt, None if last.turn.done else last.turn.observation)
