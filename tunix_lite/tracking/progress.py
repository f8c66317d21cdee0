"""Shows work that takes long: on a terminal one line, which is rewritten; elsewhere a whole line at
the start, one every 30 s, and one at the end."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

import jax

from tunix_lite.tracking.console import Console, Screen, seconds_in_words

# Seconds between two whole lines, and between two looks at a line that is rewritten.
LINE_SECONDS = 30.0
LOOK_SECONDS = 0.5
# Work that is over sooner says nothing, where it need not.
SHORT_SECONDS = 1.0
_DONE = {"loading": "loaded", "writing": "wrote", "reading back": "read back"}


class StandardError:
    """Standard error of the first process; the others are silent.
    Example: `Progress(StandardError(), lambda seconds: "compiling the sampler")`."""

    def __init__(self):
        self._speaks = jax.process_index() == 0
        self._screen = Screen(sys.stderr)

    def show(self, text: str) -> None:
        """Rewrites the line, as far as the terminal has columns."""
        if self._speaks:
            self._screen.rewrite(text)

    def note(self, text: str) -> None:
        """Prints a line, if it is no terminal."""
        if not self._screen.can_rewrite:
            self.say(text)

    def say(self, text: str) -> None:
        """Prints a line."""
        if self._speaks:
            self._screen.print(text)


# where progress is shown
Output = StandardError | Console


class Progress:
    """Shows `doing(seconds)`, by a thread, while the work inside of it goes on, and `done(seconds)`
    at its end. Work that is over within `patience` seconds says nothing, and so does one that
    fails.
    Example: `with Progress(StandardError(), lambda s: f"read {n} of 9", lambda s: f"read in
    {s}"):`"""

    def __init__(
        self,
        output: Output,
        doing: Callable[[float], str],
        done: Callable[[float], str] | None = None,
        patience: float = 0.0,
    ):
        """doing: the text after so many seconds; another thread calls it."""
        self.output = output
        self._doing = doing
        self._done = done
        self._patience = patience
        self._over = threading.Event()
        # One of them writes at a time.
        self._lock = threading.Lock()
        self._has_begun = patience <= 0
        self._noted = 0.0
        self._began = 0.0
        self._thread = threading.Thread(target=self._look_at_times, daemon=True)

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self.now()
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        self._over.set()
        # The thread may be about to write the line once more.
        self._thread.join()
        self.output.show("")
        if self._has_begun and kind is None and self._done is not None:
            self.output.say(self._done(time.monotonic() - self._began))

    def say(self, text: str) -> None:
        """Prints a whole line, once the work takes longer than `patience`."""
        if self._has_begun:
            with self._lock:
                self.output.say(text)

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Around a result that is printed: the line of a terminal makes room for it."""
        with self._lock:
            self.output.show("")
            yield

    def now(self) -> None:
        """Shows the text now, and as a whole line where no line is rewritten."""
        if not self._has_begun:
            return
        with self._lock:
            self._noted = time.monotonic()
            text = self._doing(self._noted - self._began)
            self.output.note(text)
            self.output.show(text)

    def _look_at_times(self) -> None:
        # A full disk, where it is a log that is written, is told by who does the work.
        with contextlib.suppress(OSError):
            if not self._has_begun:
                if self._over.wait(self._patience):
                    return
                self._has_begun = True
                self.now()
            while not self._over.wait(LOOK_SECONDS):
                now = time.monotonic()
                if now - self._noted >= LINE_SECONDS:
                    self.now()
                else:
                    with self._lock:
                        self.output.show(self._doing(now - self._began))


class BytesProgress(Progress):
    """How many bytes of a model were read or written, of how many: `on_bytes` of models.hf.
    Example: `with BytesProgress(StandardError(), "loading", "bundled") as on_bytes:` says "loading
    bundled: 1.2 of 2.5 MB" once it takes longer than a second."""

    def __init__(self, output: Output, verb: str, what: str, patience: float = SHORT_SECONDS):
        """verb: loading or writing."""
        self._megabytes = (0.0, 0.0)

        def doing(seconds: float) -> str:
            done, total = self._megabytes
            size = f": {done:,.0f} of {total:,.0f} MB" if total else ""
            return f"{verb} {what}{size}"

        def done(seconds: float) -> str:
            _, total = self._megabytes
            size = f", {total:,.0f} MB" if total else ""
            return f"{_DONE[verb]} {what}{size}, in {seconds_in_words(seconds)}"

        super().__init__(output, doing, done, patience)

    def __call__(self, done: int, total: int) -> None:
        self._megabytes = (done / 1e6, total / 1e6)


def compiling(output: Output, what: str) -> Progress:
    """Around the compilation of a program: `compiling the update, 12 s`."""
    return Progress(
        output,
        lambda seconds: f"compiling {what}{after(seconds)}",
        lambda seconds: f"compiled {what} in {seconds_in_words(seconds)}",
    )


def after(seconds: float) -> str:
    """`, 12 s`: how long something has taken; "" at its beginning."""
    return f", {seconds_in_words(seconds)}" if seconds >= 1 else ""
