"""Tensors on disk in Hugging Face layout: safetensors files, one or several with an index, in and
out.

Weights are read one layer's tensor at a time, and of that only the slices that the devices of this
process hold: the host never has more than one tensor beside what is already on the devices. A
tensor that is missing, unexpected or of another shape is an error.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import NamedSharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from tunix_lite.files.untrusted import read_object
from tunix_lite.models import decoder
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.families import TOP_NAMES, Family
from tunix_lite.models.quantize import quantize, stored_table
from tunix_lite.models.weights import (
    Leaf,
    Weight,
    dense,
    flatten,
    is_quantized,
    is_weight,
    shardings,
    unstacked,
)
from tunix_lite.parallel.mesh import sharding
from tunix_lite.plain_text import escaped, shown
from tunix_lite.types import Params

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"BF16": jnp.bfloat16, "F16": jnp.float16, "F32": jnp.float32}
# At most, of one file that we write.
SHARD_BYTES = 5_000_000_000
# Bytes of names and shapes in one file. A tensor takes some 100.
MOST_HEADER = 2**24
# Problems that a message lists.
SHOWN = 4
# At most, bytes of two tensors that are compared at once.
AT_ONCE = 2**26
# Called with the bytes that were read or written so far, and those of all.
OnBytes = Callable[[int, int], None]


class Tensors:
    """The tensors of a folder by name, over one file or several. Only headers are read until a
    tensor is sliced."""

    def __init__(self, folder: str | Path, family: Family | None = None):
        folder = Path(folder)
        if (folder / INDEX).is_file():
            indexed = _weight_map(folder / INDEX)
            files = sorted(set(indexed.values()))
            # Saving one file over several leaves the old index behind; which is newer, nobody says.
            if (folder / SINGLE).is_file() and SINGLE not in files:
                raise ValueError(
                    f"{folder} holds weights twice: {SINGLE}, which transformers reads, and the "
                    f"{len(files)} files of {INDEX}; delete {folder / INDEX} or {folder / SINGLE}, "
                    "whichever is older"
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
                raise ValueError(f"{folder}: the index names {escaped(file)}, which is not there")
            for name, (shape, dtype) in header(folder / file).items():
                self._add(_without_prefix(name, family), _Entry(folder / file, name, shape, dtype))
                if indexed.pop(name, file) != file:
                    raise ValueError(
                        f"{folder}: {escaped(name)} is in {file}, and the index says it is in "
                        "another file"
                    )
        if indexed:
            name, file = next(iter(indexed.items()))
            raise ValueError(
                f"{folder}: the index says that {escaped(name)} is in {file}, and it is not"
            )

    def _add(self, name: str | None, entry: "_Entry") -> None:
        """name: as a text model has it; None: the tensor belongs to another part of the model."""
        if name in self._entries:
            raise ValueError(
                f"{self.folder}: {escaped(entry.name)} is in {self._entries[name].file.name} and "
                f"in {entry.file.name}"
            )
        if name is not None:
            self._entries[name] = entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

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
        """Part of a tensor. The file is opened for this read only, so that its mapped pages leave
        the host's memory again."""
        entry = self._entries[name]
        with safe_open(str(entry.file), framework="np") as opened:
            return opened.get_slice(entry.name)[index]


@dataclass(frozen=True)
class _Entry:
    """Place, shape and type of a tensor."""

    file: Path
    name: str  # name in the file
    shape: tuple[int, ...]
    dtype: str


def _weight_map(file: Path) -> dict[str, str]:
    """Tensor -> file, as the index says. Raises ValueError if it is no index, or names a file that
    is not beside it."""
    indexed = read_object(file).get("weight_map")
    if not isinstance(indexed, dict):
        raise ValueError(
            f"{file} is not an index of tensors: weight_map={shown(indexed)}; it is an object"
        )
    for name, shard in indexed.items():
        if not isinstance(shard, str) or "\0" in shard or Path(shard).name != shard:
            raise ValueError(
                f"{file}: {escaped(name)} is said to be in {shown(shard)}, which is not the name "
                "of a file beside it"
            )
    return dict(indexed)


def header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor in a safetensors file. Raises ValueError if the file is
    damaged or cut short."""
    try:
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            if size > MOST_HEADER:
                raise ValueError(f"a header of {size:,} bytes, and {MOST_HEADER:,} are the most")
            content = opened.read(size)
        # safe_open checks that the header and the length of the file agree.
        with safe_open(str(file), framework="np"):
            pass
        entries = json.loads(content, object_pairs_hook=_each_once)
    except (SafetensorError, OSError, ValueError, RecursionError, struct.error) as error:
        raise ValueError(f"{file} is damaged or cut short ({escaped(str(error))})") from error
    entries.pop("__metadata__", None)
    return {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in entries.items()}


def _each_once(pairs: list[tuple]) -> dict:
    """An object of a header. If a name were there twice, two readers could take different ones."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name stands twice in its header")
    return entries


def _without_prefix(name: str, family: Family | None) -> str | None:
    """The name that a text model would have; None for tensors of other parts of the model."""
    if family is None:
        return name
    if name.startswith(family.ignored):
        return None
    for prefix in family.prefixes:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.") if name == "language_model.lm_head.weight" else name


# ---- names and layouts


def hf_names(
    path: str,
    cfg: Architecture,
    family: Family,
) -> list[str]:
    """The names on disk of the weight at this path: one, or one per layer."""
    if path in TOP_NAMES:
        return [TOP_NAMES[path]]
    name = family.names[path.removeprefix("layers/")]
    return [f"model.layers.{i}.{name}" for i in range(cfg.num_layers)]


def hf_weights(cfg: Architecture, family: Family) -> dict[str, Weight]:
    """Every tensor of the model, by its name on disk."""
    return {
        name: unstacked(weight)
        for path, weight in flatten(decoder.weights(cfg)).items()
        for name in hf_names(path, cfg, family)
    }


def hf_shape(weight: Weight) -> tuple[int, ...]:
    """The shape on disk: projections [outputs, inputs], transposed and flat; biases flat; tables
    [V, D]."""
    if weight.inputs:
        num_outputs = int(np.prod(weight.shape[weight.inputs :]))
        num_inputs = int(np.prod(weight.shape[: weight.inputs]))
        return num_outputs, num_inputs
    return weight.shape if weight.axes[0] == "vocab" else (int(np.prod(weight.shape)),)


def _to_hf(value: np.ndarray, weight: Weight) -> np.ndarray:
    shape = hf_shape(weight)
    return value.reshape(shape[::-1]).T if weight.inputs else value.reshape(shape)


def _read_slice(
    tensors: Tensors,
    name: str,
    weight: Weight,
    index: tuple[slice, ...],
) -> np.ndarray:
    """weight[index], reading no more than that. Of the inputs and of the outputs, only the first
    dim may be divided."""
    bounds = [s.indices(size)[:2] for s, size in zip(index, weight.shape)]
    shape = [stop - start for start, stop in bounds]

    def flat_slice(first: int, last: int) -> slice:
        # The dims first..last-1 flattened into one. All but the first of them are whole.
        start, stop = bounds[first]
        inner = int(np.prod(weight.shape[first + 1 : last]))
        return slice(start * inner, stop * inner)

    num_dims = len(weight.shape)
    if weight.inputs:
        outputs = flat_slice(weight.inputs, num_dims)
        inputs = flat_slice(0, weight.inputs)
        return tensors.read(name, (outputs, inputs)).T.reshape(shape)
    if weight.axes[0] != "vocab":
        index = (flat_slice(0, num_dims),)
    return tensors.read(name, index).reshape(shape)


# ---- in


def check_weights(
    folder: str | Path,
    cfg: Architecture,
    family: Family,
) -> None:
    """Raises ValueError listing every tensor of `folder` that is missing, unexpected, or of another
    shape or dtype."""
    tensors = Tensors(folder, family)
    names = set(tensors)
    wanted = {name: hf_shape(weight) for name, weight in hf_weights(cfg, family).items()}

    # Allowed are a copy of the embedding, and the rotary constants of older files.
    extra = names - wanted.keys() - ({TOP_NAMES["head"]} if cfg.tied else set())
    extra = {name for name in extra if not name.endswith("rotary_emb.inv_freq")}
    problems = [
        f"missing: {name} {list(shape)}" for name, shape in wanted.items() if name not in names
    ]
    problems += [
        f"unexpected: {escaped(name)} {list(tensors.shape(name))}" for name in sorted(extra)
    ]

    # What is there on both sides must be alike.
    if cfg.tied and TOP_NAMES["head"] in names:
        wanted[TOP_NAMES["head"]] = wanted[TOP_NAMES["embed"]]
    for name in sorted(names & wanted.keys()):
        shape = tensors.shape(name)
        if shape != wanted[name]:
            problems.append(f"shape: {name} is {list(shape)}, and should be {list(wanted[name])}")
        if tensors.dtype(name) not in DTYPES:
            problems.append(
                f"dtype: {name} is {tensors.dtype(name)}, and should be one of {', '.join(DTYPES)}"
            )
    if problems:
        raise ValueError(
            f"the weights in {folder} do not fit its config.json: {problem_summary(problems)}"
        )


def problem_summary(problems: list[str]) -> str:
    """Some of the problems on one line, and how many more there are. The first ones are one of each
    kind (the text before the colon)."""
    kinds = [problem.partition(":")[0] for problem in problems]
    order = sorted(range(len(problems)), key=lambda i: kinds[:i].count(kinds[i]))
    problems = [problems[i] for i in order]
    more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    return "; ".join(problems[:SHOWN] + more)


def load_params(
    folder: str | Path,
    cfg: Architecture,
    family: Family,
    storage: str = "fp32",
    on_bytes: OnBytes | None = None,
) -> Params:
    """The weights in `folder` on the current mesh, stored as fp32, bf16, int8 or nf4.

    on_bytes: is called after each tensor. Raises ValueError as `check_weights` does, and for a head
    that differs from the embedding although config.json ties them.
    """
    check_weights(folder, cfg, family)
    tensors = Tensors(folder, family)
    plain = flatten(decoder.weights(cfg))
    num_bytes = {name: tensors.num_bytes(name) for name in hf_weights(cfg, family)}
    num_read = 0
    loaded = {}
    for path, leaf in flatten(stored_table(decoder.weights(cfg), storage)).items():
        weight = plain[path]
        to = tuple(jax.tree.leaves(shardings(leaf)))
        stack = _zeros(leaf) if weight.is_stacked else None
        for i, name in enumerate(hf_names(path, cfg, family)):
            copies = _copies(tensors, name, cfg)
            # The piece gets no name here, so that it is freed before the next one is read.
            stack = _write(
                stack,
                _piece(tensors, name, unstacked(weight), *copies),
                jnp.int32(i),
                leaf,
                weight.inputs,
                to,
            )
            # Without waiting, the pieces would queue up, and the host would hold them all.
            jax.block_until_ready(stack)
            num_read += num_bytes[name]
            if on_bytes is not None:
                on_bytes(num_read, sum(num_bytes.values()))
        loaded[path] = stack
    return traverse_util.unflatten_dict(loaded, sep="/")


def _zeros(leaf: Leaf) -> Leaf:
    """Zeros with the shapes and shardings of a leaf of the table, made on each device.

    jnp.zeros(device=...) would make them on one device and copy them to the others, by way of
    temporaries as large.
    """

    def make() -> Leaf:
        return jax.tree.map(lambda w: jnp.zeros(w.shape, w.dtype), leaf, is_leaf=is_weight)

    return jax.jit(make, out_shardings=shardings(leaf))()


def _copies(
    tensors: Tensors,
    name: str,
    cfg: Architecture,
) -> tuple[str, ...]:
    """The names of copies of a tensor: a folder may hold the table of a tied model twice."""
    is_tied = cfg.tied and name == TOP_NAMES["embed"] and TOP_NAMES["head"] in tensors
    return (TOP_NAMES["head"],) if is_tied else ()


def _piece(tensors: Tensors, name: str, weight: Weight, *copies: str) -> jax.Array:
    """One tensor on the mesh in its stored dtype. A slice that several devices hold is read once,
    and compared with the tensors that should be copies of it."""
    read = {}

    def part(index: tuple[slice, ...]) -> np.ndarray:
        key = str(index)
        if key not in read:
            # A view: jax transposes while it copies.
            read[key] = _read_slice(tensors, name, weight, index)
            for other in copies:
                _check_copy(tensors, name, other, weight.shape, index)
        return read[key]

    piece = jax.make_array_from_callback(weight.shape, sharding(weight.axes, weight.shape), part)
    # Ready here, so that what was read is freed before the piece is written.
    return jax.block_until_ready(piece)


def _check_copy(
    tensors: Tensors,
    name: str,
    other: str,
    shape: tuple[int, ...],
    index: tuple[slice, ...],
) -> None:
    """Raises ValueError if this slice of the two tensors, [V, D], differs. Both are read again, a
    few rows at a time."""
    first, last, _ = index[0].indices(shape[0])
    num_rows = max(1, AT_ONCE // (8 * shape[1]))
    for start in range(first, last, num_rows):
        rows = (slice(start, min(start + num_rows, last)), index[1])
        one = tensors.read(name, rows).astype(np.float32)
        two = tensors.read(other, rows).astype(np.float32)
        different = ~((one == two) | (np.isnan(one) & np.isnan(two)))
        if different.any():
            row = start + int(np.argmax(different.any(axis=1)))
            with np.errstate(invalid="ignore"):
                most = float(np.nanmax(np.abs(one - two), initial=0.0))
            raise ValueError(
                f"{tensors.folder}: config.json ties the head to the embedding "
                f"(tie_word_embeddings), and {other} is not {name}: they differ from row {row} on, "
                f"by up to {most:.2g}. model.untie_head=true takes {other} as the head"
            )


@partial(jax.jit, static_argnums=(3, 4, 5), donate_argnums=0)
def _write(
    stack: Leaf | None,
    piece: jax.Array,
    layer: jax.Array,
    leaf: Leaf,
    inputs: int,
    to: tuple[NamedSharding, ...],
) -> Leaf:
    """`stack` with a piece in one of its layers, as `leaf` of the table stores it. It is written in
    place, so that two copies never exist."""
    one = jax.tree.map(unstacked, leaf, is_leaf=is_weight)
    value = quantize(piece, one, inputs) if is_quantized(leaf) else piece.astype(leaf.dtype)
    if stack is not None:
        # x.at[layer].set(v) is a scatter, of which XLA's CPU backend, in bfloat16, makes a copy of
        # all layers for each.
        value = jax.tree.map(
            lambda x, v: jax.lax.dynamic_update_index_in_dim(x, v, layer, 0), stack, value
        )
    leaves, treedef = jax.tree.flatten(value)
    constrained = [jax.lax.with_sharding_constraint(x, sharding) for x, sharding in zip(leaves, to)]
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

    dtype: BF16, F16 or F32, or a dict of them by tensor name. Adapters and quantised weights are
    written as plain weights that compute the same. Files hold up to 5 GB; several come with an
    index. on_bytes: is called after each file.
    """
    table = flatten(decoder.weights(cfg))
    leaves = flatten(params)

    # Tensor name -> (path, layer), in the order of the layers; and what is written of it.
    where = {
        name: (path, i if table[path].is_stacked else None)
        for path in table
        for i, name in enumerate(hf_names(path, cfg, family))
    }
    as_written = {name: unstacked(table[path]) for name, (path, _) in where.items()}
    types = {name: dtype if isinstance(dtype, str) else dtype[name] for name in where}

    def tensor(name: str) -> np.ndarray:
        path, layer = where[name]
        leaf = leaves[path] if layer is None else jax.tree.map(lambda x: x[layer], leaves[path])
        # In float32 first, so that the sum of a base and its adapter is rounded once.
        value = dense(leaf, as_written[name].inputs, jnp.float32)
        on_host = np.asarray(value.astype(DTYPES[types[name]]))
        return np.ascontiguousarray(_to_hf(on_host, as_written[name]))

    sizes = {
        name: int(np.prod(w.shape)) * jnp.dtype(DTYPES[types[name]]).itemsize
        for name, w in as_written.items()
    }
    write_shards(Path(folder), _in_order(sizes), tensor, on_bytes=on_bytes)


def _in_order(sizes: dict[str, int]) -> dict[str, int]:
    """The embedding first, then the layers by number, then the rest, as readers of the files
    expect."""

    def key(name: str) -> tuple[int, int]:
        parts = name.split(".")
        if parts[1] == "layers":
            return 1, int(parts[2])
        return (0 if "embed" in name else 2), 0

    return dict(sorted(sizes.items(), key=lambda item: key(item[0])))


def write_shards(
    folder: Path,
    sizes: dict[str, int],
    tensor: Callable[[str], np.ndarray],
    shard_bytes: int | None = None,
    on_bytes: OnBytes | None = None,
) -> None:
    """Writes tensor(name) of each name into files of up to `shard_bytes` (None: 5 GB), with an
    index if there are several. The host holds the tensors of one file at a time.

    sizes: bytes by name, in the order to write. on_bytes: is called after each file.
    """
    limit = SHARD_BYTES if shard_bytes is None else shard_bytes

    # Which tensors go into which file.
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size

    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    files = files if len(shards) > 1 else [SINGLE]
    num_written = 0
    for file, names in zip(files, shards):
        write_tensors(folder / file, {name: tensor(name) for name in names})
        num_written += sum(sizes[name] for name in names)
        if on_bytes is not None:
            on_bytes(num_written, sum(sizes.values()))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}}
        index["weight_map"] = {name: file for file, names in zip(files, shards) for name in names}
        (folder / INDEX).write_text(json.dumps(index, indent=2))


def stored_dtypes(folder: str | Path, family: Family) -> dict[str, str]:
    """The dtype of each tensor of `folder`, which `save_params` takes to write the same."""
    tensors = Tensors(folder, family)
    return {name: tensors.dtype(name) for name in tensors}


# ---- other files of this kind


def read_tensors(file: Path) -> dict[str, np.ndarray]:
    """All tensors of a small file, such as an adapter's. Raises ValueError if it is damaged."""
    header(file)
    return load_file(str(file))


def write_tensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a safetensors file with the permissions of any new file. safetensors itself makes it
    readable for its owner alone."""
    save_file(
        {name: np.ascontiguousarray(x) for name, x in tensors.items()},
        str(file),
        metadata={"format": "pt"},
    )
    mask = os.umask(0)
    os.umask(mask)
    file.chmod(0o666 & ~mask)
