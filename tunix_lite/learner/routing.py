"""What routers did with the tokens of a batch: sums, and the losses and metrics made of them.

  aux = E sum_e f_e P_e     f_e = pairs (token, choice) of expert e / N, P_e = sum of p_e / N
  z   = sum (logsumexp of the router's logits)^2 / N

N counts pairs (token, layer): the tokens of all layers together, padding left out. f_e is not
divided by the k choices of a token. So transformers defines aux (load_balancing_loss_func). f has
no gradient; z is of arXiv:2202.08906.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tunix_lite.basics.types import Metrics, RowBatch, TokenScores
from tunix_lite.models.experts import Routed

# among the metrics of a micro-batch, the sums that become numbers once all parts are added up
EXPERTS = "experts"
# constants of a batch that the losses of routers need of all of it: the load [L, E] and the number
# of tokens
LOAD = "expert_load"
NUM_TOKENS = "num_tokens"


class ExpertSums(NamedTuple):
    """Sums over the real tokens of a micro-batch, float32: micro-batches and shards add them up.

    Example: 10 tokens of a model with 2 layers and 2 of 4 experts: `load` [2, 4] sums to 40.
    """

    load: jax.Array  # [L, E] tokens that each expert got
    prob: jax.Array  # [L, E] probabilities that the router gave it, with their gradient
    z: jax.Array  # [] squared logsumexp of the router's logits, with its gradient
    tokens: jax.Array  # []
    # [] tokens with recorded routes; tokens, and pairs (token, layer), whose router would have
    # chosen other experts now. None: nothing is replayed
    replayed: jax.Array | None = None
    moved_tokens: jax.Array | None = None
    moved_pairs: jax.Array | None = None


def with_expert_sums(
    scores_RW: TokenScores, routed: Routed, routes_LRWk: jax.Array | None, batch: RowBatch
) -> TokenScores:
    """The scores with the sums of their forward pass; those of another head as they are, which have
    no field for them. routed: of all layers, stacked. routes_LRWk: as it took them."""
    if not hasattr(scores_RW, "experts"):
        return scores_RW
    count = partial(jnp.sum, dtype=jnp.float32)
    is_token_RW = batch.segment_ids > 0
    sums = ExpertSums(
        load=routed.load,
        prob=routed.prob_sum,
        z=jnp.sum(routed.z_sum),
        tokens=count(is_token_RW),
    )
    if routes_LRWk is not None:
        # Experts in another order are the same route.
        native_LRW1k = routed.native[..., None, :]
        is_among = (routed.ids[..., None] == native_LRW1k).any(axis=-1)
        is_replayed_LRW = (routes_LRWk[..., 0] >= 0) & is_token_RW
        has_moved_LRW = ~is_among.all(axis=-1) & is_replayed_LRW
        sums = sums._replace(
            replayed=count(is_replayed_LRW[0]),
            moved_tokens=count(has_moved_LRW.any(axis=0)),
            moved_pairs=count(has_moved_LRW),
        )
    return scores_RW._replace(experts=sums)


@dataclass(frozen=True)
class RouterLoss:
    """The losses of routers, which are added to that of the algorithm.

    Example: RouterLoss(aux_coef=0.001), as Qwen 3 was trained.
    """

    aux_coef: float = 0.0
    z_coef: float = 0.0

    def __call__(self, sums: ExpertSums, totals: dict[str, jax.Array]) -> jax.Array:
        """The share of a micro-batch in the losses. totals: LOAD and NUM_TOKENS of the whole batch,
        so that shares add up to it; without LOAD the micro-batch is all of it."""
        load_LE = jax.lax.stop_gradient(totals.get(LOAD, sums.load))
        num_layers, num_experts = load_LE.shape
        pairs = num_layers * totals[NUM_TOKENS]
        share_E = jnp.sum(load_LE, axis=0) / pairs
        aux = num_experts * jnp.sum(share_E * jnp.sum(sums.prob, axis=0)) / pairs
        return self.aux_coef * aux + self.z_coef * sums.z / pairs


def with_expert_metrics(metrics: Metrics) -> Metrics:
    """The metrics of a whole batch: sums over experts become numbers; others stay."""
    sums = metrics[EXPERTS]
    num_layers, num_experts = sums.load.shape
    share_LE = sums.load / jnp.maximum(jnp.sum(sums.load, axis=1, keepdims=True), 1)
    entropy_L = -jnp.sum(jax.scipy.special.xlogy(share_LE, share_LE), axis=1)
    tokens = jnp.maximum(sums.tokens, 1)
    numbers = {
        # 1: every expert gets as many tokens; 0: one expert gets all
        "experts/load_entropy": jnp.mean(entropy_L) / jnp.log(max(2, num_experts)),
        # of the busiest expert of all layers, in even shares
        "experts/load_max": num_experts * jnp.max(share_LE),
        "experts/aux_loss": RouterLoss(aux_coef=1.0)(sums, {NUM_TOKENS: tokens}),
        "experts/router_z": sums.z / (num_layers * tokens),
    }
    if sums.replayed is not None:
        replayed = jnp.maximum(sums.replayed, 1)
        numbers["experts/rerouted_tokens"] = sums.moved_tokens / replayed
        numbers["experts/rerouted"] = sums.moved_pairs / (num_layers * replayed)
    return {name: value for name, value in metrics.items() if name != EXPERTS} | numbers
