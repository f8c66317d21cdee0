"""Who sees whom, counted by hand; and one attention, however it is computed."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strict_kernel
from conftest import set_mesh

from tunix_lite.models import attention
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.attention import AttentionMeta, attention_mask, choose, obstacle
from tunix_lite.parallel.mesh import axis_size, constrain, put, use_rules

CFG = Architecture(56, 2, 16, 4, 2, 8, 32, pattern=("local", "global"), window=3, query_scale=5)


def meta(segments, positions, branches=None) -> AttentionMeta:
    return AttentionMeta(*(None if x is None else jnp.asarray([x], jnp.int32) for x in (positions, segments, branches)))


def as_text(seen_BTT) -> list[str]:
    return ["".join(".x"[int(x)] for x in row) for row in np.asarray(seen_BTT)[0]]


PACKED = meta([1, 1, 1, 1, 2, 2, 2, 0], [0, 1, 2, 3, 0, 1, 2, 0])
# a prompt of two, completions of three and of one after it; then another sequence
BRANCHED = meta([1, 1, 1, 1, 1, 1, 2, 2], [0, 1, 2, 3, 4, 2, 0, 1], [0, 0, 1, 1, 1, 2, 0, 1])


@pytest.mark.parametrize(
    "row, window, seen",
    [
        (
            PACKED,
            None,
            ["x.......", "xx......", "xxx.....", "xxxx....", "....x...", "....xx..", "....xxx.", "........"],
        ),
        (PACKED, 2, ["x.......", "xx......", ".xx.....", "..xx....", "....x...", "....xx..", ".....xx.", "........"]),
        (
            BRANCHED,
            None,
            ["x.......", "xx......", "xxx.....", "xxxx....", "xxxxx...", "xx...x..", "......x.", "......xx"],
        ),
        # the second completion's token follows the prompt at position 2, so the window takes in the prompt's last
        (BRANCHED, 2, ["x.......", "xx......", ".xx.....", "..xx....", "...xx...", ".x...x..", "......x.", "......xx"]),
        (BRANCHED, 3, ["x.......", "xx......", "xxx.....", ".xxx....", "..xxx...", "xx...x..", "......x.", "......xx"]),
    ],
)
def test_a_token_sees_its_own_segment_and_branch_within_the_window(row, window, seen):
    assert as_text(attention_mask(window, row, row)) == seen
    queries, keys = jax.tree.map(lambda x: x[:, 3:6], row), jax.tree.map(lambda x: x[:, 1:6], row)
    assert as_text(attention_mask(window, queries, keys)) == [line[1:6] for line in seen[3:6]]


def test_a_row_of_one_sequence_may_be_padded_on_both_sides():
    row = attention.one_sequence_per_row(jnp.array([[False, False, True, True, True, False]]))
    np.testing.assert_array_equal(row.positions[0, 2:5], [0, 1, 2])
    assert as_text(attention_mask(2, row, row)) == ["......", "......", "..x...", "..xx..", "...xx.", "......"]


# ---- xla


def random_rows(cfg, B: int, T: int, with_branches: bool):
    """q, k, v, a slope of the output, and rows of three sequences with padding after them."""
    rng = np.random.default_rng(0)
    sizes = [
        (B, T, heads, cfg.head_dim) for heads in (cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads, cfg.num_heads)
    ]
    q, k, v, slope = (rng.normal(size=size).astype(np.float32) for size in sizes)
    segments, positions, branches = (np.zeros((B, T), np.int32) for _ in range(3))
    for b in range(B):
        bounds = [0, *sorted(rng.choice(np.arange(2, T - 2), 2, replace=False)), T - b % 3]
        for i, (start, stop) in enumerate(pairwise(bounds)):
            segments[b, start:stop], positions[b, start:stop] = i + 1, np.arange(stop - start)
            if with_branches and (third := (stop - start) // 3):  # two completions as long as their prompt
                branches[b, start + third : start + 2 * third] = 1
                branches[b, start + 2 * third : stop] = 2
                positions[b, start + 2 * third : stop] -= third
    slope[segments == 0] = 0  # what stands on padding is nobody's business
    return (q, k, v), slope, AttentionMeta(positions, segments, branches if with_branches else None)


def by_formulas(cfg, window, rows: AttentionMeta, q, k, v):
    """Softmax attention in float64, one query after the other over the keys that it sees. 0 where it sees none."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    for b, t in np.ndindex(q.shape[:2]):
        segment, position = rows.segments[b], rows.positions[b]
        seen = [s for s in range(t + 1) if segment[s] == segment[t] > 0]
        seen = [s for s in seen if window is None or position[t] - position[s] < window]
        if rows.completion_ids is not None:
            seen = [s for s in seen if rows.completion_ids[b, s] in (0, rows.completion_ids[b, t])]
        for n in range(cfg.num_heads if seen else 0):
            shared = n * cfg.num_kv_heads // cfg.num_heads
            scores = k[b, seen, shared] @ q[b, t, n] / np.sqrt(cfg.query_scale)
            if cfg.attn_softcap is not None:
                scores = cfg.attn_softcap * np.tanh(scores / cfg.attn_softcap)
            out[b, t, n] = np.exp(scores) / np.exp(scores).sum() @ v[b, seen, shared]
    return out


def on_mesh(qkv, slope, rows):
    heads = ("heads", "kv_heads", "kv_heads")
    qkv = tuple(put(x, "batch", "seq", name, "head_dim") for x, name in zip(qkv, heads))
    return qkv, put(slope, "batch", "seq", "heads", "head_dim"), jax.tree.map(lambda x: put(x, "batch", "seq"), rows)


def attended(way, cfg, is_local, qkv, slope, rows):
    """The output where there is a token, and the gradients of q, k and v."""

    def program(is_local, qkv, slope, rows):
        out, pull = jax.vjp(lambda *qkv: way(cfg, is_local, rows, *qkv), *qkv)
        return jnp.where(rows.segments[..., None, None] > 0, out, 0), *pull(slope)

    arrays = on_mesh(qkv, slope, rows)
    if isinstance(is_local, bool):
        return jax.jit(partial(program, is_local))(*arrays)
    program = jax.jit(program)  # of both kinds
    return [program(jnp.bool_(local), *arrays) for local in is_local]


def close(got, wanted, atol=2e-6):
    for a, b in zip(got, wanted, strict=True):
        assert np.isfinite(np.asarray(a)).all()
        np.testing.assert_allclose(a, b, atol=atol * max(1, np.abs(b).max()))


# A lead of six columns and three lanes of seven: a prompt of four with completions of five and of seven tokens, and a
# prompt of two with completions of two, after the first, and of three.
LANES = np.array(
    [
        [1, 1, 1, 1, 2, 2, 1, 1, 1, 1, 1, 2, 2, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0],  # segments
        [0, 1, 2, 3, 0, 1, 4, 5, 6, 7, 8, 2, 3, 4, 5, 6, 7, 8, 9, 10, 2, 3, 4, 0, 0, 0, 0],  # positions
        [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0],  # branches
    ],
    np.int32,
)


@pytest.mark.parametrize("pieces", [pytest.param(1, marks=pytest.mark.wide), 3])
def test_lanes_are_the_whole_row(pieces, monkeypatch):
    """A lane sees the lead and itself; in the form of a whole row, segments and branches say the same."""
    set_mesh(2, 2)
    (q, k, v), slope, _ = random_rows(CFG, 4, 27, False)
    segments, positions, branches = (np.tile(row, (4, 1)) for row in LANES)
    slope = slope + np.where(segments > 0, 1.0, 0.0)[..., None, None].astype(np.float32)
    slope[segments == 0] = 0
    whole = AttentionMeta(positions, segments, branches)
    wanted = [attended(attention.xla, CFG, local, (q, k, v), slope, whole) for local in (False, True)]
    for window, found in zip((None, CFG.window), wanted):
        assert np.abs(found[0] - by_formulas(CFG, window, whole, q, k, v)).max() < 2e-6
    laned = replace(whole, prefix_columns=6, lane_columns=7)
    if pieces > 1:  # three of the seven queries of a lane, which have 13 keys each, at once
        monkeypatch.setattr(attention, "SCORES_AT_ONCE", 12 * 4 * 13 // 4 * 3)
    for local in (False, True):
        close(attended(attention.xla, CFG, local, (q, k, v), slope, laned), wanted[local])
    for found, right in zip(attended(attention.xla, CFG, [False, True], (q, k, v), slope, laned), wanted):
        close(found, right)


@pytest.mark.parametrize(
    "with_branches, softcap, pieces",
    [(True, None, 4), *(pytest.param(*c, marks=pytest.mark.wide) for c in ((False, 1.5, 2), (False, 1.5, 4), (True, None, 2)))],
)  # fmt: skip
def test_pieces_are_the_whole(with_branches, softcap, pieces, monkeypatch):
    """Two pieces whose scores all fit, or four of seven queries and less; a window of three is shorter than a piece."""
    set_mesh(2, 2)
    cfg, T = replace(CFG, attn_softcap=softcap), 26
    problem = random_rows(cfg, 4, T, with_branches)
    whole = {local: attended(attention.xla, cfg, local, *problem) for local in (False, True)}
    for local, found in whole.items():
        assert np.abs(found[0] - by_formulas(cfg, cfg.window if local else None, problem[2], *problem[0])).max() < 2e-6
    monkeypatch.setattr(attention, "CAUSAL_PIECE", 13)
    if pieces == 4:
        monkeypatch.setattr(attention, "SCORES_AT_ONCE", 4 * 4 * T // 4 * 7)  # on each of the four devices
    assert attention.piece_length(problem[0][0], T) == {2: T, 4: 7}[pieces]
    for local in (False, True):
        close(attended(attention.xla, cfg, local, *problem), whole[local])
    for local, found in enumerate(attended(attention.xla, cfg, [False, True], *problem)):
        close(found, whole[local])


# ---- splash


SPLASH = Architecture(
    56, 2, 16, 4, 2, 128, 32, pattern=("local", "global"), window=40, query_scale=128, attn_softcap=2.0
)
splash = partial(attention.splash, interpret=True)


def test_splash_attends_as_xla_does():
    problem = random_rows(SPLASH, 2, 128, False)
    wanted = [attended(attention.xla, SPLASH, local, *problem) for local in (False, True)]
    close(attended(splash, SPLASH, True, *problem), wanted[True], 1e-5)
    set_mesh(2, 2)
    for found, right in zip(attended(splash, SPLASH, [False, True], *problem), wanted, strict=True):
        close(found, right, 1e-5)


@pytest.mark.parametrize(
    "queries, keys, tp", [*(pytest.param(*n, marks=pytest.mark.wide) for n in ((4, 1, 2), (4, 2, 4))), (6, 3, 2)]
)
def test_splash_attends_where_tp_does_not_divide_the_key_heads(queries, keys, tp):
    """One key head for all, fewer than tp, and neither a multiple of the other."""
    cfg = replace(SPLASH, num_heads=queries, num_kv_heads=keys)
    problem = random_rows(cfg, 2, 128, False)
    wanted = attended(attention.xla, cfg, True, *problem)
    set_mesh(1, tp)
    close(attended(splash, cfg, True, *problem), wanted, 1e-5)


# ---- cudnn, with a kernel of the tests in its place


# of queries, of keys, and tp; in the last, neither of 6 and 4 divides the other
HEADS = [(4, 1, 2, False), (4, 2, 4, False), (4, 1, 2, True), (12, 6, 4, True)]


@pytest.mark.parametrize("queries, keys, tp, apart", HEADS)
def test_cudnn_attends_as_xla_does_whatever_tp_divides(queries, keys, tp, apart, monkeypatch):
    """Values and gradients; apart: under the vmap over shards that training.sync_gradients_every makes."""
    monkeypatch.setattr(jax.nn, "dot_product_attention", strict_kernel.dot_product_attention)
    cfg = replace(CFG, num_heads=queries, num_kv_heads=keys)
    qkv, slope, rows = random_rows(cfg, 4, 16, True)
    wanted = attended(attention.xla, cfg, True, qkv, slope, rows)
    set_mesh(4 // tp, tp)
    way = attended_apart if apart else attended
    close(way(attention.cudnn, cfg, True, qkv, slope, rows), wanted)


HEAD_AXES = ("heads", "kv_heads", "kv_heads")


def divided(x, axis):
    return constrain(x, "batch", "seq", axis, "head_dim")


def attended_apart(way, cfg, is_local, qkv, slope, rows):
    """As `attended`, each shard of the rows by itself, as micro_batches._apart has it."""

    def alone(qkv, slope, rows):
        with use_rules("train", batch=None):
            out, pull = jax.vjp(lambda *qkv: way(cfg, is_local, rows, *map(divided, qkv, HEAD_AXES)), *qkv)
            return jnp.where(rows.segments[..., None, None] > 0, out, 0), *pull(slope)

    shards = axis_size("fsdp")
    cut = lambda x: x.reshape(shards, -1, *x.shape[1:])  # noqa: E731
    found = jax.jit(jax.vmap(alone, spmd_axis_name="fsdp"))(*jax.tree.map(cut, (qkv, slope, rows)))
    return [x.reshape(-1, *x.shape[2:]) for x in found]


# ---- the choice


FITS = replace(SPLASH, attn_softcap=None)


def test_auto_takes_the_one_made_for_the_platform():
    assert choose("auto", FITS, "cpu", jnp.float32, 100, True) == ("xla", "the one for cpu")
    assert choose("auto", SPLASH, "tpu", jnp.float32, 256, False) == ("splash", "the one for tpu")
    assert choose("splash", SPLASH, "tpu", jnp.float32, 256, False) == ("splash", "as training.attention says")
    assert choose("xla", FITS, "tpu", jnp.float32, 256, False) == ("xla", "as training.attention says")


@pytest.mark.parametrize(
    "name, platform, changes, dtype, width, shares, reason",
    [
        ("cudnn", "gpu", {"attn_softcap": 50.0}, jnp.bfloat16, 64, False, "no soft cap, and the model's attn_softcap is 50.0"),
        ("cudnn", "gpu", {}, jnp.float32, 64, False, "bfloat16 only; set training.mixed_precision=bf16"),
        ("cudnn", "gpu", {"head_dim": 260}, jnp.bfloat16, 64, False, "up to 256 in multiples of 8, and head_dim is 260"),
        ("splash", "tpu", {}, jnp.bfloat16, 128, True, "no branches, and training.packing=prefix makes some"),
        ("splash", "tpu", {}, jnp.bfloat16, 200, False, "multiples of 128 tokens, and they have 200"),
        ("splash", "tpu", {"head_dim": 64}, jnp.bfloat16, 128, False, "multiples of 128, and head_dim is 64"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(name, platform, changes, dtype, width, shares, reason):
    args = replace(FITS, **changes), platform, dtype, width, shares
    assert reason in str(obstacle(name, *args))
    with pytest.raises(ValueError, match=rf"attention={name}: .*; use auto or xla") as error:
        choose(name, *args)
    assert reason in str(error.value)
    chosen, why = choose("auto", *args)
    if attention.NATIVE.get(platform) == name:
        assert chosen == "xla" and why.startswith(f"not {name}: ") and reason in why
