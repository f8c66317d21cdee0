"""What a check says: one line each, as it should be, to be looked at, or to be mended."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from typing import TextIO

from tunix_lite.plain_text import escaped

# state -> its mark, its plain letters, and its colour on a terminal
STATES = {
    "ok": ("✔", "ok  ", "32"),
    "warns": ("!", "warn", "33"),
    "fails": ("✘", "FAIL", "31"),
}
# Characters of a line that are shown.
MOST = 600


@dataclass(frozen=True)
class CheckLine:
    """One thing that was looked at.

    Example: `CheckLine("fails", "disk", "outputs/ is read-only", "hydra.run.dir=/a/folder")`.
    """

    # ok, warns or fails
    state: str
    name: str
    text: str
    # the command or the setting that mends it; what fails always has one
    fix: str | None = None

    def __post_init__(self):
        assert self.state in STATES, self.state
        assert self.state != "fails" or self.fix, f"{self.name}: what mends it?"


def ok(name: str, text: str) -> CheckLine:
    return CheckLine("ok", name, text)


def warns(name: str, text: str, fix: str | None = None) -> CheckLine:
    return CheckLine("warns", name, text, fix)


def fails(name: str, text: str, fix: str) -> CheckLine:
    return CheckLine("fails", name, text, fix)


class LinePrinter:
    """Keeps lines, and prints them with marks where the stream has them, else with plain letters.

    Example: `LinePrinter(sys.stdout).show(ok("python", "3.11.9"))` prints `✔ python  3.11.9`.
    """

    def __init__(self, stream: TextIO, is_quiet: bool = False, is_first: bool = True):
        """is_quiet: print nothing. is_first: of several processes only the first prints what is in
        order; each prints what is not."""
        self.lines: list[CheckLine] = []
        self._is_quiet = is_quiet
        self._is_first = is_first
        is_dumb = os.environ.get("TERM") == "dumb"
        self._stream = stream
        self._encoding = (stream.encoding or "utf-8").lower()
        self._has_marks = self._encoding.startswith("utf") and not is_dumb
        self._is_terminal = stream.isatty() and not is_dumb

    def show(self, *lines: CheckLine) -> None:
        """Prints lines, and below each what mends it."""
        self.lines += lines
        for line in lines:
            if self._is_quiet or not (self._is_first or line.state == "fails"):
                continue
            mark, letters, colour = STATES[line.state]
            start = mark = mark if self._has_marks else letters
            arrow = "→" if self._has_marks else "->"
            if self._is_terminal and not os.environ.get("NO_COLOR"):
                start = f"\x1b[{colour}m{mark}\x1b[0m"
            self._write(f"{start} {line.name:<14}{escaped(line.text, MOST)}")
            if line.fix:
                self._write(f"{' ' * len(mark)} {'':<14}{arrow} {escaped(line.fix, MOST)}")

    def waiting(self, what: str, seconds: float) -> None:
        """On a terminal, what the check waits for; the next line replaces it."""
        if self._is_terminal and self._is_first and not self._is_quiet:
            print(f"\r  {what}, {seconds:.0f} s\x1b[K", end="", file=self._stream, flush=True)

    def _write(self, text: str) -> None:
        text = text.encode(self._encoding, "backslashreplace").decode(self._encoding)
        clear = "\r\x1b[K" if self._is_terminal else ""
        print(f"{clear}{text}", file=self._stream, flush=True)


def look_within(seconds: float, name: str, look: Callable[[], list[CheckLine]]) -> list[CheckLine]:
    """What `look` finds, or a line that fails if it has not answered in so many seconds.

    A folder on a server that is gone may never answer; its thread is then left behind.
    """
    found: list[CheckLine] = []

    def run() -> None:
        try:
            found.extend(look())
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            found.append(fails(name, f"cannot be looked at: {what}", "see the message"))

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        text = f"no answer in {seconds:.0f} s"
        return [fails(name, text, "look at the disk, the network or the driver behind it")]
    return found
