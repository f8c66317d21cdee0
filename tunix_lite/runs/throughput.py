"""Measures tokens, FLOPs and memory of a step, as metrics."""

import resource
import sys
from collections import Counter
from dataclasses import dataclass, replace

import jax
import numpy as np

from tunix_lite.algorithms.algorithm import Comparer, Policy, Rescorer, Scorer
from tunix_lite.basics.types import Batch, Metrics, Params, RowBatch
from tunix_lite.models.architecture import Architecture
from tunix_lite.parallel.compiling import stopwatch
from tunix_lite.planning import flops
from tunix_lite.planning.hardware import Hardware


@dataclass(frozen=True)
class Throughput:
    """Turns seconds of a step into speeds. FLOPs are those of planning.flops, of the model, not of
    the compiler: 6 per weight and token (4 for frozen ones under adapters) and attention;
    recomputation by remat does not count. Example: Throughput(cfg, 0, 8, None).metrics(batch,
    update_seconds=0.5, step_seconds=2.0)."""

    cfg: Architecture
    trained_adapters: int  # parameters in adapters; 0: all weights train
    num_devices: int
    hardware: Hardware | None  # None: not in the table, so there is no MFU

    def metrics(self, batch: Batch, update_seconds: float, step_seconds: float) -> Metrics:
        """perf/ and memory/ of a step; batch: as the algorithm made it, of the host."""
        lengths = np.asarray(batch.token_mask).sum(axis=1)
        scored = int((np.asarray(batch.loss_weight) != 0).sum())
        tokens = int(lengths.sum())
        attention = flops.attention_flops(self.cfg, lengths)
        done = flops.update_flops(self.cfg, tokens, scored, attention, self.trained_adapters)
        rate = done / update_seconds
        seen = {
            "perf/tokens_per_second": tokens / step_seconds,
            "perf/update_tokens_per_second": tokens / update_seconds,
            "perf/tokens_per_second_per_device": tokens / step_seconds / self.num_devices,
            "perf/update_tflops_per_second_per_device": rate / self.num_devices / 1e12,
            "memory/peak_gb": peak_bytes() / 1e9,
        }
        mfu = flops.mfu(done, update_seconds, self.hardware, self.num_devices)
        return seen if mfu is None else seen | {"perf/mfu": mfu}


def peak_bytes() -> int:
    """The most that was ever in use on one of this host's devices; on a CPU, by the process."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    if all(s and "peak_bytes_in_use" in s for s in stats):
        return max(s["peak_bytes_in_use"] for s in stats)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# the name of the comparer among the scorers
TEACHER = "teacher"


@dataclass(frozen=True)
class _Timed:
    """A scorer, comparer or rescorer that adds the seconds of each call to `seconds`.
    Example: Timed("time/reference", scorer, seconds)(batch); seconds["time/reference"] grows."""

    # of the metric
    name: str
    scorer: Scorer | Comparer | Rescorer
    seconds: Counter

    def __call__(self, *arguments: Params | Batch) -> np.ndarray | Batch:
        elapsed = stopwatch()
        scored = self.scorer(*arguments)
        self.seconds[self.name] += elapsed()
        return scored

    def compiled(self, *arguments: Params | RowBatch) -> jax.stages.Compiled:
        return self.scorer.compiled(*arguments)


def timed(policy: Policy, seconds: Counter) -> Policy:
    """Wraps the policy, whose scorers add their time to `seconds`; sampling keeps its own time."""
    scorers = {}
    for name, scorer in policy.scorers.items():
        scorers[name] = _Timed(f"time/{name}", scorer, seconds)
    rescore = _Timed("time/rescore", policy.rescore, seconds)
    compare = policy.compare
    if compare is not None:
        compare = _Timed(f"time/{TEACHER}", compare, seconds)
    return replace(policy, scorers=scorers, rescore=rescore, compare=compare)
