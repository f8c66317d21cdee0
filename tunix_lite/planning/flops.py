"""FLOPs of the model by formulas; a multiplication and an addition are two. Recomputation, padding,
masked scores, norms, rope, softmax and activations do not count. Of a layer of attention the
weights are q: DNH, k and v: DKH each, o: NHD, gate, up and down: DF each (letters of types.py)."""

import functools
import math
import resource
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import numpy as np

from tunix_lite.basics.types import Batch, Metrics
from tunix_lite.models import decoder
from tunix_lite.models.architecture import Architecture
from tunix_lite.planning.hardware import Hardware


@functools.cache
def _matmul_params(cfg: Architecture) -> int:
    """Weights that a token is multiplied with on its way through the layers: with attention in each
    of them L * (2DNH + 2DKH + 3DF), without the head, the embedding, norms and biases; and what
    per_layer_dim adds. Of E experts a token is multiplied with k."""
    total = cfg.embed_dim * cfg.num_layers * cfg.per_layer_dim
    for kind, count in Counter(cfg.kinds_of_weights).items():
        declared = decoder.layer_weights(cfg, kind).values()
        for w in declared:
            # of the weights of E experts a token is multiplied with k / E
            share = cfg.experts.per_token / cfg.experts.count if "experts" in w.axes else 1
            total += count * math.prod(w.shape) * share * bool(w.inputs)
    return round(total)


def _head_params(cfg: Architecture) -> int:
    """Weights that a token is multiplied with to be scored, tied to the embedding or not."""
    return cfg.embed_dim * (cfg.vocab_size if cfg.output == "logits" else 1)


def attention_flops(cfg: Architecture, lengths: Iterable[int]) -> float:
    """Scores and weighted sums of one forward over sequences of these lengths: 4NH a pair of a
    query and a key. In a local layer a token sees a window of keys at most: a triangle of pairs,
    and then whole windows. With them is what `recurrence_flops` gives."""
    lengths = [int(length) for length in lengths]
    widths = 0
    for kind in cfg.kinds:
        # a gated delta net has no pairs of tokens
        if kind not in decoder.ATTENTION:
            continue
        pairs = 0
        for length in lengths:
            seen = min(length, cfg.window) if kind == "local" else length
            pairs += seen * (seen + 1) // 2 + (length - seen) * seen
        widths += pairs * cfg.kv_shape(kind)[1]
    recurrence = recurrence_flops(cfg) * sum(lengths)
    return 4.0 * cfg.num_heads * widths + recurrence


def recurrence_flops(cfg: Architecture) -> float:
    """The recurrence of one token in all gated delta nets: each head reads its state twice and
    writes it once, 6 * key_dim * value_dim; and the convolution."""
    if cfg.delta is None:
        return 0.0
    net = cfg.delta
    heads = 6.0 * net.num_value_heads * net.key_dim * net.value_dim
    convolution = 2.0 * net.num_key_heads * sum(net.parts) * net.taps
    return cfg.kinds.count("delta") * (heads + convolution)


def forward_flops(cfg: Architecture, tokens: float, scored: float, attention: float) -> float:
    """One forward over `tokens` tokens of which `scored` get scores over the vocabulary: 2PT + 2VS
    + attention, with P = matmul_params and V = head_params. Sampling is the same: each token passes
    once."""
    return 2.0 * _matmul_params(cfg) * tokens + 2.0 * _head_params(cfg) * scored + attention


def update_flops(
    cfg: Architecture, tokens: float, scored: float, attention: float, lora_params: int = 0
) -> float:
    """Forward and backward of one update: 3 * forward, as backward is two products for each one of
    forward. With `lora_params` adapter parameters A: 4PT + 6AT + 4VS + 3 * attention, as frozen
    weights, the head among them, get no gradient."""
    if not lora_params:
        return 3 * forward_flops(cfg, tokens, scored, attention)
    layers = (4.0 * _matmul_params(cfg) + 6.0 * lora_params) * tokens
    return layers + 4.0 * _head_params(cfg) * scored + 3 * attention


# ---- as metrics of a step


@dataclass(frozen=True)
class Throughput:
    """Turns seconds of a step into speeds. FLOPs are those of this file, of the model, not of
    the compiler: 6 per weight and token (4 for frozen ones under adapters) and attention;
    recomputation by remat does not count. Example: Throughput(cfg, 0, 8, None).metrics(batch,
    update_seconds=0.5, step_seconds=2.0)."""

    cfg: Architecture
    trained_adapters: int  # parameters in adapters; 0: all weights train
    num_devices: int
    hardware: Hardware | None  # None: not in the table, so there is no MFU
    has_layers_of_critic: bool = False  # a critic has layers like the policy's

    def metrics(self, batch: Batch, update_seconds: float, step_seconds: float) -> Metrics:
        """perf/ and memory/ of a step; batch: as the algorithm made it, of the host."""
        lengths = np.asarray(batch.token_mask).sum(axis=1)
        scored = int((np.asarray(batch.loss_weight) != 0).sum())
        tokens = int(lengths.sum())
        attention = attention_flops(self.cfg, lengths)
        done = update_flops(self.cfg, tokens, scored, attention, self.trained_adapters)
        if self.has_layers_of_critic:
            # without scores over the vocabulary
            done += update_flops(self.cfg, tokens, 0, attention, self.trained_adapters)
        # of the update alone: sampling has another number of FLOPs
        rate = done / update_seconds
        seen = {
            "perf/tokens_per_second": tokens / step_seconds,
            "perf/update_tokens_per_second": tokens / update_seconds,
            "perf/tokens_per_second_per_device": tokens / step_seconds / self.num_devices,
            "perf/update_tflops_per_second_per_device": rate / self.num_devices / 1e12,
            "memory/peak_gb": peak_bytes() / 1e9,
        }
        if self.hardware is not None:
            # the share of the bfloat16 peak
            seen["perf/mfu"] = rate / self.num_devices / self.hardware.peak_flops
        return seen


def peak_bytes() -> int:
    """The most that was ever in use on one of this host's devices; on a CPU, by the process."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    # CPU devices have no statistics
    if all(s and "peak_bytes_in_use" in s for s in stats):
        return max(s["peak_bytes_in_use"] for s in stats)
    # getrusage counts bytes on macOS and KiB on Linux
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
