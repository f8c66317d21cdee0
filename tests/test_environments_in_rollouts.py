"""Environments that answer the turns of a rollout: their answers become tokens once, what fails is one conversation;
and the bundled game."""

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from test_tokenizer import QWEN_25_TEMPLATE, qwen

from tunix_lite.algorithms.groups import Groups
from tunix_lite.basics.errors import ConfigError
from tunix_lite.basics.types import Conversation, Rollout, SampledTurn
from tunix_lite.environments.bundled_tools import calculator
from tunix_lite.environments.environment import Turn
from tunix_lite.environments.guessing import GuessingGame, Secrets, is_secret
from tunix_lite.environments.settings import ConversationConfig
from tunix_lite.environments.tool_calls import expression_in
from tunix_lite.environments.tools import ToolEnvironment, schema_of
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.models.turns import TurnTokens
from tunix_lite.rewards.math import correct
from tunix_lite.runs.samples import sample_rows
from tunix_lite.settings.compose import compose
from tunix_lite.tasks.processes import ALONE, Processes, SharedError
from tunix_lite.tasks.sources import Arithmetic
from tunix_lite.tasks.task import Reward, Task, TaskConfig
from tunix_lite.tracking.console import lines_of_sample
from tunix_lite.workers.pool import RewardsConfig

WIDTH = 24  # columns of prompts


class Hears:
    """Says what it heard, and is over when it hears 'stop'. begins: what reset returns; fails_at: what it breaks at."""

    def __init__(self, begins: str | None = None, fails_at: str = ""):
        self.begins = begins
        self.fails_at = fails_at

    def reset(self, example):
        return self.begins and self.begins.format(**example)

    def step(self, completion):
        if self.fails_at and self.fails_at in completion:
            raise KeyError("broken")
        return f"{completion}!", 0.5, "stop" in completion, {"calls": 2}


def open_task(tokenizer, environment, rewards=(), processes=ALONE, say=lambda line: None, **conversation):
    config = TaskConfig(Arithmetic(), "What is {question}?", dict(rewards), environment=environment)
    settings = ConversationConfig(workers=0, **conversation)
    task = Task(config, tokenizer, max_prompt_length=WIDTH, max_new_tokens=64)
    return task.with_workers(RewardsConfig(workers=0), say, processes, settings)


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


def test_rewards_of_the_task_are_about_the_last_turn(tokenizer):
    rewards = {"correct": Reward(correct, 2.0)}
    with open_task(tokenizer, Hears(), rewards) as task:
        answer = task.config.source.train[0]["answer"]
        _, graded = hold(task, [[f"The answer is {answer}.", "stop"], ["no", f"The answer is {answer}. stop"]], G=2)
    assert graded.rewards.tolist() == [1.0, 3.0]
    assert graded.correct.tolist() == [False, True]


class Wins:
    """An environment that says what is right, of rows that hold no answer."""

    def reset(self, example):
        return None

    def step(self, completion):
        return "", 0.5, True, {"won": "stop" in completion}


def test_rows_need_no_answer_where_the_environment_says_what_is_right(tokenizer, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "go"}\n{"prompt": "on"}\n')
    file = tmp_path / "rows.jsonl"
    given = ["task=jsonl", f"task.train={file}", f"task.held_out={file}"]
    run = compose([*given, "task.environment={_target_: test_environments_in_rollouts.Wins}"])
    whole = Task(run.task, tokenizer, max_prompt_length=WIDTH, max_new_tokens=64)
    with whole.with_workers(RewardsConfig(workers=0), print, ALONE, ConversationConfig(workers=0)) as task:
        _, graded = hold(task, [["stop"], ["go on"]])
    assert graded.correct.tolist() == [True, False] and graded.rewards.tolist() == [0.5, 0.5]


def test_an_environment_may_begin_with_a_text_of_its_own(tokenizer):
    with open_task(tokenizer, Hears(begins="Say {answer}.")) as task:
        example = task.config.source.train[0]
        partner = task.partner([example])
    assert partner.openings == [f"Say {example['answer']}."]
    assert partner.prompts == [tokenizer.prompt(partner.openings[0])]


@pytest.mark.parametrize(
    ("settings", "rewards", "dropped"),
    [
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


def test_a_conversation_without_room_for_its_end_is_compared_and_not_learned_from(tokenizer):
    with open_task(tokenizer, Hears(), on_limit="mask") as task:
        groups = Groups.of(*hold(task, [["1", "stop"], ["1", "2"]]), 2)
    assert [one.ended for one in groups.rollout.conversations] == ["done", "turns"]
    assert np.isfinite(groups.rewards_PG).all()
    assert groups.learned_PG.tolist() == [[True, False]]


class Unreadable:
    """Answers some completions with what no chat template takes."""

    def reset(self, example):
        return None

    def step(self, completion):
        mixed = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
        return mixed if completion == "mix" else "\ud800" if completion == "half" else "again", 1.0, False


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("mix", "what the model cannot read: an answer has messages of the assistant"),
        ("half", "returned '\\ud800' from step for the completion 'half'; it must be text in UTF-8"),
    ],
)
def test_an_answer_that_the_model_cannot_read_fails_one_conversation(tokenizer, said, message):
    with open_task(tokenizer, Unreadable(), on_error="zero") as task:
        rollout, graded = hold(task, [["1", said], ["1", "2"]])
    assert [one.ended for one in rollout.conversations] == ["failed", "turns"]
    reply = rollout.conversations[0].turns[1].reply
    assert reply.failure == "not_a_turn" and message in reply.message and "\n" not in reply.message
    assert graded.rewards.tolist() == [0.0, 2.0]
    with open_task(tokenizer, Unreadable()) as task, pytest.raises(SharedError, match="conversation.on_error=zero or"):
        hold(task, [[said]])


def test_how_environments_failed_is_a_line_of_the_console_and_if_all_did_the_step_ends(tokenizer):
    """Nothing is left to learn from then, and no reward is to blame."""
    lines = []
    with open_task(tokenizer, Hears(fails_at="boom"), on_error="drop", say=lines.append) as task:
        hold(task, [["1", "boom"], ["stop"], ["boom"]])
    (line,) = lines
    assert line.startswith("environments that failed, of 3 conversations: error 2; the first: the environment failed")
    assert "for the completion 'boom'" in line
    said = r"all 2 completions were dropped; the first: the environment failed .*boom"
    rewards = {"correct": Reward(correct)}
    with (
        open_task(tokenizer, Hears(fails_at="boom"), rewards, on_error="drop") as task,
        pytest.raises(SharedError, match=said),
    ):
        hold(task, [["boom"], ["1", "boom"]])


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
    lines = lines_of_sample(row, with_reward=False)
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


def test_the_tools_of_an_environment_reach_the_chat_template(tmp_path):
    run = compose(["task=calculator", "task.environment.role=tool"])
    tokenizer = Tokenizer.load(qwen(tmp_path / "q", QWEN_25_TEMPLATE))
    task = Task(run.task, tokenizer, 4096, 64)
    example = run.task.source.held_out[0]
    written = tokenizer.decode(task.text.prompt(example), skip_special=False)
    schema = written.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert json.loads(schema) == schema_of(calculator)
    messages = [{"role": "tool", "name": "calculator", "content": "4"}]
    tokens = task.text.turn_tokens.between(messages, ended=True)
    expected = "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokens, skip_special=False) == expected


# ---- the bundled game


def played(environment, example, completions):
    environment.reset(example)
    return [environment.step(completion) for completion in completions]


def test_a_guessing_game_by_hand():
    example = {"secret": 7, "low": 1, "high": 9}
    turns = played(GuessingGame(guesses=3), example, ["The answer is 5.", "8", "7"])
    assert turns == [Turn("higher"), Turn("lower"), Turn("right", 1.0, True, {"won": True})]
    turns = played(GuessingGame(guesses=3), example, ["what", "99", "3"])
    assert turns == [
        Turn("Say a number from 1 to 9."),
        Turn("Say a number from 1 to 9."),
        Turn("over", 0.0, True, {"won": False}),
    ]
    # 5 rules out 1 to 5, so 3 is no possible guess, and 8 is
    turns = played(GuessingGame(guesses=4, possible=0.2), example, ["5", "3", "8", "9"])
    assert [turn.reward for turn in turns] == [0.2, 0.0, 0.2, 0.0]
    assert is_secret("The answer is 7.", example) == 1


def test_secrets_are_drawn_evenly_and_the_same_everywhere():
    source = Secrets(1, 4)
    drawn = Counter(source.train[i]["secret"] for i in range(400))
    assert set(drawn) == {1, 2, 3, 4} and min(drawn.values()) > 60
    assert source.held_out[0] == Secrets(1, 4).held_out[0]
    assert source.train[0]["question"] == "Guess 1 to 4."
    for make, message in (
        (lambda: Secrets(5, 5), "low must be below high"),
        (lambda: GuessingGame(guesses=0), "guesses=0"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
