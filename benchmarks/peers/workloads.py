"""The workloads that all frameworks get, and how many FLOP one step of each needs. Standard library alone."""

import itertools
import math
import random

# Gemma 3's shape, small: 5 local layers and a global one; with fewer than 512 tokens all attend to everything.
MODEL = {
    "num_layers": 6,
    "embed_dim": 256,
    "num_heads": 4,
    "num_kv_heads": 1,
    "head_dim": 64,
    "mlp_dim": 1024,
    "window": 512,
}
# What all three are set to. AdamW without weight decay, gradients clipped to a norm, a constant rate.
TRAINING = {
    "learning_rate": 1e-5,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-8,
    "max_grad_norm": 1.0,
    "kl_coef": 0.04,
    "clip": 0.2,
    "threads": 2,
    "seed": 0,
}
PAD, EOS = 0, 1
# Names and sizes: prompts of exactly `prompt_length` tokens, completions of at most `new_tokens`. `slots` is ours
# alone, rollout.num_slots: a completion that ends makes place for the next, which the two others cannot do.
SIZES = {
    "fixed": {"prompts": 8, "prompt_length": 32, "new_tokens": 64, "vocab_size": 512},
    "long_tails": {
        "prompts": 8,
        "prompt_length": 32,
        "new_tokens": 256,
        "vocab_size": 512,
        "tails": True,
        "slots": 16,
    },
    "long_prompts": {"prompts": 8, "prompt_length": 256, "new_tokens": 32, "vocab_size": 512},
    "vocabulary": {"prompts": 4, "prompt_length": 32, "new_tokens": 64, "vocab_size": 65_536},
    "lora": {"prompts": 8, "prompt_length": 32, "new_tokens": 64, "vocab_size": 512, "lora_rank": 16},
}
GENERATIONS = 8


def workload(name: str, **changes: int) -> dict:
    """All that a worker needs to know, as JSON has it. changes: other sizes, for a trial."""
    sizes = {"lora_rank": 0, "tails": False, "slots": None, "generations": GENERATIONS} | SIZES[name] | changes
    draw = random.Random(0)
    # no padding and no end in a prompt
    tokens = [
        [draw.randrange(2, sizes["vocab_size"]) for _ in range(sizes["prompt_length"])] for _ in range(sizes["prompts"])
    ]
    rows = sizes["prompts"] * sizes["generations"]
    lengths = long_tails(rows, sizes["new_tokens"]) if sizes["tails"] else None
    # Without forced lengths nothing ends early: the end is a token that no model has.
    eos = EOS if lengths else sizes["vocab_size"]
    return {
        "name": name,
        "model": MODEL,
        "training": TRAINING,
        **sizes,
        "prompt_tokens": tokens,
        "lengths": lengths,
        "pad_id": PAD,
        "eos_id": eos,
    }


def long_tails(rows: int, longest: int) -> list[int]:
    """Lengths whose mean is a quarter of the longest, of which a few are that long: quantiles of an exponential
    distribution cut off at `longest`, shuffled."""
    rate = _rate_of_quarter()
    quantiles = [(row + 0.5) / rows for row in range(rows)]
    lengths = [max(2, round(longest * min(1.0, -rate * math.log1p(-q)))) for q in quantiles]
    # exactly a quarter on average, and one that is the longest: rounding is made good in the middle of the list
    lengths[-1] = longest
    spare = rows * longest // 4 - sum(lengths)
    by_middle = sorted(range(rows - 1), key=lambda row: abs(row - rows // 2))
    for row in itertools.cycle(by_middle):
        if not spare:
            break
        step = 1 if spare > 0 else -1
        if 1 < lengths[row] + step < longest:
            lengths[row] += step
            spare -= step
    random.Random(1).shuffle(lengths)
    return lengths


def _rate_of_quarter() -> float:
    """The scale x of an exponential distribution whose mean, cut off at 1, is 1/4: x (1 - exp(-1/x)) = 1/4."""
    low, high = 0.01, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if middle * (1 - math.exp(-1 / middle)) < 0.25:
            low = middle
        else:
            high = middle
    return low


def num_parameters(work: dict) -> int:
    """Weights in matrices, the embedding (which is the head) once; norms are left out."""
    return _layer_weights(work["model"]) * work["model"]["num_layers"] + work["vocab_size"] * work["model"]["embed_dim"]


def _layer_weights(model: dict) -> int:
    attention = 2 * model["embed_dim"] * model["head_dim"] * (model["num_heads"] + model["num_kv_heads"])
    return attention + 3 * model["embed_dim"] * model["mlp_dim"]


def new_lengths(work: dict) -> list[int]:
    """Tokens of each completion."""
    return work["lengths"] or [work["new_tokens"]] * (work["prompts"] * work["generations"])


def step_flops(work: dict) -> float:
    """FLOP that one step needs where every sequence is computed by itself and nothing is padded: sampling reads
    the prompt and each token once, the reference scores once, the update is three forward passes (with LoRA two:
    the frozen weights get no gradient; what the adapters themselves cost is left out)."""
    passes = 2 + (2 if work["lora_rank"] else 3)
    return passes * sum(_forward_flops(work, new) for new in new_lengths(work))


def _forward_flops(work: dict, new: int) -> float:
    model = work["model"]
    tokens = work["prompt_length"] + new
    linear = 2 * _layer_weights(model) * tokens
    # causal: a token sees on average half of the sequence; scores, and the sum of values
    attention = 4 * model["num_heads"] * model["head_dim"] * tokens * (tokens + 1) / 2
    head = 2 * model["embed_dim"] * work["vocab_size"] * new
    return model["num_layers"] * (linear + attention) + head
