"""The policy: a decoder that samples completions and scores the tokens of a batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tunix_lite.algorithms.algorithm import Generate, Policy
from tunix_lite.learner.rows import RowLayout
from tunix_lite.learner.scoring import FrozenScorer, Rescore, scoring_program
from tunix_lite.models import attention, decoder
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.vocabulary import token_scores
from tunix_lite.parallel.compiling import compiled_once
from tunix_lite.types import Params, RowBatch, TokenScores

# training.mixed_precision -> the dtype of the computation
DTYPES = {
    "fp32": jnp.float32,
    "bf16": jnp.bfloat16,
    "bf16_params": jnp.bfloat16,
}
# training.mixed_precision -> the dtype in which trained weights are kept
STORED = {"fp32": "fp32", "bf16": "fp32", "bf16_params": "bf16"}
ROWS = RowLayout()


def make_policy(
    cfg: Architecture,
    generate: Generate | None,
    temperature: float,
    dtype: DTypeLike = jnp.float32,
    reference: Params | None = None,
    rows: RowLayout = ROWS,
    **scoring: Any,
) -> Policy:
    """A decoder as a Policy.

    generate: None for one that only scores. temperature: what logits are divided by. reference: the
    frozen params of the KL term, or None. rows: how a batch is laid out where `collect` asks for
    scores. scoring: `remat`, `scan_layers`, `attend`, `reduce_dtype` and `tp_reduce_dtype` as
    decoder.forward takes them.

    Example: `make_policy(model.cfg, generate, temperature=1.0)`.
    """
    scores = partial(batch_scores, cfg=cfg, temperature=temperature, dtype=dtype, **scoring)
    # compiled when it is called first, and again for other shapes or types
    rescore = Rescore(rows, compiled_once(scoring_program(scores, rows).lower))
    frozen = {} if reference is None else {"reference": FrozenScorer(reference, rescore)}
    return Policy(generate, scores, frozen, rescore)


def batch_scores(
    params: Params,
    batch: RowBatch,
    *,
    cfg: Architecture,
    temperature: float,
    dtype: DTypeLike,
    head: Callable = token_scores,
    **forward: Any,
) -> TokenScores:
    """log p(token) and the entropy of the scored tokens, float32 [R, W], 0 elsewhere.

    Only they get logits over the vocabulary, and of those [R, W, V] never exist. head: another
    function of hidden states in place of vocabulary.token_scores; what it gives, a tree of [R, M]
    or [R, M, K], comes back in rows. forward: settings of decoder.forward.
    """
    meta = attention.meta_of_rows(batch)
    hidden_RWD = decoder.forward(params, cfg, batch.tokens, meta, dtype, **forward)
    before_RMD, targets_RM = scored_hidden(hidden_RWD, batch)
    table_VD = decoder.output_table(params, cfg)
    found_RM = head(before_RMD, table_VD, targets_RM, cfg.final_softcap, temperature)
    return jax.tree.map(partial(scatter_to_rows, batch=batch), found_RM)


def scored_hidden(hidden_RWD: jax.Array, batch: RowBatch) -> tuple[jax.Array, jax.Array]:
    """The hidden states [R, M, D] that predict the tokens which count, and these tokens [R, M]."""
    # slices: gathers take a CPU twice as long as the head
    if batch.scored is None:
        M = batch.is_scored.shape[1]
        return hidden_RWD[:, -M - 1 : -1], batch.tokens[:, -M:]
    before_RMD = jnp.take_along_axis(hidden_RWD, batch.previous[..., None], axis=1)
    return before_RMD, jnp.take_along_axis(batch.tokens, batch.scored, axis=1)


def scatter_to_rows(x_RM: jax.Array, batch: RowBatch) -> jax.Array:
    """[R, M] -> [R, W]: values back at the columns of their tokens, 0 elsewhere. Values may be
    vectors, [R, M, K]."""
    R, W = batch.tokens.shape
    inner = x_RM.ndim - 2
    # a row may have fewer scored tokens than M; the rest belongs to no token
    is_scored = batch.is_scored.reshape(*batch.is_scored.shape, *[1] * inner)
    x_RM = jnp.where(is_scored, x_RM, jnp.zeros((), x_RM.dtype))
    if batch.scored is None:
        return jnp.pad(x_RM, ((0, 0), (W - x_RM.shape[1], 0), *[(0, 0)] * inner))
    rows = jnp.zeros((R, W, *x_RM.shape[2:]), x_RM.dtype)
    return rows.at[jnp.arange(R)[:, None], batch.scored].add(x_RM)


def token_logprobs(
    params: Params, tokens_BT: jax.Array, token_mask_BT: jax.Array, **settings: Any
) -> jax.Array:
    """log p(tokens[b, t] | tokens[b, :t]) in float32, [B, T]; position 0, which nothing predicts,
    is 0. Settings are those of `sequence_scores`."""
    return sequence_scores(params, tokens_BT, token_mask_BT, **settings).logprobs


def sequence_scores(
    params: Params,
    tokens_BT: jax.Array,
    token_mask_BT: jax.Array,
    *,
    cfg: Architecture,
    temperature: float = 1.0,
    dtype: DTypeLike = jnp.float32,
) -> TokenScores:
    """The scores of all tokens of sequences that are not laid out in rows, [B, T] each; position 0,
    which nothing predicts, is 0."""
    meta = attention.one_sequence_per_row(token_mask_BT)
    hidden_BTD = decoder.forward(params, cfg, tokens_BT, meta, dtype)[:, :-1]
    table_VD = decoder.output_table(params, cfg)
    scores = token_scores(hidden_BTD, table_VD, tokens_BT[:, 1:], cfg.final_softcap, temperature)
    return TokenScores(*(jnp.pad(x, ((0, 0), (1, 0))) for x in scores))
