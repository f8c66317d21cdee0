"""`tunix-lite replay RUN step=137`: a step of a run once more, beside what the run logged of it.

`tunix-lite replay RUN skipped=12` says why an update was not finite, sequence by sequence.
"""

import shlex
import sys
import zipfile
import zlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.algorithms.algorithm import Algorithm
from tunix_lite.checkpoint import Checkpoints
from tunix_lite.commands import program
from tunix_lite.config import RunConfig
from tunix_lite.errors import ConfigError, error_context
from tunix_lite.files.plain_text import escaped, visible
from tunix_lite.files.untrusted import read_object
from tunix_lite.inference.language_model import open_model, run_settings
from tunix_lite.learner.policy import sequence_scores
from tunix_lite.parallel.compiling import keep_programs
from tunix_lite.planning.packing_choice import AUTO
from tunix_lite.runs.batch_files import arrays_of_batch, batch_of_arrays
from tunix_lite.runs.fingerprint import packing_of
from tunix_lite.runs.replay import Replayed, replay_step
from tunix_lite.tracking.rundir import RunDir
from tunix_lite.types import Batch, RowBatch, TokenScores

# characters of a text
SHOWN = 80
OTHER_WEIGHTS = " (not those that saw them, which are not kept)"
# of a batch, unpacked: a small file can hold very many zeros
MOST_BYTES = 2**32
# what numpy and zipfile raise for a file that is no batch
UNREADABLE = (OSError, ValueError, TypeError, KeyError, EOFError, MemoryError, RuntimeError)
UNREADABLE += (zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class Replay:
    """Which step, or which update that was not made, and whose weights look at its batch.

    Example: `tunix-lite replay RUN step=137` is Replay(checkpoint="RUN", step=137).
    """

    # Folder of the run. `tunix-lite replay FOLDER` is the short form.
    checkpoint: str | None = None
    # Number of a skipped update to explain: 12 reads skipped/step_000012.npz. null repeats `step`.
    skipped: int | None = None
    # Step to repeat. With skipped=, the step of the checkpoint to use, where null takes the newest
    # before it.
    step: int | None = None
    # Sequences scored together with skipped=. It changes memory use, not results.
    batch_size: int = 8

    def __post_init__(self):
        if self.checkpoint is None or (self.skipped is None and self.step is None):
            folder = (
                "outputs/latest" if self.checkpoint is None else shlex.quote(self.checkpoint)
            )
            raise ValueError(
                "give the folder of a run and one of its steps: tunix-lite replay "
                f"{visible(folder)} step=12; or skipped=12 for an update that the run skipped"
            )
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} must be at least 1")


# Settings that change no number of a step, or that the folder holds.
NO_MATTER = ("model", "hydra.", "launch", "project_name", "resume", "runtime.", "tracking")
NO_MATTER += (
    "evaluation.",
    *(f"training.{name}" for name in ("save_", "keep_", "log_", "grace_")),
)


def main() -> None:
    program.run_command("replay", Replay, replay, positional="checkpoint")


def replay(run: RunConfig, settings: Replay) -> None:
    """Makes a step again, or looks at the batch of one that was skipped."""
    if settings.skipped is not None:
        _look_at_skipped(run, settings)
        return
    # The folder may be somebody else's, so no setting is taken from it: they are to be pasted.
    folder = Path(settings.checkpoint).expanduser()
    missing = program.missing_overrides(folder, sys.argv[1:], NO_MATTER)
    if missing and not run.resume.force:
        command = shlex.join(["tunix-lite", "replay", *sys.argv[1:], *missing])
        raise ConfigError(f"checkpoint: the run was started with more settings: {command}")
    keep_programs(run.runtime.program_cache)
    training = run.training
    if training.micro_batch_size == "auto":
        training = replace(training, micro_batch_size=None)
    file = RunDir(folder).fingerprint
    if training.packing == AUTO and file.is_file():
        with error_context("checkpoint"):
            training = replace(training, packing=packing_of(read_object(file), file))
    evaluation = replace(run.evaluation, num_examples=0, num_samples=0)
    run = replace(run, training=training, evaluation=evaluation)

    def say(text: str) -> None:
        print(visible(text), flush=True)

    with error_context(""):
        done = replay_step(run, folder, settings.step, say)
    for line in as_lines(done):
        say(line)


# ---- what is printed


def as_lines(done: Replayed) -> list[str]:
    """The step as a table: as it was logged, as it came out now, and how far apart they are; below
    it how the completions compare with the file of the step."""
    rows = [("metric", "logged", "replayed", "distance")]
    for name in sorted({*done.metrics, *done.logged}):
        numbers = [each.get(name) for each in (done.logged, done.metrics)]
        texts = ["" if number is None else f"{number:.9g}" for number in numbers]
        apart = 0.0 if None in numbers else abs(numbers[0] - numbers[1])
        rows.append(
            (name, *texts, "" if None in numbers else f"{apart:.2e}" if apart else "0")
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [f"step {done.step}"]
    for name, *texts in rows:
        cells = [text.rjust(width) for text, width in zip(texts, widths[1:])]
        lines.append("  ".join([name.ljust(widths[0]), *cells]).rstrip())
    if done.logged:
        same = sum(done.metrics.get(name) == value for name, value in done.logged.items())
        lines.append(f"{same} of {len(done.logged)} logged metrics are the same to the bit")
    else:
        lines.append("metrics.jsonl has no line of this step")
    if done.samples is None:
        return lines
    if done.logged_samples is None:
        count = len(done.samples)
        return [*lines, f"completions: {count}, and samples/ has no file of this step"]
    pairs = list(zip(done.samples, done.logged_samples))
    total = max(len(done.samples), len(done.logged_samples))
    for name in (
        "completion",
        "tokens",
        "logprobs",
        "reward",
        "correct",
        "extracted",
        "advantage",
    ):
        if any(name in theirs for _, theirs in pairs):
            same = sum(ours.get(name) == theirs.get(name) for ours, theirs in pairs)
            lines.append(f"samples/: {name} the same in {same} of {total} completions")
    return lines


# ---- an update that was skipped


def _look_at_skipped(run: RunConfig, settings: Replay) -> None:
    """Prints the loss, and every sequence of the batch in which a number is not finite."""
    folder = RunDir(Path(settings.checkpoint).expanduser())
    batch = read_batch(folder, settings)
    step = nearest(folder, settings.skipped) if settings.step is None else settings.step

    # the weights that saw the batch, if the run kept them
    seed = run_settings(folder.path, run.model.family)[1]
    model = open_model(run.model, folder.path, step, run.training.mixed_precision, seed)
    if not 0 <= batch.tokens.min() <= batch.tokens.max() < model.cfg.vocab_size:
        raise ConfigError(
            f"skipped={settings.skipped}: its tokens are not those of this model"
        )
    temperature = run.learning_temperature
    score = jax.jit(
        partial(sequence_scores, cfg=model.cfg, temperature=temperature, dtype=model.dtype)
    )
    last = len(batch.tokens) - 1
    parts = []
    with jax.set_mesh(model.mesh):
        for start in range(0, last + 1, settings.batch_size):
            # all parts have one size, so that one program is compiled
            rows = np.minimum(np.arange(start, start + settings.batch_size), last)
            scores = score(model.params, batch.tokens[rows], batch.token_mask[rows])
            parts.append(jax.device_get(scores))
    scores = TokenScores(*(np.concatenate(arrays)[: last + 1] for arrays in zip(*parts)))
    losses_B, wrong = sequence_losses(run.algorithm, batch, scores)

    finite_B = losses_B[np.isfinite(losses_B)]
    others = "" if saw(folder, settings.skipped, step) else OTHER_WEIGHTS
    count = f"step {settings.skipped}: {len(losses_B)} sequences"
    print(f"{count}, with the weights of step {step}{others}")
    of_finite = f"of the {len(finite_B)} sequences whose loss is finite {finite_B.sum():g}"
    print(f"loss {losses_B.sum():g}; {of_finite}")
    for b, names in wrong.items():
        places = [f"{name} at {times} of its tokens" for name, times in names.items()]
        text = model.tokenizer.decode(batch.tokens[b][batch.token_mask[b]].tolist())
        print(f"sequence {b}: not finite: {', '.join(places) or 'its loss'}")
        print(f"  {(text if len(text) <= SHOWN else '…' + text[-SHOWN:])!r}")
    if not wrong:
        print(
            "every input of the loss is finite: check its gradient, or try the weights of "
            "another step="
        )


def read_batch(folder: RunDir, settings: Replay) -> Batch:
    """The batch of the update that was skipped. Raises ConfigError."""
    file = folder.skipped(settings.skipped)
    if not file.is_file():
        names = ", ".join(sorted(f.name for f in file.parent.glob("step_*.npz"))) or "nothing"
        raise ConfigError(
            f"skipped={settings.skipped}: there is no {file}; {file.parent} holds {names}"
        )
    try:
        with zipfile.ZipFile(file) as packed:
            size = sum(entry.file_size for entry in packed.infolist())
        if size > MOST_BYTES:
            raise ValueError(f"it holds {size:,} bytes; at most {MOST_BYTES:,} are read")
        # no pickles: numpy refuses them unless it is asked for them
        with np.load(file) as arrays:
            batch = batch_of_arrays(dict(arrays))
        kinds = {"tokens": "iu", "token_mask": "b"}
        for name, value in arrays_of_batch(batch).items():
            is_kind = value.dtype.kind in kinds.get(name, "biuf")
            if (
                not is_kind
                or value.ndim != 2
                or value.shape != batch.tokens.shape
                or not value.size
            ):
                is_what = f"{value.dtype} {list(value.shape)}"
                raise ValueError(f"{name} is {is_what}; it is numbers, [B, T] as tokens are")
        return batch
    except UNREADABLE as error:
        why = escaped(str(error) or type(error).__name__)
        raise ConfigError(
            f"skipped={settings.skipped}: {file} cannot be read ({why})"
        ) from error


def saw(folder: RunDir, skipped: int, step: int) -> bool:
    """Whether the weights of this checkpoint are those that saw the batch: no update in between was
    made."""
    between = range(step + 1, skipped) if step < skipped else range(skipped, step + 1)
    return all(folder.skipped(number).is_file() for number in between)


def nearest(folder: RunDir, skipped: int) -> int:
    """A checkpoint of the weights that saw the batch; else the newest of those before. Raises
    ConfigError."""
    steps = Checkpoints(folder.checkpoints).steps()
    same = [step for step in steps if saw(folder, skipped, step)]
    before = [step for step in steps if step < skipped]
    if same + before:
        return max(same or before)
    other = f"; step={steps[0]} takes weights that have been updated since" if steps else ""
    raise ConfigError(f"{folder.checkpoints} holds no checkpoint until step {skipped}{other}")


def sequence_losses(
    algorithm: Algorithm, batch: Batch, scores: TokenScores
) -> tuple[np.ndarray, dict[int, dict[str, int]]]:
    """The loss of each sequence, of which the loss is a sum; and, by sequence, how often each input
    of it is not finite at tokens that count."""
    counts_BT = batch.loss_weight != 0
    inputs = {"logprobs": scores.logprobs}
    # where log-probabilities are not finite, it is no news that entropies are not
    inputs["entropy"] = np.where(np.isfinite(scores.logprobs), scores.entropy, 0.0)
    inputs |= arrays_of_batch(batch)
    losses = []
    not_finite = {}
    for b in range(len(batch.tokens)):
        one = slice(b, b + 1)
        of_row = jax.tree.map(lambda x, one=one: jnp.asarray(x[one]), (scores, batch))
        # the rows are the sequences, so a batch is in rows already
        loss = float(algorithm.loss(of_row[0], RowBatch(**vars(of_row[1])))[0])
        losses.append(loss)
        wrong = {
            name: int((~np.isfinite(x[b]) & counts_BT[b]).sum()) for name, x in inputs.items()
        }
        if any(wrong.values()) or not np.isfinite(loss):
            not_finite[b] = {name: count for name, count in wrong.items() if count}
    return np.array(losses), not_finite
