"""The update alone, on the devices that there are: seconds, tokens per second, MFU, memory. One JSON line per arm.

    python benchmarks/train_step.py --arms fp32:none fp32:block                          # the small model, on a CPU
    python benchmarks/train_step.py --model gemma3_1b --sequences 8 --prompt 512 --new 1024 \
        --arms bf16_params:none bf16_params:save_qkv_out:xla                             # on a GPU or a TPU

An arm is precision:remat[:attention[:packing]]. All arms are compiled first and then take turns, so that what else the
machine does hits them alike; medians are of --repeats turns. Weights are random and rewards made up: what is timed
does not depend on them. MFU is that of planning/flops.py: 6 FLOPs a weight and token, and attention.
"""

import argparse
import json
import os
import statistics
import time

from tunix_lite.distributed.host_memory import keep_freed_memory

keep_freed_memory()

import jax
import numpy as np
from made_up import GENERATIONS, made_up_batch, packed_rows

from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.basics.types import Batch, TrainState
from tunix_lite.learner.optim import OptimizerConfig, init_opt_state, make_optimizer
from tunix_lite.learner.policy import DTYPES, STORED, make_policy
from tunix_lite.learner.rows import RowLayout
from tunix_lite.learner.update import TrainStep
from tunix_lite.models import attention, decoder, weights
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.quantize import init_stored
from tunix_lite.parallel.mesh import make_mesh, put
from tunix_lite.planning.flops import Throughput
from tunix_lite.planning.hardware import of_device
from tunix_lite.settings.compose import compose

SMALL = Architecture(512, 6, 256, 4, 1, 64, 1024, query_scale=64)  # that of grpo_step.py


class Arm:
    """One way to do the update, compiled."""

    def __init__(self, name: str, cfg: Architecture, batch: Batch, lengths: tuple[int, int], micro_batches: int, mesh):
        """lengths: tokens of a prompt and of a completion, at most."""
        self.name = name
        prompt, new = lengths
        precision, remat, asked, packing = [*name.split(":"), *("auto", "none")[len(name.split(":")) - 2 :]]
        rows, width = RowLayout("none", micro_batches), prompt + new
        if packing != "none":
            shape, count = packed_rows(packing, len(batch.tokens), prompt, new)
            rows, width = RowLayout(packing, -(-count // mesh.shape["fsdp"]), None, shape, 1), shape.width
        platform, dtype = mesh.devices.flat[0].platform, DTYPES[precision]
        chosen = attention.choose(asked, cfg, platform, dtype, width, packing == "prefix")
        self.attention = ": ".join(chosen)
        policy = make_policy(cfg, None, 1.0, dtype, remat=remat, attend=attention.IMPLEMENTATIONS[chosen[0]])
        optimizer = make_optimizer(OptimizerConfig(), 100)
        self.step = TrainStep(policy, GRPO(num_generations=GENERATIONS), optimizer)
        params = init_stored(decoder.weights(cfg), jax.random.key(0), STORED[precision])
        self.state = TrainState(put(np.int32(0)), params, init_opt_state(optimizer, params))
        self.batch, _ = rows.lay_out(batch)
        began = time.perf_counter()
        self.planned = self.step.compile(self.state, None, self.batch).memory_analysis()
        self.compile_seconds = time.perf_counter() - began
        self.seconds = []

    def turn(self) -> None:
        began = time.perf_counter()
        self.state, metrics = jax.block_until_ready(self.step(self.state, None, self.batch))
        self.seconds.append(time.perf_counter() - began)
        assert np.isfinite(float(metrics["train/loss"]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="small", help="small, or an option of conf/model with an architecture")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--ragged", action="store_true", help="completions of any length, as packing likes them")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--fsdp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--arms", nargs="+", default=["fp32:none"])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()

    cfg = SMALL if args.model == "small" else compose([f"model={args.model}"]).model.architecture
    mesh = make_mesh(((args.fsdp, args.tp), ("fsdp", "tp")), jax.devices()[: args.fsdp * args.tp])
    jax.set_mesh(mesh)
    batch = made_up_batch(cfg, args.sequences, args.prompt, args.new, args.ragged)
    arms = [Arm(name, cfg, batch, (args.prompt, args.new), args.micro_batches, mesh) for name in args.arms]
    for turn in range(args.repeats + 1):
        for arm in arms:
            arm.turn()
            if turn == 0:  # the first one warms up
                arm.seconds.clear()
    throughput = Throughput(cfg, 0, mesh.size, of_device(mesh.devices.flat[0]))
    for arm in arms:
        seconds = statistics.median(arm.seconds)
        said = {
            "benchmark": "train_step",
            "arm": arm.name,
            "model": args.model,
            "parameters": weights.num_params(decoder.weights(cfg)),
            "sequences": args.sequences,
            "tokens": int(batch.token_mask.sum()),
            "mesh": dict(mesh.shape),
            "attention": arm.attention,
            "seconds": round(seconds, 4),
            "spread": [round(min(arm.seconds), 4), round(max(arm.seconds), 4)],
            "compile_seconds": round(arm.compile_seconds, 1),
            "argument_bytes": arm.planned.argument_size_in_bytes,
            "temp_bytes": arm.planned.temp_size_in_bytes,
            "alias_bytes": arm.planned.alias_size_in_bytes,
        }
        said |= {name: round(value, 4) for name, value in throughput.metrics(batch, seconds, seconds).items()}
        print(
            json.dumps(said | {"jax": jax.__version__, "device": jax.devices()[0].device_kind, "cores": os.cpu_count()})
        )


if __name__ == "__main__":
    main()
