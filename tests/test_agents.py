"""Agents that are trained without changing them: tokens as they were sampled, rewards, failures, and learning."""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import conftest
import numpy as np
import pytest
from scripted_engine import ScriptedEngine
from test_trainer import ONE, TINY

from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.algorithms.weighting import per_sequence
from tunix_lite.api import ConfigError, RunConfig, RunFailed, compose, train_agent
from tunix_lite.rollout.live import DrawSettings
from tunix_lite.runs.agents.batch import EpisodeGroups, settings_for_agents
from tunix_lite.runs.agents.episodes import Episode, OpenEpisodes, _TokenSequence, add_choice, with_tokens_as_sampled
from tunix_lite.runs.agents.experience import _Endpoint
from tunix_lite.runs.agents.running import AgentConfig, Ended, Runner
from tunix_lite.serving.bad_call import BadCall
from tunix_lite.serving.calls import Limits

# Not imported before a test needs it: it takes a second in each process of the suite.
pytestmark = pytest.mark.skipif(find_spec("openai") is None, reason="needs openai")
ROOT = Path(__file__).resolve().parents[1]


def sequences(*sampled: tuple) -> list[_TokenSequence]:
    found = []
    for one in sampled:
        add_choice(found, *one)
    return found


FIRST = ((2, 5), (7, 1), (-0.1, -0.2))


@pytest.mark.parametrize(
    "calls, tokens, sampled",
    [
        # the answer of a user, 8 9, and a second turn
        ([((2, 5, 7, 1, 8, 9), (6, 1), (-0.3, -0.4))], ["2 5 7 1 8 9 6 1"], ["00110011"]),
        # a prompt that differs in one token begins a sequence of its own
        ([((2, 5, 7, 3, 8, 9), (6,), (-0.3,))], ["2 5 7 1", "2 5 7 3 8 9 6"], ["0011", "0000001"]),
        # two calls go on from one answer: the second reads it, and does not learn it again
        (
            [((2, 5, 7, 1, 8), (6,), (-0.3,)), ((2, 5, 7, 1, 9), (4,), (-0.4,))],
            ["2 5 7 1 8 6", "2 5 7 1 9 4"],
            ["001101", "000001"],
        ),
        # choices of one call are sequences, and a prompt goes on with the one that it repeats
        (
            [((2, 5), (6, 1), (-0.5, -0.6)), ((2, 5, 6, 1, 8), (3,), (-0.7,))],
            ["2 5 7 1", "2 5 6 1 8 3"],
            ["0011", "001101"],
        ),
    ],
)
def test_calls_become_sequences_that_are_learned_from_once(calls, tokens, sampled):
    found = sequences(FIRST, *calls)
    assert [" ".join(map(str, one.tokens)) for one in found] == tokens
    assert ["".join(str(int(x)) for x in one.is_sampled) for one in found] == sampled
    assert found[0].logprobs[:4] == [0, 0, -0.1, -0.2]
    assert sum(one.num_calls for one in found) == 1 + len(calls)


def test_a_conversation_keeps_the_tokens_that_were_sampled(tokenizer):
    """The answer `The` was sampled as `T` `h` `e`; its text alone would be cut into other tokens."""
    asked = [{"role": "user", "content": "hi"}]
    letters = [token for letter in "The" for token in tokenizer.encode(letter)]
    said = [*letters, tokenizer.eos_ids[-1]]
    assert tokenizer.encode("The") != letters
    earlier = sequences((tuple(tokenizer.prompt(asked)), tuple(said), (0.0,) * len(said)))
    more = [*asked, {"role": "assistant", "content": "The"}, {"role": "user", "content": "more"}]
    prompt = tokenizer.prompt(more)
    assert not earlier[0].is_start_of(prompt)
    found = with_tokens_as_sampled(prompt, earlier, tokenizer)
    assert earlier[0].is_start_of(found)
    assert tokenizer.decode(found, False) == tokenizer.decode(prompt, False)
    # Another text is left as it is: the agent changed what was said.
    other = tokenizer.prompt([*asked, {"role": "assistant", "content": "Then"}, more[2]])
    assert with_tokens_as_sampled(other, earlier, tokenizer) == other


def groups_of(rewards: list, sequences_of: list[list[_TokenSequence]], on_error: str = "drop") -> EpisodeGroups:
    episodes = [Episode(str(i), {}, i, sequences=found) for i, found in enumerate(sequences_of)]
    ended = [Ended(value, 0.1, "" if value is not None else "error", "it broke") for value in rewards]
    return EpisodeGroups(episodes, ended, 2, on_error)


def sequence(prompt: int, sampled: int) -> _TokenSequence:
    tokens = list(range(20, 20 + prompt + sampled))
    mask = [False] * prompt + [True] * sampled
    return _TokenSequence(tokens, mask, [-0.5 if is_on else 0.0 for is_on in mask], 1)


def test_rows_of_episodes_by_hand():
    """Two groups of two. The second episode has two sequences, one of them wider than the others; the third failed."""
    rewards = [1.0, 0.0, None, 1.0]
    made = [[sequence(4, 3)], [sequence(4, 2), sequence(70, 5)], [sequence(4, 9)], [sequence(4, 10)]]
    groups = groups_of(rewards, made)
    # (r - mean) / std with G - 1: +- 0.5 / 0.7071; alone in its group: 0
    np.testing.assert_allclose(groups.advantages_PG(GRPO()), [[0.70701, -0.70701], [0, 0]], atol=1e-4)
    batch = groups.batch(GRPO())
    assert batch.tokens.shape == (4, 75), "a row for each sequence that is learned from, as wide as the longest"
    # 3 + 2 + 5 + 10 sampled tokens are learned from; those of the failed one are not there
    weight = np.asarray(batch.loss_weight)
    assert (weight != 0).sum(axis=1).tolist() == [3, 2, 5, 10]
    np.testing.assert_allclose(weight[weight > 0], 1 / 20, rtol=1e-6)
    assert batch.token_mask.sum(axis=1).tolist() == [7, 6, 75, 14]
    assert (batch.advantages[2] == np.float32(groups.advantages_PG(GRPO())[0, 1])).all()
    assert (batch.old_logprobs[2, 70:75] == -0.5).all() and batch.old_logprobs[2, :70].sum() == 0
    # Each sequence the same, however long: 1 / (4 sequences * tokens).
    weight = groups.batch(GRPO(weighting=per_sequence)).loss_weight
    np.testing.assert_allclose(weight.sum(axis=1), [1 / 4] * 4, rtol=1e-5)
    # A group that agrees can be left out; where nothing is left, an update is made of which nothing counts.
    agree = groups_of([1.0, 1.0, 0.0, 0.0], [[sequence(4, 3)]] * 4)
    batch = agree.batch(GRPO(agreeing_groups="drop"))
    assert len(batch.tokens) == 1 and not batch.loss_weight.any() and not batch.token_mask.any()


def test_a_failed_episode_counts_as_on_error_says():
    made = [[sequence(4, 3)] for _ in range(4)]
    for on_error, mean in (("zero", 0.5), ("drop", 2 / 3)):
        groups = groups_of([1.0, 0.0, None, 1.0], made, on_error)
        assert groups.metrics["reward/mean"] == pytest.approx(mean) and groups.metrics["episodes/errors"] == 1
        assert groups.kept_PG.all() == (on_error == "zero")
    with pytest.raises(RunFailed, match="an agent failed .error.: it broke"):
        _ = groups_of([1.0, 0.0, None, 1.0], made, "raise").metrics


@pytest.mark.parametrize(
    "setting, message",
    [
        ("algorithm=dpo", "agents learn by GRPO"),
        ("generation.temperature=0", "all episodes of a group would be the same"),
        ("task=guessing", "task.environment: agents do not follow it"),
    ],
)
def test_what_agents_do_not_follow_is_named(setting, message):
    with pytest.raises(ConfigError, match=message):
        settings_for_agents(compose([setting]))


def test_an_agent_writes_where_its_caller_says():
    with pytest.raises(ConfigError, match=r"hydra.run.dir=out: agents write into .* train_agent\(folder="):
        train_agent(print, "task=arithmetic", "hydra.run.dir=out", folder="elsewhere")


# ---- agents at work, without a model


@pytest.fixture
def work(tokenizer):
    """Runs an agent on examples {"number": i} against an engine that says `say(prompt)`."""
    opened = []

    def run(agent, count=1, say=lambda prompt: "The answer is 7.", reward=None, draw=None, seed=5, **config):
        config = AgentConfig(**config)
        episodes = OpenEpisodes(tokenizer, 256, config.max_calls)
        engine = ScriptedEngine(tokenizer, say)
        endpoint = _Endpoint(engine, tokenizer, Limits("bundled", 256, 32, 300, is_lenient=True), episodes)
        runner = Runner(agent, reward, episodes, endpoint.base_url, config)
        opened.append((runner, endpoint))
        episodes = [episodes.open({"number": i}, seed + i, draw) for i in range(count)]
        return SimpleNamespace(ended=runner.run(episodes), episodes=episodes, engine=engine)

    yield run
    for runner, endpoint in opened:
        runner.close()
        endpoint.close()


HI = [{"role": "user", "content": "hi"}]


def say_hi(client, **settings):
    return client.chat.completions.create(model="gpt-4o", messages=HI, **settings).choices[0].message.content


def test_an_agent_with_two_turns_leaves_one_sequence(work, tokenizer):
    def agent(client, example):
        said = say_hi(client)
        more = [*HI, {"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
        client.chat.completions.create(model="gpt-4o", messages=more, max_tokens=10**6)
        return example["number"] / 2

    found = work(agent, count=3)
    assert [one.reward for one in found.ended] == [0.0, 0.5, 1.0]
    said = [*tokenizer.encode("The answer is 7."), tokenizer.eos_ids[-1]]
    for episode in found.episodes:
        [one] = episode.sequences
        first = tokenizer.prompt(HI)
        between = tokenizer.encode("\n<start_of_turn>user\nmore<end_of_turn>\n<start_of_turn>model\n")
        assert one.tokens == [*first, *said, *between, *said]
        assert sum(one.is_sampled) == 2 * len(said) == episode.num_tokens
        np.testing.assert_allclose([x for x in one.logprobs if x], [-0.01 * (t + 1) for t in range(len(said))] * 2)


def test_streams_and_texts_are_recorded_too(work, tokenizer):
    def agent(client, example):
        stream = client.chat.completions.create(model="x", messages=HI, stream=True, n=2)
        texts = ["", ""]
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        # A text that goes on with what was said, as agents do that use /v1/completions.
        first = client.completions.create(model="x", prompt="2 + 2 =", max_tokens=3).choices[0].text
        client.completions.create(model="x", prompt=f"2 + 2 ={first} so", max_tokens=3)
        return float(texts == ["The answer is 7."] * 2)

    found = work(agent)
    assert found.ended[0].reward == 1.0
    assert [one.num_calls for one in found.episodes[0].sequences] == [1, 1, 2]


def test_the_key_may_name_the_episode(work):
    """For agents that set a key and not a path."""
    import openai

    def agent(client, example):
        address = str(client.base_url).split("/episodes")[0]
        with openai.OpenAI(base_url=f"{address}/v1", api_key=client.api_key) as other:
            say_hi(other)
        other = openai.OpenAI(base_url=f"{address}/v1", api_key="what", max_retries=0)
        with pytest.raises(openai.APIStatusError, match="no such episode"):
            say_hi(other)
        other.close()
        return 1.0

    found = work(agent)
    assert found.ended[0].reward == 1.0, found.ended
    assert len(found.episodes[0].sequences) == 1


def test_failures_are_named_and_harm_no_other_episode(work):
    late = threading.Event()
    after = []

    def agent(client, example):
        number = example["number"]
        if number == 0:
            raise KeyError("answer")
        if number == 1:
            time.sleep(1.5)
            try:
                say_hi(client)
            except Exception as error:
                after.append(getattr(error, "status_code", error))
            late.set()
        if number < 5:
            return {2: {"reward": 1}, 3: None, 4: "a text"}.get(number)
        say_hi(client)
        return True

    found = work(agent, count=6, timeout=1.0)
    failures = [(one.failure, one.message) for one in found.ended]
    assert failures[0][0] == "error" and "KeyError" in failures[0][1] and "test_agents.py, line" in failures[0][1]
    assert failures[1] == ("timeout", "the agent took more than 1 s")
    assert failures[2][0] == "no_reward" and "{'reward': 1}" in failures[2][1]
    assert failures[3][0] == "no_reward" and "returned None" in failures[3][1]
    assert failures[4][0] == "no_reward" and "no reward for texts" in failures[4][1]
    assert failures[5] == ("", "") and found.ended[5].reward == 1.0
    # What an agent asks for after its time is refused, and not recorded.
    assert late.wait(10) and after == [410]
    assert found.episodes[1].sequences == []


def test_an_episode_that_has_ended_gets_no_more_tokens(tokenizer):
    """A call that was begun before the end of its episode, and comes to the engine after it."""
    episodes = OpenEpisodes(tokenizer, 64, 8)
    episode = episodes.open({}, 1)
    with episodes.submitting(episode.id):
        waiting = threading.Thread(target=episodes.close, args=(episode,))
        waiting.start()
        waiting.join(0.1)
        # it ends when the sequences are with the engine, and not before
        assert waiting.is_alive() and not episode.is_over
    waiting.join(10)
    with pytest.raises(BadCall, match="it is over"), episodes.submitting(episode.id):
        raise AssertionError("not reached")


def test_training_draws_as_the_run_says_and_evaluation_as_the_agent_asks(work):
    def agent(client, example):
        say_hi(client, temperature=0, seed=3)
        say_hi(client, temperature=0, seed=3)
        return 1.0

    trained = work(agent, count=2, draw=DrawSettings(temperature=0.9, top_p=0.8))
    draws = [one.draw for one in trained.engine.asked]
    assert {(draw.temperature, draw.top_p) for draw in draws} == {(0.9, 0.8)}
    # Each call of each episode has a seed of its own, and the same one in another run.
    assert len({draw.seed for draw in draws}) == 4
    again = work(agent, count=2, draw=DrawSettings(temperature=0.9, top_p=0.8))
    assert {one.draw.seed for one in again.engine.asked} == {draw.seed for draw in draws}
    evaluated = work(agent)
    assert {one.draw.temperature for one in evaluated.engine.asked} == {0.0}


# ---- learning


def two_turns(client, example):
    answer = client.chat.completions.create(model="any", messages=HI, max_tokens=6)
    said = answer.choices[0].message.content
    more = [*HI, {"role": "assistant", "content": said}, {"role": "user", "content": "on"}]
    said += client.chat.completions.create(model="any", messages=more, max_tokens=6).choices[0].message.content
    return float(len(said))


SMALL = [*TINY, ONE, "training.prompts_per_step=2", "algorithm.num_generations=2", "rollout.num_slots=4"]
SMALL += ["generation.max_prompt_length=48", "generation.max_new_tokens=8", "rollout.chunk=4", "training.max_steps=3"]
SMALL += ["evaluation.num_examples=2", "evaluation.num_samples=2"]


def rows_of(folder: Path) -> list[dict]:
    """metrics.jsonl without what the clock says."""
    clocks = ("time/", "perf/", "memory/")
    return [{name: x for name, x in row.items() if not name.startswith(clocks)} for row in conftest.rows_of(folder)]


def observed(observer) -> RunConfig:
    run = compose(SMALL)
    return replace(run, tracking=replace(run.tracking, observers={"seen": observer}))


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A run of three steps: its folder, and the batch of each step."""
    folder, batches = tmp_path_factory.mktemp("agent") / "run", []

    def seen(done):
        batches.append(done.experience.batch)
        return {}

    state = train_agent(two_turns, observed(seen), folder=folder)
    return SimpleNamespace(folder=folder, batches=batches, state=state)


def test_a_step_learns_from_the_tokens_as_they_were_sampled_and_its_run_has_all_that_a_run_has(learned):
    rows = rows_of(learned.folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and int(learned.state.step) == 3
    for batch, row in zip(learned.batches, rows[1:], strict=True):
        # What the sampler said of its tokens is what the model that learns says of them. At ratios of 1 the loss is
        # minus the sum of weights and advantages.
        assert row["train/sampler_gap_max"] < 1e-4 and row["train/skipped"] == 0
        wanted = -float((np.float64(batch.loss_weight) * batch.advantages).sum())
        assert row["train/loss"] == pytest.approx(wanted, abs=1e-5)
        assert row["episodes/calls"] == 2 and row["train/grad_norm"] > 0
    tokens = [batch.tokens[0][batch.token_mask[0]].tolist() for batch in learned.batches]
    assert tokens[0] != tokens[1] != tokens[2]
    folder = learned.folder
    assert {"checkpoints", "metrics.jsonl", "plan.json", "samples", "status.json"} <= {p.name for p in folder.iterdir()}
    status = json.loads((folder / "status.json").read_text())
    assert status["status"] == "completed" and status["steps"] == 3 and "avg_at_2" in status["eval"]["last"]
    samples = [json.loads(line) for line in (folder / "samples/evaluation_000000.jsonl").read_text().splitlines()]
    assert [row["sampled"] for row in samples] == [False] * 2 + [True] * 4
    assert all("hi" in row["prompt"] and row["completion"] for row in samples)


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(learned, tmp_path):
    def stops(done):
        if done.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return {}

    folder = tmp_path / "run"
    train_agent(two_turns, observed(stops), folder=folder)
    assert json.loads((folder / "status.json").read_text())["stopped"] == "SIGTERM"
    assert len(rows_of(folder)) == 2
    train_agent(two_turns, observed(stops), folder=folder)
    # Calls that come at the same time are computed together, so that the last digit depends on the clock.
    for row, wanted in zip(rows_of(folder), rows_of(learned.folder), strict=True):
        assert row == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@pytest.mark.wide
def test_the_example_learns(tmp_path):
    """Fifteen updates of the example's agent, which asks with temperature 0 for a look at held-out problems."""
    sys.path.insert(0, str(ROOT / "examples"))
    from my_agent import agent

    settings = ["task=arithmetic", "generation.max_prompt_length=128", ONE, "evaluation.num_examples=64"]
    settings += ["training.max_steps=15", "evaluation.num_samples=0", "evaluation.interval_steps=0"]
    train_agent(agent, *settings, folder=tmp_path / "run")
    before, *rows = rows_of(tmp_path / "run")
    after = rows[-1]
    assert before["eval/failed"] == after["eval/failed"] == 0
    assert after["eval/reward"] > before["eval/reward"] + 0.2, (before, after)
    assert all(row["episodes/sequences"] < 1.1 and row["train/sampler_gap_max"] < 1e-3 for row in rows)
