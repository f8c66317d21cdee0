"""The nouns that move through a run: immutable, and pytrees where they hold arrays of jax.

Shape letters, used as suffixes on array names across the package:

  B sequences   P prompts   G generations per prompt (B = P * G)   T tokens of a sequence
  S key slots   D embed     N query heads   K key/value heads   Q query heads a key head (N = K * Q)
  H head size   F feed-forward size   V vocabulary   L layers
  R rows (one or more sequences each)   W columns of a row   M scored columns of a row

A file whose arrays have other dims may give S, P, Q, M or N another meaning, and says so there.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

# nested dict of arrays, keyed by the names in the weight table
Params = Any
# The names of what trains, where a critic trains beside the policy: params are a dict of the two.
POLICY = "policy"
CRITIC = "critic"
# "part/name" -> number
Metrics = dict[str, Any]
# The token ids of each of P prompts, of any lengths: [[5, 6], [7, 8, 9]]. Not padded:
# the sampler pads them.
Prompts = Sequence[Sequence[int]]

# JAX silently drops the bits above 32: it would draw the same for the seeds 2**32 + 1 and 1.
MAX_SEED = 2**32 - 1


def check_seed(seed: int) -> int:
    """`seed` as an int. Raises ValueError unless it is a whole number of 32 bits."""
    is_number = isinstance(seed, Integral) and not isinstance(seed, bool)
    if not is_number or not 0 <= seed <= MAX_SEED:
        raise ValueError(
            f"seed={str(seed)[:80]}; a seed is a whole number from 0 to {MAX_SEED} (2**32-1)"
        )
    return int(seed)


def seed_of_call(base: int, call: int, prompt: int) -> int:
    """A seed for a prompt of a call that gave none: another one for each of them."""
    return zlib.crc32(f"{base} {call} {prompt}".encode())


def policy_part(params: Params) -> Params:
    """Returns the policy's share of what trains: all of it, where there is no critic. Tables and
    shapes go as well."""
    return params.get(POLICY, params)


def left_padded(rows: Prompts, width: int, pad_id: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """tokens and token_mask [B, width]: each row ends in the last column."""
    lengths_B1 = np.array([len(ids) for ids in rows])[:, None]
    mask = np.arange(width) >= width - lengths_B1
    tokens = np.full(mask.shape, pad_id, np.int32)
    tokens[mask] = np.concatenate(rows)
    return tokens, mask


@flax.struct.dataclass
class Max:
    """A metric of a loss that micro-batches and shards do not add up: the largest of their values
    is that of all.

    Example: {"train/sampler_gap_max": Max(jnp.max(gap))} among the metrics of a loss.
    """

    value: jax.Array  # a number
    # the metric is -value: the smallest, as `smallest` makes it
    of_negative: bool = flax.struct.field(pytree_node=False, default=False)

    def __add__(self, other: "Max") -> "Max":
        """Both together: the larger value."""
        return self.replace(value=jnp.maximum(self.value, other.value))

    @staticmethod
    def is_one(summand: object) -> bool:
        return isinstance(summand, Max)

    @staticmethod
    def start_of(like: "jax.Array | Max") -> "jax.Array | Max":
        """The start of a sum of such values, whose shapes are enough; of a Max, nothing is
        smaller."""
        if isinstance(like, Max):
            return jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), like)
        # bfloat16 would lose small parts of a long sum
        return jnp.zeros(like.shape, jnp.promote_types(like.dtype, jnp.float32))

    @staticmethod
    def number_of(total: "jax.Array | Max") -> jax.Array:
        """The metric itself: a sum, the largest value, or the smallest."""
        if not isinstance(total, Max):
            return total
        return -total.value if total.of_negative else total.value


def smallest(value: jax.Array) -> Max:
    """A metric of a loss of which micro-batches and shards take the smallest."""
    return Max(-value, of_negative=True)


class TokenScores(NamedTuple):
    """The scores of the scored tokens (loss_weight is not 0) under a policy: float32, 0 elsewhere.

    A loss gets it as [R, W], the shape of its batch. The first two fields have gradients.

    Example: the token was drawn from (1/4, 3/4), the first of the two -> logprobs log(1/4) =
    -1.386, entropy 0.562 nats.
    """

    # log p of each token given the tokens before it; under a reward model the number that it gives
    # the text up to the token
    logprobs: jax.Array
    # nats of the whole distribution that the token was drawn from; None: a reward model has none
    entropy: jax.Array | None
    # 1 where no other token is likelier, else 0; it has no gradient. None: nobody has looked
    is_likeliest: jax.Array | None = None
    # learner.routing.ExpertSums of the forward pass, not [R, W]; None: a model without experts
    experts: Any = None
    # the critic's values, in units of the reward and with a gradient; None: there is no critic
    values: jax.Array | None = None
    # nats from the teacher, with its gradient by the policy: the policy draws from (1/2, 1/2), the
    # teacher from (1/4, 3/4) -> reverse KL 0.144; None: there is no teacher
    divergence: jax.Array | None = None

    # numpy would make one array of the fields without a word; so it raises TypeError
    __array_ufunc__ = None


# why a completion ended: no room left; an end-of-sequence token; a stop text or stop token
FINISH = (
    "length",
    "eos",
    "stop",
)


@dataclass(frozen=True)
class TurnReply:
    """The answer of an environment to a turn of a conversation.

    Example: TurnReply(tokens=[106, 107, 105], reward=0.0, observation="higher"): the conversation
    goes on after these tokens.
    """

    # tokens from this turn to the next one, with the template's markers; [] at the end
    tokens: list[int] = field(default_factory=list)
    # True if the environment has ended the conversation
    done: bool = False
    reward: float = 0.0
    observation: str = ""  # as text, for display
    completion: str = ""  # the turn as text, as the environment got it
    # error, timeout, crash or not_a_turn, where the environment failed on the turn
    failure: str = ""
    message: str = ""  # how it failed
    seconds: float = 0.0  # time of the environment
    # flags of the environment, by name: {"tool_call": True, "tool_error": False}
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SampledTurn:
    """One turn of the policy in a conversation: columns of its row of the rollout, and the answer.

    Example: SampledTurn(32, 40, TurnReply(done=True, reward=1.0)): the 8 tokens from column 32 on.
    """

    begin: int
    # the column after its last token
    end: int
    reply: TurnReply


@dataclass(frozen=True)
class Conversation:
    """The turns of a row of a rollout, in their order, and why it ended.

    Example: Conversation([SampledTurn(32, 40, TurnReply(done=True, reward=1.0))], "done").
    """

    turns: list[SampledTurn]
    # done, failed: the environment ended or failed; tokens, turns: there was no more room
    ended: str
    # the environment's own first text, if it has one; None: the prompt of the task
    opening: str | None = None

    @property
    def reached_limit(self) -> bool:
        """Returns whether there was no room for more, and the environment had not ended it."""
        return self.ended in ("tokens", "turns")

    @property
    def rewards(self) -> list[float]:
        """Returns the reward of each turn."""
        return [turn.reply.reward for turn in self.turns]


@flax.struct.dataclass
class Rollout:
    """Sampled completions: each row is a left-padded prompt, then a right-padded completion. Arrays
    of the host.

    Example: the prompt 5 6 in 3 columns and its completion 7 1, where 1 ends it, in 3 -> tokens
    [[0, 5, 6, 7, 1, 0]], token_mask [[F, T, T, T, T, F]], completion_mask [[F, F, F, T, T, F]],
    finish [1].
    """

    tokens: np.ndarray  # [B, T] int32
    token_mask: np.ndarray  # [B, T] bool, True on real tokens of prompt and completion
    # [B, T] bool, True on sampled tokens, the end-of-sequence token included
    completion_mask: np.ndarray
    # [B, T] float32 under the distribution that was drawn from; 0 off the completion
    logprobs: np.ndarray
    finish: np.ndarray  # [B] int8, index into FINISH
    # [B, T] float32 under softmax(logits / temperature), nothing cut off
    full_logprobs: np.ndarray
    # [B, 2] from the start of the rollout until the first tokens, and until the end
    seconds: np.ndarray | None = None
    metrics: Metrics = flax.struct.field(default_factory=dict)  # what the rollout took
    # [B, T] int32, the updates that the weights had seen from which a token was drawn; -1 off the
    # completion; None without rollout.overlap: all of them are of the update under way
    versions: np.ndarray | None = None
    # [B, T] int16 for conversations: the turn that sampled a token, from 1; 0 on all other tokens
    turn_ids: np.ndarray | None = None
    # [B] array of `Conversation`, whose answers are in token_mask alone; None: single turns
    conversations: np.ndarray | None = None
    # [B, T, L * k] uint8 or uint16, the experts of each token (models/routes.py); None: a model
    # without experts, or rollout.replay_routes=false
    routes: np.ndarray | None = None

    @property
    def finished(self) -> np.ndarray:
        """[B] bool: it ended before its length ran out, as the sampler says."""
        return self.finish > 0


@dataclass(frozen=True)
class Graded:
    """Completions as text, and their rewards. One entry per completion, B of them.

    Example: two completions of `2 + 2 = ?`, one right -> completions ["4", "5"], rewards [1., 0.],
    correct [T, F], extracted ["4", "5"], dropped [F, F], each {"correct": [1., 0.]}.
    """

    prompts: list[str]  # the user's messages
    completions: list[str]
    rewards: np.ndarray  # [B] float64, the weighted sum; nan where dropped
    correct: np.ndarray  # [B] bool
    extracted: list[str | None]  # the answer that was read out of each, for display
    metrics: Metrics
    dropped: np.ndarray  # [B] bool: a reward failed, and nothing is to be learned from it
    # every reward by name, without its weight: [B] float64, nan where it failed
    each: dict[str, np.ndarray] = field(default_factory=dict)
    # weight of each reward in the sum, by name
    weights: dict[str, float] = field(default_factory=dict)
    # the example that each completion answers
    examples: list[dict] = field(default_factory=list)
    rollout: Rollout | None = None  # the same completions as arrays; None: they were not kept
    # rewards of the environment for each turn of each conversation; [] where there is none
    turn_rewards: list[list[float]] = field(default_factory=list)
    # factor of a reward for each turn between it and the turn that gets it; None: every turn has
    # the whole
    turn_discount: float | None = None
    # [B] bool: compared, and not learned from, as there was no room for the end; None: none is
    masked: np.ndarray | None = None
    # why functions failed on each completion, by name: {"reward 'short'": "timeout"}
    failures: list[dict[str, str]] = field(default_factory=list)
    # completions of a group, which stand side by side
    num_generations: int = 1


@flax.struct.dataclass
class Batch:
    """A batch to learn from: arrays of the host, [B, T], about `tokens[b, t]`.

    `logprobs[b, t]` always means log p(tokens[b, t] | tokens[b, :t]), so nobody shifts by one. The
    real tokens of a sequence stand side by side; a token that counts has a real one before it.

    Example: the prompt 5 6 and the completion 7 8, padded at both ends -> tokens [[0, 5, 6, 7, 8,
    0]], token_mask [[F, T, T, T, T, F]], loss_weight [[0, 0, 0, .5, .5, 0]].
    """

    tokens: np.ndarray  # int32
    token_mask: np.ndarray  # bool, True on real tokens
    # float32, 0 off the completion; a loss is a plain sum weighted by it
    loss_weight: np.ndarray
    advantages: np.ndarray | None = None  # float32
    # float32, under the policy that sampled (see GRPO.old_logprobs)
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None  # float32, under the reference of the KL term
    # float32, by name: values of the algorithm's own, which its loss reads as batch.streams[name];
    # those of policy.compare are [B, T, K]
    streams: dict[str, np.ndarray] = flax.struct.field(default_factory=dict)
    # int32, number of the token's document in its row, from 1; 0: padding. A token sees only its
    # own document. None: a sequence is one
    segment_ids: np.ndarray | None = None
    # [B, T, L * k] as Rollout.routes; None: the router chooses every token's experts
    routes: np.ndarray | None = None
    # arrays on the mesh that belong to no token, by name, such as a teacher's output embedding
    constants: dict[str, jax.Array] | None = flax.struct.field(pytree_node=False, default=None)
    # the same completions as the model of needs.comparison reads them, until it has; None: as they
    # are
    seen: "Batch | None" = None

    def parts(self, size: int) -> Iterator["Batch"]:
        """The batch, `size` sequences at a time; copies that do not count fill the last part."""
        count = len(self.tokens)
        if count == size:
            yield self
            return
        for begin in range(0, count, size):
            yield self._part(np.arange(begin, begin + size))

    def _part(self, places: np.ndarray) -> "Batch":
        """These sequences; beyond the end, copies of the first ones that do not count."""
        count = len(self.tokens)
        seen = None if self.seen is None else self.seen._part(places)
        take = partial(np.take, indices=places % count, axis=0)
        part = jax.tree.map(take, self.replace(seen=None))
        weight = np.where((places < count)[:, None], part.loss_weight, np.float32(0))
        return part.replace(loss_weight=weight, seen=seen)


def realigned(values_BT: np.ndarray, read: Batch, batch: Batch) -> np.ndarray:
    """Moves values of the tokens that count in `read` to those that count in `batch`: the n-th of a
    sequence goes to the n-th. Values may be vectors. Raises ValueError where they are not as
    many."""
    there = np.asarray(read.loss_weight) != 0
    here = np.asarray(batch.loss_weight) != 0
    if not np.array_equal(there.sum(axis=1), here.sum(axis=1)):
        raise ValueError("the teacher reads other completions than the policy has sampled")
    values_BT = np.asarray(values_BT)
    result = np.zeros((*here.shape, *values_BT.shape[2:]), values_BT.dtype)
    result[here] = values_BT[there]
    return result


@flax.struct.dataclass
class RowBatch:
    """A batch laid out in rows on the mesh, and where its tokens stand: the input of an update.

    learner.rows.RowLayout makes it. The fields of Batch are [R, W] here, and so are those of the
    layout unless they say otherwise. Without packing, the rows are the sequences: R = B, W = T.

    Example: learner/packing.py shows two prompts and their completions in one row.
    """

    tokens: jax.Array
    token_mask: jax.Array
    loss_weight: jax.Array
    advantages: jax.Array | None = None
    old_logprobs: jax.Array | None = None
    ref_logprobs: jax.Array | None = None
    streams: dict[str, jax.Array] = flax.struct.field(default_factory=dict)
    # [R, W, L * k] as in Batch
    routes: jax.Array | None = None
    # int32, number in the row of the token's sequence, or of its group with one prompt; 0: none
    segment_ids: jax.Array | None = None
    positions: jax.Array | None = None  # int32, place of a token in its own sequence
    # int32, which completion of a shared prompt; 0: the prompt; None: none is shared
    completion_ids: jax.Array | None = None
    # [R, M] int32, the columns of the scored tokens; None: the last M
    scored: jax.Array | None = None
    # [R, M] int32, the columns whose hidden states predict them; None: those before
    previous: jax.Array | None = None
    is_scored: jax.Array | None = None  # [R, M] bool, False where a row has fewer
    # [parts] int32, scored tokens of the row of a micro-batch that has most; None: M
    most_scored: jax.Array | None = None
    # [] int32, micro-batches that hold anything; None: all do
    num_micro_batches: jax.Array | None = None
    # [R] keys of the adapters' dropout; None: nothing is dropped
    dropout_keys: jax.Array | None = None
    # arrays that belong to no token and are never cut up, by name; None: there are none
    constants: dict[str, jax.Array] | None = None
    # micro-batches that the rows can be cut into; `num_micro_batches` of them run
    max_micro_batches: int = flax.struct.field(pytree_node=False, default=1)
    # columns of shared prompts; 0: none is shared (packing.RowShape)
    prefix_columns: int = flax.struct.field(pytree_node=False, default=0)
    # columns of each lane after them; 0: there are no lanes
    lane_columns: int = flax.struct.field(pytree_node=False, default=0)

    @property
    def num_used(self) -> int | jax.Array:
        """Returns how many micro-batches run."""
        if self.num_micro_batches is None:
            return self.max_micro_batches
        return self.num_micro_batches

    @property
    def per_row(self) -> "RowBatch":
        """Returns the fields that have rows, which are cut into micro-batches."""
        return self.replace(num_micro_batches=None, constants=None, most_scored=None)

    def with_constants(self, constants: dict[str, jax.Array] | None) -> "RowBatch":
        return self.replace(constants=constants)


@flax.struct.dataclass
class TrainState:
    """The state that an update changes: it may be donated, and a checkpoint holds it.

    Example: TrainState(put(np.int32(0)), params, init_opt_state(optimizer, params)) before the
    first update.
    """

    step: jax.Array  # int32: updates done, those that were skipped included
    params: Params
    opt_state: Any
