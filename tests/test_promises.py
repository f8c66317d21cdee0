"""The examples are true; what guides of other projects promise can be typed; README's blocks run as they are printed."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from test_docs import ROOT, SHELL, blocks, of_a_program, of_a_run, of_readme
from test_train import SHORT

from tunix_lite.api import GenerationConfig, make_mesh
from tunix_lite.rewards.text import brevity
from tunix_lite.settings.compose import compose
from tunix_lite.train import train

EXAMPLES = Path(__file__).parent.parent / "examples"


def cells() -> list[str]:
    notebook = json.loads((EXAMPLES / "first_run.ipynb").read_text())
    assert notebook["nbformat"] == 4
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook["cells"])
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.wide  # .ci/run runs examples/notebook.py
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


ALONE = ["training.max_steps=2", "evaluation.num_examples=0", "tracking.tensorboard=false"]
ALONE += ["optimizer.learning_rate=4e-5", "task.rewards.correct.weight=0"]


def test_the_loop_by_hand_makes_the_steps_of_a_run(tmp_path, capsys):
    """With a tiny model, which is never right: here the reward is how short a completion is."""
    spec = importlib.util.spec_from_file_location("rl_loop", EXAMPLES / "rl_loop.py")
    by_hand = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(by_hand)
    by_hand.PROMPTS = by_hand.GENERATIONS = 4
    by_hand.GENERATION = GenerationConfig(32, 8)
    run = compose([*SHORT, *ALONE])
    by_hand.ModelConfig, by_hand.correct = lambda: run.model, brevity
    # one device, whose programs come from disk
    by_hand.make_mesh = lambda shape: make_mesh(((1, 1), shape[1]), jax.devices()[:1])
    by_hand.main(2)
    printed = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    train(run, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == len(printed) == 2
    for row, words in zip(rows, printed):
        assert float(words[3].rstrip(",")) == pytest.approx(row["reward/mean"], abs=6e-4)
        assert float(words[5]) == pytest.approx(row["train/loss"], abs=1e-4)


# ---- what guides of other projects promise, and the README


def test_make_refuses_settings_that_the_program_would_never_see():
    """`make train hydra.run.dir=X` set a variable of make, and a new run began without a word."""
    call = ["make", "-n", "--no-print-directory", "train"]
    refused = subprocess.run([*call, "seed=1", "PYTHON=python3"], cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 2 and "settings go into ARGS: make train ARGS='seed=1'" in refused.stderr
    taken = subprocess.run([*call, "ARGS=seed=1 resume=none"], cwd=ROOT, capture_output=True, text=True)
    assert taken.returncode == 0 and taken.stdout.splitlines()[-1].endswith("run_training.py seed=1 resume=none")


# ---- the blocks of the README


TINY = "training.max_steps=1 training.prompts_per_step=4 evaluation.num_examples=4 evaluation.num_samples=0"
# What `make` installs is installed, and nothing is tested again; `tunix-lite` is this checkout's.
PROGRAMS = {
    "make": f'[ "$1" = test ] || exec "{sys.executable}" run_training.py',
    "python": f'exec "{sys.executable}" "$@" {TINY}',
    "tunix-lite": f'case "$1" in launch|train) set -- "$@" {TINY};; esac; exec "{sys.executable}" -m tunix_lite "$@"',
}


@pytest.mark.wide
def test_every_block_of_the_readme_runs_as_printed(tmp_path):
    copy = tmp_path / "tunix_lite"
    for folder in ("conf", "tunix_lite"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "run_training.py", copy)
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name, body in PROGRAMS.items():
        (bin_ / name).write_text(f"#!/bin/bash\n{body}\n")
        (bin_ / name).chmod(0o755)
    (copy / ".venv" / "bin").mkdir(parents=True)
    (copy / ".venv" / "bin" / "activate").touch()
    (copy / "my_rewards.py").write_text(of_readme("python"))
    (copy / "conf" / "model" / "deep.yaml").write_text(of_readme("yaml"))
    environment = os.environ | {"PATH": f"{bin_}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(copy)}
    environment.pop("XLA_FLAGS", None)
    for language, _, body in blocks(ROOT / "README.md"):
        if language not in SHELL:
            continue
        call = ["bash", "-euo", "pipefail", "-c", body]
        asked = {"input": "What is 2 + 3?\n/exit\n", "capture_output": True, "text": True, "timeout": 500}
        done = subprocess.run(call, cwd=copy, env=environment, **asked)
        # a plan that does not fit says what would, and ends with 1, so that a script does not go on
        fits = "does not fit" not in done.stdout
        assert done.returncode == (0 if fits else 1), f"{body}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        if "generate" in body:
            assert re.search(r"^The answer is 16\.$", done.stdout, re.MULTILINE), done.stdout[-500:]
