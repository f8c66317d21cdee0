"""The parameters layer by layer, which sampling runs on, and as a CPU likes them."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from tunix_lite.basics.types import Params
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.decoder import ATTENTION, by_layer, layer_weights
from tunix_lite.models.rounding import is_rounded, stored
from tunix_lite.models.weights import (
    Leaf,
    Lora,
    Transposed,
    are_quantized,
    dense,
    is_quantized,
)
from tunix_lite.parallel.mesh import without


def per_layer_params(
    params: Params,
    cfg: Architecture,
    dtype: DTypeLike,
    on_cpu: bool = False,
) -> Params:
    """The same parameters with `layers` as a list, matrices in the compute dtype: what sampling
    runs on.

    on_cpu: the matrices are `Transposed`, with their adapters merged, and q, k and v are one,
    `qkv`.
    """

    def cast(leaf: Leaf) -> Leaf:
        if is_quantized(leaf) or leaf.ndim < 2:
            return leaf
        return stored(leaf, dtype)

    # Adapters may be outside of layers alone.
    by_number = params | {"layers": by_layer(params.get("layers", {}), cfg)}
    tree = jax.tree.map(cast, by_number, is_leaf=is_quantized)
    for kind, w, whole in zip(cfg.kinds_of_weights, tree["layers"], by_number["layers"]):
        declared = layer_weights(cfg, kind)
        w |= {name: x for name, x in whole.items() if declared[name].is_exact}
        if not on_cpu:
            continue
        merge = partial(dense, inputs=1, dtype=dtype)
        for name, one in declared.items():
            if isinstance(w[name], Lora):
                merge_all = jax.vmap(merge) if one.num_counted else merge
                w[name] = merge_all(w[name])
        # One product in place of three, which costs a CPU the most where it has few rows.
        widths = [x.shape[-1] for name, x in declared.items() if name in "qkv"]
        if len(widths) == 3 and len({*widths}) == 1 and kind in ATTENTION:
            w["qkv"] = jnp.concatenate([w.pop(name) for name in "qkv"], axis=1)
            declared["qkv"] = declared["q"]
        for name in w:
            one = declared[name]
            if one.inputs and not one.num_counted and not one.is_exact:
                w[name] = Transposed(
                    jnp.moveaxis(w[name], range(one.inputs), range(-one.inputs, 0))
                )
    return tree


def per_layer_shapes(
    params: Params,
    cfg: Architecture,
    dtype: DTypeLike,
    gather: bool,
    on_cpu: bool = False,
) -> Params:
    """The result of `per_layer_params` as ShapeDtypeStructs that lie as the parameters do; if
    `gather`, whole over fsdp."""

    def of_layers(sharding: NamedSharding, count: int) -> list[NamedSharding]:
        return [NamedSharding(sharding.mesh, P(*sharding.spec[1:]))] * count

    def shape(x: jax.ShapeDtypeStruct, to: NamedSharding) -> jax.ShapeDtypeStruct:
        if gather:
            to = NamedSharding(to.mesh, without(to.spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to)

    per_layer = partial(per_layer_params, cfg=cfg, dtype=dtype, on_cpu=on_cpu)
    shapes = jax.eval_shape(per_layer, params)
    places = jax.tree.map(lambda x: x.sharding, params)
    if on_cpu:
        # As `are_for_cpu` has it, every device has all weights.
        whole = NamedSharding(params["embed"].sharding.mesh, P())
        return jax.tree.map(partial(shape, to=whole), shapes)
    places |= {"layers": by_layer(places.get("layers", {}), cfg, of_layers)}
    return jax.tree.map(shape, shapes, places)


def are_for_cpu(params: Params, dtype: DTypeLike, mesh: Mesh, gather: bool) -> bool:
    """True if sampling on this mesh takes its weights as a CPU likes them (`per_layer_params`)."""
    # On a CPU, XLA computes a product of few rows and few columns in one thread, so three of them
    # take longer than one. Where values are rounded, they stay as the trainer computes them.
    are_whole = mesh.shape["tp"] == 1 and (gather or mesh.shape["fsdp"] == 1)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return on_cpu and are_whole and not is_rounded(dtype) and not are_quantized(params)
