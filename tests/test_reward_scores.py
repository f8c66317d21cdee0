"""What a reward may say beside a number: None, a Score with a reason; what it gets beside a text: its tokens; and
weights that change over the run."""

import json
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from scored_rewards import of_group, of_text, one, shown

from tunix_lite.errors import ConfigError
from tunix_lite.rewards.scores import Score, from_json, no_answer, to_json
from tunix_lite.settings.compose import compose
from tunix_lite.tasks.task import Reward, Task, TaskConfig
from tunix_lite.types import Rollout
from tunix_lite.workers.pool import RewardsConfig


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


def grade(texts, settings, rewards, examples=None, G=None):
    """What a task says of completions of one token each."""
    source = SimpleNamespace(train=[{}], held_out=[{}] * len(texts))
    task = Task(TaskConfig(source, "", rewards, one, shown), Words(texts), 1, 8)
    ones = np.ones((len(texts), 1), bool)
    rollout = Rollout(np.arange(len(texts))[:, None], ones, ones, ones * 0.0, np.ones(len(texts)), ones * 0.0)
    with task.with_workers(settings, lambda text: None) as task:
        return task.grade(examples or [{}] * len(texts), rollout, G or len(texts))


def noted(graded) -> dict:
    return {name: graded.metrics[f"rewards/{name}"] for name in ("unscorable", "no_answer", "stopped", "dropped")}


def test_a_score_is_its_number_and_survives_its_ways():
    score = Score(0.25, "stopped", "why")
    assert score == 0.25 and score + 1 == 1.25 and isinstance(score, float) and json.dumps(score) == "0.25"
    for copy in (pickle.loads(pickle.dumps(score)), from_json(json.loads(json.dumps(to_json(score))))):
        assert copy == 0.25 and (copy.kind, copy.why) == ("stopped", "why")
    values = [1.0, None, no_answer("x")]
    found = from_json(json.loads(json.dumps(to_json(values))))
    assert found == values and found[2].why == "x"
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


@pytest.mark.parametrize("is_group", [False, True])
def test_none_is_an_error_unless_it_is_asked_for(is_group):
    reward = {"r": Reward(of_group if is_group else of_text, group=is_group)}
    with pytest.raises(ValueError, match="reward 'r' is None, not a number,"):
        grade(["1", "none"], RewardsConfig(workers=0), reward)
    graded = grade(["1", "none"], RewardsConfig("zero", workers=0), reward, examples=[{"a": 1}, {"a": 2}], G=1)
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
