"""Completions in flight between two updates, as a checkpoint keeps them: partial ones one by one,
with tokens and where they belong, or a whole rollout, with what environments answered. Nothing of a
cache is kept."""

import json
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass

import numpy as np

from tunix_lite.basics.types import FINISH, Conversation, Rollout, SampledTurn, TurnReply
from tunix_lite.basics.untrusted import parse_object
from tunix_lite.rollout.partial import OpenCompletion

# by name, the type of what there is one of per completion, and per token
_OF_COMPLETIONS = ("steps", "prompts", "generations", "lengths", "reasons")
# of completions that have begun, where routes are recorded: tokens of the prompt, and the routes of
# prompt and tokens one after the other
_OF_ROUTES = {"read", "routes"}
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
            "reasons": [
                -1 if one.reason is None else FINISH.index(one.reason)
                for one in self.completions
            ],
        }
        for name in ("step", "prompt", "generation"):
            columns[f"{name}s"] = [getattr(one, name) for one in self.completions]
        for name in _OF_TOKENS:
            columns[name] = [x for one in self.completions for x in getattr(one, name)]
        # of the prompts, which are read again with them, and of the tokens
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
        wanted = {"next_step", *_OF_COMPLETIONS, *_OF_TOKENS}
        if arrays.keys() - _OF_ROUTES != wanted:
            raise ValueError(f"it has {sorted(arrays)} and not {sorted(wanted)}")
        lengths = arrays["lengths"]
        sizes = dict.fromkeys(_OF_COMPLETIONS, lengths.size)
        sizes |= dict.fromkeys(_OF_TOKENS, int(lengths.sum())) | {"next_step": 1}
        for name, size in sizes.items():
            if arrays[name].size != size or arrays[name].dtype.kind not in "if":
                raise ValueError(f"`{name}` has {arrays[name].size} numbers and not {size}")
        reasons = arrays["reasons"]
        if lengths.size and (
            lengths.min() < 0 or not -1 <= reasons.min() <= reasons.max() < 3
        ):
            raise ValueError("lengths and reasons are out of range")
        routes = _routes(arrays, lengths)

        # The tokens of all completions stand one after the other.
        ends = np.cumsum(lengths)
        values = {name: np.split(arrays[name], ends)[: lengths.size] for name in _OF_TOKENS}
        completions = [
            OpenCompletion(
                step=int(arrays["steps"][i]),
                prompt=int(arrays["prompts"][i]),
                generation=int(arrays["generations"][i]),
                reason=None if reasons[i] < 0 else FINISH[reasons[i]],
                **{name: tuple(values[name][i].tolist()) for name in _OF_TOKENS},
                routes=routes[i],
            )
            for i in range(lengths.size)
        ]
        return cls(completions, int(arrays["next_step"]))


def _routes(
    arrays: dict[str, np.ndarray],
    lengths: np.ndarray,
) -> list[np.ndarray | None]:
    """The routes of each completion; None where none are recorded. Raises ValueError."""
    if not arrays.keys() & _OF_ROUTES:
        return [None] * lengths.size
    read = arrays.get("read", np.zeros(0, int))
    routes = arrays.get("routes", np.zeros(0))
    # -1: not of these completions
    read = read if read.shape == lengths.shape else np.full(lengths.shape, -1)
    sizes = np.where(read > 0, read + lengths, 0)
    is_right = routes.ndim == 2 and routes.dtype.kind == "u" and len(routes) == sizes.sum()
    if not is_right or read.min(initial=0) < 0:
        raise ValueError("`routes` and `read` are not those of the tokens")
    pieces = np.split(routes, np.cumsum(sizes)[:-1])
    return [piece if len(piece) else None for piece in pieces]


# by name, the type of the arrays [B, T] of a rollout, and of those of its rows
_OF_ROLLOUT = {
    "tokens": np.int32,
    "token_mask": np.bool_,
    "completion_mask": np.bool_,
    "logprobs": np.float32,
    "full_logprobs": np.float32,
    "versions": np.int32,
}
_OF_ROWS = {"finish": np.int8, "seconds": np.float32}


@dataclass(frozen=True)
class RolloutInFlight:
    """A whole rollout that waits for its update.
    Example: RolloutInFlight(step=3, version=2, rollout=rollout): sampled beside update 2."""

    # the update, from 0, that learns from it
    step: int
    # updates made before it was sampled
    version: int
    rollout: Rollout

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
        types = _OF_ROLLOUT | _OF_ROWS
        return arrays | {name: np.asarray(getattr(rollout, name)) for name in types}

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> "RolloutInFlight":
        """Rebuilds the object, without metrics, from the arrays of `as_arrays`. Raises ValueError
        for others."""
        of_rollout = _OF_ROLLOUT
        wanted = {"step", "version"}
        if "conversations" in arrays:
            of_rollout = _OF_ROLLOUT | {"turn_ids": np.int16}
            wanted.add("conversations")
        types = of_rollout | _OF_ROWS
        wanted |= types.keys()
        if arrays.keys() - {"routes"} != wanted:
            raise ValueError(f"it has {sorted(arrays)} and not {sorted(wanted)}")
        shape = arrays["tokens"].shape
        for name in ("step", "version"):
            if arrays[name].shape or arrays[name].dtype.kind not in "iu":
                raise ValueError(f"`{name}` is {arrays[name].dtype} of {arrays[name].shape}")
        for name, dtype in types.items():
            # two clock readings a row
            rows_shape = (*shape[:1], 2) if name == "seconds" else shape[:1]
            expected = shape if name in of_rollout else rows_shape
            array = arrays[name]
            if len(shape) != 2 or array.shape != expected or array.dtype != dtype:
                raise ValueError(
                    f"`{name}` is {array.dtype} of {array.shape} and not {np.dtype(dtype)} of "
                    f"{expected}"
                )
        routes = arrays.get("routes")
        if routes is not None and (routes.shape[:2] != shape or routes.dtype.kind != "u"):
            raise ValueError(f"`routes` is {routes.dtype} of {routes.shape}")
        conversations = None
        if "conversations" in arrays:
            conversations = np.empty(shape[0], object)
            conversations[:] = _conversations(arrays["conversations"].tobytes(), shape)
        rollout = Rollout(
            conversations=conversations,
            routes=routes,
            **{name: arrays[name] for name in types},
        )
        return cls(int(arrays["step"]), int(arrays["version"]), rollout)


def _conversations(text: bytes, shape: tuple[int, int]) -> list[Conversation]:
    """Rebuilds the conversations of a rollout of so many rows and columns. Raises ValueError for a
    text that `RolloutInFlight.as_arrays` does not make."""
    try:
        conversations = [
            Conversation(
                [
                    SampledTurn(
                        int(turn["begin"]),
                        int(turn["end"]),
                        TurnReply(**turn["reply"]),
                    )
                    for turn in one["turns"]
                ],
                one["ended"],
                one["opening"],
            )
            for one in parse_object(text.decode(), "it")["conversations"]
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"`conversations` holds none: {error}") from error
    if len(conversations) != shape[0]:
        raise ValueError(f"`conversations` has {len(conversations)} and not {shape[0]}")
    for one in conversations:
        for turn in one.turns:
            for value, default in zip(astuple(turn.reply), astuple(TurnReply())):
                # JSON writes 1.0 as 1
                kind = (int, float) if isinstance(default, float) else type(default)
                if not isinstance(value, kind):
                    raise ValueError(
                        f"`conversations` has {value!r} in the place of {default!r}"
                    )
        # turns follow one another, or advantages would go to wrong tokens
        places = [place for turn in one.turns for place in (turn.begin, turn.end)]
        if (
            not places
            or not 0 <= places[0] <= places[-1] <= shape[1]
            or places != sorted(places)
        ):
            raise ValueError(
                f"`conversations` has turns at {places}, and rows have {shape[1]}"
            )
    return conversations


def in_flight_from(arrays: dict[str, np.ndarray]) -> InFlight | RolloutInFlight:
    """Rebuilds what was in flight, of the arrays of a checkpoint. Raises ValueError for malformed
    ones."""
    kind = InFlight if "next_step" in arrays else RolloutInFlight
    return kind.from_arrays(arrays)
