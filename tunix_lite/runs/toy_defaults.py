"""Warns where a real model meets defaults that were chosen for the small bundled one."""

from tunix_lite.config import RunConfig
from tunix_lite.learner.optim import OptimizerConfig

# Parameters from which on a model is a real one: the smallest of ours has 268 million.
REAL = 100_000_000
# Parameters from which on all weights take a small rate.
LARGE = 400_000_000
# A rate for all weights of AdamW above which such a model often breaks: from rewards, and from
# demonstrations.
HIGH_RATE = 1e-5
HIGH_RATE_SFT = 1e-4
# The default of generation.max_new_tokens, enough for the arithmetic of the bundled model.
FEW_TOKENS = 48
ACCELERATORS = ("gpu", "cuda", "rocm", "tpu")


def toy_defaults(run: RunConfig, num_params: int, trains_all: bool, platform: str) -> list[str]:
    """One line for each such default, with the override; [] where all is well.

    num_params: of the whole model. trains_all: no adapters. platform: of the devices, cpu or tpu.
    """
    if num_params < REAL:
        return []
    size = f"{num_params / 1e9:.2g}B"
    lines = []

    # The rate is for AdamW, whose updates all have one size; other optimizers have other scales.
    learns_from_data = run.algorithm.needs_demonstrations
    high = HIGH_RATE_SFT if learns_from_data else HIGH_RATE
    rate = getattr(run.optimizer, "learning_rate", 0.0)
    is_adamw = type(run.optimizer) is OptimizerConfig
    if trains_all and is_adamw and num_params >= LARGE and rate > high:
        usual = "1e-5" if learns_from_data else "1e-6"
        lines.append(
            f"optimizer.learning_rate={rate:g} is high for all weights of a model of {size}; "
            f"usual is optimizer.learning_rate={usual}"
        )
    if platform in ACCELERATORS and run.training.mixed_precision == "fp32":
        lines.append(
            f"{platform} computes in bfloat16 several times as fast as in float32: "
            "training.mixed_precision=bf16"
        )
    if not learns_from_data and run.generation.max_new_tokens <= FEW_TOKENS:
        lines.append(
            f"generation.max_new_tokens={run.generation.max_new_tokens} cuts most answers of a "
            f"model of {size}: generation.max_new_tokens=512 generation.max_prompt_length=512"
        )
    return lines
