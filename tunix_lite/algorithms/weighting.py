"""Weights of completion tokens: the aggregation of a loss.

The weights are made once, where the whole global batch is in view. Afterwards a loss is a plain
sum, so that micro-batches, shards and hosts only add up and none of them can change the result.
"""

from collections.abc import Callable

import numpy as np

from tunix_lite.algorithms.pieces import takes

# completion mask [B, T] -> loss weights [B, T]
Weighting = Callable[..., np.ndarray]


def per_token(completion_mask_BT: np.ndarray) -> np.ndarray:
    """Every completion token of the batch counts the same: the global token mean (DAPO,
    arXiv:2503.14476)."""
    return (completion_mask_BT / max(completion_mask_BT.sum(), 1)).astype(np.float32)


def per_sequence(completion_mask_BT: np.ndarray) -> np.ndarray:
    """Every completion counts the same, however long: the mean over sequences of token means
    (arXiv:2402.03300)."""
    lengths_B1 = np.maximum(completion_mask_BT.sum(axis=1, keepdims=True), 1)
    return (completion_mask_BT / lengths_B1 / len(completion_mask_BT)).astype(np.float32)


def per_prompt(completion_mask_BT: np.ndarray, prompt_B: np.ndarray) -> np.ndarray:
    """Every prompt counts the same: the mean over prompts of the token means of their completions
    (arXiv:2510.13786).

    prompt_B: the number of the prompt of each completion."""
    lengths_B = completion_mask_BT.sum(axis=1)
    prompts, place_B = np.unique(prompt_B, return_inverse=True)
    tokens_P = np.bincount(place_B, weights=lengths_B)
    tokens_B1 = np.maximum(tokens_P, 1)[place_B][:, None]
    return (completion_mask_BT / tokens_B1 / len(prompts)).astype(np.float32)


def constant_length(completion_mask_BT: np.ndarray, length: int) -> np.ndarray:
    """Every token counts 1 / (B * length), whatever the lengths are (Dr. GRPO,
    arXiv:2503.20783)."""
    if length < 1:
        raise ValueError(f"weighting.length={length} must be at least 1")
    return (completion_mask_BT / (len(completion_mask_BT) * length)).astype(np.float32)


def weights_of_learned(
    weighting: Weighting,
    completion_mask_BT: np.ndarray,
    prompt_B: np.ndarray,
    num_mini_batches: int,
) -> np.ndarray:
    """[B, T] float32; 0 for completions that are not learned from; `weighting` does not see them.

    prompt_B: the number of each completion's prompt, which a weighting with such a parameter gets;
    below 0: it is not learned from. num_mini_batches: the sequences are so many mini-batches, one
    after the other, and each has weights of its own."""
    weights_BT = np.zeros(completion_mask_BT.shape, np.float32)
    # Each mini-batch is an update of its own, so it is weighted by itself.
    for rows in np.split(np.arange(len(prompt_B)), num_mini_batches):
        rows = rows[prompt_B[rows] >= 0]
        # weightings divide by what there is
        if len(rows):
            known = {"prompt_B": prompt_B[rows]} if takes(weighting, "prompt_B") else {}
            weights_BT[rows] = weighting(completion_mask_BT[rows], **known)
    return weights_BT
