"""The environment of the conversations in overlap_worker.py."""

import time

import jax


class Counts:
    """Says how many letters it has heard. How long it thinks depends on the conversation and the process."""

    def reset(self, example):
        self.heard = 0

    def step(self, completion):
        self.heard += len(completion)
        time.sleep(0.003 * (self.heard % 4) * (1 + jax.process_index()))
        return f"{self.heard} <end_of_turn>", 0.1, self.heard % 5 == 0
