"""Divergence between two models at each token: KL(q || p), KL(p || q) or Jensen-Shannon, over the
whole vocabulary (arXiv:2306.13649, arXiv:2601.20802). Only a block of both models' logits exists at
once (models/vocabulary.py)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from tunix_lite.models.rounding import stored
from tunix_lite.models.vocabulary import (
    AXES,
    BELOW_ALL,
    HeadSpec,
    block_products,
    block_tokens,
    constrained,
    scan_blocks,
    scores_and_totals,
    softcapped,
    table_in_blocks,
    with_gradients,
    zero_sums,
)
from tunix_lite.parallel.mesh import gather


@dataclass(frozen=True)
class Kind:
    """Kind of divergence: forward, reverse or jensen_shannon.

    Example: Kind("jensen_shannon", 0.5).
    """

    name: str
    mix: float = 0.5  # share of the teacher in the mixture, of jensen_shannon

    def of(self, student: jax.Array, teacher: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The summand of each entry, and its slope by the student's log-probability."""
        if self.name == "forward":
            q = jnp.exp(teacher)
            return q * (teacher - student), -q
        if self.name == "reverse":
            p = jnp.exp(student)
            value = p * (student - teacher)
            return value, value + p
        of_teacher = teacher + jnp.log(self.mix)
        of_student = student + jnp.log1p(-self.mix)
        # as logarithms: a probability of 1e-50 is 0 in float32
        mixture = jnp.logaddexp(of_teacher, of_student)
        slope = jnp.exp(of_student) * (student - mixture)
        return jnp.exp(of_teacher) * (teacher - mixture) + slope, slope


def head_divergence(
    kind: Kind,
    student: HeadSpec,
    hidden_BMD: jax.Array,
    table_VD: jax.Array,
    teacher: HeadSpec,
    teacher_hidden_BME: jax.Array,
    teacher_table_VE: jax.Array,
) -> jax.Array:
    """[B, M] float32, in nats: over the whole vocabulary, which is the same of both.

    hidden, table: as vocabulary.token_scores takes them, E the embedding of the teacher.
    """
    # both models have the same parts of the vocabulary
    specs = (student, teacher)
    tokens = hidden_BMD.shape[0] * hidden_BMD.shape[1]
    # a block of each model's logits exists at once
    tables = tuple(
        table_in_blocks(table, 2 * tokens) for table in (table_VD, teacher_table_VE)
    )
    arrays = (hidden_BMD, tables[0], teacher_hidden_BME, tables[1])
    return _divergence((kind, *specs), None, *arrays)


def _logits(
    spec: HeadSpec, hidden_BMD: jax.Array, index: jax.Array, block_PSD: jax.Array
) -> jax.Array:
    """Logits [B, M, P, S] of one block, BELOW_ALL where an entry is padding."""
    used_PSD = gather(stored(block_PSD, hidden_BMD.dtype), AXES)
    logits = softcapped(spec, block_products(hidden_BMD, used_PSD))
    return jnp.where(block_tokens(spec, block_PSD, index) >= 0, logits, BELOW_ALL)


def _forward(
    static: tuple[Kind, HeadSpec, HeadSpec],
    hidden_BMD: jax.Array,
    table_NPSD: jax.Array,
    teacher_BME: jax.Array,
    teacher_NPSE: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The divergence; and the logarithms of both totals and the sum of slopes, all [B, M]."""
    kind, *specs = static
    teacher_NPSE = constrained(teacher_NPSE)
    zeros = zero_sums(hidden_BMD, table_NPSD.shape[1])

    def both(index: jax.Array, ours_PSD: jax.Array, theirs_PSE: jax.Array) -> list[jax.Array]:
        return [
            _logits(specs[0], hidden_BMD, index, ours_PSD),
            _logits(specs[1], teacher_BME, index, theirs_PSE),
        ]

    # the first pass: what each model's logits are normalised by
    none = jnp.full(hidden_BMD.shape[:2], -1)
    heads = ((hidden_BMD, table_NPSD), (teacher_BME, teacher_NPSE))
    totals = [scores_and_totals(spec, *head, none)[1][0] for spec, head in zip(specs, heads)]

    # the second pass: log-probabilities of a block, and their terms
    def add_terms(sums: tuple, block: tuple) -> tuple[tuple, None]:
        ours, theirs = (x - t[..., None, None] for x, t in zip(both(*block), totals))
        is_token = block_tokens(specs[0], block[1], block[0]) >= 0
        terms = (jnp.where(is_token, x, 0.0) for x in kind.of(ours, theirs))
        return tuple(x + jnp.sum(term, axis=-1) for x, term in zip(sums, terms)), None

    sums, _ = scan_blocks(add_terms, (zeros, zeros), table_NPSD, teacher_NPSE)
    # the parts of the vocabulary meet here
    value, slopes = (jnp.sum(x, axis=-1) for x in sums)
    return value, (*totals, slopes)


def _slopes(
    static: tuple[Kind, HeadSpec, HeadSpec],
    others: list[jax.Array],
    sums: tuple[jax.Array, ...],
    g_BM: jax.Array,
) -> tuple[Callable[[jax.Array, tuple], jax.Array], tuple]:
    """Of the student alone; the teacher has none."""
    kind, *specs = static
    teacher_BME, teacher_NPSE = others
    ours_total, theirs_total, slopes, g = (x[..., None, None] for x in (*sums, g_BM))

    # the third pass: the slope of the divergence by each logit of the student
    def cotangent(products: jax.Array, block: tuple) -> jax.Array:
        index, block_PSD, theirs_PSE = block
        logits, pull = jax.vjp(partial(softcapped, specs[0]), products)
        is_token = block_tokens(specs[0], block_PSD, index) >= 0
        ours = jnp.where(is_token, logits - ours_total, BELOW_ALL)
        theirs = _logits(specs[1], teacher_BME, index, theirs_PSE) - theirs_total
        slope = jnp.where(is_token, kind.of(ours, theirs)[1], 0.0)
        # All logits share one total, so each loses its share of the sum of slopes.
        return pull(g * (slope - jnp.exp(ours) * slopes))[0]

    return cotangent, (constrained(teacher_NPSE),)


_divergence = with_gradients(_forward, _slopes)
