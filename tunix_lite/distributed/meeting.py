"""The processes of a run meet, and compare what they are, before jax starts and compiles.

Process 0 listens; each other process sends a line of JSON that describes it, and gets one back.
These are plain sockets, on the port that jax's coordinator takes over afterwards. jax itself would
wait without a message, and then end with a C++ stack trace.
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

# Most bytes of a message.
MOST = 1 << 22
# Most connections that have sent no whole message, beside one for each process.
MOST_WAITING = 64
# The key that marks a message as one of ours; its value is the process id.
HELLO = "tunix_lite"
# Seconds of waiting before the first line about it.
SHORT = 2
# Seconds in which a new connection must send its whole message.
HEARS = 5


class NotMet(ValueError):
    """A process did not come, or the port is taken. Settings are not at fault; try again."""


def meet(
    place: ProcessPlace, own: ProcessInfo, timeout: float, say: Callable[[str], None] | None = None
) -> Agreement:
    """Lets all processes of a run meet: each reports to process 0, which compares them and answers.

    place: of this process; its coordinator is the address at which process 0 listens. own: what
    this process reports. timeout: seconds to wait for all. say: prints a line; None: standard
    error. Returns what all have agreed on.

    Raises, on all processes, NotMet if one is missing after `timeout` seconds or another program
    has the port, and ValueError if their reports differ.
    """
    with contextlib.closing(Countdown(timeout, say)) as waiting:
        if place.process_id == 0:
            return _listen(place, own, waiting)
        return _report(place, own, waiting)


class Countdown:
    """A time limit, and the line that says what we wait for and how long.

    On a terminal the line is updated every second. Elsewhere there is a new one every half minute.
    """

    def __init__(self, seconds: float, say: Callable[[str], None] | None = None):
        self.seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._is_terminal = say is None and sys.stderr.isatty()
        self._say = say or functools.partial(print, file=sys.stderr, flush=True)
        # the seconds that are left when the next line is due
        self._next = seconds - SHORT
        # whether the cursor stands in a line that will be updated
        self._is_open = False

    @property
    def left(self) -> float:
        """Seconds until the limit; negative after it."""
        return self._deadline - time.monotonic()

    def show(self, text: str) -> None:
        """Prints `text` with the seconds that are left, if a line is due."""
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
        """Prints a line that is not updated."""
        self.close()
        self._is_open = False
        self._say(text)

    def close(self) -> None:
        """Removes the line from the terminal."""
        if self._is_open:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


# ---- process 0


def _listen(place: ProcessPlace, own: ProcessInfo, waiting: Countdown) -> Agreement:
    """What process 0 does: it waits for the reports of all, compares them and sends the result."""
    host, port = _address(place)
    came: dict[int, ProcessInfo] = {0: own}
    lines: list[tuple[int, socket.socket]] = []
    with (
        _server(host, port, place) as server,
        contextlib.closing(Arrivals(server, place, waiting)) as arrivals,
    ):
        # Wait until all are there, one of them is wrong, or the time is up.
        error = None
        absent = None
        while len(came) < place.num_processes and error is None and absent is None:
            missing = [p for p in range(place.num_processes) if p not in came]
            waiting.show(
                f"process 0 waits at port {port} for {len(missing)} of {place.num_processes} "
                "processes"
            )
            for connection, hello in arrivals.receive(min(1.0, max(0.01, waiting.left))):
                error = error or _welcome(connection, hello, place, came, lines)
            if error is None and len(came) < place.num_processes and waiting.left <= 0:
                absent = _missing(place, missing, waiting.seconds)

        # All of them get the same answer, so all of them end with the same error.
        error = error or absent or mismatch_error(came)
        agreed = Agreement([came[p].host for p in sorted(came)], own.folder)
        answer = {"error": error, "absent": absent is not None, **dataclasses.asdict(agreed)}
        _send_answer(lines, answer)
        for _, connection in lines:
            connection.close()
    if error:
        raise (ValueError if absent is None else NotMet)(error)
    return agreed


@dataclasses.dataclass(frozen=True)
class Hello:
    """The report of a process to process 0.

    Example: Hello(process=1, count=2, about=process_info(settings, folder)).
    """

    # the id of the process
    process: int
    # the number of processes of the run, by its own settings
    count: int
    about: ProcessInfo


class Arrivals:
    """The connections to process 0 that have not sent a whole report yet.

    All are read at once, so that a slow process or a stranger holds up nobody else.
    """

    def __init__(self, server: socket.socket, place: ProcessPlace, waiting: Countdown):
        self._server = server
        self._place = place
        self._waiting = waiting
        self._most = place.num_processes + MOST_WAITING
        # connection -> (what it has sent, its deadline), the oldest connection first
        self._received: dict[socket.socket, tuple[bytearray, float]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._has_noted = False
        server.setblocking(False)

    def receive(self, seconds: float) -> list[tuple[socket.socket, Hello]]:
        """The reports that are whole now. Waits up to `seconds` for something to arrive."""
        found = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._server:
                self._accept()
            else:
                hello = self._read(key.fileobj)
                if hello is not None:
                    found.append((key.fileobj, hello))

        now = time.monotonic()
        late = [c for c, (_, deadline) in self._received.items() if deadline < now]
        for connection in late:
            self._ignore(connection)
        return found

    def _accept(self) -> None:
        # The connection may be gone again, or we may have too many files open.
        with contextlib.suppress(OSError):
            connection, _ = self._server.accept()
            connection.setblocking(False)
            self._received[connection] = (bytearray(), time.monotonic() + HEARS)
            self._selector.register(connection, selectors.EVENT_READ)
        if len(self._received) > self._most:
            self._ignore(next(iter(self._received)))

    def _read(self, connection: socket.socket) -> Hello | None:
        """Reads what has arrived. Returns the report once it is whole, and then reads no further.

        None: the report is not whole yet, or it is a stranger's.
        """
        if connection not in self._received:
            return None
        received, _ = self._received[connection]
        try:
            piece = connection.recv(1 << 16)
        except BlockingIOError:
            return None
        except OSError:
            piece = b""
        received += piece
        if piece and not piece.endswith(b"\n") and len(received) <= MOST:
            return None

        # It is whole, or its sender hung up or sent too much.
        hello = None
        if piece and len(received) <= MOST:
            hello = _parse_hello(bytes(received))
        if hello is None:
            self._ignore(connection)
        else:
            self._forget(connection)
        return hello

    def _ignore(self, connection: socket.socket) -> None:
        """Closes the connection of a stranger; the first time with a line that says so."""
        if not self._has_noted:
            self._has_noted = True
            text = (
                f"process 0: a connection to port {_address(self._place)[1]} is not from this run, "
                "and is ignored"
            )
            self._waiting.note(text)
        self._forget(connection)
        connection.close()

    def _forget(self, connection: socket.socket) -> None:
        del self._received[connection]
        self._selector.unregister(connection)

    def close(self) -> None:
        """Closes all connections that have sent no whole report."""
        for connection in list(self._received):
            self._forget(connection)
            connection.close()
        self._selector.close()


def _parse_hello(line: bytes) -> Hello | None:
    """The report in a message; None if the message is no report, so that a stranger sent it.

    Only types are checked: process 0 compares the values when all reports are there.
    """
    try:
        message = json.loads(line)
        process = message[HELLO]
        count = message["num_processes"]
        about = ProcessInfo(**message["about"])
        texts = [about.host, *about.values.keys(), *about.values.values()]
    # ValueError: it is no JSON, or no text.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not all(isinstance(text, str) for text in texts):
        return None
    if not isinstance(about.folder, str | None):
        return None
    if not (type(process) is type(count) is int and 0 <= process < count):
        return None
    return Hello(process, count, about)


def _send_answer(lines: list[tuple[int, socket.socket]], answer: dict) -> None:
    """Sends the answer to all processes, and waits until they hang up.

    lines: (process id, connection) of each.
    """
    text = json.dumps(answer).encode() + b"\n"
    for _, connection in lines:
        with contextlib.suppress(OSError):
            connection.settimeout(10)
            connection.sendall(text)
    # If they hang up first, the port is free at once for jax's coordinator.
    for _, connection in lines:
        with contextlib.suppress(OSError):
            connection.settimeout(2)
            connection.recv(1)


def _welcome(
    connection: socket.socket, hello: Hello, place: ProcessPlace, came: dict, lines: list
) -> str | None:
    """Adds a process to those that came. Returns an error that ends the meeting, or None.

    came: process id -> its report. lines: (process id, connection) of each. Both are changed.
    """
    process = hello.process
    about = hello.about
    connection.setblocking(True)

    # A process that came before and is gone was started again: the new one takes its place.
    if any(p == process and _is_gone(line) for p, line in lines):
        lines[:] = [(p, line) for p, line in lines if p != process]
        del came[process]

    other = came.setdefault(process, about)
    lines.append((process, connection))
    if hello.count != place.num_processes:
        return (
            f"process {process} ({about.host}) was started as one of {hello.count} processes, "
            f"process 0 ({came[0].host}) as one of {place.num_processes}: give all the same number"
        )
    if other is not about:
        return (
            f"two processes say that they are process {process} ({other.host} and {about.host}): "
            "numbers count "
            "through all machines, so on the second of two with 4 processes each the first is 4"
        )
    return None


# ---- the other processes


def _report(place: ProcessPlace, own: ProcessInfo, waiting: Countdown) -> Agreement:
    """What the other processes do: report to process 0, and take its answer.

    Tries again until the time is up, because an earlier run may still have the port.
    """
    host, port = _address(place)
    while True:
        with _connect(place, host, port, waiting, own.host) as connection:
            try:
                answer = _exchange(connection, place, own, waiting)
                error = answer.pop("error")
                is_absent = answer.pop("absent", False)
                agreed = Agreement(**answer)
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
                        "no process 0 of this run: another program or an older run uses that "
                        f"port. Choose another port with {place.source}"
                    ) from problem
        # An earlier run may be ending there, before process 0 starts.
        time.sleep(0.3)
    if error:
        raise (NotMet if is_absent else ValueError)(error)
    return agreed


def _exchange(
    connection: socket.socket, place: ProcessPlace, own: ProcessInfo, waiting: Countdown
) -> dict:
    """Sends the report of this process, and waits for the answer of process 0."""
    hello = {
        HELLO: place.process_id,
        "num_processes": place.num_processes,
        "about": dataclasses.asdict(own),
    }
    connection.sendall(json.dumps(hello).encode() + b"\n")
    return json.loads(_read_line(connection, lambda: _wait_for_all(place, waiting)))


def _wait_for_all(place: ProcessPlace, waiting: Countdown) -> float:
    """Shows what we wait for. Returns the seconds that are left.

    Process 0 waits for the others, too, and says who is missing; so we wait a little longer than it
    does. If it has not answered then, it is gone itself.
    """
    waiting.show(f"process {place.process_id} has reached process 0 and waits for the others")
    return waiting.left + 10


def _connect(
    place: ProcessPlace, host: str, port: int, waiting: Countdown, own_host: str
) -> socket.socket:
    """A connection to process 0. Tries until the time is up, then raises NotMet."""
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
    # Whoever exports RANK=1 on the second machine waits here for processes that nobody started.
    by_hand = "MASTER_ADDR" in place.source
    rank = "RANK counts processes, not machines. " if by_hand else ""
    return (
        f"process {place.process_id} of {place.num_processes} ({own_host}) could not reach process "
        f"0 at {host}:{port} "
        f"in {seconds:g} s: {why}. Check that process 0 was started and still runs, that this is "
        "its address (it is "
        f"from {place.source}), and that no firewall is between them: nc -zv {host} {port}. {rank}"
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
    """Listens at the port that jax's coordinator will have later.

    Raises NotMet if another program has the port, ValueError if the system refuses it.
    """
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


def _address(place: ProcessPlace) -> tuple[str, int]:
    """The host and the port at which process 0 listens."""
    host, _, port = place.coordinator.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine alone, as localhost and 127.0.0.1 do."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def _read_line(connection: socket.socket, left: Callable[[], float]) -> bytes:
    """Reads one line. left: gives the seconds that are left, and is called at least every second.

    Raises OSError if the other side hangs up, sends more than MOST bytes, or takes too long.
    """
    line = b""
    while not line.endswith(b"\n"):
        seconds = left()
        if seconds <= 0:
            raise TimeoutError("no answer")
        connection.settimeout(min(1.0, seconds))
        try:
            piece = connection.recv(1 << 16)
        except TimeoutError:
            continue
        if not piece or len(line) > MOST:
            raise OSError("it closed the connection, or sent too much")
        line += piece
    return line


def _is_gone(connection: socket.socket) -> bool:
    """Whether the other side has hung up."""
    try:
        connection.setblocking(False)
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
