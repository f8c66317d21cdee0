"""Clients that stall, send too much, or come in thousands: the server answers the others, and its memory is bounded."""

import gc
import json
import resource
import socket
import threading
import tracemalloc

import pytest
from scripted_engine import ScriptedEngine, listening
from test_serve import post, raw, until

from tunix_lite.models.source import BUNDLED
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.rollout.live import TooManyRequests
from tunix_lite.serving import listen
from tunix_lite.serving.answers import ApiChoice
from tunix_lite.serving.calls import Limits

LIMITS = Limits("m", 64, 48, 112)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(BUNDLED)


def asking(number: int, **more) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": f"number {number}!"}]} | more).encode()


def say(prompt: str) -> str:
    """The number that was asked for."""
    return "It is " + prompt.partition("number ")[2].partition("!")[0]


def status(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


def connected(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def rest_of(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def test_a_client_that_does_not_send_its_body_is_given_up(tokenizer, monkeypatch):
    monkeypatch.setattr(listen, "BODY_SECONDS", 0.3)
    with listening(ScriptedEngine(tokenizer, say), LIMITS) as address:
        body = asking(1)
        with connected(address) as slow:
            slow.sendall(post(body)[:-20])
            # others are answered meanwhile
            assert b"It is 7" in raw(address, post(asking(7)))
            slow.settimeout(8)
            assert status(slow.recv(65536)) == 504


def test_a_request_that_takes_too_long_ends_and_frees_its_slot(tokenizer):
    engine = ScriptedEngine(tokenizer, lambda prompt: None)
    with listening(engine, LIMITS, request_seconds=0.3) as address:
        for stream in (False, True):
            answer = raw(address, post(asking(1, stream=stream)))
            assert status(answer) == 504 and b"more than 0.3 s" in answer
    assert set(map(id, engine.asked)) <= set(map(id, engine.cancelled)) and len(engine.asked) == 2


def test_large_bodies_are_refused_before_they_fill_the_memory(tokenizer):
    """40 clients send 10 MB each at once; the limit is 1 MiB."""
    body = post(b"x" * 10_000_000)
    found = []

    def send(address: str) -> None:
        try:
            with connected(address) as one:
                one.sendall(body)
                found.append(status(rest_of(one)))
        except (BrokenPipeError, ConnectionResetError):
            # the server has closed while the client still sent
            found.append(413)

    with listening(ScriptedEngine(tokenizer, say), LIMITS) as address:
        raw(address, post(asking(1)))
        tracemalloc.start()
        threads = [threading.Thread(target=send, args=(address,)) for _ in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert found == [413] * 40
        assert peak < 40 * 2.5e6, f"{peak / 1e6:.0f} MB"
        assert b"It is 3" in raw(address, post(asking(3)))


@pytest.fixture
def many_files():
    """Room for both ends of a thousand connections in one process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("this machine allows fewer open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_connections_get_their_own_answers(tokenizer, many_files):
    engine = ScriptedEngine(tokenizer, say)
    with listening(engine, LIMITS) as address:
        connections = [connected(address) for _ in range(1000)]
        try:
            # All are open and silent, and one more is answered.
            assert b"It is 5" in raw(address, post(asking(5)))
            for number, one in enumerate(connections):
                one.sendall(post(asking(number)))
            for number, one in enumerate(connections):
                answer = rest_of(one)
                assert status(answer) == 200 and f'"It is {number}"'.encode() in answer
        finally:
            for one in connections:
                one.close()
    # Nothing of the requests is kept.
    del engine
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, ApiChoice)]


def test_a_full_line_is_429_and_says_when_to_come_again(tokenizer):
    class Full(ScriptedEngine):
        def submit(self, sequences):
            raise TooManyRequests("8 sequences wait already; at most 8 may")

    with listening(Full(tokenizer, say), LIMITS) as address:
        answer = raw(address, post(asking(1)))
        assert status(answer) == 429 and b"Retry-After: 1" in answer


def test_a_client_that_vanishes_before_the_first_token_frees_its_slot(tokenizer):
    engine = ScriptedEngine(tokenizer, lambda prompt: None)
    with listening(engine, LIMITS) as address:
        connections = [connected(address) for _ in range(20)]
        for one in connections:
            one.sendall(post(asking(1, n=2)))
        until(lambda: len(engine.asked) == 40)
        assert not engine.cancelled
        for one in connections:
            one.close()
        until(lambda: set(map(id, engine.cancelled)) == set(map(id, engine.asked)))
