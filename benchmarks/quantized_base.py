"""What int8 and nf4 do to a base: bytes, and how far its scores move from bfloat16. Prints one JSON line a storage.

    python benchmarks/quantized_base.py [MODEL]     # bundled, a folder in Hugging Face layout, or a hub name

bytes_ratio: of all projections against bfloat16, from the arrays; whole_ratio: of the whole model. logits_error: the
norm of the difference of the scores over the norm of the scores; kl: mean KL(bf16 || stored) per token, in nats; over
32 prompts of the arithmetic task with their worked answers.
"""

import json
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.models import attention, decoder, source
from tunix_lite.models.source import ModelConfig
from tunix_lite.parallel.mesh import make_mesh
from tunix_lite.tasks.sources import Arithmetic


def main() -> None:
    model = source.download(source.locate(ModelConfig(weights=sys.argv[1] if len(sys.argv) > 1 else "bundled")))
    jax.set_mesh(make_mesh(((-1, 1), ("fsdp", "tp"))))
    examples = [Arithmetic().held_out[i] for i in range(32)]
    rows = [model.tokenizer.prompt(e["question"]) + model.tokenizer.encode(e["completion"]) for e in examples]
    width = max(map(len, rows))
    tokens = np.array([row + [0] * (width - len(row)) for row in rows])
    mask = np.array([[True] * len(row) + [False] * (width - len(row)) for row in rows])

    @jax.jit
    def scores(params):
        return decoder.logits(
            params, model.cfg, decoder.forward(params, model.cfg, tokens, attention.one_sequence_per_row(mask))[0]
        )

    whole, projections, reference = {}, {}, None
    for storage in ("bf16", "int8", "nf4"):
        params = source.load_base(model, 0, storage)
        whole[storage] = sum(x.nbytes for x in jax.tree.leaves(params))
        rest = {name: leaf for name, leaf in params.items() if name != "layers"}
        small = sum(x.nbytes for path, x in jax.tree.leaves_with_path(params) if is_small(path))
        projections[storage] = whole[storage] - small - sum(x.nbytes for x in jax.tree.leaves(rest))
        said = scores(params)[mask]
        reference = said if reference is None else reference
        logp, logq = (jax.nn.log_softmax(x) for x in (reference, said))
        print(json.dumps({
            "benchmark": "quantized_base",
            "model": model.name,
            "storage": storage,
            "bytes_ratio": round(projections[storage] / projections["bf16"], 4),
            "whole_ratio": round(whole[storage] / whole["bf16"], 4),
            "logits_error": round(float(jnp.linalg.norm(said - reference) / jnp.linalg.norm(reference)), 5),
            "kl": round(float(jnp.mean(jnp.sum(jnp.exp(logp) * (logp - logq), axis=-1))), 6),
        }))  # fmt: skip


def is_small(path) -> bool:
    """A norm or a bias of a layer."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return name.startswith("layers") and name.endswith(("norm", "bias"))


if __name__ == "__main__":
    main()
