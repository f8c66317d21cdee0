"""How long a step will take, by phase, and what the whole run will take and cost.

Unlike the bound of planning.speed, a forecast takes lengths as they will be and not the longest,
counts the padding that is computed, and lets the real scheduler and the real packing decide how
many chunks and micro-batches there are. What each of them takes comes from `Costs`: timed programs
of this machine, or FLOPs and bytes.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from tunix_lite.algorithms.algorithm import batch_fields, num_mini_batches
from tunix_lite.learner import packing
from tunix_lite.planning import estimate, flops, speed
from tunix_lite.planning.hardware import Hardware
from tunix_lite.planning.lengths import Lengths
from tunix_lite.planning.programs import Compiled
from tunix_lite.planning.resolved import ResolvedRun
from tunix_lite.planning.roofline import predicted_seconds
from tunix_lite.planning.simulated_rollout import RolloutCosts, RolloutTrace, simulated
from tunix_lite.types import Batch

# Of the peaks, what programs reach. On H100s, well-tuned training reaches half of the peak of
# bfloat16, and decoding some 70 % of the bandwidth.
SHARE_OF_PEAK = 0.5
SHARE_OF_BANDWIDTH = 0.7
# Kernels of one layer, and beside the layers: as compiled for an H100 (docs/log.md, 2026-11-22).
KERNELS_OF_LAYER = 17
KERNELS_BESIDE = 15
# A rollout's host calls two programs a chunk: refill and decode.
CALL_SECONDS = 2e-4
# What the host does for a sequence after the rollout: its text, its reward (a quick one) and its
# place in a row. A step of the quickstart has 0.010 s for 128 of them on two cores.
HOST_SECONDS = 8e-5
# What it does for a sequence while the devices wait for it: it reads the chunks' tokens. A rollout
# of the quickstart takes some 0.007 s more than its programs.
ROLLOUT_HOST_SECONDS = 5e-5
# The tokens of the prompts, by which packing knows which completions share one.
PROMPT_TOKENS = 1_000


@dataclass(frozen=True)
class RowWork:
    """What an update or a scorer computes: rows, padding included, on all devices together.

    Example: RowWork(parts=2, rows=64, width=96, scored=64, tokens=3000) has 2 micro-batches of 64
    rows of 96 tokens, of which 3000 are no padding.
    """

    parts: int
    # rows of one micro-batch
    rows: int
    width: int
    # columns of a row for which scores over the vocabulary are computed
    scored: int
    tokens: int


class Costs(RolloutCosts, Protocol):
    """Seconds that the programs of a step take.

    Example: HardwareCosts(resolved, hardware).
    """

    # what the seconds are of, in words
    source: str

    def scoring(self, name: str, batch: Batch, work: RowWork) -> float:
        """Of one pass of a scorer over the batch."""
        ...

    def update(self, batch: Batch, work: RowWork) -> float:
        """Of one update, the optimizer included."""
        ...

    def rest(self, batch: Batch, work: RowWork) -> float:
        """Of what the host does beside the programs: data, rewards, laying out."""
        ...


@dataclass(frozen=True)
class Forecast:
    """A predicted step, and the run of such steps.

    Example: forecast(resolved, Lengths(), HardwareCosts(resolved, hardware)).step_seconds.
    """

    # seconds of one step by phase: prefill, decode, refill, scorers by name, update, rest
    seconds: dict[str, float]
    # of one update: prompts and completions, no padding
    tokens: int
    decode_steps: int
    prefill_tokens: int
    slot_use: float
    # micro-batches that run
    parts: int
    num_steps: int
    source: str
    lengths: str
    price_per_hour: float | None = None

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def rollout_seconds(self) -> float:
        return sum(self.seconds.get(name, 0.0) for name in ("prefill", "refill", "decode"))

    @property
    def tokens_per_second(self) -> float:
        """As a run's perf/tokens_per_second counts them."""
        return self.tokens / self.step_seconds

    @property
    def hours(self) -> float:
        """Of the whole run, without starting, evaluating and saving."""
        return self.num_steps * self.step_seconds / 3600

    @property
    def price(self) -> float | None:
        """Of the whole run, in the unit of price_per_hour; None: no price is given."""
        return None if self.price_per_hour is None else self.hours * self.price_per_hour


def forecast(
    resolved: ResolvedRun,
    lengths: Lengths,
    costs: Costs,
    price_per_hour: float | None = None,
) -> Forecast:
    """The step that these lengths make on this mesh."""
    run = resolved.run
    algorithm = run.algorithm
    mini_batches = num_mini_batches(algorithm)
    prompts = resolved.batch.prompts * mini_batches
    drawn = lengths.draw(prompts, algorithm.num_generations, resolved.lengths)
    # A rollout serves several updates; what it takes is divided among them.
    share = 1 / algorithm.updates_per_rollout

    trace = None
    seconds: dict[str, float] = {}
    if not algorithm.needs_demonstrations:
        trace = simulated(resolved, *drawn, costs)
        for name in ("prefill", "decode", "refill"):
            seconds[name] = trace.seconds[name] * share

    # The batch of one update, and of a scorer: that of the whole rollout.
    one = [part[: resolved.batch.prompts] for part in drawn]
    batch = batch_of(resolved, *one)
    work = row_work(resolved, batch)
    scorers = (["scoring"] if resolved.scores else []) + list(resolved.frozen_models)
    for name in scorers:
        seconds[name] = costs.scoring(name, batch, work) * mini_batches * share
    seconds["update"] = costs.update(batch, work)
    seconds["rest"] = costs.rest(batch, work)
    return _forecast(resolved, seconds, batch, work, trace, costs, lengths, price_per_hour)


def _forecast(
    resolved: ResolvedRun,
    seconds: dict[str, float],
    batch: Batch,
    work: RowWork,
    trace: RolloutTrace | None,
    costs: Costs,
    lengths: Lengths,
    price_per_hour: float | None,
) -> Forecast:
    return Forecast(
        seconds=seconds,
        tokens=int(batch.token_mask.sum()),
        decode_steps=trace.decode_steps if trace else 0,
        prefill_tokens=trace.prefill_tokens if trace else 0,
        slot_use=trace.slot_use if trace else 0.0,
        parts=work.parts,
        num_steps=resolved.run.training.max_steps,
        source=costs.source,
        lengths=str(lengths),
        price_per_hour=price_per_hour,
    )


def batch_of(resolved: ResolvedRun, prompt_lengths: np.ndarray, lengths: np.ndarray) -> Batch:
    """A batch of sequences of these lengths, [P] and [P, G], as a rollout would hand it over."""
    most_prompt, most_new = resolved.lengths
    _, generations = lengths.shape
    repeated = np.repeat(prompt_lengths, generations)[:, None]
    column = np.arange(most_prompt + most_new)
    is_new = (column >= most_prompt) & (column < most_prompt + lengths.reshape(-1, 1))
    mask = is_new | ((column < most_prompt) & (column >= most_prompt - repeated))

    # Prompts differ from each other, so that only a group shares one.
    vocab = resolved.cfg.vocab_size
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, min(vocab, PROMPT_TOKENS), mask.shape).astype(np.int32)
    first = tokens[::generations, :most_prompt]
    tokens[:, :most_prompt] = np.repeat(first, generations, axis=0)
    tokens = np.where(mask, tokens, 0).astype(np.int32)

    weight = (is_new / is_new.sum()).astype(np.float32)
    zeros = np.zeros(mask.shape, np.float32)
    values = {name: zeros for name in batch_fields(resolved.run.algorithm)}
    return Batch(tokens, mask, weight, **values)


def row_work(resolved: ResolvedRun, batch: Batch) -> RowWork:
    """What the batch comes to in rows, by the packing that a run uses."""
    rows = resolved.rows
    fsdp = resolved.mesh_shape["fsdp"]
    tokens = int(batch.token_mask.sum())
    counts = batch.loss_weight != 0
    if rows.packing == "none":
        per_part = len(counts) // rows.num_parts
        return RowWork(rows.num_parts, per_part, counts.shape[1], rows.num_scored, tokens)
    packed = packing.packed(
        batch.tokens, batch.token_mask, counts, rows.shape, rows.rows_per_part, rows.num_parts, fsdp
    )
    scored = packed.is_scored.shape[1]
    return RowWork(packed.num_parts, rows.rows_per_part * fsdp, rows.width, scored, tokens)


# ---- by FLOPs and bytes


@dataclass(frozen=True)
class HardwareCosts:
    """Seconds by FLOPs, bytes read and bytes sent over a stated share of what the hardware does,
    and the time to start kernels.

    Example: HardwareCosts(resolved, find_target("h100x8").hardware).
    """

    resolved: ResolvedRun
    hardware: Hardware

    @property
    def source(self) -> str:
        return (
            f"an estimate by FLOPs and bytes, at {SHARE_OF_PEAK:.0%} of the peak and "
            f"{SHARE_OF_BANDWIDTH:.0%} of the bandwidth of {self.hardware.name}"
        )

    def begin(self, slots: int, columns: int, requests: int) -> float:
        weights = speed.weight_bytes(self.resolved)
        gathered = weights if self.resolved.sampling_weights == "gathered" else 0
        sending = self._link_seconds(gathered, 0.0)
        copying = self._seconds(0.0, 2 * weights, CALL_SECONDS)
        return copying + sending + requests * ROLLOUT_HOST_SECONDS

    def prefill(self, prompts: int, width: int) -> float:
        # All devices of an fsdp shard read the prompts of the shard.
        attention = flops.attention_flops(self.resolved.cfg, [width] * prompts)
        done = flops.forward_flops(self.resolved.cfg, prompts * width, 0, attention)
        read = speed.weight_bytes(self.resolved)
        return self._seconds(done, read, CALL_SECONDS) + self._sampling_links(prompts * width)

    def refill(self, slots: int, columns: int) -> float:
        read = self._cache_bytes(slots * columns)
        return self._seconds(0.0, 2 * read, CALL_SECONDS)

    def resize(self, slots: int, columns: int) -> float:
        return self.refill(slots, columns)

    def decode(self, slots: int, columns: int, steps: int, held: float) -> float:
        # Every column is read, whether a sequence has come that far or not.
        cfg = self.resolved.cfg
        done = flops.forward_flops(cfg, slots, slots, 0.0)
        read = speed.weight_bytes(self.resolved) + self._cache_bytes(slots * columns)
        return steps * (self._seconds(done, read) + self._sampling_links(slots)) + CALL_SECONDS

    def scoring(self, name: str, batch: Batch, work: RowWork) -> float:
        resolved = self.resolved
        if name in resolved.frozen_models:
            resolved = resolved.as_scorer(name)
        of_model = replace(self, resolved=resolved)
        weights = speed.weight_bytes(resolved)
        sending = of_model._link_seconds(work.parts * weights, of_model._summed(work, 1))
        return of_model.passes(work, 1, weights) + sending

    def update(self, batch: Batch, work: RowWork) -> float:
        # Backward is two passes; recomputation is one more.
        training = self.resolved.run.training
        share = {"save_all": 0.0, "none": 0.0, "dots": 0.1, "save_qkv_out": 0.6}
        again = share.get(training.remat, 1.0)
        passes = (3 if self.resolved.lora is None else 2) + again
        resident = estimate.resident(self.resolved)
        state = 2 * (resident["parameters"] + resident["optimizer"])
        read = 2 * speed.weight_bytes(self.resolved)

        # Weights are gathered forward and backward, gradients are summed over fsdp once in so many
        # micro-batches, and tp sums the streams once each way.
        syncs = -(-work.parts // training.sync_gradients_every)
        gathered = work.parts * read + syncs * speed.reduced_gradient_bytes(self.resolved)
        sending = self._link_seconds(gathered, self._summed(work, 2 + again))
        return self.passes(work, passes, read) + self._seconds(0.0, state) + sending

    def rest(self, batch: Batch, work: RowWork) -> float:
        return len(batch.tokens) * HOST_SECONDS

    def passes(self, work: RowWork, passes: float, read: float) -> float:
        """So many forward passes over all micro-batches; read: bytes of weights of each."""
        cfg = self.resolved.cfg
        attention = flops.attention_flops(cfg, [work.width] * work.rows)
        scored = work.rows * work.scored
        done = flops.forward_flops(cfg, work.rows * work.width, scored, attention)
        return work.parts * self._seconds(passes * done, read, passes * self._launches())

    def _summed(self, work: RowWork, passes: float) -> float:
        """Bytes of what tp sums in so many passes over all micro-batches, on one device."""
        tokens = work.parts * work.rows * work.width / self.resolved.mesh_shape["fsdp"]
        return passes * speed.streams(self.resolved, tokens)

    def _sampling_links(self, tokens: int) -> float:
        """Seconds that sending takes in one forward pass of the sampler; tokens: of all devices."""
        is_sharded = self.resolved.sampling_weights == "sharded"
        gathered = speed.weight_bytes(self.resolved) if is_sharded else 0
        here = tokens / self.resolved.mesh_shape["fsdp"]
        return self._link_seconds(gathered, speed.streams(self.resolved, here))

    def _link_seconds(self, gathered: float, summed: float) -> float:
        """gathered: bytes that are gathered or scattered over fsdp; summed: over tp."""
        sent = speed.ring(self.resolved, gathered, summed)
        near, far = speed.links(sent, self.resolved.mesh_shape, self.hardware)
        seconds = near / self.hardware.link_bandwidth + far / self.hardware.node_bandwidth
        return seconds / SHARE_OF_BANDWIDTH

    def _cache_bytes(self, tokens: float) -> float:
        """Of keys and values of so many tokens, on one device."""
        cfg = self.resolved.cfg
        width = 1.0 if self.resolved.run.rollout.cache == "int8" else self._itemsize()
        shards = self.resolved.mesh_shape["fsdp"]
        shards *= min(self.resolved.mesh_shape["tp"], cfg.num_kv_heads)
        return 2.0 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * tokens * width / shards

    def _itemsize(self) -> float:
        return np.dtype(self.resolved.dtype).itemsize

    def _launches(self) -> float:
        # Over tp, each of the two sums of a layer is a kernel more.
        of_layer = KERNELS_OF_LAYER + (2 if self.resolved.mesh_shape["tp"] > 1 else 0)
        kernels = of_layer * self.resolved.cfg.num_layers + KERNELS_BESIDE
        return kernels * self.hardware.launch_seconds

    def _seconds(self, done: float, read: float, more: float | None = None) -> float:
        """done: FLOPs on all devices together; read: bytes of one device; more: seconds beside."""
        devices = self.resolved.mesh_shape["fsdp"] * self.resolved.mesh_shape["tp"]
        computing = done / devices / (SHARE_OF_PEAK * self.hardware.peak_flops)
        reading = read / (SHARE_OF_BANDWIDTH * self.hardware.memory_bandwidth)
        return max(computing, reading) + (self._launches() if more is None else more)


# ---- by the kernels of compiled programs


@dataclass(frozen=True)
class CompiledCosts:
    """Seconds by the kernels of programs that were compiled for the hardware, each at the peak or
    the bandwidth and its launch (planning.roofline); what was not compiled is an estimate.

    Example: CompiledCosts(HardwareCosts(resolved, hardware), plan.programs).
    """

    estimate: HardwareCosts
    programs: dict[str, Compiled]

    @property
    def source(self) -> str:
        names = ", ".join(name for name in self.programs if self._has(name))
        return (
            f"by the kernels of compiled programs ({names}) on {self.estimate.hardware.name}, each "
            "at its roofline; the rest an estimate by FLOPs and bytes"
        )

    def begin(self, slots: int, columns: int, requests: int) -> float:
        return self.estimate.begin(slots, columns, requests)

    def prefill(self, prompts: int, width: int) -> float:
        estimated = self.estimate.prefill(prompts, width)
        if not self._has("prefill"):
            return estimated
        # What was compiled reads a block of the widest prompts.
        block, widest, _ = self.estimate.resolved.sampling_memory.prompt_cache
        return self._ratio("prefill", self.estimate.prefill(block, widest)) * estimated

    def refill(self, slots: int, columns: int) -> float:
        return self.estimate.refill(slots, columns)

    def resize(self, slots: int, columns: int) -> float:
        return self.estimate.resize(slots, columns)

    def decode(self, slots: int, columns: int, steps: int, held: float) -> float:
        estimated = self.estimate.decode(slots, columns, steps, held)
        if not self._has("decode"):
            return estimated
        # What was compiled is a chunk of a step's slots, with all columns.
        resolved = self.estimate.resolved
        full = self.estimate.decode(resolved.slots, sum(resolved.lengths), steps, held)
        return self._ratio("decode", full) * estimated + CALL_SECONDS

    def scoring(self, name: str, batch: Batch, work: RowWork) -> float:
        if not self._has(name):
            return self.estimate.scoring(name, batch, work)
        return self._turns(work) * self._seconds(name)

    def update(self, batch: Batch, work: RowWork) -> float:
        if not self._has("update"):
            return self.estimate.update(batch, work)
        return self._turns(work) * self._seconds("update")

    def rest(self, batch: Batch, work: RowWork) -> float:
        return self.estimate.rest(batch, work)

    def _has(self, name: str) -> bool:
        return name in self.programs and bool(self.programs[name].kernels)

    def _seconds(self, name: str) -> float:
        program = self.programs[name]
        hardware = self.estimate.hardware
        seconds = predicted_seconds(list(program.kernels), hardware)
        # The kernels send everything within a node; what goes to another node takes longer.
        sent = speed.sent_by_axis(program)
        _, far = speed.links(sent, self.estimate.resolved.mesh_shape, hardware)
        return seconds + far * (1 / hardware.node_bandwidth - 1 / hardware.link_bandwidth)

    def _ratio(self, name: str, estimated: float) -> float:
        return self._seconds(name) / estimated

    def _turns(self, work: RowWork) -> int:
        """How often the loop over micro-batches turns that the text shows as one turn: that of
        packed rows, as the data decides."""
        return 1 if self.estimate.resolved.rows.packing == "none" else work.parts
