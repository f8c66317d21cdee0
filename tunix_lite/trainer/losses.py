"""Token losses, as the Tinker SDK names them: each is a plain sum over tokens.

p are log-probabilities of the targets now, q those of the policy that sampled (`logprobs`), A
advantages, w weights (1 where none are given), and r = exp(p - q), where p - q is kept within -20
and 20:

  cross_entropy         - sum w p
  importance_sampling   - sum w r A
  ppo                   - sum w min(r A, clip(r, low, high) A)
  cispo                 - sum w sg[clip(r, low, high)] p A      (sg: no gradient goes through it)
  dro                   - sum w (p A - beta / 2 (p - q)^2)
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tunix_lite.algorithms.ratios import MAX_LOG_RATIO
from tunix_lite.types import Metrics, RowBatch, TokenScores

RATIO_INPUTS = ("logprobs", "advantages")


@dataclass(frozen=True)
class CrossEntropyLoss:
    """Makes the targets likely.

    Example: CrossEntropyLoss() of log-probabilities [-1, -2] with weights [0, 1] is 2.
    """

    needs: ClassVar[tuple[str, ...]] = ()

    def loss(self, scores: TokenScores, batch: RowBatch) -> tuple[jax.Array, Metrics]:
        """The sum, and the log-probabilities [R, W]."""
        return _summed(scores.logprobs, scores, batch)


@dataclass(frozen=True)
class ImportanceSamplingLoss:
    """The policy gradient, corrected by the ratio to the policy that sampled.

    Example: ImportanceSamplingLoss() of p = q = -1 and A = 2 is -2.
    """

    needs: ClassVar[tuple[str, ...]] = RATIO_INPUTS

    def loss(self, scores: TokenScores, batch: RowBatch) -> tuple[jax.Array, Metrics]:
        """The sum, and the log-probabilities [R, W]."""
        gain = _ratio(scores, batch) * batch.streams["advantages"]
        return _summed(gain, scores, batch)


@dataclass(frozen=True)
class PPOLoss:
    """The clipped surrogate of PPO (arXiv:1707.06347).

    Example: PPOLoss() of r = 1.5 and A = 1 is -1.2.
    """

    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2
    needs: ClassVar[tuple[str, ...]] = RATIO_INPUTS

    def __post_init__(self):
        _check_thresholds(self.clip_low_threshold, self.clip_high_threshold)

    def loss(self, scores: TokenScores, batch: RowBatch) -> tuple[jax.Array, Metrics]:
        """The sum, and the log-probabilities [R, W]."""
        ratio = _ratio(scores, batch)
        advantages = batch.streams["advantages"]
        clipped = jnp.clip(ratio, self.clip_low_threshold, self.clip_high_threshold)
        return _summed(jnp.minimum(ratio * advantages, clipped * advantages), scores, batch)


@dataclass(frozen=True)
class CISPOLoss:
    """The clipped ratio as a constant factor (arXiv:2506.13585).

    Example: CISPOLoss() of r = 1.5, p = -1 and A = 1 is 1.2.
    """

    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2
    needs: ClassVar[tuple[str, ...]] = RATIO_INPUTS

    def __post_init__(self):
        _check_thresholds(self.clip_low_threshold, self.clip_high_threshold)

    def loss(self, scores: TokenScores, batch: RowBatch) -> tuple[jax.Array, Metrics]:
        """The sum, and the log-probabilities [R, W]."""
        ratio = _ratio(scores, batch)
        clipped = jnp.clip(ratio, self.clip_low_threshold, self.clip_high_threshold)
        factor = jax.lax.stop_gradient(clipped) * batch.streams["advantages"]
        return _summed(factor * scores.logprobs, scores, batch)


@dataclass(frozen=True)
class DROLoss:
    """Direct reward optimisation, token by token (arXiv:2405.19107).

    Example: DROLoss(beta=0.05) of p = -1, q = -3 and A = 2 is 2.1.
    """

    beta: float = 0.05
    needs: ClassVar[tuple[str, ...]] = RATIO_INPUTS

    def __post_init__(self):
        if not 0 <= self.beta < float("inf"):
            raise ValueError(f"beta={self.beta}; it must be 0 or more, and finite")

    def loss(self, scores: TokenScores, batch: RowBatch) -> tuple[jax.Array, Metrics]:
        """The sum, and the log-probabilities [R, W]."""
        distance = _gap(scores, batch)
        gain = scores.logprobs * batch.streams["advantages"] - 0.5 * self.beta * distance**2
        return _summed(gain, scores, batch)


TokenLoss = CrossEntropyLoss | ImportanceSamplingLoss | PPOLoss | CISPOLoss | DROLoss
TOKEN_LOSSES = {
    "cross_entropy": CrossEntropyLoss,
    "importance_sampling": ImportanceSamplingLoss,
    "ppo": PPOLoss,
    "cispo": CISPOLoss,
    "dro": DROLoss,
}


def token_loss(name: str, settings: Mapping[str, Any]) -> TokenLoss:
    """The loss of this name. Raises ValueError for another name or setting.

    Example: token_loss("ppo", {"clip_high_threshold": 1.28}).
    """
    if name not in TOKEN_LOSSES:
        raise ValueError(f"loss={name!r}; a Datum is for one of {', '.join(TOKEN_LOSSES)}")
    kind = TOKEN_LOSSES[name]
    known = [field.name for field in fields(kind)]
    values = {}
    for key, value in settings.items():
        if key not in known:
            raise ValueError(
                f"settings: {name} has no {key!r}; it has {', '.join(known) or 'no settings'}"
            )
        try:
            values[key] = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"settings: {key}={value!r} is no number") from error
    return kind(**values)


def _check_thresholds(low: float, high: float) -> None:
    if not 0 <= low <= high < float("inf"):
        raise ValueError(
            f"clip_low_threshold={low} and clip_high_threshold={high}; these are bounds of a "
            "ratio, such as 0.8 and 1.2"
        )


def _gap(scores: TokenScores, batch: RowBatch) -> jax.Array:
    """p - q; 0 at tokens without weight, whatever fills their q."""
    gap_RW = scores.logprobs - batch.streams["logprobs"]
    return jnp.where(_counts(batch), gap_RW, 0.0)


def _ratio(scores: TokenScores, batch: RowBatch) -> jax.Array:
    return jnp.exp(jnp.clip(_gap(scores, batch), -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _counts(batch: RowBatch) -> jax.Array:
    return batch.token_mask & (batch.streams["weights"] != 0)


def _summed(gain_RW: jax.Array, scores: TokenScores, batch: RowBatch) -> tuple[jax.Array, Metrics]:
    """Minus the weighted sum over the tokens of the rows."""
    weighted = jnp.where(_counts(batch), batch.streams["weights"] * gain_RW, 0.0)
    return -jnp.sum(weighted), {"logprobs": scores.logprobs}
