"""Which turn of a conversation a reward counts for: numbers by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from tunix_lite.algorithms.advantages import centre
from tunix_lite.algorithms.algorithm import Policy
from tunix_lite.algorithms.groups import Groups, TurnCredit, sample_groups, turn_advantages
from tunix_lite.types import Conversation, Graded, Rollout, SampledTurn, TurnReply


def test_what_a_turn_is_worth():
    rewards = [1.0, 0.0, 4.0]
    assert TurnCredit("end").values(rewards).tolist() == [5, 5, 5]
    assert TurnCredit("turn").values(rewards).tolist() == [1, 0, 4]
    assert TurnCredit("discount", 0.5).values(rewards).tolist() == [1 + 0 + 1, 0 + 2, 4]


def test_all_turns_of_a_group_are_compared():
    """Group 1: turns worth 1, 3 and 2, mean 2. Group 2: one conversation is dropped, one turn is left."""
    rewards = [[1.0, 3.0], [2.0], [5.0], [7.0, 7.0]]
    kept = np.array([[True, True], [True, False]])
    found = turn_advantages(centre, TurnCredit("turn"), rewards, kept)
    assert [one.tolist() for one in found] == [[-1, 1], [0], [0], [0, 0]]


def test_advantages_of_completions_cannot_compare_turns():
    with pytest.raises(ValueError, match="conversation.credit=end"):
        turn_advantages(lambda rewards_PG, whole: rewards_PG, TurnCredit("turn"), [[1.0]], np.array([[True]]))


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
    graded = Graded(["", ""], ["", ""], rewards, dropped, [None] * 2, {}, dropped, turn_rewards=[[1.0, 3.0], [2.0]])
    settings = SimpleNamespace(credit=credit, discount=discount, on_limit="keep")
    grader = SimpleNamespace(submit=None, results=lambda rollout: graded)
    task = SimpleNamespace(grader=lambda examples, G: grader, prompts=lambda examples: [[0]])
    task.conversation = settings
    task.partner = lambda examples: "answers"
    policy = Policy(lambda *_, **__: rollout, None)
    return sample_groups(policy, task, None, [{}], None, 2)


def test_advantages_stand_at_the_tokens_of_their_turns():
    end = two_conversations("end").token_advantages(centre)
    assert end.tolist() == [[1] * 5, [-1] * 5]
    # turns worth 1, 3 and 2
    turn = two_conversations("turn").token_advantages(centre)
    assert turn.tolist() == [[0, -1, -1, 0, 1], [0, 0, 0, 0, 0]]
    # turns worth 1 + 3/2, 3 and 2: mean 2.5
    discounted = two_conversations("discount", discount=0.5).token_advantages(centre)
    assert discounted.tolist() == [[0, 0, 0, 0, 0.5], [0, -0.5, 0, 0, 0]]
    assert two_conversations("turn").token_advantages(centre, limit=0.5).max() == 0.5
