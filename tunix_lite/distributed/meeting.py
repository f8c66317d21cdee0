"""How the processes of a run meet before anything expensive: each reaches process 0, and hears what
all are.

Plain sockets, on the port that jax's coordinator takes over afterwards: jax itself waits without a
word and then ends in a C++ trace. Process 0 listens; each other one sends a line of JSON, what it
is, and gets one back.
"""

import contextlib
import dataclasses
import errno
import functools
import ipaddress
import json
import selectors
import socket
import sys
import time
from collections.abc import Callable

from tunix_lite.distributed.agreement import Agreement, ProcessInfo, enumerate_names, mismatch_error
from tunix_lite.distributed.process_place import ProcessPlace

# bytes of what a process says
MOST = 1 << 22
# connections, besides one for each process, that may have said nothing yet
MOST_WAITING = 64
HELLO = "tunix_lite"
# seconds of waiting that nobody needs to be told of
SHORT = 2
# seconds in which whoever comes must have said who it is
HEARS = 5


class NotMet(ValueError):
    """The processes did not come together, whatever their settings: another try may do."""


def meet(
    place: ProcessPlace, own: ProcessInfo, timeout: float, say: Callable[[str], None] | None = None
) -> Agreement:
    """Waits until all processes of the run have said what they are to process 0, and tells what all
    know.

    Raises, on all of them, NotMet if one is missing after `timeout` seconds or the port is another
    program's, and ValueError if one is another than the rest.
    """
    with contextlib.closing(Countdown(timeout, say)) as waiting:
        return (_listen if place.process_id == 0 else _report)(place, own, waiting)


class Countdown:
    """A limit, and what is waited for, once that takes a while: every second on a terminal, else
    every half minute."""

    def __init__(self, seconds: float, say: Callable[[str], None] | None = None):
        self.seconds, self._until = seconds, time.monotonic() + seconds
        self._is_terminal = say is None and sys.stderr.isatty()
        self._say = say or functools.partial(print, file=sys.stderr, flush=True)
        # the next line comes with so many seconds left
        self._next, self._is_open = (
            seconds - SHORT,
            False,
        )

    @property
    def left(self) -> float:
        return self._until - time.monotonic()

    def show(self, text: str) -> None:
        if self.left > self._next:
            return
        self._next = self.left - (1 if self._is_terminal else 30)
        line = f"{text}, {max(0, round(self.left))} s left"
        if self._is_terminal:
            print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
            self._is_open = True
        else:
            self._say(line)

    def note(self, text: str) -> None:
        """A line that stays."""
        self.close()
        self._is_open = False
        self._say(text)

    def close(self) -> None:
        if self._is_open:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


# ---- process 0


def _listen(place: ProcessPlace, own: ProcessInfo, waiting: Countdown) -> Agreement:
    host, port = _address(place)
    came: dict[int, ProcessInfo] = {0: own}
    lines: list[tuple[int, socket.socket]] = []
    with (
        _server(host, port, place) as server,
        contextlib.closing(Arrivals(server, place, waiting)) as arrivals,
    ):
        error, absent = None, None
        while len(came) < place.num_processes and error is None and absent is None:
            missing = [p for p in range(place.num_processes) if p not in came]
            waiting.show(
                f"process 0 waits at port {port} for {len(missing)} of {place.num_processes} "
                "processes"
            )
            for connection, said in arrivals.said(min(1.0, max(0.01, waiting.left))):
                error = error or _welcome(connection, said, place, came, lines)
            if error is None and len(came) < place.num_processes and waiting.left <= 0:
                absent = _missing(place, missing, waiting.seconds)
        error = error or absent or mismatch_error(came)
        agreed = Agreement([came[p].host for p in sorted(came)], own.folder)
        _tell(lines, {"error": error, "absent": absent is not None, **dataclasses.asdict(agreed)})
        for _, connection in lines:
            connection.close()
    if error:
        raise (ValueError if absent is None else NotMet)(error)
    return agreed


@dataclasses.dataclass(frozen=True)
class Hello:
    """What a process says that comes."""

    process: int
    count: int  # of processes, as it was told
    about: ProcessInfo


class Arrivals:
    """Who connects, and what they say. All are heard at once: whoever is slow, or a stranger, keeps
    nobody else."""

    def __init__(self, server: socket.socket, place: ProcessPlace, waiting: Countdown):
        self._server, self._place, self._waiting = server, place, waiting
        self._most = place.num_processes + MOST_WAITING
        self._heard: dict[
            socket.socket, tuple[bytearray, float]
        ] = {}  # so far, and until when; the oldest first
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._has_noted = False
        server.setblocking(False)

    def said(self, seconds: float) -> list[tuple[socket.socket, Hello]]:
        """Who has said who they are, within so many seconds; nobody, if that is how it is."""
        found = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._server:
                self._accept()
            elif (hello := self._hear(key.fileobj)) is not None:
                found.append((key.fileobj, hello))
        now = time.monotonic()
        for connection in [c for c, (_, until) in self._heard.items() if until < now]:
            self._ignore(connection)
        return found

    def _accept(self) -> None:
        # it is gone again, or we have too many files open
        with contextlib.suppress(OSError):
            connection, _ = self._server.accept()
            connection.setblocking(False)
            self._heard[connection] = bytearray(), time.monotonic() + HEARS
            self._selector.register(connection, selectors.EVENT_READ)
        if len(self._heard) > self._most:
            self._ignore(next(iter(self._heard)))

    def _hear(self, connection: socket.socket) -> Hello | None:
        """What it says, once that is a whole line; then it is no longer listened to. None: not yet,
        or a stranger."""
        if connection not in self._heard:
            return None
        said, _ = self._heard[connection]
        try:
            piece = connection.recv(1 << 16)
        except BlockingIOError:
            return None
        except OSError:
            piece = b""
        said += piece
        if piece and not piece.endswith(b"\n") and len(said) <= MOST:
            return None
        hello = _hello(bytes(said), self._place) if piece and len(said) <= MOST else None
        if hello is None:
            self._ignore(connection)
        else:
            self._forget(connection)
        return hello

    def _ignore(self, connection: socket.socket) -> None:
        if not self._has_noted:
            self._has_noted = True
            text = (
                f"process 0: somebody at port {_address(self._place)[1]} is no process of this "
                "run, and is ignored"
            )
            self._waiting.note(text)
        self._forget(connection)
        connection.close()

    def _forget(self, connection: socket.socket) -> None:
        del self._heard[connection]
        self._selector.unregister(connection)

    def close(self) -> None:
        for connection in list(self._heard):
            self._forget(connection)
            connection.close()
        self._selector.close()


def _hello(line: bytes, place: ProcessPlace) -> Hello | None:
    """What a process of this run would say; None: a stranger said it. What can be compared is
    compared later."""
    try:
        said = json.loads(line)
        process, count, theirs = said[HELLO], said["num_processes"], ProcessInfo(**said["about"])
        texts = [theirs.host, *theirs.values.keys(), *theirs.values.values()]
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ):  # ValueError: no JSON, or no text
        return None
    if not all(isinstance(text, str) for text in texts) or not isinstance(
        theirs.folder, str | None
    ):
        return None
    return (
        Hello(process, count, theirs)
        if type(process) is type(count) is int and 0 <= process < count
        else None
    )


def _tell(lines: list[tuple[int, socket.socket]], answer: dict) -> None:
    text = json.dumps(answer).encode() + b"\n"
    for _, connection in lines:
        with contextlib.suppress(OSError):
            connection.settimeout(10)
            connection.sendall(text)
    # they hang up first: then the port is free at once
    for _, connection in lines:
        with contextlib.suppress(OSError):
            connection.settimeout(2)
            connection.recv(1)


def _welcome(
    connection: socket.socket, hello: Hello, place: ProcessPlace, came: dict, lines: list
) -> str | None:
    """Takes it in. An error that ends the meeting, or None."""
    process, count, theirs = hello.process, hello.count, hello.about
    connection.setblocking(True)
    # it was started again
    if any(p == process and _is_gone(line) for p, line in lines):
        lines[:] = [(p, line) for p, line in lines if p != process]
        del came[process]
    other = came.setdefault(process, theirs)
    lines.append((process, connection))
    if count != place.num_processes:
        return (
            f"process {process} ({theirs.host}) is of {count} processes and process 0 "
            f"({came[0].host}) of "
            f"{place.num_processes}: give all the same number"
        )
    if other is not theirs:
        return (
            f"two processes say that they are process {process} ({other.host} and {theirs.host}): "
            "numbers count "
            "through all machines, so on the second of two with 4 processes each the first is 4"
        )
    return None


# ---- the others


def _report(place: ProcessPlace, own: ProcessInfo, waiting: Countdown) -> Agreement:
    host, port = _address(place)
    while True:
        with _connected(place, host, port, waiting, own.host) as connection:
            try:
                answer = _asked(connection, place, own, waiting)
                error, is_absent, agreed = (
                    answer.pop("error"),
                    answer.pop("absent", False),
                    Agreement(**answer),
                )
                break
            except (
                OSError,
                ValueError,
                KeyError,
                TypeError,
                AttributeError,
                RecursionError,
            ) as problem:
                if waiting.left <= 0:
                    raise NotMet(
                        f"process {place.process_id} ({own.host}) reached {host}:{port}, but in "
                        f"{waiting.seconds:g} s "
                        "no process 0 of this run: another program has the port there, or a run "
                        "that has not ended "
                        f"yet. Another port is chosen with {place.source}"
                    ) from problem
        # an earlier run may be ending there, and process 0 be about to start again
        time.sleep(0.3)
    if error:
        raise (NotMet if is_absent else ValueError)(error)
    return agreed


def _asked(
    connection: socket.socket, place: ProcessPlace, own: ProcessInfo, waiting: Countdown
) -> dict:
    hello = {
        HELLO: place.process_id,
        "num_processes": place.num_processes,
        "about": dataclasses.asdict(own),
    }
    connection.sendall(json.dumps(hello).encode() + b"\n")
    return json.loads(_line(connection, lambda: _wait_for_all(place, waiting)))


def _wait_for_all(place: ProcessPlace, waiting: Countdown) -> float:
    """Seconds left. Process 0, which waits for others, gives up first; a moment later, it is
    process 0 that is gone."""
    waiting.show(f"process {place.process_id} has reached process 0 and waits for the others")
    return waiting.left + 10


def _connected(
    place: ProcessPlace, host: str, port: int, waiting: Countdown, own_host: str
) -> socket.socket:
    while True:
        waiting.show(f"process {place.process_id} looks for process 0 at {host}:{port}")
        try:
            return socket.create_connection((host, port), timeout=min(5.0, max(0.1, waiting.left)))
        except OSError as error:
            if waiting.left <= 0:
                raise NotMet(
                    _unreachable(place, host, port, waiting.seconds, own_host, error)
                ) from error
        time.sleep(min(0.3, max(0.0, waiting.left)))


def _unreachable(
    place: ProcessPlace, host: str, port: int, seconds: float, own_host: str, error: OSError
) -> str:
    why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
    return (
        f"process {place.process_id} of {place.num_processes} ({own_host}) could not reach process "
        f"0 at {host}:{port} "
        f"in {seconds:g} s: {why}. Check that process 0 was started and still runs, that this is "
        "its address (it is "
        f"from {place.source}), and that no firewall is between them: nc -zv {host} {port}. "
        "launch.timeout=SECONDS "
        "waits longer"
    )


def _missing(place: ProcessPlace, missing: list[int], seconds: float) -> str:
    which = ("process " if len(missing) == 1 else "processes ") + enumerate_names(
        [str(p) for p in missing]
    )
    return (
        f"process 0 of {place.num_processes} waited {seconds:g} s at {place.coordinator}, and "
        f"{which} did not come. "
        "Check that every machine was started, that the others have this address (ours is from "
        f"{place.source}), and "
        "that no firewall is between them; processes are counted, not devices. "
        "launch.timeout=SECONDS waits longer"
    )


# ---- sockets


def _server(host: str, port: int, place: ProcessPlace) -> socket.socket:
    """Listening where jax's coordinator will. Raises NotMet if the port is taken, ValueError if it
    cannot be."""
    try:
        if is_loopback(host):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=1024)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise NotMet(
                f"port {port}, where process 0 listens, is taken: by another run, or by one that "
                "has not ended yet "
                f"(ss -ltnp | grep {port} shows which). Choose another, the same on every machine; "
                "this one is from "
                f"{place.source}"
            ) from error
        raise ValueError(
            f"process 0 cannot listen at {host}:{port}: {error}. It is from {place.source}"
        ) from error


def _address(place) -> tuple[str, int]:
    host, _, port = place.coordinator.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def _line(connection: socket.socket, left: Callable[[], float]) -> bytes:
    """What the other side says until the end of its line; `left` is asked every second how many
    there are.

    Raises OSError if it hangs up before, says too much, or is too slow.
    """
    said = b""
    while not said.endswith(b"\n"):
        if (seconds := left()) <= 0:
            raise TimeoutError("no answer")
        connection.settimeout(min(1.0, seconds))
        try:
            piece = connection.recv(1 << 16)
        except TimeoutError:
            continue
        if not piece or len(said) > MOST:
            raise OSError("it hung up, or said too much")
        said += piece
    return said


def _is_gone(connection: socket.socket) -> bool:
    try:
        connection.setblocking(False)
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
