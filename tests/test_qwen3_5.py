"""Qwen 3.5: the gated delta net against a loop over tokens, in rows, slots and meshes, and the model as transformers has it."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_overlap
from conftest import NEW, PROMPT, logits_of, ragged_prompts, random_params, set_mesh
from model_checks import check_sampled, groups, layout_of, losses, publish, sampled, write_model

from tunix_lite.learner.policy import token_logprobs
from tunix_lite.models import attention, decoder, gated_delta_net, hf, weights
from tunix_lite.models.architecture import Architecture, DeltaNet
from tunix_lite.models.families import QWEN3_5, config_json, read_config
from tunix_lite.models.gated_delta_net import DeltaState
from tunix_lite.models.layer_kind import Surroundings
from tunix_lite.models.lora import LoraConfig, adapter_weights
from tunix_lite.models.quantize import init_stored, stored_table
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout import engine
from tunix_lite.rollout.generate import make_generate, make_sampler
from tunix_lite.rollout.partial import PartialSampler, rollout_of
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.settings.compose import compose

sys.path.append(str(Path(__file__).parent / "eight_devices"))
from test_exactness import delta_net

NET = DeltaNet(num_key_heads=4, num_value_heads=8, key_dim=8, value_dim=6)
CFG = Architecture(
    *(48, 3, 16, 4, 2, 16, 24),
    pattern=("delta", "global"),
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
TWO = replace(CFG, num_layers=2)


# ---- one layer against a loop over tokens


def layer_weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    made = {name: rng.normal(0, 0.5, w.shape) for name, w in gated_delta_net.delta_weights(CFG).items()}
    # Half of the heads forget within a few tokens, the others keep for hundreds.
    made["decay"] = np.tile([-4.0, 0.5, -3.0, 1.0], 2)
    return made


formula = jax.jit(partial(delta_net, net=NET, eps=CFG.norm_eps))


def by_token(x: np.ndarray, w: dict[str, np.ndarray]) -> np.ndarray:
    """One sequence [T, D] through the layer, token after token, in float64. What follows a token changes nothing in it,
    so one program reads all lengths."""
    with jax.enable_x64(True):
        return np.asarray(formula(np.pad(np.float64(x), ((0, 256 - len(x)), (0, 0))), w))[: len(x)]


def mixed(x, w, sequences: attention.AttentionMeta, state: DeltaState | None = None, dtype=np.float32):
    """(what the layer adds, its state) for rows x [B, T, D]."""

    @jax.jit
    def run(x, w, sequences, state):
        around = Surroundings(decoder.Products(), None, None, sequences=sequences, state=state)
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
    around = Surroundings(decoder.Products(), None, None, sequences=in_rows([40, 24, 30, 10]))

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
    """In float64, to its digits: two rows of 70 and 3 tokens, right-padded; 10 and none more; then single tokens of the
    first row. Its state is that of all of its tokens in chunks."""
    x, w = hidden[:, :85], layer_weights()
    state, lengths, got = None, np.zeros(2, int), [[], []]
    with jax.enable_x64(True):
        for width, counts in [(80, (70, 3)), (16, (10, 0)), *[(1, (1, 0))] * 5]:
            part = np.ones((2, width, CFG.embed_dim))
            for row, n in enumerate(counts):
                part[row, :n] = x[row, lengths[row] : lengths[row] + n]
            is_token = np.arange(width) < np.array(counts)[:, None]
            out, state = mixed(part, w, attention.AttentionMeta(*ids(is_token, is_token)), state, np.float64)
            for row, n in enumerate(counts):
                got[row] += list(np.asarray(out)[row, :n])
            lengths += counts
        _, in_chunks = mixed(x[:1], w, in_rows([85]), dtype=np.float64)
        first = jax.tree.map(lambda s: s[:1], state)
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-12), first, in_chunks)
    for row in range(2):
        np.testing.assert_allclose(got[row], by_token(x[row], w)[: lengths[row]], atol=1e-12)


def test_the_gradient_is_the_slope_of_the_loop():
    """Along a drawn direction of weights and hidden states, by central differences in float64."""
    rng, w = np.random.default_rng(6), layer_weights()
    meta, ends = in_rows(EDGES[0]), np.cumsum(EDGES[0])
    x, weight = rng.normal(0, 1, (2, 1, meta.segments.shape[1], CFG.embed_dim))
    ways = jax.tree.map(lambda v: rng.normal(0, 1, v.shape), (x, w))

    def loss_of_loop(x, w):
        return sum(
            np.sum(by_token(x[0, end - n : end], w) * weight[0, end - n : end]) for n, end in zip(EDGES[0], ends)
        )

    def along(step):
        return jax.tree.map(lambda v, way: v + step * way, (x, w), ways)

    with jax.enable_x64(True):

        def loss(x, w):
            out, _ = gated_delta_net.mix(x, w, CFG, Surroundings(decoder.Products(), None, None, sequences=meta))
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


# ---- the model: rows, slots and meshes


@pytest.fixture(scope="module")
def alone():
    """What each sequence gives in a program of its own, in float64."""
    with jax.enable_x64(True):
        set_mesh(1, 1)
        params, batch = jax.tree.map(np.float64, random_params(TWO)), groups()

        def loss(params, tokens, weights):
            logprobs = token_logprobs(params, tokens, jnp.ones_like(tokens, bool), cfg=TWO, dtype=jnp.float64)
            return jnp.sum(logprobs * weights), logprobs

        of_one = jax.jit(jax.grad(loss, has_aux=True))
        logprobs, each = np.zeros(batch.tokens.shape), []
        for row, mask in enumerate(batch.token_mask):
            grads, values = of_one(params, batch.tokens[row, mask][None], batch.loss_weight[row, mask][None])
            logprobs[row, mask] = values[0]
            each.append(jax.tree.map(np.asarray, grads))
        return np.where(batch.loss_weight > 0, logprobs, 0), jax.tree.map(lambda *grads: sum(grads), *each)


# The tests of a layer above have the same of it; test_every_family.py has the other meshes, packings and slots.
@pytest.mark.wide
def test_packed_is_alone_to_the_digits_of_float64(alone):
    with jax.enable_x64(True):
        logprobs, grads = losses(random_params(TWO), groups(), layout_of("sequences"), jnp.float64, TWO)
        np.testing.assert_allclose(logprobs, alone[0], atol=1e-9)
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-9), grads, alone[1])


def test_what_is_sampled_is_what_is_scored():
    params = random_params(TWO)
    rollout = sampled(TWO, params, eos=(3, 5, 7, 11, 13))
    check_sampled(rollout, jax.jit(partial(token_logprobs, cfg=TWO))(params, rollout.tokens, rollout.token_mask))


@pytest.mark.wide  # test_overlap.py has a plain model, and chunks of a delta net go on from each other above
def test_a_completion_that_goes_on_after_an_update_draws_what_it_would_have_drawn(monkeypatch):
    """It is read again by `append`, in pieces, into slots that other sequences have left."""
    monkeypatch.setattr(engine, "APPEND_WIDTHS", (2, 4, 8))
    params = random_params(TWO)
    prompts = ragged_prompts(test_overlap.GROUPS)
    whole = test_overlap.of_cfg(make_generate, TWO)(
        params, prompts, jax.random.fold_in(test_overlap.KEY, 0), test_overlap.GENERATIONS
    )
    sampler = PartialSampler(test_overlap.of_cfg(make_sampler, TWO))
    _, after, metrics = test_overlap.carried_on(sampler, params, test_overlap.begun(), chunks=2)
    assert metrics["rollout/reread_tokens"] > 0
    resumed = rollout_of(after, prompts, GenerationConfig(PROMPT, NEW), 0, {})
    np.testing.assert_array_equal(resumed.tokens, whole.tokens)
    np.testing.assert_allclose(resumed.logprobs, whole.logprobs, atol=1e-5)


# ---- files


@pytest.mark.parametrize("is_wrapped", [pytest.param(False, marks=pytest.mark.wide), True])
def test_a_folder_comes_back_and_shards_read_their_slices(is_wrapped, tmp_path):
    """As it is published, too: names with a prefix, a vision tower and layers for further tokens."""
    set_mesh(2, 2)
    params = random_params(CFG)
    write_model(tmp_path, params, CFG, QWEN3_5)
    if is_wrapped:
        others = ("mtp.fc.weight", "model.visual.patch_embed.proj.weight")
        publish(tmp_path, others, model_type="qwen3_5", tie_word_embeddings=False)
        config = json.loads((tmp_path / "config.json").read_text())
        config["text_config"]["rope_parameters"] |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
        (tmp_path / "config.json").write_text(json.dumps(config))
    cfg, family = read_config(tmp_path)
    assert family is QWEN3_5 and cfg.delta == NET and cfg.kinds == CFG.kinds
    jax.tree.map(np.testing.assert_array_equal, hf.load_params(tmp_path, cfg, family), params)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"linear_num_value_heads": 6}, "linear_num_value_heads=6 is not a multiple of linear_num_key_heads=4"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim=0 must be above 0"),
        ({"attn_output_gate": False}, "attn_output_gate=False is not supported"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types must hold 3 entries, each linear_attention or full"),
    ],
)
def test_what_it_does_not_compute_is_refused_with_file_and_key(change, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_json(CFG, QWEN3_5) | change))
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        read_config(tmp_path)


def test_adapters_are_by_default_on_every_large_projection():
    of_kind = adapter_weights(decoder.weights(CFG), LoraConfig(rank=2))["layers"]
    assert of_kind["delta"].keys() == {"qkv", "z", "o", "gate", "up", "down"}
    assert of_kind["global"].keys() == {"q", "k", "v", "o", "gate", "up", "down"}


@pytest.mark.parametrize("storage", ["bf16", "int8", "nf4"])
def test_exponents_stay_exact_in_a_frozen_base(storage):
    stored = hf.flatten(stored_table(decoder.weights(CFG), storage))
    assert {stored[f"layers/delta/{name}"].dtype for name in ("decay", "step_bias")} == {jnp.float32}


@pytest.mark.parametrize("storage", ["int8", pytest.param("nf4", marks=pytest.mark.wide)])
def test_a_base_in_codes_computes_what_its_values_do(storage):
    """Every projection, those of the gated delta net among them, is read from its codes."""
    codes = init_stored(decoder.weights(TWO), jax.random.key(0), storage)
    assert all(weights.is_quantized(codes["layers"]["delta"][name]) for name in ("qkv", "z", "b", "a", "o"))

    def plain(weight, leaf):
        if not weights.is_quantized(leaf):
            return leaf
        return jax.vmap(partial(weights.dense, inputs=weight.inputs))(leaf)

    values = jax.jit(partial(jax.tree.map, plain, decoder.weights(TWO)))(codes)
    tokens = np.arange(20)[None] % TWO.vocab_size
    np.testing.assert_allclose(logits_of(codes, TWO, tokens), logits_of(values, TWO, tokens), atol=1e-5)


# ---- what a state costs, and what it cannot do


def test_the_state_of_slots_is_counted():
    """Per slot of Qwen 3.5 0.8B: 18 layers of 16 heads of 128 x 128 in float32, and 3 inputs of 6,144 in bfloat16."""
    cfg = compose(["model=qwen3.5_0.8b", "model.weights=random"]).model.architecture
    shapes = kv_cache.cache_shapes(cfg, 1, 100, jnp.bfloat16, False, 1)
    state = 18 * (16 * 128 * 128 * 4 + 3 * 6144 * 2)
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)) == state + 100 * 12_288
    eight = kv_cache.cache_shapes(cfg, 1, 100, jnp.bfloat16, True, 1)
    assert {x.dtype for x in jax.tree.leaves(eight[0])} == {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}


def test_a_turn_that_ends_with_a_stop_text_is_never_taken_back():
    """Chunks are of one token there: a state cannot be rewound to the middle of one."""
    sample = make_sampler(CFG, GenerationConfig(4, 8, stop=("\n",)), (1,), 0, rollout=RolloutConfig(chunk=8))
    assert sample.of_turns(None).programs.spec.chunk == 1
