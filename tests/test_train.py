"""Whole runs, through the same door as everybody's: they learn, repeat, resume, and leave what they promise."""

import json
import os
import signal
from dataclasses import dataclass, field, replace

import jax
import numpy as np
import pytest

from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.checkpoint import Checkpoints
from tunix_lite.commands.program import compose
from tunix_lite.commands.replay import Replay, replay
from tunix_lite.config import ConfigError, build
from tunix_lite.language_model import run_settings
from tunix_lite.models.source import Model
from tunix_lite.optim import learning_rate_at
from tunix_lite.tasks import task as task_module
from tunix_lite.train import train

SHORT = [
    "training.max_steps=4",
    "training.prompts_per_step=4",
    "algorithm.num_generations=4",
    "training.save_interval_steps=2",
    "generation.max_new_tokens=8",
    "evaluation.num_examples=20",
    "evaluation.interval_steps=2",
    "tracking.samples_interval_steps=2",
    "model.mesh_shape=[[2,2],[fsdp,tp]]",
    "+task.rewards.short={fn: {_target_: tunix_lite.rewards.text.brevity}, weight: 1.0}",  # so that groups disagree
    "optimizer.learning_rate=1e-3",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("a_checkout") / "outputs" / "run"
    state = train(compose(SHORT), folder)
    return folder, state


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_time(row: dict) -> dict:
    return {k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "memory/"))}


def test_a_run_leaves_what_it_promises(finished):
    folder, _ = finished
    assert "prompts x" in (folder / "train.log").read_text()
    assert [row["step"] for row in lines(folder)] == [0, 1, 2, 3, 4]
    status = json.loads((folder / "status.json").read_text())
    assert status["status"] == "completed" and status["steps"] == 4
    assert status["eval"]["first"]["accuracy"] == lines(folder)[0]["eval/accuracy"]
    assert status["eval"]["last"]["accuracy"] == lines(folder)[-1]["eval/accuracy"]
    assert list(folder.glob("events.out.tfevents.*"))
    samples = [json.loads(line) for line in (folder / "samples" / "step_000002.jsonl").read_text().splitlines()]
    assert len(samples) == 16
    assert set(samples[0]) == {"prompt", "completion", "extracted", "correct", "reward"}
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["2", "4"]
    latest = folder.parent / "latest"
    assert latest.is_symlink() and latest.resolve() == folder.resolve()


def test_the_same_seed_gives_the_same_file(finished, tmp_path):
    folder, state = finished
    again = train(compose(SHORT), tmp_path / "again")
    first, second = (["".join(json.dumps(without_time(row))) for row in lines(f)] for f in (folder, tmp_path / "again"))
    assert first == second
    jax.tree.map(np.testing.assert_array_equal, again, state)


def test_resuming_equals_never_stopping(finished, tmp_path):
    """A run that dies after step 3 has its checkpoint of step 2; the same command takes it up from there."""
    folder, state = finished
    run = compose(SHORT)
    judged, calls = task_module.Judging.judged, []

    def dies_in_step_4(self, rollout):
        calls.append(len(self.examples))
        if calls.count(16) == 4:  # evaluations judge another number
            raise RuntimeError("the power went out")
        return judged(self, rollout)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="power"):
        patch.setattr(task_module.Judging, "judged", dies_in_step_4)
        train(run, tmp_path)
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "failed"
    resumed = train(run, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, resumed, state)
    assert [without_time(row) for row in lines(tmp_path)] == [without_time(row) for row in lines(folder)]


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


def test_a_run_that_diverges_stops_before_it_saves(tmp_path):
    wild = ["optimizer.learning_rate=1e30", "optimizer.warmup_steps=0", "optimizer.schedule=constant"]
    once = ["training.max_skipped_in_a_row=1", "training.save_interval_steps=1"]
    run = compose([*SHORT, *wild, *once, "evaluation.num_examples=0"])
    with pytest.raises(
        FloatingPointError, match=r"step 2: .*nan; this update was not finite.*learning rate that is too"
    ):
        train(run, tmp_path)
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "failed"
    assert [row["step"] for row in lines(tmp_path)] == [1]


@dataclass(frozen=True)
class NotFinite(GRPO):
    """GRPO whose batches of these rollouts, counted from 0, hold an advantage that is no number."""

    rollouts: tuple[int, ...] = ()
    seen: list = field(default_factory=list)

    def collect(self, *arguments):
        batch, *rest = super().collect(*arguments)
        if len(self.seen) in self.rollouts:
            advantages = np.array(batch.advantages)
            advantages[0] = np.nan
            batch = batch.replace(advantages=advantages)
        self.seen.append(1)
        return batch, *rest


def test_a_step_that_is_not_finite_is_skipped_and_its_batch_kept(tmp_path, capsys):
    every = ["training.save_interval_steps=1", "training.keep_checkpoints=4", "evaluation.num_examples=0"]
    run = compose([*SHORT, *every, "training.max_skipped_in_a_row=2"])
    run = replace(run, algorithm=NotFinite(num_generations=4, rollouts=(1,)))
    last = train(run, tmp_path)
    rows = lines(tmp_path)
    assert [row["train/skipped"] for row in rows] == [0, 1, 0, 0]
    assert [
        row["train/learning_rate"] == learning_rate_at(run.optimizer, 4, made) for row, made in zip(rows, (0, 1, 1, 2))
    ]
    assert np.isnan(np.load(tmp_path / "skipped" / "step_000002.npz")["advantages"]).any()
    assert [file.name for file in (tmp_path / "skipped").iterdir()] == ["step_000002.npz"]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), last.params)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    first, second, third = (checkpoints.restore_params(shapes, step)[1] for step in (1, 2, 3))
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, first, second)
    replay(replace(run, model=build(Model, run_settings(tmp_path)[0])), Replay(str(tmp_path), skipped=2))
    said = capsys.readouterr().out
    assert (
        "step 2: 16 sequences, with the weights of step 2\nloss nan; of the 15 sequences whose loss is finite" in said
    )
    assert "sequence 0: not finite: advantages at " in said and "sequence 1" not in said
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(jax.tree.leaves(second), jax.tree.leaves(third)))


@dataclass(frozen=True)
class Interrupted(GRPO):
    """GRPO during whose second rollout somebody wants the run to end."""

    seen: list = field(default_factory=list)

    def collect(self, *arguments):
        self.seen.append(1)
        if len(self.seen) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().collect(*arguments)


def test_a_run_that_is_asked_to_stop_goes_on_as_if_nothing_had_been(finished, tmp_path):
    whole, wanted = finished
    run = compose([*SHORT, "training.save_interval_steps=4"])
    before = signal.getsignal(signal.SIGTERM)
    train(replace(run, algorithm=Interrupted(num_generations=4)), tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["status"], status["stopped"], status["steps"]) == ("stopped", "SIGTERM", 2)
    assert f"hydra.run.dir={tmp_path} goes on" in (tmp_path / "train.log").read_text()
    with pytest.raises(
        ConfigError, match="resume: this is not the run in .*: algorithm._target_: '.*GRPO' here, '.*Interr"
    ):
        train(run, tmp_path)
    got = train(compose([*SHORT, "training.save_interval_steps=4", "resume.force=true"]), tmp_path)
    assert "not as in the run that it goes on from: algorithm._target_: " in (tmp_path / "train.log").read_text()
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert [without_time(row) for row in lines(tmp_path)] == [without_time(row) for row in lines(whole)]
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "completed"


def test_a_run_that_was_killed_after_its_last_checkpoint_only_says_that_it_is_done(tmp_path):
    run = compose([*SHORT, "training.max_steps=1", "evaluation.num_examples=0", "training.save_interval_steps=1"])
    first = train(run, tmp_path)
    with pytest.raises(ConfigError, match="is at step 1 already"):
        train(run, tmp_path)
    status = json.loads((tmp_path / "status.json").read_text())
    (tmp_path / "status.json").write_text(json.dumps(status | {"status": "running"}))
    jax.tree.map(np.testing.assert_array_equal, train(run, tmp_path), first)
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "completed"
    assert [row["step"] for row in lines(tmp_path)] == [1]


def test_a_run_stops_before_its_time_is_up(tmp_path):
    train(compose([*SHORT, "training.max_minutes=1e-3", "evaluation.num_examples=0"]), tmp_path)
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["stopped"], status["steps"]) == ("training.max_minutes", 1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]


def test_sft_learns_its_demonstrations(tmp_path):
    sft = ["algorithm=sft", "model=random", "training.max_steps=30", "training.prompts_per_step=8",
           "generation.max_new_tokens=48", "optimizer.learning_rate=1e-2", "evaluation.num_examples=0",
           "training.save_interval_steps=0", "tracking.tensorboard=false", "model.mesh_shape=[[4,1],[fsdp,tp]]",
           "training.micro_batch_size=1"]  # fmt: skip
    train(compose(sft), tmp_path)
    losses = [row["train/loss"] for row in lines(tmp_path)]
    assert losses[0] > 5.5, "uniform over 512 tokens is 6.2"
    assert losses[-1] < 3.0
    assert not list(tmp_path.glob("events.*"))


def test_bfloat16_compute_trains(tmp_path):
    train(compose([*SHORT, "training.mixed_precision=bf16", "algorithm.kl_coef=0.1", "training.max_steps=2"]), tmp_path)
    rows = lines(tmp_path)
    assert all(np.isfinite(row["train/loss"]) and np.isfinite(row["train/grad_norm"]) for row in rows[1:])
    assert abs(rows[1]["train/kl"]) < 1e-6, "before the first update the policy is the reference"
    assert rows[1]["train/sampler_gap"] < 0.05
