"""conf/ and the dataclasses say the same; wrong settings are named."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import get_args

import composed_once
import pytest
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from test_docs import PROGRAMS

from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.algorithms.sft import SFT
from tunix_lite.basics.errors import ConfigError
from tunix_lite.basics.imports import import_named, looking_in_working_folder
from tunix_lite.distributed.agreement import digests_of_code
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.families import FAMILIES
from tunix_lite.models.lora import LoraConfig
from tunix_lite.models.source import locate
from tunix_lite.parallel.mesh import RULES
from tunix_lite.runs.fingerprint import check_same_run, fingerprint
from tunix_lite.runs.setup import prepare
from tunix_lite.settings.compose import compose, compose_values, conf_dir
from tunix_lite.settings.config import ModelConfig, RunConfig, build, plain
from tunix_lite.tracking.rundir import RunDir

CONF = Path(__file__).parents[1] / "conf"
# a recipe in experiment/ changes settings of other groups: test_recipes.py composes it; words.yaml has no settings
FILES = sorted(file for file in CONF.rglob("*.yaml") if file.parent.name != "experiment" and file.name != "words.yaml")


def kind_of(file: Path) -> type:
    """The dataclass of a file: its `_target_`, the command's, or that of a run's field."""
    group, target = file.relative_to(CONF).parts[0], yaml.safe_load(file.read_text()).get("_target_")
    if target or group in ("algorithm", "config.yaml"):
        return class_of(target) if target else {"algorithm": GRPO, "config.yaml": RunConfig}[group]
    kind = PROGRAMS[file.stem] if group == "command" else {f.name: f.type for f in dataclasses.fields(RunConfig)}[group]
    return next(iter(get_args(kind)), kind)  # of optimizers the first is adamw's


def class_of(path: str) -> type:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", sorted(file.stem for file in (CONF / "model").glob("*.yaml")))
def test_every_model_gives_exactly_the_fields_of_its_dataclasses(name):
    values = compose_values([f"model={name}"])["model"]
    assert values["architecture"] is None or values["family"] in FAMILIES
    for kind, part in {ModelConfig: values, LoraConfig: values["lora"], Architecture: values["architecture"]}.items():
        assert part is None or set(part) == {f.name for f in dataclasses.fields(kind)}


@pytest.mark.parametrize("file", [f for f in FILES if "model" not in f.parts], ids=lambda f: str(f.relative_to(CONF)))
def test_every_yaml_file_names_exactly_the_fields_of_its_dataclass(file):
    values = yaml.safe_load(file.read_text())
    fields = {f.name for f in dataclasses.fields(kind_of(file)) if f.init}
    if file.name == "config.yaml":
        groups = {next(iter(entry)) for entry in values.pop("defaults") if isinstance(entry, dict)}
        values.pop("hydra")
        fields -= groups
    defaults = values.pop("defaults", [])
    is_part = file.parent.name == "parts"
    if is_part or "default" in defaults or "parts/common@_here_" in defaults:  # says what it changes, or what is shared
        assert set(values) - {"_target_"} < fields
        return
    assert set(values) - {"_target_"} == fields
    if source := values.get("source"):
        kind = class_of(source["_target_"])
        assert set(source) - {"_target_"} == {f.name for f in dataclasses.fields(kind)}


@pytest.mark.parametrize("words", ["", "algorithm=ppo task=gsm8k", "experiment=smollm2_gsm8k", "+command=plan"])
def test_what_the_suite_merges_as_plain_values_is_what_hydra_merges(words, monkeypatch):
    """See composed_once.py."""
    quickly = compose_values(words.split())
    monkeypatch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", composed_once._merge)
    assert compose_values(words.split()) == quickly


# a size is numbers whose meaning its family's part says
@pytest.mark.parametrize("file", [f for f in FILES if f.parent.name != "model"], ids=lambda f: str(f.relative_to(CONF)))
def test_every_setting_has_a_comment(file):
    text = file.read_text().split("\nhydra:")[0]
    above = ""
    for line in text.splitlines():
        key, _, rest = line.partition(":")
        is_setting = ":" in line and not key.strip().startswith(("#", "-", "_target_", "defaults", "fn", "weight"))
        groups = ("source", "architecture", "correct", "lora")
        opens_a_group = not rest.partition("#")[0].strip() and key.strip() in groups
        if is_setting and not opens_a_group:
            is_described = "#" in rest or above.lstrip().startswith("#")
            assert is_described, f"{file.name}: {line!r} says nothing about itself"
        above = line


def test_yaml_defaults_equal_the_dataclass_defaults_where_both_exist():
    run = compose([])
    for part in (run.model, run.training, run.evaluation, run.tracking, run.launch, run.task.source):
        assert part == type(part)()
    for name, kind in PROGRAMS.items():
        values = yaml.safe_load((CONF / "command" / f"{name}.yaml").read_text())
        assert default_values(kind) == {k: values[k] for k in values if k != "defaults"}


def default_values(kind) -> dict:
    """The defaults of a dataclass, and of those in it, as YAML would have them."""
    found = {}
    for field in dataclasses.fields(kind):
        has_factory = field.default_factory is not dataclasses.MISSING
        value = field.default_factory() if has_factory else field.default
        value = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
        found[field.name] = json.loads(json.dumps(value))
    return found


def test_conf_is_found_beside_the_package_or_inside_it(tmp_path, monkeypatch):
    assert conf_dir() == CONF
    monkeypatch.setattr("tunix_lite.distributed.command_line.PACKAGE", tmp_path / "site-packages" / "tunix_lite")
    assert conf_dir() == tmp_path / "site-packages" / "tunix_lite" / "conf"


def test_meshes_are_read_as_people_type_them_and_algorithms_are_one_yaml_file_each():
    # the second is what bash makes of the first
    for text in ('[[4,1],["fsdp","tp"]]', "[[4,1],[fsdp,tp]]"):
        assert compose([f"model.mesh_shape={text}"]).model.mesh_shape == ((4, 1), ("fsdp", "tp"))
    assert compose(["algorithm=dr_grpo", "generation.max_new_tokens=9"]).algorithm.weighting.keywords == {"length": 9}
    assert isinstance(compose(["algorithm=sft"]).algorithm, SFT)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["training.micro_batchsize=4"], "training.micro_batchsize: there is no such setting; did you mean 'training.micro_batch_size'?"),
        (["algorithm=sft", "algorithm.foo=1"], "no such setting; known here: algorithm._target_, algorithm.weighting"),
        (["tracking.tensorboard=1"], "tracking.tensorboard: expected bool, got 1"),
        (["training.micro_batch_size=auto"], "training.micro_batch_size: expected int or null, got 'auto'"),
        (["optimizer.learning_rate=1e-5,1e-6"], "optimizer.learning_rate=1e-5,1e-6: several values are a sweep, which needs --multirun"),
        (["model.mesh_shape=4"], "model.mesh_shape: expected two lists, got 4; write it as 'model.mesh_shape=[[4,1],[fsdp,tp]]'"),
        (["task.rewards.correct.fn._target_=rewards.nope"], "task.rewards.correct.fn._target_: cannot import"),
        (["algorithm.advantages.epsilon=1"], "algorithm.advantages.epsilon: there is no such setting; write algorithm.advantages.eps=1"),
        (["training.max_steps=[1"], "training.max_steps=[1: cannot be read as an override"),
        (["model.weights=random"], "model: weights=random needs model.architecture"),
        (["algorithm.updates_per_rollout=3"], "must be multiples of algorithm.updates_per_rollout=3"),
        (["+sharding.train.width=tp"], "sharding: train.width: there is no such logical axis"),
        (["sharding.train.mlp=dp"], "sharding: train.mlp='dp'; it is fsdp, tp or null"),
        (["training.packing=prefix", "training.micro_batch_size=4"], "packing=prefix fills rows by tokens"),
        (["training.packing=prefix", "model.lora.rank=2", "model.lora.dropout=0.1"], "leave out one of the two"),
    ],
)  # fmt: skip
def test_wrong_settings_are_named_with_place_cause_and_remedy(overrides, message):
    with pytest.raises(ConfigError) as error:
        compose(overrides)
    assert message in str(error.value).replace("+training", "training")


def test_options_of_the_users_own_are_found_and_mistakes_beside_them_named(tmp_path):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "mine.yaml").write_text((CONF / "task" / "arithmetic.yaml").read_text())
    assert compose(["task=mine"], str(tmp_path)).task == compose([]).task
    with pytest.raises(ConfigError, match="did you mean 'training.max_steps'"):
        compose(["task=mine", "training.max_stepz=3"], str(tmp_path))
    with pytest.raises(ConfigError, match=r"did you mean task=mine\? There is arithmetic, .*mine"):
        compose(["task=mien"], str(tmp_path))


def test_a_file_that_is_no_yaml_is_named_with_its_line(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "open.yaml").write_text("defaults: [random, _self_]\narchitecture: {num_layers: 12\n")
    with pytest.raises(ConfigError, match=r"model/open\.yaml, line 2: no YAML: .*expected ',' or '}'") as refused:
        compose(["model=open"], str(tmp_path))
    assert "\n" not in str(refused.value)


def test_programs_that_train_import_what_a_setting_names_in_the_working_folder_and_nothing_before(
    tmp_path, monkeypatch
):
    """The folder comes last on the path, once a setting names a file of it: an installed module of the name wins."""
    (tmp_path / "rewards_of_this_folder.py").write_text("def near(completion, example): return 1.0\n")
    (tmp_path / "math.py").write_text("raise AssertionError('imported')\n")
    (tmp_path / "package_here").mkdir()
    (tmp_path / "package_here" / "inside.py").write_text("def far(completion, example): return 0.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # as `tunix-lite generate`, which does not look here
    for path, hint in {
        "rewards_of_this_folder.near": "put PYTHONPATH=. before the command",
        "rewards_of_this_fodler.near": "did you mean 'rewards_of_this_folder'?",
        "nowhere_at_all.f": "beside run_training.py and in the folders of PYTHONPATH",
    }.items():
        with pytest.raises(ValueError, match=r"cannot import .*; ") as refused:
            import_named(path)
        assert str(refused.value).endswith(hint), path
    before = list(sys.path)

    with looking_in_working_folder():
        assert import_named("math.sqrt")(9) == 3 and sys.path == before
        assert import_named("rewards_of_this_folder.near")("", {}) == 1.0
        with pytest.raises(ValueError, match="did you mean 'near'"):
            import_named("rewards_of_this_folder.nearr")
        assert import_named("package_here.inside.far")("", {}) == 0.0
        assert sys.path == [*before, str(tmp_path)]


def test_a_target_is_obeyed_where_a_class_or_function_is_wanted_and_nowhere_else(tmp_path, monkeypatch):
    """Importing is running: of what stands in a wrong place nothing is imported, where its place alone says so."""
    (tmp_path / "noisy.py").write_text(
        "import pathlib, dataclasses\n"
        f"pathlib.Path({str(tmp_path / 'CANARY')!r}).touch()\n"
        "from tunix_lite.models.lora import LoraConfig\n"
        "@dataclasses.dataclass(frozen=True)\nclass Wide(LoraConfig):\n    rank: int = 16\n"
        "@dataclasses.dataclass(frozen=True)\nclass Other:\n    rank: int = 16\n"
        "class Popen:\n    def __init__(self, **k):\n        raise AssertionError('called')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("noisy", None)
    for key in ("model.weights", "model.lora.targets", "seed"):
        values = place = compose_values([])
        *groups, name = key.split(".")
        for group in groups:
            place = place[group]
        place[name] = {"_target_": "noisy.Popen"}
        with pytest.raises(ConfigError, match=f"^{key}._target_: no class or function stands here"):
            build(RunConfig, values)
    assert "noisy" not in sys.modules and not (tmp_path / "CANARY").exists()
    for key, name, wanted in (
        ("model.lora", "noisy.Popen", "LoraConfig"),
        ("training", "noisy.Other", "TrainingConfig"),
        ("model", "os.system", "ModelConfig"),
    ):
        said = rf"^{key}._target_: {name} is not [\w.]+\.{wanted}, nor derived from it"
        with pytest.raises(ConfigError, match=said):
            compose([f"+{key}._target_={name}"])
    assert compose(["+model.lora._target_=noisy.Wide", "~model.lora.rank"]).model.lora.rank == 16


def test_the_table_of_rules_in_the_settings_is_the_one_in_the_code():
    run = compose([])
    assert run.sharding.train == run.sharding.rollout == RULES
    assert compose(["sharding=data_parallel"]).sharding.train == RULES | {"embed": None, "embed_blocks": None}
    assert compose(["sharding=sequence_parallel"]).sharding.train == RULES | {"residual_seq": "tp"}


# Settings that change no number of a run, and why. All others must be in its fingerprint.
FREE = {
    "training": {
        "micro_batch_size, gradient_accumulation_steps, micro_batch_tokens, sync_gradients_every": "order of a sum",
        "remat, scan_layers, attention, expert_kernels": "how the same numbers are computed",
        "memory_check, profile_communication, log_interval_steps, grace_seconds": "they look and stop",
        "max_minutes, max_skipped_in_a_row, max_sampler_gap, early_stopping_patience, epochs": "when it stops",
        "save_interval_steps, keep_checkpoints, keep_best_checkpoints, best_metric, best_is": "what stays on disk",
    },
    "evaluation": {"interval_steps": "how often"},
    "generation": {},
    "rollout": {
        "weights, kernels, mesh_shape": "how and where the same numbers are computed",
    },
    "rewards": {"timeout, workers": "how long a call may take, and in how many processes"},
    "conversation": {"timeout, workers": "how long an environment may take, and in how many processes"},
    "model": {"mesh_shape": "where", "family, target_params": "the architecture has it"},
}
# Names in the fingerprint that stand for another setting, or for what its file holds.
STANDS_FOR = {
    "slots": "num_slots",
    "weights": "weights",
    "tokenizer": "tokenizer",
    "chat_template": "chat_template",
    "template": "template",
}


@pytest.fixture(scope="module")
def every_setting(tmp_path_factory):
    """A run with all settings that only sometimes matter, and its fingerprint."""
    folder = tmp_path_factory.mktemp("run")
    template = folder / "template.jinja"
    template.write_text("{{ messages[0].content }}{{ effort }}")
    words = ["rewards.on_none=skip", "rollout.overlap=carry", "optimizer.schedule=linear", "model.lora.rank=4"]
    words += ["training.mixed_precision=bf16", "training.reduce_dtype=bfloat16", "training.tp_reduce_dtype=bfloat16"]
    words += ["training.epochs=1"]
    run = compose([*words, f"model.chat_template={template}", "model.template.effort=low"])
    assert run.model.template == {"effort": "low"}, "without the + that Hydra wants for what is not there"
    kept = fingerprint(run, prepare(run, RunDir(folder / "run")).model, 4)
    words = [f"model.architecture.experts.{size}" for size in ("count=8", "per_token=2", "mlp_dim=32")]
    words += [f"training.router_{loss}_loss_coef=0.1" for loss in ("aux", "z")]
    mixture = kept_of("model=qwen3_30b_a3b", "model.weights=random", *words)
    for group in ("rollout", "training"):
        kept[group] = mixture[group] | kept[group]
    return run, kept | {"conversation": kept_of("task=guessing")["conversation"]}


def kept_of(*overrides: str) -> dict:
    run = compose(list(overrides))
    return fingerprint(run, locate(run.model), 4)


@pytest.mark.parametrize("group", FREE)
def test_every_setting_of_a_run_is_in_its_fingerprint_or_is_free_for_a_reason(group, every_setting):
    run, kept = every_setting
    names = {STANDS_FOR.get(name, name) for name in kept[group]} - {"_target_", "shards"}
    if group == "model":
        names |= kept.keys() & STANDS_FOR.keys()
    free = {name for names in FREE[group] for name in names.split(", ")}
    assert not free & names
    assert free | names == {field.name for field in dataclasses.fields(getattr(run, group))}


def test_reward_code_that_has_changed_stops_a_resume_and_a_comment_does_not(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "reward_of_a_user.py"
    file.write_text("def short(completion, example):\n    return -float(len(completion))\n")
    run = compose(["task.rewards.correct.fn=reward_of_a_user.short"])

    def kept(run):
        return {"model": {}, "code": digests_of_code(plain(run.task))}

    theirs = kept(run)
    assert list(theirs["code"]) == ["reward_of_a_user"]
    file.write_text("# of lengths\n\ndef short(completion, example):\n    return -float(len(completion))\n")
    assert check_same_run(kept(run), theirs, tmp_path, force=False) == ""
    file.write_text("def short(completion, example):\n    return float(len(completion))\n")
    with pytest.raises(ValueError, match=r"code.reward_of_a_user: '\w+' here, '\w+' there"):
        check_same_run(kept(run), theirs, tmp_path, force=False)
    assert kept(compose([]))["code"] == {}, "ours has the version of the package"


ADDRESSED = [
    ("commands.train", "hydra.run.dir=hf://bucket/run", "hydra.run.dir: hf://bucket/run"),
    ("launch", "--nprocs=2 train.py -m seed=0,1 +hydra.sweep.dir=s3://b/run", "hydra.sweep.dir=s3://b/run"),
    ("commands.generate", "-cd gs://bucket/conf prompt=Hi", "--config-dir=gs://bucket/conf"),
    ("commands.train", "resume=gs://bucket", "resume: gs://bucket"),
    ("commands.train", "model.weights=file:///models/gemma", "model.weights: file:///models/gemma"),
    ("commands.train", "model.lora.adapter=hf://some/adapter", "model.lora: adapter: hf://some/adapter"),
    ("commands.generate", "out=az://bucket/file prompt=Hi", "out: az://bucket/file"),
    ("commands.export", "checkpoint=outputs/latest out=https://host/model", "out: https://host/model"),
]


CAN_BE_USED = (
    "of addresses, gs://BUCKET/NAME and s3://BUCKET/NAME can be used; other stores can be mounted as a folder\n",
    "a sweep goes to a disk; a single run can use a bucket\n",
    "no address can stand here, only a folder or a file of a disk\n",
    "give the bucket and a name in it, gs://BUCKET/NAME\n",
)


@pytest.mark.parametrize("program, words, named", ADDRESSED, ids=[named for *_, named in ADDRESSED])
def test_an_address_is_refused_at_once_in_one_line_and_no_folder_is_made(
    tmp_path, monkeypatch, capsys, program, words, named
):
    """No folder called gs: (which is what a path makes of it), and no run that fails at its first checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [program, *words.split()])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"tunix_lite.{program}").main()
    told = capsys.readouterr().err
    assert ended.value.code == 2 and told.count("\n") == 1, told
    assert told.startswith(f"error: {named}: ") and told.endswith(CAN_BE_USED), told
    assert not list(tmp_path.iterdir())
