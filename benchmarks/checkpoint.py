"""What saving costs: how long the loop waits for it, how much slower the next step is, and when it is on disk.

    python benchmarks/checkpoint.py [--repeats 12] [--rank 8]

The step is the update of benchmarks/grpo_step.py on its model (5.8 million parameters, float32, AdamW). Arms take
turns, of two steps each: nothing is saved between them, or parameters and optimizer, or those of adapters of `--rank`.
Medians; prints one JSON line an arm.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tunix_lite.distributed.host_memory import keep_freed_memory

keep_freed_memory()

import jax
import jax.numpy as jnp
import numpy as np
from grpo_step import CFG, GENERATIONS, NEW_TOKENS, PROMPT_LENGTH, PROMPTS, ROWS

from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.algorithms.weighting import per_token
from tunix_lite.basics.types import Batch, TrainState
from tunix_lite.learner.optim import OptimizerConfig, init_opt_state, make_optimizer
from tunix_lite.learner.policy import make_policy
from tunix_lite.learner.update import TrainStep
from tunix_lite.models import decoder, weights
from tunix_lite.models.lora import LoraConfig, adapter_weights
from tunix_lite.parallel.mesh import make_mesh, put
from tunix_lite.tracking.checkpoint import Checkpoints


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
    step = TrainStep(make_policy(CFG, None, 1.0, rows=ROWS["none"]), GRPO(kl_coef=0.04), optimizer)
    laid_out, _ = ROWS["none"].lay_out(fixed_batch())
    state, adapters = (
        state_of(table, optimizer),
        state_of(adapter_weights(table, LoraConfig(rank=args.rank)), optimizer),
    )
    arms = ("none", "all", "adapters")
    saving, after, on_disk = ({arm: [] for arm in arms} for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        kept = {arm: Checkpoints(Path(folder) / arm) for arm in arms[1:]}
        for turn in range(args.repeats + 1):
            for arm in arms:
                state, _ = jax.block_until_ready(step(state, None, laid_out))
                began = time.perf_counter()
                if arm != "none":
                    kept[arm].save(state if arm == "all" else adapters.replace(step=jnp.int32(turn)))
                saved = time.perf_counter()
                state, _ = jax.block_until_ready(step(state, None, laid_out))
                stepped = time.perf_counter()
                if arm != "none":
                    kept[arm].wait()
                if turn:  # the first compiles, and makes folders
                    saving[arm].append(saved - began)
                    after[arm].append(stepped - saved)
                    on_disk[arm].append(time.perf_counter() - began)
        for checkpoints in kept.values():
            checkpoints.close()
    plain = statistics.median(after["none"])
    for arm, size in (("all", num_bytes(state)), ("adapters", num_bytes(adapters))):
        waits, slower = statistics.median(saving[arm]), statistics.median(after[arm])
        said = {"benchmark": "checkpoint", "saves": arm, "megabytes": round(size / 1e6, 1)}
        said |= {"step_seconds": round(plain, 3), "waits_seconds": round(waits, 4)}
        said |= {
            "waits_percent": round(100 * waits / plain, 1),
            "next_step_slower_percent": round(100 * (slower / plain - 1), 1),
        }
        print(json.dumps(said | {"on_disk_after_seconds_at_most": round(statistics.median(on_disk[arm]), 3)}))


if __name__ == "__main__":
    main()
