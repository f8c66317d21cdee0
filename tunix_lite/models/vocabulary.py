"""Log-probabilities of tokens, and entropies, block by block of the vocabulary, of s_v = cap(h .
w_v) / temperature: logprob = s_token - top - log total, entropy = log total - sum_v p_v (s_v -
top). Letters beside B, D and V: M tokens of a row, P parts of the vocabulary, S entries of a block,
N blocks."""

import contextlib
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from tunix_lite.basics.types import Params, TokenScores
from tunix_lite.models.rounding import stored
from tunix_lite.models.unfused import unfused_on_cpu
from tunix_lite.parallel.mesh import constrain, constrain_gradient, gather, parts_of

# what a scan over blocks carries
T = TypeVar("T")
# Float32 logits that a device holds at once: 64 MiB, and 16 MiB on a CPU, which has some three
# arrays of that size and is no slower with smaller products (docs/log.md, 28 November 2026).
SCORES_AT_ONCE = 2**24
_ON_CPU = 2**22
# A head computes so many eighths of the columns of a row, or all: each is a branch to compile.
# An eighth is counted as these columns at least.
_EIGHTHS = (3, 4, 5, 6)
_LEAST_COLUMNS = 64
# Weights of an output embedding from which on this is worth the time to compile.
LARGE_HEAD = 2**22
# Below every logit: exp of it is 0.
BELOW_ALL = -1e30
# Logical axes of a block: parts of the vocabulary, entries of the block, embedding.
AXES = ("vocab", "seq", "embed")
# (number of a block, its gradient [P, S, D]): adds it to a sum
AddBlock = Callable[[jax.Array, jax.Array], None]
# weights that train, each with the jax.Ref of the sum of its gradients
_sums: ContextVar[tuple[tuple[jax.Array, Any], ...]] = ContextVar("sums", default=())


@dataclass(frozen=True)
class HeadSpec:
    """Inputs of the blocks besides arrays.

    Example: HeadSpec(softcap=30.0, temperature=1.0, share=32768): 8 parts of 262,144 tokens.
    """

    softcap: float | None
    temperature: float
    share: int  # tokens of the vocabulary in each part


def token_scores(
    hidden_BMD: jax.Array,
    table_VD: jax.Array,
    targets_BM: jax.Array,
    softcap: float | None,
    temperature: float,
    most: jax.Array | None = None,
) -> TokenScores:
    """Log-probability of each target, the entropy beside it, and whether it is the likeliest token,
    [B, M] float32.

    hidden: at the position that predicts the target. table: the output embedding, as it is stored.
    most: int32, the columns that are read, of several the largest; those behind get anything, and
    most of them cost nothing. None: all are read.
    """
    B, M, _ = hidden_BMD.shape
    spec = head_spec(len(table_VD), softcap, temperature)
    table_NPSD = table_in_blocks(table_VD, B * M)
    add = _adder(table_VD, table_NPSD.shape)
    scores = _token_scores
    if add is not None:
        scores = with_gradients(scores_and_totals, _slopes, add)
    return TokenScores(*scores(spec, most, hidden_BMD, table_NPSD, targets_BM))


@contextlib.contextmanager
def gradients_added(params: Params, sums: Params) -> Iterator[None]:
    """Inside, a head whose table is one of these params adds the gradient of each block to the sum
    of that table, a jax.Ref, as it arises. It has no other gradient then."""
    weights = jax.tree.leaves(params)
    totals = jax.tree.leaves(sums)
    before = _sums.set(tuple(zip(weights, totals)))
    try:
        yield
    finally:
        _sums.reset(before)


def _adder(table_VD: jax.Array, shape: tuple[int, ...]) -> AddBlock | None:
    """What adds a block's gradient to the sum of this table's; None if there is no such sum, or if
    blocks of this shape [N, P, S, D] are no slices of the table."""
    total = next((total for weight, total in _sums.get() if weight is table_VD), None)
    N, P, S, _ = shape
    if total is None or P > 1 or len(table_VD) != N * S:
        return None

    def add(number: jax.Array, of_block_PSD: jax.Array) -> None:
        def block_of(table_VD: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(table_VD, number * S, S)

        # jax adds the gradient of a slice in place; nothing reads these zeros
        zeros_VD = jnp.zeros(total.shape, total.dtype)
        _, pull = jax.vjp(block_of, zeros_VD)
        of_block_SD = of_block_PSD.squeeze(0)
        pull.with_refs(total)(of_block_SD)

    return add


def head_spec(vocabulary: int, softcap: float | None, temperature: float) -> HeadSpec:
    """Returns the inputs of a head's blocks, for a vocabulary of this size on the current mesh."""
    return HeadSpec(softcap, temperature, vocabulary // parts_of("vocab"))


def table_in_blocks(table_VD: jax.Array, tokens: int) -> jax.Array:
    """The output embedding cut into blocks [N, P, S, D], for so many tokens of the whole batch."""
    V, D = table_VD.shape
    parts = parts_of("vocab")
    share = V // parts

    # Pad each part to whole blocks, and put the blocks first, to scan over them.
    device = jax.sharding.get_abstract_mesh().abstract_device
    on_cpu = device is not None and device.device_kind == "cpu"
    blocks = num_blocks(share, tokens // parts_of("batch"), on_cpu)
    size = -(-V // (parts * blocks))
    padding = ((0, 0), (0, blocks * size - share), (0, 0))
    table_PXD = jnp.pad(table_VD.reshape(parts, share, D), padding)
    return table_PXD.reshape(parts, blocks, size, D).swapaxes(0, 1)


def num_blocks(vocabulary: int, tokens: int, on_cpu: bool = False) -> int:
    """Counts the blocks that a part of the vocabulary is cut into; a number that divides it, if one
    is near."""
    at_once = min(SCORES_AT_ONCE, _ON_CPU) if on_cpu else SCORES_AT_ONCE
    needed = -(-vocabulary * tokens // at_once)
    wanted = min(max(1, needed), vocabulary)
    near = range(wanted, min(2 * wanted, vocabulary) + 1)
    # A divisor needs no padding, which would be multiplied in vain.
    return next((n for n in near if vocabulary % n == 0), wanted)


def block_products(hidden_BMD: jax.Array, block_PSD: jax.Array) -> jax.Array:
    """Products [B, M, P, S] of all tokens with one block of each part, float32 at least."""
    wide = jnp.promote_types(hidden_BMD.dtype, jnp.float32)
    products = jnp.einsum("bmd,psd->bmps", hidden_BMD, block_PSD, preferred_element_type=wide)
    return constrain(products, "batch", "seq", "vocab", "seq")


def softcapped(spec: HeadSpec, products: jax.Array) -> jax.Array:
    """Logits from products: capped, and divided by the temperature."""
    if spec.softcap is not None:
        products = spec.softcap * jnp.tanh(products / spec.softcap)
    return products / spec.temperature


def block_tokens(
    spec: HeadSpec,
    block_PSD: jax.Array,
    index: jax.Array,
) -> jax.Array:
    """The token of each entry of block number `index`, [P, S]; -1 where the entry is padding."""
    parts, size, _ = block_PSD.shape
    within = index * size + jnp.arange(size)
    # the last block of each part may be longer than what is left
    is_token = within < spec.share
    first_P1 = jnp.arange(parts)[:, None] * spec.share
    return jnp.where(is_token, first_P1 + within, -1)


def _rebased(
    weighted: jax.Array,
    total: jax.Array,
    top: jax.Array,
    higher: jax.Array,
) -> jax.Array:
    """sum_v exp(s_v - top) (s_v - top) for a higher top; sums of logits would cancel."""
    return (weighted + total * (top - higher)) * jnp.exp(top - higher)


def constrained(table_NPSD: jax.Array) -> jax.Array:
    """The table with its sharding constraint."""
    # Inside the custom gradient: outside, the gradient of the constraint would have to lie as the
    # table does, which it cannot where the batch is divided by hand (mesh.constrain_gradient).
    return constrain(table_NPSD, "layers", *AXES)


def zero_sums(hidden_BMD: jax.Array, parts: int) -> jax.Array:
    """Zeros [B, M, P] for sums over the parts of the vocabulary, float32 at least."""
    wide = jnp.promote_types(hidden_BMD.dtype, jnp.float32)
    return constrain(jnp.zeros((*hidden_BMD.shape[:2], parts), wide), "batch", "seq", "vocab")


def scan_blocks(
    one_block: Callable[[T, tuple], tuple[T, Any]], start: T, *tables_NPSD: jax.Array
) -> tuple[T, Any]:
    """lax.scan over the blocks of tables: one_block(carry, (number, a block [P, S, D] of each)) ->
    (carry, output)."""
    # XLA for CPUs would copy each table for a dim of size 1. Of a single block, which is no loop,
    # it computes the products of the forward pass once, and only with that dim.
    blocks = [x.squeeze(1) if len(x) > 1 and x.shape[1] == 1 else x for x in tables_NPSD]

    def of_number(carry: T, block: tuple) -> tuple[T, Any]:
        number, *parts = block
        parts = [x.reshape(whole.shape[1:]) for x, whole in zip(parts, tables_NPSD)]
        return one_block(carry, (number, *parts))

    return jax.lax.scan(of_number, start, (jnp.arange(len(blocks[0])), *blocks))


def head_columns(most: int, head_size: int) -> list[int]:
    """Returns the numbers of columns for which logits may be computed in rows with `most`, the
    least first. head_size: weights of the output embedding."""
    if head_size < LARGE_HEAD:
        return [most]
    eighth = max(_LEAST_COLUMNS, -(-most // 8))
    return [*(n * eighth for n in _EIGHTHS if n * eighth < most), most]


def _of_columns(
    of_first: Callable[[int], tuple[T, Any]],
    sizes: list[int],
    most: jax.Array | None,
    axis: int = 1,
) -> tuple[T, Any]:
    """of_first(size) -> (a tree of arrays with so many columns, others), for the least of the sizes
    with room for `most`; the arrays with zeros behind, as many columns as the last size."""
    if len(sizes) == 1:
        return of_first(sizes[0])

    def of_size(size: int) -> tuple[T, Any]:
        def widened(x: jax.Array) -> jax.Array:
            behind = [(0, 0)] * x.ndim
            behind[axis] = (0, sizes[-1] - size)
            return jnp.pad(x, behind)

        by_column, others = of_first(size)
        return jax.tree.map(widened, by_column), others

    # one program for all batches: which size it takes is known only when it runs
    number = jnp.searchsorted(jnp.asarray(sizes), jnp.max(most))
    return jax.lax.switch(number, [partial(of_size, size) for size in sizes])


def _sizes_of(
    hidden_BMD: jax.Array, table_NPSD: jax.Array, most: jax.Array | None
) -> list[int]:
    columns = hidden_BMD.shape[1]
    return [columns] if most is None else head_columns(columns, table_NPSD.size)


def _first_columns(size: int, sizes: list[int], x: jax.Array | SymbolicZero) -> Any:
    return x if len(sizes) == 1 or isinstance(x, SymbolicZero) else x[:, :size]


def with_gradients(
    forward: Callable[..., tuple[Any, tuple]],
    slopes: Callable[..., tuple[Callable[[jax.Array, tuple], jax.Array], tuple]],
    add: AddBlock | None = None,
) -> Callable[..., Any]:
    """forward(spec, hidden, table in blocks, *others) -> (results, sums), as a function of spec,
    most and the others that gives the results and has gradients of hidden and table. slopes(spec,
    others, sums, cotangents) -> (function, tables): function(products of a block, (its number, its
    table, those of `tables`)) is the cotangent of these products. most: as token_scores takes it,
    where all others are [B, M]; None: all columns are read. add: gets the gradient of each block;
    None: the function gives that of the table."""

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def results(spec: Hashable, most: jax.Array | None, *arrays: jax.Array) -> Any:
        hidden_BMD, table_NPSD, *others = arrays
        return computed(spec, most, hidden_BMD, constrained(table_NPSD), *others)[0]

    def computed(
        spec: Hashable,
        most: jax.Array | None,
        hidden_BMD: jax.Array,
        table_NPSD: jax.Array,
        *others: jax.Array,
    ) -> tuple[Any, tuple]:
        sizes = _sizes_of(hidden_BMD, table_NPSD, most)

        def of_first(size: int) -> tuple[tuple, None]:
            first = partial(_first_columns, size, sizes)
            return forward(spec, first(hidden_BMD), table_NPSD, *map(first, others)), None

        return _of_columns(of_first, sizes, most)[0]

    def with_residuals(
        spec: Hashable,
        most: CustomVJPPrimal | None,
        hidden: CustomVJPPrimal,
        table: CustomVJPPrimal,
        *others: CustomVJPPrimal,
    ) -> tuple[Any, tuple]:
        most = None if most is None else most.value
        arrays = (hidden.value, constrained(table.value), *(x.value for x in others))
        values, sums = computed(spec, most, *arrays)
        # Whether the table trains is a matter of structure, () or None, so that it is known while
        # tracing.
        return values, (most, arrays, sums, () if table.perturbed else None)

    def backward(spec: Hashable, residuals: tuple, cotangents: object) -> tuple:
        most, (hidden_BMD, table_NPSD, *others), sums, trains = residuals

        wide = jnp.promote_types(hidden_BMD.dtype, jnp.float32)
        # By part, so that tp adds up once, behind the loop.
        zeros_PBMD = jnp.zeros((table_NPSD.shape[1], *hidden_BMD.shape), wide)

        # what the gradients of each number of columns are made of
        sizes = _sizes_of(hidden_BMD, table_NPSD, most)
        of_sizes = {}
        for size in sizes:
            first = partial(_first_columns, size, sizes)
            hidden, *rest = jax.tree.map(first, (hidden_BMD, others, sums, cotangents))
            slope_of, tables = slopes(spec, *rest)
            of_sizes[size] = hidden, slope_of

        def one_block(
            total: jax.Array,
            block: tuple,
        ) -> tuple[jax.Array, jax.Array | None]:
            # Block by block: no device ever holds the whole table.
            used_PSD = gather(stored(block[1], hidden_BMD.dtype), AXES)

            def of_first(size: int) -> tuple[jax.Array, jax.Array | None]:
                hidden, slope_of = of_sizes[size]
                slope = slope_of(block_products(hidden, used_PSD), block)
                # In one kernel with the transpose that the table's product needs, XLA for CPUs
                # would compute it column by column, 24 times slower (docs/log.md, 28 Nov. 2026).
                slope = unfused_on_cpu(slope.astype(hidden.dtype))

                # d hidden adds up over the blocks; d table is that of this block
                product = partial(jnp.einsum, preferred_element_type=wide)
                of_hidden = product("bmps,psd->pbmd", slope, used_PSD)
                if trains is None:
                    return of_hidden, None
                return of_hidden, product("bmps,bmd->psd", slope, hidden)

            of_hidden, of_block = _of_columns(of_first, sizes, most, axis=2)
            total = constrain(total + of_hidden, "vocab", "batch", "seq", "act_embed")
            if trains is None:
                return total, None
            of_block = constrain_gradient(of_block, AXES).astype(table_NPSD.dtype)
            return total, add(block[0], of_block) if add else of_block

        total, of_table = scan_blocks(one_block, zeros_PBMD, table_NPSD, *tables)
        of_hidden = jnp.sum(total, axis=0).astype(hidden_BMD.dtype)
        return None, of_hidden, of_table, *[None] * len(others)

    results.defvjp(with_residuals, backward, symbolic_zeros=True)
    return results


def scores_and_totals(
    spec: HeadSpec,
    hidden_BMD: jax.Array,
    table_NPSD: jax.Array,
    targets_BM: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """(log-probabilities, entropies, 1 where the target is the likeliest token); and what the
    backward pass needs: the logsumexp and the entropies."""
    zeros = zero_sums(hidden_BMD, table_NPSD.shape[1])

    def one_block(
        carry: tuple[jax.Array, ...],
        block: tuple[jax.Array, jax.Array],
    ) -> tuple[tuple[jax.Array, ...], None]:
        top, total, weighted, chosen = carry
        index, block_PSD = block
        used_PSD = gather(stored(block_PSD, hidden_BMD.dtype), AXES)
        logits = softcapped(spec, block_products(hidden_BMD, used_PSD))
        tokens_PS = block_tokens(spec, block_PSD, index)
        real = jnp.where(tokens_PS >= 0, logits, BELOW_ALL)

        # The sums so far were taken relative to the old maximum.
        higher = jnp.maximum(top, jnp.max(real, axis=-1))
        shrink = jnp.exp(top - higher)
        exps = jnp.exp(real - higher[..., None])
        rebased_so_far = _rebased(weighted, total, top, higher)
        # XLA for CPUs would take this sum of products for small products of matrices, one a token,
        # which is 10 times slower.
        products = unfused_on_cpu(exps * (real - higher[..., None]))
        weighted = rebased_so_far + jnp.sum(products, axis=-1)
        total = total * shrink + jnp.sum(exps, axis=-1)
        is_target = tokens_PS == targets_BM[..., None, None]
        chosen += jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
        return (higher, total, weighted, chosen), None

    start = (zeros + BELOW_ALL, zeros, zeros, zeros)
    (top, total, weighted, chosen), _ = scan_blocks(one_block, start, table_NPSD)

    # The parts of the vocabulary meet here, in three small sums.
    highest = jnp.max(top, axis=-1, keepdims=True)
    shrink = jnp.exp(top - highest)
    weighted = jnp.sum(_rebased(weighted, total, top, highest), axis=-1)
    total = jnp.sum(total * shrink, axis=-1)
    highest = highest[..., 0]
    chosen = jnp.sum(chosen, axis=-1)
    logprobs = (chosen - highest) - jnp.log(total)
    entropy = jnp.log(total) - weighted / total
    # the same numbers in both, so they are equal to the bit
    is_likeliest = (chosen >= highest).astype(logprobs.dtype)
    return (logprobs, entropy, is_likeliest), (jnp.log(total) + highest, entropy)


def _slopes(
    spec: HeadSpec,
    others: list[jax.Array],
    sums: tuple[jax.Array, jax.Array],
    cotangents: tuple[jax.Array | SymbolicZero, ...],
) -> tuple[Callable[[jax.Array, tuple], jax.Array], tuple]:
    """d s_v = g (1[v = token] - p_v) - e p_v (log p_v + entropy)."""
    g, e, _ = (None if isinstance(x, SymbolicZero) else x[..., None, None] for x in cotangents)
    (targets_BM,) = others
    log_total, entropy = (x[..., None, None] for x in sums)

    def cotangent(products: jax.Array, block: tuple) -> jax.Array:
        index, block_PSD = block
        logits, pull = jax.vjp(partial(softcapped, spec), products)
        tokens_PS = block_tokens(spec, block_PSD, index)
        logprobs = jnp.where(tokens_PS >= 0, logits - log_total, BELOW_ALL)

        # d logits, by the formula above.
        cotangent = 0.0
        if g is not None:
            is_target = tokens_PS == targets_BM[..., None, None]
            cotangent += g * (is_target - jnp.exp(logprobs))
        if e is not None:
            weighted = e * jnp.exp(logprobs)
            cotangent -= weighted * jnp.where(tokens_PS >= 0, logprobs + entropy, 0.0)
        return pull(cotangent)[0]

    return cotangent, ()


_token_scores = with_gradients(scores_and_totals, _slopes)
