"""A weight: its shape, where it lives, how it starts, and how it multiplies."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.parallel.mesh import RULES, sharding, spec

Initializer = Callable[..., jax.Array]  # (key, shape, dtype) -> array


def fan_in(inputs: int = 1) -> Initializer:
    """Truncated normal with variance 1 / (number of inputs), for a weight with `inputs` leading input dims."""

    def init(key, shape, dtype):
        scale = np.prod(shape[:inputs]) ** -0.5 / 0.87962566  # the std of a normal cut at two sigma
        return (scale * jax.random.truncated_normal(key, -2, 2, shape)).astype(dtype)

    return init


zeros = jax.nn.initializers.zeros


@dataclass(frozen=True)
class Weight:
    """The one declaration of a parameter: init, sharding, Hugging Face names and counts are readings of it.

    Dims run inputs first: `project` contracts the leading `inputs` of them.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]  # logical axes, one per dim; parallel.mesh.RULES places them
    init: Initializer = fan_in()
    inputs: int = 1


def is_weight(leaf) -> bool:
    return isinstance(leaf, Weight)


def stacked(weight: Weight, count: int) -> Weight:
    """The same weight `count` times, under a leading `layers` axis for scan."""

    def init(key, shape, dtype):
        return jax.vmap(lambda k: weight.init(k, shape[1:], dtype))(jax.random.split(key, shape[0]))

    return replace(weight, shape=(count, *weight.shape), axes=("layers", *weight.axes), init=init)


def project(x, weight, inputs: int = 1):
    """Contract the last `inputs` dims of x with the first `inputs` dims of weight, in x's dtype.

    Written as a product of two matrices: of a contraction over more dims, XLA's CPU backend makes a gradient with
    transposed copies that takes twice as long.
    """
    batch, outputs = x.shape[: x.ndim - inputs], weight.shape[inputs:]
    rows = x.reshape(-1, np.prod(weight.shape[:inputs]))
    return (rows @ weight.astype(x.dtype).reshape(rows.shape[1], -1)).reshape(*batch, *outputs)


def shardings(table, rules=RULES):
    """Where each weight of a table lives on the current mesh."""
    return jax.tree.map(lambda w: sharding(w.axes, w.shape, rules), table, is_leaf=is_weight)


def shapes(table, dtype):
    """The table as ShapeDtypeStructs, placed: what the parameters will be, without making them."""
    return jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.shape, dtype, sharding=sharding(w.axes, w.shape)), table, is_leaf=is_weight
    )


def check_divisible(table, mesh) -> None:
    """Raises ValueError, naming the weight and the sizes that would do, if the mesh does not divide some dim."""
    for path, w in jax.tree_util.tree_leaves_with_path(table, is_leaf=is_weight):
        try:
            spec(w.axes, w.shape, mesh)
        except ValueError as error:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(f"weight {name}: {error}") from error


def num_params(table) -> int:
    return sum(int(np.prod(w.shape)) for w in jax.tree.leaves(table, is_leaf=is_weight))


def init_params(table, key, dtype=jnp.float32):
    """Random parameters, each created directly on the devices that it will live on. The mesh does not change them."""
    leaves, treedef = jax.tree.flatten(table, is_leaf=is_weight)

    def create(key):
        keys = jax.random.split(key, len(leaves))
        return treedef.unflatten([w.init(k, w.shape, dtype) for w, k in zip(leaves, keys)])

    return jax.jit(create, out_shardings=shardings(table))(key)
