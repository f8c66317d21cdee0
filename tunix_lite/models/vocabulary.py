"""Log-probabilities of tokens, and entropies, without ever holding the scores of all tokens over
the vocabulary.

With scores s_v = cap(h . w_v) / temperature, block by block of the vocabulary, for all tokens at
once:

    total     = sum_v exp(s_v - top)      kept as a running maximum, top, and a running sum
    logprob   = s_token - top - log total
    entropy   = log total - sum_v p_v (s_v - top)

The backward pass makes the scores of each block again: d s_v = g (1[v = token] - p_v) - e p_v (log
p_v + entropy) for slopes g and e of the two. Tables that tp divides are worked off by all of its
parts at once, each on its own share, and meet once at the end of a pass.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from tunix_lite.models.rounding import stored
from tunix_lite.parallel.mesh import constrain, constrain_gradient, gather, parts_of
from tunix_lite.types import TokenScores

# float32 scores on a device: 64 MiB
SCORES_AT_ONCE = 2**24
BELOW_ALL = -1e30
# of a block: parts of the vocabulary, entries of the block, embedding
AXES = (
    "vocab",
    "seq",
    "embed",
)


@dataclass(frozen=True)
class Settings:
    """What the blocks depend on besides arrays."""

    softcap: float | None
    temperature: float
    share: int  # tokens of the vocabulary in each part


def token_scores(
    hidden_BMD, table_VD, targets_BM, softcap: float | None, temperature: float
) -> TokenScores:
    """Log-probability of each target and the entropy beside it, [B, M] float32.

    hidden: at the position that predicts the target, in the type of the computation, divided over
    the batch. table: the output embedding, as it is stored.
    """
    V, D = table_VD.shape
    B, M, _ = hidden_BMD.shape
    parts = parts_of("vocab")
    blocks = num_blocks(V // parts, B * M // parts_of("batch"))
    size = -(-V // (parts * blocks))
    table = jnp.pad(
        table_VD.reshape(parts, V // parts, D), ((0, 0), (0, blocks * size - V // parts), (0, 0))
    )
    table = table.reshape(parts, blocks, size, D).swapaxes(0, 1)
    settings = Settings(softcap, temperature, V // parts)
    return TokenScores(*_scores(settings, hidden_BMD, table, targets_BM))


def num_blocks(vocabulary: int, tokens: int) -> int:
    """How many blocks a part of the vocabulary is cut into; a number that divides it, if one is
    near."""
    wanted = min(max(1, -(-vocabulary * tokens // SCORES_AT_ONCE)), vocabulary)
    near = range(wanted, min(2 * wanted, vocabulary) + 1)
    return next((n for n in near if vocabulary % n == 0), wanted)


def raw_scores(hidden_BMD, block_PSD):
    """Products [B, M, P, S] of all tokens with one block of each part."""
    wide = jnp.promote_types(hidden_BMD.dtype, jnp.float32)
    scores = jnp.einsum("bmd,psd->bmps", hidden_BMD, block_PSD, preferred_element_type=wide)
    return constrain(scores, "batch", "seq", "vocab", "seq")


def bent(settings: Settings, scores):
    """Products as scores: capped, and divided by the temperature."""
    if settings.softcap is not None:
        scores = settings.softcap * jnp.tanh(scores / settings.softcap)
    return scores / settings.temperature


def tokens_of(settings: Settings, block, index):
    """Which token each entry of block number `index` is, [P, S]; -1 for what is only padding."""
    parts, size, _ = block.shape
    within = index * size + jnp.arange(size)
    return jnp.where(
        within < settings.share, jnp.arange(parts)[:, None] * settings.share + within, -1
    )


def _laid_out(table_NPSD):
    """Told here and not by the caller: the gradient of a plain constraint must lie as the table,
    also where the batch is divided by hand and fsdp is not there to divide it
    (mesh.constrain_gradient)."""
    return constrain(table_NPSD, "layers", *AXES)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(settings, hidden_BMD, table_NPSD, targets_BM):
    return _forward(settings, hidden_BMD, _laid_out(table_NPSD), targets_BM)[0]


def _forward(settings, hidden_BMD, table_NPSD, targets_BM):
    """The two results, and the logsumexp that the backward pass needs as well."""
    blocks, parts = table_NPSD.shape[:2]
    wide = jnp.promote_types(hidden_BMD.dtype, jnp.float32)
    zeros = constrain(jnp.zeros((*targets_BM.shape, parts), wide), "batch", "seq", "vocab")

    def one_block(carry, numbered):
        (top, total, weighted, chosen), (index, block_PSD) = carry, numbered
        scores = bent(
            settings, raw_scores(hidden_BMD, gather(stored(block_PSD, hidden_BMD.dtype), AXES))
        )
        tokens_PS = tokens_of(settings, block_PSD, index)
        real = jnp.where(tokens_PS >= 0, scores, BELOW_ALL)
        higher = jnp.maximum(top, jnp.max(real, axis=-1))
        shrink, exps = jnp.exp(top - higher), jnp.exp(real - higher[..., None])
        weighted = lowered(weighted, total, top, higher) + jnp.sum(
            exps * (real - higher[..., None]), axis=-1
        )
        total = total * shrink + jnp.sum(exps, axis=-1)
        chosen += jnp.sum(jnp.where(tokens_PS == targets_BM[..., None, None], scores, 0.0), axis=-1)
        return (higher, total, weighted, chosen), None

    start = (zeros + BELOW_ALL, zeros, zeros, zeros)
    (top, total, weighted, chosen), _ = jax.lax.scan(
        one_block, start, (jnp.arange(blocks), table_NPSD)
    )
    highest = jnp.max(top, axis=-1, keepdims=True)
    shrink = jnp.exp(top - highest)
    weighted = jnp.sum(lowered(weighted, total, top, highest), axis=-1)
    total, highest = jnp.sum(total * shrink, axis=-1), highest[..., 0]
    logprobs = (jnp.sum(chosen, axis=-1) - highest) - jnp.log(total)
    return (logprobs, jnp.log(total) - weighted / total), jnp.log(total) + highest


def lowered(weighted, total, top, higher):
    """sum_v exp(s_v - top) (s_v - top), as it is for a higher top. Scores themselves would cancel
    to few digits."""
    return (weighted + total * (top - higher)) * jnp.exp(top - higher)


def _kept(settings, hidden, table, targets):
    """The forward pass, and what the backward pass needs of it."""
    arrays = hidden.value, _laid_out(table.value), targets.value
    out, log_total = _forward(settings, *arrays)
    # told by the structure, so that it is known while tracing
    trains = () if table.perturbed else None
    return out, (*arrays, log_total, out[1], trains)


def _slopes(settings, kept, slopes):
    """What the slopes of the results make of hidden and table; a table that does not train costs
    nothing."""
    hidden_BMD, table_NPSD, targets_BM, log_total, entropy, trains = kept
    g, e = (None if isinstance(s, SymbolicZero) else s[..., None, None] for s in slopes)
    log_total, entropy = log_total[..., None, None], entropy[..., None, None]
    wide = log_total.dtype
    towards = jnp.zeros((table_NPSD.shape[1], *hidden_BMD.shape), wide)

    def one_block(total, numbered):
        index, block_PSD = numbered
        used_PSD = gather(stored(block_PSD, hidden_BMD.dtype), AXES)
        scores, pull = jax.vjp(partial(bent, settings), raw_scores(hidden_BMD, used_PSD))
        tokens_PS = tokens_of(settings, block_PSD, index)
        logs = jnp.where(tokens_PS >= 0, scores - log_total, BELOW_ALL)
        slope = 0.0
        if g is not None:
            slope += g * ((tokens_PS == targets_BM[..., None, None]) - jnp.exp(logs))
        if e is not None:
            slope -= e * jnp.exp(logs) * jnp.where(tokens_PS >= 0, logs + entropy, 0.0)
        slope = pull(slope)[0].astype(hidden_BMD.dtype)
        share = jnp.einsum("bmps,psd->pbmd", slope, used_PSD, preferred_element_type=wide)
        total = constrain(total + share, "vocab", "batch", "seq", "act_embed")
        if trains is None:
            return total, None
        of_block = jnp.einsum("bmps,bmd->psd", slope, hidden_BMD, preferred_element_type=wide)
        return total, constrain_gradient(of_block, AXES).astype(table_NPSD.dtype)

    total, of_table = jax.lax.scan(one_block, towards, (jnp.arange(len(table_NPSD)), table_NPSD))
    return jnp.sum(total, axis=0).astype(hidden_BMD.dtype), of_table, None


_scores.defvjp(_kept, _slopes, symbolic_zeros=True)
