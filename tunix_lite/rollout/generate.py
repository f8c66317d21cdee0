"""Sampling completions of a batch of prompts: `make_sampler` yields them while they grow,
`make_generate` makes a `Rollout` of them."""

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from tunix_lite.basics.types import Metrics, Params, Prompts, Rollout
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.decoder import kind_of_layer
from tunix_lite.models.kernel_choice import check_fused
from tunix_lite.models.layer_by_layer import (
    are_for_cpu,
    per_layer_params,
    per_layer_shapes,
)
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.models.weights import are_plain
from tunix_lite.parallel.compiler_options import LEAST_MEMORY, options_of_mesh
from tunix_lite.parallel.compiling import check_wanted, compiled_together
from tunix_lite.parallel.mesh import (
    axis_size,
    current_mesh,
    current_platform,
)
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout.conversations import (
    ConversationScheduler,
    Partner,
)
from tunix_lite.rollout.engine import (
    APPEND_WIDTHS,
    Engine,
    append_calls,
    padded_width,
    prompt_cache_blocks,
)
from tunix_lite.rollout.programs import (
    Programs,
    PromptCache,
    SamplerSpec,
    Slots,
)
from tunix_lite.rollout.requests import (
    OnChunk,
    Request,
    RolloutArrays,
    StopCriteria,
    check_prompts,
)
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig


@dataclass(frozen=True)
class GenerateFunction:
    """A function that samples, one that compiles its programs, and one that makes its weights.
    Example: generate = make_generate(...); generate.compile_ahead(params, 16, 4)."""

    sample: Callable
    # (params, num_prompts, num_generations, temperature=...): compiles every program that so many
    # prompts and completions of any length need
    compile_ahead: Callable[..., None]
    # as make_prepare makes it: who only samples can keep its result in place of the parameters
    prepare: Callable[[Params], Params]

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.sample(*arguments, **options)


_preparing = threading.Lock()


@dataclass(frozen=True)
class CompletionSampler:
    """Samples completions of prompts. It holds the compiled programs.
    Example: for requests in make_sampler(cfg, GenerationConfig(), (1,), 0)(params, prompts, key).
    """

    rollout: RolloutConfig
    programs: Programs
    prepare: Callable[[Params], Params]  # as make_prepare makes it
    criteria: StopCriteria  # what ends a completion

    def __call__(
        self,
        params: Params,
        prompts: Prompts,
        key: jax.Array,
        num_generations: int = 1,
        temperature: float | None = None,
        indices: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> Generator[list[Request], None, Metrics]:
        """Yields, after every chunk, the requests that got new tokens; returns the metrics of the
        rollout.

        The same key, prompt index (of `indices`, or its place), generation and position draw the
        same token, on any mesh. temperature: None: of the settings. limits: of each completion, [P
        * G]; None: max_new_tokens. Raises ValueError for what cannot be sampled, FloatingPointError
        for a NaN.
        """
        # What is asked is checked before anything is computed.
        criteria = self.criteria
        if tokenizer is not None:
            criteria = replace(criteria, tokenizer=tokenizer)
        criteria.check()
        spec = self.programs.spec
        check_prompts(prompts, spec.cfg, spec.generation, criteria.tokenizer)
        limits = spec.generation.limits_of(limits, len(prompts) * num_generations)

        engine = self.engine(params, (len(prompts), num_generations), temperature)
        engine.criteria = criteria
        indices = range(len(prompts)) if indices is None else indices
        key_data = np.asarray(jax.random.key_data(key))
        ids = [tuple(map(int, prompt)) for prompt in prompts]
        # The widest prompts first: if memory does not suffice, that shows at once.
        widths = [padded_width(len(prompt), engine.widths) for prompt in ids]
        order = sorted(range(len(ids)), key=lambda p: -widths[p])
        engine.admit(
            Request(p, indices[p], g, limits[row], ids[p], key_data, row)
            for p in order
            for g, row in enumerate(range(p * num_generations, (p + 1) * num_generations))
        )
        while (decoded := engine.next_chunk()) is not None:
            yield engine.absorb(decoded)
        return engine.metrics()

    def engine(
        self,
        params: Params,
        size: tuple[int, int],
        temperature: float | None = None,
        most_requests: int = 0,
    ) -> Engine:
        """The engine of a rollout of (prompts, completions of each), or of `most_requests`. Raises
        ValueError where decoding cannot use the kernels that `rollout.kernels` asks for."""
        spec = self.programs.spec
        # Not in make_sampler: whether the weights are plain shows only here.
        if spec.fused:
            check_fused(
                spec.cfg,
                spec.dtype,
                current_platform(),
                axis_size("tp"),
                spec.int8,
                are_plain(params),
                spec.generation.has_cutoffs,
            )
        num_prompts, num_generations = size
        num_requests = num_prompts * num_generations
        fsdp = axis_size("fsdp")
        num_slots = self.rollout.slots(num_requests, fsdp)
        block, cache_blocks = prompt_cache_blocks(
            spec.generation,
            spec.chunk,
            num_prompts,
            num_generations,
            num_slots,
            fsdp,
            spec.on_cpu,
        )
        return Engine(
            self.programs,
            self.prepare(params),
            num_slots,
            max(num_requests, most_requests),
            [block],
            cache_blocks,
            self.criteria,
            spec.generation.temperature if temperature is None else temperature,
        )

    def compile_ahead(
        self, params: Params, *size: int, **options: Any
    ) -> tuple[Engine, Slots]:
        """Compiles the programs of rollouts of so many prompts, and completions of each, for all
        widths of prompts and columns of the cache: no step of the run waits for the compiler.
        Returns an engine whose weights are shapes, and the shapes of slots with all columns."""
        # One copy of the weights at a time, and none while programs compile.
        with _preparing:
            engine = self.engine(params, size, **options)
            engine.per_layer_params = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                engine.per_layer_params,
            )
        programs = engine.programs
        spec = programs.spec
        params = engine.per_layer_params
        block = engine.block_sizes[-1]
        number = jax.ShapeDtypeStruct((), jnp.int32)

        # The prompts. A prompt cache is placed as the first width leaves it.
        def prefilled(prompt_cache: PromptCache, width: int) -> PromptCache:
            tokens = jax.ShapeDtypeStruct((block, width), jnp.int32)
            lengths = jax.ShapeDtypeStruct((block,), jnp.int32)
            routes = spec.no_routes(block, width)
            inputs = (params, tokens, lengths, number, routes)
            return _results(programs.prefill, prompt_cache, *inputs)[0]

        empty = _results(programs.make_prompt_cache, block * engine.cache_blocks)
        prompt_cache = prefilled(empty, engine.widths[0])

        # The slots, for every number of columns.
        stopped = jax.ShapeDtypeStruct((engine.num_slots,), jnp.int32)
        temperature = jax.ShapeDtypeStruct((), jnp.float32)
        cuts_off = spec.cuts_off(engine.temperature)

        def decoded(columns: int) -> Slots:
            slots = _results(programs.make_slots, engine.num_slots, columns)
            slots = _results(
                programs.admit, slots, prompt_cache, engine.queue, number, stopped
            )
            slots, _ = _results(programs.decode, slots, params, temperature, cuts_off)
            # Again for slots as `decode` leaves them, since the compiler chooses where results lie.
            return _results(programs.admit, slots, prompt_cache, engine.queue, number, stopped)

        sizes = engine.column_sizes
        slots_of = [partial(decoded, columns) for columns in sizes]
        further = [partial(prefilled, prompt_cache, width) for width in engine.widths[1:]]
        every = compiled_together(slots_of + further)[: len(sizes)]

        # What gives slots another number of columns.
        for slots in every:
            # One layer of each kind is enough: others have the same shapes.
            for kind, kv in dict(zip(spec.cfg.kinds_of_weights, slots.cache)).items():
                for columns in sizes:
                    wanted = spec.num_columns(kind, columns)
                    if kv_cache.columns_of(kv) not in (None, wanted):
                        _results(programs.resize_layer, kv, wanted)
        return engine, every[0]

    def of_turns(self, max_turn_tokens: int | None) -> "CompletionSampler":
        """The sampler of conversations with turns of so many tokens."""
        spec = self.programs.spec
        chunk = spec.chunk
        kinds = map(kind_of_layer, spec.cfg.pattern)
        if spec.generation.stop and any(kind.state_shapes is not None for kind in kinds):
            # A stop text may end a turn, and no token can be taken out of a state again.
            chunk = 1
        if max_turn_tokens is not None:
            # Chunks of one length, so that slots do not stand still in a last one that is nearly
            # empty: turns of up to 20 take two of 10, and not 16 and 4.
            num_chunks = -(-max_turn_tokens // chunk)
            chunk = -(-max_turn_tokens // num_chunks)
        return replace(self, programs=Programs(replace(spec, holds=True, chunk=chunk)))


def make_sampler(
    cfg: Architecture,
    generation: GenerationConfig,
    eos_ids: Sequence[int],
    pad_id: int,
    dtype: DTypeLike = jnp.float32,
    rollout: RolloutConfig | None = None,
    tokenizer: Tokenizer | None = None,
    tp_reduce_dtype: DTypeLike = jnp.float32,
    per_request: bool = False,
) -> CompletionSampler:
    """A sampler for the devices of the current mesh. tp_reduce_dtype: as decoder.forward takes it.
    per_request: as SamplerSpec has it. Raises ValueError for unknown stop tokens."""
    rollout = RolloutConfig() if rollout is None else rollout
    generation.check_fits(cfg.vocab_size)
    # eos comes last, and wins where a token is in both lists.
    ends = dict.fromkeys(generation.stop_token_ids, "stop") | dict.fromkeys(eos_ids, "eos")
    spec = SamplerSpec(
        cfg=cfg,
        generation=generation,
        end_ids=tuple(ends),
        pad_id=pad_id,
        dtype=dtype,
        # No completion is longer: further steps would decode nothing.
        chunk=min(rollout.chunk, generation.max_new_tokens),
        int8=rollout.cache == "int8",
        tp_reduce_dtype=tp_reduce_dtype,
        per_request=per_request,
        on_cpu=current_platform() == "cpu",
        fused=rollout.is_fused,
        # a server's requests are not learned from
        records_routes=rollout.replay_routes and cfg.experts is not None and not per_request,
    )
    prepare = make_prepare(cfg, dtype, rollout.weights != "sharded")
    criteria = StopCriteria(ends, generation.stop, tokenizer)
    return CompletionSampler(rollout, Programs(spec), prepare, criteria)


def make_generate(
    cfg: Architecture,
    generation: GenerationConfig,
    eos_ids: tuple[int, ...],
    pad_id: int,
    dtype: DTypeLike = jnp.float32,
    rollout: RolloutConfig | None = None,
    tokenizer: Tokenizer | None = None,
    tp_reduce_dtype: DTypeLike = jnp.float32,
) -> GenerateFunction:
    """generate(params, prompts, key, num_generations=1, temperature=..., limits=None,
    on_finished=None, on_chunk=None, between_chunks=None, partner=None, stepwise=False) -> Rollout
    of P * G rows.

    on_finished(row, tokens) is called when a completion has ended; on_chunk(requests, ended) and
    between_chunks() after each chunk. With stepwise it is a generator that stops after each chunk.
    With a partner each row is a conversation, and max_new_tokens bounds all that comes after a
    prompt.
    Example: `make_generate(model.cfg, GenerationConfig(32, 48), tokenizer.eos_ids, 0)`."""
    sample = make_sampler(
        cfg, generation, eos_ids, pad_id, dtype, rollout, tokenizer, tp_reduce_dtype
    )
    # Turns of another length have another chunk, and so programs of their own.
    sampler_of_turns = cache(sample.of_turns)

    def in_steps(
        params: Params,
        prompts: Prompts,
        key: jax.Array,
        num_generations: int = 1,
        temperature: float | None = None,
        limits: Sequence[int] | None = None,
        on_finished: Callable[[int, list[int]], None] | None = None,
        on_chunk: OnChunk | None = None,
        between_chunks: Callable[[], None] | None = None,
        partner: Partner | None = None,
    ) -> Generator[None, None, Rollout]:
        if partner is not None:
            sample.criteria.check()
            check_prompts(partner.prompts or prompts, cfg, generation, tokenizer)
            size = (len(prompts), num_generations)
            of_turns = sampler_of_turns(partner.max_turn_tokens)
            engine = of_turns.engine(params, size, temperature)
            talks = ConversationScheduler(engine, partner, prompts, num_generations, key)
            return (yield from talks.in_steps(on_finished, on_chunk, between_chunks))

        metrics: Metrics = {}

        def chunks():
            steps = sample(params, prompts, key, num_generations, temperature, limits=limits)
            metrics.update((yield from steps))

        arrays = RolloutArrays.empty(len(prompts) * num_generations, generation, pad_id)
        for touched in chunks():
            ended = [request for request in touched if request.reason is not None]
            for request in ended:
                arrays.write_completion(request.row, request)
                if on_finished is not None:
                    on_finished(request.row, request.tokens)
            if on_chunk is not None:
                # Copies, as `arrays` still changes while the caller holds them.
                alone = {
                    one.row: arrays.only(one.row).rollout([one.ids], 1, {}) for one in ended
                }
                on_chunk(touched, alone)
            if between_chunks is not None:
                between_chunks()
            yield
        return arrays.rollout(prompts, num_generations, metrics)

    def generate(
        *arguments: Any, stepwise: bool = False, **options: Any
    ) -> Rollout | Generator[None, None, Rollout]:
        steps = in_steps(*arguments, **options)
        return steps if stepwise else to_the_end(steps)

    def compile_ahead(
        params: Params,
        *size: int,
        converses: bool = False,
        max_turn_tokens: int | None = None,
        **options: Any,
    ) -> None:
        of = sampler_of_turns(max_turn_tokens) if converses else sample
        engine, slots = of.compile_ahead(params, *size, **options)
        if converses:
            compile_append(engine, slots)
        if converses and generation.stop:
            # takes back tokens behind a stop text
            lost_B = jax.ShapeDtypeStruct((engine.num_slots,), jnp.int32)
            _results(engine.programs.rewind, slots, lost_B)

    return GenerateFunction(generate, compile_ahead, sample.prepare)


def to_the_end(steps: Generator[None, None, Rollout]) -> Rollout:
    """Runs the generator to its end, and returns its rollout."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def make_prepare(
    cfg: Architecture,
    dtype: DTypeLike,
    gather: bool,
    may_join: bool = True,
) -> Callable[[Params], dict[str, jax.Array]]:
    """prepare(params) -> the weights that the programs take: layer by layer, in the type of the
    computation and, if `gather`, gathered over fsdp. Those that it made itself it gives back.
    may_join: False keeps names and layout."""
    compiled = {}

    def prepare(params: Params) -> Params:
        if isinstance(params.get("layers"), list):
            return params
        # One program for each way in which the weights may be sharded.
        # A tree of dicts has no hash: its structure and its leaves do.
        leaves, treedef = jax.tree.flatten(jax.tree.map(lambda x: x.sharding, params))
        place = (treedef, *leaves)
        if place not in compiled:
            on_cpu = may_join and are_for_cpu(params, dtype, current_mesh(), gather)
            how = {"cfg": cfg, "dtype": dtype, "on_cpu": on_cpu}
            shapes = per_layer_shapes(params, gather=gather, **how)
            # As in updates, a CPU goes matrix by matrix: else it would hold many of them twice.
            compiled[place] = jax.jit(
                partial(per_layer_params, **how),
                out_shardings=jax.tree.map(lambda x: x.sharding, shapes),
                compiler_options=options_of_mesh(LEAST_MEMORY),
            )
        return compiled[place](params)

    return prepare


def _results(program: Any, *arguments: Any) -> Any:
    """Compiles a program for these arguments, or shapes. Returns the shapes of its results."""
    check_wanted()
    lowered = program.lower(*arguments)
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        lowered.out_info,
        lowered.compile().output_shardings,
    )


def compile_append(engine: Engine, slots: Slots) -> Slots:
    """Compiles what appends tokens to slots. Returns the shapes of the slots after it."""
    for width in APPEND_WIDTHS:
        call = append_calls({0: ([0] * width, 1)}, engine.num_slots)[0]
        routes = engine.programs.spec.no_routes(*call[1].shape)
        inputs = (engine.per_layer_params, *call, routes)
        slots = _results(engine.programs.append, slots, *inputs)[0]
    return slots
