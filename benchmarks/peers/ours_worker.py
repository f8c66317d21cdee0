"""tunix_lite, a step a turn: `python ours_worker.py [--packing none|prefix]`, started by run.py."""

import os
import time

BEGAN = time.perf_counter()

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

from tunix_lite.distributed.host_memory import keep_freed_memory

keep_freed_memory()

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.algorithms.sampling import sample_groups
from tunix_lite.basics.types import Graded, Rollout, TrainState
from tunix_lite.learner.optim import OptimizerConfig, init_opt_state, make_optimizer
from tunix_lite.learner.policy import make_policy
from tunix_lite.learner.rows import RowLayout
from tunix_lite.learner.update import TrainStep
from tunix_lite.models import decoder, lora, weights
from tunix_lite.models.architecture import Architecture
from tunix_lite.parallel.compiler_options import for_updates
from tunix_lite.parallel.mesh import make_mesh, put
from tunix_lite.rollout.generate import make_generate
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.settings.batch_size import plan_batch, plan_rows
from tunix_lite.settings.config import TrainingConfig
from tunix_lite.settings.resolved_run import narrows

IMPORTED = time.perf_counter()

from turns import Turns, reward

# training.scan_layers and training.remat: with few layers and enough memory these make the fastest update. The peers
# have no loop over layers and no gradient checkpointing either.
FORWARD = {"scan_layers": False, "remat": "save_all"}


@dataclass
class MadeUpTask:
    """The workload's prompts, and rewards of tokens."""

    tokens: list[list[int]]
    long_prompts: str = "error"

    def prompts(self, examples: list[dict]) -> list[list[int]]:
        return self.tokens

    def partner(self, examples: list[dict], num_generations: int = 1) -> None:
        """No environment."""

    def grader(self, examples: list[dict], num_generations: int = 1) -> "MadeUpTask":
        return self

    def submit(self, row: int, tokens: list[int]) -> None:
        """All are graded at the end."""

    def results(self, rollout: Rollout) -> Graded:
        rows = zip(np.asarray(rollout.tokens), np.asarray(rollout.completion_mask), strict=True)
        rewards = np.array([reward(tokens[mask].tolist()) for tokens, mask in rows])
        nothing = np.zeros(len(rewards), bool)
        return Graded([], [], rewards, nothing, [], {}, nothing)


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


def timed(phase: str, function: Callable, turns: Turns) -> Callable:
    def call(*args: Any, **settings: Any) -> Any:
        with turns.phase(phase):
            return jax.block_until_ready(function(*args, **settings))

    return call


class Run:
    """A model, a policy, an optimizer and a compiled step."""

    def __init__(self, turns: Turns, packing: str):
        work = turns.work
        training = work["training"]
        self.turns = turns
        self.cfg = Architecture(work["vocab_size"], **work["model"], query_scale=work["model"]["head_dim"])
        self.task = MadeUpTask(work["prompt_tokens"])
        self.lora = lora.LoraConfig(work["lora_rank"], base="fp32") if work["lora_rank"] else None
        self.algorithm = GRPO(
            num_generations=work["generations"],
            kl_coef=training["kl_coef"],
            clip_low=training["clip"],
            clip_high=training["clip"],
        )
        self.rows = self._layout(work, packing)
        optimizer = make_optimizer(optimizer_of(training), max_steps=1000)

        # weights: under LoRA the base is frozen and is the reference, and the adapters train
        table = decoder.weights(self.cfg)
        key = jax.random.key(training["seed"])
        base = weights.init_params(table, key)
        self.frozen = base if self.lora else None
        trained = weights.init_params(lora.adapter_weights(table, self.lora), key) if self.lora else base
        reference = base if self.lora else jax.tree.map(jnp.copy, base)
        self.state = TrainState(put(np.int32(0)), trained, init_opt_state(optimizer, trained))
        self.policy = self._policy(work, reference)
        options = for_updates(weights.num_params(table))
        self.update = TrainStep(self.policy, self.algorithm, optimizer, lora=self.lora, compiler_options=options)

    def _layout(self, work: dict, packing: str) -> RowLayout:
        """Rows as a run with this packing plans them: all in one pass, or, where most completions are short, in
        passes of the default size, of which there are only as many as their tokens need."""
        tokens = work["prompts"] * (work["prompt_length"] + work["generations"] * work["new_tokens"])
        if packing == "none" or work["lengths"]:
            tokens = None
        run = SimpleNamespace(
            training=TrainingConfig(prompts_per_step=work["prompts"], packing=packing, micro_batch_tokens=tokens),
            generation=GenerationConfig(work["prompt_length"], work["new_tokens"]),
            algorithm=self.algorithm,
        )
        return plan_rows(run, plan_batch(run, fsdp=1), narrows(self.cfg))

    def _policy(self, work: dict, reference: Any) -> Any:
        """The policy, its sampling and its reference timed."""
        generation = GenerationConfig(work["prompt_length"], work["new_tokens"])
        # an end that no model has: lengths are forced by limits
        slots = RolloutConfig(num_slots=work["slots"])
        generate = make_generate(self.cfg, generation, (self.cfg.vocab_size,), work["pad_id"], rollout=slots)
        limited = partial(generate, limits=work["lengths"])
        sample = timed("rollout", limited, self.turns)
        policy = make_policy(self.cfg, sample, 1.0, reference=reference, rows=self.rows, **FORWARD)
        policy.scorers["reference"] = timed("reference", policy.scorers["reference"], self.turns)
        return policy

    def step(self, number: int) -> None:
        """One step of GRPO."""
        acting = lora.acting_params(self.frozen, self.state.params, self.lora)
        key = jax.random.fold_in(jax.random.key(0), number)
        examples = [{} for _ in self.task.tokens]
        arguments = (self.policy, self.task, acting, examples)
        groups = sample_groups(*arguments, key, self.algorithm.num_generations)
        batch, _ = self.algorithm.batch_of(*arguments, groups)
        rows, _ = self.rows.lay_out(batch)
        self.state, _ = self.update(self.state, self.frozen, rows)
        jax.block_until_ready(self.state)
        self.turns.lengths = np.asarray(batch.loss_weight != 0).sum(axis=1).tolist()


def optimizer_of(training: dict) -> OptimizerConfig:
    names = ("learning_rate", "beta1", "beta2", "eps", "max_grad_norm")
    return OptimizerConfig(**{name: training[name] for name in names})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--packing", choices=["none", "prefix"], default="none")
    args = parser.parse_args()
    turns = Turns(matmul_peak)
    began = time.perf_counter()
    jax.set_mesh(make_mesh(((1, 1), ("fsdp", "tp")), jax.devices()[:1]))
    run = Run(turns, args.packing)
    turns.ready(
        import_seconds=IMPORTED - BEGAN,
        setup_seconds=time.perf_counter() - began,
        versions={name: version(name) for name in ("tunix_lite", "jax")},
        trained_parameters=sum(x.size for x in jax.tree.leaves(run.state.params)),
        rows=f"{run.rows.num_micro_batches} x {run.rows.rows_per_micro_batch} rows of {run.rows.width} tokens",
    )
    number = 0
    while turns.wait():
        run.step(number)
        turns.done()
        number += 1


if __name__ == "__main__":
    main()
