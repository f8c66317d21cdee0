"""What saving costs: seconds that a step waits for it, and seconds until it is on disk. Prints one JSON line an arm.

    python benchmarks/checkpoint.py [--repeats 12] [--rank 8]

The step is the update of benchmarks/grpo_step.py on its model (5.8 million parameters, float32, AdamW), after each of
which all is saved: parameters and optimizer, or, with adapters of `--rank`, those of the adapters alone. Arms take
turns: a step without saving, one that saves everything, one that saves what adapters would be.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tunix_lite.parallel.host import keep_freed_memory

keep_freed_memory()

import jax
import jax.numpy as jnp
import numpy as np
from grpo_step import CFG, GENERATIONS, NEW_TOKENS, PROMPT_LENGTH, PROMPTS, ROWS

from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.algorithms.weighting import per_token
from tunix_lite.checkpoint import Checkpoints
from tunix_lite.models import decoder, weights
from tunix_lite.models.lora import LoraConfig, adapter_weights
from tunix_lite.optim import OptimizerConfig, init_opt_state, make_optimizer
from tunix_lite.parallel.mesh import make_mesh, put
from tunix_lite.policy import make_policy
from tunix_lite.step import make_train_step
from tunix_lite.types import Batch, TrainState


def fixed_batch() -> Batch:
    B, T = PROMPTS * GENERATIONS, PROMPT_LENGTH + NEW_TOKENS
    rng = np.random.default_rng(0)
    counted = np.zeros((B, T), bool)
    counted[:, PROMPT_LENGTH:] = True
    tokens = rng.integers(0, CFG.vocab_size, (B, T)).astype(np.int32)
    logprobs = np.full((B, T), -6.0, np.float32)
    advantages = rng.normal(size=(B, T)).astype(np.float32)
    return Batch(tokens, np.ones((B, T), bool), per_token(counted), advantages, logprobs, logprobs)


def state_of(table, optimizer) -> TrainState:
    params = weights.init_params(table, jax.random.key(0))
    return TrainState(put(np.int32(0)), params, init_opt_state(optimizer, params))


def num_bytes(state) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(state))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--rank", type=int, default=8)
    args = parser.parse_args()
    jax.set_mesh(make_mesh(((1, 1), ("fsdp", "tp")), jax.devices()[:1]))
    table, optimizer = decoder.weights(CFG), make_optimizer(OptimizerConfig(), args.repeats)
    step = make_train_step(make_policy(CFG, None, 1.0, rows=ROWS["none"]), GRPO(kl_coef=0.04), optimizer)
    laid_out, _ = ROWS["none"].lay_out(fixed_batch())
    state, adapters = (
        state_of(table, optimizer),
        state_of(adapter_weights(table, LoraConfig(rank=args.rank)), optimizer),
    )
    seconds, on_disk = {"none": [], "all": [], "adapters": []}, {"all": [], "adapters": []}
    with tempfile.TemporaryDirectory() as folder:
        kept = {name: Checkpoints(Path(folder) / name) for name in on_disk}
        for turn in range(args.repeats + 1):
            for arm, times in seconds.items():
                began = time.perf_counter()
                state, _ = jax.block_until_ready(step(state, None, laid_out))
                if arm != "none":
                    saved = state if arm == "all" else adapters.replace(step=jnp.int32(turn))
                    kept[arm].save(saved)
                if turn:  # the first compiles, and makes folders
                    times.append(time.perf_counter() - began)
                if arm != "none":
                    kept[arm].close()
                    if turn:
                        on_disk[arm].append(time.perf_counter() - began - times[-1])
    plain = statistics.median(seconds["none"])
    for arm, size in (("all", num_bytes(state)), ("adapters", num_bytes(adapters))):
        said = {"benchmark": "checkpoint", "saves": arm, "megabytes": round(size / 1e6, 1)}
        said |= {"step_seconds": round(plain, 3), "saving_step_seconds": round(statistics.median(seconds[arm]), 3)}
        said["waits_percent"] = round(100 * (statistics.median(seconds[arm]) / plain - 1), 1)
        print(json.dumps(said | {"on_disk_after_seconds": round(statistics.median(on_disk[arm]), 3)}))


if __name__ == "__main__":
    main()
