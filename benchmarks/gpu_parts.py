"""The parts of benchmarks/gpu.py, one a process: each prints its results as lines of JSON, as they come.

    python benchmarks/gpu_parts.py bf16 [--tiny] [--seconds 60] [--out FOLDER]

A line with `ok` is a check: a figure and the bound that it must keep. A line without is a measurement.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tunix_lite.distributed.host_memory import keep_freed_memory, prepare_gpu

keep_freed_memory()
prepare_gpu()

import jax
import jax.numpy as jnp
import numpy as np
from made_up import GENERATIONS, made_up_batch, rows_for

from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.basics.types import Batch, TrainState
from tunix_lite.commands.plan import recorded_lengths
from tunix_lite.kernels.decode_attention import fused_attend
from tunix_lite.kernels.decode_products import FusedProducts
from tunix_lite.kernels.fused_draw import fused_draw
from tunix_lite.learner.optim import OptimizerConfig, init_opt_state, make_optimizer
from tunix_lite.learner.policy import make_policy
from tunix_lite.learner.rows import RowLayout
from tunix_lite.learner.update import TrainStep
from tunix_lite.models import attention, decoder, rope, source, weights
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.kernel_choice import check_fused
from tunix_lite.models.quantize import init_stored
from tunix_lite.models.source import ModelConfig
from tunix_lite.parallel.mesh import make_mesh, put
from tunix_lite.planning import flops
from tunix_lite.planning.flops import peak_bytes
from tunix_lite.planning.forecast import forecast
from tunix_lite.planning.hardware import HARDWARE, Hardware, attached_machine, of_device
from tunix_lite.planning.kernels import kernels, predicted_seconds
from tunix_lite.planning.packing_choice import with_packing
from tunix_lite.planning.plan import assemble_plan, with_compiled
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout import sampling
from tunix_lite.rollout.generate import make_generate, make_sampler
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.settings.compose import compose
from tunix_lite.settings.resolved_run import resolve_run
from tunix_lite.train import train

ROOT = Path(__file__).resolve().parents[1]
NO_END = -1  # a token that is never drawn: completions take as many tokens as they are allowed


@dataclass(frozen=True)
class Setting:
    """What all parts are told."""

    tiny: bool
    out: Path
    ends: float  # time.monotonic() at which the process is stopped

    def has(self, seconds: float) -> bool:
        """Whether so many seconds are left."""
        return time.monotonic() + seconds < self.ends


def check(name: str, value: float, bound: float, **more: object) -> dict:
    """A figure that must not be above its bound."""
    # bound may be a number of numpy, which json does not write
    return {"name": name, "value": float(f"{value:.3g}"), "bound": float(bound), "ok": bool(value <= bound)} | more


def on_device(device=None) -> jax.sharding.Mesh:
    """Makes a mesh of one device the current one: the first that jax sees, or the one given."""
    mesh = make_mesh(((1, 1), ("fsdp", "tp")), [jax.devices()[0] if device is None else device])
    jax.set_mesh(mesh)
    return mesh


def median_seconds(call: Callable[[], object], repeats: int = 5) -> float:
    """Of a call that blocks, after one that compiles and warms up."""
    call()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


# ---- device: what it is, and how fast it is without us


def device(setting: Setting) -> Iterator[dict]:
    first = jax.devices()[0]
    stats = first.memory_stats() or {}
    yield {
        "device": first.device_kind,
        "platform": first.platform,
        "driver": driver(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "GiB for programs": round(stats.get("bytes_limit", 0) / 2**30, 1),
        "cores": os.cpu_count(),
    }
    size = 512 if setting.tiny else 8192
    hardware = of_device(first)
    for dtype in (jnp.bfloat16, jnp.float32):
        rate = matmul_rate(size, dtype)
        line = {"name": f"product of {size} x {size}, {jnp.dtype(dtype).name}", "TFLOP/s": round(rate / 1e12, 2)}
        if hardware is not None and dtype == jnp.bfloat16:
            line["of the peak"] = round(rate / hardware.peak_flops, 3)
        yield line
    with jax.default_matmul_precision("highest"):
        rate = matmul_rate(size, jnp.float32)
    yield {"name": f"product of {size} x {size}, float32 at precision highest", "TFLOP/s": round(rate / 1e12, 2)}
    bandwidth = copy_bandwidth(setting)
    line = {"name": "copy, read and written", "GB/s": round(bandwidth / 1e9)}
    yield line if hardware is None else line | {"of the peak": round(bandwidth / hardware.memory_bandwidth, 3)}


def driver() -> str:
    """The version of NVIDIA's driver; "none" where there is no nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
    return "none"


def matmul_rate(size: int, dtype) -> float:
    """FLOP/s of ten products, one behind the other, of random numbers (zeros are faster on a GPU)."""
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)

    @jax.jit
    def products(x):
        return jax.lax.fori_loop(0, 10, lambda _, y: (y @ x) / jnp.asarray(size**0.5, dtype), x)

    return 10 * 2 * size**3 / median_seconds(lambda: products(x).block_until_ready())


def copy_bandwidth(setting: Setting) -> float:
    """Bytes per second of adding one to a large array, read and written."""
    x = jnp.ones((16 if setting.tiny else 512) << 20)
    copy = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / median_seconds(lambda: copy(x).block_until_ready())


# ---- made-up models and batches

SIZES = {"vocab_size": 64, "num_layers": 3, "embed_dim": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
SIZES |= {"mlp_dim": 96, "window": 6, "pattern": ("local", "global"), "query_scale": 32}
QWEN = {"activation": "silu", "embed_scale": False, "norm_plus_one": False, "post_norms": False, "pattern": ("global",)}
FAMILIES = {  # one small model of the shape of each
    "gemma3": Architecture(**SIZES),
    "gemma2": Architecture(**SIZES | {"qk_norm": False, "attn_softcap": 20.0, "final_softcap": 10.0}),
    "llama3": Architecture(**SIZES | QWEN | {"qk_norm": False, "tied": False, "window": None}),
    "qwen2": Architecture(**SIZES | QWEN | {"qk_norm": False, "qkv_bias": True, "window": None}),
    "qwen3": Architecture(**SIZES | QWEN | {"window": None, "tied": False}),
}


def random_params(cfg: Architecture, seed: int = 0, scale: float = 0.3) -> dict:
    """Weights large enough that the model has opinions, the same numbers on every device."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda w: put(rng.normal(0, scale, w.shape).astype(np.float32), *w.axes),
        decoder.weights(cfg),
    )


def loss_and_gradient(cfg: Architecture, params, batch: Batch, rows: RowLayout, dtype=jnp.float32, **scoring):
    """(loss, log-probabilities [R, W], gradient) of GRPO's loss, as arrays of the host."""
    policy = make_policy(cfg, None, 1.0, dtype, rows=rows, **scoring)
    laid_out, layout = rows.lay_out(batch)

    def objective(params, batch):
        scores = policy.scores(params, batch.replace(num_micro_batches=None))
        return GRPO(num_generations=GENERATIONS).loss(scores, batch)[0], scores.logprobs

    (loss, logprobs), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(params, laid_out)
    return float(loss), layout.back(np.asarray(logprobs)), jax.device_get(grads)


def relative(theirs, ours) -> float:
    """|ours - theirs| / |theirs| over all leaves, in float64."""
    pairs = list(zip(jax.tree.leaves(theirs), jax.tree.leaves(ours)))
    off = sum(np.sum((np.asarray(a, np.float64) - np.asarray(b, np.float64)) ** 2) for a, b in pairs)
    return float(np.sqrt(off / sum(np.sum(np.asarray(a, np.float64) ** 2) for a, _ in pairs)))


# ---- exactness: float32 on this device and on the CPU


def exactness(setting: Setting) -> Iterator[dict]:
    """Log-probabilities, loss, gradient and greedy tokens of a small model of each family, against the CPU's."""
    families = list(FAMILIES.items())[: 1 if setting.tiny else None]
    for name, cfg in families:
        batch = made_up_batch(cfg, 16, 9, 14)
        counts = batch.loss_weight != 0
        # Compiling is what this costs: plain rows, and jax's default precision, of one family.
        packings = ("none", "prefix") if cfg is families[0][1] else ("prefix",)
        found = {}
        for where, chosen in (("cpu", jax.devices("cpu")[0]), ("here", jax.devices()[0])):
            on_device(chosen)
            params = random_params(cfg)
            with jax.default_matmul_precision("highest"):
                found[where] = [loss_and_gradient(cfg, params, batch, rows_for(one, 16, 9, 14)) for one in packings]
                found[where].append(greedy(cfg, params))
        for packing, theirs, ours in zip(packings, found["cpu"], found["here"]):
            gap = np.abs(theirs[1] - ours[1])[counts].max()
            yield check(f"{name}, packing={packing}: log-probabilities, highest precision", gap, 3e-5)
            yield check(f"{name}, packing={packing}: gradient", relative(theirs[2], ours[2]), 2e-5)
        same = int((found["cpu"][-1] != found["here"][-1]).any(axis=1).sum())
        yield check(f"{name}: greedy completions of 8 that are not the same", same, 0)
        if "none" in packings:
            default = loss_and_gradient(cfg, params, batch, rows_for("none", 16, 9, 14))
            gap = np.abs(found["cpu"][0][1] - default[1])[counts].max()
            off = relative(found["cpu"][0][2], default[2])
            yield {
                "name": f"{name}: jax's default precision",
                "log-probabilities": f"{gap:.1e}",
                "gradient": f"{off:.1e}",
            }


def greedy(cfg: Architecture, params) -> np.ndarray:
    """Greedy completions [8, 12] of eight prompts, in four slots."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(2, 10, 8)
    prompts = [row[9 - n :].tolist() for n, row in zip(lengths, rng.integers(0, cfg.vocab_size, (8, 9)))]
    generate = make_generate(cfg, GenerationConfig(9, 12), (NO_END,), 0, jnp.float32, RolloutConfig(4, 4))
    return np.asarray(generate(params, prompts, jax.random.key(0), temperature=0.0).tokens)[:, 9:]


# ---- attention: cuDNN's kernel against plain products


@dataclass(frozen=True)
class Shape:
    """One kind of attention."""

    heads: int
    kv_heads: int
    head_dim: int
    packing: str
    remat: str
    window: int | None = None

    def __str__(self) -> str:
        window = "" if self.window is None else f", window {self.window}"
        heads = f"{self.heads} heads over {self.kv_heads} of {self.head_dim}"
        return f"{heads}{window}, packing={self.packing}, remat={self.remat}"


SHAPES = (  # each value of each setting at least once; heads of Gemma 3 1B and 4B, Llama and Qwen
    Shape(4, 1, 256, "none", "none", 64),
    Shape(8, 4, 256, "prefix", "block", 64),
    Shape(8, 8, 64, "sequences", "dots"),
    Shape(16, 8, 128, "prefix", "save_qkv_out"),
    Shape(4, 1, 256, "prefix", "none", 64),
    Shape(14, 2, 64, "none", "block"),
    Shape(32, 8, 64, "sequences", "none"),
)


def attention_kernels(setting: Setting) -> Iterator[dict]:
    """cuDNN in bfloat16: as near to float32 as plain products in bfloat16 are, values and gradients."""
    prompt, new, sequences = (8, 24, 8) if setting.tiny else (64, 192, 16)
    for shape in SHAPES:
        if not setting.has(40):
            yield {"name": str(shape), "skipped": "no time was left"}
            continue
        cfg = replace(
            FAMILIES["gemma3"] if shape.window else FAMILIES["qwen3"],
            **{"num_heads": shape.heads, "num_kv_heads": shape.kv_heads, "head_dim": shape.head_dim},
            **{"query_scale": shape.head_dim, "window": shape.window, "num_layers": 2},
        )
        yield from one_kernel(cfg, shape, made_up_batch(cfg, sequences, prompt, new), prompt, new)


def one_kernel(cfg: Architecture, shape: Shape, batch: Batch, prompt: int, new: int) -> Iterator[dict]:
    mesh = on_device()
    rows = rows_for(shape.packing, len(batch.tokens), prompt, new)
    width, shares = rows.width or prompt + new, shape.packing == "prefix"
    where = mesh.devices.flat[0].platform
    chosen, why = attention.choose("auto", cfg, where, jnp.bfloat16, width, shares)
    if chosen != "cudnn":
        # A GPU on which the kernel is not chosen for these shapes is a finding; a CPU is not.
        line = {"name": str(shape), "skipped": f"{chosen}: {why}"}
        yield line | ({"ok": False} if where in ("gpu", "cuda") else {})
        return
    params = random_params(cfg, scale=0.1)
    true = loss_and_gradient(cfg, params, batch, rows)
    counts, gaps = batch.loss_weight != 0, {}
    for name in ("xla", "cudnn"):
        attend = attention.IMPLEMENTATIONS[name]
        found = loss_and_gradient(cfg, params, batch, rows, jnp.bfloat16, remat=shape.remat, attend=attend)
        gaps[name] = np.abs(found[1] - true[1])[counts].mean(), relative(true[2], found[2])
    for index, what in enumerate(("log-probabilities, mean gap to float32", "gradient, gap to float32")):
        yield check(f"{shape}: {what}", gaps["cudnn"][index], round(1.5 * gaps["xla"][index] + 1e-4, 5))


def fused_decoding(setting: Setting) -> Iterator[dict]:
    """The fused kernel of decoding against the steps that it replaces, of one layer: with query heads in groups, norms,
    a ring that has wrapped, sequences of all lengths. On a CPU it is interpreted."""
    on_device()
    interpret = jax.default_backend() == "cpu"
    head, columns, rows = (32, 70, 4) if setting.tiny else (256, 1000, 16)
    cfg = dataclasses.replace(FAMILIES["gemma3"], head_dim=head, num_heads=6, window=columns, query_scale=head)
    newest_B = jnp.asarray(np.linspace(0, 2 * columns, rows).astype(np.int32))
    for dtype, bound in ((jnp.float32, 1e-4), (jnp.bfloat16, 3e-2)):
        rng = np.random.default_rng(0)

        def normal(*shape, rng=rng, dtype=dtype) -> jax.Array:
            return jnp.asarray(rng.normal(size=shape), dtype)

        q_BNH, k_BKH, v_BKH = (normal(rows, heads, head) for heads in (6, 2, 2))
        norms = (normal(head).astype(jnp.float32), normal(head).astype(jnp.float32))
        old = kv_cache.KV(normal(rows, 2, columns, head), normal(rows, 2, columns, head))
        sin, cos = rope.rope_angles(cfg, newest_B[:, None], "local")
        angles = (sin[:, 0, 0], cos[:, 0, 0])

        @jax.jit
        def by_steps(q_BNH, k_BKH, v_BKH, old, norms=norms, turned=(sin, cos)):
            q_BTNH, k_BTKH = (
                rope.rope(decoder.norm(x[:, None], scale, cfg), turned) for x, scale in zip((q_BNH, k_BKH), norms)
            )
            new = kv_cache.to_cache_format(k_BTKH, v_BKH[:, None], int8=False)
            kv = old.with_token(new, newest_B)
            mask_B1C = kv_cache.attended_columns(cfg, "local", newest_B, columns)[:, None]
            return attention.attend(cfg, q_BTNH, kv.k, kv.v, mask_B1C)[:, 0], kv.k, kv.v

        with jax.default_matmul_precision("highest"):
            expected = jax.device_get(by_steps(q_BNH, k_BKH, v_BKH, old))
        kernel = jax.jit(partial(fused_attend, cfg, interpret=interpret))
        found = jax.device_get(kernel(q_BNH, k_BKH, v_BKH, norms, angles, newest_B, old.k, old.v))
        gaps = [float(np.abs(np.float32(a) - np.float32(b)).max()) for a, b in zip(expected, found)]
        name = f"fused decoding, {jnp.dtype(dtype).name}"
        yield check(f"{name}: attended, largest difference", gaps[0], bound)
        yield check(f"{name}: keys in the cache, largest difference", gaps[1], bound)
        yield check(f"{name}: values in the cache, largest difference", gaps[2], 0.0)


def fused_drawing(setting: Setting) -> Iterator[dict]:
    """The kernel that multiplies with the head and draws, against plain products: tokens, their log-probabilities, and
    the time of both. On a CPU it is interpreted."""
    on_device()
    interpret = jax.default_backend() == "cpu"
    rows, width, vocab = (20, 48, 300) if setting.tiny else (256, 1152, 262_144)
    cfg = dataclasses.replace(FAMILIES["gemma3"], embed_dim=width, vocab_size=vocab)
    keys_B, positions_B = jax.random.split(jax.random.key(0), rows), jnp.arange(rows)

    @jax.jit
    def plain(hidden_BD, table_VD):
        scores_BV = decoder.logits({"embed": table_VD}, cfg, hidden_BD)
        return sampling.draw(scores_BV, keys_B, positions_B, 0.9)[:2]

    @jax.jit
    def fused(hidden_BD, table_VD):
        return fused_draw(cfg, hidden_BD, table_VD, keys_B, positions_B, 0.9, interpret)

    # Sums in another order may turn a token whose score is as good as that of another one.
    for dtype, most in ((jnp.float32, 0), (jnp.bfloat16, 1)):
        name = f"fused drawing, {jnp.dtype(dtype).name}"
        hidden_BD = jax.random.normal(jax.random.key(1), (rows, width), dtype)
        table_VD = jax.random.normal(jax.random.key(2), (vocab, width), dtype) / width**0.5
        with jax.default_matmul_precision("highest"):
            expected = jax.device_get(plain(hidden_BD, table_VD))
        found = jax.device_get(fused(hidden_BD, table_VD))
        same = expected[0] == found[0]
        yield check(f"{name}: tokens of {rows} that differ", int((~same).sum()), most)
        gap = np.abs(expected[1] - found[1])[same].max()
        yield check(f"{name}: log-probabilities, largest difference", gap, 1e-4)
        times = [
            median_seconds(lambda draw=draw, x=hidden_BD, y=table_VD: jax.block_until_ready(draw(x, y)))
            for draw in (plain, fused)
        ]
        yield {"name": f"{name}: time", "ms, plain": round(1e3 * times[0], 3), "ms, fused": round(1e3 * times[1], 3)}


def fused_multiplying(setting: Setting) -> Iterator[dict]:
    """The kernels of a layer's products against plain ones, and the time of both. On a CPU they are interpreted."""
    on_device()
    interpret = jax.default_backend() == "cpu"
    rows, sizes = (20, {"embed_dim": 48, "mlp_dim": 80, "head_dim": 32}) if setting.tiny else (256, {})
    cfg = dataclasses.replace(compose(["model=gemma3_1b"]).model.architecture, **sizes)
    for dtype, bound in ((jnp.float32, 1e-4), (jnp.bfloat16, 5e-2)):
        keys = iter(jax.random.split(jax.random.key(0), 20))
        w = {
            name: jax.random.normal(next(keys), one.shape, dtype) / one.shape[0] ** 0.5
            for name, one in decoder.layer_weights(cfg).items()
        }
        shapes = ((cfg.embed_dim,), (cfg.num_heads, cfg.head_dim), (cfg.mlp_dim,))
        x, attended, hidden = (jax.random.normal(next(keys), (rows, 1, *shape), dtype) for shape in shapes)
        named = {
            "queries": lambda products, w, x=x: products.qkv(x, w)[0],
            "output of attention": lambda products, w, x=attended: products.out(x, w),
            "gated": lambda products, w, x=x: products.gated(x, w, cfg.activation),
            "down": lambda products, w, x=hidden: products.down(x, w),
        }
        for what, multiply in named.items():
            plain = jax.jit(partial(multiply, decoder.Products()))
            fused = jax.jit(partial(multiply, FusedProducts(interpret=interpret)))
            name = f"fused products, {jnp.dtype(dtype).name}, {what}"
            with jax.default_matmul_precision("highest"):
                expected = np.float32(plain(w))
            gap = np.abs(expected - np.float32(fused(w))).max() / np.abs(expected).max()
            yield check(f"{name}: largest difference of the largest", gap, bound)
            times = [median_seconds(lambda f=f, w=w: jax.block_until_ready(f(w))) for f in (plain, fused)]
            yield {
                "name": f"{name}: time",
                "ms, plain": round(1e3 * times[0], 3),
                "ms, fused": round(1e3 * times[1], 3),
            }


def fused_kernels(setting: Setting) -> Iterator[dict]:
    """The kernels of decoding against what they replace."""
    yield from fused_decoding(setting)
    yield from fused_drawing(setting)
    yield from fused_multiplying(setting)


# ---- bf16: what the sampler says against what the trainer says


def bf16(setting: Setting) -> Iterator[dict]:
    """The gap of log-probabilities in bfloat16 between sampler and trainer, by attention, packing and slots."""
    on_device()
    bundled = source.download(source.locate(ModelConfig()))
    _, params = source.load_weights(bundled)
    cfg, tokenizer = bundled.cfg, bundled.tokenizer
    questions = [f"What is {a} + {b} - {a + b - 7}?" for a in range(3, 7) for b in (8, 15)]
    prompts = [tokenizer.prompt(question) for question in questions[: 4 if setting.tiny else 8]]
    ends = tokenizer.eos_ids
    width, new = max(map(len, prompts)), 16 if setting.tiny else 48
    kernels = ["xla"]
    if attention.obstacle("cudnn", cfg, jax.default_backend(), jnp.bfloat16, width + new, False) is None:
        kernels.append("cudnn")
    for slots in (1, 4, 16):
        if slots == 1 and setting.tiny:
            continue
        generate = make_generate(
            cfg, GenerationConfig(width, new), ends, tokenizer.pad_id, jnp.bfloat16, RolloutConfig(slots)
        )
        asked = prompts[:1] if slots == 1 else prompts
        rollout = generate(params, asked, jax.random.key(slots), GENERATIONS)
        for kernel in kernels:
            for packing in ("none", "prefix"):
                if not setting.has(8):
                    yield {"name": f"slots={slots}, {kernel}, packing={packing}", "skipped": "no time was left"}
                    continue
                gap = sampler_gap(cfg, params, rollout, packing, width, new, kernel)
                name = f"slots={slots}, {kernel}, packing={packing}"
                most = BF16_GAP.get(jax.default_backend(), (2e-2, 1.0))
                yield check(f"{name}: mean gap in nats", gap.mean(), most[0])
                yield check(f"{name}: largest gap", gap.max(), most[1], tokens=gap.size)


BF16_GAP = {"cpu": (4e-3, 1e-1)}  # mean and maximum; kernels sum in orders of their own (models/rounding.py)


def sampler_gap(cfg: Architecture, params, rollout, packing: str, width: int, new: int, kernel: str) -> np.ndarray:
    """|sampler's - trainer's log-probability| of every sampled token."""
    mask = np.asarray(rollout.completion_mask)
    batch = Batch(rollout.tokens, rollout.token_mask, mask.astype(np.float32))
    rows = rows_for(packing, len(mask), width, new)
    attend = attention.IMPLEMENTATIONS[kernel]
    policy = make_policy(cfg, None, 1.0, jnp.bfloat16, params, rows, attend=attend)
    return np.abs(np.asarray(policy.scorers["reference"](batch)) - rollout.full_logprobs)[mask]


# ---- resume: stopping and going on equals never stopping

RUN = ["generation.max_new_tokens=16", "training.prompts_per_step=4", "evaluation.num_examples=8"]
RUN += ["tracking.tensorboard=false", "training.max_steps=4", "training.save_interval_steps=2"]
RUN += ["training.keep_checkpoints=3", "algorithm.kl_coef=0.04", "model.mesh_shape=[[1,1],[fsdp,tp]]"]


def resume(setting: Setting) -> Iterator[dict]:
    """Four steps, and the last two of them once more from the checkpoint between, in fp32 and in bf16."""
    for precision in ["fp32"] if setting.tiny else ["fp32", "bf16"]:
        whole = setting.out / f"resume-{precision}"
        shutil.rmtree(whole, ignore_errors=True)
        asked = compose([*RUN, f"training.mixed_precision={precision}"])
        never_stopped = jax.device_get(train(asked, whole))
        again = whole.with_name(f"{whole.name}-again")
        shutil.rmtree(again, ignore_errors=True)
        shutil.copytree(whole, again)
        shutil.rmtree(again / "checkpoints" / "4")
        resumed = jax.device_get(train(asked, again))
        off = max(
            float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())
            for a, b in zip(jax.tree.leaves(never_stopped), jax.tree.leaves(resumed))
        )
        yield check(f"{precision}: largest difference of a weight or a moment", off, 0.0)


# ---- memory: what the plan says against what the device says


def memory(setting: Setting) -> Iterator[dict]:
    """The peak of a run against its plan's, where the device tells; a GPU does, a CPU tells of the process only."""
    folder = setting.out / "memory"
    shutil.rmtree(folder, ignore_errors=True)
    run = [*RUN, "algorithm.kl_coef=0", "training.max_steps=2", "training.save_interval_steps=0"]
    run += ["model=random", *(["generation.max_new_tokens=8"] if setting.tiny else LARGE)]
    train(compose(run), folder)
    planned = json.loads((folder / "plan.json").read_text())["plans"][0]["peak_bytes"]
    line = {"planned GB": round(planned / 1e9, 3), "seen GB": round(peak_bytes() / 1e9, 3)}
    if jax.devices()[0].memory_stats() is None:
        yield {"name": "peak of a run (of the process: this device does not tell)"} | line
        return
    yield check("peak of a run: seen / planned", peak_bytes() / planned, 1.05) | line
    yield check("peak of a run: planned / seen", planned / peak_bytes(), 1.35)


LARGE = [  # some 200 million parameters in eight layers, so that what is resident and what is temporary both count
    *("model.architecture.num_layers=8", "model.architecture.embed_dim=1024", "model.architecture.num_heads=8"),
    *("model.architecture.num_kv_heads=2", "model.architecture.head_dim=128", "model.architecture.mlp_dim=6144"),
    *("model.architecture.query_scale=128", "generation.max_new_tokens=224", "training.prompts_per_step=8"),
    *("training.mixed_precision=bf16", "training.remat=block", "evaluation.num_examples=0"),
]


# ---- quickstart: the command of the README


def quickstart(setting: Setting) -> Iterator[dict]:
    folder = setting.out / "quickstart"
    shutil.rmtree(folder, ignore_errors=True)
    asked = ["training.max_steps=3", "evaluation.num_examples=16"] if setting.tiny else []
    command = [sys.executable, str(ROOT / "run_training.py"), f"hydra.run.dir={folder}", *asked]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=setting.out, stdout=sys.stderr)
    took = time.perf_counter() - began
    if done.returncode:
        yield {"name": "run_training.py", "failed": f"exit code {done.returncode}"}
        return
    status = json.loads((folder / "status.json").read_text())
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().split("\n") if line]
    first, last = (status["eval"][when]["accuracy"] for when in ("first", "last"))
    line = {
        "name": "run_training.py",
        "steps": status["steps"],
        "seconds": round(took, 1),
        "first": first,
        "last": last,
    }
    yield line | ({} if setting.tiny else {"bound": 0.9, "ok": last >= 0.9})
    for name in ("time/step", "time/rollout", "time/update"):
        values = [step[name] for step in steps if name in step][1:]
        yield {"name": f"{name}, median", "seconds": round(statistics.median(values), 4)}


# ---- step: a whole GRPO step, and what was predicted of it

STEPS = 3


def whole_step(setting: Setting) -> Iterator[dict]:
    """A step of 512 sequences of at most 512 tokens with Gemma 3 1B's sizes: 64 prompts with 8 completions each, of up
    to 384 tokens; with random weights hardly any ends earlier. NeMo-RL's gate for it is 14 s on eight H100s."""
    folder = setting.out / "step"
    shutil.rmtree(folder, ignore_errors=True)
    sizes = tiny_sizes() if setting.tiny else sizes_of("gemma3_1b")
    asked = compose([*STEP, *(TINY_STEP if setting.tiny else WHOLE_STEP), *sizes])
    train(asked, folder)
    # The first steps compile.
    rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()][2:]
    names = ("time/step", "time/rollout", "time/update", "perf/tokens_per_second")
    took = {name: statistics.median(row[name] for row in rows) for name in names}
    seconds = took["time/step"]
    sequences = asked.training.prompts_per_step * asked.algorithm.num_generations
    length = asked.generation.max_prompt_length + asked.generation.max_new_tokens
    line = {"name": f"step of {sequences} sequences of at most {length} tokens", "seconds": round(seconds, 3)}
    line |= {name.removeprefix("time/"): round(took[name], 3) for name in ("time/rollout", "time/update")}
    line |= {"tokens/s": round(took["perf/tokens_per_second"])}
    yield line | ({} if setting.tiny else {"bound": 14, "ok": seconds <= 14})

    # Predicted, by what the hardware does: memory and, phase by phase, time.
    planned = json.loads((folder / "plan.json").read_text())["plans"][0]["peak_bytes"]
    if jax.devices()[0].memory_stats() is not None:
        line = {"predicted GB": round(planned / 1e9, 2), "measured GB": round(peak_bytes() / 1e9, 2)}
        yield {"name": "memory"} | line | {"predicted / measured": round(planned / peak_bytes(), 3)}
    # A CPU has no figures of its own: there the rows show that the forecast runs, with those of an H100.
    hardware = of_device(jax.devices()[0]) or HARDWARE["h100"]
    cfg = asked.model.architecture
    on_one = {"lora": None, "mesh_shape": {"fsdp": 1, "tp": 1}, "platform": jax.default_backend()}
    resolved = with_packing(asked, partial(resolve_run, cfg=cfg, is_attached=True, **on_one))
    plan = with_compiled(assemble_plan(attached_machine(), resolved, {}), jax.devices()[:1])
    found = forecast(resolved, plan.programs, recorded_lengths(str(folder)), hardware)
    phases = {"rollout": found.seconds["prefill"] + found.seconds["decode"], "update": found.seconds["update"]}
    for name, predicted in (phases | {"step": found.step_seconds}).items():
        yield {
            "name": f"{name}, by the figures of {hardware.name}",
            "predicted": float(f"{predicted:.4g}"),
            "measured": float(f"{took[f'time/{name}']:.4g}"),
            "predicted / measured": round(predicted / took[f"time/{name}"], 3),
        }


def sizes_of(option: str) -> list[str]:
    """The settings that give `model=random` the sizes of another model."""
    cfg = compose([f"model={option}"]).model.architecture
    names = ("vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "window")
    names += ("query_scale", "max_positions")
    return [f"model.architecture.{name}={getattr(cfg, name)}" for name in names]


def tiny_sizes() -> list[str]:
    return ["model.architecture.num_layers=2", "model.architecture.embed_dim=32", "model.architecture.vocab_size=1024"]


STEP = [
    *("model=random", "algorithm.kl_coef=0", "evaluation.num_examples=0", "tracking.tensorboard=false"),
    *(f"training.max_steps={STEPS}", "training.save_interval_steps=0", "model.mesh_shape=[[1,1],[fsdp,tp]]"),
]
TINY_STEP = ["training.prompts_per_step=4", "generation.max_new_tokens=8"]
WHOLE_STEP = [
    *("training.prompts_per_step=64", "algorithm.num_generations=8", "training.micro_batch_size=8"),
    *("generation.max_prompt_length=128", "generation.max_new_tokens=384", "training.mixed_precision=bf16_params"),
    *("training.remat=block", "rollout.chunk=32"),
]


# ---- peers


def beside(setting: Setting) -> Iterator[dict]:
    """transformers and TRL, where they are installed."""
    from gpu_peers import peers

    cfg = toy(compose(["model=gemma3_1b"]).model.architecture, setting)
    yield from peers(cfg, setting.tiny, setting.has)


# ---- models of real sizes with random weights: the update, scoring, decoding


def toy(cfg: Architecture, setting: Setting) -> Architecture:
    """The model, with --tiny cut down to a toy."""
    if not setting.tiny:
        return cfg
    sizes = {"num_layers": 2, "embed_dim": 64, "num_heads": 4, "mlp_dim": 96, "head_dim": 32, "vocab_size": 512}
    return dataclasses.replace(cfg, **sizes, num_kv_heads=min(4, cfg.num_kv_heads), query_scale=32)


def real_model(option: str, setting: Setting) -> Iterator[dict]:
    """MFU of update and scoring, and how near decoding comes to the bandwidth of the memory."""
    cfg = toy(compose([f"model={option}"]).model.architecture, setting)
    prompt, new = (16, 16) if setting.tiny else (512, 512)
    mesh = on_device()
    hardware = of_device(mesh.devices.flat[0])
    yield {"name": "parameters", "millions": round(weights.num_params(decoder.weights(cfg)) / 1e6, 1)}
    yield from decoding(cfg, setting, hardware)
    yield from updating(cfg, setting, hardware, mesh, prompt, new)


# (slots, top_p, rollout.kernels), the most telling first
DECODING = ((64, 1.0, "xla"), (64, 1.0, "fused"), (256, 1.0, "xla"), (256, 1.0, "fused"))
DECODING += ((1, 1.0, "xla"), (16, 1.0, "xla"), (16, 1.0, "fused"), (64, 0.95, "xla"))
TINY_DECODING = ((4, 1.0, "xla"), (4, 0.95, "xla"), (4, 1.0, "fused"))


def decoding(cfg: Architecture, setting: Setting, hardware: Hardware | None) -> Iterator[dict]:
    """Milliseconds a token of all slots, against reading all weights and the cache in use once."""
    params = init_stored(decoder.weights(cfg), jax.random.key(0), "bf16")
    prompt, chunk, chunks = (16, 4, 4) if setting.tiny else (512, 32, 6)
    bandwidth = copy_bandwidth(setting) if hardware is None else hardware.memory_bandwidth
    platform = jax.devices()[0].platform
    arms = TINY_DECODING if setting.tiny else DECODING
    for slots, top_p, kernels_of in arms:
        name = f"decode, {slots} slots" + ("" if top_p == 1 else f", top_p={top_p}")
        name += ", kernels=fused" if kernels_of == "fused" else ""
        how = RolloutConfig(slots, chunk, kernels=kernels_of)
        if not setting.has(20):
            yield {"name": name, "skipped": "no time was left"}
            continue
        new = chunk * chunks
        generation = GenerationConfig(prompt, new, top_p=top_p)
        try:
            if how.is_fused:
                check_fused(cfg, jnp.bfloat16, platform, 1, has_cutoffs=generation.has_cutoffs)
        except ValueError as error:
            yield {"name": name, "skipped": str(error)}
            continue
        asked = np.random.default_rng(0).integers(0, cfg.vocab_size, (slots, prompt)).tolist()
        sample = make_sampler(cfg, generation, (cfg.vocab_size,), 0, jnp.bfloat16, how)
        for _ in range(2):  # the first one compiles
            arrivals = [time.perf_counter() for _ in sample(params, asked, jax.random.key(0))]
        seconds = statistics.median(np.diff(arrivals)) / chunk
        # Every weight once, and of each sequence the keys and values that its next token sees.
        seen = [min(prompt + new // 2, cfg.window) if kind == "local" else prompt + new // 2 for kind in cfg.kinds]
        kept = sum(2 * n * math.prod(cfg.kv_shape(kind)) for n, kind in zip(seen, cfg.kinds, strict=True))
        least = 2 * (weights.num_params(decoder.weights(cfg)) + slots * kept) / bandwidth
        yield {
            "name": name,
            "ms a token": round(1e3 * seconds, 3),
            "tokens/s": round(slots / seconds),
            "share of the bandwidth floor": round(least / seconds, 3),
        }
    del params


# (sequences of the micro-batch, remat, whether with plain products where another attention is there)
UPDATES = ((8, "block", False), (8, "none", False), (8, "block", True), (4, "none", False), (16, "block", False))
UPDATES += ((8, "dots", False), (8, "save_qkv_out", False), (2, "none", False))
TINY_UPDATES = ((8, "block", False),)


def updating(
    cfg: Architecture, setting: Setting, hardware: Hardware | None, mesh, prompt: int, new: int
) -> Iterator[dict]:
    """An update in bf16_params of one micro-batch of full sequences, over micro-batch, remat and attention."""
    where = mesh.devices.flat[0].platform
    best = attention.choose("auto", cfg, where, jnp.bfloat16, prompt + new, False)[0]
    for sequences, remat, plain in TINY_UPDATES if setting.tiny else UPDATES:
        kernel = "xla" if plain else best
        if plain and best == "xla":
            continue
        name = f"update, {sequences} sequences, {kernel}, remat={remat}"
        if not setting.has(20):
            yield {"name": name, "skipped": "no time was left"}
            continue
        try:
            yield from one_update(cfg, hardware, (sequences, prompt, new), remat, kernel, name)
        except jax.errors.JaxRuntimeError as error:
            # A setting that needs more memory than there is says so, and the next one is measured.
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            yield {"name": name, "skipped": "more memory is needed than there is"}


def one_update(
    cfg: Architecture, hardware: Hardware | None, sizes: tuple[int, int, int], remat: str, kernel: str, name: str
) -> Iterator[dict]:
    """Of (sequences, tokens of a prompt, tokens of a completion); with remat=block also the pass that scores."""
    sequences, prompt, new = sizes
    batch = made_up_batch(cfg, sequences, prompt, new, ragged=False)
    rows, optimizer = rows_for("none", sequences, prompt, new), make_optimizer(OptimizerConfig(), 100)
    tokens, scored = sequences * (prompt + new), sequences * new
    pairs = flops.attention_flops(cfg, [prompt + new] * sequences)
    attend = attention.IMPLEMENTATIONS[kernel]
    policy = make_policy(cfg, None, 1.0, jnp.bfloat16, None, rows, remat=remat, attend=attend)
    step = TrainStep(policy, GRPO(num_generations=GENERATIONS), optimizer)
    params = init_stored(decoder.weights(cfg), jax.random.key(0), "bf16")
    state = TrainState(put(np.int32(0)), params, init_opt_state(optimizer, params))
    laid_out, _ = rows.lay_out(batch)
    if remat == "block" and sequences == 8:
        scoring = make_policy(cfg, None, 1.0, jnp.bfloat16, params, rows, remat=remat, attend=attend)
        compiled = scoring.scorers["reference"].compiled(laid_out)
        seconds = median_seconds(partial(block, compiled, params, laid_out))
        done = flops.forward_flops(cfg, tokens, scored, pairs)
        yield {"name": f"scoring, {kernel}"} | rates(seconds, tokens, done, hardware)
    began = time.perf_counter()
    compiled = step.compile(state, None, laid_out)
    compile_seconds = time.perf_counter() - began
    box = [state]
    del state, params

    def update(box=box, step=step, laid_out=laid_out):
        box[0], _ = jax.block_until_ready(step(box[0], None, laid_out))

    seconds = median_seconds(update, 3)
    done = flops.update_flops(cfg, tokens, scored, pairs)
    yield {
        "name": name,
        **rates(seconds, tokens, done, hardware),
        "compiled in s": round(compile_seconds, 1),
        **forecast_of(compiled, seconds, hardware),
    }


def forecast_of(compiled: jax.stages.Compiled, seconds: float, hardware: Hardware | None) -> dict:
    """What the compiler says of the memory of a program, and the machine model (planning.kernels) of its time."""
    planned = compiled.memory_analysis()
    size = planned.argument_size_in_bytes + planned.temp_size_in_bytes
    size += planned.output_size_in_bytes - planned.alias_size_in_bytes
    found = {"planned GB": round(size / 1e9, 2)}
    if hardware is None:
        return found
    predicted = predicted_seconds(kernels(compiled.as_text()), hardware)
    return found | {"predicted ms": round(1e3 * predicted, 2), "predicted / measured": round(predicted / seconds, 3)}


def block(compiled: Callable, *args) -> None:
    jax.block_until_ready(compiled(*args))


def rates(seconds: float, tokens: int, done: float, hardware: Hardware | None) -> dict:
    found = {"ms": round(1e3 * seconds, 2), "tokens/s": round(tokens / seconds)}
    mfu = {} if hardware is None else {"MFU": round(done / seconds / hardware.peak_flops, 3)}
    return found | {"TFLOP/s": round(done / seconds / 1e12, 3)} | mfu


PARTS = {
    "device": device,
    "gemma3_1b": partial(real_model, "gemma3_1b"),
    "qwen3_0.6b": partial(real_model, "qwen3_0.6b"),
    "exactness": exactness,
    "attention": attention_kernels,
    "bf16": bf16,
    "resume": resume,
    "memory": memory,
    "quickstart": quickstart,
    "decode": fused_kernels,
    "step": whole_step,
    "peers": beside,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu" / "by-hand")
    args = parser.parse_args()
    # The peers need the memory of the GPU, which jax takes when it first looks at it.
    if args.part != "peers" and jax.devices()[0].platform == "cpu" and not args.tiny:
        sys.exit("jax sees no GPU here; `python benchmarks/gpu.py --tiny` runs every part at toy sizes on a CPU")
    args.out.mkdir(parents=True, exist_ok=True)
    setting = Setting(args.tiny, args.out.absolute(), time.monotonic() + args.seconds - 5)
    for line in PARTS[args.part](setting):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
