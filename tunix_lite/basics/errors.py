"""The errors that a user reads: wrong settings, and a run that failed."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


class ConfigError(ValueError):
    """A setting that cannot be right. The message begins with the setting, or the file and line of
    it, and says what would be right.

    Example: `compose(["training.max_step=20"])` raises one that names `training.max_steps`.
    """


class RunFailed(ValueError):
    """A run that failed for another reason than its settings: the same command may succeed another
    time.

    Example: a reward function raised, and `rewards.on_error=raise`.
    """


class SamplerFault(RunFailed):
    """The sampler and the trainer disagree about the tokens that the sampler drew: one of the two
    programs, or its weights, is wrong. Nothing that was computed since is worth keeping."""


@contextlib.contextmanager
def error_context(where: str, kind: type[ValueError] = ConfigError) -> Iterator[None]:
    """A ValueError from inside becomes a `kind` with `where`, the setting, before its message.

    ConfigError and RunFailed pass unchanged, because they name a setting already. So do errors of a
    lost peer, which `distributed.join.exit_when_a_peer_is_lost` handles.
    """
    try:
        yield
    except (ConfigError, RunFailed):
        raise
    except ValueError as error:
        # it is about another process, and no setting is wrong
        if is_of_a_peer(error):
            raise
        raise kind(f"{where}: {error}" if where else str(error)) from error


# Words of errors that XLA, gloo and jax's coordination service raise when a peer is lost.
PEER_WORDS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "heartbeat",
    "UNAVAILABLE",
    "unhealthy",
    "gloo/transport/tcp",
)
# How the message of an error of XLA begins.
STATUS = re.compile(
    r"(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION): "
)


def is_of_a_peer(error: BaseException) -> bool:
    """Returns whether an error says that another process is gone, and not that something is wrong
    here.

    Where an array is copied to the host, jax raises some of them as ValueError; those begin with a
    status of XLA.
    """
    is_of_jax = isinstance(error, RuntimeError) or (
        isinstance(error, ValueError) and STATUS.match(str(error))
    )
    return bool(is_of_jax) and any(word in str(error) for word in PEER_WORDS)


def check_numbers(
    settings: object, names: str, is_right: Callable[[Any], bool], rule: str
) -> None:
    """Raises ValueError, with the rule, for the first of these settings that breaks it. None breaks
    no rule, nor does what the settings do not have.
    Example: check_numbers(cfg, "gamma gae_lambda", lambda x: 0 <= x <= 1, "is from 0 to 1")."""
    for name in names.split():
        value = getattr(settings, name, None)
        if value is not None and not is_right(value):
            raise ValueError(f"{name}={value} {rule}")


def check_choices(settings: object, choices: Mapping[str, Sequence[str]]) -> None:
    """Raises ValueError for the first of these settings, by name, that is none of its choices.
    Example: check_choices(cfg, {"critic": ("shared", "own")})."""
    for name, allowed in choices.items():
        value = getattr(settings, name)
        if value not in allowed:
            *others, last = allowed
            raise ValueError(f"{name}={value!r}; it is {', '.join(others)} or {last}")
