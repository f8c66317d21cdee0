"""Completions in flight between two updates, as a checkpoint keeps them: tokens and where they
belong, nothing of a cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tunix_lite.rollout.carry import OpenCompletion
from tunix_lite.types import FINISH

# by name, the type of what there is one of per completion, and per token
OF_COMPLETIONS = ("steps", "prompts", "generations", "lengths", "reasons")
OF_TOKENS = {
    "tokens": np.int32,
    "versions": np.int32,
    "logprobs": np.float32,
    "full_logprobs": np.float32,
}


@dataclass(frozen=True)
class InFlight:
    """Completions that no update has taken yet, and the next step to draw prompts for.

    Example: InFlight([], 0) before the first update.
    """

    completions: Sequence[OpenCompletion]
    next_step: int

    def as_arrays(self) -> dict[str, np.ndarray]:
        """By name: [N] of each completion, and the values of all tokens one after the other."""
        found = {
            "next_step": np.int32(self.next_step),
            "steps": [one.step for one in self.completions],
            "prompts": [one.prompt for one in self.completions],
            "generations": [one.generation for one in self.completions],
            "lengths": [len(one.tokens) for one in self.completions],
            "reasons": [_number(one.reason) for one in self.completions],
        }
        for name in OF_TOKENS:
            found[name] = [x for one in self.completions for x in getattr(one, name)]
        types = dict.fromkeys(OF_COMPLETIONS, np.int32) | OF_TOKENS
        return {name: np.asarray(values, types.get(name)) for name, values in found.items()}

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> "InFlight":
        """What `as_arrays` was called on. Raises ValueError for arrays that it does not make."""
        wanted = {"next_step", *OF_COMPLETIONS, *OF_TOKENS}
        if arrays.keys() != wanted:
            raise ValueError(f"it has {sorted(arrays)} and not {sorted(wanted)}")
        lengths = arrays["lengths"]
        sizes = dict.fromkeys(OF_COMPLETIONS, lengths.size)
        sizes |= dict.fromkeys(OF_TOKENS, int(lengths.sum())) | {"next_step": 1}
        for name, size in sizes.items():
            if arrays[name].size != size or arrays[name].dtype.kind not in "if":
                raise ValueError(f"`{name}` has {arrays[name].size} numbers and not {size}")
        reasons = arrays["reasons"]
        if lengths.size and (lengths.min() < 0 or not -1 <= reasons.min() <= reasons.max() < 3):
            raise ValueError("lengths and reasons are out of range")

        ends = np.cumsum(lengths)
        values = {name: np.split(arrays[name], ends)[: lengths.size] for name in OF_TOKENS}
        completions = [
            OpenCompletion(
                step=int(arrays["steps"][i]),
                prompt=int(arrays["prompts"][i]),
                generation=int(arrays["generations"][i]),
                reason=None if reasons[i] < 0 else FINISH[reasons[i]],
                **{name: tuple(values[name][i].tolist()) for name in OF_TOKENS},
            )
            for i in range(lengths.size)
        ]
        return cls(completions, int(arrays["next_step"]))


def _number(reason: str | None) -> int:
    return -1 if reason is None else FINISH.index(reason)
