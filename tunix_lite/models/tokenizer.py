"""Text <-> tokens: a `tokenizer.json`, its chat template, and the set of tokens that end a sequence."""

import json
from dataclasses import dataclass
from pathlib import Path

import jinja2.sandbox
import tokenizers


@dataclass(frozen=True)
class Tokenizer:
    """What a folder in Hugging Face layout says about text. Make one with `Tokenizer.load`."""

    backend: tokenizers.Tokenizer
    template: jinja2.Template  # the chat template
    special: dict[str, str]  # bos_token, eos_token, pad_token ... as the template expects them
    eos_ids: tuple[int, ...]  # any of these ends a completion (Gemma 3: 1 and 106)
    pad_id: int

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Reads tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json.

        Raises ValueError naming the file that is missing or says too little.
        """
        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(f"{folder} has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{folder / 'tokenizer.json'} cannot be read ({error})") from error
        config = _json(folder / "tokenizer_config.json")
        template_file = folder / "chat_template.jinja"
        template = template_file.read_text() if template_file.is_file() else config.get("chat_template")
        if not isinstance(template, str):
            raise ValueError(
                f"{folder} has no chat template: neither chat_template.jinja nor one in tokenizer_config.json"
            )
        special = {k: _token_text(v) for k, v in config.items() if k.endswith("_token") and v}
        eos = _json(folder / "generation_config.json").get(
            "eos_token_id", _json(folder / "config.json").get("eos_token_id")
        )
        if eos is None and "eos_token" in special:
            eos = backend.token_to_id(special["eos_token"])
        if eos is None or eos == []:
            raise ValueError(f"{folder} names no end-of-sequence token in generation_config.json or config.json")
        try:
            compiled = _environment().from_string(template)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template in {folder} has an error in line {error.lineno}: {error}") from error
        pad_id = backend.token_to_id(special["pad_token"]) if "pad_token" in special else 0
        return cls(backend, compiled, special, tuple(eos) if isinstance(eos, list) else (eos,), pad_id)

    def encode(self, text: str) -> list[int]:
        """Exactly the tokens of `text`: special tokens written out in it are recognised, none is added."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids) -> str:
        """The text of the tokens, special tokens left out."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def chat(self, messages: list[dict], add_generation_prompt: bool = True) -> str:
        """The conversation as the model was trained to see it."""
        return self.template.render(messages=messages, add_generation_prompt=add_generation_prompt, **self.special)

    def prompt(self, text: str) -> list[int]:
        """The tokens of one user message, ready for the model to answer. Raises ValueError if there is a second BOS."""
        ids = self.encode(self.chat([{"role": "user", "content": text}]))
        bos = self.special.get("bos_token")
        if bos is not None and ids.count(self.backend.token_to_id(bos)) > 1:
            raise ValueError(f"the chat template and the message {text!r} together hold more than one {bos}")
        return ids

    def demonstration(self, text: str, completion: str) -> list[int]:
        """The tokens to say after `prompt(text)`: those of the completion and the one that ends the turn."""
        asked = [{"role": "user", "content": text}]
        before = self.chat(asked)
        whole = self.chat([*asked, {"role": "assistant", "content": completion}], add_generation_prompt=False)
        if not whole.startswith(before):
            raise ValueError("the chat template writes an answered conversation differently from its prompt")
        ids = self.encode(whole[len(before) :])
        ends = [i for i, token in enumerate(ids) if token in self.eos_ids]
        return ids[: ends[0] + 1] if ends else [*ids, self.eos_ids[0]]


def _environment() -> jinja2.Environment:
    """What chat templates expect to find, and no more: they come with weights from anywhere."""

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    return environment


def _json(path: Path) -> dict:
    try:
        return json.loads(path.read_text()) if path.is_file() else {}
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error})") from error


def _token_text(value) -> str:
    return value["content"] if isinstance(value, dict) else value
