"""What is drawn on a mesh of four devices, of one process or of several: a queue of requests in four slots, and three
updates of a run whose rollouts overlap with learning, of single turns and of conversations.

As a script, it is one of the processes that `processes.run_together` starts.
"""

import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import processes

from tunix_lite.algorithms.algorithm import Needs
from tunix_lite.basics.types import Graded
from tunix_lite.distributed.allgather import allgather_values
from tunix_lite.environments.settings import ConversationConfig
from tunix_lite.models import decoder, weights
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.source import BUNDLED
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.parallel.mesh import make_mesh
from tunix_lite.rollout.generate import make_generate, make_sampler
from tunix_lite.rollout.partial import PartialSampler
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.runs.in_flight import InFlight
from tunix_lite.runs.overlap import OneStepOffPolicy, PartialRollouts
from tunix_lite.tasks.processes import Processes
from tunix_lite.tasks.sources import Arithmetic
from tunix_lite.tasks.task import Task, TaskConfig
from tunix_lite.workers.pool import RewardsConfig

CFG = Architecture(32, 1, 16, 4, 2, 8, 24, pattern=("local",), window=5, query_scale=8)
GENERATION = GenerationConfig(8, 12)
GENERATIONS = 2
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [4, 4], [30, 31, 29, 28]]


class Counts:
    """Says how many letters it has heard. How long it thinks depends on the conversation and the process."""

    def reset(self, example):
        self.heard = 0

    def step(self, completion):
        self.heard += len(completion)
        time.sleep(0.003 * (self.heard % 4) * (1 + jax.process_index()))
        return f"{self.heard} <end_of_turn>", 0.1, self.heard % 5 == 0


class Grades:
    """A grader for which all completions are alike."""

    def submit(self, row, tokens):
        pass

    def results(self, rollout):
        count = len(rollout.tokens)
        none = np.zeros(count, bool)
        return Graded([""] * count, [""] * count, np.zeros(count), none, [None] * count, {}, none)


class Numbers(SimpleNamespace):
    """A task whose examples are numbers."""

    tokenizer = SimpleNamespace(pad_id=0)

    def batch(self, count, seed, rollout):
        return [{"n": rollout * count + i} for i in range(count)]

    def prompts(self, examples):
        return [[4 + (3 * one["n"] + i) % 28 for i in range(1 + one["n"] % 7)] for one in examples]

    def grader(self, examples, num_generations=1):
        return Grades()

    def partner(self, examples, num_generations=1):
        return None


def learned(params):
    """What an update leaves of the weights; every device needs to hear of all others for it."""
    return jax.tree.map(lambda x: x * (1 + x.mean()) - 0.1 * x.std(), params)


def session_of(rollout, task, generation=GENERATION):
    algorithm = SimpleNamespace(updates_per_rollout=1, num_generations=GENERATIONS, needs=Needs())
    of_tokens = {"rollout": rollout, "rollouts_behind": rollout.max_staleness}
    run = SimpleNamespace(algorithm=algorithm, generation=generation, seed=5, **of_tokens)
    parts = SimpleNamespace(batch=SimpleNamespace(prompts=3))
    stopping = SimpleNamespace(check_between_chunks=lambda: None)
    return SimpleNamespace(run=run, parts=parts, task=task, stopping=stopping)


def draw_queue() -> dict:
    """Ten requests in four slots on [[2,2]]: tokens, logprobs and reasons, and what was read and how many steps."""
    with jax.set_mesh(make_mesh(((2, 2), ("fsdp", "tp")))):
        params = weights.init_params(decoder.weights(CFG), jax.random.key(0))
        sample = make_sampler(CFG, GenerationConfig(8, 10), (1, 2, 3), 0, rollout=RolloutConfig(4, 3))
        steps, found = sample(params, PROMPTS, jax.random.key(1), 2), {}
        while True:
            try:
                found |= {completion.prompt * 2 + completion.generation: completion for completion in next(steps)}
            except StopIteration as end:
                metrics = end.value
                break
    completions = [found[row] for row in sorted(found)]
    return {
        "tokens": [completion.tokens for completion in completions],
        "reasons": [completion.reason for completion in completions],
        "logprobs": [completion.logprobs for completion in completions],
        "took": [metrics["rollout/prefill_tokens"], metrics["rollout/decode_steps"]],
    }


def draw() -> dict:
    """Tokens, versions, log-probabilities and examples of three updates on [[2,2]], of carry and of one_step."""
    arguments = CFG, GENERATION, (1, 2, 3), 0
    with jax.set_mesh(make_mesh(((2, 2), ("fsdp", "tp")))):
        rollout = RolloutConfig(4, 3, overlap="carry", max_staleness=2)
        session = session_of(rollout, Numbers())
        sampler = PartialSampler(make_sampler(*arguments, rollout=rollout))
        carried = PartialRollouts(session, sampler, InFlight([], 0))
        found = {"carry": updates(carried, CFG)}
        rollout = RolloutConfig(4, 3, overlap="one_step", max_staleness=1)
        session = session_of(rollout, Numbers())
        ahead = OneStepOffPolicy(session, make_generate(*arguments, rollout=rollout), InFlight([], 0))
        return found | {"one_step": updates(ahead, CFG), "conversations": conversations()}


def conversations() -> dict:
    """The same of conversations that are sampled ahead. Their environments are stepped by all processes in turns."""
    tokenizer = Tokenizer.load(BUNDLED)
    cfg = replace(CFG, vocab_size=512)
    rollout = RolloutConfig(4, 3, overlap="one_step", max_staleness=1)
    generation = GenerationConfig(32, 60)
    generate = make_generate(cfg, generation, tokenizer.eos_ids, tokenizer.pad_id, rollout=rollout)
    everyone = Processes(jax.process_index(), jax.process_count(), allgather_values)
    config = TaskConfig(Arithmetic(), "What is {question}?", {}, environment=Counts())
    settings = ConversationConfig(max_turns=3, max_turn_tokens=6, workers=0)
    whole = Task(config, tokenizer, 32, 60)
    with whole.with_workers(RewardsConfig(workers=0), print, everyone, settings) as task:
        session = session_of(rollout, task)
        found = updates(OneStepOffPolicy(session, generate, InFlight([], 0)), cfg)
    assert max(turn for rows in found["turns"] for row in rows for turn in row) > 1
    return found


def updates(kept, cfg) -> dict:
    params = weights.init_params(decoder.weights(cfg), jax.random.key(0))
    update = jax.jit(learned, donate_argnums=0)
    found = {"tokens": [], "versions": [], "logprobs": [], "examples": [], "turns": []}
    for step in range(3):
        examples, groups = kept.draw(step, params)
        rollout = groups.rollout
        # It is on its way to the devices when sampling goes on.
        params = update(params)
        kept.beside_update()
        jax.block_until_ready(params)
        found["tokens"].append(rollout.tokens)
        found["versions"].append(rollout.versions)
        found["logprobs"].append(np.asarray(rollout.logprobs, float))
        found["examples"].append([one.get("n", one.get("question")) for one in examples])
        if rollout.turn_ids is not None:
            found["turns"].append(rollout.turn_ids.tolist())
    return found


if __name__ == "__main__":
    processes.answer(draw, draw_queue)
