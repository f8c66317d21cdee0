"""Reward functions that fail, for real, or say more than a number: the run goes on as it was told to, nothing hangs."""

import io
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import faulty_rewards
import numpy as np
import pytest
from collecting import collect
from faulty_rewards import (
    FORKS,
    KINDS,
    as_it_is,
    begins,
    bound_nameless,
    faulty,
    length,
    negative,
    of_group,
    of_text,
    once,
    one,
    ranked,
    shown,
    slowly,
    undecodable,
)

from tunix_lite.algorithms.algorithm import Policy
from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.algorithms.weighting import per_sequence
from tunix_lite.basics.errors import ConfigError, RunFailed
from tunix_lite.basics.types import Rollout
from tunix_lite.rewards.scores import Score, from_json, no_answer, to_json
from tunix_lite.runs.evaluate import evaluate
from tunix_lite.runs.watch import keep_samples
from tunix_lite.settings.compose import compose
from tunix_lite.tasks.processes import Processes
from tunix_lite.tasks.task import Reward, Task, TaskConfig
from tunix_lite.tracking.console import Console
from tunix_lite.tracking.rundir import RunDir
from tunix_lite.workers.pool import Pool, RewardsConfig, check_portable

ZERO = RewardsConfig("zero", timeout=0.5)
FOLDERS = Path(faulty_rewards.__file__).parent, Path(faulty_rewards.__file__).parents[1]
WITH_TESTS = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, FOLDERS))}
NAMES = {"error": "errors", "timeout": "timeouts", "crash": "crashes", "not_number": "not_numbers"}


class Words:
    """A tokenizer whose token i is the whole of text i."""

    pad_id = 0

    def __init__(self, texts):
        self.texts = texts

    def decode(self, tokens):
        return self.texts[tokens[0]]

    def special_in(self, text):
        return []

    def prompt(self, asked):
        return [0]


def judge(texts, examples=None, say=lambda text: None, settings=ZERO, num_generations=None, **functions):
    """What a task with these functions, `faulty` alone by default, says of completions."""
    task = task_of(texts, **functions)
    with task.with_workers(settings, say) as task:
        G = num_generations or (1 if examples else len(texts))
        return task.grade(examples or [{}] * (len(texts) // G), said(len(texts)), G)


def task_of(texts, rewards=None, correct=faulty, extract=shown) -> Task:
    source = SimpleNamespace(train=[{}], held_out=[{}] * len(texts))
    rewards = rewards or {"faulty": Reward(faulty)}
    return Task(TaskConfig(source, "", rewards, correct, extract), Words(texts), 1, 1)


def said(count: int) -> Rollout:
    ones = np.ones((count, 1), bool)
    return Rollout(np.arange(count)[:, None], ones, ones, ones * 0.0, np.ones(count), ones * 0.0)


def counts(graded) -> dict:
    return {kind: graded.metrics[f"rewards/{name}"] for kind, name in NAMES.items()}


def are_gone(pids) -> bool:
    """Whether they end in time. One that nobody has waited for yet has ended, too."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not any(runs(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_counts_as_what_it_is_and_touches_no_other_completion(kind):
    words = KINDS[kind]
    texts = [text for word in words for text in (word, "good", "better")]
    lines = []
    # a slow machine may take a second to import numpy, which some of these need
    settings = ZERO if kind == "timeout" else RewardsConfig("zero", timeout=30.0)
    graded = judge(texts, say=lines.append, settings=settings)
    assert counts(graded) == {k: len(words) if k == kind else 0 for k in KINDS}
    np.testing.assert_array_equal(graded.rewards, [0.0, 4.0, 6.0] * len(words))
    assert graded.metrics["reward/faulty"] == graded.metrics["reward/mean"] == pytest.approx(10 / 3)
    assert graded.extracted == [text.upper() for text in texts], "a failed reward does not take the others with it"
    np.testing.assert_array_equal(graded.correct, [False, True, True] * len(words))
    assert graded.metrics["rewards/dropped"] == 0 and not graded.dropped.any()
    (line,) = lines
    failed = f"{NAMES[kind]} {len(words)}"
    assert line.startswith(f"rewards that failed, of {len(texts)} completions: {failed}; the first: reward 'faulty' ")


def test_what_is_a_number_is_taken_as_one(capfd):
    words = {"numpy": 0.5, "true": 1.0, "print": 1.0, "thread": 1.0, "stubborn thread": 1.0}
    words |= {"fork and run": 2.0, "fork and stay": 2.0, "good": 4.0}  # their children do not come back
    graded = judge(list(words), settings=RewardsConfig("raise", 20.0))
    np.testing.assert_array_equal(graded.rewards, list(words.values()))
    assert counts(graded) == dict.fromkeys(KINDS, 0)
    assert "x" * 1_000_000 in capfd.readouterr().out, "what a reward prints is seen"


@pytest.mark.parametrize("word", FORKS)
def test_after_a_fork_no_completion_gets_the_reward_of_another(word):
    """96 completions, each worth its length; the child of the tenth comes back into the worker, and ends there."""
    texts, examples = ["z" * (i + 1) for i in range(96)], [{"at": 10, "word": word}] * 96
    with closing(Pool({"once": once, "negative": negative}, RewardsConfig("zero", timeout=20.0))) as pool:
        futures = [pool.submit(text, example) for text, example in zip(texts, examples)]
        found = [future.result() for future in futures]
    assert [one["negative"] for one in found] == [("", -float(len(text))) for text in texts]
    assert [one["once"] for one in found] == [("", float(i + 1)) for i in range(96)]


def test_texts_that_are_no_text_are_counted_and_the_run_goes_on(tmp_path):
    """Undecodable names and escape codes in the text of an error and of `extract`, as far as console and samples."""
    lines = []
    console = Console(tmp_path / "train.log", 1, stream=io.StringIO())

    def say(text):
        console.say(text)
        lines.append(text)

    graded = judge(["surrogate", "good"], say=say, settings=RewardsConfig("zero", 20.0), extract=undecodable)
    assert counts(graded)["error"] == 1 and list(graded.rewards) == [0, 4] and len(lines) == 1
    keep_samples(RunDir(tmp_path), console, 1, graded, 3)
    console.close()
    log = (tmp_path / "train.log").read_text(encoding="utf-8")
    assert r"ValueError: no file \udc80\x1b[2J\x07 (" in log and r"[surrogate\ud800\x1b]" in log
    assert all(c.isprintable() or c == "\n" for c in log)
    rows = [json.loads(line) for line in (tmp_path / "samples" / "step_000001.jsonl").read_text().split("\n")[:-1]]
    assert [row["extracted"] for row in rows] == ["surrogate\\ud800\x1b", "good\\ud800\x1b"]


@pytest.mark.parametrize(
    "word, message",
    [
        (
            "raise",
            r"reward 'faulty' failed with KeyError: 'missing' \(faulty_rewards.py, line \d+\) for the completion",
        ),
        ("loop", r"reward 'faulty' took more than rewards.timeout=0.5 seconds for the completion 'loop'"),
        ("segfault", r"reward 'faulty' ended its process with SIGSEGV for the completion 'segfault'"),
        ("impostor", r"reward 'faulty' got the answer to another call from its process for the completion"),
        (
            "!raise",
            r"extract failed with KeyError: 'missing' \(faulty_rewards.py, line \d+\) for the completion '!raise'",
        ),
    ],
)
def test_raise_stops_with_the_name_of_the_culprit_and_the_remedy(word, message):
    remedy = "; rewards.on_error=zero or drop continues without it$"
    with pytest.raises(ValueError, match=f"^{message}.*{remedy}") as failed:
        judge(["good", word, "better"], settings=RewardsConfig("raise", 0.5))
    assert "\n" not in str(failed.value)


def test_correct_and_extract_fail_like_rewards_and_drop_nothing():
    texts = ["good", "loop", "!segfault", "better", "!raise"]
    graded = judge(texts, rewards={"length": Reward(length)}, settings=RewardsConfig("drop", 0.5))
    assert counts(graded) == {"error": 1, "timeout": 1, "crash": 1, "not_number": 0}
    np.testing.assert_array_equal(graded.rewards, [4, 4, 9, 6, 6])
    np.testing.assert_array_equal(graded.correct, [True, False, True, True, True])
    assert graded.extracted == ["GOOD", "LOOP", None, "BETTER", None]
    assert not graded.dropped.any()


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_dropped_counts_nowhere(workers):
    lines = []
    settings = RewardsConfig("drop", 0.5, workers)
    graded = judge(["a", "nan", "ccc", "raise"], say=lines.append, settings=settings)
    np.testing.assert_array_equal(graded.dropped, [False, True, False, True])
    np.testing.assert_array_equal(graded.rewards, [1, np.nan, 3, np.nan])
    assert graded.metrics["reward/mean"] == graded.metrics["reward/faulty"] == 2 and graded.metrics["reward/std"] == 1
    assert graded.metrics["rewards/dropped"] == 2
    assert lines[0].startswith("rewards that failed, of 4 completions: errors 1, not_numbers 1, dropped 2; the first: ")


def test_a_group_is_compared_without_the_dropped_and_one_alone_teaches_nothing():
    """By hand: [1, -, 3, 2] has mean 2 and std 1; [4, -, -, -] has nothing to compare; [2, 2, -, 2] agrees."""
    texts = ["a", "nan", "ccc", "bb", "dddd", "raise", "nan", "nan", "bb", "bb", "none", "bb"]
    policy = Policy(lambda *_, **__: said(12), None)
    algorithm = GRPO(num_generations=4, weighting=per_sequence)
    with task_of(texts).with_workers(RewardsConfig("drop"), lambda text: None) as task:
        batch, metrics, graded = collect(algorithm, policy, task, None, [{}] * 3, None)
    scale = 1 / (1 + 1e-4)
    np.testing.assert_allclose(batch.advantages[:, 0], [-scale, 0, scale, 0, *[0] * 8], rtol=1e-6)
    kept = np.array([1, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0, 1])
    np.testing.assert_array_equal(graded.dropped, kept == 0)
    np.testing.assert_allclose(batch.loss_weight[:, 0], kept / 7, rtol=1e-6)
    assert metrics["reward/groups_that_agree"] == pytest.approx(2 / 3)


def test_an_evaluation_counts_and_says_its_failures():
    texts, lines = ["a", "nan", "loop", "bb"], []
    policy = Policy(lambda *_, **__: said(4), None)
    with task_of(texts).with_workers(RewardsConfig("drop", 0.5), lines.append) as task:
        seen = evaluate(policy, task, None, task.held_out(4), None).metrics
    assert seen["eval/failed_rewards"] == 2 and seen["eval/reward"] == 1.5 and seen["eval/accuracy"] == 0.5
    assert len(lines) == 1
    raises = pytest.raises(RunFailed, match="^evaluation: rew")
    with task_of(texts).with_workers(RewardsConfig("raise"), print) as task, raises:
        evaluate(policy, task, None, task.held_out(4), None)


# ---- the workers


def test_rewards_come_back_in_the_order_of_rows():
    texts, examples = [str(i) * (i + 1) for i in range(8)], [{"seconds": 0.02 * (8 - i)} for i in range(8)]
    graded = judge(texts, examples, rewards={"r": Reward(slowly)}, settings=RewardsConfig(workers=3), correct=slowly)
    np.testing.assert_array_equal(graded.rewards, range(1, 9))


def test_several_workers_share_the_work():
    with closing(Pool({"r": begins}, RewardsConfig(workers=4, timeout=60.0))) as pool:
        first = [pool.submit("", {"seconds": 0.3}) for _ in range(12)]
        [future.result() for future in first]
        found = [pool.submit("", {"seconds": 1.0}) for _ in range(8)]
        began = sorted(future.result()["r"][1] for future in found)
    # whoever begins before the first one has ended works at the same time
    assert sum(moment < began[0] + 1.0 for moment in began) == 4


def test_rewards_run_elsewhere_without_jax_or_here_if_asked():
    for workers in (0, 2):
        graded = judge(["process"] * 9, settings=RewardsConfig(workers=workers))
        assert {int(pid) == os.getpid() for pid in graded.rewards} == {workers == 0}
    with closing(Pool({"jax": partial(faulty_rewards.imported, "jax")}, RewardsConfig())) as pool:
        assert pool.submit("", {}).result() == {"jax": ("", False)}
    with closing(Pool({"platform": partial(faulty_rewards.variable, "JAX_PLATFORMS")}, RewardsConfig())) as pool:
        assert pool.submit("", {}).result() == {"platform": ("", "cpu")}


def of_this_program(completion, example):
    return 1.0


of_this_program.__module__ = "__main__"
REMEDY = "put it at the top of a module of its own; or rewards.workers=0 runs rewards in the process that trains"


@pytest.mark.parametrize(
    "fn, why",
    [(bound_nameless, "<lambda>"), (of_this_program, "of_this_program is defined in __main__")],
)
def test_what_a_worker_cannot_be_given_is_refused_at_once_with_the_remedy(fn, why):
    with pytest.raises(ValueError, match=f"^reward 'mine': .*{why}.*{REMEDY}"):
        check_portable({"reward 'mine'": fn})
    run = compose([])
    task = replace(run.task, rewards={"mine": Reward(fn)})
    with pytest.raises(ValueError, match=f"reward 'mine': .*{REMEDY}"):
        replace(run, task=task)
    replace(run, task=task, rewards=RewardsConfig(workers=0))


def test_what_a_worker_cannot_import_is_said_with_the_remedy():
    module = types.ModuleType("made_up_in_a_test")
    exec("def reward(completion, example): return 1.0\nclass Odd: pass", module.__dict__)
    sys.modules["made_up_in_a_test"] = module
    try:
        with pytest.raises(ValueError, match=f"ModuleNotFoundError: No module named 'made_up_in_a_test'.*{REMEDY}"):
            judge(["a"], rewards={"mine": Reward(module.reward)})
        with pytest.raises(ValueError, match=r"an example cannot be sent to a worker process: ModuleNotFoundError"):
            judge(["a"], [{"odd": module.Odd()}])
    finally:
        del sys.modules["made_up_in_a_test"]
    with pytest.raises(ValueError, match=r"an example cannot be sent to a worker process: .*lock.*rewards.workers=0"):
        judge(["a"], [{"odd": threading.Lock()}])


def test_workers_leave_signals_to_the_run_and_one_that_is_killed_is_replaced():
    with closing(Pool({"r": length}, RewardsConfig())) as pool:
        pool.submit("a", {}).result()
        (worker,) = pool._workers
        for stop in (signal.SIGINT, signal.SIGTERM):
            os.killpg(worker.process.pid, stop)
        assert pool.submit("abc", {}).result() == {"r": ("", 3.0)}
        assert pool._workers == [worker], "it is the same one"
        os.kill(worker.process.pid, signal.SIGKILL)
        time.sleep(0.1)
        assert pool.submit("abc", {}).result() == {"r": ("", 3.0)}, "no call is blamed"


@pytest.mark.parametrize("busy", ["loop", "stop"])
def test_workers_are_gone_after_close_whatever_they_do(busy):
    before = threading.active_count()
    pool = Pool({"r": faulty}, RewardsConfig(timeout=60.0, workers=2))
    pool.submit("good", {}).result()
    futures = [pool.submit(busy, {}) for _ in range(40)]
    time.sleep(0.2)
    pids = [worker.process.pid for worker in pool._workers if worker is not None]
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 30 and pids and are_gone(pids)
    assert threading.active_count() == before
    assert not any(future.done() and not future.exception() for future in futures)


PARENT = """
import sys, time
from faulty_rewards import faulty
from tunix_lite.workers.pool import Pool, RewardsConfig
pool = Pool({"r": faulty}, RewardsConfig(timeout=60.0, workers=2))
[future.result() for future in [pool.submit("sleepy", {}) for _ in range(8)]]
while None in pool._workers:
    time.sleep(0.01)
pool.submit("loop", {})
time.sleep(0.2)
print(*(worker.process.pid for worker in pool._workers), flush=True)
time.sleep(60)
"""


def test_workers_are_gone_when_the_run_is_killed():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], env=WITH_TESTS, **pipes)
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(map(runs, pids))
        os.kill(parent.pid, signal.SIGKILL)
        assert are_gone(pids)
    finally:
        parent.kill()
        parent.wait()


# ---- a reward of a whole group


THREE_GROUPS = ["aa", "a", "aaa", "b", "bbb", "bb", "c", "cc", "ccc"]
RANKED = {"length": Reward(length, 0.0), "rank": Reward(ranked, 2.0, group=True)}


def three_examples(**second) -> list[dict]:
    return [{"n": 1}, {"n": 2, **second}, {"n": 3}]


def test_a_reward_ranks_the_completions_of_each_group():
    settings = RewardsConfig("raise", 20.0, workers=2)
    graded = judge(THREE_GROUPS, three_examples(), settings=settings, num_generations=3, rewards=RANKED, correct=length)
    np.testing.assert_array_equal(graded.rewards, [1, 0, 2, 0, 2, 1, 0, 1, 2])
    assert graded.metrics["reward/rank"] == 0.5 and graded.metrics["reward/mean"] == 1
    assert graded.metrics["reward/length"] == 2, "the reward of each completion is called as before"


def test_a_group_is_graded_when_its_last_completion_has_ended_whatever_their_order():
    called = []

    def seen(completions, example):
        called.append((example["n"], completions))
        return [1.0] * len(completions)

    task = task_of(THREE_GROUPS, {"r": Reward(seen, group=True)}, length)
    grader = task.grader(three_examples(), 3)
    for row in (4, 8, 3, 7, 5, 6):
        grader.submit(row, [row])
    assert called == [(2, ["b", "bbb", "bb"]), (3, ["c", "cc", "ccc"])]
    graded = grader.results(said(9))
    assert called[2:] == [(1, ["aa", "a", "aaa"])] and list(graded.rewards) == [1] * 9


@pytest.mark.parametrize(
    "on_error, fails, kind, words",
    [
        ("zero", "loop", "timeout", "took more than rewards.timeout=0.5 seconds"),
        ("drop", "count", "not_number", "is 2 numbers, not 3,"),
    ],
)
def test_a_call_that_fails_for_a_group_is_one_failure_of_all_its_completions(on_error, fails, kind, words):
    lines = []
    settings = RewardsConfig(on_error, 0.5)
    examples = three_examples(fails=fails)
    graded = judge(THREE_GROUPS, examples, lines.append, settings, 3, rewards=RANKED, correct=length)
    assert counts(graded) == {k: int(k == kind) for k in KINDS}
    of_second = [np.nan] * 3 if on_error == "drop" else [0] * 3
    np.testing.assert_array_equal(graded.rewards, [1, 0, 2, *of_second, 0, 1, 2])
    assert graded.metrics["rewards/dropped"] == (3 if on_error == "drop" else 0)
    assert f"reward 'rank' {words} for the completions ['b', 'bbb', 'bb']" in lines[0]


def test_two_processes_share_groups_and_completions():
    """Nine completions and three groups of two processes: each makes its share of the calls, and both have all."""
    given, asked, barrier = [None, None], [[], []], threading.Barrier(2, timeout=30)

    def run(process: int):
        def share(value):
            given[process] = value
            barrier.wait()
            return list(given)

        def seen(completions, example):
            asked[process].append(example["n"])
            return ranked(completions, example)

        task = task_of(THREE_GROUPS, {"rank": Reward(seen, group=True)}, length)
        task = replace(task, processes=Processes(process, 2, share))
        return task.grade(three_examples(), said(9), 3).rewards.tolist()

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(run, (0, 1)))
    assert both == [[0.5, 0, 1, 0, 1, 0.5, 0, 0.5, 1]] * 2
    assert asked == [[2], [1, 3]]


# ---- what a reward may say beside a number: None, a Score with a reason


def grade(texts, settings, rewards, G=None):
    functions = {"rewards": rewards, "correct": one, "extract": as_it_is}
    return judge(texts, settings=settings, num_generations=G, **functions)


def noted(graded) -> dict:
    return {name: graded.metrics[f"rewards/{name}"] for name in ("unscorable", "no_answer", "stopped", "dropped")}


def test_a_score_is_its_number_and_survives_its_ways():
    score = Score(0.25, "stopped", "why")
    assert score == 0.25 and score + 1 == 1.25 and isinstance(score, float) and json.dumps(score) == "0.25"
    for copy in (pickle.loads(pickle.dumps(score)), from_json(json.loads(json.dumps(to_json(score))))):
        assert copy == 0.25 and (copy.kind, copy.why) == ("stopped", "why")
    found = from_json(json.loads(json.dumps(to_json([1.0, None, no_answer("x")]))))
    assert found == [1.0, None, 0.0] and found[2].why == "x"
    with pytest.raises(ValueError, match="kind='other'; it is no_answer or stopped"):
        Score(0, "other", "why")


@pytest.mark.parametrize("workers, is_group", [(0, False), (1, True)])
def test_what_kept_a_completion_from_more_is_counted_and_is_no_failure(workers, is_group):
    texts = ["1", "no answer", "stopped", "no answer"]
    reward = Reward(of_group if is_group else of_text, group=is_group)
    graded = grade(texts, RewardsConfig(workers=workers), {"r": reward})
    np.testing.assert_array_equal(graded.rewards, [1, 0, 0.25, 0])
    assert noted(graded) == {"unscorable": 0, "no_answer": 2, "stopped": 1, "dropped": 0}
    assert graded.failures[1]["reward 'r'"] == "no_answer: it holds no number"
    assert graded.metrics["reward/r"] == 1.25 / 4


def test_none_is_an_error_unless_it_is_asked_for():
    reward = {"r": Reward(of_group, group=True)}
    with pytest.raises(ValueError, match="reward 'r' is None, not a number,"):
        grade(["1", "none"], RewardsConfig(workers=0), reward)
    graded = grade(["1", "none"], RewardsConfig("zero", workers=0), reward, G=1)
    np.testing.assert_array_equal(graded.rewards, [1, 0])
    assert graded.metrics["rewards/not_numbers"] == 1 and noted(graded)["unscorable"] == 0


@pytest.mark.parametrize("workers, is_group", [(0, False), (1, True)])
def test_an_unscorable_completion_leaves_the_baseline(workers, is_group):
    rewards = {"r": Reward(of_group if is_group else of_text, group=is_group), "one": Reward(one)}
    settings = RewardsConfig(workers=workers, on_none="unscorable")
    graded = grade(["1", "none", "3"], settings, rewards)
    np.testing.assert_array_equal(graded.rewards, [2, np.nan, 4])
    np.testing.assert_array_equal(graded.dropped, [False, True, False])
    assert noted(graded) == {"unscorable": 1, "no_answer": 0, "stopped": 0, "dropped": 1}
    assert graded.metrics["reward/r"] == 2 and graded.metrics["reward/mean"] == 3
    assert graded.failures[1]["reward 'r'"].startswith("unscorable: is None")


def test_a_reward_that_skips_leaves_the_score_to_the_others():
    rewards = {"a": Reward(of_text), "b": Reward(of_text, 10.0), "one": Reward(one)}
    settings = RewardsConfig(workers=0, on_none="skip")
    graded = grade(["1", "none", "3"], settings, rewards)
    np.testing.assert_array_equal(graded.rewards, [12, 1, 34])
    assert graded.metrics["reward/a"] == 2, "a mean of those that it scored"
    assert noted(graded)["unscorable"] == 0 and not graded.dropped.any()
    del rewards["one"]
    graded = grade(["1", "none", "3"], settings, rewards)
    np.testing.assert_array_equal(graded.dropped, [False, True, False])
    assert noted(graded)["unscorable"] == 1, "all skipped it"
    with pytest.raises(ValueError, match=r"all 1 completions were dropped; the first: reward 'a' is None"):
        grade(["none"], settings, rewards)


def test_what_none_means_is_one_of_three():
    with pytest.raises(ConfigError, match=r"rewards: on_none='zero'; it is error, unscorable or skip"):
        compose(["rewards.on_none=zero"])
