"""Drawing the next token, with randomness that is a function of what is drawn and of nothing else."""

import jax
import jax.numpy as jnp


def row_keys(key, num_prompts: int, num_generations: int):
    """One key per completion, [P * G], folded from its prompt's and its own index.

    Folding, not splitting: how the rows are batched, ordered or sharded cannot change a key.
    """
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    prompt_keys = fold(key, jnp.arange(num_prompts))
    return jax.vmap(lambda k: fold(k, jnp.arange(num_generations)))(prompt_keys).reshape(-1)


def draw(scores_BV, keys_B, position, temperature):
    """Tokens [B] from softmax(scores / temperature), and their log-probabilities under it, float32.

    temperature 0 takes the best token; its log-probability is then the one at temperature 1.
    """
    logp_BV = jax.nn.log_softmax(scores_BV / jnp.where(temperature > 0, temperature, 1.0))
    keys_B = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_B, position)
    noise_BV = jax.vmap(lambda k: jax.random.gumbel(k, logp_BV.shape[1:]))(keys_B)
    tokens_B = jnp.argmax(jnp.where(temperature > 0, logp_BV + noise_BV, logp_BV), axis=-1).astype(jnp.int32)
    return tokens_B, jnp.take_along_axis(logp_BV, tokens_B[:, None], axis=1)[:, 0]
