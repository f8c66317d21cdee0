"""conf/experiment: every recipe composes and fits what it names by its plan. Defaults that follow model, task, device."""

import functools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from tunix_lite.commands.plan import PlanConfig, make_plans
from tunix_lite.runs import session, setup
from tunix_lite.settings import compose as composing
from tunix_lite.settings.compose import conf_dir
from tunix_lite.settings.resolved_run import find_model, resolve_run
from tunix_lite.tracking.rundir import RunDir
from tunix_lite.train import train

ROOT = Path(__file__).parents[1]
RECIPES = sorted(file.stem for file in (conf_dir() / "experiment").glob("*.yaml"))
PAGE = ROOT / "docs" / "guide" / "recipes.md"
OWN_FILE = {"sft_chat", "dpo_qwen3_1.7b"}  # the user gives task.train


@functools.cache
def _composed(*overrides: str):
    return composing.compose(list(overrides))


def compose(overrides: list[str]):
    """The run, which nothing changes: composed once for all tests."""
    return _composed(*overrides)


def recipe(name: str, *more: str):
    data = ["task.train=chats.jsonl"] if name in OWN_FILE else []
    return compose([f"experiment={name}", *data, *more])


def target(name: str) -> str | None:
    """The devices that the file says the recipe is for; None: any."""
    found = re.search(r"^# For: (any|[a-z0-9-]+)\b", (conf_dir() / "experiment" / f"{name}.yaml").read_text(), re.M)
    assert found, f"{name}.yaml does not say what it is for"
    return None if found[1] == "any" else found[1]


@pytest.mark.parametrize("name", [name for name in RECIPES if target(name)])
def test_a_recipe_fits_the_devices_that_it_names(name):
    plan = make_plans(recipe(name), PlanConfig(target=target(name), analytic=True), []).plans[0]
    # formulas have been up to a quarter too low (docs/guide/plan.md)
    assert plan.fits and plan.peak_bytes < 0.75 * plan.machine.capacity
    text = (conf_dir() / "experiment" / f"{name}.yaml").read_text()
    assert "nobody has run it yet" in text, "measured? then say so here and on the page"
    shown = f"| `{name}` | `{target(name)}` | {plan.peak_bytes / 2**30:.1f} of {plan.machine.capacity / 2**30:.1f} |"
    assert shown in PAGE.read_text(), f"docs/guide/recipes.md: {shown}"


# The recipe with what is large made small: the model, lengths, counts; and no data from the hub.
SMALL = [
    *("model=random", "generation.max_prompt_length=64", "generation.max_new_tokens=16"),
    *("generation.long_prompts=truncate", "training.max_steps=1", "training.prompts_per_step=4"),
    *("evaluation.num_examples=2", "optimizer.warmup_steps=1"),
]
SMALL_MESH = {"v5e_16_gemma3_12b": "model.mesh_shape=[[2,2],[fsdp,tp]]"}
ROWS = {
    "gsm8k": {"question": "What is 1 + 2?", "answer": "1 + 2 = 3\n#### 3"},
    "sft_chat": {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}]},
    "dpo_qwen3_1.7b": {"prompt": "What is 1 + 2?", "chosen": "3", "rejected": "4"},
}


@pytest.mark.wide
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_a_tiny_model(name, tmp_path):
    data = tmp_path / "rows.jsonl"
    words = [*SMALL, SMALL_MESH.get(name, "model.mesh_shape=[[1,1],[fsdp,tp]]")]
    if "Gsm8k" in type(recipe(name).task).__name__:
        words += [f"task.train={data}", f"task.held_out={data}"]
        row = ROWS["gsm8k"]
    else:
        row = ROWS.get(name, {})
        words += [f"task.train={data}"] if name in OWN_FILE | {"tinystories"} else []
    numbered = ({key: f"{value} ({i})" if key in ("question", "prompt") else value for key, value in row.items()}
                for i in range(40))  # fmt: skip
    data.write_text("".join(json.dumps(each) + "\n" for each in numbered))
    train(recipe(name, *words), tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = {key: value for row in rows for key, value in row.items()}
    assert last["step"] == 1 and math.isfinite(last["train/loss"]) and math.isfinite(last["train/grad_norm"])


def resolved(run, platform: str):
    cfg, lora = find_model(run.model)
    if run.training.packing == "auto":
        run = replace(run, training=replace(run.training, packing="none"))
    return resolve_run(run, cfg, lora, {"fsdp": 1, "tp": 1}, platform)


# What TRL, verl, QLoRA and this project's own measurements take; docs/guide/training.md has the sources.
@pytest.mark.parametrize(
    ("overrides", "rate"),
    [
        ([], 4e-5),
        (["model.lora.rank=8"], 2e-3),
        (["model=qwen3_0.6b"], 1e-6),
        (["model=qwen3_0.6b", "algorithm=sft"], 1e-5),
    ],
)
def test_the_learning_rate_follows_what_trains(overrides, rate):
    found = resolved(compose(overrides), "cpu")
    assert found.run.optimizer.learning_rate == pytest.approx(rate, rel=1e-12)
    assert found.optimizer.learning_rate == found.run.optimizer.learning_rate
    assert bool(found.rate_reason) == ("optimizer.learning_rate" not in " ".join(overrides))


@pytest.mark.parametrize(
    ("overrides", "platform", "precision"),
    [
        ([], "cpu", "fp32"),
        (["model=gemma3_270m"], "cuda", "bf16"),
        (["model=gemma3_270m", "training.mixed_precision=fp32"], "tpu", "fp32"),
        (["training.mixed_precision=bf16_params"], "cpu", "bf16_params"),
    ],
)
def test_the_precision_follows_the_device_and_the_size(overrides, platform, precision):
    found = resolved(compose(overrides), platform)
    assert found.run.training.mixed_precision == precision
    assert bool(found.precision_reason) == ("training.mixed_precision" not in " ".join(overrides))


@pytest.mark.parametrize(
    ("overrides", "lengths"),
    [
        ([], (32, 48)),
        (["model=qwen3_0.6b", "task=gsm8k"], (256, 512)),
        (["task=gsm8k", "generation=long"], (2048, 512)),
        (["+task.lengths={max_prompt_length: 7, max_new_tokens: 9}"], (7, 9)),
    ],
)
def test_lengths_follow_the_task_and_the_model(overrides, lengths):
    run = compose([*overrides, "algorithm=dr_grpo"])
    assert (run.generation.max_prompt_length, run.generation.max_new_tokens) == lengths
    assert run.algorithm.weighting.keywords["length"] == lengths[1], "other settings can refer to it"


def test_a_recipe_gives_way_to_the_command_line_and_a_wrong_name_lists_those_there_are():
    run = recipe("low_memory", "model=gemma3_1b", "training.prompts_per_step=4")
    assert run.model.weights == "google/gemma-3-1b-it" and run.model.lora.base == "nf4"
    assert run.training.prompts_per_step == 4
    with pytest.raises(ValueError, match="there is no such experiment; there is .*quick_test"):
        compose(["experiment=quick"])


def test_a_run_that_is_out_of_memory_says_so_and_another_does_not(tmp_path, monkeypatch):
    said = []
    resolved = make_plans(compose([]), PlanConfig(analytic=True), []).plans[0].resolved
    run_session = SimpleNamespace(
        status=SimpleNamespace(started=True, steps=3, write=lambda *a, **k: None),
        run_dir=RunDir(tmp_path),
        console=SimpleNamespace(say=lambda text, style="": said.append(text)),
        parts=SimpleNamespace(resolved=resolved),
        run=compose([]),
    )

    def fail(error):
        with pytest.raises(type(error)), session._status_at_the_end(run_session, ""):
            raise error

    fail(ValueError("something else"))
    assert not any("memory" in text for text in said)
    outer = RuntimeError("step 4")
    outer.__cause__ = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")
    fail(outer)
    assert any(text.startswith("out of memory: ") for text in said)


def test_a_run_in_float32_says_where_jax_multiplies_with_fewer_bits():
    said = setup.float32_products("fp32", "gpu")
    assert "JAX_DEFAULT_MATMUL_PRECISION=highest" in said and setup.float32_products("fp32", "tpu") == said
    assert setup.float32_products("fp32", "cpu") == setup.float32_products("bf16", "gpu") == ""
    with jax.default_matmul_precision("highest"):
        assert setup.float32_products("fp32", "gpu") == ""
