"""Whole runs, through the same door as everybody's: they learn, repeat, resume, and leave what they promise."""

import json

import jax
import numpy as np
import pytest

from tunix_lite.commands.program import compose
from tunix_lite.config import ConfigError
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
    run = compose([*SHORT, *wild, "evaluation.num_examples=0", "training.save_interval_steps=1"])
    with pytest.raises(FloatingPointError, match=r"step 2: .*nan.*learning rate that is too high"):
        train(run, tmp_path)
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "failed"
    assert [row["step"] for row in lines(tmp_path)] == [1]


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
