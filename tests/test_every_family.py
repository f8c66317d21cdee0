"""Every family, as its file in conf/model has it but tiny: packed is alone, and what is sampled is what is scored."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import set_mesh

from tunix_lite.learner.packing import RowShape
from tunix_lite.learner.policy import batch_scores, token_logprobs
from tunix_lite.learner.rows import RowLayout
from tunix_lite.models import decoder, hf, weights
from tunix_lite.models.architecture import Architecture, DeltaNet, LongRope
from tunix_lite.parallel.mesh import put
from tunix_lite.rollout.generate import make_generate
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.settings.compose import compose
from tunix_lite.types import Batch

PROMPT, NEW = 10, 12
# With the usual norm_eps of 1e-6, an output near zero makes digits of rounding large.
SIZES = {"vocab_size": 48, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mlp_dim": 24}
SIZES |= {"query_scale": 8, "norm_eps": 1e-3, "max_positions": 64}
GEMMA4 = {"query_scale": 1, "global_head_dim": 16, "global_kv_heads": 1}
READERS = {"num_layers": 8, "pattern": ("local", "global", "local"), "kv_readers": 3, "per_layer_dim": 6}
FAMILIES = {
    "gemma2_2b": {},
    "gemma3_1b": {"pattern": ("local", "local", "global")},
    "gemma4_31b": GEMMA4 | {"num_layers": 4, "pattern": ("local", "global")},
    "gemma4_e2b": GEMMA4 | READERS,
    "llama3.2_1b": {},
    "ministral3_3b": {},
    "mistral0.1_7b": {},
    "olmo3_7b": {},
    "phi4_14b": {},
    "phi4_mini": {"longrope": LongRope((1.0, 1.5, 2.0), (1.0, 8.0, 30.0), 16, 64, 1.1)},
    "qwen2.5_0.5b": {},
    "qwen3_0.6b": {},
    "qwen3.5_0.8b": {"head_dim": 16, "delta": DeltaNet(num_key_heads=4, num_value_heads=8, key_dim=8, value_dim=6)},
    "smollm2_1.7b": {},
    "smollm3_3b": {},
}
# Positions up to 22 pass the first wavelengths that are made longer, and the windows.
SHORTER = {"yarn": {"original_positions": 8}, "rope_scaling": {"original_positions": 8}}
SHAPES = {"none": None, "sequences": RowShape(40), "prefix": RowShape(12, 2, 12)}


def tiny(name: str) -> Architecture:
    cfg = compose([f"model={name}", "model.weights=random"]).model.architecture
    sizes = SIZES | {"num_layers": len(cfg.pattern) + 1, "window": cfg.window and 5} | FAMILIES[name]
    for part, change in SHORTER.items():
        if (scaling := getattr(cfg, part)) is not None:
            sizes[part] = replace(scaling, **change)
    return replace(cfg, **sizes)


def drawn(cfg: Architecture, dtype):
    """Weights with opinions, on the current mesh. Norms are around 1; those of queries are less, or sharp attention would
    make digits of rounding large."""
    rng = np.random.default_rng(0)

    def one(path, w):
        name = path[-1].key
        is_scale = name.endswith(("norm", "scalar")) and not cfg.norm_plus_one
        return put((rng.normal(0.6 * is_scale, 0.2, w.shape)).astype(dtype), *w.axes)

    return jax.tree_util.tree_map_with_path(one, decoder.weights(cfg), is_leaf=weights.is_weight)


@cache
def alone(name: str) -> tuple[Batch, np.ndarray, dict]:
    """Four prompts with two completions each, of two lengths in all; and what each sequence gives in a program of its own,
    in float64: log-probabilities, and the gradient of their weighted sum."""
    rng = np.random.default_rng(4)
    tokens, mask, counts = (np.zeros((8, PROMPT + NEW), kind) for kind in (np.int32, bool, np.float32))
    for row, (prompt, total) in enumerate((prompt, total) for prompt in (10, 2, 5, 4) for total in (14, 11)):
        mask[row, PROMPT - prompt : PROMPT - prompt + total] = True
        tokens[row] = rng.integers(1, 48, PROMPT + NEW) * mask[row]
        tokens[row, :PROMPT] = tokens[row - row % 2, :PROMPT]
    counts[:, PROMPT:] = mask[:, PROMPT:] * rng.uniform(0.5, 1.5, (8, NEW))
    cfg, logprobs, total = tiny(name), np.zeros(tokens.shape), None
    set_mesh(1, 1)
    with jax.enable_x64(True):
        params = drawn(cfg, np.float64)

        @jax.jit
        @partial(jax.grad, has_aux=True)
        def of_one(params, tokens, slopes):
            found = token_logprobs(params, tokens, jnp.ones_like(tokens, bool), cfg=cfg, dtype=jnp.float64)
            return jnp.sum(found * slopes), found

        for row, real in enumerate(mask):
            grads, values = of_one(params, tokens[row, real][None], counts[row, real][None])
            logprobs[row, real] = values[0]
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    return Batch(tokens, mask, counts), logprobs, jax.tree.map(np.asarray, hf.flatten(total))


def check(name: str, mesh: tuple[int, int], slots: tuple[int, ...], packings: tuple[str, ...]) -> None:
    fixed, exact, exact_grads = alone(name)
    set_mesh(*mesh)
    cfg = tiny(name)
    params = drawn(cfg, np.float32)
    expected = [(fixed, exact)]
    for count in slots:
        rollout = RolloutConfig(num_slots=count, chunk=4)
        generate = make_generate(cfg, GenerationConfig(PROMPT, NEW), (3, 5, 7), 0, rollout=rollout)
        sampled = generate(params, [[5, 6, 7], [8] * PROMPT, [9], [11, 12]], jax.random.key(0), num_generations=2)
        mask = np.asarray(sampled.completion_mask)
        assert len(set(mask.sum(axis=1))) > 1, "all are of one length"
        batch = Batch(*map(np.asarray, (sampled.tokens, sampled.token_mask)), mask.astype(np.float32))
        expected.append((batch, sampled.logprobs))
    for packing in packings:
        layout = RowLayout(packing, 1, None, SHAPES[packing], 8 // mesh[0])

        def scores(params, rows, dtype=jnp.float32):
            found = batch_scores(params, rows, cfg=cfg, temperature=1.0, dtype=dtype).logprobs
            return jnp.sum(found * rows.loss_weight), found

        in_float32 = jax.jit(scores)
        for batch, logprobs in expected:
            rows, packed = layout.lay_out(batch)
            scored, counts = packed.back(in_float32(params, rows)[1]), batch.loss_weight > 0
            np.testing.assert_allclose(scored[counts], np.asarray(logprobs)[counts], atol=1e-5, err_msg=packing)
        with jax.enable_x64(True):
            rows, _ = layout.lay_out(fixed)
            grads, _ = jax.jit(jax.grad(partial(scores, dtype=jnp.float64), has_aux=True))(drawn(cfg, np.float64), rows)
            for path, grad in hf.flatten(grads).items():
                np.testing.assert_allclose(grad, exact_grads[path], atol=1e-6, err_msg=f"{packing} {path}")


@pytest.mark.parametrize("name, mesh", [("phi4_mini", (1, 1)), ("ministral3_3b", (2, 2))])
def test_shared_prompts_are_alone_and_what_is_sampled_is_what_is_scored(name, mesh):
    check(name, mesh, (3,), ("prefix",))


@pytest.mark.wide
@pytest.mark.parametrize("mesh", [(1, 1), (1, 4), (2, 2), (4, 1)])
@pytest.mark.parametrize("name", FAMILIES)
def test_of_every_family_in_every_packing_in_slots_and_on_meshes(name, mesh):
    check(name, mesh, (1, 3, 16), tuple(SHAPES))
