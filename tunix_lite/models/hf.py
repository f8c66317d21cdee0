"""Tensors on disk in Hugging Face layout: safetensors files, one or several with an index, in and
out; those of a GGUF file, too. The host never has more than one tensor beside what is on the
devices."""

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import NamedSharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from tunix_lite.basics.plain_text import escaped, shortened, shown
from tunix_lite.basics.types import Params
from tunix_lite.basics.untrusted import read_object
from tunix_lite.models import decoder
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.family import FUSED_EXPERTS, PER_EXPERT, TOP_NAMES, Family
from tunix_lite.models.gguf_file import is_gguf
from tunix_lite.models.gguf_tensors import GgufTensors
from tunix_lite.models.mxfp4 import BLOCK, dequantised
from tunix_lite.models.quantize import quantize, stored_table
from tunix_lite.models.weights import (
    Leaf,
    Weight,
    dense,
    flatten,
    num_params,
    shardings,
    unstacked,
)
from tunix_lite.parallel.mesh import put, sharding

INDEX = "model.safetensors.index.json"
# The tensors of a reward model beside those of the decoder.
SCORES = (TOP_NAMES["score"], TOP_NAMES["score_bias"])
SINGLE = "model.safetensors"
DTYPES = {"BF16": jnp.bfloat16, "F16": jnp.float16, "F32": jnp.float32}
# The name of a tensor of one expert, within a layer.
_EXPERT = re.compile(r"mlp\.experts\.\d+\.(gate|up|down)_proj\.weight$")
# At most, of one file that we write.
_SHARD_BYTES = 5_000_000_000
# Modules of a layer whose keys and values are those of another one, which files may have.
_OF_SOURCES = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
# Problems of each kind that a message lists.
SHOWN = 2
# At most, bytes of two tensors that are compared at once. A piece of a table has a quarter.
AT_ONCE = 2**26
# Called with the bytes that were read or written so far, and those of all.
OnBytes = Callable[[int, int], None]


class Tensors:
    """The tensors of a folder by name. Only headers are read until a tensor is sliced."""

    def __init__(self, folder: str | Path, family: Family | None = None):
        folder = Path(folder)
        if (folder / INDEX).is_file():
            indexed = read_object(folder / INDEX).get("weight_map")
            if not isinstance(indexed, dict):
                raise ValueError(
                    f"{folder / INDEX}: weight_map={shown(indexed)}; it is an object"
                )
            for name, file in indexed.items():
                # A file of a stranger must not name one outside of its folder.
                if not isinstance(file, str) or "\0" in file or Path(file).name != file:
                    raise ValueError(
                        f"{folder / INDEX}: {escaped(name)} is said to be in {shown(file)}, which "
                        "is not the name of a file beside it"
                    )
            files = sorted(set(indexed.values()))
            # Saving one file over several leaves the old index behind; which is newer, nobody says.
            if (folder / SINGLE).is_file() and SINGLE not in files:
                raise ValueError(
                    f"{folder} holds weights twice: delete {SINGLE} or {INDEX}, whichever is older"
                )
        elif (folder / SINGLE).is_file():
            indexed = {}
            files = [SINGLE]
        else:
            raise ValueError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}")
        self.folder = folder
        self._entries: dict[str, _Entry] = {}

        # The headers say which tensors there are. The index must agree with them.
        for file in files:
            if not (folder / file).is_file():
                raise ValueError(
                    f"{folder}: the index names {escaped(file)}, which is not there"
                )
            for name, (shape, dtype) in header(folder / file).items():
                plain = without_prefix(name, family)
                if plain in self._entries:
                    other = self._entries[plain].file.name
                    raise ValueError(f"{folder}: {escaped(name)} is in {other} and in {file}")
                # None: the tensor belongs to another part of the model
                if plain is not None:
                    self._entries[plain] = _Entry(folder / file, name, shape, dtype)
                if indexed.get(name) == file:
                    del indexed[name]
        for name, file in indexed.items():
            raise ValueError(
                f"{folder}: the index says that {escaped(name)} is in {file}, and it is not"
            )
        if family is not None and "mxfp4" in family.quantised:
            for name in [*self._entries]:
                if name.endswith("_blocks"):
                    self._join(name.removesuffix("_blocks"))

    def _join(self, name: str) -> None:
        """Makes one entry of the blocks and the scales of a tensor, as it is without them."""
        names = [name + end for end in ("_blocks", "_scales", "")]
        parts = tuple(self._entries.pop(x) for x in names if x in self._entries)
        held = [(x.shape, x.dtype) for x in parts]
        dims = held[0][0][:-1]
        wanted = [((*dims, BLOCK // 2), "U8"), (dims, "U8")]
        if held != wanted or len(dims) != 3:
            raise ValueError(
                f"{self.folder}: {escaped(name)} is no MXFP4: its _blocks should be [experts, "
                f"outputs, blocks, {BLOCK // 2}] in U8, its _scales the same without the last dim, "
                f"with no plain tensor beside them, and there is {held}"
            )
        experts, outputs, groups = dims
        shape = (experts, groups * BLOCK, outputs)
        self._entries[name] = _Entry(parts[0].file, name, shape, "BF16", parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def label(self, name: str) -> str:
        """The name of a tensor in messages."""
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor on disk."""
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """Type of a tensor, as safetensors spells it: BF16, F16, F32 ..."""
        return self._entries[name].dtype

    def num_bytes(self, name: str) -> int:
        """Bytes of a tensor in the file."""
        return math.prod(self.shape(name)) * jnp.dtype(DTYPES[self.dtype(name)]).itemsize

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Part of a tensor."""
        entry = self._entries[name]
        if not entry.packed:
            return entry.read(index)
        # The blocks that hold these inputs.
        experts, inputs, outputs = index
        blocks = slice(inputs.start // BLOCK, -(-inputs.stop // BLOCK))
        parts = [packed.read((experts, outputs, blocks)) for packed in entry.packed]
        first = blocks.start * BLOCK
        values = dequantised(*parts)[..., inputs.start - first : inputs.stop - first]
        return values.swapaxes(1, 2)


def open_tensors(model: str | Path, family: Family) -> Tensors | GgufTensors:
    """The tensors of a folder or of a GGUF file. Raises ValueError if their headers are damaged."""
    model = Path(model)
    if is_gguf(model):
        return GgufTensors(model, family)
    return Tensors(model, family)


@dataclass(frozen=True)
class _Entry:
    """Place, shape and type of a tensor."""

    file: Path
    name: str  # name in the file
    shape: tuple[int, ...]
    dtype: str
    packed: tuple["_Entry", ...] = ()  # blocks and scales of MXFP4, which it is made of

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Part of it. The file is open for this alone, so that its pages leave the memory."""
        with safe_open(str(self.file), framework="np") as opened:
            return opened.get_slice(self.name)[index]


def header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor in a safetensors file. Raises ValueError if it is damaged."""
    try:
        # safe_open checks that the header and the length of the file agree.
        with safe_open(str(file), framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: (tuple(x.get_shape()), x.get_dtype()) for name, x in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{file} is damaged or cut short ({escaped(str(error))})") from error


def without_prefix(name: str, family: Family | None) -> str | None:
    """The name that a text model would have; None for tensors of other parts of the model."""
    if family is None:
        return name
    if name.startswith(family.ignored):
        return None
    for prefix in family.prefixes:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return "lm_head.weight" if name == "language_model.lm_head.weight" else name


# ---- names and layouts


def hf_names(
    path: str,
    cfg: Architecture,
    family: Family,
) -> list[str]:
    """The names on disk of the weight at this path: one, or one per layer. Where each expert has a
    tensor, * stands for its number."""
    if path in TOP_NAMES:
        return [TOP_NAMES[path]]
    # layers/q, or layers/<stack>/q: kinds may name the same weight differently
    *stack, name = path.removeprefix("layers/").split("/")
    of_kind = family.names.get("/".join([*stack, name])) or family.names[name]
    own_stack = stack[0] if stack else None
    stacks = enumerate(decoder.stack_of_layers(cfg))
    return [f"model.layers.{i}.{of_kind}" for i, stack in stacks if stack == own_stack]


@dataclass(frozen=True)
class TensorPart:
    """Rows of a tensor on disk that are one weight of a layer, or of one expert.

    Example: the keys of Phi's third layer, with 4 query heads of 8 -> path "layers/k", place (2,),
    rows slice(32, 48) of the tensor that has queries, keys and values.
    """

    name: str  # of the tensor
    path: str
    # place in the leaf: the number of the layer in its stack, and of the expert
    place: tuple[int, ...]
    weight: Weight  # of one layer, or of one expert
    rows: slice
    experts: int = 0  # which the tensor has in its first dim; 0: it has no such dim
    by_turns: bool = False  # as in Family

    def by_rows(self) -> list["TensorPart"]:
        """A table [V, D] in pieces, each of at most a quarter of AT_ONCE in float32."""
        count, width = self.weight.shape
        num_rows = max(1, AT_ONCE // (16 * width))
        pieces = []
        for start in range(0, count, num_rows):
            rows = slice(start, min(start + num_rows, count))
            weight = replace(self.weight, shape=(rows.stop - start, width))
            pieces.append(replace(self, weight=weight, rows=rows))
        return pieces


def hf_parts(cfg: Architecture, family: Family) -> dict[str, list[TensorPart]]:
    """The weights in every tensor of the model, by its name on disk, in the order of their rows."""
    parts: dict[str, list[TensorPart]] = {}
    for path, weight in flatten(decoder.weights(cfg)).items():
        one = unstacked(weight)
        count = one.shape[0] if one.axes[0] == "experts" else 0
        if count:
            one = replace(one, shape=one.shape[1:], axes=one.axes[1:])
        for layer, name in enumerate(hf_names(path, cfg, family)):
            # parts come in the order of the table, which is that of the rows on disk
            first = parts[name][-1].rows.stop if name in parts else 0
            rows = slice(first, first + hf_shape(one)[0])
            for expert in range(max(1, count)):
                own = name.replace("*", str(expert))
                place = (layer, expert)[: weight.num_counted]
                in_it = count if own == name else 0
                part = TensorPart(own, path, place, one, rows, in_it, family.by_turns)
                parts.setdefault(own, []).append(part)
    if not family.by_turns:
        return parts
    # gate and up have every other row
    for name, those in parts.items():
        paths = list(dict.fromkeys(part.path for part in those))
        turns = {x: slice(i, those[-1].rows.stop, len(paths)) for i, x in enumerate(paths)}
        parts[name] = [replace(part, rows=turns[part.path]) for part in those]
    return parts


def hf_shapes(cfg: Architecture, family: Family) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of the model, by its name on disk: the embedding, the layers by
    number, the rest."""

    def place(tensor: tuple[str, list[TensorPart]]) -> tuple[int, int]:
        parts = tensor[0].split(".")
        # by number: as text, layer 10 would stand before layer 2
        if parts[1] == "layers":
            return 1, int(parts[2])
        return (0 if "embed" in tensor[0] else 2), 0

    shapes = {}
    for name, parts in sorted(hf_parts(cfg, family).items(), key=place):
        shape = (parts[-1].rows.stop, *hf_shape(parts[0].weight)[1:])
        if count := parts[0].experts:
            shape = (count, *(shape[::-1] if family.by_turns else shape))
        shapes[name] = shape
    return shapes


def _is_score(weight: Weight) -> bool:
    """Whether a weight is the head of a reward model; a bias of one expert has its axes, too."""
    return weight.axes == ("embed",) and weight.is_exact


def hf_shape(weight: Weight) -> tuple[int, ...]:
    """The shape on disk: projections [outputs, inputs]; biases flat; tables [V, D]; convolutions
    [outputs, 1, taps]; the head of a reward model [1, D]."""
    if _is_score(weight):
        return 1, *weight.shape
    if weight.axes[-1] == "taps":
        return int(np.prod(weight.shape[:-1])), 1, weight.shape[-1]
    if weight.inputs:
        # heads are a dim of their own here, and rows on disk
        num_outputs = int(np.prod(weight.shape[weight.inputs :]))
        num_inputs = int(np.prod(weight.shape[: weight.inputs]))
        return num_outputs, num_inputs
    if weight.axes[0] == "vocab":
        return weight.shape
    return (int(np.prod(weight.shape)),)


def to_hf(value: np.ndarray, weight: Weight) -> np.ndarray:
    """The tensor on disk of the values of one layer's weight."""
    shape = hf_shape(weight)
    if weight.parts:
        # of each part all heads, then the next part
        heads, dim = weight.inputs, weight.inputs + 1
        parts = np.split(value, np.cumsum(weight.parts)[:-1], axis=dim)
        merged = (*value.shape[:heads], -1, *value.shape[dim + 1 :])
        value = np.concatenate([x.reshape(merged) for x in parts], axis=heads)
    if weight.inputs:
        return value.reshape(shape[::-1]).T
    return value.reshape(shape)


def from_hf(tensor: np.ndarray, weight: Weight) -> np.ndarray:
    """The values of one layer's weight, given the tensor on disk."""
    # The same code reads a tensor that is in memory.
    return _read_slice(tensor.__getitem__, weight, (slice(None),) * len(weight.shape))


def _read_slice(
    read: Callable[[tuple[slice, ...]], np.ndarray],
    weight: Weight,
    index: tuple[slice, ...],
    first_row: int = 0,
) -> np.ndarray:
    """weight[index], of which only the first dim of inputs and of outputs may be divided. read: a
    part of its tensor. first_row: where the weight begins there."""
    if weight.parts:
        heads, dim = weight.inputs, weight.inputs + 1
        pieces = []
        for width in weight.parts:
            shape = (*weight.shape[:dim], width, *weight.shape[dim + 1 :])
            one = replace(weight, shape=shape, parts=())
            pieces.append(_read_slice(read, one, index, first_row))
            first_row += weight.shape[heads] * width
        return np.concatenate(pieces, axis=dim)
    # each device asks for its own part, so that none is read that is not needed
    bounds = [s.indices(size)[:2] for s, size in zip(index, weight.shape)]
    shape = [stop - start for start, stop in bounds]

    def flat_slice(first: int, last: int, row: int = 0) -> slice:
        # The dims first..last-1 flattened into one. All but the first of them are whole.
        start, stop = bounds[first]
        inner = int(np.prod(weight.shape[first + 1 : last]))
        return slice(row + start * inner, row + stop * inner)

    num_dims = len(weight.shape)
    if weight.inputs:
        outputs = flat_slice(weight.inputs, num_dims, first_row)
        inputs = flat_slice(0, weight.inputs)
        return read((outputs, inputs)).T.reshape(shape)
    if weight.axes[-1] == "taps":
        index = (flat_slice(0, num_dims - 1, first_row), slice(None), slice(None))
    elif _is_score(weight):
        index = (slice(None), flat_slice(0, 1))
    elif weight.axes[0] == "vocab":
        index = (flat_slice(0, 1, first_row), flat_slice(1, 2))
    else:
        index = (flat_slice(0, num_dims),)
    return read(index).reshape(shape)


def _read_part(
    tensors: Tensors | GgufTensors, part: TensorPart, index: tuple[slice, ...]
) -> np.ndarray:
    """part.weight[index], out of its tensor."""
    whole = partial(tensors.read, part.name)
    first, step = part.rows.start, part.rows.step or 1
    if not part.experts:
        return _read_slice(whole, part.weight, index, first)
    expert = part.place[-1]

    def read(index: tuple[slice, ...]) -> np.ndarray:
        outputs, *inputs = index
        # all rows between are read: a file has no slices with steps
        rows = slice(first + outputs.start * step, first + (outputs.stop - 1) * step + 1)
        dims = [*inputs, rows] if part.by_turns else [rows, *inputs]
        one = whole((slice(expert, expert + 1), *dims))[0]
        if part.by_turns:
            one = one.T
        return one[::step]

    return _read_slice(read, part.weight, index)


# ---- in


def check_weights(
    folder: str | Path,
    cfg: Architecture,
    family: Family,
) -> tuple[Tensors | GgufTensors, Family]:
    """The tensors of a folder, and the family with the names that they have. Raises ValueError
    listing every tensor that is missing, unexpected, or of another shape or dtype."""
    tensors = open_tensors(folder, family)
    names = set(tensors)
    # Transformers writes Qwen 3.5 MoE with a tensor for each expert, and it is published with those
    # of a layer in one.
    if any(map(_EXPERT.search, names)):
        family = replace(family, names=family.names | PER_EXPERT)
    wanted = hf_shapes(cfg, family)

    # A head that gives numbers begins at zero where the folder has none, and needs no logits.
    if cfg.output != "logits":
        wanted = {n: shape for n, shape in wanted.items() if n in names or n not in SCORES}
        names.discard(TOP_NAMES["head"])
        file = Path(folder) / "config.json"
        config = read_object(file) if SCORES[0] in names else {}
        for key in ("num_labels", "id2label"):
            value = config.get(key, 1)
            num_labels = len(value) if isinstance(value, dict) else value
            if num_labels != 1:
                raise ValueError(
                    f"{file}: {key}={shortened(value)}, and the model of a reward has 1 label; "
                    f"{SCORES[0]} is {tensors.shape(SCORES[0])}"
                )
    # Allowed is a copy of the embedding.
    if cfg.tied and TOP_NAMES["head"] in names:
        wanted[TOP_NAMES["head"]] = wanted[TOP_NAMES["embed"]]
    # Older files have rotary constants, and some have keys and values that no layer reads.
    unread = tuple(f"model.layers.{i}.self_attn.{x}" for i in cfg.sources for x in _OF_SOURCES)
    problems = misfits(
        {tensors.label(name): shape for name, shape in wanted.items()},
        {
            tensors.label(name): (tensors.shape(name), tensors.dtype(name))
            for name in names
            if name in wanted
            or not (name.endswith("rotary_emb.inv_freq") or name.startswith(unread))
        },
    )
    if problems:
        config = "metadata" if is_gguf(Path(folder)) else "config.json"
        raise ValueError(f"the weights in {folder} do not fit its {config}: {problems}")
    return tensors, family


def misfits(
    wanted: dict[str, tuple[int, ...]], entries: dict[str, tuple[tuple[int, ...], str]]
) -> str:
    """Describes on one line the tensors that are missing, unexpected, or of another shape or dtype,
    SHOWN of each; "" if there are none. wanted: shapes; entries: as `header` reads them."""
    problems = {
        "missing": [
            f"{name} {list(shape)}" for name, shape in wanted.items() if name not in entries
        ],
        "unexpected": [
            f"{escaped(name)} {list(entries[name][0])}"
            for name in sorted(entries.keys() - wanted.keys())
        ],
        "shape": [
            f"{name} is {list(entries[name][0])}, and should be {list(wanted[name])}"
            for name in sorted(entries.keys() & wanted.keys())
            if entries[name][0] != wanted[name]
        ],
        "dtype": [
            f"{escaped(name)} is {dtype}, and should be one of {', '.join(DTYPES)}"
            for name, (_, dtype) in sorted(entries.items())
            if dtype not in DTYPES and name in wanted
        ],
    }
    # a wrong config.json has hundreds of them, and the first few say what is wrong
    more = sum(max(0, len(texts) - SHOWN) for texts in problems.values())
    lines = []
    for kind, texts in problems.items():
        lines += [f"{kind}: {text}" for text in texts[:SHOWN]]
    if more:
        lines.append(f"and {more} more")
    return "; ".join(lines)


def load_params(
    folder: str | Path,
    cfg: Architecture,
    family: Family,
    storage: str = "fp32",
    on_bytes: OnBytes | None = None,
) -> Params:
    """The weights in `folder` on the current mesh, stored as fp32, bf16, int8 or nf4.

    on_bytes: is called after each tensor. Raises ValueError as `check_weights`, and for a head that
    differs from the embedding although config.json ties them.
    """
    tensors, family = check_weights(folder, cfg, family)
    # a folder may hold the table of a tied model twice
    if cfg.tied and TOP_NAMES["head"] in tensors:
        _check_copy(tensors, TOP_NAMES["embed"], TOP_NAMES["head"])
    plain = flatten(decoder.weights(cfg))
    parts_of: dict[str, list[TensorPart]] = {path: [] for path in plain}
    by_name = hf_parts(cfg, family)
    for part in itertools.chain(*by_name.values()):
        parts_of[part.path].append(part)
    # what nobody reads may have a type that we do not know
    num_bytes = sum(tensors.num_bytes(name) for name in by_name if name in tensors)
    num_read = 0
    loaded = {}
    for path, leaf in flatten(stored_table(decoder.weights(cfg), storage)).items():
        weight = plain[path]
        to = tuple(jax.tree.leaves(shardings(leaf)))
        if TOP_NAMES.get(path) in SCORES and TOP_NAMES[path] not in tensors:
            loaded[path] = put(np.zeros(leaf.shape, leaf.dtype), *leaf.axes)
            continue
        stack = None
        parts = parts_of[path]
        # On one device a table comes in pieces of rows: whole, it would be there twice.
        if weight.axes[0] == "vocab" and to[0].mesh.size == 1:
            parts = parts[0].by_rows()
        if weight.is_stacked or len(parts) > 1:
            # jnp.zeros(device=...) would make them on one device and copy them to the others, by
            # way of temporaries as large
            make = partial(jax.tree.map, lambda w: jnp.zeros(w.shape, w.dtype), leaf)
            stack = jax.jit(make, out_shardings=shardings(leaf))()
        # of each layer, one or those of its experts
        count = len(parts) // weight.shape[0] if weight.is_stacked else 1
        for i in range(0, len(parts), count):
            some = parts[i : i + count]
            one = unstacked(weight) if weight.is_stacked else some[0].weight
            at = i // count if weight.is_stacked else some[0].rows.start
            # The piece gets no name here, so that it is freed before the next one is read.
            stack = _write(stack, _piece(tensors, some, one), jnp.int32(at), leaf, to)
            # Without waiting, the pieces would queue up, and the host would hold them all.
            jax.block_until_ready(stack)
            num_read += math.prod(one.shape)
            if on_bytes is not None:
                # a weight has the share of its elements in the bytes of all
                on_bytes(num_bytes * num_read // num_params(plain), num_bytes)
        loaded[path] = stack
    return traverse_util.unflatten_dict(loaded, sep="/")


def _piece(
    tensors: Tensors | GgufTensors, parts: list[TensorPart], weight: Weight
) -> jax.Array:
    """A weight of one layer on the mesh, in the stored dtype. parts: it, or its experts."""
    read = {}

    def part(index: tuple[slice, ...]) -> np.ndarray:
        # devices that hold the same part ask for it one after the other
        key = str(index)
        if key not in read:
            # A view: jax transposes while it copies.
            if weight.axes[0] == "experts":
                of_experts = [_read_part(tensors, one, index[1:]) for one in parts[index[0]]]
                read[key] = np.stack(of_experts)
            else:
                read[key] = _read_part(tensors, parts[0], index)
        return read[key]

    piece = jax.make_array_from_callback(
        weight.shape, sharding(weight.axes, weight.shape), part
    )
    # Ready here, so that what was read is freed before the piece is written.
    return jax.block_until_ready(piece)


def _check_copy(tensors: Tensors | GgufTensors, name: str, other: str) -> None:
    """Raises ValueError if the two tensors, [V, D], differ."""
    count, width = tensors.shape(name)
    # a table in float32 twice might not fit beside what is loaded
    num_rows = max(1, AT_ONCE // (8 * width))
    for start in range(0, count, num_rows):
        rows = (slice(start, min(start + num_rows, count)), slice(0, width))
        one, two = (tensors.read(x, rows).astype(np.float32) for x in (name, other))
        if not np.array_equal(one, two, equal_nan=True):
            raise ValueError(
                f"{tensors.folder}: config.json ties the head to the embedding, and {other} is not "
                f'{name}; to take {other} as the head, write "tie_word_embeddings": false there'
            )


@partial(jax.jit, static_argnums=(3, 4), donate_argnums=0)
def _write(
    stack: Leaf | None,
    piece: jax.Array,
    at: jax.Array,
    leaf: Leaf,
    to: tuple[NamedSharding, ...],
) -> Leaf:
    """`stack` with a piece as one of its layers, or as rows of a table, written in place as `leaf`
    of the table says. at: the layer, or the first row."""
    value = quantize(piece, jax.tree.map(unstacked, leaf))
    if stack is not None:
        # x.at[layer].set(v) is a scatter, of which XLA's CPU backend, in bfloat16, makes a copy of
        # all layers for each.
        def put_in(x: jax.Array, v: jax.Array) -> jax.Array:
            rows = v.reshape(-1, *x.shape[1:])
            return jax.lax.dynamic_update_slice_in_dim(x, rows, at, 0)

        value = jax.tree.map(put_in, stack, value)
    leaves, treedef = jax.tree.flatten(value)
    constrained = [
        jax.lax.with_sharding_constraint(x, sharding) for x, sharding in zip(leaves, to)
    ]
    return treedef.unflatten(constrained)


# ---- out


def save_params(
    params: Params,
    cfg: Architecture,
    family: Family,
    folder: str | Path,
    dtype: str | dict[str, str] = "BF16",
    on_bytes: OnBytes | None = None,
) -> None:
    """Writes the weights with the names and layouts that `load_params` and transformers read.

    dtype: BF16, F16 or F32, or a dict of them by tensor name. on_bytes: is called after each file.
    """
    shapes = hf_shapes(cfg, family)
    types = {name: dtype if isinstance(dtype, str) else dtype[name] for name in shapes}
    tensor = tensors_of(params, cfg, family)
    sizes = {
        name: math.prod(shape) * jnp.dtype(DTYPES[types[name]]).itemsize
        for name, shape in shapes.items()
    }
    write_shards(
        Path(folder), sizes, lambda name: tensor(name, types[name]), on_bytes=on_bytes
    )


def tensors_of(
    params: Params, cfg: Architecture, family: Family
) -> Callable[[str, str], np.ndarray]:
    """Returns (name, dtype) -> the tensor of this name in Hugging Face layout, as a plain
    weight."""
    leaves = flatten(params)
    parts_of = hf_parts(cfg, family)
    shapes = hf_shapes(cfg, family)

    def tensor(name: str, dtype: str) -> np.ndarray:
        whole = np.empty(shapes[name], DTYPES[dtype])
        for part in parts_of[name]:
            leaf = jax.tree.map(lambda x, at=part.place: x[at], leaves[part.path])
            # In float32 first, so that the sum of a base and its adapter is rounded once.
            value = dense(leaf, part.weight.inputs, jnp.float32)
            rows = to_hf(np.asarray(value.astype(DTYPES[dtype])), part.weight)
            if part.experts:
                one = whole[part.place[-1]]
                (one.T if part.by_turns else one)[part.rows] = rows
            else:
                whole[part.rows] = rows
        return whole

    return tensor


def write_shards(
    folder: Path,
    sizes: dict[str, int],
    tensor: Callable[[str], np.ndarray],
    on_bytes: OnBytes | None = None,
) -> None:
    """Writes tensor(name) of each name into files of up to 5 GB, with an index if there are
    several. sizes: bytes by name, in the order to write."""
    # Which tensors go into which file.
    shards = [[]]
    filled = 0
    for name, size in sizes.items():
        # a tensor larger than the limit has a file of its own
        if shards[-1] and filled + size > _SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size

    count = len(shards)
    files = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    if count == 1:
        files = [SINGLE]
    num_written = 0
    for file, names in zip(files, shards):
        write_tensors(folder / file, {name: tensor(name) for name in names})
        num_written += sum(sizes[name] for name in names)
        if on_bytes is not None:
            on_bytes(num_written, sum(sizes.values()))
    if len(shards) > 1:
        # readers want an index only where there are several files
        index = {"metadata": {"total_size": sum(sizes.values())}}
        index["weight_map"] = {
            name: file for file, names in zip(files, shards) for name in names
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2))


def stored_dtypes(folder: str | Path, family: Family) -> dict[str, str]:
    """The dtype of each tensor of `folder`, which `save_params` takes to write the same."""
    tensors = open_tensors(folder, family)
    dtypes = {name: tensors.dtype(name) for name in tensors}
    # where each expert has a tensor there, it is written into that of its layer
    for name in list(dtypes):
        if one := _EXPERT.search(name):
            dtypes[name[: one.start()] + FUSED_EXPERTS[f"expert_{one[1]}"]] = dtypes[name]
    return dtypes


# ---- other files of this kind


def read_tensors(file: Path) -> dict[str, np.ndarray]:
    """All tensors of a small file, such as an adapter's. Raises ValueError if it is damaged."""
    header(file)
    return load_file(str(file))


def write_tensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a safetensors file with the permissions of any new file."""
    save_file(
        # safetensors would write the memory of a transposed view as it lies.
        {name: np.ascontiguousarray(x) for name, x in tensors.items()},
        str(file),
        # transformers refuses a file that names no format.
        metadata={"format": "pt"},
    )
    # safetensors makes a file for its owner alone; to read the mask is to set it.
    mask = os.umask(0)
    os.umask(mask)
    file.chmod(0o666 & ~mask)
