"""Rewards that tests/test_reward_docs.py calls before a run. A worker imports this, so it imports little."""

import os
from dataclasses import dataclass
from pathlib import Path


def wrong_key(completion, example):
    return float(completion == example["anser"])


def inside_marks(completion, example):
    """Fails on a text without <answer>, as the text of a model may be."""
    return float(len(completion.split("<answer>")[1]))


def too_few(completions, example):
    return [1.0]


def one_each(completions, example):
    return [float(len(completion)) for completion in completions]


async def waits(completion, example):
    return 1.0


def stuck(completion, example):
    while True:
        pass


def counts(completion, example, file):
    with Path(file).open("a") as opened:
        opened.write(f"{os.getpid()}\n")
    return 0.0


@dataclass(frozen=True)
class Server:
    """Stands for a judge: its calls cost something."""

    file: str

    def __call__(self, completion, example):
        return counts(completion, example, self.file)
