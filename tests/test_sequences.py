"""Sums and means over a sequence, however sequences lie in rows, by explicit loops."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_docs import example_conf, with_the_example  # noqa: F401
from test_packing import layouts

from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.algorithms.sequences import sequence_mean, sequence_sum
from tunix_lite.algorithms.sft import SFT
from tunix_lite.basics.errors import ConfigError
from tunix_lite.basics.types import RowBatch
from tunix_lite.settings import compose as composing
from tunix_lite.settings.config import reduction_of


def padded(x_RW, fill=0):
    """All rows in one shape, so that little is compiled."""
    R, W = x_RW.shape
    return np.pad(x_RW, ((0, 24 - R), (0, 48 - W)), constant_values=fill)


def placed(layout, x_BT, fill):
    """In rows, with a number where nothing is."""
    return np.where(layout.source < 0, np.float32(fill), layout.place(x_BT))


def in_rows(layout, weight) -> RowBatch:
    """What RowLayout.lay_out makes of the batch, as far as a loss looks at it."""
    is_packed = (layout.source.reshape(-1) != np.arange(layout.source.size)).any()
    return RowBatch(
        tokens=None,
        token_mask=None,
        loss_weight=padded(layout.place(weight)),
        segment_ids=padded(layout.segment_ids),
        completion_ids=None if layout.completion_ids is None else padded(layout.completion_ids),
        scored=np.zeros(1) if is_packed else None,
    )


@jax.jit
def summed(x_RW, slope_RW, batch):
    """Sum, mean and what the slopes of the sum make of x."""
    total, pull = jax.vjp(lambda x: sequence_sum(x, batch), x_RW)
    return total, sequence_mean(x_RW, batch), pull(slope_RW)[0]


@settings(deadline=None, max_examples=40)
@given(layouts(), st.integers(0, 10_000))
def test_a_sum_over_a_sequence_and_its_slope_are_those_of_the_sequence_by_itself(made, seed):
    (_, _, counts), layout, *_ = made
    rng = np.random.default_rng(seed)
    weight = np.where(counts, rng.uniform(0.5, 1.5, counts.shape), 0).astype(np.float32)
    x, slope = rng.normal(size=(2, *counts.shape)).astype(np.float32)
    x = np.where(counts, x, np.inf).astype(np.float32)  # what does not count never matters
    batch = in_rows(layout, weight)
    wanted, wanted_mean, pulled = (np.zeros(counts.shape) for _ in range(3))
    for b, real in enumerate(counts):
        if real.any():
            wanted[b, real] = x[b, real].astype(np.float64).sum()
            wanted_mean[b, real] = x[b, real].astype(np.float64).mean()
            pulled[b, real] = slope[b, real].astype(np.float64).sum()
    found = summed(padded(placed(layout, x, np.inf)), padded(placed(layout, slope, 7.0), 7.0), batch)
    R, W = layout.source.shape
    for got, right in zip(found, (wanted, wanted_mean, pulled)):
        np.testing.assert_allclose(layout.back(got[:R, :W]), right, atol=1e-5)
        assert not np.asarray(got)[batch.loss_weight == 0].any()


# ---- an algorithm says how its loss adds up


@dataclass(frozen=True)
class LossOfItsOwn(GRPO):
    """It inherits what GRPO says, which is about another loss."""

    def loss(self, scores, batch):
        return jnp.mean(scores.logprobs.mean(axis=1) ** 2), {}


@dataclass(frozen=True)
class SaysSo(LossOfItsOwn):
    loss_reduction = "sequences"


@dataclass(frozen=True)
class OtherBatches(GRPO):
    def batch_of(self, *arguments):
        return super().batch_of(*arguments)


@dataclass(frozen=True)
class CollectsItself(GRPO):
    """As algorithms were: nobody would call this, and the run would be GRPO's."""

    def collect(self, policy, task, params, examples, key):
        raise AssertionError


def test_an_algorithm_that_samples_by_itself_gets_the_line_to_write_in_its_place():
    with pytest.raises(ConfigError) as error:
        composing.compose(["~algorithm", "+algorithm={_target_: test_sequences.CollectsItself}"])
    assert "CollectsItself.collect" in str(error.value)
    assert "def batch_of(self, policy, task, params, examples, groups)" in str(error.value)


def test_a_loss_says_itself_how_it_adds_up():
    kinds = {GRPO: "sequences", SFT: "tokens", LossOfItsOwn: None, SaysSo: "sequences", OtherBatches: "sequences"}
    assert {kind: reduction_of(kind()) for kind in kinds} == kinds


def test_packing_is_refused_to_a_loss_that_does_not_say_how_it_adds_up():
    mine = "algorithm={_target_: test_sequences.LossOfItsOwn}"
    assert composing.compose(["~algorithm", f"+{mine}"]).training.packing == "auto"
    with pytest.raises(ConfigError) as error:
        composing.compose(["~algorithm", f"+{mine}", "training.packing=prefix"])
    said = str(error.value)
    assert said.startswith("training.packing=prefix: a row then holds several completions, and LossOfItsOwn does")
    assert 'loss_reduction = "tokens"' in said and "sequence_mean" in said and "training.packing=none" in said
    composing.compose(["~algorithm", "+algorithm={_target_: test_sequences.SaysSo}", "training.packing=prefix"])
