"""A loaded model as an engine that requests join and leave at any time."""

from dataclasses import replace

import jax

from tunix_lite.basics.types import Params
from tunix_lite.inference.language_model import LanguageModel
from tunix_lite.rollout.generate import make_sampler
from tunix_lite.rollout.live import LiveEngine
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig, round_up_to_shards

# Slots where rollout.num_slots does not say how many.
_SLOTS = 32


def live_engine(
    model: LanguageModel,
    generation: GenerationConfig,
    rollout: RolloutConfig,
    max_waiting: int = 256,
    prepared: Params | None = None,
) -> LiveEngine:
    """A live engine with the weights of the model, or `prepared` ones of make_prepare. Raises
    ValueError for a setting that it does not have. generation: the most tokens; what is drawn is
    for each request to say."""
    # Prompt and completion share the model's positions; each request says how.
    most = model.cfg.max_positions - 1
    new = min(generation.max_new_tokens, most)
    width = min(generation.max_prompt_length, most)
    plain = replace(
        generation,
        max_prompt_length=width,
        max_new_tokens=new,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        stop=(),
        stop_token_ids=(),
    )
    if rollout.is_fused:
        raise ValueError(
            "rollout.kernels=fused: each request says what is cut off, and the kernels draw from "
            "all tokens; use auto or xla"
        )
    tokenizer = model.tokenizer
    with jax.set_mesh(model.mesh):
        slots = round_up_to_shards(rollout.fixed_slots or _SLOTS, model.mesh.shape["fsdp"])
        how = (model.cfg, plain, tokenizer.eos_ids, tokenizer.pad_id, model.dtype, rollout)
        sampler = make_sampler(*how, per_request=True)
        if prepared is None:
            prepared = sampler.prepare(model.params)
    return LiveEngine(
        sampler.programs, prepared, model.mesh, slots, max_waiting, tokenizer.eos_ids
    )
