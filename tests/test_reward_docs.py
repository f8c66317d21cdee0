"""docs/extend/reward.md followed to the letter, and every YAML of docs/guide/rewards.md built and called."""

import contextlib
import importlib.util
import re
from types import SimpleNamespace

import pytest
import yaml
from test_docs import DOCS, EXAMPLE, blocks, example_conf, with_the_example  # noqa: F401

from tunix_lite.config import build
from tunix_lite.rewards import answers, code, judge, math_verify, similarity, text
from tunix_lite.rewards.scores import CompletionText
from tunix_lite.settings.compose import compose
from tunix_lite.tasks.task import Reward, TaskConfig
from tunix_lite.workers.pool import Pool, RewardsConfig

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
    built = [build(dict[str, Reward], block["rewards"], "rewards") for block in yaml_of_the_guide()]
    for reward in [reward for rewards in built for reward in rewards.values()]:
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
    chosen |= {"max_tokens", "buffer_tokens", "start", "end", "steps", "begin", "text", "length"}
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
