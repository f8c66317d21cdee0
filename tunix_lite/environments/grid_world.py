"""A small world of squares in text: the model says where to go until it is at the goal."""

import re
from collections import deque
from dataclasses import dataclass

import numpy as np

from tunix_lite.environments.environment import Turn
from tunix_lite.environments.examples import Draws

# a direction, and what it adds to row and column; the first has number 1
DIRECTIONS = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}
WORDS = re.compile(r"\b(up|right|down|left|[1-4])\b")
VIEWS = ("directions", "map")


@dataclass(frozen=True)
class Worlds:
    """Squares with a start, a goal, and walls that leave a way between them. A task's source.

    Example: {"size": 3, "start": [0, 2], "goal": [2, 0], "walls": [[1, 1]], "question": "..."}.
    """

    # Squares on a side.
    size: int = 3
    # Squares that are walls, at most. Those that would cut off the goal are left out.
    walls: int = 0
    # What the model sees: directions (how far the goal is), or map (every square as a character).
    view: str = "directions"
    # Worlds in one pass of the training data.
    num_train: int = 1_000_000
    # Held-out worlds, for evaluation.
    num_held_out: int = 64

    def __post_init__(self):
        if not 2 <= self.size <= 9:
            raise ValueError(f"size={self.size} must be from 2 to 9")
        if not 0 <= self.walls <= self.size * self.size - 2:
            raise ValueError(
                f"walls={self.walls} must be from 0 to {self.size * self.size - 2}, so that start "
                "and goal have a square each"
            )
        if self.view not in VIEWS:
            raise ValueError(f"view={self.view!r}; it is directions or map")
        if min(self.num_train, self.num_held_out) < 1:
            raise ValueError(
                f"num_train={self.num_train}, num_held_out={self.num_held_out}: both must be at "
                "least 1"
            )

    @property
    def train(self) -> Draws:
        return Draws(self, held_out=False, count=self.num_train)

    @property
    def held_out(self) -> Draws:
        return Draws(self, held_out=True, count=self.num_held_out)

    def make(self, rng: np.random.Generator) -> dict:
        """Makes one world."""
        squares = [divmod(int(i), self.size) for i in rng.permutation(self.size * self.size)]
        start, goal = squares[:2]
        walls: list[tuple[int, int]] = []
        for wall in squares[2 : 2 + self.walls]:
            if distance(start, goal, [*walls, wall], self.size) is not None:
                walls.append(wall)
        example = {
            "size": self.size,
            "start": list(start),
            "goal": list(goal),
            "walls": [list(wall) for wall in walls],
            "view": self.view,
        }
        return example | {"question": seen(example, start)}


def distance(
    start: tuple[int, int], goal: tuple[int, int], walls: list[tuple[int, int]], size: int
) -> int | None:
    """Steps on the shortest way; None: there is no way."""
    steps = {start: 0}
    reached = deque([start])
    while reached:
        square = reached.popleft()
        if square == goal:
            return steps[square]
        for row, column in DIRECTIONS.values():
            near = (square[0] + row, square[1] + column)
            inside = 0 <= near[0] < size and 0 <= near[1] < size
            if inside and near not in walls and near not in steps:
                steps[near] = steps[square] + 1
                reached.append(near)
    return None


def seen(example: dict, at: tuple[int, int]) -> str:
    """Describes a world as the model reads it when it is at a square: "goal 2 up 1 left", or a map
    in which A is itself, G the goal and # a wall."""
    goal = tuple(example["goal"])
    if example["view"] == "directions":
        down = goal[0] - at[0]
        right = goal[1] - at[1]
        parts = [f"{abs(down)} {'down' if down > 0 else 'up'}"] if down else []
        parts += [f"{abs(right)} {'right' if right > 0 else 'left'}"] if right else []
        return f"goal {' '.join(parts)}"
    marks = {tuple(wall): "#" for wall in example["walls"]} | {goal: "G", at: "A"}
    size = example["size"]
    return "\n".join(
        "".join(marks.get((row, column), ".") for column in range(size)) for row in range(size)
    )


@dataclass
class GridWorld:
    """The last of the words up, right, down, left or of their numbers 1, 2, 3, 4 is the move.

    The goal gets 1 and ends the world. A move towards it gets `closer`, one away from it costs as
    much.

    Example: GridWorld(moves=6) answers "goal 1 left" where the goal is one square to the left.
    """

    # Moves in a world.
    moves: int = 6
    # Reward of a move that makes the way to the goal shorter, 0 or more.
    closer: float = 0.1

    def __post_init__(self):
        if self.moves < 1:
            raise ValueError(f"moves={self.moves} must be at least 1")
        if self.closer < 0:
            raise ValueError(f"closer={self.closer} must not be negative")

    def reset(self, example: dict) -> None:
        """Begins at the `start` of a world."""
        self.example = example
        self.at = tuple(example["start"])
        self.goal = tuple(example["goal"])
        self.walls = [tuple(wall) for wall in example["walls"]]
        self.left = self.moves

    def step(self, completion: str) -> Turn:
        """Makes a move, if nothing is in the way."""
        self.left -= 1
        named = WORDS.findall(completion.lower())
        before = self._way()
        if named:
            names = list(DIRECTIONS)
            name = names[int(named[-1]) - 1] if named[-1].isdigit() else named[-1]
            self._go(*DIRECTIONS[name])
        if self.at == self.goal:
            return Turn("there", 1.0 + self.closer, done=True, info={"won": True})
        reward = self.closer * (before - self._way())
        text = seen(self.example, self.at) if named else "1 up 2 right 3 down 4 left"
        return Turn(text, reward, self.left == 0, {} if self.left else {"won": False})

    def _go(self, row: int, column: int) -> None:
        to = (self.at[0] + row, self.at[1] + column)
        size = self.example["size"]
        if 0 <= to[0] < size and 0 <= to[1] < size and to not in self.walls:
            self.at = to

    def _way(self) -> int:
        return distance(self.at, self.goal, self.walls, self.example["size"]) or 0


def names_move(completion: str, example: dict) -> float:
    """1 if the completion names a move, else 0."""
    return float(bool(WORDS.search(completion.lower())))
