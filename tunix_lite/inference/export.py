"""Exports a model: a folder in Hugging Face layout, a PEFT adapter, or GGUF files for llama.cpp and
Ollama. The export is read back, and its logits are compared, before the folder gets its name."""

import json
import platform
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from tunix_lite import __version__
from tunix_lite.basics.errors import ConfigError, error_context
from tunix_lite.basics.types import Params
from tunix_lite.basics.untrusted import read_object
from tunix_lite.inference.language_model import LanguageModel
from tunix_lite.models import attention, decoder, families, gguf_out, hf, peft, tokenizer
from tunix_lite.models.families import config_json
from tunix_lite.models.gguf_file import is_gguf
from tunix_lite.models.gguf_metadata import MODEL_TYPES, small_object
from tunix_lite.models.lora import LoraConfig, attach
from tunix_lite.models.scalar_head import scalar_scores
from tunix_lite.models.source import download
from tunix_lite.models.weights import Lora, flatten, without_adapters
from tunix_lite.tracking.progress import BytesProgress, StandardError

KINDS = ("full", "merged", "adapter", "gguf", "gguf_adapter")
# those that write adapters without their base
_ADAPTERS = ("adapter", "gguf_adapter")
_DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
# The file that marks a folder as written by `export`: overwrite=true replaces no other folder.
_PROVENANCE = "tunix_lite.json"
# How far logits may move, relative to their size, when float32 weights are rounded to this dtype.
_TOLERANCE = {"F32": 1e-3, "F16": 0.02, "BF16": 0.05, "Q8_0": 0.05}
# The files of kind=gguf and kind=gguf_adapter, and the type that null is.
_GGUF = "weights.gguf"
_GGUF_ADAPTER = "adapter.gguf"
_GGUF_TYPE = "bf16"
# Texts that a tokenizer has to cut the same after reading back.
_PROBE = "Hello, I'LL pay  1234.5 for\n\n\n\tit's (naïve) 你好, ok?\r\n   end "


@dataclass(frozen=True)
class _Exported:
    """What `export` has written.
    Example: `export(model, "out").serve` is "vllm serve out"."""

    folder: Path
    kind: str  # one of KINDS
    difference: float  # of the logits after reading back, relative to their size
    serve: str  # the command that serves it, or learns from it as a reward


def check_export(
    model_has_adapters: bool,
    out: Path,
    kind: str,
    dtype: str | None,
    overwrite: bool,
    gguf_type: str | None = None,
) -> str:
    """Checks what `export` would do, before anything is loaded or written. Returns the kind, one of
    KINDS. Raises ConfigError."""
    # kind and dtype against the model
    if kind == "auto":
        kind = "adapter" if model_has_adapters else "full"
    if kind not in KINDS:
        raise ConfigError(f"kind={kind!r}; it is auto, {', '.join(KINDS)}")
    if kind != "gguf" and (kind == "full") == model_has_adapters:
        formats = (
            ("merged, adapter", "gguf_adapter") if model_has_adapters else ("full", "gguf")
        )
        in_gguf = ", ".join(MODEL_TYPES)
        right = f"{formats[0]}, or {formats[1]} for the families {in_gguf}"
        raise ConfigError(
            f"kind={kind}: the model {'has' if model_has_adapters else 'has no'} adapters; give "
            f"{right}"
        )
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(
            f"dtype={dtype!r}; it is one of {', '.join(_DTYPES)}, or null for that of the original"
        )
    for name, value in (("dtype", dtype), ("type", gguf_type)):
        if value is not None and kind in _ADAPTERS:
            raise ConfigError(
                f"{name}={value}: adapters are written in float32, as they train; leave it out"
            )

    if kind == "gguf" and dtype is not None:
        raise ConfigError(f"dtype={dtype}: tensors of kind=gguf have a type; give type=...")
    if kind == "gguf" and gguf_type not in (None, *gguf_out.TYPES):
        raise ConfigError(f"type={gguf_type!r}; it is {', '.join(gguf_out.TYPES)}, or null")
    if kind != "gguf" and gguf_type is not None:
        raise ConfigError(
            f"type={gguf_type}: type is of kind=gguf; dtype=... is of kind={kind}"
        )

    # the folder, which must be new, empty or our own
    there = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    if not there.is_dir():
        raise ConfigError(f"out={out}: {there} is a file; give a folder")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise ConfigError(
                f"out={out} exists and is not empty; give another folder, or overwrite=true to "
                "replace it"
            )
        if not (out / _PROVENANCE).is_file():
            raise ConfigError(
                f"out={out} was not written by export (it has no {_PROVENANCE}), so it is not "
                "replaced"
            )
    if jax.process_count() > 1:
        raise ConfigError(
            "export runs in one process; start it on one host that can read the run's folder"
        )
    return kind


def export(
    model: LanguageModel,
    out: str | Path,
    kind: str = "auto",
    dtype: str | None = None,
    overwrite: bool = False,
    gguf_type: str | None = None,
) -> _Exported:
    """Writes the model to the folder `out`, reads it back and compares it. Raises ConfigError,
    writes nothing. kind: full, merged, adapter (PEFT), gguf, gguf_adapter, or auto: adapter if
    there are adapters, else full. dtype: bf16, fp16 or fp32; None: as the original has it.
    gguf_type: f32, f16, bf16 or q8_0.
    Example: `export(load("outputs/latest"), "outputs/model").serve` is the command to serve it."""
    # What can be wrong is found before anything is written.
    out = Path(out).expanduser().resolve()
    source = model.source
    kind = check_export(source.lora is not None, out, kind, dtype, overwrite, gguf_type)
    # With overwrite=true, the folder is deleted before the new one gets its name.
    for what, folder in (
        ("the base", source.folder),
        ("the adapter", source.lora and source.lora.adapter),
    ):
        if folder is not None and out == Path(folder).resolve():
            raise ConfigError(
                f"out={out} is the folder of {what} that the model is made from; give another"
            )
    if kind in _ADAPTERS and source.folder is None:
        raise ConfigError(
            f"kind={kind}: the base has random weights that nobody else has; give kind=merged"
        )
    if source.family is None:
        raise ConfigError(
            f"model.family: name the family of its tensors: {', '.join(families.FAMILIES)}"
        )
    if source.cfg.output != "logits" and kind not in ("full", "merged"):
        raise ConfigError(
            f"kind={kind} has no place for the head of a reward model; give kind="
            f"{'full' if source.lora is None else 'merged'}"
        )
    if source.lora is None and model.params["embed"].dtype == jnp.bfloat16:
        written = {(gguf_type or _GGUF_TYPE).upper()}
        if kind == "full":
            written = {_DTYPES[dtype]} if dtype else set(_stored(model, None).values())
        if written != {"BF16"}:
            raise ConfigError(
                "the model was loaded rounded to bfloat16; load it with dtype fp32 to export it"
            )
    with error_context("model.family"):
        families.check_flags(source.cfg, source.family)

    # Everything is written into a temporary folder beside it, which then gets its name.
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside it, as a folder can be renamed only within one file system.
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    # mkdtemp makes a folder that only its owner can read.
    partial.chmod(0o755)
    try:
        with jax.set_mesh(model.mesh), error_context(f"kind={kind}"):
            if kind in _ADAPTERS:
                difference = _write_adapter(model, partial, kind)
            elif kind == "gguf":
                difference = _write_gguf(model, partial / _GGUF, gguf_type or _GGUF_TYPE)
            else:
                difference = _write_model(model, partial, dtype)
        served = _describe(model, partial, out, kind, difference)
        # A folder takes the name of another one only if that is empty.
        if out.is_dir():
            shutil.rmtree(out)
        partial.replace(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return _Exported(out, kind, difference, served)


def _write_model(model: LanguageModel, folder: Path, dtype: str | None) -> float:
    """Writes config.json, weights and tokenizer. Returns the difference after reading back."""
    cfg = model.cfg
    family = model.source.family
    stored = _stored(model, dtype)
    with BytesProgress(StandardError(), "writing", "the model") as on_bytes:
        hf.save_params(model.params, cfg, family, folder, stored, on_bytes)

    # The coarsest dtype of all tensors stands in config.json, and sets the tolerance.
    dtypes = [stored[name] for name in hf.hf_shapes(cfg, family)]
    coarsest = max(dtypes, key=lambda name: _TOLERANCE[name])
    named = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[coarsest]
    source = model.source
    # readers end a completion at any of them
    ids = {
        "eos_token_id": list(source.tokenizer.eos_ids),
        "pad_token_id": source.tokenizer.pad_id,
    }
    original = {} if source.folder is None else small_object(source.folder, "config.json")
    if "architectures" in original and original.get("model_type") == family.model_type:
        # what was stored quantised is written plain
        original.pop("quantization_config", None)
        config = original | {"torch_dtype" if "torch_dtype" in original else "dtype": named}
    else:
        # Random weights, or the text part of a model with images or the like.
        # what the model's own file says counts more than what its tokenizer says
        ids = {key: original.get(key, value) for key, value in ids.items()}
        if "bos_token_id" in original:
            ids["bos_token_id"] = original["bos_token_id"]
        config = config_json(cfg, family, dtype=named, **ids)
    if cfg.output != "logits":
        # transformers reads the number at the last token that is not this one
        config |= {"pad_token_id": source.tokenizer.pad_id}
        config |= families.keys_of_output(cfg, family)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _copy_tokenizer(model, folder)
    return _compare_files(model, folder, _TOLERANCE[coarsest])


def _stored(model: LanguageModel, dtype: str | None) -> dict[str, str]:
    """The dtype of each tensor in the files, by its Hugging Face name: BF16, F16 or F32."""
    source = model.source
    if dtype is None and source.folder is not None:
        # a reward model may have begun with a folder that has no such head
        new = dict.fromkeys(hf.SCORES, "F32")
        return new | hf.stored_dtypes(download(source).folder, source.family)
    return dict.fromkeys(hf.hf_shapes(source.cfg, source.family), _DTYPES[dtype or "bf16"])


def _write_gguf(model: LanguageModel, file: Path, kind: str) -> float:
    """Writes all weights and the tokenizer as one file. Returns the difference after reading
    back."""
    source = model.source
    with BytesProgress(StandardError(), "writing", "the model") as on_bytes:
        gguf_out.save_gguf(
            model.params,
            model.cfg,
            source.family,
            source.tokenizer,
            file,
            kind,
            Path(_base_name(model)).name,
            on_bytes,
        )
    return _compare_files(
        model, file, _TOLERANCE[{"f32": "F32", "f16": "F16"}.get(kind, "BF16")]
    )


def _compare_files(
    model: LanguageModel,
    where: Path,
    tolerance: float,
) -> float:
    """`_compare` with the model in a folder or a GGUF file. Raises ValueError if it has another
    architecture or cuts texts in another way."""
    source = model.source
    with error_context("what was written"):
        again, family = families.read_config(where, source.family)
        read = tokenizer.Tokenizer.load(where)
    lost = families.architecture_differences(
        families.as_computed(model.cfg), families.as_computed(again)
    )
    if lost:
        raise ValueError(
            f"what was written is of another architecture: {'; '.join(lost)} (there)"
        )
    # of all tokens, also those for which the model has no embedding
    backends = (read.backend, source.tokenizer.backend)
    one, other = (x.encode(_PROBE, add_special_tokens=False).ids for x in backends)
    if one != other:
        raise ValueError(
            f"what was written has no tokenizer that cuts texts as {source.tokenizer.folder} does"
        )
    with BytesProgress(StandardError(), "reading back", "the model") as on_bytes:
        params = hf.load_params(where, model.cfg, family, on_bytes=on_bytes)
    return _compare(model, params, tolerance)


def _write_adapter(model: LanguageModel, folder: Path, kind: str) -> float:
    """Writes a PEFT adapter, or one for llama.cpp. Returns the difference after reading back."""
    cfg = model.cfg
    source = model.source
    family = source.family
    leaves = {p: x for p, x in flatten(model.params).items() if isinstance(x, Lora)}
    sides = {path: {"a": leaf.a, "b": leaf.b} for path, leaf in leaves.items()}
    adapters = traverse_util.unflatten_dict(sides, sep="/")
    base = _base_name(model)
    if kind == "gguf_adapter":
        read = source.lora
        file = folder / _GGUF_ADAPTER
        tensors = peft.to_tensors(adapters, cfg, family, read)
        gguf_out.save_gguf_adapter(tensors, cfg, family, read.alpha, file, Path(base).name)
        tensors = gguf_out.read_gguf_adapter(file, tensors, cfg, family)
        again = peft.from_tensors(tensors, cfg, family, read)
    else:
        wrapped = families.is_wrapped(source.folder, family)
        peft.save_adapters(adapters, cfg, family, source.lora, folder, base, wrapped)
        _copy_tokenizer(model, folder)
        with error_context("what was written"):
            read = peft.read_adapter_config(LoraConfig(adapter=str(folder)), cfg, family)
            again = peft.load_adapters(folder, cfg, family, read)
    # Adapters are written as they are, so nothing but the order of a sum may differ.
    return _compare(model, attach(without_adapters(model.params), again, read), 1e-5)


def _compare(model: LanguageModel, params: Params, tolerance: float) -> float:
    """The difference of the logits with `params` and the model's own, relative to their size; of a
    reward model, of its numbers. Both send the tokens to the same experts. Raises ConfigError if it
    is above `tolerance`."""
    cfg = model.cfg
    tokens = np.random.default_rng(0).integers(
        0, cfg.vocab_size, (2, min(32, cfg.max_positions))
    )

    @jax.jit
    def logits(
        params: Params, routes_LBTk: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        meta = attention.one_sequence_per_row(jnp.ones_like(tokens, bool))
        hidden, routed = decoder.forward(params, cfg, tokens, meta, routes_LBTk=routes_LBTk)
        routes_LBTk = None if routed is None else routed.ids
        if cfg.output != "logits":
            return scalar_scores(params, hidden), routes_LBTk
        return decoder.logits(params, cfg, hidden), routes_LBTk

    # Scores, and not weights, are compared: they are what serving gives.
    own, routes_LBTk = logits(model.params)
    # Rounded weights send some tokens to another expert that is nearly as good. That moves scores
    # far more than rounding does, and is no mistake in the files.
    other, _ = logits(params, routes_LBTk)
    size = jnp.linalg.norm(own)
    # a reward model that nobody has trained gives 0
    difference = float(jnp.linalg.norm(own - other) / jnp.where(size > 0, size, 1))
    # Not `>`: every comparison with NaN is false.
    if not difference <= tolerance:
        raise ConfigError(
            f"what was written, read back, gives other scores: they differ by {difference:.2g} of "
            "their size, and "
            f"rounding explains {tolerance:g}. Nothing was kept; dtype=fp32 writes the weights as "
            "they are"
        )
    return difference


def _copy_tokenizer(model: LanguageModel, folder: Path) -> None:
    """Copies the files of the tokenizer, and writes all ends of a completion beside them."""
    source = model.source
    template = source.tokenizer.template
    if is_gguf(source.tokenizer.folder):
        source.tokenizer.backend.save(str(folder / "tokenizer.json"))
        for name in ("tokenizer_config.json", "generation_config.json"):
            content = small_object(source.tokenizer.folder, name)
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    for name in (*tokenizer.FILES, "generation_config.json"):
        if (source.tokenizer.folder / name).is_file():
            shutil.copyfile(source.tokenizer.folder / name, folder / name)
    # the folder's own template was copied with the other files
    is_own = template is None or Path(template.where).parent == source.tokenizer.folder
    # Whoever loads the folder has none of our settings: they become part of the template.
    if not is_own or template.variables:
        (folder / "chat_template.jinja").write_text(template.standalone, encoding="utf-8")
    file = folder / "generation_config.json"
    ids = {"pad_token_id": source.tokenizer.pad_id}
    written = read_object(file) if file.is_file() else ids
    # others read the ends of a completion here, and a template may write more of them
    ends = written.get("eos_token_id")
    if not isinstance(ends, list):
        ends = [ends]
    if set(ends) != set(source.tokenizer.eos_ids):
        written["eos_token_id"] = list(source.tokenizer.eos_ids)
        file.write_text(json.dumps(written, indent=2) + "\n")


def _base_name(model: LanguageModel) -> str:
    """The base that vLLM and PEFT load an adapter onto: a name on the hub, or a folder."""
    named = model.source.name
    if named in ("bundled", "random"):
        return str(model.source.folder or named)
    return named


def _describe(
    model: LanguageModel, folder: Path, out: Path, kind: str, difference: float
) -> str:
    """Writes _PROVENANCE. Returns the command that serves the model."""
    # the run's folder below `outputs`: project, date and time, without the path of a machine
    run = None
    if model.run is not None:
        parts = model.run.resolve().parts
        begin = len(parts) - 1
        if "outputs" in parts:
            begin = parts.index("outputs") + 1
        run = "/".join(parts[begin:])
    # A damaged file is no reason to stop: nothing depends on its content.
    try:
        evaluated = read_object(model.run / "status.json")["eval"]
        accuracy = {when: float(evaluated[when]["accuracy"]) for when in ("first", "last")}
    except (AttributeError, LookupError, OSError, TypeError, ValueError):
        accuracy = {}
    lora = model.source.lora
    base = _base_name(model)
    about = {
        "kind": kind,
        "base": base,
        "run": run,
        "step": model.step,
        "difference_after_reading_back": difference,
        "accuracy": accuracy,
        "lora": lora
        and {name: getattr(lora, name) for name in ("rank", "alpha", "targets", "base")},
        "versions": {
            "tunix_lite": __version__,
            "jax": jax.__version__,
            "python": platform.python_version(),
        },
    }
    of_llama = base if is_gguf(Path(base)) else f"{Path(base).name}.gguf"
    served = {
        "gguf": f"llama-server -m {out / _GGUF}",
        "gguf_adapter": f"llama-server -m {of_llama} --lora {out / _GGUF_ADAPTER}",
    }.get(kind, f"vllm serve {out}")
    if kind == "adapter":
        served = (
            f"vllm serve {base} --enable-lora --max-lora-rank {lora.rank} --lora-modules "
            f"{out.name}={out}"
        )
    if model.cfg.output == "score":
        served = (
            "python run_training.py '+task.rewards.rm={_target_: "
            f"tunix_lite.rewards.model.RewardModel, weights: {out}}}'"
        )

    (folder / _PROVENANCE).write_text(json.dumps(about, indent=2) + "\n")
    return served
