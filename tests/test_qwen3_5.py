"""Qwen 3.5: the gated delta net against a loop over tokens, in rows, slots and meshes, and the model as transformers has it."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_overlap
from conftest import NEW, PROMPT, logits_of, ragged_prompts, random_params, set_mesh

from tunix_lite.kernels.choice import check_fused
from tunix_lite.learner.packing import RowShape
from tunix_lite.learner.policy import batch_scores, token_logprobs
from tunix_lite.learner.rows import RowLayout
from tunix_lite.models import attention, decoder, gated_delta_net, hf, peft, weights
from tunix_lite.models.architecture import Architecture, DeltaNet
from tunix_lite.models.families import QWEN3_5, config_json, read_config
from tunix_lite.models.gated_delta_net import DeltaState
from tunix_lite.models.layer_kind import Surroundings
from tunix_lite.models.lora import LoraConfig, adapter_weights, attach
from tunix_lite.models.quantize import init_stored, stored_table
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout import engine
from tunix_lite.rollout.generate import make_generate, make_sampler
from tunix_lite.rollout.partial import PartialSampler, rollout_of
from tunix_lite.rollout.programs import SamplerSpec, longest_chunk
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.settings.compose import compose
from tunix_lite.types import Batch

NET = DeltaNet(num_key_heads=4, num_value_heads=8, key_dim=8, value_dim=6)
CFG = Architecture(
    vocab_size=48,
    num_layers=5,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_dim=24,
    pattern=("delta", "delta", "delta", "global"),
    window=None,
    query_scale=16,
    rope_theta_local=1e7,
    rope_theta_global=1e7,
    rope_share=0.25,
    # With 1e-6 the norm of an output near zero makes digits of rounding large: to 3e-5 in log-probabilities.
    norm_eps=1e-3,
    activation="silu",
    embed_scale=False,
    post_norms=False,
    attn_gate=True,
    delta=NET,
    tied=False,
)


# ---- one layer against a loop over tokens


def layer_weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    made = {name: rng.normal(0, 0.5, w.shape) for name, w in gated_delta_net.delta_weights(CFG).items()}
    # Half of the heads forget within a few tokens, the others keep for hundreds.
    made["decay"] = np.tile([-4.0, 0.5, -3.0, 1.0], 2)
    return made


def by_token(x: np.ndarray, w: dict[str, np.ndarray], net: DeltaNet = NET) -> np.ndarray:
    """One sequence [T, D] through the layer, token after token, in float64."""
    qkv = np.einsum("td,dkc->tkc", x, w["qkv"])
    padded = np.concatenate([np.zeros((net.taps - 1, *qkv.shape[1:])), qkv])
    memory = np.zeros((net.num_value_heads, net.key_dim, net.value_dim))
    out = []
    for t in range(len(x)):
        summed = sum(padded[t + i] * w["conv"][..., i] for i in range(net.taps))
        mixed = summed / (1 + np.exp(-summed))
        heads = []
        for head in range(net.num_value_heads):
            per_key_head = net.num_value_heads // net.num_key_heads
            of_key_head = mixed[head // per_key_head]
            q, k = of_key_head[: net.key_dim], of_key_head[net.key_dim : 2 * net.key_dim]
            first = 2 * net.key_dim + head % per_key_head * net.value_dim
            v = of_key_head[first : first + net.value_dim]
            q = q / np.sqrt((q**2).sum() + 1e-6) / np.sqrt(net.key_dim)
            k = k / np.sqrt((k**2).sum() + 1e-6)
            beta = 1 / (1 + np.exp(-x[t] @ w["b"][:, head]))
            step = np.log1p(np.exp(x[t] @ w["a"][:, head] + w["step_bias"][head]))
            memory[head] *= np.exp(-np.exp(w["decay"][head]) * step)
            memory[head] += np.outer(k, beta * (v - memory[head].T @ k))
            o = memory[head].T @ q
            z = x[t] @ w["z"][:, head]
            heads.append(o / np.sqrt((o**2).mean() + CFG.norm_eps) * w["norm"] * z / (1 + np.exp(-z)))
        out.append(np.einsum("vh,vhd->d", np.stack(heads), w["o"]))
    return np.stack(out)


def mixed(x, w, sequences: attention.AttentionMeta, state: DeltaState | None = None, dtype=np.float32):
    """(what the layer adds, its state) for rows x [B, T, D]."""

    @jax.jit
    def run(x, w, sequences, state):
        around = Surroundings(decoder.PLAIN, None, None, sequences=sequences, state=state)
        return gated_delta_net.mix(x, w, CFG, around)

    return run(jnp.asarray(x, dtype), jax.tree.map(partial(jnp.asarray, dtype=dtype), w), sequences, state)


def ids(*arrays) -> list[jax.Array]:
    return [jnp.asarray(x, jnp.int32) for x in arrays]


def in_rows(*rows: list[int]) -> attention.AttentionMeta:
    """Rows of sequences of these lengths, side by side; the rest is padding."""
    width = max(map(sum, rows))
    segments, positions = np.zeros((2, len(rows), width), int)
    for row, lengths in enumerate(rows):
        ends = np.cumsum(lengths)
        for number, (length, end) in enumerate(zip(lengths, ends)):
            segments[row, end - length : end] = number + 1
            positions[row, end - length : end] = range(length)
    return attention.AttentionMeta(*ids(positions, segments))


@pytest.fixture(scope="module")
def hidden() -> np.ndarray:
    return np.random.default_rng(1).normal(0, 1, (2, 200, CFG.embed_dim))


# Ends inside of a chunk of 64 tokens, one before and one after its edge, and at the edge; rows of 200 and less.
EDGES = ([63, 2, 65, 1, 60], [64, 64, 3, 69])


def of_sequences(hidden, meta) -> np.ndarray:
    """What the loop gives of each sequence alone, in rows; 0 for padding."""
    out = np.zeros_like(hidden[:, : meta.segments.shape[1]])
    for row, segments in enumerate(np.asarray(meta.segments)):
        for number in range(1, segments.max() + 1):
            out[row, segments == number] = by_token(hidden[row, : len(segments)][segments == number], layer_weights())
    return out


def test_packed_sequences_are_what_a_loop_over_the_tokens_of_each_gives(hidden):
    meta = in_rows(*EDGES)
    x = hidden[:, : meta.segments.shape[1]]
    out, _ = mixed(x, layer_weights(), meta)
    expected = of_sequences(hidden, meta)
    assert np.abs(expected).max() > 1
    is_token = np.asarray(meta.segments) > 0
    np.testing.assert_allclose(out[is_token], expected[is_token], atol=3e-5)


def test_heads_that_forget_at_once_have_finite_gradients(hidden):
    """Over 30 tokens their decay is e^-1000, the inverse of which float32 does not have."""
    w = jax.tree.map(jnp.float32, layer_weights() | {"decay": np.full(8, 4.0)})
    around = Surroundings(decoder.PLAIN, None, None, sequences=in_rows([40, 24, 30, 10]))

    def total(w, x):
        return jnp.sum(gated_delta_net.mix(x, w, CFG, around)[0])

    grads = jax.jit(jax.grad(total, argnums=(0, 1)))(w, jnp.float32(hidden[:1, :104]))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


def test_heads_that_forget_keep_the_digits_of_float32(hidden):
    """Decays over a chunk add up to 1000 there: a difference of two such sums would be off by 3e-5."""
    w = layer_weights() | {"decay": np.log(np.random.default_rng(0).uniform(0.01, 16, 8))}
    out, _ = mixed(hidden[:1], w, in_rows([200]))
    error = out[0] - by_token(hidden[0], w)
    assert np.sqrt(np.mean(error**2)) < 1e-6


def lanes() -> tuple[attention.AttentionMeta, list]:
    """A row with two prompts in 70 columns, and five completions in two lanes of 80; and of each completion where its
    prompt stands, and where it stands."""
    prompts = {1: slice(0, 40), 2: slice(40, 65)}
    completions = [(1, 1, 70, 30), (1, 2, 100, 40), (2, 1, 140, 5), (1, 3, 150, 64), (2, 2, 214, 10)]
    positions, segments, numbers = np.zeros((3, 1, 70 + 2 * 80), int)
    for segment, here in prompts.items():
        segments[0, here], positions[0, here] = segment, range(here.stop - here.start)
    places = []
    for segment, number, start, length in completions:
        here = slice(start, start + length)
        prompt = prompts[segment]
        segments[0, here], numbers[0, here] = segment, number
        positions[0, here] = np.arange(length) + prompt.stop - prompt.start
        places.append((prompt, here))
    return attention.AttentionMeta(*ids(positions, segments, numbers), 70, 80), places


def test_completions_go_on_from_the_state_of_their_shared_prompt():
    x = np.random.default_rng(2).normal(0, 1, (1, 230, CFG.embed_dim))
    meta, places = lanes()
    out, _ = mixed(x, layer_weights(), meta)
    for prompt, here in places:
        whole = by_token(np.concatenate([x[0, prompt], x[0, here]]), layer_weights())
        num_prompt = prompt.stop - prompt.start
        np.testing.assert_allclose(out[0, prompt], whole[:num_prompt], atol=3e-5)
        np.testing.assert_allclose(out[0, here], whole[num_prompt:], atol=3e-5)


def test_chunks_then_single_tokens_go_on_from_each_other(hidden):
    """Two rows of 70 and 3 tokens, right-padded; 10 and none more; then one token at a time, for the first row alone."""
    x, w = hidden[:, :85], layer_weights()
    expected = [by_token(row, w) for row in x]
    state, lengths, got = None, np.zeros(2, int), [[], []]
    for width, counts in [(80, (70, 3)), (16, (10, 0)), *[(1, (1, 0))] * 5]:
        part = np.stack([np.resize(x[row, lengths[row] : lengths[row] + n], (width, 16)) if n else np.ones((width, 16))
                         for row, n in enumerate(counts)])  # fmt: skip
        is_token = np.arange(width) < np.array(counts)[:, None]
        out, state = mixed(part, w, attention.AttentionMeta(*ids(is_token, is_token)), state)
        for row, n in enumerate(counts):
            got[row] += list(np.asarray(out)[row, :n])
        lengths += counts
    for row in range(2):
        np.testing.assert_allclose(got[row], expected[row][: lengths[row]], atol=3e-5)


def test_token_by_token_is_in_chunks_is_the_loop(hidden):
    """In float64, to its digits: 130 tokens one at a time, and in three chunks."""
    x, w = hidden[:1, :130], layer_weights()
    expected = by_token(x[0], w)
    with jax.enable_x64(True):
        chunks, after_chunks = mixed(x, w, in_rows([130]), dtype=np.float64)

        @jax.jit
        def step(x, w, state):
            one = attention.AttentionMeta(*ids([[0]], [[1]]))
            return gated_delta_net.mix(x, w, CFG, Surroundings(decoder.PLAIN, None, None, sequences=one, state=state))

        state = jax.tree.map(lambda s: jnp.zeros(s.shape), gated_delta_net.state_shapes(CFG, 1, np.float64))
        tokens = []
        for t in range(130):
            out, state = step(jnp.asarray(x[:, t : t + 1]), jax.tree.map(jnp.asarray, w), state)
            tokens.append(out[0, 0])
        np.testing.assert_allclose(chunks[0], expected, atol=1e-12)
        np.testing.assert_allclose(tokens, expected, atol=1e-12)
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-12), state, after_chunks)


@pytest.mark.parametrize("is_shared", [False, pytest.param(True, marks=pytest.mark.wide)])
def test_the_gradient_is_the_slope_of_the_loop(is_shared):
    """Along a drawn direction of weights and hidden states, by central differences in float64."""
    rng, w = np.random.default_rng(6), layer_weights()
    meta, places = lanes() if is_shared else (in_rows(EDGES[0]), [])
    x, weight = rng.normal(0, 1, (2, 1, meta.segments.shape[1], CFG.embed_dim))
    ways = jax.tree.map(lambda v: rng.normal(0, 1, v.shape), (x, w))

    def loss_of_loop(x, w):
        if not is_shared:
            ends = np.cumsum(EDGES[0])
            return sum(np.sum(by_token(x[0, end - n : end], w) * weight[0, end - n : end])
                       for n, end in zip(EDGES[0], ends))  # fmt: skip
        total = {prompt.stop: np.sum(by_token(x[0, prompt], w) * weight[0, prompt]) for prompt, _ in places}
        for prompt, here in places:
            whole = by_token(np.concatenate([x[0, prompt], x[0, here]]), w)
            total[here.start] = np.sum(whole[prompt.stop - prompt.start :] * weight[0, here])
        return sum(total.values())

    def along(step):
        return jax.tree.map(lambda v, way: v + step * way, (x, w), ways)

    with jax.enable_x64(True):

        def loss(x, w):
            out, _ = gated_delta_net.mix(x, w, CFG, Surroundings(decoder.PLAIN, None, None, sequences=meta))
            return jnp.sum(jnp.where((meta.segments > 0)[..., None], out, 0) * weight)

        value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w)
    slope = sum(np.sum(grad * way) for grad, way in zip(jax.tree.leaves(grads), jax.tree.leaves(ways)))
    np.testing.assert_allclose(value, loss_of_loop(x, w), rtol=1e-11)
    ahead, behind = (loss_of_loop(*along(step)) for step in (1e-5, -1e-5))
    np.testing.assert_allclose(slope, (ahead - behind) / 2e-5, rtol=1e-6)


def test_a_prompt_of_one_token_repeated_stays_exact():
    """Keys that are all alike make the triangular system as bad as it gets: powers of it would cancel out."""
    x = np.broadcast_to(np.random.default_rng(3).normal(0, 1, CFG.embed_dim), (1, 128, CFG.embed_dim))
    w = layer_weights() | {"decay": np.full(8, -30.0), "b": np.zeros((16, 8))}
    out, _ = mixed(x, w, in_rows([128]))
    np.testing.assert_allclose(out[0], by_token(x[0], w), atol=3e-5)


# ---- leaks that are put in on purpose: the tests above must see them


def every_tap(taps, *args):
    """The convolution reads across the beginning of a sequence."""
    return [(x, jnp.ones_like(is_own)) for x, is_own in taps(*args)]


def one_sequence(rule, q, k, v, rows, memory=None, prompts=None):
    """S goes on across the beginning of a sequence; the convolution does not."""
    whole = attention.AttentionMeta(rows.sequences.positions, jnp.ones_like(rows.sequences.segments))
    return rule(q, k, v, rows.replace(sequences=whole), memory, prompts)


def one_completion(rule, q, k, v, rows, memory=None, prompts=None):
    """A completion goes on from S of the one before it in its lane, if they share the prompt."""
    return rule(q, k, v, rows.replace(sequences=rows.sequences.replace(completion_ids=None)), memory, prompts)


def every_prompt(rule, q, k, v, rows, memory=None, prompts=None):
    """A completion goes on from S of every prompt of the row."""
    if prompts is not None:
        segments = jnp.ones_like(rows.sequences.segments)
        rows = rows.replace(sequences=rows.sequences.replace(segments=segments))
        prompts = prompts.replace(segments=jnp.ones_like(prompts.segments))
    return rule(q, k, v, rows, memory, prompts)


def padding_writes(of_rows, rows, *args):
    return of_rows(rows.replace(beta=jnp.where(rows.beta == 0, 0.5, rows.beta)), *args)


def no_inputs(of_rows, *args):
    """The convolution of the next piece begins with zeros."""
    out, state, *more = of_rows(*args)
    return out, state.replace(inputs=jnp.zeros_like(state.inputs)), *more


PACKED = test_packed_sequences_are_what_a_loop_over_the_tokens_of_each_gives
PIECES = test_chunks_then_single_tokens_go_on_from_each_other
SHARED = lambda hidden: test_completions_go_on_from_the_state_of_their_shared_prompt()  # noqa: E731


@pytest.mark.parametrize(
    "name, leak, seen",
    [
        ("_delta_rule", one_sequence, PACKED),
        ("_delta_rule", every_prompt, SHARED),
        pytest.param("_taps", every_tap, PACKED, marks=pytest.mark.wide),
        pytest.param("_delta_rule", one_completion, SHARED, marks=pytest.mark.wide),
        pytest.param("_rows", padding_writes, PIECES, marks=pytest.mark.wide),
        pytest.param("_rows", no_inputs, PIECES, marks=pytest.mark.wide),
    ],
)
def test_a_leak_is_seen(name, leak, seen, hidden, monkeypatch):
    monkeypatch.setattr(gated_delta_net, name, partial(leak, getattr(gated_delta_net, name)))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        seen(hidden)


# ---- the model: rows, slots and meshes


def batch_of(prompts: list[list[int]], completions: list[list[int]]) -> Batch:
    """Left-padded prompts, then right-padded completions, all of whose tokens count."""
    P, N = max(map(len, prompts)), max(map(len, completions))
    tokens, mask, counts = (np.zeros((len(prompts), P + N), kind) for kind in (np.int32, bool, np.float32))
    for row, (prompt, completion) in enumerate(zip(prompts, completions)):
        here = slice(P - len(prompt), P + len(completion))
        tokens[row, here], mask[row, here] = prompt + completion, True
        counts[row, P : P + len(completion)] = 1.0 / len(completion)
    return Batch(tokens, mask, counts)


@pytest.fixture(scope="module")
def groups() -> Batch:
    """Three prompts with two completions each, longer and shorter than the convolution; of two lengths in all."""
    rng = np.random.default_rng(4)

    def text(length: int) -> list[int]:
        return rng.integers(1, CFG.vocab_size, length).tolist()

    prompts = [prompt for prompt in (text(9), text(2), text(5)) for _ in range(2)]
    return batch_of(prompts, [text(n) for n in (7, 1, 14, 8, 11, 5)])


LAYOUTS = {
    "none": RowLayout("none"),
    "sequences": RowLayout("sequences", 1, shape=RowShape(40), rows_per_part=4),
    "prefix": RowLayout("prefix", 1, shape=RowShape(14, 2, 16), rows_per_part=4),
}


def losses(params, groups: Batch, layout: RowLayout, dtype):
    """(log-probabilities [B, T], gradient of their weighted sum)."""
    rows, packed = layout.lay_out(groups)

    @jax.jit
    def run(params, rows):
        def loss(params):
            scores = batch_scores(params, rows, cfg=CFG, temperature=1.0, dtype=dtype)
            return jnp.sum(scores.logprobs * rows.loss_weight), scores.logprobs

        return jax.grad(loss, has_aux=True)(params)

    grads, logprobs = run(params, rows)
    return packed.back(logprobs), grads


@pytest.fixture(scope="module")
def alone(groups):
    """What each sequence gives in a program of its own, in float64."""
    with jax.enable_x64(True):
        set_mesh(1, 1)
        params = jax.tree.map(np.float64, random_params(CFG))

        def loss(params, tokens, weights):
            logprobs = token_logprobs(params, tokens, jnp.ones_like(tokens, bool), cfg=CFG, dtype=jnp.float64)
            return jnp.sum(logprobs * weights), logprobs

        of_one = jax.jit(jax.grad(loss, has_aux=True))
        logprobs, total = np.zeros(groups.tokens.shape), None
        for row, mask in enumerate(groups.token_mask):
            grads, values = of_one(params, groups.tokens[row, mask][None], groups.loss_weight[row, mask][None])
            counts = groups.loss_weight[row] > 0
            logprobs[row, counts] = values[0][groups.loss_weight[row, mask] > 0]
            grads = jax.tree.map(np.asarray, grads)
            total = grads if total is None else jax.tree.map(np.add, total, grads)
        return logprobs, total


WIDE = pytest.mark.wide
# `make test` has the layouts in float64 below, and a packed one in float32 on a mesh.
IN_FLOAT32 = ["none", pytest.param("sequences", marks=WIDE), pytest.param("prefix", marks=WIDE)]


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_packed_is_alone(groups, alone, name):
    logprobs, grads = losses(random_params(CFG), groups, LAYOUTS[name], jnp.float32)
    np.testing.assert_allclose(logprobs, alone[0], atol=1e-5)
    flat, expected = hf.flatten(grads), hf.flatten(alone[1])
    for path, grad in flat.items():
        size = np.abs(expected[path]).max()
        np.testing.assert_allclose(grad / size, expected[path] / size, atol=2e-4, err_msg=path)


@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_is_alone_to_the_digits_of_float64(groups, alone, name):
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, random_params(CFG))
        _, grads = losses(params, groups, LAYOUTS[name], jnp.float64)
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-9), grads, alone[1])


@pytest.mark.parametrize("mesh", [(2, 2), pytest.param((1, 4), marks=WIDE), pytest.param((4, 1), marks=WIDE)])
def test_a_mesh_changes_nothing(groups, alone, mesh):
    set_mesh(*mesh)
    layout = RowLayout("prefix", 1, shape=RowShape(14, 2, 16), rows_per_part=1 if mesh[0] == 4 else 2)
    logprobs, grads = losses(random_params(CFG), groups, layout, jnp.float32)
    np.testing.assert_allclose(logprobs, alone[0], atol=1e-5)
    for path, grad in hf.flatten(grads).items():
        size = np.abs(hf.flatten(alone[1])[path]).max()
        np.testing.assert_allclose(grad / size, hf.flatten(alone[1])[path] / size, atol=2e-4, err_msg=path)


@pytest.mark.parametrize("mesh, slots", [pytest.param((1, 1), 1, marks=WIDE), ((1, 1), 3), ((2, 2), 16)])
def test_what_is_sampled_is_what_is_scored(mesh, slots):
    """Ragged prompts, two completions of each; slots take the next request while others run."""
    set_mesh(*mesh)
    params = random_params(CFG)
    rollout_config = RolloutConfig(num_slots=slots, chunk=4)
    generate = make_generate(CFG, GenerationConfig(10, 12), (3,), 0, rollout=rollout_config)
    prompts = [[5, 6, 7], [8] * 10, [9], [11, 12]]
    rollout = generate(params, prompts, jax.random.key(0), num_generations=2)
    scored = jax.jit(partial(token_logprobs, cfg=CFG))(params, rollout.tokens, rollout.token_mask)
    mask = rollout.completion_mask
    assert len(set(mask.sum(axis=1))) > 1, "all are of one length"
    np.testing.assert_allclose(np.asarray(scored)[mask], rollout.logprobs[mask], atol=1e-5)


def layout_of(name: str, fsdp: int) -> RowLayout:
    """As LAYOUTS, in eight rows of columns that four devices divide, too."""
    shape = {"none": None, "sequences": RowShape(48), "prefix": RowShape(16, 2, 16)}[name]
    return RowLayout(name, 1, None, shape, 8 // fsdp)


@pytest.mark.wide
@pytest.mark.parametrize("slots", [1, 3, 16])
@pytest.mark.parametrize("mesh", [(1, 4), (2, 2), (4, 1)])
def test_in_every_packing_what_is_scored_is_what_was_sampled(mesh, slots):
    set_mesh(*mesh)
    params = random_params(CFG)
    generate = make_generate(CFG, GenerationConfig(10, 12), (3,), 0, rollout=RolloutConfig(num_slots=slots, chunk=4))
    prompts = [[5, 6, 7], [8] * 10, [9], [11, 12]]
    rollout = jax.tree.map(np.asarray, generate(params, prompts, jax.random.key(0), num_generations=2))
    mask = rollout.completion_mask
    assert len(set(mask.sum(axis=1))) > 1, "all are of one length"
    batch = Batch(rollout.tokens, rollout.token_mask, mask.astype(np.float32))
    for name in LAYOUTS:
        rows, packed = layout_of(name, mesh[0]).lay_out(batch)
        scores = jax.jit(partial(batch_scores, cfg=CFG, temperature=1.0, dtype=jnp.float32))(params, rows)
        np.testing.assert_allclose(packed.back(scores.logprobs)[mask], rollout.logprobs[mask], atol=1e-5, err_msg=name)


@pytest.mark.wide
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("mesh", [(1, 4), (2, 2), (4, 1)])
def test_on_every_mesh_packed_is_alone_to_the_digits_of_float64(groups, alone, mesh, name):
    set_mesh(*mesh)
    eight = jax.tree.map(lambda x: np.concatenate([x, x[-2:]]), groups)
    eight.loss_weight[-2:] = 0  # two that count nothing, so that four devices divide the rows
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), random_params(CFG))
        logprobs, grads = losses(params, eight, layout_of(name, mesh[0]), jnp.float64)
        np.testing.assert_allclose(logprobs[: len(alone[0])], alone[0], atol=1e-9)
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-9), grads, alone[1])


def keeps_states(load, kv, prompts, *where):
    """A slot that takes the next sequence keeps the state of the one before."""
    return kv if isinstance(kv, DeltaState) else load(kv, prompts, *where)


@pytest.mark.wide
def test_a_state_that_stays_in_its_slot_is_seen(monkeypatch):
    monkeypatch.setattr(kv_cache, "load_rows", partial(keeps_states, kv_cache.load_rows))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        test_what_is_sampled_is_what_is_scored((1, 1), 3)


def test_a_completion_that_goes_on_after_an_update_draws_what_it_would_have_drawn(monkeypatch):
    """It is read again by `append`, in pieces, into slots that other sequences have left."""
    monkeypatch.setattr(engine, "APPEND_WIDTHS", (2, 4, 8))
    params = random_params(CFG)
    prompts = ragged_prompts(test_overlap.GROUPS)
    whole = test_overlap.of_cfg(make_generate, CFG)(
        params, prompts, jax.random.fold_in(test_overlap.KEY, 0), test_overlap.GENERATIONS
    )
    sampler = PartialSampler(test_overlap.of_cfg(make_sampler, CFG))
    _, after, metrics = test_overlap.carried_on(sampler, params, test_overlap.begun(), chunks=3)
    assert metrics["rollout/reread_tokens"] > 0
    resumed = rollout_of(after, prompts, GenerationConfig(PROMPT, NEW), 0, {})
    np.testing.assert_array_equal(resumed.tokens, whole.tokens)
    np.testing.assert_allclose(resumed.logprobs, whole.logprobs, atol=1e-5)


def test_a_scan_over_periods_is_layer_after_layer(groups, alone):
    rows, packed = LAYOUTS["none"].lay_out(groups)
    program = partial(batch_scores, cfg=CFG, temperature=1.0, dtype=jnp.float32, scan_layers=False)
    scores = jax.jit(program)(random_params(CFG), rows)
    np.testing.assert_allclose(packed.back(scores.logprobs), alone[0], atol=1e-5)


# ---- files


def write_model(folder, params, **more) -> None:
    hf.save_params(params, CFG, QWEN3_5, folder, "F32")
    (folder / "config.json").write_text(json.dumps(config_json(CFG, QWEN3_5) | more))


@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)])
def test_a_folder_comes_back_and_shards_read_their_slices(mesh, tmp_path):
    set_mesh(*mesh)
    params = random_params(CFG)
    write_model(tmp_path, params)
    cfg, family = read_config(tmp_path)
    assert family is QWEN3_5 and cfg.delta == NET and cfg.kinds == CFG.kinds
    jax.tree.map(np.testing.assert_array_equal, hf.load_params(tmp_path, cfg, family), params)


def test_a_larger_model_is_read_for_its_text_part(tmp_path):
    """As it is published: text_config within, names with a prefix, a vision tower and layers for further tokens."""
    params = random_params(CFG)
    write_model(tmp_path, params)
    held = hf.read_tensors(tmp_path / hf.SINGLE)
    longer = {name.replace("model.", "model.language_model.", 1): x for name, x in held.items()}
    longer |= {"mtp.fc.weight": np.ones((2, 2)), "model.visual.patch_embed.proj.weight": np.ones((2, 2))}
    hf.write_tensors(tmp_path / hf.SINGLE, longer)
    text = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "qwen3_5_text"}
    text["rope_parameters"] |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    whole = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    cfg, family = read_config(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, hf.load_params(tmp_path, cfg, family), params)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"linear_num_value_heads": 6}, "linear_num_value_heads=6 is not a multiple of linear_num_key_heads=4"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim=0; it is 1 to"),
        ({"attn_output_gate": False}, "attn_output_gate=False is not supported"),
        (
            {"layer_types": ["linear_attention"] * 4},
            "layer_types must hold 5 entries, each linear_attention or full_att",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}}, "rope_type 'yarn' is not supported"),
    ],
)
def test_what_it_does_not_compute_is_refused_with_file_and_key(change, message, tmp_path):
    write_model(tmp_path, random_params(CFG), **change)
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        read_config(tmp_path)


EVERY_PROJECTION = ".*/(q|k|v|qkv|z|b|a|o|gate|up|down)"


def test_adapters_are_by_default_on_every_large_projection():
    of_kind = adapter_weights(decoder.weights(CFG), LoraConfig(rank=2))["layers"]
    assert of_kind["delta"].keys() == {"qkv", "z", "o", "gate", "up", "down"}
    assert of_kind["global"].keys() == {"q", "k", "v", "o", "gate", "up", "down"}


def test_adapters_go_to_the_modules_of_the_files_and_come_back(tmp_path):
    lora = LoraConfig(rank=3, targets=EVERY_PROJECTION)
    adapters = jax.tree.map(
        lambda w: np.random.default_rng(5).normal(0, 1, w.shape).astype(np.float32),
        adapter_weights(decoder.weights(CFG), lora),
        is_leaf=weights.is_weight,
    )
    peft.save_adapters(adapters, CFG, QWEN3_5, lora, tmp_path, "base")
    tensors = hf.read_tensors(tmp_path / peft.TENSORS)
    module = "base_model.model.model.layers.4.linear_attn.in_proj_qkv"
    assert tensors[f"{module}.lora_A.weight"].shape == (3, 16)
    # Merged on disk or here, the fused tensor is the same.
    pair = adapters["layers"]["delta"]["qkv"]
    merged = np.einsum("dr,rkc->dkc", pair["a"][3], pair["b"][3])
    on_disk = tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]
    declared = decoder.layer_weights(CFG, "delta")["qkv"]
    np.testing.assert_allclose(hf.to_hf(merged, declared), on_disk, atol=1e-5)
    read = peft.read_adapter_config(LoraConfig(adapter=str(tmp_path)), CFG, QWEN3_5)
    jax.tree.map(np.testing.assert_array_equal, peft.load_adapters(tmp_path, CFG, QWEN3_5, read), adapters)


@pytest.mark.parametrize("storage", ["bf16", "int8", "nf4"])
def test_exponents_stay_exact_in_a_frozen_base(storage):
    stored = hf.flatten(stored_table(decoder.weights(CFG), storage))
    assert {stored[f"layers/delta/{name}"].dtype for name in ("decay", "step_bias")} == {jnp.float32}


@pytest.mark.parametrize("storage", ["int8", pytest.param("nf4", marks=pytest.mark.wide)])
def test_a_base_in_codes_computes_what_its_values_do(storage):
    """Every projection, those of the gated delta net among them, is read from its codes."""
    codes = init_stored(decoder.weights(CFG), jax.random.key(0), storage)
    assert all(weights.is_quantized(codes["layers"]["delta"][name]) for name in ("qkv", "z", "b", "a", "o"))

    def plain(weight, leaf):
        if not weights.is_quantized(leaf):
            return leaf
        return jax.vmap(partial(weights.dense, inputs=weight.inputs))(leaf)

    values = jax.tree.map(plain, decoder.weights(CFG), codes, is_leaf=weights.is_weight)
    tokens = np.arange(20)[None] % CFG.vocab_size
    np.testing.assert_allclose(logits_of(codes, CFG, tokens), logits_of(values, CFG, tokens), atol=1e-5)


# ---- what a state costs, and what it cannot do


def test_the_state_of_slots_is_counted():
    """Per slot of Qwen 3.5 0.8B: 18 layers of 16 heads of 128 x 128 in float32, and 3 inputs of 6,144 in bfloat16."""
    cfg = compose(["model=qwen3.5_0.8b", "model.weights=random"]).model.architecture
    shapes = kv_cache.cache_shapes(cfg, 1, 100, jnp.bfloat16, False, 1)
    state = 18 * (16 * 128 * 128 * 4 + 3 * 6144 * 2)
    assert kv_cache.tree_bytes(shapes) == state + 100 * 12_288
    eight = kv_cache.cache_shapes(cfg, 1, 100, jnp.bfloat16, True, 1)
    assert {x.dtype for x in jax.tree.leaves(eight[0])} == {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}


def test_fused_kernels_are_refused():
    with pytest.raises(ValueError, match="kernels=fused: they compute attention without gate.*use auto or xla"):
        check_fused(CFG, jnp.float32, "gpu", 1)


def test_a_turn_that_ends_with_a_stop_text_is_never_taken_back():
    """Chunks are of one token there: a state cannot be rewound to the middle of one."""
    spec = SamplerSpec(CFG, GenerationConfig(4, 8), (1,), 0, jnp.float32, chunk=8)
    assert longest_chunk(spec) == 1


# ---- transformers


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(4))
def test_a_drawn_model_is_that_of_transformers(seed, tmp_path):
    """Logits, greedy continuations of ragged prompts, and the folder that we write back."""
    torch = pytest.importorskip("torch", reason="needs the parity extra")
    transformers = pytest.importorskip("transformers", reason="needs the parity extra")
    if not hasattr(transformers, "Qwen3_5ForCausalLM"):
        pytest.skip("transformers is older than Qwen 3.5")
    model = drawn_model(np.random.default_rng(seed), torch, transformers)
    model.save_pretrained(tmp_path / "theirs")
    cfg, family = read_config(tmp_path / "theirs")
    assert family is QWEN3_5
    params = hf.load_params(tmp_path / "theirs", cfg, family)

    # Longer than two chunks.
    tokens = np.random.default_rng(0).integers(0, 97, (2, 150))
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.numpy()
    assert np.abs(theirs).max() > 1
    np.testing.assert_allclose(logits_of(params, cfg, tokens), theirs, atol=1e-4)

    prompts = [np.random.default_rng(n).integers(1, 97, n).tolist() for n in (20, 1, 70, 3, 9)]
    config = GenerationConfig(70, 24)
    ours = make_generate(cfg, config, (-1,), 0, rollout=RolloutConfig(num_slots=2, chunk=5))(
        params, prompts, jax.random.key(0), temperature=0.0
    )
    for row, real in zip(ours.tokens, ours.token_mask):
        asked = torch.tensor(row[:70][real[:70]])[None]
        all_of_it = torch.ones_like(asked)
        continued = model.generate(asked, attention_mask=all_of_it, max_new_tokens=24, min_new_tokens=24)
        np.testing.assert_array_equal(row[real], continued[0].numpy())

    (tmp_path / "ours").mkdir()
    hf.save_params(params, cfg, family, tmp_path / "ours", hf.stored_dtypes(tmp_path / "theirs", family))
    (tmp_path / "ours" / "config.json").write_text(json.dumps(config_json(cfg, family)))
    again = type(model).from_pretrained(tmp_path / "ours", attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(torch.tensor(tokens)).logits, torch.tensor(theirs), rtol=0, atol=0)


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(3))
def test_in_bfloat16_logits_are_no_further_off_than_those_of_transformers(seed, tmp_path):
    """From what transformers computes in float64 with the same weights, on average over two rows of 150 tokens."""
    torch = pytest.importorskip("torch", reason="needs the parity extra")
    transformers = pytest.importorskip("transformers", reason="needs the parity extra")
    model = drawn_model(np.random.default_rng(seed), torch, transformers).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    cfg, family = read_config(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 97, (2, 150))
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.double().numpy()
        exact = model.double()(torch.tensor(tokens)).logits.numpy()
    ours = logits_of(hf.load_params(tmp_path, cfg, family), cfg, tokens, jnp.bfloat16)
    errors = [np.sqrt(np.mean((np.float64(logits) - exact) ** 2)) for logits in (ours, theirs)]
    assert exact.std() > 0.3 and errors[1] > 1e-3
    assert errors[0] <= errors[1], errors


@pytest.mark.parity
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_peft_says_the_same_with_adapters_of_delta_layers(is_wrapped, tmp_path):
    """Ours read by PEFT, PEFT's read here, and merged; of the text model, and of the larger one around it."""
    torch = pytest.importorskip("torch", reason="needs the parity extra")
    transformers = pytest.importorskip("transformers", reason="needs the parity extra")
    library = pytest.importorskip("peft", reason="needs the parity extra")
    model = drawn_model(np.random.default_rng(2), torch, transformers)
    if is_wrapped:
        vision = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "num_position_embeddings": 16}
        vision |= {"out_hidden_size": model.config.hidden_size, "patch_size": 4}
        text = model.config.to_dict()
        tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
        config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, **tied)
        config._attn_implementation = "eager"
        whole = transformers.Qwen3_5ForConditionalGeneration(config).eval()
        whole.model.language_model.load_state_dict(model.model.state_dict())
        whole.lm_head.load_state_dict(model.lm_head.state_dict())
        model = whole
    model.save_pretrained(tmp_path / "base")
    cfg, family = read_config(tmp_path / "base")
    assert set(cfg.kinds) == {"delta", "global"}
    base = hf.load_params(tmp_path / "base", cfg, family)
    tokens = np.random.default_rng(0).integers(0, 97, (2, 80))

    def says(model) -> np.ndarray:
        with torch.no_grad():
            return model.eval()(torch.tensor(tokens)).logits.numpy()

    # Ours, read by PEFT, and merged.
    lora = LoraConfig(rank=4, alpha=12.0, targets=EVERY_PROJECTION)
    adapters = jax.tree.map(
        lambda w: np.random.default_rng(5).normal(0, 0.2, w.shape).astype(np.float32),
        adapter_weights(decoder.weights(cfg), lora),
        is_leaf=weights.is_weight,
    )
    acting = attach(base, adapters, lora)
    ours = logits_of(acting, cfg, tokens)
    assert np.abs(ours - logits_of(base, cfg, tokens)).max() > 0.1
    (tmp_path / "ours").mkdir()
    peft.save_adapters(adapters, cfg, family, lora, tmp_path / "ours", "base", is_wrapped=is_wrapped)
    np.testing.assert_allclose(says(library.PeftModel.from_pretrained(model, tmp_path / "ours")), ours, atol=2e-4)
    (tmp_path / "merged").mkdir()
    hf.save_params(acting, cfg, family, tmp_path / "merged", "F32")
    (tmp_path / "merged" / "config.json").write_text(json.dumps(config_json(cfg, family)))
    merged = transformers.Qwen3_5ForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    np.testing.assert_allclose(says(merged), ours, atol=2e-4)

    # PEFT's, read here: two projections of delta layers, and one of attention.
    fresh = type(model).from_pretrained(tmp_path / "base", attn_implementation="eager", dtype=torch.float32)
    modules = r".*layers\.\d+\.(self_attn\.q_proj|linear_attn\.(in_proj_qkv|out_proj))"
    adapted = library.get_peft_model(fresh, library.LoraConfig(r=3, lora_alpha=6, target_modules=modules))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    adapted.save_pretrained(tmp_path / "theirs")
    read = peft.read_adapter_config(LoraConfig(adapter=str(tmp_path / "theirs")), cfg, family)
    loaded = peft.load_adapters(tmp_path / "theirs", cfg, family, read)
    assert {stack: set(of) for stack, of in loaded["layers"].items()} == {"delta": {"qkv", "o"}, "global": {"q"}}
    np.testing.assert_allclose(logits_of(attach(base, loaded, read), cfg, tokens), says(adapted), atol=2e-4)


def drawn_model(rng: np.random.Generator, torch, transformers):
    """A tiny model of transformers' class with opinions, of drawn sizes and kinds of layers."""

    def one_of(*choices):
        return choices[rng.integers(len(choices))]

    num_layers = one_of(3, 4, 6, 9)
    key_heads = one_of(1, 2, 3)
    kinds = [one_of("linear_attention", "full_attention") for _ in range(num_layers)]
    config = transformers.Qwen3_5TextConfig(
        vocab_size=97,
        hidden_size=one_of(24, 40),
        intermediate_size=one_of(32, 56),
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=one_of(1, 2, 4),
        head_dim=one_of(16, 32),
        linear_num_key_heads=key_heads,
        linear_num_value_heads=key_heads * one_of(1, 2, 3),
        linear_key_head_dim=one_of(8, 12),
        linear_value_head_dim=one_of(8, 20),
        linear_conv_kernel_dim=one_of(2, 4),
        layer_types=one_of(None, kinds),
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": one_of(0.25, 0.5, 1.0)},
        tie_word_embeddings=one_of(True, False),
        rms_norm_eps=CFG.norm_eps,
        max_position_embeddings=256,
    )
    torch.manual_seed(int(rng.integers(100)))
    config._attn_implementation = "eager"
    model = transformers.Qwen3_5ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = 1.0 if name.endswith(("linear_attn.norm.weight", "dt_bias")) else 0.0
            wide = 0.3 if "norm" in name else 1.5 if "A_log" in name else 0.15
            parameter.copy_(torch.randn_like(parameter) * wide + around)
    model.generation_config.update(eos_token_id=None, pad_token_id=0, do_sample=False)
    return model
