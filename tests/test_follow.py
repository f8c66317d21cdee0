"""`tunix-lite watch`: a run by its files alone, read-only, bounded, escaped."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from tunix_lite.commands import watch
from tunix_lite.tracking.dashboard import Dashboard


def line(step: int, **more) -> bytes:
    return json.dumps({"step": step, "reward/mean": step / 10, "time/step": 2.0, **more}).encode() + b"\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("training:\n  max_steps: 20\n")
    (tmp_path / "metrics.jsonl").write_bytes(line(1) + line(2))
    monkeypatch.setattr(watch, "EVERY", 0.02)
    monkeypatch.setattr(sys, "argv", ["tunix-lite watch", str(tmp_path)])
    return tmp_path


def contents(folder) -> dict:
    return {str(f): (f.stat().st_mtime_ns, f.read_bytes()) for f in sorted(folder.rglob("*")) if f.is_file()}


def test_half_a_line_and_numbers_that_are_none_are_left_out(folder):
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(line(3, **{"my/text": "x", "my/nan": float("nan"), "a\x1b": 1}) + line(4)[:10])
    assert watch.last_rows(folder / "metrics.jsonl")[2:] == [(3, {"reward/mean": 0.3, "time/step": 2.0, "a\\x1b": 1})]


def test_the_time_left_of_a_run_elsewhere_is_by_the_seconds_of_its_steps(folder):
    board = Dashboard(20)
    for step, metrics in watch.last_rows(folder / "metrics.jsonl"):
        board.log(step, metrics)
    assert board.seconds_left() == pytest.approx(18 * 2.0)
    board = Dashboard(20, evaluates_every=5)
    for step in (1, 2, 3):
        board.log(step, {"time/step": 2.0, "time/eval": 7.0} if step == 3 else {"time/step": 2.0})
    assert board.seconds_left() == pytest.approx(17 * 2.0 + 4 * 7.0)


def test_the_command_shows_each_step_until_the_run_ends_and_changes_nothing(folder, capsys):
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


def test_a_run_whose_process_was_killed_is_not_waited_for(folder, capsys):
    trainer = subprocess.Popen([sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout.readline() == "has it\n"
    (folder / "status.json").write_text('{"status": "running", "steps": 0}')
    trainer.kill()
    trainer.communicate()
    watch.main()
    assert f"its process was killed; hydra.run.dir={folder} goes on" in capsys.readouterr().out


def test_an_empty_folder_an_address_and_a_pipe_are_refused(folder, tmp_path_factory, monkeypatch, capsys):
    os.unlink(folder / "metrics.jsonl")
    os.mkfifo(folder / "metrics.jsonl")
    (folder / "status.json").write_text('{"status": "completed", "steps": 0}')
    watch.main()
    assert capsys.readouterr().out == "completed after step 0\n", "and no pipe is waited for"
    for place, message in (
        (tmp_path_factory.mktemp("empty"), "is not the folder of a run"),
        ("gs://bucket/run", "addresses are not supported"),
    ):
        monkeypatch.setattr(sys, "argv", ["tunix-lite watch", str(place)])
        with pytest.raises(SystemExit):
            watch.main()
        assert message in capsys.readouterr().err
