"""The critic: it learns beside the policy what reward is still to come. It is a head on the hidden
states of the policy, or of layers of its own.

Its value of tokens[b, t] is that of the state before the token, V(s_t): it is read where the token
is predicted, as the token's log-probability is.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tunix_lite.algorithms.algorithm import Critic
from tunix_lite.basics.types import CRITIC, POLICY, Params, RowBatch, TokenScores
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.quantize import init_stored, stored_table
from tunix_lite.models.scalar_head import scalar_head, scalar_scores
from tunix_lite.models.vocabulary import token_scores
from tunix_lite.models.weights import Table


def critic_table(critic: Critic, cfg: Architecture, trained: Table, storage: str) -> Table:
    """Declares the weights of a critic. trained: those of the policy that train; storage: of what
    trains, fp32 or bf16."""
    head = stored_table(scalar_head(cfg, with_bias=True), storage)
    return (trained if critic.is_own else {}) | head


def with_critic(critic: Critic, cfg: Architecture, params: Params, storage: str) -> Params:
    """The policy and a critic that begins with a head of zeros: every value is 0 at first. Layers
    of its own begin as a copy of the policy's. params: of the policy, those that train."""
    head = init_stored(scalar_head(cfg, with_bias=True), jax.random.key(0), storage)
    layers = jax.tree.map(jnp.copy, params) if critic.is_own else {}
    return {POLICY: params, CRITIC: layers | head}


def token_values(
    scores: Callable[..., jax.Array], critic: Critic, params: Params, batch: RowBatch
) -> jax.Array:
    """The values [R, W] of the tokens that count. scores: policy.batch_scores with its settings.
    params: of both networks. Recorded routes are those of the policy's routers: layers of the
    critic's own have their own routers, which choose."""
    layers = params[POLICY]
    if critic.is_own:
        layers, batch = params[CRITIC], batch.replace(routes=None)

    def head(before_RMD: jax.Array, *_: jax.Array | float | None) -> jax.Array:
        return scalar_scores(params[CRITIC], before_RMD)

    return scores(layers, batch, head=head)


def with_values(
    scores: Callable[..., TokenScores], critic: Critic
) -> Callable[..., TokenScores]:
    """The scores of the policy, with the values of the critic where params hold one. scores:
    policy.batch_scores with its settings."""

    def valued(params: Params, batch: RowBatch, **how: Any) -> TokenScores:
        if CRITIC not in params:
            return scores(params, batch, **how)
        if critic.is_own:
            values_RW = token_values(scores, critic, params, batch)
            return scores(params[POLICY], batch)._replace(values=values_RW)

        def both(before_RMD: jax.Array, *settings: jax.Array | float | None) -> TokenScores:
            # one pass through the layers serves both heads
            values_RM = scalar_scores(params[CRITIC], before_RMD)
            return token_scores(before_RMD, *settings)._replace(values=values_RM)

        return scores(params[POLICY], batch, head=both)

    return valued


def both_optimizers(
    critic: Critic,
    of_policy: Callable[[Table], optax.GradientTransformation],
    of_critic: Callable[[Table], optax.GradientTransformation],
    tables: dict[str, Table],
) -> optax.GradientTransformation:
    """An optimizer for each network, which clips by its own norm. The policy's begins after the
    critic's warm-up. of_policy and of_critic make them of a table; tables: of the two networks."""

    def table_of(name: str) -> Table:
        # each optimizer sees the tree of both, and no leaves where the other one's are
        return {
            other: t if other == name else optax.MaskedNode() for other, t in tables.items()
        }

    policy = of_policy(table_of(POLICY))
    if critic.warmup:
        policy = optax.conditionally_mask(policy, lambda step: step >= critic.warmup)
    networks = {POLICY: policy, CRITIC: of_critic(table_of(CRITIC))}
    return optax.partition(networks, {name: name for name in networks})
