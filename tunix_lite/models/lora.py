"""LoRA (arXiv:2106.09685) as operations on trees: adapters, `<path of the weight>/a` and `/b`,
which alone train, and a frozen base beside them, which is also the reference of the KL term."""

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.typing import DTypeLike

from tunix_lite.basics.plain_text import shown
from tunix_lite.basics.types import POLICY, Params
from tunix_lite.models.quantize import STORAGE
from tunix_lite.models.scalar_head import HEAD
from tunix_lite.models.weights import (
    Initializer,
    Lora,
    Table,
    adapter_pair,
    flatten,
    stacked,
    unstacked,
)

# Folded into the seed of a run, so that adapters do not start from the numbers of random weights.
ADAPTER_SEED = 0x10A


# The expressions of targets: they match in no time, so a folder of a stranger may hold one.
_MOST_TARGETS = 200
_MOST_ANY = 3
PLAIN = re.compile(rf"(?:[\w/|()\[\]^$]|\.\*){{0,{_MOST_TARGETS}}}")
_EMPTY = re.compile(r"\(\||\|\||\|\)")


@dataclass(frozen=True)
class LoraConfig:
    """Selects the weights that get an adapter, its size, and how the frozen base is stored."""

    # conf/model/parts/common.yaml explains each setting
    rank: int = 0
    alpha: float = 32.0
    targets: str = ".*/(q|k|v|qkv|z|o|gate|up|down)"
    dropout: float = 0.0
    base: str = "bf16"
    adapter: str | None = None

    def __post_init__(self):
        if self.rank < 0:
            raise ValueError(f"rank={self.rank} must not be negative; 0 trains all weights")
        if self.alpha <= 0:
            raise ValueError(f"alpha={self.alpha} must be above 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")
        if self.base not in STORAGE:
            raise ValueError(f"base={self.base!r}; it is one of {', '.join(STORAGE)}")
        is_short = PLAIN.fullmatch(self.targets) and self.targets.count(".*") <= _MOST_ANY
        if not is_short or _EMPTY.search(self.targets):
            raise ValueError(
                f"targets={shown(self.targets)}: of regular expressions it takes names, | between "
                f"them, ( ), [ ], ^, $ and up to {_MOST_ANY} .*, in {_MOST_TARGETS} characters"
            )
        try:
            re.compile(self.targets)
        except re.error as error:
            raise ValueError(
                f"targets={shown(self.targets)} is not a regular expression ({error})"
            ) from error

    @property
    def scale(self) -> float:
        """The factor of a @ b."""
        return self.alpha / self.rank


@cache
def _uniform_fan_in(inputs: int) -> Initializer:
    """Uniform within 1 / sqrt(number of inputs), as PEFT initialises a."""

    def init(
        key: jax.Array,
        shape: tuple[int, ...],
        dtype: DTypeLike,
    ) -> jax.Array:
        # the shape of one layer: a stack is made layer by layer
        bound = math.prod(shape[:inputs]) ** -0.5
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def adapter_weights(table: Table, lora: LoraConfig) -> Table:
    """The a and b of each weight whose path matches `lora.targets`. Raises ValueError if nothing
    matches, or something that is no projection."""
    declared = flatten(table)
    matched = [path for path in declared if re.fullmatch(lora.targets, path)]
    if not matched:
        some = [path for path in declared if declared[path].inputs][:3]
        raise ValueError(
            f"targets={lora.targets!r} matches no weight; paths look like {', '.join(some)}"
        )
    adapters = {}
    for path in matched:
        weight = declared[path]
        if not weight.inputs:
            raise ValueError(
                f"targets={lora.targets!r} matches {path}, which is not a projection"
            )
        if lora.dropout and "experts" in weight.axes:
            raise ValueError(
                f"targets={lora.targets!r} matches {path}, and adapters of experts have no "
                "dropout; set model.lora.dropout=0"
            )
        a, b = adapter_pair(unstacked(weight), lora.rank, _uniform_fan_in(weight.inputs))
        if weight.is_stacked:
            a, b = stacked(a, weight.shape[0]), stacked(b, weight.shape[0])
        adapters |= {f"{path}/a": a, f"{path}/b": b}
    return traverse_util.unflatten_dict(adapters, sep="/")


def trained_weights(table: Table, lora: LoraConfig) -> Table:
    """What trains beside a frozen base: `adapter_weights`, and the head that gives numbers, if the
    table has one."""
    return adapter_weights(table, lora) | {name: table[name] for name in HEAD if name in table}


def attach(
    base: Params,
    adapters: Params,
    lora: LoraConfig,
    keys: jax.Array | None = None,
) -> Params:
    """The parameters that a policy acts with: the base, with a `Lora` leaf wherever there is an
    adapter, and with the trained head that gives numbers, if there is one.

    keys: one per sequence of the batch, [B]; with them, dropout acts. The adapters of a policy and
    of a critic are attached to the same base.
    """
    if POLICY in adapters:
        return {name: attach(base, part, lora, keys) for name, part in adapters.items()}
    leaves = flatten(base) | {name: adapters[name] for name in HEAD if name in adapters}
    fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
    # Sorted, so that the key of a weight does not depend on the order of a dict.
    for i, (path, (a, b)) in enumerate(sorted(pairs(adapters).items())):
        keys_LB = None
        if keys is not None:
            # each weight drops other inputs
            keys_LB = fold(keys, i)
            if path.startswith("layers/"):
                # and each layer
                keys_LB = jax.vmap(fold, in_axes=(None, 0))(keys_LB, jnp.arange(a.shape[0]))
        leaves[path] = Lora(leaves[path], a, b, keys_LB, lora.scale, lora.dropout)
    return traverse_util.unflatten_dict(leaves, sep="/")


def acting_params(
    frozen: Params | None,
    params: Params,
    lora: LoraConfig | None,
    keys: jax.Array | None = None,
) -> Params:
    """The weights that the model computes with: `params`, or the frozen base with its adapters
    `params`."""
    if frozen is None:
        return params
    return attach(frozen, params, lora, keys)


def pairs(adapters: Params) -> dict[str, tuple[Any, Any]]:
    """Path of the weight -> its (a, b)."""
    sides = flatten(adapters)
    return {
        path.removesuffix("/a"): (sides[path], sides[f"{path[:-1]}b"])
        for path in sides
        if path.endswith("/a")
    }
