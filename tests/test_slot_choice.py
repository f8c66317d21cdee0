"""rollout.num_slots=auto: memory says how many slots may be, the clock which of them are fastest."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from conftest import random_params, set_mesh
from test_train import TINY, samples_of

from tunix_lite.rollout import slot_choice
from tunix_lite.rollout.generate import make_sampler
from tunix_lite.rollout.memory import SamplingMemory, slots_that_fit
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.settings.compose import compose
from tunix_lite.train import train

GENERATION = GenerationConfig(6, 8)
AUTO = RolloutConfig("auto", 4)


def memory_of(cfg, slots: int, fsdp: int = 1) -> SamplingMemory:
    set_mesh(fsdp, 1)
    return SamplingMemory.here(cfg, jnp.float32, GENERATION, AUTO, slots, [(slots, 1)])


@pytest.mark.parametrize(
    "slots, fsdp, sizes", [(64, 1, [64, 32, 16]), (2, 1, [2, 1]), (24, 4, [24, 12, 8]), (4, 4, [4])]
)
def test_slots_are_halved_and_stay_multiples_of_fsdp(cfg, slots, fsdp, sizes):
    assert slots_that_fit(memory_of(cfg, slots, fsdp), 0, 10**12) == sizes


def test_memory_bounds_the_slots(cfg):
    """Of 1,000 bytes of weights and 90 % of what is free: a byte less than 16 slots need leaves 8."""
    memory = memory_of(cfg, 64)
    of_16 = replace(memory, num_slots=16)
    needed = 1000 + of_16.cache_bytes() + of_16.prompt_bytes()
    enough = -(-10 * needed // 9)
    assert slots_that_fit(memory, 1000, enough) == [16, 8, 4]
    assert slots_that_fit(memory, 1000, enough - 2) == [8, 4, 2]
    assert slots_that_fit(memory, 1000, 0) == [1]


# ---- the clock. Seconds of a token in each slot, and so tokens a second:
# 16 slots in 0.25 s are 64, 32 in 0.4 s are 80, 64 in 1 s are 64.

SECONDS = {16: 0.25, 32: 0.4, 64: 1.0}


@pytest.fixture
def choose(cfg, monkeypatch):
    """Chooses for 64 requests with these seconds; `measured` has the slots that were timed."""
    monkeypatch.setattr(slot_choice, "free_bytes", lambda: 10**12)
    params = random_params(cfg)
    measured = []

    def choose(seconds: dict, slots: int = 64):
        def decode_seconds(sampler, params):
            return lambda size: measured.append(size) or seconds[size]

        monkeypatch.setattr(slot_choice, "decode_seconds", decode_seconds)
        return slot_choice.choose_slots(memory_of(cfg, slots), params, lambda place: None)

    choose.measured = measured
    return choose


def test_the_fastest_number_of_slots_is_chosen(choose):
    assert choose(SECONDS) == (32, "the fastest; tokens/s of decoding: 16: 64, 32: 80, 64: 64")
    assert choose.measured == [16, 32, 64]


def test_more_slots_are_not_timed_once_they_are_slower(choose):
    assert choose({16: 0.1, 32: 0.4})[0] == 16
    assert choose.measured == [16, 32]


def test_the_clock_times_decoding_itself(cfg):
    memory = memory_of(cfg, 4)
    params = random_params(cfg)
    sampler = make_sampler(cfg, GENERATION, (1,), 0, rollout=AUTO)
    slots, why = slot_choice.choose_slots(memory, params, lambda place: sampler)
    assert slots in (1, 2, 4)
    assert why.startswith("the fastest; tokens/s of decoding")


def test_overlap_and_devices_that_only_sample_need_a_number():
    for other in ({"overlap": "carry"}, {"mesh_shape": [[1, 1], ["fsdp", "tp"]]}):
        with pytest.raises(ValueError, match="num_slots=auto is for overlap=none without rollout.mesh_shape"):
            RolloutConfig("auto", **other)
    for wrong in ("many", 0, True, 1.5):
        with pytest.raises(ValueError, match="num_slots=.* must be at least 1, auto, or null"):
            RolloutConfig(wrong)


def test_a_run_that_resumes_with_another_number_draws_the_same_tokens(tmp_path):
    """Two updates with slots that the clock chose, then two with three slots: as four without a change."""
    small = [
        *(*TINY, "training.prompts_per_step=2", "algorithm.num_generations=2", "evaluation.num_examples=0"),
        *("model.mesh_shape=[[1,1],[fsdp,tp]]", "generation.max_new_tokens=8", "tracking.tensorboard=false"),
        *("tracking.samples_interval_steps=4", "training.save_interval_steps=2"),
    ]
    train(compose([*small, "training.max_steps=4", "rollout.num_slots=4"]), tmp_path / "whole")
    train(compose([*small, "training.max_steps=2", "rollout.num_slots=auto"]), tmp_path / "parts")
    train(compose([*small, "training.max_steps=4", "rollout.num_slots=3"]), tmp_path / "parts")
    drawn = [samples_of(tmp_path / name, "step_000004") for name in ("whole", "parts")]
    assert drawn[0] and [row["tokens"] for row in drawn[0]] == [row["tokens"] for row in drawn[1]]
    assert "slots (the fastest; tokens/s of decoding" in (tmp_path / "parts" / "train.log").read_text()
