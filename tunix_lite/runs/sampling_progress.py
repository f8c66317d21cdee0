"""Reports the progress of an evaluation, or of many prompts: completions done, speed, time left."""

from collections.abc import Sequence

from tunix_lite.basics.types import Rollout
from tunix_lite.parallel.compiling import stopwatch
from tunix_lite.rollout.requests import Request
from tunix_lite.tracking.console import seconds_in_words
from tunix_lite.tracking.progress import Output, Progress, after


class SamplingProgress(Progress):
    """Follows one rollout after another, and says how far they are. Example: `with
    SamplingProgress(StandardError(), [32]) as progress:`, then `generate(...,
    on_chunk=progress.on_chunk)`."""

    def __init__(self, output: Output, rollouts: Sequence[int], patience: float = 0.0):
        """rollouts: how many completions each one samples. patience: as of a Progress."""
        self._total = sum(rollouts)
        self._tokens = 0
        self._num_ended = 0
        # at the last chunk
        self._seconds = 0.0
        # seconds of sampling until now, without compiling
        self.elapsed = stopwatch()
        self._has_shown_rate = False

        def at_end(seconds: float) -> str:
            took = f"sampled {self._num_ended} completions in {seconds_in_words(seconds)}"
            return ", ".join([took, *self._rate()])

        super().__init__(output, self.text, at_end, patience)

    def on_chunk(self, requests: Sequence[Request], ended: dict[int, Rollout]) -> None:
        """Takes a chunk of the rollout, as make_generate gives it."""
        self._tokens += sum(request.num_new for request in requests)
        self._num_ended += sum(request.reason is not None for request in requests)
        self._seconds = self.elapsed()
        if not self._has_shown_rate and 0 < self._num_ended < self._total:
            self._has_shown_rate = True
            self.now()

    def _rate(self) -> list[str]:
        has_rate = self._tokens and self._seconds > 0
        return [f"{self._tokens / self._seconds:,.0f} tokens/s"] if has_rate else []

    def text(self, seconds: float) -> str:
        """`sampled 17 of 160 completions, 41 tokens/s, 2m10s left`: as if the other completions
        took as long as those that have ended."""
        total = self._total
        if not self._tokens:
            what = f"compiling the sampler and reading prompts, for {total} completions"
            return f"{what}{after(seconds)}"
        parts = [f"sampled {self._num_ended} of {total} completions", *self._rate()]
        if 0 < self._num_ended < total:
            left = self._seconds * (total - self._num_ended) / self._num_ended
            parts.append(f"{seconds_in_words(left)} left")
        return ", ".join(parts)
