"""Bytes of a run's weights on one device, from the rules that place them: arithmetic, without a
mesh of devices."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tunix_lite.learner.policy import STORED
from tunix_lite.models import decoder
from tunix_lite.models.lora import adapter_weights
from tunix_lite.models.quantize import STORAGE, stored_table
from tunix_lite.models.weights import Weight, is_weight
from tunix_lite.resolved.run import ResolvedRun


@dataclass(frozen=True)
class Tables:
    """The declared weights of a run, in the types that they are stored in.

    Example: tables(resolved).frozen is None, unless adapters train.
    """

    trained: dict
    # None: all weights train
    frozen: dict | None


def tables(resolved: ResolvedRun) -> Tables:
    """Returns the weights that train, and those of the frozen base."""
    table = decoder.weights(resolved.cfg)
    storage = STORED[resolved.run.training.mixed_precision]
    if resolved.lora is None:
        return Tables(stored_table(table, storage), None)
    adapters = jax.tree.map(
        lambda w: replace(w, dtype=STORAGE[storage]),
        adapter_weights(table, resolved.lora),
        is_leaf=is_weight,
    )
    return Tables(adapters, stored_table(table, resolved.lora.base))


def table_bytes(
    table: dict,
    resolved: ResolvedRun,
    dtype: DTypeLike | None = None,
    keep_norms: bool = False,
    is_gathered: bool = False,
) -> int:
    """Bytes of a table on one device of the run's mesh: elements / shards x bytes of an element.

    dtype: instead of the declared one; keep_norms: except for the scales of norms, which are
    float32. is_gathered: whole over fsdp.
    """

    def of(w: Weight) -> int:
        storage = w.dtype if dtype is None else dtype
        if keep_norms and w.axes[-1] == "norm":
            storage = jnp.float32
        return resolved.elements(w.shape, w.axes, is_gathered) * jnp.dtype(storage).itemsize

    return sum(of(w) for w in jax.tree.leaves(table, is_leaf=is_weight))
