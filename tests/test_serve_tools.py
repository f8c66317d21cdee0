"""Tools in the chat endpoint: the openai package against the templates and the forms of each family, without a model."""

import json
from contextlib import contextmanager

import pytest
from scripted_engine import ScriptedEngine, listening
from test_tokenizer import FAMILIES, GEMMA_TEMPLATE, byte_fallback, gemma, write
from test_tokenizer import GEMMA as SPECIAL

from tunix_lite.models.source import BUNDLED
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.serving.bad_call import BadCall
from tunix_lite.serving.calls import Limits, read_call

openai = pytest.importorskip("openai")
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
    engine = ScriptedEngine(tokenizer, say)
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
@pytest.mark.parametrize(
    "said",
    [
        "No call, a < b, and {a} here.\n",
        "<tool_call>\nnot json\n</tool_call>",
        '{"answer": 3}',
        "```python\nprint(1)\n```",
        "  <tool_cal",
    ],
)
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
        ("gemma", {}, "tools", "has no form for tools"),
        ("bundled", {"tools": None, "messages": [*ASKED, RESULT]}, "messages", "has no form for tools"),
        ("qwen2.5", {"tool_choice": "required"}, "tool_choice", "would force a call"),
        ("qwen2.5", {"tool_choice": {"type": "function"}}, "tool_choice", "auto or none"),
        ("qwen2.5", {"parallel_tool_calls": False}, "parallel_tool_calls", "take the first call"),
        ("qwen2.5", {"tools": [{"type": "web_search"}]}, "tools", "a tool is"),
        ("qwen2.5", {"tools": "add"}, "tools", "a list of functions"),
        ("qwen2.5", {"messages": [*ASKED, CALLED, RESULT]}, "messages", "arguments of the call of 'add' are no JSON"),
        ("qwen2.5", {"messages": [*ASKED, {"role": "assistant", "tool_calls": [3]}]}, "messages", "with a name"),
        ("qwen2.5", {"messages": [{"role": "user"}]}, "messages", "content of a message is text"),
    ],
)
def test_what_cannot_be_done_with_tools_is_named(tokenizers_of, family, settings, field, message):
    with serving(tokenizers_of[family], lambda prompt: "hi") as (client, engine):
        with pytest.raises(openai.BadRequestError, match=message) as raised:
            ask(client, **settings)
        assert raised.value.body["param"] == field and not engine.asked
