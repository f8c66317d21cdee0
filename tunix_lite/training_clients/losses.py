"""Token losses, as the Tinker SDK names them: each is a plain sum over tokens.

p are log-probabilities of the targets now, q those of the policy that sampled (`logprobs`), A
advantages, w weights (1 where none are given), and r = exp(p - q), where p - q is kept within -20
and 20:

  cross_entropy         - sum w p
  importance_sampling   - sum w r A
  ppo                   - sum w min(r A, clip(r, low, high) A)            (arXiv:1707.06347)
  cispo                 - sum w sg[clip(r, low, high)] p A                (arXiv:2506.13585)
  dro                   - sum w (p A - beta / 2 (p - q)^2)                (arXiv:2405.19107)

No gradient goes through sg. low and high are clip_low_threshold and clip_high_threshold.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tunix_lite.algorithms.ratios import MAX_LOG_RATIO
from tunix_lite.basics.types import Metrics, RowBatch, TokenScores

_RATIO_INPUTS = ("logprobs", "advantages")
_CLIPPING = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
# The settings of each loss, and their defaults.
SETTINGS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": _CLIPPING,
    "cispo": _CLIPPING,
    "dro": {"beta": 0.05},
}


@dataclass(frozen=True)
class TokenLoss:
    """A loss with its settings.
    Example: token_loss("ppo", {}) of r = 1.5 and A = 1 is -1.2."""

    name: str
    settings: tuple[float, ...]

    @property
    def needs(self) -> tuple[str, ...]:
        """The values of a Datum without which it has no meaning."""
        return () if self.name == "cross_entropy" else _RATIO_INPUTS

    def loss(self, scores: TokenScores, batch: RowBatch) -> tuple[jax.Array, Metrics]:
        """The sum, and the log-probabilities [R, W]."""
        p_RW = scores.logprobs
        A_RW = batch.streams["advantages"]
        counts_RW = batch.token_mask & (batch.streams["weights"] != 0)
        # 0 at tokens without weight, whatever fills their q
        gap_RW = jnp.where(counts_RW, p_RW - batch.streams["logprobs"], 0.0)
        ratio_RW = jnp.exp(jnp.clip(gap_RW, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        match self.name:
            case "cross_entropy":
                gain_RW = p_RW
            case "importance_sampling":
                gain_RW = ratio_RW * A_RW
            case "ppo":
                clipped_RW = jnp.clip(ratio_RW, *self.settings)
                gain_RW = jnp.minimum(ratio_RW * A_RW, clipped_RW * A_RW)
            case "cispo":
                clipped_RW = jnp.clip(ratio_RW, *self.settings)
                gain_RW = jax.lax.stop_gradient(clipped_RW) * A_RW * p_RW
            case "dro":
                [beta] = self.settings
                gain_RW = p_RW * A_RW - 0.5 * beta * gap_RW**2
        # Not a product alone: a weight of 0 times an infinite gain is NaN.
        weighted_RW = jnp.where(counts_RW, batch.streams["weights"] * gain_RW, 0.0)
        return -jnp.sum(weighted_RW), {"logprobs": p_RW}


def token_loss(name: str, settings: Mapping[str, float]) -> TokenLoss:
    """The loss of this name. Raises ValueError for another name or setting.
    Example: token_loss("ppo", {"clip_high_threshold": 1.28})."""
    if name not in SETTINGS:
        raise ValueError(f"loss={name!r}; a Datum is for one of {', '.join(SETTINGS)}")
    values = dict(SETTINGS[name])
    for key, value in settings.items():
        if key not in values:
            names = ", ".join(values) or "no settings"
            raise ValueError(f"settings: {name} has no {key!r}; it has {names}")
        try:
            values[key] = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"settings: {key}={value!r} is no number") from error
    if not 0 <= values.get("beta", 0.0) < math.inf:
        raise ValueError(f"beta={values['beta']}; it must be 0 or more, and finite")
    low, high = (values.get(key, default) for key, default in _CLIPPING.items())
    # Bounds of a ratio that are the wrong way round would clip each token to nonsense.
    if not 0 <= low <= high < math.inf:
        raise ValueError(
            f"clip_low_threshold={low} and clip_high_threshold={high}; these are bounds of a "
            "ratio, such as 0.8 and 1.2"
        )
    return TokenLoss(name, tuple(values.values()))
