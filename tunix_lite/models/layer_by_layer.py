"""The parameters layer by layer, which sampling runs on, and as a CPU likes them."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from tunix_lite.basics.types import Params
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.decoder import ATTENTION, layer_weights, stack_of_layers
from tunix_lite.models.rounding import is_rounded, stored
from tunix_lite.models.weights import (
    Leaf,
    Lora,
    Transposed,
    are_quantized,
    dense,
    is_quantized,
    without_adapters,
)
from tunix_lite.parallel.mesh import current_rules


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
        return leaf if is_quantized(leaf) or leaf.ndim < 2 else stored(leaf, dtype)

    by_number = by_layer(params, cfg, lambda w, i: w[i])
    tree = jax.tree.map(cast, by_number, is_leaf=is_quantized)
    for kind, w, whole in zip(cfg.kinds_of_weights, tree["layers"], by_number["layers"]):
        w |= {name: whole[name] for name, x in layer_weights(cfg, kind).items() if x.is_exact}
    if on_cpu:
        for kind, w in zip(cfg.kinds_of_weights, tree["layers"]):
            # One product in place of three, which costs a CPU the most where it has few rows.
            merge = partial(dense, inputs=1, dtype=dtype)
            for name, one in layer_weights(cfg, kind).items():
                if isinstance(w[name], Lora):
                    w[name] = (jax.vmap(merge) if one.num_counted else merge)(w[name])
            matrices = _matrices(cfg, kind)
            if _are_joined(cfg, kind):
                w["qkv"] = jnp.concatenate([w.pop(name) for name in "qkv"], axis=1)
            for name, (_, inputs) in matrices.items():
                inputs_last = jnp.moveaxis(w[name], range(inputs), range(-inputs, 0))
                w[name] = Transposed(inputs_last)
    return tree


def _matrices(cfg: Architecture, kind: str) -> dict[str, tuple[int, int]]:
    """The matrices of a layer, q, k and v perhaps joined: how many dims they have, and how many are
    inputs."""
    declared = layer_weights(cfg, kind)
    matrices = {
        name: (len(w.shape), w.inputs)
        for name, w in declared.items()
        if w.inputs and not w.num_counted and not w.is_exact
    }
    if _are_joined(cfg, kind):
        matrices["qkv"], *_ = [matrices.pop(name) for name in "qkv"]
    return matrices


def _are_joined(cfg: Architecture, kind: str) -> bool:
    """Whether a CPU takes q, k and v as one matrix: their heads have one width."""
    widths = [w.shape[-1] for name, w in layer_weights(cfg, kind).items() if name in "qkv"]
    return len(widths) == 3 and len({*widths}) == 1 and kind in ATTENTION


def per_layer_shardings(shardings: dict, cfg: Architecture, on_cpu: bool = False) -> Any:
    """The shardings of the result of `per_layer_params`, given those of the parameters."""

    def of_layer(sharding: NamedSharding, _: int) -> NamedSharding:
        return NamedSharding(sharding.mesh, P(*sharding.spec[1:]))

    tree = by_layer(shardings, cfg, of_layer)
    if on_cpu:
        # Outside of layers, adapters stay beside their base.
        tree["layers"] = without_adapters(tree["layers"])
        for kind, w in zip(cfg.kinds_of_weights, tree["layers"]):
            matrices = _matrices(cfg, kind)
            if _are_joined(cfg, kind):
                w["qkv"], *_ = [w.pop(name) for name in "qkv"]
            for name, (dims, inputs) in matrices.items():
                axes = (*w[name].spec, *[None] * dims)[:dims]
                spec = P(*axes[inputs:], *axes[:inputs])
                w[name] = Transposed(NamedSharding(w[name].mesh, spec))
    return tree


def are_for_cpu(params: Params, dtype: DTypeLike, mesh: Mesh) -> bool:
    """True if sampling on this mesh takes its weights as a CPU likes them (`per_layer_params`)."""
    # On a CPU, XLA computes a product of few rows and few columns in one thread, so three of them
    # take longer than one. Where values are rounded, they stay as the trainer computes them.
    axis = current_rules()["heads"]
    are_whole = axis is None or mesh.shape[axis] == 1
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return on_cpu and are_whole and not is_rounded(dtype) and not are_quantized(params)


def by_layer(
    tree: dict,
    cfg: Architecture,
    of_layer: Callable[[Any, int], Any],
) -> dict:
    """The tree with `layers` as a list. of_layer(leaf, i): the part of layer i of a stack."""
    layers = []
    counts = Counter()
    for stack in stack_of_layers(cfg):
        # Adapters may be those of some stacks only, or of none.
        of_stack = tree.get("layers", {})
        of_stack = of_stack if stack is None else of_stack.get(stack, {})
        i = counts[stack]
        layers.append(jax.tree.map(lambda leaf, i=i: of_layer(leaf, i), of_stack))
        counts[stack] += 1
    return tree | {"layers": layers}
