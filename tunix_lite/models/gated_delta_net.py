"""The gated delta net, a recurrent kind of layer (arXiv:2412.06464), as Qwen 3.5 has it. Each value
head keeps a matrix S [key_dim, value_dim] of float32, zero before a sequence. For each token

    S <- e^g S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q;   y = norm(o) * silu(z)

with k and q of length 1, beta = sigmoid(b), and g = -exp(decay) softplus(a + step_bias). Rows are
computed in chunks (arXiv:2406.06484). Letters beside those of types.py: K key heads, V value heads;
C queries, keys and values of a key head, side by side; n chunks; i, j tokens of a chunk.
"""

from functools import cache, partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from tunix_lite.models.architecture import Architecture, DeltaNet
from tunix_lite.models.attention import AttentionMeta
from tunix_lite.models.layer_kind import LayerKind, Surroundings
from tunix_lite.models.rounding import at_least_float32, stored, wide
from tunix_lite.models.weights import Initializer, Weight, fan_in, ones, project
from tunix_lite.parallel.mesh import constrain

# Tokens of a chunk, at most, a power of two.
CHUNK = 64
# In less, a GPU or TPU would multiply in TF32 or bfloat16, and S adds up what is lost.
_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


@flax.struct.dataclass
class DeltaState:
    """What a row keeps of its tokens so far, whatever their number.

    Example: 4 slots, 16 value heads of 128 by 128 and 4 taps: memory [4, 16, 128, 128], inputs
    [4, 16, 3, 384].
    """

    memory: jax.Array  # S, [B, V, key_dim, value_dim], float32
    inputs: jax.Array  # what the convolution reads of the last tokens, [B, K, taps - 1, C]


def state_shapes(cfg: Architecture, rows: int, dtype: DTypeLike) -> DeltaState:
    """The shapes of the state of so many sequences. dtype: of the computation."""
    net = cfg.delta
    memory = (rows, net.num_value_heads, net.key_dim, net.value_dim)
    inputs = (rows, net.num_key_heads, net.taps - 1, sum(net.parts))
    return DeltaState(
        jax.ShapeDtypeStruct(memory, at_least_float32(dtype)),
        jax.ShapeDtypeStruct(inputs, dtype),
    )


def delta_weights(cfg: Architecture) -> dict[str, Weight]:
    """The weights that mix tokens, by name."""
    net = cfg.delta
    D = cfg.embed_dim
    K = net.num_key_heads
    V = net.num_value_heads
    H = net.value_dim
    C = sum(net.parts)
    # decay and step_bias are exponents, so they stay exact in a frozen base
    exact = partial(Weight, (V,), ("heads",), inputs=0, is_exact=True)
    return {
        "qkv": Weight((D, K, C), ("embed", "heads", "head_dim"), parts=net.parts),
        "z": Weight((D, V, H), ("embed", "heads", "head_dim")),
        "b": Weight((D, V), ("embed", "heads")),
        "a": Weight((D, V), ("embed", "heads")),
        "conv": Weight(
            (K, C, net.taps),
            ("heads", "head_dim", "taps"),
            _uniform(-(net.taps**-0.5), net.taps**-0.5),
            inputs=0,
            parts=net.parts,
        ),
        "decay": exact(init=_log_uniform),
        "step_bias": exact(init=ones),
        "norm": Weight((H,), ("norm",), ones, inputs=0),
        "o": Weight((V, H, D), ("heads", "head_dim", "embed"), fan_in(2), inputs=2),
    }


@cache
def _uniform(least: float, most: float) -> Initializer:
    return partial(jax.random.uniform, minval=least, maxval=most)


def _log_uniform(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16.0))


def mix(
    x_BTD: jax.Array, w: dict[str, Any], cfg: Architecture, around: Surroundings
) -> tuple[jax.Array, DeltaState | None]:
    """From normed hidden states to what is added to the residual stream, [B, T, D]; and the state
    after the last token of each row, if the rows go on from a state or hold one sequence each."""
    net = cfg.delta
    sequences = around.sequences
    qkv_BTKC = constrain(project(x_BTD, w["qkv"]), "batch", "seq", "heads", "head_dim")
    z_BTVH = project(x_BTD, w["z"])
    beta_BTV = jax.nn.sigmoid(wide(project(x_BTD, w["b"])))
    step_BTV = jax.nn.softplus(wide(project(x_BTD, w["a"])) + wide(w["step_bias"]))
    log_decay_BTV = -jnp.exp(wide(w["decay"])) * step_BTV

    # A token of no sequence writes nothing, and S does not decay at it.
    is_token_BT1 = (sequences.segments > 0)[..., None]
    gates = (jnp.where(is_token_BT1, log_decay_BTV, 0), jnp.where(is_token_BT1, beta_BTV, 0))
    rows = Rows(qkv_BTKC, *gates, sequences)
    if sequences.lane_columns:
        out_BTVH = _shared_prompts(rows, w["conv"], net)
        state = None
    else:
        out_BTVH, state, *_ = _rows(rows, w["conv"], net, around.state)

    # The output is normed per head, and gated.
    mean_square = jnp.mean(out_BTVH**2, axis=-1, keepdims=True)
    normed = out_BTVH * jax.lax.rsqrt(mean_square + cfg.norm_eps) * wide(w["norm"])
    gated = stored(normed * jax.nn.silu(wide(z_BTVH)), x_BTD.dtype)
    gated = checkpoint_name(constrain(gated, "batch", "seq", "heads", "head_dim"), "attended")
    return around.products.out(gated, w), state


@flax.struct.dataclass
class Rows:
    """The tokens of rows before the convolution.

    Example: of 2 rows of 8 tokens and 4 value heads, beta is [2, 8, 4].
    """

    qkv: jax.Array  # [B, T, K, C]
    # [B, T, V] each: g, and beta
    log_decay: jax.Array
    beta: jax.Array
    sequences: AttentionMeta

    @property
    def numbers(self) -> jax.Array:
        """A number for each token that its sequence has and no other of the row, [B, T]."""
        of_segment = self.sequences.segments
        if self.sequences.completion_ids is not None:
            of_segment = of_segment * of_segment.shape[1] + self.sequences.completion_ids
        # Sequences stand in ascending order (learner/packing.py); padding has the number before it.
        return jax.lax.cummax(of_segment, axis=1)


@flax.struct.dataclass
class Prompts:
    """What sequences that begin in these rows go on from: prompts in other rows, S as the sum of k
    u^T.

    Example: 2 rows of 8 tokens of prompts and 4 value heads of 16: u is [2, 8, 4, 16].
    """

    k: jax.Array  # [B, P, V, key_dim], with that decay
    u: jax.Array  # [B, P, V, value_dim]
    segments: jax.Array  # [B, P]


def _rows(
    rows: Rows, conv_KCt: jax.Array, net: DeltaNet, state: DeltaState | None
) -> tuple[jax.Array, DeltaState, jax.Array, jax.Array | None]:
    """o of the tokens, [B, T, V, value_dim]; the state after the last; k; and u, what each has
    written into S (None for one token alone)."""
    B, T, K, C = rows.qkv.shape
    memory = None if state is None else state.memory
    before_BKtC = jnp.zeros((B, K, net.taps - 1, C)) if state is None else state.inputs
    before_BtKC = before_BKtC.swapaxes(1, 2).astype(rows.qkv.dtype)
    # What stands before a row is of its first sequence.
    numbers = jnp.pad(rows.numbers, ((0, 0), (net.taps - 1, 0)), mode="edge")
    extended = jnp.concatenate([before_BtKC, rows.qkv], axis=1)
    taps = [jnp.where(is_own, x, 0) for x, is_own in _taps(extended, numbers, net)]
    q, k, v = _convolved(taps, conv_KCt, net)
    u = None
    if T == 1 and state is not None:
        # One token of each row, by the recurrence.
        q, k, v = (x[:, 0] for x in (q, k, v))
        memory = memory * jnp.exp(rows.log_decay[:, 0])[..., None, None]
        error = v - _einsum("bvdh,bvd->bvh", memory, k)
        memory = memory + k[..., None] * (rows.beta[:, 0, :, None] * error)[..., None, :]
        out = _einsum("bvdh,bvd->bvh", memory, q)[:, None]
    else:
        out, memory, u = _delta_rule(q, k, v, rows, memory)

    # The inputs of the last real tokens. Where there is none, they are those of before.
    count_B1 = jnp.sum(rows.sequences.segments > 0, axis=1, keepdims=True)
    index_Bt = count_B1 + jnp.arange(net.taps - 1)
    last = jnp.take_along_axis(extended, index_Bt[..., None, None], axis=1)
    return out, DeltaState(memory, last.swapaxes(1, 2)), k, u


def _shared_prompts(rows: Rows, conv_KCt: jax.Array, net: DeltaNet) -> jax.Array:
    """o of rows with a prefix of prompts and lanes of their completions, [B, T, V, value_dim]."""
    meta = rows.sequences
    B = len(rows.beta)
    P = meta.prefix_columns
    # As rows of their own, the two have no lanes.
    rows = rows.replace(
        sequences=AttentionMeta(meta.positions, meta.segments, meta.completion_ids)
    )
    prefix = jax.tree.map(lambda x: x[:, :P], rows)
    lanes = jax.tree.map(lambda x: x[:, P:].reshape(-1, meta.lane_columns, *x.shape[2:]), rows)
    copied = partial(jnp.repeat, repeats=len(lanes.beta) // B, axis=0)

    # The prompts, and how far each of their tokens decays up to the end of its prompt.
    out_prefix, _, k, u = _rows(prefix, conv_KCt, net, None)
    segments_BP = prefix.sequences.segments
    is_later = np.arange(P) > np.arange(P)[:, None]
    follows_BPP = (segments_BP[:, :, None] == segments_BP[:, None]) & is_later
    left_BPV = _einsum("bij,bjv->biv", follows_BPP.astype(u.dtype), prefix.log_decay)
    segments_BP = copied(segments_BP)
    prompts = Prompts(copied(k * jnp.exp(left_BPV)[..., None]), copied(u), segments_BP)

    # The completions. Their first tokens convolve the last ones of the prompt.
    is_before = segments_BP[:, None] < lanes.sequences.segments[..., None]
    first_BT = jnp.sum(is_before & (segments_BP[:, None] > 0), axis=2)
    inputs = copied(prefix.qkv)
    nothing = [(0, 0), (net.taps - 1, 0)]
    extended = jnp.pad(lanes.qkv, [*nothing, (0, 0), (0, 0)])
    numbers = jnp.pad(lanes.numbers, nothing, constant_values=-1)
    taps = []
    for back, (own, is_own) in enumerate(_taps(extended, numbers, net)):
        position_BT = lanes.sequences.positions - back
        column_BT = jnp.clip(first_BT + position_BT, 0, P - 1)
        of_prompt = jnp.take_along_axis(inputs, column_BT[..., None, None], axis=1)
        is_in_prompt = (position_BT >= 0)[..., None, None]
        taps.append(jnp.where(is_own, own, jnp.where(is_in_prompt, of_prompt, 0)))
    q, k, v = _convolved(taps, conv_KCt, net)
    out_lanes, *_ = _delta_rule(q, k, v, lanes, prompts=prompts)
    return jnp.concatenate(
        [out_prefix, out_lanes.reshape(B, -1, *out_lanes.shape[2:])], axis=1
    )


def _taps(
    extended: jax.Array, numbers: jax.Array, net: DeltaNet
) -> list[tuple[jax.Array, jax.Array]]:
    """What stands 0, 1, 2 ... tokens before each token, [B, T, K, C]; and whether it is of the same
    sequence. extended, numbers: with taps - 1 tokens before the first."""
    ahead = net.taps - 1
    T = numbers.shape[1] - ahead
    taps = []
    for back in range(net.taps):
        here = slice(ahead - back, ahead - back + T)
        # a convolution must not reach into the sequence before, which stands in the same row
        is_own = numbers[:, here] == numbers[:, ahead:]
        taps.append((extended[:, here], is_own[..., None, None]))
    return taps


def _convolved(
    taps: list[jax.Array], conv_KCt: jax.Array, net: DeltaNet
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q and k [B, T, V, key_dim] and v [B, T, V, value_dim] of the taps, float32."""
    conv_KCt = wide(stored(conv_KCt, taps[0].dtype))
    # The last tap of a checkpoint is the token itself.
    summed = sum(wide(x) * conv_KCt[..., -1 - back] for back, x in enumerate(taps))
    q, k, v = jnp.split(jax.nn.silu(summed), np.cumsum(net.parts)[:-1], axis=-1)

    def of_length_1(x: jax.Array) -> jax.Array:
        x = x * jax.lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-6)
        return jnp.repeat(x, net.num_value_heads // net.num_key_heads, axis=2)

    v = v.reshape(*v.shape[:2], net.num_value_heads, net.value_dim)
    return of_length_1(q) * net.key_dim**-0.5, of_length_1(k), v


def _delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: Rows,
    memory: jax.Array | None = None,
    prompts: Prompts | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """o [B, T, V, value_dim] of rows, S after the last token, and u, what each token has written
    into S.

    memory: S before the first token, if the rows go on. prompts: where the sequences begin.
    """
    B, T, V = rows.beta.shape
    # A power of two, as `_inverse` halves its blocks.
    size = min(CHUNK, 1 << (T - 1).bit_length())
    num_chunks = -(-T // size)

    def cut(x: jax.Array, mode: str = "constant") -> jax.Array:
        more = [(0, 0), (0, num_chunks * size - T), *[(0, 0)] * (x.ndim - 2)]
        return jnp.pad(x, more, mode=mode).reshape(B, num_chunks, size, *x.shape[2:])

    q, k, v, log_decay, beta = map(cut, (q, k, v, rows.log_decay, rows.beta))
    # Padding goes on with the last sequence and changes nothing, so the last state is that of
    # its last token.
    numbers = cut(rows.numbers, "edge")

    # Decay from the first token of a sequence in the chunk up to i, and from j to i.
    is_before = np.tri(size, dtype=bool) & (numbers[..., None] == numbers[..., None, :])
    total = _einsum("bnij,bnjv->bnvi", is_before.astype(q.dtype), log_decay)
    # A sum of its own for each pair: a difference of totals would lose digits in heads that forget.
    up_to_i = log_decay.swapaxes(2, 3)[..., None, :] * np.tri(size, dtype=bool)
    after_j = jnp.tri(size, k=-1, dtype=q.dtype)
    between = _einsum("bnvit,tj->bnvij", up_to_i, after_j)
    # Hidden before exp, so that no gradient is infinite.
    between = jnp.exp(jnp.where(is_before[:, :, None], between, -jnp.inf))
    from_first = jnp.exp(total).swapaxes(2, 3)[..., None]

    # Within a chunk: what each token writes, if S were zero before (u) and for each S (reads).
    beta = beta[..., None]
    overlap = _einsum("bnivd,bnjvd->bnvij", beta * k, k) * between
    inverse = _inverse(jnp.tril(overlap, -1))
    u = _einsum("bnvij,bnjvh->bnivh", inverse, beta * v)
    reads = _einsum("bnvij,bnjvd->bnivd", inverse, beta * k * from_first)
    attends = _einsum("bnivd,bnjvd->bnvij", q, k) * between
    q = q * from_first

    # Only tokens that go on from the last chunk read S, and only the last sequence writes to it.
    last = numbers[:, :, -1]
    # No token has the number -1: nothing is read before the first chunk.
    first = numbers[:, :1, 0] if memory is not None else jnp.full((B, 1), -1)
    previous = jnp.concatenate([first, last[:, :-1]], axis=1)
    goes_on = numbers == previous[..., None]
    to_end = between[..., -1, :].swapaxes(2, 3)
    stays = jnp.where((last == previous)[..., None], jnp.exp(total[..., -1]), 0)

    out = 0
    begins = jnp.zeros((), q.dtype)
    if prompts is not None:
        segments = cut(rows.sequences.segments, "edge")
        is_its = (segments[..., None] == prompts.segments[:, None, None]) & ~goes_on[..., None]
        is_its &= segments[..., None] > 0

        def of_prompt(x: jax.Array) -> jax.Array:
            scores = _einsum("bnivd,bpvd->bnvip", x, prompts.k) * is_its[:, :, None]
            return _einsum("bnvip,bpvh->bnivh", scores, prompts.u)

        u = u - of_prompt(reads)
        out = of_prompt(q)
        of_last = is_its[:, :, -1, :, None, None] * prompts.k[:, None]
        begins = _einsum("bnpvd,bpvh->bnvdh", of_last, prompts.u)
        begins = begins * jnp.exp(total[..., -1])[..., None, None]
    begins = jnp.broadcast_to(begins, (B, num_chunks, V, q.shape[-1], v.shape[-1]))
    goes_on = goes_on[..., None, None]
    chunks = (u, reads * goes_on, q * goes_on, attends, k * to_end[..., None], stays, begins)

    def step(memory: jax.Array, chunk: tuple) -> tuple[jax.Array, tuple]:
        u, reads, q, attends, k, stays, begins = chunk
        u = u - _einsum("bivd,bvdh->bivh", reads, memory)
        out = _einsum("bivd,bvdh->bivh", q, memory)
        out = out + _einsum("bvij,bjvh->bivh", attends, u)
        memory = stays[..., None, None] * memory + begins
        return memory + _einsum("bivd,bivh->bvdh", k, u), (out, u)

    if memory is None:
        memory = jnp.zeros_like(begins[:, 0])
    memory, (later, u) = jax.lax.scan(
        step, memory, jax.tree.map(lambda x: x.swapaxes(0, 1), chunks)
    )
    out = out + later.swapaxes(0, 1)
    u = u.swapaxes(0, 1)
    out, u = (x.reshape(B, -1, *x.shape[3:])[:, :T] for x in (out, u))
    return out, memory, u


@jax.custom_vjp
def _inverse(below: jax.Array) -> jax.Array:
    """(1 + below)^-1 of matrices [..., size, size] that have values below their diagonal only."""
    # By blocks of twice the size in each round, so it is made of products, which a mesh can divide.
    # A series of powers of `below` would need fewer, but its terms grow large and cancel out.
    # Blocks are cut by slices: a TPU's memory has 128 numbers for each row, so a reshape of the
    # matrix to small blocks would take up to 64 times its bytes.
    size = below.shape[-1]

    def along_diagonal(width: int, row: int, half: int) -> jax.Array:
        corners = [
            below[..., i + row : i + row + half, i : i + half] for i in range(0, size, width)
        ]
        return jnp.stack(corners, axis=-3)

    def product(*factors: jax.Array) -> jax.Array:
        return _einsum("...ij,...jk,...kl->...il", *factors)

    # Blocks of up to 8, whole: X <- X - X C X, where C is the lower left quarter of those of twice
    # the size.
    half = min(8, size)
    inner = along_diagonal(half, 0, half)
    place = np.arange(half)
    blocks = jnp.where(place[:, None] == place, jnp.ones_like(inner), 0)
    for quarter in (1, 2, 4):
        is_same_block = place[:, None] // (2 * quarter) == place // (2 * quarter)
        is_corner = is_same_block & (place[:, None] // quarter > place // quarter)
        blocks = blocks - product(blocks, jnp.where(is_corner, inner, 0), blocks)
    while half < size:
        upper = blocks[..., 0::2, :, :]
        lower = blocks[..., 1::2, :, :]
        corner = -product(lower, along_diagonal(2 * half, half, half), upper)
        top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
        blocks = jnp.concatenate([top, jnp.concatenate([corner, lower], axis=-1)], axis=-2)
        half *= 2
    return blocks.squeeze(-3)


def _inverse_backward(inverse: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    # d(A^-1) = - A^-1 dA A^-1
    across = _einsum("...ji,...jk->...ik", inverse, cotangent)
    return (-_einsum("...ij,...kj->...ik", across, inverse),)


_inverse.defvjp(lambda below: (_inverse(below),) * 2, _inverse_backward)

GATED_DELTA_NET = LayerKind(delta_weights, mix, state_shapes)
