"""Compares the policy with a teacher at each token: `collect` stores the teacher's outputs, and the
update computes the divergence from them.

For each token the teacher's hidden state is stored. It travels with the batch as a stream
[B, T, K]; the teacher's output embedding stays on the mesh and is a constant of the batch.
models/divergence.py computes the divergence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.typing import DTypeLike

from tunix_lite.algorithms.algorithm import TeacherComparison
from tunix_lite.basics.types import (
    Batch,
    Params,
    RowBatch,
    TokenScores,
    realigned,
)
from tunix_lite.learner.rows import RowLayout, at_scored
from tunix_lite.models.divergence import Kind, head_divergence
from tunix_lite.models.vocabulary import head_spec, token_scores
from tunix_lite.parallel.mesh import sharding

# names of what is kept of the teacher: a stream, and a constant
HIDDEN = "teacher_hidden"
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
        return {HIDDEN: (self.embed_dim, dtype)}

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
        shape = (self.vocabulary, self.embed_dim)
        place = sharding(("vocab", "embed"), shape)
        constants = {TABLE: jax.ShapeDtypeStruct(shape, table.dtype, sharding=place)}
        return rows.replace(streams=rows.streams | streams, constants=constants)


@dataclass(frozen=True)
class FrozenComparer:
    """Adds to a batch what a teacher finds of each token: an algorithms.algorithm.Comparer.
    Example: batch = policy.compare(batch); then policy.scores(params, rows).divergence."""

    params: Params  # weights of the teacher, on the mesh, never donated
    table: jax.Array  # its output embedding
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
        return batch.replace(streams=batch.streams | streams, constants={TABLE: self.table})

    def compiled(self, batch: RowBatch) -> Callable[..., dict[str, jax.Array]]:
        return self.program(self.params, batch)


def description_program(
    scores: Callable[..., Any],
) -> Callable[..., dict[str, jax.Array]]:
    """(params, batch in rows) -> the streams of a comparison, [R, W, K] each, of one micro-batch.
    scores: those of the teacher, as policy.batch_scores with its settings."""

    def head(before_RMD: jax.Array, *unused: Any) -> dict[str, jax.Array]:
        return {HIDDEN: before_RMD}

    return partial(scores, head=head)


def with_divergence(
    scores: Callable[..., TokenScores], teacher: Teacher
) -> Callable[..., TokenScores]:
    """The scores of the policy, and how far it is from the teacher at each token that counts.
    scores: policy.batch_scores with its settings."""
    comparison = teacher.comparison
    kind = Kind(comparison.divergence, comparison.mix)

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
            divergence = head_divergence(
                kind,
                spec,
                before_RMD,
                table_VD,
                head_spec(len(table_VD), teacher.softcap, temperature),
                at_scored(batch.streams[HIDDEN], batch),
                batch.constants[TABLE],
            )
            return sampled._replace(divergence=divergence)

        return scores(params, batch, head=head)

    return compared
