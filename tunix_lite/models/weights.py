"""A weight: its shape, its sharding, its initialisation, and how it multiplies. `project` also
understands `Int8` and `Nf4` (a frozen weight in a byte or half of one) and `Lora`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import NormalDist
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from tunix_lite.basics.types import Params
from tunix_lite.models.rounding import added, is_rounded, product, stored, wide
from tunix_lite.models.unfused import matmul, matrix_first
from tunix_lite.parallel.mesh import MeshSizes, constrain_gradient, gather, sharding, spec

# (key, shape, dtype) -> array
Initializer = Callable[..., jax.Array]
# A nested dict of `Weight`, or of leaves like `Int8` that hold Weights: parameters, declared.
Table = Any
# A leaf of parameters: an array, `Int8`, `Nf4`, `Lora` or `ComputeCopy`.
Leaf = Any
# On a CPU a product with up to so many rows takes the matrix as its first factor: timed up to 64.
FEW_ROWS = 128


# Cached, so that weights which start alike have one initialiser and compile once.
@cache
def fan_in(inputs: int = 1) -> Initializer:
    """Truncated normal with variance 1 / (number of inputs), the leading `inputs` dims."""

    def init(
        key: jax.Array,
        shape: tuple[int, ...],
        dtype: DTypeLike,
    ) -> jax.Array:
        # 0.88 is the standard deviation of a normal that is cut at two sigma.
        scale = np.prod(shape[:inputs]) ** -0.5 / 0.87962566
        return (scale * jax.random.truncated_normal(key, -2, 2, shape)).astype(dtype)

    return init


zeros = jax.nn.initializers.zeros
ones = jax.nn.initializers.ones


@dataclass(frozen=True)
class Weight:
    """The declaration of a parameter. Dims run inputs first: `project` contracts the leading
    `inputs`.

    Example: Weight((512, 8, 64), ("embed", "heads", "head_dim")): 512 inputs into 8 heads of 64.
    """

    shape: tuple[int, ...]
    # logical axes, one per dim; parallel.mesh.RULES says which mesh axis divides them
    axes: tuple[str, ...]
    init: Initializer = fan_in()  # initialiser of one layer
    # leading dims that are inputs; 0: nothing is projected with it (norms, biases, the embedding)
    inputs: int = 1
    dtype: DTypeLike = jnp.float32
    # of each head, the widths of parts that a file has one after the other, each of all heads
    parts: tuple[int, ...] = ()
    # True: it stays float32 in a frozen base and in what is computed with, too
    is_exact: bool = False

    @property
    def is_stacked(self) -> bool:
        """True if the first dim counts layers."""
        return self.axes[0] == "layers"

    @property
    def num_counted(self) -> int:
        """Leading dims that count layers or experts."""
        return sum(axis in ("layers", "experts") for axis in self.axes)


def stacked(weight: Weight, count: int) -> Weight:
    """The same weight `count` times, under a leading `layers` axis for scan."""
    return replace(weight, shape=(count, *weight.shape), axes=("layers", *weight.axes))


def unstacked(weight: Weight) -> Weight:
    """Selects one layer of a stacked weight. Another weight is returned unchanged."""
    if not weight.is_stacked:
        return weight
    return replace(weight, shape=weight.shape[1:], axes=weight.axes[1:])


# ---- leaves that are more than an array


@flax.struct.dataclass
class Int8:
    """A weight as round(w / scale), with one scale for each block of inputs of an output.

    Example: inputs [0.5, -1.0] in one block -> codes [64, -127], scales [1 / 127].
    """

    codes: Any  # int8, the weight's shape
    scales: Any  # float32, the weight's shape with the last input dim counted in blocks


@flax.struct.dataclass
class Nf4:
    """A weight as the nearest of 16 levels times the scale of its block (arXiv:2305.14314 appendix
    E).

    Example: 1.0 and -1.0 side by side, in blocks of scale 1 -> codes [0xF0]: levels 15 and 0.
    """

    codes: Any  # uint8, two neighbours of the last dim in a byte, the first in the high half
    scales: Any  # float32, as in Int8


@flax.struct.dataclass
class Lora:
    """base + scale * a @ b (arXiv:2106.09685). With `keys`, one per sequence of the batch, dropout
    acts.

    Example: base [64, 256] with a [64, 8], b [8, 256] and scale 2.0: rank 8, alpha 16.
    """

    base: Any  # frozen: an array, Int8 or Nf4
    a: Any  # [*inputs, R]
    b: Any  # [R, *outputs]
    keys: Any = None  # [B]
    scale: float = flax.struct.field(pytree_node=False, default=1.0)
    dropout: float = flax.struct.field(pytree_node=False, default=0.0)


@flax.struct.dataclass
class ComputeCopy:
    """A trained weight whose gradient is summed in more bits than it is computed with
    (`for_compute`).

    Example: a float32 weight under mixed_precision=bf16 -> value in bfloat16, master in float32.
    """

    # weight in the dtype of the computation, gathered over fsdp; no gradient goes through it
    value: Any
    # weight in the dtype of the sums, divided over fsdp; never read, gets the whole gradient
    master: Any
    axes: tuple[str, ...] = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Transposed:
    """A plain weight as [*outputs, *inputs]: what sampling multiplies with on a CPU.

    Example: a weight [64, 256] with one dim of inputs is held as [256, 64].
    """

    values: Any


def is_quantized(leaf: Leaf) -> bool:
    """True if a leaf is `Int8` or `Nf4`."""
    return isinstance(leaf, Int8 | Nf4)


def are_plain(params: Params) -> bool:
    """True if all leaves are arrays: there are no adapters, and nothing is quantised."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Lora) or is_quantized(x))
    return not any(isinstance(leaf, Lora) or is_quantized(leaf) for leaf in leaves)


def are_quantized(params: Params) -> bool:
    """True if some leaves are quantised, or the base of some adapters is."""
    return any(is_quantized(leaf) for leaf in jax.tree.leaves(params, is_leaf=is_quantized))


def without_adapters(tree: Any) -> Any:
    """The tree with the base of each `Lora` in its place."""
    return jax.tree.map(
        lambda leaf: leaf.base if isinstance(leaf, Lora) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, Lora),
    )


def nf4_levels() -> np.ndarray:
    """The 16 levels, float32: quantiles of a normal, 8 above zero, 7 below, and zero."""
    # The paper's offset: the mean of the outermost quantiles of both sides.
    outermost = (1 - 1 / 30 + 1 - 1 / 32) / 2

    def quantiles(count: int) -> list[float]:
        return [NormalDist().inv_cdf(p) for p in np.linspace(outermost, 0.5, count + 1)[:-1]]

    levels = np.array([*(-q for q in quantiles(7)), 0.0, *quantiles(8)[::-1]])
    return (levels / levels.max()).astype(np.float32)


NF4_LEVELS = nf4_levels()


def dense(
    weight: Leaf,
    inputs: int = 1,
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """Any leaf of one layer as a plain array of `dtype`: dequantised, adapters added."""
    if isinstance(weight, Lora):
        # The sum is taken in the wider of the two dtypes, and cast once.
        rank = weight.a.shape[-1]
        update = weight.a.reshape(-1, rank) @ weight.b.reshape(rank, -1)
        base = dense(weight.base, inputs, jnp.promote_types(dtype, update.dtype))
        return (base + weight.scale * update.reshape(base.shape)).astype(dtype)
    if not is_quantized(weight):
        return stored(weight, dtype)

    # Codes become values, and each block of them is multiplied by its scale.
    if isinstance(weight, Nf4):
        pairs = jnp.stack([weight.codes >> 4, weight.codes & 15], axis=-1)
        values = jnp.asarray(NF4_LEVELS)[pairs.reshape(*pairs.shape[:-2], -1)]
    else:
        values = weight.codes.astype(jnp.float32)
    blocks = in_blocks(values, weight.scales.shape, inputs)
    scaled = blocks * jnp.expand_dims(weight.scales, inputs)
    return stored(scaled.reshape(values.shape), dtype)


def in_blocks(
    values: jax.Array,
    scales_shape: tuple[int, ...],
    inputs: int,
) -> jax.Array:
    """`values` with the last input dim split into (blocks, block)."""
    dim = inputs - 1
    return values.reshape(*values.shape[:dim], scales_shape[dim], -1, *values.shape[inputs:])


def project(
    x: jax.Array,
    weight: Leaf,
    inputs: int = 1,
    sum_dtype: DTypeLike = jnp.float32,
    name: str = "product",
) -> jax.Array:
    """Contracts the last `inputs` dims of x with the first `inputs` dims of weight, in x's dtype:
    [*batch, *outputs]. sum_dtype: of the parts of shards, as rounding.product takes it. name: of
    the result, for a remat policy; "product" is one of those that decoder.REMAT keeps."""
    if isinstance(weight, Lora):
        x_kept = x if weight.keys is None else dropout(x, weight.keys, weight.dropout)
        # Two thin products, as a @ b would be as large as the weight.
        thin = project(x_kept, weight.a, inputs, sum_dtype)
        # The backward pass reads their sum, and neither of these two.
        adapted = project(thin, weight.b, name="part of a product")
        of_base = project(x, weight.base, inputs, sum_dtype, "part of a product")
        scaled = stored(wide(jnp.asarray(weight.scale, x.dtype)) * wide(adapted), x.dtype)
        return checkpoint_name(added(of_base, scaled), name)
    if isinstance(weight, ComputeCopy):
        info = (weight.axes, inputs, weight.master.dtype)
        out = project(x, weight.value, inputs, sum_dtype, name)
        return _with_gradient_to_master(info, out, x, weight.master)

    batch = x.shape[: x.ndim - inputs]
    if isinstance(weight, Transposed):
        outputs = weight.values.shape[:-inputs]
        rows = x.reshape(-1, np.prod(x.shape[len(batch) :]))
        matrix = weight.values.reshape(-1, rows.shape[1])
        out = matrix_first(matrix, rows) if len(rows) <= FEW_ROWS else rows @ matrix.T
        return out.reshape(*batch, *outputs)

    weight = dense(weight, inputs, x.dtype)
    outputs = weight.shape[inputs:]
    # Of a contraction over more dims XLA's CPU backend makes a gradient that takes twice as long.
    rows = x.reshape(-1, np.prod(weight.shape[:inputs]))
    matrix = weight.reshape(rows.shape[1], -1)

    if is_rounded(rows.dtype):
        out = product(jnp.matmul, rows, matrix, sum_dtype)
    else:
        out = matmul(rows, matrix)
    return checkpoint_name(out, name).reshape(*batch, *outputs)


def for_compute(
    leaf: Leaf,
    weight: Weight,
    dtype: DTypeLike,
    reduce_dtype: DTypeLike = jnp.float32,
) -> Leaf:
    """A leaf of one layer, in `dtype`, and gathered over fsdp. Its gradient is divided over fsdp.

    weight: the declaration of one layer. reduce_dtype: what gradients are computed and summed in,
    if it has more bits than `dtype`.
    """
    if isinstance(leaf, Lora):
        a, b = adapter_pair(weight, leaf.a.shape[-1])
        a = for_compute(leaf.a, a, dtype, reduce_dtype)
        b = for_compute(leaf.b, b, dtype, reduce_dtype)
        # The base is frozen: it has no gradient to sum.
        base = for_compute(leaf.base, weight, dtype, reduce_dtype=dtype)
        return leaf.replace(base=base, a=a, b=b)
    if is_quantized(leaf):
        return leaf.replace(
            codes=gather(leaf.codes, weight.axes),
            scales=gather(leaf.scales, scales_axes(weight)),
        )
    if leaf.ndim == 1:
        # Norms compute in float32 anyway, and are too small for a gather.
        return leaf
    if weight.is_exact:
        return gather(leaf, weight.axes)
    has_more_bits = jnp.finfo(reduce_dtype).bits > jnp.finfo(dtype).bits
    if not has_more_bits and "experts" not in weight.axes:
        return gather(stored(leaf, dtype), weight.axes)

    # The gradient has more bits than the computation, or is that of experts (models/grouped.py).
    sum_dtype = jnp.promote_types(leaf.dtype, reduce_dtype)
    master = leaf.astype(sum_dtype) if has_more_bits else stored(leaf, dtype)
    if not weight.inputs:
        # A bias, which is rounded where it is added (decoder.attention_part).
        return gather(master, weight.axes)
    # The gradient goes to `master`, which has more bits.
    value = gather(stored(jax.lax.stop_gradient(leaf), dtype), weight.axes)
    return ComputeCopy(value, master, weight.axes)


# info: the axes of the weight, how many dims are inputs, and the dtype of its gradient
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient_to_master(
    info: tuple[tuple[str, ...], int, DTypeLike],
    out: jax.Array,
    x: jax.Array,
    master: jax.Array,
) -> jax.Array:
    """`out`, the product of x and a weight. Its gradient goes to `master`, in that dtype."""
    # JAX would give a bfloat16 weight a bfloat16 gradient, rounded on each shard and then summed.
    return out


def _backward_to_master(
    info: tuple[tuple[str, ...], int, DTypeLike],
    x: jax.Array,
    cotangent: jax.Array,
) -> tuple[jax.Array, None, jax.Array]:
    axes, inputs, dtype = info
    shape = x.shape[x.ndim - inputs :] + cotangent.shape[x.ndim - inputs :]
    # all tokens of the batch are summed over, whatever dims they have
    rows = x.reshape(-1, np.prod(shape[:inputs]))
    cotangent_rows = cotangent.reshape(len(rows), -1)
    # summed in its own type: the weight may be computed with in bfloat16
    gradient = jax.lax.dot_general(
        rows, cotangent_rows, (((0,), (0,)), ((), ())), preferred_element_type=dtype
    )
    return cotangent, None, constrain_gradient(gradient.reshape(shape), axes)


_with_gradient_to_master.defvjp(lambda _, out, x, master: (out, x), _backward_to_master)


def adapter_pair(
    w: Weight,
    rank: int,
    init: Initializer = zeros,
) -> tuple[Weight, Weight]:
    """The a [*inputs, R] and b [R, *outputs] of an adapter of one layer's weight. init: of a. Where
    the weight has experts, so have a and b, in their first dim."""
    first = w.num_counted
    end = first + w.inputs
    a = Weight((*w.shape[:end], rank), (*w.axes[:end], "rank"), init, inputs=w.inputs)
    b = Weight(
        (*w.shape[:first], rank, *w.shape[end:]),
        (*w.axes[:first], "rank", *w.axes[end:]),
        zeros,
        parts=w.parts,
    )
    return a, b


def scales_axes(w: Weight) -> tuple[str, ...]:
    """The axes of a quantised weight's scales: the last input dim counts blocks."""
    dim = w.inputs - 1 + w.num_counted
    return (*w.axes[:dim], f"{w.axes[dim]}_blocks", *w.axes[dim + 1 :])


def dropout(
    x: jax.Array,
    keys: jax.Array,
    rate: float,
) -> jax.Array:
    """x [B, ...] with a share `rate` at zero, by keys[b], and the rest scaled up."""
    is_kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(keys)
    return jnp.where(is_kept, x / jnp.asarray(1 - rate, x.dtype), 0)


# ---- what is read from a table


def flatten(tree: Table | Params) -> dict[str, Any]:
    """A table or parameters by path, "layers/q" and the like."""
    return traverse_util.flatten_dict(
        tree, sep="/", is_leaf=lambda _, leaf: not isinstance(leaf, dict)
    )


def shardings(table: Table) -> Any:
    """The sharding of each weight of a table on the current mesh."""
    return jax.tree.map(lambda w: sharding(w.axes, w.shape), table)


def shapes(table: Table, dtype: DTypeLike | None = None) -> Any:
    """The table as ShapeDtypeStructs with shardings."""

    def shape(w: Weight) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            w.shape, dtype or w.dtype, sharding=sharding(w.axes, w.shape)
        )

    return jax.tree.map(shape, table)


def check_divisible(
    table: Table,
    mesh: MeshSizes,
    rules: dict[str, str | None] | None = None,
) -> None:
    """Raises ValueError, naming the weight and the sizes that would do, if the mesh does not divide
    a dim."""
    for path, w in jax.tree_util.tree_leaves_with_path(table):
        try:
            spec(w.axes, w.shape, mesh, rules)
        except ValueError as error:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(f"weight {name}: {error}") from error


def num_params(table: Table) -> int:
    """Elements of all weights together."""
    return sum(int(np.prod(w.shape)) for w in jax.tree.leaves(table))


def num_bytes(table: Table) -> int:
    """Bytes of all weights together, on no mesh."""
    leaves = jax.tree.leaves(table)
    return sum(int(np.prod(w.shape)) * jnp.dtype(w.dtype).itemsize for w in leaves)


def init_params(table: Table, key: jax.Array) -> Params:
    """Random parameters, made on the devices that hold them. The mesh changes no number."""
    leaves, treedef = jax.tree.flatten(table)
    keys = jax.random.split(key, len(leaves))
    made = [_creator(w, sharding(w.axes, w.shape))(k) for w, k in zip(leaves, keys)]
    return treedef.unflatten(made)


@cache
def _creator(w: Weight, out_sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """key -> the weight. Cached, so that weights which are alike compile once."""

    def create(key: jax.Array) -> jax.Array:
        first = w.num_counted
        if not first:
            return w.init(key, w.shape, w.dtype)

        def make(key: jax.Array) -> jax.Array:
            return w.init(key, w.shape[first:], w.dtype)

        for _ in range(first):
            make = jax.vmap(make)
        return make(jax.random.split(key, w.shape[:first]))

    return jax.jit(create, out_shardings=out_sharding)
