"""Conversations in the slots: what is sampled, what is learned from, and that no clock changes it."""

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import EOS, PROMPT, ragged_prompts, random_params, set_mesh
from test_rollout import Letters

from tunix_lite.algorithms.weighting import per_token
from tunix_lite.basics.types import Batch, TurnReply
from tunix_lite.learner.packing import RowShape
from tunix_lite.learner.policy import make_policy, token_logprobs
from tunix_lite.learner.rows import RowLayout
from tunix_lite.models import attention, decoder
from tunix_lite.rollout import sampling
from tunix_lite.rollout.engine import APPEND_WIDTHS, append_calls
from tunix_lite.rollout.generate import make_generate
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig

WIDE = pytest.mark.wide
NEW = 48
G = 2


@dataclass
class Numbers:
    """An environment of tokens: what it answers follows from the turn, the row and how many turns there were.

    It answers `delay` polls after a turn, the last one first.
    """

    delay: int = 0
    max_turns: int = 4
    max_turn_tokens: int | None = 9
    prompts: list | None = None
    # tokens of an answer; None: 1 to 8
    num_tokens: int | None = None
    openings: tuple = (None,) * 16
    told: dict = field(default_factory=dict)
    waiting: list = field(default_factory=list)

    def answer(self, row, tokens, ended):
        turns = self.told.setdefault(row, [])
        turns.append((tokens, ended))
        total = sum(tokens) + 7 * row + len(turns)
        if total % 11 == 0:
            return TurnReply(done=True, reward=1.0)
        # a turn that was cut gets the marker that it lacks, as a chat template would have it
        marker = [] if ended else [EOS[0]]
        return TurnReply(
            [*marker, *(4 + (total + i) % 28 for i in range(self.num_tokens or 1 + total % 8))], reward=float(total % 3)
        )

    def submit(self, row, tokens, ended):
        self.waiting.append([self.delay, row, self.answer(row, tokens, ended)])

    def close(self):
        assert not self.waiting

    def replies(self, wait, patience=0.0):
        while True:
            ready = [one for one in reversed(self.waiting) if one[0] <= 0]
            self.waiting = [[left - 1, row, reply] for left, row, reply in self.waiting if left > 0]
            if ready or not wait:
                return {row: reply for _, row, reply in ready}


def converse(cfg, params, partner, on_chunk=None, **settings):
    rollout = RolloutConfig(chunk=4, **settings)
    sample = make_generate(cfg, GenerationConfig(PROMPT, NEW), EOS, 0, rollout=rollout)
    asked = (params, ragged_prompts(4), jax.random.key(5), G, 1.0)
    return sample(*asked, partner=partner, on_chunk=on_chunk)


@partial(jax.jit, static_argnums=1)
def next_token(params, cfg, tokens, length, key, num_sampled):
    """What is drawn after so many of the tokens [1, T]."""
    meta = attention.one_sequence_per_row(jnp.arange(tokens.shape[1])[None] < length)
    logits = decoder.logits(params, cfg, decoder.forward(params, cfg, tokens, meta)[0][:, length - 1])
    return sampling.draw(logits, key[None], num_sampled[None], 1.0)[0][0]


def naive(cfg, params, prompt, key, row, partner):
    """A conversation without a cache: the whole sequence is read for every token. (tokens, turn of each, 0: answered)"""
    tokens = list(prompt)
    turn_of, num_sampled, turns = [], 0, 0
    limit = partner.max_turn_tokens
    width = PROMPT + NEW
    while True:
        turn = []
        room = NEW - len(turn_of)
        while len(turn) < min(limit or room, room):
            fixed = np.array([tokens + [0] * (width - len(tokens))])
            turn.append(int(next_token(params, cfg, fixed, len(tokens), key, num_sampled)))
            tokens.append(turn[-1])
            turn_of.append(turns + 1)
            num_sampled += 1
            if turn[-1] in EOS:
                break
        turns += 1
        reply = partner.answer(row, turn, turn[-1] in EOS)
        if reply.done:
            return tokens, turn_of, "done"
        if turns == partner.max_turns:
            return tokens, turn_of, "turns"
        if len(turn_of) + len(reply.tokens) >= NEW:
            return tokens, turn_of, "tokens"
        tokens += reply.tokens
        turn_of += [0] * len(reply.tokens)


def rows_of(rollout):
    """(tokens, turn of each token after the prompt, why it ended) of each row."""
    found = []
    for row, (tokens, mask) in enumerate(zip(rollout.tokens, rollout.token_mask)):
        in_completion = mask & (np.arange(len(mask)) >= PROMPT)
        turns = rollout.turn_ids[row][in_completion]
        found.append((tokens[mask].tolist(), turns.tolist(), rollout.conversations[row].ended))
    return found


def all_read_again(cfg, params) -> list:
    prompts, partner = ragged_prompts(4), Numbers()
    keys = sampling.row_keys(jnp.broadcast_to(jax.random.key(5), 8), jnp.arange(8) // G, jnp.arange(8) % G)
    return [naive(cfg, params, prompts[row // G], keys[row], row, partner) for row in range(8)]


@pytest.fixture(scope="module")
def expected(cfg, params):
    set_mesh(1, 1)
    return all_read_again(cfg, params)


@pytest.fixture(scope="module")
def talked(cfg, params):
    set_mesh(1, 1)
    partner = Numbers()
    return converse(cfg, params, partner, num_slots=4), partner


def test_a_conversation_equals_one_that_reads_everything_again_for_every_token(expected, talked):
    assert rows_of(talked[0]) == expected
    ended = {why for _, _, why in expected}
    assert len(ended) >= 2, f"the test needs conversations that end in several ways: {ended}"
    assert max(max(turns) for _, turns, _ in expected) >= 3


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(dict(num_slots=1, delay=2), marks=WIDE),
        dict(num_slots=4, delay=3),
        pytest.param(dict(num_slots=16, delay=0), marks=WIDE),
    ],
    ids=str,
)
def test_slots_and_the_clock_change_nothing(cfg, params, talked, expected, settings):
    settings, alone = dict(settings), {}

    partner = Numbers(delay=settings.pop("delay"))
    rollout = converse(cfg, params, partner, on_chunk=lambda _, ended: alone.update(ended), **settings)
    assert rows_of(rollout) == expected
    if settings["num_slots"] == 4:
        # Nor does the slot or the clock change a bit.
        assert rollout.metrics["perf/decode_steps"] != talked[0].metrics["perf/decode_steps"]
        np.testing.assert_array_equal(rollout.logprobs, talked[0].logprobs)
    # Each conversation is handed over alone when it has ended, as it is in the whole.
    assert [rows_of(alone[row])[0] for row in range(len(expected))] == expected


@pytest.mark.wide
def test_meshes_change_nothing(cfg, expected):
    set_mesh(2, 2)
    rollout = converse(cfg, random_params(cfg), Numbers(delay=2), num_slots=4)
    assert rows_of(rollout) == expected


def test_what_is_learned_from_is_what_was_sampled(talked):
    """Position by position: the partner got the very tokens that completion_mask marks."""
    rollout, partner = talked
    for row, conversation in enumerate(rollout.conversations):
        told = [token for tokens, _ in partner.told[row] for token in tokens]
        assert rollout.tokens[row][rollout.completion_mask[row]].tolist() == told
        for turn, (tokens, ended) in zip(conversation.turns, partner.told[row], strict=True):
            assert rollout.tokens[row, turn.begin : turn.end].tolist() == tokens
            assert rollout.completion_mask[row, turn.begin : turn.end].all()
            assert ended == (tokens[-1] in EOS)
        # each answer stands behind its turn, as it was given
        for turn, after in zip(conversation.turns, conversation.turns[1:]):
            assert rollout.tokens[row, turn.end : after.begin].tolist() == turn.reply.tokens
            assert not rollout.completion_mask[row, turn.end : after.begin].any()
            assert rollout.token_mask[row, turn.end : after.begin].all()


@pytest.mark.parametrize("packing", ["none", pytest.param("prefix", marks=WIDE)])
def test_answers_have_no_gradient_and_no_scores(cfg, params, talked, packing):
    """Holes in the middle of a completion: scores of rows come back to the sampled tokens, and to no others."""
    rollout = talked[0]
    batch = Batch(tokens=rollout.tokens, token_mask=rollout.token_mask, loss_weight=per_token(rollout.completion_mask))
    shared = {"shape": RowShape(NEW, num_lanes=2, prefix_columns=PROMPT), "rows_per_micro_batch": 8}
    layout = RowLayout("prefix", **shared) if packing == "prefix" else RowLayout(num_scored=NEW)
    rows, packed = layout.lay_out(batch)
    policy = make_policy(cfg, None, 1.0)
    scores = packed.back(np.asarray(jax.jit(policy.scores)(params, rows).logprobs))
    want = np.where(rollout.completion_mask, rollout.full_logprobs, 0)
    np.testing.assert_allclose(scores, want, atol=1e-4)
    assert (scores != 0).sum() == rollout.completion_mask.sum()


def test_an_environment_that_fails_ends_its_conversation_alone(cfg, params, expected):
    class Fails(Numbers):
        def answer(self, row, tokens, ended):
            reply = super().answer(row, tokens, ended)
            return replace(reply, failure="timeout", done=False) if row == 2 else reply

    rollout = converse(cfg, params, Fails(), num_slots=4)
    found = rows_of(rollout)
    assert found[2][2] == "failed" and rollout.conversations[2].turns[-1].reply.failure == "timeout"
    assert len(rollout.conversations[2].turns) == 1
    assert [row for i, row in enumerate(found) if i != 2] == [row for i, row in enumerate(expected) if i != 2]


# ---- stop texts: with two letters a token, one may end within a token, or span two


STOP = ("ad", "cbc")


def stopping(cfg, params, partner, chunk=4):
    rollout = RolloutConfig(chunk=chunk, num_slots=4)
    generation = GenerationConfig(PROMPT, NEW, stop=STOP)
    sample = make_generate(cfg, generation, EOS, 0, rollout=rollout, tokenizer=Letters())
    return sample(params, ragged_prompts(4), jax.random.key(5), G, 1.0, partner=partner)


def ended_by_text(told):
    """How many turns a stop text ended; none goes on behind one."""
    found = 0
    for tokens, _ in (turn for turns in told.values() for turn in turns):
        assert not any(text in Letters().decode(tokens[:-1]) for text in STOP), "a turn went on behind a stop text"
        found += any(text in Letters().decode(tokens) for text in STOP)
    return found


# one token more at a time, so that nothing is ever taken back; the cache has a ring of 4 columns in every local layer
@pytest.fixture(scope="module")
def one_at_a_time(cfg, params):
    set_mesh(1, 1)
    partner = Numbers(max_turn_tokens=12)
    return stopping(cfg, params, partner, chunk=1), partner


def test_a_stop_text_ends_a_turn_and_what_was_drawn_behind_it_leaves_no_trace(cfg, params, one_at_a_time):
    want, told = one_at_a_time
    partner = Numbers(max_turn_tokens=12, delay=1)
    rollout = stopping(cfg, params, partner)
    assert rows_of(rollout) == rows_of(want)
    assert partner.told == told.told
    assert ended_by_text(partner.told) >= 4
    np.testing.assert_allclose(rollout.logprobs, want.logprobs, atol=1e-5)
    # and the trainer, which reads it all at once, sees the same
    scored = jax.jit(partial(token_logprobs, cfg=cfg))(params, rollout.tokens, rollout.token_mask)
    assert np.abs(np.where(rollout.completion_mask, scored - rollout.logprobs, 0.0)).max() < 1e-4


# ---- tokens that nobody sampled join a slot, as if the whole sequence had been read at once


@pytest.mark.wide  # test_rollout.py has an int8 cache, and answers are appended to a plain one above
def test_an_int8_cache_knows_what_was_appended(cfg, params):
    """As far off as a cache that nothing was appended to: see test_rollout.py."""
    rollout = converse(cfg, params, Numbers(), num_slots=4, cache="int8")
    assert rollout.turn_ids.max() >= 3
    scored = jax.jit(partial(token_logprobs, cfg=cfg))(params, rollout.tokens, rollout.token_mask)
    gap = np.where(rollout.completion_mask, scored - rollout.logprobs, 0.0)
    assert 1e-4 < np.abs(gap).max() < 0.1


def test_widths_follow_from_the_length_of_what_is_appended_alone():
    widest = APPEND_WIDTHS[-1]
    calls = append_calls({2: ([1] * (widest + 20), 9), 5: ([2] * 3, 7)}, num_slots=32, fsdp=1)
    assert [tokens.shape for _, tokens, _, _ in calls] == [(8, 16), (8, widest), (8, 64)]
    # the slot of the long one decodes only once its last piece is there
    assert [limits[0] for *_, limits in calls] == [7, 0, 9]
    assert calls[0][0].tolist() == [5] + [32] * 7
    # slots that fsdp divides are not gathered
    assert append_calls({2: ([1], 9)}, num_slots=32, fsdp=2)[0][0].tolist() == list(range(32))


def test_long_tokens_are_cut_so_that_little_of_them_is_padding():
    long = list(range(256 + 130))
    calls = append_calls({3: (long, 12), 1: ([7, 8], 9), 2: (long[:200], 5)}, num_slots=32, fsdp=1)
    read = [(slot, count, limit) for rows, _, *of in calls for slot, count, limit in zip(rows, *of) if count]
    assert read == [(1, 2, 9), (2, 200, 5), (3, 256, 0), (3, 64, 0), (3, 64, 0), (3, 2, 12)]
