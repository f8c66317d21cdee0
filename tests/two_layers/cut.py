"""Cuts a small model out of SmolLM2 135M Instruct, and writes down what transformers computes with it.

    python tests/two_layers/cut.py smollm2-135m-instruct-q4_1.gguf

It needs gguf, torch and transformers 5, and nothing of this package. The first and the last layer stay, their
matrices as Q4_0, with the first 512 tokens and the merges among them: a file of 4.3 MB that CI can have. Rows of the
embedding are copied bit for bit.
"""

import sys
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

LAYERS = (0, 29)
TOKENS = 512
NEW = 32
# Greedy tokens after the first hold an end token, those after the second hold none.
PROMPTS = ["The capital of France is", "Q: What is 12 + 30?\nA:"]
HERE = Path(__file__).parent
MODEL = HERE / "model.gguf"
EXPECTED = HERE / "expected.npz"


def cut(source: Path) -> None:
    """Writes the small model."""
    reader = gguf.GGUFReader(source)
    values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    texts = values["tokenizer.ggml.tokens"][:TOKENS]
    merges = [merge for merge in values["tokenizer.ggml.merges"] if merge.replace(" ", "") in texts]
    values |= {
        "general.name": "The first and the last layer of SmolLM2 135M Instruct, and 512 tokens",
        "llama.block_count": len(LAYERS),
        "llama.vocab_size": TOKENS,
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": values["tokenizer.ggml.token_type"][:TOKENS],
        "tokenizer.ggml.merges": merges,
    }
    writer = gguf.GGUFWriter(MODEL, values.pop("general.architecture"))
    for key, value in values.items():
        kinds = reader.fields[key].types
        writer.add_key_value(key, value, kinds[0], kinds[1] if len(kinds) > 1 else None)

    q4_0 = gguf.GGMLQuantizationType.Q4_0
    for tensor in reader.tensors:
        name = tensor.name
        if name.startswith("blk."):
            _, layer, rest = name.split(".", 2)
            if int(layer) not in LAYERS:
                continue
            name = f"blk.{LAYERS.index(int(layer))}.{rest}"
        data, kind = tensor.data, tensor.tensor_type
        if name == "token_embd.weight":
            data = data[:TOKENS]
        elif name.startswith("blk.") and data.ndim > 1:
            data, kind = gguf.quantize(gguf.dequantize(data, kind), q4_0), q4_0
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def expect() -> None:
    """Writes the tokens of each prompt, the greedy ones after it, and the logits that chose these, in float32."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(HERE, gguf_file=MODEL.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(HERE, gguf_file=MODEL.name, dtype=torch.float32)
    how = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    made = {}
    for i, text in enumerate(PROMPTS):
        turns = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
        ids = torch.tensor([prompt])
        # Without a mask, generate takes end tokens within a prompt for padding.
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        logits = model(whole).logits.detach().numpy()[0, len(prompt) - 1 : -1]
        greedy = whole[0, len(prompt) :].numpy()
        made |= {f"prompt{i}": np.array(prompt), f"greedy{i}": greedy, f"logits{i}": logits}
        top = np.sort(logits, axis=-1)
        lead = (top[:, -1] - top[:, -2]).min()
        print(f"{len(prompt)} tokens, then {tokenizer.decode(greedy)!r}; the least lead of a greedy token: {lead:.3f}")
    np.savez_compressed(EXPECTED, **made)


if __name__ == "__main__":
    cut(Path(sys.argv[1]))
    expect()
