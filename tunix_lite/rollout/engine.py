"""The engine of all sampling: slots on the devices, and the host's record of what they decode.
`admit` queues requests, `append` reads tokens that nobody sampled into slots, `start_chunk`
decodes, `next_chunk` and `absorb` read the tokens. With several hosts, each one runs this code, so
all of them decide the same."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import chain

import jax
import numpy as np

from tunix_lite.basics.types import Metrics, Params
from tunix_lite.parallel.compiling import stopwatch
from tunix_lite.parallel.mesh import axis_size
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout.programs import (
    DecodedChunk,
    Programs,
    PromptCache,
    Queue,
    Slots,
    no_draws,
)
from tunix_lite.rollout.requests import (
    Request,
    RoutePiece,
    StopCriteria,
    joined,
)
from tunix_lite.rollout.settings import GenerationConfig

# Tokens, padding included, of the prompts that one prefill reads: enough to keep any device busy.
# On a CPU a few hundred do, and small blocks have less padding: with 4,096, 16 questions of GSM8K
# filled 1,159 of 3,072 places (docs/log.md, 27 November 2026).
TOKENS_PER_PREFILL = 4096
_TOKENS_PER_PREFILL_ON_CPU = 512
# Prompts are read for so many chunks to come: two are under way, and a third is being started.
_CHUNKS_AHEAD = 3
# Tokens. Prompts below this length are not sorted by length.
MIN_PROMPT_WIDTH = 64
# Requests. A queue has at least this length.
_MIN_QUEUE = 64
# The widths that appended tokens are padded to. Longer ones are read in pieces of the last of them.
APPEND_WIDTHS = (16, 64, 256)
# Slots that one call of `append` reads, where the mesh does not divide the slots: these, or all.
FEW_SLOTS = 8

# By slot, tokens to append, and the count of sampled tokens at which the slot is cut after them.
_Appended = dict[int, tuple[list[int], int]]


class Engine:
    """Decodes requests in slots.
    Example: engine = Engine(programs, weights, 4, 64, block_sizes=[2], cache_blocks=3,
    criteria=criteria); engine.admit(requests); engine.start_chunk();
    engine.absorb(engine.next_chunk())."""

    def __init__(
        self,
        programs: Programs,
        per_layer_params: Params,
        num_slots: int,
        queue: int,
        block_sizes: Sequence[int],
        cache_blocks: int,
        criteria: StopCriteria,
        temperature: float = 1.0,
    ):
        """queue: requests that can wait with their prompts read. block_sizes: the numbers of
        prompts that one prefill may read, ascending. cache_blocks: the blocks that the prompt cache
        holds."""
        spec = programs.spec
        self.programs = programs
        self.per_layer_params = per_layer_params
        self.num_slots = num_slots
        self.criteria = criteria
        self.temperature = np.float32(temperature)
        self.chunk = spec.chunk
        self.widths = prompt_widths(spec.generation.max_prompt_length)
        self.block_sizes = block_sizes
        self.cache_blocks = cache_blocks
        # The number of columns changes how sums round. Which conversations go on together is a
        # matter of time, so these always read all columns.
        self.column_sizes = [spec.max_length]
        if not spec.holds:
            self.column_sizes = kv_cache.column_sizes(
                spec.max_length, spec.generation.max_prompt_length
            )
        # columns of the cache; None: there will be as many as the first requests need
        self.columns: int | None = None

        # Requests whose prompts wait, and those that have got a number and not ended, by number.
        self.waiting: deque[Request] = deque()
        self.requests: dict[int, Request] = {}
        # Requests whose prompts were read, after each block of the prompt cache; and all of them.
        self.block_ends: deque[int] = deque(maxlen=self.cache_blocks)
        self.num_blocks = 0
        self.num_ready = 0
        # Requests that slots are known to have taken: they may have taken more. The slots that are
        # known to be free; and by slot, the request that the host has ended (-1: none).
        self.num_taken = 0
        self.is_free = np.ones(num_slots, bool)
        self.stopped = np.full(num_slots, -1, np.int32)
        # The next requests. Few lengths, so that few programs are compiled.
        count = next_power_of_two(queue, _MIN_QUEUE)
        zeros = np.zeros((5, count), np.int32)
        key_data = np.zeros((count, 2), np.uint32)
        draws = no_draws(count) if spec.per_request else None
        self.queue = Queue(zeros[0], key_data, *zeros[1:], draws)

        # Chunks that were started and not read yet.
        self.in_flight: deque[DecodedChunk] = deque()
        self.num_chunks = 0
        self.chunks_absorbed = 0
        self.prefill_tokens = 0
        self.tokens_sampled = 0
        self.elapsed = stopwatch()
        self.prompt_cache: PromptCache | None = None
        self.slots: Slots | None = None

    # ---- requests

    def admit(self, requests: Iterable[Request]) -> None:
        """Puts requests at the end of the queue. Those of one prompt stand side by side."""
        self.waiting.extend(requests)

    def release(self, request: Request, slot: int | None = None) -> None:
        """Ends a request. slot: the one that holds it; None: the next chunk says which one does."""
        if request.number < 0:
            self.waiting.remove(request)
        self.requests.pop(request.number, None)
        if slot is not None:
            self.stopped[slot] = request.number
            self.is_free[slot] = True

    @property
    def waits(self) -> bool:
        """Returns whether requests wait for a slot."""
        return bool(self.waiting) or self.num_taken < self.num_ready

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self.waiting) + len(self.requests)

    def fill(self) -> list[tuple[int, Request]]:
        """Reads prompts and gives free slots their requests. Returns the slots that are known to
        have got one."""
        filled = []
        programs = self.programs
        # Each round makes room in the prompt cache, so that the next prompts can be read.
        while self.waits and (self.in_flight or self.is_free.any()):
            # Only now the first requests say how many columns suffice.
            if self.slots is None:
                self.columns = self.columns or self.columns_needed()
                self.slots = programs.make_slots(self.num_slots, self.columns)
            # `read_chunk` frees it once no request waits; later requests need it again.
            if self.prompt_cache is None:
                rows = self.block_sizes[-1] * self.cache_blocks
                self.prompt_cache = programs.make_prompt_cache(rows)
            self._read_prompts()
            # Copies, as jax may read a host's array later than now, when the host has changed it.
            queue, stopped = jax.tree.map(np.copy, (self.queue, self.stopped))
            ready = np.int32(self.num_ready)
            self.slots = programs.admit(self.slots, self.prompt_cache, queue, ready, stopped)

            # Free slots take the next requests in order.
            numbers = range(self.num_taken, self.num_ready)
            new = list(zip(np.flatnonzero(self.is_free).tolist(), numbers))
            taken = []
            for slot, number in new:
                # A request that was released meanwhile leaves its slot at once.
                self.is_free[slot] = number not in self.requests
                self.stopped[slot] = number if self.is_free[slot] else -1
                if number in self.requests:
                    taken.append((slot, self.requests[number]))
            self.num_taken += len(new)
            # While chunks are under way, other slots may have ended: absorb sees who took which.
            if not self.in_flight:
                self._read_again(dict(taken))
            filled += taken
            # No slot is known to be free: only the next chunk's tokens can show one.
            if not new:
                break
        return filled

    def _read_prompts(self) -> None:
        """Reads all blocks of prompts for which the prompt cache has room."""
        # A block has room once slots have taken all requests of the block whose place it takes.
        ends = self.block_ends
        queue = self.queue
        while self.waiting and not (
            len(ends) == self.cache_blocks and ends[0] > self.num_taken
        ):
            first_row = self.num_blocks % self.cache_blocks * self.block_sizes[-1]
            first_number = self.num_ready
            # The next requests get a number and a place in the queue. A block holds the first one
            # of each prompt, all of one width. So the width to which a prompt is padded depends on
            # its length alone, and the rounding of its keys and values does, too.
            block: list[Request] = []
            while self.waiting and self.num_ready - self.num_taken < len(queue.rows):
                request = self.waiting[0]
                # Those of one prompt stand side by side, so the last one is enough to compare.
                last = block[-1] if block else None
                is_other = last is None or request.ids != last.ids
                if is_other or request.prompt_routes is not last.prompt_routes:
                    both = (request, *block[:1])
                    widths = {padded_width(len(one.ids), self.widths) for one in both}
                    if len(widths) > 1 or len(block) == self.block_sizes[-1]:
                        break
                    block.append(request)
                self.waiting.popleft()
                request.number = self.num_ready
                request.first_chunk = None if request.tokens else 0
                self.requests[request.number] = request
                place = request.number % len(queue.rows)
                queue.rows[place] = first_row + len(block) - 1
                queue.key_data[place] = request.key_data
                queue.prompts[place] = request.index
                queue.generations[place] = request.generation
                queue.num_drawn[place] = len(request.tokens)
                # A slot whose limit is 0 does not run: it waits until earlier tokens are read.
                queue.limits[place] = (
                    0 if request.tokens else request.first_limit or request.limit
                )
                if request.draw is not None:
                    for field in fields(queue.draws):
                        value = getattr(request.draw, field.name)
                        getattr(queue.draws, field.name)[place] = value
                self.num_ready += 1
            if not block:
                return
            # Rows that the block does not fill hold one token, so that no sequence is empty.
            count = min(size for size in self.block_sizes if size >= len(block))
            width = padded_width(max(len(request.ids) for request in block), self.widths)
            tokens = np.zeros((count, width), np.int32)
            lengths = np.ones(count, np.int32)
            routes = self.programs.spec.no_routes(count, width)
            for i, request in enumerate(block):
                lengths[i] = len(request.ids)
                tokens[i, : lengths[i]] = request.ids
                if request.prompt_routes is not None:
                    routes[i, : lengths[i]] = joined([request.prompt_routes])
            self.prompt_cache, routes = self.programs.prefill(
                self.prompt_cache,
                self.per_layer_params,
                tokens,
                lengths,
                np.int32(first_row),
                routes,
            )
            if routes is not None:
                routes.copy_to_host_async()
                for number in range(first_number, self.num_ready):
                    request = self.requests[number]
                    row = queue.rows[number % len(queue.rows)] - first_row
                    piece = (routes, np.s_[row, : len(request.ids)])
                    request.prompt_routes = request.prompt_routes or piece
            self.num_blocks += 1
            ends.append(self.num_ready)
            self.prefill_tokens += sum(len(request.ids) for request in block)

    # ---- slots

    def append(
        self, new: _Appended, known: dict[int, np.ndarray] | None = None
    ) -> dict[int, list[RoutePiece]]:
        """Reads tokens into slots, which decode on from there. known: the routes of tokens that
        were read before, by slot. Returns those of all tokens; {}: none are recorded."""
        pieces: dict[int, list[RoutePiece]] = {}
        for call in append_calls(new, self.num_slots):
            rows, tokens, counts, _ = call
            routes = self.programs.spec.no_routes(*tokens.shape)
            places = np.flatnonzero(counts).tolist() if routes is not None else []
            for place in places if known else ():
                # the next ones of this slot
                of_slot = known[rows[place]]
                routes[place, : counts[place]] = of_slot[: counts[place]]
                known[rows[place]] = of_slot[counts[place] :]
            self.slots, routes = self.programs.append(
                self.slots, self.per_layer_params, *call, routes
            )
            for place in places:
                piece = (routes, np.s_[place, : counts[place]])
                pieces.setdefault(int(rows[place]), []).append(piece)
        return pieces

    def _read_again(self, taken: dict[int, Request]) -> None:
        """Reads the tokens that requests had before they were admitted."""
        resumed = {slot: one for slot, one in taken.items() if one.tokens}
        for request in resumed.values():
            # Chunks that are under way began before these tokens were read, and hold none of it.
            request.first_chunk = self.num_chunks
        known = {slot: joined(one.routes) for slot, one in resumed.items() if one.routes}
        new = {slot: (list(one.tokens), one.limit) for slot, one in resumed.items()}
        self.append(new, known)

    def columns_needed(self) -> int:
        """Columns of the cache that suffice until the chunk that is started now has ended."""
        # Of chunks that the host has not read yet it knows only that no sequence grows by more.
        ahead = (self.num_chunks - self.chunks_absorbed + 1) * self.chunk
        # A server's requests come and go: its cache only grows.
        longest = (self.columns or 0) if self.programs.spec.per_request else 0
        for request in chain(self.requests.values(), self.waiting):
            new = min(request.limit, len(request.tokens) + ahead)
            longest = max(longest, len(request.ids) + new)
        return min(self.column_sizes, key=lambda size: (size < longest, size))

    # ---- decoding

    def start_chunk(self) -> None:
        """Fills slots, as long as requests wait, and starts a chunk of decoding."""
        # Before `fill`, as the requests that it admits count as well.
        if self.slots is not None and self.columns != (columns := self.columns_needed()):
            self.slots = self.programs.resize(self.slots, columns)
            self.columns = columns
        if self.waits:
            self.fill()
        self.decode()

    def decode(self) -> None:
        """Starts a chunk of decoding in the slots as they are."""
        spec = self.programs.spec
        has_cutoffs = spec.cuts_off(self.temperature)
        # A static argument: where no request cuts tokens off, the program without it is faster.
        if spec.per_request:
            draws = [request.draw for request in self.requests.values()]
            has_cutoffs = any(draw.has_cutoffs for draw in draws)
        self.slots, chunk = self.programs.decode(
            self.slots, self.per_layer_params, self.temperature, has_cutoffs
        )
        # The copy follows the chunk at once, so that `read_chunk` need not ask for it.
        jax.tree.map(lambda x: x.copy_to_host_async(), chunk)
        self.in_flight.append(chunk)
        self.num_chunks += 1

    def next_chunk(self, starts: bool = True) -> DecodedChunk | None:
        """The tokens of the oldest chunk under way, with the next one started; None if all requests
        have ended. starts: False starts no other chunk."""
        if not self.unfinished:
            return None
        # While requests wait, the devices have a chunk ahead of them, and never wait for the host.
        if starts and not self.in_flight:
            self.start_chunk()
            if self.waits:
                self.start_chunk()
        if not self.in_flight:
            return None
        decoded = self.read_chunk()
        # Once no request waits, the chunk ahead might find no slot running: look at it first.
        is_needed = self.waits or (not self.in_flight and decoded.running.any())
        if starts and is_needed:
            self.start_chunk()
        return decoded

    def read_chunk(self) -> DecodedChunk:
        """Waits for the oldest chunk under way."""
        decoded = jax.device_get(self.in_flight.popleft())
        # The host may know more than the chunk: it has filled free slots since it started it.
        self.num_taken = max(self.num_taken, int(decoded.num_taken))
        if not self.waits and not self.programs.spec.per_request:
            # Free its memory. A server's next request is near.
            self.prompt_cache = None
            self.block_ends.clear()
        return decoded

    def absorb(self, decoded: DecodedChunk) -> list[Request]:
        """Appends the tokens of a chunk to their requests, and ends those that are complete.
        Returns the requests that got tokens. Raises as `take_tokens`."""
        now = self.elapsed()
        touched = []
        resumed = {}
        for slot, number in enumerate(decoded.requests.tolist()):
            request = self.requests.get(number)
            if request is None:
                # The host has ended it, and its slot does not know yet.
                self.stopped[slot] = number
                continue
            # Only now the host knows which slot took it, and can read its earlier tokens there.
            if request.first_chunk is None:
                resumed[slot] = request
            if request.first_chunk is None or self.chunks_absorbed < request.first_chunk:
                continue
            if self.take_tokens(decoded, slot, request) is not None:
                request.reason = "stop"
            elif not decoded.running[slot]:
                request.reason = request.reason or self.criteria.tokens.get(
                    request.tokens[-1], "length"
                )
            request.began = now if request.began is None else request.began
            if request.reason is not None:
                request.ended = now
                # The devices know no stop texts: by this number the next `admit` frees the slot.
                self.stopped[slot] = number
                del self.requests[number]
            touched.append(request)
        self.chunks_absorbed += 1
        self._read_again(resumed)
        # While a chunk is under way, slots may have taken requests that the host has not seen.
        if not self.in_flight:
            self.is_free[:] = [
                number not in self.requests for number in decoded.requests.tolist()
            ]
        return touched

    def take_tokens(self, decoded: DecodedChunk, slot: int, request: Request) -> int | None:
        """Appends the new tokens of a slot to its request. Returns how many, if the last completes
        a stop text. Raises FloatingPointError if a log-probability is not finite; a server's
        request ends with "error"."""
        count = int((decoded.tokens[:, slot] >= 0).sum())
        if not np.isfinite(decoded.logprobs[:count, slot]).all():
            if not self.programs.spec.per_request:
                raise FloatingPointError(self.criteria.not_finite(request))
            # An error would end the engine, and with it the requests of all other clients.
            request.reason = "error"
            count = 0

        # Stop texts are looked for here, as the devices know tokens only.
        new = decoded.tokens[:count, slot].tolist()
        end = self.criteria.end_of(request, new)
        count = count if end is None else end
        request.num_new = count
        request.tokens += new[:count]
        request.logprobs += decoded.logprobs[:count, slot].tolist()
        request.full_logprobs += decoded.full_logprobs[:count, slot].tolist()
        self.tokens_sampled += count
        if decoded.routes is not None:
            request.routes.append((decoded.routes, np.s_[:count, slot]))
        return end

    def metrics(self) -> Metrics:
        """Tokens, steps and seconds of the rollout."""
        steps = self.num_chunks * self.chunk
        seconds = self.elapsed()
        return {
            "rollout/prefill_tokens": self.prefill_tokens,
            "rollout/decode_steps": steps,
            "rollout/slot_use": self.tokens_sampled / (steps * self.num_slots),
            "perf/rollout_tokens_per_second": self.tokens_sampled / seconds,
            "time/rollout": seconds,
        }


def append_calls(
    new: _Appended, num_slots: int, fsdp: int | None = None
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """(rows [R], tokens [R, W], counts [R], limits [R]) of the calls of `append` that read these
    tokens. A row of num_slots is no slot; only the last piece of a slot has its limit. fsdp: None:
    of the current mesh."""
    # Which widths and pieces there are depends on the length of the tokens alone, and so does
    # rounding. Tokens are cut at 64, unless 256 are padded by fewer than 64.
    fsdp = axis_size("fsdp") if fsdp is None else fsdp
    # Where fsdp divides the slots, each device reads its own: none is gathered from another. How
    # many answers come together is a matter of the clock, so all calls have one shape.
    is_few = fsdp == 1 and num_slots > FEW_SLOTS
    together = FEW_SLOTS if is_few else num_slots
    _, middle, widest = APPEND_WIDTHS
    calls = []
    while new := {slot: (tokens, limit) for slot, (tokens, limit) in new.items() if tokens}:
        # In each round, the slots with pieces of one width go together.
        by_width: dict[int, list[tuple[int, list[int], int]]] = {}
        for slot in sorted(new, key=lambda slot: len(new[slot][0])):
            tokens, limit = new[slot]
            piece = tokens[: widest if len(tokens) > widest - middle else middle]
            rest = tokens[len(piece) :]
            width = padded_width(len(piece), APPEND_WIDTHS)
            by_width.setdefault(width, []).append((slot, piece, 0 if rest else limit))
            new[slot] = (rest, limit)
        for width, pieces in sorted(by_width.items()):
            for start in range(0, len(pieces), together):
                rows = np.full(together, num_slots, np.int32)
                if not is_few:
                    rows = np.arange(num_slots, dtype=np.int32)
                tokens = np.zeros((together, width), np.int32)
                counts, limits = np.zeros((2, together), np.int32)
                for i, (slot, piece, limit) in enumerate(pieces[start : start + together]):
                    place = i if is_few else slot
                    rows[place] = slot
                    tokens[place, : len(piece)] = piece
                    counts[place] = len(piece)
                    limits[place] = limit
                calls.append((rows, tokens, counts, limits))
    return calls


def prompt_cache_blocks(
    generation: GenerationConfig,
    chunk: int,
    num_prompts: int,
    num_generations: int,
    num_slots: int,
    fsdp: int,
    on_cpu: bool,
) -> tuple[int, int]:
    """(prompts of a block, blocks in the prompt cache) of a rollout. A block is read at once."""
    # It holds the prompts of requests that may start within _CHUNKS_AHEAD chunks, if completions
    # have a quarter of their longest length. Real lengths do not count: all steps run one program.
    widths = prompt_widths(generation.max_prompt_length)
    tokens = TOKENS_PER_PREFILL
    if on_cpu:
        tokens = min(tokens, _TOKENS_PER_PREFILL_ON_CPU)
    per_prefill = max(1, tokens // widths[0])
    block = -(-min(next_power_of_two(num_prompts), per_prefill) // fsdp) * fsdp
    starting = num_slots * min(1, 4 * _CHUNKS_AHEAD * chunk / generation.max_new_tokens)
    # No rollout can have more blocks than these.
    most = -(-num_prompts // block) + len(widths) - 1
    wanted = math.ceil(starting / (num_generations * block))
    # With one block, no prompt could be read before slots have taken all of the last ones.
    return block, min(most, max(2, wanted))


def prompt_widths(longest: int) -> list[int]:
    """The widths of prompts, the widest first, three at most: [512, 128, 64] for 512."""
    widths = [longest]
    while widths[-1] >= 2 * MIN_PROMPT_WIDTH:
        widths.append(-(-widths[-1] // 2))
    # A program is compiled for each width.
    if len(widths) <= 3:
        return widths
    return [longest, widths[len(widths) // 2], widths[-1]]


def padded_width(length: int, widths: Sequence[int]) -> int:
    """The least of the widths that holds `length` tokens."""
    return min(width for width in widths if width >= length)


def next_power_of_two(count: int, least: int = 1) -> int:
    """The least power of two that is at least `count` and `least`."""
    return 1 << (max(count, least) - 1).bit_length()
