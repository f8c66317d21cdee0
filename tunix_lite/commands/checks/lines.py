"""What a check says: one line each, as it should be, to be looked at, or to be mended."""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from typing import TextIO

from tunix_lite.files.plain_text import escaped

# state -> its mark, and its plain letters
STATES = {"ok": ("✔", "ok  "), "warns": ("!", "warn"), "fails": ("✘", "FAIL")}
# Characters of a line that are shown.
SHOWN = 600


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
        assert self.state != "fails" or self.fix, f"{self.name}: what mends it?"

    def print_to(self, stream: TextIO) -> None:
        """Prints the line, and below it what mends it: with marks where the stream has them."""
        encoding = (stream.encoding or "utf-8").lower()
        has_marks = encoding.startswith("utf")
        mark = STATES[self.state][0 if has_marks else 1]
        text = f"{mark} {self.name:<14}{escaped(self.text, SHOWN)}"
        if self.fix:
            indent = " " * (len(mark) + 15)
            text += f"\n{indent}{'→' if has_marks else '->'} {escaped(self.fix, SHOWN)}"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        print(text, file=stream, flush=True)


def ok(name: str, text: str) -> CheckLine:
    return CheckLine("ok", name, text)


def warns(name: str, text: str, fix: str) -> CheckLine:
    return CheckLine("warns", name, text, fix)


def fails(name: str, text: str, fix: str) -> CheckLine:
    return CheckLine("fails", name, text, fix)


def look_within(
    seconds: float, name: str, look: Callable[[], list[CheckLine]]
) -> list[CheckLine]:
    """What `look` finds, or a line that fails if it has not answered in so many seconds.

    A folder on a server that is gone may never answer; its thread is then left behind.
    """
    lines: list[CheckLine] = []

    def run() -> None:
        try:
            lines.extend(look())
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            lines.append(fails(name, f"cannot be looked at: {what}", "see the message"))

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        text = f"no answer in {seconds:.0f} s"
        return [fails(name, text, "look at the disk, the network or the driver behind it")]
    return lines
