"""Environments that fail in the middle of a run, each in its way, in about half of the conversations."""

import os
import time
import zlib


def spin():
    while True:
        pass


FAILS = {
    "raise": lambda: {}["missing"],
    "loop": spin,
    "sleep": lambda: time.sleep(3600),
    "die": lambda: os._exit(3),
    "nonsense": lambda: 7,
    # nothing fails, and no conversation is ever over
    "never end": lambda: ("go on", 0.0, False),
}


class Fails:
    """Answers once, and fails at the second turn of half of the examples; the others end there.

    how: "all" takes another way for each example.
    """

    def __init__(self, how: str):
        self.how = how

    def reset(self, example):
        number = zlib.crc32(repr(example).encode())
        self.way = [*FAILS][number // 2 % len(FAILS)] if self.how == "all" else self.how
        self.fails = self.way == "never end" or number % 2
        self.turns = 0

    def step(self, completion):
        self.turns += 1
        if self.turns > 1 and self.fails:
            return FAILS[self.way]()
        return "again", 1.0, self.turns > 1
