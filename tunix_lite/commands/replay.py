"""`tunix-lite replay checkpoint=RUN skipped=12`: why an update was not finite, sequence by
sequence."""

import zipfile
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.algorithms.algorithm import Algorithm, check_loss
from tunix_lite.checkpoint import Checkpoints
from tunix_lite.commands import program
from tunix_lite.config import RunConfig
from tunix_lite.errors import ConfigError
from tunix_lite.inference.language_model import LanguageModel, open_model, run_settings
from tunix_lite.learner.policy import sequence_scores
from tunix_lite.plain_text import escaped
from tunix_lite.tracking.rundir import RunDir
from tunix_lite.types import STREAM, Batch, RowBatch, TokenScores

# characters of a text
SHOWN = 80
OTHER_WEIGHTS = " (not those that saw them, which are not kept)"
# of a batch, unpacked
ARRAYS = (
    "tokens",
    "token_mask",
    "loss_weight",
    "advantages",
    "old_logprobs",
    "ref_logprobs",
)
# of a batch, unpacked: a small file can hold very many zeros
MOST_BYTES = 2**32


@dataclass(frozen=True)
class Replay:
    """Which update, and whose weights look at its batch."""

    checkpoint: str | None = None  # the folder of the run
    skipped: int | None = None  # the step that was skipped: 12 for skipped/step_000012.npz
    # of the checkpoint whose weights are used; null: those that saw it, or the newest before
    step: int | None = None
    batch_size: int = 8  # sequences at a time; changes memory, not what is said

    def __post_init__(self):
        if self.checkpoint is None or self.skipped is None:
            raise ValueError(
                "give checkpoint=FOLDER, of a run, and skipped=STEP, an update that it did not make"
            )
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} must be at least 1")


def main() -> None:
    program.run_command("replay", Replay, replay)


def replay(run: RunConfig, settings: Replay) -> None:
    """Prints the loss, and every sequence of the batch in which a number is not finite."""
    check_loss(run.algorithm)
    folder = RunDir(Path(settings.checkpoint).expanduser())
    batch = read_batch(folder, settings)
    step = settings.step
    if step is None:
        step = nearest(folder, settings.skipped)

    # the weights that saw the batch, if the run kept them
    seed = run_settings(folder.path, run.model.family)[1]
    model = open_model(run.model, folder.path, step, run.training.mixed_precision, seed)
    if not 0 <= batch.tokens.min() <= batch.tokens.max() < model.cfg.vocab_size:
        raise ConfigError(f"skipped={settings.skipped}: its tokens are not those of this model")
    scores = score_batch(model, batch, run.learning_temperature, settings.batch_size)
    losses_B, found = sequence_losses(run.algorithm, batch, scores)

    is_finite_B = np.isfinite(losses_B)
    others = "" if saw(folder, settings.skipped, step) else OTHER_WEIGHTS
    print(
        f"step {settings.skipped}: {len(losses_B)} sequences, with the weights of step "
        f"{step}{others}"
    )
    print(
        f"loss {losses_B.sum():g}; of the {is_finite_B.sum()} sequences whose loss is finite "
        f"{losses_B[is_finite_B].sum():g}"
    )
    for b, names in found.items():
        places = [f"{name} at {count} of its tokens" for name, count in names.items()]
        what = ", ".join(places) or "its loss"
        print(f"sequence {b}: not finite: {what}\n  {_text(model, batch, b)}")
    if not found:
        print(
            "all that goes into the loss is finite: look at its gradient, or try the weights of "
            "another step="
        )


def read_batch(folder: RunDir, settings: Replay) -> Batch:
    """The batch of the update that was skipped. Raises ConfigError."""
    file = folder.skipped(settings.skipped)
    if not file.is_file():
        kept = ", ".join(sorted(f.name for f in file.parent.glob("step_*.npz"))) or "nothing"
        raise ConfigError(
            f"skipped={settings.skipped}: there is no {file}; {file.parent} holds {kept}"
        )
    try:
        with zipfile.ZipFile(file) as packed:
            size = sum(entry.file_size for entry in packed.infolist())
            if size > MOST_BYTES:
                raise ValueError(
                    f"it holds {size:,} bytes, and {MOST_BYTES:,} are the most that are read"
                )
        # no pickles: numpy refuses them unless it is asked for them
        with np.load(file) as arrays:
            found = {name: arrays[name] for name in arrays}
        unknown = sorted(name for name in found.keys() - ARRAYS if not name.startswith(STREAM))
        if unknown:
            raise ValueError(f"a batch has no {unknown[0]}")
        batch = Batch.of_arrays(found)
        _check_arrays(batch)
        return batch
    except (OSError, ValueError, TypeError, KeyError, EOFError, MemoryError, RuntimeError) as error:
        raise ConfigError(
            f"skipped={settings.skipped}: {file} cannot be read ({_in_words(error)})"
        ) from error
    except (zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise ConfigError(
            f"skipped={settings.skipped}: {file} cannot be read ({_in_words(error)})"
        ) from error


def _in_words(error: Exception) -> str:
    return escaped(str(error) or type(error).__name__)


def _check_arrays(batch: Batch) -> None:
    """Raises ValueError unless all arrays are numbers and of one shape, [B, T]."""
    for name, value in batch.arrays().items():
        if value.ndim != 2 or value.shape != batch.tokens.shape or value.dtype.kind not in "biuf":
            raise ValueError(
                f"{name} is {value.dtype} {list(value.shape)}; it is numbers, [B, T] as tokens are"
            )
    if batch.tokens.dtype.kind not in "iu" or not batch.tokens.size:
        raise ValueError(
            f"tokens are {batch.tokens.dtype} {list(batch.tokens.shape)}; they are whole numbers"
        )
    if batch.token_mask.dtype != bool:
        raise ValueError(f"token_mask is {batch.token_mask.dtype}; it is true or false")


def saw(folder: RunDir, skipped: int, step: int) -> bool:
    """Whether the weights of this checkpoint are those that saw the batch: no update in between was
    made."""
    between = range(step + 1, skipped) if step < skipped else range(skipped, step + 1)
    return all(folder.skipped(number).is_file() for number in between)


def nearest(folder: RunDir, skipped: int) -> int:
    """A checkpoint of the weights that saw the batch; else the newest of those before. Raises
    ConfigError."""
    steps = Checkpoints(folder.checkpoints).steps()
    if not steps:
        raise ConfigError(
            f"{folder.checkpoints} holds no checkpoint, so there are no weights to look at the "
            "batch"
        )
    same = [step for step in steps if saw(folder, skipped, step)]
    before = [step for step in steps if step < skipped]
    if not same + before:
        raise ConfigError(
            f"{folder.checkpoints} holds no checkpoint until step {skipped}; step={steps[0]} takes "
            "the weights of step "
            f"{steps[0]}, which have been updated since"
        )
    return max(same or before)


def score_batch(
    model: LanguageModel, batch: Batch, temperature: float, batch_size: int
) -> TokenScores:
    """What these weights say of the batch: arrays of the host, [B, T] float32."""
    score = jax.jit(
        partial(sequence_scores, cfg=model.cfg, temperature=temperature, dtype=model.dtype)
    )
    B = len(batch.tokens)
    parts = []
    with jax.set_mesh(model.mesh):
        for start in range(0, B, batch_size):
            # all parts have one size, so that one program is compiled
            rows = np.minimum(np.arange(start, start + batch_size), B - 1)
            found = score(model.params, batch.tokens[rows], batch.token_mask[rows])
            parts.append(jax.device_get(found))
    return TokenScores(*(np.concatenate(arrays)[:B] for arrays in zip(*parts)))


def sequence_losses(
    algorithm: Algorithm, batch: Batch, scores: TokenScores
) -> tuple[np.ndarray, dict[int, dict[str, int]]]:
    """The loss of each sequence, and, by sequence, how often what goes into it is not finite.

    A loss is a sum over sequences, so each has a loss of its own.
    """
    counts_BT = batch.loss_weight != 0
    inputs = {"logprobs": scores.logprobs}
    # where log-probabilities are not finite, it is no news that entropies are not
    inputs["entropy"] = np.where(np.isfinite(scores.logprobs), scores.entropy, 0.0)
    inputs |= batch.arrays()
    losses = []
    found = {}
    for b in range(len(batch.tokens)):
        loss = _loss_of_row(algorithm, batch, scores, b)
        losses.append(loss)

        # only at tokens that count
        wrong = {name: int((~np.isfinite(x[b]) & counts_BT[b]).sum()) for name, x in inputs.items()}
        if any(wrong.values()) or not np.isfinite(loss):
            found[b] = {name: count for name, count in wrong.items() if count}
    return np.array(losses), found


def _loss_of_row(algorithm: Algorithm, batch: Batch, scores: TokenScores, b: int) -> float:
    def row(x: np.ndarray) -> jax.Array:
        return jnp.asarray(x[b : b + 1])

    # the rows are the sequences, so a batch is in rows already
    in_rows = RowBatch(**vars(jax.tree.map(row, batch)))
    return float(algorithm.loss(jax.tree.map(row, scores), in_rows)[0])


def _text(model: LanguageModel, batch: Batch, b: int) -> str:
    text = model.tokenizer.decode([int(t) for t in batch.tokens[b][batch.token_mask[b]]])
    return repr(text if len(text) <= SHOWN else "…" + text[-SHOWN:])
