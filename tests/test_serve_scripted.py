"""Servers of an engine without a model: clients that stall, send too much, or come in thousands; and tools."""

import dataclasses
import json
import re
import socket
import sys
import threading
import time
import tracemalloc
from contextlib import contextmanager

import pytest
from scripted_engine import ScriptedEngine, listening
from test_serve import post, raw, until
from test_tokenizer import FAMILIES, GEMMA_TEMPLATE, byte_fallback, gemma, write
from test_tokenizer import GEMMA as SPECIAL

from tunix_lite.models.source import BUNDLED
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.rollout.live import TooManyRequests
from tunix_lite.serving import face
from tunix_lite.serving.bad_call import BadCall
from tunix_lite.serving.calls import Limits, read_call

LIMITS = Limits("m", 64, 48, 112)


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


def test_a_client_that_does_not_send_its_body_is_given_up(tokenizer, monkeypatch):
    monkeypatch.setattr(face, "_BODY_SECONDS", 0.3)
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
                found.append(status(one.recv(65536)))
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


def test_more_completions_than_the_server_holds_are_refused_before_anything_is_made_of_them(tokenizer):
    """A body of 10 kB asked for 256,000 completions, and nobody else was answered for 46 s."""
    engine = ScriptedEngine(tokenizer, say)
    most = LIMITS.max_sequences
    with listening(engine, LIMITS) as address:
        for body, count in [
            ({"prompt": [[5]] * 2000, "n": 128}, 256_000),
            ({"prompt": [[5]] * 145, "n": 2}, 290),
        ]:
            began = time.monotonic()
            answer = raw(address, post(json.dumps(body).encode(), "/v1/completions"))
            said = f"is {count} completions; this server takes up to {most}"
            assert status(answer) == 400 and said in answer.decode()
            assert time.monotonic() - began < 2
        assert not engine.asked
        answer = raw(address, post(json.dumps({"prompt": [[5]] * 144, "n": 2}).encode(), "/v1/completions"))
        assert status(answer) == 200 and len(engine.asked) == most


@pytest.mark.parametrize("where", ["prompts", "content", "parts", "tools", "template"])
def test_a_prompt_that_is_far_too_long_is_refused_unread(tokenizer, where, monkeypatch):
    """24 prompts of 900 kB at once kept others waiting for 20 s, as they were tokenised first."""
    text = "word " * 100_000
    user = {"role": "user", "content": "hi"}
    function = {"type": "function", "function": {"name": "f", "description": text}}
    body = {
        "prompts": {"prompt": ["a", text]},
        "content": {"messages": [user, {"role": "assistant", "content": text}]},
        "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]},
        "tools": {"messages": [user], "tools": [function]},
        "template": {"messages": [user], "chat_template_kwargs": {"more": [{"deep": text}]}},
    }[where]
    read = []
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: read.append(text) or [5])
    with pytest.raises(BadCall, match=r"bytes; this server reads up to 16384, .* 64 tokens") as raised:
        read_call(body, "messages" in body, LIMITS, tokenizer)
    assert raised.value.code == "context_length_exceeded"
    assert all(len(text) < 100 for text in read)


@pytest.mark.parametrize(
    "more, field",
    [
        ({"temperature": 10**400}, "temperature"),
        ({"chat_template_kwargs": {"bos_token": "<eos>"}}, "chat_template_kwargs"),
        ({"model": "\ud800"}, None),
    ],
)
def test_numbers_and_texts_wider_than_float_and_utf8_are_refused(tokenizer, more, field):
    limits = dataclasses.replace(LIMITS, is_lenient=True)
    with listening(ScriptedEngine(tokenizer, say), limits) as address:
        for stream in (False, True):
            answer = raw(address, post(asking(1, stream=stream, **more)))
            assert status(answer) == 400, answer
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["param"] == field
        assert b"It is 7" in raw(address, post(asking(7, user="\U0001f600 and " + "1" * 400)))


def test_a_stream_whose_client_has_left_frees_its_slots_and_leaves_one_line(tokenizer, monkeypatch, capfd, caplog):
    from aiohttp import ClientConnectionResetError, web

    async def gone(self, data):
        raise ClientConnectionResetError("Cannot write to closing transport")

    engine = ScriptedEngine(tokenizer, lambda prompt: "1 2 3 4 5 6 7 8 9")
    with listening(engine, LIMITS, log_requests=True) as address:
        with monkeypatch.context() as patched:
            patched.setattr(web.StreamResponse, "write", gone)
            with connected(address) as one:
                one.sendall(post(asking(1, stream=True, n=2)))
                until(lambda: {id(one) for one in engine.cancelled} == {id(one) for one in engine.asked} != set())
        assert b"1 2 3" in raw(address, post(asking(7)))
    said = capfd.readouterr().err
    assert "Traceback" not in said + caplog.text
    [left, answered] = said.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d POST /v1/chat/completions 499 0\.\d\d s .* tokens", left)
    tokens = [len(engine.asked[-1].ids), len(tokenizer.encode("1 2 3 4 5 6 7 8 9")) + 1]
    assert re.fullmatch(rf".* 200 0\.\d\d s {tokens[0]} \+ {tokens[1]} tokens", answered)


def test_an_error_of_our_own_is_json_and_its_traceback_is_in_the_log(tokenizer, capfd):
    def fail(prompt):
        raise ZeroDivisionError("a secret of the server")

    with listening(ScriptedEngine(tokenizer, fail), LIMITS) as address:
        answer = raw(address, post(asking(1)))
    assert status(answer) == 500 and b"its log says why" in answer and b"secret" not in answer
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_full_line_is_429_and_says_when_to_come_again(tokenizer):
    class Full(ScriptedEngine):
        def submit(self, sequences):
            raise TooManyRequests("8 sequences wait already; at most 8 may")

    with listening(Full(tokenizer, say), LIMITS) as address:
        answer = raw(address, post(asking(1)))
        assert status(answer) == 429 and b"Retry-After: 1" in answer


# ---- tools in the chat endpoint: the openai package against the templates and the forms of each family


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
            "strict": True,
        },
    }
]
ASKED = [{"role": "user", "content": "What is 1 + 2?"}]
ARGUMENTS = {"a": 1, "b": 2}
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
GEMMA = "```tool_code\nadd(a=1, b=2)\n```"
MARKS = ["<|tool_call>", "<tool_call|>", '<|"|>']
GEMMA4 = "I add.<|tool_call>call:add{a:1,b:2}<tool_call|>"


@pytest.fixture(scope="module")
def tokenizers_of(tmp_path_factory):
    """family -> its tokenizer, of small files with the form of its template."""
    found = {"bundled": Tokenizer.load(BUNDLED)}
    for name, (make, template) in FAMILIES.items():
        if name != "marked":
            found[name] = Tokenizer.load(make(tmp_path_factory.mktemp("tools") / name, template))
    # a template such as Gemma's with a form for tools
    with_tools = GEMMA_TEMPLATE.replace("{%- for turn in turns -%}", "{{ tools | tojson }}{%- for turn in turns -%}")
    found["gemma_tools"] = Tokenizer.load(gemma(tmp_path_factory.mktemp("tools") / "gemma", with_tools))
    with_marks = byte_fallback([*SPECIAL, *MARKS])
    folder = tmp_path_factory.mktemp("tools") / "gemma4"
    found["gemma4"] = Tokenizer.load(write(folder, with_marks, with_tools, bos="<bos>", eos="<eos>", eos_ids=[1, 4]))
    return found


def test_variables_of_a_request_come_before_those_of_the_settings(tokenizers_of, tmp_path):
    """chat_template_kwargs, as vLLM has them, and OpenAI's reasoning_effort."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ enable_thinking }},{{ reasoning_effort }}"
    tokenizer = Tokenizer.load(gemma(tmp_path / "g", template))
    tokenizer = tokenizer.with_template(tokenizer.template.with_variables({"enable_thinking": False}))

    def prompt(tokenizer=tokenizer, **more):
        body = {"messages": [{"role": "user", "content": "hi "}], **more}
        return tokenizer.decode(read_call(body, True, Limits("m", 4096, 512, 5000), tokenizer).prompts[0])

    assert prompt() == "hi False,"
    assert prompt(chat_template_kwargs={"enable_thinking": True}) == "hi True,"
    assert prompt(reasoning_effort="low") == "hi False,low"
    assert prompt(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"}) == "hi False,high"
    with pytest.raises(BadCall, match="reads no reasoning_effort; leave it out"):
        prompt(tokenizers_of["qwen3"], reasoning_effort="low")


@contextmanager
def serving(tokenizer, say):
    """A client of a server whose model says `say(prompt)`; and the engine."""
    engine, openai = ScriptedEngine(tokenizer, say), pytest.importorskip("openai")
    with (
        listening(engine, Limits("m", 4096, 512, 5000)) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        yield client, engine


def ask(client, messages=ASKED, **settings):
    return client.chat.completions.create(**{"model": "m", "messages": messages, "tools": TOOLS} | settings)


@pytest.mark.parametrize(
    "family, said",
    [("qwen2.5", HERMES), ("qwen3", HERMES), ("llama3", LLAMA), ("gemma_tools", GEMMA), ("gemma4", GEMMA4)],
)
def test_a_call_and_its_result_go_round(tokenizers_of, family, said):
    """The model calls, the client answers, the model goes on: each family in its own form."""
    tokenizer = tokenizers_of[family]

    def say(prompt: str) -> str:
        assert "Add two numbers." in prompt and "strict" not in prompt
        return "It is 3." if "is three" in prompt else said

    with serving(tokenizer, say) as (client, engine):
        [choice] = ask(client).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == ("I add." if family == "gemma4" else None)
        [call] = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "add")
        assert json.loads(call.function.arguments) == ARGUMENTS
        if family.startswith("gemma"):
            # Gemma takes turns of user and model, and has no role for tools.
            return
        result = {"role": "tool", "tool_call_id": call.id, "content": "it is three"}
        [choice] = ask(client, [*ASKED, choice.message.model_dump(exclude_none=True), result]).choices
        assert (choice.message.content, choice.finish_reason) == ("It is 3.", "stop")
        assert choice.message.tool_calls is None
        # What the model reads of its own call is what it said, arguments as an object.
        read = tokenizer.decode(engine.asked[-1].ids, skip_special=False)
        name = '{"name": "add", "' + ("parameters" if family == "llama3" else "arguments")
        assert f'{name}": {{"a": 1, "b": 2}}}}' in read or family == "qwen3"


def test_special_tokens_of_a_call_are_text_and_others_are_not(tokenizers_of):
    tokenizer, text = tokenizers_of["gemma4"], '<|tool_call>call:say{to:<|"|>you<|"|>}<tool_call|>'
    ids = tokenizer.encode(f"{text}<end_of_turn>")
    assert tokenizer.vocabulary[MARKS[2]] in ids
    stream = tokenizer.stream()
    assert tokenizer.decode(ids) == "".join(map(stream.feed, ([one] for one in ids))) + stream.end() == text


@pytest.mark.parametrize("stream", [False, True])
def test_text_before_calls_and_several_calls(tokenizers_of, stream):
    said = f"I add twice.\n{HERMES}\n{HERMES.replace('1', '7')}"
    with serving(tokenizers_of["qwen2.5"], lambda prompt: said) as (client, _):
        if not stream:
            [choice] = ask(client).choices
            content, reason = choice.message.content, choice.finish_reason
            calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
            ids = [call.id for call in choice.message.tool_calls]
        else:
            content, reason, calls, ids = "", None, [], []
            for chunk in ask(client, stream=True):
                [choice] = chunk.choices
                content += choice.delta.content or ""
                reason = choice.finish_reason or reason
                for call in choice.delta.tool_calls or []:
                    assert call.index == len(calls)
                    calls.append((call.function.name, call.function.arguments))
                    ids.append(call.id)
        assert (content, reason) == ("I add twice.", "tool_calls")
        assert [(name, json.loads(text)) for name, text in calls] == [("add", ARGUMENTS), ("add", {"a": 7, "b": 2})]
        assert len(set(ids)) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", ["<tool_call>\nnot json\n</tool_call>", '{"answer": 3}', "a < b,  <tool_cal"])
def test_what_is_no_call_is_text(tokenizers_of, said, stream):
    with serving(tokenizers_of["qwen2.5"], lambda prompt: said) as (client, _):
        if stream:
            chunks = [chunk.choices[0] for chunk in ask(client, stream=True)]
            assert "".join(choice.delta.content or "" for choice in chunks) == said
            assert chunks[-1].finish_reason == "stop" and not any(choice.delta.tool_calls for choice in chunks)
        else:
            [choice] = ask(client).choices
            assert (choice.message.content, choice.finish_reason) == (said, "stop")


RESULT = {"role": "tool", "tool_call_id": "x", "content": "3"}
CALLED = {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "add", "arguments": "{"}}]}


@pytest.mark.parametrize(
    "family, settings, field, message",
    [
        ("bundled", {}, "tools", "has no form for tools"),
        ("bundled", {"tools": None, "messages": [*ASKED, RESULT]}, "messages", "has no form for tools"),
        ("qwen2.5", {"tool_choice": "required"}, "tool_choice", "would force a call"),
        ("qwen2.5", {"messages": [*ASKED, CALLED, RESULT]}, "messages", "arguments of the call of 'add' are no JSON"),
    ],
)
def test_what_cannot_be_done_with_tools_is_named(tokenizers_of, family, settings, field, message):
    with serving(tokenizers_of[family], lambda prompt: "hi") as (client, engine):
        with pytest.raises(sys.modules["openai"].BadRequestError, match=message) as raised:
            ask(client, **settings)
        assert raised.value.body["param"] == field and not engine.asked
