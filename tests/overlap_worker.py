"""Three updates of a run whose rollouts overlap with learning, on a mesh of four devices of one process or of several.

As a script, it is one of the processes that `processes.run_together` starts.
"""

from types import SimpleNamespace

import jax
import numpy as np
import processes

from tunix_lite.algorithms.algorithm import Policy
from tunix_lite.models import decoder, weights
from tunix_lite.models.decoder import Architecture
from tunix_lite.parallel.mesh import make_mesh
from tunix_lite.rollout.carry import make_carry_sampler
from tunix_lite.rollout.engine import make_generate
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.runs.in_flight import InFlight
from tunix_lite.runs.overlap import Carry, OneStep

CFG = Architecture(32, 1, 16, 4, 2, 8, 24, pattern=("local",), window=5, query_scale=8)
GENERATION = GenerationConfig(8, 12)
GENERATIONS = 2


class Numbers(SimpleNamespace):
    """A task whose examples are numbers. Nothing is graded."""

    long_prompts = "error"
    tokenizer = SimpleNamespace(pad_id=0)

    def batch(self, count, seed, rollout):
        return [{"n": rollout * count + i} for i in range(count)], 0

    def prompts(self, examples):
        return [[4 + (3 * one["n"] + i) % 28 for i in range(1 + one["n"] % 7)] for one in examples]

    def at_step(self, step):
        return self

    def grader(self, examples):
        return SimpleNamespace(submit=lambda row, tokens: None)


def learned(params):
    """What an update leaves of the weights; every device needs to hear of all others for it."""
    return jax.tree.map(lambda x: x * (1 + x.mean()) - 0.1 * x.std(), params)


def draw() -> dict:
    """Tokens, versions, log-probabilities and examples of three updates on [[2,2]], of carry and of one_step."""
    found = {}
    with jax.set_mesh(make_mesh(((2, 2), ("fsdp", "tp")))):
        update = jax.jit(learned, donate_argnums=0)
        for overlap, staleness in (("carry", 2), ("one_step", 1)):
            rollout = RolloutConfig(4, 3, overlap=overlap, max_staleness=staleness)
            algorithm = SimpleNamespace(updates_per_rollout=1, num_generations=GENERATIONS)
            run = SimpleNamespace(algorithm=algorithm, rollout=rollout, generation=GENERATION, seed=5)
            parts = SimpleNamespace(batch=SimpleNamespace(prompts=3))
            stopping = SimpleNamespace(check_between_chunks=lambda: None)
            session = SimpleNamespace(run=run, parts=parts, task=Numbers(), stopping=stopping)
            arguments = CFG, GENERATION, (1, 2, 3), 0
            if overlap == "carry":
                kept = Carry(session, run, make_carry_sampler(*arguments, rollout=rollout), InFlight([], 0))
                policy = Policy(None, None)
            else:
                kept = OneStep(session, run, InFlight([], 0))
                policy = Policy(make_generate(*arguments, rollout=rollout), None)
            found[overlap] = updates(kept, policy, update)
    return found


def updates(kept, policy, update) -> dict:
    params = weights.init_params(decoder.weights(CFG), jax.random.key(0))
    found = {"tokens": [], "versions": [], "logprobs": [], "examples": []}
    for step in range(3):
        handed, _, examples, _ = kept.draw(step, policy, Numbers(), params)
        rollout = handed.generate(None, examples, None, GENERATIONS)
        # It is on its way to the devices when sampling goes on.
        params = update(params)
        kept.beside_update()
        jax.block_until_ready(params)
        found["tokens"].append(rollout.tokens)
        found["versions"].append(rollout.versions)
        found["logprobs"].append(np.asarray(rollout.logprobs, float))
        found["examples"].append([one["n"] for one in examples])
    return found


if __name__ == "__main__":
    processes.answer(draw)
