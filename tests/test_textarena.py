"""Games of TextArena as environments. Those that need the package run where it is installed."""

import importlib.util
import random

import pytest

from tunix_lite.environments.pool import EnvironmentPool
from tunix_lite.environments.settings import ConversationConfig
from tunix_lite.environments.text_arena import TextArena, bracketed_number, random_move
from tunix_lite.errors import ConfigError
from tunix_lite.runs.setup import prepare
from tunix_lite.settings.compose import compose
from tunix_lite.tracking.rundir import RunDir

GUESS = {"game": "GuessTheNumber-v0", "seed": 7}
BOARD = {"game": "TicTacToe-v0", "seed": 7}
OPPONENT = "task.environment.opponent=tunix_lite.environments.text_arena.random_move"


def first_move(observation):
    """Breaks on its second move, which is not the first that the game lists."""
    if observation.count("Available Moves") > 2:
        raise RuntimeError("the opponent left")
    return random_move(observation)


# ---- without the package


def test_without_textarena_one_line_says_what_to_install(tmp_path):
    if importlib.util.find_spec("textarena"):
        pytest.skip("TextArena is installed")
    with pytest.raises(ConfigError, match=r"^task: task=textarena needs .*pip install -e '.\[textarena\]'"):
        prepare(compose(["task=textarena"]), RunDir(tmp_path))
    with pytest.raises(ValueError, match=r"pip install -e '.\[textarena\]'"):
        TextArena().reset(GUESS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["task.source.games=[]"], "games is empty"),
        (["task.source.num_held_out=0"], "both must be at least 1"),
        (["task.environment.player=2", OPPONENT], "player=2 must be 0, 1 or null"),
    ],
)
def test_settings_of_games_that_cannot_be_meant_are_refused(settings, message):
    with pytest.raises(ConfigError) as caught:
        compose(["task=textarena", *settings])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- with it


@pytest.fixture
def installed():
    pytest.importorskip("textarena")


def said_in(environment, example, completions):
    prompt = environment.reset(example)
    return prompt, [environment.step(completion) for completion in completions]


def test_a_game_for_one_is_played_to_its_end(installed):
    prompt, (wrong, *_) = said_in(TextArena(), GUESS, ["[1]"])
    assert "guess the number between 1 and 20 within 10 turns" in prompt
    assert wrong.observation == "[GAME] The target number is higher." and not wrong.done
    # by halves: the number is found in five guesses
    game = TextArena(settings={"max_number": 31}, move=bracketed_number)
    game.reset(GUESS)
    low, high = 1, 31
    for _ in range(5):
        turn = game.step(f"The answer is {(low + high) // 2}.")
        if turn.done:
            break
        low, high = ((low + high) // 2 + 1, high) if "higher" in turn.observation else (low, (low + high) // 2 - 1)
    assert (turn.reward, turn.done, turn.info) == (1.0, True, {"won": True, "invalid_move": False})


def test_an_invalid_move_is_named_once_and_ends_the_game_then(installed):
    _, turns = said_in(TextArena(), GUESS, ["seven", "eight"])
    assert "You attempted an invalid move" in turns[0].observation and not turns[0].done
    assert turns[1].done and turns[1].info == {"won": False, "invalid_move": True}


def test_a_game_for_two_is_played_against_a_fixed_opponent(installed):
    rewards = set()
    for seed in range(12):
        game = TextArena(opponent=random_move)
        observation = game.reset({"game": "TicTacToe-v0", "seed": seed})
        # who begins is drawn from the seed
        assert ("[Player 0] [" in observation) == bool(seed % 2)
        turn = None
        while turn is None or not turn.done:
            random.seed(seed)
            turn = game.step(random_move(observation))
            observation = turn.observation
        assert not turn.info["invalid_move"]
        rewards.add((turn.reward, turn.info["won"]))
    assert rewards >= {(1.0, True), (-1.0, False)}


def test_games_side_by_side_are_those_one_after_another(installed):
    """Blackjack draws cards from the generator of the process, at every move."""
    examples = [{"game": "Blackjack-v0", "seed": seed} for seed in (3, 4)]
    moves = ["[Hit]", "[Stand]", "[Hit]", "[Hit]"]
    alone = [said_in(TextArena(), example, moves) for example in examples]
    games = [TextArena(), TextArena()]
    prompts = [game.reset(example) for game, example in zip(games, examples)]
    turns = [[game.step(move) for game in games] for move in moves]
    assert [(prompt, list(said)) for prompt, said in zip(prompts, zip(*turns))] == alone


def test_an_opponent_that_raises_ends_its_game_alone(installed):
    settings = ConversationConfig(on_error="zero", workers=0)
    with EnvironmentPool(TextArena(opponent=first_move, player=0), settings) as pool:
        board = pool.reset(0, BOARD).result().turn.observation
        other = pool.reset(1, BOARD).result().turn.observation
        assert board == other
        board = pool.step(0, "[0]").result().turn.observation
        failed = pool.step(0, random_move(board)).result()
        assert failed.failure == "error" and "RuntimeError: the opponent left" in failed.message
        assert pool.step(1, "[0]").result().turn.observation == board


def test_a_game_of_a_worker_that_died_goes_on_in_the_next(installed):
    with EnvironmentPool(TextArena(), ConversationConfig(timeout=60)) as pool:
        pool.reset(0, GUESS).result()
        first = pool.step(0, "[1]").result().turn
        assert first.observation == "[GAME] The target number is higher."
        worker = pool._pools[0]._workers[0].process
        worker.kill()
        worker.wait()
        # played again: 1 was guessed before
        assert "has already guessed the number" in pool.step(0, "[1]").result().turn.observation
