"""Each family is right: logits, greedy continuations and gradients of transformers' own models, saved by it."""

import json
from copy import deepcopy
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import logits_of, set_mesh

torch = pytest.importorskip("torch", reason="needs the parity extra")
transformers = pytest.importorskip("transformers", reason="needs the parity extra")

from tunix_lite.learner.policy import token_logprobs  # noqa: E402
from tunix_lite.models import decoder, hf  # noqa: E402
from tunix_lite.models.attention import one_sequence_per_row  # noqa: E402
from tunix_lite.models.families import config_json, find_family, read_config  # noqa: E402
from tunix_lite.models.family import FUSED_EXPERTS  # noqa: E402
from tunix_lite.models.source import BUNDLED  # noqa: E402
from tunix_lite.models.tokenizer import Tokenizer  # noqa: E402
from tunix_lite.rollout.generate import make_generate  # noqa: E402
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig  # noqa: E402

pytestmark = pytest.mark.parity

VOCAB, PROMPT, NEW = 97, 20, 32
CLASSES = {
    "ministral3": (transformers.Ministral3ForCausalLM, transformers.Ministral3Config),
    "mistral": (transformers.MistralForCausalLM, transformers.MistralConfig),
    "olmo3": (transformers.Olmo3ForCausalLM, transformers.Olmo3Config),
    "phi3": (transformers.Phi3ForCausalLM, transformers.Phi3Config),
    "smollm3": (transformers.SmolLM3ForCausalLM, transformers.SmolLM3Config),
    "gemma2": (transformers.Gemma2ForCausalLM, transformers.Gemma2Config),
    "gemma3": (transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig),
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
    "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config),
}
ONE, SOME, ALL = ({"num_attention_heads": 4, "num_key_value_heads": k} for k in (1, 2, 4))
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 13}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 16}
MINISTRAL3 = YARN | {
    "type": "yarn",
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "llama_4_scaling_beta": 0.1,
    "beta_fast": 4.0,
}
FACTORS = {"short_factor": [1.0, 1.1, 1.5, 2.0], "long_factor": [1.0, 3.0, 9.0, 30.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 500.0, **FACTORS}
BY_KIND = {"sliding_attention": {"rope_type": "default", "rope_theta": 300.0}, "full_attention": YARN}


def drawn_gemma4(seed: int) -> dict:
    """Sizes and kinds of layers, with and without readers of keys and values, per-layer inputs and global values."""
    rng = np.random.default_rng(seed)

    def one_of(*choices):
        return choices[rng.integers(len(choices))]

    num_layers = one_of(4, 7, 10)
    kinds = [one_of("sliding_attention", "sliding_attention", "full_attention") for _ in range(num_layers - 3)]
    return {
        **{"num_attention_heads": 4, "num_key_value_heads": one_of(1, 2, 4), "head_dim": one_of(8, 16)},
        **{"global_head_dim": one_of(16, 32), "num_global_key_value_heads": one_of(1, 2)},
        **{"attention_k_eq_v": one_of(True, False), "num_hidden_layers": num_layers, "sliding_window": one_of(3, 7)},
        "layer_types": ["sliding_attention", "full_attention", *kinds, "full_attention"],
        **{"num_kv_shared_layers": (0, 2, num_layers - 2)[seed], "use_double_wide_mlp": one_of(True, False)},
        **{"hidden_size_per_layer_input": (0, 8, 6)[seed], "vocab_size_per_layer_input": VOCAB},
        # With the usual 1e-6, digits of rounding become large, in transformers as here.
        **{"final_logit_softcapping": one_of(30.0, 5.0), "rms_norm_eps": 1e-3},
    }


def drawn_qwen3_5(seed: int) -> dict:
    """Sizes and kinds of layers of a model with gated delta nets."""
    rng = np.random.default_rng(seed)

    def one_of(*choices):
        return choices[rng.integers(len(choices))]

    num_layers, key_heads = one_of(3, 4, 6, 9), one_of(1, 2, 3)
    kinds = [one_of("linear_attention", "full_attention") for _ in range(num_layers)]
    return {
        **{"hidden_size": one_of(24, 40), "num_hidden_layers": num_layers, "layer_types": one_of(None, kinds)},
        **{"num_attention_heads": 4, "num_key_value_heads": one_of(1, 2, 4), "head_dim": one_of(16, 32)},
        **{"linear_num_key_heads": key_heads, "linear_num_value_heads": key_heads * one_of(1, 2, 3)},
        **{"linear_key_head_dim": one_of(8, 12), "linear_value_head_dim": one_of(8, 20)},
        **{"linear_conv_kernel_dim": one_of(2, 4), "tie_word_embeddings": one_of(True, False), "rms_norm_eps": 1e-3},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": one_of(0.25, 0.5, 1.0)},
    }


def drawn_experts(family: str, seed: int) -> dict:
    """Sizes of a model with a mixture of experts: more experts than a token has, and one that all tokens have."""
    rng = np.random.default_rng(seed)

    def one_of(*choices):
        return choices[rng.integers(len(choices))]

    experts = {"num_experts": one_of(5, 8), "num_experts_per_tok": one_of(1, 2, 3), "moe_intermediate_size": 24}
    if family == "gemma4":
        experts |= {"top_k_experts": experts["num_experts_per_tok"], "enable_moe_block": True}
        return drawn_gemma4(0) | experts
    if family == "qwen3_5_moe":
        return drawn_qwen3_5(seed) | experts | {"shared_expert_intermediate_size": one_of(16, 32)}
    shape = {"num_hidden_layers": one_of(2, 3), "head_dim": 16, "rms_norm_eps": 1e-3} | SOME
    if family == "qwen3_moe":
        return shape | experts | {"norm_topk_prob": seed == 0, "tie_word_embeddings": seed == 1}
    rope = YARN | {"truncate": one_of(True, False), "rope_theta": 150.0}
    of_gpt = {"num_local_experts": 6, "num_experts_per_tok": experts["num_experts_per_tok"], "sliding_window": 5}
    return shape | of_gpt | {"rope_parameters": rope, "swiglu_limit": one_of(7.0, 0.5), "pad_token_id": 0}


SHAPES = {  # windows are shorter than the prompt; layers do not always fill whole groups
    "gemma2-one": GEMMA | ONE | {"num_hidden_layers": 3, "sliding_window": 7, "attn_logit_softcapping": 2.0},
    "gemma2-some": GEMMA | SOME | {"num_hidden_layers": 4, "sliding_window": 3, "final_logit_softcapping": 5.0},
    "gemma3-one": GEMMA | ONE | {"num_hidden_layers": 8, "sliding_window": 7},
    "gemma3-some": GEMMA | SOME | {"num_hidden_layers": 6, "sliding_window": 3},
    "gemma3-all": GEMMA | ALL | {"num_hidden_layers": 3, "sliding_window": 7},
    "gemma3-scaled": GEMMA | ONE | {
        "num_hidden_layers": 6,
        "sliding_window": 5,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
        },
    },
    "llama-one-tied": ONE | {"num_hidden_layers": 2, "tie_word_embeddings": True},
    "llama-some": SOME | {"num_hidden_layers": 3, "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16}},
    "qwen2-one-tied": ONE | {"num_hidden_layers": 2, "tie_word_embeddings": True},
    "qwen2-some": SOME | {"num_hidden_layers": 3},
    "qwen2-all-windows": ALL | {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "qwen3-one-tied": ONE | {"num_hidden_layers": 2, "tie_word_embeddings": True, "head_dim": 24},
    "qwen3-some": SOME | {"num_hidden_layers": 3, "head_dim": 16},
    "ministral3-some": SOME | {"num_hidden_layers": 2, "head_dim": 16, "rope_parameters": MINISTRAL3},
    "ministral3-one-tied": ONE | {"num_hidden_layers": 1, "rope_parameters": MINISTRAL3, "tie_word_embeddings": True},
    "olmo3-some": SOME | {"num_hidden_layers": 5, "sliding_window": 5, "rope_parameters": BY_KIND},
    "olmo3-all": ALL | {"num_hidden_layers": 3, "sliding_window": 7},
    "phi3-some": SOME | {"num_hidden_layers": 2, "pad_token_id": 0},
    "phi3-one-longrope": ONE | {
        "num_hidden_layers": 2,
        "sliding_window": 7,
        "original_max_position_embeddings": 64,
        "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.8},
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "smollm3-some": SOME | {"num_hidden_layers": 5, "pad_token_id": 0},
    "smollm3-all": ALL | {"num_hidden_layers": 3, "no_rope_layers": [0, 1, 1], "rope_parameters": YARN, "pad_token_id": 0},
    "mistral-some": SOME | {"num_hidden_layers": 3, "head_dim": 16, "sliding_window": 5},
    "mistral-all": ALL | {"num_hidden_layers": 2, "sliding_window": None},
}  # fmt: skip
if hasattr(transformers, "Gemma4ForCausalLM"):
    CLASSES["gemma4"] = (transformers.Gemma4ForCausalLM, transformers.Gemma4TextConfig)
    CLASSES["gemma4_unified"] = (transformers.Gemma4UnifiedForCausalLM, transformers.Gemma4UnifiedTextConfig)
    SHAPES |= {f"{kind}-{seed}": drawn_gemma4(seed) for kind in ("gemma4", "gemma4_unified") for seed in range(3)}
if hasattr(transformers, "Qwen3_5ForCausalLM"):
    CLASSES["qwen3_5"] = (transformers.Qwen3_5ForCausalLM, transformers.Qwen3_5TextConfig)
    SHAPES |= {f"qwen3_5-{seed}": drawn_qwen3_5(seed) for seed in range(4)}
if hasattr(transformers, "Qwen3_5MoeForCausalLM"):
    CLASSES["qwen3_moe"] = (transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig)
    CLASSES["qwen3_5_moe"] = (transformers.Qwen3_5MoeForCausalLM, transformers.Qwen3_5MoeTextConfig)
    CLASSES["gpt_oss"] = (transformers.GptOssForCausalLM, transformers.GptOssConfig)
    MIXTURES = [
        f"{family}-moe{seed}" for family in ("gemma4", "gpt_oss", "qwen3_5_moe", "qwen3_moe") for seed in range(2)
    ]
    SHAPES |= {name: drawn_experts(name.split("-")[0], int(name[-1])) for name in MIXTURES}


def around_of(family: str, name: str) -> tuple[float, float]:
    """The mean and the spread of a parameter."""
    is_scale = "norm" in name or "scal" in name
    wide = 1.5 if "A_log" in name or "sinks" in name else 0.3 if is_scale or "bias" in name else 0.15
    if family.startswith("qwen3_5"):
        return float(name.endswith(("linear_attn.norm.weight", "dt_bias"))), wide
    if family.startswith("gemma4") and "q_norm" in name:
        return 0.4, wide  # sharp attention would make digits of rounding large
    return float(is_scale and family not in ("gemma2", "gemma3")), wide


def random_model(name: str, seed: int = 0):
    """A tiny model with opinions, of transformers' own class."""
    kind, config = CLASSES[name.split("-")[0]]
    base = {"vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 56, "max_position_embeddings": 128}
    torch.manual_seed(seed)
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = kind(config(**(base | SHAPES[name]), **how)).eval()
    with torch.no_grad():
        scalars = [(key, x) for key, x in model.named_buffers() if key.endswith("layer_scalar")]
        for parameter_name, parameter in [*model.named_parameters(), *scalars]:
            around, wide = around_of(name.split("-")[0], parameter_name)
            parameter.copy_(torch.randn_like(parameter) * wide + around)
    model.generation_config.update(eos_token_id=None, pad_token_id=0, do_sample=False)
    return model


@pytest.fixture(scope="module", params=SHAPES)
def both(request, tmp_path_factory):
    """(transformers' model, our architecture, our params) of one shape."""
    folder = tmp_path_factory.mktemp(request.param)
    model = random_model(request.param)
    model.save_pretrained(folder)
    set_mesh(1, 1)
    cfg, family = read_config(folder)
    assert family is find_family(request.param.split("-")[0])
    return model, cfg, hf.load_params(folder, cfg, family), family, folder


def test_logits_equal_those_of_transformers(both):
    model, cfg, params, _, _ = both
    # Longer than two chunks of a delta net.
    tokens = np.random.default_rng(0).integers(0, VOCAB, (3, 150 if cfg.delta else 30))
    assert cfg.window is None or cfg.window < tokens.shape[1]
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.numpy()
    assert np.abs(theirs).max() > 1
    np.testing.assert_allclose(logits_of(params, cfg, tokens), theirs, atol=1e-4)


def test_greedy_continuations_are_the_same(both):
    """Of prompts of several lengths, longer and shorter than the window, in fewer slots than there are prompts."""
    model, cfg, params, _, _ = both
    longest = 70 if cfg.delta else PROMPT
    lengths = (longest, 1, longest - 3, 2, longest // 2)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, VOCAB, length).tolist() for length in lengths]
    generate = make_generate(cfg, GenerationConfig(longest, NEW), (-1,), 0, rollout=RolloutConfig(num_slots=2, chunk=5))
    ours = generate(params, prompts, jax.random.key(0), temperature=0.0)
    for row, real in zip(ours.tokens, ours.token_mask):
        asked = torch.tensor(row[:longest][real[:longest]])[None]
        theirs = model.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=NEW, min_new_tokens=NEW)
        np.testing.assert_array_equal(row[real], theirs[0].numpy())


class InFloat64(torch.overrides.TorchFunctionMode):
    """What asks for float32 inside a model, as norms, softmax and delta nets do, gets float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def wide(x):
            return torch.float64 if x is torch.float32 else x

        function = torch.Tensor.double if function is torch.Tensor.float else function
        return function(*map(wide, args), **{key: wide(x) for key, x in (kwargs or {}).items()})


def test_gradients_equal_those_of_transformers_in_float64(both):
    model, cfg, params, family, _ = both
    tokens = np.random.default_rng(2).integers(0, VOCAB, (2, 24))

    def loss(params):
        return -jnp.mean(token_logprobs(params, tokens, np.ones_like(tokens, bool), cfg=cfg)[:, 1:])

    ours = jax.jit(jax.grad(loss))(params)
    # In float32, transformers' own is 2 % off in an A_log: its decays are differences of sums, of a token to itself, too,
    # whose large gradients should cancel out, and do so but for their rounding. Ours is 6e-5 off there, 3e-5 elsewhere.
    model, asked = deepcopy(model).double(), torch.tensor(tokens)
    with InFloat64():
        logp = torch.log_softmax(model(asked).logits[:, :-1], -1)
        (-torch.gather(logp, 2, asked[:, 1:, None]).mean()).backward()
    theirs = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    if any(name.endswith("experts.gate_up_proj") for name in theirs):
        family = replace(family, names=family.names | FUSED_EXPERTS if family.name == "qwen3_moe" else family.names)
    tensor = hf.tensors_of(ours, cfg, family)
    for name in hf.hf_shapes(cfg, family):
        grad = tensor(name, "F32")
        if name not in theirs:
            assert name.endswith("layer_scalar") and not grad.any(), name
            continue
        difference = np.linalg.norm(grad - theirs[name]) / np.linalg.norm(theirs[name])
        assert difference < 3e-4, f"{name}: {difference}"


def test_the_auxiliary_loss_is_that_of_transformers(both):
    """Out of the sums that the block returns, over all layers together."""
    model, cfg, params, _, _ = both
    if cfg.experts is None or not hasattr(model.config, "router_aux_loss_coef"):
        pytest.skip("transformers has none for it")
    tokens = np.random.default_rng(3).integers(0, VOCAB, (3, 20))
    mask = np.arange(20) < np.array([20, 13, 5])[:, None]
    with torch.no_grad():
        given = {"attention_mask": torch.tensor(mask), "output_router_logits": True}
        theirs = float(model(torch.tensor(tokens), **given).aux_loss)
    meta = one_sequence_per_row(mask)
    _, routed = jax.jit(partial(decoder.forward, cfg=cfg))(params, tokens_BT=tokens, meta=meta)
    count = cfg.num_layers * mask.sum()
    shares = [np.sum(x, axis=0) / count for x in (routed.load, routed.prob_sum)]
    np.testing.assert_allclose(cfg.experts.count * np.sum(shares[0] * shares[1]), theirs, rtol=1e-5)


def test_out_equals_in(both, tmp_path):
    model, cfg, params, family, folder = both
    hf.save_params(params, cfg, family, tmp_path, hf.stored_dtypes(folder, family))
    (tmp_path / "config.json").write_text(json.dumps(config_json(cfg, family, pad_token_id=0)))
    how = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    again = type(model).from_pretrained(tmp_path, **how).eval()
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        # A delta net of transformers may add up in another order in another object.
        atol = 5e-6 if cfg.delta else 0
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=0, atol=atol)
    for (name, before), (_, after) in zip(model.named_parameters(), again.named_parameters()):
        assert torch.equal(before, after), name


@pytest.mark.parametrize("seed", range(3))
def test_in_bfloat16_logits_of_qwen3_5_are_no_further_off_than_those_of_transformers(seed, tmp_path):
    """From what transformers computes in float64 with the same weights, on average over two rows of 150 tokens."""
    model = random_model(f"qwen3_5-{seed}").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    cfg, family = read_config(tmp_path)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 150))
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.double().numpy()
        exact = model.double()(torch.tensor(tokens)).logits.numpy()
    ours = logits_of(hf.load_params(tmp_path, cfg, family), cfg, tokens, jnp.bfloat16)
    errors = [np.sqrt(np.mean((np.float64(logits) - exact) ** 2)) for logits in (ours, theirs)]
    assert exact.std() > 0.3 and errors[1] > 1e-3
    assert errors[0] <= errors[1], errors


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_comes_out_bit_for_bit(tmp_path, dtype):
    model = random_model("qwen3-some").to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    cfg, family = read_config(tmp_path / "theirs")
    assert (tmp_path / "theirs" / hf.INDEX).is_file()
    params = hf.load_params(tmp_path / "theirs", cfg, family)
    (tmp_path / "ours").mkdir()
    hf.save_params(params, cfg, family, tmp_path / "ours", hf.stored_dtypes(tmp_path / "theirs", family))
    before, after = hf.Tensors(tmp_path / "theirs"), hf.Tensors(tmp_path / "ours")
    assert set(before) == set(after)
    for name in before:
        whole = tuple(slice(None) for _ in before.shape(name))
        assert before.dtype(name) == after.dtype(name) != "F32"
        assert before.read(name, whole).tobytes() == after.read(name, whole).tobytes(), name


def test_the_bundled_base_is_a_gemma_3_that_transformers_runs():
    cfg, family = read_config(BUNDLED)
    params = hf.load_params(BUNDLED, cfg, family)
    model = transformers.Gemma3ForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    theirs = transformers.AutoTokenizer.from_pretrained(BUNDLED)
    ours = Tokenizer.load(BUNDLED)
    asked = [{"role": "user", "content": "What is 12 + 7 - 30?"}]
    assert ours.chat(asked) == theirs.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    tokens = np.array([ours.prompt(asked[0]["content"])])
    assert list(tokens[0]) == theirs(ours.chat(asked), add_special_tokens=False)["input_ids"]
    mine = logits_of(params, cfg, tokens)
    with torch.no_grad():
        np.testing.assert_allclose(mine, model(torch.tensor(tokens)).logits.numpy(), atol=1e-4)
