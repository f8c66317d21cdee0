"""The few protobuf messages of the Tinker protocol, read and written without the SDK
(tinker_public.proto, 0.38.0)."""

import numpy as np
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from tunix_lite.serving.bad_call import BadCall
from tunix_lite.training_clients.data import VALUES, Datum
from tunix_lite.training_clients.sampling import Sample

# The fields of each message, numbered from 1. * repeats. A map is a list of entries.
_MESSAGES = {
    "EncodedText": "tokens:bytes",
    "Chunk": "text:EncodedText",
    "Tensor": "dense:bytes sparse:bytes dtype:int64 shape:*int64",
    "Input": "name:string tensor:Tensor",
    "Datum": "chunks:*Chunk inputs:*Input",
    "Number": "name:string value:double",
    "Value": "number:double text:string",
    "Setting": "name:string value:Value",
    "Request": (
        "model_id:string seq_id:int64 data:*Datum loss:string numbers:*Number forward_only:bool "
        "settings:*Setting"
    ),
    "Column": "values:bytes ends:bytes dtype:int64",
    "NamedColumn": "name:string column:Column",
    "Rows": "kind:string columns:*NamedColumn count:int64",
    "Gradient": "kind:string rows:Rows metrics:*Number",
    "Sequence": "reason:int64 tokens:bytes logprobs:bytes",
    "Samples": "sequences:*Sequence prompt_logprobs:bytes",
}
# DType of the protocol -> numpy's, little-endian as on the wire.
_DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
_FLOAT32 = 1


def _classes() -> dict[str, type[Message]]:
    file = FileDescriptorProto(name="tinker.proto", package="tinker", syntax="proto3")
    for message, text in _MESSAGES.items():
        added = file.message_type.add(name=message)
        for number, word in enumerate(text.split(), start=1):
            # the numbers of fields are their places in the text
            name, kind = word.split(":")
            # 3 is LABEL_REPEATED, and 1 LABEL_OPTIONAL.
            field = added.field.add(name=name, number=number, label=3 if kind[0] == "*" else 1)
            kind = kind.removeprefix("*")
            if kind in _MESSAGES:
                field.type_name = f".tinker.{kind}"
            else:
                field.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
    pool = DescriptorPool()
    pool.Add(file)
    types = {name: pool.FindMessageTypeByName(f"tinker.{name}") for name in _MESSAGES}
    return {name: GetMessageClass(descriptor) for name, descriptor in types.items()}


CLASSES = _classes()


def wire_message(name: str, body: bytes) -> Message:
    """The message of this name. Raises BadCall if the bytes are none."""
    try:
        return CLASSES[name].FromString(body)
    except DecodeError as error:
        raise BadCall(f"the body is no protobuf message of the protocol: {error}") from error


def loss_settings(request: Message) -> dict[str, float | str]:
    """The settings of the loss. The SDK writes numbers into both maps; the newer one has texts."""
    newer = {one.name: one.value.text or one.value.number for one in request.settings}
    return newer or {one.name: one.value for one in request.numbers}


def data_of(request: Message) -> list[Datum]:
    """The data of a forward_backward request. Raises BadCall for what this server cannot train."""
    data = []
    for i, message in enumerate(request.data):
        where = f"data[{i}]"
        tokens = []
        for chunk in message.chunks:
            if not chunk.HasField("text"):
                raise BadCall(
                    f"{where}: images and sound are not supported, only encoded_text"
                )
            tokens += _array(chunk.text.tokens, 3, where).tolist()
        inputs = {}
        for one in message.inputs:
            here = f"{where}.loss_fn_inputs[{one.name!r}]"
            name = one.name.replace("target_tokens", "targets")
            if one.tensor.sparse:
                raise BadCall(f"{here}: sparse tensors are not supported")
            if name not in ("targets", *VALUES):
                raise BadCall(
                    f"{here} is not supported; target_tokens, {', '.join(VALUES)} are"
                )
            inputs[name] = _array(one.tensor.dense, one.tensor.dtype or _FLOAT32, here)
            if list(one.tensor.shape) not in ([], [inputs[name].size]):
                raise BadCall(
                    f"{here} has the shape {list(one.tensor.shape)}; 1 dim is supported"
                )
        if "targets" not in inputs:
            raise BadCall(f"{where}.loss_fn_inputs['target_tokens'] is missing")
        data.append(Datum(tokens, **inputs))
    return data


def _array(raw: bytes, dtype: int, where: str) -> np.ndarray:
    if dtype not in _DTYPES:
        raise BadCall(f"{where}: dtype {dtype} is not one of {sorted(_DTYPES)}")
    if len(raw) % _DTYPES[dtype].itemsize:
        raise BadCall(
            f"{where}: {len(raw)} bytes are no whole number of {_DTYPES[dtype]} values"
        )
    return np.frombuffer(raw, _DTYPES[dtype])


def write_forward_backward(logprobs: list[list[float]], metrics: dict[str, float]) -> bytes:
    """The result of forward_backward: log-probabilities of the targets of each datum."""
    result = CLASSES["Gradient"](kind="ArrayRecord")
    result.rows.kind = "ArrayRecord"
    result.rows.count = len(logprobs)
    column = result.rows.columns.add(name="logprobs").column
    column.dtype = _FLOAT32
    # numpy joins at least one array.
    column.values = np.concatenate([np.zeros(0), *logprobs]).astype("<f4").tobytes()
    # one array of all rows, and the bytes where each of them ends
    ends = np.cumsum([0, *(4 * len(row) for row in logprobs)])
    column.ends = ends.astype("<i8").tobytes()
    for name, value in metrics.items():
        result.metrics.add(name=name, value=value)
    return result.SerializeToString()


def write_samples(samples: list[Sample], prompt_logprobs: list[float | None] | None) -> bytes:
    """The result of a sample request."""
    result = CLASSES["Samples"]()
    for one in samples:
        tokens = np.asarray(one.tokens, "<i4").tobytes()
        logprobs = np.asarray(one.logprobs, "<f4").tobytes()
        # 0: by an end token or a stop text.
        reason = int(one.stop_reason == "length")
        result.sequences.add(reason=reason, tokens=tokens, logprobs=logprobs)
    if prompt_logprobs is not None:
        values = [np.nan if value is None else value for value in prompt_logprobs]
        result.prompt_logprobs = np.asarray(values, "<f4").tobytes()
    return result.SerializeToString()
