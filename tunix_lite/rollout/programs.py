"""The compiled programs of sampling, and the arrays that they hand to one another: functions whose
first argument is a `SamplerSpec`, which `Programs` compiles. Letters beside those of types.py: Q
requests that may take a slot, R slots that are appended to, W new tokens of each, C columns of the
cache."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from tunix_lite.basics.types import Params
from tunix_lite.models import attention, decoder, rope, rounding
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.experts import Routed
from tunix_lite.models.routes import no_routes, recorded, replayed
from tunix_lite.models.unfused import unfused
from tunix_lite.parallel.compiler_options import FOR_DECODING, options_of_mesh
from tunix_lite.parallel.mesh import constrain, use_rules
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout import sampling
from tunix_lite.rollout.cache import KV
from tunix_lite.rollout.settings import GenerationConfig

# Elements of the noise of a chunk that a CPU draws before its first step: 16 MiB.
_NOISE_AT_ONCE = 2**22


@dataclass(frozen=True)
class SamplerSpec:
    """Static settings of the sampling programs.
    Example: `SamplerSpec(cfg, GenerationConfig(32, 64), (1,), 0, jnp.float32, chunk=16)`."""

    cfg: Architecture
    generation: GenerationConfig
    end_ids: tuple[int, ...]  # tokens that end a completion and are part of it
    pad_id: int  # token that slots without a running sequence read
    dtype: DTypeLike  # dtype of the computation
    chunk: int  # tokens that each slot decodes in one call
    int8: bool = False  # whether the cache holds int8 codes
    tp_reduce_dtype: DTypeLike = jnp.float32  # dtype of sums over tp, for decoder.forward
    # whether a slot keeps its sequence when a turn of it has ended, until the host frees the slot
    holds: bool = False
    per_request: bool = False  # whether each request has _RequestDraws of its own
    fused: bool = False  # whether kernels of our own decode (tunix_lite/kernels)
    # whether it runs on CPUs, whose decode program reads some arrays in another layout
    on_cpu: bool = False
    # whether fused kernels are interpreted, as tests do where there is no GPU
    interpret: bool = False
    # whether the programs report the experts that each token took, and take those of tokens that
    # were read before (models/routes.py)
    records_routes: bool = False

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt with its longest completion."""
        return self.generation.max_prompt_length + self.generation.max_new_tokens

    @property
    def spare_columns(self) -> int:
        """Columns of a ring for tokens behind a stop text, which are taken back."""
        return self.chunk if self.holds and self.generation.stop else 0

    def num_columns(self, kind: str, length: int) -> int:
        """Columns of a layer of this kind for sequences of up to `length` tokens."""
        return kv_cache.num_columns(self.cfg, kind, length, self.spare_columns)

    def no_routes(self, *shape: int) -> np.ndarray | None:
        """The routes of so many tokens, none of them recorded yet; None: none ever are."""
        return no_routes(self.cfg, *shape) if self.records_routes else None

    def cuts_off(self, temperature: float) -> bool:
        """Returns whether decode cuts tokens off: at temperature 0 it would change no token."""
        return bool(self.generation.has_cutoffs and temperature > 0)


@flax.struct.dataclass
class PromptCache:
    """M prompts that have been read, which every fsdp shard holds in full.
    Example: make_prompt_cache(8) has room for 8 prompts; prefill fills 2 of its rows at a time."""

    cache: list[KV]  # keys and values of up to max_prompt_length columns, one entry per layer
    # [M, D] hidden state of the last token: a completion's first token is drawn from it
    hidden: jax.Array
    lengths: jax.Array  # [M] tokens of each prompt


@flax.struct.dataclass
class _RequestDraws:
    """Sampling settings of each request, where a server's requests have settings of their own.
    Example: of one greedy request: temperature [0.], top_k [0], top_p [1.], min_p [0.]."""

    temperature: jax.Array  # float32; 0 takes the likeliest token
    top_k: jax.Array  # int32; 0: all tokens
    top_p: jax.Array  # float32; 1: all tokens
    min_p: jax.Array  # float32; 0: all tokens


@flax.struct.dataclass
class Queue:
    """The next requests, arrays of the host, [Q] each. Request number n stands at n % Q.
    Example: of 2 prompts with 2 completions each, `rows` is [0, 0, 1, 1, 0, 0, ...]."""

    rows: np.ndarray  # row of the prompt in the prompt cache
    # [Q, 2] data of the random key that the prompt's number and the generation are folded into
    key_data: np.ndarray
    prompts: np.ndarray
    generations: np.ndarray
    num_drawn: np.ndarray  # tokens that were drawn before
    limits: np.ndarray  # tokens of the completion, at most; 0: it waits for `append`
    # None: all requests are drawn as SamplerSpec.generation says
    draws: _RequestDraws | None = None


@flax.struct.dataclass
class Slots:
    """The B sequences that are being decoded. Every program donates its slots to the next one.
    Example: make_slots(4) gives four with `requests` [-1, -1, -1, -1], none of them running."""

    cache: list[KV]
    hidden: jax.Array  # [B, D] of the newest token
    requests: jax.Array  # [B] number of the request; -1: none yet
    keys: jax.Array  # [B] random keys
    lengths: jax.Array  # [B] tokens in the cache, which is the position of the next one
    num_drawn: jax.Array  # [B] tokens of the completion so far
    limits: jax.Array  # [B] tokens of the completion, at most; 0: the slot waits for `append`
    running: jax.Array  # [B] bool
    num_taken: jax.Array  # [] requests taken so far
    draws: _RequestDraws | None = None  # [B]; None as in Queue


@flax.struct.dataclass
class DecodedChunk:
    """Tokens that one call of decode drew, whole on every device.
    Example: chunk=2 and 2 slots, of which the second ended at once: tokens [[5, 1], [7, -1]]."""

    tokens: jax.Array  # [chunk, B]; -1: the slot was not running
    logprobs: jax.Array  # [chunk, B] under the distribution that was drawn from
    full_logprobs: jax.Array  # [chunk, B] under softmax(logits / temperature)
    requests: jax.Array  # [B] number of the request
    running: jax.Array  # [B] bool, after the chunk
    num_taken: jax.Array  # [] requests taken so far
    # [chunk, B, L * k] the experts that each token took; None: they are not recorded
    routes: jax.Array | None = None


class Programs:
    """The programs of one `SamplerSpec`, under jit, for the platform of the current mesh. Slots and
    prompt caches are donated. `compiles` counts how many times each was compiled.
    Example: Programs(spec).make_prompt_cache(8)."""

    def __init__(self, spec: SamplerSpec):
        self.spec = spec
        self.compiles: Counter[str] = Counter()
        self.make_prompt_cache = self._jit(make_prompt_cache, static_argnums=0)
        self.make_slots = self._jit(make_slots, static_argnums=(0, 1))
        self.resize_layer = self._jit(resize_layer, static_argnums=1)
        self.prefill = self._jit(prefill, donate_argnums=0)
        self.admit = self._jit(admit, donate_argnums=0)
        self.append = self._jit(append, donate_argnums=0)
        self.decode = self._jit(
            decode,
            compiler_options=options_of_mesh(FOR_DECODING),
            static_argnums=3,
            donate_argnums=0,
        )
        self.rewind = self._jit(rewind, donate_argnums=0)

    def _jit(self, function: Callable, **options: Any) -> Callable:
        def program(*args: Any) -> Any:
            # jit runs the body of a function only to compile it.
            self.compiles[function.__name__] += 1
            with use_rules("rollout"):
                return function(self.spec, *args)

        # Profiles and logs show this name.
        program.__name__ = function.__name__
        return jax.jit(program, **options)

    def resize(self, slots: Slots, columns: int) -> Slots:
        """The slots with a cache for sequences of up to `columns` tokens."""
        # One layer after the other, so that no device ever holds two whole caches.
        for layer, kind in enumerate(self.spec.cfg.kinds):
            wanted = self.spec.num_columns(kind, columns)
            if kv_cache.columns_of(slots.cache[layer]) not in (None, wanted):
                slots.cache[layer] = self.resize_layer(slots.cache[layer], wanted)
        return slots


# ---- what the programs keep on the devices


def at_home(
    state: Any,
    rows_axis: str,
    place: Callable[[Any, tuple[str, ...]], Any] = lambda x, axes: constrain(x, *axes),
) -> Any:
    """A Slots or PromptCache, each array placed on the mesh, from program to program at the same
    place.

    rows_axis: the logical axis of its rows. place(x, logical axes) places an array, or its shape.
    """

    def place_rows(x: Any) -> Any:
        # `seq` is the logical axis that no rule may divide.
        others = ["seq"] * (x.ndim - 1)
        return place(x, (rows_axis, *others) if x.ndim else ())

    def place_kv(x: Any) -> Any:
        return place(x, kv_cache.logical_axes(x, rows_axis))

    others = jax.tree.map(place_rows, state.replace(cache=None))
    return others.replace(cache=jax.tree.map(place_kv, state.cache))


def _on_every_device(x: jax.Array) -> jax.Array:
    """The array, whole on every device."""
    return constrain(x, *["seq"] * x.ndim)


def _where_rows(
    is_row_B: jax.Array,
    new: jax.Array,
    old: jax.Array,
) -> jax.Array:
    """`new` in the rows where is_row_B is true, and `old` in all others, [B, ...]."""
    further_dims = [1] * (old.ndim - 1)
    return jnp.where(is_row_B.reshape(-1, *further_dims), new, old)


def _empty_cache(spec: SamplerSpec, rows: int, length: int, rows_axis: str) -> list[Any]:
    how = (spec.dtype, spec.int8, rows_axis, spec.spare_columns)
    return kv_cache.empty_cache(spec.cfg, rows, length, *how)


def make_prompt_cache(spec: SamplerSpec, rows: int) -> PromptCache:
    """Room for `rows` prompts, empty."""
    longest = spec.generation.max_prompt_length
    empty = PromptCache(
        cache=_empty_cache(spec, rows, longest, "prompts"),
        hidden=jnp.zeros((rows, spec.cfg.embed_dim), spec.dtype),
        lengths=jnp.zeros(rows, jnp.int32),
    )
    return at_home(empty, "prompts")


def make_slots(spec: SamplerSpec, num_slots: int, columns: int | None = None) -> Slots:
    """Makes slots of which none is running, with a cache of so many columns; None: of all."""
    columns = spec.max_length if columns is None else columns
    zeros = jnp.zeros(num_slots, jnp.int32)
    empty = Slots(
        cache=_empty_cache(spec, num_slots, columns, "batch"),
        hidden=jnp.zeros((num_slots, spec.cfg.embed_dim), spec.dtype),
        requests=zeros - 1,
        keys=jnp.broadcast_to(jax.random.key(0), (num_slots,)),
        lengths=zeros,
        num_drawn=zeros,
        limits=zeros,
        running=zeros > 0,
        num_taken=jnp.int32(0),
        draws=no_draws(num_slots) if spec.per_request else None,
    )
    return at_home(empty, "batch")


def resize_layer(spec: SamplerSpec, kv: KV, columns: int) -> KV:
    """The cache of a layer with so many columns."""
    # `Programs` hands its spec to every program.
    del spec
    return kv.resized(columns)


def no_draws(count: int) -> _RequestDraws:
    """Makes settings of so many requests that draw from the whole distribution."""
    zeros = np.zeros(count, np.float32)
    return _RequestDraws(zeros + 1, np.zeros(count, np.int32), zeros + 1, zeros)


# ---- prefill


def prefill(
    spec: SamplerSpec,
    prompt_cache: PromptCache,
    per_layer_params: Params,
    tokens_MT: jax.Array,
    lengths_M: jax.Array,
    first_row: jax.Array,
    routes_MTK: jax.Array | None = None,
) -> tuple[PromptCache, jax.Array | None]:
    """Reads M right-padded prompts into the rows of the prompt cache from `first_row` on. Returns
    the cache, and the routes of the tokens: those that are given, and else the router's."""
    M, T = tokens_MT.shape
    tokens_MT = constrain(tokens_MT, "batch", "seq")
    is_token_MT = jnp.arange(T) < lengths_M[:, None]
    meta = attention.one_sequence_per_row(is_token_MT)

    def attend_fn(
        kind: str,
        held: None,
        of_source: tuple[jax.Array, jax.Array] | None,
        q_BTNH: jax.Array,
        *own: jax.Array,
        **sinks: jax.Array,
    ):
        kv_BTKH = own or of_source
        attended_BTNH = attention.xla(
            spec.cfg, kind == "local", meta, q_BTNH, *kv_BTKH, **sinks
        )
        # A layer that reads the keys of another one keeps none of its own.
        return attended_BTNH, own or None

    @jax.jit
    def stored(old, new):
        if isinstance(old, KV):
            new = kv_cache.to_cache_format(*new, spec.int8).as_ring(lengths_M, old.columns)
        return kv_cache.store_rows(old, new, first_row)

    hidden_MTD, new_cache, routed = decoder.forward_by_layer(
        per_layer_params,
        spec.cfg,
        tokens_MT,
        meta.positions,
        attend_fn,
        spec.tp_reduce_dtype,
        sequences=meta,
        routes_LBTk=replayed(routes_MTK, spec.cfg),
    )

    put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=first_row, axis=0)
    filled = PromptCache(
        cache=list(map(stored, prompt_cache.cache, new_cache)),
        hidden=put(prompt_cache.hidden, hidden_MTD[jnp.arange(M), lengths_M - 1]),
        lengths=put(prompt_cache.lengths, lengths_M),
    )
    return at_home(filled, "prompts"), _reported_routes(spec, routed)


def _reported_routes(spec: SamplerSpec, routed: Routed | None) -> jax.Array | None:
    """The routes of tokens that were read, whole on every device; None: nothing is recorded."""
    if not spec.records_routes:
        return None
    return _on_every_device(recorded(routed.ids, spec.cfg))


# ---- admit


def admit(
    spec: SamplerSpec,
    slots: Slots,
    prompt_cache: PromptCache,
    queue: Queue,
    ready: jax.Array,
    stopped_B: jax.Array,
) -> Slots:
    """Every free slot takes the next request of the queue.

    ready: requests whose prompts stand in the prompt cache, []. stopped_B: the requests that the
    host has ended, whose slots are free. With spec.holds the host alone frees a slot.
    """
    # A slot whose limit is 0 does not run yet: its request waits for `append`.
    is_free_B = (slots.requests < 0) | (slots.requests == stopped_B)
    if not spec.holds:
        is_free_B |= ~slots.running & (slots.limits > 0)
    # In the order of the slots: `Engine.fill` counts in the same way, without asking.
    request_B = slots.num_taken + jnp.cumsum(is_free_B) - 1
    is_new_B = is_free_B & (request_B < ready)
    place_B = request_B % len(queue.rows)
    row_B = queue.rows[place_B]
    keys_B = jax.random.wrap_key_data(queue.key_data[place_B])
    keys_B = sampling.row_keys(keys_B, queue.prompts[place_B], queue.generations[place_B])
    limits_B = queue.limits[place_B]
    take = partial(_where_rows, is_new_B)

    # under jit, as the layers in decoder.forward_by_layer are
    @jax.jit
    def load(kv, prompts):
        return kv_cache.load_rows(kv, prompts, row_B, is_new_B)

    draws = jax.tree.map(lambda new: new[place_B], queue.draws)
    draws = jax.tree.map(take, draws, slots.draws)
    admitted = Slots(
        cache=list(map(load, slots.cache, prompt_cache.cache)),
        hidden=take(prompt_cache.hidden[row_B], slots.hidden),
        requests=take(request_B, slots.requests),
        keys=take(keys_B, slots.keys),
        lengths=take(prompt_cache.lengths[row_B], slots.lengths),
        num_drawn=take(queue.num_drawn[place_B], slots.num_drawn),
        limits=take(limits_B, slots.limits),
        running=(is_new_B & (limits_B > 0)) | (slots.running & ~is_free_B),
        num_taken=slots.num_taken + is_new_B.sum(),
        draws=draws,
    )
    return at_home(admitted, "batch")


# ---- decode


def decode(
    spec: SamplerSpec,
    slots: Slots,
    per_layer_params: Params,
    temperature: jax.Array,
    has_cutoffs: bool = False,
) -> tuple[Slots, DecodedChunk]:
    """Draws one token in every slot and reads it, `spec.chunk` times.

    temperature: of all slots, unless spec.per_request. has_cutoffs: top_k, top_p and min_p cut
    tokens off.
    """
    cutoffs = None
    if spec.per_request:
        temperature = slots.draws.temperature[:, None]
    if has_cutoffs and spec.per_request:
        draws = slots.draws
        cutoffs = tuple(x[:, None] for x in (draws.top_k, draws.top_p, draws.min_p))
    elif has_cutoffs:
        cutoffs = (spec.generation.top_k, spec.generation.top_p, spec.generation.min_p)

    # What all steps of a chunk need is computed before the first, on a CPU: XLA would compute sin
    # and cos once more for each head of each layer, and one large array is drawn in threads. A slot
    # that runs moves on by one token a step. What a slot that has ended computes is not used.
    angles = None
    noise_TBV = None
    if spec.on_cpu:
        step_T1 = jnp.arange(spec.chunk)[:, None]
        positions_TB = slots.lengths + step_T1
        angles = rope.rope_angles_by_kind(spec.cfg, positions_TB[:, :, None])
        if positions_TB.size * spec.cfg.vocab_size <= _NOISE_AT_ONCE:
            noise_of = partial(sampling.gumbel_noise, vocab_size=spec.cfg.vocab_size)
            noise_TBV = jax.vmap(noise_of, (None, 0))(slots.keys, slots.num_drawn + step_T1)
            noise_TBV = unfused(constrain(noise_TBV, "seq", "batch", "vocab"))

    def draw(slots: Slots, noise_BV: jax.Array | None) -> tuple:
        """tokens, logprobs, full_logprobs, [B] each."""
        # `hidden` is that of the newest token, of the prompt or of the completion.
        if spec.fused:
            # One kernel, and no logits. Pallas is only imported where it is used.
            from tunix_lite.kernels.fused_draw import fused_draw

            table_VD = decoder.output_table(per_layer_params, spec.cfg)
            token_B, logprobs_B = fused_draw(
                spec.cfg,
                slots.hidden,
                rounding.stored(table_VD, slots.hidden.dtype),
                slots.keys,
                slots.num_drawn,
                temperature,
                spec.interpret,
            )
            return token_B, logprobs_B, logprobs_B
        logits_BV = decoder.logits(per_layer_params, spec.cfg, slots.hidden)
        logits_BV = constrain(logits_BV, "batch", "vocab")
        return sampling.draw(
            logits_BV,
            slots.keys,
            slots.num_drawn,
            temperature,
            cutoffs,
            noise_BV,
        )

    def step(slots: Slots, ahead: tuple) -> tuple[Slots, tuple]:
        angles, noise_BV = ahead
        token_B, *others = draw(slots, noise_BV)
        after, *reported = read_drawn(spec, slots, per_layer_params, token_B, angles)
        return after, (*reported, *others)

    ahead = (angles, noise_TBV)
    slots, drawn = jax.lax.scan(step, slots, ahead, length=spec.chunk)
    report = DecodedChunk(
        tokens=drawn[0],
        routes=drawn[1],
        logprobs=drawn[2],
        full_logprobs=drawn[3],
        requests=slots.requests,
        running=slots.running,
        num_taken=slots.num_taken,
    )
    # Each host reads all tokens, and decides from them by itself.
    return slots, jax.tree.map(_on_every_device, report)


def read_drawn(
    spec: SamplerSpec,
    slots: Slots,
    per_layer_params: Params,
    token_B: jax.Array,
    angles: dict[str, decoder.Angles] | None,
) -> tuple[Slots, jax.Array, jax.Array | None]:
    """The slots after every running one has read the token drawn for it; these tokens, -1 for
    slots that do not run; and their routes, if they are recorded. angles: of the tokens, by kind
    of layer; None: they are computed here."""
    cfg = spec.cfg
    token_B = jnp.where(slots.running, token_B, spec.pad_id)
    attend_fn = attend_to_cache(spec, slots)
    products = decoder.Products(spec.tp_reduce_dtype)
    if spec.fused:
        from tunix_lite.kernels.decode_attention import fused_attend
        from tunix_lite.kernels.decode_products import FusedProducts

        # one kernel a layer, which norms and turns what it gets
        def attend_fused(
            kind: str,
            old: KV,
            of_source: None,
            q_BTNH: jax.Array,
            k_BTKH: jax.Array,
            v_BTKH: jax.Array,
            weights: dict[str, Any],
            angles: decoder.Angles,
        ):
            norms = (weights["q_norm"], weights["k_norm"]) if cfg.qk_norm else ()
            sin, cos = angles
            out_BNH, k_BKCH, v_BKCH = fused_attend(
                cfg,
                q_BTNH[:, 0],
                k_BTKH[:, 0],
                v_BTKH[:, 0],
                norms,
                (sin[:, 0, 0], cos[:, 0, 0]),
                slots.lengths,
                old.k,
                old.v,
                spec.interpret,
            )
            return out_BNH[:, None], KV(k_BKCH, v_BKCH)

        attend_fn = attend_fused
        products = FusedProducts(spec.tp_reduce_dtype, interpret=spec.interpret)

    # Read the new token: its keys and values join the cache.
    hidden_B1D, cache, routed = decoder.forward_by_layer(
        per_layer_params,
        spec.cfg,
        token_B[:, None],
        slots.lengths[:, None],
        attend_fn,
        spec.tp_reduce_dtype,
        attend_norms=spec.fused,
        products=products,
        angles=angles,
        sequences=attention.AttentionMeta(
            slots.lengths[:, None], slots.running[:, None].astype(jnp.int32)
        ),
        states=slots.cache,
    )

    # A sequence ends with an end token, or where it has reached its limit.
    num_drawn_B = slots.num_drawn + slots.running
    is_end_B = jnp.isin(token_B, jnp.asarray(spec.end_ids, jnp.int32))
    is_last_B = is_end_B | (num_drawn_B >= slots.limits)
    after = slots.replace(
        cache=cache,
        hidden=hidden_B1D[:, 0],
        lengths=slots.lengths + slots.running,
        num_drawn=num_drawn_B,
        running=slots.running & ~is_last_B,
    )
    routes_BK = jax.tree.map(lambda x: x[:, 0], _reported_routes(spec, routed))
    return at_home(after, "batch"), jnp.where(slots.running, token_B, -1), routes_BK


def attend_to_cache(spec: SamplerSpec, slots: Slots) -> Callable:
    """attend_fn of decoder.forward_by_layer for one new token per slot."""
    cfg = spec.cfg
    newest_B = slots.lengths
    num_columns = {
        kind: kv_cache.columns_of(kv)
        for kind, kv in zip(cfg.kinds, slots.cache)
        if isinstance(kv, KV)
    }
    masks = {
        kind: kv_cache.attended_columns(cfg, kind, newest_B, columns)[:, None]
        for kind, columns in num_columns.items()
    }

    def attend_fn(
        kind: str,
        held: KV,
        of_source: KV | None,
        q_BTNH: jax.Array,
        *kv_BTKH: jax.Array,
        **sinks: jax.Array,
    ):
        kv = of_source
        if kv_BTKH:
            new = kv_cache.to_cache_format(*kv_BTKH, spec.int8)
            # A slot that does not run writes, too: into the column of its next token, which
            # nothing reads before that token is there.
            kv = held.with_token(new, newest_B)
        attended_BTNH = attention.attend(
            cfg, q_BTNH, kv.k, kv.v, masks[kind], kv.k_scales, kv.v_scales, **sinks
        )
        return attended_BTNH, kv if kv_BTKH else None

    return attend_fn


# ---- append


def append(
    spec: SamplerSpec,
    slots: Slots,
    per_layer_params: Params,
    rows_R: jax.Array,
    tokens_RW: jax.Array,
    counts_R: jax.Array,
    limits_R: jax.Array,
    routes_RWK: jax.Array | None = None,
) -> tuple[Slots, jax.Array | None]:
    """Appends counts_R tokens to the sequences of slots rows_R, which decode on up to limits_R
    sampled tokens; with limit 0 a slot waits for the rest. A row beyond the slots, or with count 0,
    is none. Returns the slots, and the routes of the tokens, as `prefill` does."""
    R, W = tokens_RW.shape
    B = len(slots.lengths)
    is_new_R = counts_R > 0

    def read(x: jax.Array) -> jax.Array:
        # Then rows_R are all slots in order, and nothing is gathered over fsdp.
        if R == B:
            return x
        # A row that is no slot reads the last one; `write` drops what comes of it.
        return jnp.take(x, jnp.minimum(rows_R, B - 1), axis=0)

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        new = new.astype(old.dtype)
        if R == B:
            return _where_rows(is_new_R, new, old)
        # There is no slot B: with "drop", such rows are written nowhere.
        target_R = jnp.where(is_new_R, rows_R, B)
        return old.at[target_R].set(new, mode="drop")

    # Read the new tokens: their keys and values join the cache.
    lengths_R = read(slots.lengths)
    positions_RW = lengths_R[:, None] + jnp.arange(W)
    cache = jax.tree.map(read, slots.cache)
    attend_fn = attend_to_cache_and_new(spec, cache, lengths_R, counts_R, W)
    is_token_RW = jnp.arange(W) < counts_R[:, None]
    hidden_RWD, new_cache, routed = decoder.forward_by_layer(
        per_layer_params,
        spec.cfg,
        tokens_RW,
        positions_RW,
        attend_fn,
        spec.tp_reduce_dtype,
        sequences=attention.AttentionMeta(positions_RW, is_token_RW.astype(jnp.int32)),
        states=cache,
        routes_LBTk=replayed(routes_RWK, spec.cfg),
    )

    # The first token of the next turn is drawn from the last of them.
    last_R = jnp.maximum(counts_R - 1, 0)
    appended = slots.replace(
        cache=[
            old.with_tokens(new, rows_R, lengths_R, counts_R)
            if isinstance(old, KV)
            else jax.tree.map(write, old, new)
            for old, new in zip(slots.cache, new_cache)
        ],
        hidden=write(slots.hidden, hidden_RWD[jnp.arange(R), last_R]),
        lengths=write(slots.lengths, lengths_R + counts_R),
        limits=write(slots.limits, limits_R),
        running=write(slots.running, limits_R > 0),
    )
    return at_home(appended, "batch"), _reported_routes(spec, routed)


def attend_to_cache_and_new(
    spec: SamplerSpec,
    cache: list[KV],
    lengths_R: jax.Array,
    counts_R: jax.Array,
    W: int,
) -> Callable:
    """attend_fn of decoder.forward_by_layer for W new tokens per row."""
    cfg = spec.cfg
    place_W = jnp.arange(W)
    query_RW = lengths_R[:, None] + place_W
    # A token behind the last one sees itself, so that no row of scores is empty.
    is_token_RW = place_W < counts_R[:, None]
    new_RWW = (place_W[:, None] >= place_W) & is_token_RW[:, None]
    new_RWW |= place_W[:, None] == place_W
    masks = {}
    for kind, kv in zip(cfg.kinds, cache):
        if not isinstance(kv, KV) or kind in masks:
            continue
        # Columns of the cache, then new tokens: [R, W, C + W].
        held_RC = kv_cache.positions_held(lengths_R - 1, kv.columns)
        shape = (*query_RW.shape, held_RC.shape[1])
        old_RWC = jnp.broadcast_to(held_RC[:, None] >= 0, shape)
        near_RWW = new_RWW
        if (window := attention.window_of(cfg, kind == "local")) is not None:
            old_RWC &= query_RW[:, :, None] - held_RC[:, None] < window
            near_RWW = new_RWW & (place_W[:, None] - place_W < window)
        # New tokens stand beside the cache: in a ring they would overwrite what the first of
        # them still attend to.
        masks[kind] = jnp.concatenate([old_RWC, near_RWW], axis=2)

    def attend_fn(
        kind: str,
        held: KV,
        of_source: KV | None,
        q_BTNH: jax.Array,
        *kv_BTKH: jax.Array,
        **sinks: jax.Array,
    ):
        new = of_source
        if kv_BTKH:
            new = kv_cache.to_cache_format(*kv_BTKH, spec.int8)
        kv = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=2), held, new)
        mask_BTS = masks[kind]

        # So many queries at a time that their scores fit.
        length = attention.piece_length(q_BTNH, kv.columns)
        pieces = []
        for start in range(0, W, length):
            queries = slice(start, start + length)
            part = (q_BTNH[:, queries], kv.k, kv.v, mask_BTS[:, queries])
            pieces.append(attention.attend(cfg, *part, kv.k_scales, kv.v_scales, **sinks))
        attended_BTNH = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)
        return attended_BTNH, new if kv_BTKH else None

    return attend_fn


# ---- rewind


def rewind(spec: SamplerSpec, slots: Slots, lost_B: jax.Array) -> Slots:
    """The slots without the last lost_B tokens, which then wait for an answer; -1: as they are."""
    del spec
    num_lost_B = jnp.maximum(lost_B, 0)
    # Their keys and values stay: nothing attends beyond the length, and later tokens overwrite
    # them.
    back = slots.replace(
        lengths=slots.lengths - num_lost_B,
        num_drawn=slots.num_drawn - num_lost_B,
        running=slots.running & (lost_B < 0),
    )
    return at_home(back, "batch")
