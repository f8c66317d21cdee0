"""What an int8 cache does to what is sampled: bytes, and how far its log-probabilities move. Prints one JSON line.

    python benchmarks/quantized_cache.py [MODEL]     # bundled, a folder in Hugging Face layout, or a hub name

256 completions of up to 48 tokens, 8 each of 32 prompts of the arithmetic task, at temperature 1 in float32, drawn with
each cache. logprob_gap: |sampler's log-probability - trainer's| of the drawn tokens, its mean and its largest; that of
the plain cache is rounding. same: the share of completions that are the same tokens with both caches.
"""

import json
import os
import sys
from functools import partial

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from tunix_lite.learner.policy import token_logprobs
from tunix_lite.models import source
from tunix_lite.models.source import ModelConfig
from tunix_lite.parallel.mesh import RULES, make_mesh
from tunix_lite.rollout.generate import make_generate
from tunix_lite.rollout.memory import SamplingMemory
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.tasks.sources import Arithmetic

WIDTH = 32


def main() -> None:
    model = source.download(source.locate(ModelConfig(weights=sys.argv[1] if len(sys.argv) > 1 else "bundled")))
    jax.set_mesh(make_mesh(((-1, 1), ("fsdp", "tp"))))
    params = source.load_base(model, 0, "fp32")
    rows = [model.tokenizer.prompt(Arithmetic().held_out[i]["question"])[-WIDTH:] for i in range(32)]
    generation, ends = GenerationConfig(WIDTH, 48), (model.tokenizer.eos_ids, model.tokenizer.pad_id)
    said = {}
    score = jax.jit(partial(token_logprobs, cfg=model.cfg))
    for cache in ("compute", "int8"):
        how = RolloutConfig(cache=cache, num_slots=64)
        generate = make_generate(model.cfg, generation, *ends, rollout=how)
        rollout = said[cache] = generate(params, rows, jax.random.key(0), 8)
        one_slot = SamplingMemory(model.cfg, np.float32, generation, how, 1, (), {"fsdp": 1, "tp": 1}, RULES)
        scored = np.asarray(score(params, rollout.tokens, rollout.token_mask))
        gap = np.abs(scored - rollout.logprobs)[rollout.completion_mask]
        print(json.dumps({
            "benchmark": "quantized_cache",
            "model": model.name,
            "cache": cache,
            "bytes_per_slot": one_slot.cache_bytes(),
            "logprob_gap_mean": float(gap.mean()),
            "logprob_gap_max": float(gap.max()),
            "same": float((rollout.tokens == said["compute"].tokens).all(axis=1).mean()),
        }))  # fmt: skip


if __name__ == "__main__":
    main()
