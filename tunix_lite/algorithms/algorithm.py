"""Interface of an algorithm, and of the policy and the task that it uses.

An algorithm is any object with the fields of `Algorithm`: usually a frozen dataclass, whose fields
are its settings. YAML names it by its dotted path.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from tunix_lite.algorithms.groups import Groups
from tunix_lite.basics.types import (
    Batch,
    Graded,
    Metrics,
    Params,
    Prompts,
    Rollout,
    RowBatch,
    TokenScores,
)

# a loss, a number, and its metrics
LossAndMetrics = tuple[jax.Array, Metrics]


class Generate(Protocol):
    """Samples completions. A policy may take more settings than these."""

    def __call__(
        self,
        params: Params,
        prompts: Prompts,
        key: jax.Array,
        num_generations: int = 1,
        *,
        temperature: float = ...,
        on_finished: Callable[[int, Any], None] | None = None,
        partner: object | None = None,
    ) -> Rollout:
        """Returns P * G rows: row p * G + g is generation g of prompt p. It may call
        on_finished(row, tokens) when a completion has ended; others are graded at the end.
        partner: answers the turns of each row's conversation; None: completions are single
        turns."""


class Scorer(Protocol):
    """Scores a batch under frozen weights of its own, such as those of the reference: [B, T]
    float32, an array of the host; 0 where no token counts. A batch may have more sequences than an
    update: they are scored in parts as large as that."""

    def __call__(self, batch: Batch) -> np.ndarray: ...

    def compiled(self, batch: RowBatch) -> jax.stages.Compiled:
        """Its program for rows, or for their shapes."""


class Rescorer(Protocol):
    """A Scorer of weights that come with the batch, such as today's."""

    def __call__(self, params: Params, batch: Batch) -> np.ndarray: ...

    def compiled(self, params: Params, batch: RowBatch) -> jax.stages.Compiled:
        """Its program for these arguments, or for their shapes."""


@dataclass(frozen=True)
class TeacherComparison:
    """Comparison of the policy with one of the algorithm's frozen models, token by token.
    Example: TeacherComparison("teacher", "reverse")."""

    model: str  # the name of the frozen model
    divergence: str  # forward, reverse or jensen_shannon (models/divergence.py)
    mix: float = 0.5  # weight b of jensen_shannon


@dataclass(frozen=True)
class Policy:
    """All that an algorithm may ask of a model. `params` are its current weights; under LoRA, the
    frozen base with its adapters attached; with a critic, what basics.types names of each network,
    for `scores` and `values` alone.
    Example: Policy(make_generate(...), scores, {"reference": scorer}) for a loss with a KL term."""

    # None: the policy only scores
    generate: Generate | None
    # (params, batch in rows) -> TokenScores [R, W]; called inside of jit, differentiated
    scores: Callable[[Params, RowBatch], TokenScores]
    # frozen scorers by name; "reference", if `needs.reference`: the policy at the start of training
    scorers: Mapping[str, Scorer] = field(default_factory=dict)
    # (params, batch) -> `scores` for use in `batch_of`; an algorithm that calls it says
    # Needs(rescore=True)
    rescore: Rescorer | None = None
    # batch -> the batch with what the update needs, so that `scores` have divergence; None: no
    # comparison
    compare: Callable[[Batch], Batch] | None = None
    # (params, batch) -> values of the critic, so that `scores` have values; None: `needs.critic`
    # names none
    values: Rescorer | None = None


class _GroupGrader(Protocol):
    """Grades the completions of a batch of examples, one by one, while others are still sampled."""

    def submit(self, row: int, tokens: Sequence[int]) -> None:
        """Sends a completion that has ended to the rewards. row: its row of the rollout."""

    def results(self, rollout: Rollout) -> Graded:
        """Waits for all grades. Completions that were not submitted are graded now."""


class TaskInterface(Protocol):
    """All that an algorithm may ask of a task (tasks/task.py)."""

    long_prompts: str  # treatment of prompts that are too long: error, truncate or drop

    def prompts(self, examples: list[dict]) -> Prompts:
        """The tokens of each example's prompt."""

    def prompts_with(
        self, examples: list[dict], prompt: str, max_length: int | None
    ) -> Prompts:
        """The same with another message; {names} are fields of the example. max_length: tokens of
        it; None: as many as of any prompt."""

    def partner(self, examples: list[dict], num_generations: int = 1) -> Any | None:
        """What answers the turns of conversations, for policy.generate: num_generations for each
        example, side by side. None: the task has no environment."""

    def grader(self, examples: list[dict], num_generations: int = 1) -> _GroupGrader:
        """Grades num_generations completions of each example, a group, side by side."""

    def grade(
        self, examples: list[dict], rollout: Rollout, num_generations: int = 1
    ) -> Graded:
        """Grades all at once: num_generations completions of each example, side by side."""

    def demonstrations(
        self, examples: list[dict], name: str = "completion"
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """tokens, token_mask and completion_mask [B, T]: prompts with the demonstrations that are
        in the field `name`."""

    def conversations(
        self, examples: list[dict], name: str = "completion"
    ) -> tuple[np.ndarray, np.ndarray]:
        """tokens and token_mask [B, T]: whole conversations with the answers in the field `name`,
        left-padded, up to the token at which a reward model is read."""

    def segments(self, examples: list[dict]) -> np.ndarray | None:
        """[B, T] int32: the documents of the tokens that `demonstrations` gives, as
        Batch.segment_ids; None: each row is one."""

    def truncated(self, examples: list[dict]) -> int:
        """Counts the prompts that have lost their beginning."""


@dataclass(frozen=True)
class Critic:
    """A network that learns the value of each token, and trains beside the policy.
    Example: Critic(is_own=True, learning_rate=1e-5, warmup=20)."""

    # whether it has layers of its own, a copy of the policy's; else it is a head on those
    is_own: bool = False
    # its peak learning rate; None: that of the policy
    learning_rate: float | None = None
    # updates at the start of training that the critic makes alone
    warmup: int = 0


# names of parts of a run, which a frozen model cannot have
TAKEN = ("reference", "rollout", "scoring", "update", "prefill", "decode", "critic", "values")


@dataclass(frozen=True)
class Needs:
    """Properties of an algorithm that a run must know before it starts, to plan memory and to load
    models. Raises ValueError for a frozen model with the name of something else.
    Example: Needs() samples completions and learns from their advantages;
    Needs(demonstrations=("completion",)) samples nothing."""

    # whether the run makes policy.scorers["reference"], the policy that training starts from
    reference: bool = False
    # whether `batch_of` calls policy.rescore
    rescore: bool = False
    # fields of examples that are learned from; (): completions are sampled
    demonstrations: tuple[str, ...] = ()
    # fields of float32 of its batches beside loss_weight; None: `batch_fields` says the usual ones
    fields: tuple[str, ...] | None = None
    # names of the float32 values of its own in Batch.streams
    streams: tuple[str, ...] = ()
    # models.source.TeacherConfig by name: models that the run loads as policy.scorers
    frozen_models: Mapping[str, Any] = field(default_factory=dict)
    # the scores of the loss have divergence from this model
    comparison: TeacherComparison | None = None
    # Network that trains beside the policy. `batch_of` gets both in params and calls policy.values,
    # and the scores of the loss have values. None: the policy trains alone
    critic: Critic | None = None
    # updates that `batch_of` makes a batch for: so many mini-batches, one after the other
    mini_batches: int = 1
    # whether `batch_of` asks nothing of policy and params, so that the next batch is made beside an
    # update
    reads_ahead: bool = False
    # times as many examples as a rollout needs that are drawn: those of a further round replace
    # groups that agree
    rounds: int = 1
    # why it cannot learn from tokens that earlier weights drew, and what to set instead; None: it
    # can (rollout.overlap)
    fresh: str | None = None
    # unit of its loss on held-out examples: nats (of a token, so that its exponential is a
    # perplexity) or objective; None: the loss has the right gradient and no meaning of its own.
    # With a unit, its metrics are sums.
    held_out_loss: str | None = None
    # what its policy gives of a token: logits, or score, the number of a reward model
    output: str = "logits"

    def __post_init__(self):
        if taken := set(TAKEN) & self.frozen_models.keys():
            raise ValueError(
                f"frozen_models: {taken.pop()!r} is the name of something else in a run"
            )

    @property
    def is_sampled(self) -> bool:
        """Whether its batches are completions that the policy samples."""
        return not self.demonstrations

    @property
    def batch_fields(self) -> tuple[str, ...]:
        """Fields of float32 that batches have beside loss_weight: `fields`, or advantages and
        old_logprobs of what was sampled, and ref_logprobs with a reference."""
        if self.fields is not None:
            return self.fields
        sampled = ("advantages", "old_logprobs") if self.is_sampled else ()
        return (*sampled, "ref_logprobs") if self.reference else sampled


class Algorithm(Protocol):
    """Two functions, and what a run must know of them before it starts.

    Example: algorithms/grpo.py samples, algorithms/sft.py does not.
    """

    num_generations: int  # completions per prompt
    updates_per_rollout: int  # optimizer updates made from one batch
    needs: Needs
    # sums of the loss. tokens: only over tokens; sequences: also within a completion, by
    # algorithms/sequences.py. None, or no such field: it may not be packed.
    loss_reduction: str | None

    def batch_of(
        self,
        policy: Policy,
        task: TaskInterface,
        params: Params,
        examples: list[dict],
        groups: Groups | None,
    ) -> tuple[Batch, Metrics]:
        """Returns the batch to learn from ([B, T], arrays of the host) and metrics, to which the
        caller may add.

        examples: P rows of data; with `needs.rounds`, P of each round. groups: completions of P of
        them, sampled with `params` by algorithms/sampling.py; None for an algorithm of
        demonstrations."""

    def loss(self, scores: TokenScores, batch: RowBatch) -> LossAndMetrics:
        """Returns the loss, a number, and its metrics, inside of jit. scores and batch are in rows,
        [R, W].

        Numbers are sums weighted by batch.loss_weight, so that micro-batches and shards may add
        them; of a types.Max they take the largest."""


def refuse(problems: Mapping[str, bool]) -> None:
    """Raises ValueError with the first of these messages that is true."""
    for problem, is_there in problems.items():
        if is_there:
            raise ValueError(problem)
