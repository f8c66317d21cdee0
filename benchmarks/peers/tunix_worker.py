"""Tunix's GRPOLearner, a step a turn. Runs in the venv of Tunix: `python tunix_worker.py`, started by run.py."""

import os
import time

BEGAN = time.perf_counter()

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx
from tunix.models.gemma3 import model as gemma3
from tunix.rl import rl_cluster as clusters
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

IMPORTED = time.perf_counter()

from turns import Turns, reward_of_text, words

LAYERS = ".*q_einsum|.*kv_einsum|.*attn_vec_einsum|.*gate_proj|.*up_proj|.*down_proj"


class Gemma(gemma3.Gemma3):
    """The model, which while it samples ends rows where the workload says: it forces the end-of-sequence token
    there and forbids it before. Losses and the reference see its own logits."""

    forced: tuple[tuple[int, ...], int, int] | None = None

    # Tunix looks at the names of the arguments: they are those of Gemma3
    def __call__(
        self,
        last_tokens: Any,
        positions: Any = None,
        cache: Any = None,
        attention_mask: Any = None,
        output_hidden_states: bool = False,
    ) -> Any:
        logits, cache = super().__call__(last_tokens, positions, cache, attention_mask, output_hidden_states)
        if self.forced is None or cache is None:
            return logits, cache
        lengths, prompt_length, eos_id = self.forced
        # positions count from the first token of the prompt; what is drawn stands one further
        is_last = positions + 1 - prompt_length >= jnp.array(lengths)[:, None] - 1
        return logits.at[:, :, eos_id].set(jnp.where(is_last, 1e9, -1e9)), cache


class Words:
    """One word a token, in the form that Tunix takes of tokenizers."""

    def __init__(self, work: dict):
        self.work = work

    def encode(self, text: str, **settings: Any) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def decode(self, tokens: Any, **settings: Any) -> str:
        return words(np.asarray(tokens).tolist())

    def bos_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return self.work["eos_id"]

    def pad_id(self) -> int:
        return self.work["pad_id"]


class TimedCluster(clusters.RLCluster):
    """The cluster, whose sampling and whose scoring by the reference are timed."""

    turns: Turns = None

    def generate(self, *args: Any, **settings: Any) -> Any:
        with self.turns.phase("rollout"):
            rollout = super().generate(*args, **settings)
        # Tunix samples the end token and leaves it out of what it hands on.
        ended = self.turns.work["lengths"] is not None
        self.turns.lengths = [len(tokens) + ended for tokens in rollout.tokens]
        return rollout

    def get_ref_per_token_logps(self, *args: Any, **settings: Any) -> Any:
        with self.turns.phase("reference"):
            return jax.block_until_ready(super().get_ref_per_token_logps(*args, **settings))


def make_model(work: dict) -> Gemma:
    size = work["model"]
    config = gemma3.ModelConfig(
        num_layers=size["num_layers"],
        num_embed=work["vocab_size"],
        embed_dim=size["embed_dim"],
        hidden_dim=size["mlp_dim"],
        num_heads=size["num_heads"],
        head_dim=size["head_dim"],
        num_kv_heads=size["num_kv_heads"],
        sliding_window_size=size["window"],
        local_base_frequency=10_000,
        global_base_frequency=1_000_000,
        param_dtype=jnp.float32,
    )
    model = Gemma(config, rngs=nnx.Rngs(work["training"]["seed"]))
    if work["lengths"]:
        Gemma.forced = (tuple(work["lengths"]), work["prompt_length"], work["eos_id"])
    return model


def on_mesh(model: nnx.Module, mesh: jax.sharding.Mesh) -> nnx.Module:
    """The model with its weights on the mesh: otherwise the cluster copies them there, once for each role."""
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    nnx.update(model, jax.device_put(nnx.state(model), place))
    return model


def make_cluster(work: dict, mesh: jax.sharding.Mesh) -> TimedCluster:
    training = work["training"]
    reference = on_mesh(make_model(work), mesh)
    # under LoRA the base is the reference, which then is not a second copy
    if not work["lora_rank"]:
        actor = on_mesh(make_model(work), mesh)
    else:
        provider = qwix.LoraProvider(module_path=LAYERS, rank=work["lora_rank"], alpha=32.0)
        adapted = qwix.apply_lora_to_model(reference, provider, **reference.get_model_input())
        actor = on_mesh(adapted, mesh)
    adam = optax.adamw(
        training["learning_rate"], training["beta1"], training["beta2"], training["eps"], weight_decay=0.0
    )
    settings = clusters.RLTrainingConfig(
        actor_optimizer=optax.chain(optax.clip_by_global_norm(training["max_grad_norm"]), adam),
        eval_every_n_steps=1_000_000,
        max_steps=1_000_000,
        mini_batch_size=work["prompts"],
        train_micro_batch_size=work["prompts"],
    )
    rollout = RolloutConfig(
        max_tokens_to_generate=work["new_tokens"],
        max_prompt_length=work["prompt_length"],
        kv_cache_size=work["prompt_length"] + work["new_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        eos_tokens=[work["eos_id"]],
    )
    roles = (clusters.Role.ACTOR, clusters.Role.REFERENCE, clusters.Role.ROLLOUT)
    return TimedCluster(
        actor=actor,
        reference=reference,
        tokenizer=Words(work),
        cluster_config=clusters.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh), training_config=settings, rollout_config=rollout
        ),
    )


def rewards(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [reward_of_text(text) for text in completions]


def batches(turns: Turns, cluster: TimedCluster) -> Iterator[dict]:
    """The same prompts a turn; a turn is over when the learner asks for the next ones and its weights are there."""
    prompts = [words(tokens) for tokens in turns.work["prompt_tokens"]]
    while turns.wait():
        yield {"prompts": np.array(prompts)}
        jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
        turns.done()


def main() -> None:
    turns = Turns()
    work = turns.work
    TimedCluster.turns = turns
    began = time.perf_counter()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    with mesh:
        cluster = make_cluster(work, mesh)
        config = GRPOConfig(
            num_generations=work["generations"],
            num_iterations=1,
            beta=work["training"]["kl_coef"],
            epsilon=work["training"]["clip"],
            loss_agg_mode="token-mean",
            kl_loss_mode="low_var_kl",
        )
        learner = GRPOLearner(rl_cluster=cluster, algo_config=config, reward_fns=rewards)
        kind = nnx.LoRAParam if work["lora_rank"] else nnx.Param
        trained = sum(x.size for x in jax.tree.leaves(nnx.state(cluster.actor_trainer.model, kind)))
        turns.ready(
            import_seconds=IMPORTED - BEGAN,
            setup_seconds=time.perf_counter() - began,
            versions={name: version(name) for name in ("google-tunix", "jax", "flax", "qwix")},
            trained_parameters=trained,
        )
        learner.train(batches(turns, cluster))


if __name__ == "__main__":
    main()
