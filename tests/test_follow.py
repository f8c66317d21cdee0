"""`tunix-lite watch`: a run by its files alone, read-only, bounded, escaped."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from tunix_lite.commands import watch
from tunix_lite.commands.watch import FollowedRun
from tunix_lite.tracking.dashboard import Dashboard


def line(step: int, **more) -> bytes:
    return json.dumps({"step": step, "reward/mean": step / 10, "time/step": 2.0, **more}).encode() + b"\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / "samples").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("training:\n  max_steps: 20\n")
    (tmp_path / "metrics.jsonl").write_bytes(line(1) + line(2))
    return tmp_path


def contents(folder) -> dict:
    return {str(f): (f.stat().st_mtime_ns, f.read_bytes()) for f in sorted(folder.rglob("*")) if f.is_file()}


def test_new_rows_come_once_and_half_a_line_waits_for_the_rest(folder):
    run = FollowedRun(folder)
    assert [step for step, _ in run.new_rows()] == [1, 2] and run.new_rows() == []
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(line(3)[:10])
        file.flush()
        assert run.new_rows() == []
        file.write(line(3)[10:])
        file.flush()
    assert run.new_rows() == [(3, {"reward/mean": 0.3, "time/step": 2.0})]
    assert run.steps_setting("training", "max_steps") == 20


def test_a_file_that_a_resumed_run_has_cut_is_read_anew(folder):
    run = FollowedRun(folder)
    run.new_rows()
    (folder / "metrics.jsonl").write_bytes(line(1))
    assert [step for step, _ in run.new_rows()] == [1]


def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(folder, capsys):
    (folder / "samples" / "step_000001.jsonl").unlink(missing_ok=True)
    os.mkfifo(folder / "samples" / "step_000001.jsonl")
    (folder / "status.json").unlink(missing_ok=True)
    os.mkfifo(folder / "status.json")
    run = FollowedRun(folder)
    assert run.new_samples() == [] and run.status() == {} and not run.has_ended()


def test_the_time_left_of_a_run_elsewhere_is_by_the_seconds_of_its_steps(folder):
    board = Dashboard(20)
    for step, metrics in FollowedRun(folder).new_rows():
        board.log(step, metrics)
    assert board.seconds_left() == pytest.approx(18 * 2.0)
    board = Dashboard(20, evaluates_every=5)
    for step in (1, 2, 3):
        board.log(step, {"time/step": 2.0, "time/eval": 7.0} if step == 3 else {"time/step": 2.0})
    assert board.seconds_left() == pytest.approx(17 * 2.0 + 4 * 7.0)


def test_the_command_shows_each_step_until_the_run_ends_and_changes_nothing(folder, monkeypatch, capsys):
    monkeypatch.setattr(watch, "EVERY", 0.02)
    monkeypatch.setattr(sys, "argv", ["tunix-lite watch", str(folder)])

    def go_on():
        time.sleep(0.2)
        with (folder / "metrics.jsonl").open("ab") as file:
            file.write(line(3))
        (folder / "status.json").write_text(json.dumps({"status": "failed", "steps": 3, "error": "out\x1b[2J"}))

    thread = threading.Thread(target=go_on)
    thread.start()
    watch.main()
    thread.join()
    out = capsys.readouterr().out.splitlines()
    assert [text.split(" | ")[0] for text in out[:3]] == ["step 1/20 5%", "step 2/20 10%", "step 3/20 15%"]
    assert out[3] == "failed after step 3: out\\x1b[2J"
    before = contents(folder)
    watch.main()
    assert contents(folder) == before


HOLDS = "import sys, time; from pathlib import Path; from tunix_lite.distributed.folder_lock import lock_folder\n"
HOLDS += "with lock_folder(Path(sys.argv[1]), 1): print('has it', flush=True); time.sleep(60)"


def test_a_run_whose_process_was_killed_is_not_waited_for(folder, monkeypatch, capsys):
    trainer = subprocess.Popen([sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout.readline() == "has it\n"
    (folder / "status.json").write_text('{"status": "running", "steps": 0}')
    assert not FollowedRun(folder).has_ended()
    trainer.kill()
    trainer.communicate()
    monkeypatch.setattr(sys, "argv", ["tunix-lite watch", str(folder)])
    watch.main()
    assert f"it was killed; hydra.run.dir={folder} goes on" in capsys.readouterr().out
    # the lock of another machine cannot be seen from here, so nothing is said of its process
    (folder / ".lock").write_text("process 1 of another-machine, since 2026-01-01 00:00:00.0\n")
    assert not FollowedRun(folder).has_ended()


def test_an_empty_folder_and_an_address_are_refused(tmp_path, monkeypatch, capsys):
    for folder, message in (
        (tmp_path, "is not the folder of a run"),
        ("gs://bucket/run", "addresses are not supported"),
    ):
        monkeypatch.setattr(sys, "argv", ["tunix-lite watch", str(folder)])
        with pytest.raises(SystemExit):
            watch.main()
        assert message in capsys.readouterr().err
