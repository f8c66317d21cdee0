"""Computes the sequences of an update and their rows by arithmetic on the settings.

    prompts x num_generations = micro_batch_size x fsdp x accumulation

What is not given of it is derived. Packed sequences fill rows instead, and a micro-batch is the
rows that its tokens make. Where a group shares its prompt, a row is the prompt and k lanes of new
tokens, with the k whose rows, empty ones counted, make the fewest tokens for a shard."""

import math
from dataclasses import dataclass, replace

from tunix_lite.basics.errors import ConfigError
from tunix_lite.learner.packing import RowShape, rows_needed_at_most, shared_rows_at_most
from tunix_lite.learner.rows import RowLayout
from tunix_lite.settings.config import RunConfig, TrainingConfig

# of packed rows in a micro-batch of a shard, where nobody says
TOKENS_AT_ONCE = 2048
# that a row of shared prompts may have in any case: then most of what can be shared is
_LANES = 4
# of a row's width that room for further prompts may add to it
_MORE_PROMPTS_SHARE = 1 / 32


@dataclass(frozen=True)
class BatchPlan:
    """The numbers that make up the sequences of one update; their identity holds.
    Example: `plan_batch(run, fsdp=4).sequences`. Where sequences are packed, micro-batches have
    tokens, not sequences, and the last two numbers are 0."""

    prompts: int
    num_generations: int
    fsdp: int
    micro_batch_size: int
    num_micro_batches: int

    @property
    def sequences(self) -> int:
        return self.prompts * self.num_generations

    def __str__(self) -> str:
        sequences = (
            f"{self.prompts} prompts x {self.num_generations} generations = {self.sequences} "
            "sequences"
        )
        if not self.num_micro_batches:
            return sequences
        return (
            f"{sequences} = "
            f"{self.micro_batch_size} micro_batch_size x {self.fsdp} fsdp x "
            f"{self.num_micro_batches} accumulation"
        )


def plan_batch(run: RunConfig, fsdp: int) -> BatchPlan:
    """Derives the numbers that are not given: prompts x generations = micro_batch_size x fsdp x
    accumulation. packing=auto counts as none here: packing_choice.with_packing asks for each
    packing by name. Raises ConfigError, with the arithmetic, if no whole numbers satisfy it."""
    settings = run.training
    G = run.algorithm.num_generations
    prompts = settings.prompts_per_step
    micro = settings.micro_batch_size
    accumulation = settings.gradient_accumulation_steps

    # Enough is given to derive the rest from.
    if prompts is None and settings.is_packed:
        raise ConfigError(
            f"training: packing={settings.packing} needs prompts_per_step: "
            "training.prompts_per_step=16"
        )
    if settings.is_packed:
        return BatchPlan(prompts, G, fsdp, 0, 0)
    if prompts is None and micro is None:
        raise ConfigError(
            "training: give prompts_per_step or micro_batch_size; the rest is derived: "
            "training.prompts_per_step=16"
        )

    if prompts is None:
        accumulation = accumulation or 1
        prompts = micro * fsdp * accumulation // G
    per_shard = prompts * G // fsdp
    micro = micro or per_shard // (accumulation or 1)
    accumulation = accumulation or per_shard // max(micro, 1)
    batch = BatchPlan(prompts, G, fsdp, micro, accumulation)

    # The numbers fit together.
    made = micro * fsdp * accumulation
    if settings.prompts_per_step is None and made % G:
        step = G // math.gcd(G, fsdp * accumulation)
        raise ConfigError(
            f"training: micro_batch_size={micro} x fsdp={fsdp} x "
            f"gradient_accumulation_steps={accumulation} = "
            f"{made} sequences, not a multiple of algorithm.num_generations={G}; "
            f"training.micro_batch_size={_nearest_multiple(micro, step)} would do"
        )
    total = (
        f"prompts_per_step={prompts} x num_generations={G} = {batch.sequences} sequences per "
        "update"
    )
    # a shard with fewer sequences would wait for the others
    if batch.sequences % fsdp:
        least = fsdp // math.gcd(G, fsdp)
        raise ConfigError(
            f"training: {total} do not divide over fsdp={fsdp}; use a multiple of {least} prompts: "
            f"training.prompts_per_step={_nearest_multiple(prompts, least)}"
        )
    if made != batch.sequences:
        # The override that leaves one number to be derived from the others, the one that changes
        # least first; of the micro-batch alone if none of them can be.
        size = settings.micro_batch_size
        given = settings.gradient_accumulation_steps
        if size and per_shard % size == 0:
            derived = f"training.gradient_accumulation_steps=null makes it {per_shard // size}"
        elif given and per_shard % given == 0:
            derived = f"training.micro_batch_size=null makes it {per_shard // given}"
        else:
            divisor = _largest_divisor(per_shard, size or per_shard)
            rest = " training.gradient_accumulation_steps=null" if given else ""
            derived = f"training.micro_batch_size={divisor}{rest} does"
        raise ConfigError(
            f"training: {total}, but micro_batch_size={size or 'derived'} x fsdp={fsdp} x "
            f"gradient_accumulation_steps={given or 'derived'} cannot make {batch.sequences}: each "
            f"of the {fsdp} shards has {per_shard} sequences. Set one of the three to null to have "
            f"it derived: {derived}"
        )
    if accumulation % settings.sync_gradients_every:
        raise ConfigError(
            f"training: sync_gradients_every={settings.sync_gradients_every} does not divide the "
            f"{accumulation} micro-batches of an update ({total}); training.sync_gradients_every="
            f"{_largest_divisor(accumulation, settings.sync_gradients_every)} does"
        )
    return batch


def _nearest_multiple(wanted: int, step: int) -> int:
    """The multiple of `step` nearest to `wanted`, and at least one."""
    return max(1, round(wanted / step)) * step


def _largest_divisor(number: int, most: int) -> int:
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)


def plan_rows(
    run: RunConfig,
    batch: BatchPlan,
    narrows: bool = False,
    tokens_at_once: int = TOKENS_AT_ONCE,
) -> RowLayout:
    """Plans the rows of a batch's sequences. narrows: whether a batch with short prompts is worth
    a program of its own (resolved_run.narrows). tokens_at_once: of packed rows in a micro-batch of
    a shard, if no setting says. Raises ConfigError if the longest does not fit into a
    micro-batch."""
    settings = run.training
    at_once = settings.micro_batch_tokens or tokens_at_once
    if not settings.is_packed:
        scored = run.generation.max_new_tokens
        return RowLayout("none", batch.num_micro_batches, scored, num_rows=batch.sequences)
    longest = sum(run.generation.lengths)
    if (settings.micro_batch_tokens or longest) < longest:
        raise ConfigError(
            f"training.micro_batch_tokens={settings.micro_batch_tokens} is less than the longest "
            f"sequence: max_prompt_length={run.generation.max_prompt_length} + "
            f"max_new_tokens={run.generation.max_new_tokens} = {longest}; "
            f"training.micro_batch_tokens={longest} is the least that does"
        )
    if settings.packing == "sequences":
        shape = RowShape(longest + longest % 2)
        most = rows_needed_at_most(batch.sequences, longest, shape.width)
    else:
        # The row of shared prompts that makes the fewest tokens for a shard; of equals, the
        # one that shares more. Lengths are even, which cuDNN wants.
        prompt, new = (length + length % 2 for length in run.generation.lengths)
        shapes = [
            RowShape(new, lanes, prompt) for lanes in range(1, batch.num_generations + 1)
        ]
        tokens_given = settings.micro_batch_tokens
        most = tokens_given or max(TOKENS_AT_ONCE, prompt + _LANES * new)

        def tokens(shape: RowShape) -> int:
            rows = shared_rows_at_most(batch.prompts, batch.num_generations, shape.num_lanes)
            return math.prod(_parts(settings, batch.fsdp, shape, rows, at_once)) * shape.width

        # rounded, it may be a token too wide
        fitting = [shape for shape in shapes if shape.width <= most] or shapes[:1]
        shape = min(fitting, key=lambda shape: (tokens(shape), -shape.num_lanes))

        # room for further prompts where they are short beside the lanes
        added = _MORE_PROMPTS_SHARE * shape.width
        if tokens_given:
            added = min(added, max(0, tokens_given - shape.width))
        more_prompts = min(int(added // prompt), batch.prompts - 1)
        shape = replace(shape, prefix_columns=prompt * (1 + more_prompts))
        most = shared_rows_at_most(batch.prompts, batch.num_generations, shape.num_lanes)
    parts, rows_per_micro_batch = _parts(settings, batch.fsdp, shape, most, at_once)
    # at last: what narrows compiles more programs, and changes no row
    shape = replace(shape, narrows=narrows)
    return RowLayout(settings.packing, parts, None, shape, rows_per_micro_batch)


def _parts(
    settings: TrainingConfig, fsdp: int, shape: RowShape, num_rows: int, tokens: int
) -> tuple[int, int]:
    """Returns the fewest micro-batches for so many rows, and the rows of a shard in each. tokens:
    of a shard in a micro-batch."""
    # one row at least, however wide it is
    at_once = max(1, tokens // shape.width)
    every = settings.sync_gradients_every
    parts = -(-num_rows // (at_once * fsdp * every)) * every
    return parts, -(-num_rows // (parts * fsdp))
