"""Drawing the next token, with randomness that is a function of what is drawn and of nothing else."""

import jax
import jax.numpy as jnp


def row_keys(key, num_prompts: int, num_generations: int, first=0):
    """One key per completion, [P * G], folded from its prompt's and its own index. `first` is the first prompt's.

    Folding, not splitting: how the rows are batched, ordered or sharded cannot change a key.
    """
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    prompt_keys = fold(key, first + jnp.arange(num_prompts))
    return jax.vmap(lambda k: fold(k, jnp.arange(num_generations)))(prompt_keys).reshape(-1)


def draw(scores_BV, keys_B, position, temperature, top_k: int = 0, top_p: float = 1.0):
    """Tokens [B] from softmax(scores / temperature), and their log-probabilities under it, float32.

    temperature 0 takes the best token; its log-probability is then the one at temperature 1. top_k and top_p cut the
    distribution off, and the log-probabilities are those of what is left.
    """
    logp_BV = jax.nn.log_softmax(scores_BV / jnp.where(temperature > 0, temperature, 1.0))
    if top_k or top_p < 1:
        logp_BV = cut_off(logp_BV, top_k, top_p)
    keys_B = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_B, position)
    noise_BV = jax.vmap(lambda k: jax.random.gumbel(k, logp_BV.shape[1:]))(keys_B)
    tokens_B = jnp.argmax(jnp.where(temperature > 0, logp_BV + noise_BV, logp_BV), axis=-1).astype(jnp.int32)
    return tokens_B, jnp.take_along_axis(logp_BV, tokens_B[:, None], axis=1)[:, 0]


def cut_off(logp_BV, top_k: int, top_p: float):
    """The distribution of the top_k likeliest tokens (0: all), and of them of those that first reach top_p, rescaled.

    The token that crosses top_p is in, so that one always is (arXiv:1904.09751).
    """
    if 0 < top_k < logp_BV.shape[-1]:
        least_B1 = jax.lax.top_k(logp_BV, top_k)[0][:, -1:]
        logp_BV = jax.nn.log_softmax(jnp.where(logp_BV < least_B1, -jnp.inf, logp_BV))
    if top_p < 1:
        ranked_BV = -jnp.sort(-logp_BV, axis=-1)
        p_BV = jnp.exp(ranked_BV)
        inside_BV = jnp.cumsum(p_BV, axis=-1) - p_BV < top_p
        least_B1 = jnp.min(jnp.where(inside_BV, ranked_BV, jnp.inf), axis=-1, keepdims=True)
        logp_BV = jax.nn.log_softmax(jnp.where(logp_BV < least_B1, -jnp.inf, logp_BV))
    return logp_BV
