"""Penalties that are added to the reward of a completion for its length, in tokens, chosen by name
in YAML (`algorithm.shaping`): lengths [B] -> penalties [B], float64.

A group is judged as mixed, for `algorithm.agreeing_groups`, before this is added.
"""

import numpy as np


def overlong(
    lengths_B: np.ndarray, length: int, buffer: float = 0.2, factor: float = 1.0
) -> np.ndarray:
    """0 for a completion shorter than (1 - buffer) length tokens; from there on the penalty rises
    to `factor` at `length` tokens (DAPO, arXiv:2503.14476).
    Example: length 100, buffer 0.2 -> of 80, 90 and 100 tokens 0, -0.5 and -1."""
    if length < 1 or not 0 < buffer <= 1:
        raise ValueError(
            f"shaping: length={length} must be at least 1 token, and buffer={buffer} a share of it "
            "above 0, 1 at most"
        )
    # A penalty that rose all at once would punish a completion for its last token alone.
    free = (1 - buffer) * length
    excess_B = (np.asarray(lengths_B, np.float64) - free) / (buffer * length)
    return -factor * np.clip(excess_B, 0.0, 1.0)
