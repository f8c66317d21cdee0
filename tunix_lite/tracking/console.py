"""What a run says: a panel at the start, a live line on a terminal or a plain line a step in a
pipe, and samples.

Everything said also goes to train.log as plain text. Model output is never read as markup, and what
in it would act on a terminal is escaped.
"""

import contextlib
import errno
import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import rich.console
import rich.live
import rich.panel
import rich.table
import rich.text

from tunix_lite.plain_text import SHOWN, visible
from tunix_lite.types import Metrics


class Console:
    """The voice of one run."""

    def __init__(
        self, log_file: Path, max_steps: int, every: int = 1, stream=None, quiet: bool = False
    ):
        """quiet: says nothing on the screen, as of several processes all but the first."""
        stream = open(os.devnull, "w") if quiet else stream  # noqa: SIM115
        self._terminal = Terminal(file=Screen(stream or sys.stdout), highlight=False)
        self._log = log_file.open("a", encoding="utf-8")
        self._live = None
        self._max_steps, self._every = max_steps, every
        self._began, self._first_step = None, 0

    # ---- the start

    def panel(self, title: str, rows: list[tuple[str, str]]) -> None:
        """The start-up panel: what runs, on what, how much at a time, and where it writes."""
        title, rows = visible(title), [(name, visible(text)) for name, text in rows]
        if self._terminal.is_terminal:
            table = rich.table.Table.grid(padding=(0, 2))
            for name, text in rows:
                table.add_row(rich.text.Text(name, style="bold cyan"), rich.text.Text(text))
            self._terminal.print(
                rich.panel.Panel(table, title=rich.text.Text(title), title_align="left")
            )
        else:
            for line in [title, *(f"  {name:<11}{text}" for name, text in rows)]:
                self._print(line)
        self._write(title, *(f"  {name:<11}{text}" for name, text in rows))

    def say(self, text: str, style: str = "") -> None:
        """One line, now."""
        self._print(text, style)
        self._write(text)

    def busy(self, text: str) -> None:
        """What is being done that takes a while and says nothing itself: loading, compiling,
        saving."""
        if self._terminal.is_terminal:
            self._show(text)
        else:
            self._print(text)
        self._write(text)

    # ---- every step

    def log(self, step: int, metrics: Metrics) -> None:
        line = self.line(step, metrics)
        # the first step compiles: the pace begins after it
        if self._began is None and "time/step" in metrics:
            self._began, self._first_step = time.perf_counter(), step
        self._write(line)
        if self._terminal.is_terminal:
            self._show(line)
            if "eval/accuracy" in metrics:
                self._print(line)
        elif step % self._every == 0 or step == self._max_steps or "eval/accuracy" in metrics:
            self._print(line)

    def line(self, step: int, metrics: Metrics) -> str:
        """`step 12/120 10% | reward 0.41 | ...`, of what there is."""
        parts = [f"step {step}/{self._max_steps} {step / self._max_steps:.0%}"]
        if self._began is not None and step > self._first_step:
            pace = (time.perf_counter() - self._began) / (step - self._first_step)
            parts.append(f"eta {minutes(pace * (self._max_steps - step))}")
        for key, text in (
            ("train/loss", "loss {:.4f}"),
            ("reward/mean", "reward {:.3f}"),
            ("completions/correct", "right {:.0%}"),
            ("eval/accuracy", "held-out accuracy {:.1%}"),
            ("completions/mean_length", "length {:.1f}"),
            ("completions/truncated", "cut {:.0%}"),
            ("train/kl", "kl {:.4f}"),
            ("train/entropy", "entropy {:.3f}"),
            ("train/grad_norm", "grad {:.2f}"),
            ("train/learning_rate", "lr {:.1e}"),
            ("time/step", "{:.2f} s/step"),
        ):
            if key in metrics:
                parts.append(text.format(metrics[key]))
        return " | ".join(parts)

    def samples(self, step: int, rows: list[dict]) -> None:
        """Completions with the extracted answer marked right or wrong."""
        for row in rows:
            mark, style = ("right", "green") if row["correct"] else ("wrong", "red")
            answer = "no answer" if row["extracted"] is None else _cut(row["extracted"])
            text = row["completion"][: SHOWN + 1].replace("\n", " ⏎ ")
            line = f"  {mark}  {_cut(row['prompt'])}  →  {_cut(text)}  [{answer}]"
            self._print(line, style)
            self._write(line)

    def close(self) -> None:
        self._hide()
        self._log.close()

    # ---- how

    def _print(self, text: str, style: str = "") -> None:
        text = visible(text)
        if self._terminal.is_terminal:
            self._terminal.print(rich.text.Text(text, style=style))
        else:
            print(text, file=self._terminal.file, flush=True)

    def _show(self, text: str) -> None:
        text = visible(text)
        shown = rich.text.Text(
            text, no_wrap=True, overflow="ellipsis", style="dim" if text.endswith("…") else ""
        )
        if self._live is None:
            self._live = rich.live.Live(
                console=self._terminal, refresh_per_second=4, transient=True
            )
            self._live.start()
        self._live.update(shown)

    def _hide(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _write(self, *lines: str) -> None:
        self._log.write("".join(f"{time.strftime('%H:%M:%S')} {visible(line)}\n" for line in lines))
        self._log.flush()


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


class Terminal(rich.console.Console):
    """As wide as the terminal that it writes to: standard output may be another file."""

    @property
    def size(self) -> rich.console.ConsoleDimensions:
        # no terminal
        with contextlib.suppress(OSError, ValueError):
            found = os.get_terminal_size(self.file.fileno())
            # a terminal may not know
            if all(found):
                return rich.console.ConsoleDimensions(*found)
        return super().size


# nobody reads the pipe; the terminal was closed
GONE = (errno.EPIPE, errno.EIO, errno.ENXIO)


class Screen:
    """A stream that may go away, as with `| head` or a closed terminal: what is written afterwards
    is dropped.

    What its encoding does not have, as where a terminal is set to ASCII, is escaped.
    """

    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        self._or_drop(lambda: self._stream.write(text))

    def flush(self) -> None:
        self._or_drop(self._stream.flush)

    def _or_drop(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if error.errno not in GONE:
                raise
            with contextlib.suppress(OSError, ValueError):
                to_nowhere(self._stream.fileno())
            self._stream = open(os.devnull, "w")  # noqa: SIM115


def to_nowhere(gone: int) -> None:
    """This file, and standard error if it is the same terminal, become nowhere: or Python would
    fail at its end."""
    was, nowhere = os.fstat(gone), os.open(os.devnull, os.O_WRONLY)
    for file in {gone, sys.__stderr__.fileno()}:
        now = os.fstat(file)
        if file == gone or (
            stat.S_ISCHR(was.st_mode) and (now.st_dev, now.st_ino) == (was.st_dev, was.st_ino)
        ):
            os.dup2(nowhere, file)
    os.close(nowhere)


def minutes(seconds: float) -> str:
    """`48s`, `2m05s`, `3h12m`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
