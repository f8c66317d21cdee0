"""Games of TextArena (extra `textarena`): for one player, or for two against a fixed opponent."""

import difflib
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from tunix_lite.environments.environment import Turn, seed_of
from tunix_lite.environments.examples import Draws, check_num_examples

# Imported with this module, which a run imports only for this task: the start of a worker may take
# the seconds that it needs, a call may not.
try:
    import textarena
    from textarena.envs.registration import ENV_REGISTRY
except ImportError as error:
    textarena = None
    WHY_NOT = str(error)

# beginning of a list of moves, as in "Available Moves: '[0]', '[4]'"
LISTS_MOVES = re.compile(
    r"(?:available|legal|possible|valid) (?:actions?|moves?)\b[^:\n]*:", re.I
)
MOVE = re.compile(r"\[[^\[\]\n]+\]")
# stands for a number that a player chooses, as in "[bet X]"
PLACEHOLDER = re.compile(r"\bX\b")


@dataclass(frozen=True)
class TextArenaGames:
    """Games of TextArena by their ids, each with a seed of its own. A task's source.

    Example: {"game": "GuessTheNumber-v0", "seed": 1608637542}.
    """

    # Ids of games in TextArena. Several are drawn alike.
    games: tuple[str, ...] = ("GuessTheNumber-v0",)
    # Games in one pass of the training data.
    num_train: int = 1_000_000
    # Held-out games, for evaluation.
    num_held_out: int = 64

    def __post_init__(self):
        if not self.games:
            raise ValueError("games is empty: name at least one game of TextArena")
        check_num_examples(self.num_train, self.num_held_out)
        # on a machine without it settings can be composed, but no game can be played
        for game in self.games if textarena is not None else ():
            _check_game(game)

    @property
    def train(self) -> Draws:
        """The training stream."""
        return Draws(self, held_out=False, count=self.num_train)

    @property
    def held_out(self) -> Draws:
        """The held-out set: other seeds. A game with few starts has some of them in both."""
        return Draws(self, held_out=True, count=self.num_held_out)

    def make(self, rng: np.random.Generator) -> dict:
        """Makes one game."""
        _check_textarena()
        game = self.games[int(rng.integers(len(self.games)))]
        return {"game": game, "seed": int(rng.integers(2**31))}


@dataclass
class TextArena:
    """Plays the `game` of an example with its `seed`. The game says what the model reads first.

    The reward comes at the end, as the game gives it: mostly 1 for a game that is won, and -1 for
    one that is lost. Whatever the game draws, it draws from the seed.

    Example: TextArena() answers "[7]" with "[GAME] The target number is higher." in
    GuessTheNumber-v0.
    """

    # Settings that every game is made with: '+task.environment.settings.max_number=9'.
    settings: dict = field(default_factory=dict)
    # Function (observation) -> move of the other player in a game for two. null: the game is for
    # one.
    opponent: Callable | None = None
    # Player that the model is in a game for two: 0 begins, 1 comes second. null draws it from the
    # seed.
    player: int | None = None
    # Function (completion) -> move. null plays the whole completion.
    move: Callable | None = None

    def __post_init__(self):
        if self.player not in (None, 0, 1):
            raise ValueError(f"player={self.player} must be 0, 1 or null")

    def reset(self, example: dict) -> str:
        """Begins a game. Returns its rules, and what else the model sees of it."""
        _check_textarena()
        if "game" not in example:
            raise ValueError("an example of TextArena has the id of a `game`, and a `seed`")
        _check_game(example["game"])
        seed = example.get("seed", seed_of(example))
        self._random = _SeededRandom(seed)
        self.players = 1 if self.opponent is None else 2
        self.me = seed % 2 if self.players == 2 and self.player is None else self.player or 0
        self.heard: list[str] = []

        with self._random.in_use():
            try:
                self.game = textarena.make(example["game"], **self.settings)
                self.game.reset(num_players=self.players, seed=seed)
            except AssertionError as error:
                hint = "name an opponent" if self.players == 1 else "leave out the opponent"
                raise ValueError(
                    f"{example['game']} is not for {self.players} player{'s'[: self.players - 1]} "
                    f"({error}); {hint}, or take another game"
                ) from error
            except LookupError as error:
                # nltk explains at length, with empty lines before and after
                reason = " ".join(str(error).replace("*", " ").split())
                raise ValueError(
                    f"{example['game']} lacks data of a package of its own: {reason[:160]}"
                ) from error
            self._let_others_move(self.game.state.done)
            return "\n".join(self._lines(self.me))

    def step(self, completion: str) -> Turn:
        """Plays a move, and then those of the opponent until the model is to move again."""
        move = completion if self.move is None else self.move(completion)
        with self._random.in_use():
            done = self.game.state.done
            if not done:
                done = self._play("" if move is None else str(move))
                done = self._let_others_move(done)
            if not done:
                return Turn("\n".join(self._lines(self.me)) or "It is your turn.")
            rewards, verdicts = self.game.close()
        reward = float((rewards or {}).get(self.me, 0.0))
        mine = verdicts.get(self.me, {})
        info = {"won": reward >= 1, "invalid_move": bool(mine.get("invalid_move", False))}
        return Turn(str(mine.get("reason") or ""), reward, done=True, info=info)

    def _play(self, move: str) -> bool:
        """Plays the move of the player whose turn it is, and tells if the game is over."""
        done, _ = self.game.step(action=move)
        self.played = move
        return bool(done)

    def _let_others_move(self, done: bool) -> bool:
        while not done and self.game.state.current_player_id != self.me:
            other = self.game.state.current_player_id
            self.heard += self._lines(other)
            done = self._play(str(self.opponent("\n".join(self.heard))))
        return done

    def _lines(self, player: int) -> list[str]:
        """Returns the lines that a player has not seen yet, without its own moves."""
        state = self.game.state
        new = state.observations[player]
        state.observations[player] = []
        # games for one player name nobody as the sender of its moves
        own = (player, textarena.GAME_ID) if self.players == 1 else (player,)
        return [
            f"[{state.role_mapping.get(sender, f'Player {sender}')}] {text}"
            for sender, text, kind in new
            if sender not in own or kind != textarena.ObservationType.PLAYER_ACTION
        ]


def random_move(observation: str) -> str:
    """An opponent: one of the moves that the game listed last, such as "Available Moves: '[0]',
    '[4]'", each as likely as the others. Raises ValueError where no moves are listed."""
    listed = LISTS_MOVES.split(observation)
    listed_moves = MOVE.findall(listed[-1].split("\n[")[0]) if len(listed) > 1 else []
    moves = [move for move in listed_moves if not PLACEHOLDER.search(move)]
    if not moves:
        raise ValueError(
            "this game does not list the moves that there are: task.environment.opponent must be a "
            "function (observation) -> move of your own"
        )
    return random.choice(moves)


def bracketed_number(completion: str) -> str:
    """The last whole number of a completion as most games want a move: "The answer is 7." is
    [7]."""
    numbers = re.findall(r"\d+", completion)
    return f"[{numbers[-1]}]" if numbers else completion


def _check_textarena() -> None:
    """Raises ValueError if TextArena is not installed."""
    if textarena is None:
        raise ValueError(
            f"task=textarena needs TextArena ({WHY_NOT}): pip install -e '.[textarena]'"
        )


def _check_game(game: str) -> None:
    """Raises ValueError if TextArena has no game of this id."""
    if game not in ENV_REGISTRY:
        near = difflib.get_close_matches(str(game), ENV_REGISTRY, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"TextArena {textarena.__version__} has no game {game!r}{hint}")


class _SeededRandom:
    """The global generators of Python and numpy, which games draw from, as one game sees them.

    Several games take turns in one process, and none must change what another one draws.

    Example: with SeededRandom(7).in_use(): random.random() is the same in any process.
    """

    def __init__(self, seed: int):
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Puts the generators of the process in the place of this game's, and back again."""
        outer = random.getstate(), np.random.get_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._python = random.getstate()
            self._numpy = np.random.get_state()
            random.setstate(outer[0])
            np.random.set_state(outer[1])
