"""Folders, files and adapters of strangers: none executes, hangs or shows a traceback, whichever way it comes in.

Each is refused in one line that begins with a setting or names the file, or it is taken as the data that it is. What
would run leaves a file behind (the canary), and every test looks for it. See docs/references/trust.md.
"""

import base64
import json
import math
import os
import pickle
import shlex
import shutil
import struct
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from conftest import random_params, set_mesh
from model_checks import write_with_tokenizer
from safetensors.numpy import load_file, save_file

from tunix_lite.algorithms.algorithm import Needs
from tunix_lite.basics import digests
from tunix_lite.basics.errors import ConfigError
from tunix_lite.basics.plain_text import escaped
from tunix_lite.basics.types import TrainState
from tunix_lite.basics.untrusted import MOST_LINE
from tunix_lite.commands import doctor, evaluate, export, generate, program
from tunix_lite.inference.language_model import load, run_settings
from tunix_lite.learner.optim import OptimizerConfig, init_opt_state, make_optimizer
from tunix_lite.models import decoder, hf, peft, source
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.chat_template import ChatTemplate
from tunix_lite.models.families import LLAMA
from tunix_lite.models.lora import LoraConfig, adapter_weights
from tunix_lite.models.source import ModelConfig
from tunix_lite.models.tokenizer import Tokenizer, as_data
from tunix_lite.models.weights import init_params
from tunix_lite.parallel.mesh import put
from tunix_lite.report.evidence import read_evidence
from tunix_lite.report.findings import diagnose
from tunix_lite.runs import leaving
from tunix_lite.runs.fingerprint import fingerprint, read_fingerprint
from tunix_lite.runs.reference import find_reference
from tunix_lite.runs.setup import prepare
from tunix_lite.settings import compose as composing
from tunix_lite.settings.config import ResumeConfig, build
from tunix_lite.tasks.sources import Arithmetic
from tunix_lite.tracking.checkpoint import _LATER, Checkpoints
from tunix_lite.tracking.rows import check_rows, read_rows
from tunix_lite.tracking.rundir import RunDir, read_status
from tunix_lite.workers import confined

ROOT = Path(__file__).parents[1]
SECONDS = 4.0
CFG = Architecture(
    512, 2, 16, 2, 1, 8, 24, query_scale=8, rope_theta_local=1e6, max_positions=512, tied=True, **LLAMA.flags
)
LORA = LoraConfig(rank=2, targets="layers/(q|v)")
PLUG = "import pathlib\npathlib.Path({canary!r}).touch()\nFAMILY = None\ndef Plug(*a, **b):\n    pass\n"
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A model, an adapter of it, and a run that trained it: folders in which nothing is wrong."""
    folder = tmp_path_factory.mktemp("good")
    set_mesh(1, 1)
    params = random_params(CFG)
    write_with_tokenizer(folder / "model", CFG, LLAMA)

    (folder / "adapter").mkdir()
    adapters = init_params(adapter_weights(decoder.weights(CFG), LORA), jax.random.key(0))
    peft.save_adapters(adapters, CFG, LLAMA, LORA, folder / "adapter", "base")

    (folder / "run").mkdir()
    settings = ModelConfig(weights=str(folder / "model"))
    run_dir = RunDir(folder / "run")
    run_dir.write_json(run_dir.path / RunDir.MODEL, source.settings_to_keep(settings, source.locate(settings), 0))
    checkpoints = Checkpoints(folder / "run" / "checkpoints")
    optimizer = make_optimizer(OptimizerConfig(), 2)
    checkpoints.save(TrainState(put(np.int32(1)), params, init_opt_state(optimizer, params)))
    checkpoints.close()
    return folder


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """The file that exists once something has run; `hostile_plug` can be imported, and that runs, too."""
    file = tmp_path / "CANARY"
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "hostile_plug.py").write_text(PLUG.format(canary=str(file)))
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    sys.modules.pop("hostile_plug", None)
    yield file
    assert not file.exists(), "something of the folder was executed"
    assert "hostile_plug" not in sys.modules


def popen(canary: Path) -> dict:
    return {"_target_": "subprocess.Popen", "args": f"touch {shlex.quote(str(canary))}", "shell": True}


def within_seconds(act):
    """What `act` returns, or the one line that it refuses with. On a machine with other work the clock runs slower."""
    began = time.perf_counter()
    try:
        said = act()
    except ValueError as error:
        said = str(error)
        assert said and "\n" not in said, "one line"
        assert said.isprintable(), "nothing that acts on a terminal"
        assert len(said) < 2000
    seconds, busy = time.perf_counter() - began, max(1.0, 2 * os.getloadavg()[0] / os.cpu_count())
    assert seconds < SECONDS * busy
    return said


def is_refused(act, *words: str) -> None:
    said = within_seconds(act)
    assert isinstance(said, str), "it was taken"
    for word in words:
        assert word in said, said


# ---- files: each of these in place of a file that is read


FILES_THAT_ARE_NONE = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to /dev/zero": lambda file: file.symlink_to("/dev/zero"),
    "100,000 brackets": lambda file: file.write_text(DEEP),
    "a list": lambda file: file.write_text("[1, 2]"),
    "nothing": lambda file: file.write_text(""),
    "bytes that are no text": lambda file: file.write_bytes(b'{"a": "\xff\xfe"}'),
    "a pickle": lambda file: file.write_bytes(pickle.dumps(Pickled("touch CANARY"))),
    "20 MB": lambda file: file.write_text('{"a": "' + "x" * 20_000_000 + '"}'),
}


class Pickled:
    """Unpickling it runs a command."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def put_in(folder: Path, name: str, kind: str) -> Path:
    (folder / name).unlink(missing_ok=True)
    FILES_THAT_ARE_NONE[kind](folder / name)
    return folder


@pytest.mark.parametrize("kind", FILES_THAT_ARE_NONE)
def test_what_is_no_json_file_is_refused_by_name_wherever_one_is_read(kind, good, tmp_path, canary):
    model, adapter, run = (shutil.copytree(good / name, tmp_path / name) for name in ("model", "adapter", "run"))
    run_dir = put_in(run, "model.json", kind)
    is_missing = kind in ("a pipe", "a folder", "a link to /dev/zero")  # as is_file says
    is_refused(lambda: run_settings(run_dir), "model.json")
    is_refused(lambda: load(run_dir), "" if is_missing else "model.json")
    put_in(adapter, "adapter_config.json", kind)
    is_refused(lambda: adapted(good / "model", adapter), "model.lora: adapter: ", "adapter_config.json")
    for name in ("config.json", "tokenizer_config.json", "generation_config.json", hf.INDEX):
        folder = put_in(shutil.copytree(model, tmp_path / f"with {name}"), name, kind)
        if is_missing and name != "config.json":
            within_seconds(lambda folder=folder: loaded(folder))  # as if it were not there
        else:
            is_refused(lambda folder=folder: loaded(folder), "model.weights: ", name)


def loaded(folder: Path):
    """All of the way from model.weights= to what training needs, short of the weights themselves."""
    return source.download(source.locate(ModelConfig(weights=str(folder))))


def adapted(folder: Path, adapter: Path):
    model = ModelConfig(weights=str(folder), mesh_shape=((1, 1), ("fsdp", "tp")), lora=LoraConfig(adapter=str(adapter)))
    return source.load_weights(source.download(source.locate(model)))


def test_folders_in_which_nothing_is_wrong_are_taken(good, canary):
    assert loaded(good / "model").cfg == CFG
    assert adapted(good / "model", good / "adapter")[0] is not None
    devices = {"mesh_shape": [[4, 1], ["fsdp", "tp"]]}
    assert load(good / "run", **devices).step == 1
    assert load(good / "model", **devices).run is None


# ---- model.json

HOSTILE_SETTINGS = {  # key of `model` -> what stands there; POPEN: a _target_ that starts a shell
    "architecture": "POPEN",
    "weights": "POPEN",
    "lora.targets": "POPEN",
    "architecture.pattern": ["POPEN"],
    "architecture.window": [{"deep": ["POPEN"]}],
    "mesh_shape ": [[1, 1], ["POPEN", "tp"]],
    "there is no such setting": "POPEN",
    "lora ": {"_target_": "hostile_plug.Plug"},
}


def settings_with(run: Path, key: str, value, canary: Path) -> None:
    """model.json with another value at this key of its `model`."""
    said = json.loads((run / "model.json").read_text())
    place, *path = said, *f"model.{key.strip()}".split(".")
    for name in path[:-1]:
        place = place[name]
    text = json.dumps(value).replace('"POPEN"', json.dumps(popen(canary)))
    place[path[-1]] = json.loads(text)
    (run / "model.json").write_text(json.dumps(said))


def of_run(run: Path, *overrides: str) -> ModelConfig:
    """What generate, chat and export make of checkpoint=RUN, before they open it."""
    values = {"checkpoint": str(run), "model": {"mesh_shape": [[1, 1], ["fsdp", "tp"]], "family": "llama"}}
    return build(ModelConfig, program._of_run(values, list(overrides)), "model")


@pytest.mark.parametrize("key", HOSTILE_SETTINGS)
def test_a_target_in_a_runs_folder_is_refused_wherever_it_stands(key, good, tmp_path, canary):
    run = shutil.copytree(good / "run", tmp_path / "run")
    settings_with(run, key, HOSTILE_SETTINGS[key], canary)
    for act in (lambda: load(run), lambda: of_run(run), lambda: of_run(run, "model.family=llama")):
        is_refused(act, f"{run}/model.json: model.{key.strip()}", "_target_: a folder is data")


WRONG_SETTINGS = {
    "family: a module": ("family", "hostile_plug.FAMILY", "a folder may not choose what is imported"),
    "family: escape codes": ("family", "\x1b[2J\x07.x", "model.family='\\x1b[2J\\x07.x'; a text of one line"),
    "layers": ("architecture.num_layers", 10**9, "num_layers=1000000000 is beyond 1,024"),
    "not finite": ("architecture.norm_eps", float("nan"), "expected a finite number"),
    "a pattern for ever": ("lora.targets", "(.|.|.)*(.|.|.)*(.|.|.)*x", "of regular expressions it takes names"),
    "a path too long": ("weights", "x" * 5000, "is no path"),
    "a NUL": ("weights", "x\0y", "model.weights='x\\x00y'; a text of one line"),
    "seed of 33 bits": ("../seed", 2**32, "from 0 to 4294967295"),
    "model that is a list": ("..", [], "model is []"),
    "a kind of layer": ("architecture", {"pattern": ["hostile_plug.KIND"]}, "pattern names 'hostile_plug.KIND', and a folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_wrong_settings_in_a_runs_folder_are_refused_with_the_file(name, good, tmp_path, canary):
    key, value, words = WRONG_SETTINGS[name]
    run = shutil.copytree(good / "run", tmp_path / "run")
    if key.startswith(".."):
        said = json.loads((run / "model.json").read_text())
        said |= {key.removeprefix("../") if "/" in key else "model": value}
        (run / "model.json").write_text(json.dumps(said))
    else:
        settings_with(run, key, value, canary)
    is_refused(lambda: load(run), words)
    if key != "weights":  # which is looked at when the model is opened
        is_refused(lambda: of_run(run), words, "model.json")


def test_a_size_that_the_machine_cannot_hold_is_refused_before_anything_is_made(good, tmp_path, canary):
    run = shutil.copytree(good / "run", tmp_path / "run")
    for key, value in {"weights": "random", "architecture.vocab_size": 2**26, "architecture.embed_dim": 2**20}.items():
        settings_with(run, key, value, canary)
    is_refused(lambda: load(run), "model: its weights take", "GB")  # 2^46 x 4 bytes


def test_a_family_of_ones_own_is_imported_if_the_user_names_it_and_else_not(good, tmp_path, canary, monkeypatch):
    """What a run of such a family writes must be read again; its folder alone imports nothing."""
    run = shutil.copytree(good / "run", tmp_path / "run")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "extend" / "example"))
    settings_with(run, "family", "mistral.MISTRAL", canary)
    sys.modules.pop("mistral", None)
    line = "give it yourself: model.family=mistral.MISTRAL (in Python load(..., family=...))"
    is_refused(lambda: load(run), line)
    is_refused(lambda: of_run(run), line)
    assert "mistral" not in sys.modules
    values = {"checkpoint": str(run), "model": {"mesh_shape": [[1, 1], ["fsdp", "tp"]], "family": "mistral.MISTRAL"}}
    assert program._of_run(values, ["model.family=mistral.MISTRAL"])["family"] == "mistral.MISTRAL"
    assert load(run, mesh_shape=[[4, 1], ["fsdp", "tp"]], family="llama").source.family is LLAMA


COMMANDS = {
    "generate": (generate.main, ["prompt=hi"]),
    "export": (export.main, ["out=exported"]),
    "evaluate": (evaluate.main, ["evaluate.num_examples=1", "out=exported"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_refuses_a_hostile_run_in_one_line(name, good, tmp_path, canary, monkeypatch, capsys):
    run = shutil.copytree(good / "run", tmp_path / "run")
    settings_with(run, "lora", "POPEN", canary)
    main, words = COMMANDS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tunix-lite", f"checkpoint={run}", *words])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == ""
    assert said.err == (
        f"error: checkpoint: {run}/model.json: model.lora._target_: a folder is data, and names nothing to call; "
        "remove this key. _target_ is for the command line and for conf/\n"
    )
    assert not (tmp_path / "exported").exists()


# ---- a model in Hugging Face layout


def config(**values):
    return lambda folder: change_json(folder / "config.json", **values)


def change_json(file: Path, **values) -> None:
    file.write_text(json.dumps(json.loads(file.read_text() if file.is_file() else "{}") | values))


def template(text: str, where: str = "tokenizer_config.json"):
    """The folder with this chat template and no other."""

    def change(folder: Path) -> None:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        change_json(folder / where, chat_template=text)

    return change


def safetensors(header: bytes, data: bytes = b"", length: int | None = None):
    def change(folder: Path) -> None:
        head = struct.pack("<Q", len(header) if length is None else length)
        (folder / hf.SINGLE).write_bytes(head + header + data)

    return change


def tensors(header: dict, data: bytes = b"\0" * 64):
    return safetensors(json.dumps(header).encode(), data)


def one(shape, offsets=(0, 64), dtype="F32", name="model.norm.weight") -> dict:
    return {name: {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}}


def index(weight_map):
    return lambda folder: (folder / hf.INDEX).write_text(json.dumps({"weight_map": weight_map}))


def sparse(folder: Path) -> None:
    """A file that says it has a terabyte: a hole, which takes no room on the disk."""
    header = json.dumps(one([2**38], (0, 2**40))).encode()
    with (folder / hf.SINGLE).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 2**40)


def only_a_pickle(folder: Path) -> None:
    (folder / hf.SINGLE).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Pickled(f"touch {folder.parent / 'CANARY'}")))


def head(shape, value: float = 1.0):
    def change(folder: Path) -> None:
        held = load_file(folder / hf.SINGLE)
        save_file(held | {"lm_head.weight": np.full(shape, value, np.float32)}, folder / hf.SINGLE)

    return change


def tokenizer(**values):
    return lambda folder: change_json(folder / "tokenizer.json", **values)


TEN = {"type": "Replace", "pattern": {"String": "x"}, "content": "x" * 10}
GROWS = {"type": "Sequence", "normalizers": [TEN] * 9}  # a letter becomes a thousand million

MODELS = {  # what is done to the folder, and words of the refusal; none: it is taken, as data
    "auto_map": (config(auto_map={"AutoModel": "hostile_plug.Plug"}, trust_remote_code=True), ()),
    "model_type is a module": (config(model_type="hostile_plug.FAMILY"), ("config.json: model_type is",)),
    "model_type clears the screen": (config(model_type="\x1b[2J\n\x07"), ("config.json: model_type is '\\x1b[2J",)),
    "10^9 layers": (config(num_hidden_layers=10**9), ("num_hidden_layers=1000000000; it is at most 1,024",)),
    "1,024 layers": (config(num_hidden_layers=1024), ("missing: model.layers.2.", "more")),
    "a vocabulary of 10^15": (config(vocab_size=10**15), ("vocab_size=1000000000000000 is beyond",)),
    "rope_parameters is a target": (config(rope_parameters={"_target_": "hostile_plug.Plug"}), ("'rope_theta'",)),
    "eos beyond everything": (lambda f: change_json(f / "generation_config.json", eos_token_id=10**12), ("token 1000",)),
    "a template that is a number": (template(5), ("chat template", "tokenizer_config.json is 5")),
    "5,000 parentheses": (template("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"), ("json cannot be compiled",)),
    "a template of 2 MB": (template("x" * 2_000_000), ("up to 1,048,576 characters",)),
    "a template that is no text": (lambda f: (f / "chat_template.jinja").write_bytes(b"\xff\xfe{{ 1 }}"),
                                   ("chat_template.jinja is not UTF-8",)),
    "a tokenizer that is none": (lambda f: (f / "tokenizer.json").write_text(DEEP), ("tokenizer.json cannot be read",)),
    "a tokenizer that is a pipe": (lambda f: put_in(f, "tokenizer.json", "a pipe"), ("has no tokenizer.json",)),
    "a normalizer that grows": (tokenizer(normalizer=GROWS), ("tokenizer.json: the replacements of its normalizer",)),
    "an invalid expression": (tokenizer(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a"}, "behavior": "Isolated",
                                                       "invert": False}), ("tokenizer.json cannot be read (Onig",)),
    "a header of 2^60 bytes": (safetensors(b"{}", length=2**60), ("is damaged or cut short",)),
    "a pickle alone": (only_a_pickle, ("has no weights",)),
    "offsets beyond the file": (tensors(one([2**20], (0, 2**22))), ("is damaged or cut short",)),
    "a type that is none": (tensors(one([16], dtype="hostile_plug.Plug")), ("is damaged or cut short",)),
    "a name that clears the screen": (tensors(one([16], name="\x1b[2J\n")), ("\\x1b[2J",)),
    "a hole of a terabyte": (sparse, ("model.norm.weight is [274877906944]",)),
    "an index outside": (index({"a": "../model.safetensors"}), ("index.json: a is said to be in '../model",)),
    "an index to the root": (index({"a": "/etc/passwd"}), ("which is not the name of a file",)),
    "an index of a pipe": (lambda f: (index({"a": "pipe"})(f), os.mkfifo(f / "pipe")), ("holds weights twice",)),
    "a head of another shape": (head((3, 7)), ("shape: lm_head.weight is [3, 7], and should be [512, 16]",)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_strangers_model_is_data(name, good, tmp_path, canary):
    change, words = MODELS[name]
    folder = shutil.copytree(good / "model", tmp_path / "model")
    change(folder)
    if words:
        is_refused(lambda: loaded(folder), "model.weights: ", str(folder), *words)
    else:
        assert within_seconds(lambda: loaded(folder)).cfg == CFG


# ---- chat templates

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
TEMPLATES = {
    "three loops": (LOOP, "takes more than 1 second of the processor"),
    "ten gigabytes": ("{{ 'a' * 10**10 }}", "fails in line 1: MemoryError"),
    "calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
    "a large text": ("{{ 'a' * 17 * 10**6 }}", "16,777,216 are the most"),
    "a lone surrogate": ("{{ '\\ud800' }}", "writes what is no text"),
    "escape codes": ("{{ raise_exception('\x1b[2J\n\x07') }}", "fails in line 1: \\x1b[2J \\x07"),
    "include": ("{% include '/etc/passwd' %}", "fails in line 1"),
    "cycler": ("{{ cycler.__init__.__globals__.os.system('touch CANARY') }}", "fails in line 1"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_overruns_or_breaks_out_is_refused_with_its_file(name, good, tmp_path, canary):
    text, words = TEMPLATES[name]
    folder = shutil.copytree(good / "model", tmp_path / "model")
    template(text)(folder)
    is_refused(
        lambda: Tokenizer.load(folder).prompt("hi"), "the chat template in ", "model/tokenizer_config.json ", words
    )
    assert ChatTemplate.compile("{{ 1 + 1 }}", "another").render() == "2", "the next one is served"


FOR_EVER = {  # what has the expression, and who runs it: a text as it is, one that spells a special token, a prompt
    "split": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}},
    "replace": {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "x"}},
}  # fmt: skip


@pytest.mark.parametrize("name", FOR_EVER)
def test_a_regular_expression_for_ever_in_a_tokenizer_ends_with_its_file(name, good, tmp_path):
    folder = shutil.copytree(good / "model", tmp_path / "model")
    tokenizer(**FOR_EVER[name])(folder)
    made = Tokenizer.load(folder)
    text, said = "a" * 40 + "!", "tokenizer.json fails ("
    is_refused(lambda: made.encode(text), said)
    is_refused(lambda: made.written_ids(as_data(text, [(0, 1)], "text")), said)
    made.__dict__["_has_normalized"] = True
    is_refused(lambda: made.special_in(text), said)


def charsmap(offset: int = 0xC0, place: int = 0, replacements: bytes = b"a\0", size: int = 1024) -> bytes:
    """A table that puts what stands at `place` of the replacements where a text has an A.

    The root leads to 1, so that A (0x41) is unit 0x40, and its value is that of unit 0x40 ^ `offset`.
    """
    units = np.zeros(256, "<u4")
    units[0] = 1 << 10
    units[0x40] = 0x41 | 1 << 8 | offset << 10
    units[0x80] = 1 << 31 | place
    return struct.pack("<I", size) + units.tobytes() + replacements


def precompiled(table: bytes) -> dict:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


CHARSMAPS = {
    "beyond its units": charsmap(offset=2**21 - 1),
    "inside of a character": charsmap(place=1, replacements="é\0".encode()),
    "a size beyond its bytes": charsmap(size=10**9),
    "empty": b"",
}


def test_an_ordinary_precompiled_normalizer_is_taken(good, tmp_path):
    """What the library does with it, and how long it makes a text at most; inside of a sequence, too."""
    folder = shutil.copytree(good / "model", tmp_path / "model")
    tokenizer(normalizer={"type": "Sequence", "normalizers": [precompiled(charsmap(replacements=b"xyz\0"))]})(folder)
    made = within_seconds(lambda: Tokenizer.load(folder))
    assert made.backend.normalizer.normalize_str("bAbA") == "bxyzbxyz"


@pytest.mark.parametrize("name", CHARSMAPS)
def test_a_damaged_precompiled_normalizer_is_a_value_error_and_no_panic(name, good, tmp_path):
    folder = shutil.copytree(good / "model", tmp_path / "model")
    tokenizer(normalizer=precompiled(CHARSMAPS[name]))(folder)
    is_refused(lambda: Tokenizer.load(folder).encode("bAb"), "tokenizer.json")


def test_a_strangers_template_sees_no_secrets(monkeypatch):
    """What a hole in the sandbox would find: no environment of ours, and not our memory."""
    confined.close()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    ChatTemplate.compile("{{ 1 }}", "x").render()
    environ = Path(f"/proc/{confined._running.process.pid}/environ")
    if not environ.exists():
        pytest.skip("needs /proc")
    assert b"hf_secret" not in environ.read_bytes()


# ---- adapters


def adapter(**values):
    return lambda folder: change_json(folder / peft.CONFIG, **values)


ADAPTERS = {
    "a target": (adapter(_target_="subprocess.Popen", args="touch CANARY"), ("_target_='subprocess.Popen' is not",)),
    "auto_mapping": (adapter(auto_mapping={"base_model_class": "hostile_plug.Plug", "parent_library": "hostile_plug"}), ()),
    "target_modules for ever": (adapter(target_modules="(a|a)*" * 30 + "x"), ()),
    "rank 10^12": (adapter(r=10**12), ("r=1000000000000; it is a whole number from 1 to 65,536",)),
    "alpha nan": (adapter(lora_alpha=float("nan")), ("lora_alpha=nan; it is a finite number above 0",)),
    "a kind with escape codes": (adapter(peft_type="\x1b[2J"), ("peft_type is '\\x1b[2J'",)),
    "tensors that are a pickle": (lambda f: put_in(f, peft.TENSORS, "a pickle"), ("is damaged or cut short",)),
    "tensors of another model": (lambda f: save_file({"x": np.ones(2, np.float32)}, f / peft.TENSORS), ("no adapter of",)),
}  # fmt: skip


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_strangers_adapter_is_data(name, good, tmp_path, canary):
    change, words = ADAPTERS[name]
    folder = shutil.copytree(good / "adapter", tmp_path / "adapter")
    change(folder)
    found = ModelConfig(weights=str(good / "model"), lora=LoraConfig(adapter=str(folder)))
    if words:
        is_refused(lambda: source.locate(found), f"model.lora: adapter: {folder}", *words)
    else:
        assert within_seconds(lambda: source.locate(found)).lora.rank == 2


# ---- doctor


YAML = {
    "tags": "!!python/object/apply:os.system ['touch CANARY']",
    "a billion laughs": "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
    "brackets": "a: " + DEEP,
    "a colon without an end": "a: " + "{" * 3000,
}


@pytest.mark.parametrize("kind", [*FILES_THAT_ARE_NONE, *YAML])
def test_the_doctor_waits_for_no_file_and_runs_none(kind, tmp_path, canary):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / "samples").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 0.5}\n')
    config = tmp_path / ".hydra" / "config.yaml"
    if kind in YAML:
        config.write_text(YAML[kind])
    else:
        others = ("status.json", "model.json", "samples/step_000001.jsonl", "fingerprint.json")
        for name in (".hydra/config.yaml", *others):
            put_in(tmp_path, name, kind)
    said = within_seconds(lambda: doctor_says(tmp_path))
    assert any("not read: " in line for line in said) and all(line.isprintable() for line in said)
    if kind in FILES_THAT_ARE_NONE:
        put_in(tmp_path, "metrics.jsonl", kind)
        within_seconds(lambda: doctor_says(tmp_path))


def doctor_says(folder: Path) -> list[str]:
    """The lines of `tunix-lite doctor FOLDER`."""
    evidence = read_evidence(folder)
    json.dumps([vars(finding) for finding in diagnose(evidence)])
    return [escaped(line, 1000) for line in doctor.lines_of_run(folder)]


def test_a_line_without_an_end_is_given_up(tmp_path):
    """A hole of a terabyte, which takes no room on the disk."""
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.truncate(2**40)
    is_refused(lambda: doctor_says(tmp_path), "metrics.jsonl has a line of more than 67,108,864 bytes")
    is_refused(lambda: check_rows(tmp_path / "metrics.jsonl", 1, 0), "has a line of more than")


# ---- evaluate, which writes into the folder


def evaluation(folder: Path) -> SimpleNamespace:
    return SimpleNamespace(out=None, checkpoint=str(folder), step=1, overwrite=False)


RUN = SimpleNamespace(task=SimpleNamespace(source=Arithmetic()))


def test_the_results_of_an_evaluation_do_not_follow_a_link_out_of_the_run(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "run").mkdir()
    for place in ("evaluation", "evaluation/step_000001", "evaluation/step_000001/arithmetic"):
        link = tmp_path / "run" / place
        link.symlink_to(tmp_path / "mine")
        is_refused(lambda: evaluate.output_folder(RUN, evaluation(tmp_path / "run")), "is a link to")
        link.unlink()
        link.mkdir()
    assert evaluate.output_folder(RUN, evaluation(tmp_path / "run")) == link
    (tmp_path / "by another way").symlink_to(tmp_path / "run")
    evaluate.output_folder(RUN, evaluation(tmp_path / "by another way"))


# ---- resume, and checkpoints


def metadata(name: str, **values):
    """A file of orbax's with other values in it."""

    def change(step: Path) -> None:
        (file,) = [file for file in step.rglob(name) if file.is_file()]
        change_json(file, **values)

    return change


def types(kind: str, theirs: str):
    """The tree's description with a class of the stranger's as the type of each value, or of each key."""

    def change(step: Path) -> None:
        (file,) = step.rglob("_METADATA")
        text = file.read_text()
        assert kind in text
        file.write_text(text.replace(kind, theirs))

    return change


CHECKPOINTS = {
    "handlers are a target": metadata("_CHECKPOINT_METADATA", item_handlers={"_target_": "hostile_plug.Plug"}),
    "custom": metadata("_CHECKPOINT_METADATA", custom_metadata={"skipped_in_a_row": {"_target_": "hostile_plug.Plug"}}),
    "brackets": lambda step: (step / "_CHECKPOINT_METADATA").write_text(DEEP),
    "types of values": types('"value_type": "jax.Array"', '"value_type": "hostile_plug.Plug"'),
    "types of keys": types('"key_type": 2', '"key_type": "hostile_plug.Plug"'),
    "rich types": metadata("_METADATA", value_metadata_tree={"clazz": "Plug", "module_name": "hostile_plug"}),
    "a pickle": lambda step: next(step.rglob("_METADATA")).write_bytes(pickle.dumps(Pickled("touch CANARY"))),
}


# Here orbax does not use what the stranger wrote, and restores the arrays; all else is refused.
RESTORED = {"handlers are a target", "custom", "rich types"}


def restored(folder: Path):
    """(params, the whole state) as both ways to read a checkpoint restore them."""
    params = random_params(CFG)
    like = TrainState(put(np.int32(1)), params, init_opt_state(make_optimizer(OptimizerConfig(), 2), params))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    return Checkpoints(folder).restore_params(like.params)[1], Checkpoints(folder).restore(like)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_nothing_that_a_checkpoint_names_is_imported(name, good, tmp_path, canary, monkeypatch):
    """orbax reads what the stranger wrote, whose digests are right: it restores the arrays, or it is refused by us."""
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(good / "run" / "checkpoints", tmp_path / "checkpoints")
    CHECKPOINTS[name](folder / "1")
    (folder / "1" / "about.json").unlink()  # else nobody asks orbax for how many updates were skipped
    digests.write_digests(folder / "1", _LATER)
    really, asked = ocp.CheckpointManager.restore, []

    def restore(self, step, **more):
        asked.append(step)
        return really(self, step, **more)

    monkeypatch.setattr(ocp.CheckpointManager, "restore", restore)
    try:
        params, state = restored(folder)
    except ValueError as error:
        assert name not in RESTORED, error
        assert str(error).startswith("step 1 cannot be read (") and "\n" not in str(error)
    else:
        assert name in RESTORED
        jax.tree.map(np.testing.assert_array_equal, params, random_params(CFG))
        jax.tree.map(np.testing.assert_array_equal, state.params, params)
    # What the others hold ends orbax's look at the shapes, before it is asked for a step.
    assert set(asked) == ({1} if name in RESTORED else set()), "orbax was asked"
    said = within_seconds(lambda: Checkpoints(folder).skipped(1))
    assert said == 0 or said.startswith("step 1 cannot be read (")


def digests_name(place: str):
    """digests.json with one more file in it, of no bytes."""

    def change(step: Path) -> None:
        said = json.loads((step / "digests.json").read_text())
        said["files"][place] = {"bytes": 0, "sha256": "0"}
        (step / "digests.json").write_text(json.dumps(said))

    return change


WAITING = {  # what would be read for ever
    "digests that are a pipe": lambda step: put_in(step, "digests.json", "a pipe"),
    "digests of a device, by dots": digests_name("../" * 30 + "dev/zero"),
    "a pipe in the place of what orbax reads": lambda step: put_in(step, "_CHECKPOINT_METADATA", "a pipe"),
    "a folder that is a link": lambda step: (step / "more").symlink_to("/dev"),
}  # fmt: skip


@pytest.mark.parametrize("name", WAITING)
def test_a_checkpoint_is_read_from_files_only(name, good, tmp_path):
    folder = shutil.copytree(good / "run" / "checkpoints", tmp_path / "checkpoints")
    WAITING[name](folder / "1")
    like = random_params(CFG)
    is_refused(lambda: Checkpoints(folder).restore_params(like), "step 1 cannot be read (", "remove ")
    assert Checkpoints(folder).whole_steps() in ([], [1])


@pytest.mark.parametrize(
    "change",
    [
        {"task": {"source": {"_target_": "subprocess.Popen", "args": "touch CANARY", "shell": True}}},
        {"model": {"architecture": [[[]]]}},
        {"\x1b[2J": 1},
        {"seed": 10**4000},
    ],
)
def test_a_strangers_fingerprint_is_compared_and_nothing_more(change, good, tmp_path, canary, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(good / "run", tmp_path / "run")
    sizes = ["generation.max_new_tokens=64", "generation.max_prompt_length=64", "training.prompts_per_step=4"]
    words = [*sizes, "algorithm=sft", "evaluation.num_examples=0", "model.mesh_shape=[[4,1],[fsdp,tp]]"]
    training = composing.compose([*words, f"model.weights={good / 'model'}"])
    ours = fingerprint(training, source.download(source.locate(training.model)), 4)
    (run / "fingerprint.json").write_text(json.dumps(json.loads(json.dumps(ours)) | change))
    resumed = replace(training, resume=ResumeConfig(str(run)))
    with pytest.raises(ConfigError, match="^resume: "):
        prepare(resumed, RunDir(tmp_path / "new"))


# ---- the other files of a run


@pytest.mark.parametrize("kind", FILES_THAT_ARE_NONE)
def test_what_is_no_json_file_in_a_run_is_refused_in_one_line_and_never_waited_for(kind, good, tmp_path):
    run_dir = RunDir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    shutil.copytree(good / "run" / "checkpoints" / "1", tmp_path / "checkpoints" / "1")
    for file in (run_dir.fingerprint, run_dir.status, run_dir.reference, run_dir.checkpoints / "1" / "about.json"):
        put_in(file.parent, file.name, kind)
    put_in(tmp_path, "metrics.jsonl", kind)
    run = SimpleNamespace(algorithm=SimpleNamespace(needs=Needs(reference=True)), resume=SimpleNamespace(force=False))
    run.model = SimpleNamespace(weights="x", lora=LoraConfig())
    model = SimpleNamespace(lora=None)

    is_refused(lambda: read_fingerprint(run_dir.fingerprint), f"{run_dir.fingerprint.name}")
    is_refused(lambda: find_reference(run, model, run_dir, run_dir.checkpoints), "reference.json", "resume=")
    is_refused(lambda: Checkpoints(run_dir.checkpoints).skipped(1), "step 1 cannot be read (", "remove ")
    *found, wrong = within_seconds(lambda: read_status(run_dir.status))
    assert found == [{}, 0.0, None] and wrong.startswith(f"{run_dir.status} ") and "\n" not in wrong

    said = SimpleNamespace(evaluation=SimpleNamespace(num_examples=4, interval_steps=2), loss_examples=0)
    said.training = SimpleNamespace(max_steps=8)
    assert within_seconds(lambda: leaving.unmeasured(said, run_dir, 2)) is None
    is_refused(lambda: check_rows(run_dir.metrics, 1, 0), "metrics.jsonl")


def test_a_line_of_metrics_is_read_up_to_a_megabyte_and_those_behind_it_are_still_read(tmp_path):
    """Of a line without an end only its beginning is held; a row keeps numbers alone."""
    file = tmp_path / "metrics.jsonl"
    long = b'{"step": 2, "x": "' + b"x" * 5_000_000 + b'"}'
    deep = b'{"step": 3, "x": ' + b"[" * 100 + b"]" * 100 + b"}"
    odd = b'{"step": 4, "train/loss": 0.5, "text": "x", "list": [1], "digits": 1' + b"0" * 400 + b', "none": null}'
    file.write_bytes(b"\n".join([b'{"step": 1}', long, deep, odd, b'{"step": 5}']))
    found = [*read_rows(file)]
    assert [row and row["step"] for _, _, row in found] == [1, None, None, 4, 5]
    assert max(len(line) for _, line, _ in found) == MOST_LINE
    with pytest.raises(ValueError, match="line 2 of .*metrics.jsonl is not the metrics of a step"):
        check_rows(file, 5, 0)
    run = SimpleNamespace(evaluation=SimpleNamespace(num_examples=4, interval_steps=2), loss_examples=0)
    run.training = SimpleNamespace(max_steps=8)
    np.testing.assert_equal(leaving.unmeasured(run, RunDir(tmp_path), 4), {"train/loss": 0.5, "none": math.nan})
