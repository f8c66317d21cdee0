"""Drawing the next token, with randomness that is a function of what is drawn and of nothing else.

Scores go through repetition penalty (arXiv:1909.05858), temperature, top-k, top-p
(arXiv:1904.09751) and min-p (arXiv:2407.01082), in this order; a token is then drawn by adding
Gumbel noise to the log-probabilities that are left.
"""

import jax
import jax.numpy as jnp

from tunix_lite.rollout.settings import GenerationConfig

# of -inf and inf, see float_of
LOWEST_KEY, HIGHEST_KEY = 0x007FFFFF, 0xFF800000


def row_keys(key, prompts_B, generations_B):
    """One key per completion, [B], folded from the index of its prompt and its own.

    Folding, not splitting: how the rows are batched, ordered or sharded cannot change a key.
    """
    fold = jax.vmap(jax.random.fold_in)
    return fold(jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, prompts_B), generations_B)


def draw(scores_BV, keys_B, positions_B, temperature, generation: GenerationConfig, seen_BV=None):
    """Tokens [B], their log-probabilities under the distribution that was drawn from, and under the
    whole one.

    Float32 both; the whole one is softmax(scores / temperature), what the trainer computes.
    positions_B counts the tokens of the completion so far. temperature 0 takes the best token, with
    log-probabilities as at temperature 1 and nothing cut off, which could not change the best one.
    seen_BV marks the tokens that a repetition penalty is for.
    """
    whole_BV = left_BV = scores_BV / jnp.where(temperature > 0, temperature, 1.0)
    if seen_BV is not None:
        left_BV = apply_repetition_penalty(whole_BV, seen_BV, generation.repetition_penalty)
    if generation.cuts:
        kept_BV = apply_cutoffs(left_BV, generation.top_k, generation.top_p, generation.min_p)
        left_BV = jnp.where(temperature > 0, kept_BV, left_BV)
    keys_B = jax.vmap(jax.random.fold_in)(keys_B, positions_B)
    noise_BV = jax.vmap(lambda k: jax.random.gumbel(k, scores_BV.shape[1:]))(keys_B)
    # the best of noisy scores needs no probabilities: none are kept beside the scores
    tokens_B = first_best(left_BV + jnp.where(temperature > 0, noise_BV, 0.0))
    logprobs_B = logprobs_of(left_BV, tokens_B)
    return (
        tokens_B,
        logprobs_B,
        logprobs_B if left_BV is whole_BV else logprobs_of(whole_BV, tokens_B),
    )


def first_best(scores_BV):
    """The first of the best tokens of each row, [B] int32; in a row that is no numbers, the last
    token.

    argmax as two plain reductions: a CPU then draws the noise in threads, and takes half the time.
    """
    V = scores_BV.shape[-1]
    is_best_BV = scores_BV >= jnp.max(scores_BV, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_best_BV, jnp.arange(V, dtype=jnp.int32), V - 1), axis=-1)


def logprobs_of(scores_BV, tokens_B):
    """log softmax(scores)[token] of each row."""
    return jnp.take_along_axis(scores_BV, tokens_B[:, None], axis=1)[:, 0] - jax.nn.logsumexp(
        scores_BV, axis=-1
    )


def apply_repetition_penalty(scores_BV, seen_BV, penalty: float):
    """Scores with those of the tokens seen so far divided by the penalty, or times it where they
    are negative."""
    return jnp.where(
        seen_BV, jnp.where(scores_BV > 0, scores_BV / penalty, scores_BV * penalty), scores_BV
    )


def apply_cutoffs(scores_BV, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    """The scores with -inf for what is cut off: left are of the top_k best those that first reach
    top_p, and of them those at least min_p times as likely as the best. Tokens as good as the last
    one that is in are in, so top_k may leave more than k, and top_p counts within all of them.

    The token that crosses top_p is in, so that one always is. Float32 scores; a score that is no
    number stays.
    """
    top_k = 0 if top_k >= scores_BV.shape[-1] else top_k
    if not top_k and top_p == 1 and not min_p:
        return scores_BV
    best_B1 = jnp.max(scores_BV, axis=-1, keepdims=True)
    least_B1 = jnp.full_like(best_B1, -jnp.inf)

    def count(least_BW):
        return jnp.sum(scores_BV[:, None] >= least_BW[..., None], axis=-1)

    def mass(least_BW):
        is_in_BWV = scores_BV[:, None] >= jnp.maximum(least_BW, of_top_k_B1)[..., None]
        return jnp.sum(jnp.where(is_in_BWV, jnp.exp(scores_BV - best_B1)[:, None], 0.0), axis=-1)

    if top_k:
        least_B1 = highest_that(lambda least_BW: count(least_BW) >= top_k, len(scores_BV))
    if top_p < 1:
        of_top_k_B1 = least_B1
        enough_B1 = top_p * mass(of_top_k_B1)
        least_B1 = highest_that(lambda least_BW: mass(least_BW) >= enough_B1, len(scores_BV))
    if min_p:
        least_B1 = jnp.maximum(least_B1, best_B1 + jnp.log(min_p))
    return jnp.where(scores_BV < least_B1, -jnp.inf, scores_BV)


def highest_that(holds, B: int):
    """The highest float32 for which holds([B, W] candidates) -> [B, W] is true, in each of B rows,
    [B, 1].

    It must be true up to some number, and false above. Sixteen rounds find two bits of the number
    each, by asking for three candidates at once. Nothing is sorted, and where holds() counts over a
    vocabulary that tp divides, only the counts of the candidates cross.
    """
    ways_W = jnp.arange(1, 4, dtype=jnp.uint32)

    def two_bits(round_, key_B1):
        step = jnp.uint32(1) << (30 - 2 * round_).astype(jnp.uint32)
        return key_B1 + step * jnp.sum(
            holds(float_of(key_B1 + step * ways_W)), axis=-1, keepdims=True, dtype=jnp.uint32
        )

    return float_of(jax.lax.fori_loop(0, 16, two_bits, jnp.zeros((B, 1), jnp.uint32)))


def float_of(key):
    """The float32 of a uint32 key; keys are in the order of their floats, from -inf to inf, which
    those beyond are."""
    key = jnp.clip(key, jnp.uint32(LOWEST_KEY), jnp.uint32(HIGHEST_KEY))
    sign = jnp.uint32(1 << 31)
    return jax.lax.bitcast_convert_type(jnp.where(key >= sign, key ^ sign, ~key), jnp.float32)
