"""Sampling completions: each prompt is read once, a fixed number of slots decode, and a completion
that ends makes room for the next request.

`make_sampler` yields completions while they grow; `make_generate` makes a `Rollout` of them.
programs.py holds what runs on the devices, scheduler.py what the host does meanwhile.
"""

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from tunix_lite.kernels.choice import check_fused
from tunix_lite.models import decoder
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.models.weights import are_plain
from tunix_lite.parallel.mesh import (
    axis_size,
    current_mesh,
    current_platform,
    gathered_sharding,
)
from tunix_lite.rollout.compile_ahead import RolloutSize, as_shape, compile_rollout
from tunix_lite.rollout.programs import Programs, SamplerSpec, Slots, make_programs
from tunix_lite.rollout.requests import Request, StopCriteria, check_limits, check_prompts
from tunix_lite.rollout.scheduler import (
    RolloutScheduler,
    padded_width,
    prompt_blocks,
    prompt_widths,
)
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.types import FINISH, Metrics, Params, Prompts, Rollout

# on_chunk(requests that got tokens, those that ended by row, each as a Rollout of one row)
OnChunk = Callable[[Sequence[Request], dict[int, Rollout]], None]


@dataclass(frozen=True)
class Sampling:
    """A function that samples, and one that compiles its programs.

    Example: generate = make_generate(...); generate.compile_ahead(params, 16, 4), then
    generate(params, prompts, key, 4), with 16 prompts, compiles nothing.
    """

    sample: Callable
    # (params, num_prompts, num_generations, temperature=...): compiles every program that so many
    # prompts and completions of any length need
    compile_ahead: Callable[..., None]

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.sample(*arguments, **options)


def make_sampler(
    cfg: Architecture,
    generation: GenerationConfig,
    eos_ids: tuple[int, ...],
    pad_id: int,
    dtype: DTypeLike = jnp.float32,
    rollout: RolloutConfig | None = None,
    tp_reduce_dtype: DTypeLike = jnp.float32,
) -> "Sampling":
    """sample(params, prompts, key, num_generations=1, temperature=..., indices=None, limits=None,
    tokenizer=None).

    It yields, after every chunk, the `Request`s that got new tokens, and returns the metrics of the
    rollout at the end. The same key, prompt index (of `indices`, or its place in the list),
    generation and position draw the same token. The mesh, the number of slots, the chunk and other
    requests change nothing. limits: tokens of each completion, [P * G], at most; None:
    max_new_tokens. generation.stop needs the `tokenizer`. tp_reduce_dtype: as decoder.forward takes
    it. Raises ValueError for what cannot be sampled, FloatingPointError for a NaN.
    """
    rollout = RolloutConfig() if rollout is None else rollout
    generation.check_fits(cfg.vocab_size)
    spec, ends = sampler_spec(cfg, generation, eos_ids, pad_id, dtype, rollout, tp_reduce_dtype)
    programs = make_programs(spec)
    prepare = make_prepare(cfg, dtype, rollout.weights != "sharded")
    widths = prompt_widths(generation.max_prompt_length)

    def sample(
        params: Params,
        prompts: Prompts,
        key: jax.Array,
        num_generations: int = 1,
        temperature: float = generation.temperature,
        indices: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> Generator[list[Request], None, Metrics]:
        # What is asked is checked before anything is computed.
        criteria = StopCriteria(ends, generation.stop, tokenizer)
        criteria.check()
        check_kernels(spec, rollout, params)
        check_prompts(prompts, cfg, generation, tokenizer)
        limits = check_limits(limits, len(prompts) * num_generations, generation)

        # The widest prompts first: if memory does not suffice, that shows at once.
        order = sorted(range(len(prompts)), key=lambda p: -padded_width(len(prompts[p]), widths))
        indices = range(len(prompts)) if indices is None else indices
        requests = make_requests(order, indices, limits, num_generations)
        num_slots = rollout.slots(len(requests), axis_size("fsdp"))
        blocks = prompt_blocks(spec, [prompts[p] for p in order], num_generations, num_slots)

        # From here on the devices work, a chunk ahead of the host.
        scheduler = RolloutScheduler(
            programs, prepare(params), np.float32(temperature), requests, blocks, num_slots, key
        )
        scheduler.fill_slots()
        while (decoded := scheduler.next_chunk()) is not None:
            yield scheduler.absorb(decoded, criteria, prompts)
        return scheduler.metrics()

    return Sampling(sample, partial(compile_ahead, programs, prepare, rollout))


def compile_ahead(
    programs: Programs,
    prepare: Callable[[Params], Params],
    rollout: RolloutConfig,
    params: Params,
    num_prompts: int,
    num_generations: int,
    temperature: float | None = None,
) -> tuple[Params, Slots]:
    """Compiles the programs that `Sampling` describes. temperature: None takes that of the
    settings. Returns the shapes of the weights as the programs take them, and of the slots."""
    if temperature is None:
        temperature = programs.spec.generation.temperature
    num_slots = rollout.slots(num_prompts * num_generations, axis_size("fsdp"))
    size = RolloutSize(num_prompts, num_generations, num_slots, temperature)
    # One copy of the weights at a time, and none while programs compile.
    with _preparing:
        weights = jax.tree.map(as_shape, prepare(params))
    _, slots = compile_rollout(programs, weights, size)
    return weights, slots


_preparing = threading.Lock()


def check_kernels(spec: SamplerSpec, rollout: RolloutConfig, params: Params) -> None:
    """Raises ValueError where decoding with these weights on the current mesh cannot use the
    kernels that `rollout.kernels` asks for."""
    if rollout.is_fused:
        check_fused(
            spec.cfg,
            spec.dtype,
            current_platform(),
            axis_size("tp"),
            spec.int8,
            are_plain(params),
            spec.generation.has_cutoffs,
            spec.generation.repetition_penalty,
        )


def make_requests(
    order: Sequence[int],
    indices: Sequence[int],
    limits: Sequence[int],
    num_generations: int,
) -> list[Request]:
    """The requests of all completions, prompt by prompt in this order.

    limits: of completion g of prompt p at p * num_generations + g.
    """
    return [
        Request(p, indices[p], g, limits[p * num_generations + g])
        for p in order
        for g in range(num_generations)
    ]


def sampler_spec(
    cfg: Architecture,
    generation: GenerationConfig,
    eos_ids: Sequence[int],
    pad_id: int,
    dtype: DTypeLike,
    rollout: RolloutConfig,
    tp_reduce_dtype: DTypeLike,
) -> tuple[SamplerSpec, dict[int, str]]:
    """The spec of a sampler's programs; and "eos" or "stop", by the token that ends a completion.

    A token that is both counts as end-of-sequence.
    """
    ends = dict.fromkeys(generation.stop_token_ids, "stop") | dict.fromkeys(eos_ids, "eos")
    spec = SamplerSpec(
        cfg=cfg,
        generation=generation,
        end_ids=tuple(ends),
        pad_id=pad_id,
        dtype=dtype,
        chunk=min(rollout.chunk, generation.max_new_tokens),
        int8=rollout.cache == "int8",
        tp_reduce_dtype=tp_reduce_dtype,
        on_cpu=current_platform() == "cpu",
        fused=rollout.is_fused,
    )
    return spec, ends


def make_generate(
    cfg: Architecture,
    generation: GenerationConfig,
    eos_ids: tuple[int, ...],
    pad_id: int,
    dtype: DTypeLike = jnp.float32,
    rollout: RolloutConfig | None = None,
    tokenizer: Tokenizer | None = None,
    tp_reduce_dtype: DTypeLike = jnp.float32,
) -> Sampling:
    """generate(params, prompts, key, num_generations=1, temperature=..., limits=None,
    on_finished=None, on_chunk=None, between_chunks=None, stepwise=False)

    -> Rollout of P * G rows: row p * G + g is generation g of prompt p. on_finished(row, tokens) is
    called when the host reads the chunk in which a completion ended, while others still decode.
    on_chunk(requests, ended) is called after each chunk, with the requests that got tokens and, by
    row, those that ended as Rollouts of one row. between_chunks() is called after each chunk, of
    which all processes run the same; what it raises ends the rollout. With stepwise it returns a
    generator that stops after each chunk, while the next one is under way, and returns the Rollout.
    The rest is as in `make_sampler`.

    Example: `make_generate(model.cfg, GenerationConfig(32, 48), tokenizer.eos_ids,
    tokenizer.pad_id)`, called with prompts as lists of token numbers.
    """
    sample = make_sampler(cfg, generation, eos_ids, pad_id, dtype, rollout, tp_reduce_dtype)

    def in_steps(
        params: Params,
        prompts: Prompts,
        key: jax.Array,
        num_generations: int = 1,
        temperature: float = generation.temperature,
        limits: Sequence[int] | None = None,
        on_finished: Callable[[int, list[int]], None] | None = None,
        on_chunk: OnChunk | None = None,
        between_chunks: Callable[[], None] | None = None,
    ) -> Generator[None, None, Rollout]:
        metrics: Metrics = {}

        def chunks():
            arguments = (params, prompts, key, num_generations, temperature, None)
            metrics.update((yield from sample(*arguments, limits=limits, tokenizer=tokenizer)))

        arrays = RolloutArrays.empty(len(prompts) * num_generations, generation, pad_id)
        for touched in chunks():
            for request in touched:
                if request.reason is not None:
                    row = request.prompt * num_generations + request.generation
                    arrays.write_completion(row, request)
                    if on_finished is not None:
                        on_finished(row, request.tokens)
            if on_chunk is not None:
                ended = [request for request in touched if request.reason is not None]
                on_chunk(touched, rollouts_of_one(ended, prompts, num_generations, arrays))
            if between_chunks is not None:
                between_chunks()
            yield
        return arrays.rollout(prompts, num_generations, metrics)

    return Sampling(whole_or_stepwise(in_steps), sample.compile_ahead)


def rollouts_of_one(
    ended: list[Request], prompts: Prompts, num_generations: int, arrays: "RolloutArrays"
) -> dict[int, Rollout]:
    """Completions that have ended and are in the arrays, by row, each as a Rollout of one row."""
    rows = {request.prompt * num_generations + request.generation: request for request in ended}
    return {
        row: arrays.only(row).rollout([prompts[request.prompt]], 1, {})
        for row, request in rows.items()
    }


def whole_or_stepwise(
    in_steps: Callable[..., Generator[None, None, Rollout]],
) -> Callable[..., Rollout | Generator[None, None, Rollout]]:
    """The same as a function that returns the Rollout; with stepwise=True it returns the
    generator."""

    def generate(
        *arguments: Any, stepwise: bool = False, **options: Any
    ) -> Rollout | Generator[None, None, Rollout]:
        steps = in_steps(*arguments, **options)
        return steps if stepwise else to_the_end(steps)

    return generate


def to_the_end(steps: Generator[None, None, Rollout]) -> Rollout:
    """Runs the generator to its end, and returns its rollout."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


@dataclass(frozen=True)
class RolloutArrays:
    """The arrays of a `Rollout`, [B, T] each, while its completions come in.

    A `Rollout` is padded, unlike prompts and requests, because its arrays become those of a
    `Batch`: all completions begin in column max_prompt_length.

    Example: of `GenerationConfig(4, 3)`, a prompt [5, 6] with the completion [7, 1] is the row
    [0, 0, 5, 6, 7, 1, 0].
    """

    # the first column of completions
    width: int
    tokens: np.ndarray
    completion_mask: np.ndarray
    logprobs: np.ndarray
    full_logprobs: np.ndarray
    # [B]
    finish: np.ndarray
    # [B, 2]
    seconds: np.ndarray

    @classmethod
    def empty(
        cls,
        num_rows: int,
        generation: GenerationConfig,
        pad_id: int,
    ) -> "RolloutArrays":
        """Makes so many rows of padding."""
        width = generation.max_prompt_length
        shape = (num_rows, width + generation.max_new_tokens)
        return cls(
            width=width,
            tokens=np.full(shape, pad_id, np.int32),
            completion_mask=np.zeros(shape, bool),
            logprobs=np.zeros(shape, np.float32),
            full_logprobs=np.zeros(shape, np.float32),
            finish=np.zeros(num_rows, np.int8),
            seconds=np.zeros((num_rows, 2), np.float32),
        )

    def only(self, row: int) -> "RolloutArrays":
        """A copy of one row."""
        arrays = (getattr(self, part.name) for part in fields(self)[1:])
        return RolloutArrays(self.width, *(array[row : row + 1].copy() for array in arrays))

    def write_completion(self, row: int, request: Request) -> None:
        """Writes a request that has ended."""
        here = np.s_[row, self.width : self.width + len(request.tokens)]
        self.tokens[here] = request.tokens
        self.completion_mask[here] = True
        self.logprobs[here] = request.logprobs
        self.full_logprobs[here] = request.full_logprobs
        self.finish[row] = FINISH.index(request.reason)
        self.seconds[row] = (request.began, request.ended)

    def rollout(
        self,
        prompts: Prompts,
        num_generations: int,
        metrics: Metrics,
    ) -> Rollout:
        """The rollout, with each prompt left of its completions."""
        token_mask = self.completion_mask.copy()
        for p, prompt in enumerate(prompts):
            rows = slice(p * num_generations, (p + 1) * num_generations)
            begin = self.width - len(prompt)
            self.tokens[rows, begin : self.width] = prompt
            token_mask[rows, begin : self.width] = True
        return Rollout(
            tokens=self.tokens,
            token_mask=token_mask,
            completion_mask=self.completion_mask,
            logprobs=self.logprobs,
            finish=self.finish,
            full_logprobs=self.full_logprobs,
            seconds=self.seconds,
            metrics=metrics,
        )


def make_prepare(
    cfg: Architecture,
    dtype: DTypeLike,
    gather: bool,
    may_join: bool = True,
) -> Callable[[Params], dict[str, jax.Array]]:
    """prepare(params) -> the weights that the programs take: layer by layer, in the type of the
    computation, and, if `gather`, gathered over fsdp, once instead of for every token.

    may_join: q, k and v of a layer are joined where `decoder.joins_qkv` says so; False keeps the
    names of all weights.
    """
    compiled = {}

    def prepare(params: Params) -> Params:
        # One program for each way in which the weights may be sharded.
        leaves, treedef = jax.tree.flatten(jax.tree.map(lambda x: x.sharding, params))
        place = (treedef, *leaves)
        if place not in compiled:
            join_qkv = may_join and decoder.joins_qkv(params, dtype, current_mesh())
            shardings = decoder.per_layer_shardings(treedef.unflatten(leaves), cfg, join_qkv)
            if gather:
                shardings = jax.tree.map(gathered_sharding, shardings)
            per_layer = partial(decoder.per_layer_params, cfg=cfg, dtype=dtype, join_qkv=join_qkv)
            compiled[place] = jax.jit(per_layer, out_shardings=shardings)
        return compiled[place](params)

    return prepare
