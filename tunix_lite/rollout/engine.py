"""Sampling completions: prompts are read once each, a fixed number of slots decode, and who ends makes room.

The host only looks on. It puts prompts on the shelf, starts a refill and a chunk of decoding, starts the next ones, and
then reads what the first chunk drew: while requests wait in the queue, the devices always have a chunk ahead of them.
(A loop that asks after every token would make a GPU wait for the host after every token.) On several hosts, each runs
this loop and sees all tokens, so all of them decide the same.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.models import decoder
from tunix_lite.models.decoder import ModelConfig
from tunix_lite.models.tokenizer import TextStream, Tokenizer
from tunix_lite.parallel.mesh import axis_size, gathered
from tunix_lite.rollout.programs import Drawn, Programs, make_programs
from tunix_lite.rollout.settings import Generation, RolloutConfig
from tunix_lite.types import FINISH, Metrics, Prompts, Rollout

MOST_SLOTS = 256  # where nobody says how many
TOKENS_PER_PREFILL = 4096  # prompts that are read together, padded: enough to keep any device busy
NARROWEST = 64  # tokens; below it, prompts are not sorted by length


@dataclass
class Sampled:
    """A completion, growing from chunk to chunk."""

    prompt: int  # the prompt that it answers, counted in the list that was given
    index: int  # and as its randomness counts it
    generation: int  # which of its completions
    limit: int  # tokens, at most
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # under the distribution that was drawn from
    whole_logprobs: list[float] = field(default_factory=list)  # under softmax(scores / temperature)
    reason: str | None = None  # one of types.FINISH, once it has ended
    began: float | None = None  # seconds from the start of the rollout until its first tokens were seen
    ended: float | None = None  # and until it had ended
    text: TextStream | None = None  # only where stop texts are looked for
    tail: str = ""  # the end of its text so far


def make_sampler(
    cfg: ModelConfig,
    generation: Generation,
    eos_ids: tuple[int, ...],
    pad_id: int,
    dtype=jnp.float32,
    rollout: RolloutConfig | None = None,
) -> Callable:
    """sample(params, prompts, key, num_generations=1, temperature=..., indices=None, limits=None,
    tokenizer=None).

    It yields, after every chunk, the list of `Sampled` that got new tokens, and returns the metrics of the rollout at
    the end. prompts: token ids of each; limits: tokens of each completion, [P * G], up to max_new_tokens, the default.
    The same key, prompt index (of `indices`, or its place in the list), generation and position draw the same token,
    whatever the mesh, the number of slots, the chunk, or the order and number of other requests. `tokenizer` is needed
    for generation.stop, and otherwise only makes messages readable.
    """
    rollout = RolloutConfig() if rollout is None else rollout
    chunk = min(rollout.chunk, generation.max_new_tokens)
    ends = {token: "stop" for token in generation.stop_token_ids} | {token: "eos" for token in eos_ids}
    programs = make_programs(cfg, generation, tuple(ends), pad_id, dtype, chunk, rollout.cache == "int8")
    prepare = make_prepare(cfg, dtype, rollout.weights != "sharded")
    widths = prompt_widths(generation.max_prompt_length)

    def sample(
        params,
        prompts: Sequence[Sequence[int]],
        key,
        num_generations: int = 1,
        temperature: float = generation.temperature,
        indices: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> Iterator[list[Sampled]]:
        if generation.stop and tokenizer is None:
            raise ValueError(f"stop={list(generation.stop)}: stop texts need a tokenizer, and there is none")
        check_prompts(prompts, cfg, generation, tokenizer)
        limits = check_limits(limits, len(prompts) * num_generations, generation)
        indices = range(len(prompts)) if indices is None else indices
        # the widest first: if memory does not suffice, that shows at once
        order = sorted(range(len(prompts)), key=lambda p: -fitting(len(prompts[p]), widths))
        asked = [
            Sampled(p, indices[p], g, limits[p * num_generations + g]) for p in order for g in range(num_generations)
        ]
        work = Work(programs, prepare(params), np.float32(temperature), asked, chunk)
        work.shelve([prompts[p] for p in order], num_generations, widths, generation.max_prompt_length)
        work.line_up(key)
        work.open(rollout.num_slots or min(MOST_SLOTS, len(asked)))
        while (drawn := work.next_chunk()) is not None:
            yield work.read(drawn, ends, generation.stop, tokenizer, prompts)
        return work.metrics()

    return sample


def make_generate(
    cfg: ModelConfig,
    generation: Generation,
    eos_ids: tuple[int, ...],
    pad_id: int,
    dtype=jnp.float32,
    rollout: RolloutConfig | None = None,
    tokenizer: Tokenizer | None = None,
) -> Callable:
    """generate(params, prompts, key, num_generations=1, temperature=..., limits=None, on_finished=None)

    -> Rollout of P * G rows: row p * G + g is generation g of prompt p. on_finished(row, tokens) is called as soon as
    a completion has ended, while others still decode. The rest is as in `make_sampler`.
    """
    sample = make_sampler(cfg, generation, eos_ids, pad_id, dtype, rollout)
    width, new = generation.max_prompt_length, generation.max_new_tokens

    def generate(
        params,
        prompts: Prompts,
        key,
        num_generations: int = 1,
        temperature: float = generation.temperature,
        limits: Sequence[int] | None = None,
        on_finished: Callable | None = None,
    ) -> Rollout:
        asked, mask = np.asarray(prompts.tokens), np.asarray(prompts.token_mask)
        rows = [row[keep] for row, keep in zip(asked, mask)]
        B = len(rows) * num_generations
        tokens, completion_mask = np.full((B, width + new), pad_id, np.int32), np.zeros((B, width + new), bool)
        logprobs, whole_logprobs = np.zeros((2, B, width + new), np.float32)
        finish, seconds = np.zeros(B, np.int8), np.zeros((B, 2), np.float32)
        steps = sample(params, rows, key, num_generations, temperature, limits=limits, tokenizer=tokenizer)
        while True:
            try:
                touched = next(steps)
            except StopIteration as end:
                metrics: Metrics = end.value
                break
            for answer in touched:
                if answer.reason is not None:
                    row, count = answer.prompt * num_generations + answer.generation, len(answer.tokens)
                    here = np.s_[row, width : width + count]
                    tokens[here], completion_mask[here] = answer.tokens, True
                    logprobs[here], whole_logprobs[here] = answer.logprobs, answer.whole_logprobs
                    finish[row], seconds[row] = FINISH.index(answer.reason), (answer.began, answer.ended)
                    if on_finished is not None:
                        on_finished(row, answer.tokens)
        for p, row in enumerate(rows):
            tokens[p * num_generations : (p + 1) * num_generations, width - len(row) : width] = row
        token_mask = completion_mask.copy()
        token_mask[:, :width] = np.repeat(left_padded(rows, width), num_generations, axis=0)
        return Rollout(tokens, token_mask, completion_mask, logprobs, finish, whole_logprobs, seconds, metrics)

    return generate


class Work:
    """One rollout on its way: what is on the devices, and what the host knows of it."""

    def __init__(self, programs: Programs, layered, temperature, asked: list[Sampled], chunk: int):
        self.programs, self.layered, self.temperature = programs, layered, temperature
        self.asked, self.chunk = asked, chunk
        self.in_flight: deque[Drawn] = deque()  # chunks that were started and not read yet
        self.started = 0  # requests known to have been taken; more may have been
        self.unfinished = len(asked)
        self.began = time.perf_counter()
        self.num_chunks = self.prefill_tokens = 0

    def shelve(self, prompts, num_generations: int, widths: list[int], longest: int) -> None:
        """Prepares reading the prompts, in blocks of as many as are read together. At most two blocks wait at once."""
        fsdp, per_prefill = axis_size("fsdp"), max(1, TOKENS_PER_PREFILL // longest)
        self.block = -(-min(power_of_two(len(prompts)), per_prefill) // fsdp) * fsdp
        self.blocks = [prompts[i : i + self.block] for i in range(0, len(prompts), self.block)]
        self.num_generations, self.requests_per_block = num_generations, self.block * num_generations
        self.widths, self.num_read = widths, 0
        self.room = min(2, len(self.blocks))  # blocks that the shelf holds
        self.shelf = self.programs.make_shelf(self.room * self.block)

    def line_up(self, key) -> None:
        """Puts all requests into the queue."""
        rows = np.arange(len(self.asked)) // self.num_generations % (self.room * self.block)
        padding = power_of_two(len(self.asked), least=NARROWEST) - len(self.asked)
        columns = [a.index for a in self.asked], [a.generation for a in self.asked], rows, [a.limit for a in self.asked]
        columns = [np.pad(np.asarray(column, np.int32), (0, padding)) for column in columns]
        self.queue = self.programs.make_queue(np.asarray(jax.random.key_data(key)), *columns)

    def open(self, num_slots: int) -> None:
        """Fills the slots, and starts as many chunks as should be under way."""
        self.slots, self.num_slots = self.programs.make_slots(num_slots), num_slots
        self.stopped = np.full(num_slots, -1, np.int32)
        while self.started < min(num_slots, len(self.asked)):  # all slots are free: what is ready is taken
            self.read_prompts()
            self.refill()
            self.started = min(self.num_ready, num_slots)
        self.start_chunk()
        if self.started < len(self.asked):
            self.start_chunk()

    @property
    def num_ready(self) -> int:
        """Requests whose prompts have been read."""
        return min(self.num_read * self.requests_per_block, len(self.asked))

    def read_prompts(self) -> None:
        """Reads all blocks of prompts that have room, which is that of blocks whose requests have all been taken."""
        while self.num_read < len(self.blocks):
            if (self.num_read - self.room + 1) * self.requests_per_block > self.started:
                return
            block = self.blocks[self.num_read]
            width = fitting(max(map(len, block)), self.widths)
            tokens, lengths = np.zeros((self.block, width), np.int32), np.ones(self.block, np.int32)
            for i, row in enumerate(block):
                tokens[i, : len(row)], lengths[i] = row, len(row)
            place = np.int32(self.num_read % self.room * self.block)
            self.shelf = self.programs.prefill(self.shelf, self.layered, tokens, lengths, place)
            self.num_read += 1
            self.prefill_tokens += sum(map(len, block))

    def refill(self) -> None:
        self.slots = self.programs.refill(self.slots, self.shelf, self.queue, np.int32(self.num_ready), self.stopped)

    def start_chunk(self) -> None:
        """Starts reading prompts and refilling, as long as there is something to take, and a chunk of decoding."""
        if self.num_chunks and self.started < len(self.asked):
            self.read_prompts()
            self.refill()
        self.slots, drawn = self.programs.decode(self.slots, self.layered, self.temperature)
        jax.tree.map(lambda x: x.copy_to_host_async(), drawn)
        self.in_flight.append(drawn)
        self.num_chunks += 1

    def next_chunk(self) -> Drawn | None:
        """What the oldest chunk under way drew, with the next one started; None if nothing is unfinished."""
        if not self.unfinished:
            return None
        drawn = jax.device_get(self.in_flight.popleft())
        self.started = int(drawn.head)
        everything_taken = self.started == len(self.asked)
        if everything_taken:
            self.shelf = None  # its memory is free
        # when nothing waits any more, a chunk ahead might find nobody running: look first
        if not everything_taken or (not self.in_flight and drawn.running.any()):
            self.start_chunk()
        return drawn

    def read(self, drawn: Drawn, ends: dict[int, str], stop: tuple[str, ...], tokenizer, prompts) -> list[Sampled]:
        """Hands each token to its completion, and finds those that have ended. Raises FloatingPointError."""
        now, touched = time.perf_counter() - self.began, []
        for slot in np.flatnonzero(drawn.requests >= 0):
            answer = self.asked[drawn.requests[slot]]
            if answer.reason is not None:
                continue
            count = int((drawn.tokens[:, slot] >= 0).sum())
            new = drawn.tokens[:count, slot].tolist()
            if not np.isfinite(drawn.logprobs[:count, slot]).all():
                raise FloatingPointError(not_finite(answer, prompts[answer.prompt], tokenizer))
            if stop and (kept := up_to_stop(answer, new, stop, tokenizer)) is not None:
                new, answer.reason, self.stopped[slot] = new[:kept], "stop", drawn.requests[slot]
            answer.began = now if answer.began is None else answer.began
            answer.tokens += new
            answer.logprobs += drawn.logprobs[: len(new), slot].tolist()
            answer.whole_logprobs += drawn.whole_logprobs[: len(new), slot].tolist()
            if not drawn.running[slot] and answer.reason is None:
                answer.reason = ends.get(answer.tokens[-1], "length")
            if answer.reason is not None:
                answer.ended, self.unfinished = now, self.unfinished - 1
            touched.append(answer)
        return touched

    def metrics(self) -> Metrics:
        """What the rollout took."""
        tokens, steps = sum(len(answer.tokens) for answer in self.asked), self.num_chunks * self.chunk
        seconds = time.perf_counter() - self.began
        return {
            "rollout/prefill_tokens": self.prefill_tokens,
            "rollout/decode_steps": steps,
            "rollout/slot_use": tokens / (steps * self.num_slots),
            "perf/rollout_tokens_per_second": tokens / seconds,
            "time/rollout": seconds,
        }


# ---- small print


def make_prepare(cfg: ModelConfig, dtype, gather: bool) -> Callable:
    """prepare(params) -> weights as sampling wants them: by layer, in the type of the computation, and, where asked,
    gathered over fsdp, once instead of for every token."""
    compiled = {}

    def prepare(params):
        leaves, treedef = jax.tree.flatten(jax.tree.map(lambda x: x.sharding, params))
        if (place := (treedef, *leaves)) not in compiled:
            places = decoder.per_layer_places(treedef.unflatten(leaves), cfg)
            places = jax.tree.map(gathered, places) if gather else places
            compiled[place] = jax.jit(partial(decoder.per_layer, cfg=cfg, dtype=dtype), out_shardings=places)
        return compiled[place](params)

    return prepare


def prompt_widths(longest: int) -> list[int]:
    """The few widths that prompts are padded to, the widest first: halves, down to NARROWEST."""
    widths = [longest]
    while widths[-1] >= 2 * NARROWEST:
        widths.append(-(-widths[-1] // 2))
    return widths


def fitting(length: int, widths: list[int]) -> int:
    """The least of the widths that holds `length` tokens."""
    return min(width for width in widths if width >= length)


def power_of_two(count: int, least: int = 1) -> int:
    """The least power of two that is not below either."""
    return 1 << (max(count, least) - 1).bit_length()


def left_padded(rows, width: int) -> np.ndarray:
    """Which of `width` columns the rows fill, [P, width] bool, when they end in the last one."""
    return np.arange(width) >= width - np.array([len(row) for row in rows])[:, None]


def up_to_stop(answer: Sampled, new: list[int], stop: tuple[str, ...], tokenizer: Tokenizer) -> int | None:
    """How many of the new tokens it takes until a stop text is complete; None if none is."""
    if answer.text is None:
        answer.text = tokenizer.stream(skip_special=False)
    for count, token in enumerate(new, start=1):
        answer.tail += answer.text.feed([token])
        if any(piece in answer.tail for piece in stop):
            return count
        answer.tail = answer.tail[-max(map(len, stop)) :]
    return None


def check_prompts(prompts, cfg: ModelConfig, generation: Generation, tokenizer: Tokenizer | None) -> None:
    """Raises ValueError, naming the prompt, for what cannot be continued."""
    if not len(prompts):
        raise ValueError("there are no prompts to continue")
    for i, row in enumerate(prompts):
        name = f"prompt {i + 1} of {len(prompts)}"
        if not 0 < len(row) <= generation.max_prompt_length:
            raise ValueError(
                f"{name} has {len(row)} tokens; it takes 1 to max_prompt_length={generation.max_prompt_length}"
            )
        if (top := int(max(row))) >= cfg.vocab_size or min(row) < 0:
            raise ValueError(
                f"{name} holds token {top if top >= cfg.vocab_size else min(row)}, and the model has tokens 0 to "
                f"{cfg.vocab_size - 1}: the tokenizer is not this model's{quoted(row, tokenizer)}"
            )


def check_limits(limits, count: int, generation: Generation) -> list[int]:
    if limits is None:
        return [generation.max_new_tokens] * count
    if len(limits) != count:
        raise ValueError(f"{len(limits)} limits for {count} completions; give one for each")
    for i, limit in enumerate(limits):
        if not 1 <= limit <= generation.max_new_tokens:
            raise ValueError(f"limits[{i}]={limit}; it is 1 to max_new_tokens={generation.max_new_tokens}")
    return [int(limit) for limit in limits]


def not_finite(answer: Sampled, prompt, tokenizer: Tokenizer | None) -> str:
    return (
        f"the model's scores are not finite at token {len(answer.tokens) + 1} or a little later of completion "
        f"{answer.generation + 1} of prompt {answer.prompt + 1}{quoted(prompt, tokenizer)}: the weights are damaged, "
        "or too large for the type of the computation"
    )


def quoted(prompt, tokenizer: Tokenizer | None) -> str:
    return "" if tokenizer is None else f", {tokenizer.decode(list(prompt))!r}"
