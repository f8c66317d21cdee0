"""Several attempts at a problem, and those of reasoning-gym."""

import json

import pytest

from tunix_lite.environments.attempts import Attempts
from tunix_lite.environments.environment import Turn
from tunix_lite.environments.pool import EnvironmentPool
from tunix_lite.environments.settings import ConversationConfig
from tunix_lite.errors import ConfigError
from tunix_lite.settings.compose import compose


def length_over_four(completion, example):
    if completion == "raise":
        raise KeyError("no score")
    return len(completion) / 4


def play(environment, completions):
    environment.reset({"question": "?"})
    return [environment.step(completion) for completion in completions]


def test_a_wrong_answer_is_asked_again_and_the_last_one_counts():
    made = Attempts(length_over_four, attempts=3, later=0.5, feedback="{score:.2f}, {left} left")
    assert play(made, ["a", "ab", "abcd"]) == [
        Turn("0.25, 2 left"),
        Turn("0.50, 1 left"),
        # the right answer, halved for each of the two before it
        Turn("", 0.25, True, {"won": True, "attempts": 3}),
    ]
    assert play(made, ["abcd"]) == [Turn("", 1.0, True, {"won": True, "attempts": 1})]
    assert play(made, ["", "", "ab"])[-1] == Turn("", 0.125, True, {"won": False, "attempts": 3})


def test_a_score_that_fails_ends_its_conversation_alone():
    with EnvironmentPool(Attempts(length_over_four), ConversationConfig(on_error="zero", workers=0)) as pool:
        pool.reset(0, {}).result()
        pool.reset(1, {}).result()
        assert "KeyError: 'no score'" in pool.step(0, "raise").result().message
        assert pool.step(1, "abcd").result().turn.reward == 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [("attempts=0", "attempts=0 must be at least 1"), ("later=1.5", "later=1.5 must be from 0 to 1")],
)
def test_settings_of_attempts_that_cannot_be_meant_are_refused(setting, message):
    with pytest.raises(ConfigError) as caught:
        compose(["task=reasoning_gym_attempts", f"task.environment.{setting}"])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_attempts_at_problems_of_reasoning_gym_are_scored_by_its_own_verifier():
    pytest.importorskip("reasoning_gym")
    task = compose(["task=reasoning_gym_attempts", "task.source.tasks=[countdown]"]).task
    example = task.source.held_out[0]
    json.dumps(example)
    with EnvironmentPool(task.environment, ConversationConfig(timeout=60)) as pool:
        assert pool.reset(0, example).result().turn is None
        said = [pool.step(0, text).result().turn for text in ("<answer>1</answer>", example["completion"])]
    assert said[0] == Turn("That is not right. Try again.")
    assert said[1] == Turn("", 1.0, True, {"won": True, "attempts": 2})
