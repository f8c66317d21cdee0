"""How fast completions of unequal length are sampled, with and without refilling slots. Prints JSON lines.

    python benchmarks/rollout.py [--workload longtail] [--slots 16 ...] [--chunk 4 ...] [--model tiny]
    JAX_PLATFORMS=cuda python benchmarks/rollout.py --model gemma3_1b --slots 128 --prompt 1024 --max-new 3072

64 prompts of half to the whole of --prompt tokens x 8 generations, random weights, no end-of-sequence token: how many
tokens a completion takes is fixed beforehand. longtail: drawn from a log-normal, sigma 1, mean a quarter of --max-new,
cut to [1, max-new]; uniform: that mean for all of them, with which refilling gains nothing. Models: tiny has 2 layers
of 64, grpo_step is that of benchmarks/grpo_step.py (both float32), gemma3_1b the shapes of Gemma 3 1B in bfloat16.

ours          the engine with all requests in its queue
static        the engine again, same programs and weights, given as many requests as there are slots at a time: each
              batch waits for its longest. So it isolates refilling, and is nobody else's static batching; what it
              pays besides is the start of every batch (empty slots, weights by layer) and no chunk under way ahead
transformers  its generate() with a static cache and random weights of the same shapes, in the same batches, each as
              long as its longest. On a GPU, leave it memory: XLA_PYTHON_CLIENT_MEM_FRACTION=.4

Arms take turns, --repeats times after a warm-up that compiles. Every turn draws new lengths, the same for all arms:
one long completion that begins late moves slot_use by 0.03. Figures are medians over the turns, and so is the ratio of
tokens per second; steps_ratio is that of decode_steps, which does not depend on what else the machine does.
tokens_per_second counts tokens of completions over the whole of an arm's time, reading prompts included; slot_use is
their share of slots x decode_steps, and slot_use_bound what it would be if a free slot took the next request after any
token: what is missing from 1 is the end of the rollout, when nothing waits any more. ms_per_step is all the time over
decode_steps. prefill_tokens were read; prompt_tokens counts each request with its own prompt. `compiles` are of XLA
programs. floor_ms is what a step takes at the bandwidth of the memory if it does no more than read all weights and the
slots' whole cache; floor_share is floor_ms / ms_per_step. On a CPU, small models are bound by something else.
"""

import argparse
import heapq
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, replace
from functools import partial

from tunix_lite.distributed.host_memory import keep_freed_memory

keep_freed_memory()

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.models import decoder, families, layer_by_layer, weights
from tunix_lite.models.architecture import Architecture
from tunix_lite.parallel.mesh import make_mesh
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout.generate import make_sampler
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig

MODELS = {
    "tiny": (Architecture(512, 2, 64, 2, 1, 32, 256, query_scale=32), jnp.float32),
    "grpo_step": (Architecture(512, 6, 256, 4, 1, 64, 1024, query_scale=64), jnp.float32),
    "gemma3_1b": (Architecture(262_144, 26, 1152, 4, 1, 256, 6912), jnp.bfloat16),
}
SIGMA = 1.0  # of the logarithm of a length
COMPILED = "/jax/core/compile/backend_compile_duration"  # the event that jax reports for every program


@dataclass(frozen=True)
class Requests:
    """What is to be sampled: request p * generations + g is generation g of prompt p."""

    prompts: list[list[int]]
    generations: int
    limits: list[int]  # tokens of each

    def batches(self, rows: int) -> list["Requests"]:
        """The same in order, `rows` requests at a time: whole prompts, or parts of one prompt's generations."""
        together, G = max(1, rows // self.generations), self.generations
        parts = []
        for p in range(0, len(self.prompts), together):
            for g in range(0, G, rows):
                here = slice(p * G + g, p * G + g + min(rows, together * G))
                parts.append(Requests(self.prompts[p : p + together], min(rows, G), self.limits[here]))
        return parts

    def shortened(self, most: int) -> "Requests":
        return replace(self, limits=[min(limit, most) for limit in self.limits])


@dataclass(frozen=True)
class Took:
    """What an arm took for all requests of a turn."""

    steps: int
    prefill_tokens: int
    seconds: float = 0.0
    compiles: int = 0  # XLA programs


def make_requests(args, cfg: Architecture) -> list[Requests]:
    """Those of every turn: the same prompts, new lengths."""
    rng = np.random.default_rng(args.seed)
    lengths = rng.integers(-(-args.prompt // 2), args.prompt + 1, args.requests // args.generations)
    prompts = [rng.integers(0, cfg.vocab_size, length).tolist() for length in lengths]
    shape, mean = (args.repeats, args.requests), args.max_new / 4
    limits = np.full(shape, mean)
    if args.workload == "longtail":
        limits = rng.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, shape)
    limits = np.clip(np.rint(limits), 1, args.max_new).astype(int)
    return [Requests(prompts, args.generations, row.tolist()) for row in limits]


def fewest_steps(limits: list[int], slots: int) -> int:
    """Decode steps if each slot that falls free takes the next request at once."""
    ends = [0] * slots
    for limit in limits:
        heapq.heapreplace(ends, ends[0] + limit)
    return max(ends)


# ---- the arms: each takes Requests and says what they took


def make_ours(sample, params):
    def run(requests: Requests) -> Took:
        steps = sample(params, requests.prompts, jax.random.key(0), requests.generations, limits=requests.limits)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return Took(end.value["rollout/decode_steps"], end.value["rollout/prefill_tokens"])

    return run


def make_static(ours, slots: int):
    def run(requests: Requests) -> Took:
        parts = [ours(batch) for batch in requests.batches(slots)]
        return Took(sum(part.steps for part in parts), sum(part.prefill_tokens for part in parts))

    return run


def make_transformers(args, cfg: Architecture, dtype, slots: int):
    """None, and a line on stderr, where it is not installed."""
    try:
        import torch
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig
    except ImportError as error:
        print(f"no arm transformers: {error}; pip install torch transformers", file=sys.stderr)
        return None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = Gemma3TextConfig(**families.config_json(cfg, families.GEMMA3))
    theirs = Gemma3ForCausalLM(config).to(device, getattr(torch, jnp.dtype(dtype).name)).eval()
    theirs.generation_config.eos_token_id = None
    # a cache of one length, whatever a batch's: otherwise each would compile anew on a GPU
    options = {"cache_implementation": "static", "max_cache_len": args.prompt + args.max_new, "pad_token_id": 0}
    options |= {"do_sample": True, "top_k": 0, "top_p": 1.0}

    def generate(batch: Requests) -> None:
        tokens, mask = np.zeros((2, len(batch.limits), args.prompt), int)
        for row, prompt in enumerate(np.repeat(np.arange(len(batch.prompts)), batch.generations)):
            asked = batch.prompts[prompt]
            tokens[row, -len(asked) :], mask[row, -len(asked) :] = asked, 1
        tokens, mask = (torch.as_tensor(x, device=device) for x in (tokens, mask))
        theirs.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=max(batch.limits), **options).cpu()

    @torch.inference_mode()
    def run(requests: Requests) -> Took:
        parts = requests.batches(slots)
        for batch in parts:
            generate(batch)
        read = sum(len(batch.limits) * args.prompt for batch in parts)
        return Took(sum(max(batch.limits) for batch in parts), read)

    return run


# ---- measuring


def timed(arm, requests: Requests, compiles: list) -> Took:
    before, began = len(compiles), time.perf_counter()
    took = arm(requests)
    return replace(took, seconds=time.perf_counter() - began, compiles=len(compiles) - before)


def bytes_per_step(cfg: Architecture, dtype, params, slots: int, length: int) -> int:
    """Of all weights and of the slots' whole cache: what a step that keeps nothing on the chip has to read."""
    per_layer_params = jax.eval_shape(partial(layer_by_layer.per_layer_params, cfg=cfg, dtype=dtype), params)
    cache = jax.eval_shape(lambda: kv_cache.empty_cache(cfg, slots, length, dtype, False))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((per_layer_params, cache)))


def memory_bandwidth(repeats: int = 5) -> float:
    """GB/s of copying a large array, read and written, the best of a few."""
    x = jnp.ones((256 if jax.default_backend() == "gpu" else 64) << 20)
    copy = jax.jit(lambda x: x + 1)
    copy(x).block_until_ready()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        copy(x).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return 2 * x.nbytes / min(seconds) / 1e9


def measure(args, slots: int, chunk: int, params, bandwidth: float, compiles: list) -> None:
    """All arms for one number of slots and one chunk, a line each, and a line that compares."""
    cfg, dtype = MODELS[args.model]
    turns, generation = make_requests(args, cfg), GenerationConfig(args.prompt, args.max_new)
    sample = make_sampler(cfg, generation, (cfg.vocab_size,), 0, dtype, RolloutConfig(slots, chunk))
    ours = make_ours(sample, params)
    makers = {
        "ours": lambda: ours,
        "static": lambda: make_static(ours, slots),
        "transformers": lambda: make_transformers(args, cfg, dtype, slots),
    }
    arms = {name: arm for name in args.arms if (arm := makers[name]()) is not None}
    # lengths change no shape: short completions compile everything
    warm_up = {name: timed(arm, turns[0].shortened(2 * chunk), compiles) for name, arm in arms.items()}
    took = {name: [] for name in arms}
    for requests in turns:
        for name, arm in arms.items():
            took[name].append(timed(arm, requests, compiles))

    about = {"benchmark": "rollout", "workload": args.workload, "model": args.model, "slots": slots, "chunk": chunk}
    floor_bytes = bytes_per_step(cfg, dtype, params, slots, args.prompt + args.max_new)
    floor = {"bytes_per_step": floor_bytes, "bandwidth_gb_s": round(bandwidth, 1)}
    floor["floor_ms"] = round(floor_bytes / bandwidth / 1e6, 4)
    for name, runs in took.items():
        line = about | {"arm": name} | figures(turns, runs, slots)
        if name != "transformers":  # whose programs are not jax's, and whose reads are not counted
            compiled = {"warm_up": warm_up[name].compiles, "measured": sum(run.compiles for run in runs)}
            share = floor["floor_ms"] / line["ms_per_step"]
            line |= {"compiles": compiled} | floor | {"floor_share": round(share, 3)}
        host = {"device": jax.devices()[0].device_kind, "cores": os.cpu_count(), "jax": jax.__version__}
        print(json.dumps(line | host), flush=True)
    if {"ours", "static"} <= took.keys():
        ratios = [theirs.seconds / our.seconds for our, theirs in zip(took["ours"], took["static"])]
        steps = [theirs.steps / our.steps for our, theirs in zip(took["ours"], took["static"])]
        summary = {"ratio": round(statistics.median(ratios), 2), "by_turn": [round(x, 2) for x in ratios]}
        summary["steps_ratio"] = round(statistics.median(steps), 2)
        print(json.dumps(about | {"arm": "ours/static"} | summary), flush=True)


def figures(turns: list[Requests], runs: list[Took], slots: int) -> dict:
    """The medians of an arm over its turns."""

    def median(of, digits: int = 0):
        value = statistics.median(of(requests, run) for requests, run in zip(turns, runs))
        return round(value, digits) if digits else round(value)

    tokens = [limit for requests in turns for limit in requests.limits]
    return {
        "requests": len(turns[0].limits),
        "length_mean": round(statistics.mean(tokens), 1),
        "length_max": max(tokens),
        "tokens_per_second": median(lambda asked, run: sum(asked.limits) / run.seconds),
        "slot_use": median(lambda asked, run: sum(asked.limits) / run.steps / slots, 4),
        "slot_use_bound": median(lambda asked, _: sum(asked.limits) / fewest_steps(asked.limits, slots) / slots, 4),
        "decode_steps": median(lambda _, run: run.steps),
        "prefill_tokens": median(lambda _, run: run.prefill_tokens),
        "prompt_tokens": turns[0].generations * sum(map(len, turns[0].prompts)),
        "seconds": median(lambda _, run: run.seconds, 3),
        "seconds_by_turn": [round(run.seconds, 3) for run in runs],
        "ms_per_step": median(lambda _, run: 1e3 * run.seconds / run.steps, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=("longtail", "uniform"), default="longtail")
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--arms", nargs="+", choices=("ours", "static", "transformers"), default=["ours", "static"])
    parser.add_argument("--slots", nargs="+", type=int, default=[16])
    parser.add_argument("--chunk", nargs="+", type=int, default=[4])
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the longest prompt")
    parser.add_argument("--max-new", type=int, default=512, help="tokens of the longest completion")
    parser.add_argument("--bandwidth", type=float, help="GB/s of the memory; measured if not given")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.requests % args.generations:
        parser.error(f"--requests {args.requests} is not a multiple of --generations {args.generations}")
    if bad := [slots for slots in args.slots if slots % args.generations and args.generations % slots]:
        parser.error(f"--slots {bad[0]} neither divides --generations {args.generations} nor is a multiple of it")

    compiles = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiles.append(event) if event == COMPILED else None
    )
    jax.set_mesh(make_mesh(((1, 1), ("fsdp", "tp")), jax.devices()[:1]))
    cfg, dtype = MODELS[args.model]
    table = jax.tree.map(lambda w: replace(w, dtype=dtype), decoder.weights(cfg))
    params = weights.init_params(table, jax.random.key(0))
    bandwidth = args.bandwidth or memory_bandwidth()
    for slots in args.slots:
        for chunk in args.chunk:
            measure(args, slots, chunk, params, bandwidth, compiles)


if __name__ == "__main__":
    main()
