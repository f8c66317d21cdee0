"""conf/ and the dataclasses say the same; wrong settings are named; the arithmetic of a batch holds."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.algorithms.sft import SFT
from tunix_lite.commands.chat import Chat
from tunix_lite.commands.export import Export
from tunix_lite.commands.generate import Generate
from tunix_lite.commands.plan import PlanSettings
from tunix_lite.commands.program import compose, composed, conf_dir
from tunix_lite.config import (
    ConfigError,
    Evaluation,
    Model,
    RunConfig,
    Tracking,
    Training,
    build,
    plan_batch,
    plan_rows,
    row_width,
)
from tunix_lite.models.decoder import ModelConfig
from tunix_lite.models.families import FAMILIES
from tunix_lite.models.lora import LoraConfig
from tunix_lite.optim import OptimizerConfig
from tunix_lite.parallel.mesh import RULES, Rules
from tunix_lite.rollout.settings import Generation, RolloutConfig
from tunix_lite.tasks.sources import Arithmetic
from tunix_lite.tasks.task import TaskConfig

CONF = Path(__file__).parents[1] / "conf"
KINDS = {
    "config": RunConfig,
    "model": Model,
    "algorithm/grpo": GRPO,
    "algorithm/dr_grpo": GRPO,
    "algorithm/sft": SFT,
    "task": TaskConfig,
    "command/chat": Chat,
    "command/export": Export,
    "command/generate": Generate,
    "command/plan": PlanSettings,
    "generation": Generation,
    "rollout": RolloutConfig,
    "sharding": Rules,
    "training": Training,
    "optimizer": OptimizerConfig,
    "evaluation": Evaluation,
    "tracking": Tracking,
}
FILES = sorted(CONF.rglob("*.yaml"))


def kind_of(file: Path):
    path = file.relative_to(CONF).with_suffix("").as_posix()
    return KINDS.get(path) or KINDS[path.split("/")[0]]


MODELS = sorted(f.name.removesuffix(".yaml") for f in (CONF / "model").glob("*.yaml"))


@pytest.mark.parametrize("name", MODELS)
def test_every_model_gives_exactly_the_fields_of_its_dataclasses(name):
    values = composed([f"model={name}"])["model"]
    assert set(values) == {f.name for f in dataclasses.fields(Model)}
    assert set(values["lora"]) == {f.name for f in dataclasses.fields(LoraConfig)}
    if values["architecture"] is not None:
        assert set(values["architecture"]) == {f.name for f in dataclasses.fields(ModelConfig)}
        assert compose([f"model={name}"]).model.family in FAMILIES


@pytest.mark.parametrize("file", [f for f in FILES if "model" not in f.parts], ids=lambda f: str(f.relative_to(CONF)))
def test_every_yaml_file_names_exactly_the_fields_of_its_dataclass(file):
    values = yaml.safe_load(file.read_text())
    fields = {f.name for f in dataclasses.fields(kind_of(file))}
    if file.name == "config.yaml":
        groups = {next(iter(entry)) for entry in values.pop("defaults") if isinstance(entry, dict)}
        values.pop("hydra")
        fields -= groups
    if "default" in values.pop("defaults", []):  # says only what it changes
        assert set(values) < fields
        return
    assert set(values) - {"_target_"} == fields
    if source := values.get("source"):
        assert set(source) - {"_target_"} == {f.name for f in dataclasses.fields(Arithmetic)}


# a size is numbers whose meaning its family's part says
@pytest.mark.parametrize("file", [f for f in FILES if f.parent.name != "model"], ids=lambda f: str(f.relative_to(CONF)))
def test_every_setting_has_a_comment(file):
    text = file.read_text().split("\nhydra:")[0]
    for line in text.splitlines():
        key, _, rest = line.partition(":")
        is_setting = ":" in line and not key.strip().startswith(("#", "-", "_target_", "defaults", "fn", "weight"))
        opens_a_group = not rest.partition("#")[0].strip() and key.strip() in (
            "source",
            "architecture",
            "correct",
            "lora",
        )
        if is_setting and not opens_a_group:
            assert "#" in rest, f"{file.name}: {line!r} says nothing about itself"


def test_yaml_defaults_equal_the_dataclass_defaults_where_both_exist():
    run = compose([])
    for part in (run.generation, run.evaluation, run.tracking):
        same = {f.name for f in dataclasses.fields(part) if getattr(part, f.name) == f.default}
        assert same >= {"temperature"} & {f.name for f in dataclasses.fields(part)}
    assert run.model == Model()
    assert run.training == Training()
    assert run.evaluation == Evaluation()
    assert run.tracking == Tracking()
    assert run.task.source == Arithmetic()
    for name, kind in KINDS.items():
        if name.startswith("command/"):
            values = yaml.safe_load((CONF / f"{name}.yaml").read_text())
            assert {f.name: f.default for f in dataclasses.fields(kind)} == {
                k: values[k] for k in values if k != "defaults"
            }


def test_conf_is_found_beside_the_package_or_inside_it(tmp_path, monkeypatch):
    assert conf_dir() == CONF
    monkeypatch.setattr("tunix_lite.commands.program.PACKAGE", tmp_path / "site-packages" / "tunix_lite")
    assert conf_dir() == tmp_path / "site-packages" / "tunix_lite" / "conf"


@pytest.mark.parametrize(
    "override, value",
    [
        ('model.mesh_shape=[[4,1],["fsdp","tp"]]', ((4, 1), ("fsdp", "tp"))),
        ("model.mesh_shape=[[4,1],[fsdp,tp]]", ((4, 1), ("fsdp", "tp"))),  # what bash makes of the line above
    ],
)
def test_meshes_are_read_as_people_type_them(override, value):
    assert compose([override]).model.mesh_shape == value


def test_algorithms_are_one_yaml_file_each():
    assert compose(["algorithm=dr_grpo", "generation.max_new_tokens=9"]).algorithm.weighting.keywords == {"length": 9}
    assert isinstance(compose(["algorithm=sft"]).algorithm, SFT)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["training.micro_batchsize=4"], "training.micro_batchsize: there is no such setting; did you mean 'training.micro_batch_size'?"),
        (["micro_batch_size=4"], "micro_batch_size: there is no such setting; did you mean 'training.micro_batch_size'?"),
        (["+training.max_step=4"], "training.max_step: there is no such setting; did you mean 'training.max_steps'?"),
        (["training.max_steps=four"], "training.max_steps: expected int, got 'four'"),
        (["training.max_steps=1.5"], "training.max_steps: expected int, got 1.5"),
        (["tracking.tensorboard=1"], "tracking.tensorboard: expected bool, got 1"),
        (["model.mesh_shape=4"], "model.mesh_shape: expected list, got 4"),
        (["algorithm=gpro"], "algorithm=gpro: there is no such algorithm; there is dr_grpo, grpo, sft"),
        (["algorithm.num_generations=1"], "algorithm: num_generations=1: a completion is judged against the others"),
        (["generation.temperature=-1"], "generation: temperature=-1.0 and top_k=0 must not be negative"),
        (["training.mixed_precision=fp8"], "training: mixed_precision='fp8'; it is fp32, bf16 or bf16_params"),
        (["optimizer.schedule=step"], "optimizer: schedule='step'; it is one of constant, linear, cosine"),
        (["task.rewards.correct.fn._target_=rewards.nope"], "task.rewards.correct.fn._target_: cannot import"),
        (["algorithm.advantages.epsilon=1"], "algorithm.advantages.epsilon: there is no such setting; did you mean"),
        (["training.max_steps=[1"], "training.max_steps=[1: cannot be read as an override"),
        (["model.weights=random"], "model: weights=random needs model.architecture"),
        (["algorithm.updates_per_rollout=3"], "must be multiples of algorithm.updates_per_rollout=3"),
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
    with pytest.raises(ConfigError, match="there is arithmetic, mine"):
        compose(["task=mien"], str(tmp_path))


# ---- batch arithmetic


def run_with(G=8, **training) -> SimpleNamespace:
    return SimpleNamespace(training=Training(**training), algorithm=SimpleNamespace(num_generations=G))


@pytest.mark.parametrize(
    "training, fsdp, expected",
    [
        ({}, 1, (16, 128, 1)),
        ({}, 4, (16, 32, 1)),
        ({"micro_batch_size": 4}, 4, (16, 4, 8)),
        ({"gradient_accumulation_steps": 4}, 2, (16, 16, 4)),
        ({"prompts_per_step": None, "micro_batch_size": 4, "gradient_accumulation_steps": 2}, 4, (4, 4, 2)),
        ({"prompts_per_step": None, "micro_batch_size": 4}, 4, (2, 4, 1)),
    ],
)
def test_the_rest_of_a_batch_is_derived(training, fsdp, expected):
    plan = plan_batch(run_with(**training), fsdp)
    assert (plan.prompts, plan.micro_batch_size, plan.num_micro_batches) == expected


def test_the_derived_batch_is_said_as_arithmetic():
    text = "16 prompts x 8 generations = 128 sequences = 4 micro_batch_size x 4 fsdp x 8 accumulation"
    assert str(plan_batch(run_with(micro_batch_size=4), 4)) == text


@pytest.mark.parametrize(
    "training, fsdp, message",
    [
        ({"micro_batch_size": 3}, 4, "prompts_per_step=16 x num_generations=8 = 128 .* each of the 4 shards has 32"),
        ({"micro_batch_size": 4, "gradient_accumulation_steps": 4}, 4, "cannot make 128.*Set one of the three to null"),
        ({"micro_batch_size": 64, "gradient_accumulation_steps": 1}, 1, "cannot make 128"),
        ({"prompts_per_step": 3}, 16, "= 24 sequences per update do not divide over fsdp=16; use a multiple of 2"),
        ({"prompts_per_step": None}, 1, "give prompts_per_step or micro_batch_size"),
        ({"prompts_per_step": None, "micro_batch_size": 3}, 1, "3 sequences, not a multiple of algorithm.num_gen"),
    ],
)
def test_batches_that_contradict_themselves_show_the_arithmetic(training, fsdp, message):
    with pytest.raises(ConfigError, match=message):
        plan_batch(run_with(**training), fsdp)


@given(
    st.one_of(st.none(), st.integers(1, 40)),
    st.one_of(st.none(), st.integers(1, 40)),
    st.one_of(st.none(), st.integers(1, 9)),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 8]),
)
def test_a_batch_plan_satisfies_its_identity_and_what_was_asked(prompts, micro, accumulation, fsdp, G):
    asked = {"prompts_per_step": prompts, "micro_batch_size": micro, "gradient_accumulation_steps": accumulation}
    try:
        plan = plan_batch(run_with(G, **asked), fsdp)
    except ConfigError:
        return
    assert plan.prompts * G == plan.micro_batch_size * fsdp * plan.num_micro_batches
    assert prompts in (None, plan.prompts)
    assert micro in (None, plan.micro_batch_size)
    assert accumulation in (None, plan.num_micro_batches)


def test_build_binds_functions_and_builds_classes():
    reward = build(TaskConfig, {
        "source": {"_target_": "tunix_lite.tasks.sources.Arithmetic", "worked": 1},
        "prompt": "{question}",
        "rewards": {"short": {"fn": {"_target_": "tunix_lite.rewards.text.brevity", "length": 10}, "weight": 2}},
    }).rewards["short"]  # fmt: skip
    assert reward.fn("12345", {}) == 0.5 and reward.weight == 2.0


def test_the_table_of_rules_in_the_settings_is_the_one_in_the_code():
    run = compose([])
    assert run.sharding.train == run.sharding.rollout == RULES
    assert compose(["sharding=data_parallel"]).sharding.train == RULES | {"embed": None, "embed_blocks": None}
    assert compose(["sharding=sequence_parallel"]).sharding.train == RULES | {"residual_seq": "tp"}


@pytest.mark.parametrize(
    "override, message",
    [
        ("+sharding.train.width=tp", "sharding: train.width: there is no such logical axis"),
        ("sharding.train.seq=tp", "sharding: train.seq='tp': the programs need it whole"),
        ("sharding.train.mlp=dp", "sharding: train.mlp='dp'; it is fsdp, tp or null"),
        ("sharding.rollout.residual_seq=tp", "sharding: rollout.residual_seq: a token that is sampled has no length"),
        ("sharding.train.batch=null", "sharding: batch: sequences are divided over fsdp"),
    ],
)
def test_rules_that_cannot_be_are_named(override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose([override])


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["training.remat=all"], "training: remat='all'; it is none, dots, save_qkv_out or block"),
        (["training.attention=flash"], "training: attention='flash'; it is auto, xla, cudnn or splash"),
        (["training.micro_batch_size=most"], "training: micro_batch_size='most'; it is a number, auto, or null"),
        (["training.micro_batch_tokens=99"], "micro_batch_tokens=99 is of packed rows, and packing is none"),
        (["training.packing=prefix", "training.micro_batch_size=4"], "packing=prefix fills rows by tokens"),
        (["training.sync_gradients_every=0"], "sync_gradients_every=0 must be at least 1"),
        (["training.packing=prefix", "model.lora.rank=2", "model.lora.dropout=0.1"], "one of the two has to go"),
    ],
)
def test_settings_of_the_update_that_cannot_be_are_named(overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose(overrides)


def test_the_arithmetic_of_packed_and_synced_micro_batches():
    run = compose(["training.packing=sequences", "training.micro_batch_tokens=200"])  # rows of 80: two at a time
    batch = plan_batch(run, fsdp=4)
    assert (batch.sequences, batch.num_micro_batches) == (128, 0)
    rows = plan_rows(run, batch, SMALL)
    assert (rows.width, rows.rows_per_part, rows.num_parts) == (80, 2, 16)  # 128 rows at most, 8 at a time
    with pytest.raises(ConfigError, match="micro_batch_tokens=79 is less than the longest sequence"):
        tight = compose(["training.packing=sequences", "training.micro_batch_tokens=79"])
        plan_rows(tight, plan_batch(tight, 1), SMALL)
    with pytest.raises(ConfigError, match="sync_gradients_every=3 does not divide the 4 micro-batches"):
        plan_batch(compose(["training.gradient_accumulation_steps=4", "training.sync_gradients_every=3"]), 1)


def test_a_row_of_shared_prompts_is_as_wide_as_pays():
    """By hand, for prompts of 32 and completions of 64 in a layer of 950,272 weights and 4 heads of 64: k completions
    cost (32 / k + 64) (1,900,544 + 4,096 (32 + 64 k)), in millions 220, 205, 211, 222 ...: two of them."""
    lengths = ["generation.max_prompt_length=32", "generation.max_new_tokens=64", "training.packing=prefix"]
    assert row_width(compose(lengths), SMALL) == 32 + 2 * 64
    assert row_width(compose([*lengths, "training.micro_batch_tokens=100"]), SMALL) == 32 + 64
    long = ["generation.max_prompt_length=512", "generation.max_new_tokens=64", "training.packing=prefix"]
    assert row_width(compose(long), SMALL) > 512 + 3 * 64


SMALL = ModelConfig(512, 6, 256, 4, 1, 64, 1024, query_scale=64)
