"""Requests of a client: the JSON bodies of /v1/completions and /v1/chat/completions, checked. Each
field is used, or listed in _IGNORED, or an error that names it; `top_k`, `min_p` and
`return_token_ids` are vLLM's."""

import secrets
from dataclasses import dataclass, field, fields
from typing import Any

from tunix_lite.basics.plain_text import shown
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.rollout.live import DrawSettings
from tunix_lite.serving.bad_call import BadCall
from tunix_lite.serving.fields import between, checked_number, read
from tunix_lite.serving.tools import tools_of, with_tool_messages

# Fields that describe the caller, not the answer.
_IGNORED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    "parallel_tool_calls",
}
# Fields that do nothing at one value, which clients send by themselves; others are refused.
_ONLY = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "best_of": 1,
    "top_logprobs": 0,
    "echo": False,
    "suffix": None,
    "response_format": {"type": "text"},
    "modalities": ["text"],
}
_MOST_STOPS = 4
_MOST_CHOICES = 128
# Bytes of a prompt that are read whatever the server takes: they cost nothing, and where prompts
# are short, roles and names of messages count.
_FREE_BYTES = 2**14


@dataclass(frozen=True)
class Limits:
    """The bounds of one request."""

    model_name: str
    # tokens of a prompt, of a completion, and of both together
    max_prompt_length: int
    max_new_tokens: int
    max_length: int
    # completions of one request, over all its prompts: what may run and wait at once
    max_sequences: int = 288
    # for agents written for another model: any name of a model will do, and max_tokens above what
    # there is room for is what there is room for
    is_lenient: bool = False


@dataclass(frozen=True)
class _CompletionBody:
    """The fields that both endpoints have. What needs the limits of the server is checked later."""

    model: Any = None
    n: int = between(1, _MOST_CHOICES, 1)
    max_tokens: Any = None
    temperature: float = between(0.0, 2.0, 1.0)
    top_p: float = between(0.0, 1.0, 1.0)
    top_k: int = between(0, 2**31 - 1, 0)
    min_p: float = between(0.0, 1.0, 0.0)
    seed: int | None = between(0, 2**32 - 1, None)
    stop: Any = ()
    stream: bool = False
    stream_options: dict = field(default_factory=dict)
    return_token_ids: bool = False

    def __post_init__(self):
        if self.top_p == 0:
            raise BadCall("top_p=0; it is above 0, and temperature=0 is greedy", "top_p")


@dataclass(frozen=True)
class _TextBody(_CompletionBody):
    """The body of /v1/completions."""

    prompt: Any = None
    # 0 or 1: both are those of the tokens themselves, never of others
    logprobs: int | None = between(0, 1, None)


@dataclass(frozen=True)
class _ChatBody(_CompletionBody):
    """The body of /v1/chat/completions."""

    messages: Any = None
    max_completion_tokens: Any = None
    logprobs: bool = False
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    chat_template_kwargs: dict = field(default_factory=dict)
    reasoning_effort: Any = None


@dataclass(frozen=True)
class Call:
    """A checked request: its body, and what it comes to with the tokenizer and the limits."""

    body: _TextBody | _ChatBody
    model: str
    prompts: list[list[int]]  # the tokens of each prompt; a chat has one
    # of every choice; its generation is that of the choice
    draw: DrawSettings
    max_tokens: int
    stop: tuple[str, ...]
    is_text: bool = True  # the prompts were text or messages, and not tokens
    reads_calls: bool = False  # calls of tools are read out of what is said

    @property
    def is_chat(self) -> bool:
        return isinstance(self.body, _ChatBody)

    @property
    def logprobs(self) -> bool:
        """The log-probability of each token is in the answer."""
        if self.is_chat:
            return self.body.logprobs
        return self.body.logprobs is not None


def read_call(body: object, is_chat: bool, limits: Limits, tokenizer: Tokenizer) -> Call:
    """The request in a body. Raises BadCall, naming the field."""
    checked = read(_ChatBody if is_chat else _TextBody, body)
    model = limits.model_name if checked.model is None else checked.model
    if model != limits.model_name and not (limits.is_lenient and isinstance(model, str)):
        raise BadCall(
            f"there is no model {shown(model)}; this server has {limits.model_name!r}",
            "model",
            "model_not_found",
        )

    of_prompt = "messages" if is_chat else "prompt"
    read_prompts = _chat_prompt if is_chat else _text_prompts
    try:
        prompts, is_text, reads_calls = read_prompts(checked, tokenizer, limits)
    except BadCall:
        raise
    except (ValueError, TypeError) as error:
        # Of the template or the tokenizer; clients need not know the server's folders.
        message = str(error).replace(f"{tokenizer.folder}/", "")
        raise BadCall(message, of_prompt) from error
    if (longest := max(map(len, prompts))) > limits.max_prompt_length:
        raise BadCall(
            f"the prompt has {longest} tokens; this server takes up to {limits.max_prompt_length}: "
            f"start it with generation.max_prompt_length={longest}",
            of_prompt,
            "context_length_exceeded",
        )

    # The tokens of a completion, at most.
    most = min(limits.max_new_tokens, limits.max_length - longest)
    # 16 is the default that the API has for texts.
    max_tokens = most if is_chat else min(16, most)
    for name in ("max_tokens", "max_completion_tokens"):
        value = getattr(checked, name, None)
        if value is not None:
            high = 2**31 - 1 if limits.is_lenient else most
            max_tokens = min(checked_number(name, value, int, 1, high), most)
    stop = [checked.stop] if isinstance(checked.stop, str) else checked.stop
    is_list = isinstance(stop, list | tuple) and len(stop) <= _MOST_STOPS
    if not is_list or not all(isinstance(one, str) and one for one in stop):
        raise BadCall(
            f"stop is a text, or a list of up to {_MOST_STOPS} texts, none empty", "stop"
        )

    known = {*_IGNORED, *(one.name for one in fields(checked))}
    for name, value in body.items():
        if name not in known and value is not None and value != _ONLY.get(name):
            what = f"{name} is no field that this server knows"
            if name in _ONLY:
                what = f"{name}={shown(value)} is not supported"
            raise BadCall(f"{what}; leave it out", name)
    draw = DrawSettings(
        temperature=checked.temperature,
        top_p=checked.top_p,
        top_k=checked.top_k,
        min_p=checked.min_p,
        seed=secrets.randbits(31) if checked.seed is None else checked.seed,
    )
    return Call(checked, model, prompts, draw, max_tokens, tuple(stop), is_text, reads_calls)


def _check_count(prompts: int, choices: int, limits: Limits) -> None:
    """Raises BadCall for more completions than the server ever holds."""
    count = prompts * choices
    if count > limits.max_sequences:
        raise BadCall(
            f"n={choices} for each of {prompts} prompts is {count} completions; this server takes "
            f"up to {limits.max_sequences} in one request: send several",
            "n" if prompts == 1 else "prompt",
        )


def _check_bytes(texts: object, limits: Limits, tokenizer: Tokenizer, field: str) -> None:
    """Raises BadCall for texts that cannot be short enough: a tokenizer takes long to read them."""
    most = max(limits.max_prompt_length * tokenizer.longest_token, _FREE_BYTES)
    size = 0
    # no recursion: a client may nest as deep as it likes
    left = [texts]
    while left:
        one = left.pop()
        if isinstance(one, str):
            size += len(one.encode(errors="surrogatepass"))
        elif isinstance(one, dict):
            left += [*one, *one.values()]
        elif isinstance(one, list):
            left += one
    if size > most:
        raise BadCall(
            f"the prompt has {size} bytes; this server reads up to {most}, as it takes "
            f"{limits.max_prompt_length} tokens and no token has more than "
            f"{tokenizer.longest_token} bytes",
            field,
            "context_length_exceeded",
        )


def _chat_prompt(
    body: _ChatBody, tokenizer: Tokenizer, limits: Limits
) -> tuple[list[list[int]], bool, bool]:
    """The tokens of a conversation, that it is text, and whether the model may call tools."""
    # How many completions there are is known before anything is made of the prompt.
    _check_count(1, body.n, limits)
    if not tokenizer.has_chat_template:
        raise BadCall("this model has no chat template; use /v1/completions", "messages")
    if not isinstance(body.messages, list) or not body.messages:
        raise BadCall("messages is a list of at least one message", "messages")
    variables = body.chat_template_kwargs
    for name in variables:
        if name.endswith("_token"):
            raise BadCall(
                f"chat_template_kwargs: {shown(name)} is of the tokenizer; leave it out",
                "chat_template_kwargs",
            )
    if body.reasoning_effort is not None:
        if not tokenizer.template.names("reasoning_effort"):
            raise BadCall(
                "the chat template of this model reads no reasoning_effort; leave it out",
                "reasoning_effort",
            )
        variables = {"reasoning_effort": body.reasoning_effort, **variables}
    of_tools = [body.tools, body.tool_choice, body.parallel_tool_calls]
    _check_bytes([body.messages, variables, of_tools], limits, tokenizer, "messages")
    tools = tools_of(*of_tools, tokenizer)
    if tools:
        variables = {**variables, "tools": tools}

    # Templates read the text of a message as one string.
    messages = []
    for message in body.messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadCall(
                f"a message is an object with a role; this one is {shown(message)}", "messages"
            )
        parts = message.get("content")
        if isinstance(parts, list):
            if not all(
                isinstance(part, dict) and part.get("type") == "text" for part in parts
            ):
                raise BadCall(
                    "a part of a message is of type text; this model reads no other",
                    "messages",
                )
            text = "".join(str(part.get("text", "")) for part in parts)
            message = message | {"content": text}
        messages.append(message)
    prompt = tokenizer.prompt(with_tool_messages(messages, tokenizer), **variables)
    return [prompt], True, bool(tools)


def _text_prompts(
    body: _TextBody, tokenizer: Tokenizer, limits: Limits
) -> tuple[list[list[int]], bool, bool]:
    """The prompts of /v1/completions: a text, a list of texts, of tokens, or of lists of tokens;
    whether all of them were text; and that no tool is called."""
    inputs = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not isinstance(inputs, list) or not inputs:
        raise BadCall("prompt is a text, or a list of texts or of token ids", "prompt")
    if all(type(value) is int for value in inputs):
        inputs = [inputs]
    _check_count(len(inputs), body.n, limits)
    is_text = all(isinstance(one, str) for one in inputs)
    prompts = []
    for one in inputs:
        if isinstance(one, str):
            _check_bytes(one, limits, tokenizer, "prompt")
            # As the model was trained to see a text: with the tokens it starts with.
            one = [*tokenizer.start_ids, *tokenizer.encode(one)]
        if not isinstance(one, list) or not all(type(token) is int for token in one):
            raise BadCall(f"prompt holds {shown(one)}, neither text nor token ids", "prompt")
        if not one or min(one) < 0 or max(one) >= tokenizer.num_tokens:
            ids = f"token ids from 0 to {tokenizer.num_tokens - 1}"
            raise BadCall(f"a prompt has at least one token; {ids} are known", "prompt")
        prompts.append(one)
    return prompts, is_text, False
