"""A wrong environment is named in one message, before anything is compiled."""

import pytest

from tunix_lite.environments.pool import EnvironmentPool
from tunix_lite.environments.settings import ConversationConfig
from tunix_lite.errors import ConfigError
from tunix_lite.models.source import BUNDLED
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.runs.setup import check_environment_answers
from tunix_lite.settings.compose import compose
from tunix_lite.tasks.task import Task

HERE = "environments_to_try"
TOOLS = "{{_target_: tunix_lite.environments.tools.ToolEnvironment, tools: [environments_to_try.{}]}}"
ZERO = ConversationConfig(on_error="zero")


def task_of(name: str) -> Task:
    run = compose([f"task.environment={{_target_: {HERE}.{name}}}"])
    return Task(run.task, Tokenizer.load(BUNDLED), 32, 32)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", "the environment failed with KeyError: 'secret' (environments_to_try.py, line"),
        ("Nonsense", "from step for the completion 'The answer is 7.'; it is Turn(observation, reward, done)"),
        (
            "BadReset",
            "returned the observation 7 from reset for the example {'question': '2 + 2'}; it is a text, or a list",
        ),
        ("makes_none", "is None, which has no method `reset`"),
    ],
)
def test_an_environment_that_fails_is_named_before_the_run(name, message):
    task = task_of(name)
    with pytest.raises(ValueError, match="tried before the run: the environment") as caught:
        check_environment_answers(task, ConversationConfig(workers=0), {"question": "2 + 2"})
    assert message in str(caught.value)
    # a user who wants to go on without it may
    check_environment_answers(task, ZERO, {})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (f"{HERE}.NoStep", "environment is a NoStep, which has no method `step`"),
        (f"{HERE}.NeedsLevel", "task.environment: missing level"),
        (f"{HERE}.needs_more", "environment is a function that makes one, and is called with () and its settings"),
        (f"{HERE}.Nobody", "Nobody"),
        (TOOLS.format("no_hint"), "task.environment: the tool no_hint has no type hint for city"),
        (TOOLS.format("silent"), "task.environment: the tool silent has no docstring"),
        ("{_target_: tunix_lite.environments.guessing.GuessingGame, gueses: 2}", "guesses"),
        ("3", "expected a group of settings with a _target_, got 3"),
    ],
)
def test_a_setting_that_names_no_environment_is_one_message(setting, message):
    with pytest.raises(ConfigError) as caught:
        compose([f"task.environment={setting}"])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_environment_of_the_examples_is_played():
    run = compose(["task.environment=examples.my_environment.HotAndCold"])
    with EnvironmentPool(run.task.environment, ConversationConfig(workers=0)) as pool:
        assert pool.reset(0, {"answer": "7"}).result().turn is None
        said = [pool.step(0, text).result().turn for text in ("none", "The answer is 3.", "9", "7")]
    assert [turn.observation for turn in said] == ["Say a number.", "higher", "lower", "right"]
    assert [turn.done for turn in said] == [False, False, False, True]
