"""A rollout without a model: the scheduler that runs real rollouts decides on prefills, refills and
chunks, and a clock adds what each would take.

rollout.scheduler calls the programs of `rollout.programs.Programs`. Here they are functions on
small numpy arrays: they keep which slots run and how far, as the programs on the devices do, and
draw no token.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from tunix_lite.planning.lengths import prompts_of
from tunix_lite.planning.resolved import ResolvedRun
from tunix_lite.rollout.engine import make_requests, sampler_spec
from tunix_lite.rollout.programs import DecodedChunk, Programs, SamplerSpec
from tunix_lite.rollout.requests import StopCriteria
from tunix_lite.rollout.scheduler import (
    RolloutScheduler,
    padded_width,
    prompt_blocks,
    prompt_widths,
)

NO_END = 1


class RolloutCosts(Protocol):
    """Seconds that each program of a rollout takes.

    Example: a class with these five methods that returns 0.001 from each.
    """

    def begin(self, slots: int, columns: int, requests: int) -> float:
        """Of what a rollout does once: weights as the sampler takes them, empty slots and the queue
        of so many requests, and of what the host does for each of them."""
        ...

    def prefill(self, prompts: int, width: int) -> float:
        """Of reading so many prompts, padded to this width."""
        ...

    def refill(self, slots: int, columns: int) -> float:
        """Of giving free slots their prompts; columns: of the cache."""
        ...

    def resize(self, slots: int, columns: int) -> float:
        """Of a new cache with so many columns."""
        ...

    def decode(self, slots: int, columns: int, steps: int, held: float) -> float:
        """Of one chunk; held: tokens in the cache, of all slots together."""
        ...


@dataclass
class RolloutTrace:
    """What happened in a rollout, and the seconds that it took.

    Example: simulated(resolved, prompt_lengths, lengths, costs).decode_steps.
    """

    # Seconds by program.
    seconds: Counter
    decode_steps: int = 0
    prefill_tokens: int = 0
    slot_use: float = 0.0

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


class _HostArray(np.ndarray):
    """An array that is on the host already."""

    def copy_to_host_async(self) -> None:
        pass


def _host(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).view(_HostArray)


@dataclass
class _Slots:
    """As rollout.programs.Slots, without what only a model needs."""

    columns: int
    requests: np.ndarray
    lengths: np.ndarray
    num_drawn: np.ndarray
    running: np.ndarray
    num_taken: int = 0


class _Clock:
    """The programs of a rollout, which only count and take time."""

    def __init__(
        self,
        spec: SamplerSpec,
        costs: RolloutCosts,
        prompt_lengths_Q: np.ndarray,
        lengths_Q: np.ndarray,
    ):
        """prompt_lengths_Q, lengths_Q: of each request, in the order in which slots take them."""
        self.spec = spec
        self.costs = costs
        self.prompt_lengths_Q = prompt_lengths_Q
        self.lengths_Q = lengths_Q
        self.seconds: Counter = Counter()

    def programs(self) -> Programs:
        return Programs(
            spec=self.spec,
            make_prompt_cache=lambda rows: rows,
            make_slots=self.make_slots,
            resize=self.resize,
            make_queue=lambda key, *columns: None,
            prefill=self.prefill,
            refill=self.refill,
            decode=self.decode,
            decode_greedy=self.decode,
            compiles=Counter(),
        )

    def make_slots(self, num_slots: int, columns: int | None = None) -> _Slots:
        columns = self.spec.max_length if columns is None else columns
        self.seconds["refill"] += self.costs.begin(num_slots, columns, len(self.lengths_Q))
        zeros = np.zeros(num_slots, np.int64)
        return _Slots(columns, zeros - 1, zeros.copy(), zeros.copy(), np.zeros(num_slots, bool))

    def resize(self, slots: _Slots, columns: int) -> _Slots:
        self.seconds["refill"] += self.costs.resize(len(slots.requests), columns)
        slots.columns = columns
        return slots

    def prefill(self, prompt_cache: Any, params: Any, tokens: np.ndarray, *_: Any) -> Any:
        self.seconds["prefill"] += self.costs.prefill(*tokens.shape)
        return prompt_cache

    def refill(
        self, slots: _Slots, prompt_cache: Any, queue: Any, ready: int, stopped: np.ndarray
    ) -> _Slots:
        """As rollout.programs.refill."""
        self.seconds["refill"] += self.costs.refill(len(slots.requests), slots.columns)
        is_free = ~slots.running | (slots.requests == stopped)
        request = slots.num_taken + np.cumsum(is_free) - 1
        is_new = is_free & (request < ready)
        slots.requests = np.where(is_new, request, slots.requests)
        first = self.prompt_lengths_Q[np.minimum(request, len(self.lengths_Q) - 1)]
        slots.lengths = np.where(is_new, first, slots.lengths)
        slots.num_drawn = np.where(is_new, 0, slots.num_drawn)
        slots.running = is_new | ~is_free
        slots.num_taken += int(is_new.sum())
        return slots

    def decode(self, slots: _Slots, params: Any, temperature: Any) -> tuple[_Slots, DecodedChunk]:
        """As rollout.programs.decode: each slot goes on until its completion has its length."""
        chunk = self.spec.chunk
        num_slots = len(slots.requests)
        held = float(np.minimum(slots.lengths + chunk / 2, slots.columns).sum())
        self.seconds["decode"] += self.costs.decode(num_slots, slots.columns, chunk, held)

        left = self.lengths_Q[np.maximum(slots.requests, 0)] - slots.num_drawn
        new = np.where(slots.running, np.minimum(left, chunk), 0)
        is_drawn = np.arange(chunk)[:, None] < new
        slots.num_drawn = slots.num_drawn + new
        slots.lengths = slots.lengths + new
        slots.running = slots.running & (left > chunk)
        zeros = _host(np.zeros((chunk, num_slots), np.float32))
        return slots, DecodedChunk(
            tokens=_host(np.where(is_drawn, 0, -1).astype(np.int32)),
            logprobs=zeros,
            full_logprobs=zeros,
            requests=_host(slots.requests.astype(np.int32)),
            running=_host(slots.running),
            num_taken=_host(np.int32(slots.num_taken)),
        )


def spec_of(resolved: ResolvedRun) -> SamplerSpec:
    """Of the run's sampler, with some token as the end."""
    run = resolved.run
    spec, _ = sampler_spec(
        resolved.cfg,
        run.generation,
        (NO_END,),
        0,
        resolved.dtype,
        run.rollout,
        run.training.tp_reduce_dtype,
    )
    return spec


def simulated(
    resolved: ResolvedRun, prompt_lengths: np.ndarray, lengths: np.ndarray, costs: RolloutCosts
) -> RolloutTrace:
    """The rollout of prompts [P] with completions [P, G] of these lengths.

    It is the real scheduler that runs, with the prompts in the order that a rollout gives them.
    """
    spec = spec_of(resolved)
    num_prompts, generations = lengths.shape
    widths = prompt_widths(spec.generation.max_prompt_length)
    prompts = prompts_of(prompt_lengths)
    order = sorted(range(num_prompts), key=lambda p: -padded_width(len(prompts[p]), widths))
    limits = [spec.generation.max_new_tokens] * lengths.size
    requests = make_requests(order, range(num_prompts), limits, generations)
    slots = resolved.run.rollout.slots(len(requests), resolved.mesh_shape["fsdp"])

    in_order = [prompts[p] for p in order]
    fsdp = resolved.mesh_shape["fsdp"]
    blocks = prompt_blocks(spec, in_order, generations, slots, fsdp)

    clock = _Clock(
        spec,
        costs,
        np.repeat(prompt_lengths[order], generations),
        lengths[order].reshape(-1),
    )
    temperature = np.float32(spec.generation.temperature)
    scheduler = RolloutScheduler(
        clock.programs(), {}, temperature, requests, blocks, slots, jax.random.key(0)
    )
    criteria = StopCriteria({})
    scheduler.fill_slots()
    while (decoded := scheduler.next_chunk()) is not None:
        scheduler.absorb(decoded, criteria, prompts)
    found = scheduler.metrics()
    return RolloutTrace(
        clock.seconds,
        found["rollout/decode_steps"],
        found["rollout/prefill_tokens"],
        found["rollout/slot_use"],
    )
