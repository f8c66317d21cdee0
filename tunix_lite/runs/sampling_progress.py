"""Reports the progress of an evaluation, or of many prompts: completions done, speed, time left."""

import time
from collections.abc import Callable, Sequence

from tunix_lite.basics.types import Rollout
from tunix_lite.parallel.compiling import compile_seconds
from tunix_lite.rollout.requests import Request
from tunix_lite.tracking.console import seconds_in_words
from tunix_lite.tracking.progress import Output, Progress, after


class SamplingClock:
    """Estimates the time left, as if the other completions took as long as those that have ended.
    Example: `clock = SamplingClock(160)`; `clock.take(requests)` after each chunk."""

    def __init__(
        self,
        total: int,
        compile_seconds: Callable[[], float] = compile_seconds,
        clock: Callable[[], float] = time.monotonic,
    ):
        """total: completions. compile_seconds: how long this process has compiled until now. clock:
        seconds, from any start."""
        self.total = total
        self.tokens = 0
        self.num_ended = 0
        # Compiling is no part of the rate.
        self._working_seconds = lambda: clock() - compile_seconds()
        self._began = self._working_seconds()
        self.seconds = 0.0

    def take(self, requests: Sequence[Request]) -> None:
        """Takes the requests that got tokens in a chunk."""
        self.tokens += sum(request.num_new for request in requests)
        self.num_ended += sum(request.reason is not None for request in requests)
        self.seconds = self._working_seconds() - self._began

    def tokens_per_second(self) -> float | None:
        """Returns the speed so far; None: not known yet."""
        return self.tokens / self.seconds if self.tokens and self.seconds > 0 else None

    def seconds_left(self) -> float | None:
        """Returns the seconds until all completions have ended; None: none has ended yet."""
        if not self.num_ended:
            return None
        since = self._working_seconds() - self._began - self.seconds
        left = self.seconds * (self.total - self.num_ended) / self.num_ended
        return max(0.0, left - since)


class SamplingProgress(Progress):
    """Follows one rollout after another, and says how far they are. Example: `with
    SamplingProgress(StandardError(), [32]) as progress:`, then `generate(...,
    on_chunk=progress.on_chunk)`."""

    def __init__(
        self,
        output: Output,
        rollouts: Sequence[int],
        patience: float = 0.0,
    ):
        """rollouts: how many completions each one samples. patience: as of a Progress."""
        self.clock = SamplingClock(sum(rollouts))
        super().__init__(output, self.text, self._text_at_end, patience)
        self._compiled_before = compile_seconds()
        self._is_rate_said = False

    def on_chunk(self, requests: Sequence[Request], ended: dict[int, Rollout]) -> None:
        """Takes a chunk of the rollout, as make_generate gives it."""
        has_begun = bool(self.clock.tokens)
        self.clock.take(requests)
        compiled = compile_seconds() - self._compiled_before
        if not has_begun and compiled >= 1:
            self.say(f"compiled the sampler in {seconds_in_words(compiled)}")
        if not self._is_rate_said and 0 < self.clock.num_ended < self.clock.total:
            self._is_rate_said = True
            self.now()

    # ---- in words

    def text(self, seconds: float) -> str:
        """`sampled 17 of 160 completions, 41 tokens/s, 2m10s left`."""
        clock = self.clock
        if not clock.tokens:
            what = f"compiling the sampler and reading prompts, for {clock.total} completions"
            return f"{what}{after(seconds)}"
        parts = [f"sampled {clock.num_ended} of {clock.total} completions"]
        left = clock.seconds_left()
        if rate := clock.tokens_per_second():
            parts.append(f"{rate:,.0f} tokens/s")
        if clock.num_ended < clock.total and left is not None:
            parts.append(f"{seconds_in_words(left)} left")
        return ", ".join(parts)

    def _text_at_end(self, seconds: float) -> str:
        rate = self.clock.tokens_per_second()
        speed = [] if rate is None else [f"{rate:,.0f} tokens/s"]
        text = f"sampled {self.clock.num_ended} completions in {seconds_in_words(seconds)}"
        return ", ".join([text, *speed])
