"""Reads the header of a GGUF file, its metadata and the places of its tensors, as a stranger's:
counts and offsets are compared with the bytes of the file
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

import itertools
import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tunix_lite.basics.plain_text import escaped, shown
from tunix_lite.basics.untrusted import opened

# Most bytes before the tensors. Gemma 3's vocabulary has 6 MB.
_MOST_HEADER = 2**28
# Most bytes of one text. Chat templates have up to 20,000.
_MOST_TEXT = 2**20
# Type of a value -> its format for struct. Two more types have a length: 8 a text, 9 an array.
_FORMATS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd"))
_TEXT = 8
_ARRAY = 9
# The bytes that a value has at least, by its type.
_SIZES = {kind: struct.calcsize(f"<{form}") for kind, form in _FORMATS.items()} | {_TEXT: 8}
_MISSING = object()


@dataclass(frozen=True)
class GgufTensor:
    """Place, shape and type of a tensor, whose rows are whole blocks of `block` numbers.

    Example: `open_gguf("model.gguf").tensors["token_embd.weight"].shape` is (49152, 576).
    """

    name: str
    shape: tuple[int, ...]  # the last dim is contiguous
    type: str  # as ggml names it: F32, Q4_K ...
    offset: int  # in bytes, from the beginning of the file
    block: int
    block_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) // self.block * self.block_bytes


@dataclass(frozen=True)
class _Array:
    """A list of the metadata, which is read when it is needed."""

    kind: int  # type of its items
    count: int
    offset: int


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file. Make one with `open_gguf`.

    Example: `open_gguf("model.gguf").value("general.architecture", str)` is "llama".
    """

    path: Path
    values: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def value(self, key: str, kind: type, default: object = _MISSING) -> Any:
        """A value of this type: str, bool, int (0 or more) or float (finite). Raises ValueError for
        another one, and for a key that is not there and has no default."""
        value = self.values.get(key, default)
        if value is _MISSING:
            raise ValueError(f"{self.path}: {key} is missing")
        # a default may be of any type
        if key not in self.values:
            return value
        # For isinstance a boolean is an int, too.
        is_right = type(value) is kind
        if kind is int:
            is_right = is_right and value >= 0
        if kind is float:
            is_right = is_right and math.isfinite(value)
        if not is_right:
            expected = {
                str: "a text",
                bool: "true or false",
                int: "a whole number of 0 or more",
                float: "a finite number of type float",
            }[kind]
            text = "a list" if isinstance(value, _Array) else shown(value)
            raise ValueError(f"{self.path}: {key} is {text}; expected is {expected}")
        return value

    def array(self, key: str, kind: type, count: int | None = None) -> list:
        """A list of str, bool, int or float. Raises ValueError for another type, or not `count`
        items."""
        about = self.values.get(key)
        if about is None:
            raise ValueError(f"{self.path}: {key} is missing")
        # Lists are read when somebody asks: those of a vocabulary are long.
        letter = _FORMATS.get(about.kind, "s") if isinstance(about, _Array) else ""
        if (
            not letter
            or letter not in {str: "s", bool: "?", int: "BbHhIiQq", float: "fd"}[kind]
        ):
            raise ValueError(f"{self.path}: {key} is not a list of type {kind.__name__}")
        if count is not None and about.count != count:
            raise ValueError(
                f"{self.path}: {key} has {about.count} items; expected is {count}"
            )
        with opened(self.path) as stream:
            stream.seek(about.offset)
            if about.kind != _TEXT:
                content = stream.read(about.count * _SIZES[about.kind])
                return np.frombuffer(content, np.dtype(letter).newbyteorder("<")).tolist()
            texts = []
            for i in range(about.count):
                content = stream.read(int.from_bytes(stream.read(8), "little"))
                texts.append(_decoded(content, self.path, f"{key}[{i}]"))
        return texts

    def content(self, tensor: GgufTensor, rows: slice) -> np.ndarray:
        """The bytes of these rows of a tensor, [rows, bytes of a row]. One of one dim has one
        row."""
        row_bytes = tensor.shape[-1] // tensor.block * tensor.block_bytes
        with opened(self.path) as stream:
            stream.seek(tensor.offset + rows.start * row_bytes)
            content = stream.read((rows.stop - rows.start) * row_bytes)
        return np.frombuffer(content, np.uint8).reshape(-1, row_bytes)


def is_gguf(path: Path) -> bool:
    """True if a path is a file of this format, by its name."""
    return path.suffix == ".gguf" and not path.is_dir()


def import_gguf(path: Path) -> Any:
    """The gguf package. Raises ValueError, naming the extra to install, without it."""
    try:
        import gguf
    except ImportError:
        raise ValueError(f"{path} is in GGUF format: pip install -e '.[gguf]'") from None
    return gguf


def open_gguf(path: Path) -> GgufFile:
    """The header of a GGUF file. Raises ValueError, with the file, if it is damaged or not
    supported."""
    try:
        about = path.stat()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
    return _opened_once(path, about.st_size, about.st_mtime_ns)


# Several parts of a program read the header of the same file.
@lru_cache(maxsize=4)
def _opened_once(path: Path, size: int, _changed: int) -> GgufFile:
    with opened(path) as stream:
        if size < 24:
            raise ValueError(f"{path} is no GGUF file: it has {size} bytes")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            # a damaged count must not read on through gigabytes of weights
            cursor = _Cursor(path, content, min(len(content), _MOST_HEADER))
            if cursor.take(4, "its first bytes") != b"GGUF":
                raise ValueError(f"{path} is no GGUF file: it does not begin with GGUF")
            (version,) = cursor.unpack("I", "its version")
            if version not in (2, 3):
                raise ValueError(
                    f"{path}: GGUF version {version}; read are 2 and 3, little-endian"
                )
            num_tensors, num_values = cursor.unpack("QQ", "its counts")
            values = {}
            # The least bytes of a key: 8 of a length, 4 of a type and 1 of a value.
            for i in range(cursor.checked(num_values, 13, "number of keys")):
                key = cursor.text(f"key {i}")
                if key in values:
                    raise ValueError(f"{path}: the key {escaped(key)} is there twice")
                values[key] = cursor.value(escaped(key))
            num_tensors = cursor.checked(num_tensors, 24, "number of tensors")
            places = list(cursor.places(num_tensors))
            alignment = values.get("general.alignment", 32)
            if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment % 8:
                raise ValueError(
                    f"{path}: general.alignment is {shown(alignment)}; expected is a multiple of 8"
                )
            # offsets count from here
            begin = -(-cursor.at // alignment) * alignment
            tensors = _checked_tensors(path, places, begin, len(content), alignment)
    return GgufFile(path, values, tensors)


def _checked_tensors(
    path: Path,
    places: list[tuple[str, tuple[int, ...], int, int]],
    begin: int,
    size: int,
    alignment: int,
) -> dict[str, GgufTensor]:
    """The tensors by name, checked to be within the file and apart. begin: of the tensors; size: of
    the file."""
    gguf = import_gguf(path)
    tensors = {}
    for name, shape, number, offset in places:
        where = f"{path}: the tensor {escaped(name)}"
        if name in tensors:
            raise ValueError(f"{where} is there twice")
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            raise ValueError(f"{where} has type {number}, which gguf does not know") from None
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block or 0 in shape:
            raise ValueError(
                f"{where} has rows of {shape[-1]}, and {kind.name} blocks of {block}"
            )
        tensor = GgufTensor(name, shape, kind.name, begin + offset, block, block_bytes)
        if offset % alignment or tensor.offset + tensor.num_bytes > size:
            raise ValueError(
                f"{where} has {tensor.num_bytes:,} bytes from {tensor.offset:,} on, and the file "
                f"{size:,}: it is damaged or cut short"
            )
        tensors[name] = tensor
    # of two that overlap, one would be read as the other
    in_order = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for one, other in itertools.pairwise(in_order):
        if one.offset + one.num_bytes > other.offset:
            raise ValueError(
                f"{path}: the tensors {escaped(one.name)} and {escaped(other.name)} overlap"
            )
    return tensors


@dataclass
class _Cursor:
    """A place in a header, whose every step is checked against its end."""

    path: Path
    content: mmap.mmap
    end: int
    at: int = 0

    def checked(self, count: int, size: int, what: str) -> int:
        """`count`, if so many things of at least `size` bytes can follow."""
        if count * size > self.end - self.at:
            raise ValueError(
                f"{self.path} is damaged or cut short: {what} is {count:,}, and "
                f"{self.end - self.at:,} bytes of its header follow"
            )
        return count

    def take(self, count: int, what: str) -> bytes:
        begin = self.at
        self.at += self.checked(count, 1, f"the length of {what}")
        return self.content[begin : self.at]

    def unpack(self, form: str, what: str) -> tuple:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}"), what))

    def text(self, what: str) -> str:
        (length,) = self.unpack("Q", what)
        if length > _MOST_TEXT:
            raise ValueError(
                f"{self.path}: {what} has {length:,} bytes; read are {_MOST_TEXT:,}"
            )
        return _decoded(self.take(length, what), self.path, what)

    def value(self, key: str) -> Any:
        """The value of a key. Of a list, its type, its length and its place."""
        (kind,) = self.unpack("I", key)
        if kind in _FORMATS:
            return self.unpack(_FORMATS[kind], key)[0]
        if kind == _TEXT:
            return self.text(key)
        item_kind, count = self.unpack("IQ", key) if kind == _ARRAY else (kind, 0)
        if item_kind not in _SIZES:
            raise ValueError(f"{self.path}: {key} has type {item_kind}, which is not read")
        self.checked(count, _SIZES[item_kind], f"the length of {key}")
        array = _Array(item_kind, count, self.at)
        if item_kind != _TEXT:
            self.at += count * _SIZES[item_kind]
            return array
        # Texts are passed over one by one, as each says its length.
        for i in range(count):
            (length,) = self.unpack("Q", f"{key}[{i}]")
            self.at += self.checked(length, 1, f"the length of {key}[{i}]")
        return array

    def places(self, count: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        """Yields the name, the shape, the number of the type and the offset of each tensor."""
        for i in range(count):
            name = self.text(f"the name of tensor {i}")
            (num_dims,) = self.unpack("I", name)
            if not 1 <= num_dims <= 4:
                raise ValueError(
                    f"{self.path}: the tensor {escaped(name)} has {num_dims:,} dims; expected is "
                    "1 to 4"
                )
            # ggml names the contiguous dim first.
            shape = self.unpack(f"{num_dims}Q", name)[::-1]
            number, offset = self.unpack("IQ", name)
            yield name, shape, number, offset


def _decoded(content: bytes, path: Path, what: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {what} is not UTF-8 ({error.reason})") from error
