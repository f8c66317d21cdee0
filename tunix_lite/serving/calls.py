"""What a client asks for: the JSON bodies of /v1/completions and /v1/chat/completions, checked.

Every field of the protocol is either used, or without effect here and listed in IGNORED, or an
error that names it. Field names are those of the OpenAI API; `top_k`, `min_p` and
`return_token_ids` are additions that vLLM has, too.
"""

import math
import secrets
from dataclasses import dataclass
from typing import Any

from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.plain_text import shown
from tunix_lite.rollout.live import DrawSettings
from tunix_lite.rollout.live_programs import MOST_TOP
from tunix_lite.serving.bad_call import BadCall
from tunix_lite.serving.tools import tools_of, with_tool_messages

# Fields that describe the caller, not the answer.
IGNORED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    "parallel_tool_calls",
}
# Fields that do nothing at one value, which clients send by themselves; others are refused.
ONLY = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "best_of": 1,
    "suffix": None,
    "response_format": {"type": "text"},
    "modalities": ["text"],
}
MOST_STOPS = 4
MOST_CHOICES = 128


@dataclass(frozen=True)
class Limits:
    """What one request may ask for.

    Example: Limits("bundled", max_prompt_length=2048, max_new_tokens=512, max_length=2560).
    """

    model_name: str
    # tokens of a prompt, of a completion, and of both together
    max_prompt_length: int
    max_new_tokens: int
    max_length: int
    # for agents written for another model: any name of a model will do, and max_tokens above what
    # there is room for is what there is room for
    is_lenient: bool = False


@dataclass(frozen=True)
class Call:
    """A checked request.

    Example: of {"model": "bundled", "messages": [{"role": "user", "content": "hi"}]} the prompts
    are the tokens of that conversation, and there is one choice.
    """

    is_chat: bool
    model: str
    # the tokens of each prompt; a chat has one
    prompts: list[list[int]]
    # completions of each prompt
    choices: int
    # of every choice; its generation is that of the choice
    draw: DrawSettings
    max_tokens: int
    stop: tuple[str, ...]
    stream: bool
    # a last piece of a stream holds the numbers of tokens
    include_usage: bool
    # the log-probability of each token
    logprobs: bool
    # the tokens themselves
    token_ids: bool
    # the prompt before each completion (/v1/completions only)
    echo: bool
    # the prompts were text or messages, and not tokens
    is_text: bool = True
    # calls of tools are read out of what is said
    reads_calls: bool = False


class _Fields:
    """The fields of a body, each taken once."""

    def __init__(self, body: Any):
        if not isinstance(body, dict):
            raise BadCall(f"the body is {shown(body)}, not a JSON object")
        self._left = dict(body)

    def take(self, name: str, default: Any = None) -> Any:
        """The field, or the default where it is missing or null."""
        value = self._left.pop(name, None)
        return default if value is None else value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.take(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not low <= value <= high:
            raise BadCall(f"{name}={shown(value)}; it is a number from {low:g} to {high:g}", name)
        return float(value)

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self.take(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise BadCall(f"{name}={shown(value)}; it is a whole number from {low} to {high}", name)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise BadCall(f"{name}={shown(value)}; it is true or false", name)
        return value

    def end(self) -> None:
        """Raises BadCall for a field that nothing has taken."""
        for name, value in self._left.items():
            if name in IGNORED or value is None:
                continue
            if name in ONLY and value == ONLY[name]:
                continue
            if name in ONLY:
                raise BadCall(f"{name}={shown(value)} is not supported; leave it out", name)
            raise BadCall(f"{name} is no field that this server knows; leave it out", name)


def read_call(body: Any, is_chat: bool, limits: Limits, tokenizer: Tokenizer) -> Call:
    """The request in a body. Raises BadCall, naming the field."""
    fields = _Fields(body)
    model = fields.take("model", limits.model_name)
    if model != limits.model_name and not (limits.is_lenient and isinstance(model, str)):
        message = f"there is no model {shown(model)}; this server has {limits.model_name!r}"
        raise BadCall(message, "model", "model_not_found")

    # The prompt.
    is_text = True
    reads_calls = False
    if is_chat:
        prompt, reads_calls = _chat_prompt(fields, tokenizer)
        prompts = [prompt]
    else:
        prompts, is_text = _text_prompts(fields, tokenizer)
    _check_lengths(prompts, limits, "messages" if is_chat else "prompt")

    # What is sampled.
    choices = fields.integer("n", 1, 1, MOST_CHOICES)
    max_tokens = _max_tokens(fields, is_chat, limits, max(map(len, prompts)))
    logprobs, top_logprobs = _logprobs(fields, is_chat)
    draw = DrawSettings(
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=_top_p(fields),
        top_k=fields.integer("top_k", 0, 0, 2**31 - 1),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        seed=fields.integer("seed", secrets.randbits(31), 0, 2**32 - 1),
        top_logprobs=top_logprobs,
    )

    # How it is answered.
    stream = fields.flag("stream")
    options = fields.take("stream_options", {})
    if not isinstance(options, dict):
        raise BadCall(f"stream_options={shown(options)}; it is an object", "stream_options")
    call = Call(
        is_chat=is_chat,
        model=model,
        prompts=prompts,
        choices=choices,
        draw=draw,
        max_tokens=max_tokens,
        stop=_stop(fields),
        stream=stream,
        include_usage=stream and bool(options.get("include_usage")),
        logprobs=logprobs,
        token_ids=fields.flag("return_token_ids"),
        echo=not is_chat and fields.flag("echo"),
        is_text=is_text,
        reads_calls=reads_calls,
    )
    fields.end()
    return call


def _check_lengths(prompts: list[list[int]], limits: Limits, field: str) -> None:
    """Raises BadCall for a prompt with more tokens than the server takes."""
    for prompt in prompts:
        if len(prompt) > limits.max_prompt_length:
            message = (
                f"the prompt has {len(prompt)} tokens; this server takes up to "
                f"{limits.max_prompt_length}: start it with generation.max_prompt_length="
                f"{len(prompt)}"
            )
            raise BadCall(message, field, "context_length_exceeded")


def _chat_prompt(fields: _Fields, tokenizer: Tokenizer) -> tuple[list[int], bool]:
    """The tokens of a conversation, and whether the model may call tools."""
    if not tokenizer.has_chat_template:
        raise BadCall("this model has no chat template; use /v1/completions", "messages")
    messages = fields.take("messages")
    if not isinstance(messages, list) or not messages:
        raise BadCall("messages is a list of at least one message", "messages")
    variables = fields.take("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise BadCall("chat_template_kwargs is an object", "chat_template_kwargs")
    asked = (fields.take(name) for name in ("tools", "tool_choice", "parallel_tool_calls"))
    tools = tools_of(*asked, tokenizer)
    if tools:
        variables = {**variables, "tools": tools}
    messages = with_tool_messages([_message(one) for one in messages], tokenizer)
    try:
        return tokenizer.prompt(messages, **variables), bool(tools)
    except (ValueError, TypeError) as error:
        raise BadCall(str(error), "messages") from error


def _message(message: Any) -> dict:
    """A message with its text as one string, which templates read."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadCall(
            f"a message is an object with a role; this one is {shown(message)}", "messages"
        )
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise BadCall(
                "a part of a message is of type text; this model reads no other", "messages"
            )
        texts.append(str(part.get("text", "")))
    return message | {"content": "".join(texts)}


def _text_prompts(fields: _Fields, tokenizer: Tokenizer) -> tuple[list[list[int]], bool]:
    """The prompts of /v1/completions: a text, a list of texts, of tokens, or of lists of tokens;
    and whether all of them were text."""
    asked = fields.take("prompt")
    if isinstance(asked, str):
        asked = [asked]
    if not isinstance(asked, list) or not asked:
        raise BadCall("prompt is a text, or a list of texts or of token ids", "prompt")
    if all(_is_token(one) for one in asked):
        asked = [asked]
    is_text = all(isinstance(one, str) for one in asked)
    prompts = []
    for one in asked:
        if isinstance(one, str):
            try:
                # As the model was trained to see a text: with the tokens it starts with.
                one = [*tokenizer.start_ids, *tokenizer.encode(one)]
            except ValueError as error:
                raise BadCall(str(error), "prompt") from error
        is_tokens = isinstance(one, list) and all(_is_token(token) for token in one)
        if not is_tokens:
            raise BadCall(f"prompt holds {shown(one)}, neither text nor token ids", "prompt")
        if not one:
            raise BadCall("a prompt has at least one token", "prompt")
        most = len(tokenizer.vocabulary)
        if not all(0 <= token < most for token in one):
            raise BadCall(f"prompt: token ids are 0 to {most - 1}", "prompt")
        prompts.append(one)
    return prompts, is_text


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _max_tokens(fields: _Fields, is_chat: bool, limits: Limits, longest_prompt: int) -> int:
    """The most tokens of a completion, after a prompt of this length."""
    most = min(limits.max_new_tokens, limits.max_length - longest_prompt)
    default = most if is_chat else min(16, most)
    high = 2**31 - 1 if limits.is_lenient else most
    found = fields.integer("max_tokens", default, 1, high)
    if is_chat:
        found = fields.integer("max_completion_tokens", found, 1, high)
    return min(found, most)


def _logprobs(fields: _Fields, is_chat: bool) -> tuple[bool, int]:
    """Whether log-probabilities are asked for, and of how many of the likeliest tokens."""
    if not is_chat:
        asked = fields.take("logprobs")
        if asked is None:
            return False, 0
        if not _is_token(asked) or not 0 <= asked <= MOST_TOP:
            raise BadCall(f"logprobs={shown(asked)}; it is 0 to {MOST_TOP}", "logprobs")
        return True, asked
    logprobs = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, 0, MOST_TOP)
    if top and not logprobs:
        raise BadCall("top_logprobs needs logprobs=true", "top_logprobs")
    return logprobs, top


def _top_p(fields: _Fields) -> float:
    top_p = fields.number("top_p", 1.0, 0.0, 1.0)
    if top_p == 0:
        raise BadCall("top_p=0; it is above 0, and temperature=0 is greedy", "top_p")
    return top_p


def _stop(fields: _Fields) -> tuple[str, ...]:
    stop = fields.take("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    is_list = isinstance(stop, list) and all(isinstance(text, str) and text for text in stop)
    if not is_list or len(stop) > MOST_STOPS:
        raise BadCall(f"stop is a text, or a list of up to {MOST_STOPS} texts, none empty", "stop")
    return tuple(stop)
