"""A loaded model as what samples the completions of a task, as a run does."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from tunix_lite.inference.language_model import LanguageModel
from tunix_lite.models import decoder
from tunix_lite.models.weights import num_params
from tunix_lite.rollout.generate import GenerateFunction, make_generate, make_sampler
from tunix_lite.rollout.memory import SamplingMemory, choose_weights
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig, round_up_to_shards
from tunix_lite.rollout.slot_choice import choose_slots

# On a CPU: slots of any model, and weights times slots of a small one.
_CPU_SLOTS = 16
_CPU_WORK = 2_000_000_000


def generate_of(
    model: LanguageModel,
    generation: GenerationConfig,
    rollout: RolloutConfig,
    counts: list[tuple[int, int]],
    tp_reduce_dtype: str = "float32",
) -> GenerateFunction:
    """generate(params, prompts, key, num_generations=1, ...) -> Rollout, as make_generate makes it,
    for the mesh of the model. counts: (prompts, completions of each) of the largest calls to come.
    """

    def arguments(slots: int, weights: str) -> tuple:
        return (
            model.cfg,
            generation,
            model.tokenizer.eos_ids,
            model.tokenizer.pad_id,
            model.dtype,
            replace(rollout, num_slots=slots, weights=weights),
            model.tokenizer,
            jnp.dtype(tp_reduce_dtype),
        )

    with jax.set_mesh(model.mesh):
        largest = max(prompts * completions for prompts, completions in counts)
        slots = rollout.slots(largest, model.mesh.shape["fsdp"])
        if rollout.num_slots is None and model.mesh.devices.flat[0].platform == "cpu":
            # More slots than keep the cores busy make a step longer and take memory, and all
            # completions end late and together: few would be graded when an evaluation is killed.
            busy = _CPU_WORK // num_params(decoder.weights(model.cfg))
            busy = round_up_to_shards(max(_CPU_SLOTS, busy), model.mesh.shape["fsdp"])
            slots = min(slots, busy)
        how = (model.cfg, model.dtype, generation, rollout, slots, counts)
        memory = SamplingMemory.here(*how)
        if rollout.num_slots == "auto":
            most = slots
            slots, _ = choose_slots(
                memory, model.params, lambda weights: make_sampler(*arguments(most, weights))
            )
            memory = replace(memory, num_slots=slots)
        weights, _ = choose_weights(model.params, memory)
        return make_generate(*arguments(slots, weights))
