"""How fast a step can be at best: FLOPs, bytes read and bytes sent of each phase, over what the
hardware does.

As if every sequence had its longest length, every kernel reached the peak and sending cost nothing
but links: a bound, not a forecast. Recomputation (training.remat) is not counted, as in
planning.flops. In the formulas, W is the bytes of the weights of a tp shard in the types that they
are used in, G those of their gradients as they are summed over fsdp.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tunix_lite.models.weights import Weight, is_weight, num_params
from tunix_lite.planning import estimate, flops, sizes
from tunix_lite.planning.hardware import Hardware
from tunix_lite.planning.programs import Compiled
from tunix_lite.planning.resolved import Case, shelf


@dataclass(frozen=True)
class Bound:
    """The least that a phase takes."""

    flops: float  # on all devices together
    read_bytes: float  # from the memory of one device
    sent_bytes: float  # by one device to others of its node or slice
    sent_between_nodes: float = 0.0  # and to those of other nodes
    seconds: float | None = None  # None: the hardware is not in the table
    limit: str | None = None  # compute, memory or links

    @property
    def all_sent_bytes(self) -> float:
        return self.sent_bytes + self.sent_between_nodes


def bounds(
    case: Case, hardware: Hardware | None, compiled: dict[str, Compiled]
) -> dict[str, Bound]:
    """By phase, of one step; of a rollout that serves several updates, the share of one."""
    run, found = case.run, {}
    shared = 1 / run.algorithm.updates_per_rollout
    if not run.algorithm.needs_demonstrations:
        found["rollout"] = _together(
            _prefill(case, compiled), _decode(case, compiled), hardware, case.sizes, shared
        )
    if run.algorithm.needs_reference:
        found["scoring"] = _together(_scoring(case, compiled), None, hardware, case.sizes, shared)
    found["update"] = _together(_update(case, compiled), None, hardware, case.sizes, 1.0)
    return found


@dataclass(frozen=True)
class Work:
    """What one program, all its calls in a step together, does: as in Bound, sent bytes by axis."""

    flops: float
    read: float
    sent: dict[str, float]


def _together(
    first: Work, second: Work | None, hardware: Hardware | None, sizes, share: float
) -> Bound:
    """One after the other; each is bound by what it needs most of."""
    works, devices = [first] if second is None else [first, second], sizes["fsdp"] * sizes["tp"]
    total_flops, read = sum(w.flops for w in works) * share, sum(w.read for w in works) * share
    links = [_links(w.sent, sizes, hardware) for w in works]
    sent = [sum(part) * share for part in zip(*links)]
    if hardware is None:
        return Bound(total_flops, read, *sent)
    done = [
        flops.roofline(w.flops / devices, w.read, near, hardware, far)
        for w, (near, far) in zip(works, links)
    ]
    return Bound(
        total_flops, read, *sent, sum(seconds for seconds, _ in done) * share, max(done)[1]
    )


def _links(
    sent: dict[str, float], sizes: dict[str, int], hardware: Hardware | None
) -> tuple[float, float]:
    """Bytes within a node, and between nodes: neighbours over tp are on one node, those over fsdp
    are not."""
    if (
        hardware is None
        or hardware.platform == "tpu"
        or sizes["fsdp"] * sizes["tp"] <= hardware.host_devices
    ):
        return sum(sent.values()), 0.0
    far = sum(
        size for axis, size in sent.items() if axis != "tp" or sizes["tp"] > hardware.host_devices
    )
    return sum(sent.values()) - far, far


def _sent(
    compiled: Compiled | None, calls: float, estimated: dict[str, float], turns: float = 1
) -> dict[str, float]:
    """By axis, as compiled where it is, otherwise by formula. turns: of a loop whose turns the data
    decides, and which is listed as one."""
    if compiled is None:
        return estimated
    by_axis: dict[str, float] = {}
    for group in compiled.collectives:
        times = calls if group.count_known else calls * turns
        by_axis[group.axis] = by_axis.get(group.axis, 0.0) + times * group.sent_bytes
    return by_axis


def _ring(case: Case, gathered: float, reduced: float) -> dict[str, float]:
    """Bytes that a device sends: (n - 1) / n of each buffer that is gathered or reduce-scattered
    over fsdp, twice that of one all-reduced over tp."""
    fsdp, tp = case.sizes["fsdp"], case.sizes["tp"]
    return {"fsdp": gathered * (fsdp - 1) / fsdp, "tp": 2 * reduced * (tp - 1) / tp}


def weight_bytes(case: Case) -> int:
    """W: the weights of a tp shard, whole over fsdp, in the types that they are used in."""
    return estimate.sampling_copy(case, is_gathered=True)


def gradient_bytes(case: Case) -> int:
    """G: the gradients of a tp shard as they cross fsdp: layers' matrices in training.reduce_dtype,
    others float32."""

    def of(w: Weight) -> int:
        is_narrow = w.inputs and case.run.training.reduce_dtype == "bfloat16"
        return sizes.elements(w.shape, w.axes, case.sizes, without_fsdp=True) * (
            2 if is_narrow else 4
        )

    return sum(of(w) for w in jax.tree.leaves(sizes.tables(case).trained, is_leaf=is_weight))


def _streams(case: Case, tokens: float, is_forward: bool = True) -> float:
    """Bytes of what tp sums in one pass over so many tokens on a device: two residual streams a
    layer.

    Forward they are summed in training.tp_reduce_dtype (models.rounding.product), backward in the
    compute dtype.
    """
    summed_in = jnp.promote_types(case.run.training.tp_reduce_dtype, case.dtype)
    dtype = summed_in if is_forward else case.dtype
    return 2 * case.cfg.num_layers * tokens * case.cfg.embed_dim * jnp.dtype(dtype).itemsize


def _prefill(case: Case, compiled) -> Work:
    """Each prompt read once: 2PT FLOPs and attention; W is read once a block of prompts."""
    block, width, _ = shelf(case)
    prompts, length = case.batch.prompts, case.lengths[0]
    calls = -(-prompts // block)
    attention = flops.attention_flops(case.cfg, [length] * prompts)
    moved = calls * weight_bytes(case) if case.weights == "sharded" else 0
    estimated = _ring(case, moved, _streams(case, calls * block * width / case.sizes["fsdp"]))
    sent = _sent(compiled.get("prefill"), calls, estimated)
    return Work(
        flops.forward_flops(case.cfg, prompts * length, 0, attention),
        calls * weight_bytes(case),
        sent,
    )


def _decode(case: Case, compiled) -> Work:
    """Every token of every completion, slots at a time: each step reads W and the keys and values
    of its sequences, which stand at half their completion."""
    cfg, (prompt, new), B = case.cfg, case.lengths, case.batch.sequences
    steps = new * -(-B // case.slots)
    attention = flops.attention_flops(cfg, [prompt + new] * B) - flops.attention_flops(
        cfg, [prompt] * B
    )
    itemsize = (
        jnp.dtype(case.dtype).itemsize if case.run.rollout.cache != "int8" else 1 + 4 / cfg.head_dim
    )
    heads = min(case.sizes["tp"], cfg.num_kv_heads)
    cache = flops.decode_bytes(cfg, [prompt + new // 2] * case.slots, 0, itemsize) / (
        case.sizes["fsdp"] * heads
    )
    moved = steps * weight_bytes(case) if case.weights == "sharded" else 0
    estimated = _ring(case, moved, _streams(case, steps * case.slots / case.sizes["fsdp"]))
    sent = _sent(compiled.get("decode"), steps / min(case.run.rollout.chunk, new), estimated)
    return Work(
        flops.forward_flops(cfg, B * new, B * new, attention),
        steps * (weight_bytes(case) + cache),
        sent,
    )


def counted(case: Case) -> tuple[int, int, float]:
    """(tokens, tokens that count, FLOPs of attention) of one forward over the batch at its
    longest."""
    (prompt, new), B = case.lengths, case.batch.sequences
    prompts = B
    if case.rows.packing == "prefix":
        # as often as one stands
        prompts = case.batch.prompts * -(-case.batch.num_generations // case.rows.shape.num_lanes)
    return prompts * prompt + B * new, B * new, flops.attention_flops(case.cfg, [prompt + new] * B)


def parts(case: Case) -> int:
    """Micro-batches that hold anything: of packed rows, as many as the tokens at their longest
    fill."""
    # a completion at its longest takes a lane, so all rows are there
    if case.rows.packing != "sequences":
        return case.rows.num_parts
    at_once = case.rows.width * case.rows.rows_per_part * case.sizes["fsdp"]
    return min(case.rows.num_parts, -(-counted(case)[0] // at_once))


def _scoring(case: Case, compiled) -> Work:
    """One forward: 2P a token; W is read and gathered once a micro-batch."""
    tokens, scored, attention = counted(case)
    once = parts(case) * weight_bytes(case)
    estimated = _ring(case, once, _streams(case, tokens / case.sizes["fsdp"]))
    sent = _sent(compiled.get("scoring"), 1, estimated, parts(case))
    return Work(flops.forward_flops(case.cfg, tokens, scored, attention), once, sent)


def _update(case: Case, compiled) -> Work:
    """Forward and backward: 6P a token (4P under LoRA). W is gathered for each; G is reduced once
    in sync_gradients_every micro-batches; tp sums two streams a layer each way; the state is read
    and written."""
    tokens, scored, attention = counted(case)
    lora_params = num_params(sizes.tables(case).trained) if case.lora else 0
    turns, gradients = parts(case), gradient_bytes(case)
    syncs = -(-turns // case.run.training.sync_gradients_every)
    gathered = 2 * turns * weight_bytes(case) + syncs * gradients
    here = tokens / case.sizes["fsdp"]
    estimated = _ring(case, gathered, _streams(case, here) + _streams(case, here, is_forward=False))
    state = 2 * sum(
        size
        for name, size in estimate.resident(case).items()
        if name in ("parameters", "optimizer")
    )
    sent = _sent(compiled.get("update"), 1, estimated, syncs)
    done = flops.update_flops(case.cfg, tokens, scored, attention, lora_params)
    return Work(done, 2 * turns * weight_bytes(case) + state, sent)
