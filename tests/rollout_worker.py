"""A queue of requests in four slots on a mesh of four devices, of one process or of several: what it draws.

As a script, it is one of the processes that `processes.run_together` starts.
"""

import jax
import processes

from tunix_lite.models import decoder, weights
from tunix_lite.models.architecture import Architecture
from tunix_lite.parallel.mesh import make_mesh
from tunix_lite.rollout.generate import make_sampler
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig

CFG = Architecture(32, 1, 16, 4, 2, 8, 24, pattern=("local",), window=5, query_scale=8)
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [4, 4], [30, 31, 29, 28]]


def draw() -> dict:
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


if __name__ == "__main__":
    processes.answer(draw)
