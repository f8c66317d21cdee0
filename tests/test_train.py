"""Whole runs, through the same door as everybody's: they learn, repeat, resume, and leave what they promise."""

import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from conftest import rows_of as lines

from tunix_lite.basics import plain_text
from tunix_lite.basics.errors import ConfigError, RunFailed
from tunix_lite.basics.plain_text import visible
from tunix_lite.commands import evaluate as evaluating
from tunix_lite.commands import train as train_command
from tunix_lite.distributed.stopping import Stopping
from tunix_lite.learner.optim import learning_rates
from tunix_lite.models import attention, decoder, source
from tunix_lite.report.comparison import result_lines
from tunix_lite.report.evidence import read_evidence
from tunix_lite.runs.experience import TaskExperience
from tunix_lite.runs.fingerprint import check_same_run, fingerprint, read_fingerprint
from tunix_lite.runs.learner import Learner
from tunix_lite.runs.session import Job
from tunix_lite.runs.setup import prepare, resume_from_folder
from tunix_lite.settings.compose import compose
from tunix_lite.tasks import task as task_module
from tunix_lite.tracking.checkpoint import Checkpoints
from tunix_lite.tracking.rundir import RunDir, Status
from tunix_lite.train import train

ROOT = Path(__file__).parents[1]
# On one device, because programs of several are compiled again by each test: see distributed.join.
TINY = ["model=random", "model.architecture.num_layers=2", "model.architecture.vocab_size=512"]
OF_A_RUN = [
    *("training.max_steps=4", "training.prompts_per_step=4", "algorithm.num_generations=4"),
    *("training.save_interval_steps=2", "generation.max_new_tokens=8", "evaluation.num_examples=20"),
    *("evaluation.num_samples=0", "evaluation.interval_steps=2", "tracking.samples_interval_steps=2"),
    "model.mesh_shape=[[1,1],[fsdp,tp]]",
    "+task.rewards.short={fn: {_target_: tunix_lite.rewards.text.brevity}, weight: 1.0}",  # so that groups disagree
    "optimizer.learning_rate=1e-3",
    "optimizer.schedule=constant",  # a rate of which the program of an update knows no last step
    *("optimizer.warmup_steps=0", "rewards.workers=0"),
]
SHORT = [*TINY, *OF_A_RUN]


LATEST = []  # its folder, and the checkpoints in it, each time that outputs/latest was pointed there


def noting_latest(really):
    def point_latest_here(self):
        LATEST.append((self.path, Checkpoints(self.checkpoints).steps()))
        really(self)

    return point_latest_here


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("a_checkout") / "outputs" / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDir, "point_latest_here", noting_latest(RunDir.point_latest_here))
        state = train(compose(SHORT), folder)
    return folder, state


def without_time(row: dict) -> dict:
    return {k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "memory/"))}


def test_a_run_leaves_what_it_promises(finished):
    folder, _ = finished
    log = (folder / "train.log").read_text()
    assert "prompts x" in log
    before = log.partition("| held-out accuracy")[0]
    for said in (r"loaded random, in \d+ s", "compiled the update in", r"sampled \d+ completions in .*"):
        assert re.search(said, before), before
    held_out = [line for line in before.splitlines() if re.search(r"(right|wrong)  .*  →  .*\]  reward [\d.]+$", line)]
    assert len(held_out) == 2, "two held-out prompts, before the first step"
    assert [row["step"] for row in lines(folder)] == [0, 1, 2, 3, 4]
    status = json.loads((folder / "status.json").read_text())
    assert status["status"] == "completed" and status["steps"] == 4
    assert status["eval"]["first"]["accuracy"] == lines(folder)[0]["eval/accuracy"]
    assert status["eval"]["last"]["accuracy"] == lines(folder)[-1]["eval/accuracy"]
    (events,) = folder.glob("events.out.tfevents.*")
    assert b"train/loss" in events.read_bytes()
    word, accuracy, *_ = result_lines(read_evidence(folder))
    assert word == "completed" and accuracy.startswith("accuracy ")
    for which in ("first", "last"):
        assert f"{100 * status['eval'][which]['accuracy']:.1f} % (" in accuracy
    samples = [json.loads(line) for line in (folder / "samples" / "step_000002.jsonl").read_text().splitlines()]
    assert len(samples) == 16
    assert set(samples[0]) == SAMPLE_KEYS
    page = (ROOT / "docs" / "references" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `([a-z_]+/[a-z_0-9]+)` \|", page, re.MULTILINE))
    logged = {name for row in lines(folder) for name in row if not re.match("reward/(correct|short)", name)}
    assert logged - {"step"} <= documented
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["2", "4"]
    latest = folder.parent / "latest"
    ((pointed_at, steps),) = LATEST
    assert pointed_at == folder and steps[0] == 2, "moved once, when the first checkpoint was whole"
    assert latest.is_symlink() and latest.resolve() == folder.resolve()


def learned(folder) -> list[dict]:
    """What training logged, evaluations apart; the row of step 0 is of an evaluation alone."""
    rows = [{k: v for k, v in without_time(row).items() if not k.startswith("eval/")} for row in lines(folder)]
    return [row for row in rows if row["step"]]


@pytest.mark.wide
def test_without_an_evaluation_a_run_learns_the_same_to_the_bit(finished, tmp_path):
    folder, state = finished
    other = train(compose([*SHORT, "evaluation.num_examples=0"]), tmp_path)
    jax.tree.map(np.testing.assert_array_equal, other, state)
    assert learned(tmp_path) == learned(folder)
    assert not any("eval/accuracy" in row for row in lines(tmp_path))


def test_the_same_seed_gives_the_same_file(finished, tmp_path):
    """To the bit, also where samples of each evaluation are drawn beside."""
    folder, state = finished
    other = train(compose([*SHORT, "evaluation.num_samples=4"]), tmp_path)
    jax.tree.map(np.testing.assert_array_equal, other, state)
    assert learned(tmp_path) == learned(folder)
    greedy, sampled = ([row for row in lines(f) if "eval/accuracy" in row] for f in (folder, tmp_path))
    for row, with_samples in zip(greedy, sampled, strict=True):
        assert with_samples["eval/accuracy"] == row["eval/accuracy"]
        assert with_samples["eval/avg_at_4"] <= with_samples["eval/pass_at_4"]
        # 20 examples, 4 samples of each
        assert with_samples["eval/avg_at_4"] * 80 == pytest.approx(round(with_samples["eval/avg_at_4"] * 80))


def test_a_checkpoint_is_evaluated_as_the_run_did_and_compared(finished, tmp_path, monkeypatch, capsys):
    """The run's own newest checkpoint against its older one; each number again from the completions."""
    folder, _ = finished
    against = [f"evaluate.against={folder}", "evaluate.against_step=2", "evaluate.reference=completion"]
    words = [*OF_A_RUN[1:], "evaluate.num_examples=20", "evaluate.num_samples=2", *against]
    monkeypatch.setattr(sys, "argv", ["evaluate", f"checkpoint={folder}", f"out={tmp_path}", *words])
    evaluating.main()
    found = json.loads((tmp_path / "results.json").read_text())
    result = found["tasks"]["arithmetic"]
    assert {name: (model["weights"], model["step"]) for name, model in found["models"].items()} == {
        "model": (str(folder), 4),
        "against": (str(folder), 2),
    }
    measured = {row["step"]: row for row in lines(folder) if "eval/accuracy" in row}
    for which, step in (("model", 4), ("against", 2)):
        scores = {name: score["value"] for name, score in result["scores"][which].items()}
        assert scores["accuracy"] == measured[step]["eval/accuracy"]
        assert scores["length"] == pytest.approx(measured[step]["eval/mean_length"])
        assert scores["reward"] == pytest.approx(measured[step]["eval/reward"])

        rows = [json.loads(line) for line in (tmp_path / f"{which}.arithmetic.jsonl").read_text().splitlines()]
        right = np.array([row["correct"] for row in rows if row["sampled"]]).reshape(20, 2)
        assert scores["avg_at_2"] == scores["pass_at_1"] == pytest.approx(right.mean())
        assert scores["pass_at_2"] == pytest.approx(right.any(axis=1).mean())
    change = result["comparison"]["accuracy"]
    better = change["better"] - change["worse"]
    assert change["difference"]["value"] == pytest.approx(better / 20) and 0 < change["p_value"] <= 1
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "results.md").read_text() and "## arithmetic: 20 examples" in printed
    assert "| score | model | against | difference | 95% interval | p | higher, lower |" in printed
    with pytest.raises(SystemExit, match="2"):
        evaluating.main()
    assert capsys.readouterr().err.startswith(f"error: out={tmp_path} holds results.json; give another folder, or over")


def test_resuming_equals_never_stopping(finished, tmp_path):
    """A run that dies after step 3 has its checkpoint of step 2; the same command takes it up from there."""
    folder, state = finished
    run = compose(SHORT)
    graded, calls, killed = task_module.Grader.results, [], []

    def dies_in_step_4(self, rollout, look=None):
        calls.append(len(self.examples))
        if calls.count(16) == 4:  # evaluations judge another number
            killed.append((tmp_path / "status.json").read_text())  # what kill -9 would leave
            raise jax.errors.JaxRuntimeError("the power went out")  # after which nothing is saved
        return graded(self, rollout)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="power"):
        patch.setattr(task_module.Grader, "results", dies_in_step_4)
        train(run, tmp_path)
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "failed"
    accuracy = [{"accuracy": row["eval/accuracy"]} for row in lines(folder) if "eval/accuracy" in row]
    status = json.loads(killed[0])
    assert (status["status"], status["steps"]) == ("running", 2)
    assert status["eval"] == {"first": accuracy[0], "last": accuracy[1]}
    (tmp_path / "status.json").write_text(json.dumps(status | {"seconds": 1000.0}))
    resumed = train(run, tmp_path)
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["eval"] == {"first": accuracy[0], "last": accuracy[2]}
    assert (status["status"], status["steps"]) == ("completed", 4) and status["seconds"] > 1000
    jax.tree.map(np.testing.assert_array_equal, resumed, state)
    assert [without_time(row) for row in lines(tmp_path)] == [without_time(row) for row in lines(folder)]


def whole(checkpoint):
    """What looks like a checkpoint, with the least that orbax needs of one."""
    (checkpoint / "default").mkdir(parents=True)
    for name in ("_METADATA", "manifest.ocdbt"):
        (checkpoint / "default" / name).touch()


def test_a_run_goes_on_from_its_own_checkpoints_once_it_has_some(tmp_path, monkeypatch):
    def goes_on(folder: str, resume: str):
        return resume_from_folder(compose([*SHORT, f"resume={resume}"]), RunDir(tmp_path / folder))

    other, own = tmp_path / "other" / "checkpoints", tmp_path / "own" / "checkpoints"
    whole(other / "2")
    assert [goes_on("own", resume) for resume in ("auto", "none", other.parent)] == [None, None, other]
    whole(own / "4")
    assert [goes_on("own", resume) for resume in ("auto", other.parent)] == [own, own]
    with pytest.raises(ConfigError, match="resume: none, but .*/own holds checkpoints; resume=auto continues from"):
        goes_on("own", "none")
    monkeypatch.setenv("TUNIX_LITE_RESTARTS", "1")  # as its launcher does, which starts the same command again
    assert goes_on("own", "none") == own


def test_resuming_from_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="resume: .* holds no checkpoint; give auto, none, or the folder"):
        train(compose([*SHORT, f"resume={tmp_path}"]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_several_updates_from_one_rollout_make_the_ratio_count(tmp_path):
    train(compose([*SHORT, "algorithm.updates_per_rollout=2", "optimizer.learning_rate=3e-2"]), tmp_path)
    rows = lines(tmp_path)
    gaps = [row["train/sampler_gap"] for row in rows[1:]]
    assert gaps[0] < 1e-5 and gaps[2] < 1e-5, "the first update from a rollout is on-policy"
    assert gaps[1] > 1e-3 and gaps[3] > 1e-3, "the second is not"
    assert rows[2]["train/clipped_low"] + rows[2]["train/clipped_high"] > 0
    assert "reward/mean" in rows[1] and "reward/mean" not in rows[2]


SAMPLE_KEYS = {"example", "expected", "group", "rewards", "advantage", "tokens", "logprobs", "finish_reason", "failed"}
SAMPLE_KEYS |= {"prompt", "completion", "extracted", "correct", "reward"}


def samples_of(folder, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples" / f"{name}.jsonl").read_text().splitlines()]


def test_the_logged_means_are_those_of_the_samples_to_the_bit(finished):
    """The weights are 1 and 1; the advantage is (r - mean) / (std + 1e-4), 0 where a group agrees, kept in float32."""
    folder, _ = finished
    row, samples = lines(folder)[2], samples_of(folder, "step_000002")
    each = {name: np.array([sample["rewards"][name] for sample in samples]) for name in ("correct", "short")}
    rewards = each["correct"] + each["short"]
    assert [sample["reward"] for sample in samples] == rewards.tolist()
    groups = rewards.reshape(4, 4)
    assert [sample["group"] for sample in samples] == np.repeat(range(4), 4).tolist()
    agree = groups.min(axis=1) == groups.max(axis=1)
    lengths = np.array([len(sample["tokens"]) for sample in samples])
    ended = lengths[[sample["finish_reason"] != "length" for sample in samples]]
    advantages = np.array([sample["advantage"] for sample in samples])
    again = {
        "reward/groups_that_agree": agree.mean(),
        "reward/groups_all_zero": np.mean((groups == 0).all(axis=1)),
        "reward/groups_all_one": np.mean((groups == 1).all(axis=1)),
        "reward/groups_mixed": np.mean(~agree),
        "completions/correct": np.mean([sample["correct"] for sample in samples]),
        "completions/truncated": 1 - len(ended) / len(samples),
        "completions/eos": np.mean([sample["finish_reason"] == "eos" for sample in samples]),
    }
    for name, values in each.items():
        again |= {f"reward/{name}": values.mean(), f"reward/{name}_std": values.std()}
    for kind in ("mean", "std", "min", "max"):
        again |= {f"reward/{kind}": getattr(rewards, kind)(), f"advantage/{kind}": getattr(advantages, kind)()}
    for kind in ("mean", "min", "max"):
        again[f"completions/{kind}_length"] = getattr(lengths, kind)()
        again[f"completions/{kind}_terminated_length"] = getattr(ended, kind)()
    assert again == {name: row[name] for name in again}
    spread = np.where(agree, 1.0, groups.std(axis=1, ddof=1))[:, None]
    expected = np.where(agree[:, None], 0.0, (groups - groups.mean(axis=1, keepdims=True)) / (spread + 1e-4))
    np.testing.assert_allclose(advantages.reshape(4, 4), expected, rtol=1e-6)
    for sample in samples:
        assert len(sample["logprobs"]) == len(sample["tokens"]) and max(sample["logprobs"]) <= 0
        assert sample["expected"] == sample["example"]["answer"] and sample["failed"] == {}


def test_the_evaluation_of_every_step_leaves_its_completions_from_step_0_on(finished):
    folder, _ = finished
    for row in lines(folder):
        if "eval/accuracy" not in row:
            continue
        samples = samples_of(folder, f"evaluation_{row['step']:06d}")
        assert np.mean([sample["correct"] for sample in samples]) == row["eval/accuracy"]
        assert np.mean([sample["reward"] for sample in samples]) == row["eval/reward"]
        assert np.mean([len(sample["tokens"]) for sample in samples]) == row["eval/mean_length"]
        assert {sample["advantage"] for sample in samples} == {None} and not any(s["sampled"] for s in samples)
    names = [f"{kind}_{step:06d}.jsonl" for kind in ("evaluation", "step") for step in (0, 2, 4)]
    assert sorted(file.name for file in (folder / "samples").iterdir()) == sorted({*names} - {"step_000000.jsonl"})


def not_finite(monkeypatch, rollouts: tuple[int, ...]) -> None:
    """Batches of these rollouts, counted from 0 in this process, hold an advantage that is no number."""
    really, numbers = TaskExperience.collect, itertools.count()

    def collect(self, *arguments):
        batch, *rest = really(self, *arguments)
        if next(numbers) in rollouts:
            advantages = np.array(batch.advantages)
            advantages[0] = np.nan
            batch = batch.replace(advantages=advantages)
        return batch, *rest

    monkeypatch.setattr(TaskExperience, "collect", collect)


def test_a_run_that_diverges_skips_steps_saves_what_it_has_and_goes_on_only_with_other_settings(tmp_path, monkeypatch):
    """It is interrupted after the first of three skipped steps: the three count in a row all the same."""
    settings = [*SHORT, "evaluation.num_examples=0", "training.save_interval_steps=0", "optimizer.schedule=linear"]
    run = compose([*settings, "training.max_steps=2", "training.max_skipped_in_a_row=3", "training.keep_checkpoints=3"])
    not_finite(monkeypatch, rollouts=(1, 2, 3))
    train(run, tmp_path)
    run = replace(run, training=replace(run.training, max_steps=6))
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    said = f"3 updates in a row were not finite. None was made: checkpoint 4 in {tmp_path}/checkpoints has the weights before"
    with pytest.raises(FloatingPointError, match=f"step 4: train/loss nan, train/grad_norm nan; {said}.*learning rate"):
        train(run, tmp_path)
    assert checkpoints.steps() == [2, 4] and checkpoints.skipped(4) == 3
    with pytest.raises(FloatingPointError, match=f"step 4: {said}"):
        # after the last step, too, it does not count as completed
        train(replace(run, training=replace(run.training, max_steps=4)), tmp_path)
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "failed"
    assert f"failed after step 4; checkpoint 4 is in {tmp_path}" in (tmp_path / "train.log").read_text()
    (failed, *_) = result_lines(read_evidence(tmp_path))
    assert failed.startswith("failed: ") and "3 updates in a row were not finite" in failed

    last = train(replace(run, seed=7, resume=replace(run.resume, force=True)), tmp_path)
    rows = lines(tmp_path)
    assert [row["train/skipped"] for row in rows] == [0, 1, 1, 1, 0, 0]
    # updates that were not made do not count in the schedule
    made = [(2, 0), (2, 1), (6, 1), (6, 1), (6, 1), (6, 2)]
    wanted = [learning_rates(run.optimizer, max_steps)(update) for max_steps, update in made]
    assert [row["train/learning_rate"] for row in rows] == wanted
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "completed"
    assert checkpoints.skipped(6) == 0
    assert sorted(file.name for file in (tmp_path / "skipped").iterdir()) == [f"step_00000{n}.npz" for n in (2, 3, 4)]
    assert np.isnan(np.load(tmp_path / "skipped" / "step_000003.npz")["advantages"]).any()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), last.params)
    first, second, third = (checkpoints.restore_params(shapes, step)[1] for step in (2, 4, 6))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(jax.tree.leaves(second), jax.tree.leaves(third)))


def copied(finished, folder):
    return shutil.copytree(finished[0], folder / "run")


def said_of_itself(folder) -> list[str]:
    return [(folder / name).read_text() for name in ("fingerprint.json", "model.json")]


def test_other_settings_leave_no_mark_before_they_have_a_checkpoint(finished, tmp_path, monkeypatch):
    """They are refused, or end before they save: the run whose checkpoints these are can go on."""
    folder = copied(finished, tmp_path)
    before = said_of_itself(folder)
    with pytest.raises(ConfigError, match=r"resume: step 4 of .* does not fit .*optimizer: opt_state/\d.*count: \(\)"):
        train(compose([*SHORT, "training.max_steps=6", "optimizer.max_grad_norm=0", "resume.force=true"]), folder)
    assert said_of_itself(folder) == before

    forced = compose([*SHORT, "training.max_steps=5", "evaluation.num_examples=0", "seed=7", "resume.force=true"])
    saved = []
    monkeypatch.setattr(Checkpoints, "save", lambda *_: saved.append(said_of_itself(folder)))
    train(forced, folder)
    assert saved == [before]
    assert [json.loads(text)["seed"] for text in said_of_itself(folder)] == [7, 7]


IN_CHUNKS = ["rollout.chunk=2"]  # of 8 tokens: four at least


def test_a_run_that_is_asked_to_stop_in_a_rollout_goes_on_as_if_nothing_had_been(finished, tmp_path, monkeypatch):
    """It saves the state of step 1, which the second rollout has not changed, and leaves within the rollout."""
    whole, wanted = finished
    really, chunks = Stopping.check_between_chunks, []

    def look(self):
        """The signal comes in the second rollout, after the second chunk of it."""
        chunks.append(self.has_learned)
        if sum(chunks) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        really(self)

    run = compose([*SHORT, *IN_CHUNKS, "training.save_interval_steps=4"])
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(Stopping, "check_between_chunks", look)
        stopped = train(run, tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before
    assert int(stopped.step) == 1 and sum(chunks) == 2, "no chunk after the signal"
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["status"], status["stopped"], status["steps"]) == ("stopped", "SIGTERM", 1)
    assert result_lines(read_evidence(tmp_path))[0].startswith("stopped: by SIGTERM after 1 step, ")
    assert Checkpoints(tmp_path / "checkpoints").steps() == [1]
    log = (tmp_path / "train.log").read_text()
    assert f"hydra.run.dir={tmp_path} goes on" in log
    assert "SIGTERM: stopping, with a checkpoint; once more stops at once\n" in log
    with pytest.raises(ConfigError, match="resume: this is not the run in .*: algorithm.clip_low: 0.1 here, 0.2 there"):
        train(replace(run, algorithm=replace(run.algorithm, clip_low=0.1)), tmp_path)
    got = train(run, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert [learnt(row) for row in lines(tmp_path)] == [learnt(row) for row in lines(whole)]
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "completed"


def learnt(row: dict) -> dict:
    """Without what depends on the clock, or on the size of a chunk."""
    return {k: v for k, v in without_time(row).items() if not k.startswith("rollout/")}


def test_a_run_that_was_killed_when_all_its_steps_were_made_only_says_so(finished, tmp_path):
    run, folder = compose(SHORT), copied(finished, tmp_path)
    made = lines(folder)
    ended = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(ended | {"status": "running"}))
    jax.tree.map(np.testing.assert_array_equal, train(run, folder), finished[1])
    status = json.loads((folder / "status.json").read_text())
    assert (status["status"], status["steps"], status["eval"]) == ("completed", 4, ended["eval"])
    assert lines(folder) == made
    assert "all its steps are made; raise training.max_steps to go on" in (folder / "train.log").read_text()
    with pytest.raises(ConfigError, match="is at step 4 already"):
        train(replace(run, resume=replace(run.resume, folder=str(folder))), tmp_path / "another")


def test_a_run_stops_before_its_time_is_up_which_counts_from_the_start_of_the_job(tmp_path, monkeypatch):
    written, really = [], Status.write

    def write(self, word, **more):
        really(self, word, **more)
        written.append([json.loads(self._run_dir.status.read_text())[name] for name in ("status", "steps", "eval")])

    monkeypatch.setattr(Status, "write", write)
    run = compose([*SHORT, "training.max_minutes=60", "evaluation.num_examples=0"])
    train(run, tmp_path, Job(time.time() - 3600, "hydra.sweep.dir=/sweep"))
    assert written == [["running", 0, {}], ["running", 1, {}], ["stopped", 1, {}]]
    said = "stopped by training.max_minutes; the same command with hydra.sweep.dir=/sweep goes on\n"
    assert said in (tmp_path / "train.log").read_text()
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["stopped"], status["steps"]) == ("training.max_minutes", 1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]


@pytest.fixture
def commanded(tmp_path, monkeypatch):
    """`tunix-lite train` of these words in this process, in a folder of its own. Hydra sets up Python's logging."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    monkeypatch.chdir(tmp_path)

    def command(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["run_training.py", *words])
        train_command.main()

    yield command
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_sweep_ends_where_one_of_its_runs_is_asked_to_stop(commanded, tmp_path, monkeypatch, capsys):
    jobs = []

    def of_no_steps(run, folder, job):
        jobs.append((run.seed, job.resume_hint))
        with Stopping(None, print) as job.stopping:
            if run.seed == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(train_command, "train", of_no_steps)
    with pytest.raises(SystemExit, match="0"):
        commanded("--multirun", "seed=0,1,2", "hydra.sweep.dir=sweep")
    assert jobs == [(seed, f"hydra.sweep.dir={tmp_path}/sweep") for seed in (0, 1)]
    assert "\nSIGTERM: the sweep starts no further run\n" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "sweep").glob("[0-9]")) == ["0", "1"]


@pytest.mark.parametrize(
    "reason, code", [("SIGINT", 130), ("SIGTERM", 0), ("SIGHUP", 0), ("training.max_minutes", 0), (None, 0)]
)
def test_ctrl_c_alone_has_an_exit_code_of_its_own(reason, code, tmp_path, monkeypatch):
    """Through `start`, as the program calls it, with a run that was stopped for this reason."""
    monkeypatch.setattr(train_command, "train", lambda run, folder, job: setattr(job, "stopped", reason))
    monkeypatch.setattr(train_command.composing, "sweep_folder", lambda: None)
    monkeypatch.delenv("TUNIX_LITE_HEARTBEAT", raising=False)
    monkeypatch.setattr(train_command, "join", lambda run: None)
    stopped = contextlib.nullcontext() if code == 0 else pytest.raises(SystemExit, match="130")
    with stopped:
        train_command.start(compose(SHORT), tmp_path, None)


SECRETS = ["generation.stop=['${oc.env:MY_TOKEN}','http://me:my-password@judge/v1']"]


def test_secrets_of_the_settings_stand_in_no_file_of_the_run(commanded, tmp_path, monkeypatch, capsys):
    """Neither what came from ${oc.env:...} nor the user of a URL; a number and a path of the environment do."""
    monkeypatch.setattr(plain_text, "_SECRETS", {})
    secrets = {"MY_TOKEN": "hf_aSecretThatIsLong", "HEAT": "0.87654321", "PLACE": "/tmp/nowhere"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    short = ["training.max_steps=1", "evaluation.num_examples=0", "generation.long_prompts=truncate"]
    commanded(*SHORT, *SECRETS, *short, "hydra.run.dir=run", "task.system=${oc.env:HEAT} ${oc.env:PLACE}")
    said = capsys.readouterr()
    texts = [file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()]
    texts.append((said.out + said.err).encode())
    assert not [text for text in texts if b"aSecret" in text or b"my-password" in text]
    settings = json.loads((tmp_path / "run" / "fingerprint.json").read_text())
    kept = settings["generation"]["stop"]
    token, user = (hashlib.sha256(text).hexdigest()[:4] for text in (b"hf_aSecretThatIsLong", b"me:my-password"))
    assert kept == [f"<secret:{token}>", f"http://<secret:{user}>@judge/v1"]
    assert settings["task"]["system"] == "0.87654321 /tmp/nowhere"
    config = (tmp_path / "run" / ".hydra" / "config.yaml").read_text()
    assert "${oc.env:MY_TOKEN}" in config and yaml.safe_load(config)["generation"]["stop"][1] == kept[1]


def test_a_run_goes_on_with_the_same_secrets_and_with_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(plain_text, "_SECRETS", {})

    def made(token: str) -> dict:
        monkeypatch.setenv("MY_TOKEN", token)
        run = compose([*SHORT, *SECRETS])
        return fingerprint(run, prepare(run, RunDir(tmp_path)).model, 4)

    ours = made("a-token-of-mine")
    assert check_same_run(made("a-token-of-mine"), ours, "run", False) == ""
    # a file that has the text itself
    (tmp_path / "fingerprint.json").write_text(
        json.dumps(ours).replace(word := ours["generation"]["stop"][0], "a-token-of-mine")
    )
    assert read_fingerprint(tmp_path / "fingerprint.json") == json.loads(json.dumps(ours))
    with pytest.raises(ValueError, match="generation.stop: ") as found:
        check_same_run(made("another-token"), ours, "run", False)
    assert "another-token" not in visible(str(found.value)) and word in str(found.value)


def test_a_run_whose_file_lacks_settings_of_its_model_can_be_forced_and_one_of_another_model_cannot():
    """Files of before left out what was at its default, also of the architecture (CHANGELOG)."""
    run = compose(SHORT)
    ours = json.loads(json.dumps(fingerprint(run, source.locate(run.model), 4)))
    theirs = json.loads(json.dumps(ours))
    del theirs["model"]["architecture"]["rope_share"], theirs["generation"]["min_p"]
    with pytest.raises(
        ValueError, match=r"not the run in run: .*model.architecture.rope_share: 1.0 here, nothing there"
    ):
        check_same_run(ours, theirs, "run", False)
    said = check_same_run(ours, theirs, "run", True)
    assert "generation.min_p: 0.0 here" in said and "model.architecture.rope_share: 1.0 here" in said
    theirs["model"]["architecture"]["num_layers"] += 1
    with pytest.raises(ValueError, match=r"has another model: model.architecture.num_layers: \d+ here, \d+ there$"):
        check_same_run(ours, theirs, "run", True)


def test_sft_fits_the_distribution_itself_whatever_the_temperature_of_sampling_and_learns_it(tmp_path):
    """By hand: the mean of -log softmax(scores) over the tokens of the demonstrations, the softmax in float64."""
    sft = ["algorithm=sft", "model=random", "training.max_steps=30", "training.prompts_per_step=8",
           "generation.max_new_tokens=48", "optimizer.learning_rate=1e-2", "evaluation.num_examples=0",
           "training.save_interval_steps=0", "tracking.tensorboard=false", "model.mesh_shape=[[1,1],[fsdp,tp]]",
           "training.micro_batch_size=4", "model.architecture.num_layers=1", "generation.temperature=2"]  # fmt: skip
    run = compose(sft)
    train(run, tmp_path)
    losses = [row["train/loss"] for row in lines(tmp_path)]
    model = source.download(source.locate(run.model))
    params = source.load_weights(model, run.seed)[1]
    task = task_module.Task(run.task, model.tokenizer, run.generation.max_prompt_length, run.generation.max_new_tokens)
    tokens, mask, counts = task.demonstrations(task.batch(8, run.seed, 0))
    forward = jax.jit(decoder.forward, static_argnums=1)
    hidden = forward(params, model.cfg, tokens, attention.one_sequence_per_row(mask))[0]
    scores = np.asarray(decoder.logits(params, model.cfg, hidden), np.float64)[:, :-1]
    logprobs = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    of_tokens = np.take_along_axis(logprobs, np.asarray(tokens)[:, 1:, None], axis=-1)[..., 0]
    assert abs(losses[0] + of_tokens[np.asarray(counts)[:, 1:]].mean()) < 1e-5
    assert losses[-1] < 3.0
    assert not list(tmp_path.glob("events.*"))


def test_a_sampler_whose_weights_are_not_the_trainers_stops_the_run(tmp_path, monkeypatch):
    """vllm#14483: rewards rose with one sampler and not with another, and nothing was said."""
    really = Learner.acting_params

    def stale(self, state):
        """Scores of 0.3 in size become scores of 6."""
        params = really(self, state)
        return params | {"embed": 20 * params["embed"]} if int(state.step) == 1 else params

    monkeypatch.setattr(Learner, "acting_params", stale)
    run = compose([*SHORT, "training.save_interval_steps=1", "evaluation.num_examples=0", "training.max_steps=2"])
    with pytest.raises(RunFailed, match=r"step 2: .* differ by [\d.]+ nats a token .* training.max_sampler_gap=0.5 is"):
        train(run, tmp_path)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [1], "what was learned from it is not kept"
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "failed"
    rows = lines(tmp_path)
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["train/sampler_gap_max"] < 1e-4 and rows[1]["train/sampler_gap"] > 0.5


def test_a_data_file_that_changed_is_noticed_where_a_run_goes_on(finished, tmp_path):
    """Nothing is compiled: the checkpoint is that of `finished`, and what made it is written anew."""
    folder, data = RunDir(copied(finished, tmp_path)), tmp_path / "rows.jsonl"
    rows = [json.dumps({"question": f"{n} + 1", "answer": str(n + 1)}) for n in range(8)]
    source = f"task.source={{_target_: tunix_lite.tasks.sources.FileRows, train_file: {data}, held_out_file: {data}}}"

    def found(*settings: str) -> str:
        """What differs from the run in the folder; the file is read again."""
        every = [*SHORT, "~task.source", f"+{source}", "training.max_steps=6", *settings]
        return prepare(compose(every), folder).differs

    data.write_text("\n".join(rows))
    run = compose([*SHORT, "~task.source", f"+{source}", "evaluation.num_examples=8"])
    prepare(replace(run, resume=replace(run.resume, force=True)), folder).write_fingerprint(folder)
    signed = json.loads(folder.fingerprint.read_text())
    assert found("evaluation.num_examples=8", "model.mesh_shape=[[4,1],[fsdp,tp]]") == ""
    assert found("evaluation.num_examples=3") == "evaluation.num_examples: 3 here, 8 there", "said, and the run goes on"
    data.write_text("\n".join([*rows[:7], rows[0]]))
    here = r"data.train: '\w{16}' here, '" + signed["data"]["train"] + "' there; data.held_out: "
    with pytest.raises(ConfigError, match=f"resume: this is not the run in {folder.path}: {here}"):
        found("evaluation.num_examples=8")
    assert found("evaluation.num_examples=8", "resume.force=true").startswith("data.train: ")
