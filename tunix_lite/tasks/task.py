"""A task: where examples come from, how they are asked, how they are judged."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.rewards.math import correct, final_answer
from tunix_lite.tasks.sources import batch_at
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

    def batches(self, batch_size: int, seed: int, start: int = 0) -> Iterator[list[dict]]:
        """Batches number `start`, `start + 1` ... of training examples."""
        step = start
        while True:
            yield batch_at(self.config.source.train, batch_size, seed, step)
            step += 1

    def held_out(self, count: int) -> list[dict]:
        """The first `count` held-out examples. Raises ValueError if there are fewer."""
        examples = self.config.source.held_out
        if len(examples) < count:
            raise ValueError(f"evaluation.num_examples={count}, but the held-out set has {len(examples)}")
        return [examples[i] for i in range(count)]

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
        """Raises ValueError naming the example if its prompt is longer than `max_prompt_length`."""
        rows = [self.tokenizer.prompt(self.ask(example)) for example in examples]
        width = self.max_prompt_length
        for example, row in zip(examples, rows):
            if len(row) > width:
                raise ValueError(
                    f"the prompt {self.ask(example)!r} has {len(row)} tokens, more than "
                    f"generation.max_prompt_length={width}; raise it to at least {len(row)}"
                )
        tokens = np.full((len(rows), width), self.tokenizer.pad_id, np.int32)
        token_mask = np.zeros((len(rows), width), bool)
        for i, row in enumerate(rows):
            tokens[i, width - len(row) :] = row
            token_mask[i, width - len(row) :] = True
        return Prompts(tokens, token_mask)

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

    def judge(self, examples: list[dict], rollout: Rollout) -> Judged:
        """Every completion as text, its rewards, and their metrics."""
        tokens, mask = np.asarray(rollout.tokens), np.asarray(rollout.completion_mask)
        completions = [self.tokenizer.decode(row[keep]) for row, keep in zip(tokens, mask)]
        each = {name: self._score(name, reward, completions, examples) for name, reward in self.config.rewards.items()}
        total_B = sum(self.config.rewards[name].weight * values for name, values in each.items())
        right_B = np.array([self.config.correct(c, e) > 0 for c, e in zip(completions, examples)])
        lengths_B = mask.sum(axis=1)
        metrics = {
            "reward/mean": float(total_B.mean()),
            "reward/std": float(total_B.std()),
            **{f"reward/{name}": float(values.mean()) for name, values in each.items()},
            "completions/correct": float(right_B.mean()),
            "completions/mean_length": float(lengths_B.mean()),
            "completions/max_length": int(lengths_B.max()),
            "completions/truncated": float(1 - np.asarray(rollout.finished).mean()),
        }
        asked = [self.ask(example) for example in examples]
        return Judged(asked, completions, total_B, right_B, [self.config.extract(c) for c in completions], metrics)

    def _score(self, name, reward: Reward, completions, examples) -> np.ndarray:
        values = np.array([reward.fn(c, e) for c, e in zip(completions, examples)], np.float64)
        if not np.isfinite(values).all():
            bad = int(np.flatnonzero(~np.isfinite(values))[0])
            raise ValueError(f"reward {name!r} is {values[bad]} for the completion {completions[bad]!r}")
        return values
