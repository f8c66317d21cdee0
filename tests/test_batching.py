"""What is not given of a batch is derived, and what contradicts itself shows the arithmetic; FLOPs and bytes by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunix_lite.basics.errors import ConfigError
from tunix_lite.learner.packing import RowShape
from tunix_lite.learner.rows import RowLayout
from tunix_lite.models.architecture import Architecture
from tunix_lite.planning.flops import _head_params, _matmul_params, attention_flops, update_flops
from tunix_lite.settings.batch_size import plan_batch, plan_rows
from tunix_lite.settings.compose import compose
from tunix_lite.settings.config import TrainingConfig
from tunix_lite.settings.resolved_run import find_model, tokens_at_once


def run_with(G=8, **training) -> SimpleNamespace:
    return SimpleNamespace(training=TrainingConfig(**training), algorithm=SimpleNamespace(num_generations=G))


@pytest.mark.parametrize(
    "training, fsdp, expected",
    [
        ({}, 4, (16, 32, 1)),
        ({"micro_batch_size": 4}, 4, (16, 4, 8)),
        ({"prompts_per_step": None, "micro_batch_size": 4, "gradient_accumulation_steps": 2}, 4, (4, 4, 2)),
    ],
)
def test_the_rest_of_a_batch_is_derived(training, fsdp, expected):
    plan = plan_batch(run_with(**training), fsdp)
    assert (plan.prompts, plan.micro_batch_size, plan.num_micro_batches) == expected


@pytest.mark.parametrize(
    "training, fsdp, message",
    [
        ({"micro_batch_size": 3}, 4, "prompts_per_step=16 x num_generations=8 = 128 .* each of the 4 shards has 32"),
        ({"micro_batch_size": 4, "gradient_accumulation_steps": 4}, 4, "cannot make 128.*Set one of the three to null"),
        ({"prompts_per_step": 3}, 16, "= 24 sequences per update do not divide over fsdp=16; use a multiple of 2"),
    ],
)
def test_batches_that_contradict_themselves_show_the_arithmetic(training, fsdp, message):
    with pytest.raises(ConfigError, match=message):
        plan_batch(run_with(**training), fsdp)


@given(
    st.one_of(st.none(), st.integers(1, 40)),
    st.one_of(st.none(), st.integers(1, 40)),
    st.one_of(st.none(), st.integers(1, 9)),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 8]),
)
def test_a_batch_plan_satisfies_its_identity_and_what_was_asked(prompts, micro, accumulation, fsdp, G):
    asked = {"prompts_per_step": prompts, "micro_batch_size": micro, "gradient_accumulation_steps": accumulation}
    try:
        plan = plan_batch(run_with(G, **asked), fsdp)
    except ConfigError:
        return
    assert plan.prompts * G == plan.micro_batch_size * fsdp * plan.num_micro_batches
    assert prompts in (None, plan.prompts)
    assert micro in (None, plan.micro_batch_size)
    assert accumulation in (None, plan.num_micro_batches)


def test_a_micro_batch_has_2048_tokens_where_nobody_says_or_one_row_that_is_longer():
    # 80 tokens (of 25, as 128 take 6 parts), 2048, 2080
    for new, rows_per_micro_batch in ((48, 22), (2048 - 32, 1), (2048, 1)):
        run = compose(["training.packing=sequences", f"generation.max_new_tokens={new}"])
        rows = plan_rows(run, plan_batch(run, 1))
        assert (rows.width, rows.rows_per_micro_batch) == (32 + new, rows_per_micro_batch)


def test_on_a_cpu_a_large_model_has_fewer_tokens_in_a_micro_batch():
    """30 layers of q and its output (2 x 576), keys and values (2 x 192), gate and up (2 x 1536) and down (576) in
    float32 are 622,080 bytes a token, of which 2^29 bytes hold 863."""
    cfg = find_model(compose(["model=smollm2_135m"]).model)[0]
    assert tokens_at_once(cfg, "cpu") == 863
    assert tokens_at_once(cfg, "tpu") == 2048
    assert tokens_at_once(find_model(compose([]).model)[0], "cpu") == 2048


@pytest.mark.parametrize(
    "more, fsdp, lanes, parts, rows_per_micro_batch",
    [
        # 16 prompts of 32 tokens x 8 completions of 64: with k lanes 16 ceil(8 / k) rows of 32 + 64 k tokens, 2048 at
        # once. k = 1, 2, 4, 8: 128 rows in 7 parts, 64 in 6, 32 in 5, 16 in 6; of tokens 19, 11, 7, 3 rows a part
        # 12,768, 10,560, 10,080, 9,792
        ([], 1, 8, 6, 3),
        ([], 32, 4, 1, 1),  # 16 rows would leave half of the shards without any
        # rows are even, and 96 wide
        (["training.micro_batch_tokens=95", "generation.max_new_tokens=63"], 1, 1, 128, 1),
        (["generation.max_new_tokens=1024"], 1, 4, 32, 1),  # four at least, whatever a micro-batch has
        (["training.sync_gradients_every=4"], 1, 8, 8, 2),  # no more in a micro-batch than four at a time need
    ],
)
def test_a_row_of_shared_prompts_makes_the_fewest_tokens(more, fsdp, lanes, parts, rows_per_micro_batch):
    lengths = ["generation.max_prompt_length=32", "generation.max_new_tokens=64", "training.packing=prefix"]
    run = compose([*lengths, "training.prompts_per_step=16", "algorithm.num_generations=8", *more])
    rows = plan_rows(run, plan_batch(run, fsdp))
    new = run.generation.max_new_tokens + run.generation.max_new_tokens % 2
    shape = RowShape(new, lanes, 160 if new == 1024 else 32)  # 4128 columns have room for 129 more: four prompts
    assert rows == RowLayout("prefix", parts, None, shape, rows_per_micro_batch)


# ---- FLOPs and bytes, against numbers that can be counted by hand


GEMMA3_1B = Architecture(262144, 26, 1152, num_heads=4, num_kv_heads=1, head_dim=256, mlp_dim=6912, window=512)


def test_gemma3_1b_multiplies_with_its_published_params_less_the_norms():
    q_and_o, k_and_v, gate_up_down = 2 * 1152 * 4 * 256, 2 * 1152 * 256, 3 * 1152 * 6912
    norms = 26 * (4 * 1152 + 2 * 256) + 1152
    assert _matmul_params(GEMMA3_1B) == 26 * (q_and_o + k_and_v + gate_up_down) == 697_761_792
    assert _head_params(GEMMA3_1B) == 262144 * 1152 == 301_989_888
    assert _matmul_params(GEMMA3_1B) + _head_params(GEMMA3_1B) + norms == 999_885_952  # as the hub counts them


def pairs(length: int, window: int) -> int:
    """Who sees whom, counted one by one."""
    return sum(s <= t and t - s < window for t in range(length) for s in range(length))


@pytest.mark.parametrize("lengths", [[6], [0, 3, 5, 12, 12]])
def test_attention_is_the_pairs_of_tokens_that_see_each_other(cfg, lengths):
    assert (cfg.kinds, cfg.window, cfg.num_heads, cfg.head_dim) == (("local", "global", "local"), 5, 4, 8)
    counted = sum(2 * pairs(length, 5) + pairs(length, length + 1) for length in lengths)
    assert attention_flops(cfg, lengths) == 4 * 4 * 8 * counted
    assert attention_flops(cfg, np.array(lengths, np.int32)) == 4 * 4 * 8 * counted


def test_full_training_is_six_flops_a_weight_and_token_and_adapters_leave_out_gradients_of_frozen_weights():
    P, V = 697_761_792, 301_989_888
    assert update_flops(GEMMA3_1B, 1000, 600, 5e9) == 6 * P * 1000 + 6 * V * 600 + 15e9
    adapters = 26 * 16 * ((1152 + 4 * 256) * 2)  # rank 16 on q and o
    counted = 4 * P * 1000 + 6 * adapters * 1000 + 4 * V * 600 + 15e9
    assert update_flops(GEMMA3_1B, 1000, 600, 5e9, lora_params=adapters) == counted
