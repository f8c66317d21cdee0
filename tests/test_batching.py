"""What is not given of a batch is derived; what contradicts itself shows the arithmetic; rows are as wide as pays."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunix_lite.config import TrainingConfig
from tunix_lite.errors import ConfigError
from tunix_lite.learner.packing import RowShape
from tunix_lite.learner.rows import RowLayout
from tunix_lite.resolved.batch_size import plan_batch, plan_rows
from tunix_lite.settings.compose import compose


def run_with(G=8, **training) -> SimpleNamespace:
    return SimpleNamespace(training=TrainingConfig(**training), algorithm=SimpleNamespace(num_generations=G))


@pytest.mark.parametrize(
    "training, fsdp, expected",
    [
        ({}, 4, (16, 32, 1)),
        ({"micro_batch_size": 4}, 4, (16, 4, 8)),
        ({"gradient_accumulation_steps": 4}, 2, (16, 16, 4)),
        ({"micro_batch_size": "auto", "sync_gradients_every": 4}, 2, (16, 16, 4)),
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
        ({"prompts_per_step": None}, 1, "give prompts_per_step or micro_batch_size"),
        ({"prompts_per_step": None, "micro_batch_size": "auto"}, 1, "micro_batch_size=auto needs prompts_per_step"),
        ({"micro_batch_size": "auto", "gradient_accumulation_steps": 2}, 1, "auto derives gradient_accumulation_steps"),
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
    for new, rows_per_part in ((48, 22), (2048 - 32, 1), (2048, 1)):
        run = compose(["training.packing=sequences", f"generation.max_new_tokens={new}"])
        rows = plan_rows(run, plan_batch(run, 1))
        assert (rows.width, rows.rows_per_part) == (32 + new, rows_per_part)


@pytest.mark.parametrize(
    "more, fsdp, lanes, parts, rows_per_part",
    [
        # 16 prompts of 32 tokens x 8 completions of 64: with k lanes 16 ceil(8 / k) rows of 32 + 64 k tokens, 2048 at
        # once. k = 1, 2, 4, 8: 128 rows in 7 parts, 64 in 6, 32 in 5, 16 in 6; of tokens 19, 11, 7, 3 rows a part
        # 12,768, 10,560, 10,080, 9,792
        ([], 1, 8, 6, 3),
        ([], 32, 4, 1, 1),  # 16 rows would leave half of the shards without any
        (["training.micro_batch_tokens=100"], 1, 1, 128, 1),  # no room for two
        # rows are even, and 96 wide
        (["training.micro_batch_tokens=95", "generation.max_new_tokens=63"], 1, 1, 128, 1),
        (["training.micro_batch_tokens=320"], 4, 4, 8, 1),  # 288 tokens
        (["generation.max_new_tokens=1024"], 1, 4, 32, 1),  # four at least, whatever a micro-batch has
        (["training.sync_gradients_every=4"], 1, 8, 8, 2),  # no more in a micro-batch than four at a time need
    ],
)
def test_a_row_of_shared_prompts_makes_the_fewest_tokens(more, fsdp, lanes, parts, rows_per_part):
    lengths = ["generation.max_prompt_length=32", "generation.max_new_tokens=64", "training.packing=prefix"]
    run = compose([*lengths, "training.prompts_per_step=16", "algorithm.num_generations=8", *more])
    rows = plan_rows(run, plan_batch(run, fsdp))
    new = run.generation.max_new_tokens + run.generation.max_new_tokens % 2
    shape = RowShape(new, lanes, 160 if new == 1024 else 32)  # 4128 columns have room for 129 more: four prompts
    assert rows == RowLayout("prefix", parts, None, shape, rows_per_part)
