"""The model is Gemma 3: logits of transformers' own implementation, on models that it saved itself."""

import json
from functools import partial

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the parity extra")
transformers = pytest.importorskip("transformers", reason="needs the parity extra")

from tunix_lite.models import decoder, hf  # noqa: E402
from tunix_lite.models.tokenizer import Tokenizer  # noqa: E402
from tunix_lite.policy import token_logprobs  # noqa: E402
from tunix_lite.train import BUNDLED  # noqa: E402

pytestmark = pytest.mark.parity

SHAPES = {
    "one key head, a tail": {"num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 1},
    "grouped heads": {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 3},
    "all heads, no whole group": {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2},
    "scaled rope": {
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
        },
    },
}


def random_gemma(folder, seed=0, **shape):
    """A tiny Gemma3ForCausalLM with opinions, saved by transformers."""
    base = {"vocab_size": 97, "hidden_size": 40, "intermediate_size": 56, "head_dim": 16, "sliding_window": 7}
    base |= {"query_pre_attn_scalar": 13, "max_position_embeddings": 128, "attn_implementation": "eager"}
    torch.manual_seed(seed)
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**(base | shape))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if "norm" in name else 0.15))
    model.save_pretrained(folder)
    return model


def scores(params, cfg, tokens):
    hidden = jax.jit(decoder.forward, static_argnums=1)(params, cfg, tokens, np.ones_like(tokens, bool))
    return decoder.logits(params, hidden)


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_those_of_transformers(tmp_path, name):
    model = random_gemma(tmp_path, **SHAPES[name])
    cfg = hf.read_config(tmp_path)
    params = hf.load_params(tmp_path, cfg)
    tokens = np.random.default_rng(0).integers(0, 97, (3, 30))
    assert tokens.shape[1] > cfg.window
    ours = scores(params, cfg, tokens)
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.numpy()
    assert np.abs(theirs).max() > 1
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_left_padded_prompts_score_as_transformers_scores_them(tmp_path):
    model = random_gemma(tmp_path, **SHAPES["grouped heads"])
    cfg = hf.read_config(tmp_path)
    params = hf.load_params(tmp_path, cfg)
    tokens = np.random.default_rng(1).integers(0, 97, (1, 20))
    padded, mask = np.pad(tokens, ((0, 0), (6, 0))), np.pad(np.ones((1, 20), bool), ((0, 0), (6, 0)))
    ours = jax.jit(partial(token_logprobs, cfg=cfg))(params, padded, mask)[:, 7:]
    with torch.no_grad():
        theirs = torch.log_softmax(model(torch.tensor(tokens)).logits.double(), -1)
    expected = np.take_along_axis(theirs.numpy()[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(ours, expected, atol=1e-4)


def test_what_we_write_transformers_reads(tmp_path):
    model = random_gemma(tmp_path / "theirs", **SHAPES["one key head, a tail"])
    cfg = hf.read_config(tmp_path / "theirs")
    ours = tmp_path / "ours"
    ours.mkdir()
    hf.save_params(hf.load_params(tmp_path / "theirs", cfg), cfg, ours, np.float32)
    (ours / "config.json").write_text(json.dumps(hf.config_json(cfg)))
    again = transformers.Gemma3ForCausalLM.from_pretrained(ours, attn_implementation="eager").eval()
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=0, atol=0)


def test_the_bundled_base_is_a_gemma_3_that_transformers_runs():
    cfg = hf.read_config(BUNDLED)
    params = hf.load_params(BUNDLED, cfg)
    model = transformers.Gemma3ForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    theirs = transformers.AutoTokenizer.from_pretrained(BUNDLED)
    ours = Tokenizer.load(BUNDLED)
    asked = [{"role": "user", "content": "What is 12 + 7 - 30?"}]
    assert ours.chat(asked) == theirs.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    tokens = np.array([ours.prompt(asked[0]["content"])])
    assert list(tokens[0]) == theirs(ours.chat(asked), add_special_tokens=False)["input_ids"]
    mine = scores(params, cfg, tokens)
    with torch.no_grad():
        np.testing.assert_allclose(mine, model(torch.tensor(tokens)).logits.numpy(), atol=1e-4)
