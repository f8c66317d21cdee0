"""The few protobuf messages of the Tinker protocol, read and written without the SDK.

The SDK sends forward_backward as protobuf and reads the results of forward_backward and of samples
as protobuf; all else is JSON. A protobuf message is a list of fields: a key (number * 8 + type),
then a varint (type 0), 8 bytes (1), a length and so many bytes (2), or 4 bytes (5).
Reference: tinker_public.proto of the SDK 0.38.0.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

# DType of the protocol -> numpy's, little-endian as on the wire.
DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
FLOAT32 = 1
STOP_REASONS = {"stop": 0, "length": 1}
# Bytes of a varint, at most: 64 bits, 7 in each.
VARINT_BYTES = 10


class WireError(ValueError):
    """The bytes are no message of this protocol."""


@dataclass(frozen=True)
class WireDatum:
    """One sequence of a forward_backward request.

    Example: WireDatum([2, 17], {"target_tokens": array([17, 5])}).
    """

    tokens: list[int]
    # each of the shape that its tensor names
    inputs: dict[str, np.ndarray]


@dataclass(frozen=True)
class ForwardBackward:
    """A forward_backward request.

    Example: read_forward_backward(body).loss is "cross_entropy".
    """

    model_id: str
    seq_id: int
    loss: str
    data: list[WireDatum]
    settings: dict[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


# ---- reading


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Raises WireError if the bytes are no such request, or hold what this server cannot train."""
    texts = {1: "", 4: ""}
    numbers = {2: 0, 6: 0}
    data: list[WireDatum] = []
    settings: dict[str, float | str] = {}
    newer: dict[str, float | str] = {}
    for number, value in _fields(body):
        if number in texts:
            texts[number] = _text(value)
        elif number in numbers:
            numbers[number] = _whole(value)
        elif number == 3:
            data.append(_datum(_bytes(value), f"data[{len(data)}]"))
        elif number == 5:
            name, entry = _entry(value)
            settings[name] = _double(entry)
        elif number == 7:
            name, entry = _entry(value)
            newer[name] = _setting(_bytes(entry))
    # The SDK writes numbers into both maps; the newer one has texts, too.
    chosen = newer or settings
    return ForwardBackward(texts[1], numbers[2], texts[4], data, chosen, bool(numbers[6]))


def _datum(body: memoryview, where: str) -> WireDatum:
    tokens: list[int] = []
    inputs: dict[str, np.ndarray] = {}
    for number, value in _fields(body):
        if number == 1:
            tokens += _chunk(_bytes(value), where)
        elif number == 2:
            name, entry = _entry(value)
            inputs[name] = _tensor(_bytes(entry), f"{where}.loss_fn_inputs[{name!r}]")
    return WireDatum(tokens, inputs)


def _chunk(body: memoryview, where: str) -> list[int]:
    tokens: list[int] = []
    for number, value in _fields(body):
        if number != 1:
            raise WireError(f"{where}: images and sound are not supported, only encoded_text")
        for inner, raw in _fields(_bytes(value)):
            if inner == 1:
                tokens += _array(_bytes(raw), DTYPES[3], where).tolist()
    return tokens


def _tensor(body: memoryview, where: str) -> np.ndarray:
    dense: memoryview | None = None
    dtype = FLOAT32
    shape: list[int] = []
    for number, value in _fields(body):
        if number == 1:
            dense = _bytes(value)
        elif number == 2:
            raise WireError(f"{where}: sparse tensors are not supported")
        elif number == 3:
            dtype = _whole(value)
        elif number == 4:
            shape += _wholes(value)
    if dtype not in DTYPES:
        raise WireError(f"{where}: dtype {dtype} is not one of {sorted(DTYPES)}")
    values = _array(dense if dense is not None else memoryview(b""), DTYPES[dtype], where)
    sizes = [size - 2**64 if size >= 2**63 else size for size in shape]
    if not shape:
        return values
    if min(sizes) < 0 or int(np.prod(sizes, dtype=object)) != values.size:
        raise WireError(f"{where}: {values.size} values for the shape {sizes}")
    return values.reshape(sizes)


def _setting(body: memoryview) -> float | str:
    for number, value in _fields(body):
        return _double(value) if number == 1 else _text(value)
    return 0.0


def _entry(value: int | memoryview) -> tuple[str, int | memoryview]:
    """The key and the value of an entry of a map."""
    name = ""
    entry: int | memoryview = memoryview(b"")
    for number, found in _fields(_bytes(value)):
        if number == 1:
            name = _text(found)
        elif number == 2:
            entry = found
    return name, entry


def _fields(body: bytes | memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Numbers and values of all fields: whole numbers for varints, bytes for the rest."""
    view = memoryview(body)
    at = 0
    while at < len(view):
        key, at = _varint(view, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(view, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(view, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise WireError(f"a field of type {kind}: the body is no protobuf message")
        if at + size > len(view):
            raise WireError("the body ends inside a field")
        yield key >> 3, view[at : at + size]
        at += size


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for i in range(VARINT_BYTES):
        if at + i >= len(view):
            raise WireError("the body ends inside a number")
        value |= (view[at + i] & 127) << (7 * i)
        if view[at + i] < 128:
            return value & (2**64 - 1), at + i + 1
    raise WireError("a number of more than 64 bits")


def _bytes(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise WireError("a number where bytes belong")
    return value


def _whole(value: int | memoryview) -> int:
    if not isinstance(value, int):
        raise WireError("bytes where a number belongs")
    return value


def _wholes(value: int | memoryview) -> list[int]:
    """A repeated whole number: one, or all of them packed."""
    if isinstance(value, int):
        return [value]
    found = []
    at = 0
    while at < len(value):
        number, at = _varint(value, at)
        found.append(number)
    return found


def _double(value: int | memoryview) -> float:
    raw = bytes(_bytes(value))
    # protobuf leaves out what is zero
    if len(raw) not in (0, 8):
        raise WireError("a number of the wrong size")
    return struct.unpack("<d", raw)[0] if raw else 0.0


def _text(value: int | memoryview) -> str:
    try:
        return bytes(_bytes(value)).decode()
    except UnicodeDecodeError as error:
        raise WireError(f"a text that is no UTF-8: {error}") from error


def _array(raw: memoryview, dtype: np.dtype, where: str) -> np.ndarray:
    if len(raw) % dtype.itemsize:
        raise WireError(f"{where}: {len(raw)} bytes are no whole number of {dtype} values")
    return np.frombuffer(raw, dtype)


# ---- writing


def write_forward_backward(logprobs: list[np.ndarray], metrics: dict[str, float]) -> bytes:
    """The result of forward_backward: log-probabilities of the targets of each datum."""
    ends = np.cumsum([0, *(4 * len(row) for row in logprobs)]).astype("<i8")
    values = np.concatenate([np.zeros(0), *logprobs]).astype("<f4")
    tensor = _field(1, values.tobytes()) + _field(2, ends.tobytes()) + _number(3, FLOAT32)
    entry = _field(1, b"logprobs") + _field(2, tensor)
    record = _field(1, b"ArrayRecord") + _field(2, entry) + _number(3, len(logprobs))
    body = _field(1, b"ArrayRecord") + _field(2, record)
    for name, value in metrics.items():
        body += _field(3, _field(1, name.encode()) + b"\x11" + struct.pack("<d", value))
    return body


def write_samples(
    sequences: list[tuple[list[int], list[float], str]],
    prompt_logprobs: list[float | None] | None = None,
) -> bytes:
    """The result of a sample request: (tokens, log-probabilities, stop reason) of each sequence."""
    body = b""
    for tokens, logprobs, reason in sequences:
        sequence = _number(1, STOP_REASONS[reason])
        sequence += _field(2, np.asarray(tokens, "<i4").tobytes())
        sequence += _field(3, np.asarray(logprobs, "<f4").tobytes())
        body += _field(1, sequence)
    if prompt_logprobs is not None:
        values = [np.nan if value is None else value for value in prompt_logprobs]
        body += _field(2, np.asarray(values, "<f4").tobytes())
    return body


def _field(number: int, raw: bytes) -> bytes:
    return _encoded(number * 8 + 2) + _encoded(len(raw)) + raw


def _number(number: int, value: int) -> bytes:
    return _encoded(number * 8) + _encoded(value)


def _encoded(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
