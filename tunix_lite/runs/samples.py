"""samples/*.jsonl: every completion of a step, and all that made its reward and its advantage.

From the rows of a file the means that the step logged can be computed again, to the bit."""

from dataclasses import fields
from typing import Any

import numpy as np

from tunix_lite.basics.types import FINISH, Batch, Graded, Metrics, Rollout
from tunix_lite.runs.evaluate import Evaluated
from tunix_lite.tracking.console import Console
from tunix_lite.tracking.rundir import RunDir


def keep_samples(
    run_dir: RunDir,
    console: Console,
    step: int,
    graded: Graded,
    num_shown: int,
    batch: Batch | None = None,
) -> list[dict[str, Any]]:
    """Writes all completions of a step, and shows so many of them, from best to worst. Returns the
    lines written. batch: what the step learned from, which has their advantages."""
    # A batch has an advantage for each completion, the mean over its tokens where they differ,
    # unless its sequences are others.
    advantages_B = None
    rollout = graded.rollout
    if batch is not None and batch.advantages is not None and rollout is not None:
        mask_BT = rollout.completion_mask
        if np.array_equal(batch.tokens, rollout.tokens):
            advantages_BT = np.asarray(batch.advantages, np.float64)
            advantages_B = _means_over_tokens(advantages_BT, mask_BT)
    rows = sample_rows(graded, advantages_B)
    run_dir.write_samples(step, rows)
    console.samples(from_best_to_worst(rows, num_shown))
    return rows


def arrays_of_batch(batch: Batch) -> dict[str, np.ndarray]:
    """All arrays of a batch by name, `streams.NAME` for a stream; without a model's constants."""
    named = {field.name: getattr(batch, field.name) for field in fields(batch)}
    streams = named.pop("streams")
    # a teacher's table would be larger than all the rest
    del named["constants"]
    named |= {f"streams.{name}": value for name, value in streams.items()}
    return {name: np.asarray(value) for name, value in named.items() if value is not None}


def from_best_to_worst(rows: list[dict[str, Any]], num_shown: int) -> list[dict[str, Any]]:
    """Picks so many of the rows that have a reward, evenly spread over their order by it."""
    rewarded = [row for row in rows if row["reward"] is not None]
    ranked = sorted(rewarded, key=lambda row: -row["reward"])
    count = min(num_shown, len(ranked))
    chosen = np.linspace(0, len(ranked) - 1, count).round().astype(int)
    return [ranked[i] for i in chosen]


def sample_rows(
    graded: Graded, advantages_B: np.ndarray | None = None
) -> list[dict[str, Any]]:
    """A line of samples/step_000010.jsonl for each completion, in the order of the rollout.
    advantages_B: what is learned from each; None: nothing is, as in an evaluation."""
    rows = []
    rollout = graded.rollout
    for i, text in enumerate(graded.completions):
        row = {
            "prompt": graded.prompts[i],
            "completion": text,
            "extracted": graded.extracted[i],
            "correct": bool(graded.correct[i]),
            "reward": None if graded.dropped[i] else float(graded.rewards[i]),
            "rewards": {name: _number(values_B[i]) for name, values_B in graded.each.items()},
            "advantage": None if advantages_B is None else _number(advantages_B[i]),
        }
        if graded.failures:
            row["failed"] = graded.failures[i]
        if graded.examples:
            row["group"] = i // graded.num_generations
            row["expected"] = graded.examples[i].get("answer")
            row["example"] = graded.examples[i]
        if rollout is not None and rollout.conversations is not None:
            row |= _of_conversation(rollout, i)
        if rollout is not None:
            mask_T = rollout.completion_mask[i]
            row["finish_reason"] = FINISH[int(rollout.finish[i])]
            row["tokens"] = rollout.tokens[i][mask_T].tolist()
            # as they were when they were drawn
            row["logprobs"] = rollout.logprobs[i][mask_T].tolist()
        rows.append(row)
    return rows


def evaluation_rows(evaluated: Evaluated) -> list[dict[str, Any]]:
    """The lines of samples/evaluation_000010.jsonl: greedy completions first, then the samples."""
    rows = [{"sampled": False} | row for row in sample_rows(evaluated.greedy)]
    if evaluated.sampled is not None:
        rows += [{"sampled": True} | row for row in sample_rows(evaluated.sampled)]
    return rows


def _of_conversation(rollout: Rollout, i: int) -> dict[str, Any]:
    """The turns of a conversation. `all_tokens` are those after the prompt, answers included, and
    spans are places among them, [begin, end)."""
    one = rollout.conversations[i]
    token_mask_T = rollout.token_mask[i]
    # the file counts from the prompt on, since padding is no part of a conversation
    first = one.turns[0].begin
    turns = []
    for turn in one.turns:
        reply = turn.reply
        row = {
            "span": [turn.begin - first, turn.end - first],
            "completion": reply.completion,
            "observation": reply.observation,
            "reward": float(reply.reward),
        }
        if reply.info:
            row["info"] = reply.info
        if reply.failure:
            row["failed"] = f"{reply.failure}: {reply.message}"
        turns.append(row)
    tokens = rollout.tokens[i, first:][token_mask_T[first:]]
    return {"turns": turns, "ended_by": one.ended, "all_tokens": tokens.tolist()}


def advantage_metrics(batch: Batch) -> Metrics:
    """Measures the advantages of all completions that something is learned from; {} without any."""
    mask_BT = np.asarray(batch.loss_weight) != 0
    learned_B = mask_BT.any(axis=1)
    if batch.advantages is None or not learned_B.any():
        return {}
    advantages_BT = np.asarray(batch.advantages, np.float64)
    values = _means_over_tokens(advantages_BT[learned_B], mask_BT[learned_B])
    return {
        "advantage/mean": float(values.mean()),
        "advantage/std": float(values.std()),
        "advantage/min": float(values.min()),
        "advantage/max": float(values.max()),
    }


def _means_over_tokens(advantages_BT: np.ndarray, mask_BT: np.ndarray) -> np.ndarray:
    """[B] float64: the mean of each row over its tokens, and exactly their value if they agree."""
    first_B = mask_BT.argmax(axis=1)
    one_B = advantages_BT[np.arange(len(first_B)), first_B]

    # The mean of equal numbers is not always the number itself.
    are_equal_B = (~mask_BT | (advantages_BT == one_B[:, None])).all(axis=1)
    lengths_B = np.maximum(mask_BT.sum(axis=1), 1)
    means_B = np.where(mask_BT, advantages_BT, 0.0).sum(axis=1) / lengths_B
    return np.where(are_equal_B, one_B, means_B)


def _number(value: float) -> float | None:
    """Returns None for nan, since JSON has no nan: a failure has no number."""
    return float(value) if np.isfinite(value) else None
