"""A judge over HTTP on this machine: what it answers, how it fails, what is kept."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tunix_lite.rewards.judge import Judge, JudgeError

PROMPT = "Is {completion} a good answer to {question}? End with Score: 0 to 10."


class Server(ThreadingHTTPServer):
    """Answers each request by the next of `answers` (the last one for ever): a text, a status, or a function."""

    daemon_threads = True

    def __init__(self, *answers):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers, self.asked, self.headers, self.paths = list(answers), [], [], []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        server.headers.append(dict(self.headers))
        server.paths.append(self.path)
        answer = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
        if callable(answer):
            answer(self)
        elif isinstance(answer, int):
            self.say(answer, b"busy")
        else:
            self.say(200, json.dumps({"choices": [{"message": {"content": answer}}]}).encode())

    def say(self, status, body, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(*answers):
    with Server(*answers) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


def judge(server, **settings) -> Judge:
    return Judge(**{"base_url": server.url, "model": "m", "prompt": PROMPT, "backoff": 0.01, "timeout": 2.0} | settings)


EXAMPLE = {"question": "2 + 2", "answer": "4"}


@pytest.mark.parametrize(
    ("answer", "settings", "score"),
    [
        ("Score: 7", {}, 0.7),
        ("yes? no!", {"pattern": r"(?i)\b(yes|no)\b", "scores": {"yes": 1.0, "no": -1.0}}, -1),
        # as YAML reads {yes: 1, no: 0}
        ("Yes", {"pattern": r"(?i)\b(yes|no)\b", "scores": {True: 1.0, False: 0.0}}, 1),
    ],
)
def test_the_last_score_of_the_answer_counts(answer, settings, score):
    with serving(answer) as server:
        assert judge(server, **settings)("It is {4}", EXAMPLE) == pytest.approx(score)
        assert server.paths == ["/v1/chat/completions"]
        (asked,) = server.asked
    assert asked == {
        "model": "m",
        "messages": [{"role": "user", "content": "Is It is {4} a good answer to 2 + 2? End with Score: 0 to 10."}],
        "temperature": 0.0,
        "max_tokens": 512,
    }


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("It is good.", "the judge's answer holds no score: 'It is good.'"),
        ("Score: 11", "the judge's 11 is not from 0 to 10"),
    ],
)
def test_an_answer_without_a_score_is_an_error(answer, message):
    with serving(answer, "Score: 5") as server:
        asks = judge(server)
        with pytest.raises(JudgeError, match=message):
            asks("4", EXAMPLE)
        assert asks("4", EXAMPLE) == 0.5, "it was asked again"


def test_what_may_pass_is_tried_again_and_what_will_not_is_not():
    with serving(503, 429, "Score: 5") as server:
        assert judge(server, retries=2)("4", EXAMPLE) == 0.5 and len(server.asked) == 3
    twice = "gave no answer, asked 2 times: HTTP 503 Service Unavailable busy"
    with serving(503) as server, pytest.raises(JudgeError, match=twice):
        judge(server)("4", EXAMPLE)
    with serving(401) as server:
        with pytest.raises(JudgeError, match="asked once: HTTP 401"):
            judge(server)("4", EXAMPLE)
        assert len(server.asked) == 1
    with serving(lambda handler: handler.say(200, b"<html>"), "Score: 5") as server:
        assert judge(server)("4", EXAMPLE) == 0.5
    closed = Server("")
    closed.server_close()
    with pytest.raises(JudgeError, match="refused"):
        judge(closed)("4", EXAMPLE)


def test_a_judge_that_is_slow_or_endless_is_given_up():
    def drip(handler):
        handler.send_response(200)
        handler.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(300):
                handler.wfile.write(b" ")
                time.sleep(0.02)

    def flood(handler):
        handler.send_response(200)
        handler.end_headers()
        with contextlib.suppress(OSError):
            handler.wfile.write(b" " * 5 * 2**20)

    def drip_headers(handler):
        with contextlib.suppress(OSError):
            handler.wfile.write(b"HTTP/1.0 200 OK\r\n")
            for i in range(150):
                handler.wfile.write(b"X-%d: a\r\n" % i)
                time.sleep(0.02)

    late = "timed out|more than 0.3 sec"
    for answer, message in ((lambda _: time.sleep(1), late), (drip, late), (drip_headers, late), (flood, "bytes")):
        with serving(answer) as server:
            began = time.monotonic()
            with pytest.raises(JudgeError, match=message):
                judge(server, timeout=0.3, retries=0)("4", EXAMPLE)
            assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 100_000, "RecursionError"),
        (b"HTTP/1.0 200 OK\r\n" + b"X-A: a\r\n" * 200 + b"\r\n{}", "HTTPException: got more than 100 headers"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}", "IncompleteRead|JSONDecodeError|KeyError"),
        (b'HTTP/1.0 200 OK\r\n\r\n{"a": "\xc3(', "UnicodeDecodeError"),
        (b"HTTP/1.0 503 \x1b[31mred\r\n\r\n\x1b]0;title\x07", r"HTTP 503 \\x1b\[31mred \\x1b\]0;title\\x07"),
    ],
    ids=lambda said: said[:24] if isinstance(said, bytes) else "",
)
def test_what_is_no_answer_is_a_judge_error_and_asked_for_again(said, message):
    with serving(lambda handler: handler.wfile.write(said)) as server:
        with pytest.raises(JudgeError, match=message) as failed:
            judge(server)("4", EXAMPLE)
        assert str(failed.value).isprintable() and len(server.asked) == 2


def test_a_key_that_is_no_header_is_refused_and_not_shown(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret\r\nX-Other: 1")
    with pytest.raises(ValueError, match="api_key_env=MY_KEY: the key holds") as failed:
        Judge("http://127.0.0.1:1/v1", "m", PROMPT, api_key_env="MY_KEY")
    assert "secret" not in str(failed.value)
    # as `export MY_KEY="$(cat file)\n"` leaves it
    monkeypatch.setenv("MY_KEY", "secret\n")
    with serving("Score: 5") as server:
        judge(server, api_key_env="MY_KEY")("4", EXAMPLE)
        assert server.headers[0]["Authorization"] == "Bearer secret"


def test_only_the_named_server_is_asked_and_gets_the_key(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with serving("Score: 5") as other:
        with serving(lambda handler: handler.say(302, b"", Location=other.url)) as server:
            with pytest.raises(JudgeError, match="HTTP 302"):
                judge(server, api_key_env="MY_KEY")("4", EXAMPLE)
            assert server.headers[0]["Authorization"] == "Bearer secret"
        assert not other.asked
        judge(other)("4", EXAMPLE)
        assert "Authorization" not in other.headers[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_url": "file:///etc/passwd"}, "base_url='file:///etc/passwd'; write it as http"),
        ({"base_url": "http://127.0.0.1:1/v1\r\nX-A: 1"}, r"base_url='http://127.0.0.1:1/v1\\r\\nX-A: 1'; write it as"),
        ({"prompt": "Is it good?"}, r"prompt has no \{completion\}"),
        ({"api_key_env": "NO_SUCH_VARIABLE"}, "there is no such variable"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Judge(**{"base_url": "http://127.0.0.1:1/v1", "model": "m", "prompt": PROMPT} | settings)
