"""The compiled programs of a trainer, each kept for the next call with the same settings."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from tunix_lite.algorithms.algorithm import Policy
from tunix_lite.learner.apart import gradient_program, loss_program, optimizer_program
from tunix_lite.learner.optim import Optimizer
from tunix_lite.learner.step import TrainStep
from tunix_lite.models import attention, decoder
from tunix_lite.models.lora import LoraConfig
from tunix_lite.models.vocabulary import token_scores
from tunix_lite.models.weights import Table
from tunix_lite.parallel.compiler_options import OptionsByPlatform
from tunix_lite.trainer.data import masked
from tunix_lite.trainer.losses import TokenLoss
from tunix_lite.types import Params, RowBatch, TokenScores, TrainState

# Programs that are kept of each kind: clients of a server may send ever new settings.
MOST_KEPT = 32


def target_scores(
    params: Params,
    batch: RowBatch,
    *,
    cfg: decoder.Architecture,
    dtype: type,
    **forward: Any,
) -> TokenScores:
    """The scores of batch.streams["targets"], each at the token that it is predicted from; [R, W]
    float32, 0 where a row holds nothing. forward: settings of decoder.forward."""
    meta = attention.meta_of_rows(batch)
    hidden_RWD = decoder.forward(params, cfg, batch.tokens, meta, dtype, **forward)
    table_VD = decoder.output_table(params, cfg)
    targets_RW = batch.streams["targets"]
    found = token_scores(hidden_RWD, table_VD, targets_RW, cfg.final_softcap, 1.0)
    return TokenScores(*(masked(x_RW, batch) for x_RW in found))


@dataclass
class TrainerPrograms:
    """What a trainer has compiled.

    Example: TrainerPrograms(policy, seed=0).losses(token_loss("ppo", {}), None).
    """

    # whose scores are `target_scores`
    policy: Policy
    # of rounding
    seed: int
    # of the schedule of a run
    max_steps: int = 1
    # of the gradients, by platform
    compiler_options: OptionsByPlatform = field(default_factory=dict)
    kept: dict[str, OrderedDict] = field(default_factory=dict)

    def gradients(self, loss: TokenLoss, lora: LoraConfig | None, params: Params) -> Callable:
        """As learner.apart.gradient_program."""
        settings = {"lora": lora, "seed": self.seed, "compiler_options": self.compiler_options}
        step = partial(TrainStep, self.policy, loss, None, **settings)
        key = loss, lora, shardings_of(params)
        return self.once("gradients", key, lambda: gradient_program(step(), params))

    def losses(self, loss: TokenLoss, lora: LoraConfig | None) -> Callable:
        """As learner.apart.loss_program."""
        step = partial(TrainStep, self.policy, loss, None, lora=lora, seed=self.seed)
        return self.once("losses", (loss, lora), lambda: loss_program(step()))

    def optimizer(self, cfg: Optimizer, table: Table | None, state: TrainState) -> Callable:
        """As learner.apart.optimizer_program."""
        make = partial(optimizer_program, cfg, table, self.seed, state, self.max_steps)
        return self.once("optimizer", (cfg, shardings_of(state)), make)

    def once(self, kind: str, key: Hashable, make: Callable[[], Callable]) -> Callable:
        """The program of this key, made by the first call; the one used longest ago goes."""
        kept = self.kept.setdefault(kind, OrderedDict())
        if key not in kept:
            kept[key] = make()
        kept.move_to_end(key)
        while len(kept) > MOST_KEPT:
            kept.popitem(last=False)
        return kept[key]


def shardings_of(tree: Params | TrainState) -> tuple:
    """Form, shapes and places of arrays, as a key."""
    leaves, form = jax.tree.flatten(tree)
    return form, *((x.shape, x.dtype, x.sharding) for x in leaves)
