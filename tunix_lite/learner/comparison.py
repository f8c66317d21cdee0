"""Compares the policy with a teacher at each token: the run stores the teacher's outputs, and the
update computes the divergence from them.

For each token the teacher's hidden state is stored. It travels with the batch as a stream
[B, T, K]; the teacher's output embedding stays on the mesh and is a constant of the batch.
models/divergence.py computes the divergence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.typing import DTypeLike

from tunix_lite.algorithms.algorithm import Scorer, TeacherComparison
from tunix_lite.basics.types import (
    Batch,
    Params,
    RowBatch,
    TokenScores,
    realigned,
)
from tunix_lite.learner.rows import at_scored
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

    def shapes(
        self, rows: RowBatch, table: jax.ShapeDtypeStruct, dtype: DTypeLike
    ) -> RowBatch:
        """Adds the shapes of a comparison's arrays; table: that of the teacher's output
        embedding."""
        shape = (*rows.tokens.shape, self.embed_dim)
        place = sharding(("batch", "seq", "seq"), shape)
        hidden = {HIDDEN: jax.ShapeDtypeStruct(shape, dtype, sharding=place)}
        shape = (self.vocabulary, self.embed_dim)
        place = sharding(("vocab", "embed"), shape)
        constants = {TABLE: jax.ShapeDtypeStruct(shape, table.dtype, sharding=place)}
        return rows.replace(streams=rows.streams | hidden, constants=constants)


def with_hidden_states(scorer: Scorer, table: jax.Array, batch: Batch) -> Batch:
    """Adds to a batch what a teacher finds of each token: Policy.compare of an algorithm.

    scorer: a batch -> hidden states of the teacher [B, T, K]. table: its output embedding, of the
    tokens that the policy has. Raises ValueError if another number of tokens counts in a sequence
    of batch.seen.
    Example: batch = policy.compare(batch); then policy.scores(params, rows).divergence."""
    read = batch if batch.seen is None else batch.seen
    hidden_BTK = realigned(scorer(read), read, batch)
    streams = batch.streams | {HIDDEN: hidden_BTK}
    return batch.replace(streams=streams, constants={TABLE: table}, seen=None)


def hidden_states(before_RMD: jax.Array, *_: Any) -> jax.Array:
    """A head of policy.batch_scores: the states that predict the tokens, as they are."""
    return before_RMD


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
            most: jax.Array | None,
        ) -> TokenScores:
            # the scores of the sampled tokens, as without a comparison
            how = (softcap, temperature, most)
            sampled = token_scores(before_RMD, table_VD, targets_RM, *how)
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
