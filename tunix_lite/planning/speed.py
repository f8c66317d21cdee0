"""How fast a step can be at best: FLOPs, bytes read and bytes sent of each phase, over those of the
hardware.

As if every sequence had its longest length, every kernel reached the peak and sending cost nothing
but links: a bound, not a forecast. Recomputation is not counted. W is the bytes of the weights of a
tp shard in the types that they are used in, G those of their gradients as summed over fsdp.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tunix_lite.models.weights import is_weight, num_params
from tunix_lite.planning import estimate, flops
from tunix_lite.planning.hardware import Hardware
from tunix_lite.planning.programs import Compiled
from tunix_lite.resolved import sizes
from tunix_lite.resolved.run import ResolvedRun


@dataclass(frozen=True)
class Bound:
    """The least that a phase takes.

    Example: Bound(4e12, 2e9, 0.0, seconds=0.004, limit="compute").
    """

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
    resolved: ResolvedRun, hardware: Hardware | None, compiled: dict[str, Compiled]
) -> dict[str, Bound]:
    """By phase, of one step; of a rollout that serves several updates, the share of one."""
    algorithm = resolved.run.algorithm
    mesh_shape = resolved.mesh_shape
    # a rollout is for as many updates' sequences as there are mini-batches
    share = algorithm.needs.mini_batches / algorithm.updates_per_rollout
    works = {}
    if not algorithm.needs.demonstrations and resolved.apart is None:
        works["rollout"] = [_prefill(resolved, compiled), _decode(resolved, compiled)]
    if resolved.scores:
        works["scoring"] = [_scoring(resolved, compiled.get("scoring"))]
    for name in resolved.frozen_models:
        works[name] = [_scoring(resolved.as_scorer(name), compiled.get(name))]
    update = _bound([_update(resolved, compiled)], hardware, mesh_shape, 1.0)
    phases = {name: _bound(work, hardware, mesh_shape, share) for name, work in works.items()}
    return phases | {"update": update}


@dataclass(frozen=True)
class ProgramWork:
    """What one program, all its calls in a step together, does: as in Bound, sent bytes by axis.

    Example: ProgramWork(4e12, 2e9, {"fsdp": 1e8}).
    """

    flops: float
    read: float
    sent: dict[str, float]


def _bound(
    works: list[ProgramWork],
    hardware: Hardware | None,
    mesh_shape: dict[str, int],
    share: float,
) -> Bound:
    """One program after the other; each is bound by what it needs most of."""
    # What they do, whatever the hardware.
    total_flops = sum(work.flops for work in works) * share
    read_bytes = sum(work.read for work in works) * share
    near_and_far = [links(work.sent, mesh_shape, hardware) for work in works]
    near_bytes = sum(near for near, _ in near_and_far) * share
    far_bytes = sum(far for _, far in near_and_far) * share
    if hardware is None:
        return Bound(total_flops, read_bytes, near_bytes, far_bytes)

    # How long it takes, and the limit of the program that takes longest.
    devices = mesh_shape["fsdp"] * mesh_shape["tp"]
    times = [
        flops.roofline(work.flops / devices, work.read, near, hardware, far)
        for work, (near, far) in zip(works, near_and_far)
    ]
    seconds = sum(seconds for seconds, _ in times) * share
    _, limit = max(times)
    return Bound(total_flops, read_bytes, near_bytes, far_bytes, seconds, limit)


def links(
    sent: dict[str, float], mesh_shape: dict[str, int], hardware: Hardware | None
) -> tuple[float, float]:
    """Bytes within a node, and between nodes: only neighbours over tp are on one node."""
    total = sum(sent.values())
    num_devices = mesh_shape["fsdp"] * mesh_shape["tp"]
    if hardware is None or hardware.platform == "tpu" or num_devices <= hardware.host_devices:
        return total, 0.0
    tp_crosses = mesh_shape["tp"] > hardware.host_devices
    far = sum(size for axis, size in sent.items() if axis != "tp" or tp_crosses)
    return total - far, far


def _sent(
    compiled: Compiled | None, calls: float, estimated: dict[str, float], turns: float = 1
) -> dict[str, float]:
    """By axis, as compiled where it is, otherwise by formula. turns: of a loop whose turns the data
    decides, and which is listed as one."""
    return estimated if compiled is None else sent_by_axis(compiled, calls, turns)


def sent_by_axis(compiled: Compiled, calls: float = 1, turns: float = 1) -> dict[str, float]:
    """Bytes that a device sends in so many calls of a program, by axis of the mesh."""
    by_axis: dict[str, float] = {}
    for group in compiled.collectives:
        times = calls if group.count_known else calls * turns
        by_axis[group.axis] = by_axis.get(group.axis, 0.0) + times * group.sent_bytes
    return by_axis


def ring(resolved: ResolvedRun, gathered: float, reduced: float) -> dict[str, float]:
    """Bytes that a device sends: (n - 1) / n of each buffer that is gathered or reduce-scattered
    over fsdp, twice that of one all-reduced over tp."""
    fsdp = resolved.mesh_shape["fsdp"]
    tp = resolved.mesh_shape["tp"]
    return {"fsdp": gathered * (fsdp - 1) / fsdp, "tp": 2 * reduced * (tp - 1) / tp}


def weight_bytes(resolved: ResolvedRun) -> int:
    """W: the weights of a tp shard, whole over fsdp, in the types that they are used in."""
    return estimate.sampling_copy(resolved, is_gathered=True)


def reduced_gradient_bytes(resolved: ResolvedRun) -> int:
    """G: the gradients of a tp shard as they cross fsdp: layers' matrices in training.reduce_dtype,
    others float32."""
    total = 0
    for weight in jax.tree.leaves(sizes.tables(resolved).trained, is_leaf=is_weight):
        is_narrow = weight.inputs and resolved.run.training.reduce_dtype == "bfloat16"
        elements = resolved.elements(weight.shape, weight.axes, is_gathered=True)
        total += elements * (2 if is_narrow else 4)
    return total


def streams(resolved: ResolvedRun, tokens: float, is_forward: bool = True) -> float:
    """Bytes that tp sums in one pass over so many tokens on a device: two residual streams a layer,
    forward in training.tp_reduce_dtype, backward in the compute dtype."""
    dtype = resolved.dtype
    if is_forward:
        dtype = jnp.promote_types(resolved.run.training.tp_reduce_dtype, dtype)
    elements = 2 * resolved.cfg.num_layers * tokens * resolved.cfg.embed_dim
    return elements * jnp.dtype(dtype).itemsize


def _prefill(resolved: ResolvedRun, compiled: dict[str, Compiled]) -> ProgramWork:
    """Each prompt read once: 2PT FLOPs and attention; W is read once a block of prompts."""
    block, width, _ = resolved.sampling_memory.prompt_cache
    prompts = resolved.batch.prompts
    length, _ = resolved.lengths
    calls = -(-prompts // block)
    attention = flops.attention_flops(resolved.cfg, [length] * prompts)

    moved = calls * weight_bytes(resolved) if resolved.sampling_weights == "sharded" else 0
    tokens = calls * block * width / resolved.mesh_shape["fsdp"]
    estimated = ring(resolved, moved, streams(resolved, tokens))
    return ProgramWork(
        flops.forward_flops(resolved.cfg, prompts * length, 0, attention),
        calls * weight_bytes(resolved),
        _sent(compiled.get("prefill"), calls, estimated),
    )


def _decode(resolved: ResolvedRun, compiled: dict[str, Compiled]) -> ProgramWork:
    """Every token of every completion, slots at a time: each step reads W and the keys and values
    of its sequences, which stand at half their completion."""
    cfg = resolved.cfg
    prompt, new = resolved.lengths
    B = resolved.batch.sequences
    steps = new * -(-B // resolved.slots)
    attention = flops.attention_flops(cfg, [prompt + new] * B)
    attention -= flops.attention_flops(cfg, [prompt] * B)

    # Keys and values that a device reads in a step: a code and its share of a scale, or a number.
    is_int8 = resolved.run.rollout.cache == "int8"
    itemsize = 1 + 4 / cfg.head_dim if is_int8 else jnp.dtype(resolved.dtype).itemsize
    shards = resolved.mesh_shape["fsdp"] * min(resolved.mesh_shape["tp"], cfg.num_kv_heads)
    half_done = [prompt + new // 2] * resolved.slots
    cache = flops.decode_bytes(cfg, half_done, 0, itemsize) / shards

    moved = steps * weight_bytes(resolved) if resolved.sampling_weights == "sharded" else 0
    tokens = steps * resolved.slots / resolved.mesh_shape["fsdp"]
    estimated = ring(resolved, moved, streams(resolved, tokens))
    calls = steps / resolved.sampling_memory.chunk
    return ProgramWork(
        flops.forward_flops(cfg, B * new, B * new, attention),
        steps * (weight_bytes(resolved) + cache),
        _sent(compiled.get("decode"), calls, estimated),
    )


def batch_tokens(resolved: ResolvedRun) -> tuple[int, int, float]:
    """(tokens, tokens that count, FLOPs of attention) of one forward over the batch at its
    longest."""
    prompt, new = resolved.lengths
    B = resolved.batch.sequences
    # A prompt that is shared stands once in a row.
    prompts = B
    if resolved.rows.packing == "prefix":
        num_lanes = resolved.rows.shape.num_lanes
        prompts = resolved.batch.prompts * -(-resolved.batch.num_generations // num_lanes)
    attention = flops.attention_flops(resolved.cfg, [prompt + new] * B)
    return prompts * prompt + B * new, B * new, attention


def parts(resolved: ResolvedRun) -> int:
    """Micro-batches that hold anything: of packed rows, as many as the tokens at their longest
    fill."""
    # With shared prompts a completion at its longest takes a lane, so all rows are there.
    if resolved.rows.packing != "sequences":
        return resolved.rows.num_parts
    tokens, _, _ = batch_tokens(resolved)
    at_once = resolved.rows.width * resolved.rows.rows_per_part * resolved.mesh_shape["fsdp"]
    return min(resolved.rows.num_parts, -(-tokens // at_once))


def _scoring(resolved: ResolvedRun, compiled: Compiled | None) -> ProgramWork:
    """One forward: 2P a token; W is read and gathered once a micro-batch."""
    tokens, scored, attention = batch_tokens(resolved)
    once = parts(resolved) * weight_bytes(resolved)
    estimated = ring(resolved, once, streams(resolved, tokens / resolved.mesh_shape["fsdp"]))
    return ProgramWork(
        flops.forward_flops(resolved.cfg, tokens, scored, attention),
        once,
        _sent(compiled, 1, estimated, parts(resolved)),
    )


def _update(resolved: ResolvedRun, compiled: dict[str, Compiled]) -> ProgramWork:
    """Forward and backward: 6P a token (4P under LoRA). W is gathered for each; G is reduced once
    in sync_gradients_every micro-batches; the state is read and written."""
    tokens, scored, attention = batch_tokens(resolved)
    lora_params = num_params(sizes.tables(resolved).trained) if resolved.lora else 0

    # Bytes sent.
    turns = parts(resolved)
    syncs = -(-turns // resolved.run.training.sync_gradients_every)
    gathered = 2 * turns * weight_bytes(resolved) + syncs * reduced_gradient_bytes(resolved)
    here = tokens / resolved.mesh_shape["fsdp"]
    summed = streams(resolved, here) + streams(resolved, here, is_forward=False)
    estimated = ring(resolved, gathered, summed)

    # Bytes read from the device's own memory: weights each way, the state read and written.
    resident = estimate.resident(resolved)
    state = 2 * (resident["parameters"] + resident["optimizer"])
    return ProgramWork(
        flops.update_flops(resolved.cfg, tokens, scored, attention, lora_params),
        2 * turns * weight_bytes(resolved) + state,
        _sent(compiled.get("update"), 1, estimated, syncs),
    )
