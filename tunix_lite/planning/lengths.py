"""How long prompts and completions will be: as a run recorded them, or assumed, exponential with a
mean that is a share of the maximum: many are short, a few are long."""

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

# Share of the maximum that a mean length has, if nobody says.
_MEAN_SHARE = 0.5
# Drawn the same for every mesh and setting, so that plans can be compared.
SEED = 0
# Above this share nearly all lengths have the maximum.
_ALMOST_ALL = 0.995


@dataclass(frozen=True)
class Lengths:
    """Where the lengths of a plan come from.
    Example: Lengths(0.5, 0.25).draw(prompts=16, generations=8, longest=(32, 64))."""

    # Means as shares of the maxima.
    prompt_share: float = _MEAN_SHARE
    completion_share: float = _MEAN_SHARE
    # Tokens of completions that a run has recorded; (): assumed.
    completions: tuple[int, ...] = ()
    # The mean of its prompts in tokens; None: assumed.
    mean_prompt: float | None = None
    # The folder of that run.
    recorded_by: str = ""

    def draw(
        self, prompts: int, generations: int, longest: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """(tokens of each prompt [P], tokens of each completion [P, G])."""
        rng = np.random.default_rng(SEED)
        most_prompt, most_new = longest
        shape = (prompts, generations)
        if self.mean_prompt is None:
            prompt_lengths = assumed(rng, (prompts,), most_prompt, self.prompt_share)
        else:
            # A recorded mean is that of prompts which hardly differ.
            fixed = min(most_prompt, max(1, round(self.mean_prompt)))
            prompt_lengths = np.full(prompts, fixed)
        if self.completions:
            drawn = rng.choice(np.asarray(self.completions), shape)
            return prompt_lengths, np.minimum(drawn, most_new)
        return prompt_lengths, assumed(rng, shape, most_new, self.completion_share)

    def __str__(self) -> str:
        if self.completions:
            mean = np.mean(self.completions)
            return (
                f"lengths recorded by {self.recorded_by}: {len(self.completions)} completions of "
                f"{mean:.1f} tokens on average, prompts of {self.mean_prompt:.1f}"
            )
        shares = f"prompts {self.prompt_share:.0%}, completions {self.completion_share:.0%}"
        return f"assumed lengths: {shares} of the longest on average"


def assumed(
    rng: np.random.Generator, shape: tuple[int, ...], longest: int, share: float
) -> np.ndarray:
    """Lengths from 1 to `longest` whose mean is this share of it."""
    if share >= _ALMOST_ALL:
        return np.full(shape, longest)
    # The scale r of an exponential whose mean, cut off at 1, is `share`: r (1 - exp(-1 / r)).
    scale = brentq(lambda r: -r * math.expm1(-1 / r) - share, 1e-3, 1e3, xtol=1e-12)
    drawn = np.ceil(rng.exponential(scale * longest, shape))
    return np.clip(drawn, 1, longest).astype(int)
