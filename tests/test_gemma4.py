"""Gemma 4 against its formulas in float64: layers of two shapes, keys and values that later layers read, per-layer inputs."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_overlap
from conftest import NEW, PROMPT, ragged_prompts, random_params, set_mesh
from jax.sharding import NamedSharding, PartitionSpec
from model_checks import check_sampled, groups, layout_of, losses, publish, random_adapters, sampled, write_model

from tunix_lite.learner.optim import AdafactorConfig, LionConfig, MuonConfig, OptimizerConfig, SGDConfig, make_optimizer
from tunix_lite.models import decoder, hf, peft, weights
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.families import GEMMA4, GEMMA4_UNIFIED, config_json, read_config
from tunix_lite.models.lora import LoraConfig, adapter_weights, attach
from tunix_lite.models.quantize import stored_table
from tunix_lite.parallel.collectives import collectives
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout import engine
from tunix_lite.rollout.generate import make_sampler
from tunix_lite.rollout.partial import PartialSampler, rollout_of
from tunix_lite.rollout.settings import GenerationConfig
from tunix_lite.settings.compose import compose

# Kinds L G L G | L G: the last two read layers 2 and 3, and those from 2 on stand outside of loops.
CFG = Architecture(
    vocab_size=48,
    num_layers=6,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=24,
    pattern=("local", "global"),
    window=5,
    query_scale=1,
    norm_eps=1e-3,
    norm_plus_one=False,
    final_softcap=3.0,
    global_head_dim=16,
    global_kv_heads=1,
    global_rope_share=0.25,
    keys_as_values=True,
    value_norm=True,
    kv_readers=2,
    wide_readers=True,
    per_layer_dim=6,
    layer_scalar=True,
)


def drawn(cfg: Architecture = CFG, seed: int = 0) -> dict:
    """Weights with opinions, in float64 on the host; norms and scalars of layers are around 1. Those of queries are less,
    or sharp attention would make digits of rounding large."""

    def with_one(path, x):
        name = path[-1].key
        return np.asarray(x, np.float64) + (0.4 if name == "q_norm" else name.endswith(("norm", "scalar")))

    return jax.tree_util.tree_map_with_path(with_one, random_params(cfg, seed, scale=0.2))


@pytest.fixture(scope="module")
def params() -> dict:
    set_mesh(1, 1)
    return drawn()


def in_float32(params):
    return jax.tree.map(jnp.float32, params)


# ---- the formulas, for one sequence, without anything that is shared or stacked


def reference(params: dict, tokens: np.ndarray, cfg: Architecture = CFG) -> np.ndarray:
    """The logits [T, V] of one sequence."""

    def rms(x, scale=1.0):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + cfg.norm_eps) * scale

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def turned(x, kind):
        half = x.shape[-1] // 2
        frequency = (1e4 if kind == "local" else 1e6) ** (-np.arange(half) / half)
        if kind == "global":
            frequency[half // 4 :] = 0
        angle = np.arange(len(x))[:, None, None] * frequency
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)

    kinds = [cfg.pattern[i % len(cfg.pattern)] for i in range(cfg.num_layers)]
    first_reader = cfg.num_layers - cfg.kv_readers
    T, P = len(tokens), cfg.per_layer_dim
    t, s = np.ogrid[:T, :T]
    x = params["embed"][tokens] * np.sqrt(cfg.embed_dim)
    own = params["per_layer"]
    rows = own["table"][tokens].reshape(T, cfg.num_layers, P) * np.sqrt(P)
    context = rms(np.einsum("td,dlp->tlp", x, own["project"]) / np.sqrt(cfg.embed_dim), own["norm"])
    inputs = (context + rows) / np.sqrt(2)
    num_of_stack, shared = {}, {}
    for i, kind in enumerate(kinds):
        is_reader = i >= first_reader
        stack = f"{kind}_reader" if is_reader else kind
        number = num_of_stack[stack] = num_of_stack.get(stack, -1) + 1
        w = {name: stacked[number] for name, stacked in params["layers"][stack].items()}
        normed = rms(x, w["attn_norm"])
        q = turned(rms(np.einsum("td,dnh->tnh", normed, w["q"]), w["q_norm"]), kind)
        if not is_reader:
            k = np.einsum("td,dkh->tkh", normed, w["k"])
            v = np.einsum("td,dkh->tkh", normed, w["v"]) if kind == "local" else k
            shared[kind] = turned(rms(k, w["k_norm"]), kind), rms(v)
        k, v = (np.repeat(x, cfg.num_heads // x.shape[1], axis=1) for x in shared[kind])
        seen = (s <= t) & ((t - s < cfg.window) if kind == "local" else True)
        scores = np.where(seen, np.einsum("tnh,snh->nts", q, k), -np.inf)
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        attended = np.einsum("nts,snh->tnh", probs, v)
        x = x + rms(np.einsum("tnh,nhd->td", attended, w["o"]), w["attn_post_norm"])
        normed = rms(x, w["mlp_norm"])
        x = x + rms(gelu(normed @ w["gate"]) * (normed @ w["up"]) @ w["down"], w["mlp_post_norm"])
        x = x + rms(gelu(x @ w["per_layer_gate"]) * inputs[:, i] @ w["per_layer_out"], w["per_layer_norm"])
        x = x * w["layer_scalar"]
    logits = rms(x, params["final_norm"]) @ params["embed"].T
    return cfg.final_softcap * np.tanh(logits / cfg.final_softcap)


def reference_logprobs(params: dict, tokens: np.ndarray) -> np.ndarray:
    """log p of each token given those before, [T]; 0 for the first."""
    logits = reference(params, tokens)[:-1]
    shifted = logits - logits.max(-1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return np.concatenate([[0.0], log_probs[np.arange(len(tokens) - 1), tokens[1:]]])


def by_formulas(params: dict, tokens: np.ndarray, token_mask: np.ndarray) -> np.ndarray:
    """The log-probabilities [B, T] of rows, each alone."""
    found = np.zeros(tokens.shape)
    for row, mask in enumerate(token_mask):
        found[row, mask] = reference_logprobs(params, tokens[row, mask])
    return found


# ---- rows: packed is alone, and gradients reach what is shared


@pytest.fixture(scope="module")
def alone(params) -> np.ndarray:
    """The log-probabilities of the tokens that count, [B, T]."""
    batch = groups()
    return np.where(batch.loss_weight > 0, by_formulas(params, batch.tokens, batch.token_mask), 0)


@pytest.fixture(scope="module")
def exact(params):
    """The same of rows in which completions share their prompt, in float64, and the gradient of their weighted sum; the
    backward pass computes each layer again."""
    set_mesh(1, 1)
    with jax.enable_x64(True):
        return losses(params, groups(), layout_of("prefix"), jnp.float64, CFG, remat="block")


def test_rows_with_shared_prompts_are_what_the_formulas_give(exact, alone):
    assert np.abs(alone).max() > 3
    np.testing.assert_allclose(exact[0], alone, atol=1e-10)


# Own keys and values of layers that others read, of one that none reads, and what readers have.
MOVED = {
    "layers/local/k": 1,
    "layers/local/v": 1,
    "layers/local/k_norm": 1,
    "layers/global/k": 1,
    "layers/global/q": 0,
    "layers/local_reader/q": 0,
    "layers/global_reader/down": 0,
    "per_layer/table": None,
    "per_layer/project": None,
    "embed": None,
}


def test_gradients_are_the_slopes_of_the_formulas(params, exact):
    """Along random directions, by differences of the loss."""
    batch, grads = groups(), exact[1]

    def loss(moved):
        return (by_formulas(moved, batch.tokens[:6], batch.token_mask[:6]) * batch.loss_weight[:6]).sum()

    rng = np.random.default_rng(7)
    flat = hf.flatten(params)
    for path, layer in MOVED.items():
        direction = np.zeros(flat[path].shape)
        part = direction if layer is None else direction[layer]
        part[...] = rng.normal(0, 1, part.shape)

        def at(step, path=path, direction=direction):
            moved = flat | {path: flat[path] + step * direction}
            return loss(weights.traverse_util.unflatten_dict(moved, sep="/"))

        slope = (at(1e-6) - at(-1e-6)) / 2e-6
        np.testing.assert_allclose((hf.flatten(grads)[path] * direction).sum(), slope, rtol=1e-6, err_msg=path)


def on_mesh(params: dict) -> dict:
    return jax.tree.map(jax.device_put, in_float32(params), weights.shardings(decoder.weights(CFG)))


def test_rows_of_the_inputs_are_looked_up_and_their_table_is_never_gathered():
    """Neither forward nor backward: what crosses the mesh are the rows of the tokens."""
    mesh = set_mesh(2, 2)
    cfg = replace(CFG, vocab_size=4096)
    table = decoder.weights(cfg)["per_layer"]
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    shapes = (weights.shapes(table), jax.ShapeDtypeStruct((8, 12), jnp.int32, sharding=rows))
    hidden = jax.ShapeDtypeStruct((8, 12, cfg.embed_dim), jnp.float32, sharding=rows)

    def total(w, tokens, hidden):
        return jnp.sum(decoder.per_layer_inputs(w, cfg, tokens, hidden) ** 2)

    compiled = jax.jit(jax.grad(total), out_shardings=weights.shardings(table)).lower(*shapes, hidden).compile()
    sent = [one.num_bytes for one in collectives(compiled.as_text(), dict(mesh.shape))]
    in_rows = 4 * 8 * 12 * cfg.num_layers * cfg.per_layer_dim
    assert sent and max(sent) <= in_rows < 4 * weights.num_params(table["table"]) / 40


# ---- sampling


def test_what_is_sampled_is_what_the_formulas_score(params):
    rollout = sampled(CFG, in_float32(params), 3, (3, 5, 7, 11))
    check_sampled(rollout, by_formulas(params, rollout.tokens, rollout.token_mask))


EVERY_PROJECTION = ".*/(q|k|v|o|gate|up|down|per_layer_gate|per_layer_out|project)"


def test_adapters_on_all_that_docs_name_sample_what_the_formulas_score(params):
    """Those of layers are merged on a CPU; that of `project`, which no layer has, stays beside its base."""
    lora = LoraConfig(rank=2, targets=EVERY_PROJECTION)
    adapters = jax.tree.map(np.float64, random_adapters(CFG, lora, 0.05))

    def added(base, own):
        if not isinstance(own, dict):
            return base
        if "a" in own:  # layers first, where there are any; then inputs, rank, outputs
            stacked = own["a"].ndim + own["b"].ndim > base.ndim + 2
            count = len(base) if stacked else 1
            a, b = own["a"].reshape(count, -1, 2), own["b"].reshape(count, 2, -1)
            return base + lora.alpha / 2 * (a @ b).reshape(base.shape)
        return {name: added(x, own.get(name)) for name, x in base.items()}

    rollout = sampled(CFG, attach(on_mesh(params), in_float32(adapters), lora), 4)
    check_sampled(rollout, by_formulas(added(params, adapters), rollout.tokens, rollout.token_mask))


def test_a_completion_that_goes_on_after_an_update_is_read_again_by_its_readers(params, monkeypatch):
    """In pieces, beside what the cache of their source holds."""
    monkeypatch.setattr(engine, "APPEND_WIDTHS", (2, 4, 8))
    prompts = ragged_prompts(test_overlap.GROUPS)
    sampler = PartialSampler(test_overlap.of_cfg(make_sampler, CFG))
    _, after, metrics = test_overlap.carried_on(sampler, in_float32(params), test_overlap.begun(), chunks=3)
    assert metrics["rollout/reread_tokens"] > 0
    resumed = rollout_of(after, prompts, GenerationConfig(PROMPT, NEW), 0, {})
    check_sampled(resumed, by_formulas(params, resumed.tokens, resumed.token_mask))


def test_readers_have_no_cache_and_a_slot_is_what_the_note_counts():
    """Bytes in bfloat16: of E2B 12 local layers of 512 columns and 3 global ones; of 31B 50 of 1,024 and 10."""
    for name, fixed, per_token in (
        ("e2b", 6 * 2**20, 6144),
        ("12b", 320 * 2**20, 16_384),
        ("31b", 800 * 2**20, 81_920),
    ):
        cfg = compose([f"model=gemma4_{name}", "model.weights=random"]).model.architecture
        shapes = kv_cache.cache_shapes(cfg, 1, 2000, jnp.bfloat16, False, 1)
        assert sum(layer is None for layer in shapes) == cfg.kv_readers
        assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)) == fixed + 2000 * per_token


# ---- files


@pytest.mark.parametrize("is_wrapped", [pytest.param(False, marks=pytest.mark.wide), True])
def test_a_folder_comes_back_and_shards_read_their_slices(is_wrapped, tmp_path):
    """As it is published, too: names with a prefix, towers, and weights that no layer reads."""
    set_mesh(2, 2)
    params = random_params(CFG)
    write_model(tmp_path, params, CFG, GEMMA4)
    others = [f"model.{part}.x.weight" for part in ("vision_tower", "embed_vision", "audio_tower")]
    unread = [f"model.language_model.layers.4.self_attn.{x}.weight" for x in ("k_proj", "v_proj", "k_norm")]
    if is_wrapped:
        publish(tmp_path, others + unread, model_type="gemma4", audio_config=None)
    cfg, family = read_config(tmp_path)
    assert family is GEMMA4 and cfg == replace(CFG, max_positions=cfg.max_positions)
    jax.tree.map(np.testing.assert_array_equal, hf.load_params(tmp_path, cfg, family), params)
    # A layer that others read needs its keys.
    held = hf.read_tensors(tmp_path / hf.SINGLE)
    hf.write_tensors(tmp_path / hf.SINGLE, {name: x for name, x in held.items() if "layers.2.self_attn.k" not in name})
    with pytest.raises(ValueError, match=r"missing: model.layers.2.self_attn.k_proj.weight \[16, 16\]"):
        hf.check_weights(tmp_path, cfg, family)


def test_shapes_by_number_of_layer_are_shapes_by_kind(tmp_path):
    """transformers writes per_layer_config in place of global_head_dim and num_global_key_value_heads."""
    config = config_json(CFG, GEMMA4)
    own = {"head_dim": config.pop("global_head_dim"), "num_key_value_heads": config.pop("num_global_key_value_heads")}
    for numbers in ("135", ("01", "03", "05")):
        config["per_layer_config"] = dict.fromkeys(numbers, own)
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert read_config(tmp_path)[0] == CFG


def test_a_file_without_its_usual_values_has_them(tmp_path):
    """Of 12B, whose text part is of another type."""
    cfg = compose(["model=gemma4_12b"]).model.architecture
    config = {
        **{"model_type": "gemma4_unified_text", "hidden_size": 3840, "intermediate_size": 15360},
        **{"num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "attention_k_eq_v": True},
        **{"num_global_key_value_heads": 1, "final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path) == (replace(cfg, pattern=cfg.pattern), GEMMA4_UNIFIED)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"enable_moe_block": True}, "num_experts=None; it is a finite int"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers=6: each of them needs a layer of its kind before them"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 3}, "layer_types: the last layer must be full_att"),
        ({"per_layer_config": {"1": {"head_dim": 16}}}, "per_layer_config must have the same for each layer with"),
        (
            {"per_layer_config": {i: {"sliding_window": 16} for i in "135"}},
            "per_layer_config.1: 'sliding_window' is not supported",
        ),
        ({"num_global_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_global_key_value_heads=3"),
        ({"layer_types": [["full_attention"]] * 6}, "layer_types must hold 6 entries"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": 5}},
            "rope_parameters.sliding_attention=5; it is an",
        ),
    ],
)
def test_what_it_does_not_compute_is_refused_with_file_and_key(change, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_json(CFG, GEMMA4) | change))
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        read_config(tmp_path)


def test_a_bias_is_not_for_layers_without_keys():
    with pytest.raises(ValueError, match="qkv_bias=true has a bias for keys and values"):
        replace(CFG, qkv_bias=True)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_adapters_go_to_the_modules_of_the_files_and_come_back(is_wrapped, tmp_path):
    """Those of layers without keys and values, and of the per-layer inputs, among them."""
    lora = LoraConfig(rank=3, targets=EVERY_PROJECTION)
    adapters = random_adapters(CFG, lora)
    peft.save_adapters(adapters, CFG, GEMMA4, lora, tmp_path, "base", is_wrapped)
    tensors = hf.read_tensors(tmp_path / peft.TENSORS)
    within = "base_model.model.model." + ("language_model." if is_wrapped else "")
    assert tensors[f"{within}layers.4.mlp.gate_proj.lora_B.weight"].shape == (48, 3)
    assert tensors[f"{within}per_layer_model_projection.lora_B.weight"].shape == (36, 3)
    assert f"{within}layers.4.self_attn.k_proj.lora_B.weight" not in tensors
    read = peft.read_adapter_config(LoraConfig(adapter=str(tmp_path)), CFG, GEMMA4)
    jax.tree.map(np.testing.assert_array_equal, peft.load_adapters(tmp_path, CFG, GEMMA4, read), adapters)


def test_default_adapters_leave_per_layer_inputs_frozen():
    adapters = hf.flatten(adapter_weights(decoder.weights(CFG), LoraConfig(rank=2)))
    assert {path.split("/")[-2] for path in adapters} == {"q", "k", "v", "o", "gate", "up", "down"}
    with pytest.raises(ValueError, match="per_layer/table, which is not a projection"):
        adapter_weights(decoder.weights(CFG), LoraConfig(rank=2, targets="per_layer/.*"))


def test_dropout_reaches_an_adapter_that_no_layer_has():
    lora = LoraConfig(rank=2, targets="per_layer/project|layers/local/q", dropout=0.5)
    keys = jax.random.split(jax.random.key(0), 3)
    attached = attach(random_params(CFG), random_adapters(CFG, lora), lora, keys)
    assert attached["per_layer"]["project"].keys.shape == (3,)
    assert attached["layers"]["local"]["q"].keys.shape == (2, 3)


def test_scalars_of_a_base_in_codes_stay_exact_and_the_table_of_inputs_is_bfloat16():
    stored = hf.flatten(stored_table(decoder.weights(CFG), "int8"))
    assert stored["layers/global/layer_scalar"].dtype == jnp.float32
    assert stored["per_layer/table"].dtype == jnp.bfloat16


# ---- what never trains, and what cannot be


SETTINGS = (OptimizerConfig, AdafactorConfig, MuonConfig, LionConfig, SGDConfig)


def test_the_scalar_of_a_layer_has_no_gradient(exact):
    assert not any(stack["layer_scalar"].any() for stack in exact[1]["layers"].values())


@pytest.mark.parametrize("kind", SETTINGS, ids=lambda kind: kind.NAME)
def test_no_optimizer_moves_the_scalar_of_a_layer(kind):
    def of_one(tree: dict) -> dict:
        return {"layers": {"local": {name: tree["layers"]["local"][name] for name in ("q", "layer_scalar")}}}

    more = {"weight_decay": 0.1} if hasattr(kind, "weight_decay") else {}
    optimizer = make_optimizer(kind(learning_rate=0.1, **more), 3, of_one(decoder.weights(CFG)))
    params = of_one(random_params(CFG))
    grads = jax.tree_util.tree_map_with_path(lambda path, x: x * (path[-1].key == "q"), params)
    updates = jax.jit(lambda: optimizer.update(grads, optimizer.init(params), params)[0])()["layers"]["local"]
    assert not np.any(updates["layer_scalar"]) and np.any(updates["q"])
