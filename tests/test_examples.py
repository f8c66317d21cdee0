"""The examples are true: the notebook's cells run, and the commands of the script compose."""

import json
import re
import shlex
from pathlib import Path

from test_docs import of_a_program, of_a_run

from tunix_lite.settings import compose as composing

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
    composing.compose(of_a_run(first))
    name, settings = of_a_program(export)
    assert name == "export" and settings == ["checkpoint=outputs/x/sft", "out=outputs/x/model"]
    assert composing.compose(of_a_run(second)).model.weights == "outputs/x/model"


def test_the_table_of_examples_names_them_all():
    named = re.findall(r"\]\(([\w./]+)\)", (EXAMPLES / "README.md").read_text())
    assert all((EXAMPLES / name).is_file() for name in named)
    files = {str(file.relative_to(EXAMPLES)) for file in EXAMPLES.rglob("*") if file.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    assert files - {"README.md"} <= set(named)
