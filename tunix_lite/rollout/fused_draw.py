"""The product with the output head and the draw of a token, as one kernel for NVIDIA GPUs.

As plain products, a step of decoding writes the logits of every slot over the whole vocabulary in
float32, reads them twice, and writes their parts several times where XLA splits the contraction.
This kernel (Pallas, which hands it to Triton) writes no logits. Each of its programs multiplies a
piece of the head with some rows of hidden states, adds the noise, and writes five numbers a row:
the best noisy score, its token and its logit, the maximum of the logits, and the sum of their
exponentials. A reduction over the pieces makes tokens and log-probabilities of them.

The noise is that of `jax.random.gumbel`, made of the same bits: those of token v are threefry-2x32
(Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3") of the row's key and the
counter v. So it draws the tokens that `sampling.draw` draws, but for sums taken in another order.
No GPU has measured it yet, so `rollout.head=auto` stays with plain products; benchmarks/gpu.py
times both.

Letters beside those of types.py: P pieces of the vocabulary, W tokens of a piece, R rows that a
program takes.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from tunix_lite.models.decoder import Architecture, softcap
from tunix_lite.parallel.mesh import spec
from tunix_lite.rollout.settings import GenerationConfig

# Rows that a program takes: tensor cores multiply at least 16. Up to 64 share what it reads of the
# head; programs of other rows and the same piece run beside it and find the piece in the L2 cache.
# With more rows an H100 has registers for one program a multiprocessor; with 64 it has them for
# two, of which one reads the head while the other draws.
FEWEST_ROWS = 16
MOST_ROWS = 64
# Tokens of a piece.
TOKENS = 128
# Columns of the head that are multiplied at once, at most and at least.
MOST_COLUMNS = 64
FEWEST_COLUMNS = 16


def choose_head(
    asked: str,
    cfg: Architecture,
    generation: GenerationConfig,
    dtype: DTypeLike,
    platform: str,
) -> str:
    """What draws tokens, xla or fused. asked: `rollout.head`, auto, xla or fused.

    Raises ValueError where the fused kernel is asked for and cannot do it.
    """
    if asked != "fused":
        return "xla"
    reason = _obstacle(cfg, generation, dtype, platform)
    if reason:
        raise ValueError(f"head=fused: {reason}; use auto or xla")
    return "fused"


def _obstacle(
    cfg: Architecture,
    generation: GenerationConfig,
    dtype: DTypeLike,
    platform: str,
) -> str | None:
    """Why the fused kernel cannot draw this; None: it can."""
    if platform not in ("gpu", "cuda"):
        return f"it runs on NVIDIA GPUs, not on {platform}"
    if generation.has_cutoffs:
        return "it draws from all tokens, and generation.top_k, top_p or min_p cuts some off"
    if generation.repetition_penalty != 1:
        penalty = generation.repetition_penalty
        return f"it changes no logits, and generation.repetition_penalty is {penalty}"
    if jnp.dtype(dtype).itemsize > 4:
        return f"it computes in float32 or bfloat16, not in {jnp.dtype(dtype).name}"
    if cfg.embed_dim % FEWEST_COLUMNS:
        return f"it takes an embed_dim that is a multiple of {FEWEST_COLUMNS}, not {cfg.embed_dim}"
    config = jax.config
    is_threefry = config.jax_default_prng_impl == "threefry2x32"
    if not (is_threefry and config.jax_threefry_partitionable):
        return "its noise is that of JAX's default generator, and jax.config has another"
    if config.jax_high_dynamic_range_gumbel:
        return "it draws noise of 23 bits, and jax_high_dynamic_range_gumbel asks for more"
    return None


def fused_draw(
    cfg: Architecture,
    hidden_BD: jax.Array,
    table_VD: jax.Array,
    keys_B: jax.Array,
    positions_B: jax.Array,
    temperature: jax.Array | float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Tokens and their log-probabilities under softmax(logits / temperature), [B] each, as
    `sampling.draw` gives them where nothing is cut off.

    hidden: of the newest tokens, after the final norm. table: the head, or the embedding.
    interpret: runs the kernel without a GPU, as tests do.
    """
    B, V = len(hidden_BD), len(table_VD)
    keys_B = jax.vmap(jax.random.fold_in)(keys_B, positions_B)
    key_data_B2 = jax.random.key_data(keys_B)
    temperature_1 = jnp.asarray(temperature, jnp.float32).reshape(1)

    # Each device draws for its own rows from its own part of the vocabulary.
    rows, tokens = spec(("batch", "vocab"), (B, V), jax.sharding.get_abstract_mesh())
    on_a_device = jax.shard_map(
        partial(_call, cfg, tokens, interpret),
        in_specs=(P(rows, None), P(tokens, None), P(rows, None), P(None)),
        out_specs=P(rows, tokens),
        check_vma=False,
    )
    pieces = on_a_device(hidden_BD, table_VD, key_data_B2, temperature_1)
    return best_of_pieces(V, *pieces)


def best_of_pieces(
    V: int,
    score_BP: jax.Array,
    token_BP: jax.Array,
    logit_BP: jax.Array,
    top_BP: jax.Array,
    sum_BP: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The first of the best tokens of each row, [B] int32, the last token in a row with NaN; and
    its log-probability, [B].

    Of each piece: the best score, its token and logit, the maximum of the logits, and the sum of
    exp(logit - maximum).
    """

    def better(left: tuple, right: tuple) -> tuple:
        is_first = (left[0] == right[0]) & (left[1] < right[1])
        is_left = (left[0] > right[0]) | is_first
        # maximum keeps NaN.
        score = jnp.maximum(left[0], right[0])
        token = jnp.where(is_left, left[1], right[1])
        token = jnp.where(jnp.isnan(score), V - 1, token)
        logit = jnp.where(is_left, left[2], right[2])
        return score, token, logit, jnp.maximum(left[3], right[3])

    lowest = jnp.float32(-jnp.inf)
    start = (lowest, jnp.int32(V - 1), lowest, lowest)
    operands = (score_BP, token_BP, logit_BP, top_BP)
    _, token_B, logit_B, top_B = jax.lax.reduce(operands, start, better, (1,))
    sum_B = jnp.sum(sum_BP * jnp.exp(top_BP - top_B[:, None]), axis=-1)
    return token_B, logit_B - (jnp.log(sum_B) + top_B)


def _call(
    cfg: Architecture,
    vocab_axis: str | None,
    interpret: bool,
    hidden_BD: jax.Array,
    table_VD: jax.Array,
    key_data_B2: jax.Array,
    temperature_1: jax.Array,
) -> list[jax.Array]:
    """What `best_of_pieces` takes, [B, P] each, of the rows and the part of the vocabulary of one
    device."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    B, V = len(hidden_BD), len(table_VD)
    R = rows_of_program(B)
    part = 0 if vocab_axis is None else jax.lax.axis_index(vocab_axis)
    first_1 = jnp.full(1, part * V, jnp.int32)

    def whole(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda r, p: (0,) * x.ndim)

    inputs = (hidden_BD, table_VD, key_data_B2, temperature_1, first_1)
    dtypes = (jnp.float32, jnp.int32, jnp.float32, jnp.float32, jnp.float32)
    pieces = pl.cdiv(V, TOKENS)
    call = pl.pallas_call(
        partial(_kernel, cfg, R),
        # Programs of one piece of the vocabulary follow each other.
        grid=(pl.cdiv(B, R), pieces),
        in_specs=[whole(x) for x in inputs],
        out_specs=[pl.BlockSpec((B, None), lambda r, p: (0, p))] * len(dtypes),
        out_shape=[jax.ShapeDtypeStruct((B, pieces), dtype) for dtype in dtypes],
        compiler_params=triton.CompilerParams(num_warps=8 if R == MOST_ROWS else 4, num_stages=4),
        interpret=interpret,
        name="fused_draw",
    )
    return call(*inputs)


def rows_of_program(B: int) -> int:
    """R, a power of two as Triton needs it, where a device has B rows."""
    power = 1 << (B - 1).bit_length()
    return max(FEWEST_ROWS, min(MOST_ROWS, power))


def _kernel(cfg: Architecture, R: int, *refs: Any) -> None:
    """R rows and a piece of the vocabulary. What lies beyond the last row or token is read as the
    last one; several programs then write the same numbers of that row."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    hidden_BD, table_VD, key_data_B2, temperature_1, first_1, *out_refs = refs
    B, D = hidden_BD.shape
    V = len(table_VD)
    W = TOKENS
    rows_R = jnp.minimum(pl.program_id(0) * R + jnp.arange(R), B - 1)
    at_W = pl.program_id(1) * W + jnp.arange(W)
    here_W = jnp.minimum(at_W, V - 1)

    # Logits, summed in float32 as in decoder.logits.
    columns = int(np.gcd(D, MOST_COLUMNS))
    exact = jax.lax.Precision.HIGHEST if hidden_BD.dtype == jnp.float32 else None

    def add_columns(i: jax.Array, sum_RW: jax.Array) -> jax.Array:
        at = i * columns + jnp.arange(columns)
        table = table_VD[here_W[:, None], at[None]]
        hidden = hidden_BD[rows_R[:, None], at[None]]
        return sum_RW + triton.dot(hidden, table, trans_b=True, precision=exact)

    logits_RW = jax.lax.fori_loop(0, D // columns, add_columns, jnp.zeros((R, W), jnp.float32))
    temperature = temperature_1[0]
    logits_RW = softcap(logits_RW, cfg.final_softcap)
    logits_RW = logits_RW / jnp.where(temperature > 0, temperature, 1.0)

    # Noise. The key and the counter are those of the row and the token in the whole arrays.
    token_1W = (first_1[0] + at_W)[None]
    keys = (key_data_B2[rows_R, 0][:, None], key_data_B2[rows_R, 1][:, None])
    noise_RW = gumbel(keys, token_1W.astype(jnp.uint32))
    scores_RW = logits_RW + jnp.where(temperature > 0, noise_RW, 0.0)

    # Tokens beyond the last have no part in it. Whether there is NaN is asked by itself, since a
    # maximum of Triton may drop it.
    lowest = jnp.float32(-jnp.inf)
    is_token_1W = (at_W < V)[None]
    is_nan_RW = is_token_1W & (scores_RW != scores_RW)
    has_nan_R = jnp.max(is_nan_RW.astype(jnp.int32), axis=1) > 0
    logits_RW = jnp.where(is_token_1W, logits_RW, lowest)
    scores_RW = jnp.where(is_token_1W & ~is_nan_RW, scores_RW, lowest)
    top_R = jnp.max(jnp.where(is_nan_RW, lowest, logits_RW), axis=1)
    # Of a piece of which every logit is -inf the sum is 0.
    base_R = jnp.where(top_R == lowest, 0.0, top_R)
    sum_R = jnp.sum(jnp.exp(logits_RW - base_R[:, None]), axis=1)

    # The first of the best.
    best_R = jnp.max(scores_RW, axis=1)
    last = first_1[0] + V - 1
    is_best_RW = is_token_1W & (scores_RW == best_R[:, None])
    token_R = jnp.min(jnp.where(is_best_RW, token_1W, last), axis=1)
    is_drawn_RW = token_1W == token_R[:, None]
    logit_R = jnp.sum(jnp.where(is_drawn_RW, logits_RW, 0.0), axis=1)
    best_R = jnp.where(has_nan_R, jnp.nan, best_R)
    for ref, x in zip(out_refs, (best_R, token_R, logit_R, top_R, sum_R)):
        ref[rows_R] = x


# How far each of four rounds turns a word, by turns.
TURNS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(
    keys: tuple[jax.Array, jax.Array],
    low: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The two words of threefry-2x32 with 20 rounds, of a key (two words) and the counter (0, low),
    uint32."""
    schedule = (*keys, keys[0] ^ keys[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = keys[0], low + keys[1]
    for group in range(5):
        for turn in TURNS[group % 2]:
            x = x + y
            y = (y << jnp.uint32(turn)) | (y >> jnp.uint32(32 - turn))
            y = x ^ y
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def gumbel(keys: tuple[jax.Array, jax.Array], counter: jax.Array) -> jax.Array:
    """Element `counter` of jax.random.gumbel of this key, float32."""
    x, y = threefry(keys, counter)
    # 23 bits as a number from 0 to 1, and in place of 0 the smallest normal number.
    bits = ((x ^ y) >> jnp.uint32(9)).astype(jnp.int32)
    uniform = bits.astype(jnp.float32) * jnp.float32(2.0**-23)
    uniform = jnp.maximum(uniform, jnp.float32(jnp.finfo(jnp.float32).tiny))
    return -jnp.log(-jnp.log(uniform))
