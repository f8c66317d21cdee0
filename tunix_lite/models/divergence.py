"""Divergence between two models at each token: KL(q || p), KL(p || q) or Jensen-Shannon, over the
whole vocabulary (arXiv:2306.13649, arXiv:2601.20802). Only a block of both models' logits exists at
once (models/vocabulary.py)."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal

from tunix_lite.models.rounding import stored
from tunix_lite.models.vocabulary import (
    AXES,
    BELOW_ALL,
    HeadSpec,
    block_products,
    block_tokens,
    constrained,
    pulled_back,
    scan_blocks,
    softcapped,
    table_in_blocks,
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
    return _divergence(kind, specs, hidden_BMD, tables[0], teacher_hidden_BME, tables[1])


def _logits(
    spec: HeadSpec, hidden_BMD: jax.Array, index: jax.Array, block_PSD: jax.Array
) -> jax.Array:
    """Logits [B, M, P, S] of one block, BELOW_ALL where an entry is padding."""
    used_PSD = gather(stored(block_PSD, hidden_BMD.dtype), AXES)
    logits = softcapped(spec, block_products(hidden_BMD, used_PSD))
    return jnp.where(block_tokens(spec, block_PSD, index) >= 0, logits, BELOW_ALL)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _divergence(kind: Kind, specs: tuple[HeadSpec, HeadSpec], *arrays: jax.Array) -> jax.Array:
    """[B, M] of the four arrays that _forward takes."""
    hidden, table, teacher, teacher_table = arrays
    placed = (hidden, constrained(table), teacher, constrained(teacher_table))
    return _forward(kind, specs, *placed)[0]


def _forward(
    kind: Kind,
    specs: tuple[HeadSpec, HeadSpec],
    hidden_BMD: jax.Array,
    table_NPSD: jax.Array,
    teacher_BME: jax.Array,
    teacher_NPSE: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The divergence; and the logarithms of both totals and the sum of slopes, all [B, M]."""
    tables = (table_NPSD, teacher_NPSE)
    zeros = zero_sums(hidden_BMD, table_NPSD.shape[1])

    def both(index: jax.Array, ours_PSD: jax.Array, theirs_PSE: jax.Array) -> list[jax.Array]:
        return [
            _logits(specs[0], hidden_BMD, index, ours_PSD),
            _logits(specs[1], teacher_BME, index, theirs_PSE),
        ]

    # the first pass: what each model's logits are normalised by
    def add_totals(sums: tuple, block: tuple) -> tuple[tuple, None]:
        grown = []
        for (top, total), logits in zip(sums, both(*block)):
            # the sum so far was taken relative to the old maximum
            higher = jnp.maximum(top, jnp.max(logits, axis=-1))
            exps = jnp.exp(logits - higher[..., None])
            grown.append((higher, total * jnp.exp(top - higher) + jnp.sum(exps, axis=-1)))
        return tuple(grown), None

    start = (zeros + BELOW_ALL, zeros)
    sums, _ = scan_blocks(add_totals, (start, start), *tables)
    # the parts of the vocabulary [B, M, P] meet here, for the first time
    totals = [jax.nn.logsumexp(top + jnp.log(total), axis=-1) for top, total in sums]

    # the second pass: log-probabilities of a block, and their terms
    def add_terms(sums: tuple, block: tuple) -> tuple[tuple, None]:
        ours, theirs = (x - t[..., None, None] for x, t in zip(both(*block), totals))
        is_token = block_tokens(specs[0], block[1], block[0]) >= 0
        terms = (jnp.where(is_token, x, 0.0) for x in kind.of(ours, theirs))
        return tuple(x + jnp.sum(term, axis=-1) for x, term in zip(sums, terms)), None

    sums, _ = scan_blocks(add_terms, (zeros, zeros), *tables)
    # the parts of the vocabulary meet here
    value, slopes = (jnp.sum(x, axis=-1) for x in sums)
    return value, (*totals, slopes)


def _forward_with_residuals(
    kind: Kind, specs: tuple[HeadSpec, HeadSpec], *primals: CustomVJPPrimal
) -> tuple[jax.Array, tuple]:
    hidden, table, teacher, teacher_table = (primal.value for primal in primals)
    arrays = (hidden, constrained(table), teacher, constrained(teacher_table))
    value, sums = _forward(kind, specs, *arrays)
    # whether the table trains is known while tracing
    trains = () if primals[1].perturbed else None
    return value, (arrays, sums, trains)


def _backward(
    kind: Kind, specs: tuple[HeadSpec, HeadSpec], residuals: tuple, g_BM: jax.Array
) -> tuple[jax.Array, jax.Array | None, None, None]:
    """The gradients of the student's hidden states and table; the teacher has none."""
    (hidden_BMD, table_NPSD, teacher_BME, teacher_NPSE), sums, trains = residuals
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

    return *pulled_back(hidden_BMD, table_NPSD, trains, cotangent, (teacher_NPSE,)), None, None


_divergence.defvjp(_forward_with_residuals, _backward, symbolic_zeros=True)
