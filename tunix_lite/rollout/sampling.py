"""Draws the next token by adding Gumbel noise, after temperature, top-k, top-p (arXiv:1904.09751)
and min-p (arXiv:2407.01082). Letters beside those of types.py: W candidates of `_highest_float`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

# The keys of -inf and inf, see float_from_key.
_LOWEST_KEY = 0x007FFFFF
_HIGHEST_KEY = 0xFF800000


def row_keys(
    keys_B: jax.Array,
    prompts_B: jax.Array,
    generations_B: jax.Array,
) -> jax.Array:
    """One random key per completion, [B], of its rollout's, its prompt's index and its own."""
    # Keys are folded, not split: how the rows are batched, ordered or sharded changes no key.
    fold = jax.vmap(jax.random.fold_in)
    return fold(fold(keys_B, prompts_B), generations_B)


def draw(
    logits_BV: jax.Array,
    keys_B: jax.Array,
    positions_B: jax.Array,
    temperature: jax.Array | float,
    cutoffs: tuple | None = None,
    noise_BV: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens, their log-probabilities under the distribution that was drawn from, and those under
    softmax(logits / temperature), which the trainer computes; [B] each, float32.

    positions_B: tokens of the completion so far. temperature: [] or [B, 1]; 0 takes the best token.
    cutoffs: as apply_cutoffs takes them. noise_BV: `gumbel_noise`; None: it is drawn here.
    """
    # What is left of the full distribution; the same array where nothing changes it.
    full_BV = logits_BV / jnp.where(temperature > 0, temperature, 1.0)
    left_BV = full_BV
    if cutoffs is not None:
        # Cutting off never removes the best token.
        left_BV = jnp.where(temperature > 0, _apply_cutoffs(left_BV, *cutoffs), left_BV)

    # The best of noisy logits needs no probabilities, so none are held beside the logits.
    if noise_BV is None:
        noise_BV = gumbel_noise(keys_B, positions_B, logits_BV.shape[1])
    noise_BV = jnp.where(temperature > 0, noise_BV, 0.0)
    tokens_B, full_logprobs_B = jax.lax.platform_dependent(
        left_BV + noise_BV, full_BV, cpu=_best_on_cpu, default=best
    )

    # Where nothing was changed, one log-probability is enough.
    if left_BV is full_BV:
        return tokens_B, full_logprobs_B, full_logprobs_B
    return tokens_B, _logprobs_of(left_BV, tokens_B), full_logprobs_B


def gumbel_noise(
    keys_B: jax.Array,
    positions_B: jax.Array,
    vocab_size: int,
) -> jax.Array:
    """The noise of the logits of each row's next token, [B, V] float32, by key and position."""
    keys_B = jax.vmap(jax.random.fold_in)(keys_B, positions_B)
    return jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,)))(keys_B)


def best(scores_BV: jax.Array, logits_BV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first of the best tokens of each row by scores, [B] int32, the last token in a row of
    NaN; and its log-probability under the logits, [B]. On accelerators scores are never written."""
    V = scores_BV.shape[-1]

    def better(left: tuple, right: tuple) -> tuple:
        left_score, left_token, left_logit = left
        right_score, right_token, right_logit = right
        # XLA may reduce in any order: ties go to the lower token whichever side it is on.
        is_first = (left_score == right_score) & (left_token < right_token)
        is_left = (left_score > right_score) | is_first
        # maximum keeps NaN.
        score = jnp.maximum(left_score, right_score)
        token = jnp.where(is_left, left_token, right_token)
        token = jnp.where(jnp.isnan(score), V - 1, token)
        return score, token, jnp.maximum(left_logit, right_logit)

    token_BV = jax.lax.broadcasted_iota(jnp.int32, scores_BV.shape, 1)
    operands = (scores_BV, token_BV, logits_BV)
    lowest = jnp.float32(-jnp.inf)
    _, tokens_B, top_B = jax.lax.reduce(
        operands, (lowest, jnp.int32(V - 1), lowest), better, (1,)
    )

    chosen_B1 = jnp.take_along_axis(logits_BV, tokens_B[:, None], axis=1)
    # Without the largest, exp would overflow.
    sum_B = jnp.sum(jnp.exp(logits_BV - top_B[:, None]), axis=-1)
    return tokens_B, chosen_B1[:, 0] - (jnp.log(sum_B) + top_B)


def _best_on_cpu(scores_BV: jax.Array, logits_BV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws like `best`, by two plain reductions: a CPU then draws the noise in threads."""
    V = scores_BV.shape[-1]
    is_best_BV = scores_BV >= jnp.max(scores_BV, axis=-1, keepdims=True)
    token_V = jnp.arange(V, dtype=jnp.int32)
    candidates_BV = jnp.where(is_best_BV, token_V, V - 1)
    tokens_B = jnp.min(candidates_BV, axis=-1)
    return tokens_B, _logprobs_of(logits_BV, tokens_B)


def _logprobs_of(logits_BV: jax.Array, tokens_B: jax.Array) -> jax.Array:
    """log softmax(logits)[token] of each row, [B]."""
    chosen_B1 = jnp.take_along_axis(logits_BV, tokens_B[:, None], axis=1)
    return chosen_B1[:, 0] - jax.nn.logsumexp(logits_BV, axis=-1)


def _apply_cutoffs(
    logits_BV: jax.Array,
    top_k: int | jax.Array = 0,
    top_p: float | jax.Array = 1.0,
    min_p: float | jax.Array = 0.0,
) -> jax.Array:
    """The logits, float32, with -inf for every token that is cut off; settings are numbers or
    arrays [B, 1].

    Of the top_k best tokens those are left that first reach top_p, and of these the ones that are
    at least min_p times as likely as the best. Ties with the last one are left, too. NaN stays.
    """
    B, V = logits_BV.shape
    best_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
    lowest_B1 = jnp.full_like(best_B1, -jnp.inf)
    # Not normalised, as top_p compares sums with each other.
    exps_BV = jnp.exp(logits_BV - best_B1)

    # Numbers that cut nothing off cost nothing.
    def may_cut(setting: float | jax.Array, nothing: float) -> bool:
        return isinstance(setting, jax.Array) or setting != nothing

    def count(least_BW: jax.Array) -> jax.Array:
        return jnp.sum(logits_BV[:, None] >= least_BW[..., None], axis=-1)

    def mass(least_BW: jax.Array) -> jax.Array:
        # Unnormalised probability, of tokens that top_k leaves.
        is_in_BWV = logits_BV[:, None] >= jnp.maximum(least_BW, of_top_k_B1)[..., None]
        return jnp.sum(jnp.where(is_in_BWV, exps_BV[:, None], 0.0), axis=-1)

    # Each setting raises the least logit that is left.
    least_B1 = lowest_B1
    if may_cut(top_k, 0):
        k_B1 = jnp.where(top_k > 0, top_k, V)
        least_B1 = _highest_float(lambda least_BW: count(least_BW) >= k_B1, B)
        least_B1 = jnp.where(k_B1 < V, least_B1, lowest_B1)
    of_top_k_B1 = least_B1
    if may_cut(top_p, 1):
        enough_B1 = top_p * mass(of_top_k_B1)
        least_B1 = _highest_float(lambda least_BW: mass(least_BW) >= enough_B1, B)
        least_B1 = jnp.where(top_p < 1, least_B1, of_top_k_B1)
    if may_cut(min_p, 0):
        of_min_p_B1 = best_B1 + jnp.log(min_p)
        least_B1 = jnp.maximum(least_B1, jnp.where(min_p > 0, of_min_p_B1, lowest_B1))
    # Not `>=`: a comparison with NaN is false, and a NaN has to stay to be noticed.
    return jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)


def _highest_float(holds: Callable[[jax.Array], jax.Array], B: int) -> jax.Array:
    """The highest float32, in each of B rows, for which holds([B, W] candidates) -> [B, W] is true,
    [B, 1]. holds must be true up to some number and false above it."""
    # Each of sixteen rounds finds two bits by asking for three candidates at once. Nothing is
    # sorted, and where tp divides the vocabulary the devices exchange only counts.
    ways_W = jnp.arange(1, 4, dtype=jnp.uint32)

    def two_bits(round_: jax.Array, key_B1: jax.Array) -> jax.Array:
        # The candidates that hold are the first so many, as holds is true up to some number.
        step = jnp.uint32(1) << (30 - 2 * round_).astype(jnp.uint32)
        held_BW = holds(_float_from_key(key_B1 + step * ways_W))
        num_held_B1 = jnp.sum(held_BW, axis=-1, keepdims=True, dtype=jnp.uint32)
        return key_B1 + step * num_held_B1

    zeros_B1 = jnp.zeros((B, 1), jnp.uint32)
    key_B1 = jax.lax.fori_loop(0, 16, two_bits, zeros_B1)
    return _float_from_key(key_B1)


def _float_from_key(key: jax.Array) -> jax.Array:
    """The float32 of a uint32 key, with keys in the order of their floats, from -inf to inf."""
    # Keys outside of these bounds are the bits of NaN.
    key = jnp.clip(key, jnp.uint32(_LOWEST_KEY), jnp.uint32(_HIGHEST_KEY))
    # The upper half of the keys are floats without a sign bit; the lower half are negative ones,
    # of which the largest bits are the lowest floats.
    sign = jnp.uint32(1 << 31)
    bits = jnp.where(key >= sign, key ^ sign, ~key)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
