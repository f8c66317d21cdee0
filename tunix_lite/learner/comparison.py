"""Compares the policy with a teacher at each token: `collect` stores the teacher's outputs, and the
update computes the divergence from them.

For each token the teacher's hidden state is stored, or its k likeliest tokens with their
log-probabilities. They travel with the batch as streams [B, T, K]; its output embedding stays on
the mesh and is a constant of the batch. models/divergence.py computes the divergence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tunix_lite.algorithms.algorithm import TeacherComparison
from tunix_lite.basics.types import (
    Batch,
    Params,
    RowBatch,
    TokenScores,
    realigned,
)
from tunix_lite.learner.rows import RowLayout
from tunix_lite.models.divergence import Kind, head_divergence, list_divergence, top_tokens
from tunix_lite.models.vocabulary import head_spec, token_scores
from tunix_lite.parallel.mesh import sharding

# names of what is kept of the teacher: streams, and a constant
HIDDEN = "teacher_hidden"
TOKENS = "teacher_tokens"
LOGPROBS = "teacher_logprobs"
TABLE = "teacher_table"


@dataclass(frozen=True)
class Teacher:
    """Inputs of a comparison beside arrays.
    Example: Teacher(TeacherComparison("teacher", "reverse"), None, 2304, 262144)."""

    comparison: TeacherComparison
    softcap: float | None  # softcap of the teacher's logits
    embed_dim: int  # width of the teacher
    vocabulary: int  # tokens of the policy; a larger teacher's other tokens are left out

    def streams(self, dtype: DTypeLike) -> dict[str, tuple[int, DTypeLike]]:
        """Length and type of the vector that is stored for each token, by name."""
        k = self.comparison.top_k
        if not k:
            return {HIDDEN: (self.embed_dim, dtype)}
        return {TOKENS: (k, jnp.int32), LOGPROBS: (k + 1, jnp.float32)}

    def vocabulary_of(self, table: jax.Array) -> jax.Array:
        """Returns the rows of the teacher's output embedding that the policy has tokens for."""
        return table if len(table) == self.vocabulary else table[: self.vocabulary]

    def shapes(
        self, rows: RowBatch, table: jax.ShapeDtypeStruct, dtype: DTypeLike
    ) -> RowBatch:
        """Adds the shapes of a comparison's arrays; table: that of the teacher's output
        embedding."""

        def vectors(length: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
            shape = (*rows.tokens.shape, length)
            place = sharding(("batch", "seq", "seq"), shape)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

        streams = {name: vectors(*one) for name, one in self.streams(dtype).items()}
        # only where the whole vocabulary is compared does the update need the table
        constants = None
        if not self.comparison.top_k:
            shape = (self.vocabulary, self.embed_dim)
            place = sharding(("vocab", "embed"), shape)
            constants = {TABLE: jax.ShapeDtypeStruct(shape, table.dtype, sharding=place)}
        return rows.replace(streams=rows.streams | streams, constants=constants)


@dataclass(frozen=True)
class FrozenComparer:
    """Adds to a batch what a teacher finds of each token: an algorithms.algorithm.Comparer.
    Example: batch = policy.compare(batch); then policy.scores(params, rows).divergence."""

    params: Params  # weights of the teacher, on the mesh, never donated
    table: jax.Array | None  # its output embedding, where the whole vocabulary is compared
    rows: RowLayout  # layout of its batches
    # (params, batch in rows) -> its compiled program, which it keeps
    program: Callable[..., Any]

    def __call__(self, batch: Batch, seen: Batch | None = None) -> Batch:
        """The batch with streams and constants of the comparison.

        seen: the same completions as the teacher reads them, after other prompts; None: as they
        are. Raises ValueError if another number of tokens counts in a sequence of it."""
        # Other fields of a batch would only make another program.
        read = batch if seen is None else seen
        read = Batch(read.tokens, read.token_mask, read.loss_weight)
        laid_out, layout = self.rows.lay_out(read)
        streams = jax.tree.map(layout.back, self.compiled(laid_out)(self.params, laid_out))
        streams = {name: realigned(values, read, batch) for name, values in streams.items()}
        constants = None if self.table is None else {TABLE: self.table}
        return batch.replace(streams=batch.streams | streams, constants=constants)

    def compiled(self, batch: RowBatch) -> Callable[..., dict[str, jax.Array]]:
        return self.program(self.params, batch)


def description_program(
    scores: Callable[..., Any], teacher: Teacher
) -> Callable[..., dict[str, jax.Array]]:
    """(params, batch in rows) -> the streams of a comparison, [R, W, K] each, of one micro-batch.
    scores: those of the teacher, as policy.batch_scores with its settings."""

    def head(
        before_RMD: jax.Array, table_VD: jax.Array, *settings: Any
    ) -> dict[str, jax.Array]:
        k = teacher.comparison.top_k
        if not k:
            return {HIDDEN: before_RMD}
        # a teacher may have more tokens than the policy
        _, softcap, temperature = settings
        table_VD = teacher.vocabulary_of(table_VD)
        spec = head_spec(len(table_VD), softcap, temperature)
        tokens, logprobs = top_tokens(spec, before_RMD, table_VD, k)
        return {TOKENS: tokens, LOGPROBS: logprobs}

    return partial(scores, head=head)


def with_divergence(
    scores: Callable[..., TokenScores], teacher: Teacher
) -> Callable[..., TokenScores]:
    """The scores of the policy, and how far it is from the teacher at each token that counts.
    scores: policy.batch_scores with its settings."""
    comparison = teacher.comparison
    kind = Kind(comparison.divergence, comparison.mix)

    def at_scored(x_RWK: jax.Array, batch: RowBatch) -> jax.Array:
        # the teacher's streams at the same tokens, [R, M, K]
        if batch.scored is None:
            return x_RWK[:, -batch.is_scored.shape[1] :]
        return jnp.take_along_axis(x_RWK, batch.scored[..., None], axis=1)

    def compared(params: Params, batch: RowBatch) -> TokenScores:
        def head(
            before_RMD: jax.Array,
            table_VD: jax.Array,
            targets_RM: jax.Array,
            softcap: float | None,
            temperature: float,
        ) -> TokenScores:
            # the scores of the sampled tokens, as without a comparison
            sampled = token_scores(before_RMD, table_VD, targets_RM, softcap, temperature)
            spec = head_spec(len(table_VD), softcap, temperature)
            ours = (kind, spec, before_RMD, table_VD)
            theirs = {
                name: at_scored(batch.streams[name], batch) for name in teacher.streams(None)
            }
            if comparison.top_k:
                divergence = list_divergence(*ours, theirs[TOKENS], theirs[LOGPROBS])
            else:
                spec_of_teacher = head_spec(len(table_VD), teacher.softcap, temperature)
                table_VE = batch.constants[TABLE]
                divergence = head_divergence(*ours, spec_of_teacher, theirs[HIDDEN], table_VE)
            return sampled._replace(divergence=divergence)

        return scores(params, batch, head=head)

    return compared
