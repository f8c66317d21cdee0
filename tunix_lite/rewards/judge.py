"""A model as a judge, over HTTP: the server that `base_url` names, and no other, answers
OpenAI-style chat completions. What fails is an error of the reward (rewards.on_error), never a
score of 0."""

import contextlib
import http.client
import json
import os
import re
import string
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from urllib.parse import urlsplit

from tunix_lite.workers.limits import time_limit

# bytes of an answer that are read, and characters of what is wrong that are shown
LONGEST = 1024 * 1024
SHOWN = 200
# statuses of requests that may well succeed when they are made again
TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504)
# errors of a server that cannot be reached, speaks no HTTP, or sends another kind of answer
FAILURES = (
    OSError,
    http.client.HTTPException,
    ValueError,
    LookupError,
    TypeError,
    RecursionError,
)


# A number behind the word, and behind brackets such as `(0 to 10)`; no part of `7,5`, `7 to 9`.
SCORE = (
    r"(?i)score(?:\s*\([^)\n]{0,40}\))?[^\w(-]{0,9}\(?"
    r"(-?\d+(?:\.\d+)?)(?![.,]?\d)(?!\s*(?:to|-|\u2013)\s*\d)"
)
# values that YAML makes of words without quotes
WORDS_OF_YAML = {True: ("true", "yes", "on"), False: ("false", "no", "off")}


class JudgeError(RuntimeError):
    """Raised if the judge could not be asked, or its answer holds no score."""


@dataclass(frozen=True)
class Judge:
    """The score that a model gives a completion, from 0 to 1.

    `prompt` is a text with {completion} and fields of the example. In the answer, `pattern` finds
    the score, and the last place counts: its first group is a number from `lowest` to `highest`,
    which becomes 0 to 1; or, with `scores`, a word with a score of its own.

    Requests that fail are made again, `retries` times, each after twice the time. Raises JudgeError
    when none succeeds, or when the answer holds no score.
    Example: Judge("http://127.0.0.1:8000/v1", "judge", "Rate from 0 to 10: {completion}")."""

    base_url: str  # of the server, as in http://127.0.0.1:8000/v1
    model: str  # its name there
    prompt: str
    system: str = ""  # a message before it; "": none
    pattern: str = SCORE
    lowest: float = 0.0
    highest: float = 10.0
    # words and their scores, without case, as in {"yes": 1, "no": 0}; null: numbers
    scores: dict[str, float] | None = None
    temperature: float = 0.0
    max_tokens: int = 512  # of the judge's answer
    timeout: float = 4.0  # seconds for one request
    retries: int = 1
    backoff: float = 0.5  # seconds before the first retry
    api_key_env: str = ""  # the environment variable that holds a key; "": none is sent

    def __post_init__(self):
        try:
            parts = urlsplit(self.base_url)
            is_address = (
                parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            )
        except ValueError:
            # no port, no host
            is_address = False
        if not is_address or " " in self.base_url or not self.base_url.isprintable():
            raise ValueError(
                f"base_url={self.base_url!r}; write it as http://127.0.0.1:8000/v1"
            )
        try:
            named = {name for _, name, *_ in string.Formatter().parse(self.prompt) if name}
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"pattern={self.pattern!r}: {error}") from error
        except ValueError as error:
            raise ValueError(f"prompt={self.prompt[:SHOWN]!r}: {error}") from error
        if "completion" not in named:
            raise ValueError("prompt has no {completion}: the judge needs to see it")
        if groups < 1:
            raise ValueError(f"pattern={self.pattern!r} has no group (...) around the score")
        if self.scores is None and self.lowest >= self.highest:
            raise ValueError(f"lowest={self.lowest} must be below highest={self.highest}")
        if self.timeout <= 0 or self.retries < 0 or self.backoff < 0 or self.max_tokens < 1:
            raise ValueError(
                "timeout and max_tokens must be above 0, retries and backoff not negative"
            )
        if self.api_key_env and self.api_key_env not in os.environ:
            raise ValueError(f"api_key_env={self.api_key_env}: there is no such variable")
        if self.api_key_env and not (self._key().isascii() and self._key().isprintable()):
            raise ValueError(
                f"api_key_env={self.api_key_env}: the key holds a line break or another character "
                "that no header can hold"
            )

    @property
    def most_seconds(self) -> float:
        """Most seconds that a call may take; rewards.timeout must be above it."""
        waits = self.backoff * (2**self.retries - 1)
        return self.timeout * (self.retries + 1) + waits

    def __call__(self, completion: str, example: dict) -> float:
        try:
            text = self.prompt.format(**{**example, "completion": completion})
        except (KeyError, IndexError, AttributeError) as error:
            fields = ", ".join(map(str, example))[:SHOWN]
            wrong = f"the judge's prompt names {error}; an example has {fields}"
            raise ValueError(wrong) from error
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": [*system, {"role": "user", "content": text}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        answer = self._ask(body)
        matches = [
            match[1] for match in re.finditer(self.pattern, answer) if match[1] is not None
        ]
        if not matches:
            raise JudgeError(f"the judge's answer holds no score: {answer[-SHOWN:]!r}")
        if self.scores is not None:
            scores = {
                name.casefold(): score
                for word, score in self.scores.items()
                for name in (WORDS_OF_YAML[word] if isinstance(word, bool) else [str(word)])
            }
            if matches[-1].casefold() not in scores:
                raise JudgeError(
                    f"the judge's {matches[-1][:SHOWN]!r} is none of {list(scores)}"
                )
            return scores[matches[-1].casefold()]
        try:
            number = float(matches[-1])
        except ValueError as error:
            raise JudgeError(f"the judge's {matches[-1][:SHOWN]!r} is no number") from error
        if not self.lowest <= number <= self.highest:
            wrong = f"the judge's {number:g} is not from {self.lowest:g} to {self.highest:g}"
            raise JudgeError(wrong)
        return (number - self.lowest) / (self.highest - self.lowest)

    def _key(self) -> str:
        # a file that a key was read from ends in a line break
        return os.environ[self.api_key_env].strip()

    def _ask(self, body: dict) -> str:
        """The text of the answer. Raises JudgeError naming the last failure."""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.backoff * 2 ** (attempt - 1))
            try:
                # a server may send its headers as slowly as it likes
                with time_limit(self.timeout, "the answer"):
                    return self._post(body)
            except urllib.error.HTTPError as error:
                message = ""
                with contextlib.suppress(*FAILURES), time_limit(self.timeout, "the answer"):
                    message = error.read(SHOWN).decode(errors="replace")
                failure = f"HTTP {error.code} {error.reason} {message}".strip()
                # another try would get the same answer
                if error.code not in TRANSIENT:
                    break
            except FAILURES as error:
                failure = f"{type(error).__name__}: {error}"[:SHOWN]
        attempts = f"asked {attempt + 1} times" if attempt else "asked once"
        failed = f"the judge at {self.base_url} gave no answer, {attempts}: {failure}"
        # a server may say anything, also what acts on a terminal
        raise JudgeError("".join(c if c.isprintable() else repr(c)[1:-1] for c in failed))

    def _post(self, body: dict) -> str:
        headers = {"Content-Type": "application/json; charset=utf-8"}
        if self.api_key_env:
            headers["Authorization"] = f"Bearer {self._key()}"
        request = urllib.request.Request(
            f"{self.base_url.rstrip('/')}/chat/completions",
            json.dumps(body).encode("utf-8"),
            headers,
        )
        handlers = [_NoRedirect()]
        if urlsplit(self.base_url).hostname in ("127.0.0.1", "localhost", "::1"):
            # no proxy stands between this machine and itself
            handlers.append(urllib.request.ProxyHandler({}))
        opener = urllib.request.build_opener(*handlers)
        # the timeout of a socket begins again with each byte
        deadline = time.monotonic() + self.timeout
        with opener.open(request, timeout=self.timeout) as response:
            said = b""
            # a server that sends a byte now and then takes no longer either
            while part := response.read1(65536):
                said += part
                if len(said) > LONGEST:
                    raise ValueError(f"the answer has more than {LONGEST:,} bytes")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the answer took more than {self.timeout:g} seconds")
        text = json.loads(said)["choices"][0]["message"]["content"]
        if not isinstance(text, str):
            raise TypeError(f"the content of the answer is {type(text).__name__}, not a text")
        return text


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: a key must go to the named server alone."""

    def redirect_request(self, *_: object) -> None:
        return None
