"""Prints a run: its settings, a line for each step, and samples; train.log has all of it. On a
terminal the last line says what is done now. Control characters of the model are escaped."""

import contextlib
import errno
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from tunix_lite.basics.plain_text import SHOWN, visible
from tunix_lite.basics.types import Metrics
from tunix_lite.tracking.rows import is_number

# Parts of the names of the run's own metrics, which a user's observers may not take.
OUR_PARTS = ("train", "eval", "reward", "rewards", "advantage", "conversation", "completions")
OUR_PARTS += ("critic", "prompts", "rollout", "experts", "sampler", "time", "perf", "memory")
# The numbers of a step's line: the name, and how it is written.
_LINE_METRICS = {
    "train/loss": ("loss", "{:.4f}"),
    "reward/mean": ("reward", "{:.3f}"),
    "completions/correct": ("right", "{:.0%}"),
    "critic/explained_variance": ("explained", "{:.2f}"),
    "eval/loss": ("held-out loss", "{:.4f}"),
    "eval/accuracy": ("held-out accuracy", "{:.1%}"),
    "completions/mean_length": ("length", "{:.1f}"),
    "completions/truncated": ("cut", "{:.0%}"),
    "conversation/turns": ("turns", "{:.2f}"),
    "prompts/drawn": ("drawn", "{:.0f}"),
    "prompts/kept": ("kept", "{:.0f}"),
    "time/extra_rounds": ("extra rounds", "{:.1f} s"),
    "train/kl": ("kl", "{:.4f}"),
    "train/entropy": ("entropy", "{:.3f}"),
    "train/grad_norm": ("grad", "{:.2f}"),
    "train/learning_rate": ("lr", "{:.1e}"),
    "time/step": ("s/step", "{:.2f}"),
}
# How a terminal colours a line.
_COLORS = {"red": "31", "green": "32", "yellow": "33", "bold green": "1;32"}


_AVERAGES = "eval/avg_at_"


def scores_of(metrics: Metrics) -> Metrics:
    """What status.json keeps of an evaluation, by name: accuracy, loss and avg_at_8 and its like,
    the share of right samples, as far as there are numbers."""
    averages = [name for name in metrics if name.startswith(_AVERAGES)]
    scores = {name: metrics.get(name) for name in ("eval/accuracy", "eval/loss", *averages)}
    return {name[len("eval/") :]: x for name, x in scores.items() if is_number(x)}


def as_words(name: str) -> str:
    """avg_at_8 as people write it: avg@8."""
    return name.replace("_at_", "@")


def seconds_in_words(seconds: float) -> str:
    """A duration as `48 s`, `2m05s` or `3h12m`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


class Console:
    """The screen and train.log of one run."""

    def __init__(
        self,
        log_file: Path,
        max_steps: int,
        every: int = 1,
        stream: TextIO | None = None,
        quiet: bool = False,
        mode: str = "plain",
        evaluates_every: int = 0,
        epochs: int | None = None,
    ):
        """every: steps between two lines on the screen. stream: the screen; None: standard output.
        quiet: print nothing; of several processes only the first prints. mode: tracking.console.
        evaluates_every: steps between two evaluations; 0: there is one at the end, or none. epochs:
        passes over the data that max_steps are; None: they are not counted. Raises OSError."""
        if quiet:
            stream = open(os.devnull, "w")  # noqa: SIM115
        self._screen = Screen(stream or sys.stdout)
        self._is_quiet = mode == "quiet"
        self._log = log_file.open("a", encoding="utf-8")
        self._max_steps = max_steps
        self._epochs = epochs
        self._every = every
        self._evaluates_every = evaluates_every
        # of the steps so far, and of the last evaluation
        self._seconds: list[float] = []
        self._of_evaluation = 0.0
        self._headline = self._head(0, None)

    def panel(self, title: str, rows: list[tuple[str, str]]) -> None:
        """Prints what the run is. rows: (name, text) of each line."""
        for line in [title, *(f"  {name:<11}{text}" for name, text in rows)]:
            self.say(line)

    def say(self, text: str, style: str = "") -> None:
        """Prints one line, perhaps in a colour; tracking.console=quiet prints no other lines."""
        self._print(text, style, is_loud=bool(style))
        self._write(text)

    # ---- a tracking.progress.Output: work that takes long

    def show(self, text: str) -> None:
        """Shows what is done now as the last line of a terminal: neither printed nor logged."""
        if not self._is_quiet:
            self._screen.rewrite(" | ".join([*self._headline, text]) if text else "")

    def note(self, text: str) -> None:
        """Prints how far it is as a line, where no line is rewritten; train.log has it too."""
        if not self._screen.can_rewrite:
            self._print(text)
        self._write(text)

    def busy(self, text: str) -> None:
        """Says what is done now, until the next step."""
        self.note(text)
        self.show(text)

    def begin_at(self, step: int) -> None:
        """The step that a run goes on from."""
        self._headline = self._head(step, None)

    def log(self, step: int, metrics: Metrics) -> None:
        """Prints the line of a step, `step 12/120 10% | reward 0.41 | ...`, and writes it to the
        log. A `Tracker`."""
        if "time/step" in metrics:
            self._seconds.append(metrics["time/step"])
        self._of_evaluation = metrics.get("time/eval", self._of_evaluation)
        left = self.seconds_left(step)
        self._headline = self._head(step, left)
        # The numbers of a user's observers come first, so that a narrow terminal shows them.
        parts = list(self._headline)
        for key, value in metrics.items():
            if key.partition("/")[0] not in OUR_PARTS:
                parts.append(f"{key} {value:.6g}")
        for key, (name, text) in _LINE_METRICS.items():
            if key in metrics:
                parts.append(f"{name} {text.format(metrics[key])}")
            if key == "eval/accuracy":
                averages = [name for name in metrics if name.startswith(_AVERAGES)]
                parts += [f"{as_words(name[5:])} {metrics[name]:.1%}" for name in averages]
        line = " | ".join(parts)
        self._write(line)
        is_due = step % self._every == 0 or step == self._max_steps
        if is_due or any(name.startswith("eval/") for name in metrics):
            self._print(line)

    def seconds_left(self, step: int) -> float | None:
        """Seconds to go after this step, by the steps since the first one, which compiles, and the
        evaluations to come, each as long as the last one; None: not known yet."""
        # Evaluations are every so many steps, and after the last one.
        every = self._evaluates_every
        to_come = int(step < self._max_steps)
        if every:
            to_come += max(0, (self._max_steps - 1) // every - step // every)
        if len(self._seconds) < 2:
            return None
        pace = sum(self._seconds[1:]) / (len(self._seconds) - 1)
        return pace * (self._max_steps - step) + to_come * self._of_evaluation

    def samples(self, rows: list[dict], with_rewards: bool = False) -> None:
        """Prints completions with the answer found, right or wrong, and maybe the reward."""
        for row in rows:
            for line in lines_of_sample(row, with_rewards):
                self._print(line, "green" if row["correct"] else "red")
                self._write(line)

    def close(self) -> None:
        """Clears the line that is rewritten, and closes the log."""
        self._screen.rewrite("")
        self._log.close()

    def _head(self, step: int, seconds_left: float | None) -> list[str]:
        """`step 12/60 20%`, `epoch 0.40 of 2` and `eta 1m20s`; None: not known."""
        parts = [f"step {step}/{self._max_steps} {step / self._max_steps:.0%}"]
        if self._epochs is not None:
            passed = self._epochs * step / self._max_steps
            parts.append(f"epoch {passed:.2f} of {self._epochs}")
        if seconds_left is not None:
            parts.append(f"eta {seconds_in_words(seconds_left)}")
        return parts

    def _print(self, text: str, style: str = "", is_loud: bool = False) -> None:
        if not self._is_quiet or is_loud:
            self._screen.print(text, style)

    def _write(self, *lines: str) -> None:
        self._log.write(
            "".join(f"{time.strftime('%H:%M:%S')} {visible(line)}\n" for line in lines)
        )
        # A run that is killed leaves its last line.
        self._log.flush()


def lines_of_sample(row: dict, with_reward: bool) -> list[str]:
    """A row of a samples file: one line, or of a conversation a line for each turn and answer."""
    mark = "right" if row.get("correct") else "wrong"
    head = f"  {mark}  {_one_line(row.get('prompt'))}"
    if not row.get("turns"):
        answer = "no answer" if row.get("extracted") is None else _one_line(row["extracted"])
        has_reward = with_reward and is_number(row.get("reward"))
        reward = f"  reward {row['reward']:g}" if has_reward else ""
        return [f"{head}  →  {_one_line(row.get('completion'))}  [{answer}]{reward}"]
    lines = [head]
    for turn in row["turns"]:
        reward = f"  (reward {turn['reward']:g})" if turn["reward"] else ""
        lines.append(f"         model:  {_one_line(turn['completion'])}{reward}")
        if turn.get("failed"):
            lines.append(f"         failed: {_one_line(turn['failed'])}")
        elif turn["observation"]:
            lines.append(f"         answer: {_one_line(turn['observation'])}")
    return [*lines, f"         ended by {row['ended_by']}, {len(row['turns'])} turns"]


def _one_line(value: object) -> str:
    text = str(value)[: SHOWN + 1].replace("\n", " ⏎ ")
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


# Errors of a pipe that nobody reads, and of a terminal that was closed.
_GONE = (errno.EPIPE, errno.EIO, errno.ENXIO)


class Screen:
    """A text stream whose reader may go away, as with `| head`: later text is then dropped.
    Characters that its encoding does not have are escaped. Of a terminal the last line can be
    rewritten."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        is_dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown")
        self.can_rewrite = stream.isatty() and not is_dumb
        self._is_rewritten = False

    def print(self, text: str, style: str = "") -> None:
        """Prints a line, on a terminal in a colour: red, green, yellow or bold green."""
        # Otherwise the text would stand behind the line that is rewritten.
        self.rewrite("")
        text = visible(text)
        if style and self.can_rewrite and not os.environ.get("NO_COLOR"):
            text = f"\x1b[{_COLORS[style]}m{text}\x1b[0m"
        self.write(f"{text}\n")
        self.flush()

    def rewrite(self, text: str) -> None:
        """Puts a text in the place of the last line, cut at the terminal's width; "": nothing."""
        if not self.can_rewrite or not (text or self._is_rewritten):
            return
        columns = shutil.get_terminal_size().columns
        # An error: the stream is no terminal of its own.
        with contextlib.suppress(OSError, ValueError):
            # 0: the terminal does not know its size
            columns = os.get_terminal_size(self._stream.fileno()).columns or columns
        # One column less, as a full line makes some terminals go on in the next one.
        self.write(f"\r\x1b[2K{visible(text)[: columns - 1]}")
        self.flush()
        self._is_rewritten = bool(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        """Writes the text, if the reader is there."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        with self._or_dropped():
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def flush(self) -> None:
        """Flushes the stream, if the reader is there."""
        with self._or_dropped():
            self._stream.flush()

    @contextlib.contextmanager
    def _or_dropped(self) -> Iterator[None]:
        """If the reader is gone, all text goes to /dev/null from now on."""
        try:
            yield
        except OSError as error:
            if error.errno not in _GONE:
                # Without a name it would be taken for a file of the run.
                raise OSError(error.errno, error.strerror, "standard output") from error
            with contextlib.suppress(OSError, ValueError):
                # Redirects descriptor `gone` to /dev/null, and standard error if it is the
                # same terminal: Python would fail at its end, when it flushes them.
                gone = self._stream.fileno()
                before = os.fstat(gone)
                null = os.open(os.devnull, os.O_WRONLY)
                for file in {gone, sys.__stderr__.fileno()}:
                    now = os.fstat(file)
                    is_same = (now.st_dev, now.st_ino) == (before.st_dev, before.st_ino)
                    if file == gone or (stat.S_ISCHR(before.st_mode) and is_same):
                        os.dup2(null, file)
                os.close(null)
            self._stream = open(os.devnull, "w")  # noqa: SIM115
