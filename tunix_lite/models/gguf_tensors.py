"""Tensors of GGUF files under their Hugging Face names, and in that layout. llama.cpp stores a norm
of Gemma as weight + 1, and in the Llama family the rows of q and k in another order
(convert_hf_to_gguf.py)."""

from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from tunix_lite.basics.plain_text import escaped
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.family import TOP_NAMES, Family
from tunix_lite.models.gguf_file import GgufTensor, import_gguf, open_gguf
from tunix_lite.models.gguf_metadata import ROPE_DIVISORS, small_object

# Our name of a weight -> the name of its tensor.
TOP = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
}
# The same within blk.<i>.
OF_LAYER = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "attn_post_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "mlp_post_norm": "post_ffw_norm.weight",
}
# Types whose numbers are not in blocks.
PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
# At most, bytes of float32 that are dequantised at once.
_AT_ONCE = 2**24


def gguf_names(family: Family, num_layers: int) -> dict[str, str]:
    """The name of each tensor in a GGUF file, by its Hugging Face name."""
    names = {TOP_NAMES[own]: name for own, name in TOP.items()}
    for own, hf_name in family.names.items():
        for i in range(num_layers):
            if own in OF_LAYER:
                names[f"model.layers.{i}.{hf_name}"] = f"blk.{i}.{OF_LAYER[own]}"
    return names


def has_turned_rows(family: Family, gguf_name: str) -> bool:
    """True for tensors whose rows llama.cpp puts into another order."""
    return family.model_type == "llama" and gguf_name.endswith(
        (".attn_q.weight", ".attn_k.weight")
    )


def has_plus_one(family: Family, gguf_name: str) -> bool:
    """True for tensors that llama.cpp stores with 1 added."""
    has = family.flags.get("norm_plus_one", Architecture.norm_plus_one)
    return has and gguf_name.endswith("norm.weight")


def rows_of_halves(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of whole heads, [rows, D], of which neighbours turn together, with one of each pair
    first."""
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def rows_of_pairs(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """The inverse of `rows_of_halves`."""
    halves = rows.reshape(-1, 2, head_dim // 2, rows.shape[-1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


class GgufTensors:
    """The tensors of a GGUF file by Hugging Face name, read as hf.Tensors reads those of a
    folder."""

    def __init__(self, path: Path, family: Family):
        self.folder = path
        self._file = open_gguf(path)
        self._gguf = import_gguf(path)
        self._family = family
        config = small_object(path, "config.json")
        self._head_dim = config["head_dim"]
        known = gguf_names(family, config["num_hidden_layers"])
        self._names = known
        there = {name: hf_name for hf_name, name in known.items()}
        # The divisors of rotary frequencies are part of config.json.
        self._entries = {
            there.get(name, name): tensor
            for name, tensor in self._file.tensors.items()
            if name != ROPE_DIVISORS
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def label(self, name: str) -> str:
        """The name of a tensor in the file."""
        return self._names.get(name, name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, [outputs, inputs] as in Hugging Face layout."""
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """Type of a tensor as it is read: BF16, F16 or F32; its own one if it cannot be read."""
        tensor = self._entries[name]
        if tensor.type in PLAIN:
            return tensor.type
        try:
            # tried on one block: the package has names of more types than it can read
            self._dequantised(np.zeros((1, tensor.block_bytes), np.uint8), tensor)
        except NotImplementedError:
            return tensor.type
        return "F32"

    def num_bytes(self, name: str) -> int:
        """Bytes of a tensor in the file."""
        return self._entries[name].num_bytes

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Part of a tensor, in float32; in its own type if that is F16 or BF16."""
        tensor = self._entries[name]
        *rows, columns = (slice(*s.indices(n)[:2]) for s, n in zip(index, tensor.shape))
        rows = rows[0] if rows else slice(0, 1)
        # Whole blocks that hold these columns.
        first = columns.start // tensor.block
        last = -(-columns.stop // tensor.block)
        of_blocks = slice(first * tensor.block_bytes, last * tensor.block_bytes)
        of_values = slice(
            columns.start - first * tensor.block, columns.stop - first * tensor.block
        )
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        out = np.empty(shape, PLAIN.get(tensor.type, np.float32))
        step = max(1, _AT_ONCE // (4 * tensor.shape[-1]))
        for at in range(rows.start, rows.stop, step):
            some = slice(at, min(at + step, rows.stop))
            content = self._file.content(tensor, some)[:, of_blocks]
            values = self._dequantised(content, tensor)[:, of_values]
            if not np.isfinite(values).all():
                raise ValueError(
                    f"{self.folder}: the tensor {escaped(tensor.name)} has numbers that are not "
                    "finite"
                )
            out[at - rows.start : some.stop - rows.start] = values
        if has_turned_rows(self._family, tensor.name):
            out = rows_of_halves(out, self._head_dim)
        if has_plus_one(self._family, tensor.name):
            out = out.astype(np.float32) - np.float32(1)
        return out.reshape(shape[-len(tensor.shape) :])

    def _dequantised(self, content: np.ndarray, tensor: GgufTensor) -> np.ndarray:
        """The numbers in these bytes of whole blocks, [rows, bytes]."""
        if tensor.type in PLAIN:
            return np.ascontiguousarray(content).view(PLAIN[tensor.type])
        # A damaged scale is beyond float16, which `read` refuses.
        with np.errstate(all="ignore"):
            return self._gguf.dequantize(content, self._gguf.GGMLQuantizationType[tensor.type])
