"""A task: where examples come from, how they are asked, how they are judged."""

import inspect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import numpy as np

from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.rewards.math import correct, final_answer
from tunix_lite.tasks.sources import batch_at, fitting_batch_at
from tunix_lite.types import Metrics, Prompts, Rollout


@dataclass(frozen=True)
class Reward:
    """A reward function and what it counts in the total."""

    fn: Callable  # (completion text, example) -> number
    weight: float = 1.0  # factor in the sum of rewards


@dataclass(frozen=True)
class TaskConfig:
    """A task as YAML writes it: plain functions and texts, no tokenizer yet."""

    source: Any  # has `train` and `held_out`, sequences of examples (tunix_lite.tasks.sources)
    prompt: str  # the user's message; {names} are fields of the example
    rewards: dict[str, Reward]  # by the name under which they are logged
    correct: Callable = correct  # (completion, example) -> 1 if right: eval/accuracy and the marks on samples
    extract: Callable = final_answer  # completion -> the answer as text or None, for display

    def __post_init__(self):
        if not self.rewards:
            raise ValueError("rewards is empty: name at least one reward function")
        if taken := {"mean", "std", "groups_that_agree"} & self.rewards.keys():
            raise ValueError(f"a reward cannot be called {taken.pop()!r}: the metric of that name means something else")
        calls = {f"rewards.{name}.fn": (reward.fn, ("text", {})) for name, reward in self.rewards.items()}
        calls |= {"correct": (self.correct, ("text", {})), "extract": (self.extract, ("text",))}
        for name, (fn, arguments) in calls.items():
            try:
                inspect.signature(fn).bind(*arguments)
            except TypeError as error:
                given = "(completion, example)" if len(arguments) == 2 else "(completion)"
                raise ValueError(f"{name} is called with {given} and its settings: {error}") from error


@dataclass(frozen=True)
class Judged:
    """Completions as text, and what they are worth. One entry per completion."""

    prompts: list[str]  # the user's messages
    completions: list[str]
    rewards: np.ndarray  # [B] float64, the weighted sum
    correct: np.ndarray  # [B] bool
    extracted: list[str | None]
    metrics: Metrics


@dataclass(frozen=True)
class Task:
    """All that an algorithm may ask of a task. `max_*` are the widths, in tokens, of what it makes."""

    config: TaskConfig
    tokenizer: Tokenizer
    max_prompt_length: int
    max_new_tokens: int
    long_prompts: str = "error"  # a longer prompt: error; truncate: keep its last tokens; drop: take another example

    def batch(self, batch_size: int, seed: int, step: int) -> tuple[list[dict], int]:
        """Training examples number `step`, and how many were dropped on the way to them."""
        train = self.config.source.train
        if self.long_prompts != "drop":
            return batch_at(train, batch_size, seed, step), 0
        return fitting_batch_at(train, batch_size, seed, step, self._length, self.max_prompt_length)

    def held_out(self, count: int) -> list[dict]:
        """The first `count` held-out examples, of those that fit if others are dropped. ValueError if too few."""
        examples = self.config.source.held_out
        if len(examples) < count:
            raise ValueError(f"evaluation.num_examples={count}, but the held-out set has {len(examples)}")
        if self.long_prompts != "drop":
            return [examples[i] for i in range(count)]
        everything = (examples[i] for i in range(len(examples)))
        fitting = list(islice((e for e in everything if self._length(e) <= self.max_prompt_length), count))
        if len(fitting) < count:
            raise ValueError(
                f"evaluation.num_examples={count}, but of {len(examples)} held-out prompts {len(fitting)} fit "
                f"generation.max_prompt_length={self.max_prompt_length}; lower the one or raise the other"
            )
        return fitting

    def ask(self, example: dict) -> str:
        """The user's message for an example."""
        try:
            return self.config.prompt.format(**example)
        except KeyError as error:
            raise ValueError(f"task.prompt names {error}, but an example has {', '.join(example)}") from error
        except (AttributeError, IndexError, TypeError) as error:
            wrong = f"task.prompt={self.config.prompt!r} does not fit the example {example} ({error})"
            raise ValueError(f"{wrong}; write {{name}} for a field, {{{{ for a brace") from error

    def prompts(self, examples: list[dict]) -> Prompts:
        """Left-padded to `max_prompt_length`. A longer prompt loses its beginning, or is a ValueError naming it."""
        rows = [self._tokens(example) for example in examples]
        width = self.max_prompt_length
        if self.long_prompts == "truncate":
            rows = [row[-width:] for row in rows]
        for example, row in zip(examples, rows):
            if len(row) > width:
                raise ValueError(
                    f"the prompt {self.ask(example)!r} has {len(row)} tokens, more than "
                    f"generation.max_prompt_length={width}; raise it to at least {len(row)}, "
                    "or set generation.long_prompts=truncate or drop"
                )
        tokens = np.full((len(rows), width), self.tokenizer.pad_id, np.int32)
        token_mask = np.zeros((len(rows), width), bool)
        for i, row in enumerate(rows):
            tokens[i, width - len(row) :] = row
            token_mask[i, width - len(row) :] = True
        return Prompts(tokens, token_mask)

    def truncated(self, examples: list[dict]) -> int:
        """How many prompts are longer than `max_prompt_length`. The repeats of an example, a group, are one prompt."""
        return sum(self._length(next(group)) > self.max_prompt_length for _, group in groupby(examples, key=id))

    def demonstrations(self, examples: list[dict]):
        """tokens, token_mask, completion_mask, [B, T] each: prompts, then the `completion` of each example."""
        prompts = self.prompts(examples)
        shape = (len(examples), self.max_new_tokens)
        tokens, mask = np.full(shape, self.tokenizer.pad_id, np.int32), np.zeros(shape, bool)
        for i, example in enumerate(examples):
            if "completion" not in example:
                raise ValueError(f"an example for sft needs a `completion`; this one has {', '.join(example)}")
            row = self.tokenizer.demonstration(self.ask(example), example["completion"])
            if len(row) > self.max_new_tokens:
                raise ValueError(
                    f"the completion {example['completion']!r} has {len(row)} tokens, more than "
                    f"generation.max_new_tokens={self.max_new_tokens}; raise it to at least {len(row)}"
                )
            tokens[i, : len(row)], mask[i, : len(row)] = row, True
        none = np.zeros_like(prompts.token_mask)
        return (
            np.concatenate([prompts.tokens, tokens], axis=1),
            np.concatenate([prompts.token_mask, mask], axis=1),
            np.concatenate([none, mask], axis=1),
        )

    def judging(self, examples: list[dict]) -> "Judging":
        """Judges the completions of `examples`, one of each, as they come."""
        return Judging(self, examples)

    def judge(self, examples: list[dict], rollout: Rollout) -> Judged:
        """Every completion as text, its rewards, and their metrics."""
        return self.judging(examples).judged(rollout)

    def _tokens(self, example: dict) -> list[int]:
        row = self.tokenizer.prompt(self.ask(example))
        if not row:
            raise ValueError(f"the prompt of the example {example} has no tokens; task.prompt={self.config.prompt!r}")
        return row

    def _length(self, example: dict) -> int:
        return len(self._tokens(example))


class Judging:
    """Verdicts that are reached one by one. Rewards run where `see` is called, so they need not be thread-safe."""

    def __init__(self, task: Task, examples: list[dict]):
        self.task, self.examples = task, examples
        self.seen: dict[int, tuple[str, dict[str, float], bool]] = {}  # row -> text, rewards, whether it is right
        self.seconds = 0.0

    def see(self, row: int, tokens) -> None:
        """Judges a completion that has ended."""
        began = time.perf_counter()
        config, example = self.task.config, self.examples[row]
        text = self.task.tokenizer.decode(tokens)
        rewards = {name: float(reward.fn(text, example)) for name, reward in config.rewards.items()}
        for name, value in rewards.items():
            if not math.isfinite(value):
                raise ValueError(f"reward {name!r} is {value} for the completion {text!r}")
        self.seen[row] = text, rewards, config.correct(text, example) > 0
        self.seconds += time.perf_counter() - began

    def judged(self, rollout: Rollout) -> Judged:
        """All of them, those included that `see` was not called for."""
        tokens, mask = np.asarray(rollout.tokens), np.asarray(rollout.completion_mask)
        for row in range(len(self.examples)):
            if row not in self.seen:
                self.see(row, tokens[row][mask[row]])
        completions, rewards, right = zip(*(self.seen[row] for row in range(len(self.examples))))
        config = self.task.config
        each = {name: np.array([values[name] for values in rewards]) for name in config.rewards}
        total_B = sum(config.rewards[name].weight * values for name, values in each.items())
        lengths_B = mask.sum(axis=1)
        metrics = {
            "reward/mean": float(total_B.mean()),
            "reward/std": float(total_B.std()),
            **{f"reward/{name}": float(values.mean()) for name, values in each.items()},
            "completions/correct": float(np.mean(right)),
            "completions/mean_length": float(lengths_B.mean()),
            "completions/max_length": int(lengths_B.max()),
            "completions/truncated": float(1 - np.asarray(rollout.finished).mean()),
            "time/rewards": self.seconds,
        }
        if self.task.long_prompts == "truncate":
            full_B = np.asarray(rollout.token_mask)[:, 0]  # only a prompt that fills its row can have been cut
            metrics["prompts/truncated"] = self.task.truncated([e for e, full in zip(self.examples, full_B) if full])
        asked = [self.task.ask(example) for example in self.examples]
        extracted = [config.extract(text) for text in completions]
        return Judged(asked, list(completions), total_B, np.array(right), extracted, metrics)
