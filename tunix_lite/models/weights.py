"""A weight: its shape, where it lives, how it starts, and how it multiplies.

Besides plain arrays, `project` understands three leaves: `Int8` and `Nf4`, which store a frozen
weight in one byte or half a byte an element, and `Lora`, which adds a trained product of two thin
matrices to a frozen weight of any kind. It is the one place that does; the model only ever says
`project(x, w["q"])`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import NormalDist
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.ad_checkpoint import checkpoint_name

from tunix_lite.models.rounding import added, by_rows, product, stored, wide
from tunix_lite.parallel.mesh import constrain_gradient, gather, parts_of, sharding, spec

# (key, shape, dtype) -> array
Initializer = Callable[..., jax.Array]


# one object for one number: weights that start alike compile once
@cache
def fan_in(inputs: int = 1) -> Initializer:
    """Truncated normal with variance 1 / (number of inputs), for a weight with `inputs` leading
    input dims."""

    def init(key, shape, dtype):
        # the std of a normal cut at two sigma
        scale = np.prod(shape[:inputs]) ** -0.5 / 0.87962566
        return (scale * jax.random.truncated_normal(key, -2, 2, shape)).astype(dtype)

    return init


zeros = jax.nn.initializers.zeros
ones = jax.nn.initializers.ones


@dataclass(frozen=True)
class Weight:
    """The one declaration of a parameter: init, sharding, Hugging Face names and counts are
    readings of it.

    Dims run inputs first: `project` contracts the leading `inputs` of them. 0 marks what is not
    projected with: norms, biases and the embedding.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]  # logical axes, one per dim; parallel.mesh.RULES places them
    init: Initializer = fan_in()  # of one layer
    inputs: int = 1
    dtype: Any = jnp.float32

    @property
    def is_stacked(self) -> bool:
        """Whether the first dim counts layers."""
        return self.axes[0] == "layers"


def is_weight(leaf) -> bool:
    return isinstance(leaf, Weight)


def stacked(weight: Weight, count: int) -> Weight:
    """The same weight `count` times, under a leading `layers` axis for scan."""
    return replace(weight, shape=(count, *weight.shape), axes=("layers", *weight.axes))


def unstacked(weight: Weight) -> Weight:
    """One of the layers of a stacked weight; another weight as it is."""
    return (
        replace(weight, shape=weight.shape[1:], axes=weight.axes[1:])
        if weight.is_stacked
        else weight
    )


# ---- leaves that are more than an array


@flax.struct.dataclass
class Int8:
    """A weight as round(w / scale) with one scale for each block of inputs of an output."""

    codes: Any  # int8, the weight's shape
    scales: Any  # float32, the weight's shape with the last input dim counted in blocks


@flax.struct.dataclass
class Nf4:
    """A weight as the nearest of 16 levels times a block's scale (NormalFloat, arXiv:2305.14314
    appendix E)."""

    codes: Any  # uint8, two neighbours of the last dim in a byte, the first in the high half
    scales: Any  # float32, as in Int8


@flax.struct.dataclass
class Lora:
    """base + scale * a @ b (arXiv:2106.09685). `keys`, one per sequence of the batch, are there
    while dropout acts."""

    base: Any  # frozen: an array, Int8 or Nf4
    a: Any  # [*inputs, R]
    b: Any  # [R, *outputs]
    keys: Any = None  # [B]
    scale: float = flax.struct.field(pytree_node=False, default=1.0)
    dropout: float = flax.struct.field(pytree_node=False, default=0.0)


@flax.struct.dataclass
class ComputeCopy:
    """A weight that trains, where it is computed with fewer bits than its gradient is summed with
    (see `for_compute`)."""

    used: Any  # in the type of the computation, whole over fsdp; no gradient goes through it
    # in the type of the sums, divided over fsdp; never read, and all of the gradient goes to it
    trained: Any
    axes: tuple[str, ...] = flax.struct.field(pytree_node=False)


def is_quantized(leaf) -> bool:
    return isinstance(leaf, Int8 | Nf4)


def nf4_levels() -> np.ndarray:
    """The 16 levels: quantiles of a normal distribution, 8 above zero, 7 below and zero itself,
    scaled to [-1, 1]."""
    # the paper's offset: the mean of both sides' outermost quantile
    outermost = (1 - 1 / 30 + 1 - 1 / 32) / 2

    def quantiles(count: int) -> list[float]:
        return [NormalDist().inv_cdf(p) for p in np.linspace(outermost, 0.5, count + 1)[:-1]]

    levels = np.array([*(-q for q in quantiles(7)), 0.0, *quantiles(8)[::-1]])
    return (levels / levels.max()).astype(np.float32)


NF4_LEVELS = nf4_levels()


def dense(weight, inputs: int = 1, dtype=jnp.float32):
    """Any leaf as a plain array of `dtype`: dequantised, adapters added."""
    if isinstance(weight, Lora):
        rank = weight.a.shape[-1]
        product = weight.a.reshape(-1, rank) @ weight.b.reshape(rank, -1)
        whole = dense(weight.base, inputs, jnp.promote_types(dtype, product.dtype))
        return (whole + weight.scale * product.reshape(whole.shape)).astype(dtype)
    if not is_quantized(weight):
        return stored(weight, dtype)
    if isinstance(weight, Nf4):
        pairs = jnp.stack([weight.codes >> 4, weight.codes & 15], axis=-1)
        values = jnp.asarray(NF4_LEVELS)[pairs.reshape(*pairs.shape[:-2], -1)]
    else:
        values = weight.codes.astype(jnp.float32)
    scaled = in_blocks(values, weight.scales.shape, inputs) * jnp.expand_dims(weight.scales, inputs)
    return stored(scaled.reshape(values.shape), dtype)


def in_blocks(values, scales_shape: tuple[int, ...], inputs: int):
    """`values` with the last input dim split into (blocks, block)."""
    dim = inputs - 1
    return values.reshape(*values.shape[:dim], scales_shape[dim], -1, *values.shape[inputs:])


def project(x, weight, inputs: int = 1, sum_dtype=jnp.float32):
    """Contract the last `inputs` dims of x with the first `inputs` dims of weight, in x's dtype.

    sum_dtype: what the parts of shards that divide these dims are summed in, as rounding.product
    takes it. Written as a product of two matrices: of a contraction over more dims, XLA's CPU
    backend makes a gradient with transposed copies that takes twice as long.
    """
    if isinstance(weight, Lora):
        seen = x if weight.keys is None else drop(x, weight.keys, weight.dropout)
        adapted = project(project(seen, weight.a, inputs, sum_dtype), weight.b)
        scaled = stored(wide(jnp.asarray(weight.scale, x.dtype)) * wide(adapted), x.dtype)
        return added(project(x, weight.base, inputs, sum_dtype), scaled)
    if isinstance(weight, ComputeCopy):
        way = Way(weight.axes, inputs, weight.trained.dtype)
        return _with_slope_of(way, project(x, weight.used, inputs, sum_dtype), x, weight.trained)
    weight = dense(weight, inputs, x.dtype)
    batch, outputs = x.shape[: x.ndim - inputs], weight.shape[inputs:]
    rows = x.reshape(-1, np.prod(weight.shape[:inputs]))
    matrix = weight.reshape(rows.shape[1], -1)
    multiplied = lambda rows: product(jnp.matmul, rows, matrix, sum_dtype=sum_dtype)  # noqa: E731
    outcome = by_rows(multiplied, rows, 0, parts_of("batch"))
    # see decoder.REMAT
    outcome = checkpoint_name(outcome, "product")
    return outcome.reshape(*batch, *outputs)


def for_compute(leaf, weight: Weight, dtype, reduce_dtype=jnp.float32):
    """A leaf for the moment that it is used: in the type of the computation, whole over fsdp; its
    gradient divided.

    weight: the declaration of the plain weight, of one layer. Quantised leaves travel as codes,
    norms keep their type. reduce_dtype: what gradients are computed and summed over the mesh in, if
    it has more bits than `dtype`.
    """
    if isinstance(leaf, Lora):
        a, b = pair(weight, leaf.a.shape[-1])
        a, b = (
            for_compute(leaf.a, a, dtype, reduce_dtype),
            for_compute(leaf.b, b, dtype, reduce_dtype),
        )
        # the base is frozen
        return leaf.replace(
            base=for_compute(leaf.base, weight, dtype, reduce_dtype=dtype), a=a, b=b
        )
    if is_quantized(leaf):
        return leaf.replace(
            codes=gather(leaf.codes, weight.axes), scales=gather(leaf.scales, scales_axes(weight))
        )
    if leaf.ndim == 1:
        return leaf
    if jnp.finfo(reduce_dtype).bits <= jnp.finfo(dtype).bits:
        return gather(stored(leaf, dtype), weight.axes)
    trained = leaf.astype(jnp.promote_types(leaf.dtype, reduce_dtype))
    # a bias: it is rounded where it is added (decoder.attention_part)
    if not weight.inputs:
        return gather(trained, weight.axes)
    return ComputeCopy(
        gather(stored(jax.lax.stop_gradient(leaf), dtype), weight.axes), trained, weight.axes
    )


class Way(NamedTuple):
    """What is known, while compiling, of a gradient that goes a way of its own."""

    axes: tuple[str, ...]  # of the weight
    inputs: int
    dtype: Any


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_slope_of(way: Way, product, x, trained):
    """The product of x and a weight, as it is; its slope also goes to `trained`, which stands for
    the weight.

    JAX would give a bfloat16 weight a bfloat16 gradient: each shard's part is rounded, and then the
    parts are summed.
    """
    return product


def _slope_of(way: Way, x, slope):
    shape = x.shape[x.ndim - way.inputs :] + slope.shape[x.ndim - way.inputs :]
    rows = x.reshape(-1, np.prod(shape[: way.inputs]))
    slopes = slope.reshape(len(rows), -1)
    whole = jax.lax.dot_general(
        rows, slopes, (((0,), (0,)), ((), ())), preferred_element_type=way.dtype
    )
    return slope, None, constrain_gradient(whole.reshape(shape), way.axes)


_with_slope_of.defvjp(lambda way, product, x, trained: (product, x), _slope_of)


def pair(w: Weight, rank: int, init: Initializer = zeros) -> tuple[Weight, Weight]:
    """The a and b of an adapter of one layer's weight; init: of a."""
    a = Weight((*w.shape[: w.inputs], rank), (*w.axes[: w.inputs], "rank"), init, inputs=w.inputs)
    return a, Weight((rank, *w.shape[w.inputs :]), ("rank", *w.axes[w.inputs :]), zeros)


def scales_axes(w: Weight) -> tuple[str, ...]:
    """The axes of a quantised weight's scales: the last input dim counts blocks."""
    dim = w.inputs - 1 + w.is_stacked
    return (*w.axes[:dim], f"{w.axes[dim]}_blocks", *w.axes[dim + 1 :])


def drop(x, keys, rate: float):
    """x with a share of its elements at zero and the rest scaled up; row b's come from keys[b]
    alone."""
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(keys)
    return jnp.where(kept, x / jnp.asarray(1 - rate, x.dtype), 0)


# ---- readings of a table


def flatten(tree) -> dict:
    """A table or parameters by path, "layers/q" and the like; a leaf that is more than an array
    stays whole."""
    return traverse_util.flatten_dict(
        tree, sep="/", is_leaf=lambda _, leaf: not isinstance(leaf, dict)
    )


def shardings(table, rules=None):
    """Where each weight of a table lives on the current mesh."""
    return jax.tree.map(lambda w: sharding(w.axes, w.shape, rules), table, is_leaf=is_weight)


def shapes(table, dtype=None):
    """The table as ShapeDtypeStructs, placed: what the parameters will be, without making them."""

    def shape(w: Weight):
        return jax.ShapeDtypeStruct(w.shape, dtype or w.dtype, sharding=sharding(w.axes, w.shape))

    return jax.tree.map(shape, table, is_leaf=is_weight)


def check_divisible(table, mesh, rules: dict[str, str | None] | None = None) -> None:
    """Raises ValueError, naming the weight and the sizes that would do, if the mesh does not divide
    some dim."""
    for path, w in jax.tree_util.tree_leaves_with_path(table, is_leaf=is_weight):
        try:
            spec(w.axes, w.shape, mesh, rules)
        except ValueError as error:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(f"weight {name}: {error}") from error


def num_params(table) -> int:
    return sum(int(np.prod(w.shape)) for w in jax.tree.leaves(table, is_leaf=is_weight))


def num_bytes(table) -> int:
    return sum(
        int(np.prod(w.shape)) * w.dtype.itemsize for w in jax.tree.leaves(shapes_only(table))
    )


def shapes_only(table):
    """The table as ShapeDtypeStructs without a place: needs no mesh."""
    return jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), table, is_leaf=is_weight)


def init_params(table, key):
    """Random parameters, each created directly on the devices that it will live on. The mesh does
    not change them."""
    leaves, treedef = jax.tree.flatten(table, is_leaf=is_weight)
    keys = jax.random.split(key, len(leaves))
    return treedef.unflatten(
        [_creator(w, sharding(w.axes, w.shape))(k) for w, k in zip(leaves, keys)]
    )


@cache
def _creator(w: Weight, place):
    def create(key):
        if not w.is_stacked:
            return w.init(key, w.shape, w.dtype)
        return jax.vmap(lambda k: w.init(k, w.shape[1:], w.dtype))(
            jax.random.split(key, w.shape[0])
        )

    return jax.jit(create, out_shardings=place)
