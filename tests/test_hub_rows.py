"""Data sets of the hub by name, from a hub of our own on the loopback: which split, which commit, from which cache."""

import json
import re
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from hub_server import Hub, serving

from tunix_lite.models.source import BUNDLED
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.runs.fingerprint import with_commits_of
from tunix_lite.settings.compose import compose
from tunix_lite.tasks import hub_rows
from tunix_lite.tasks.hub_rows import HubData, pinned
from tunix_lite.train import train

# Not imported before a test needs it: it takes a second in each process of the suite.
pytestmark = pytest.mark.skipif(find_spec("datasets") is None, reason="needs datasets")
ROOT = Path(__file__).parents[1]
OLD, NEW = "a" * 40, "b" * 40


def lines(*answers: str) -> bytes:
    return "".join(json.dumps({"problem": f"{a} + 0", "answer": a}) + "\n" for a in answers).encode()


CARD = b"""---
configs:
- config_name: main
  default: true
  data_files:
  - {split: train, path: main/train-*.jsonl}
  - {split: test, path: main/test.jsonl}
- config_name: hard
  data_files:
  - {split: train, path: hard.jsonl}
---
"""
FILES = {
    "README.md": CARD,
    "main/train-0.jsonl": lines("1", "2"),
    "main/train-1.jsonl": lines("3"),
    "main/test.jsonl": lines("9"),
    "hard.jsonl": lines("77"),
}
REPOS = {
    "org/sums": {OLD: FILES, NEW: FILES | {"main/train-0.jsonl": lines("1001", "1002")}},
    "org/plain": {OLD: {"train.jsonl": lines("5")}},
}


class Rows(Hub):
    repos = REPOS
    kind = "datasets"


@pytest.fixture
def hub(tmp_path):
    """hub(code, **environment): what `code` prints as JSON."""
    Rows.main = OLD
    with serving(Rows, tmp_path / "cache", HEAD) as run:
        yield lambda code, **environment: json.loads(run(code, **environment).splitlines()[-1])


HEAD = """
import json
from tunix_lite.tasks.hub_rows import _builder, pinned, rows_of_hub

def read(name, split="train", is_streamed=False, first=None):
    try:
        full = pinned(name, split)
        rows = []
        for number, row in rows_of_hub(full, is_streamed):
            rows.append([number, row["answer"]])
            if number == first:
                break
        return [full, rows]
    except ValueError as error:
        return str(error)
"""
TRAIN = [[1, "1"], [2, "2"], [3, "3"]]


def test_a_name_gives_the_rows_of_a_config_and_a_split(hub):
    names = ["org/sums", "org/sums:main", "org/sums:test", "org/sums:main:test", "org/sums:hard", "org/sums::test"]
    names += [f"org/sums@{NEW}:main", "org/plain", "org/plain:train"]
    # to evaluate with, the same name is the split `test`
    reads = f"[read('hub:' + name) for name in {names}] + [read('hub:org/sums', 'test')]"
    read = hub(f"print(json.dumps({reads}))")
    whole, test = [f"hub:org/sums@{OLD}:main:train", TRAIN], [f"hub:org/sums@{OLD}:main:test", [[1, "9"]]]
    hard = [f"hub:org/sums@{OLD}:hard:train", [[1, "77"]]]
    new = [f"hub:org/sums@{NEW}:main:train", [[1, "1001"], [2, "1002"], [3, "3"]]]
    plain = [f"hub:org/plain@{OLD}:default:train", [[1, "5"]]]
    assert read == [whole, whole, test, test, hard, test, new, plain, plain, test]


def test_rows_are_streamed_as_they_are_read(hub, tmp_path):
    name, rows = hub("print(json.dumps(read('hub:org/sums', is_streamed=True, first=2)))")
    assert (name, rows) == (f"hub:org/sums@{OLD}:main:train", TRAIN[:2])
    assert not [*(tmp_path / "cache").rglob("*.arrow")] and not [*(tmp_path / "cache").rglob("train-0.jsonl")]


def test_without_a_network_the_cache_has_every_commit_that_was_read(hub):
    hub("print(json.dumps(read('hub:org/sums')))")
    Rows.main = NEW
    name, rows = hub("print(json.dumps(read('hub:org/sums')))")
    assert name == f"hub:org/sums@{NEW}:main:train" and rows[0] == [1, "1001"]
    code = f"print(json.dumps([read('hub:org/sums@{OLD}:main'), read('hub:org/sums@{NEW}:main:train')]))"
    # no address is listening there
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        assert hub(code, **environment) == [[f"hub:org/sums@{OLD}:main:train", TRAIN], [name, rows]]


def test_what_cannot_be_had_says_what_to_type(hub):
    names = ["org/sums:main", "org/absent", "org/sums@v9", "org/sums:main:valid"]
    read = f"print(json.dumps([read('hub:' + name) for name in {names}]))"
    _, absent, revision, split = hub(read)
    assert absent.startswith("hub:org/absent: ") and "or it is private: then run `hf auth login`" in absent
    assert revision.startswith("hub:org/sums@v9: org/sums has no revision v9; a revision is a branch, a tag or")
    assert split == (
        "hub:org/sums:main:valid: there is no split valid; write hub:org/sums:main:train, hub:org/sums:main:test"
    )
    offline = hub("print(json.dumps(read('hub:org/plain:default')))", HF_HUB_OFFLINE="1")
    assert offline.startswith("hub:org/plain:default is not in the cache ") and "HF_HUB_OFFLINE" in offline
    line = re.search(
        r"type python -c '(.*)' and bring that cache here; or give a folder of its files: hub:FOLDER", offline
    )
    # what it says to type works, and fills the cache
    hub(f"{line[1]}\nprint('null')")
    assert hub("print(json.dumps(read('hub:org/plain:default')))", HF_HUB_OFFLINE="1")[1] == [[1, "5"]]


# ---- in this process, from a folder in the hub's layout


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """folder(commit): the folder of org/sums at a commit, as `git clone` would make it."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    hub_rows._builder.cache_clear()

    def make(commit: str) -> Path:
        for name, data in REPOS["org/sums"][commit].items():
            file = tmp_path / commit / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        return tmp_path / commit

    return make


def test_a_folder_in_the_layout_of_the_hub_is_read_alike(folder):
    name = f"hub:{folder(OLD)}:main"
    words = ["task=jsonl", "algorithm=sft", f"task.train={name}", f"task.held_out={name}", "task.prompt={problem}"]
    source = compose([*words, "task.fields={completion: answer}"]).task.source
    assert [row["completion"] for row in source.train] == ["1", "2", "3"]
    assert [row["completion"] for row in source.held_out] == ["9"], "the split `test` where none is named"
    assert source.train.file == f"{name}:train" and source.train[2].place == f"{name}:train, row 3"
    with pytest.raises(ValueError, match=f"{name}:train, row 1: task.fields={{completion: solution}}, and the row has"):
        _ = compose([*words, "task.fields={completion: solution}"]).task.source.train


def test_text_of_the_hub_is_read_from_its_cache(folder, tmp_path):
    name = f"hub:{folder(OLD)}:main"
    words = ["algorithm=sft", "task=text", f"task.train={name}", f"task.held_out={name}", "task.field=problem"]
    config = compose([*words, f"task.cache={tmp_path / 'text'}", "task.row_tokens=8"]).task
    assert [*config.texts(None)] == ["1 + 0", "2 + 0", "3 + 0"] and [*config.texts(2)] == ["1 + 0", "2 + 0"]
    source = replace(config.source, tokenizer=Tokenizer.load(BUNDLED))
    assert source.train.num_documents == 3 and source.held_out.num_documents == 1


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("hub:org/name", ("org/name", None, None, None)),
        ("hub:org/name:main", ("org/name", None, "main", None)),
        ("hub:org/name::test", ("org/name", None, None, "test")),
        ("hub:org/name@v2:main:test", ("org/name", "v2", "main", "test")),
    ],
)
def test_a_name_has_up_to_four_parts(name, parts):
    data = HubData.parse(name)
    assert data == parts and HubData.parse(str(data)) == data


def test_a_folder_that_is_not_there_is_no_name_of_the_hub(tmp_path):
    with pytest.raises(ValueError, match=f"hub:{tmp_path}/none:main: there is no such folder"):
        pinned(f"hub:{tmp_path}/none:main", "train")


@pytest.mark.parametrize("name", ["hub:", "hub:a:b:c:d", "hub:org/name@:main"])
def test_another_form_is_refused_before_anything_is_read(name):
    with pytest.raises(ValueError, match=r"a data set of the hub is hub:org/name, with @REVISION, :CONFIG and :SPLIT"):
        compose(["task=jsonl", "algorithm=sft", f"task.train='{name}'"])


@pytest.mark.parametrize(
    ("ours", "taken"),
    [
        ("hub:org/sums", f"hub:org/sums@{OLD}"),
        ("hub:org/sums:main", f"hub:org/sums@{OLD}:main"),
        ("hub:org/sums:main:train", f"hub:org/sums@{OLD}:main:train"),
        ("hub:org/others", "hub:org/others"),
        (f"hub:org/sums@{NEW}", f"hub:org/sums@{NEW}"),  # the user wants that one
    ],
)
def test_a_resumed_run_takes_the_commit_that_it_began_with(ours, taken):
    task = compose(["task=jsonl", "algorithm=sft", f"task.train={ours}"]).task
    before = {"task": {"train": f"hub:org/sums@{OLD}:main:train", "held_out": None}}
    assert with_commits_of(before, task).train == taken
    assert with_commits_of({"task": {"train": "rows.jsonl"}}, task) == with_commits_of({}, task) == task


def test_a_run_goes_on_with_the_commit_in_its_folder(folder, tmp_path, monkeypatch):
    """The data set changes between two starts; the second one reads what the first one read."""
    import datasets

    asked = []

    def load(repo, config, revision=None):
        asked.append(revision)
        commit = revision or main
        builder = datasets.load_dataset_builder.original(str(folder(commit)), config)
        builder.hash = commit
        return builder

    load.original = datasets.load_dataset_builder
    monkeypatch.setattr(datasets, "load_dataset_builder", load)
    words = ["task=jsonl", "algorithm=sft", "task.train=hub:org/sums", "task.held_out=hub:org/sums"]
    words += ["task.prompt={problem}", "'task.fields={completion: answer}'".strip("'"), "model=random"]
    words += ["training.prompts_per_step=2", "evaluation.num_examples=0"]
    words += ["model.mesh_shape=[[1,1],[fsdp,tp]]", "training.packing=none", "model.architecture.num_layers=2"]
    main = OLD
    train(compose([*words, "training.max_steps=1"]), tmp_path / "run")
    kept = json.loads((tmp_path / "run" / "fingerprint.json").read_text())["task"]
    assert f"; hub:org/sums@{OLD}:main:train\n" in (tmp_path / "run" / "train.log").read_text()
    assert kept["train"] == f"hub:org/sums@{OLD}:main:train" and kept["held_out"] == f"hub:org/sums@{OLD}:main:test"
    main = NEW
    hub_rows._builder.cache_clear()
    asked.clear()
    train(compose([*words, "training.max_steps=2"]), tmp_path / "run")
    assert set(asked) == {OLD}
    again = json.loads((tmp_path / "run" / "fingerprint.json").read_text())
    assert again["task"] == kept
    # a new run reads what is there now
    hub_rows._builder.cache_clear()
    assert pinned("hub:org/sums", "train") == f"hub:org/sums@{NEW}:main:train"


def test_without_the_library_the_extra_is_named(monkeypatch):
    hub_rows._builder.cache_clear()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ValueError, match=r"hub:org/sums: it is read by the datasets library: pip install -e '.\[hub\]'"
    ):
        pinned("hub:org/sums", "train")
