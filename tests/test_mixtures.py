"""Families with mixtures of experts: attention sinks, MXFP4, tensors of experts in and out, and what is refused."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_params, set_mesh
from model_checks import check_sampled, sampled, write_model
from safetensors.numpy import load_file, save_file
from test_every_family import tiny
from test_tokenizer import byte_level, write

from tunix_lite.basics.types import Batch
from tunix_lite.learner.packing import RowShape
from tunix_lite.learner.policy import batch_scores
from tunix_lite.learner.rows import RowLayout
from tunix_lite.models import attention, hf
from tunix_lite.models.attention import AttentionMeta, attend
from tunix_lite.models.families import FAMILIES, as_computed, config_json, read_config
from tunix_lite.models.family import FUSED_EXPERTS, PER_EXPERT
from tunix_lite.models.mxfp4 import dequantised
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.models.turns import TurnTokens

GPT_OSS = FAMILIES["gpt_oss"]
FAMILY_OF = {"qwen3_30b_a3b": "qwen3_moe", "qwen3.5_35b_a3b": "qwen3_5_moe", "gemma4_26b_a4b": "gemma4"}
FAMILY_OF |= {"gpt_oss_20b": "gpt_oss"}


def small(name: str):
    """The tiny size, with the scale of queries that its config.json says."""
    cfg = tiny(name)
    return cfg if cfg.query_scale == 1 else replace(cfg, query_scale=cfg.head_dim)


# ---- sinks


def with_a_column(q, k, v, sinks, seen, scale):
    """Attention with sinks as a softmax over one column more: [B, T, N, H]. q [B, T, N, H], k and v [B, K, S, H]."""
    group = q.shape[2] // k.shape[1]
    k, v = jnp.repeat(k, group, 1), jnp.repeat(v, group, 1)
    scores = jnp.where(seen[:, None], jnp.einsum("btnh,bnsh->bnts", q, k) * scale, -jnp.inf)
    column = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
    probs = jax.nn.softmax(jnp.concatenate([scores, column], -1), -1)[..., :-1]
    return jnp.einsum("bnts,bnsh->btnh", probs, v)


def drawn_attention(T: int, S: int):
    cfg = replace(small("gpt_oss_20b"), window=None, pattern=("global",))
    rng = np.random.default_rng(0)
    shapes = ((2, T, 4, 8), (2, 2, S, 8), (2, 2, S, 8), (4,))
    return cfg, [rng.normal(0, 1.5, shape) for shape in shapes], rng.random((2, T, S)) < 0.6


def test_a_sink_is_one_column_more_whose_value_is_nothing_and_has_its_gradient():
    cfg, arrays, seen = drawn_attention(5, 7)
    seen[0, 0] = False  # sees nothing: all of its softmax is the sink
    slope = np.random.default_rng(1).normal(0, 1, (2, 5, 4, 8))

    def ours(q, k, v, sinks):
        return jnp.sum(attend(cfg, q, k, v, seen, sinks_N=sinks) * slope)

    def theirs(*arrays):
        return jnp.sum(with_a_column(*arrays, seen, 8**-0.5) * slope)

    with jax.enable_x64(True):
        given = [jnp.asarray(x) for x in arrays]
        mine, other = (jax.jit(jax.value_and_grad(fn, argnums=(0, 1, 2, 3)))(*given) for fn in (ours, theirs))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-12), mine, other)
    assert np.abs(other[1][3]).min() > 1e-3


@pytest.mark.parametrize("is_local", [False, True])
def test_rows_in_pieces_have_the_sinks_of_whole_rows(is_local, monkeypatch):
    cfg, (_, _, _, sinks), _ = drawn_attention(1, 1)
    cfg = replace(cfg, window=5, pattern=("local", "global"))
    q, k, v = (np.random.default_rng(2).normal(0, 1, (2, 40, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    positions = np.broadcast_to(np.arange(40, dtype=np.int32), (2, 40))
    meta = AttentionMeta(positions, np.ones((2, 40), np.int32))

    def run(q, k, v, sinks):
        out, pull = jax.vjp(lambda *x: attention.xla(cfg, is_local, meta, *x), q, k, v, sinks)
        return out, *pull(jnp.ones_like(out))

    set_mesh(1, 1)
    whole = jax.jit(run)(q, k, v, np.float32(sinks))
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 2 * 4 * 40 * 10)
    assert attention.piece_length(q, 40) == 10
    in_pieces = jax.jit(run)(q, k, v, np.float32(sinks))
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-5), in_pieces, whole)
    d = np.subtract.outer(np.arange(40), np.arange(40))
    seen = np.broadcast_to((d >= 0) & ((d < 5) | (not is_local)), (2, 40, 40))
    exact = with_a_column(q, k.swapaxes(1, 2), v.swapaxes(1, 2), np.float32(sinks), seen, 8**-0.5)
    np.testing.assert_allclose(whole[0], exact, atol=2e-5)


@pytest.mark.parametrize("name, platform", [("cudnn", "gpu"), ("splash", "tpu")])
def test_kernels_without_sinks_are_not_taken_and_the_reason_is_said(name, platform):
    how = (small("gpt_oss_20b"), platform, jnp.bfloat16, 128, False)
    with pytest.raises(ValueError, match=f"attention={name}: it has no attention sinks, and the model has some"):
        attention.choose(name, *how)
    assert attention.choose("auto", *how) == ("xla", f"not {name}: it has no attention sinks, and the model has some")


# ---- MXFP4


def test_a_block_is_levels_times_a_power_of_two():
    """By the table of the format: codes 1 and 2 are 0.5 and 1, 7 is 6, 9 is -0.5, 15 is -6."""
    blocks = np.zeros((1, 2, 16), np.uint8)
    blocks[0, 0, :2] = 0x21, 0x9F
    blocks[0, 1, 15] = 0x70
    values = dequantised(blocks, np.array([[127, 129]], np.uint8)).astype(np.float32)
    assert values[0, :4].tolist() == [0.5, 1.0, -6.0, -0.5] and values[0, 63] == 24.0
    assert np.count_nonzero(values) == 5


CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def as_mxfp4(folder) -> dict:
    """The plain tensors of a folder, whose experts are then stored as MXFP4 of numbers that it holds."""
    rng, plain, stored = np.random.default_rng(0), {}, {}
    for name, value in load_file(folder / hf.SINGLE).items():
        plain[name] = stored[name] = value
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        del stored[name]
        experts, inputs, outputs = value.shape
        codes = rng.integers(0, 16, (experts, outputs, inputs // 32, 32))
        exponents = rng.integers(-4, 1, codes.shape[:3])
        numbers = CODES[codes] * 2.0 ** exponents[..., None]
        plain[name] = numbers.reshape(experts, outputs, inputs).swapaxes(1, 2).astype(value.dtype)
        stored[f"{name}_blocks"] = np.uint8(codes[..., ::2] | codes[..., 1::2] << 4)
        stored[f"{name}_scales"] = np.uint8(exponents + 127)
    save_file(stored, folder / hf.SINGLE, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return plain


@pytest.fixture(scope="module")
def gpt_oss():
    cfg = small("gpt_oss_20b")
    return replace(cfg, embed_dim=64, experts=replace(cfg.experts, count=4, mlp_dim=64))


@pytest.fixture()
def quantised(gpt_oss, tmp_path):
    write_model(tmp_path, random_params(gpt_oss), gpt_oss, GPT_OSS)
    return tmp_path, as_mxfp4(tmp_path)


def test_mxfp4_is_read_as_what_it_stands_for_slice_by_slice(gpt_oss, quantised, monkeypatch):
    folder, plain = quantised
    assert read_config(folder)[1] is GPT_OSS
    set_mesh(2, 2)
    read, original = [], hf.dequantised

    def counting(blocks, scales):
        read.append(scales.size * 32)
        return original(blocks, scales)

    monkeypatch.setattr(hf, "dequantised", counting)
    params = hf.load_params(folder, gpt_oss, GPT_OSS)
    # Of one expert at a time. A shard holds half of inputs and half of outputs, and rows of gate and up take turns: from
    # the first to the last of 32 there are 63.
    assert set(read) == {32 * 32, 63 * 32}
    layers = params["layers"]
    for layer, kind in enumerate(("local", "global", "local")):
        stack = layers if "q" in layers else layers[kind]
        place = layer if "q" in layers else layer // 2
        both = plain[f"model.layers.{layer}.mlp.experts.gate_up_proj"].astype(np.float32)
        np.testing.assert_array_equal(stack["expert_gate"][place], both[..., ::2])
        np.testing.assert_array_equal(stack["expert_up"][place], both[..., 1::2])
        down = plain[f"model.layers.{layer}.mlp.experts.down_proj"].astype(np.float32)
        np.testing.assert_array_equal(stack["expert_down"][place], down)
    assert set(hf.stored_dtypes(folder, GPT_OSS)) == set(plain) == set(hf.hf_shapes(gpt_oss, GPT_OSS))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x: x.pop("model.layers.1.mlp.experts.down_proj_scales"), "layers.1.mlp.experts.down_proj is no MXFP4"),
        (
            lambda x: x.update({"model.layers.0.mlp.experts.down_proj_blocks": np.zeros((4, 64, 2, 8), np.uint8)}),
            "layers.0.mlp.experts.down_proj is no MXFP4: its _blocks should be",
        ),
        (
            lambda x: x.update({"model.layers.0.mlp.experts.down_proj_blocks": np.zeros((), np.uint8)}),
            "layers.0.mlp.experts.down_proj is no MXFP4: its _blocks should be",
        ),
        (
            lambda x: x.update({"model.layers.0.mlp.experts.down_proj": np.zeros((4, 64, 64), np.float32)}),
            "layers.0.mlp.experts.down_proj is no MXFP4: .*no plain tensor beside them",
        ),
    ],
)
def test_what_is_no_mxfp4_is_refused_with_file_and_tensor(change, message, gpt_oss, quantised):
    folder, _ = quantised
    tensors = load_file(folder / hf.SINGLE)
    change(tensors)
    save_file(tensors, folder / hf.SINGLE, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{folder}.*{message}"):
        hf.load_params(folder, gpt_oss, GPT_OSS)


# ---- tensors of experts


def test_experts_in_one_tensor_and_one_by_one_are_read_alike_on_a_mesh(tmp_path):
    """Qwen 3.5 MoE is published with those of a layer in one; transformers writes one for each."""
    family, cfg = FAMILIES["qwen3_5_moe"], replace(small("qwen3.5_35b_a3b"), num_layers=3)
    params = random_params(cfg)
    one_by_one = replace(family, names=family.names | PER_EXPERT)
    folders = []
    for layout in (family, one_by_one):
        folder = tmp_path / str(len(folders))
        folder.mkdir()
        write_model(folder, params, cfg, layout)
        folders.append(folder)
    fused, split = (load_file(folder / hf.SINGLE) for folder in folders)
    name = "model.layers.2.mlp.experts"
    gates = [split[f"{name}.{i}.gate_proj.weight"] for i in range(6)]
    ups = [split[f"{name}.{i}.up_proj.weight"] for i in range(6)]
    np.testing.assert_array_equal(fused[f"{name}.gate_up_proj"], np.concatenate([gates, ups], axis=1))
    assert f"{name}.gate_up_proj" not in split and f"{name}.0.gate_proj.weight" not in fused
    assert fused[f"{name}.down_proj"].shape == (6, 16, 12) and gates[0].shape == (12, 16)
    set_mesh(2, 2)
    for folder in folders:
        again = hf.load_params(folder, cfg, family)
        jax.tree.map(np.testing.assert_array_equal, again, params)
        assert set(hf.stored_dtypes(folder, family)) >= set(hf.hf_shapes(cfg, family))


def test_a_shard_reads_its_part_of_each_expert(tmp_path, monkeypatch):
    cfg, family = small("qwen3_30b_a3b"), FAMILIES["qwen3_moe"]
    write_model(tmp_path, random_params(cfg), cfg, family)
    set_mesh(2, 2)
    read, original = [], hf.Tensors.read

    def counting(tensors, name, index):
        part = original(tensors, name, index)
        read.append((name, part.size))
        return part

    monkeypatch.setattr(hf.Tensors, "read", counting)
    hf.load_params(tmp_path, cfg, family)
    sizes = {size for name, size in read if ".experts." in name}
    assert sizes == {16 * 12 // 4}
    # four shards, six experts, three tensors in each of two layers
    assert sum(".experts." in name for name, _ in read) == 4 * 6 * 3 * cfg.num_layers


@pytest.mark.parametrize(
    "name", ["qwen3_30b_a3b", "gpt_oss_20b", pytest.param("gemma4_26b_a4b", marks=pytest.mark.wide)]
)
def test_a_folder_comes_back(name, tmp_path):
    """Qwen 3.5 MoE is above; tests/test_parity.py has the same with transformers."""
    cfg, family = small(name), FAMILIES[FAMILY_OF[name]]
    params = random_params(cfg)
    write_model(tmp_path, params, cfg, family)
    again, family_again = read_config(tmp_path)
    assert family_again is family and as_computed(again) == as_computed(cfg)
    jax.tree.map(np.testing.assert_array_equal, hf.load_params(tmp_path, cfg, family), params)
    names = set(load_file(tmp_path / hf.SINGLE))
    own = PER_EXPERT if family.name == "qwen3_moe" else FUSED_EXPERTS
    assert any(x.endswith(own["expert_down"].replace("*", "5").removeprefix("mlp.")) for x in names)


# ---- config.json


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("qwen3_30b_a3b", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported"),
        ("qwen3_30b_a3b", {"mlp_only_layers": [1]}, "mlp_only_layers=.1. is not supported"),
        ("qwen3_30b_a3b", {"num_experts": None}, "num_experts=None; it is a finite int"),
        ("qwen3_30b_a3b", {"num_experts_per_tok": 7}, "num_experts_per_tok=7 is above num_experts=6"),
        ("gpt_oss_20b", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0 is not supported"),
        ("gpt_oss_20b", {"attention_bias": False}, "attention_bias=False is not supported"),
        ("gpt_oss_20b", {"quantization_config": {"quant_method": "fp8"}}, "cannot be read, but for mxfp4"),
        (
            "gpt_oss_20b",
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear"}},
            "rope_type 'linear'",
        ),
        ("qwen3.5_35b_a3b", {"quantization_config": {"quant_method": "mxfp4"}}, "cannot be read;"),
        ("gemma4_26b_a4b", {"moe_intermediate_size": None}, "moe_intermediate_size=None; it is a finite int"),
    ],
)
def test_what_it_does_not_compute_is_refused_with_file_and_key(name, change, message, tmp_path):
    config = config_json(small(name), FAMILIES[FAMILY_OF[name]]) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        read_config(tmp_path)


# ---- harmony

# The marks of gpt-oss's own template, which the folder brings along. Only the last turn ends with <|return|>.
HARMONY = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>"
    "{% for m in messages %}<|start|>{{ m.role }}"
    "{% if m.tool_calls %} to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
MARKS = ["<|endoftext|>", "<|return|>", "<|call|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>"]


def test_a_turn_of_gpt_oss_ends_with_return_or_a_call_and_a_thought_ends_none(tmp_path):
    backend = byte_level(MARKS)
    ids = {mark: backend.token_to_id(mark) for mark in MARKS}
    eos_ids = [ids["<|return|>"], ids["<|endoftext|>"]]
    tokenizer = Tokenizer.load(
        write(tmp_path, backend, HARMONY, eos="<|return|>", pad="<|endoftext|>", eos_ids=eos_ids)
    )
    assert tokenizer.eos_ids == (*eos_ids, ids["<|call|>"]) and tokenizer.pad_id == ids["<|endoftext|>"]
    low = tokenizer.with_template(tokenizer.template.with_variables({"reasoning_effort": "low"}))
    prompt = backend.decode(low.prompt("Hello"), skip_special_tokens=False)
    system = "<|start|>system<|message|>Reasoning: low<|end|>"
    assert prompt == f"{system}<|start|>user<|message|>Hello<|end|><|start|>assistant"
    between = backend.decode(TurnTokens(low).between("Higher.", ended=True), skip_special_tokens=False)
    assert between == "<|end|><|start|>user<|message|>Higher.<|end|><|start|>assistant"


# ---- rows and slots


# test_every_family.py (make wide) has the other families and meshes, and the gradient in packed rows.
def test_what_is_sampled_is_what_is_scored_in_packed_rows():
    cfg = replace(small("gpt_oss_20b"), num_layers=2)
    params = random_params(cfg)
    rollout = sampled(cfg, params, generations=1)
    layout = RowLayout("sequences", 1, None, RowShape(40), 4)
    batch = Batch(rollout.tokens, rollout.token_mask, np.float32(rollout.completion_mask))
    rows, packed = layout.lay_out(batch)
    scores = jax.jit(partial(batch_scores, cfg=cfg, temperature=1.0, dtype=jnp.float32))(params, rows)
    check_sampled(rollout, packed.back(scores.logprobs))
