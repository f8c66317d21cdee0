"""Rewards are those of transformers' AutoModelForSequenceClassification, on drawn models that it has saved."""

import json
import shutil

import numpy as np
import pytest
from conftest import set_mesh

torch = pytest.importorskip("torch", reason="needs the parity extra")
transformers = pytest.importorskip("transformers", reason="needs the parity extra")

from test_parity import CLASSES, SHAPES, around_of  # noqa: E402
from test_reward_models import COMPLETIONS, EXAMPLES, scorer_of  # noqa: E402

from tunix_lite.models.source import BUNDLED  # noqa: E402

pytestmark = pytest.mark.parity

# Not the template of the bundled model, whose tokens these are. The second one ends with the end of the turn.
TEMPLATES = {
    "newline": "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}",
    "end": "{{ messages[0].content }} = {{ messages[1].content }}<end_of_turn>",
}
# One shape of each family that transformers has such a class of.
NAMES = ["gemma2-one", "gemma3-some", "llama-some", "mistral-some", "olmo3-some", "phi3-some", "qwen2-some",
         "qwen3-one-tied", "smollm3-some", "qwen3_5-1"]  # fmt: skip


@pytest.fixture(scope="module", params=[name for name in NAMES if name in SHAPES])
def saved(request, tmp_path_factory):
    """A folder that transformers has written, with the bundled tokenizer."""
    family = request.param.split("-")[0]
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(BUNDLED)
    base = {"vocab_size": len(tokenizer), "hidden_size": 40, "intermediate_size": 56, "max_position_embeddings": 512}
    base |= {"eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(1)
    config = CLASSES[family][1](**(base | SHAPES[request.param] | {"num_labels": 1}), attn_implementation="eager")
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around, wide = around_of(family, name)
            parameter.copy_(torch.randn_like(parameter) * wide + around)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / file, folder / file)
    return model, folder


def of_transformers(model, tokenizer, rows: list[list[int]], side: str) -> np.ndarray:
    """One batch, padded on this side with the padding token of the config."""
    pad = model.config.pad_token_id
    width = max(map(len, rows))
    tokens = [row + [pad] * (width - len(row)) if side == "right" else [pad] * (width - len(row)) + row for row in rows]
    mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    mask = [row[::-1] for row in mask] if side == "left" else mask
    with torch.no_grad():
        return model(torch.tensor(tokens), attention_mask=torch.tensor(mask)).logits[:, 0].numpy()


@pytest.mark.parametrize(
    ("template", "pad", "most"),
    [("newline", "<pad>", None), ("newline", "<pad>", 20), ("end", "<pad>", None), ("end", "<end_of_turn>", None)],
)
def test_rewards_equal_those_of_transformers(saved, template, pad, most):
    """Padded on either side, pad = the end of a turn, and cut to 20 tokens: the same number within 1e-5."""
    set_mesh(1, 1)
    model, folder = saved
    (folder / "chat_template.jinja").write_text(TEMPLATES[template])
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    pad_id = tokenizer.convert_tokens_to_ids(pad)
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": pad_id}))
    model.config.pad_token_id = pad_id

    rows = []
    for example, completion in zip(EXAMPLES, COMPLETIONS):
        turns = [
            {"role": "user", "content": example["question"]},
            {"role": "assistant", "content": completion},
        ]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        rows.append(
            tokenizer(text, add_special_tokens=False, truncation=most is not None, max_length=most)["input_ids"]
        )
    scorer = scorer_of(folder, num_rows=3, **({} if most is None else {"max_length": most}))
    ours = [outcome.value for outcome in scorer(EXAMPLES, COMPLETIONS)]
    for side in ("right", "left"):
        theirs = of_transformers(model, tokenizer, rows, side)
        assert np.ptp(theirs) > 0.1
        np.testing.assert_allclose(ours, theirs, atol=1e-5, err_msg=side)
