"""How fast a step can be at best: FLOPs, bytes read and bytes sent of each phase by formulas, over
those of the hardware.

As if every sequence had its longest length, every kernel reached the peak and sending cost nothing
but links: a bound, not a forecast. Recomputation is not counted. W is the bytes of the weights of a
tp shard in the types that they are used in, G those of their gradients as summed over fsdp.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from tunix_lite.models.weights import flatten, num_params
from tunix_lite.planning import flops
from tunix_lite.planning.estimate import MemoryEstimate
from tunix_lite.planning.hardware import Hardware
from tunix_lite.settings.resolved_run import ResolvedRun


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


@dataclass(frozen=True)
class _ProgramWork:
    """What one program, all its calls in a step together, does: as in Bound, sent bytes by axis.

    Example: ProgramWork(4e12, 2e9, {"fsdp": 1e8}).
    """

    flops: float
    read: float
    sent: dict[str, float]


@dataclass(frozen=True)
class Speed:
    """The bounds of a run, by phase.

    Example: `Speed(resolved).bounds(hardware)["update"].seconds`.
    """

    resolved: ResolvedRun

    def bounds(self, hardware: Hardware | None) -> dict[str, Bound]:
        """By phase, of one step; of a rollout that serves several updates, the share of one."""
        resolved = self.resolved
        algorithm = resolved.run.algorithm
        # a rollout is for as many updates' sequences as there are mini-batches
        share = algorithm.needs.mini_batches / algorithm.updates_per_rollout
        works = {}
        if not algorithm.needs.demonstrations and resolved.apart is None:
            works["rollout"] = self._rollout()
        if resolved.scores:
            works["scoring"] = [self._scoring()]
        for name in resolved.frozen_models:
            works[name] = [Speed(resolved.as_scorer(name))._scoring()]
        phases = {
            name: _bound(work, hardware, resolved.mesh_shape, share)
            for name, work in works.items()
        }
        return phases | {
            "update": _bound([self._update()], hardware, resolved.mesh_shape, 1.0)
        }

    def _ring(self, gathered: float, reduced: float) -> dict[str, float]:
        """Bytes that a device sends: (n - 1) / n of each buffer that is gathered or
        reduce-scattered over fsdp, twice that of one all-reduced over tp."""
        fsdp = self.resolved.fsdp
        tp = self.resolved.tp
        return {"fsdp": gathered * (fsdp - 1) / fsdp, "tp": 2 * reduced * (tp - 1) / tp}

    def _weights_read(self) -> int:
        """W: the bytes of the weights that a pass reads, whole over fsdp. Of the table of per-layer
        inputs these are a few rows."""
        resolved = self.resolved
        cfg = resolved.cfg
        shape = (cfg.vocab_size, cfg.num_layers * cfg.per_layer_dim)
        rows = resolved.elements(shape, ("vocab", "embed"), is_gathered=True)
        copy = MemoryEstimate(resolved).sampling_copy(is_gathered=True)
        return copy - rows * resolved.itemsize

    def reduced_gradient_bytes(self) -> int:
        """G: the gradients of a tp shard as they cross fsdp: layers' matrices in
        training.reduce_dtype, others float32. Rows of the table of per-layer inputs do not."""
        resolved = self.resolved
        total = 0
        for path, weight in flatten(resolved.tables.trained).items():
            if path == "per_layer/table":
                continue
            is_narrow = weight.inputs and resolved.run.training.reduce_dtype == "bfloat16"
            elements = resolved.elements(weight.shape, weight.axes, is_gathered=True)
            total += elements * (2 if is_narrow else 4)
        return total

    def _streams(self, tokens: float, is_forward: bool = True) -> float:
        """Bytes that tp sums in one pass over so many tokens on a device: two residual streams a
        layer, forward in training.tp_reduce_dtype, backward in the compute dtype."""
        resolved = self.resolved
        dtype = resolved.dtype
        if is_forward:
            dtype = jnp.promote_types(resolved.run.training.tp_reduce_dtype, dtype)
        elements = 2 * resolved.cfg.num_layers * tokens * resolved.cfg.embed_dim
        return elements * jnp.dtype(dtype).itemsize

    def _rollout(self) -> list[_ProgramWork]:
        """Prefill reads W once a block of prompts. Each decode step reads W and the keys and values
        of its sequences, which stand at half their completion."""
        resolved = self.resolved
        cfg = resolved.cfg
        prompt, new = resolved.lengths
        P = resolved.batch.prompts
        B = resolved.batch.sequences
        fsdp = resolved.fsdp
        W = self._weights_read()
        gathered = W if resolved.sampling_weights == "sharded" else 0

        # Each prompt once: 2PT FLOPs and attention.
        block, width, _ = resolved.sampling_memory.prompt_cache
        calls = -(-P // block)
        read = flops.attention_flops(cfg, [prompt] * P)
        prefill = _ProgramWork(
            flops.forward_flops(cfg, P * prompt, 0, read),
            calls * W,
            self._ring(calls * gathered, self._streams(calls * block * width / fsdp)),
        )

        # Every token of every completion, slots at a time. Of keys and values a device reads a
        # code and its share of a scale, or a number.
        steps = new * -(-B // resolved.slots)
        is_int8 = resolved.run.rollout.cache == "int8"
        itemsize = 1 + 4 / cfg.head_dim if is_int8 else resolved.itemsize
        shards = fsdp * min(resolved.tp, cfg.num_kv_heads)
        half_done = [prompt + new // 2] * resolved.slots
        cache = flops.decode_bytes(cfg, half_done, 0, itemsize) / shards
        attention = flops.attention_flops(cfg, [prompt + new] * B)
        attention -= flops.attention_flops(cfg, [prompt] * B)
        decode = _ProgramWork(
            flops.forward_flops(cfg, B * new, B * new, attention),
            steps * (W + cache),
            self._ring(steps * gathered, self._streams(steps * resolved.slots / fsdp)),
        )
        return [prefill, decode]

    def _batch_work(self) -> tuple[int, int, float, int]:
        """(tokens, tokens that count, FLOPs of attention, micro-batches that hold anything) of one
        forward over the batch at its longest."""
        resolved = self.resolved
        prompt, new = resolved.lengths
        B = resolved.batch.sequences
        rows = resolved.rows
        # A prompt that is shared stands once in a row.
        prompts = B
        if rows.packing == "prefix":
            num_lanes = rows.shape.num_lanes
            prompts = resolved.batch.prompts * -(-resolved.batch.num_generations // num_lanes)
        tokens = prompts * prompt + B * new
        # With shared prompts a completion at its longest takes a lane, so all rows are there.
        parts = rows.num_parts
        if rows.packing == "sequences":
            at_once = rows.width * rows.rows_per_part * resolved.fsdp
            parts = min(parts, -(-tokens // at_once))
        return (
            tokens,
            B * new,
            flops.attention_flops(resolved.cfg, [prompt + new] * B),
            parts,
        )

    def _scoring(self) -> _ProgramWork:
        """One forward: 2P a token; W is read and gathered once a micro-batch."""
        resolved = self.resolved
        tokens, scored, attention, parts = self._batch_work()
        once = parts * self._weights_read()
        return _ProgramWork(
            flops.forward_flops(resolved.cfg, tokens, scored, attention),
            once,
            self._ring(once, self._streams(tokens / resolved.fsdp)),
        )

    def _update(self) -> _ProgramWork:
        """Forward and backward: 6P a token (4P under LoRA). W is gathered for each; G is reduced
        once in sync_gradients_every micro-batches; the state is read and written."""
        resolved = self.resolved
        tokens, scored, attention, parts = self._batch_work()
        lora_params = num_params(resolved.tables.trained) if resolved.lora else 0
        both_ways = 2 * parts * self._weights_read()
        syncs = -(-parts // resolved.run.training.sync_gradients_every)
        here = tokens / resolved.fsdp
        summed = self._streams(here) + self._streams(here, is_forward=False)
        resident = MemoryEstimate(resolved).resident()
        state = 2 * (resident["parameters"] + resident["optimizer"])
        return _ProgramWork(
            flops.update_flops(resolved.cfg, tokens, scored, attention, lora_params),
            both_ways + state,
            self._ring(both_ways + syncs * self.reduced_gradient_bytes(), summed),
        )


def _bound(
    works: list[_ProgramWork],
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
