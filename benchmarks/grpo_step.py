"""One GRPO step on a fixed workload, on one device: rollout, reference pass, update. Prints one JSON line.

    python benchmarks/grpo_step.py [--repeats 7] [--packing none|prefix] [--remat save_all|none|...] [--dtype fp32|bf16]
        [--unroll]

6 layers, embed 256, 4 heads, 1 key/value head, head dim 64, mlp 1024, vocabulary 512, computed in float32 by default; 8
prompts x 8 generations, prompts of 32 tokens, exactly 64 new ones; KL 0.04 against a reference; one update with AdamW.
Without sharing the prompts of a group the step needs 361 GFLOP. The matmul peak of the machine is measured in the same
run.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import arguments
import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.algorithms.advantages import standardise
from tunix_lite.algorithms.algorithm import Policy
from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.algorithms.weighting import per_token
from tunix_lite.basics.types import Batch, Rollout, TrainState
from tunix_lite.distributed.host_memory import keep_freed_memory
from tunix_lite.learner.optim import OptimizerConfig, init_opt_state, make_optimizer
from tunix_lite.learner.packing import RowShape
from tunix_lite.learner.policy import DTYPES, make_policy
from tunix_lite.learner.rows import RowLayout
from tunix_lite.learner.update import TrainStep
from tunix_lite.models import decoder, weights
from tunix_lite.models.architecture import Architecture
from tunix_lite.parallel.compiler_options import for_updates
from tunix_lite.parallel.mesh import make_mesh, put
from tunix_lite.rollout.generate import make_generate
from tunix_lite.rollout.settings import GenerationConfig

PROMPTS, GENERATIONS, PROMPT_LENGTH, NEW_TOKENS = 8, 8, 32, 64
GROUP = RowShape(NEW_TOKENS, GENERATIONS, PROMPT_LENGTH)  # a prompt and its completions, as batching chooses
ROWS = {  # all at once; of equal lengths, side by side gains nothing
    "none": RowLayout("none", 1, NEW_TOKENS),
    "prefix": RowLayout("prefix", 1, None, GROUP, PROMPTS),
}
CFG = Architecture(512, 6, 256, 4, 1, 64, 1024, query_scale=64)


def matmul_peak(size: int = 2048, repeats: int = 5) -> float:
    """GFLOP/s of one large float32 product, the best of a few."""
    x = jnp.ones((size, size))
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        product(x, x).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds) / 1e9


@dataclass
class FixedWork:
    """The programs and the weights of the fixed workload, and its phases one by one.

    Example: `work = FixedWork.make("prefix")`, then `batch = work.judged(work.rollout(0))`.
    """

    generate: Callable
    policy: Policy
    train_step: TrainStep
    rows: RowLayout
    state: TrainState
    prompts: list[list[int]]

    @classmethod
    def make(cls, packing: str, remat: str = "none", dtype_name: str = "fp32", scan_layers: bool = True) -> "FixedWork":
        """packing: a name of ROWS. remat: a name of decoder.REMAT. dtype_name: of learner.policy.DTYPES. scan_layers:
        of decoder.forward."""
        keep_freed_memory()
        jax.set_mesh(make_mesh(((1, 1), ("fsdp", "tp")), jax.devices()[:1]))
        rng = np.random.default_rng(0)
        params = weights.init_params(decoder.weights(CFG), jax.random.key(0))
        generation, dtype = GenerationConfig(PROMPT_LENGTH, NEW_TOKENS), DTYPES[dtype_name]
        generate = make_generate(CFG, generation, eos_ids=(CFG.vocab_size,), pad_id=0, dtype=dtype)
        rows = ROWS[packing]
        reference = jax.tree.map(jnp.copy, params)
        policy = make_policy(CFG, generate, 1.0, dtype, reference, rows, remat=remat, scan_layers=scan_layers)
        optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-5), max_steps=100)
        state = TrainState(put(np.int32(0)), params, init_opt_state(optimizer, params))
        algorithm = GRPO(num_generations=GENERATIONS, kl_coef=0.04)
        options = for_updates(weights.num_params(decoder.weights(CFG)))
        train_step = TrainStep(policy, algorithm, optimizer, compiler_options=options)
        prompts = rng.integers(0, CFG.vocab_size, (PROMPTS, PROMPT_LENGTH)).tolist()
        return cls(generate, policy, train_step, rows, state, prompts)

    def rollout(self, step: int) -> Rollout:
        """Completions of all prompts, every one of NEW_TOKENS tokens."""
        key = jax.random.fold_in(jax.random.key(0), step)
        return jax.block_until_ready(self.generate(self.state.params, self.prompts, key, GENERATIONS))

    def judged(self, rollout: Rollout) -> Batch:
        """The batch of a rollout, with the advantages of a made-up reward."""
        mask = np.asarray(rollout.completion_mask)
        assert (mask.sum(axis=1) == NEW_TOKENS).all()
        rewards = (np.asarray(rollout.tokens) % 7 == 0).mean(axis=1).reshape(PROMPTS, GENERATIONS)
        return Batch(
            tokens=rollout.tokens,
            token_mask=rollout.token_mask,
            loss_weight=per_token(mask),
            advantages=np.broadcast_to(standardise(rewards).reshape(-1, 1), mask.shape).astype(np.float32),
            old_logprobs=rollout.logprobs,
        )

    def reference(self, batch: Batch) -> Batch:
        """The batch with the log-probabilities of the reference."""
        return batch.replace(ref_logprobs=self.policy.scorers["reference"](batch))

    def update(self, batch: Batch) -> dict:
        """One update of the weights. Returns its metrics."""
        self.state, metrics = self.train_step(self.state, None, self.rows.lay_out(batch)[0])
        jax.block_until_ready((self.state, metrics))
        return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=arguments.count, default=7, help="steps that are timed, after one more")
    parser.add_argument("--packing", choices=ROWS, default="none", help="prefix shares prompts")
    parser.add_argument("--remat", choices=decoder.REMAT, default="none", help="what the update computes again")
    parser.add_argument("--unroll", action="store_true", help="training.scan_layers=false")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of the computation")
    args = parser.parse_args()
    repeats = args.repeats

    work = FixedWork.make(args.packing, args.remat, args.dtype, not args.unroll)
    times = {"rollout": [], "reference": [], "update": [], "step": []}
    for step in range(repeats + 1):
        began = time.perf_counter()
        rollout = work.rollout(step)
        rolled = time.perf_counter()
        batch = work.judged(rollout)
        judged = time.perf_counter()
        batch = work.reference(batch)
        scored = time.perf_counter()
        metrics = work.update(batch)
        ended = time.perf_counter()
        if step:  # the first one compiles
            for name, seconds in (
                ("rollout", rolled - began),
                ("reference", scored - judged),
                ("update", ended - scored),
                ("step", ended - began),
            ):
                times[name].append(seconds)

    medians = {name: round(statistics.median(seconds), 3) for name, seconds in times.items()}
    print(
        json.dumps(
            {
                "benchmark": "grpo_step",
                "packing": args.packing,
                "remat": args.remat,
                "scan_layers": not args.unroll,
                "dtype": args.dtype,
                "seconds": medians,
                "repeats": repeats,
                "matmul_peak_gflops": round(matmul_peak()),
                "sampler_gap": float(metrics["train/sampler_gap"]),
                "jax": jax.__version__,
                "device": jax.devices()[0].device_kind,
                "cores": os.cpu_count(),
            }
        )
    )


if __name__ == "__main__":
    main()
