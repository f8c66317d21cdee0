"""The bundled game: its rules and its rewards."""

from collections import Counter

import pytest

from tunix_lite.environments.environment import Turn
from tunix_lite.environments.examples import last_integer
from tunix_lite.environments.guessing import GuessingGame, Secrets, is_secret
from tunix_lite.environments.pool import EnvironmentPool
from tunix_lite.environments.settings import ConversationConfig
from tunix_lite.settings.compose import compose


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 5.", 5),
        ("12 + 3 = 15\nThe answer is -7.", -7),
        ("I say **9**!", 9),
        ("none", None),
        ("", None),
        ("5 or so", 5),
        ("-", None),
        ("9" * 4000, None),
    ],
)
def test_the_guess_is_the_last_whole_number(text, number):
    assert last_integer(text) == number


def played(environment, example, completions):
    environment.reset(example)
    return [environment.step(completion) for completion in completions]


def test_a_guessing_game_by_hand():
    example = {"secret": 7, "low": 1, "high": 9}
    turns = played(GuessingGame(guesses=3), example, ["The answer is 5.", "8", "7"])
    assert turns == [Turn("higher"), Turn("lower"), Turn("right", 1.0, True, {"won": True})]
    turns = played(GuessingGame(guesses=3), example, ["what", "99", "3"])
    assert turns == [
        Turn("Say a number from 1 to 9."),
        Turn("Say a number from 1 to 9."),
        Turn("over", 0.0, True, {"won": False}),
    ]
    # 5 rules out 1 to 5, so 3 is no possible guess, and 8 is
    turns = played(GuessingGame(guesses=4, possible=0.2), example, ["5", "3", "8", "9"])
    assert [turn.reward for turn in turns] == [0.2, 0.0, 0.2, 0.0]
    assert played(GuessingGame(guesses=1), example, ["none"])[0] == Turn("over", 0.0, True, {"won": False})
    assert is_secret("The answer is 7.", example) == 1


def test_secrets_are_drawn_evenly_and_the_same_everywhere():
    source = Secrets(1, 4)
    drawn = Counter(source.train[i]["secret"] for i in range(400))
    assert set(drawn) == {1, 2, 3, 4} and min(drawn.values()) > 60
    assert source.held_out[0] == Secrets(1, 4).held_out[0]
    assert source.train[0]["question"] == "Guess 1 to 4."


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Secrets(5, 5), "low must be below high"),
        (lambda: Secrets(num_train=0), "num_train=0"),
        (lambda: GuessingGame(guesses=0), "guesses=0"),
        (lambda: GuessingGame(possible=2), "possible=2"),
    ],
)
def test_settings_of_games_that_cannot_be_meant_are_refused(make, message):
    with pytest.raises(ValueError, match="=") as caught:
        make()
    assert message in str(caught.value)


def test_a_game_of_yaml_is_played_in_a_pool():
    run = compose(["task=guessing"])
    with EnvironmentPool(run.task.environment, ConversationConfig(workers=0)) as pool:
        example = run.task.source.held_out[0]
        assert pool.reset(0, example).result().turn is None
        done = False
        while not done:
            done = pool.step(0, "The answer is 3.").result().turn.done
    assert run.task.template.messages(example)[-1].content == example["question"]
