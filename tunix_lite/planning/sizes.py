"""Bytes of a table of weights on one device, from the rules that place it: arithmetic, without a
mesh of devices."""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from tunix_lite.learner.policy import STORED
from tunix_lite.models import decoder
from tunix_lite.models.lora import adapter_weights
from tunix_lite.models.quantize import STORAGE, stored_table
from tunix_lite.models.weights import Weight, is_weight
from tunix_lite.parallel.mesh import spec
from tunix_lite.planning.resolved import Case


@dataclass(frozen=True)
class Tables:
    """The declared weights of a run, in the types that they are stored in."""

    trained: dict
    frozen: dict | None


def tables(case: Case) -> Tables:
    table, storage = decoder.weights(case.cfg), STORED[case.run.training.mixed_precision]
    if case.lora is None:
        return Tables(stored_table(table, storage), None)
    adapters = adapter_weights(table, case.lora)
    adapters = jax.tree.map(
        lambda w: replace(w, dtype=STORAGE[storage]), adapters, is_leaf=is_weight
    )
    return Tables(adapters, stored_table(table, case.lora.base))


def num_bytes(table, sizes: dict[str, int], dtype=None, keep_norms: bool = False) -> int:
    """Bytes of a table on one device of a mesh of these sizes: elements / shards x bytes of an
    element.

    dtype: instead of the declared one; keep_norms: except for the scales of norms, which are
    float32.
    """

    def of(w: Weight) -> int:
        kept = jnp.float32 if keep_norms and w.axes[-1] == "norm" else (dtype or w.dtype)
        return elements(w.shape, w.axes, sizes) * jnp.dtype(kept).itemsize

    return sum(of(w) for w in jax.tree.leaves(table, is_leaf=is_weight))


def elements(shape, axes, sizes: dict[str, int], without_fsdp: bool = False) -> int:
    """Elements of an array on one device, whose dims carry these logical axes."""
    places = spec(axes, shape, SimpleNamespace(shape=sizes | ({"fsdp": 1} if without_fsdp else {})))
    return math.prod(
        size // (1 if axis is None else sizes[axis]) for size, axis in zip(shape, places)
    )
