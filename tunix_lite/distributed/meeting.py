"""The roll-call of a run: its processes compare what they are by plain sockets, on the port that
jax's coordinator takes over. jax itself would wait without a message, and then end with a C++ stack
trace."""

import contextlib
import dataclasses
import errno
import ipaddress
import json
import socket
import sys
import threading
import time
from collections.abc import Callable

from tunix_lite.basics.errors import RunFailed
from tunix_lite.distributed.agreement import (
    Agreement,
    ProcessInfo,
    enumerate_names,
    mismatch_error,
)
from tunix_lite.distributed.process_place import ProcessPlace

# Bytes of a message, at most.
_LONGEST = 1 << 22
# The key that marks a message as one of ours; its value is the process id.
_HELLO = "tunix_lite"
# Seconds of waiting before the first line about it, and between two lines.
_FIRST_LINE = 2
_NEXT_LINE = 30
# Seconds of silence after which a connection counts as a stranger's.
_MESSAGE_SECONDS = 5
# Seconds between two looks at what the connections have sent.
_ACCEPT_SECONDS = 0.05
# What a message of a stranger raises when it is read. ValueError: it is no JSON, or no text.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


class NotMet(RunFailed):
    """A process did not come, or the port is taken. Settings are not at fault; try again."""


class _Waiting:
    """A time limit, and a line now and then that says what we wait for and how long."""

    def __init__(self, seconds: float, say: Callable[[str], None]):
        self.seconds = seconds
        self.say = say
        self._deadline = time.monotonic() + seconds
        # the seconds that are left when the next line is due
        self._next = seconds - _FIRST_LINE

    @property
    def left(self) -> float:
        """Seconds until the limit; negative after it."""
        return self._deadline - time.monotonic()

    def show(self, text: str) -> None:
        """Prints `text` with the seconds that are left, if a line is due."""
        if self.left <= self._next:
            self._next = self.left - _NEXT_LINE
            self.say(f"{text}, {max(0, round(self.left))} s left")


def meet(
    place: ProcessPlace,
    own: ProcessInfo,
    timeout: float,
    say: Callable[[str], None] | None = None,
) -> Agreement:
    """Lets all processes of a run meet: each reports to process 0, which compares them and answers.
    place: of this process. own: what it reports. timeout: seconds. say: prints a line; None:
    standard error. Raises, on all processes, NotMet if one is missing or the port is taken, and
    ValueError if their reports differ."""
    waiting = _Waiting(timeout, say or (lambda line: print(line, file=sys.stderr, flush=True)))
    host, _, port = place.coordinator.rpartition(":")
    host = host.strip("[]")
    if place.process_id > 0:
        return _report(place, host, int(port), own, waiting)

    # Process 0 listens at the port that jax's coordinator will have later.
    local = is_loopback(host)
    # The others may come by either protocol.
    both = not local and socket.has_dualstack_ipv6()
    is_v6 = both or (local and ":" in host)
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    address = (host if local else "", int(port))
    try:
        server = socket.create_server(
            address, family=family, dualstack_ipv6=both, backlog=1024
        )
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
    with server:
        return _call_roll(server, place, own, waiting)


# ---- process 0


def _call_roll(
    server: socket.socket, place: ProcessPlace, own: ProcessInfo, waiting: _Waiting
) -> Agreement:
    """Waits until all are there, one of them is wrong, or the time is up; then answers all."""
    server.settimeout(_ACCEPT_SECONDS)
    port = server.getsockname()[1]
    count = place.num_processes
    came = {0: own}
    # those that wait for an answer, each with the thread that hears it
    connections: dict[socket.socket, threading.Thread] = {}
    errors = []
    strangers = []

    def hear(connection: socket.socket) -> None:
        """Notes the report of a connection, until the other side hangs up."""
        with connection:
            try:
                process, its_count, about = _read_report(connection)
            except _UNREADABLE as problem:
                strangers.append(str(problem)[:80])
                if len(strangers) == 1:
                    stranger = f"a connection to port {port} is not from this run"
                    waiting.say(f"process 0: {stranger}, and is ignored")
                return
            connections[connection] = threading.current_thread()
            if its_count != count:
                errors.append(
                    f"process {process} ({about.host}) was started as one of {its_count} "
                    f"processes, process 0 ({own.host}) as one of {count}: give all the same number"
                )
            elif came.setdefault(process, about) is not about:
                errors.append(
                    f"two processes say that they are process {process} ({came[process].host} and "
                    f"{about.host}): numbers count through all machines, so on the second of two "
                    "with 4 processes each the first is 4"
                )
            with contextlib.suppress(OSError):
                connection.recv(1)
            # It may be started again, and then comes as a new one.
            if came.get(process) is about:
                del came[process]

    absent = None
    while len(everyone := dict(came)) < count and not errors and absent is None:
        missing = [str(p) for p in range(count) if p not in everyone]
        waiting.show(f"process 0 waits at port {port} for {len(missing)} of {count} processes")
        if waiting.left <= 0:
            absent = (
                f"process 0 of {count} waited {waiting.seconds:g} s at {place.coordinator}, and "
                f"{'process' if len(missing) == 1 else 'processes'} {enumerate_names(missing)} did "
                "not come. Check that every machine was started, that the others have this address "
                f"(ours is from {place.source}), and that no firewall is between them; "
                "processes are counted, not devices. launch.timeout=SECONDS waits longer"
            )
        # Each connection has a thread: a slow process or a stranger holds up nobody else.
        try:
            connection, _ = server.accept()
            threading.Thread(target=hear, args=(connection,), daemon=True).start()
        except TimeoutError:
            pass
        except OSError:
            # The connection is gone again, or too many files are open.
            time.sleep(_ACCEPT_SECONDS)

    # All of them get the same answer, so all of them end with the same error.
    error = next(iter(errors), absent) or mismatch_error(everyone)
    agreed = Agreement([everyone[p].host for p in sorted(everyone)], own.folder)
    answer = {"error": error, "absent": absent is not None, **dataclasses.asdict(agreed)}
    waiting_for_answer = dict(connections)
    for connection in waiting_for_answer:
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps(answer).encode() + b"\n")
    # Waits until the other side hangs up: then the port is free at once for jax.
    for thread in waiting_for_answer.values():
        thread.join(2)
    if error:
        raise (ValueError if absent is None else NotMet)(error)
    return agreed


def _read_report(connection: socket.socket) -> tuple[int, int, ProcessInfo]:
    """The report of a connection: (process id, number of processes, what the process is). Raises
    one of _UNREADABLE for a stranger's; only types are checked."""
    connection.settimeout(_MESSAGE_SECONDS)
    with connection.makefile("rb") as lines:
        # A stranger may send without end.
        message = json.loads(lines.readline(_LONGEST))
    process = message[_HELLO]
    count = message["num_processes"]
    about = ProcessInfo(**message["about"])
    texts = [about.host, *about.values.keys(), *about.values.values()]
    is_text = all(isinstance(text, str) for text in texts)
    # The type itself, as True would pass for the number 1.
    is_number = type(process) is type(count) is int and 0 <= process < count
    if not (is_text and is_number and isinstance(about.folder, str | None)):
        raise ValueError("no report of a process")
    connection.settimeout(None)
    return process, count, about


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine alone, as localhost and 127.0.0.1 do."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


# ---- the other processes


def _report(
    place: ProcessPlace, host: str, port: int, own: ProcessInfo, waiting: _Waiting
) -> Agreement:
    """Reports to process 0, as all others do, and takes its answer."""
    me = place.process_id
    count = place.num_processes
    hello = {_HELLO: me, "num_processes": count, "about": dataclasses.asdict(own)}
    answer = None
    # Again until the time is up, because an earlier run may still have the port.
    while answer is None:
        waiting.show(f"process {me} looks for process 0 at {host}:{port}")
        reached = False
        seconds = min(5.0, max(0.1, waiting.left))
        try:
            with socket.create_connection((host, port), timeout=seconds) as connection:
                reached = True
                connection.sendall(json.dumps(hello).encode() + b"\n")
                # Process 0 says who is missing, so it has a little longer; then it is gone itself.
                connection.settimeout(max(0.0, waiting.left) + 10)
                with connection.makefile("rb") as lines:
                    answer = json.loads(lines.readline(_LONGEST))
            # Inside of `try`, as another program may have answered.
            agreed = Agreement(answer["hosts"], answer["folder"])
            error = answer["error"]
            kind = NotMet if answer["absent"] else ValueError
        except _UNREADABLE as problem:
            answer = None
            if waiting.left > 0:
                time.sleep(min(0.3, waiting.left))
                continue
            if reached:
                raise NotMet(
                    f"process {me} ({own.host}) reached {host}:{port}, but in "
                    f"{waiting.seconds:g} s no process 0 of this run: another program or an "
                    f"older run uses that port. Choose another port with {place.source}"
                ) from problem
            why = getattr(problem, "strerror", None) or str(problem)
            # Whoever exports RANK=1 on the second machine waits for processes that nobody started.
            by_hand = "MASTER_ADDR" in place.source
            rank = "RANK counts processes, not machines. " if by_hand else ""
            raise NotMet(
                f"process {me} of {count} ({own.host}) could not reach process 0 at {host}:{port} "
                f"in {waiting.seconds:g} s: {why}. Check that process 0 was started and still "
                f"runs, that this is its address (it is from {place.source}), and that no firewall "
                f"is between them: nc -zv {host} {port}. {rank}launch.timeout=SECONDS waits longer"
            ) from problem
    if error:
        raise kind(error)
    return agreed
