"""Tensors on disk in Hugging Face layout: safetensors files, one or several with an index, in and
out.

Reading goes one layer's tensor at a time, and of that only the slices that this process's devices
hold: the host never has more than one tensor beside what is already on the devices. Nothing
missing, unexpected or mis-shaped passes.
"""

import json
import os
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from tunix_lite.files.untrusted import read_object
from tunix_lite.models import decoder
from tunix_lite.models.decoder import Architecture
from tunix_lite.models.families import TOP_NAMES, Family
from tunix_lite.models.quantize import quantize, stored_table
from tunix_lite.models.weights import (
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

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"BF16": jnp.bfloat16, "F16": jnp.float16, "F32": jnp.float32}
# of one file that we write, at most
SHARD_BYTES = 5_000_000_000
# bytes of names and shapes in one file; a tensor takes some 100
MOST_HEADER = 2**24
# problems in a message
SHOWN = 4
# bytes of two tensors that are compared, at most
AT_ONCE = 2**26


class Tensors:
    """The tensors of a folder by name, over one file or several. Only headers are read until a
    tensor is sliced."""

    def __init__(self, folder: str | Path, family: Family | None = None):
        folder = Path(folder)
        if (folder / INDEX).is_file():
            listed = _weight_map(folder / INDEX)
            files = sorted(set(listed.values()))
        elif (folder / SINGLE).is_file():
            listed, files = {}, [SINGLE]
        else:
            raise ValueError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}")
        self.folder, self._place = folder, {}
        for file in files:
            if not (folder / file).is_file():
                raise ValueError(f"{folder}: the index names {escaped(file)}, which is not there")
            for name, (shape, dtype) in header(folder / file).items():
                ours = _without_prefix(name, family)
                if ours in self._place:
                    raise ValueError(
                        f"{folder}: {escaped(name)} is in {self._place[ours][0].name} and in {file}"
                    )
                if ours is not None:
                    self._place[ours] = (folder / file, name, shape, dtype)
                if listed.pop(name, file) != file:
                    raise ValueError(
                        f"{folder}: {escaped(name)} is in {file}, and the index says it is in "
                        "another file"
                    )
        if listed:
            name, file = next(iter(listed.items()))
            raise ValueError(
                f"{folder}: the index says that {escaped(name)} is in {file}, and it is not"
            )

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._place[name][2]

    def dtype(self, name: str) -> str:
        """As safetensors spells it: BF16, F16, F32 ..."""
        return self._place[name][3]

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Part of a tensor. The file is opened for this only: what was mapped of it leaves the
        host's memory again."""
        file, theirs, _, _ = self._place[name]
        with safe_open(str(file), framework="np") as opened:
            return opened.get_slice(theirs)[index]


def _weight_map(file: Path) -> dict[str, str]:
    """Tensor -> file, as the index says. Raises ValueError."""
    listed = read_object(file).get("weight_map")
    if not isinstance(listed, dict):
        raise ValueError(
            f"{file} is not an index of tensors: weight_map={shown(listed)}; it is an object"
        )
    for name, place in listed.items():
        if not isinstance(place, str) or "\0" in place or Path(place).name != place:
            raise ValueError(
                f"{file}: {escaped(name)} is said to be in {shown(place)}, which is not the name "
                "of a file beside it"
            )
    return dict(listed)


def header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor in a safetensors file. Raises ValueError if the file is
    damaged or cut short."""
    try:
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            if size > MOST_HEADER:
                raise ValueError(f"a header of {size:,} bytes, and {MOST_HEADER:,} are the most")
            read = opened.read(size)
        # checks that the header and the length agree
        with safe_open(str(file), framework="np"):
            pass
        entries = json.loads(read, object_pairs_hook=_each_once)
    except (SafetensorError, OSError, ValueError, RecursionError, struct.error) as error:
        raise ValueError(f"{file} is damaged or cut short ({escaped(str(error))})") from error
    return {
        name: (tuple(e["shape"]), e["dtype"])
        for name, e in entries.items()
        if name != "__metadata__"
    }


def _each_once(pairs: list[tuple]) -> dict:
    """An object of a header: of a name that stands there twice, two readers could take different
    ones."""
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


def hf_names(path: str, cfg: Architecture, family: Family) -> list[str]:
    """The tensors that a weight of ours holds: one, or one per layer."""
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
    """As stored: projections transposed and flat, [outputs, inputs]; biases flat; the rest as it
    is."""
    if weight.inputs:
        return int(np.prod(weight.shape[weight.inputs :])), int(
            np.prod(weight.shape[: weight.inputs])
        )
    return weight.shape if weight.axes[0] == "vocab" else (int(np.prod(weight.shape)),)


def _to_hf(value, weight: Weight):
    return (
        value.reshape(hf_shape(weight)[::-1]).T
        if weight.inputs
        else value.reshape(hf_shape(weight))
    )


def _read_slice(
    tensors: Tensors, name: str, weight: Weight, index: tuple[slice, ...]
) -> np.ndarray:
    """weight[index] from its stored layout, and no more than that. Only leading dims of a group are
    divided."""
    bounds = [s.indices(size)[:2] for s, size in zip(index, weight.shape)]
    shape = [stop - start for start, stop in bounds]

    def as_one(
        first: int, last: int
    ) -> slice:  # dims first..last-1 in a row; all but the first of them are whole
        inner = int(np.prod(weight.shape[first + 1 : last]))
        return slice(bounds[first][0] * inner, bounds[first][1] * inner)

    dims = len(weight.shape)
    if weight.inputs:
        return tensors.read(
            name, (as_one(weight.inputs, dims), as_one(0, weight.inputs))
        ).T.reshape(shape)
    index = index if weight.axes[0] == "vocab" else (as_one(0, dims),)
    return tensors.read(name, index).reshape(shape)


# ---- in


def check_weights(folder: str | Path, cfg: Architecture, family: Family) -> None:
    """Raises ValueError listing every tensor of `folder` that is missing, unexpected, mis-shaped or
    of another type."""
    tensors = Tensors(folder, family)
    names = set(tensors)
    wanted = {name: hf_shape(weight) for name, weight in hf_weights(cfg, family).items()}
    # a copy of the embedding
    extra = names - wanted.keys() - ({TOP_NAMES["head"]} if cfg.tied else set())
    # older files store the constants
    extra = {name for name in extra if not name.endswith("rotary_emb.inv_freq")}
    problems = [
        f"missing: {name} {list(shape)}" for name, shape in wanted.items() if name not in names
    ]
    problems += [
        f"unexpected: {escaped(name)} {list(tensors.shape(name))}" for name in sorted(extra)
    ]
    if cfg.tied and TOP_NAMES["head"] in names:
        wanted[TOP_NAMES["head"]] = wanted[TOP_NAMES["embed"]]
    for name in sorted(names & wanted.keys()):
        if (found := tensors.shape(name)) != wanted[name]:
            problems.append(f"shape: {name} is {list(found)}, and should be {list(wanted[name])}")
        if tensors.dtype(name) not in DTYPES:
            problems.append(
                f"dtype: {name} is {tensors.dtype(name)}, and should be one of {', '.join(DTYPES)}"
            )
    if problems:
        raise ValueError(
            f"the weights in {folder} do not fit its config.json: {problem_summary(problems)}"
        )


def problem_summary(problems: list[str]) -> str:
    """Some of them on one line, of each kind (what stands before the colon) one first, and how many
    more there are."""
    kinds = [problem.partition(":")[0] for problem in problems]
    places = sorted(range(len(problems)), key=lambda i: kinds[:i].count(kinds[i]))
    problems = [problems[i] for i in places]
    more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    return "; ".join(problems[:SHOWN] + more)


def load_params(
    folder: str | Path, cfg: Architecture, family: Family, storage: str = "fp32"
) -> Params:
    """The weights in `folder` on the current mesh, stored as fp32, bf16, int8 or nf4.

    Raises ValueError as `check_weights` does, and for a head that is not the embedding that
    config.json ties it to.
    """
    check_weights(folder, cfg, family)
    tensors, plain = Tensors(folder, family), flatten(decoder.weights(cfg))
    loaded = {}
    for path, leaf in flatten(stored_table(decoder.weights(cfg), storage)).items():
        weight, places = plain[path], tuple(jax.tree.leaves(shardings(leaf)))
        whole = _room(leaf) if weight.is_stacked else None
        for i, name in enumerate(hf_names(path, cfg, family)):
            copies = _copies(tensors, name, cfg)
            # the piece has no name here: it is gone before the next one is read
            whole = _write(
                whole,
                _piece(tensors, name, unstacked(weight), *copies),
                jnp.int32(i),
                leaf,
                weight.inputs,
                places,
            )
            # else the pieces queue up, and the host holds them all
            jax.block_until_ready(whole)
        loaded[path] = whole
    return traverse_util.unflatten_dict(loaded, sep="/")


def _room(leaf):
    """Zeros where a leaf of the table will be, each device's made there: jnp.zeros(device=...)
    makes one device's and copies it to the others, by way of temporaries as large."""
    make = lambda: jax.tree.map(lambda w: jnp.zeros(w.shape, w.dtype), leaf, is_leaf=is_weight)  # noqa: E731
    return jax.jit(make, out_shardings=shardings(leaf))()


def _copies(tensors: Tensors, name: str, cfg: Architecture) -> tuple[str, ...]:
    """What the folder holds once more under another name, as the table of a tied model may be."""
    is_tied = cfg.tied and name == TOP_NAMES["embed"] and TOP_NAMES["head"] in tensors
    return (TOP_NAMES["head"],) if is_tied else ()


def _piece(tensors: Tensors, name: str, weight: Weight, *copies: str) -> jax.Array:
    """One tensor on the mesh in its stored dtype; a slice that several devices hold is read once,
    and compared with what should be copies of it."""
    read = {}

    def part(index):
        key = str(index)
        if key not in read:
            # a view: jax transposes while it copies
            read[key] = _read_slice(tensors, name, weight, index)
            for other in copies:
                _check_copy(tensors, name, other, weight.shape, index)
        return read[key]

    piece = jax.make_array_from_callback(weight.shape, sharding(weight.axes, weight.shape), part)
    # what was read is let go before it is written
    return jax.block_until_ready(piece)


def _check_copy(
    tensors: Tensors, name: str, other: str, shape: tuple[int, ...], index: tuple[slice, ...]
) -> None:
    """Raises ValueError if this slice of the two, [V, D], is not the same: read again, a few rows
    at a time."""
    (first, last, _), columns = index[0].indices(shape[0]), index[1]
    rows = max(1, AT_ONCE // (8 * shape[1]))
    for start in range(first, last, rows):
        here = slice(start, min(start + rows, last)), columns
        one, two = (tensors.read(each, here).astype(np.float32) for each in (name, other))
        different = ~((one == two) | (np.isnan(one) & np.isnan(two)))
        if different.any():
            row = start + int(np.argmax(different.any(axis=1)))
            with np.errstate(invalid="ignore"):
                most = float(np.nanmax(np.abs(one - two), initial=0.0))
            raise ValueError(
                f"{tensors.folder}: config.json ties the head to the embedding "
                f"(tie_word_embeddings), and {other} is "
                f"not {name}: they differ from row {row} on, by up to {most:.2g}. "
                f"model.untie_head=true takes {other} "
                "as the head"
            )


@partial(jax.jit, static_argnums=(3, 4, 5), donate_argnums=0)
def _write(whole, piece, layer, leaf, inputs: int, places: tuple):
    """A piece as `leaf` of the table stores it, in its layer of `whole`: in place, so that two
    copies never exist."""
    one = jax.tree.map(unstacked, leaf, is_leaf=is_weight)
    value = quantize(piece, one, inputs) if is_quantized(leaf) else piece.astype(leaf.dtype)
    if whole is not None:
        # x.at[layer].set(v) is a scatter: in bfloat16, XLA's CPU backend makes a copy of all layers
        # for each
        value = jax.tree.map(
            lambda x, v: jax.lax.dynamic_update_index_in_dim(x, v, layer, 0), whole, value
        )
    leaves, treedef = jax.tree.flatten(value)
    return treedef.unflatten(
        [jax.lax.with_sharding_constraint(x, at) for x, at in zip(leaves, places)]
    )


# ---- out


def save_params(
    params: Params, cfg: Architecture, family: Family, folder: str | Path, dtype="BF16"
) -> None:
    """Writes the weights with the names and layouts that `load_params` and transformers read.

    `dtype` is BF16, F16 or F32, or a dict of them by tensor name. Adapters and quantised weights
    are written as the plain weights that they amount to. Files hold up to 5 GB; more than one come
    with an index.
    """
    table, leaves = flatten(decoder.weights(cfg)), flatten(params)
    # tensor name -> (path, layer), in the order of the layers
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
        # through float32: the sum of a base and its adapter is rounded once
        value = dense(leaf, as_written[name].inputs, jnp.float32)
        return np.ascontiguousarray(
            _to_hf(np.asarray(value.astype(DTYPES[types[name]])), as_written[name])
        )

    sizes = {
        name: int(np.prod(w.shape)) * jnp.dtype(DTYPES[types[name]]).itemsize
        for name, w in as_written.items()
    }
    write_shards(Path(folder), _in_order(sizes), tensor)


def _in_order(sizes: dict[str, int]) -> dict[str, int]:
    """Embedding first, then the layers by number, then the rest: what a reader of the files
    expects."""

    def key(name: str):
        parts = name.split(".")
        return (1, int(parts[2])) if parts[1] == "layers" else (0 if "embed" in name else 2, 0)

    return dict(sorted(sizes.items(), key=lambda item: key(item[0])))


def write_shards(
    folder: Path, sizes: dict[str, int], tensor, shard_bytes: int | None = None
) -> None:
    """Files of up to `shard_bytes`, with an index if there are several; holds one file's tensors at
    a time."""
    limit = SHARD_BYTES if shard_bytes is None else shard_bytes
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
    for file, names in zip(files, shards):
        write_tensors(folder / file, {name: tensor(name) for name in names})
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}}
        index["weight_map"] = {name: file for file, names in zip(files, shards) for name in names}
        (folder / INDEX).write_text(json.dumps(index, indent=2))


def stored_dtypes(folder: str | Path, family: Family) -> dict[str, str]:
    """How each tensor of `folder` is stored: what `save_params` takes to write the same."""
    tensors = Tensors(folder, family)
    return {name: tensors.dtype(name) for name in tensors}


# ---- other files of this kind


def read_tensors(file: Path) -> dict[str, np.ndarray]:
    """All tensors of a small file, such as an adapter's. Raises ValueError if it is damaged."""
    header(file)
    return load_file(str(file))


def write_tensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """A file that others may read as they may any new file; safetensors makes it for its owner
    alone."""
    save_file(
        {name: np.ascontiguousarray(x) for name, x in tensors.items()},
        str(file),
        metadata={"format": "pt"},
    )
    mask = os.umask(0)
    os.umask(mask)
    file.chmod(0o666 & ~mask)
