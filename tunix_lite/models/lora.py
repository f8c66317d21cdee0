"""LoRA (arXiv:2106.09685) as operations on trees: declare adapters, attach them to a base, take
them off again.

Adapters are a tree of their own, `<path of the weight>/a` and `/b`, and under LoRA the only thing
that trains. The base beside them is frozen and never copied; it is also the reference of the KL
term.
"""

import math
import re
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
from flax import traverse_util

from tunix_lite.files.addresses import check_on_disk
from tunix_lite.models import confined
from tunix_lite.models.decoder import Architecture, layer_weights
from tunix_lite.models.quantize import STORAGE
from tunix_lite.models.weights import (
    Lora,
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

# folded into a run's seed, so that adapters do not start from the numbers of random weights
ADAPTER_SEED = 0x10A


@dataclass(frozen=True)
class LoraConfig:
    """Which weights get an adapter, of what size, and how the frozen base is stored."""

    # of the adapters, the only weights that then train; 0: no adapters, all weights train
    rank: int = 0
    alpha: float = 32.0  # what adapters say is scaled by alpha / rank
    # regular expression over paths of weights, such as layers/q
    targets: str = ".*/(q|k|v|o|gate|up|down)"
    dropout: float = 0.0  # share of an adapter's inputs that an update does not see
    base: str = "bf16"  # how the frozen base is stored: fp32, bf16, int8 or nf4
    # a folder in PEFT format to start from, with its rank, alpha and targets; null: fresh
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
        return self.alpha / self.rank


# no repetition of a repetition: matched in no time
PLAIN = re.compile(r"(?:[\w/|()]|\.\*){0,200}")
PATHS = [
    f"layers/{name}" for name in ("q", "attn_norm", "attn_post_norm", "mlp_post_norm", "down")
] + ["final_norm"]


def check_targets(targets: str) -> None:
    """Raises ValueError for a regular expression, as a folder brings it, that is none or takes for
    ever to match.

    It is tried in a process that can be killed, against names as long as those that it will meet.
    """
    if PLAIN.fullmatch(targets) and targets.count(".*") <= 3:
        return
    try:
        confined.ask("match", targets, PATHS)
    except confined.Refused as error:
        raise ValueError(f"targets={shown(targets)}: this regular expression {error}") from error


@cache
def uniform_fan_in(inputs: int):
    """Uniform within 1 / sqrt(number of inputs), as PEFT begins."""

    def init(key, shape, dtype):
        bound = math.prod(shape[:inputs]) ** -0.5
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def adapter_weights(table, lora: LoraConfig) -> dict:
    """The a and b of each weight whose path matches. They lie on the mesh as the dims that they
    share with it do.

    Raises ValueError if no projection matches, or something that is none.
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


def _some(declared: dict) -> list[str]:
    return [path for path in declared if declared[path].inputs][:3]


def _pair(w: Weight, rank: int) -> tuple[Weight, Weight]:
    a, b = adapter_pair(unstacked(w), rank, uniform_fan_in(w.inputs))
    return (stacked(a, w.shape[0]), stacked(b, w.shape[0])) if w.is_stacked else (a, b)


def attach(base: Params, adapters: Params, lora: LoraConfig, keys=None) -> Params:
    """The params that a policy acts with: the base, with a `Lora` leaf wherever there is an
    adapter. Copies nothing.

    keys: one per sequence of the batch, [B], if dropout is to act.
    """
    leaves = flatten(base)
    for i, (path, (a, b)) in enumerate(sorted(pairs(adapters).items())):
        here = None if keys is None else _keys(keys, i, a.shape[0])
        leaves[path] = Lora(leaves[path], a, b, here, lora.scale, lora.dropout)
    return traverse_util.unflatten_dict(leaves, sep="/")


def _keys(keys_B, place: int, num_layers: int):
    """Keys of one stacked weight, [L, B]."""
    fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
    return jax.vmap(fold, in_axes=(None, 0))(fold(keys_B, place), jnp.arange(num_layers))


def acting_params(
    frozen: Params | None, params: Params, lora: LoraConfig | None, keys=None
) -> Params:
    """What the policy acts with: all weights if all train, else the frozen base with its
    adapters."""
    return params if frozen is None else attach(frozen, params, lora, keys)


def merge(params: Params, cfg: Architecture, dtype=jnp.float32) -> Params:
    """The plain weights that acting params amount to: adapters added, quantised weights
    unpacked."""
    leaves = flatten(params)
    layer = layer_weights(cfg)

    def plain(path: str, leaf):
        if not (isinstance(leaf, Lora) or is_quantized(leaf)):
            return leaf.astype(dtype)
        one = partial(dense, inputs=layer[path.rsplit("/", 1)[1]].inputs, dtype=dtype)
        return jax.vmap(one)(leaf)

    merged = jax.jit(lambda leaves: {path: plain(path, leaf) for path, leaf in leaves.items()})(
        leaves
    )
    return traverse_util.unflatten_dict(merged, sep="/")


def pairs(adapters: Params) -> dict:
    """path of the weight -> (a, b)"""
    sides = flatten(adapters)
    return {
        path.removesuffix("/a"): (sides[path], sides[f"{path[:-1]}b"])
        for path in sides
        if path.endswith("/a")
    }
