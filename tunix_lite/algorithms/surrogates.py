"""Gains that are maximised per token: functions of the ratio and the advantage, chosen by name in
YAML (`algorithm.surrogate`).

A surrogate is (terms, bounds, settings) -> Gain, or (terms, settings) -> Gain where it has no use
for algorithm.clip_low and clip_high. The loss is - sum_t w_t gain_t. rho is the ratio, A the
advantage, lp the log-probability now, sg a value without gradient.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tunix_lite.algorithms.ratios import MAX_LOG_RATIO, TokenTerms
from tunix_lite.algorithms.sequences import sequence_mean
from tunix_lite.basics.types import Max, Metrics, smallest


class Bounds(NamedTuple):
    """A ratio is kept within [1 - low, 1 + high]; None: no bound on that side.
    Example: Bounds(0.2, 0.28).clip(ratios [0.5, 1, 2]) -> [0.8, 1, 1.28]."""

    low: float | None
    high: float | None

    def clip(self, ratio_RW: jax.Array) -> jax.Array:
        least = None if self.low is None else 1 - self.low
        most = None if self.high is None else 1 + self.high
        return jnp.clip(ratio_RW, least, most)


class Gain(NamedTuple):
    """Result of a surrogate, [R, W] each.
    Example: of a ratio 2 with advantage 1 and Bounds(0.2, 0.28), `clip` gives the gain 1.28."""

    gain: jax.Array
    # bool: where the surrogate took the gradient away, or bounded its factor; None: it never does
    limited: jax.Array | None = None

    def at_least(self, least_RW: jax.Array, where_RW: jax.Array) -> "Gain":
        """The gain with a lower bound at some tokens."""
        is_below_RW = where_RW & (self.gain < least_RW)
        gain_RW = jnp.where(is_below_RW, least_RW, self.gain)
        return Gain(gain_RW, self.limited | is_below_RW)


def clip(terms: TokenTerms, bounds: Bounds, dual: float | None = None) -> Gain:
    """min(rho A, clip(rho) A), the surrogate of PPO and GRPO.

    dual: where A < 0 the gain is not below dual A, so that a ratio above `dual` has no gradient
    (dual clip, arXiv:1912.09729; the `delta` of TRL). None: it grows without end."""
    advantages_RW = terms.advantages
    plain_RW = terms.ratio * advantages_RW
    bounded_RW = bounds.clip(terms.ratio) * advantages_RW
    # The lower of the two is a pessimist: a step that goes too far gains nothing, and one that must
    # come back still has its gradient.
    gain = Gain(jnp.minimum(plain_RW, bounded_RW), plain_RW > bounded_RW)
    if dual is None:
        return gain
    return gain.at_least(dual * advantages_RW, advantages_RW < 0)


def cispo(terms: TokenTerms, bounds: Bounds) -> Gain:
    """sg[clip(rho)] A lp: the ratio is a bounded weight, and every token keeps its gradient (CISPO,
    arXiv:2506.13585)."""
    weight_RW = jax.lax.stop_gradient(bounds.clip(terms.ratio))
    return Gain(weight_RW * terms.advantages * terms.logprobs, weight_RW != terms.ratio)


def sapo(terms: TokenTerms, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Gain:
    """(4 / tau) sigmoid(tau (rho - 1)) A: a soft gate in place of a clip (SAPO, arXiv:2511.20347).

    tau_positive is for A > 0, tau_negative for the others. At rho = 1 the gradient is that of rho
    A."""
    tau_RW = jnp.where(terms.advantages > 0, tau_positive, tau_negative)
    gate_RW = 4 / tau_RW * jax.nn.sigmoid(tau_RW * (terms.ratio - 1))
    return Gain(gate_RW * terms.advantages)


def binary_tv(
    terms: TokenTerms,
    delta_low: float = 0.2,
    delta_high: float = 0.2,
    cap: float | None = None,
    log_square: float = 0.0,
) -> Gain:
    """rho A where the probability of the token has not moved too far in the direction of A, else 0
    (DPPO with binary total variation, arXiv:2602.04879).

    A token is left out if A > 0 and p - p_old > delta_high, or A < 0 and p - p_old < -delta_low.
    cap: None, or the gain is sg[min(rho, cap)] A lp, as in verl. log_square: weight of - (lp -
    old)^2, on all tokens, as in prime-rl."""
    moved_RW = jnp.exp(terms.logprobs) - jnp.exp(terms.old_logprobs)
    # it decides where there is a gradient, and has none itself
    moved_RW = jax.lax.stop_gradient(moved_RW)
    is_up_RW = (terms.advantages > 0) & (moved_RW > delta_high)
    is_down_RW = (terms.advantages < 0) & (moved_RW < -delta_low)
    limited_RW = is_up_RW | is_down_RW
    gain_RW = terms.ratio * terms.advantages
    if cap is not None:
        weight_RW = jax.lax.stop_gradient(jnp.minimum(terms.ratio, cap))
        gain_RW = weight_RW * terms.advantages * terms.logprobs
    gain_RW = jnp.where(limited_RW, 0.0, gain_RW)
    if log_square:
        gain_RW -= log_square * terms.gap**2
    return Gain(gain_RW, limited_RW)


def geometric_mean(terms: TokenTerms, log_clip: float = 0.4) -> Gain:
    """exp(mean_t of the clipped log rho_t) A: the ratio of a completion is the geometric mean of
    its clipped token ratios (GMPO, arXiv:2507.20673).

    log rho_t is at most log_clip where A > 0, and at least -log_clip where A < 0."""
    log_RW = jnp.clip(terms.log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    limited_RW = jnp.where(terms.advantages > 0, log_RW > log_clip, log_RW < -log_clip)
    bound_RW = jnp.where(terms.advantages > 0, log_clip, -log_clip)
    mean_RW = sequence_mean(jnp.where(limited_RW, bound_RW, log_RW), terms.batch)
    return Gain(jnp.exp(mean_RW) * terms.advantages, limited_RW)


def policy_gradient(terms: TokenTerms) -> Gain:
    """rho A, nothing clipped (REINFORCE with importance weights)."""
    return Gain(terms.ratio * terms.advantages)


# ---- what is logged of a surrogate


def ratio_metrics(terms: TokenTerms, gain: Gain, bounds: Bounds | None = None) -> Metrics:
    """Returns metrics of the distance between the policy and the one that sampled, also as NeMo-RL
    and prime-rl measure it, and of the surrogate's clipping. bounds: None where it has none."""
    # A metric must not become infinite while the loss, which clips too, stays finite.
    ratio_RW = terms.ratio
    gap_RW = terms.gap
    bounded_RW = jnp.clip(gap_RW, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    means = {
        "train/sampler_gap": jnp.abs(gap_RW),
        "train/ratio_mean": ratio_RW,
        "train/sampler_mult_prob_error": jnp.exp(jnp.abs(bounded_RW)),
        "train/sampler_k3": jnp.expm1(bounded_RW) - bounded_RW,
    }
    if bounds is not None:
        means["train/ratio_outside_clip"] = ratio_RW != bounds.clip(ratio_RW)
    if gain.limited is not None:
        means["train/clipped_low"] = gain.limited & (ratio_RW < 1)
        means["train/clipped_high"] = gain.limited & (ratio_RW > 1)
    weight_RW = terms.batch.loss_weight
    counts_RW = weight_RW != 0
    return {
        **{name: jnp.sum(weight_RW * value_RW) for name, value_RW in means.items()},
        "train/sampler_gap_max": Max(jnp.max(jnp.abs(gap_RW))),
        "train/ratio_min": smallest(jnp.min(jnp.where(counts_RW, ratio_RW, jnp.inf))),
        "train/ratio_max": Max(jnp.max(jnp.where(counts_RW, ratio_RW, -jnp.inf))),
    }
