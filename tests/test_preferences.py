"""Preferences and distillation: scores under today's weights, DPO's gradient, and a frozen teacher."""

import jax
import jax.numpy as jnp
import numpy as np
from conftest import random_params

from tunix_lite.learner.policy import make_policy, token_logprobs
from tunix_lite.types import Batch


def test_a_batch_is_scored_under_the_weights_that_are_given(cfg, params, rollout):
    """`rescore` under two sets of weights equals the scores of whole sequences under each."""
    mask = np.asarray(rollout.completion_mask)
    batch = Batch(
        np.asarray(rollout.tokens), np.asarray(rollout.token_mask), (mask / mask.sum()).astype(np.float32), mask * 1e30
    )
    policy = make_policy(cfg, None, temperature=1.0, reference=params)
    for weights in (params, random_params(cfg, seed=5)):
        found = policy.rescore(weights, batch)
        whole = token_logprobs(weights, jnp.asarray(batch.tokens), jnp.asarray(batch.token_mask), cfg=cfg)
        np.testing.assert_allclose(found, np.where(mask, whole, 0), atol=2e-5)
    np.testing.assert_array_equal(
        policy.scorers["reference"](batch), policy.rescore(jax.tree.map(jnp.copy, params), batch)
    )
