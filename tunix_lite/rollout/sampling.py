"""Drawing the next token, with randomness that is a function of what is drawn and of nothing else.

Scores go through repetition penalty (arXiv:1909.05858), temperature, top-k, top-p (arXiv:1904.09751) and min-p
(arXiv:2407.01082), in this order; a token is then drawn by adding Gumbel noise to the log-probabilities that are left.
"""

import jax
import jax.numpy as jnp

from tunix_lite.rollout.settings import Generation


def row_keys(key, prompts_B, generations_B):
    """One key per completion, [B], folded from the index of its prompt and its own.

    Folding, not splitting: how the rows are batched, ordered or sharded cannot change a key.
    """
    fold = jax.vmap(jax.random.fold_in)
    return fold(jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, prompts_B), generations_B)


def draw(scores_BV, keys_B, positions_B, temperature, generation: Generation, seen_BV=None):
    """Tokens [B], their log-probabilities under the distribution that was drawn from, and under the whole one.

    Float32 both; the whole one is softmax(scores / temperature), what the trainer computes. positions_B counts the
    tokens of the completion so far. temperature 0 takes the best token, with log-probabilities as at temperature 1.
    seen_BV marks the tokens that a repetition penalty is for.
    """
    whole_BV = left_BV = scores_BV / jnp.where(temperature > 0, temperature, 1.0)
    if seen_BV is not None:
        left_BV = penalised(whole_BV, seen_BV, generation.repetition_penalty)
    left_BV = cut_off(left_BV, generation.top_k, generation.top_p, generation.min_p)
    keys_B = jax.vmap(jax.random.fold_in)(keys_B, positions_B)
    noise_BV = jax.vmap(lambda k: jax.random.gumbel(k, scores_BV.shape[1:]))(keys_B)
    # the best of noisy scores needs no probabilities: nothing as large as the scores is kept beside them
    tokens_B = jnp.argmax(left_BV + jnp.where(temperature > 0, noise_BV, 0.0), axis=-1).astype(jnp.int32)
    logprobs_B = logprobs_of(left_BV, tokens_B)
    return tokens_B, logprobs_B, logprobs_B if left_BV is whole_BV else logprobs_of(whole_BV, tokens_B)


def logprobs_of(scores_BV, tokens_B):
    """log softmax(scores)[token] of each row."""
    return jnp.take_along_axis(scores_BV, tokens_B[:, None], axis=1)[:, 0] - jax.nn.logsumexp(scores_BV, axis=-1)


def penalised(scores_BV, seen_BV, penalty: float):
    """Scores with those of the tokens seen so far divided by the penalty, or times it where they are negative."""
    return jnp.where(seen_BV, jnp.where(scores_BV > 0, scores_BV / penalty, scores_BV * penalty), scores_BV)


def cut_off(scores_BV, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    """The scores with -inf for what is cut off: left are of the top_k best those that first reach top_p, and of them
    those at least min_p times as likely as the best. Tokens as good as the last one that is in are in.

    The token that crosses top_p is in, so that one always is.
    """
    V = scores_BV.shape[-1]
    if top_k >= V:
        top_k = 0
    if not top_k and top_p == 1 and not min_p:
        return scores_BV
    k = top_k or (V if top_p < 1 else 1)  # min_p alone asks for the best one only
    ranked_BK = jax.lax.top_k(scores_BV, k)[0]
    least_B1 = ranked_BK[:, -1:] if top_k else jnp.full_like(ranked_BK[:, :1], -jnp.inf)
    if top_p < 1:
        p_BK = jax.nn.softmax(ranked_BK)
        inside_BK = jnp.cumsum(p_BK, axis=-1) - p_BK < top_p
        least_B1 = jnp.min(jnp.where(inside_BK, ranked_BK, jnp.inf), axis=-1, keepdims=True)
    if min_p:
        least_B1 = jnp.maximum(least_B1, ranked_BK[:, :1] + jnp.log(min_p))
    return jnp.where(scores_BV < least_B1, -jnp.inf, scores_BV)
