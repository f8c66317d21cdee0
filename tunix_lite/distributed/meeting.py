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
# (process id, number of processes, what the process is)
Report = tuple[int, int, ProcessInfo]
# What a message of a stranger raises when it is read. ValueError: it is no JSON, or no text.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


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
    waiting = Waiting(timeout, say or (lambda line: print(line, file=sys.stderr, flush=True)))
    host, _, port = place.coordinator.rpartition(":")
    host = host.strip("[]")
    if place.process_id > 0:
        return _report(place, host, int(port), own, waiting)
    with _server(host, int(port), place) as server:
        return RollCall(place, own, waiting).hold(server)


class Waiting:
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


class RollCall:
    """Process 0 at the port of the run: it waits for the reports of all, and answers them.

    Each connection has a thread: a slow process or a stranger holds up nobody else.
    """

    def __init__(self, place: ProcessPlace, own: ProcessInfo, waiting: Waiting):
        self._place = place
        self._own = own
        self._waiting = waiting
        self._has_noted_stranger = False
        self._came: dict[int, ProcessInfo] = {0: own}
        self._lines: dict[int, socket.socket] = {}
        # what the threads have heard: a report, None of a stranger
        self._heard: queue.SimpleQueue[tuple[socket.socket, Report | None]] = queue.SimpleQueue()
        # threads of processes, which send the answer when it is there
        self._threads: list[threading.Thread] = []
        self._answer = b""
        self._has_answer = threading.Event()

    def hold(self, server: socket.socket) -> Agreement:
        """Waits until all are there, one of them is wrong, or the time is up; then answers."""
        server.settimeout(ACCEPT_SECONDS)
        port = server.getsockname()[1]
        count = self._place.num_processes
        error = absent = None
        while len(self._came) < count and error is None and absent is None:
            missing = [p for p in range(count) if p not in self._came]
            self._waiting.show(
                f"process 0 waits at port {port} for {len(missing)} of {count} processes"
            )
            try:
                connection, _ = server.accept()
                threading.Thread(target=self._hear, args=(connection,), daemon=True).start()
            except TimeoutError:
                pass
            except OSError:
                # The connection is gone again, or too many files are open.
                time.sleep(ACCEPT_SECONDS)
            while not self._heard.empty():
                connection, report = self._heard.get()
                if report is not None:
                    error = error or self._welcome(connection, *report)
                elif not self._has_noted_stranger:
                    self._has_noted_stranger = True
                    self._waiting.say(
                        f"process 0: a connection to port {port} is not from this run, and is "
                        "ignored"
                    )
            if error is None and len(self._came) < count and self._waiting.left <= 0:
                names = enumerate_names([str(p) for p in missing])
                absent = (
                    f"process 0 of {count} waited {self._waiting.seconds:g} s at "
                    f"{self._place.coordinator}, and "
                    f"{'process' if len(missing) == 1 else 'processes'} {names} did not come. "
                    "Check that every machine was started, that the others have this address "
                    f"(ours is from {self._place.source}), and that no firewall is between them; "
                    "processes are counted, not devices. launch.timeout=SECONDS waits longer"
                )

        # All of them get the same answer, so all of them end with the same error.
        error = error or absent or mismatch_error(self._came)
        agreed = Agreement([self._came[p].host for p in sorted(self._came)], self._own.folder)
        answer = {"error": error, "absent": absent is not None, **dataclasses.asdict(agreed)}
        self._answer = json.dumps(answer).encode() + b"\n"
        self._has_answer.set()
        for thread in self._threads:
            thread.join()
        if error:
            raise (ValueError if absent is None else NotMet)(error)
        return agreed

    def _hear(self, connection: socket.socket) -> None:
        """Reads the report of a connection, and answers it when all are there."""
        deadline = time.monotonic() + MESSAGE_SECONDS
        report = None
        with connection:
            with contextlib.suppress(*UNREADABLE):
                report = parse_hello(_read_line(connection, lambda: deadline - time.monotonic()))
                self._threads.append(threading.current_thread())
            self._heard.put((connection, report))
            if report is None:
                return
            self._has_answer.wait()
            # Waits until the other side hangs up: then the port is free at once for jax.
            with contextlib.suppress(OSError):
                connection.settimeout(10)
                connection.sendall(self._answer)
                connection.settimeout(2)
                connection.recv(1)

    def _welcome(
        self, connection: socket.socket, process: int, count: int, about: ProcessInfo
    ) -> str | None:
        """Adds a process to those that came. Returns an error that ends the roll-call, or None."""
        other = self._came.get(process)
        # A process that came before and is gone was started again: the new one takes its place.
        if other is None or (process in self._lines and _is_gone(self._lines[process])):
            self._came[process] = about
            self._lines[process] = connection
            other = None
        if count != self._place.num_processes:
            return (
                f"process {process} ({about.host}) was started as one of {count} processes, "
                f"process 0 ({self._own.host}) as one of {self._place.num_processes}: give all the "
                "same number"
            )
        if other is not None:
            return (
                f"two processes say that they are process {process} ({other.host} and "
                f"{about.host}): numbers count through all machines, so on the second of two with "
                "4 processes each the first is 4"
            )
        return None


def parse_hello(line: bytes) -> Report:
    """The report in a line; raises one of UNREADABLE if a stranger sent it.

    Only types are checked: process 0 compares the values when all reports are there.
    """
    message = json.loads(line)
    process = message[HELLO]
    count = message["num_processes"]
    about = ProcessInfo(**message["about"])
    texts = [about.host, *about.values.keys(), *about.values.values()]
    is_text = all(isinstance(text, str) for text in texts) and isinstance(about.folder, str | None)
    is_process = type(process) is type(count) is int and 0 <= process < count
    if not (is_text and is_process):
        raise ValueError("no process of a run sends this")
    return process, count, about


def _is_gone(connection: socket.socket) -> bool:
    """Whether the other side has hung up."""
    try:
        connection.setblocking(False)
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _server(host: str, port: int, place: ProcessPlace) -> socket.socket:
    """Listens at the port that jax's coordinator will have later.

    Raises NotMet if another program has the port, ValueError if the system refuses it.
    """
    both = not is_loopback(host) and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or (is_loopback(host) and ":" in host) else socket.AF_INET
    address = (host if is_loopback(host) else "", port)
    try:
        return socket.create_server(address, family=family, dualstack_ipv6=both, backlog=1024)
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


# ---- the other processes


def _report(
    place: ProcessPlace, host: str, port: int, own: ProcessInfo, waiting: Waiting
) -> Agreement:
    """Reports to process 0, as all others do, and takes its answer.

    Tries again until the time is up, because an earlier run may still have the port.
    """
    hello = {
        HELLO: place.process_id,
        "num_processes": place.num_processes,
        "about": dataclasses.asdict(own),
    }

    # Process 0 says who is missing, so it has a little longer; then it is gone itself.
    def left() -> float:
        waiting.show(f"process {place.process_id} has reached process 0 and waits for the others")
        return waiting.left + 10

    while True:
        waiting.show(f"process {place.process_id} looks for process 0 at {host}:{port}")
        seconds = min(5.0, max(0.1, waiting.left))
        try:
            connection = socket.create_connection((host, port), timeout=seconds)
        except OSError as error:
            if waiting.left <= 0:
                text = _unreachable(place, host, port, waiting.seconds, own.host, error)
                raise NotMet(text) from error
            time.sleep(min(0.3, max(0.0, waiting.left)))
            continue
        with connection:
            try:
                connection.sendall(json.dumps(hello).encode() + b"\n")
                answer = json.loads(_read_line(connection, left))
                error = answer.pop("error")
                kind = NotMet if answer.pop("absent", False) else ValueError
                agreed = Agreement(**answer)
                break
            except UNREADABLE as problem:
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
