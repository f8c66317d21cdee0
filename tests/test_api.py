"""tunix_lite.api, its page, and how the pages read where nothing is built: on a code host."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from test_docs import DOCS, LIVING, ROOT, blocks

from tunix_lite import api

FRONT = (DOCS / "api" / "front.md").read_text()
SHOWN = [page for page in LIVING if DOCS in page.parents and "{literalinclude}" in page.read_text()]


@pytest.mark.parametrize("name", api.__all__)
def test_a_name_to_program_with_has_an_example_and_stands_on_its_page(name):
    kind = getattr(api, name)
    assert "Example: " in kind.__doc__, f"{name}: write an `Example: ` into its docstring"
    home = Path(inspect.getsourcefile(kind)).relative_to(ROOT)
    [row] = re.findall(rf"^\| `{name}` \|.*$", FRONT, re.MULTILINE)
    assert f"](../../{home})" in row, f"{name} is defined in {home}"
    assert len(re.findall(rf"^\.\. auto\w+:: tunix_lite\.api\.{name}$", FRONT, re.MULTILINE)) == 1


def test_the_page_of_names_has_no_other():
    assert set(re.findall(r"^\| `(\w+)` \|", FRONT, re.MULTILINE)) == set(api.__all__)
    assert set(re.findall(r"^\.\. auto\w+:: tunix_lite\.api\.(\w+)$", FRONT, re.MULTILINE)) == set(api.__all__)


def test_what_the_page_of_names_shows_is_made_of_them():
    shown = [ast.parse(body) for language, _, body in blocks(DOCS / "api" / "front.md") if language == "python"]
    assert len(shown) == 5
    ours = [node for tree in shown for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in ours if node.module.startswith("tunix_lite")]
    assert {node.module for node in ours} == {"tunix_lite.api"}
    assert {alias.name for node in ours for alias in node.names} <= set(api.__all__)


def test_the_task_of_that_page_is_one():
    [shown] = [body for _, _, body in blocks(DOCS / "api" / "front.md") if "TaskConfig(" in body and "import" in body]
    scope: dict = {}
    exec(shown, scope)
    task, example = scope["task"], scope["task"].source.train[0]
    assert task.rewards["few_words"].fn("one two", example) == 1.0
    assert task.rewards["correct"].fn(f"so {example['answer']}", example) == 1.0


@pytest.mark.parametrize("file", ["rl_loop.py", "notebook.py", "trainer_grpo.py"])
def test_examples_are_written_with_these_names_alone(file):
    tree = ast.parse((ROOT / "examples" / file).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module for module in modules if module.startswith("tunix_lite")} == {"tunix_lite.api"}


# ---- pages as a code host shows them


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.stem)
def test_a_file_that_a_page_shows_is_linked_beside_it(page):
    """A code host shows the directive and not the file."""
    found = re.findall(r"^```\{literalinclude\} (\S+)\n(?:.*\n)*?```\n\n(.*)$", page.read_text(), re.MULTILINE)
    assert len(found) == page.read_text().count("```{literalinclude}")
    for target, after in found:
        assert f"]({target})" in after, f"{page.name}: write [{Path(target).name}]({target}) below it"
