"""Conversations over the chat templates of all families: what is learned from is what was sampled, token for token."""

import random
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_params, set_mesh
from test_conversations import FAMILIES
from test_tokenizer import FAMILIES as TEMPLATES
from test_tokenizer import TOOL

from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.algorithms.weighting import per_token
from tunix_lite.environments.settings import ConversationConfig
from tunix_lite.learner.policy import make_policy, token_logprobs
from tunix_lite.learner.rows import RowLayout
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.models.turns import TurnTokens
from tunix_lite.rollout.generate import make_generate
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.tasks.processes import ALONE
from tunix_lite.tasks.sources import Arithmetic
from tunix_lite.tasks.task import Task, TaskConfig
from tunix_lite.types import Batch, TokenScores
from tunix_lite.workers.pool import RewardsConfig

PROMPT, NEW, G = 896, 704, 2
# of each family: its template, and whether it takes messages of tools
TAKES = {
    "gemma2": ("gemma", False),
    "gemma3": ("gemma", False),
    "qwen2": ("qwen2.5", True),
    "qwen3": ("qwen3", True),
    "llama3": ("llama3", True),
}
# of each family: the seed of its weights, and how much louder they make tokens that end a turn; so that some turns are
# empty and some are cut
OFTEN_ENDS = {"gemma2": (1, 4.0), "gemma3": (1, 12.0), "qwen2": (1, 4.0), "qwen3": (3, 6.0), "llama3": (1, 12.0)}
MARKERS = "<start_of_turn>user\n<end_of_turn><eos><bos><|im_end|>\n<|im_start|>assistant\n<|eot_id|><|begin_of_text|>"
ODD = [
    "",
    " ",
    # emoji of several code points, combining marks, CJK, control characters
    "\U0001f99c \U0001f3f4\u200d\u2620\ufe0f \U0001f469\u200d\U0001f467",
    "e\u0301 a\u0308\u0323 \u0e01\u0e33",
    "\u4f60\u597d\uff0c\u4e16\u754c",
    "\x00\x01\x1b[31m\x7f\u200b\u202e",
    MARKERS,
    "\r\n\n \t end ",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
]


class Odd:
    """Answers with odd texts, as a user or as tools; what it says follows from what it heard."""

    def __init__(self, with_tools: bool):
        self.with_tools = with_tools
        self.template_variables = {"tools": [TOOL]} if with_tools else {}
        self.said = []

    def reset(self, example):
        self.random = random.Random(example["question"])

    def step(self, completion):
        text = self.random.choice(ODD)
        if self.with_tools and self.random.random() < 0.4:
            return [{"role": "tool", "content": one} for one in (text, self.random.choice(ODD))], 0.0, False
        return [{"role": "user", "content": text}], 0.5, False


@cache
def tokenizer_of(name, folder):
    make, template = TEMPLATES[TAKES[name][0]]
    return Tokenizer.load(make(folder / name, template))


def often_ends(params, vocab, eos_ids, factor):
    """Weights under which a turn ends often, sometimes with its first token."""

    def louder(x):
        for axis, size in enumerate(x.shape):
            if size == vocab:
                rows = (slice(None),) * axis + (np.array(eos_ids),)
                return x.at[rows].multiply(factor)
        return x

    return jax.tree.map(louder, params)


def converse(name, folder):
    """(rollout, turns by row as the environment's side got them, tokenizer, cfg, params) of a family."""
    set_mesh(1, 1)
    tokenizer = tokenizer_of(name, folder)
    vocab = -(-tokenizer.backend.get_vocab_size() // 8) * 8
    cfg = Architecture(vocab, 3, 16, 4, 2, 8, 24, query_scale=8, **FAMILIES[name])
    seed, factor = OFTEN_ENDS[name]
    params = often_ends(random_params(cfg, seed=seed), vocab, tokenizer.eos_ids, factor)
    config = TaskConfig(Arithmetic(), "What is {question}?", {}, environment=partial(Odd, TAKES[name][1]))
    settings = ConversationConfig(max_turns=5, max_turn_tokens=12, workers=0)
    told, task = {}, Task(config, tokenizer, PROMPT, NEW)
    with task.with_workers(RewardsConfig(workers=0), print, ALONE, settings) as opened:
        examples = [task.config.source.train[i] for i in range(4)]
        partner = opened.partner([example for example in examples for _ in range(G)])
        submit = partner.submit

        def noted(row, tokens, ended):
            told.setdefault(row, []).append((list(tokens), ended))
            submit(row, tokens, ended)

        partner.submit = noted
        sample = make_generate(
            cfg,
            GenerationConfig(PROMPT, NEW),
            tokenizer.eos_ids,
            tokenizer.pad_id,
            rollout=RolloutConfig(num_slots=3, chunk=4),
            tokenizer=tokenizer,
        )
        rollout = sample(params, opened.prompts(examples), jax.random.key(3), G, partner=partner)
    return rollout, told, tokenizer, cfg, params


# The template of each family alone is in test_turns.py, which is cheap.
@pytest.mark.wide
@pytest.mark.parametrize("name", TAKES)
def test_what_is_learned_from_is_what_was_sampled_over_real_templates(name, tmp_path):
    rollout, told, tokenizer, cfg, params = converse(name, tmp_path)
    with_tools = TAKES[name][1]
    special = set(tokenizer._special_tokens)
    variables = {"tools": [TOOL]} if with_tools else {}
    turns_of = TurnTokens(tokenizer, variables=variables)
    answers = []
    for row, conversation in enumerate(rollout.conversations):
        tokens, sampled = rollout.tokens[row], rollout.completion_mask[row]
        assert tokens[sampled].tolist() == [token for turn, _ in told[row] for token in turn]
        for turn, (said, ended) in zip(conversation.turns, told[row], strict=True):
            assert tokens[turn.begin : turn.end].tolist() == said
            assert ended == (said[-1] in tokenizer.eos_ids)
            assert turn.reply.completion == tokenizer.decode(said)
        for (_, ended), turn, after in zip(told[row], conversation.turns, conversation.turns[1:]):
            answer = tokens[turn.end : after.begin].tolist()
            assert answer == turn.reply.tokens and not sampled[turn.end : after.begin].any()
            # what an environment spells is letters: the markers are the template's alone
            roles = 1 if not with_tools or answer_is_of_user(tokenizer, answer) else None
            if roles:
                plain = turns_of.between("x", ended)
                assert [t for t in answer if t in special] == [t for t in plain if t in special]
            answers.append(turn.reply.observation)
    assert MARKERS in "".join(answers) and "" in answers, "too few odd answers"
    assert any(turn == [turn[0]] and ended for turns in told.values() for turn, ended in turns), "no empty turn"
    assert any(not ended for turns in told.values() for _, ended in turns), "no turn was cut"

    scored = jax.jit(partial(token_logprobs, cfg=cfg))(params, rollout.tokens, rollout.token_mask)
    assert np.abs(np.where(rollout.completion_mask, scored - rollout.logprobs, 0.0)).max() < 1e-4
    check_gradient(cfg, params, rollout)


def answer_is_of_user(tokenizer, answer):
    """Whether the answer has the markers of one message of a user."""
    plain = TurnTokens(tokenizer).between("x", ended=True)
    special = set(tokenizer._special_tokens)
    return sum(t in special for t in answer) in (sum(t in special for t in plain), 1 + sum(t in special for t in plain))


def check_gradient(cfg, params, rollout):
    """The loss has a gradient by the log-probability of each sampled token, and of no other."""
    weights = per_token(rollout.completion_mask)
    batch = Batch(rollout.tokens, rollout.token_mask, weights, np.ones_like(weights), rollout.full_logprobs)
    rows, packed = RowLayout(num_scored=NEW).lay_out(batch)
    scores = make_policy(cfg, None, 1.0).scores(params, rows)

    def loss(logprobs):
        return GRPO().loss(TokenScores(logprobs, scores.entropy), rows)[0]

    gradient = packed.back(np.asarray(jax.grad(loss)(jnp.asarray(scores.logprobs))))
    assert (gradient[~rollout.completion_mask] == 0).all()
    assert (gradient[rollout.completion_mask] != 0).all()
