"""However an update is divided, its gradient is the one that the formulas give, sequence by sequence, in float64."""

import math
import re
from functools import cache, partial

import exactness_worker
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import set_mesh
from exactness_worker import MODELS, NEW, PROMPT, SEQUENCES, Way

from tunix_lite.basics.types import Batch
from tunix_lite.learner.update import round_by_chance
from tunix_lite.models import attention, vocabulary
from tunix_lite.parallel.collectives import collectives
from tunix_lite.parallel.mesh import ShardingConfig, put, set_rules

KL_COEF, CLIP_LOW, CLIP_HIGH = 0.1, 0.2, 0.28


@pytest.fixture(autouse=True)
def plain_rules():
    yield
    set_rules(ShardingConfig())


# ---- the formulas once more, in float64: one sequence without padding, nothing divided, nothing made again


def silu(x):
    return x / (1 + jnp.exp(-x))


def delta_net(x, w, net, eps):
    """What a gated delta net adds, token after token. x [T, D]."""
    qkv = jnp.pad(jnp.einsum("td,dkc->tkc", x, w["qkv"]), ((net.taps - 1, 0), (0, 0), (0, 0)))
    qkv = silu(sum(qkv[i : i + len(x)] * w["conv"][..., i] for i in range(net.taps)))
    q, k, v = qkv[..., : net.key_dim], qkv[..., net.key_dim : 2 * net.key_dim], qkv[..., 2 * net.key_dim :]
    q, k = (y / jnp.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    q, k = (jnp.repeat(y, net.num_value_heads // net.num_key_heads, axis=1) for y in (q, k))
    v = v.reshape(len(x), net.num_value_heads, net.value_dim)
    beta = 1 / (1 + jnp.exp(-x @ w["b"]))
    decay = jnp.exp(-jnp.exp(w["decay"]) * jnp.log1p(jnp.exp(x @ w["a"] + w["step_bias"])))

    def token(memory, of_token):
        q, k, v, beta, decay = of_token
        memory = memory * decay[:, None, None]
        error = beta[:, None] * (v - jnp.einsum("vdh,vd->vh", memory, k))
        memory += k[:, :, None] * error[:, None]
        return memory, jnp.einsum("vdh,vd->vh", memory, q) / math.sqrt(net.key_dim)

    empty = jnp.zeros((net.num_value_heads, net.key_dim, net.value_dim))
    _, out = jax.lax.scan(token, empty, (q, k, v, beta, decay))
    out = out / jnp.sqrt((out**2).mean(-1, keepdims=True) + eps) * w["norm"]
    return jnp.einsum("tvh,vhd->td", out * silu(jnp.einsum("td,dvh->tvh", x, w["z"])), w["o"])


def log_probabilities(params, tokens, cfg, temperature):
    """log p(. | tokens[:t]) for t = 1 ... T - 1, [T - 1, V]."""

    def rms(x, scale):
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + scale)

    def turned(x, theta):  # x [T, heads, H]; elements i and i + H/2 by the angle t theta^(-2i/H)
        half = x.shape[-1] // 2
        angle = jnp.arange(len(x))[:, None, None] * theta ** (-jnp.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        return jnp.concatenate(
            [first * jnp.cos(angle) - second * jnp.sin(angle), first * jnp.sin(angle) + second * jnp.cos(angle)], -1
        )

    def capped(x, cap):
        return x if cap is None else cap * jnp.tanh(x / cap)

    t, s = np.ogrid[: len(tokens), : len(tokens)]

    def attention_layer(normed, w, kind):
        theta, seen = (1e4, (s <= t) & (t - s < cfg.window)) if kind == "local" else (1e6, s <= t)
        q = jnp.einsum("td,dnh->tnh", normed, w["q"])
        gate = q[..., cfg.head_dim :]  # empty where there is none
        q = turned(rms(q[..., : cfg.head_dim], w["q_norm"]), theta)
        k = turned(rms(jnp.einsum("td,dkh->tkh", normed, w["k"]), w["k_norm"]), theta)
        v = jnp.einsum("td,dkh->tkh", normed, w["v"])
        k, v = (jnp.repeat(x, cfg.num_heads // cfg.num_kv_heads, axis=1) for x in (k, v))  # neighbours share one
        exps = jnp.exp(capped(jnp.einsum("tnh,snh->nts", q, k) / math.sqrt(cfg.query_scale), cfg.attn_softcap)) * seen
        attended = jnp.einsum("nts,snh->tnh", exps / exps.sum(-1, keepdims=True), v)
        if cfg.attn_gate:
            attended = attended / (1 + jnp.exp(-gate))
        return jnp.einsum("tnh,nhd->td", attended, w["o"])

    x = params["embed"][tokens] * math.sqrt(cfg.embed_dim)
    for i, kind in enumerate(cfg.kinds):
        layers = params["layers"]
        if kind in layers:  # a stack for each kind
            layers, i = layers[kind], cfg.kinds[:i].count(kind)
        w = {name: stacked[i] for name, stacked in layers.items()}
        normed = rms(x, w["attn_norm"])
        if kind == "delta":
            mixed = delta_net(normed, w, cfg.delta, cfg.norm_eps)
        else:
            mixed = attention_layer(normed, w, kind)
        x += rms(mixed, w["attn_post_norm"])
        normed = rms(x, w["mlp_norm"])
        gate = normed @ w["gate"]
        gelu = gate / 2 * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        x += rms((gelu * (normed @ w["up"])) @ w["down"], w["mlp_post_norm"])
    table = params["embed"] if cfg.tied else params["head"]
    scores = capped(rms(x, params["final_norm"])[:-1] @ table.T, cfg.final_softcap) / temperature
    return scores - jnp.log(jnp.exp(scores).sum(-1, keepdims=True))


def with_adapters(base, adapters, scale):
    """The base with scale * a b added to the weights that have an a and a b."""

    def of_stack(layers, sides):
        layers = dict(layers)
        for name, side in sides.items():
            if name in ("delta", "global"):
                layers[name] = of_stack(layers[name], side)
                continue
            count, *_, rank = side["a"].shape
            a, b = side["a"].reshape(count, -1, rank), side["b"].reshape(count, rank, -1)
            layers[name] = layers[name] + scale * jnp.einsum("lir,lro->lio", a, b).reshape(layers[name].shape)
        return layers

    return base | {"layers": of_stack(base["layers"], adapters["layers"])}


@partial(jax.jit, static_argnums=4, compiler_options=exactness_worker.FAST)
def pulled(trained, base, tokens, slopes, model):
    """All log-probabilities of one sequence, and what slopes of those of its tokens make of the weights."""

    def of(trained):
        params = trained if base is None else with_adapters(base, trained, 3.0 / 2)
        full = log_probabilities(params, tokens, model.cfg, model.temperature)
        return full[jnp.arange(len(tokens) - 1), tokens[1:]], full

    _, pull, full = jax.vjp(of, trained, has_aux=True)
    return full, pull(slopes)[0]


def sequences() -> list[tuple[int, int]]:
    """(prompt, completion) lengths: four groups of four, of two lengths in all, so that few programs are compiled."""
    totals = [(11, 21, 21, 11), (21, 11, 21, 21), (21, 11, 11, 11), (11, 21, 11, 21)]
    return [(prompt, total - prompt) for prompt, group in zip((2, 5, 8, 10), totals) for total in group]


class Expected:
    """A batch for a model, and what its update amounts to."""

    def __init__(self, model):
        rng = np.random.default_rng(0)
        shape = (SEQUENCES, PROMPT + NEW)
        mask, weight, tokens = np.zeros(shape, bool), np.zeros(shape, np.float32), rng.integers(4, 56, shape)
        for b, (prompt, completion) in enumerate(sequences()):
            tokens[b, :PROMPT] = tokens[b - b % 4, :PROMPT]
            mask[b, PROMPT - prompt : PROMPT + completion] = True
            weight[b, PROMPT : PROMPT + completion] = rng.uniform(0.5, 1.5, completion) / 100
        weight[6] = 0  # one that counts nothing
        weight[8, 14] = 0  # and one with a token that does not count among those that do
        tokens = np.where(mask, tokens, 0).astype(np.int32)
        counts = weight > 0
        with jax.enable_x64(True), jax.set_mesh(set_mesh(1, 1)):
            trained, base = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), model.arrays())

            def one(b, slopes):
                real = mask[b]
                return jax.tree.map(np.asarray, pulled(trained, base, tokens[b][real], slopes[b][real][1:], model))

            zeros = np.zeros(shape)
            self.logprobs, entropy = np.zeros(shape), np.zeros(shape)
            for b in range(SEQUENCES):
                full = one(b, zeros)[0]
                real = np.flatnonzero(mask[b])[1:]
                self.logprobs[b, real] = np.take_along_axis(full, tokens[b, real][:, None], 1)[:, 0]
                entropy[b, real] = -(np.exp(full) * full).sum(-1)
            # log ratios on either side of both bounds, and no nearer to them than rounding could matter
            away = rng.choice([-0.6, -0.1, 0.1, 0.6], shape) + rng.uniform(-0.05, 0.05, shape)
            old = (self.logprobs - away).astype(np.float32)
            ref = (self.logprobs + rng.normal(0, 0.3, shape)).astype(np.float32)
            advantages = np.broadcast_to(rng.normal(size=(SEQUENCES, 1)), shape).astype(np.float32)
            self.batch = Batch(tokens, mask, weight, advantages, old, ref)
            weight, advantages = weight.astype(np.float64), advantages.astype(np.float64)
            ratio, gap = np.exp(self.logprobs - old), ref - self.logprobs
            bounded = np.clip(ratio, 1 - CLIP_LOW, 1 + CLIP_HIGH)
            is_clipped = bounded * advantages < ratio * advantages
            assert 0.1 < is_clipped[counts].mean() < 0.9 and (np.abs(np.log(ratio))[counts] > 0.04).all()
            gain = np.where(is_clipped, bounded, ratio) * advantages
            self.kl = float(np.sum(weight * ratio * (np.exp(gap) - gap - 1)))
            self.loss = float(-np.sum(weight * gain)) + KL_COEF * self.kl
            self.entropy = float(np.sum(weight * entropy))
            # d rho / d logprob = rho; and of the KL term the slope of gap^2 / 2, which is that of the KL in expectation
            slopes = -weight * np.where(is_clipped, 0, ratio * advantages) - KL_COEF * weight * ratio * gap
            of_each = [one(b, slopes)[1] for b in range(SEQUENCES)]
            self.grads = jax.tree.map(lambda *xs: np.sum(xs, axis=0), *of_each)
        self.norm = norm(self.grads)


def norm(tree) -> float:
    return math.sqrt(sum(float((np.asarray(x, np.float64) ** 2).sum()) for x in jax.tree.leaves(tree)))


@cache
def expected(name: str) -> Expected:
    return Expected(MODELS[name])


@cache
def updated(name: str, *settings):
    """The update of the code, compiled once for tests that look at it from different sides."""
    way = Way(**{key: dict(value) if key == "rules" else value for key, value in settings})
    return exactness_worker.update(MODELS[name], way, expected(name).batch, jax.devices()[: way.fsdp * way.tp])


def difference(got, wanted) -> float:
    """Norm of the difference, in norms of what is wanted."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    return norm(jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, got, wanted)) / norm(wanted)


# ---- what may not matter. Not the product of all: each value at least twice, with different others


SEQ, REPLICATED = (("residual_seq", "tp"),), (("embed", None),)
BASIC = {"fsdp": 4, "tp": 2, "parts": 4}
WAYS = [
    ("plain", {}, {}),
    ("plain", BASIC, {}),
    ("plain", BASIC | {"sync_every": 2}, {}),
    ("plain", BASIC | {"sync_every": 4, "remat": "save_most"}, {}),
    ("plain", {"fsdp": 8, "parts": 2, "sync_every": 2, "remat": "dots"}, {"blocks": 4}),
    ("plain", {"fsdp": 8, "packing": "prefix", "remat": "block", "rules": REPLICATED}, {}),
    ("head", {"fsdp": 2, "tp": 4, "parts": 2, "packing": "sequences", "remat": "block", "rules": SEQ}, {"blocks": 3, "pieces": 3}),
    ("head", {"tp": 8, "parts": 4, "packing": "prefix", "remat": "save_qkv_out"}, {"blocks": 2}),
    ("head", {"parts": 8, "packing": "sequences", "remat": "save_all", "scan_layers": False}, {"blocks": 4, "pieces": 2}),
    ("adapters", {"fsdp": 2, "tp": 4, "parts": 8, "packing": "prefix", "remat": "dots", "sync_every": 4, "rules": REPLICATED}, {"pieces": 2}),
    ("adapters", {"fsdp": 4, "tp": 2, "packing": "sequences", "remat": "save_qkv_out", "rules": SEQ}, {"blocks": 4}),
    ("adapters", {"tp": 8, "remat": "block", "rules": SEQ, "scan_layers": False}, {"pieces": 3}),
]  # fmt: skip
WIDE = [
    ("plain", {"tp": 8, "packing": "prefix", "rules": SEQ, "remat": "save_all"}, {"blocks": 3}),
    ("adapters", {"fsdp": 2, "tp": 4, "parts": 8, "remat": "save_qkv_out", "sync_every": 4, "rules": SEQ}, {}),
    ("delta", {"tp": 8, "packing": "prefix", "rules": SEQ, "remat": "block"}, {"blocks": 3}),
    ("delta", {"fsdp": 2, "tp": 4, "parts": 2, "packing": "sequences", "remat": "save_all", "sync_every": 2}, {"pieces": 2}),
    ("delta_adapters", {"fsdp": 8, "packing": "prefix", "remat": "dots", "scan_layers": False}, {}),
]  # fmt: skip


def cut_into(monkeypatch, blocks: int = 1, pieces: int = 1):
    """Fewer scores at once, as they would be with a larger vocabulary and longer rows; and how many there then were."""
    seen, num_blocks, piece_length = [], vocabulary.num_blocks, attention.piece_length

    def blocks_of(size, tokens, *on_cpu):
        monkeypatch.setattr(vocabulary, "SCORES_AT_ONCE", -(-size * tokens // blocks))
        seen.append(("blocks", num_blocks(size, tokens, *on_cpu)))
        return seen[-1][1]

    def piece_of(q, keys):
        rows, _, heads, _ = q.shape
        of_a_query = rows * heads * keys // (attention.parts_of("batch") * attention.parts_of("heads"))
        monkeypatch.setattr(attention, "SCORES_AT_ONCE", of_a_query * -(-q.shape[1] // pieces))
        length = piece_length(q, keys)
        seen.append(("pieces", -(-q.shape[1] // length)))
        return length

    monkeypatch.setattr(vocabulary, "num_blocks", blocks_of)
    monkeypatch.setattr(attention, "piece_length", piece_of)
    # of packed rows a head computes the columns that they need, in eighths of a row
    monkeypatch.setattr(vocabulary, "_LEAST_COLUMNS", 2)
    monkeypatch.setattr(vocabulary, "LARGE_HEAD", 1)
    return seen


def named(way) -> str:
    name, settings, cuts = way
    both = {key: value if key != "rules" else value[0][0] for key, value in (settings | cuts).items()}
    return "-".join([name, *(f"{key}={value}" for key, value in both.items())])


def check(way, monkeypatch, bound: float, **more):
    name, settings, cuts = way
    seen = cut_into(monkeypatch, **cuts)
    found, wanted = updated(name, *(settings | more).items()), expected(name)
    assert set(seen) == {("blocks", cuts.get("blocks", 1)), ("pieces", cuts.get("pieces", 1))}
    assert difference(found.grads, wanted.grads) < bound
    for (path, got), right in zip(jax.tree_util.tree_leaves_with_path(found.grads), jax.tree.leaves(wanted.grads)):
        assert difference(got, right) < 10 * bound, jax.tree_util.keystr(path)
    metrics = {"grad_norm": wanted.norm, "loss": wanted.loss, "entropy": wanted.entropy, "kl": wanted.kl}
    for metric, value in metrics.items():
        np.testing.assert_allclose(found.metrics[f"train/{metric}"], value, rtol=2 * bound, err_msg=metric)


@pytest.mark.parametrize("way", WAYS, ids=named)
def test_the_gradient_is_that_of_the_formulas(way, monkeypatch):
    check(way, monkeypatch, 1e-5)


@pytest.mark.parametrize("way", WIDE, ids=named)
def test_the_gradient_is_that_of_the_formulas_to_float64(way, monkeypatch):
    with jax.enable_x64(True):
        check(way, monkeypatch, 1e-10, wide=True)
        assert jax.tree.leaves(updated(way[0], *(way[1] | {"wide": True}).items()).grads)[0].dtype == jnp.float64


def test_in_bfloat16_gradients_that_cross_the_mesh_less_often_are_the_same():
    """The sums are float32 in every case. Packed and unpacked programs, or other meshes, round activations elsewhere."""
    every_time, *less_often = (
        updated("plain", *{"fsdp": 4, "parts": 4, "reduce_dtype": "float32", "sync_every": every}.items()).grads
        for every in (1, 2, 4)
    )
    for grads in less_often:
        assert difference(grads, jax.tree.map(np.asarray, every_time)) < 1e-5


# ---- what the compiled update says


# Elements of PLAIN's gradient on a device of BASIC before they are divided over fsdp: matrices by tp, norms whole.
MATRICES = (56 * 16 + 2 * (2 * 16 * 8 * 4 + 2 * 16 * 2 * 4 + 3 * 16 * 32)) // 2
NORMS = 16 + 2 * (4 * 16 + 2 * 4)
TABLE = 56 * 16 // 2  # of what tokens are looked up in and scored with: jaxlib 0.12 reduces both halves of its gradient


def test_gradients_cross_the_mesh_once_in_sync_every_micro_batches():
    """Four micro-batches: four times, twice, once. The CPU writes a reduce-scatter as an all-reduce."""
    for every in (1, 2, 4):
        more = {"sync_every": every} if every > 1 else {}
        text = updated("plain", *(BASIC | more).items()).compiled.as_text()
        reduced = 0
        for c in collectives(text, {"fsdp": 4, "tp": 2}):
            if c.kind in ("all-reduce", "reduce-scatter") and c.axis == "fsdp":
                assert c.count_known
                shapes = re.findall(r"\[([\d,]+)\]", c.shapes)  # and not f32[], which are metrics
                reduced += c.count * sum(math.prod(map(int, shape.split(","))) for shape in shapes)
        once = MATRICES + NORMS
        assert reduced in (4 // every * once, 4 // every * (once + TABLE)), every


def test_the_new_state_takes_the_place_of_the_old_one():
    found = updated("plain", *BASIC.items())
    assert found.bytes_of_state == 2 * 4 * (MATRICES // 4 + NORMS) + 4  # params, gradient, step
    assert found.compiled.memory_analysis().alias_size_in_bytes >= found.bytes_of_state


# ---- weights in bfloat16


def neighbours(x) -> tuple[np.ndarray, np.ndarray]:
    """The nearest bfloat16 numbers towards zero and away from it."""
    upper = np.asarray(x, np.float32).view(np.uint32) >> 16
    return tuple((bits << 16).astype(np.uint32).view(np.float32) for bits in (upper, upper + 1))


VALUES = np.array([1.0009, -1.0051, 3.1415927, -1e-6, 255.9, 1.99999, 6.1e-39, -7e4, 0.1, 2.0 + 2**-10], np.float32)


def test_rounding_by_chance_gives_a_neighbour_and_the_value_on_average():
    keys = jax.random.split(jax.random.key(0), 4096)
    rounded = jax.jit(jax.vmap(partial(round_by_chance, jnp.asarray(VALUES), jnp.bfloat16)))(keys)
    assert rounded.dtype == jnp.bfloat16
    rounded, (near, far) = np.asarray(rounded, np.float64), neighbours(VALUES)
    assert ((rounded == near) | (rounded == far)).all()
    gap = np.abs(far.astype(np.float64) - near)
    assert (np.abs(rounded.mean(axis=0) - VALUES) < 5 * gap / 2 / math.sqrt(4096)).all()
    assert set(rounded[:, 0]) == {near[0], far[0]}
    # What is exact in bfloat16 stays.
    exact = jnp.array([0.0, -0.0, 1.0, -2.5, 2.0**-126, 3.3895314e38, jnp.inf, -jnp.inf, jnp.nan])
    for key in keys[:20]:
        kept = round_by_chance(exact, jnp.bfloat16, key)
        np.testing.assert_array_equal(np.asarray(kept, np.float32), exact)


def test_rounding_by_chance_is_the_same_on_every_mesh():
    x = np.random.default_rng(0).normal(size=(16, 56)).astype(np.float32)
    made = []
    for mesh in ((1, 1), (8, 1), (2, 4), (1, 8)):
        set_mesh(*mesh)
        program = jax.jit(lambda x: round_by_chance(x, jnp.bfloat16, jax.random.key(3)))
        made.append(np.asarray(program(put(x, "embed", "vocab")), np.float32))
    for other in made[1:]:
        np.testing.assert_array_equal(other, made[0])
    assert (made[0] != x).any()
