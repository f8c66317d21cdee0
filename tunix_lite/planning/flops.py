"""FLOPs and bytes of the model by formulas that can be counted by hand, and how near a run comes to
the hardware.

XLA's own count is of no use here: it sees a scanned layer once. A multiplication and an addition
are two FLOPs. What counts is what the mathematics needs: recomputation, padding and masked scores
do not, nor do norms, rope, softmax and activations, which are small. Of one layer, with D =
embed_dim, N = num_heads, K = num_kv_heads, H = head_dim, F = mlp_dim, the weights are q: DNH, k and
v: DKH each, o: NHD, gate, up and down: DF each.
"""

from collections.abc import Iterable

from tunix_lite.models.architecture import Architecture
from tunix_lite.planning.hardware import Hardware


def _matmul_params(cfg: Architecture) -> int:
    """Weights that a token is multiplied with on its way through the layers: L * (2DNH + 2DKH +
    3DF), without the head, the embedding, norms and biases."""
    attention = 2 * cfg.embed_dim * cfg.head_dim * (cfg.num_heads + cfg.num_kv_heads)
    return cfg.num_layers * (attention + 3 * cfg.embed_dim * cfg.mlp_dim)


def _head_params(cfg: Architecture) -> int:
    """Weights that a token is multiplied with to be scored, tied to the embedding or not."""
    return cfg.vocab_size * cfg.embed_dim


def attention_flops(cfg: Architecture, lengths: Iterable[int]) -> float:
    """Scores and weighted sums of one forward over sequences of these lengths: 4NH a pair of a
    query and a key. In a local layer a token sees a window of keys at most: a triangle of pairs,
    and then whole windows."""
    lengths = [int(length) for length in lengths]
    pairs = 0
    for kind in cfg.kinds:
        for length in lengths:
            seen = min(length, cfg.window) if kind == "local" else length
            pairs += seen * (seen + 1) // 2 + (length - seen) * seen
    return 4.0 * cfg.num_heads * cfg.head_dim * pairs


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


def mfu(
    flops: float, seconds: float, hardware: Hardware | None, num_devices: int
) -> float | None:
    """The share of the devices' bfloat16 peak; None if that is not known."""
    return None if hardware is None else flops / (seconds * num_devices * hardware.peak_flops)


def decode_bytes(
    cfg: Architecture,
    lengths: Iterable[int],
    weight_itemsize: float = 2,
    cache_itemsize: float = 2,
) -> float:
    """Bytes that one decode step over sequences of these lengths must read, on all devices
    together: every weight once, and of each sequence the keys and values that its next token sees.
    weight_itemsize, cache_itemsize: bytes of an element; a fraction for codes with scales."""
    lengths = [int(length) for length in lengths]
    seen = 0
    for kind in cfg.kinds:
        seen += sum(min(n, cfg.window) if kind == "local" else n for n in lengths)
    weights = _matmul_params(cfg) + _head_params(cfg)
    return (
        weights * weight_itemsize
        + 2.0 * cfg.num_kv_heads * cfg.head_dim * seen * cache_itemsize
    )


def roofline(
    flops: float,
    bytes_read: float,
    sent_bytes: float,
    hardware: Hardware,
    sent_between_nodes: float = 0.0,
) -> tuple[float, str]:
    """The least seconds that this takes on one device, and what takes them: compute, memory or
    links, as if they overlapped perfectly. sent_between_nodes: bytes that leave the node, beside
    sent_bytes within it."""
    seconds = {
        "compute": flops / hardware.peak_flops,
        "memory": bytes_read / hardware.memory_bandwidth,
        "links": max(
            sent_bytes / hardware.link_bandwidth, sent_between_nodes / hardware.node_bandwidth
        ),
    }
    bound = max(seconds, key=seconds.get)
    return seconds[bound], bound
