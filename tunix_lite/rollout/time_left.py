"""Estimates the time left of a rollout, by its ended and its growing completions.

Short completions end first, so the mean length of those that have ended is too small. The lengths
are estimated as lifetimes are, with Kaplan and Meier: a completion that still grows, or was cut,
counts as one that is longer than it is now. Behind the longest that was seen, completions end at a
constant rate, which is that of all tokens so far. Then the remaining completions are dealt out to
the slots.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from tunix_lite.rollout.requests import Request

# Seconds between two estimates.
ESTIMATE_SECONDS = 1.0
# So many chunks must have been seen where prompts are read before every one of them.
CHUNKS_THAT_READ = 4
# Ends that are taken for seen, in as many tokens as one completion may have: so the rate at which
# completions end is never 0.
ENDS_BEFORE = 0.5


class SamplingClock:
    """Follows one rollout after another, such as greedy completions and then samples.

    Example: `clock = SamplingClock([32, 128])`; `clock.begin()` before each rollout,
    `clock.take(requests)` after each chunk, and `clock.seconds_left()` whenever it is asked.
    """

    def __init__(
        self,
        rollouts: Sequence[int],
        compile_seconds: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ):
        """rollouts: how many completions each one samples. compile_seconds: how long this process
        has compiled until now. clock: seconds, from any start."""
        self.total = sum(rollouts)
        self.tokens = 0
        self.num_ended = 0
        self._rollouts = list(rollouts)
        self._clock = clock
        self._compile_seconds = compile_seconds
        # Of completions that have ended: tokens, and whether they ended by themselves.
        self._ended: list[tuple[int, bool]] = []
        # Of the rollout under way: its number, requests that grow by their identity, and those that
        # have ended.
        self._number = -1
        self._running: dict[int, Request] = {}
        self._ended_here = 0
        self._num_slots = 1
        # tokens of each running request after the chunk before
        self._tokens_before: dict[int, int] = {}
        # Tokens of a chunk; of each in which nothing compiled: seconds, tokens, and tokens of
        # prompts that were read before it.
        self._chunk = 1
        self._chunks: deque[tuple[float, int, int]] = deque(maxlen=200)
        # tokens of prompts of the rollout under way: read, and to be read
        self._prompts = (0, 0)
        self._read_at: float | None = None
        self._compiled_before = 0.0
        # when the rollout began, and seconds until its first chunk, compiling left out
        self._began = 0.0
        self._reading = 0.0
        # the last estimate, and when it was made
        self._left: tuple[float, float] | None = None

    def begin(self) -> None:
        """The next rollout begins."""
        self._number += 1
        self._running.clear()
        self._tokens_before.clear()
        self._ended_here = 0
        self._read_at = None
        self._prompts = (0, 0)
        self._began = self._clock()
        self._compiled_before = self._compile_seconds()

    @property
    def has_sampled(self) -> bool:
        """Returns whether a chunk was read."""
        return bool(self.tokens)

    def take(self, requests: Sequence[Request]) -> None:
        """The requests that got tokens in a chunk."""
        now = self._clock()
        new = 0
        for request in requests:
            grown = len(request.tokens) - self._tokens_before.get(id(request), 0)
            new += grown
            self._chunk = max(self._chunk, grown)
            self._running[id(request)] = request
            self._tokens_before[id(request)] = len(request.tokens)
        self._num_slots = max(self._num_slots, len(requests))
        self.tokens += new
        before = self._prompts[0]
        self._prompts = max((request.prompts_read for request in requests), default=self._prompts)
        self._time_chunk(now, new, self._prompts[0] - before)
        for request in requests:
            if request.reason is not None:
                del self._running[id(request)]
                self.num_ended += 1
                self._ended_here += 1
                self._ended.append((len(request.tokens), request.reason != "length"))
        if self._left is None or now - self._left[1] >= ESTIMATE_SECONDS:
            self._left = self._estimate(now)

    def _time_chunk(self, now: float, new: int, read: int) -> None:
        """The first chunk of a rollout waits for its prompts, and a chunk that compiles says
        nothing about those to come: neither counts."""
        compiled = self._compile_seconds()
        if self._read_at is None:
            self._reading = max(0.0, now - self._began - (compiled - self._compiled_before))
        elif compiled == self._compiled_before:
            self._chunks.append((now - self._read_at, new, read))
        self._compiled_before = compiled
        self._read_at = now

    def tokens_per_second(self) -> float | None:
        """Returns the speed without compiling and reading prompts; None: not known yet."""
        chunks = self._chunks_that_count()
        seconds = sum(seconds for seconds, _, _ in chunks)
        tokens = sum(tokens for _, tokens, _ in chunks)
        return tokens / seconds if seconds else None

    def _chunks_that_count(self) -> list[tuple[float, int, int]]:
        """Returns the chunks before which no prompt was read, or all where prompts are read before
        every chunk."""
        # A copy at once: another thread may ask while a chunk is taken.
        chunks = list(self._chunks)
        plain = [chunk for chunk in chunks if not chunk[2]]
        return plain or (chunks if len(chunks) >= CHUNKS_THAT_READ else [])

    def seconds_left(self) -> float | None:
        """Returns the seconds until all rollouts have ended; None: not known yet."""
        if self._left is None:
            return None
        left, made_at = self._left
        return max(0.0, left - (self._clock() - made_at))

    def _estimate(self, now: float) -> tuple[float, float] | None:
        chunks = self._chunks_that_count()
        if not chunks:
            return None
        # Later chunks may be slower, as sequences have become longer: the last half of them counts.
        last = chunks[len(chunks) // 2 :]
        seconds_of_chunk = sum(seconds for seconds, _, _ in last) / len(last)

        # Prompts that are still to be read, as far as they do not count already.
        readers = [chunk for chunk in self._chunks if chunk[2]]
        later = len(self._rollouts) - 1 - self._number
        reading = self._reading * later
        if readers and chunks != list(self._chunks):
            extra = sum(seconds - seconds_of_chunk for seconds, _, _ in readers)
            per_token = max(0.0, extra) / sum(read for _, _, read in readers)
            read, unread = self._prompts
            reading = per_token * (unread + later * (read + unread))
        return self._chunks_left() * seconds_of_chunk + reading, now

    def _chunks_left(self) -> int:
        """Chunks until this rollout and those behind it have ended."""
        running = list(self._running.values())
        waiting = max(0, self._rollouts[self._number] - self._ended_here - len(running))
        limit = max((request.limit for request in running), default=self._longest)
        lengths = LengthEstimate(self._ended, [len(request.tokens) for request in running], limit)
        grown = np.array([len(request.tokens) for request in running], int)
        limits = np.array([request.limit for request in running], int)
        left = np.minimum(lengths.draw(grown), limits) - grown
        chunks = self._dealt_out(left, lengths.draw(np.zeros(waiting, int)))
        for count in self._rollouts[self._number + 1 :]:
            chunks += self._dealt_out((), lengths.draw(np.zeros(count, int)))
        return chunks

    @property
    def _longest(self) -> int:
        return max((length for length, _ in self._ended), default=1)

    def _dealt_out(self, running: Sequence[int], waiting: Sequence[int]) -> int:
        """Counts the chunks until the slots have sampled so many tokens for each completion; a slot
        takes the next one when it is free."""
        slots = [-(-int(tokens) // self._chunk) for tokens in running]
        slots += [0] * (self._num_slots - len(slots))
        heapq.heapify(slots)
        for tokens in waiting:
            heapq.heapreplace(slots, slots[0] + -(-int(tokens) // self._chunk))
        return max(slots)


class LengthEstimate:
    """Estimates the lengths of completions, by those that have ended and those that still grow.

    Example: `LengthEstimate([(7, True)], [9, 9], limit=16).draw(np.array([9]))` is the length of
    one that has 9 tokens now.
    """

    def __init__(self, ended: Sequence[tuple[int, bool]], growing: Sequence[int], limit: int):
        """ended: tokens of each, and whether it ended by itself. limit: tokens, at most."""
        tokens = np.array([tokens for tokens, _ in ended] + list(growing), int)
        is_end = np.array([ends for _, ends in ended] + [False] * len(growing), bool)
        last = int(tokens.max(initial=0))

        # log of the share that becomes longer than t tokens, for t up to the limit.
        lengths = np.arange(limit + 1)
        ends = np.bincount(np.minimum(tokens[is_end], limit), minlength=limit + 1)
        counts = np.bincount(np.minimum(tokens, limit), minlength=limit + 1)
        at_risk = counts[::-1].cumsum()[::-1]
        share = np.minimum(ends / np.maximum(at_risk, 1), 1 - 1e-9)
        rate = (is_end.sum() + ENDS_BEFORE) / (tokens.sum() + limit)
        self._limit = limit
        self._log_longer = np.cumsum(np.log1p(-share))
        self._log_longer -= rate * np.maximum(0, lengths - last)

    def draw(self, grown: np.ndarray) -> np.ndarray:
        """Draws a length for each of so many completions, which have `grown` tokens now: quantiles,
        in a fixed order without a pattern."""
        count = len(grown)
        quantiles = (np.random.default_rng(0).permutation(count) + 0.5) / count
        longer = self._log_longer[np.minimum(grown, self._limit)] + np.log(quantiles)
        lengths = np.searchsorted(-self._log_longer, -longer)
        return np.minimum(np.maximum(lengths, grown + 1), np.maximum(self._limit, grown))
