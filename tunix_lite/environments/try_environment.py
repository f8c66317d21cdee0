"""Tries an environment once before a run compiles anything: what fails always is found in a
second, not after the first rollout."""

from dataclasses import replace
from typing import Any

from tunix_lite.environments.pool import EnvironmentPool
from tunix_lite.environments.settings import ConversationConfig

COMPLETION = "The answer is 7."
# that a call may take here; one that takes longer is not judged
SECONDS = 5.0
# how a call may have failed for good
FOR_GOOD = ("error", "not_a_turn", "crash")


def try_environment(
    environment: Any, example: dict, settings: ConversationConfig
) -> tuple[str, str | list[dict] | None]:
    """How the environment fails on an example, in words ("": it does not); and what it answers to
    a made-up completion (None: nothing that is read).

    It is called in a process of its own, which ends with the call. Raises ValueError if that
    process cannot start.

    Example: ("the environment failed with KeyError: 'secret' (my_game.py, line 3) for the example
    {'question': '2 + 2'}", None).
    """
    own = replace(
        settings,
        on_error="zero",
        workers=min(settings.workers, 1),
        timeout=min(settings.timeout, SECONDS),
    )
    with EnvironmentPool(environment, own) as pool:
        reply = pool.replay(0, example, [COMPLETION])[-1]
        if reply.failure:
            return (reply.message if reply.failure in FOR_GOOD else ""), None
        if reply.turn is not None and not reply.turn.done:
            return "", reply.turn.observation
    return "", None
