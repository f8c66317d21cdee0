"""A sampler that requests join and leave at any time, for servers. One thread owns the devices. A
request's tokens depend on its prompt, its settings and its seed, and on nobody else's."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from tunix_lite.basics.types import Params
from tunix_lite.rollout.engine import Engine
from tunix_lite.rollout.programs import Programs
from tunix_lite.rollout.requests import DrawSettings, Request, StopCriteria

# Prompts that one prefill reads, at most. A single one is read alone.
_PROMPTS_PER_PREFILL = 8
# Seconds that an idle thread sleeps, at most, until it looks whether it should end.
_IDLE_SECONDS = 0.5
_NOT_FINITE = "the model's scores are not finite: its weights are damaged or too large"


class TooManyRequests(Exception):
    """The waiting line is full."""


class EngineFailed(Exception):
    """The engine has ended, by a failure or because it was closed."""


@dataclass
class NewTokens:
    """Tokens that one chunk added to a sequence.
    Example: NewTokens([12, 1], [-0.1, -0.02], [-0.1, -0.02], reason="eos")."""

    tokens: list[int]
    logprobs: list[float]  # log-probabilities under the distribution that was drawn from
    full_logprobs: list[float]  # log-probabilities under softmax(logits / temperature)
    # eos, stop or length, once the sequence has ended; error with a message
    reason: str | None = None
    message: str = ""


class LiveSequence(Request):
    """A completion under way, of a server.
    Example: LiveSequence([2, 17, 5], DrawSettings(), limit=64, on_tokens=print)."""

    def __init__(
        self,
        prompt: Sequence[int],
        draw: DrawSettings,
        limit: int,
        on_tokens: Callable[[NewTokens], None],
        criteria: StopCriteria | None = None,
    ):
        """limit: tokens, at most. on_tokens: called in the engine's thread. criteria: what else
        ends it."""
        ids = tuple(prompt)
        super().__init__(0, 0, draw.generation, limit, ids, draw=draw, criteria=criteria)
        self.on_tokens = on_tokens
        self.is_cancelled = False


class LiveEngine:
    """Decodes sequences in slots while others come and go.
    Example: LiveEngine(programs, params, mesh, num_slots=16).submit([sequence])."""

    def __init__(
        self,
        programs: Programs,
        per_layer_params: Params,
        mesh: jax.sharding.Mesh,
        num_slots: int,
        max_waiting: int = 256,
        eos_ids: Sequence[int] = (),
    ):
        """programs: of a spec with per_request. max_waiting: sequences that may wait for a slot."""
        fsdp = mesh.shape["fsdp"]
        # Prompts that fsdp does not divide would all be read by every device.
        block = -(-_PROMPTS_PER_PREFILL // fsdp) * fsdp
        criteria = StopCriteria(dict.fromkeys(eos_ids, "eos"))
        self.engine = Engine(
            programs, per_layer_params, num_slots, num_slots, [fsdp, block], 1, criteria
        )
        self.programs = programs
        self.spec = programs.spec
        self.mesh = mesh
        self.num_slots = num_slots
        self.max_waiting = max_waiting

        # Shared with other threads, under the lock.
        self._lock = threading.Condition()
        self._waiting: deque[LiveSequence] = deque()
        self._cancelled: list[LiveSequence] = []
        self._is_closing = False
        self._deadline = float("inf")
        self._is_idle = True
        self.failure: BaseException | None = None

        # Of the engine's thread alone.
        self._sequences: set[LiveSequence] = set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # ---- for other threads

    @property
    def is_alive(self) -> bool:
        """Returns whether it can take requests."""
        return self.failure is None and not self._is_closing and self._thread.is_alive()

    def submit(self, sequences: Sequence[LiveSequence]) -> None:
        """Puts all sequences into the line, or none. Raises TooManyRequests, EngineFailed."""
        with self._lock:
            if not self.is_alive:
                raise EngineFailed("the engine does not take requests any more")
            held = len(self._waiting) + self.engine.unfinished
            if held + len(sequences) > self.max_waiting + self.num_slots:
                raise TooManyRequests(
                    f"{max(0, held - self.num_slots)} sequences wait already; "
                    f"at most {self.max_waiting} may"
                )
            self._waiting.extend(sequences)
            # Here, as until the engine's thread wakes up `wait_until_idle` would return too early.
            self._is_idle = False
            self._lock.notify_all()

    def cancel(self, sequence: LiveSequence) -> None:
        """Ends a sequence; it is not called back any more."""
        with self._lock:
            # A server may cancel a sequence twice: at its stop text, and when its client leaves.
            if not sequence.is_cancelled:
                sequence.is_cancelled = True
                self._cancelled.append(sequence)
                self._lock.notify_all()

    def warm_up(self) -> None:
        """Samples from one token, so that most programs are compiled. Raises EngineFailed."""
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
                # With a limit, as a thread that has died notifies nobody.
                self._lock.wait(_IDLE_SECONDS)

    def set_params(self, per_layer_params: Params | None) -> None:
        """Samples with other weights; None frees them. Raises ValueError while sequences run."""
        with self._lock:
            if not self._is_idle:
                raise ValueError("the engine is sampling; wait until it is idle")
            self.engine.per_layer_params = per_layer_params

    def close(self, seconds: float = 0.0) -> None:
        """Takes no more requests, serves the present ones for so many seconds, and ends."""
        with self._lock:
            self._is_closing = True
            self._deadline = time.monotonic() + seconds
            self._lock.notify_all()
        self._thread.join()

    # ---- the engine's thread

    def _run(self) -> None:
        try:
            # jax's current mesh belongs to a thread.
            with jax.set_mesh(self.mesh):
                while self._wait_for_work():
                    self._step()
        except BaseException as error:
            # Whatever it was: clients wait for a callback, which comes below.
            self.failure = error

        # All that are left end here.
        with self._lock:
            # Under one lock with the list, so that no request can be submitted after it was made.
            self._is_closing = True
            left = [*self._sequences, *self._waiting]
            self._waiting.clear()
        self._sequences.clear()
        why = "the server is stopping"
        if self.failure is not None:
            why = f"the engine failed: {self.failure}"
        for sequence in left:
            if not sequence.is_cancelled:
                sequence.on_tokens(NewTokens([], [], [], reason="error", message=why))

    def _wait_for_work(self) -> bool:
        """Sleeps while it is idle; False when it should end."""
        with self._lock:
            while True:
                is_busy = bool(
                    # A chunk under way reads the weights, which an idle engine may lose.
                    self._waiting or self.engine.unfinished or self.engine.in_flight
                )
                is_over = time.monotonic() > self._deadline
                if self._is_closing and (is_over or not is_busy):
                    return False
                if is_busy:
                    return True
                self._is_idle = True
                self._lock.notify_all()
                self._lock.wait(_IDLE_SECONDS)

    def _step(self) -> None:
        """One chunk: sequences come and go, the next chunk starts, and the one before is read."""
        engine = self.engine
        with self._lock:
            new = [one for one in self._waiting if not one.is_cancelled]
            self._waiting.clear()
            # One that has ended meanwhile has no slot to release.
            cancelled = self._sequences.intersection(self._cancelled)
            self._cancelled.clear()
            for one in new:
                key = jax.random.key(one.draw.seed)
                one.key_data = np.asarray(jax.random.key_data(key))
            self._sequences.update(new)
            # Under the lock, so that whoever submits counts them.
            engine.admit(new)
        for one in cancelled:
            engine.release(one)
            self._sequences.remove(one)

        # Where requests wait, all ends are read first: then each free slot gets one at once.
        if engine.waits:
            self._read_all_but(0)
        if engine.unfinished:
            engine.start_chunk()
        # While sequences run, a chunk is always under way when the one before is read.
        self._read_all_but(1 if engine.unfinished else 0)

    def _read_all_but(self, count: int) -> None:
        """Reads chunks until so many are under way, and calls back the sequences of each."""
        engine = self.engine
        while len(engine.in_flight) > count:
            for one in engine.absorb(engine.read_chunk()):
                new = slice(len(one.tokens) - one.num_new, None)
                message = _NOT_FINITE if one.reason == "error" else ""
                if one.reason is not None:
                    self._sequences.remove(one)
                if not one.is_cancelled:
                    drawn = NewTokens(
                        one.tokens[new],
                        one.logprobs[new],
                        one.full_logprobs[new],
                        one.reason,
                        message,
                    )
                    one.on_tokens(drawn)
