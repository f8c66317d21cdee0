"""The policy: a decoder that samples completions and scores the tokens of a batch, in the update
and where `batch_of` asks for log-probabilities: under frozen weights, or under today's."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from tunix_lite.algorithms.algorithm import Generate, Policy
from tunix_lite.basics.types import Batch, Params, RowBatch, TokenScores
from tunix_lite.learner.micro_batches import cut, part_of
from tunix_lite.learner.routing import with_expert_sums
from tunix_lite.learner.rows import RowLayout, at_scored
from tunix_lite.models import attention, decoder
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.routes import replayed
from tunix_lite.models.scalar_head import scalar_scores
from tunix_lite.models.vocabulary import token_scores
from tunix_lite.parallel.compiling import compiled_once, stopwatch
from tunix_lite.parallel.mesh import axis_size, constrain

# training.mixed_precision -> the dtype of the computation
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "bf16_params": jnp.bfloat16}
# training.mixed_precision -> the dtype in which trained weights are kept
STORED = {"fp32": "fp32", "bf16": "fp32", "bf16_params": "bf16"}
ROWS = RowLayout()


@dataclass(frozen=True)
class _Rescore:
    """A Rescorer. Example: policy.rescore(params, batch) -> log-probabilities [B, T]."""

    rows: RowLayout  # layout of its batches
    # (params, batch in rows) -> its compiled program, which it keeps
    compiled: Callable[[Params, RowBatch], jax.stages.Compiled]
    # whether tokens take the experts that the sampler recorded, as they do in the update; then
    # log-probabilities differ by weights alone
    replays: bool = True
    # sequences of a part that is scored at once; 0: all
    num_sequences: int = 0
    # seconds of its calls are added up, under the name of a metric
    metric: str = "time/rescore"
    seconds: Counter = field(default_factory=Counter)

    def __call__(self, params: Params, batch: Batch) -> np.ndarray:
        elapsed = stopwatch()
        # Other fields of a batch would only make another program.
        arrays = (batch.tokens, batch.token_mask, batch.loss_weight)
        routes = batch.routes if self.replays else None
        read = Batch(*arrays, segment_ids=batch.segment_ids, routes=routes)
        count = len(batch.tokens)
        parts = []
        for part in read.parts(self.num_sequences or count):
            laid_out, layout = self.rows.lay_out(part)
            parts.append(layout.back(self.compiled(params, laid_out)(params, laid_out)))
        self.seconds[self.metric] += elapsed()
        # of one part no copy: it may hold hidden states
        scores = parts[0]
        if len(parts) > 1:
            scores = np.concatenate(parts)
        return scores[:count]

    def under(self, params: Params, metric: str) -> "_FrozenScorer":
        """The scorer of weights that stay as they are; its seconds go to `metric`."""
        return _FrozenScorer(params, replace(self, metric=metric))


@dataclass(frozen=True)
class _FrozenScorer:
    """A Scorer. Example: policy.scorers["reference"](batch) -> ref_logprobs [B, T]."""

    params: Params  # on the mesh, or on a part of it, never donated
    rescore: _Rescore

    def __call__(self, batch: Batch) -> np.ndarray:
        with jax.set_mesh(self._mesh):
            return self.rescore(self.params, batch)

    def compiled(self, batch: RowBatch) -> jax.stages.Compiled:
        with jax.set_mesh(self._mesh):
            return self.rescore.compiled(self.params, batch)

    @property
    def _mesh(self) -> jax.sharding.Mesh:
        place = jax.tree.leaves(self.params)[0].sharding
        # weights of one device that nobody has put on a mesh are read on the current one
        is_placed = isinstance(place, jax.sharding.NamedSharding)
        return place.mesh if is_placed else jax.sharding.get_mesh()


def scoring_program(
    scores: Callable[[Params, RowBatch], TokenScores], rows: RowLayout
) -> jax.stages.Wrapped:
    """(params, batch in rows) -> log-probabilities [R, W], micro-batch by micro-batch."""
    return on_every_device(lambda params, part: scores(params, part).logprobs, rows)


def on_every_device(
    of_part: Callable[[Params, RowBatch], Any], rows: RowLayout
) -> jax.stages.Wrapped:
    """(params, batch in rows) -> what of_part gives of each micro-batch, a tree of [R, W, ...].
    Every device has all of it, so that every process can read it. Parts that hold nothing give
    zeros."""

    def in_rows(x: jax.Array) -> jax.Array:
        # back from parts of shards
        inner = x.shape[2:]
        x = x.reshape(len(x), axis_size("fsdp"), -1, *inner).swapaxes(0, 1)
        return constrain(x.reshape(-1, *inner), "batch", *["seq"] * len(inner))

    def score(params: Params, batch: RowBatch) -> Any:
        if rows.num_micro_batches == 1:
            scores = of_part(params, batch.per_row.replace(most_scored=batch.most_scored))
        else:
            parts = cut(batch)

            def fill(i: jax.Array, out: Any) -> Any:
                scores = of_part(params, part_of(parts, i))
                return jax.tree.map(lambda to, x: to.at[i].set(x), out, scores)

            def empty(x: jax.ShapeDtypeStruct) -> jax.Array:
                start = jnp.zeros((rows.num_micro_batches, *x.shape), x.dtype)
                return constrain(start, "layers", "batch", *["seq"] * (x.ndim - 1))

            # The number of parts that run is traced, so this is a loop of XLA and not a scan.
            like = jax.eval_shape(of_part, params, part_of(parts, 0))
            filled = jax.lax.fori_loop(0, batch.num_used, fill, jax.tree.map(empty, like))
            scores = jax.tree.map(in_rows, filled)
        return jax.tree.map(lambda x: constrain(x, *["seq"] * x.ndim), scores)

    return jax.jit(score)


def make_policy(
    cfg: Architecture,
    generate: Generate | None,
    temperature: float,
    dtype: DTypeLike = jnp.float32,
    reference: Params | None = None,
    rows: RowLayout = ROWS,
    *,
    num_sequences: int = 0,
    seconds: Counter | None = None,
    **scoring: Any,
) -> Policy:
    """A decoder as a Policy.

    generate: None for one that only scores. temperature: what logits are divided by. reference: the
    frozen params of the KL term. rows: the layout where `batch_of` asks for scores. num_sequences:
    as many are scored at once; 0: all. seconds: gets those of scoring, by the name of their metric.
    scoring: settings of decoder.forward, such as `remat`.

    Example: `make_policy(model.cfg, generate, temperature=1.0)`.
    """
    # one function for the update and for scorers, so that ratios are 1 where weights are equal
    of_tokens = partial(batch_scores, cfg=cfg, temperature=temperature, dtype=dtype, **scoring)

    def numbers(params: Params, batch: RowBatch) -> TokenScores:
        def head(hidden_RMD: jax.Array, *_: Any) -> TokenScores:
            return TokenScores(scalar_scores(params, hidden_RMD), None)

        # those that a reward model gives the text up to each scored token, that itself included
        return of_tokens(params, batch, head=head, before=0)

    scores = of_tokens if cfg.output == "logits" else numbers
    # compiled when it is called first, and again for other shapes or types
    program = compiled_once(scoring_program(scores, rows).lower)
    rescore = _Rescore(
        rows,
        program,
        num_sequences=num_sequences,
        seconds=Counter() if seconds is None else seconds,
    )
    frozen = {}
    if reference is not None:
        frozen["reference"] = rescore.under(reference, "time/reference")
    return Policy(generate, scores, frozen, rescore)


def batch_scores(
    params: Params,
    batch: RowBatch,
    *,
    cfg: Architecture,
    temperature: float,
    dtype: DTypeLike,
    head: Callable = token_scores,
    before: int = 1,
    **forward: Any,
) -> TokenScores:
    """log p(token) and the entropy of the scored tokens, float32 [R, W], 0 elsewhere. Logits
    [R, W, V] never exist.

    head: another function of hidden states than vocabulary.token_scores; what it gives, a tree of
    [R, M] or [R, M, K], comes back in rows. before: 0 reads the hidden state of each token itself,
    which predicts batch.streams["targets"] if the batch has it. forward: settings of
    decoder.forward."""
    meta = attention.meta_of_rows(batch)
    routes = replayed(batch.routes, cfg)
    hidden_RWD, routed = decoder.forward(
        params, cfg, batch.tokens, meta, dtype, routes_LBTk=routes, **forward
    )

    def in_rows(x_RM: jax.Array) -> jax.Array:
        # values back at the columns of their tokens, 0 elsewhere
        R, M, *inner = x_RM.shape
        W = batch.tokens.shape[1]
        # a row may have fewer scored tokens than M; the rest belongs to no token
        is_scored = batch.is_scored[..., None] if inner else batch.is_scored
        x_RM = jnp.where(is_scored, x_RM, 0)
        if batch.scored is None:
            return jnp.pad(x_RM, [(0, 0), (W - M, 0), *[(0, 0)] * len(inner)])
        rows = jnp.zeros((R, W, *inner), x_RM.dtype)
        return rows.at[jnp.arange(R)[:, None], batch.scored].add(x_RM)

    # The hidden states [R, M, D] that predict the tokens which count, and these tokens [R, M].
    before_RMD = at_scored(hidden_RWD, batch, before)
    # of a batch whose tokens predict something else, and not each other
    targets = batch.tokens if before else batch.streams.get("targets", batch.tokens)
    targets_RM = at_scored(targets, batch)
    table_VD = decoder.output_table(params, cfg) if cfg.output == "logits" else None
    softcap = cfg.final_softcap
    most = batch.most_scored
    scores_RM = head(before_RMD, table_VD, targets_RM, softcap, temperature, most)
    scores_RW = jax.tree.map(in_rows, scores_RM)
    if routed is not None:
        scores_RW = with_expert_sums(scores_RW, routed, routes, batch)
    return scores_RW


def token_logprobs(
    params: Params,
    tokens_BT: jax.Array,
    token_mask_BT: jax.Array,
    *,
    cfg: Architecture,
    temperature: float = 1.0,
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """log p(tokens[b, t] | tokens[b, :t]) in float32, [B, T], of sequences that are not laid out in
    rows; position 0, which nothing predicts, is 0."""
    meta = attention.one_sequence_per_row(token_mask_BT)
    hidden_BTD = decoder.forward(params, cfg, tokens_BT, meta, dtype)[0][:, :-1]
    table_VD = decoder.output_table(params, cfg)
    scores = token_scores(
        hidden_BTD, table_VD, tokens_BT[:, 1:], cfg.final_softcap, temperature
    )
    return jnp.pad(scores.logprobs, ((0, 0), (1, 0)))
