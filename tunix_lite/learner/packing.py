"""Bin packing: places the tokens of a batch in rows, so that padding is not computed.

A batch is [B, T]: left-padded prompts, then right-padded completions. Packed, its sequences stand
side by side in rows [R, W]; M is the most tokens that a row may score (loss_weight is not 0). A
loss is a weighted sum over tokens, so it is the same however they stand. Neighbours
that start with the same prompt may share it: the prompt stands once, in the prefix of the row
(prefix_columns), and their completions stand in its num_lanes lanes (lane_columns each). A token in
a lane sees the prefix and that lane, never another lane, so attention costs no more than without
sharing.

Example: prompt 5 6 with the completions 7 8 and 9, and prompt 3 with the completion 4, in a row
with a prefix of 3 columns and two lanes of 3:

  tokens          5 6 3|7 8 4|9 . .
  segment_ids     1 1 2|1 1 2|1 0 0    a token sees only its segment,
  completion_ids  0 0 0|1 1 1|2 0 0    of that the prompt, 0, and its own completion,
  positions       0 1 0|2 3 1|2 0 0    of those the tokens at its position or before
  scored          3 4 5 6              the columns of 7 8 4 9
  previous        1 3 2 1              the columns whose hidden states predict them: 7, 9 follow 6
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tunix_lite.basics.types import Batch

# fields of a RowBatch that say where its tokens stand
PLACES = (
    "segment_ids",
    "positions",
    "completion_ids",
    "scored",
    "previous",
    "is_scored",
    "most_scored",
    "num_micro_batches",
)


@dataclass(frozen=True)
class RowShape:
    """Columns of a packed row: shared prompts in its prefix, then lanes. Example: RowShape(3, 2, 3)
    is the row above, 9 columns wide."""

    lane_columns: int  # columns of each lane
    num_lanes: int = 1
    # 0: prompts are not shared, and a sequence stands in a lane
    prefix_columns: int = 0
    # True: a batch with short prompts takes programs of its own
    narrows: bool = False

    @property
    def width(self) -> int:
        return self.prefix_columns + self.num_lanes * self.lane_columns

    @property
    def lanes(self) -> dict[str, int]:
        """Columns of shared prompts and of each lane, as in RowBatch; {}: no prompt is shared."""
        if not self.prefix_columns:
            return {}
        return {"prefix_columns": self.prefix_columns, "lane_columns": self.lane_columns}

    @property
    def prefixes(self) -> list["RowShape"]:
        """This shape, and where it narrows one with fewer columns for shared prompts: a run
        compiles programs for each."""
        columns = -(-5 * self.prefix_columns // 8)
        narrow = replace(self, prefix_columns=columns + columns % 2)
        has_two = self.narrows and narrow.prefix_columns < self.prefix_columns
        return [self, narrow] if has_two else [self]

    @property
    def num_scored(self) -> int:
        """Returns M, the most tokens that a row may score."""
        return self.num_lanes * self.lane_columns


@dataclass(frozen=True)
class Packed:
    """Places of the tokens of a [B, T] batch in rows [R, W], and what each may see.
    Example: the row at the top of this file has the `positions` 0 1 0 2 3 1 2 0 0."""

    source: np.ndarray  # [R, W] int32, place in the flattened batch; -1: nothing
    # [R, W] int32, 1, 2 ... within a row; 0: nothing. A token sees only its own segment
    segment_ids: np.ndarray
    positions: np.ndarray  # [R, W] int32, place of the token in its own sequence, from 0
    # [R, W] int32, only with shared prompts: 0: the prompt; i: the i-th completion
    completion_ids: np.ndarray | None
    # [R, M] int32, columns of the scored tokens, in order; 0 where there is none. None: the last M
    scored: np.ndarray | None
    # [R, M] int32, the column whose hidden state predicts that token; None: the one before it
    previous: np.ndarray | None
    is_scored: np.ndarray  # [R, M] bool
    # [parts] int32, scored tokens of the row of a micro-batch that has most; None: M
    most_scored: np.ndarray | None
    shape: tuple[int, int]  # (B, T)
    # micro-batches that hold anything; None where the rows are the sequences: all do
    num_micro_batches: np.int32 | None
    row_shape: RowShape  # one of RowShape.prefixes

    @property
    def places(self) -> dict[str, np.ndarray | np.int32 | int | None]:
        """The fields of a RowBatch that say where its tokens stand."""
        columns = {name: getattr(self, name) for name in PLACES}
        return columns | self.row_shape.lanes

    def place(self, x_BT: np.ndarray) -> np.ndarray:
        """[B, T] or [B, T, K] -> [R, W] or [R, W, K], 0 where nothing stands. A shared prompt
        has the values of its first sequence."""
        x_BT = np.asarray(x_BT)
        x_RW = x_BT.reshape(-1, *x_BT.shape[2:])[self.source]
        x_RW[self.source < 0] = 0
        return x_RW

    def back(self, x_RW: np.ndarray) -> np.ndarray:
        """[R, W] or [R, W, K] -> [B, T] or [B, T, K]: values at the scored tokens, 0 elsewhere."""
        x_RW = np.asarray(x_RW)
        x_BT = np.zeros((*self.shape, *x_RW.shape[2:]), x_RW.dtype)
        rows, nth = np.nonzero(self.is_scored)
        last = x_RW.shape[1] - self.is_scored.shape[1]
        columns = last + nth if self.scored is None else self.scored[rows, nth]
        flat = x_BT.reshape(-1, *x_RW.shape[2:])
        flat[self.source[rows, columns]] = x_RW[rows, columns]
        return x_BT


def unpacked(batch: Batch, num_rows: int = 0, num_scored: int | None = None) -> Packed:
    """The rows are the sequences, unchanged, whose real tokens must be contiguous, and empty rows
    where there are fewer than num_rows. num_scored: the last columns, which have all tokens that
    count; None: as many as needed. Raises ValueError where a token counts that nothing predicts, or
    outside of these columns."""
    counts_BT = np.asarray(batch.loss_weight) != 0
    documents_BT = batch.token_mask if batch.segment_ids is None else batch.segment_ids
    segment_ids_BT = np.asarray(documents_BT, np.int32)
    _check_predicted(segment_ids_BT, counts_BT)
    shape = counts_BT.shape
    source_RT = np.arange(counts_BT.size, dtype=np.int32).reshape(shape)
    if (missing := num_rows - len(counts_BT)) > 0:
        below = ((0, missing), (0, 0))
        source_RT = np.pad(source_RT, below, constant_values=-1)
        segment_ids_BT = np.pad(segment_ids_BT, below)
        counts_BT = np.pad(counts_BT, below)

    # a slice of the last columns has all scored tokens
    T = shape[1]
    needed = T - int(counts_BT.any(axis=0).argmax()) if counts_BT.any() else 1
    if num_scored is None:
        # in quarters of a row, so that few programs are compiled
        quarter = -(-T // 4)
        num_scored = min(T - 1, -(-needed // quarter) * quarter)
    elif needed > num_scored:
        raise ValueError(f"tokens count in the last {needed} columns, but {num_scored=}")

    # positions begin anew with each document
    columns = np.arange(T, dtype=np.int32)
    is_first = np.diff(segment_ids_BT, axis=1, prepend=0) != 0
    starts = np.maximum.accumulate(np.where(is_first, columns, 0), axis=1)
    return Packed(
        source=source_RT,
        segment_ids=segment_ids_BT,
        positions=np.where(segment_ids_BT > 0, columns - starts, 0),
        completion_ids=None,
        scored=None,
        previous=None,
        is_scored=counts_BT[:, T - num_scored :],
        most_scored=None,
        shape=shape,
        num_micro_batches=None,
        row_shape=RowShape(T),
    )


def packed(
    batch: Batch,
    shape: RowShape,
    rows_per_micro_batch: int,
    num_micro_batches: int,
    shards: int,
) -> Packed:
    """Sequences side by side in shards * num_micro_batches * rows_per_micro_batch rows, shard by
    shard, empty rows last. Micro-batch i is the i-th `rows_per_micro_batch` rows of every shard.

    Tokens that no counted token can see are dropped: those behind the last counted token of a
    sequence, and a sequence without any. With a prefix, neighbours share their prompt: the tokens
    before the last `lane_columns` columns, as far as none of them counts. The narrower of
    `shape.prefixes` is taken where all prompts fit and no more rows are used. Raises ValueError
    where a sequence does not fit into a row, where rows run out, and as `unpacked` does."""
    token_mask_BT = np.asarray(batch.token_mask, bool)
    counts_BT = np.asarray(batch.loss_weight) != 0

    # sequences that stand in one row together, and their places
    sequences = _sequences(token_mask_BT, counts_BT, shape)
    units = list(_units(np.asarray(batch.tokens).reshape(-1), sequences, shape))
    places = _first_fit_rows(units, shape)
    for narrow in shape.prefixes[1:]:
        if all(unit.prefix <= narrow.prefix_columns for unit in units):
            in_narrow = _first_fit_rows(units, narrow)
            # a narrower row saves nothing where it takes one row more
            if in_narrow[0].max(initial=0) <= places[0].max(initial=0):
                places = in_narrow
                shape = narrow
    row_of_unit, lanes_of_unit = places

    # tokens of each used row
    fills = np.bincount(row_of_unit, [unit.tokens for unit in units])
    num_rows = shards * num_micro_batches * rows_per_micro_batch
    if len(fills) > num_rows:
        raise ValueError(
            f"the batch takes {len(fills)} rows of {shape.width} tokens, but there are only "
            f"{num_rows}"
        )

    # Each shard gets as many of the used rows, its first ones: the fullest first, dealt across the
    # shards of a part, then to the next part. Every other pass goes the other way round, or the
    # first would always get the fuller row.
    slot, shard = np.divmod(np.arange(len(fills)), shards)
    part, nth = np.divmod(slot, rows_per_micro_batch)
    by_shard = np.where((nth + part) % 2, -shard, shard)
    by_part = np.where(nth % 2, -part, part)
    turn = np.lexsort((by_shard, by_part, nth))
    spread = np.zeros(len(fills), int)
    fullest_first = np.argsort(-fills, kind="stable")
    spread[fullest_first] = (shard * num_micro_batches * rows_per_micro_batch + slot)[turn]
    row_of_unit = spread[row_of_unit]

    arrays, previous_RW = _fill_rows(units, row_of_unit, lanes_of_unit, num_rows, shape)
    if not shape.prefix_columns:
        arrays["completion_ids"] = None
    counts_RW = counts_BT.reshape(-1)[arrays["source"]] & (arrays["source"] >= 0)

    # the scored tokens row by row, as the loss reads them
    counted = np.flatnonzero(counts_RW)
    counted_R = np.bincount(counted // shape.width, minlength=num_rows)
    most_scored = counted_R.reshape(shards, num_micro_batches, -1).max(axis=(0, 2))
    is_scored = np.arange(shape.num_scored) < counted_R[:, None]
    scored = np.zeros(is_scored.shape, np.int32)
    scored[is_scored] = counted % shape.width
    previous = np.zeros(is_scored.shape, np.int32)
    previous[is_scored] = previous_RW.reshape(-1)[counted]
    return Packed(
        **arrays,
        scored=scored,
        previous=previous,
        is_scored=is_scored,
        most_scored=most_scored.astype(np.int32),
        shape=counts_BT.shape,
        num_micro_batches=np.int32(max(1, -(-len(fills) // (shards * rows_per_micro_batch)))),
        row_shape=shape,
    )


def rows_needed_at_most(num_sequences: int, longest: int, width: int) -> int:
    """Counts the rows that `packed` takes at most, for sequences of at most `longest` tokens.

    Of two used rows, whatever opened the later did not fit into the earlier, so together they hold
    more than `width`. Summed over every row and the next (after the last, the first): 2 * tokens >
    rows * width, if there are two rows. Sharing prompts adds no tokens."""
    return min(num_sequences, max(1, -(-2 * num_sequences * longest // width) - 1))


def shared_rows_at_most(num_groups: int, group_size: int, lanes: int) -> int:
    """The same where every `group_size` neighbours have one prompt: in a row of its own a
    completion needs no more than a lane."""
    return num_groups * -(-group_size // lanes)


class _Sequence(NamedTuple):
    """Tokens of one sequence that go into rows, as places in the flattened batch."""

    start: int  # its first real token
    prefix: int  # tokens of its prompt, which it could share, if the row has a prefix
    stop: int  # one past its last token that counts


class _Unit(NamedTuple):
    """Sequences that stand in one row together: a shared prompt, and the rest of each."""

    prefix: int  # tokens
    sequences: list[_Sequence]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence behind the shared prompt."""
        return [one.stop - one.start - self.prefix for one in self.sequences]

    @property
    def tokens(self) -> int:
        return self.prefix + sum(self.lengths)


def _check_predicted(segment_ids_BT: np.ndarray, counts_BT: np.ndarray) -> None:
    """segment_ids_BT: 0 is padding; of one sequence the mask of its tokens does."""
    predicted_BT = np.array(segment_ids_BT, bool)
    predicted_BT[:, 1:] &= segment_ids_BT[:, 1:] == segment_ids_BT[:, :-1]
    predicted_BT[:, :1] = False
    wrong = np.argwhere(counts_BT & ~predicted_BT)
    if len(wrong):
        b, t = wrong[0]
        raise ValueError(
            f"sequence {b} counts column {t}, but no real token right before it predicts a real "
            "one there"
        )


def _sequences(
    token_mask_BT: np.ndarray, counts_BT: np.ndarray, shape: RowShape
) -> list[_Sequence]:
    """The sequences that count anything, in the order of the batch."""
    _check_predicted(token_mask_BT, counts_BT)
    T = counts_BT.shape[1]
    start_B = token_mask_BT.argmax(axis=1)
    first_B = counts_BT.argmax(axis=1)
    stop_B = T - counts_BT[:, ::-1].argmax(axis=1)
    sequences = []
    for b in np.flatnonzero(counts_BT.any(axis=1)).tolist():
        start = int(start_B[b])
        stop = int(stop_B[b])
        if not token_mask_BT[b, start:stop].all():
            raise ValueError(
                f"sequence {b} has padding between its tokens; it may only stand at the two ends"
            )

        # No further than the prompt's columns: where the first of a completion's tokens do not
        # count, it ends there.
        end = min(int(first_B[b]), T - shape.lane_columns, start + shape.prefix_columns)
        prefix = max(0, end - start)
        rest = stop - start - prefix
        if rest > shape.lane_columns:
            room = f"{shape.lane_columns} in a lane"
            if shape.prefix_columns:
                room += f" after {shape.prefix_columns} that are shared"
            raise ValueError(
                f"sequence {b} takes {rest} tokens of {stop - start} for itself; a row has room "
                f"for {room}"
            )
        sequences.append(_Sequence(b * T + start, prefix, b * T + stop))
    return sequences


def _units(tokens: np.ndarray, sequences: list[_Sequence], shape: RowShape) -> Iterator[_Unit]:
    """Neighbours with the same prompt, in units that fit into an empty row each."""
    if not shape.prefix_columns:
        yield from (_Unit(0, [one]) for one in sequences)
        return

    def prompt_of(one: _Sequence) -> bytes:
        # by its tokens: of two examples with one text the prompts are shared, too
        return tokens[one.start : one.start + one.prefix].tobytes()

    for _, neighbours in itertools.groupby(sequences, prompt_of):
        group = list(neighbours)
        prefix = group[0].prefix
        lengths = _Unit(prefix, group).lengths
        # lanes first, and then as many in a row as it has
        rows = _first_fit(lengths, np.zeros(0, int), shape.lane_columns) // shape.num_lanes
        for row in range(rows.max() + 1):
            yield _Unit(prefix, [group[i] for i in np.flatnonzero(rows == row)])


def _first_fit(
    lengths: list[int], room: np.ndarray, new: int | None = None
) -> np.ndarray | None:
    """The place of each length: from the longest on, the first place with room for it, or a new one
    with room for `new`. None: there is no room, and no new place."""
    places = np.zeros(len(lengths), int)
    left = room.tolist()
    # The longest first: what is left at the end is short, and fits into gaps. A stable order is the
    # same on every host.
    for i in np.argsort(-np.asarray(lengths, int), kind="stable").tolist():
        place = next((p for p, free in enumerate(left) if free >= lengths[i]), len(left))
        if place == len(left):
            if new is None:
                return None
            left.append(new)
        left[place] -= lengths[i]
        places[i] = place
    return places


def _first_fit_rows(
    units: list[_Unit], shape: RowShape
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The row of each unit, first fit from the largest on, and the lanes of its sequences."""
    rows = np.zeros(len(units), int)
    lanes: list = [None] * len(units)
    # columns that are free in each row: of its prefix, and of each lane
    prefixes = np.full(len(units), shape.prefix_columns)
    room = np.full((len(units), shape.num_lanes), shape.lane_columns)
    for i in np.argsort([-unit.tokens for unit in units], kind="stable").tolist():
        unit = units[i]
        lengths = unit.lengths
        candidates = (
            (prefixes >= unit.prefix)
            & (room.max(axis=1) >= max(lengths))
            & (room.sum(axis=1) >= sum(lengths))
        )

        # the first row in which every sequence finds a lane; an empty row always does
        for row in np.flatnonzero(candidates).tolist():
            lanes[i] = _first_fit(lengths, room[row])
            if lanes[i] is not None:
                break
        rows[i] = row
        prefixes[row] -= unit.prefix
        np.subtract.at(room[row], lanes[i], lengths)
    return rows, lanes


def _fill_rows(
    units: list[_Unit],
    row_of_unit: np.ndarray,
    lanes_of_unit: list[np.ndarray],
    num_rows: int,
    shape: RowShape,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The [R, W] arrays of Packed, and the column that predicts each."""
    width = shape.width
    names = ("source", "segment_ids", "positions", "completion_ids")
    arrays = {name: np.zeros(num_rows * width, np.int32) for name in names}
    arrays["source"] -= 1
    previous = np.tile(np.arange(width) - 1, num_rows)
    count = np.arange(width, dtype=np.int32)

    # column of the next token of each row: in its prefix, then in each of its lanes
    starts = shape.prefix_columns + shape.lane_columns * np.arange(-1, shape.num_lanes)
    starts[0] = 0
    ends = np.arange(0, num_rows * width, width)[:, None] + starts

    segments = [0] * num_rows
    for unit, row, lanes in zip(units, row_of_unit.tolist(), lanes_of_unit):
        segments[row] += 1
        # the shared prompt, then the rest of each sequence: place in the batch, tokens, lane
        pieces = [(unit.sequences[0].start, unit.prefix, 0)]
        for one, length, lane in zip(unit.sequences, unit.lengths, lanes):
            pieces.append((one.start + unit.prefix, length, 1 + lane))
        for number, (start, length, lane) in enumerate(pieces):
            first = ends[row, lane]
            here = slice(first, first + length)
            arrays["source"][here] = count[:length] + start
            arrays["segment_ids"][here] = segments[row]
            arrays["positions"][here] = count[:length] + (unit.prefix if number else 0)
            arrays["completion_ids"][here] = number
            # the first token of a rest follows the last one of the prompt
            if number and unit.prefix:
                previous[first] = (ends[row, 0] - 1) % width
            ends[row, lane] += length

    in_rows = {name: array.reshape(num_rows, width) for name, array in arrays.items()}
    return in_rows, previous.reshape(num_rows, width)
