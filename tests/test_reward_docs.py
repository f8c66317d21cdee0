"""docs/extend/reward.md followed to the letter, every YAML of docs/guide/rewards.md built and called; and what a start tries."""

import contextlib
import importlib.util
import os
import re
import shlex
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import rewards_to_try as tried
import yaml
from test_docs import DOCS, EXAMPLE, blocks, example_conf, with_the_example  # noqa: F401

from tunix_lite.basics.errors import ConfigError
from tunix_lite.models.source import BUNDLED
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.rewards import answers, code, judge, math_verify, similarity, text
from tunix_lite.rewards.model import RewardModel
from tunix_lite.rewards.scores import CompletionText
from tunix_lite.rewards.text import brevity
from tunix_lite.runs import setup
from tunix_lite.runs.setup import prepare
from tunix_lite.settings.compose import compose
from tunix_lite.settings.config import build
from tunix_lite.tasks.check_rows import check_all_rows
from tunix_lite.tasks.sources import Arithmetic
from tunix_lite.tasks.task import Reward, Task, TaskConfig
from tunix_lite.tasks.try_rewards import failing_functions
from tunix_lite.tracking.rundir import RunDir
from tunix_lite.workers.pool import Pool, RewardsConfig, check_portable

GUIDE = DOCS / "guide" / "rewards.md"
EXTEND = DOCS / "extend" / "reward.md"
EXAMPLE_ROW = {"question": "3 + 4", "answer": "7", "tests": ["assert True"]}


def yaml_of_the_guide() -> list[dict]:
    bodies = [body for language, _, body in blocks(GUIDE) if language == "yaml"]
    return [yaml.safe_load(body.replace("${generation.max_new_tokens}", "64")) for body in bodies]


@pytest.fixture
def as_if_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)


def test_every_reward_that_is_there_is_on_the_page_with_all_its_settings(as_if_installed):
    on_the_page = {pasted["_target_"].rpartition(".")[2] for pasted in targets(yaml_of_the_guide())}
    classes = {
        name: set(kind.__dataclass_fields__)
        for module in (answers, code, judge, math_verify, similarity, text)
        for name, kind in vars(module).items()
        if isinstance(kind, type) and kind.__module__ == module.__name__ and "__call__" in vars(kind)
    }
    assert len(classes) >= 11 and classes.keys() <= on_the_page
    shown = GUIDE.read_text()
    for name, fields in classes.items():
        missing = {field for field in fields if not re.search(rf"\b{field}\b", shown)}
        assert not missing, f"{name}: the page does not name {missing}"


def targets(value) -> list[dict]:
    if isinstance(value, dict):
        own = [value] if "_target_" in value else []
        return own + [found for item in value.values() for found in targets(item)]
    return [found for item in value for found in targets(item)] if isinstance(value, list) else []


def test_every_yaml_of_the_page_is_a_task_and_its_rewards_can_be_called(as_if_installed):
    source = SimpleNamespace(train=[], held_out=[])
    called = 0
    built = [build(dict[str, Reward | RewardModel], block["rewards"], "rewards") for block in yaml_of_the_guide()]
    for reward in [reward for rewards in built for reward in rewards.values()]:
        if isinstance(reward, RewardModel):  # the folder is the reader's
            continue
        TaskConfig(source, "{question}", {"r": reward})
        if isinstance(reward.fn, judge.Judge | math_verify.MathVerify):
            continue
        completion = CompletionText("<think>3 + 4</think><answer>7</answer>\n```python\n3\n```", 20)
        row = EXAMPLE_ROW | {"answer": "B" if isinstance(reward.fn, answers.ChoiceAnswer) else "7"}
        found = reward.fn([completion] if reward.group else completion, row)
        assert all(isinstance(score, float | int) for score in (found if reward.group else [found]))
        called += 1
    assert called >= 10


def test_the_defaults_on_the_page_are_those_of_the_code(as_if_installed):
    """Where a block names every setting of a reward, it shows the defaults; what has none is chosen for the page."""
    chosen = {"base_url", "model", "prompt", "cache", "choices", "target", "width", "max_length", "correct", "pattern"}
    chosen |= {"max_tokens", "buffer_tokens", "start", "end", "steps", "begin", "text", "length", "weights"}
    for pasted in targets(yaml_of_the_guide()):
        module, _, name = pasted["_target_"].rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        for field, value in pasted.items():
            if field != "_target_" and field not in chosen:
                default = kind.__dataclass_fields__[field].default
                value = tuple(value) if isinstance(value, list) else value
                assert value == default, f"{name}.{field}: the page shows {value}, and the default is {default}"


# ---- a reward of your own


def test_the_task_of_the_page_grades_as_it_says(with_the_example):  # noqa: F811
    run = compose(["task=my_task"])
    assert {*run.task.rewards} == {*re.findall(r"`reward/(\w+)`", EXTEND.read_text())} - {"mean"}
    with contextlib.closing(Pool(run.task.functions(), run.rewards)) as pool:
        found = pool.submit(CompletionText("2 + 3 = 5", 6), {"question": "2 + 3", "answer": "5"}).result()
    assert {name: value for name, (_, value) in found.items()} == {
        "reward 'correct'": 1.0,
        "reward 'working'": 1.0,
        "reward 'few_words'": 1.0,
        "extract": "5",
    }
    run = compose(["task=my_task", "task.rewards.few_words.fn.most=8", "task.rewards.few_words.weight=0"])
    assert run.task.rewards["few_words"].fn.most == 8 and run.task.weights["few_words"] == 0


def test_rewards_of_trl_and_verl_run_as_the_page_says(with_the_example):  # noqa: F811
    bodies = [yaml.safe_load(body) for language, _, body in blocks(EXTEND) if language == "yaml"]
    found = {}
    for body in bodies:
        found |= build(dict[str, Reward], body.get("rewards", {}), "rewards")
    row = {"question": "2 + 3", "answer": "5", "data_source": "sums", "reward_model": {"ground_truth": "5"}}
    row["extra_info"] = {"index": 0}
    task = TaskConfig(SimpleNamespace(train=[], held_out=[]), "{question}", found)
    with contextlib.closing(Pool(task.functions(), RewardsConfig(timeout=60.0))) as pool:
        group = pool.submit(["it is 5", "6"], row, ["reward 'accuracy'"]).result()
        single = pool.submit(CompletionText("it is 5", 4), row, ["reward 'score'"]).result()
    assert group == {"reward 'accuracy'": ("", [1.0, 0.0])} and single == {"reward 'score'": ("", 1.0)}


# ---- rewards are called before a run


HALF_A_SECOND = RewardsConfig(timeout=0.5)


def task_to_try(**rewards):
    found = {name: fn if isinstance(fn, Reward) else Reward(fn) for name, fn in rewards.items()}
    return TaskConfig(Arithmetic(worked=1), "{question}", found)


def test_what_fails_on_every_completion_is_named_and_nothing_else():
    """Each in words; a function that takes too long, or reads marks of its own, is not judged."""
    task = task_to_try(
        wrong=tried.wrong_key,
        short=Reward(tried.too_few, group=True),
        later=tried.waits,
        marks=tried.inside_marks,
        each=Reward(tried.one_each, group=True),
        stuck=tried.stuck,
    )
    found = failing_functions(task, {"question": "1 + 2", "answer": "3"}, 3, HALF_A_SECOND)
    wrong, short, later = found.split("; ")
    assert wrong == (
        "reward 'wrong' failed with KeyError: 'anser' (rewards_to_try.py, line 9) for the completion "
        "'I think that the answer is 7.'"
    )
    assert short.startswith("reward 'short' is 1 numbers, not 3, for the completions ['I think")
    assert later.startswith("reward 'later' is <coroutine object waits") and "not a number, for the completion" in later


def test_objects_and_rewards_of_this_package_are_not_called_and_functions_are_in_a_process_of_their_own(tmp_path):
    plain, object_ = tmp_path / "plain", tmp_path / "object"
    task = task_to_try(server=tried.Server(str(object_)), short=partial(brevity, length=0))
    assert failing_functions(task, {"answer": "3"}, 4, HALF_A_SECOND) == "" and not object_.exists()
    called = task_to_try(plain=partial(tried.counts, file=str(plain)))
    assert failing_functions(called, {"answer": "3"}, 4, HALF_A_SECOND) == ""
    pids = plain.read_text().split()
    assert len(pids) == 2 and len(set(pids)) == 1 and pids[0] != str(os.getpid())


def test_a_failing_reward_ends_the_start_or_is_a_warning_as_on_error_says(tmp_path, monkeypatch):
    """Only the first process calls rewards; nothing is written; the second look of a start calls nothing again."""
    run = compose(["evaluation.num_examples=4"])
    run = replace(run, task=replace(run.task, rewards=run.task.rewards | {"wrong": Reward(tried.wrong_key)}))
    folder = RunDir(tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"^task: tried on made-up completions .*: reward 'wrong' failed with KeyError: 'anser'"
    ):
        prepare(run, folder)
    assert not folder.path.exists()
    parts = prepare(replace(run, rewards=replace(run.rewards, on_error="drop")), folder)
    assert parts.failing.startswith("reward 'wrong' failed")
    assert prepare(run, folder, parts).failing == parts.failing
    monkeypatch.setattr(setup.jax, "process_index", lambda: 1)
    assert prepare(run, folder).failing == ""


# ---- the pages of tasks


OF_TASKS = DOCS / "extend" / "task.md"


def test_the_page_of_tasks_is_followed_to_the_letter(with_the_example, monkeypatch):  # noqa: F811
    found = blocks(OF_TASKS)
    assert [argument for _, argument, _ in found if "example/" in argument] == [
        "example/my_task.py",
        "example/conf/task/roman.yaml",
    ]
    for language, _, body in found:
        if language == "python":
            exec(compile(body, str(OF_TASKS), "exec"), {})
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
