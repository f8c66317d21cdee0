"""Puts completions after another prompt for the teacher, such as one with the expected answer: the
same weights with a demonstration are a better policy than without (arXiv:2601.19897).
"""

import numpy as np

from tunix_lite.types import Batch, Prompts


def after_prompts(batch: Batch, first: int, prompts: Prompts) -> Batch:
    """The completions of a batch after other prompts, one for each sequence: [B, L + T - first].

    first: the column in which completions begin. prompts: as token ids; L of them are in the
    longest. Only tokens, their mask and their weights are in the batch.

    Example: 5 6 | 7 8 after the prompt 9 -> 9 | 7 8, of the same weights.
    """
    longest = max(map(len, prompts))
    shape = (len(prompts), longest)
    tokens = np.zeros(shape, np.int32)
    mask = np.zeros(shape, bool)
    for b, prompt in enumerate(prompts):
        tokens[b, longest - len(prompt) :] = prompt
        mask[b, longest - len(prompt) :] = True
    weight = np.zeros(shape, np.float32)

    def joined(before: np.ndarray, values: np.ndarray) -> np.ndarray:
        return np.concatenate([before, np.asarray(values)[:, first:]], axis=1)

    return Batch(
        tokens=joined(tokens, batch.tokens),
        token_mask=joined(mask, batch.token_mask),
        loss_weight=joined(weight, batch.loss_weight),
    )
