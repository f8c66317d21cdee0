"""What an algorithm is, and what it may ask of a policy and of a task.

An algorithm is any object with the fields of `Algorithm`: usually a frozen dataclass, whose fields
are its settings, named in YAML by its dotted path. It subclasses nothing.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from tunix_lite.types import Batch, Graded, Metrics, Params, Prompts, Rollout, RowBatch, TokenScores


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
    ) -> Rollout:
        """Returns P * G rows: row p * G + g is generation g of prompt p.

        It may call on_finished(row, tokens) when a completion has ended. A completion that it makes
        no such call for is graded at the end.
        """


class Scorer(Protocol):
    """Log-probabilities of a batch under frozen weights, such as those of the reference."""

    def __call__(self, batch: Batch) -> np.ndarray:
        """Returns [B, T] float32, an array of the host; 0 where no token counts."""

    def compiled(self, batch: RowBatch) -> Any:
        """Returns the compiled program for this batch in rows, or for its shapes."""


class Rescorer(Protocol):
    """Log-probabilities of a batch under weights that are given with it, such as today's."""

    def __call__(self, params: Params, batch: Batch) -> np.ndarray:
        """Returns [B, T] float32, an array of the host; 0 where no token counts."""

    def compiled(self, params: Params, batch: RowBatch) -> Any:
        """Returns the compiled program for these weights and this batch in rows, or for their
        shapes."""


@dataclass(frozen=True)
class TeacherComparison:
    """How an algorithm compares the policy with one of its frozen models, token by token.

    Example: TeacherComparison("teacher", "reverse", top_k=100).
    """

    model: str  # the name of the frozen model
    divergence: str  # forward, reverse or jensen_shannon (models/divergence.py)
    mix: float = 0.5  # of jensen_shannon
    top_k: int = (
        0  # of the likeliest tokens of the teacher, and one bin; 0: of the whole vocabulary
    )


class Comparer(Protocol):
    """Adds to a batch what the update needs to compare the policy with a frozen model."""

    def __call__(self, batch: Batch, seen: Batch | None = None) -> Batch:
        """seen: the same completions as the frozen model reads them, after other prompts; None: as
        they are."""

    def compiled(self, batch: RowBatch) -> Any:
        """Returns the compiled program for this batch in rows, or for its shapes."""


@dataclass(frozen=True)
class Policy:
    """All that an algorithm may ask of a model. Tests and other engines supply their own.

    `params` are its current weights; under LoRA, the frozen base with its adapters attached.

    Example: Policy(make_generate(...), scores, {"reference": scorer}) for a loss with a KL term.
    """

    # None: the policy only scores
    generate: Generate | None
    # (params, batch in rows) -> TokenScores [R, W]; called inside of jit, differentiated
    scores: Callable[[Params, RowBatch], TokenScores]
    # by name; "reference": the policy that training starts from, there if `needs_reference`
    scorers: Mapping[str, Scorer] = field(default_factory=dict)
    # what `scores` gives, for `collect`; an algorithm that calls it says `rescores = True`
    rescore: Rescorer | None = None
    # for an algorithm with a `comparison`: its batches go through this, and `scores` are
    # ComparedScores
    compare: Comparer | None = None


class GroupGrader(Protocol):
    """Grades the completions of a batch of examples, one by one, while others are still sampled."""

    def submit(self, row: int, tokens: Sequence[int]) -> None:
        """Sends a completion that has ended to the rewards. row: its row of the rollout."""

    def results(self, rollout: Rollout) -> Graded:
        """Waits for all grades. Completions that were not submitted are graded now."""


class TaskInterface(Protocol):
    """All that an algorithm may ask of a task; tasks/task.py has the one that is used."""

    long_prompts: str  # what becomes of a prompt that is too long: error, truncate or drop

    def prompts(self, examples: list[dict]) -> Prompts:
        """The tokens of each example's prompt."""

    def prompts_with(self, examples: list[dict], prompt: str, max_length: int | None) -> Prompts:
        """The tokens of each example's prompt with another message; {names} are its fields.
        max_length: tokens of it; None: as many as of any prompt."""

    # Optional, of a task with an environment: `conversation`, its settings, and partner(examples),
    # who answers the turns of one conversation per example; policy.generate gets it as `partner`.

    def grader(self, examples: list[dict]) -> GroupGrader:
        """Grades one completion per example: repeat an example for each of its completions."""

    def grade(self, examples: list[dict], rollout: Rollout) -> Graded:
        """All at once: one completion per example."""

    def demonstrations(self, examples: list[dict]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """tokens, token_mask and completion_mask [B, T]: prompts with their demonstrations."""

    def truncated(self, examples: list[dict]) -> int:
        """How many prompts have lost their beginning."""


class Algorithm(Protocol):
    """Two functions and what a run must know of them before it starts.

    Example: algorithms/grpo.py (with completions), algorithms/sft.py (without).
    """

    num_generations: int  # completions per prompt
    updates_per_rollout: int  # optimizer updates made from one batch
    needs_reference: bool  # the run makes policy.scorers["reference"]
    needs_demonstrations: bool  # it learns from the `completion` of examples; nothing is sampled
    # what the loss sums over. tokens: only over tokens; sequences: it also sums within a
    # completion, by algorithms/sequences.py. None, or no such field: it may not be packed.
    loss_reduction: str | None
    # Optional: `streams`, the names of the float32 values of its own in Batch.streams. The memory
    # plan must know them before there is a batch. And `rescores`: collect calls policy.rescore.
    # `batch_fields`: the fields of float32 of its batches beside loss_weight, where they are not
    # advantages and old_logprobs (none if it needs demonstrations), and ref_logprobs with a
    # reference. `demonstration_fields`: the fields of examples that it learns from; `completion`.
    # `frozen_models`: by name, the models.source.TeacherConfig of what is in policy.scorers beside
    # the reference; the run loads and plans them.
    # `mini_batches`: collect gets examples for so many updates, and makes a batch of that many
    # mini-batches, one after the other; `max_rounds`: it gets so many times as many as it needs.
    # `reference_every`, `reference_mix`: the reference follows the policy every so many steps.
    # `comparison`, a TeacherComparison: `collect` calls policy.compare, and the loss gets
    # ComparedScores.

    def collect(
        self,
        policy: Policy,
        task: TaskInterface,
        params: Params,
        examples: list[dict],
        key: jax.Array,
    ) -> tuple[Batch, Metrics, Graded | None]:
        """Returns the batch to learn from ([B, T], arrays of the host), metrics, and the graded
        completions for the samples files (None: there are none).

        The metrics are a dict of its own, to which the caller may add. params: the current weights
        of the policy, adapters attached. examples: P rows of data; with `max_rounds`, P of each
        round. key: the random key of this step's sampling.
        """

    def loss(self, scores: TokenScores, batch: RowBatch) -> tuple[jax.Array, Metrics]:
        """Returns the loss, a number, and its metrics, numbers or types.Max.

        Numbers are sums weighted by batch.loss_weight, so that micro-batches and shards may add
        them; of a Max they take the largest. scores and batch are [R, W]: the batch in rows. It
        runs inside of jit.
        """


def who_answers(task: TaskInterface, examples: list[dict]) -> dict[str, Any]:
    """The setting of policy.generate with which completions are conversations, one per example; {}:
    the task has no environment."""
    partner_of = getattr(task, "partner", None)
    partner = None if partner_of is None else partner_of(examples)
    return {} if partner is None else {"partner": partner}


def stream_names(algorithm: Algorithm) -> tuple[str, ...]:
    """The streams that the algorithm says its batches have."""
    return tuple(getattr(algorithm, "streams", ()))


def batch_fields(algorithm: Algorithm) -> tuple[str, ...]:
    """The fields of float32 that the algorithm's batches have beside loss_weight."""
    named = getattr(algorithm, "batch_fields", None)
    if named is not None:
        return tuple(named)
    found = () if algorithm.needs_demonstrations else ("advantages", "old_logprobs")
    return (*found, "ref_logprobs") if algorithm.needs_reference else found


def demonstration_fields(algorithm: Algorithm) -> tuple[str, ...]:
    """The fields of an example that the algorithm learns from, if it needs demonstrations."""
    return tuple(getattr(algorithm, "demonstration_fields", ("completion",)))


def answered_by(examples: list[dict], name: str) -> list[dict]:
    """The examples with what their field `name` holds as `completion`. Raises ValueError where one
    has no such field."""
    # the task knows where it is: in `completion`, or among the turns of a conversation
    if name == "completion":
        return examples
    for example in examples:
        if name not in example:
            raise ValueError(
                f"an example needs a `{name}` to learn from; this one has "
                f"{', '.join(map(str, example))[:200]}"
            )
    return [example | {"completion": example[name]} for example in examples]


def frozen_models(algorithm: Algorithm) -> dict[str, Any]:
    """By name, the settings of the models that the run loads as policy.scorers for it. Raises
    ValueError for the name of a scorer or of a part of a run that there is already."""
    named = dict(getattr(algorithm, "frozen_models", {}))
    taken = {"reference", "rollout", "scoring", "update", "prefill", "decode"} & named.keys()
    if taken:
        raise ValueError(f"frozen_models: {taken.pop()!r} is the name of something else in a run")
    return named


def rescores(algorithm: Algorithm) -> bool:
    """Whether the algorithm says that `collect` calls policy.rescore."""
    return bool(getattr(algorithm, "rescores", False))


def num_mini_batches(algorithm: Algorithm) -> int:
    """How many updates' sequences the algorithm samples at once."""
    return int(getattr(algorithm, "mini_batches", 1))


def max_rounds(algorithm: Algorithm) -> int:
    """How many times as many examples as a rollout needs are given to `collect`."""
    return int(getattr(algorithm, "max_rounds", 1))


def reference_every(algorithm: Algorithm) -> int:
    """After how many steps the reference follows the policy; 0: never."""
    return int(getattr(algorithm, "reference_every", 0))


def comparison_of(algorithm: Algorithm) -> TeacherComparison | None:
    """How the algorithm compares the policy with one of its frozen models; None: it does not."""
    return getattr(algorithm, "comparison", None)


def check_loss(algorithm: Algorithm) -> None:
    """Raises ValueError for a loss with the signature of earlier versions, loss(logprobs, batch).

    The name of its first parameter tells the two apart.
    """
    first = next(iter(inspect.signature(algorithm.loss).parameters), "")
    if first.startswith(("logprob", "logp")):
        raise ValueError(
            f"{type(algorithm).__name__}.loss({first}, batch): a loss is now called with (scores, "
            "batch); name its first parameter scores, and write scores.logprobs for the "
            "log-probabilities (scores.entropy is there, too)"
        )
