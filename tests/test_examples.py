"""The examples are true: the notebook's cells run, commands of the script compose, the loop by hand learns as a run."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import jax
import pytest
from test_docs import of_a_program, of_a_run

from tunix_lite.api import GenerationConfig, make_mesh
from tunix_lite.settings.compose import compose
from tunix_lite.train import train

EXAMPLES = Path(__file__).parent.parent / "examples"


def cells() -> list[str]:
    notebook = json.loads((EXAMPLES / "first_run.ipynb").read_text())
    assert notebook["nbformat"] == 4
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook["cells"])
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_cells_of_the_notebook_run(tmp_path, monkeypatch):
    """One step of few prompts stands for sixty."""
    monkeypatch.chdir(tmp_path)
    small = '"evaluation.num_examples=4", "evaluation.num_samples=0", "training.prompts_per_step=2", "model.mesh_shape=[[1,1],[fsdp,tp]]", '
    scope: dict = {}
    for cell in cells():
        cell = cell.replace("MAX_STEPS = 60", "MAX_STEPS = 1").replace('"resume=none"', small + '"resume=none"')
        exec(compile(cell, "first_run.ipynb", "exec"), scope)
    assert scope["before"] == "The answer is 24." and "The answer is" in scope["after"]
    assert [row["step"] for row in scope["rows"]] == [0, 1]


def test_the_commands_of_the_script_compose():
    text = (EXAMPLES / "sft_then_grpo.sh").read_text().replace("\\\n", " ").replace('"$@"', "training.max_steps=20")
    commands = [shlex.split(line) for line in text.replace("$folder", "outputs/x").splitlines()]
    runs = [words for words in commands if words and words[0] in ("python", "tunix-lite")]
    first, export, second = runs
    compose(of_a_run(first))
    name, settings = of_a_program(export)
    assert name == "export" and settings == ["checkpoint=outputs/x/sft", "out=outputs/x/model"]
    assert compose(of_a_run(second)).model.weights == "outputs/x/model"


def test_the_table_of_examples_names_them_all():
    named = re.findall(r"\]\(([\w./]+)\)", (EXAMPLES / "README.md").read_text())
    assert all((EXAMPLES / name).is_file() for name in named)
    files = {str(file.relative_to(EXAMPLES)) for file in EXAMPLES.rglob("*") if file.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    assert files - {"README.md"} <= set(named)


SMALL = ["training.prompts_per_step=4", "algorithm.num_generations=4", "model.mesh_shape=[[1,1],[fsdp,tp]]"]
SMALL += ["optimizer.schedule=constant", "optimizer.warmup_steps=0", "generation.max_new_tokens=16"]
SMALL += ["training.max_steps=2", "evaluation.num_examples=0", "tracking.tensorboard=false"]


def test_the_loop_by_hand_makes_the_steps_of_a_run(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("rl_loop", EXAMPLES / "rl_loop.py")
    by_hand = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(by_hand)
    by_hand.PROMPTS = by_hand.GENERATIONS = 4
    by_hand.GENERATION = GenerationConfig(32, 16)
    # one device, whose programs come from disk
    by_hand.make_mesh = lambda shape: make_mesh(((1, 1), shape[1]), jax.devices()[:1])
    by_hand.main(2)
    printed = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    train(compose(SMALL), tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == len(printed) == 2
    for row, words in zip(rows, printed):
        assert float(words[3].rstrip(",")) == pytest.approx(row["reward/mean"], abs=6e-4)
        assert float(words[5]) == pytest.approx(row["train/loss"], abs=1e-4)
