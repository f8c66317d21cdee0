"""Environments that answer the turns of a rollout: their answers become tokens once, what fails is one conversation."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tunix_lite.commands.program import compose
from tunix_lite.environments.bundled_tools import calculator
from tunix_lite.environments.settings import ConversationConfig
from tunix_lite.environments.tool_calls import expression_in
from tunix_lite.environments.tools import ToolEnvironment
from tunix_lite.errors import ConfigError
from tunix_lite.models.source import BUNDLED
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.models.turns import TurnTokens
from tunix_lite.rewards.math import correct
from tunix_lite.rewards.pool import RewardsConfig
from tunix_lite.runs.samples import sample_rows
from tunix_lite.tasks.processes import ALONE, Processes, SharedError
from tunix_lite.tasks.sources import Arithmetic
from tunix_lite.tasks.task import Reward, Task, TaskConfig
from tunix_lite.tracking.console import conversation_lines
from tunix_lite.train import train
from tunix_lite.types import Conversation, Rollout, SampledTurn

WIDTH = 24  # columns of prompts


class Hears:
    """Says what it heard, and is over when it hears 'stop'. begins: what reset returns; fails_at: what it breaks at."""

    def __init__(self, begins: str | None = None, fails_at: str = ""):
        self.begins = begins
        self.fails_at = fails_at

    def reset(self, example):
        if self.fails_at == "reset":
            raise KeyError("no beginning")
        return self.begins and self.begins.format(**example)

    def step(self, completion):
        if self.fails_at and self.fails_at in completion:
            raise KeyError("broken")
        return {"observation": f"{completion}!", "reward": 0.5, "done": "stop" in completion, "info": {"calls": 2}}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(BUNDLED)


def open_task(tokenizer, environment, rewards=(), processes=ALONE, **conversation):
    config = TaskConfig(Arithmetic(), "What is {question}?", dict(rewards), environment=environment)
    settings = ConversationConfig(workers=0, **conversation)
    task = Task(config, tokenizer, max_prompt_length=WIDTH, max_new_tokens=64)
    return task.with_workers(RewardsConfig(workers=0), lambda line: None, processes, settings)


def hold(task, said, G=1):
    """A rollout in which the model says these turns, a list of each row; and the grades of it."""
    examples = [task.config.source.train[row // G] for row in range(len(said))]
    partner = task.partner(examples)
    grader = task.grader(examples)
    shape = (len(said), WIDTH + 64)
    tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
    conversations = np.empty(len(said), object)
    token_mask = mask.copy()
    for row, texts in enumerate(said):
        turns, at, ended = [], WIDTH, ""
        for number, text in enumerate(texts, start=1):
            new = [*task.tokenizer.encode(text), task.tokenizer.eos_ids[-1]]
            partner.submit(row, new, True)
            reply = partner.replies(wait=True)[row]
            tokens[row, at : at + len(new)] = new
            mask[row, at : at + len(new)] = True
            turns.append(SampledTurn(at, at + len(new), reply))
            at += len(new)
            token_mask[row, WIDTH:at] = True
            if reply.done or reply.failure:
                ended = "failed" if reply.failure else "done"
                break
            if number < len(texts):
                tokens[row, at : at + len(reply.tokens)] = reply.tokens
                at += len(reply.tokens)
        conversations[row] = Conversation(turns, ended or "turns")
        grader.submit(row, new)
    zeros = np.zeros(shape, np.float32)
    finish = np.array([one.ended == "done" for one in conversations], np.int8)
    rollout = Rollout(tokens, token_mask, mask, zeros, finish, zeros, turn_ids=mask, conversations=conversations)
    return rollout, grader.results(rollout)


def test_answers_become_tokens_of_the_template_and_turns_texts(tokenizer):
    with open_task(tokenizer, Hears()) as task:
        assert task.partner([task.config.source.train[0]]).prompts is None
        rollout, graded = hold(task, [["1 + 1", "stop"], ["2", "3"]])
    first, second = rollout.conversations[0].turns
    assert (first.reply.completion, first.reply.observation) == ("1 + 1", "1 + 1!")
    want = TurnTokens(tokenizer).between([{"role": "user", "content": "1 + 1!"}], True)
    assert first.reply.tokens == want
    assert second.reply.done and second.reply.tokens == []
    # the environment alone gives rewards: their sum, and what got any is right
    assert graded.rewards.tolist() == [1.0, 1.0]
    assert graded.turn_rewards == [[0.5, 0.5], [0.5, 0.5]]
    assert graded.completions == ["stop", "3"]
    metrics = graded.metrics
    assert metrics["reward/environment"] == 1.0
    assert metrics["conversation/turns"] == 2 and metrics["conversation/ended_by_done"] == 0.5
    assert metrics["conversation/calls"] == 4


def test_calls_of_tools_are_counted_and_how_many_went_well(tokenizer):
    tools = ToolEnvironment((calculator,), role="user", calls=expression_in)
    said = [["2 + 2 =", "4"], ["1 / 0 ="], ["7"], ["3 * 3 =", "5 + 5 ="]]
    with open_task(tokenizer, tools) as task:
        _, graded = hold(task, said)
    found = {name: graded.metrics[f"conversation/{name}"] for name in ("tool_calls", "tool_errors", "called_a_tool")}
    # four calls in four conversations, one of which failed; three conversations called
    assert found == {"tool_calls": 1.0, "tool_errors": 0.25, "called_a_tool": 0.75}
    assert graded.metrics["conversation/tool_success"] == 0.75
    with open_task(tokenizer, tools) as task:
        _, graded = hold(task, [["7"]])
    assert "conversation/tool_success" not in graded.metrics


def test_rewards_of_the_task_are_about_the_last_turn(tokenizer):
    rewards = {"correct": Reward(correct, 2.0)}
    with open_task(tokenizer, Hears(), rewards) as task:
        answer = task.config.source.train[0]["answer"]
        _, graded = hold(task, [[f"The answer is {answer}.", "stop"], ["no", f"The answer is {answer}. stop"]], G=2)
    assert graded.rewards.tolist() == [1.0, 3.0]
    assert graded.correct.tolist() == [False, True]


def test_an_environment_may_begin_with_a_text_of_its_own(tokenizer):
    with open_task(tokenizer, Hears(begins="Say {answer}.")) as task:
        examples = [task.config.source.train[row] for row in range(2)]
        prompts = task.partner(examples).prompts
    assert prompts == [tokenizer.prompt(f"Say {example['answer']}.") for example in examples]


@pytest.mark.parametrize(
    ("settings", "rewards", "dropped"),
    [
        ({"on_error": "zero"}, [0.0, 1.0, 1.0], [False] * 3),
        ({"on_error": "drop"}, [np.nan, 1.0, 1.0], [True, False, False]),
        ({"on_error": "zero", "on_limit": "penalise", "limit_reward": -1.0}, [0.0, 1.0, -1.0], [False] * 3),
    ],
    ids=str,
)
def test_what_failed_or_reached_a_limit_is_worth_what_the_settings_say(tokenizer, settings, rewards, dropped):
    said = [["1", "boom", "2"], ["1", "stop"], ["1", "2"]]
    with open_task(tokenizer, Hears(fails_at="boom"), **settings) as task:
        rollout, graded = hold(task, said)
    assert [one.ended for one in rollout.conversations] == ["failed", "done", "turns"]
    np.testing.assert_array_equal(graded.rewards, rewards)
    assert graded.dropped.tolist() == dropped
    assert graded.metrics["conversation/ended_by_failed"] == pytest.approx(1 / 3)
    assert graded.metrics["conversation/failed_by_error"] == pytest.approx(1 / 3)


def test_one_that_fails_stops_the_run_where_errors_are_raised(tokenizer):
    raised = pytest.raises(SharedError, match=r"broken.*conversation.on_error=zero or drop")
    with open_task(tokenizer, Hears(fails_at="boom")) as task, raised:
        hold(task, [["boom"]])
    with open_task(tokenizer, Hears(fails_at="reset")) as task, pytest.raises(SharedError, match="no beginning"):
        task.partner([task.config.source.train[0]])


def test_one_that_cannot_begin_fails_at_its_first_turn(tokenizer):
    with open_task(tokenizer, Hears(fails_at="reset"), on_error="zero") as task:
        rollout, graded = hold(task, [["1"]])
    assert rollout.conversations[0].turns[0].reply.failure == "error"
    assert graded.rewards.tolist() == [0.0]


def test_two_processes_share_the_environments_and_get_the_same_answers(tokenizer):
    """Each steps its own rows; threads stand for the processes."""
    barrier = threading.Barrier(2)
    board: dict = {}

    def run(index):
        def share(value):
            board[index] = value
            barrier.wait()
            everyone = [board[0], board[1]]
            barrier.wait()
            return everyone

        with open_task(tokenizer, Hears(), processes=Processes(index, 2, share)) as task:
            rollout, graded = hold(task, [["1", "stop"], ["2", "3"], ["4 stop"]])
            known = list(task.environments._rows)
        return [one.turns for one in rollout.conversations], graded.rewards.tolist(), known

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(run, range(2))
    for ours, theirs in zip(first[0], second[0]):
        assert [(t.begin, t.end, t.reply) for t in ours] == [(t.begin, t.end, t.reply) for t in theirs]
    assert first[1] == second[1] == [1.0, 1.0, 0.5]
    assert (first[2], second[2]) == ([0, 2], [1])


def test_samples_hold_whole_conversations(tokenizer):
    with open_task(tokenizer, Hears()) as task:
        rollout, graded = hold(task, [["1 + 1", "stop"]])
    (row,) = sample_rows(graded)
    assert [turn["completion"] for turn in row["turns"]] == ["1 + 1", "stop"]
    assert row["turns"][0]["observation"] == "1 + 1!" and row["ended_by"] == "done"
    spans = [row["all_tokens"][slice(*turn["span"])] for turn in row["turns"]]
    assert [token for span in spans for token in span] == row["tokens"]
    between = row["all_tokens"][row["turns"][0]["span"][1] : row["turns"][1]["span"][0]]
    assert between == rollout.conversations[0].turns[0].reply.tokens
    lines = conversation_lines(row, "right")
    assert [line.split(":")[0].strip() for line in lines[1:4]] == ["model", "answer", "model"]
    assert "1 + 1!" in lines[2] and lines[-1].strip() == "ended by done, 2 turns"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm=gdpo", "conversation.credit=turn"], "conversation.credit=end"),
        (["algorithm=sft", "evaluation.num_examples=0"], "nothing is sampled: .* set task.environment=null"),
    ],
)
def test_settings_that_conversations_exclude_are_one_message(settings, message):
    environment = "+task.environment._target_=test_environments_in_rollouts.Hears"
    with pytest.raises(ConfigError, match=message):
        compose([environment, "conversation.workers=0", *settings])
    compose(settings)


@pytest.mark.wide
def test_a_run_goes_on_when_environments_loop(tmp_path):
    """Two steps of a real run: each looping conversation fails after the stated second, is counted, and is worth 0."""
    settings = [
        "+task.environment={_target_:faulty_environments.Fails,how:loop}",
        *("conversation.on_error=zero", "conversation.timeout=1", "conversation.max_turns=3"),
        *("conversation.max_turn_tokens=6", "generation.max_new_tokens=64", "training.max_steps=2"),
        *("training.prompts_per_step=4", "algorithm.num_generations=2", "evaluation.num_examples=0"),
        *("model=random", "model.architecture.num_layers=1", "tracking.tensorboard=false"),
    ]
    train(compose(settings), tmp_path)
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    for step in steps:
        failed = step["conversation/ended_by_failed"]
        assert 0 < failed < 1 and failed == step["conversation/failed_by_timeout"]
        assert step["time/environments"] >= 8 * failed * 1.0
        assert step["conversation/ended_by_done"] == 1 - failed
