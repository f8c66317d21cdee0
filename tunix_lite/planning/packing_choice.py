"""training.packing=auto: a sequence a row, several side by side, or with the group's prompt once,
whichever computes least for the lengths that are expected.

Packing changes no answer, rounding apart. What it saves is padding, and the copies of a prompt that
its completions share; what it costs is attention over longer rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tunix_lite.config import RunConfig, reduction_of
from tunix_lite.errors import ConfigError
from tunix_lite.learner import packing
from tunix_lite.learner.rows import PACKING
from tunix_lite.planning.flops import forward_flops
from tunix_lite.planning.lengths import Lengths
from tunix_lite.resolved.run import ResolvedRun
from tunix_lite.types import Batch

AUTO = "auto"
# A packed run computes at least so much less: packing rows takes the host some time, too.
LEAST_GAIN = 0.1
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


def with_packing(
    run: RunConfig, resolve: Callable[[RunConfig], ResolvedRun], lengths: Lengths | None = None
) -> ResolvedRun:
    """The resolved run; where packing is auto, with the packing that computes least.

    resolve: resolve_run of a run on this mesh. lengths: that are expected; None: as plans assume
    them, so that a run that resumes chooses the same. Raises ConfigError as resolve does.
    """
    if run.training.packing != AUTO:
        return resolve(run)
    plain = resolve(packed_as(run, "none")) if _can_be_plain(run) else None
    found = {} if plain is None else {"none": plain}
    why_not = ""
    for name in PACKING:
        if name == "none" or not _can_be_packed(run):
            continue
        try:
            trial = resolve(packed_as(run, name))
        except ConfigError as error:
            why_not = why_not or str(error)
            continue
        # The kernel of the device may not take these rows.
        if plain is None or trial.attention == plain.attention:
            found[name] = trial
    if not found:
        raise ConfigError(why_not)

    lengths = Lengths() if lengths is None else lengths
    flops = {name: computed_flops(trial, lengths) for name, trial in found.items()}
    best = min(flops, key=flops.get)
    most = flops.get("none", flops[best])
    if "none" in found and flops[best] > (1 - LEAST_GAIN) * most:
        best = "none"
    return replace(found[best], packing_reason=_reason(best, flops, lengths))


def packed_as(run: RunConfig, packing: str) -> RunConfig:
    """The run with this packing."""
    return replace(run, training=replace(run.training, packing=packing))


def _can_be_plain(run: RunConfig) -> bool:
    return run.training.micro_batch_tokens is None


def _can_be_packed(run: RunConfig) -> bool:
    """Whether several sequences may stand in a row: the loss says that it is a sum over tokens, no
    dropout belongs to one sequence, and rows are not counted in sequences."""
    training = run.training
    counts_sequences = training.micro_batch_size or training.gradient_accumulation_steps
    return not counts_sequences and bool(reduction_of(run.algorithm)) and not run.model.lora.dropout


def _reason(best: str, flops: dict[str, float], lengths: Lengths) -> str:
    """Why this packing was chosen, with the gain that is expected."""
    base = "none" if "none" in flops else max(flops, key=flops.get)
    others = [f"{name} {value / flops[base]:.0%}" for name, value in flops.items() if name != base]
    if not others:
        return f"auto: {best}, as these settings allow no other"
    gain = (
        f"; {LEAST_GAIN:.0%} must be saved"
        if best == "none" and min(flops, key=flops.get) != best
        else ""
    )
    return f"auto: {best}; FLOPs against {base}: {', '.join(others)}{gain} ({_in_short(lengths)})"


def _in_short(lengths: Lengths) -> str:
    if lengths.completions:
        return f"lengths {lengths}"
    prompt = f"prompts {lengths.prompt_share:.0%}"
    completion = f"completions {lengths.completion_share:.0%}"
    return f"assumed lengths: {prompt}, {completion} of the longest on average"


def computed_flops(resolved: ResolvedRun, lengths: Lengths) -> float:
    """FLOPs of one forward pass over the batch of an update in its rows, padding included."""
    prompts = resolved.batch.prompts
    generations = resolved.run.algorithm.num_generations
    batch = batch_of(resolved, *lengths.draw(prompts, generations, resolved.lengths))
    work = row_work(resolved, batch)
    rows = work.parts * work.rows
    cfg = resolved.cfg
    attention = 4.0 * cfg.num_layers * cfg.num_heads * cfg.head_dim * rows * _pairs(resolved, work)
    return forward_flops(cfg, rows * work.width, rows * work.scored, attention)


def _pairs(resolved: ResolvedRun, work: RowWork) -> int:
    """Pairs of a query and a key whose scores a row computes: all of them, or where lanes share a
    prefix, those within the prefix and of each lane with the prefix and itself."""
    shape = resolved.rows.shape
    if shape is None or not shape.prefix_columns:
        return work.width**2
    keys_of_lane = shape.prefix_columns + shape.lane_columns
    return shape.prefix_columns**2 + shape.num_lanes * shape.lane_columns * keys_of_lane


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
    values = {name: zeros for name in resolved.run.algorithm.needs.batch_fields}
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
