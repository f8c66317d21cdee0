"""The policy: what it would say, and what it thinks of what was said."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from tunix_lite.algorithms.algorithm import Policy
from tunix_lite.learner.micro_batches import Rows, mapped
from tunix_lite.models import attention, decoder
from tunix_lite.models.attention import AttentionMeta
from tunix_lite.models.decoder import Architecture
from tunix_lite.models.vocabulary import token_scores
from tunix_lite.parallel.compiling import compiled_once
from tunix_lite.parallel.mesh import constrain
from tunix_lite.types import Batch, Params, TokenScores

# of the computation
DTYPES = {
    "fp32": jnp.float32,
    "bf16": jnp.bfloat16,
    "bf16_params": jnp.bfloat16,
}
# and of what trains
STORED = {"fp32": "fp32", "bf16": "fp32", "bf16_params": "bf16"}
ROWS = Rows()


@dataclass(frozen=True)
class FrozenScorer:
    """Log-probabilities under frozen weights: an algorithms.algorithm.Scorer."""

    params: Params  # on the mesh, never donated
    rows: Rows  # how a batch is laid out for it
    # (params, batch in rows) -> its compiled program, which it keeps
    program: Callable

    def __call__(self, batch: Batch) -> np.ndarray:
        """Returns [B, T] float32, an array of the host; 0 where no token counts."""
        laid_out, layout = self.rows.lay_out(batch)
        return layout.back(self.compiled(laid_out)(self.params, laid_out))

    def compiled(self, batch: Batch) -> Callable:
        """Returns the compiled program for this batch in rows, or for its shapes."""
        return self.program(self.params, batch)


def make_policy(
    cfg: Architecture,
    generate,
    temperature: float,
    dtype=jnp.float32,
    reference=None,
    rows: Rows = ROWS,
    **scoring,
) -> Policy:
    """A decoder as a Policy. `reference` are the frozen params of the KL term, or None.

    rows: how sequences are laid out; scoring: `remat`, `attend`, `reduce_dtype` and
    `tp_reduce_dtype` as decoder.forward takes them.
    """
    scores = partial(batch_scores, cfg=cfg, temperature=temperature, dtype=dtype, **scoring)
    if reference is None:
        return Policy(generate, scores)
    program = compiled_once(scoring_program(scores, rows).lower)
    return Policy(generate, scores, {"reference": FrozenScorer(reference, rows, program)})


def scoring_program(scores: Callable, rows: Rows):
    """(params, batch in rows) -> log-probabilities [R, W]: compiled, micro-batch by micro-batch as
    the update is.

    Every device has all of them, so that every process can read them.
    """

    def score(params, batch):
        return constrain(
            mapped(lambda part: scores(params, part).logprobs, batch, rows.num_parts), "seq", "seq"
        )

    return jax.jit(score)


def batch_scores(
    params, batch: Batch, *, cfg: Architecture, temperature: float, dtype, **forward
) -> TokenScores:
    """log p(token) and the entropy beside it of the tokens that count, float32 [R, W], 0 elsewhere.

    Only they get scores over the vocabulary, and of those [R, W, V] never exist.
    """
    meta = AttentionMeta(batch.positions, batch.segment_ids, batch.branches, batch.lead, batch.lane)
    hidden_RWD = decoder.forward(params, cfg, batch.tokens, meta, dtype, **forward)
    before_RMD, targets_RM = to_score(hidden_RWD, batch)
    found = token_scores(
        before_RMD, decoder.output_table(params, cfg), targets_RM, cfg.final_softcap, temperature
    )
    return TokenScores(*(in_place(jnp.where(batch.is_scored, x_RM, 0.0), batch) for x_RM in found))


def to_score(hidden_RWD, batch: Batch):
    """The hidden states [R, M, D] that predict the tokens which count, and these tokens [R, M]."""
    # slices: gathers take a CPU twice as long as the head
    if batch.scored is None:
        M = batch.is_scored.shape[1]
        return hidden_RWD[:, -M - 1 : -1], batch.tokens[:, -M:]
    before_RMD = jnp.take_along_axis(hidden_RWD, batch.previous[..., None], axis=1)
    return before_RMD, jnp.take_along_axis(batch.tokens, batch.scored, axis=1)


def in_place(x_RM, batch: Batch):
    """[R, M] -> [R, W]: values back at the columns of their tokens, 0 elsewhere."""
    R, W = batch.tokens.shape
    if batch.scored is None:
        return jnp.pad(x_RM, ((0, 0), (W - x_RM.shape[1], 0)))
    return jnp.zeros((R, W), x_RM.dtype).at[jnp.arange(R)[:, None], batch.scored].add(x_RM)


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
    hidden_BTD = decoder.forward(
        params, cfg, tokens_BT, attention.one_sequence_per_row(token_mask_BT), dtype
    )[:, :-1]
    table_VD = decoder.output_table(params, cfg)
    found = token_scores(hidden_BTD, table_VD, tokens_BT[:, 1:], cfg.final_softcap, temperature)
    return TokenScores(*(jnp.pad(x, ((0, 0), (1, 0))) for x in found))
