"""`tunix-lite replay RUN step=137`: a step of a run once more, beside what the run logged of it.

`tunix-lite replay RUN skipped=12` says why an update was not finite, sequence by sequence.
"""

import contextlib
import dataclasses
import re
import shlex
import zipfile
import zlib
from dataclasses import dataclass
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
from tunix_lite.files.imports import importing_only
from tunix_lite.files.untrusted import read_object, read_yaml
from tunix_lite.inference.language_model import LanguageModel, open_model, run_settings
from tunix_lite.learner.policy import sequence_scores
from tunix_lite.parallel.compiling import keep_programs
from tunix_lite.plain_text import escaped, shown, visible
from tunix_lite.planning.packing_choice import AUTO
from tunix_lite.runs.batch_files import STREAM, arrays_of_batch, batch_of_arrays
from tunix_lite.runs.fingerprint import packing_of
from tunix_lite.runs.replay import Replayed, replay_step
from tunix_lite.settings import compose as composing
from tunix_lite.tracking.rundir import RunDir, with_chosen_values
from tunix_lite.types import Batch, RowBatch, TokenScores

# characters of a text
SHOWN = 80
OTHER_WEIGHTS = " (not those that saw them, which are not kept)"
# a class or function of ours, as a file of conf/ names it
NAME_OF_OURS = re.compile(r"\btunix_lite(?:\.\w+)+")
IF_YOURS = "If the run is yours: replay.trust=true"
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
# what numpy and zipfile raise for a file that is no batch
UNREADABLE = (OSError, ValueError, TypeError, KeyError, EOFError, MemoryError, RuntimeError)
UNREADABLE += (zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class ReplayOptions:
    """How a step is made again.

    Example: `replay.trust=true` is ReplayOptions(trust=True).
    """

    # true imports code that the run's settings name outside tunix_lite. Use it only for your own
    # runs.
    trust: bool = False


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
    replay: ReplayOptions = ReplayOptions()

    def __post_init__(self):
        if self.checkpoint is None or (self.skipped is None and self.step is None):
            raise ValueError(
                "give the folder of a run and one of its steps: tunix-lite replay "
                f"{shown_folder(self.checkpoint)} step=12; or skipped=12 for an update that the "
                "run skipped"
            )
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} must be at least 1")


def shown_folder(folder: str | None) -> str:
    """The folder as a command line has it; without one, that of the newest run."""
    return "outputs/latest" if folder is None else visible(shlex.quote(folder))


# settings of the command itself
OWN = {f.name for f in dataclasses.fields(Replay)}


def main() -> None:
    with contextlib.ExitStack() as until_its_end:
        program.run_command(
            "replay",
            Replay,
            replay,
            positional="checkpoint",
            change_settings=partial(with_settings_of_run, until_its_end),
        )


def replay(run: RunConfig, settings: Replay) -> None:
    """Makes a step again, or looks at the batch of one that was skipped."""
    if settings.skipped is not None:
        look_at_skipped(run, settings)
        return
    keep_programs(run.runtime.program_cache)
    folder = Path(settings.checkpoint).expanduser()

    def say(text: str) -> None:
        print(visible(text), flush=True)

    with error_context(""):
        done = replay_step(run, folder, settings.step, say)
    for line in as_lines(done):
        say(line)


# ---- the settings of the run


def with_settings_of_run(
    until_its_end: contextlib.ExitStack, values: dict, keys: list[str]
) -> dict:
    """The settings that the run was started with, and on top what the command line says.

    values: the settings that the command line gives, composed; keys: which it names. The mesh and
    what belongs to this machine are the command line's. The batch of skipped= is looked at with the
    settings of the command line alone. Without replay.trust, what the settings of the run name is
    imported only if conf/ or the command line names it, too, until the ExitStack closes. Raises
    ConfigError.
    """
    if values["checkpoint"] is None or values["skipped"] is not None:
        return values
    file = Path(values["checkpoint"]).expanduser() / ".hydra" / "config.yaml"
    if not file.is_file():
        return values
    # What is this machine's, or was decided for the model already; nothing is evaluated.
    kept = {"model", "launch", "resume", "tracking", "evaluation", "runtime", *OWN}
    with error_context("checkpoint"):
        saved = RunDir(file.parents[1]).fingerprint
        chosen = read_object(saved) if saved.is_file() else {}
        theirs = with_chosen_values(read_yaml(file), chosen)
        for key in theirs.keys() & values.keys():
            if isinstance(values[key], dict) and not isinstance(theirs[key], dict):
                raise ValueError(f"{file}: {key} is {shown(theirs[key])}, not a group of settings")
    changed = {key: theirs[key] for key in theirs.keys() & values.keys() - kept}
    if not values["replay"]["trust"]:
        refusal = f"is named by {file}, and a folder may not choose what is imported. {IF_YOURS}"
        until_its_end.enter_context(importing_only(names_known(values), refusal))
    found = {**values, **changed}
    for key in (key.lstrip("+~") for key in keys):
        if key.partition(".")[0] not in kept:
            _copy_setting(values, found, key.split("."))
    found["evaluation"] = {**values["evaluation"], "num_examples": 0, "num_samples": 0}
    found["rewards"] = {**found["rewards"], "workers": values["rewards"]["workers"]}
    with error_context("checkpoint"):
        return _on_this_mesh(found, theirs)


def _copy_setting(source: dict, target: dict, path: list[str]) -> None:
    """Copies a setting, or a whole group, from one tree of settings into another."""
    *groups, name = path
    for group in groups:
        source = source[group]
        there = target.get(group)
        target[group] = dict(there) if isinstance(there, dict) else {}
        target = target[group]
    if name in source:
        target[name] = source[name]


def _on_this_mesh(values: dict, theirs: dict) -> dict:
    """The batch as the run had it, cut for the devices that are here: a mesh of another size needs
    micro-batches of another."""
    training = dict(values["training"])
    if training.get("micro_batch_size") == "auto":
        training["micro_batch_size"] = None
    model = theirs.get("model")
    mesh = model.get("mesh_shape") if isinstance(model, dict) else None
    if mesh != values["model"]["mesh_shape"]:
        training["gradient_accumulation_steps"] = None
        training["micro_batch_size"] = None
    if training.get("prompts_per_step") is None or training.get("packing") == AUTO:
        # The run derived them, on its mesh; its fingerprint says what came out.
        file = RunDir(Path(values["checkpoint"]).expanduser()).fingerprint
        saved = read_object(file)
        kept = saved.get("training")
        if training.get("prompts_per_step") is None:
            training["prompts_per_step"] = (
                kept.get("prompts_per_step") if isinstance(kept, dict) else None
            )
        if training.get("packing") == AUTO:
            training["packing"] = packing_of(saved, file)
    return {**values, "training": training}


def names_known(values: dict) -> set[str]:
    """All texts of the command line's settings of a run, and what of ours conf/ names: what a run's
    folder names beside them is not imported.

    values: the settings that the command line gives. Those of the model come from the folder, but
    for its family: a family of one's own is refused unless the command line names it.
    """
    known = set()
    # The name of a folder is no name of a function: evil.plug/ would import evil.py beside it.
    given = {key: value for key, value in values.items() if key not in OWN}
    left: list = [{**given, "model": values["model"].get("family")}]
    while left:
        value = left.pop()
        if isinstance(value, str):
            known.add(value)
        elif isinstance(value, dict | list):
            left += value.values() if isinstance(value, dict) else value
    for yaml_file in composing.conf_dir().rglob("*.yaml"):
        known |= set(NAME_OF_OURS.findall(yaml_file.read_text()))
    return known


# ---- what is printed


def as_lines(done: Replayed) -> list[str]:
    """The step as a table: what was logged, what came out now, and how far apart they are."""
    rows = [("metric", "logged", "replayed", "distance")]
    for name in sorted({*done.metrics, *done.logged}):
        ours = done.metrics.get(name)
        theirs = done.logged.get(name)
        apart = ""
        if ours is not None and theirs is not None:
            apart = "0" if ours == theirs else f"{abs(ours - theirs):.2e}"
        rows.append((name, _number(theirs), _number(ours), apart))
    first, *widths = (max(len(row[i]) for row in rows) for i in range(4))
    lines = [f"step {done.step}"]
    for name, *numbers in rows:
        cells = [text.rjust(width) for text, width in zip(numbers, widths)]
        lines.append("  ".join([name.ljust(first), *cells]).rstrip())
    if not done.logged:
        lines.append("metrics.jsonl has no line of this step")
    else:
        same = sum(done.metrics.get(name) == value for name, value in done.logged.items())
        lines.append(f"{same} of {len(done.logged)} logged metrics are the same to the bit")
    return lines + sample_lines(done)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.9g}"


def sample_lines(done: Replayed) -> list[str]:
    """How the completions compare with the file of the step."""
    if done.samples is None:
        return []
    if done.logged_samples is None:
        return [f"completions: {len(done.samples)}, and samples/ has no file of this step"]
    pairs = list(zip(done.samples, done.logged_samples))
    total = max(len(done.samples), len(done.logged_samples))
    lines = []
    for name in ("completion", "tokens", "reward", "correct", "extracted", "advantage"):
        if any(name in theirs for _, theirs in pairs):
            same = sum(ours.get(name) == theirs.get(name) for ours, theirs in pairs)
            lines.append(f"samples/: {name} the same in {same} of {total} completions")
    gaps = [gap for ours, theirs in pairs if (gap := _gap(ours, theirs)) is not None]
    if gaps:
        lines.append(f"samples/: logprobs apart by {max(gaps):.2e} at most")
    return lines


def _gap(ours: dict, theirs: dict) -> float | None:
    """The largest difference of two completions' log-probabilities; None where they are not of the
    same tokens."""
    here, there = ours.get("logprobs"), theirs.get("logprobs")
    if not isinstance(here, list) or not isinstance(there, list) or len(here) != len(there):
        return None
    try:
        return float(np.abs(np.subtract(here, there)).max(initial=0.0))
    except (TypeError, ValueError):
        return None


# ---- an update that was skipped


def look_at_skipped(run: RunConfig, settings: Replay) -> None:
    """Prints the loss, and every sequence of the batch in which a number is not finite."""
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
            "every input of the loss is finite: check its gradient, or try the weights of "
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
            raise ValueError(f"a batch has no array {unknown[0]}")
        batch = batch_of_arrays(found)
        _check_arrays(batch)
        return batch
    except UNREADABLE as error:
        why = escaped(str(error) or type(error).__name__)
        raise ConfigError(f"skipped={settings.skipped}: {file} cannot be read ({why})") from error


def _check_arrays(batch: Batch) -> None:
    """Raises ValueError unless all arrays are numbers and of one shape, [B, T]."""
    for name, value in arrays_of_batch(batch).items():
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
    inputs |= arrays_of_batch(batch)
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
