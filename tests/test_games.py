"""The bundled games: rules, rewards, and worlds that can be won."""

from collections import Counter

import numpy as np
import pytest

from tunix_lite.environments.environment import Turn
from tunix_lite.environments.examples import last_integer
from tunix_lite.environments.grid_world import GridWorld, Worlds, distance
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
    turns = played(GuessingGame(guesses=3, near=0.4), example, ["what", "99", "3"])
    # 3 is 4 away, 3 farther than the nearest, of 8
    assert turns == [
        Turn("Say a number from 1 to 9."),
        Turn("Say a number from 1 to 9."),
        Turn("over", pytest.approx(0.4 * (1 - 3 / 8)), True, {"won": False}),
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


WORLD = {"size": 3, "start": [2, 0], "goal": [0, 1], "walls": [], "view": "directions"}


def test_a_grid_world_by_hand():
    turns = played(
        GridWorld(moves=6, closer=0.1), WORLD, ["The answer is 1.", "left", "go down", "up up", "1", "right"]
    )
    assert [turn.observation for turn in turns] == [
        "goal 1 up 1 right",  # up
        "goal 1 up 1 right",  # a wall of the world is in the way
        "goal 2 up 1 right",  # down
        "goal 1 up 1 right",  # the last word alone counts
        "goal 1 right",
        "there",
    ]
    assert [turn.reward for turn in turns] == pytest.approx([0.1, 0, -0.1, 0.1, 0.1, 1.1])
    assert [turn.done for turn in turns] == [False] * 5 + [True]
    assert turns[-1].info == {"won": True}
    assert played(GridWorld(moves=1), WORLD, ["uptown"])[0] == Turn(
        "1 up 2 right 3 down 4 left", 0.0, True, {"won": False}
    )


def test_every_world_with_walls_has_a_way():
    source = Worlds(size=4, walls=8, view="map")
    for i in range(200):
        world = source.train[i]
        walls = [tuple(wall) for wall in world["walls"]]
        assert distance(tuple(world["start"]), tuple(world["goal"]), walls, 4) is not None
        assert tuple(world["start"]) not in walls and tuple(world["goal"]) not in walls
    assert np.mean([len(source.train[i]["walls"]) for i in range(50)]) > 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Secrets(5, 5), "low must be below high"),
        (lambda: Secrets(num_train=0), "num_train=0"),
        (lambda: GuessingGame(guesses=0), "guesses=0"),
        (lambda: GuessingGame(near=2), "near=2"),
        (lambda: Worlds(size=1), "size=1"),
        (lambda: Worlds(size=2, walls=3), "walls=3 must be from 0 to 2"),
        (lambda: Worlds(view="sound"), "view='sound'"),
        (lambda: GridWorld(moves=0), "moves=0"),
        (lambda: GridWorld(closer=-1), "closer=-1"),
    ],
)
def test_settings_of_games_that_cannot_be_meant_are_refused(make, message):
    with pytest.raises(ValueError, match="=") as caught:
        make()
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["guessing", "grid_world"])
def test_a_game_of_yaml_is_played_in_a_pool(name):
    run = compose([f"task={name}"])
    with EnvironmentPool(run.task.environment, ConversationConfig(workers=0)) as pool:
        example = run.task.source.held_out[0]
        assert pool.reset(0, example).result().turn is None
        done = False
        while not done:
            done = pool.step(0, "The answer is 3.").result().turn.done
    assert run.task.template.messages(example)[-1].content == example["question"]
