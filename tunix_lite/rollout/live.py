"""A sampler that requests join and leave at any time, for servers.

One thread owns the devices. Other threads hand it requests, which get free slots in the order in
which they came. It decodes a chunk of tokens in all slots at once, and calls each request back with
its new tokens. A request's tokens depend on its prompt, its settings and its seed, and on nobody
else's.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout.live_programs import Joining, LivePrograms, SlotSampling
from tunix_lite.rollout.programs import DecodedChunk
from tunix_lite.rollout.scheduler import padded_width, widths_by_halves
from tunix_lite.types import Params

# Prompts that one prefill reads, at most. A single one is read alone.
PROMPTS_PER_PREFILL = 8
# Seconds that an idle thread sleeps, at most, until it looks whether it should end.
IDLE_SECONDS = 0.5


class TooManyRequests(Exception):
    """The waiting line is full."""


class EngineFailed(Exception):
    """The engine has ended, by a failure or because it was closed."""


@dataclass(frozen=True)
class DrawSettings:
    """Settings that draw the tokens of one sequence.

    Example: DrawSettings(temperature=0.7, top_p=0.95, seed=3).
    """

    # 0 takes the likeliest token
    temperature: float = 1.0
    top_p: float = 1.0
    # 0: all tokens
    top_k: int = 0
    # 0: all tokens
    min_p: float = 0.0
    seed: int = 0
    # index among the completions of the same prompt and seed
    generation: int = 0
    # the likeliest tokens that are reported at each position
    top_logprobs: int = 0

    @property
    def has_cutoffs(self) -> bool:
        """Returns whether some tokens can never be drawn."""
        is_cut = bool(self.top_k or self.top_p < 1 or self.min_p)
        return is_cut and self.temperature > 0


@dataclass
class NewTokens:
    """Tokens that one chunk added to a sequence.

    Example: NewTokens([12, 1], [-0.1, -0.02], [-0.1, -0.02], reason="eos").
    """

    tokens: list[int]
    # log-probabilities under the distribution that was drawn from
    logprobs: list[float]
    # log-probabilities under softmax(logits / temperature)
    full_logprobs: list[float]
    # (token, log-probability) of the likeliest tokens at each token; [] where none is asked for
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    # eos or length, once the sequence has ended; error with a message
    reason: str | None = None
    message: str = ""


@dataclass(eq=False)
class LiveSequence:
    """One completion under way.

    Example: LiveSequence([2, 17, 5], DrawSettings(), limit=64, on_tokens=print).
    """

    prompt: Sequence[int]
    draw: DrawSettings
    # tokens, at most
    limit: int
    # called in the engine's thread
    on_tokens: Callable[[NewTokens], None]
    number: int = -1
    is_cancelled: bool = False
    num_tokens: int = 0


class LiveEngine:
    """Decodes sequences in slots while others come and go.

    Example: engine = LiveEngine(programs, params, mesh, num_slots=16); engine.submit([sequence]);
    engine.close().
    """

    def __init__(
        self,
        programs: LivePrograms,
        per_layer_params: Params,
        mesh: jax.sharding.Mesh,
        num_slots: int,
        max_waiting: int = 256,
        eos_ids: Sequence[int] = (),
    ):
        """per_layer_params: as rollout.engine.make_prepare makes them. max_waiting: sequences that
        may wait for a slot."""
        self.programs = programs
        self.params = per_layer_params
        self.mesh = mesh
        self.num_slots = num_slots
        self.max_waiting = max_waiting
        self.eos_ids = frozenset(eos_ids)
        self.spec = programs.spec
        self.widths = widths_by_halves(self.spec.generation.max_prompt_length)

        # Shared with other threads, under the lock.
        self._lock = threading.Condition()
        self._waiting: deque[LiveSequence] = deque()
        self._is_closing = False
        self._deadline = float("inf")
        self._is_idle = True
        self.failure: BaseException | None = None
        # Told, once they are compiled, the names of programs and the seconds they took.
        self.on_compile: Callable[[str, float], None] | None = None

        # Of the engine's thread alone.
        self._owners: list[LiveSequence | None] = [None] * num_slots
        self._by_number: dict[int, LiveSequence] = {}
        self._stopped = np.zeros(num_slots, bool)
        self._in_flight: deque = deque()
        self._next_number = 0
        self._columns = 0
        self._slots = None
        self._prompt_cache = None
        self.tokens_sampled = 0
        self.prompt_tokens = 0
        self.chunks = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # ---- for other threads

    @property
    def num_running(self) -> int:
        """Slots that hold a sequence."""
        return sum(owner is not None for owner in self._owners)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return len(self._waiting)

    @property
    def is_alive(self) -> bool:
        """Returns whether it can take requests."""
        return self.failure is None and not self._is_closing and self._thread.is_alive()

    def submit(self, sequences: Sequence[LiveSequence]) -> None:
        """Puts sequences into the waiting line, all of them or none.

        Raises TooManyRequests if there is no room for all, EngineFailed if the engine has ended.
        """
        with self._lock:
            if not self.is_alive:
                raise EngineFailed("the engine does not take requests any more")
            if len(self._waiting) + len(sequences) > self.max_waiting + self._num_free():
                raise TooManyRequests(
                    f"{len(self._waiting)} sequences wait already; at most {self.max_waiting} may"
                )
            self._waiting.extend(sequences)
            self._is_idle = False
            self._lock.notify_all()

    def cancel(self, sequence: LiveSequence) -> None:
        """Ends a sequence; it is not called back any more."""
        with self._lock:
            sequence.is_cancelled = True
            self._lock.notify_all()

    def warm_up(self) -> None:
        """Samples from a prompt of one token, so that the programs of most requests are compiled.
        Programs of longer prompts, and of cut-offs, still compile when the first request needs
        them. Raises EngineFailed."""
        ended = threading.Event()
        failed: list[str] = []

        def on_tokens(new: NewTokens) -> None:
            if new.reason == "error":
                failed.append(new.message)
            if new.reason is not None:
                ended.set()

        self.submit([LiveSequence([0], DrawSettings(), 1, on_tokens)])
        ended.wait()
        if failed:
            raise EngineFailed(failed[0])

    def wait_until_idle(self) -> None:
        """Waits until no sequence is left and none is on the devices, or the engine has ended."""
        with self._lock:
            while not self._is_idle and self._thread.is_alive():
                self._lock.wait(IDLE_SECONDS)

    def set_params(self, per_layer_params: Params | None) -> None:
        """Samples with other weights from now on; None frees them, and nothing may be submitted
        until there are others. Raises ValueError while sequences are running."""
        with self._lock:
            if not self._is_idle:
                raise ValueError("the engine is sampling; wait until it is idle")
            self.params = per_layer_params

    def close(self, seconds: float = 0.0) -> None:
        """Takes no more requests, serves the present ones for so many seconds, and ends."""
        with self._lock:
            self._is_closing = True
            self._deadline = time.monotonic() + seconds
            self._lock.notify_all()
        self._thread.join()

    def _num_free(self) -> int:
        return self.num_slots - self.num_running

    # ---- the engine's thread

    def _run(self) -> None:
        try:
            with jax.set_mesh(self.mesh):
                while self._wait_for_work():
                    self._step()
        except BaseException as error:
            self.failure = error
        self._end_all()

    def _wait_for_work(self) -> bool:
        """Sleeps while it is idle; False when it should end."""
        with self._lock:
            while True:
                is_busy = bool(self._waiting or self._by_number or self._in_flight)
                is_over = time.monotonic() > self._deadline
                if self._is_closing and (is_over or not is_busy):
                    return False
                if is_busy:
                    return True
                self._is_idle = True
                self._lock.notify_all()
                self._lock.wait(IDLE_SECONDS)

    def _step(self) -> None:
        """One chunk: slots are filled, the next chunk starts, and the one before is read."""
        compiles = dict(self.programs.compiles)
        began = time.monotonic()
        self._drop_cancelled()
        self._fill()
        if self._by_number:
            self._start_chunk()
        if self.on_compile is not None and compiles != self.programs.compiles:
            new = [name for name, n in self.programs.compiles.items() if n != compiles.get(name)]
            self.on_compile(" and ".join(new), time.monotonic() - began)
        # While sequences run, a chunk is always under way when the one before is read.
        while len(self._in_flight) > (1 if self._by_number else 0):
            self._read_chunk()

    def _drop_cancelled(self) -> None:
        with self._lock:
            self._waiting = deque(one for one in self._waiting if not one.is_cancelled)
        for sequence in list(self._by_number.values()):
            if sequence.is_cancelled:
                self._release(sequence)

    def _release(self, sequence: LiveSequence) -> None:
        """Frees the slot of a sequence. The device may still decode it: it is told to stop."""
        slot = self._owners.index(sequence)
        self._owners[slot] = None
        self._stopped[slot] = True
        del self._by_number[sequence.number]

    def _take_waiting(self) -> list[LiveSequence]:
        """Takes the next sequences for free slots: of one padded width, as many as a prefill
        reads."""
        taken: list[LiveSequence] = []
        prompts: set[tuple[int, ...]] = set()
        with self._lock:
            while self._waiting and len(taken) < self._num_free():
                first = self._waiting[0]
                width = padded_width(len(first.prompt), self.widths)
                if taken and width != padded_width(len(taken[0].prompt), self.widths):
                    break
                prompts.add(tuple(first.prompt))
                if len(prompts) > PROMPTS_PER_PREFILL:
                    break
                taken.append(self._waiting.popleft())
        return taken

    def _fill(self) -> None:
        """Gives free slots to sequences that wait."""
        while taken := self._take_waiting():
            rows = self._prefill(taken)
            self._join(taken, rows)
        if self._stopped.any():
            self._join([], [])

    def _prefill(self, taken: list[LiveSequence]) -> list[int]:
        """Reads the prompts of these sequences, each once; returns their rows in the cache."""
        distinct: dict[tuple[int, ...], int] = {}
        rows = [distinct.setdefault(tuple(one.prompt), len(distinct)) for one in taken]
        count = 1 if len(distinct) == 1 else PROMPTS_PER_PREFILL
        count = -(-count // self.mesh.shape["fsdp"]) * self.mesh.shape["fsdp"]
        width = padded_width(max(map(len, distinct)), self.widths)
        tokens = np.zeros((count, width), np.int32)
        lengths = np.ones(count, np.int32)
        for prompt, row in distinct.items():
            tokens[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
        if self._prompt_cache is None:
            fsdp = self.mesh.shape["fsdp"]
            most = -(-PROMPTS_PER_PREFILL // fsdp) * fsdp
            self._prompt_cache = self.programs.make_prompt_cache(most)
        self._prompt_cache = self.programs.prefill(
            self._prompt_cache, self.params, tokens, lengths, np.int32(0)
        )
        self.prompt_tokens += sum(map(len, distinct))
        return rows

    def _join(self, taken: list[LiveSequence], rows: list[int]) -> None:
        """Puts prompts that were read into free slots, and stops slots that were freed."""
        B = self.num_slots
        zeros = np.zeros(B, np.int32)
        joining = Joining(
            rows=zeros.copy(),
            is_new=np.zeros(B, bool),
            requests=zeros.copy(),
            seeds=np.zeros(B, np.uint32),
            generations=zeros.copy(),
            limits=zeros.copy(),
            is_stopped=self._stopped.copy(),
        )
        free = [slot for slot, owner in enumerate(self._owners) if owner is None]
        for sequence, row, slot in zip(taken, rows, free):
            sequence.number = self._next_number
            self._next_number = (self._next_number + 1) % 2**31
            self._owners[slot] = sequence
            self._by_number[sequence.number] = sequence
            joining.rows[slot] = row
            joining.is_new[slot] = True
            joining.requests[slot] = sequence.number
            joining.seeds[slot] = sequence.draw.seed
            joining.generations[slot] = sequence.draw.generation
            joining.limits[slot] = sequence.limit
        self._stopped[:] = False
        self._fit_columns()
        if self._prompt_cache is None:
            return
        self._slots = self.programs.admit(self._slots, self._prompt_cache, joining)

    def _fit_columns(self) -> None:
        """A cache with as many columns as the sequences need until the next two chunks end."""
        ahead = (len(self._in_flight) + 1) * self.spec.chunk
        needed = self.widths[0]
        for one in self._by_number.values():
            needed = max(needed, len(one.prompt) + min(one.limit, one.num_tokens + ahead))
        columns = kv_cache.columns_in_use(needed, self.spec.max_length)
        if self._slots is None:
            self._slots = self.programs.make_slots(self.num_slots, columns)
        elif columns > self._columns:
            self._slots = self.programs.resize(self._slots, columns)
        else:
            return
        self._columns = columns

    def _start_chunk(self) -> None:
        self._fit_columns()
        owners = self._owners
        draws = [DrawSettings() if owner is None else owner.draw for owner in owners]
        how = SlotSampling(
            temperature=np.asarray([draw.temperature for draw in draws], np.float32),
            top_k=np.asarray([draw.top_k for draw in draws], np.int32),
            top_p=np.asarray([draw.top_p for draw in draws], np.float32),
            min_p=np.asarray([draw.min_p for draw in draws], np.float32),
        )
        has_cutoffs = any(draw.has_cutoffs for draw in draws)
        has_top = any(draw.top_logprobs for draw in draws)
        self._slots, decoded, top = self.programs.decode(
            has_cutoffs, has_top, self._slots, self.params, how
        )
        jax.tree.map(lambda x: x.copy_to_host_async(), (decoded, top))
        self._in_flight.append((decoded, top))
        self.chunks += 1

    def _read_chunk(self) -> None:
        """Calls back the sequences that got tokens in the oldest chunk under way."""
        decoded, top = jax.device_get(self._in_flight.popleft())
        for slot in np.flatnonzero(decoded.requests >= 0):
            sequence = self._by_number.get(int(decoded.requests[slot]))
            # The slot may hold one that has ended, or that was cancelled.
            if sequence is None or self._owners[slot] is not sequence or sequence.is_cancelled:
                continue
            new = self._new_tokens(sequence, int(slot), decoded, top)
            if new.reason is not None:
                self._release(sequence)
            sequence.on_tokens(new)

    def _new_tokens(
        self, sequence: LiveSequence, slot: int, decoded: DecodedChunk, top
    ) -> NewTokens:
        count = int((decoded.tokens[:, slot] >= 0).sum())
        logprobs = decoded.logprobs[:count, slot]
        if not np.isfinite(logprobs).all():
            message = "the model's scores are not finite: its weights are damaged or too large"
            return NewTokens([], [], [], reason="error", message=message)
        tokens = decoded.tokens[:count, slot].tolist()
        full = decoded.full_logprobs[:count, slot].tolist()
        new = NewTokens(tokens, logprobs.tolist(), full)
        most = sequence.draw.top_logprobs
        if most and top is not None:
            for t in range(count):
                ids = top.tokens[t, slot, :most].tolist()
                new.top.append(list(zip(ids, top.logprobs[t, slot, :most].tolist())))
        sequence.num_tokens += count
        self.tokens_sampled += count
        if not decoded.running[slot]:
            new.reason = "eos" if tokens and tokens[-1] in self.eos_ids else "length"
        return new

    def _end_all(self) -> None:
        """Tells all that are left that they end here."""
        with self._lock:
            self._is_closing = True
            left = [*self._by_number.values(), *self._waiting]
            self._waiting.clear()
        self._by_number.clear()
        why = "the server is stopping"
        if self.failure is not None:
            why = f"the engine failed: {self.failure}"
        for sequence in left:
            if not sequence.is_cancelled:
                sequence.on_tokens(NewTokens([], [], [], reason="error", message=why))
