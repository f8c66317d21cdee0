"""GRPO whose gradient is sometimes no number, where the batch says so: then a run that goes on meets it again."""

import zlib

import numpy as np

from tunix_lite.algorithms.grpo import GRPO


class NotFinite(GRPO):
    """One batch in five, by its tokens, holds an advantage that is no number."""

    def batch_of(self, *arguments):
        batch, *rest = super().batch_of(*arguments)
        if zlib.crc32(np.asarray(batch.tokens).tobytes()) % 5 == 0:
            advantages = np.array(batch.advantages)
            advantages[0] = np.nan
            batch = batch.replace(advantages=advantages)
        return batch, *rest
