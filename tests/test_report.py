"""Results of runs: their numbers computed again from the files of a run, hostile texts, time, and runs that were killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml
from test_bad_input import HOLDS

from tunix_lite.__main__ import main
from tunix_lite.basics.locks import is_held
from tunix_lite.report.comparison import result_lines, runs_in
from tunix_lite.report.evidence import read_evidence

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>](javascript:x)|`</pre>&\x1b[31m\u202e"
STEPS, EXAMPLES, SAMPLES = 60, 40, 4
# ---- folders of runs, made here


def metric_rows(steps: int, rng: np.random.Generator, every: int = 15) -> list[dict]:
    rows = []
    for step in range(steps + 1):
        row: dict = {"step": step}
        if step:
            row |= {"train/loss": float(rng.normal()), "reward/mean": step / steps / 2 + float(rng.normal() / 20)}
            row |= {"completions/mean_length": 20 + step / 10, "completions/correct": float(rng.random())}
            row |= {"train/entropy": 1 / step, "train/grad_norm": float(rng.random()) + 0.1, "train/update_norm": 1e-3}
            row |= {
                "train/learning_rate": 4e-5 * min(step / 5, 1),
                "train/num_tokens": 1000 * step,
                "train/skipped": 0.0,
            }
            row |= {"time/rollout": 0.5 + float(rng.random()), "time/rewards": 0.01, "time/reference": 0.2}
            row |= {"time/update": 0.4, "perf/tokens_per_second": 500 + step, "memory/peak_gb": 1.5}
            row["time/collect"] = row["time/rollout"] + 0.31
            row["time/step"] = row["time/collect"] + row["time/update"]
        if step % every == 0:
            row |= {"eval/accuracy": 0.0, "eval/reward": 0.0, "time/eval": 1.25}
        rows.append(row)
    return rows


def evaluation(step: int, right: np.ndarray, sampled: np.ndarray, text: str = "") -> list[dict]:
    rows = []
    for group, is_right in enumerate(right):
        row = {"prompt": f"What is {group}?{text}", "completion": f"{group} at {step}{text}", "group": group}
        row |= {"expected": f"{group}{text}", "extracted": f"{group}{text}", "rewards": {f"correct{text}": 1.0}}
        rows.append(row | {"sampled": False, "correct": bool(is_right), "reward": float(is_right)})
    for group, row_S in enumerate(sampled):
        for is_right in row_S:
            answer = str(group) if is_right else f"no {group}"
            row = {"sampled": True, "group": group, "correct": bool(is_right), "extracted": answer}
            rows.append(row | {"prompt": "?"})
    return rows


def make_run(folder, steps: int = STEPS, seed: int = 0, text: str = "", **settings):
    """The folder of a run that never was, and what is true of it."""
    rng = np.random.default_rng(seed)
    rows = metric_rows(steps, rng)
    truth = {}
    (folder / "samples").mkdir(parents=True)
    for step in (0, steps):
        right = rng.random(EXAMPLES) < (0.9 if step else 0.4)
        sampled = rng.random((EXAMPLES, SAMPLES)) < (0.7 if step else 0.5)
        truth[step] = (right, sampled)
        rows[step] |= {"eval/accuracy": float(right.mean()), f"eval/avg_at_{SAMPLES}": float(sampled.mean())}
        lines = evaluation(step, right, sampled, text)
        (folder / "samples" / f"evaluation_{step:06d}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    group = [{"prompt": f"p{text}", "completion": f"c{i}{text}", "correct": i > 2, "reward": i / 4} for i in range(4)]
    group = [row | {"group": 0, "rewards": {f"near{text}": 0.5}, "advantage": -0.5} for row in group]
    (folder / "samples" / f"step_{steps:06d}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in group))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status = {"status": "completed", "steps": steps, "seconds": 400.0, "algorithm": f"GRPO{text}", "seed": seed}
    status |= {"parameters": 632448, "mesh": {f"fsdp{text}": 2, "tp": 1}, "versions": {"jax": f"0.10{text}"}}
    (folder / "status.json").write_text(json.dumps(status | {"batch": f"16 x 8{text}"}))
    (folder / ".hydra").mkdir()
    known = {"optimizer": {"learning_rate": 4e-5}, "training": {"max_steps": steps}, "seed": seed, f"k{text}": text}
    known |= {"algorithm": {"num_generations": 4}, "evaluation": {"num_examples": EXAMPLES}, **settings}
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(known))
    given = [f"seed={seed}", f"training.max_steps={steps}", *([f"task.x={text}"] if text else [])]
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(given))
    (folder / "checkpoints" / "60").mkdir(parents=True)
    return rows, truth


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    return folder, *make_run(folder)


def read(folder) -> list[str]:
    return result_lines(read_evidence(folder))


def numbers(text: str) -> list[float]:
    return [float(x.replace(",", "")) for x in re.findall(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?", text)]


# ---- numbers


def test_scores_before_and_after_are_those_of_the_samples(run):
    folder, _, truth = run
    word, *lines = read(folder)
    assert word == "completed"
    (right0, sampled0), (right1, sampled1) = truth[0], truth[STEPS]
    of = {
        "accuracy": (right0, right1),
        "avg@4": (sampled0.mean(1), sampled1.mean(1)),
        "pass@4": (sampled0.any(1), sampled1.any(1)),
    }
    for line, (name, ends) in zip(lines, of.items()):
        assert line.startswith(f"{name} ")
        *shown, higher, lower = numbers(line.removeprefix(name))
        before, after = map(np.float64, ends)
        change = after - before
        for values, (mean, low, high) in zip((before, after, change), zip(*[iter(shown)] * 3)):
            assert mean == pytest.approx(100 * values.mean(), abs=0.051)
            reach = 196 * values.std() / np.sqrt(EXAMPLES)
            assert (low + high) / 2 == pytest.approx(mean, abs=5) and (high - low) / 2 == pytest.approx(reach, rel=0.25)
        assert [higher, lower] == [(change > 0).sum(), (change < 0).sum()]


# ---- what a stranger's folder may do


def test_texts_of_a_stranger_stay_texts(tmp_path, doctor):
    folder = tmp_path / "other"
    make_run(folder, text=EVIL)
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(status | {"status": "failed", "error": EVIL}))
    shown = doctor(folder)
    assert "failed: <script>alert(1)</script>" in shown, "it is shown, as text"
    assert "\x1b" not in shown and "\u202e" not in shown


# ---- time, size, and runs that ended badly


def test_the_results_of_thousands_of_steps_are_soon_there(tmp_path):
    make_run(tmp_path / "run", steps=6_000)
    began = time.process_time()
    assert read(tmp_path / "run")[0] == "completed"
    assert time.process_time() - began < 12, "some 2 s; reading the rows once a metric takes minutes"


@pytest.fixture
def doctor(monkeypatch, capsys):
    """What `tunix-lite doctor FOLDER` prints."""

    def says(folder) -> str:
        monkeypatch.setattr(sys, "argv", ["tunix-lite", "doctor", str(folder)])
        main()
        return capsys.readouterr().out

    return says


def test_a_killed_run_is_called_so(run, doctor):
    folder, _, _ = run
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(status | {"status": "running"}))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "train/lo')
    trainer = subprocess.Popen([sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout.readline() == "has it\n" and is_held(folder)
    assert doctor(folder).splitlines()[1].startswith("running: ")
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.communicate()
    assert is_held(folder) is False
    line = doctor(folder).splitlines()[1]
    assert line.startswith("killed: ") and line.endswith("metrics.jsonl holds 60 steps")


# ---- several


def test_runs_are_compared_by_their_own_numbers_and_settings(tmp_path, doctor):
    truths = [make_run(tmp_path / "sweep" / str(seed), seed=seed)[1] for seed in (0, 1, 10)]
    (tmp_path / "sweep" / ".hydra").mkdir()
    assert [path.name for path in runs_in(tmp_path / "sweep")] == ["0", "1", "10"]
    heads, *rows = doctor(tmp_path / "sweep").splitlines()
    assert heads.split()[:3] == ["run", "status", "steps"]
    for row, seed, truth in zip(rows, (0, 1, 10), truths):
        assert row.split()[:3] == [f"seed={seed}", "completed", "60"]
        before, after = (f"{truth[step][0].mean():.1%}".replace("%", " %") for step in (0, STEPS))
        assert re.search(rf"60 +{before} +{after} ", row)
