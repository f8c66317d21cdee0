"""Where the tokens of a batch stand while a model trains on them, so that padding is not computed.

A batch is [B, T]: left-padded prompts, then right-padded completions. A layout sets its sequences side by side in rows
[R, W]; M is the most tokens of a row that count. A loss is a weighted sum over tokens, so every layout has the same.
Sequences that start with the same prompt may share it: it stands once, and their completions are branches after it.

Example: prompt 5 6 with the completions 7 8 and 9, and prompt 3 with the completion 4, in one row of 8 columns:

  tokens       5 6 7 8 9 3 4 .
  segment_ids  1 1 1 1 1 2 2 0    a token sees only its segment,
  branches     0 0 1 1 2 0 1 0    of that branch 0 and its own branch,
  positions    0 1 2 3 2 0 1 0    of those what stands at its column or before
  scored       2 3 4 6            the columns of 7 8 9 4
  previous     1 2 1 5            the columns whose hidden states predict them: both 7 and 9 follow 6
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a [B, T] batch stand in rows [R, W], and what each may see."""

    source: np.ndarray  # [R, W] int32, place in the flattened batch; -1: nothing
    segment_ids: np.ndarray  # [R, W] int32, 1, 2 ... within a row; 0: nothing. A token sees only its own segment
    positions: np.ndarray  # [R, W] int32, place of the token in its own sequence, from 0
    branches: np.ndarray | None  # [R, W] int32, only with shared prompts: 0: the prompt; i: the i-th completion
    scored: np.ndarray  # [R, M] int32, columns of the tokens that count, in order; 0 where there is none
    previous: np.ndarray  # [R, M] int32, the column whose hidden state predicts that token
    is_scored: np.ndarray  # [R, M] bool
    shape: tuple[int, int]  # (B, T)
    num_parts: int  # micro-batches that hold anything; 1 where the rows are the sequences

    def place(self, x_BT, fill=0) -> np.ndarray:
        """[B, T] -> [R, W], `fill` where nothing stands. A shared prompt has the values of its first sequence."""
        x_RW = np.asarray(x_BT).reshape(-1)[self.source]
        x_RW[self.source < 0] = fill
        return x_RW

    def back(self, x_RW) -> np.ndarray:
        """[R, W] -> [B, T]: the values at the tokens that count, 0 elsewhere."""
        x_RW = np.asarray(x_RW)
        x_BT = np.zeros(self.shape, x_RW.dtype)
        rows, nth = np.nonzero(self.is_scored)
        columns = self.scored[rows, nth]
        x_BT.reshape(-1)[self.source[rows, columns]] = x_RW[rows, columns]
        return x_BT


def unpacked(token_mask_BT, counts_BT, num_scored: int | None = None) -> Layout:
    """The rows are the sequences where they stand; the real tokens of each must be contiguous.

    `num_scored` is M; None takes what the batch needs, rounded up to quarters of a row. ValueError where a row counts
    more, or counts a token that nothing predicts.
    """
    token_mask_BT, counts_BT = np.asarray(token_mask_BT, bool), np.asarray(counts_BT, bool)
    _check_predicted(token_mask_BT, counts_BT)
    return Layout(
        source=np.arange(counts_BT.size, dtype=np.int32).reshape(counts_BT.shape),
        segment_ids=token_mask_BT.astype(np.int32),
        positions=np.maximum(token_mask_BT.cumsum(axis=1, dtype=np.int32) - 1, 0),
        branches=None,
        **_scored(counts_BT, {}, num_scored),
        shape=counts_BT.shape,
        num_parts=1,
    )


def packed(
    tokens_BT, token_mask_BT, counts_BT, width, rows_per_part, num_parts, shards, share_prompts, num_scored=None
) -> Layout:
    """Sequences side by side in shards * num_parts * rows_per_part rows of `width`, shard by shard, empty rows last.

    Micro-batch i is the i-th `rows_per_part` rows of every shard. What no token that counts can see is dropped: what
    follows the last such token of a sequence, and a sequence without any. With `share_prompts`, neighbours with the
    same tokens before the first that counts share them. `num_scored` as in `unpacked`. ValueError where a sequence is
    longer than `width`, where rows run out (`rows_needed_at_most` says how many do), and as in `unpacked`.
    """
    token_mask_BT, counts_BT = np.asarray(token_mask_BT, bool), np.asarray(counts_BT, bool)
    sequences = _sequences(token_mask_BT, counts_BT, width)
    units = _groups(np.asarray(tokens_BT), sequences, width) if share_prompts else [[one] for one in sequences]
    lengths = [unit[0].lead + sum(one.stop - one.first for one in unit) for unit in units]
    row_of_unit = _first_fit(lengths, width)
    fills = np.bincount(row_of_unit, lengths)  # tokens of each used row
    num_rows = shards * num_parts * rows_per_part
    if len(fills) > num_rows:
        raise ValueError(f"the batch takes {len(fills)} rows of width {width}, but there are only {num_rows}")
    row_of_unit = _dealt(fills, rows_per_part, num_parts, shards)[row_of_unit]
    arrays, jumps = _laid_out(units, row_of_unit, num_rows, width)
    counts_RW = counts_BT.reshape(-1)[arrays["source"]] & (arrays["source"] >= 0)
    return Layout(
        **arrays | ({} if share_prompts else {"branches": None}),
        **_scored(counts_RW, jumps, num_scored),
        shape=counts_BT.shape,
        num_parts=max(1, -(-len(fills) // (shards * rows_per_part))),
    )


def rows_needed_at_most(num_sequences: int, longest: int, width: int) -> int:
    """How many rows `packed` takes at most, for sequences of at most `longest` tokens, prompts shared or not.

    Of two used rows, whatever opened the later did not fit into the earlier, so together they hold more than `width`.
    Summed over every row and the next (after the last, the first): 2 * tokens > rows * width, if there are two rows.
    Sharing adds no tokens: a unit is never longer than its sequences are together. And no row is without a sequence.
    """
    return min(num_sequences, max(1, -(-2 * num_sequences * longest // width) - 1))


class _Sequence(NamedTuple):
    """What is kept of one sequence, as places in the flattened batch."""

    start: int  # its first real token
    first: int  # its first token that counts; those before are its lead
    stop: int  # one past its last token that counts

    @property
    def lead(self) -> int:
        return self.first - self.start


def _check_predicted(token_mask_BT, counts_BT):
    predicted_BT = token_mask_BT.copy()
    predicted_BT[:, 1:] &= token_mask_BT[:, :-1]
    predicted_BT[:, :1] = False
    wrong = np.argwhere(counts_BT & ~predicted_BT)
    if len(wrong):
        b, t = wrong[0]
        raise ValueError(f"sequence {b} counts column {t}, but no real token right before it predicts a real one there")


def _sequences(token_mask_BT, counts_BT, width) -> list[_Sequence]:
    """The sequences that count anything, in the order of the batch."""
    _check_predicted(token_mask_BT, counts_BT)
    sequences, T = [], counts_BT.shape[1]
    spans = token_mask_BT.argmax(axis=1), counts_BT.argmax(axis=1), T - counts_BT[:, ::-1].argmax(axis=1)
    for b in np.flatnonzero(counts_BT.any(axis=1)).tolist():
        start, first, stop = (int(place_B[b]) for place_B in spans)
        if not token_mask_BT[b, start:stop].all():
            raise ValueError(f"sequence {b} has padding between its tokens; it may only stand at the two ends")
        if stop - start > width:
            raise ValueError(f"sequence {b} takes {stop - start} tokens, which do not fit into a row of width {width}")
        sequences.append(_Sequence(b * T + start, b * T + first, b * T + stop))
    return sequences


def _groups(tokens_BT, sequences, width) -> list[list[_Sequence]]:
    """Neighbours with the same lead, together; divided into several groups where they are too long for one row."""
    tokens, groups = tokens_BT.reshape(-1), []
    for _, run in itertools.groupby(sequences, lambda one: tokens[one.start : one.first].tobytes()):
        run = list(run)
        rows = _first_fit([one.stop - one.first for one in run], width - run[0].lead)
        groups += [[run[i] for i in np.flatnonzero(rows == row)] for row in range(rows.max() + 1)]
    return groups


def _first_fit(lengths, width) -> np.ndarray:
    """The row of each: from the longest on, each goes to the first row with room for it."""
    rows, room = np.zeros(len(lengths), int), np.full(len(lengths), width)
    for i in np.argsort(-np.asarray(lengths, int), kind="stable"):
        rows[i] = np.argmax(room >= lengths[i])
        room[rows[i]] -= lengths[i]
    return rows


def _dealt(fills, rows_per_part, num_parts, shards) -> np.ndarray:
    """Where each used row stands: the fullest are dealt first, across the shards of a part, then to the next part.

    Every other pass goes the other way round, or the first shard and the first part would always get the fuller row.
    """
    slot, shard = np.divmod(np.arange(len(fills)), shards)  # as many for each shard, its first ones
    part, nth = np.divmod(slot, rows_per_part)
    turn = np.lexsort((np.where((nth + part) % 2, -shard, shard), np.where(nth % 2, -part, part), nth))
    rows = np.zeros(len(fills), int)
    rows[np.argsort(-fills, kind="stable")] = (shard * num_parts * rows_per_part + slot)[turn]
    return rows


def _laid_out(units, row_of_unit, num_rows, width) -> tuple[dict, dict]:
    """The [R, W] arrays of a layout, and where a branch starts (in them, flattened): the last column of its lead."""
    names = ("source", "segment_ids", "positions", "branches")
    arrays = {name: np.full(num_rows * width, -1 if name == "source" else 0, np.int32) for name in names}
    segments, ends, jumps = [0] * num_rows, list(range(0, num_rows * width, width)), {}
    count = np.arange(width, dtype=np.int32)
    for unit, row in zip(units, row_of_unit.tolist()):
        segments[row] += 1
        lead, predictor = unit[0].lead, (ends[row] + unit[0].lead - 1) % width
        pieces = [(unit[0].start, lead, 0), *((one.first, one.stop - one.first, lead) for one in unit)]
        for branch, (start, length, position) in enumerate(pieces):
            values = (count[:length] + start, segments[row], count[position : position + length], branch)
            for name, value in zip(names, values):
                arrays[name][ends[row] : ends[row] + length] = value
            if branch:
                jumps[ends[row]] = predictor
            ends[row] += length
    return {name: array.reshape(num_rows, width) for name, array in arrays.items()}, jumps


def _scored(counts_RW, jumps, num_scored) -> dict:
    """The [R, M] arrays of a layout; the column before predicts a token, unless `jumps` names another."""
    (R, W), counted = counts_RW.shape, np.flatnonzero(counts_RW)
    previous = counted % W - 1
    previous[np.searchsorted(counted, list(jumps))] = list(jumps.values())
    counted_R = np.bincount(counted // W, minlength=R)
    most = counted_R.max(initial=0)
    if num_scored is None:
        step = max(1, -(-W // 4))  # few sizes, so that few are compiled
        num_scored = max(1, -(-int(most) // step)) * step
    if most > num_scored:
        raise ValueError(f"row {counted_R.argmax()} counts {most} tokens, more than num_scored={num_scored}")
    is_scored = np.arange(num_scored) < counted_R[:, None]
    arrays = {"scored": np.zeros((R, num_scored), np.int32), "previous": np.zeros((R, num_scored), np.int32)}
    arrays["scored"][is_scored] = counted % W  # both go row by row, in order
    arrays["previous"][is_scored] = previous
    return arrays | {"is_scored": is_scored}
