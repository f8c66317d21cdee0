"""Batches that no model has sampled, for benchmarks: what an update costs does not depend on what the tokens say."""

import numpy as np

from tunix_lite.basics.types import Batch
from tunix_lite.learner.packing import RowShape, rows_needed_at_most
from tunix_lite.learner.rows import RowLayout
from tunix_lite.models.architecture import Architecture

GENERATIONS = 8


def made_up_batch(cfg: Architecture, sequences: int, prompt: int, new: int, ragged: bool = True) -> Batch:
    """Groups that share a prompt; completions are full or, ragged, of any length from one to that."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, cfg.vocab_size, (sequences, prompt + new)).astype(np.int32)
    tokens[:, :prompt] = tokens[np.arange(sequences) // GENERATIONS * GENERATIONS, :prompt]
    lengths = rng.integers(1, new + 1, sequences) if ragged else np.full(sequences, new)
    mask = np.arange(prompt + new) < prompt + lengths[:, None]
    counts = mask & (np.arange(prompt + new) >= prompt)
    noise = rng.normal(size=tokens.shape).astype(np.float32)
    weight = (counts / counts.sum()).astype(np.float32)
    return Batch(tokens, mask, weight, advantages=noise, old_logprobs=noise * 0.1 - np.log(cfg.vocab_size))


def packed_rows(packing: str, sequences: int, prompt: int, new: int) -> tuple[RowShape, int]:
    """The shape of a packed row, and how many rows the sequences need at most."""
    if packing == "sequences":
        width = prompt + new + (prompt + new) % 2
        return RowShape(width), rows_needed_at_most(sequences, prompt + new, width)
    group = min(GENERATIONS, sequences)
    return RowShape(new + new % 2, group, prompt + prompt % 2), -(-sequences // group)


def rows_for(packing: str, sequences: int, prompt: int, new: int) -> RowLayout:
    """All sequences at once, on one device: one a row, side by side, or a prompt and its group's completions."""
    if packing == "none":
        return RowLayout("none", 1, new)
    shape, count = packed_rows(packing, sequences, prompt, new)
    return RowLayout(packing, 1, None, shape, count)
