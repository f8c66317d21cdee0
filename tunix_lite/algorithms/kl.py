"""The KL term: how far the policy may go from the reference.

Estimators per token, from d = ref_logprob - logprob of the token that was sampled, by the names of
`algorithm.kl_estimator`. k1 = -d as a loss has no expected gradient at all, so it is only offered
as a part of the reward (`k1_reward`).
"""

import jax
import jax.numpy as jnp

from tunix_lite.algorithms.ratios import MAX_LOG_RATIO, TokenTerms


def k3_exact(ref_gap_RW: jax.Array, ratio_RW: jax.Array) -> jax.Array:
    """Per-token KL(policy || reference), from ref_gap = ref_logprob - logprob of the sampled token.

    Its value is k3, exp(d) - d - 1, never negative; its gradient is that of k2, d^2 / 2, which in
    expectation is the gradient of the KL (k3's own is not, and k1's is zero). The ratio makes both
    right off-policy as well."""
    weight_RW = jax.lax.stop_gradient(ratio_RW)
    d_RW = jnp.clip(jax.lax.stop_gradient(ref_gap_RW), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    value_RW = weight_RW * (jnp.exp(d_RW) - d_RW - 1)
    slope_RW = weight_RW * 0.5 * ref_gap_RW**2
    # the slope adds its gradient and no value
    return value_RW + slope_RW - jax.lax.stop_gradient(slope_RW)


def k3(ref_gap_RW: jax.Array, ratio_RW: jax.Array) -> jax.Array:
    """exp(d) - d - 1, with its own gradient, which is not that of the KL (the GRPO paper, TRL)."""
    # one token that the reference finds impossible must not make the loss infinite
    d_RW = jnp.clip(ref_gap_RW, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.exp(d_RW) - d_RW - 1


def k3_ratio(ref_gap_RW: jax.Array, ratio_RW: jax.Array) -> jax.Array:
    """rho (exp(d) - d - 1) with the gradient of both factors: in expectation the KL and its
    gradient (DeepSeek-V3.2, arXiv:2512.02556)."""
    return ratio_RW * k3(ref_gap_RW, ratio_RW)


def k2(ref_gap_RW: jax.Array, ratio_RW: jax.Array) -> jax.Array:
    """d^2 / 2: on policy its gradient is that of the KL in expectation, its value is not."""
    return 0.5 * ref_gap_RW**2


# values of `algorithm.kl_estimator` that are a term of the loss
ESTIMATORS = {"k3_exact": k3_exact, "k3": k3, "k3_ratio": k3_ratio, "k2": k2}
# estimator inside the reward: each completion loses kl_coef times its k1, summed over its tokens
IN_REWARD = "k1_reward"


def token_kl(estimator: str, terms: TokenTerms) -> jax.Array:
    """[R, W]: the KL of each token that counts, 0 elsewhere; under `k1_reward`, for display, that
    of k3_exact."""
    counts_RW = terms.batch.loss_weight != 0
    ref_gap_RW = jnp.where(counts_RW, terms.batch.ref_logprobs - terms.logprobs, 0.0)
    # the token's own ratio, whatever the ratio of the surrogate is
    ratio_RW = jnp.exp(jnp.clip(terms.gap, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return ESTIMATORS.get(estimator, k3_exact)(ref_gap_RW, ratio_RW)
