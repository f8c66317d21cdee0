"""Chooses the values of `auto` in optimizer.learning_rate and training.mixed_precision: the rate
follows what trains, the precision follows the device.

docs/guide/training.md gives the source of each number.
"""

from dataclasses import replace

from tunix_lite.learner.optim import Optimizer

AUTO = "auto"
# Parameters from which on a model is a real one: the bundled model has 0.5 million, the smallest
# that people load has 135 million.
REAL = 100_000_000
# Platforms on which bfloat16 is several times as fast as float32.
ACCELERATORS = ("gpu", "cuda", "rocm", "tpu")
# Rates of AdamW by what trains, and by what the algorithm learns from.
LEARNS_FROM = ("rewards", "demonstrations", "preferences")
RATES = {
    "all weights of a real model": (1e-6, 1e-5, 1e-6),
    "adapters of a real model": (1e-4, 2e-4, 1e-5),
    "all weights of a small model": (4e-5, 4e-5, 4e-5),
    "adapters of a small model": (2e-3, 2e-3, 2e-3),
}


def what_trains(has_adapters: bool, num_params: int) -> str:
    """The row of RATES. num_params: of the whole model.
    Example: `what_trains(False, 600_000_000)` is "all weights of a real model"."""
    size = "real" if num_params >= REAL else "small"
    return f"{'adapters' if has_adapters else 'all weights'} of a {size} model"


def with_rate(optimizer: Optimizer, trains: str, learns_from: str) -> Optimizer:
    """The optimizer with a number for learning_rate=auto. trains: a row of RATES. learns_from: one
    of LEARNS_FROM."""
    if optimizer.learning_rate != AUTO:
        return optimizer
    rate = RATES[trains][LEARNS_FROM.index(learns_from)] * optimizer.TIMES_ADAMW
    return replace(optimizer, learning_rate=rate)


def precision(setting: str, num_params: int, platform: str) -> str:
    """training.mixed_precision with a type for auto: bf16 for a real model on an accelerator, else
    fp32."""
    if setting != AUTO:
        return setting
    return "bf16" if num_params >= REAL and platform in ACCELERATORS else "fp32"
