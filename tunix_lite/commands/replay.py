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
from tunix_lite.runs.batch_files import arrays_of_batch, batch_of_arrays
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
            folder = "outputs/latest" if self.checkpoint is None else shlex.quote(self.checkpoint)
            raise ValueError(
                "give the folder of a run and one of its steps: tunix-lite replay "
                f"{visible(folder)} step=12; or skipped=12 for an update that the run skipped"
            )
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} must be at least 1")


# Settings of the command itself, and all that are not taken from the run: they are this machine's,
# or were decided for the model already.
OWN = {f.name for f in dataclasses.fields(Replay)}
OURS = {"model", "launch", "resume", "tracking", "evaluation", "runtime", *OWN}


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
    """The settings that the run was started with, and on top those of the command line.

    values: the settings that the command line gives, composed; keys: which it names. The mesh and
    all that belongs to this machine are the command line's, and so is everything of skipped=.
    Without replay.trust, a name in the settings of the run is imported only if conf/ or the command
    line has it, too, until the ExitStack closes. Raises ConfigError.
    """
    if values["checkpoint"] is None or values["skipped"] is not None:
        return values
    run_dir = RunDir(Path(values["checkpoint"]).expanduser())
    file = run_dir.path / ".hydra" / "config.yaml"
    if not file.is_file():
        return values
    with error_context("checkpoint"):
        saved = read_object(run_dir.fingerprint) if run_dir.fingerprint.is_file() else {}
        theirs = with_chosen_values(read_yaml(file), saved)
        for key in theirs.keys() & values.keys():
            if isinstance(values[key], dict) and not isinstance(theirs[key], dict):
                raise ValueError(f"{file}: {key} is {shown(theirs[key])}, not a group of settings")
    if not values["replay"]["trust"]:
        refusal = f"is named by {file}, and a folder may not choose what is imported. {IF_YOURS}"
        until_its_end.enter_context(importing_only(names_known(values), refusal))
    changed = values | {key: theirs[key] for key in theirs.keys() & values.keys() - OURS}
    for key in (key.lstrip("+~") for key in keys):
        if key.partition(".")[0] not in OURS:
            _copy_setting(values, changed, key.split("."))
    changed["evaluation"] = {**values["evaluation"], "num_examples": 0, "num_samples": 0}
    changed["rewards"] = {**changed["rewards"], "workers": values["rewards"]["workers"]}
    with error_context("checkpoint"):
        return _on_this_mesh(changed, theirs)


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
    micro-batches of another. The run's fingerprint says what was derived on its mesh."""
    training = dict(values["training"])
    model = theirs.get("model")
    mesh = model.get("mesh_shape") if isinstance(model, dict) else None
    is_other = mesh != values["model"]["mesh_shape"]
    if is_other:
        training["gradient_accumulation_steps"] = None
    if is_other or training.get("micro_batch_size") == "auto":
        training["micro_batch_size"] = None
    is_derived = training.get("prompts_per_step") is None
    if is_derived or training.get("packing") == AUTO:
        file = RunDir(Path(values["checkpoint"]).expanduser()).fingerprint
        saved = read_object(file)
        derived = saved.get("training")
        if is_derived:
            derived = derived if isinstance(derived, dict) else {}
            training["prompts_per_step"] = derived.get("prompts_per_step")
        if training.get("packing") == AUTO:
            training["packing"] = packing_of(saved, file)
    return {**values, "training": training}


def names_known(values: dict) -> set[str]:
    """All texts of the command line's settings of a run, and the names of ours in conf/: no other
    name in a run's folder is imported.

    values: the settings that the command line gives. Those of the model come from the folder, but
    for its family: a family of one's own is refused unless the command line names it.
    """
    known = set()
    # The name of a folder is no name of a function: evil.plug/ would import evil.py beside it.
    of_run = {key: value for key, value in values.items() if key not in OWN}
    left: list = [{**of_run, "model": values["model"].get("family")}]
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
    """The step as a table: as it was logged, as it came out now, and how far apart they are."""
    rows = [("metric", "logged", "replayed", "distance")]
    for name in sorted({*done.metrics, *done.logged}):
        numbers = [each[name] for each in (done.logged, done.metrics) if name in each]
        texts = [
            f"{each[name]:.9g}" if name in each else "" for each in (done.logged, done.metrics)
        ]
        distance = f"{abs(numbers[0] - numbers[-1]):.2e}" if len(set(numbers)) > 1 else "0"
        rows.append((name, *texts, distance if len(numbers) == 2 else ""))
    first, *widths = (max(map(len, column)) for column in zip(*rows))
    lines = [f"step {done.step}"]
    for name, *texts in rows:
        cells = [text.rjust(width) for text, width in zip(texts, widths)]
        lines.append("  ".join([name.ljust(first), *cells]).rstrip())
    if done.logged:
        same = sum(done.metrics.get(name) == value for name, value in done.logged.items())
        lines.append(f"{same} of {len(done.logged)} logged metrics are the same to the bit")
    else:
        lines.append("metrics.jsonl has no line of this step")
    return lines + sample_lines(done)


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
    step = nearest(folder, settings.skipped) if settings.step is None else settings.step

    # the weights that saw the batch, if the run kept them
    seed = run_settings(folder.path, run.model.family)[1]
    model = open_model(run.model, folder.path, step, run.training.mixed_precision, seed)
    if not 0 <= batch.tokens.min() <= batch.tokens.max() < model.cfg.vocab_size:
        raise ConfigError(f"skipped={settings.skipped}: its tokens are not those of this model")
    scores = score_batch(model, batch, run.learning_temperature, settings.batch_size)
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
        for name, value in arrays_of_batch(batch).items():
            is_number = value.dtype.kind in "biuf"
            if value.ndim != 2 or value.shape != batch.tokens.shape or not is_number:
                is_what = f"{value.dtype} {list(value.shape)}"
                raise ValueError(f"{name} is {is_what}; it is numbers, [B, T] as tokens are")
        if batch.tokens.dtype.kind not in "iu" or not batch.tokens.size:
            raise ValueError(f"tokens are {batch.tokens.dtype}; they are whole numbers")
        if batch.token_mask.dtype != bool:
            raise ValueError(f"token_mask is {batch.token_mask.dtype}; it is true or false")
        return batch
    except UNREADABLE as error:
        why = escaped(str(error) or type(error).__name__)
        raise ConfigError(f"skipped={settings.skipped}: {file} cannot be read ({why})") from error


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
    """The scores of the batch by these weights: arrays of the host, [B, T] float32."""
    score = jax.jit(
        partial(sequence_scores, cfg=model.cfg, temperature=temperature, dtype=model.dtype)
    )
    B = len(batch.tokens)
    parts = []
    with jax.set_mesh(model.mesh):
        for start in range(0, B, batch_size):
            # all parts have one size, so that one program is compiled
            rows = np.minimum(np.arange(start, start + batch_size), B - 1)
            scores = score(model.params, batch.tokens[rows], batch.token_mask[rows])
            parts.append(jax.device_get(scores))
    return TokenScores(*(np.concatenate(arrays)[:B] for arrays in zip(*parts)))


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
        wrong = {name: int((~np.isfinite(x[b]) & counts_BT[b]).sum()) for name, x in inputs.items()}
        if any(wrong.values()) or not np.isfinite(loss):
            not_finite[b] = {name: count for name, count in wrong.items() if count}
    return np.array(losses), not_finite
