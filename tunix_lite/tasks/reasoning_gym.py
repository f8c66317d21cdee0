"""The tasks of reasoning-gym (extra `gym`), any of them by name, with its own verifiers."""

import functools
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tunix_lite.tasks.generated import GeneratedSource, answer_text

# Imported with this module, which a run imports only for this task: the start of a reward worker
# may take the seconds that it needs, a call may not.
try:
    import reasoning_gym
except ImportError as error:
    reasoning_gym = None
    WHY_NOT = str(error)


@dataclass(frozen=True)
class ReasoningGym(GeneratedSource):
    """Problems of one or several tasks of reasoning-gym. Which one a problem is of, and its number,
    are drawn from the number of the example; held-out questions are never trained on.
    Example: ReasoningGym(tasks=("basic_arithmetic", "chain_sum"), weights=(1, 3))."""

    # Names of tasks in reasoning-gym.
    tasks: tuple[str, ...] = ("basic_arithmetic",)
    # Relative frequency of each task, such as [2, 1]. [] draws all alike.
    weights: tuple[float, ...] = ()
    # Settings of a task: '+task.source.settings.basic_arithmetic={max_terms: 3}'. {} keeps all
    # defaults.
    settings: dict[str, dict] = field(default_factory=dict)
    # Seed of the problems. The seed of the run does not change them.
    seed: int = 0
    # Problems of each task that are drawn from. acre and word_ladder need 10000.
    num_problems: int = 1_000_000

    def __post_init__(self):
        if not self.tasks:
            raise ValueError("tasks is empty: name at least one task of reasoning-gym")
        if self.weights and (len(self.weights) != len(self.tasks) or min(self.weights) <= 0):
            raise ValueError(
                f"weights={list(self.weights)}: one above 0 for each of {len(self.tasks)} tasks"
            )
        if others := self.settings.keys() - {*self.tasks}:
            raise ValueError(f"settings of {', '.join(sorted(others))}, which is not in tasks")
        super().__post_init__()
        # on a machine without it settings can be composed, but no problem can be made
        for name in self.tasks if reasoning_gym is not None else ():
            _dataset_of(name, self._settings(name), self.seed, self.num_problems)

    def make(self, rng: np.random.Generator) -> dict:
        """Makes one problem. `problem` says which one it is, to make it again."""
        weights = np.array(self.weights or [1.0] * len(self.tasks))
        name = self.tasks[int(rng.choice(len(self.tasks), p=weights / weights.sum()))]
        index = int(rng.integers(self.num_problems))
        settings = self._settings(name)
        entry = _entry_of(name, settings, self.seed, self.num_problems, index)
        example: dict[str, Any] = {
            "question": entry["question"],
            "task": name,
            "problem": [settings, self.seed, self.num_problems, index],
        }
        # some tasks accept many answers, and give none
        if entry["answer"] is not None:
            example["answer"] = str(entry["answer"])
            example["completion"] = f"<answer>{entry['answer']}</answer>"
        return example

    def _settings(self, name: str) -> str:
        return json.dumps(self.settings.get(name, {}), sort_keys=True)


@functools.lru_cache(maxsize=128)
def _dataset_of(name: str, settings: str, seed: int, size: int) -> Any:
    """A task of reasoning-gym with its settings, as JSON. Raises ValueError if there is none."""
    if reasoning_gym is None:
        raise ValueError(
            f"task=reasoning_gym needs reasoning-gym ({WHY_NOT}): pip install -e '.[gym]'; "
            "one of its dependencies, pycosat, is built by a C compiler"
        )
    try:
        arguments = json.loads(settings)
        arguments = {
            key: tuple(x) if isinstance(x, list) else x for key, x in arguments.items()
        }
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **arguments)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning-gym refuses {name} with {settings}: {error}") from error


@functools.lru_cache(maxsize=1024)
def _entry_of(name: str, settings: str, seed: int, size: int, index: int) -> dict:
    """A problem as reasoning-gym makes it: question, answer, metadata."""
    return _dataset_of(name, settings, seed, size)[index]


def score(completion: str, example: dict) -> float:
    """Scores the completion's answer by the task's own verifier, 0 to 1."""
    *problem, index = example["problem"]
    entry = _entry_of(example["task"], *problem, index)
    dataset = _dataset_of(example["task"], *problem)
    # verifiers want the bare answer
    return float(dataset.score_answer(answer_text(completion), entry))


def solved(completion: str, example: dict) -> float:
    """1 if the verifier gives the answer its full score, else 0."""
    return float(score(completion, example) >= 1.0)
