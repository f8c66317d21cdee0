"""Conversations with environments in four slots on a mesh of four devices, of one process or of several.

As a script, it is one of the processes that `processes.run_together` starts.
"""

import time

import jax
import processes

from tunix_lite.distributed.allgather import allgather_values
from tunix_lite.environments.settings import ConversationConfig
from tunix_lite.models import decoder, weights
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.source import BUNDLED
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.parallel.mesh import make_mesh
from tunix_lite.rollout.generate import make_generate
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.tasks.processes import Processes
from tunix_lite.tasks.sources import Arithmetic
from tunix_lite.tasks.task import Task, TaskConfig
from tunix_lite.workers.pool import RewardsConfig


class Counts:
    """Says how many letters it has heard. How long it thinks depends on the conversation and the process."""

    def reset(self, example):
        self.heard = 0

    def step(self, completion):
        self.heard += len(completion)
        time.sleep(0.003 * (self.heard % 4) * (1 + jax.process_index()))
        return f"{self.heard} <end_of_turn>", 0.1, self.heard % 5 == 0


def draw() -> dict:
    """Ten conversations in four slots on [[2,2]]: tokens, turns, log-probabilities and how they ended."""
    tokenizer = Tokenizer.load(BUNDLED)
    cfg = Architecture(512, 2, 16, 4, 2, 8, 24, pattern=("local", "global"), window=9, query_scale=8)
    everyone = Processes(jax.process_index(), jax.process_count(), allgather_values)
    config = TaskConfig(Arithmetic(), "What is {question}?", {}, environment=Counts())
    settings = ConversationConfig(max_turns=4, max_turn_tokens=6, workers=0)
    task = Task(config, tokenizer, 32, 120)
    examples = [task.config.source.train[i] for i in range(5)]
    with (
        jax.set_mesh(make_mesh(((2, 2), ("fsdp", "tp")))),
        task.with_workers(RewardsConfig(workers=0), print, everyone, settings) as opened,
    ):
        params = weights.init_params(decoder.weights(cfg), jax.random.key(0))
        generation = GenerationConfig(32, 120)
        rollout = RolloutConfig(4, 3)
        converse = make_generate(cfg, generation, tokenizer.eos_ids, tokenizer.pad_id, rollout=rollout)
        partner = opened.partner([example for example in examples for _ in range(2)])
        found = converse(params, opened.prompts(examples), jax.random.key(1), 2, partner=partner)
    return {
        "tokens": found.tokens.tolist(),
        "turns": found.turn_ids.tolist(),
        "logprobs": found.logprobs.tolist(),
        "ended": [one.ended for one in found.conversations],
        "answers": [[turn.reply.observation for turn in one.turns] for one in found.conversations],
        "took": [found.metrics["rollout/prefill_tokens"], found.metrics["rollout/appended_tokens"]],
    }


if __name__ == "__main__":
    processes.answer(draw)
