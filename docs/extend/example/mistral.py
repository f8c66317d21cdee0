"""Mistral: Llama's shape, where one window holds for all layers or there is none
(arXiv:2310.06825)."""

from tunix_lite.models.families import KEYS, LLAMA_LIKE, NAMES, Family


def one_kind(hf: dict) -> list[str]:
    """The kind of every layer: local if there is a window at all."""
    return ["global" if hf["sliding_window"] is None else "local"] * hf["num_hidden_layers"]


MISTRAL = Family(
    name="mistral",
    model_type="mistral",
    architecture="MistralForCausalLM",
    flags=LLAMA_LIKE | {"qk_norm": False},
    names=NAMES,
    keys=KEYS | {"window": "sliding_window"},
    fixed={"hidden_act": "silu"},
    # transformers' defaults
    absent={
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "rope_theta": 10_000.0,
    },
    kinds=one_kind,
    has_windows=False,
)
