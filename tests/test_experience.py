"""What an update learns from: mini-batches, later rounds of prompts, the same again after a resume; credit of turns."""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import set_mesh

from tunix_lite.algorithms.advantages import centre
from tunix_lite.algorithms.algorithm import Needs, Policy
from tunix_lite.algorithms.groups import Groups, turn_advantages
from tunix_lite.algorithms.sampling import sample_groups
from tunix_lite.basics.types import Batch, Conversation, Graded, Rollout, SampledTurn, TurnReply
from tunix_lite.environments.settings import ConversationConfig
from tunix_lite.learner.rows import RowLayout
from tunix_lite.runs.experience import TaskExperience


@dataclass(frozen=True)
class Echo:
    """Its batch holds the numbers of the examples that it was given, and the key of the step."""

    updates_per_rollout: int = 1
    mini_batches: int = 1
    max_rounds: int = 1

    @property
    def needs(self):
        return Needs(mini_batches=self.mini_batches, rounds=self.max_rounds)

    num_generations = 1

    def batch_of(self, policy, task, params, examples, groups):
        rollout = groups.rollout
        mask = np.ones(rollout.tokens.shape, bool)
        metrics = {"seen": [example["n"] for example in examples]}
        weight = rollout.completion_mask / 3
        return Batch(rollout.tokens, mask, weight, old_logprobs=rollout.logprobs), metrics


def generate(params, prompts, key, num_generations, **_):
    """The tokens of a completion are the number of its example."""
    numbers = np.array([[n] * 4 for n in prompts], np.int32)
    mask = np.broadcast_to(np.arange(4) >= 1, numbers.shape)
    drawn = np.full(numbers.shape, float(jax.random.uniform(key)), np.float32)
    return Rollout(numbers, mask, mask, drawn, np.ones(len(numbers), np.int8), drawn)


def grades(rollout):
    count = len(rollout.tokens)
    texts = [str(row[0]) for row in rollout.tokens]
    yes, no = np.ones(count, bool), np.zeros(count, bool)
    return Graded(texts, texts, np.arange(count, dtype=float), yes, texts, {}, no, rollout=rollout)


def source(algorithm, prompts=2):
    def batch(count, seed, rollout):
        return [{"n": seed % 1000 + rollout * count + i} for i in range(count)]

    task = SimpleNamespace(
        batch=batch,
        prompts=lambda examples: [example["n"] for example in examples],
        grader=lambda examples, G: SimpleNamespace(submit=None, results=grades),
        partner=lambda examples, G: None,
    )
    parts = SimpleNamespace(batch=SimpleNamespace(prompts=prompts))
    run = SimpleNamespace(algorithm=algorithm, seed=0, evaluation=None)
    console = SimpleNamespace(say=print)
    session = SimpleNamespace(run=run, task=task, parts=parts, run_dir=None, console=console, stopping=None)
    resolved = SimpleNamespace(rows=RowLayout())
    policy = Policy(generate, None)
    learner = SimpleNamespace(policy=policy, seed_key=jax.random.key(0), overlap=None, resolved=resolved)
    return TaskExperience(session, learner)


@pytest.fixture(autouse=True)
def one_device():
    with jax.set_mesh(set_mesh(1, 1)):
        yield


def numbers(experience):
    return experience.batch.tokens[:, 0].tolist()


def test_each_update_takes_the_next_mini_batch_and_then_goes_through_them_again():
    taken = source(Echo(updates_per_rollout=4, mini_batches=2))
    found = [taken.take(step, {}) for step in range(8)]
    assert [numbers(one) for one in found] == [[0, 1], [2, 3]] * 2 + [[4, 5], [6, 7]] * 2
    assert [one.updates_left for one in found] == [4, 3, 2, 1] * 2
    assert [one.graded.completions for one in found[:2]] == [["0", "1"], ["2", "3"]]
    assert [bool(one.metrics) for one in found] == [True, False, False, False] * 2
    np.testing.assert_array_equal(found[1].rows.tokens, found[1].batch.tokens)
    # one rollout, one set of random numbers: the old policy is that of the rollout for all of its updates
    drawn = [float(one.batch.old_logprobs[0, 0]) for one in found]
    assert len(set(drawn[:4])) == 1 and drawn[0] != drawn[4]


def test_a_run_that_resumes_gets_what_it_would_have_got():
    settings = Echo(updates_per_rollout=2, mini_batches=2, max_rounds=3)
    whole = source(settings)
    before = [whole.take(step, {}) for step in range(8)]
    again = source(settings)
    for step in range(4, 8):
        jax.tree.map(np.testing.assert_array_equal, again.take(step, {}).batch, before[step].batch)


# ---- which turn of a conversation a reward counts for: numbers by hand


def test_what_a_turn_is_worth():
    for discount, worth in ((0.0, [1, 0, 4]), (0.5, [1 + 0 + 1, 0 + 2, 4])):
        [values] = turn_advantages(lambda values: values, discount, [[1.0, 0.0, 4.0]], np.array([[True]]))
        assert values.tolist() == worth


def test_all_turns_of_a_group_are_compared():
    """Group 1: turns worth 1, 3 and 2, mean 2. Group 2: one conversation is dropped, one turn is left."""
    rewards = [[1.0, 3.0], [2.0], [5.0], [7.0, 7.0]]
    kept = np.array([[True, True], [True, False]])
    found = turn_advantages(centre, 0.0, rewards, kept)
    assert [one.tolist() for one in found] == [[-1, 1], [0], [0], [0, 0]]


def test_advantages_of_completions_cannot_compare_turns():
    with pytest.raises(ValueError, match="conversation.credit=end"):
        turn_advantages(lambda rewards_PG, whole: rewards_PG, 0.0, [[1.0]], np.array([[True]]))


def two_conversations(credit: str, discount: float = 1.0) -> Groups:
    """A prompt in column 0; tokens of turns in columns 1, 2 and 4 of the first row, and 1 of the second."""
    replies = [TurnReply([9], reward=1.0), TurnReply(done=True, reward=3.0), TurnReply(reward=2.0)]
    conversations = np.empty(2, object)
    conversations[0] = Conversation([SampledTurn(1, 3, replies[0]), SampledTurn(4, 5, replies[1])], "done")
    conversations[1] = Conversation([SampledTurn(1, 2, replies[2])], "tokens")
    mask = np.array([[0, 1, 1, 0, 1], [0, 1, 0, 0, 0]], bool)
    zeros = np.zeros((2, 5), np.float32)
    token_mask = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], bool)
    finish = np.array([1, 0])
    rollout = Rollout(
        zeros.astype(int), token_mask, mask, zeros, finish, zeros, turn_ids=zeros, conversations=conversations
    )
    rewards = np.array([4.0, 2.0])
    dropped = np.zeros(2, bool)
    settings = ConversationConfig(credit=credit, discount=discount)
    how = {"turn_rewards": [[1.0, 3.0], [2.0]], "turn_discount": settings.turn_discount}
    graded = Graded(["", ""], ["", ""], rewards, dropped, [None] * 2, {}, dropped, **how)
    grader = SimpleNamespace(submit=None, results=lambda rollout: graded)
    task = SimpleNamespace(grader=lambda examples, G: grader, prompts=lambda examples: [[0]])
    task.partner = lambda examples, G: "answers"
    policy = Policy(lambda *_, **__: rollout, None)
    return sample_groups(policy, task, {}, [{}], None, 2)


def test_advantages_stand_at_the_tokens_of_their_turns():
    end = two_conversations("end").token_advantages(centre)
    assert end.tolist() == [[1] * 5, [-1] * 5]
    # turns worth 1, 3 and 2
    turn = two_conversations("turn").token_advantages(centre)
    assert turn.tolist() == [[0, -1, -1, 0, 1], [0, 0, 0, 0, 0]]
    # turns worth 1 + 3/2, 3 and 2: mean 2.5
    discounted = two_conversations("discount", discount=0.5).token_advantages(centre)
    assert discounted.tolist() == [[0, 0, 0, 0, 0.5], [0, -0.5, 0, 0, 0]]
