"""What a user reads when something cannot go on: wrong settings, or a run that failed."""

import contextlib
import re
from collections.abc import Iterator


class ConfigError(ValueError):
    """A setting that cannot be right. The message begins with where it stands and says what would
    be right."""


class RunFailed(ValueError):
    """What is wrong need not be in the settings: the same command may succeed another time."""


@contextlib.contextmanager
def error_context(where: str, kind: type[ValueError] = ConfigError) -> Iterator[None]:
    """Raises a ValueError from inside as `kind`, with `where` before its message: users know
    settings, not code.

    ConfigError and RunFailed pass unchanged, because they name a place already. So do errors of a
    lost peer, which `distributed.join.exit_when_a_peer_is_lost` handles.
    """
    try:
        yield
    except (ConfigError, RunFailed):
        raise
    except ValueError as error:
        if is_of_a_peer(error):
            raise
        raise kind(f"{where}: {error}" if where else str(error)) from error


PEER_WORDS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "heartbeat",
    "UNAVAILABLE",
    "unhealthy",
)
PEER_WORDS += ("gloo/transport/tcp",)
STATUS = re.compile(
    r"(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION): "
)


def is_of_a_peer(error: BaseException) -> bool:
    """Whether an error says that another process is gone, rather than that something is wrong here.

    jax raises some as ValueError, where an array is copied to the host; those begin with a status
    of XLA's.
    """
    is_of_jax = isinstance(error, RuntimeError) or (
        isinstance(error, ValueError) and STATUS.match(str(error))
    )
    return bool(is_of_jax) and any(word in str(error) for word in PEER_WORDS)
