"""What a run says and keeps: survives being killed, never reads model output as markup."""

import io
import json

from tunix_lite.tracking.console import Console, minutes
from tunix_lite.tracking.rundir import RunDir, Status
from tunix_lite.tracking.tracker import JsonLines


def test_metrics_are_cut_at_the_checkpoint_and_a_half_written_line_is_dropped(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 3, "a": 3}\n{"step": 4, "a"')
    tracker = JsonLines(file, resume_at=2)
    tracker.log(3, {"b/z": 1, "a/y": 2.5})
    tracker.close()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3]
    assert file.read_text().splitlines()[-1] == '{"step": 3, "a/y": 2.5, "b/z": 1}'


def test_a_status_continues_what_an_earlier_part_of_the_run_said(tmp_path):
    run_dir = RunDir(tmp_path)
    status = Status(run_dir, {"seed": 0})
    status.start(0)
    status.saw(0.25)
    status.saw(0.5)
    status.steps = 7
    status.write("failed", error="the power went out")
    resumed = Status(run_dir, {"seed": 0})
    resumed.start(4)
    resumed.saw(0.75)
    resumed.write("completed")
    said = json.loads((tmp_path / "status.json").read_text())
    assert said["eval"] == {"first": {"accuracy": 0.25}, "last": {"accuracy": 0.75}}
    assert said["status"] == "completed" and said["steps"] == 4 and "error" not in said


def test_a_status_file_that_a_full_disk_emptied_is_no_obstacle(tmp_path):
    (tmp_path / "status.json").write_text("")
    status = Status(RunDir(tmp_path), {})
    status.start(0)
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "running"


def test_latest_points_at_the_run_even_when_the_run_is_named_by_it(tmp_path):
    run = tmp_path / "outputs" / "project" / "day" / "run"
    RunDir(run).make()
    latest = tmp_path / "outputs" / "latest"
    assert latest.resolve() == run.resolve()
    RunDir(latest).make()
    assert latest.resolve() == run.resolve() and not run.is_symlink()


def test_piped_output_is_one_plain_line_a_step(tmp_path):
    stream = io.StringIO()
    console = Console(tmp_path / "train.log", max_steps=4, every=2, stream=stream)
    console.panel("title", [("mesh", "fsdp=1")])
    for step in range(1, 5):
        console.log(step, {"reward/mean": 0.5, "time/step": 1.0})
    row = {"prompt": "1 + 1", "completion": "[bold]2[/bold]\nso 2", "extracted": "2", "correct": True, "reward": 1.0}
    console.samples(4, [row])
    console.close()
    out = stream.getvalue().splitlines()
    assert out[:2] == ["title", "  mesh       fsdp=1"]
    assert [line.split(" | ")[0] for line in out[2:4]] == ["step 2/4 50%", "step 4/4 100%"]
    assert "eta" in out[2] and "\x1b" not in stream.getvalue()
    assert out[4] == "  right  1 + 1  →  [bold]2[/bold] ⏎ so 2  [2]"
    log = (tmp_path / "train.log").read_text()
    assert all(f"step {step}/4" in log for step in range(1, 5)), "the log gets every step"


def test_minutes_read_well():
    assert [minutes(s) for s in (48.4, 125, 11520)] == ["48s", "2m05s", "3h12m"]
