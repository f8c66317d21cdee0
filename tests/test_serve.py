"""The server: its engine equals `generate`, real clients get what the protocol says, and no client harms another."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import programs_once
import pytest
from server_thread import in_thread

from tunix_lite.basics.errors import ConfigError
from tunix_lite.commands.serve import ServeConfig, serve_model
from tunix_lite.inference.language_model import load
from tunix_lite.inference.live import live_engine
from tunix_lite.rollout.live import DrawSettings, EngineFailed, LiveSequence, NewTokens, TooManyRequests
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.serving.answers import ApiChoice
from tunix_lite.serving.app import Server, ServerSettings
from tunix_lite.serving.bad_call import BadCall
from tunix_lite.serving.calls import Limits, read_call

ROOT = Path(__file__).resolve().parents[1]
GENERATION = GenerationConfig(max_prompt_length=64, max_new_tokens=48)
LIMITS = Limits("bundled", 64, 48, 112)
QUESTIONS = [f"What is {a} + {b} - 3?" for a in (5, 17, 23) for b in (3, 8)]
ASK = {"model": "bundled", "messages": [{"role": "user", "content": QUESTIONS[0]}]}


@pytest.fixture(scope="module")
def model():
    # One device: here `generate` and the engine use the devices from two threads, and programs of several devices
    # would wait for each other.
    return load("bundled", mesh_shape=((1, 1), ("fsdp", "tp")))


@pytest.fixture(scope="module")
def engine(model):
    with programs_once.anew():  # its programs count how often they are compiled
        engine = live_engine(model, GENERATION, RolloutConfig(num_slots=4, chunk=8), max_waiting=8)
    yield engine
    engine.close()
    assert engine.failure is None


def sampled(engine, prompts: list[list[int]], draws: list[DrawSettings], limit: int = 48) -> list[NewTokens]:
    """All tokens of each sequence, when the last has ended."""
    found = [NewTokens([], [], []) for _ in prompts]
    ended = [threading.Event() for _ in prompts]

    def callback(i):
        def on_tokens(new):
            found[i].tokens.extend(new.tokens)
            found[i].full_logprobs.extend(new.full_logprobs)
            found[i].reason = new.reason
            if new.reason:
                ended[i].set()

        return on_tokens

    engine.submit([LiveSequence(p, d, limit, callback(i)) for i, (p, d) in enumerate(zip(prompts, draws))])
    assert all(event.wait(120) for event in ended)
    return found


# ---- the engine


def test_after_the_warm_up_a_request_compiles_nothing(model, engine):
    """It is the first test of this engine."""
    engine.warm_up()
    compiled = dict(engine.programs.compiles)
    sampled(engine, [model.tokenizer.prompt(QUESTIONS[0])], [DrawSettings()])
    assert engine.programs.compiles == compiled
    engine.failure = RuntimeError("out of memory")
    with pytest.raises(EngineFailed):
        engine.warm_up()
    engine.failure = None


def test_the_engine_draws_what_generate_draws(model, engine):
    """More sequences than slots; each alone by `generate`, so nothing that another client asks for can matter."""
    prompts = [model.tokenizer.prompt(question) for question in QUESTIONS[:3]]
    how = {"temperature": 1.5, "top_p": 0.8}
    # Others with other settings stand in the slots beside them.
    draws = [DrawSettings(seed=7, **how) for _ in prompts]
    others = [DrawSettings(seed=i, temperature=1.3, top_k=5, min_p=0.01) for i in range(4)]
    both = sampled(engine, [*prompts, *prompts, prompts[0]], [*draws, *others])
    settings = GenerationConfig(64, 48, **how)
    for question, found in zip(QUESTIONS[:3], both):
        [alone] = model.generate(question, settings, seed=7)
        assert found.tokens == alone.tokens
        np.testing.assert_allclose(found.full_logprobs, alone.full_logprobs, atol=1e-5)
        assert found.reason == alone.finish_reason


def test_the_waiting_line_is_bounded_and_sequences_that_are_cancelled_even_twice_leave_it(model, engine):
    prompt = model.tokenizer.prompt(QUESTIONS[0])
    heard = []
    many = [LiveSequence(prompt, DrawSettings(), 48, heard.append) for _ in range(4 + 8 + 1)]
    with pytest.raises(TooManyRequests, match="at most 8 may"):
        engine.submit(many)
    assert not engine._waiting and not heard

    engine.submit(many[:12])
    for one in many[:12]:
        engine.cancel(one)
    until(lambda: not engine._waiting and not engine.engine.unfinished)
    # A choice that a stop text ends is cancelled there, and again when its answer is complete.
    for count in (0, 1):  # while it waits, and while it runs
        heard.clear()
        one = LiveSequence(prompt, DrawSettings(), 48, heard.append)
        engine.submit([one])
        until(lambda count=count: len(heard) >= count)
        engine.cancel(one)
        engine.cancel(one)
        assert sampled(engine, [prompt], [DrawSettings(seed=2)])[0].tokens and engine.failure is None
    until(lambda: not engine._waiting and not engine.engine.unfinished)


def until(is_true, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    "body, field, message",
    [
        ([], None, "not a JSON object"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "reads no other"),
        (ASK | {"model": "gpt-9"}, "model", "this server has 'bundled'"),
        (ASK | {"max_tokens": 49}, "max_tokens", "from 1 to 48"),
        (ASK | {"messages": [{"role": "user", "content": "1 + " * 99}]}, "messages", "takes up to 64"),
    ],
)
def test_a_wrong_body_is_named_by_its_field(model, body, field, message):
    with pytest.raises(BadCall, match=message) as raised:
        read_call(body, True, LIMITS, model.tokenizer)
    assert raised.value.field == field


def test_text_that_may_become_a_stop_text_is_held_back(model):
    """Tokens of `ab`, `c`, `d`... with the stop text `cde`: nothing of it is ever sent."""
    choice = ApiChoice(0, model.tokenizer, stop=("1 + 1",))
    sent = []
    for token in model.tokenizer.encode("so 1 + 2 or 1 + 1 is"):
        if choice.whole.finish_reason is None:
            sent.append(choice.add(NewTokens([token], [0.0], [0.0])).text)
    assert "".join(sent) == choice.whole.text == "so 1 + 2 or "
    assert choice.whole.finish_reason == "stop"
    # A text that only begins like it comes whole in the end.
    other = ApiChoice(0, model.tokenizer, stop=("1 + 1",))
    tokens = model.tokenizer.encode("so 1 + ")
    other.add(NewTokens(tokens, [0.0] * len(tokens), [0.0] * len(tokens), reason="length"))
    assert (other.whole.text, other.whole.finish_reason) == ("so 1 + ", "length")


@contextmanager
def listening(engine, model, **settings):
    """The address of a server over this engine."""
    server = Server(engine, model.tokenizer, LIMITS, ServerSettings(port=0, **settings))
    with in_thread(server.application()) as address:
        yield address


@pytest.fixture(scope="module")
def client(engine, model):
    openai = pytest.importorskip("openai")
    with listening(engine, model) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)


def test_a_real_client_gets_what_generate_gives(model, client):
    [greedy] = model.generate(QUESTIONS[0], GenerationConfig(64, 48, temperature=0.0))
    answer = client.chat.completions.create(**ASK, temperature=0, logprobs=True)
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == (greedy.text, "stop")
    values = [one.logprob for one in choice.logprobs.content]
    np.testing.assert_allclose(values, greedy.full_logprobs, atol=1e-5)
    prompt = len(model.tokenizer.prompt(QUESTIONS[0]))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, len(greedy.tokens))

    several = model.generate(QUESTIONS[0], GenerationConfig(64, 48), num_generations=3, seed=11)
    answer = client.chat.completions.create(**ASK, n=3, seed=11, extra_body={"return_token_ids": True})
    assert [choice.token_ids for choice in answer.choices] == [one.tokens for one in several]
    assert [model.id for model in client.models.list()] == ["bundled"]


def test_a_stream_is_the_answer_in_pieces(client):
    options = {"seed": 4, "n": 2, "stream_options": {"include_usage": True}}
    whole = client.chat.completions.create(**ASK, seed=4, n=2)
    texts = ["", ""]
    reasons = [None, None]
    usage = None
    for chunk in client.chat.completions.create(**ASK, stream=True, **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


def test_completions_stop_and_count(model, client):
    stopped = client.chat.completions.create(**ASK, temperature=0, stop=" is")
    [greedy] = model.generate(QUESTIONS[0], GenerationConfig(64, 48, temperature=0.0))
    assert " is" in greedy.text
    assert stopped.choices[0].message.content == greedy.text.split(" is")[0]
    assert stopped.choices[0].finish_reason == "stop"
    answer = client.completions.create(model="bundled", prompt=["2 + 2 =", "7"], max_tokens=3, logprobs=1)
    assert len(answer.choices) == 2
    assert all(len(choice.logprobs.tokens) <= 3 for choice in answer.choices)


def test_errors_are_those_that_clients_know(client):
    import openai

    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(**ASK | {"model": "gpt-9"})
    assert raised.value.body["code"] == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="from 0 to 2"):
        client.chat.completions.create(**ASK, temperature=5)
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(**ASK, n=100)


def raw(address: str, data: bytes) -> bytes:
    """What the server answers to these bytes; the connection closes after it."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(data)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def post(body: bytes, path: str = "/v1/chat/completions", more: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{more}\r\n"
    return head.encode() + body


def test_clients_that_send_garbage_or_vanish_harm_nobody(model, engine):
    with listening(engine, model, max_body=10_000) as address:
        assert b"400" in raw(address, post(b'{"model"')).split(b"\r\n")[0]
        assert b"400" in raw(address, post(b"[" * 5_000)).split(b"\r\n")[0]
        assert b"413" in raw(address, post(b"x" * 20_000)).split(b"\r\n")[0]
        assert b"400" in raw(address, b"\x16\x03\x01 what\r\n\r\n").split(b"\r\n")[0]

        # Clients that ask for a stream and go away: their slots are free again.
        host, port = address.removeprefix("http://").split(":")
        body = json.dumps(ASK | {"stream": True, "n": 8}).encode()
        for _ in range(3):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(post(body))
                connection.recv(10)
        until(lambda: not engine._waiting and not engine.engine.unfinished)
        answer = raw(address, post(json.dumps(ASK | {"temperature": 0}).encode()))
        [greedy] = model.generate(QUESTIONS[0], GenerationConfig(64, 48, temperature=0.0))
        assert json.dumps(greedy.text).encode() in answer


def test_a_key_is_asked_for(model, engine):
    with listening(engine, model, api_key="open sesame") as address:
        body = json.dumps(ASK | {"max_tokens": 1}).encode()
        for more, code in (("", b"401"), ("Bearer open", b"401"), ("Bearer open sesame", b"200")):
            answer = raw(address, post(body, more=f"Authorization: {more}\r\n" if more else ""))
            assert code in answer.split(b"\r\n")[0]
        assert b" 200 " in raw(address, b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")[:15]


@pytest.mark.wide
def test_sigterm_lets_requests_under_way_end(tmp_path):
    command = [sys.executable, "-m", "tunix_lite", "serve", "port=0", "generation.max_prompt_length=64"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen([*command, "rollout.chunk=1"], cwd=ROOT, stderr=log, env=environment)
    try:
        until(lambda: "/v1" in (tmp_path / "log").read_text() or process.poll() is not None, 120)
        said = (tmp_path / "log").read_text()
        address = said.split("/v1")[0].split()[-1]
        answers = []
        body = json.dumps(ASK | {"seed": 1, "temperature": 2, "n": 16}).encode()
        asking = threading.Thread(target=lambda: answers.append(raw(address, post(body))))
        asking.start()
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        asking.join(60)
        assert b"200" in answers[0].split(b"\r\n")[0], answers
        assert answers[0].count(b'"finish_reason": "') == 16
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        log.close()


def test_serve_says_what_it_cannot_do(model):
    with pytest.raises(ValueError, match="rollout.kernels=fused: each request says what is cut off"):
        live_engine(model, GENERATION, RolloutConfig(kernels="fused"))
    for wrong, message in (
        ({"port": 70000}, "port=70000"),
        ({"api": "other"}, "there is openai and tinker"),
        ({"api": "tinker", "checkpoint": "outputs/latest"}, "starts from model.weights"),
    ):
        with pytest.raises(ValueError, match=message):
            ServeConfig(**wrong)
    with pytest.raises(ConfigError, match="api_key_variable=NO_SUCH_KEY"):
        serve_model(None, ServeConfig(api_key_variable="NO_SUCH_KEY"))
    # A port that is taken is told before a model is loaded: there is no run to load one of.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port={port}: .*address already in use"):
            serve_model(None, ServeConfig(port=port))
