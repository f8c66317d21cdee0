"""How far the trainer's log-probabilities are from the sampler's, token by token. Prints one JSON line a case.

    python benchmarks/bf16_gap.py [--model bundled qwen3 ...] [--packing none sequences prefix] [--slots 1 4 16]
                                  [--dtype bf16|fp32] [--prompts 8] [--generations 8] [--new 48]

The sampler draws at temperature 1 and says log p of each token; the trainer scores the same tokens in whole rows. The
gap is |difference|, in nats. outside: the share of ratios outside the clip range [0.8, 1.28], where nothing has been
learnt yet and each should be 1. from_fp32: how far sampler and trainer are from the same model computed in float32,
which is what bfloat16 costs. Models: the bundled one on arithmetic, and random ones with the shapes of a family, whose
weights are large enough that they have opinions: Gemma 3 (gemma3), Qwen 2.5 (qwen25), Qwen 3 (qwen3),
Qwen 3.5 (qwen3.5), Llama 3 (llama).
"""

import argparse
import json
import os
from functools import partial

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.basics.types import Batch
from tunix_lite.inference import language_model
from tunix_lite.learner.packing import RowShape, rows_needed_at_most, shared_rows_at_most
from tunix_lite.learner.policy import batch_scores, scoring_program
from tunix_lite.learner.rows import RowLayout
from tunix_lite.models import decoder, weights
from tunix_lite.models.architecture import Architecture, DeltaNet, RopeScaling
from tunix_lite.parallel.mesh import make_mesh
from tunix_lite.rollout.generate import make_generate
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig

PLAIN = dict(pattern=("global",), window=None, embed_scale=False, norm_plus_one=False, post_norms=False)
PLAIN |= dict(activation="silu", query_scale=32)
MODELS = {
    "gemma3": Architecture(512, 6, 256, 4, 1, 64, 1024, window=24, query_scale=64),
    "qwen25": Architecture(512, 4, 256, 8, 2, 32, 768, qk_norm=False, qkv_bias=True, **PLAIN),
    "qwen3": Architecture(512, 4, 256, 8, 4, 32, 768, **PLAIN),
    "qwen3.5": Architecture(
        *(512, 4, 256, 8, 4, 32, 768),
        **PLAIN | {"pattern": ("delta", "delta", "delta", "global"), "norm_plus_one": True},
        attn_gate=True,
        rope_share=0.25,
        delta=DeltaNet(num_key_heads=4, num_value_heads=8, key_dim=32, value_dim=32),
    ),
    "llama": Architecture(
        512, 5, 256, 8, 8, 32, 704, qk_norm=False, tied=False, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64), **PLAIN
    ),
}
DTYPES = {"bf16": jnp.bfloat16, "fp32": jnp.float32}
CLIP = 0.8, 1.28


def opinionated(cfg: Architecture, seed: int = 0):
    """Random parameters whose scores differ by some nats: the table as large as a trained one, norms and biases not at
    rest."""
    params = weights.init_params(decoder.weights(cfg), jax.random.key(seed))
    rng = np.random.default_rng(seed)

    def stirred(path, x):
        name = path[-1].key
        if "norm" in name or "bias" in name:
            return x + rng.normal(0, 0.2, x.shape).astype(np.float32)
        return x * (6.0 if name in ("embed", "head") and not cfg.embed_scale else 1.0)

    return jax.tree_util.tree_map_with_path(stirred, params)


def bundled_prompts(model, count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [
        model.tokenizer.prompt(f"What is {a} {'+-'[i % 2]} {b}?")
        for i, (a, b) in enumerate(rng.integers(0, 99, (count, 2)))
    ]


def random_prompts(cfg: Architecture, count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(4, cfg.vocab_size, length).tolist() for length in rng.integers(3, 25, count)]


def rows_for(packing: str, prompts: int, generations: int, width: int, new: int) -> RowLayout:
    """The rows as batching lays them out, in two micro-batches."""
    if packing == "none":
        return RowLayout("none", 2, new)
    if packing == "sequences":
        shape = RowShape(2 * (width + new))
        count = rows_needed_at_most(prompts * generations, width + new, shape.width)
    else:
        shape = RowShape(new, min(4, generations), width)
        count = shared_rows_at_most(prompts, generations, shape.num_lanes)
    return RowLayout(packing, 2, None, shape, -(-count // 2))


def scored(params, cfg: Architecture, dtype, rollout, rows: RowLayout) -> np.ndarray:
    """log p of the tokens of a rollout as the trainer computes it, [B, T]."""
    mask = np.asarray(rollout.completion_mask)
    batch, layout = rows.lay_out(Batch(rollout.tokens, rollout.token_mask, mask.astype(np.float32)))
    scores = partial(batch_scores, cfg=cfg, temperature=1.0, dtype=dtype)
    return layout.back(scoring_program(scores, rows)(params, batch))


def figures(gap: np.ndarray) -> dict:
    size = np.abs(gap)
    ratio = np.exp(gap)
    return {
        "mean": float(size.mean()),
        "p99": float(np.quantile(size, 0.99)),
        "max": float(size.max()),
        "outside": float(((ratio < CLIP[0]) | (ratio > CLIP[1])).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=["bundled", *MODELS], default=["bundled", *MODELS])
    parser.add_argument("--packing", nargs="+", choices=["none", "sequences", "prefix"], default=["none", "prefix"])
    parser.add_argument("--slots", nargs="+", type=int, default=[16])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--new", type=int, default=48)
    args = parser.parse_args()
    dtype = DTYPES[args.dtype]
    jax.set_mesh(make_mesh(((1, 1), ("fsdp", "tp")), jax.devices()[:1]))
    for name in args.model:
        if name == "bundled":
            model = language_model.load("bundled", mesh_shape=((1, 1), ("fsdp", "tp")))
            cfg, params, ends = model.cfg, model.params, model.tokenizer.eos_ids
            ids = bundled_prompts(model, args.prompts)
        else:
            cfg, ends = MODELS[name], (1,)
            params = opinionated(cfg)
            ids = random_prompts(cfg, args.prompts)
        width = max(map(len, ids))
        for slots in args.slots:
            generation, rollout = GenerationConfig(width, args.new), RolloutConfig(num_slots=slots)
            generate = make_generate(cfg, generation, ends, 0, dtype, rollout)
            drawn = generate(params, ids, jax.random.key(0), args.generations)
            here = np.asarray(drawn.completion_mask)
            exact = scored(params, cfg, jnp.float32, drawn, rows_for("none", 1, 1, width, args.new))[here]
            for packing in args.packing:
                rows = rows_for(packing, args.prompts, args.generations, width, args.new)
                ours = scored(params, cfg, dtype, drawn, rows)[here]
                said = np.asarray(drawn.full_logprobs)[here]
                line = {"benchmark": "bf16_gap", "model": name, "dtype": args.dtype, "packing": packing, "slots": slots}
                line |= {"tokens": int(here.sum()), "mean_logprob": round(float(said.mean()), 3)} | figures(ours - said)
                far = {"sampler": figures(said - exact), "trainer": figures(ours - exact)}
                line["from_fp32"] = {who: {k: v[k] for k in ("mean", "max")} for who, v in far.items()}
                print(json.dumps(line | {"jax": jax.__version__, "device": jax.devices()[0].device_kind}), flush=True)


if __name__ == "__main__":
    main()
