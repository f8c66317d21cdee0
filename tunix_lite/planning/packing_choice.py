"""training.packing=auto: a sequence a row, several side by side, or with the group's prompt once,
whichever computes least for the lengths that are expected. Packing saves padding and copies of
prompts, costs attention over longer rows, and changes no answer, rounding apart."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tunix_lite.basics.errors import ConfigError
from tunix_lite.basics.types import Batch
from tunix_lite.learner import packing
from tunix_lite.models import decoder
from tunix_lite.models.vocabulary import head_columns
from tunix_lite.planning.flops import forward_flops, recurrence_flops
from tunix_lite.planning.lengths import Lengths
from tunix_lite.settings.config import RunConfig, packings_of, reduction_of
from tunix_lite.settings.resolved_run import ResolvedRun

AUTO = "auto"
# A packed run computes at least so much less: packing rows takes the host some time, too.
_LEAST_GAIN = 0.1
# The tokens of the prompts, by which packing knows which completions share one.
_PROMPT_TOKENS = 1_000


@dataclass(frozen=True)
class _RowWork:
    """What an update or a scorer computes: rows, padding included, on all devices together."""

    parts: int
    # rows of one micro-batch
    rows: int
    width: int
    # columns of a row for which scores over the vocabulary are computed, in the mean
    scored: float
    tokens: int


def with_packing(
    run: RunConfig, resolve: Callable[[RunConfig], ResolvedRun], lengths: Lengths | None = None
) -> ResolvedRun:
    """The resolved run; where packing is auto, with the packing that computes least. resolve:
    resolve_run of a run on this mesh. lengths: that are expected; None: as plans assume them, so
    that a run that resumes chooses the same. Raises ConfigError as resolve does."""
    training = run.training
    if training.packing != AUTO:
        return resolve(run)
    can_be_plain = training.micro_batch_tokens is None
    trials = {"none": resolve(run.packed_as("none"))} if can_be_plain else {}
    # Several sequences may stand in a row if the loss says that it is a sum over tokens, no dropout
    # belongs to one sequence, rows are not counted in sequences, and the task does not fill them.
    counts_sequences = training.micro_batch_size or training.gradient_accumulation_steps
    is_sum = bool(reduction_of(run.algorithm))
    why_not = ""
    for name in packings_of(run.algorithm.needs):
        if counts_sequences or not is_sum or run.model.lora.dropout or run.task.packs_rows:
            break
        try:
            trial = resolve(run.packed_as(name))
        except ConfigError as error:
            why_not = why_not or str(error)
            continue
        # The kernel of the device may not take these rows.
        if not can_be_plain or trial.attention == trials["none"].attention:
            trials[name] = trial
    if not trials:
        raise ConfigError(why_not)

    lengths = Lengths() if lengths is None else lengths
    flops = {name: _computed_flops(trial, lengths) for name, trial in trials.items()}
    best = min(flops, key=flops.get)
    if flops[best] > (1 - _LEAST_GAIN) * flops.get("none", math.inf):
        best = "none"

    # Why this packing was chosen, with the gain that is expected.
    base = "none" if "none" in flops else max(flops, key=flops.get)
    others = [
        f"{name} {value / flops[base]:.0%}" for name, value in flops.items() if name != base
    ]
    if not others:
        reason = f"auto: {best}, as these settings allow no other"
        return replace(trials[best], packing_reason=reason)
    is_less = best == "none" and min(flops, key=flops.get) != best
    gain = f"; {_LEAST_GAIN:.0%} must be saved" if is_less else ""
    reason = f"auto: {best}; FLOPs against {base}: {', '.join(others)}{gain} ({lengths})"
    return replace(trials[best], packing_reason=reason)


def _computed_flops(resolved: ResolvedRun, lengths: Lengths) -> float:
    """FLOPs of one forward pass over the batch of an update in its rows, padding included."""
    prompts = resolved.batch.prompts
    generations = resolved.run.algorithm.num_generations
    batch = batch_of(resolved, *lengths.draw(prompts, generations, resolved.lengths))
    work = row_work(resolved, batch)
    rows = work.parts * work.rows
    cfg = resolved.cfg
    # Pairs of a query and a key in a row: all of them, or where lanes share a prefix, those within
    # the prefix and of each lane with the prefix and itself.
    pairs = work.width**2
    shape = resolved.rows.shape
    if shape is not None and shape.prefix_columns:
        prefix = work.width - shape.num_lanes * shape.lane_columns
        keys_of_lane = prefix + shape.lane_columns
        pairs = prefix**2 + shape.num_lanes * shape.lane_columns * keys_of_lane
    widths = sum(cfg.kv_shape(kind)[1] for kind in cfg.kinds if kind in decoder.ATTENTION)
    attention = 4.0 * widths * cfg.num_heads * rows * pairs
    attention += recurrence_flops(cfg) * rows * work.width
    return forward_flops(cfg, rows * work.width, rows * work.scored, attention)


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
    tokens = rng.integers(0, min(vocab, _PROMPT_TOKENS), mask.shape).astype(np.int32)
    first = tokens[::generations, :most_prompt]
    tokens[:, :most_prompt] = np.repeat(first, generations, axis=0)
    tokens = np.where(mask, tokens, 0).astype(np.int32)

    weight = (is_new / is_new.sum()).astype(np.float32)
    zeros = np.zeros(mask.shape, np.float32)
    values = {name: zeros for name in resolved.needs.batch_fields}
    return Batch(tokens, mask, weight, **values)


def row_work(resolved: ResolvedRun, batch: Batch) -> _RowWork:
    """The rows of the batch, by the packing that a run uses."""
    rows = resolved.rows
    fsdp = resolved.fsdp
    tokens = int(batch.token_mask.sum())
    # only what is scored needs the head
    if rows.packing == "none":
        num_rows, width = batch.tokens.shape
        per_part = num_rows // rows.num_micro_batches
        return _RowWork(rows.num_micro_batches, per_part, width, rows.num_scored, tokens)
    # packed as the run would: a formula would not know what fits beside what
    sizes = (rows.shape, rows.rows_per_micro_batch, rows.num_micro_batches, fsdp)
    packed = packing.packed(batch, *sizes)
    parts = int(packed.num_micro_batches)
    # of each micro-batch the head computes the columns that its rows need, and a divergence all
    head_size = resolved.cfg.vocab_size * resolved.cfg.embed_dim
    sizes = np.asarray(head_columns(packed.row_shape.num_scored, head_size))
    if resolved.needs.comparison is not None:
        sizes = sizes[-1:]
    scored = sizes[np.searchsorted(sizes, packed.most_scored[:parts])].mean()
    width = packed.row_shape.width
    return _RowWork(parts, rows.rows_per_micro_batch * fsdp, width, scored, tokens)
