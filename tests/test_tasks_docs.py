"""docs/extend/task.md followed to the letter."""

import re
import shlex

from test_docs import DOCS, EXAMPLE, blocks, example_conf, with_the_example  # noqa: F401

from tunix_lite.models.source import BUNDLED
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.settings.compose import compose
from tunix_lite.tasks.check_rows import check_all_rows
from tunix_lite.tasks.task import Task
from tunix_lite.workers.pool import check_portable

PAGE = DOCS / "extend" / "task.md"


def test_the_page_is_followed_to_the_letter(with_the_example, monkeypatch):  # noqa: F811
    found = blocks(PAGE)
    assert [argument for _, argument, _ in found if "example/" in argument] == [
        "example/my_task.py",
        "example/conf/task/roman.yaml",
    ]
    for language, _, body in found:
        if language == "python":
            exec(compile(body, str(PAGE), "exec"), {})
    lines = "\n".join(body for language, _, body in found if language == "bash").replace("\\\n", " ").splitlines()
    assert len(lines) == 2
    for line in lines:
        run = compose(shlex.split(line)[2:])
        check_portable(run.task.functions())
        lengths = run.generation.max_prompt_length, run.generation.max_new_tokens
        task = Task(run.task, Tokenizer.load(BUNDLED), *lengths)
        assert check_all_rows(task, True, run.evaluation.num_examples) == ""
        example = task.config.source.train[0]
        assert task.config.correct(example["completion"], example) == 1


def test_the_guide_names_every_task():
    page = (DOCS / "guide" / "tasks.md").read_text()
    rows = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    named = set(re.findall(r"`(\w+)`", rows))
    assert named == {file.stem for file in (DOCS.parent / "conf" / "task").glob("*.yaml")}
