"""A loaded model as an engine that requests join and leave at any time."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from tunix_lite.inference.language_model import LanguageModel
from tunix_lite.rollout.generate import make_prepare, sampler_spec
from tunix_lite.rollout.live import LiveEngine
from tunix_lite.rollout.programs import make_programs
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig, round_up_to_shards
from tunix_lite.types import Params

# Slots where rollout.num_slots does not say how many.
_SLOTS = 32


def live_engine(
    model: LanguageModel,
    generation: GenerationConfig,
    rollout: RolloutConfig,
    max_waiting: int = 256,
    prepared: Params | None = None,
) -> LiveEngine:
    """A live engine with the weights of the model.

    generation: the most tokens of prompts and completions; what is drawn is for each request to
    say. rollout: slots, chunk, and where the weights stay. max_waiting: sequences that may wait for
    a slot. prepared: the weights as rollout.generate.make_prepare makes them; None: made of the
    model's. Raises ValueError for a setting that it does not have.
    """
    if generation.repetition_penalty != 1:
        raise ValueError("generation.repetition_penalty is not supported; set it to 1")
    # Prompt and completion share the model's positions; each request says how.
    most = model.cfg.max_positions - 1
    new = min(generation.max_new_tokens, most)
    width = min(generation.max_prompt_length, most)
    plain = replace(
        generation.without_cutoffs,
        max_prompt_length=width,
        max_new_tokens=new,
        temperature=1.0,
        stop=(),
        stop_token_ids=(),
    )
    tokenizer = model.tokenizer
    with jax.set_mesh(model.mesh):
        slots = round_up_to_shards(rollout.num_slots or _SLOTS, model.mesh.shape["fsdp"])
        spec, _ = sampler_spec(
            model.cfg,
            plain,
            tokenizer.eos_ids,
            tokenizer.pad_id,
            model.dtype,
            rollout,
            jnp.float32,
        )
        if prepared is None:
            prepare = make_prepare(model.cfg, model.dtype, rollout.weights != "sharded")
            prepared = prepare(model.params)
        programs = make_programs(replace(spec, per_request=True))
    return LiveEngine(programs, prepared, model.mesh, slots, max_waiting, tokenizer.eos_ids)
