"""What the programs of a run take on this machine: each is compiled and run a few times, with
weights of zeros and a batch of made-up tokens, and timed.

The forecast of a step puts them together: as many prefills, chunks and micro-batches as the
scheduler and the packing make. Of a machine without a row in planning.hardware, its peak and its
bandwidth are measured, too.
"""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.algorithms.algorithm import stream_names
from tunix_lite.learner.scoring import scoring_program
from tunix_lite.planning import estimate, flops
from tunix_lite.planning.forecast import HOST_SECONDS, ROLLOUT_HOST_SECONDS, RowWork
from tunix_lite.planning.hardware import GiB, Hardware
from tunix_lite.planning.programs import Shapes, abstract, policy_of, train_step_of
from tunix_lite.planning.resolved import ResolvedRun
from tunix_lite.planning.simulated_rollout import spec_of
from tunix_lite.rollout.engine import make_prepare
from tunix_lite.rollout.programs import make_programs
from tunix_lite.rollout.scheduler import MIN_QUEUE, next_power_of_two
from tunix_lite.types import Batch, Params

# A program is run until so many seconds are over, at least and at most so often.
SECONDS = 1.0
FEWEST_RUNS = 5
MOST_RUNS = 15
# What is timed must be small: FLOPs of one step by formula, and bytes of what stays on a device.
MOST_FLOPS = 2e12
MOST_BYTES = 2**31
# Elements of the arrays by which bandwidth is measured: more than caches hold.
LARGE = 1 << 25


@dataclass
class TimedCosts:
    """Seconds of the programs of a run on the attached devices, each timed when it is first needed.

    Its mesh is the current one while it is used (planning.programs.mesh_of_run).

    Example: with mesh_of_run(resolved, jax.devices()): forecast(resolved, lengths,
    TimedCosts(resolved)).
    """

    resolved: ResolvedRun
    source: str = "each program timed on this machine"
    # by program and sizes
    known: dict[tuple, float] = field(default_factory=dict)

    @functools.cached_property
    def shapes(self) -> Shapes:
        return abstract(self.resolved)

    @functools.cached_property
    def prepare(self) -> Callable[[Params], Params]:
        """What makes the weights those that the sampler takes."""
        gather = self.resolved.sampling_weights != "sharded"
        return make_prepare(self.resolved.cfg, self.resolved.dtype, gather)

    @functools.cached_property
    def sampling(self) -> Any:
        """(programs of the rollout, weights as they take them)."""
        acting = zeros_of(self.shapes.acting(self.resolved))
        return make_programs(spec_of(self.resolved)), self.prepare(acting)

    def once(self, name: tuple, measure: Callable[[], float]) -> float:
        if name not in self.known:
            self.known[name] = measure()
        return self.known[name]

    def begin(self, slots: int, columns: int, requests: int) -> float:
        def measure() -> float:
            programs, _ = self.sampling
            _, _, rows = self.resolved.sampling_memory.prompt_cache
            acting = zeros_of(self.shapes.acting(self.resolved))

            def once(_: Any) -> Any:
                empty = programs.make_slots(slots, columns), programs.make_prompt_cache(rows)
                return *empty, self.queue(requests), self.prepare(acting)

            return seconds_of(once, None) + requests * ROLLOUT_HOST_SECONDS

        return self.once(("begin", slots, columns, requests), measure)

    def queue(self, requests: int) -> Any:
        """A queue of so many requests, as the scheduler pads it."""
        programs, _ = self.sampling
        zeros = np.zeros(next_power_of_two(requests, least=MIN_QUEUE), np.int32)
        key = np.asarray(jax.random.key_data(jax.random.key(0)))
        return programs.make_queue(key, zeros, zeros, zeros, zeros + 1)

    def prefill(self, prompts: int, width: int) -> float:
        def measure() -> float:
            programs, params = self.sampling
            tokens = np.zeros((prompts, width), np.int32)
            lengths = np.full(prompts, width, np.int32)
            cache = programs.make_prompt_cache(prompts)
            return seconds_of(
                lambda state: programs.prefill(state, params, tokens, lengths, np.int32(0)), cache
            )

        return self.once(("prefill", prompts, width), measure)

    def refill(self, slots: int, columns: int) -> float:
        def measure() -> float:
            programs, _ = self.sampling
            _, _, rows = self.resolved.sampling_memory.prompt_cache
            cache = programs.make_prompt_cache(rows)
            queue = self.queue(self.resolved.batch.sequences)
            stopped = np.full(slots, -1, np.int32)
            return seconds_of(
                lambda state: programs.refill(state, cache, queue, np.int32(0), stopped),
                programs.make_slots(slots, columns),
            )

        return self.once(("refill", slots, columns), measure)

    def resize(self, slots: int, columns: int) -> float:
        return self.refill(slots, columns)

    def decode(self, slots: int, columns: int, steps: int, held: float) -> float:
        def measure() -> float:
            programs, params = self.sampling
            temperature = np.float32(self.resolved.run.generation.temperature)
            decode = programs.decode if temperature > 0 else programs.decode_greedy
            return seconds_of(
                lambda state: decode(state, params, temperature)[0],
                programs.make_slots(slots, columns),
            )

        return self.once(("decode", slots, columns, steps), measure)

    def scoring(self, name: str, batch: Batch, work: RowWork) -> float:
        resolved = self.resolved
        under = self.shapes.reference
        if name in resolved.frozen_models:
            under = self.shapes.frozen_models[name]
            resolved = resolved.as_scorer(name)
        elif under is None:
            under = self.shapes.acting(resolved)

        def measure() -> float:
            read = Batch(batch.tokens, batch.token_mask, batch.loss_weight)
            rows, layout = resolved.rows.lay_out(read)
            score = scoring_program(policy_of(resolved).scores, resolved.rows)
            params = zeros_of(under)
            return seconds_of(lambda _: layout.back(score(params, rows)), None)

        return self.once(("scoring", name, work), measure)

    def update(self, batch: Batch, work: RowWork) -> float:
        def measure() -> float:
            step = train_step_of(self.resolved)
            rows, _ = self.resolved.rows.lay_out(batch)
            frozen = None if self.shapes.frozen is None else zeros_of(self.shapes.frozen)
            return seconds_of(
                lambda state: step(state, frozen, rows)[0], zeros_of(self.shapes.state)
            )

        return self.once(("update", work), measure)

    def rest(self, batch: Batch, work: RowWork) -> float:
        def measure() -> float:
            laying_out = seconds_of(lambda _: self.resolved.rows.lay_out(batch)[0], None)
            return laying_out + len(batch.tokens) * HOST_SECONDS

        return self.once(("rest", work), measure)


def why_not_timed(resolved: ResolvedRun) -> str:
    """Why the programs of this run are not timed; "": they are."""
    if resolved.teacher is not None or stream_names(resolved.run.algorithm):
        return "its batches hold values of the algorithm's own"
    prompt, new = resolved.lengths
    sequences = resolved.batch.sequences
    attention = flops.attention_flops(resolved.cfg, [prompt + new] * sequences)
    tokens = sequences * (prompt + new)
    done = 4 * flops.forward_flops(resolved.cfg, tokens, sequences * new, attention)
    if done > MOST_FLOPS:
        return f"a step has {done / 1e12:,.0f} TFLOP"
    stays = sum(estimate.resident(resolved).values())
    if stays > MOST_BYTES:
        return f"{stays / GiB:,.0f} GiB stay on a device"
    return ""


def zeros_of(shapes: Any) -> Any:
    """Arrays of zeros with these shapes, placed as they say."""
    return jax.tree.map(lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding), shapes)


def seconds_of(program: Callable[[Any], Any], state: Any) -> float:
    """Median seconds of program(state), which may donate its state and returns the next one. The
    first call, which compiles, does not count."""
    state = jax.block_until_ready(program(state))
    seconds = []
    while len(seconds) < FEWEST_RUNS or (sum(seconds) < SECONDS and len(seconds) < MOST_RUNS):
        began = time.perf_counter()
        state = jax.block_until_ready(program(state))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


# ---- a machine that is not in the table


@dataclass(frozen=True)
class MachineSpeed:
    """What this machine was measured to do.

    Example: machine_speed(((1024, 256, 1024),)).peak_flops.
    """

    # FLOPs a second of the fastest of the products, float32
    peak_flops: float
    # of each product: (m, k, n) and FLOPs a second
    products: tuple[tuple[tuple[int, int, int], float], ...]
    # bytes read and written a second by a pass over large arrays
    memory_bandwidth: float
    # seconds to call a program that does next to nothing
    call_seconds: float

    def __str__(self) -> str:
        shown = ", ".join(f"{m}x{k}x{n} {rate / 1e9:,.0f}" for (m, k, n), rate in self.products)
        return (
            f"measured: products {shown} GFLOP/s; {self.memory_bandwidth / 1e9:,.1f} GB/s; "
            f"{self.call_seconds * 1e6:,.0f} us a call"
        )

    def as_hardware(self, platform: str) -> Hardware:
        """As a row of planning.hardware. Links are memory here: all devices share it."""
        bandwidth = self.memory_bandwidth
        return Hardware(
            "this machine", platform, 0, self.peak_flops, bandwidth, bandwidth, bandwidth, 1024,
            (), None,
        )  # fmt: skip


@functools.cache
def machine_speed(shapes: tuple[tuple[int, int, int], ...]) -> MachineSpeed:
    """Measures products of these shapes (m, k, n), bandwidth and the cost of a call, in a second or
    two, once a process."""
    product = jax.jit(jnp.matmul)

    def rate_of(m: int, k: int, n: int) -> float:
        x = jnp.ones((m, k), jnp.float32)
        y = jnp.ones((k, n), jnp.float32)
        return 2.0 * m * k * n / seconds_of(lambda _: product(x, y), None)

    rates = tuple((shape, rate_of(*shape)) for shape in shapes)
    add = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    passed = 2 * 4 * LARGE / seconds_of(add, jnp.zeros(LARGE, jnp.float32))
    call = seconds_of(add, jnp.float32(0))
    return MachineSpeed(max(rate for _, rate in rates), rates, passed, call)


def shapes_that_matter(resolved: ResolvedRun) -> tuple[tuple[int, int, int], ...]:
    """(m, k, n) of the products of a micro-batch in the feed-forward, and of one decoded token."""
    cfg = resolved.cfg
    width = resolved.rows.width or sum(resolved.lengths)
    rows = resolved.rows.rows_per_part or resolved.batch.micro_batch_size
    return (
        (2048, 2048, 2048),
        (min(rows * width, 4096), cfg.embed_dim, cfg.mlp_dim),
        (resolved.slots, cfg.embed_dim, cfg.mlp_dim),
    )
