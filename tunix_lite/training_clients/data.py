"""What a token loss learns from: sequences with a target at each position, in rows on the mesh."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.typing import ArrayLike

from tunix_lite.basics.types import RowBatch
from tunix_lite.learner.rows import on_mesh

# The narrowest row.
_LEAST_WIDTH = 16
# Tokens of a forward and backward pass on one shard, padding included.
TOKENS_AT_ONCE = 2048
# Tokens of the smallest: fewer would take no less time.
_TOKENS_AT_LEAST = 128
# The values that a datum may have at each position, and what stands where it has none.
_DEFAULTS = {"weights": 1.0, "logprobs": 0.0, "advantages": 0.0}
VALUES = tuple(_DEFAULTS)


@dataclass(frozen=True)
class Datum:
    """One sequence to learn from. All lists have one entry for each of its T tokens; targets[t] is
    predicted from tokens[0] to tokens[t].
    Example: the prompt 5 6 and the completion 7 1, of which the completion counts: Datum([5, 6, 7],
    [6, 7, 1], weights=[0, 1, 1])."""

    tokens: Sequence[int]
    targets: Sequence[int]
    weights: Sequence[float] | None = None  # what each target counts in the sum; None: 1
    # log-probability of each target under the policy that sampled it, in nats
    logprobs: Sequence[float] | None = None
    advantages: Sequence[float] | None = None


def check_data(
    data: Sequence[Datum], needs: Sequence[str], vocab_size: int, max_positions: int
) -> None:
    """Raises ValueError for a datum that the model or the loss, which `needs` values, cannot
    take."""
    # an empty sum would be a gradient of nothing
    if not data:
        raise ValueError("data is empty; give at least one Datum")
    for i, datum in enumerate(data):
        length = len(datum.tokens)
        if not 1 <= length <= max_positions:
            raise ValueError(
                f"datum {i}: {length} tokens; the model takes 1 to {max_positions}"
            )
        for name in ("tokens", "targets"):
            _check_ids(f"datum {i}: {name}", getattr(datum, name), length, vocab_size)
        for name in VALUES:
            values = getattr(datum, name)
            if values is not None:
                array = _array(f"datum {i}: {name}", values, length)
                if array.dtype.kind not in "iuf":
                    raise ValueError(
                        f"datum {i}: {name}: these are numbers, not {array.dtype}"
                    )
                # checked as float32: a larger float64 becomes infinite there
                for t in np.flatnonzero(~np.isfinite(array.astype(np.float32))):
                    raise ValueError(
                        f"datum {i}: {name}[{t}] is {array[t]}; it must be finite"
                    )
            elif name in needs:
                raise ValueError(f"datum {i}: {name} is missing; this loss needs it")


def check_tokens(name: str, tokens: Sequence[int], vocab_size: int, most: int) -> None:
    """Raises ValueError unless these are 1 to `most` tokens of the vocabulary."""
    if not 1 <= len(tokens) <= most:
        raise ValueError(f"{name}: {len(tokens)} tokens; there is room for 1 to {most}")
    _check_ids(name, tokens, len(tokens), vocab_size)


def _check_ids(name: str, ids: Sequence[int], length: int, vocab_size: int) -> None:
    array = _array(name, ids, length)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name}: token ids are whole numbers, not {array.dtype}")
    for t in np.flatnonzero((array < 0) | (array >= vocab_size)):
        most = vocab_size - 1
        raise ValueError(f"{name}[{t}] is {array[t]}; a token of this model is 0 to {most}")


def _array(name: str, values: ArrayLike, length: int) -> np.ndarray:
    try:
        # lists of different lengths make no array
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name}: this is no list of numbers ({error})") from error
    if array.shape != (length,):
        shape = list(array.shape)
        raise ValueError(
            f"{name} has shape {shape} for {length} tokens; give one entry per token"
        )
    return array


def parts_of_data(
    data: Sequence[Datum], shards: int, max_positions: int
) -> Iterator[tuple[list[int], RowBatch]]:
    """The data in parts for a forward and backward pass each, the narrowest rows first: the numbers
    of the data in the first rows, and all rows on the mesh. shards: of a batch (fsdp)."""
    # Widths and numbers of rows are powers of two, so that few programs are compiled.
    by_width: dict[int, list[int]] = {}
    for i, datum in enumerate(data):
        width = min(_power_of_two(len(datum.tokens), _LEAST_WIDTH), max_positions)
        by_width.setdefault(width, []).append(i)
    for width, indices in sorted(by_width.items()):
        # memory grows with tokens, so wide rows come few at a time
        most = max(1, TOKENS_AT_ONCE // width)
        for start in range(0, len(indices), most * shards):
            chunk = indices[start : start + most * shards]
            # a few short sequences take a program that others use too
            least = max(1, _TOKENS_AT_LEAST // width)
            num_rows = _power_of_two(-(-len(chunk) // shards), least) * shards

            # a datum a row, then empty rows: arrays [R, W]
            ids = {
                name: np.zeros((num_rows, width), np.int32) for name in ("tokens", "targets")
            }
            values = {name: np.zeros((num_rows, width), np.float32) for name in VALUES}
            mask = np.zeros((num_rows, width), bool)
            for row, i in enumerate(chunk):
                length = len(data[i].tokens)
                mask[row, :length] = True
                for name, array in ids.items():
                    array[row, :length] = getattr(data[i], name)
                for name, array in values.items():
                    of_datum = getattr(data[i], name)
                    array[row, :length] = _DEFAULTS[name] if of_datum is None else of_datum
            rows = RowBatch(
                tokens=ids["tokens"],
                token_mask=mask,
                loss_weight=mask.astype(np.float32),
                is_scored=mask,
                segment_ids=mask.astype(np.int32),
                positions=np.tile(np.arange(width, dtype=np.int32), (num_rows, 1)),
                streams={"targets": ids["targets"], **values},
            )
            yield chunk, jax.tree.map(on_mesh, rows)


def _power_of_two(count: int, least: int) -> int:
    return max(least, 1 << (count - 1).bit_length())
