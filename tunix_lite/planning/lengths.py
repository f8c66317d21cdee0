"""How long prompts and completions will be: as a run recorded them, or assumed, exponential with a
mean that is a share of the maximum: many are short, a few are long."""

from dataclasses import dataclass

import numpy as np

# The scale r of an exponential, cut off at 1, whose mean is half of that: r (1 - exp(-1 / r)).
_SCALE = 0.6275004874579876
# Drawn the same for every mesh and setting, so that plans can be compared.
_SEED = 0


@dataclass(frozen=True)
class Lengths:
    """Where the lengths of a plan come from.
    Example: Lengths().draw(prompts=16, generations=8, longest=(32, 64))."""

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
        rng = np.random.default_rng(_SEED)
        most_prompt, most_new = longest
        shape = (prompts, generations)
        if self.mean_prompt is None:
            prompt_lengths = _assumed(rng, (prompts,), most_prompt)
        else:
            # A recorded mean is that of prompts which hardly differ.
            fixed = min(most_prompt, max(1, round(self.mean_prompt)))
            prompt_lengths = np.full(prompts, fixed)
        if self.completions:
            drawn = rng.choice(np.asarray(self.completions), shape)
            return prompt_lengths, np.minimum(drawn, most_new)
        return prompt_lengths, _assumed(rng, shape, most_new)

    def __str__(self) -> str:
        if self.completions:
            mean = np.mean(self.completions)
            return (
                f"lengths recorded by {self.recorded_by}: {len(self.completions)} completions of "
                f"{mean:.1f} tokens on average, prompts of {self.mean_prompt:.1f}"
            )
        return "assumed lengths: prompts 50%, completions 50% of the longest on average"


def _assumed(rng: np.random.Generator, shape: tuple[int, ...], longest: int) -> np.ndarray:
    """Lengths from 1 to `longest` whose mean is half of it."""
    drawn = np.ceil(rng.exponential(_SCALE * longest, shape))
    return np.clip(drawn, 1, longest).astype(int)
