"""Prints a run: its settings, a line for each step, and samples; train.log has all of it.

On a terminal a live region shows the last step, drawn by tracking/dashboard.py. Text of the model
is never read as markup, and its control characters are escaped.
"""

import contextlib
import errno
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import rich.console
import rich.live
import rich.text

from tunix_lite.files.plain_text import SHOWN, visible
from tunix_lite.tracking.dashboard import BARS, LINE_METRICS, Dashboard, headline
from tunix_lite.tracking.rows import is_number
from tunix_lite.types import Metrics

# Parts of the names of metrics that are the run's own. All others are of a user's observers, which
# may not take one of these.
OUR_PARTS = ("train", "eval", "reward", "rewards", "advantage", "conversation", "completions")
OUR_PARTS += ("prompts", "rollout", "sampler", "time", "perf", "memory")


def averages_of_samples(metrics: Metrics) -> Metrics:
    """avg_at_8 and its like of an evaluation: the share of right samples, by name."""
    names = [name for name in metrics if name.startswith("eval/avg_at_")]
    return {name.removeprefix("eval/"): metrics[name] for name in names}


def as_words(name: str) -> str:
    """avg_at_8 as people write it: avg@8."""
    return name.replace("_at_", "@")


class Console:
    """The screen and train.log of one run."""

    def __init__(
        self,
        log_file: Path,
        max_steps: int,
        every: int = 1,
        stream: TextIO | None = None,
        quiet: bool = False,
        mode: str = "auto",
        evaluates_every: int = 0,
    ):
        """every: steps between two lines in a pipe. stream: the screen; None: standard output.
        quiet: print nothing; of several processes only the first prints. mode: tracking.console.
        evaluates_every: as of a Dashboard. Raises OSError."""
        if quiet:
            stream = open(os.devnull, "w")  # noqa: SIM115
        self._terminal = Terminal(file=Screen(stream or sys.stdout), highlight=False)
        self._is_live = self._terminal.is_terminal and is_live(mode, self._terminal)
        self._is_quiet = mode == "quiet"
        self._log = log_file.open("a", encoding="utf-8")
        self._live: rich.live.Live | None = None
        self._board = Dashboard(max_steps, evaluates_every=evaluates_every)
        self._max_steps = max_steps
        self._every = every

    # ---- the start

    def panel(self, title: str, rows: list[tuple[str, str]]) -> None:
        """Prints what the run is. rows: (name, text) of each line."""
        for line in [title, *(f"  {name:<11}{text}" for name, text in rows)]:
            self.say(line)

    def say(self, text: str, style: str = "") -> None:
        """Prints one line. style: of rich, such as "bold red"; tracking.console=quiet prints only
        lines with one: hints, errors and results."""
        self._print(text, style, is_loud=bool(style))
        self._write(text)

    def busy(self, text: str) -> None:
        """Prints what is done now; the live region shows it with a clock, until the next step."""
        self.doing(text)
        self.note(text)

    def doing(self, text: str) -> None:
        """Shows what is done now in the live region alone: neither printed nor logged."""
        self._board.busy(text)
        self._show()

    # ---- a tracking.progress.Output: work that takes long

    def show(self, text: str) -> None:
        """Shows what is done now and how far it is in the live region."""
        self._board.busy(text, has_clock=False)
        self._show()

    def note(self, text: str) -> None:
        """Prints how far it is as a line, where there is no live region; train.log has it too."""
        if not self._is_live:
            self._print(text)
        self._write(text)

    def begin_at(self, step: int) -> None:
        """The step that a run goes on from: the live region shows it until the next is made."""
        self._board.step = step

    # ---- every step

    def log(self, step: int, metrics: Metrics) -> None:
        """Prints the line of a step, and writes it to the log. A `Tracker`."""
        self._board.log(step, metrics)
        line = step_line(step, self._max_steps, metrics, self._board.seconds_left())
        self._write(line)
        self._show()
        is_due = step % self._every == 0 or step == self._max_steps
        if "eval/accuracy" in metrics or (is_due and not self._is_live):
            self._print(line)

    def samples(self, rows: list[dict], with_rewards: bool = False) -> None:
        """Prints completions, each with its extracted answer, marked right or wrong; with_rewards:
        and with its reward."""
        for row in rows:
            for line in lines_of_sample(row, with_rewards):
                self._print(line, "green" if row["correct"] else "red")
                self._write(line)

    def close(self) -> None:
        """Ends the live region, and closes the log."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._log.close()

    # ---- the screen and the log

    def _print(self, text: str, style: str = "", is_loud: bool = False) -> None:
        if self._is_quiet and not is_loud:
            return
        text = visible(text)
        if self._is_live:
            self._terminal.print(rich.text.Text(text, style=style))
        else:
            print(text, file=self._terminal.file, flush=True)

    def _show(self) -> None:
        """Begins the live region: a thread of rich draws it, whatever a step does meanwhile."""
        if self._is_live and self._live is None:
            self._live = rich.live.Live(
                console=self._terminal,
                get_renderable=lambda: self._board.drawn(*self._terminal.size),
                refresh_per_second=4,
                transient=True,
            )
            self._live.start()

    def _write(self, *lines: str) -> None:
        self._log.write(
            "".join(f"{time.strftime('%H:%M:%S')} {visible(line)}\n" for line in lines)
        )
        self._log.flush()


def step_line(
    step: int, max_steps: int | None, metrics: Metrics, seconds_left: float | None = None
) -> str:
    """`step 12/120 10% | reward 0.41 | ...`, with those of LINE_METRICS that there are.

    The numbers of a user's observers come first, so that a narrow terminal shows them.
    """
    parts = headline(step, max_steps, seconds_left)
    for key, value in metrics.items():
        if key.partition("/")[0] not in OUR_PARTS:
            parts.append(f"{key} {value:.6g}")
    for key, (name, text) in LINE_METRICS.items():
        if key in metrics:
            parts.append(f"{name} {text.format(metrics[key])}")
        if key == "eval/accuracy":
            averages = averages_of_samples(metrics).items()
            parts += [f"{as_words(name)} {value:.1%}" for name, value in averages]
    return " | ".join(parts)


def is_live(mode: str, terminal: rich.console.Console) -> bool:
    """Whether there is a live region on this terminal."""
    if mode in ("plain", "quiet"):
        return False
    try:
        BARS.encode(terminal.encoding)
    except (UnicodeEncodeError, LookupError):
        return mode == "rich"
    return mode == "rich" or not terminal.is_dumb_terminal


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


class Terminal(rich.console.Console):
    """A rich console as wide as the terminal that it writes to: rich asks standard output."""

    @property
    def size(self) -> rich.console.ConsoleDimensions:
        # An error: it is no terminal.
        with contextlib.suppress(OSError, ValueError):
            found = os.get_terminal_size(self.file.fileno())
            # Zeros: the terminal does not know its size.
            if all(found):
                return rich.console.ConsoleDimensions(*found)
        return super().size


# Errors of a pipe that nobody reads, and of a terminal that was closed.
_GONE = (errno.EPIPE, errno.EIO, errno.ENXIO)


class Screen:
    """A text stream whose reader may go away, as with `| head`: later text is then dropped.

    Characters that the stream's encoding does not have, as on an ASCII terminal, are escaped.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

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
