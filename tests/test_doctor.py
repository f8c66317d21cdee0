"""What `tunix-lite doctor` finds in runs that were spoilt on purpose, in sound ones, and in folders of strangers."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from tunix_lite.__main__ import main
from tunix_lite.commands.closed_pipe import as_long_as_read
from tunix_lite.report.evidence import Evidence, read_evidence
from tunix_lite.report.findings import FAULTS, _relative_step, diagnose

# benchmarks/spoilt_runs.py made these runs, and cut short what they left
RECORDED = json.loads((Path(__file__).parent / "recorded_doctor.json").read_text())


def nested(flat: dict) -> dict:
    found: dict = {}
    for name, value in flat.items():
        *groups, key = name.split(".")
        inner = found
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[key] = value
    return found


def folder_of(case: dict, folder: Path) -> Path:
    """A folder as the run left it."""
    columns = case["metrics"]
    rows = [{name: x for name, x in zip(columns, row) if x is not None} for row in zip(*columns.values())]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "samples").mkdir()
    for step, lines in case["samples"].items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "samples" / f"step_{int(step):06d}.jsonl").write_text(text)
    (folder / ".hydra").mkdir()
    settings = nested(case["settings"])
    settings["task"] = {"rewards": {name: {"weight": -1.0} for name in case["weights"]}}
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "status.json").write_text(json.dumps({"status": "completed", "parameters": case["parameters"]}))
    model = {"model": {"architecture": {"embed_dim": case["embed_dim"]}}, "seed": 0}
    (folder / "model.json").write_text(json.dumps(model))
    return folder


@pytest.mark.parametrize("name", RECORDED)
def test_the_first_finding_of_a_spoilt_run_is_its_fault_and_a_sound_run_has_none(name, tmp_path):
    case = RECORDED[name]
    found = diagnose(read_evidence(folder_of(case, tmp_path)))
    if case["right"]:
        assert found and found[0].name in case["right"], [finding.name for finding in found]
        assert found[0].evidence and found[0].overrides
    else:
        assert not found


# ---- one fault a time, by hand


def evidence(samples: dict | None = None, settings: dict | None = None, **columns) -> Evidence:
    """A run of these columns, `train_loss=[...]` for train/loss; a column of one number is constant."""
    length = max((len(values) for values in columns.values()), default=10)
    columns = {"train_loss": [0.1], **columns}
    named = {
        name.replace("_", "/", 1): values * (length if len(values) == 1 else 1) for name, values in columns.items()
    }
    rows = [{"step": i + 1} | {name: values[i] for name, values in named.items()} for i in range(length)]
    evaluations = [row for row in rows if "eval/accuracy" in row]
    return Evidence(Path("run"), nested(settings or {}), rows, evaluations, samples or {}, {}, {})


def names(run: Evidence) -> list[str]:
    return [finding.name for finding in diagnose(run)]


def test_a_gap_in_the_first_step_is_a_fault():
    assert names(evidence()) == names(Evidence(Path("run"), {}, [], [], {}, {}, {})) == []
    assert names(evidence(train_sampler_gap=[3e-7] * 10)) == []
    assert names(evidence(train_sampler_gap=[0.8])) == ["sampler_gap"]
    # within a rollout the policy moves, so only its first update counts
    moving = [1e-7, 0.1] * 5
    assert names(evidence(train_sampler_gap=moving, settings={"algorithm.updates_per_rollout": 2})) == []


def test_held_out_prompts_among_the_training_prompts_are_counted():
    def of(data):
        return names(replace(evidence(), status={"data": data}))

    assert of({"train": 9, "held_out": 4, "held_out_in_train": 1}) == ["held_out_in_train"]
    for both in (0, None, 5, -1, True, "1", 0.5):
        assert of({"train": 9, "held_out": 4, "held_out_in_train": both}) == []
    assert of(None) == of([]) == of({}) == []


def test_the_step_of_adapters_is_what_they_add_to_a_weight():
    """rank 8, alpha 32: 100 parameters that move by 0.01 each add 4 * sqrt(8 / 3) * 0.01 of a weight's size; in numpy
    what a @ b comes to."""
    settings = {"model.lora.rank": 8, "model.lora.alpha": 32.0}
    run = replace(evidence(train_update_norm=[0.1], settings=settings), status={"trained_parameters": 100})
    found = _relative_step(replace(run, architecture={"embed_dim": 64}))
    assert found.largest == pytest.approx(4 * np.sqrt(8 / 3) * 0.01)
    rng = np.random.default_rng(0)
    a, b = rng.uniform(-(64**-0.5), 64**-0.5, (64, 8)), rng.choice([-0.01, 0.01], (8, 64))
    assert found.largest == pytest.approx((4 * a @ b).std() * np.sqrt(64), rel=0.05)
    assert not _relative_step(replace(run, status={"parameters": 100}))


def test_a_reward_that_climbs_while_nothing_gets_right_is_exploited():
    """As a newcomer's run had it: reward 0.06 to 0.5, held-out 0 to 0, and groups that agree."""
    climbs = np.linspace(0.06, 0.5, 20).tolist()
    zeros = [0.0] * 20
    held_out = {"eval_accuracy": zeros}
    assert names(evidence(reward_mean=climbs, completions_correct=zeros, **held_out)) == ["reward_exploited"]
    assert names(evidence(reward_mean=climbs, **held_out)) == ["reward_exploited"]
    agree = {"reward_groups_that_agree": [0.8] * 20}
    assert names(evidence(reward_mean=climbs, completions_correct=zeros, **agree))[0] == "reward_exploited"
    # what is right rises, too; or nearly all of it is right; or the reward does not climb
    assert names(evidence(reward_mean=climbs, completions_correct=climbs)) == []
    assert names(evidence(reward_mean=climbs, completions_correct=[0.9] * 20)) == []
    assert names(evidence(reward_mean=[0.3, 0.4] * 10, completions_correct=[0.2] * 20)) == []


def test_findings_name_steps_numbers_and_an_override():
    run = evidence(
        train_skipped=[0.0] * 5 + [1.0] * 5, settings={"optimizer.learning_rate": 1e-3, "algorithm.num_generations": 8}
    )
    (finding,) = diagnose(run)
    assert finding.evidence == ["train/skipped is 1 in 5 of 10 steps, first in step 6"]
    assert finding.overrides == ["optimizer.learning_rate=0.0001"]


def test_the_page_names_every_finding():
    page = (Path(__file__).parents[1] / "docs" / "guide" / "doctor.md").read_text()
    assert not [name for name in FAULTS if f"`{name}`" not in page]


# ---- the command, and folders of strangers


def doctor(*words: str, capsys) -> str:
    before = sys.argv
    sys.argv = ["tunix-lite", "doctor", *words]
    try:
        main()
    finally:
        sys.argv = before
    return capsys.readouterr().out


def test_the_command_prints_lines(tmp_path, capsys):
    folder = folder_of(RECORDED["learning rate 0"], tmp_path)
    text = doctor(str(folder), capsys=capsys)
    assert text.splitlines()[0].startswith(f"{folder}: 12 steps, reward/mean")
    assert "1. the weights do not move [learning_rate_zero]" in text and "try optimizer.learning_rate=1e-4" in text
    with pytest.raises(SystemExit, match="2"):
        doctor(str(tmp_path / "samples"), capsys=capsys)
    error = capsys.readouterr().err
    assert "samples is not the folder of a run: it has no metrics.jsonl" in error and error.count("\n") == 1


def closed_pipe() -> int:
    """The end to write into of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def test_output_that_nobody_reads_is_no_error_and_another_broken_pipe_is_one(monkeypatch):
    with os.fdopen(closed_pipe(), "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        for size in (10, 100_000):
            with as_long_as_read():
                print("x" * size)
    with pytest.raises(BrokenPipeError), as_long_as_read():
        os.write(closed_pipe(), b"x")


def test_what_cannot_be_read_is_named_and_left_out(tmp_path):
    folder = folder_of(RECORDED["learning rate 0"], tmp_path)
    (folder / ".hydra" / "config.yaml").write_text("a: &a [1]\nb: *a\n")
    (folder / "status.json").write_text("{")
    (folder / "samples" / "step_000004.jsonl").write_text("[1]\n")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("half a li")
    run = read_evidence(folder)
    unread = [re.match(r"\S*/([\w.]+)", text)[1] for text in run.unread]
    assert unread == ["metrics.jsonl", "status.json", "config.yaml", "step_000004.jsonl"]
    assert names(run)[0] == "learning_rate_zero"


def test_no_value_of_a_file_makes_the_doctor_fail():
    """Numbers where texts are expected, texts where numbers are, nothing where anything is."""
    rng = np.random.default_rng(0)
    odd = [None, "x", 1e308, -1.0, float("nan"), True, [], {}, 0, 1, 0.5, 2**70, "\x1b[31m"]
    metrics = sorted({name for case in RECORDED.values() for name in case["metrics"]} - {"step"})
    settings = sorted({name for case in RECORDED.values() for name in case["settings"]})
    keys = ("prompt", "completion", "extracted", "correct", "reward", "advantage", "group", "finish_reason", "expected")

    def any_of(*values):
        return values[rng.integers(len(values))]

    for _ in range(150):
        rows = [{"step": i, "train/loss": 0.0} | {name: any_of(*odd) for name in metrics} for i in range(1, 13)]
        samples = {i: [{key: any_of(*odd) for key in keys} for _ in range(8)] for i in (1, 2)}
        chosen = nested({name: any_of(*odd) for name in settings})
        status = {"status": any_of("failed", *odd), "parameters": any_of(*odd), "error": any_of(*odd)}
        run = Evidence(Path("run"), chosen, rows, rows, samples, status, {"embed_dim": any_of(*odd)})
        with np.errstate(all="ignore"):
            diagnose(run)
