"""Completions in flight between two updates, as a checkpoint keeps them: partial ones one by one,
with tokens and where they belong, or a whole rollout, with what environments answered. Nothing of a
cache is kept."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from tunix_lite.basics.plain_text import reason_of
from tunix_lite.basics.types import FINISH, Conversation, Rollout, SampledTurn, TurnReply
from tunix_lite.basics.untrusted import parse_object
from tunix_lite.rollout.partial import OpenCompletion

# by name, the type of what there is one of per completion, and per token
_OF_COMPLETIONS = ("steps", "prompts", "generations", "lengths", "reasons")
# None: it has not ended
_REASONS = (*FINISH, None)
_OF_TOKENS = {
    "tokens": np.int32,
    "versions": np.int32,
    "logprobs": np.float32,
    "full_logprobs": np.float32,
}


@dataclass(frozen=True)
class InFlight:
    """Completions that no update has taken yet, and the next step to draw prompts for.
    Example: InFlight([], 0) before the first update."""

    completions: Sequence[OpenCompletion]
    next_step: int

    def as_arrays(self) -> dict[str, np.ndarray]:
        """Returns arrays by name: [N] of each completion, and the values of all tokens one after
        the other."""
        columns = {
            "next_step": np.int32(self.next_step),
            "lengths": [len(one.tokens) for one in self.completions],
            "reasons": [_REASONS.index(one.reason) for one in self.completions],
        }
        for name in ("step", "prompt", "generation"):
            columns[f"{name}s"] = [getattr(one, name) for one in self.completions]
        for name in _OF_TOKENS:
            columns[name] = [x for one in self.completions for x in getattr(one, name)]
        # The tokens of the prompts, which are read again, and the routes of prompts and tokens.
        routed = [one.routes for one in self.completions if one.routes is not None]
        if routed:
            columns["read"] = [one.num_read for one in self.completions]
            columns["routes"] = np.concatenate(routed)
        # an empty list would become float64
        types = dict.fromkeys((*_OF_COMPLETIONS, "read"), np.int32) | _OF_TOKENS
        return {name: np.asarray(values, types.get(name)) for name, values in columns.items()}

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> "InFlight":
        """Rebuilds the object from the arrays of `as_arrays`. Raises ValueError for others."""
        _check_names(arrays, {"next_step", *_OF_COMPLETIONS, *_OF_TOKENS}, {"read", "routes"})
        lengths = arrays["lengths"]
        # The tokens of all completions stand one after the other.
        ends = np.cumsum(lengths)
        values = {name: np.split(arrays[name], ends) for name in _OF_TOKENS}
        read = arrays.get("read", np.zeros_like(lengths))
        sizes = np.where(read > 0, read + lengths, 0)
        routes = np.split(arrays.get("routes", read[:0]), np.cumsum(sizes))
        completions = [
            OpenCompletion(
                step=int(arrays["steps"][i]),
                prompt=int(arrays["prompts"][i]),
                generation=int(arrays["generations"][i]),
                reason=_REASONS[reason],
                **{name: tuple(values[name][i].tolist()) for name in _OF_TOKENS},
                routes=routes[i] if read[i] else None,
            )
            for i, reason in enumerate(arrays["reasons"])
        ]
        return cls(completions, int(arrays["next_step"]))


# the arrays of every rollout
_OF_ROLLOUT = {field.name for field in fields(Rollout)}
_OF_ROLLOUT -= {"metrics", "conversations", "turn_ids", "routes"}


@dataclass(frozen=True)
class RolloutInFlight:
    """A whole rollout that waits for its update.
    Example: RolloutInFlight(step=3, version=2, rollout=rollout): sampled beside update 2."""

    # the update, from 0, that learns from it
    step: int
    # updates made before it was sampled
    version: int
    rollout: Rollout
    # grades its completions; arrays hold nothing of it
    grader: Any = None

    @property
    def last_turns(self) -> list[list[int]]:
        """The tokens of each completion, or of the last turn of each conversation: rewards of the
        task are about them."""
        tokens = self.rollout.tokens
        if self.rollout.conversations is None:
            masks = self.rollout.completion_mask
            return [row[mask].tolist() for row, mask in zip(tokens, masks)]
        last = [conversation.turns[-1] for conversation in self.rollout.conversations]
        return [row[turn.begin : turn.end].tolist() for row, turn in zip(tokens, last)]

    def as_arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the rollout by name, and its conversations as the bytes of a JSON text."""
        rollout = self.rollout
        arrays = {"step": np.int32(self.step), "version": np.int32(self.version)}
        if rollout.conversations is not None:
            conversations = [asdict(one) for one in rollout.conversations]
            texts = json.dumps({"conversations": conversations})
            arrays["conversations"] = np.frombuffer(texts.encode(), np.uint8)
            arrays["turn_ids"] = rollout.turn_ids
        if rollout.routes is not None:
            arrays["routes"] = rollout.routes
        return arrays | {name: np.asarray(getattr(rollout, name)) for name in _OF_ROLLOUT}

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> "RolloutInFlight":
        """Rebuilds the object, without metrics, from the arrays of `as_arrays`. Raises ValueError
        for others."""
        wanted = {"step", "version", *_OF_ROLLOUT}
        if "conversations" in arrays:
            wanted |= {"conversations", "turn_ids"}
        _check_names(arrays, wanted, {"routes"})
        conversations = None
        if "conversations" in arrays:
            text = arrays["conversations"].tobytes().decode()
            conversations = np.empty(len(arrays["tokens"]), object)
            conversations[:] = [
                Conversation(
                    [
                        SampledTurn(turn["begin"], turn["end"], TurnReply(**turn["reply"]))
                        for turn in one["turns"]
                    ],
                    one["ended"],
                    one["opening"],
                )
                for one in parse_object(text, "`conversations`")["conversations"]
            ]
        rollout = Rollout(
            **{name: arrays[name] for name in _OF_ROLLOUT},
            turn_ids=arrays.get("turn_ids"),
            conversations=conversations,
            routes=arrays.get("routes"),
        )
        return cls(int(arrays["step"]), int(arrays["version"]), rollout)


def _check_names(arrays: dict[str, np.ndarray], wanted: set[str], more: set[str]) -> None:
    # The digests of a checkpoint tell of changed values; other names are another format.
    if arrays.keys() - more != wanted:
        raise ValueError(f"it has {sorted(arrays)} and not {sorted(wanted)}")


def in_flight_from(arrays: dict[str, np.ndarray]) -> InFlight | RolloutInFlight:
    """Rebuilds what was in flight, of the arrays of a checkpoint. Raises ValueError for those of
    another format, or that do not belong together."""
    kind = InFlight if "next_step" in arrays else RolloutInFlight
    try:
        return kind.from_arrays(arrays)
    except (IndexError, KeyError, TypeError) as error:
        why = reason_of(error)
        raise ValueError(f"the completions in flight are damaged ({why})") from error
