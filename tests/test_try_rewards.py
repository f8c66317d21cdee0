"""Plain rewards of a user are called before anything compiles; what fails on every completion ends the start."""

import os
from dataclasses import replace
from functools import partial

import pytest
import rewards_to_try as tried

from tunix_lite.basics.errors import ConfigError
from tunix_lite.rewards.text import brevity
from tunix_lite.runs import setup
from tunix_lite.runs.setup import prepare
from tunix_lite.settings.compose import compose
from tunix_lite.tasks.sources import Arithmetic
from tunix_lite.tasks.task import Reward, TaskConfig
from tunix_lite.tasks.try_rewards import failing_functions
from tunix_lite.tracking.rundir import RunDir
from tunix_lite.workers.pool import RewardsConfig

SETTINGS = RewardsConfig(timeout=0.5)


def task_of(**rewards):
    found = {name: fn if isinstance(fn, Reward) else Reward(fn) for name, fn in rewards.items()}
    return TaskConfig(Arithmetic(worked=1), "{question}", found)


def test_what_fails_on_every_completion_is_named_and_nothing_else():
    """Each in words; a function that takes too long, or reads marks of its own, is not judged."""
    task = task_of(
        wrong=tried.wrong_key,
        short=Reward(tried.too_few, group=True),
        later=tried.waits,
        marks=tried.inside_marks,
        each=Reward(tried.one_each, group=True),
        stuck=tried.stuck,
    )
    found = failing_functions(task, {"question": "1 + 2", "answer": "3"}, 3, SETTINGS)
    wrong, short, later = found.split("; ")
    assert wrong == (
        "reward 'wrong' failed with KeyError: 'anser' (rewards_to_try.py, line 9) for the completion "
        "'I think that the answer is 7.'"
    )
    assert short.startswith("reward 'short' is 1 numbers, not 3, for the completions ['I think")
    assert later.startswith("reward 'later' is <coroutine object waits") and "not a number, for the completion" in later


def test_objects_and_rewards_of_this_package_are_not_called_and_functions_are_in_a_process_of_their_own(tmp_path):
    plain, object_ = tmp_path / "plain", tmp_path / "object"
    task = task_of(server=tried.Server(str(object_)), short=partial(brevity, length=0))
    assert failing_functions(task, {"answer": "3"}, 4, SETTINGS) == "" and not object_.exists()
    called = task_of(plain=partial(tried.counts, file=str(plain)))
    assert failing_functions(called, {"answer": "3"}, 4, SETTINGS) == ""
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
