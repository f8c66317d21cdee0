"""Every family, as its file in conf/model has it but tiny: packed is alone, and what is sampled is what is scored."""

from dataclasses import replace
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import set_mesh

from tunix_lite.basics.types import Batch
from tunix_lite.learner.packing import RowShape
from tunix_lite.learner.policy import batch_scores, token_logprobs
from tunix_lite.learner.rows import RowLayout
from tunix_lite.models import decoder, hf
from tunix_lite.models.architecture import Architecture, DeltaNet, LongRope
from tunix_lite.parallel.mesh import put
from tunix_lite.rollout.generate import make_generate
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.settings.compose import compose

PROMPT, NEW = 10, 12
# With the usual norm_eps of 1e-6, an output near zero makes digits of rounding large.
SIZES = {"vocab_size": 48, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mlp_dim": 24}
SIZES |= {"query_scale": 8, "norm_eps": 1e-3, "max_positions": 64}
GEMMA4 = {"query_scale": 1, "global_head_dim": 16, "global_kv_heads": 1, "pattern": ("local", "global", "local")}
OWN = {
    "gemma4_31b": GEMMA4 | {"num_layers": 5},
    "gemma4_e2b": GEMMA4 | {"num_layers": 8, "kv_readers": 3, "per_layer_dim": 6},
    "phi4_mini": {"longrope": LongRope((1.0, 1.5, 2.0), (1.0, 8.0, 30.0), 16, 64, 1.1)},
    "qwen3.5_0.8b": {"head_dim": 16, "delta": DeltaNet(num_key_heads=4, num_value_heads=8, key_dim=8, value_dim=6)},
}
MIXTURES = ("gemma4_26b_a4b", "gpt_oss_20b", "qwen3_30b_a3b", "qwen3.5_35b_a3b")
OWN |= {"gemma4_26b_a4b": OWN["gemma4_31b"], "qwen3.5_35b_a3b": OWN["qwen3.5_0.8b"]}
OLD = ("gemma2_2b", "gemma3_1b", "llama3.2_1b", "qwen2.5_0.5b", "qwen3_0.6b")
RELATIVES = ("ministral3_3b", "mistral0.1_7b", "olmo3_7b", "phi4_14b", "smollm2_1.7b", "smollm3_3b")
SHAPES = {"none": None, "sequences": RowShape(40), "prefix": RowShape(12, 2, 12)}


def tiny(name: str) -> Architecture:
    """Sequences of up to 22 tokens pass its window and the lengths of pretraining."""
    cfg = compose([f"model={name}", "model.weights=random"]).model.architecture
    own = {"num_layers": len(cfg.pattern) + 1, "window": cfg.window and 5}
    for part in ("yarn", "rope_scaling"):
        own |= {part: replace(there, original_positions=8)} if (there := getattr(cfg, part)) else {}
    if experts := cfg.experts:
        own |= {"experts": replace(experts, count=6, per_token=2, mlp_dim=12, shared_dim=experts.shared_dim and 12)}
    return replace(cfg, **SIZES | own | OWN.get(name, {}))


def drawn(cfg: Architecture, dtype):
    """Weights with opinions. Norms are around 1; those of queries are less, or sharp attention makes rounding large."""
    rng = np.random.default_rng(0)

    def one(path, w):
        around = 0.4 if path[-1].key == "q_norm" else path[-1].key.endswith(("norm", "scalar"))
        return put(rng.normal(0 if cfg.norm_plus_one else around, 0.2, w.shape).astype(dtype), *w.axes)

    return jax.tree_util.tree_map_with_path(one, decoder.weights(cfg))


@cache
def alone(name: str) -> tuple[Batch, np.ndarray, dict]:
    """Four prompts with two completions each; and in float64 what each sequence gives in a program of its own."""
    rng = np.random.default_rng(4)
    tokens, mask, counts = (np.zeros((8, PROMPT + NEW), kind) for kind in (np.int32, bool, np.float32))
    for row, (prompt, total) in enumerate((prompt, total) for prompt in (10, 2, 5, 4) for total in (14, 11)):
        mask[row, PROMPT - prompt : PROMPT - prompt + total] = True
        tokens[row] = rng.integers(1, 48, PROMPT + NEW) * mask[row]
        tokens[row, :PROMPT] = tokens[row - row % 2, :PROMPT]
    counts[:, PROMPT:] = mask[:, PROMPT:] * rng.uniform(0.5, 1.5, (8, NEW))
    cfg, logprobs, summed = tiny(name), np.zeros(tokens.shape), []
    set_mesh(1, 1)

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def of_one(params, tokens, slopes):
        values = token_logprobs(params, tokens, jnp.ones_like(tokens, bool), cfg=cfg, dtype=jnp.float64)
        return jnp.sum(values * slopes), values

    with jax.enable_x64(True):
        for row, real in enumerate(mask):
            grads, values = of_one(drawn(cfg, np.float64), tokens[row, real][None], counts[row, real][None])
            logprobs[row, real] = values[0]
            summed = jax.tree.map(np.add, summed, grads) if summed else grads
    return Batch(tokens, mask, counts), logprobs, hf.flatten(summed)


EVERY = product(
    dict.fromkeys((*OWN, *MIXTURES, *RELATIVES, *OLD)), [(1, 1), (1, 4), (2, 2), (4, 1)], [[1, 3, 16]], [[*SHAPES]]
)


@pytest.mark.wide  # test_relatives.py, test_gemma4.py, test_qwen3_5.py and test_conversations.py have a case each
@pytest.mark.parametrize("name, mesh, slots, packings", EVERY)
def test_packed_is_alone_and_what_is_sampled_is_what_is_scored(name, mesh, slots, packings):
    fixed, *exact = alone(name)
    batches, cfg = [(fixed, exact[0])], tiny(name)
    set_mesh(*mesh)
    for count in slots:
        rollout, prompts = RolloutConfig(num_slots=count, chunk=4), [[5, 6, 7], [8] * PROMPT, [9], [11, 12]]
        generate = make_generate(cfg, GenerationConfig(PROMPT, NEW), (3, 5, 7), 0, rollout=rollout)
        sampled = generate(drawn(cfg, np.float32), prompts, jax.random.key(0), num_generations=2)
        counts = np.float32(sampled.completion_mask)
        assert len(set(counts.sum(axis=1))) > 1, "all are of one length"
        batches.append((Batch(*map(np.asarray, (sampled.tokens, sampled.token_mask)), counts), sampled.logprobs))
    for packing in packings:
        layout = RowLayout(packing, 1, None, SHAPES[packing], 8 // mesh[0])

        def scores(params, rows, dtype=jnp.float32):
            values = batch_scores(params, rows, cfg=cfg, temperature=1.0, dtype=dtype).logprobs
            return jnp.sum(values * rows.loss_weight), values

        in_float32 = jax.jit(scores)
        for batch, logprobs in batches:
            rows, packed = layout.lay_out(batch)
            scored, counts = packed.back(in_float32(drawn(cfg, np.float32), rows)[1]), batch.loss_weight > 0
            np.testing.assert_allclose(scored[counts], np.asarray(logprobs)[counts], atol=1e-5, err_msg=packing)
        with jax.enable_x64(True):
            program = jax.jit(jax.grad(partial(scores, dtype=jnp.float64), has_aux=True))
            grads, _ = program(drawn(cfg, np.float64), layout.lay_out(fixed)[0])
            for path, grad in hf.flatten(grads).items():
                np.testing.assert_allclose(grad, exact[1][path], atol=1e-6, err_msg=f"{packing} {path}")
