"""Predicts how long a step takes, from its compiled programs by the model of `planning.kernels`,
with lengths as they will be and padding counted. The host and refills of slots take no time."""

import heapq
import math
from dataclasses import dataclass

import numpy as np

from tunix_lite.planning.hardware import Hardware
from tunix_lite.planning.kernels import predicted_seconds
from tunix_lite.planning.lengths import Lengths
from tunix_lite.planning.packing_choice import batch_of, row_work
from tunix_lite.planning.programs import Compiled
from tunix_lite.rollout.engine import padded_width, prompt_widths
from tunix_lite.settings.resolved_run import ResolvedRun


@dataclass(frozen=True)
class Forecast:
    """A predicted step, and the run of such steps.
    Example: forecast(resolved, plan.programs, Lengths(), hardware).step_seconds."""

    # seconds of one step by phase: prefill, decode, scorers by name, update
    seconds: dict[str, float]
    # of one update: prompts and completions, no padding
    tokens: int
    decode_steps: int
    # micro-batches that run
    parts: int
    num_steps: int
    source: str
    lengths: str

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """As a run's perf/tokens_per_second counts them."""
        return self.tokens / self.step_seconds

    @property
    def hours(self) -> float:
        """Of the whole run, without starting, evaluating and saving."""
        return self.num_steps * self.step_seconds / 3600


def forecast(
    resolved: ResolvedRun,
    programs: dict[str, Compiled],
    lengths: Lengths,
    hardware: Hardware,
) -> Forecast:
    """The step that these lengths make of the compiled programs of a run."""
    algorithm = resolved.run.algorithm
    mini_batches = algorithm.needs.mini_batches
    prompts, completions = lengths.draw(
        resolved.batch.prompts * mini_batches, algorithm.num_generations, resolved.lengths
    )
    # Of one call of each. The kernels send everything within a node; what goes to another node
    # takes longer. Only neighbours over tp are on one node.
    once = {}
    node = hardware.host_devices
    is_far = hardware.platform != "tpu" and math.prod(resolved.mesh_shape.values()) > node
    longer = 1 / hardware.node_bandwidth - 1 / hardware.link_bandwidth
    for name, program in programs.items():
        once[name] = predicted_seconds(list(program.kernels), hardware)
        for group in program.collectives:
            if is_far and (group.axis != "tp" or resolved.tp > node):
                once[name] += group.sent_bytes * longer
    # A rollout serves several updates; what it takes is divided among them.
    share = 1 / algorithm.updates_per_rollout
    seconds: dict[str, float] = {}
    steps = 0
    if algorithm.needs.is_sampled:
        # What was compiled reads a block of the widest prompts, and decodes a chunk of all columns.
        block, widest, _ = resolved.sampling_memory.prompt_cache
        widths = prompt_widths(resolved.lengths[0])
        read = sum(padded_width(int(length), widths) for length in prompts)
        chunk = resolved.sampling_memory.chunk
        # A rollout for several updates has slots for all of them; a step reads the weights once.
        slots = resolved.run.rollout.slots(completions.size, resolved.fsdp)
        steps = decode_steps(completions, slots, chunk)
        seconds["prefill"] = share * once["prefill"] * read / (block * widest)
        seconds["decode"] = share * once["decode"] * steps / chunk

    # The loop over packed micro-batches turns as the data decides: its text shows one turn.
    batch = batch_of(
        resolved, prompts[: resolved.batch.prompts], completions[: resolved.batch.prompts]
    )
    work = row_work(resolved, batch)
    turns = 1 if resolved.rows.packing == "none" else work.parts
    scoring = resolved.run.scoring_models
    for name in (["scoring"] if resolved.scores else []) + list(resolved.frozen_models):
        calls = turns * mini_batches
        if name in scoring and scoring[name].reward is not None:
            # its rows are all taken as the longest
            calls = -(-completions.size // resolved.as_scorer(name).batch.sequences)
        seconds[name] = once[name] * calls * share
    seconds["update"] = once["update"] * turns
    return Forecast(
        seconds=seconds,
        tokens=work.tokens,
        decode_steps=steps,
        parts=work.parts,
        num_steps=resolved.run.training.max_steps,
        source=f"by the kernels of the compiled programs on {hardware.name}, each at its roofline",
        lengths=str(lengths),
    )


def decode_steps(completions: np.ndarray, slots: int, chunk: int) -> int:
    """Tokens that the slot decodes which ends last: each takes the next completion when a chunk
    has ended in which its own did."""
    free_at = [0] * slots
    for length in completions.reshape(-1).tolist():
        begun = heapq.heappop(free_at)
        heapq.heappush(free_at, begun + chunk * math.ceil(length / chunk))
    return max(free_at)
