"""LoRA (arXiv:2106.09685) as operations on trees: declare adapters, attach them to a base, merge
them into it.

Adapters are a tree of their own, `<path of the weight>/a` and `/b`, and under LoRA they alone
train. The base beside them is frozen and never copied; it is also the reference of the KL term.
"""

import math
import re
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.typing import DTypeLike

from tunix_lite.files.addresses import check_on_disk
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.decoder import layer_weights
from tunix_lite.models.quantize import STORAGE
from tunix_lite.models.weights import (
    Initializer,
    Leaf,
    Lora,
    Table,
    Weight,
    adapter_pair,
    dense,
    flatten,
    is_quantized,
    stacked,
    unstacked,
)
from tunix_lite.plain_text import shown
from tunix_lite.types import Params
from tunix_lite.workers import confined

# Folded into the seed of a run, so that adapters do not start from the numbers of random weights.
ADAPTER_SEED = 0x10A


@dataclass(frozen=True)
class LoraConfig:
    """Selects the weights that get an adapter, its size, and how the frozen base is stored."""

    # Rank of the LoRA adapters, which are then the only weights that train. 0 trains all weights.
    rank: int = 0
    # The output of adapters is scaled by alpha / rank.
    alpha: float = 32.0
    # Regular expression over weight paths, such as layers/q. Matching projections get adapters.
    targets: str = ".*/(q|k|v|o|gate|up|down)"
    # Share of the adapter inputs set to 0 in an update, from 0 to 1. 0 turns dropout off.
    dropout: float = 0.0
    # Type in which the frozen weights are stored under adapters: fp32, bf16, int8 or nf4.
    base: str = "bf16"
    # PEFT folder to start from. Rank, alpha and targets come from it. null starts with new
    # adapters.
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
        check_on_disk("adapter", self.adapter)
        try:
            re.compile(self.targets)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(
                f"targets={shown(self.targets)} is not a regular expression ({error})"
            ) from error

    @property
    def scale(self) -> float:
        """The factor of a @ b."""
        return self.alpha / self.rank


# Expressions without a repetition of a repetition. They match in no time.
PLAIN = re.compile(r"(?:[\w/|()]|\.\*){0,200}")
# Paths to try other expressions against.
_TRIED = ("q", "attn_norm", "attn_post_norm", "mlp_post_norm", "down")
PATHS = [*(f"layers/{name}" for name in _TRIED), "final_norm"]


def check_targets(targets: str) -> None:
    """Raises ValueError if the text, from a folder that we do not trust, is no regular expression
    or takes too long to match.

    It is tried in a process that can be killed, against names as long as the real ones.
    """
    if PLAIN.fullmatch(targets) and targets.count(".*") <= 3:
        return
    try:
        confined.try_pattern(targets, PATHS)
    except confined.Refused as error:
        raise ValueError(f"targets={shown(targets)}: this regular expression {error}") from error


@cache
def uniform_fan_in(inputs: int) -> Initializer:
    """Uniform within 1 / sqrt(number of inputs), as PEFT initialises a."""

    def init(
        key: jax.Array,
        shape: tuple[int, ...],
        dtype: DTypeLike,
    ) -> jax.Array:
        bound = math.prod(shape[:inputs]) ** -0.5
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def adapter_weights(table: Table, lora: LoraConfig) -> Table:
    """The a and b of each weight whose path matches `lora.targets`. The mesh divides them as it
    divides the dims that they share with the weight.

    Raises ValueError if nothing matches, or something that is no projection.
    """
    declared = flatten(table)
    matched = [path for path in declared if re.fullmatch(lora.targets, path)]
    if not matched:
        raise ValueError(
            f"targets={lora.targets!r} matches no weight; paths look like "
            f"{', '.join(_some(declared))}"
        )
    adapters = {}
    for path in matched:
        if not declared[path].inputs:
            raise ValueError(f"targets={lora.targets!r} matches {path}, which is not a projection")
        a, b = _pair(declared[path], lora.rank)
        adapters |= {f"{path}/a": a, f"{path}/b": b}
    return traverse_util.unflatten_dict(adapters, sep="/")


def _some(declared: dict[str, Weight]) -> list[str]:
    """A few paths of projections, for a message."""
    return [path for path in declared if declared[path].inputs][:3]


def _pair(w: Weight, rank: int) -> tuple[Weight, Weight]:
    a, b = adapter_pair(unstacked(w), rank, uniform_fan_in(w.inputs))
    if not w.is_stacked:
        return a, b
    return stacked(a, w.shape[0]), stacked(b, w.shape[0])


def attach(
    base: Params,
    adapters: Params,
    lora: LoraConfig,
    keys: jax.Array | None = None,
) -> Params:
    """The parameters that a policy acts with: the base, with a `Lora` leaf wherever there is an
    adapter. Copies nothing.

    keys: one per sequence of the batch, [B]; with them, dropout acts.
    """
    leaves = flatten(base)
    for i, (path, (a, b)) in enumerate(sorted(pairs(adapters).items())):
        keys_LB = None if keys is None else _keys(keys, i, a.shape[0])
        leaves[path] = Lora(leaves[path], a, b, keys_LB, lora.scale, lora.dropout)
    return traverse_util.unflatten_dict(leaves, sep="/")


def _keys(
    keys_B: jax.Array,
    index: int,
    num_layers: int,
) -> jax.Array:
    """Keys of the stacked weight number `index`, [L, B]."""
    fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
    return jax.vmap(fold, in_axes=(None, 0))(fold(keys_B, index), jnp.arange(num_layers))


def acting_params(
    frozen: Params | None,
    params: Params,
    lora: LoraConfig | None,
    keys: jax.Array | None = None,
) -> Params:
    """The weights that the model computes with: `params`, if all weights train (frozen is None);
    else the frozen base with its adapters `params`. keys: as of `attach`."""
    return params if frozen is None else attach(frozen, params, lora, keys)


def merge(
    params: Params,
    cfg: Architecture,
    dtype: DTypeLike = jnp.float32,
) -> Params:
    """The plain weights, in `dtype`, that compute the same as acting parameters: adapters added,
    quantised weights unpacked."""
    layer = layer_weights(cfg)

    def merge_leaf(path: str, leaf: Leaf) -> jax.Array:
        if not (isinstance(leaf, Lora) or is_quantized(leaf)):
            return leaf.astype(dtype)
        # Only projections of layers are such leaves, and all layers are stacked.
        name = path.rsplit("/", 1)[1]
        return jax.vmap(partial(dense, inputs=layer[name].inputs, dtype=dtype))(leaf)

    @jax.jit
    def merge_all(leaves: dict[str, Leaf]) -> dict[str, jax.Array]:
        return {path: merge_leaf(path, leaf) for path, leaf in leaves.items()}

    return traverse_util.unflatten_dict(merge_all(flatten(params)), sep="/")


def pairs(adapters: Params) -> dict[str, tuple[Any, Any]]:
    """Path of the weight -> its (a, b)."""
    sides = flatten(adapters)
    return {
        path.removesuffix("/a"): (sides[path], sides[f"{path[:-1]}b"])
        for path in sides
        if path.endswith("/a")
    }
