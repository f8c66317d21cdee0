"""Products of rows in groups (models/groups.py) with the weights of their experts, with a backward
pass by hand: the gradient of the rows is the same product with each matrix transposed, and that of
a weight is summed block after block. Each row is multiplied by itself, so its product depends on no
other row. Letters as in models/groups.py; A inputs and C outputs of a weight.

On a CPU and a TPU a loop runs over experts or blocks. On a GPU the host would have to wait
for each turn, so there kernels do the same (models/grouped_kernels.py)."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp

from tunix_lite.models.groups import FEWEST, ExpertGroups
from tunix_lite.models.rounding import added, at_least_float32, product, stored, wide
from tunix_lite.models.unfused import unfused_on_cpu
from tunix_lite.models.weights import ComputeCopy, Int8, Leaf, Lora, dense, is_quantized


def grouped_product(rows_RA: jax.Array, weight: Leaf, groups: ExpertGroups) -> jax.Array:
    """The rows times the weights [E, A, C] of their experts, [R, C], in the dtype of the rows. What
    stands in rows of no pair is undefined. Of weights only a `ComputeCopy` gets a gradient."""
    if isinstance(weight, Lora):
        # Two thin products, as in weights.project.
        thin_RK = grouped_product(rows_RA, weight.a, groups)
        adapted_RC = weight.scale * wide(grouped_product(thin_RK, weight.b, groups))
        base_RC = grouped_product(rows_RA, weight.base, groups)
        return added(base_RC, stored(adapted_RC, base_RC.dtype))
    if isinstance(weight, ComputeCopy):
        return _multiply(rows_RA, weight.value, weight.master, groups)
    return _multiply(rows_RA, weight, None, groups)


@jax.custom_vjp
def _multiply(
    rows_RA: jax.Array, weight: Leaf, master: jax.Array | None, groups: ExpertGroups
) -> jax.Array:
    """The product. The gradient of the weight goes to `master`, in its dtype, as weights.project
    has it; a master divided over fsdp gets its part of the sum."""
    return _by_expert(rows_RA, weight, groups, is_transposed=False)


def _backward(kept: tuple, g_RC: jax.Array) -> tuple:
    rows_RA, weight, master, groups = kept
    gradient = None
    if master is not None:
        gradient = stored(_of_weight(rows_RA, g_RC, groups), master.dtype)
        for dim, size in enumerate(gradient.shape):
            if master.shape[dim] != size:
                scatter = partial(jax.lax.psum_scatter, scatter_dimension=dim, tiled=True)
                gradient = scatter(gradient, "fsdp")
    return _by_expert(g_RC, weight, groups, is_transposed=True), None, gradient, None


_multiply.defvjp(
    # Without a gradient of the weight nobody reads the rows again.
    lambda rows, *rest: (_multiply(rows, *rest), (rest[1] is not None and rows, *rest)),
    _backward,
)


# Jitted, so that it is traced once for all layers that are alike.
@partial(jax.jit, static_argnames="is_transposed")
def _by_expert(
    rows_RA: jax.Array, weight: Leaf, groups: ExpertGroups, is_transposed: bool
) -> jax.Array:
    """The product of each row with its expert's matrix, or with that matrix transposed."""

    def matrix_of(expert: jax.Array) -> jax.Array:
        matrix = dense(jax.tree.map(lambda x: x[expert], weight), 1, rows_RA.dtype)
        # On a CPU the transposed matrix is made once, and not in each product.
        return unfused_on_cpu(matrix.T) if is_transposed else matrix

    def of_block(matrix: jax.Array, j: jax.Array, out_RC: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(rows_RA, j * groups.block, groups.block)
        out = product(jnp.matmul, rows, matrix)
        return jax.lax.dynamic_update_slice_in_dim(out_RC, out, j * groups.block, 0)

    def of_expert(expert: jax.Array, out_RC: jax.Array) -> jax.Array:
        return _over_blocks(groups, expert, partial(of_block, matrix_of(expert)), out_RC)

    R, A = rows_RA.shape
    C = jax.eval_shape(matrix_of, groups.expert[0]).shape[1]

    def by_loops() -> jax.Array:
        # Rows of blocks without an expert are never read.
        start_RC = jax.lax.empty((R, C), rows_RA.dtype)
        if groups.expected_blocks > 1.25:
            return jax.lax.fori_loop(0, len(groups.first), of_expert, start_RC)
        # Most experts have one block. One loop over blocks reads a matrix where it is multiplied.
        with _expected(turns=groups.expected_rows / groups.block):
            return jax.lax.fori_loop(
                0,
                jnp.sum(groups.count),
                lambda j, out_RC: of_block(matrix_of(groups.expert[j]), j, out_RC),
                start_RC,
            )

    def by_kernel(kernels: ModuleType) -> jax.Array:
        whole = weight
        if is_quantized(weight) and (groups.tokamax or not isinstance(weight, Int8)):
            whole = jax.vmap(partial(dense, inputs=1, dtype=rows_RA.dtype))(weight)
        stored_bytes = sum(x.nbytes for x in jax.tree.leaves(whole)) / len(groups.first)
        rows = groups.expected_rows
        read = rows * A * rows_RA.dtype.itemsize + stored_bytes * groups.expected_touched
        with _expected(flops=2 * rows * A * C, read=read):
            return kernels.multiply(rows_RA, whole, groups, is_transposed)

    return _on_platform(by_loops, by_kernel, rows_RA, (groups.block, A))


@jax.jit
def _of_weight(rows_RA: jax.Array, g_RC: jax.Array, groups: ExpertGroups) -> jax.Array:
    """The gradient of a weight, [E, A, C], float32 at least."""
    dtype = at_least_float32(rows_RA.dtype)
    A = rows_RA.shape[1]
    C = g_RC.shape[1]

    def of_expert(expert: jax.Array, out_EAC: jax.Array) -> jax.Array:
        # Block after block, so that the order of the sum is that of the rows.
        def of_block(j: jax.Array, total_AC: jax.Array) -> jax.Array:
            rows, g = (
                jax.lax.dynamic_slice_in_dim(x, j * groups.block, groups.block)
                for x in (rows_RA, g_RC)
            )
            columns = unfused_on_cpu(rows.T)
            return total_AC + jnp.matmul(columns, g, preferred_element_type=dtype)

        total_AC = _over_blocks(groups, expert, of_block, jnp.zeros((A, C), dtype))
        return jax.lax.dynamic_update_index_in_dim(out_EAC, total_AC, expert, 0)

    def by_loops() -> jax.Array:
        E = len(groups.first)
        return jax.lax.fori_loop(0, E, of_expert, jax.lax.empty((E, A, C), dtype))

    def by_kernel(kernels: ModuleType) -> jax.Array:
        rows = groups.expected_rows
        with _expected(flops=2 * rows * A * C, read=rows * (A + C) * rows_RA.dtype.itemsize):
            return kernels.weight_gradient(rows_RA, g_RC, groups, dtype)

    return _on_platform(by_loops, by_kernel, rows_RA, (groups.block,))


# ---- loops, and what a plan knows of them


def _on_platform(
    by_loops: Callable[[], jax.Array],
    by_kernel: Callable[[ModuleType], jax.Array],
    rows: jax.Array,
    sizes: tuple[int, ...],
) -> jax.Array:
    """The kernel on NVIDIA GPUs, if tensor cores can take these sizes of what is multiplied."""
    if rows.dtype.itemsize > 4 or any(size % FEWEST for size in sizes):
        return by_loops()
    # models without experts import no Pallas
    from tunix_lite.models import grouped_kernels

    return jax.lax.platform_dependent(
        cuda=partial(by_kernel, grouped_kernels), default=by_loops
    )


def _over_blocks(
    groups: ExpertGroups,
    expert: jax.Array,
    of_block: Callable[..., jax.Array],
    start: jax.Array,
) -> jax.Array:
    """of_block(its number, so far) of each block of an expert."""
    first = groups.first[expert]
    with _expected(turns=groups.expected_blocks):
        return jax.lax.fori_loop(first, first + groups.count[expert], of_block, start)


def _expected(**numbers: float) -> AbstractContextManager:
    """Writes into the program what it will do where only the data decide (planning/kernels.py)."""
    parts = (f"{name}_{number:.2f}" for name, number in numbers.items())
    return jax.named_scope("_".join(["expected", *parts]))
