"""Environments that a run tries before it compiles anything (tests/test_try_environment.py)."""

import time


class Game:
    answer = ("higher", 0.0, False)

    def reset(self, example):
        return None

    def step(self, completion):
        return self.answer


class Raises(Game):
    def step(self, completion):
        raise KeyError("secret")


class Nonsense(Game):
    answer = "higher"


class Slow(Game):
    def step(self, completion):
        time.sleep(60)


class BadReset(Game):
    def reset(self, example):
        return 7


class Talks(Game):
    answer = ([{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}], 0.0, False)


class NoStep:
    def reset(self, example):
        return None


class NeedsLevel(Game):
    def __init__(self, level, *more, seed=0):
        self.level = level


def needs_more(size):
    return Game()


def makes_none():
    return None


def no_hint(city):
    """Say what the weather will be."""


def silent(city: str):
    pass
