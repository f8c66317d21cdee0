"""What a check says: one line each, as it should be, to be looked at, or to be mended."""

import os
import sys
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
    """Prints lines with marks where the stream has them, else with plain letters.

    Example: `LinePrinter(sys.stdout).show(ok("python", "3.11.9"))` prints `✔ python  3.11.9`.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._is_coloured = self._is_terminal and not os.environ.get("NO_COLOR")
        self._has_marks = os.environ.get("TERM") != "dumb" and _can_write("✔✘…", stream)

    def show(self, line: CheckLine) -> None:
        """Prints a line, and below it what mends it."""
        mark, letters, colour = STATES[line.state]
        mark = mark if self._has_marks else letters
        start = f"\x1b[{colour}m{mark}\x1b[0m" if self._is_coloured else mark
        self._write(f"{start} {line.name:<14}{escaped(line.text, MOST)}")
        if line.fix:
            self._write(f"{' ' * len(mark)} {'':<14}→ {escaped(line.fix, MOST)}")

    def waiting(self, what: str, seconds: float) -> None:
        """On a terminal, what the check waits for; the next line replaces it."""
        if self._is_terminal:
            print(f"\r  {what}, {seconds:.0f} s\x1b[K", end="", file=self._stream, flush=True)

    def _write(self, text: str) -> None:
        if not self._has_marks:
            text = text.replace("→", "->").replace("…", "...")
        encoding = self._stream.encoding or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        clear = "\r\x1b[K" if self._is_terminal else ""
        print(f"{clear}{text}", file=self._stream, flush=True)


def _can_write(text: str, stream: TextIO) -> bool:
    try:
        text.encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


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


def exit_code(lines: list[CheckLine]) -> int:
    """1 if anything fails, else 0."""
    return int(any(line.state == "fails" for line in lines))


def leave(code: int) -> None:
    """Ends the process although a thread may still wait for a disk or a device."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
