"""Models on disk in Hugging Face layout: `config.json` and `model.safetensors`, in and out.

Each process reads only the slices that its devices hold. What a config asks for and this decoder does not do is
refused; nothing is dropped in silence.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tunix_lite.models import decoder
from tunix_lite.models.decoder import ModelConfig
from tunix_lite.models.weights import Weight, is_weight, shardings
from tunix_lite.types import Params

TOP_NAMES = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
KINDS = {"sliding_attention": "local", "full_attention": "global"}


# ---- config.json


def read_config(folder: str | Path) -> ModelConfig:
    """The architecture of the model in `folder`. Raises ValueError naming what is missing or not supported."""
    file = Path(folder) / "config.json"
    if not file.parent.is_dir():
        raise ValueError(f"{folder} is not a folder")
    if not file.is_file():
        raise ValueError(f"{folder} has no config.json; a model folder in Hugging Face layout has one")
    try:
        hf = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON ({error})") from error
    if hf.get("model_type") != "gemma3_text":
        raise ValueError(f"{file}: model_type is {hf.get('model_type')!r}; supported is 'gemma3_text'")
    for key, wanted in {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
        "tie_word_embeddings": True,
    }.items():
        if hf.get(key, wanted) not in (wanted, wanted or None):
            raise ValueError(f"{file}: {key}={hf[key]!r} is not supported; supported is {wanted!r}")
    try:
        return _config_from(hf)
    except KeyError as error:
        raise ValueError(f"{file}: {error} is missing") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _config_from(hf: dict) -> ModelConfig:
    local, whole = _rope(hf)
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        num_layers=hf["num_hidden_layers"],
        embed_dim=hf["hidden_size"],
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf["num_key_value_heads"],
        head_dim=hf["head_dim"],
        mlp_dim=hf["intermediate_size"],
        pattern=_pattern(hf),
        window=hf["sliding_window"],
        query_scale=hf["query_pre_attn_scalar"],
        rope_theta_local=local["rope_theta"],
        rope_theta_global=whole["rope_theta"],
        rope_factor_global=whole.get("factor", 1.0),
        norm_eps=hf["rms_norm_eps"],
    )


def _rope(hf: dict) -> tuple[dict, dict]:
    """The rope settings of local and of global layers, from the newer spelling or the older one."""
    if parameters := hf.get("rope_parameters"):
        local, whole = parameters["sliding_attention"], parameters["full_attention"]
    else:
        local = {"rope_theta": hf["rope_local_base_freq"]}
        whole = {"rope_theta": hf["rope_theta"], **(hf.get("rope_scaling") or {})}
    for rope, supported in ((local, ("default",)), (whole, ("default", "linear"))):
        if (kind := rope.get("rope_type", "default")) not in supported:
            raise ValueError(f"rope_type {kind!r} is not supported; supported is {' or '.join(supported)}")
    return local, whole


def _pattern(hf: dict) -> tuple[str, ...]:
    """The shortest pattern that repeats to the list of layers."""
    count = hf["num_hidden_layers"]
    if types := hf.get("layer_types"):
        if len(types) != count or set(types) - set(KINDS):
            raise ValueError(f"layer_types must hold {count} entries, each {' or '.join(KINDS)}")
        kinds = [KINDS[t] for t in types]
    else:
        every = hf.get("sliding_window_pattern", 6)
        kinds = ["local" if (i + 1) % every else "global" for i in range(count)]
    period = next(p for p in range(1, count + 1) if all(kinds[i] == kinds[i % p] for i in range(count)))
    return tuple(kinds[:period])


def config_json(cfg: ModelConfig, **more) -> dict:
    """What `read_config` reads back; transformers reads it as a Gemma3ForCausalLM. `more` is added, token ids say."""
    names = {kind: name for name, kind in KINDS.items()}
    whole = {"rope_type": "default", "rope_theta": cfg.rope_theta_global}
    if cfg.rope_factor_global != 1.0:
        whole |= {"rope_type": "linear", "factor": cfg.rope_factor_global}
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": cfg.vocab_size,
        "num_hidden_layers": cfg.num_layers,
        "hidden_size": cfg.embed_dim,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.mlp_dim,
        "layer_types": [names[kind] for kind in cfg.kinds],
        "sliding_window": cfg.window,
        "query_pre_attn_scalar": cfg.query_scale,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": cfg.rope_theta_local},
            "full_attention": whole,
        },
        "rms_norm_eps": cfg.norm_eps,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        **more,
    }


# ---- model.safetensors


class Tensors:
    """The tensors of a folder, by name, over one file or several; nothing is read until it is sliced."""

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.is_file():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        elif single.is_file():
            files = [single.name]
        else:
            raise ValueError(f"{folder} has no weights: neither model.safetensors nor model.safetensors.index.json")
        self.folder, self._file_of = folder, {}
        for file in files:
            if not (folder / file).is_file():
                raise ValueError(f"{folder}: the index names {file}, which is not there")
            try:
                handle = safe_open(str(folder / file), framework="np")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{folder / file} is damaged or cut short ({error})") from error
            self._file_of.update({name: handle for name in handle.keys()})  # noqa: SIM118 (not a dict)

    def __iter__(self):
        return iter(self._file_of)

    def __getitem__(self, name: str):
        return self._file_of[name].get_slice(name)


def check_weights(folder: str | Path, cfg: ModelConfig) -> None:
    """Raises ValueError listing every tensor of `folder` that is missing, unexpected or of the wrong shape."""
    tensors = Tensors(folder)
    names = set(tensors)
    wanted = {name: _hf_shape(weight) for name, weight in _hf_weights(cfg).items()}
    problems = [f"missing: {name} {list(shape)}" for name, shape in wanted.items() if name not in names]
    problems += [f"unexpected: {name}" for name in sorted(names - wanted.keys() - {"lm_head.weight"})]  # tied copy
    for name in names & wanted.keys():
        if (found := tuple(tensors[name].get_shape())) != wanted[name]:
            problems.append(f"shape: {name} is {list(found)}, and should be {list(wanted[name])}")
    if problems:
        shown = "\n  ".join(problems[:20] + ([f"... and {len(problems) - 20} more"] if len(problems) > 20 else []))
        raise ValueError(f"the weights in {folder} do not fit its config.json:\n  {shown}")


def load_params(folder: str | Path, cfg: ModelConfig, dtype=jnp.float32) -> Params:
    """The weights in `folder`, placed on the current mesh. Raises ValueError as `check_weights` does."""
    check_weights(folder, cfg)
    tensors = Tensors(folder)
    table = traverse_util.flatten_dict(decoder.weights(cfg), sep="/", is_leaf=lambda _, v: is_weight(v))
    placed = traverse_util.flatten_dict(shardings(decoder.weights(cfg)), sep="/")

    def load(path: str, weight: Weight):
        names = hf_names(path, cfg)

        def read(index):  # the part of the array that one device holds
            if weight.axes[0] != "layers":
                return _read_slice(tensors[names[0]], weight, index).astype(dtype)
            one = Weight(weight.shape[1:], weight.axes[1:], inputs=weight.inputs)
            parts = [_read_slice(tensors[name], one, index[1:]) for name in names[index[0]]]
            return np.stack(parts).astype(dtype)

        return jax.make_array_from_callback(weight.shape, placed[path], read)

    return traverse_util.unflatten_dict({path: load(path, w) for path, w in table.items()}, sep="/")


def save_params(params: Params, cfg: ModelConfig, folder: str | Path, dtype=jnp.bfloat16) -> None:
    """Writes `model.safetensors` with the names and layouts that `load_params` and transformers read."""
    flat = traverse_util.flatten_dict(params, sep="/")
    table = traverse_util.flatten_dict(decoder.weights(cfg), sep="/", is_leaf=lambda _, v: is_weight(v))
    tensors = {}
    for path, weight in table.items():
        value, names = np.asarray(flat[path]).astype(dtype), hf_names(path, cfg)
        stacked = weight.axes[0] == "layers"
        one = Weight(weight.shape[1:], weight.axes[1:], inputs=weight.inputs) if stacked else weight
        for name, part in zip(names, value if stacked else [value]):
            tensors[name] = np.ascontiguousarray(_to_hf(part, one))
    save_file(tensors, str(Path(folder) / "model.safetensors"), metadata={"format": "pt"})


def hf_names(path: str, cfg: ModelConfig) -> list[str]:
    """The tensors that a weight of ours holds: one, or one per repeat of the layer pattern."""
    if path in TOP_NAMES:
        return [TOP_NAMES[path]]
    part, place, name = path.split("/")
    layers = [i for i, (where, _) in enumerate(decoder.layer_places(cfg)) if where == f"{part}/{place}"]
    return [f"model.layers.{i}.{LAYER_NAMES[name]}" for i in layers]


def _hf_weights(cfg: ModelConfig) -> dict[str, Weight]:
    table, layer = decoder.weights(cfg), decoder.layer_weights(cfg)
    top = {name: table[ours] for ours, name in TOP_NAMES.items()}
    layers = {
        f"model.layers.{i}.{name}": layer[ours] for i in range(cfg.num_layers) for ours, name in LAYER_NAMES.items()
    }
    return top | layers


def _is_linear(weight: Weight) -> bool:
    """Projections are stored transposed and flat, [outputs, inputs]; vectors and the embedding as they are."""
    return len(weight.shape) > 1 and weight.axes[0] != "vocab"


def _hf_shape(weight: Weight) -> tuple[int, ...]:
    if not _is_linear(weight):
        return weight.shape
    return int(np.prod(weight.shape[weight.inputs :])), int(np.prod(weight.shape[: weight.inputs]))


def _to_hf(value, weight: Weight):
    return value.reshape(_hf_shape(weight)[::-1]).T if _is_linear(weight) else value


def _read_slice(tensor, weight: Weight, index: tuple[slice, ...]) -> np.ndarray:
    """weight[index] read from its stored layout, and no more than that. Only leading dims of a group are divided."""
    if not _is_linear(weight):
        return tensor[index]
    bounds = [s.indices(size)[:2] for s, size in zip(index, weight.shape)]
    shape = [stop - start for start, stop in bounds]

    def flat(first: int, last: int) -> slice:  # dims first..last-1 as one; all but the first of them are whole
        inner = int(np.prod(weight.shape[first + 1 : last]))
        return slice(bounds[first][0] * inner, bounds[first][1] * inner)

    rows, columns = flat(weight.inputs, len(weight.shape)), flat(0, weight.inputs)
    return tensor[rows, columns].T.reshape(shape)
