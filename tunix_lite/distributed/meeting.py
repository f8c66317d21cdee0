"""The roll-call of a run: its processes meet, and compare what they are, before jax starts.

Process 0 listens; each other process sends a line of JSON that describes it, and gets one back.
These are plain sockets, on the port that jax's coordinator takes over afterwards. jax itself would
wait without a message, and then end with a C++ stack trace.
"""

import contextlib
import dataclasses
import errno
import ipaddress
import json
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable

from tunix_lite.distributed.agreement import Agreement, ProcessInfo, enumerate_names, mismatch_error
from tunix_lite.distributed.process_place import ProcessPlace

# Bytes of a message, at most.
LONGEST = 1 << 22
# The key that marks a message as one of ours; its value is the process id.
HELLO = "tunix_lite"
# Seconds of waiting before the first line about it, and between two lines.
FIRST_LINE = 2
NEXT_LINE = 30
# Seconds in which a new connection must send its whole message.
MESSAGE_SECONDS = 5
# Seconds between two looks at what the connections have sent.
ACCEPT_SECONDS = 0.05


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
    waiting = Countdown(timeout, say or _print)
    host, _, port = place.coordinator.rpartition(":")
    take_part = _listen if place.process_id == 0 else _report
    return take_part(place, host.strip("[]"), int(port), own, waiting)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Countdown:
    """A time limit, and a line now and then that says what we wait for and how long."""

    def __init__(self, seconds: float, say: Callable[[str], None]):
        self.seconds = seconds
        self.say = say
        self._deadline = time.monotonic() + seconds
        # the seconds that are left when the next line is due
        self._next = seconds - FIRST_LINE

    @property
    def left(self) -> float:
        """Seconds until the limit; negative after it."""
        return self._deadline - time.monotonic()

    def show(self, text: str) -> None:
        """Prints `text` with the seconds that are left, if a line is due."""
        if self.left <= self._next:
            self._next = self.left - NEXT_LINE
            self.say(f"{text}, {max(0, round(self.left))} s left")


# ---- process 0


def _listen(
    place: ProcessPlace, host: str, port: int, own: ProcessInfo, waiting: Countdown
) -> Agreement:
    """Waits, as process 0, for the reports of all, compares them and sends the result."""
    came: dict[int, ProcessInfo] = {0: own}
    lines: dict[int, socket.socket] = {}
    extra: list[socket.socket] = []
    heard: queue.SimpleQueue = queue.SimpleQueue()
    unheard: set[socket.socket] = set()
    error = None
    absent = None
    has_noted = False
    with _server(host, port, place) as server:
        # Wait until all are there, one of them is wrong, or the time is up.
        while len(came) < place.num_processes and error is None and absent is None:
            missing = [p for p in range(place.num_processes) if p not in came]
            waiting.show(
                f"process 0 waits at port {port} for {len(missing)} of {place.num_processes} "
                "processes"
            )
            _accept(server, heard, unheard)
            while not heard.empty():
                connection, hello = heard.get()
                unheard.discard(connection)
                if hello is not None:
                    error = error or _welcome(connection, hello, place, came, lines, extra)
                    continue
                connection.close()
                if not has_noted:
                    has_noted = True
                    waiting.say(
                        f"process 0: a connection to port {port} is not from this run, and is "
                        "ignored"
                    )
            if error is None and len(came) < place.num_processes and waiting.left <= 0:
                absent = _missing(place, missing, waiting.seconds)

        # All of them get the same answer, so all of them end with the same error.
        error = error or absent or mismatch_error(came)
        agreed = Agreement([came[p].host for p in sorted(came)], own.folder)
        answer = {"error": error, "absent": absent is not None, **dataclasses.asdict(agreed)}
        _send_answer([*lines.values(), *extra], answer)
        for connection in unheard:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
    if error:
        raise (ValueError if absent is None else NotMet)(error)
    return agreed


def _accept(server: socket.socket, heard: queue.SimpleQueue, unheard: set[socket.socket]) -> None:
    """Waits a moment for a connection, and gives it a thread that reads its report: a slow process
    or a stranger holds up nobody else."""
    server.settimeout(ACCEPT_SECONDS)
    try:
        connection, _ = server.accept()
    except TimeoutError:
        return
    except OSError:
        # The connection is gone again, or too many files are open.
        time.sleep(ACCEPT_SECONDS)
        return
    unheard.add(connection)
    threading.Thread(target=_hear, args=(connection, heard), daemon=True).start()


def _hear(connection: socket.socket, heard: queue.SimpleQueue) -> None:
    deadline = time.monotonic() + MESSAGE_SECONDS
    hello = None
    with contextlib.suppress(OSError):
        hello = _parse_hello(_read_line(connection, lambda: deadline - time.monotonic()))
    heard.put((connection, hello))


def _parse_hello(line: bytes) -> tuple[int, int, ProcessInfo] | None:
    """(process id, number of processes, what it is) of a report; None: a stranger sent it.

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
    is_text = all(isinstance(text, str) for text in texts) and isinstance(about.folder, str | None)
    is_process = type(process) is type(count) is int and 0 <= process < count
    return (process, count, about) if is_text and is_process else None


def _welcome(
    connection: socket.socket,
    hello: tuple[int, int, ProcessInfo],
    place: ProcessPlace,
    came: dict[int, ProcessInfo],
    lines: dict[int, socket.socket],
    extra: list[socket.socket],
) -> str | None:
    """Adds a process to those that came. Returns an error that ends the meeting, or None.

    lines: the connection of each process; extra: those of processes that are one too many.
    """
    process, count, about = hello
    other = came.get(process)
    # A process that came before and is gone was started again: the new one takes its place.
    if other is None or (process in lines and _is_gone(lines[process])):
        came[process] = about
        lines[process] = connection
        other = None
    else:
        extra.append(connection)
    if count != place.num_processes:
        return (
            f"process {process} ({about.host}) was started as one of {count} processes, "
            f"process 0 ({came[0].host}) as one of {place.num_processes}: give all the same number"
        )
    if other is not None:
        return (
            f"two processes say that they are process {process} ({other.host} and {about.host}): "
            "numbers count through all machines, so on the second of two with 4 processes each the "
            "first is 4"
        )
    return None


def _send_answer(lines: list[socket.socket], answer: dict) -> None:
    """Sends the answer to all processes, and waits until they hang up: then the port is free at
    once for jax's coordinator."""
    text = json.dumps(answer).encode() + b"\n"
    for connection in lines:
        with contextlib.suppress(OSError):
            connection.settimeout(10)
            connection.sendall(text)
    for connection in lines:
        with contextlib.suppress(OSError):
            connection.settimeout(2)
            connection.recv(1)
        connection.close()


# ---- the other processes


def _report(
    place: ProcessPlace, host: str, port: int, own: ProcessInfo, waiting: Countdown
) -> Agreement:
    """Reports to process 0, as all others do, and takes its answer.

    Tries again until the time is up, because an earlier run may still have the port.
    """
    while True:
        with _connect(place, host, port, waiting, own.host) as connection:
            try:
                answer = _exchange(connection, place, own, waiting)
                error = answer.pop("error")
                kind = NotMet if answer.pop("absent", False) else ValueError
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
                        f"{waiting.seconds:g} s no process 0 of this run: another program or an "
                        f"older run uses that port. Choose another port with {place.source}"
                    ) from problem
        # An earlier run may be ending there, before process 0 starts.
        time.sleep(0.3)
    if error:
        raise kind(error)
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

    # Process 0 says who is missing, so it has a little longer; then it is gone itself.
    def left() -> float:
        waiting.show(f"process {place.process_id} has reached process 0 and waits for the others")
        return waiting.left + 10

    return json.loads(_read_line(connection, left))


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
        f"0 at {host}:{port} in {seconds:g} s: {why}. Check that process 0 was started and still "
        f"runs, that this is its address (it is from {place.source}), and that no firewall is "
        f"between them: nc -zv {host} {port}. {rank}launch.timeout=SECONDS waits longer"
    )


def _missing(place: ProcessPlace, missing: list[int], seconds: float) -> str:
    names = enumerate_names([str(p) for p in missing])
    which = f"{'process' if len(missing) == 1 else 'processes'} {names}"
    return (
        f"process 0 of {place.num_processes} waited {seconds:g} s at {place.coordinator}, and "
        f"{which} did not come. Check that every machine was started, that the others have this "
        f"address (ours is from {place.source}), and that no firewall is between them; processes "
        "are counted, not devices. launch.timeout=SECONDS waits longer"
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
                f"has not ended yet (ss -ltnp | grep {port} shows which). Choose another, the same "
                f"on every machine; this one is from {place.source}"
            ) from error
        raise ValueError(
            f"process 0 cannot listen at {host}:{port}: {error}. It is from {place.source}"
        ) from error


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine alone, as localhost and 127.0.0.1 do."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def _read_line(connection: socket.socket, left: Callable[[], float]) -> bytes:
    """Reads one line. left: gives the seconds that are left, and is called at least every second.

    Raises OSError if the other side hangs up, sends more than LONGEST bytes, or takes too long.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        seconds = left()
        if seconds <= 0:
            raise TimeoutError("no answer")
        connection.settimeout(min(1.0, seconds))
        try:
            piece = connection.recv(1 << 16)
        except TimeoutError:
            continue
        if not piece or len(line) > LONGEST:
            raise OSError("it closed the connection, or sent too much")
        line += piece
    return bytes(line)


def _is_gone(connection: socket.socket) -> bool:
    """Whether the other side has hung up."""
    try:
        connection.setblocking(False)
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
