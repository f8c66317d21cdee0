"""What the tests of each family of models share: drawn rows and adapters, packings, rollouts, and folders of files."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from conftest import random_params

from tunix_lite.basics.types import Batch
from tunix_lite.learner.packing import RowShape
from tunix_lite.learner.policy import batch_scores
from tunix_lite.learner.rows import RowLayout
from tunix_lite.models import decoder, hf
from tunix_lite.models.families import config_json
from tunix_lite.models.lora import adapter_weights
from tunix_lite.models.source import BUNDLED
from tunix_lite.parallel.mesh import put
from tunix_lite.rollout.generate import make_generate
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig


def layout_of(name: str, fsdp: int = 1) -> RowLayout:
    """For `groups`, in columns and rows that four devices divide."""
    shape = {"none": None, "sequences": RowShape(48), "prefix": RowShape(16, 2, 16)}[name]
    return RowLayout(name, 1, None, shape, 4 // fsdp)


def groups(vocab_size: int = 48) -> Batch:
    """Four prompts with two completions each, longer and shorter than windows; the last group counts nothing. In all a
    sequence has 10 or 16 tokens, so that little is compiled."""
    rng = np.random.default_rng(4)
    prompts = [row for row in (rng.integers(1, vocab_size, n).tolist() for n in (9, 2, 5, 3)) for _ in range(2)]
    completions = [rng.integers(1, vocab_size, n).tolist() for n in (7, 1, 14, 8, 11, 5, 13, 7)]
    tokens, mask, counts = (np.zeros((8, 9 + 14), kind) for kind in (np.int32, bool, np.float32))
    for row, (prompt, completion) in enumerate(zip(prompts, completions)):
        here = slice(9 - len(prompt), 9 + len(completion))
        tokens[row, here], mask[row, here] = prompt + completion, True
        counts[row, 9 : here.stop] = 1 / len(completion) if row < 6 else 0
    return Batch(tokens, mask, counts)


def losses(params, batch: Batch, layout: RowLayout, dtype, cfg, **how):
    """(log-probabilities [B, T] of what counts, gradient of their weighted sum)."""
    rows, packed = layout.lay_out(batch)

    @jax.jit
    def run(params, rows):
        def loss(params):
            scores = batch_scores(params, rows, cfg=cfg, temperature=1.0, dtype=dtype, **how)
            return jnp.sum(scores.logprobs * rows.loss_weight), scores.logprobs

        return jax.grad(loss, has_aux=True)(params)

    grads, logprobs = run(jax.tree.map(lambda x: jnp.asarray(x, dtype), params), rows)
    return np.where(batch.loss_weight > 0, packed.back(logprobs), 0), jax.tree.map(np.asarray, grads)


def sampled(cfg, params, slots: int = 3, eos=(3,), generations: int = 2):
    """A rollout of ragged prompts, whose slots take the next request while others run."""
    config = RolloutConfig(num_slots=slots, chunk=4)
    generate = make_generate(cfg, GenerationConfig(10, 12), eos, 0, rollout=config)
    prompts = [[5, 6, 7], [8] * 10, [9], [11, 12]]
    rollout = jax.tree.map(np.asarray, generate(params, prompts, jax.random.key(0), num_generations=generations))
    assert len(set(rollout.completion_mask.sum(axis=1))) > 1, "all are of one length"
    return rollout


def check_sampled(rollout, scored) -> None:
    """Compares the sampler's log-probabilities with these, [B, T]."""
    mask = rollout.completion_mask
    assert mask.any()
    np.testing.assert_allclose(np.asarray(scored)[mask], rollout.logprobs[mask], atol=1e-5)


def random_adapters(cfg, lora, scale: float = 0.3):
    """Adapters with opinions, on the current mesh."""
    rng = np.random.default_rng(5)
    table = adapter_weights(decoder.weights(cfg), lora)
    return jax.tree.map(lambda w: put(rng.normal(0, scale, w.shape).astype(np.float32), *w.axes), table)


def write_model(folder, params, cfg, family, **more) -> None:
    """A folder as transformers has it; more: keys of its config.json."""
    hf.save_params(params, cfg, family, folder, "F32")
    (folder / "config.json").write_text(json.dumps(config_json(cfg, family) | more))


def write_with_tokenizer(folder: Path, cfg, family) -> Path:
    """A random model in Hugging Face layout, with the bundled tokenizer."""
    shutil.copytree(BUNDLED, folder, dirs_exist_ok=True)
    write_model(folder, random_params(cfg), cfg, family)
    return folder


def publish(folder, others, before: str = "", **config) -> None:
    """Makes of it the folder of a larger model, as it is published: text_config within, names with a
    prefix, other parts. before: what stands before each name; without it, model. becomes model.language_model."""
    held = hf.read_tensors(folder / hf.SINGLE)
    names = {name: before + name if before else name.replace("model.", "model.language_model.", 1) for name in held}
    longer = {names[name]: x for name, x in held.items()} | {name: np.ones((2, 2)) for name in others}
    hf.write_tensors(folder / hf.SINGLE, longer)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"text_config": text, "vision_config": {}} | config))
