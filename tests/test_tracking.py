"""What a run says and keeps: survives being killed, never reads model output as markup."""

import io
import json
import os
import pty
import re
import select
import subprocess
import sys

import pytest

from tunix_lite.basics.plain_text import visible
from tunix_lite.report.evidence import read_samples
from tunix_lite.tracking.console import Console
from tunix_lite.tracking.rundir import RunDir, Status, read_status


def test_the_last_words_name_the_setting_that_goes_on(tmp_path):
    status = Status(RunDir(tmp_path))
    status.start(3)
    (ended,) = status.closing_lines("hydra.sweep.dir=/sweep")
    assert ended == (f"3 steps in 0 s; everything is in {tmp_path}", "")
    status.record({"eval/accuracy": 0.25})
    status.record({"eval/accuracy": 0.5})
    status.stopped = "SIGTERM"
    accuracy, _, stopped = status.closing_lines("hydra.sweep.dir=/sweep")
    assert accuracy == ("held-out accuracy 25.0% → 50.0%", "bold green")
    status.eval = {}
    status.record({"eval/accuracy": 0.25, "eval/avg_at_4": 0.125, "eval/loss": 1.5, "eval/reward": 1.0})
    status.record({"eval/accuracy": 0.5, "eval/avg_at_4": 0.75, "eval/loss": 1.25, "eval/reward": 2.0})
    words = status.closing_lines("")[0][0]
    assert words == "held-out accuracy 25.0% → 50.0%, avg@4 12.5% → 75.0%, held-out loss 1.5000 → 1.2500"
    assert stopped == ("stopped by SIGTERM; the same command with hydra.sweep.dir=/sweep goes on", "")


def test_latest_points_at_the_run_even_when_the_run_is_named_by_it(tmp_path):
    run, latest = tmp_path / "outputs" / "day" / "run", tmp_path / "outputs" / "latest"
    run.mkdir(parents=True)
    for named in (run, latest):
        RunDir(named).point_latest_here()
    assert latest.resolve() == run.resolve() and not run.is_symlink()


def test_piped_output_is_one_plain_line_a_step(tmp_path):
    stream = io.StringIO()
    console = Console(tmp_path / "train.log", max_steps=4, every=2, stream=stream)
    console.panel("title", [("mesh", "fsdp=1")])
    for step in range(1, 5):
        console.log(step, {"reward/mean": 0.5, "time/step": 1.0})
    row = {"prompt": "1 + 1", "completion": "[bold]2[/bold]\nso 2", "extracted": "2", "correct": True, "reward": 1.0}
    console.samples([row])
    console.close()
    out = stream.getvalue().splitlines()
    assert out[:2] == ["title", "  mesh       fsdp=1"]
    assert [line.split(" | ")[0] for line in out[2:4]] == ["step 2/4 50%", "step 4/4 100%"]
    assert "eta" in out[2] and "\x1b" not in stream.getvalue()
    assert out[4] == "  right  1 + 1  →  [bold]2[/bold] ⏎ so 2  [2]"
    log = (tmp_path / "train.log").read_text()
    assert all(f"step {step}/4" in log for step in range(1, 5)), "the log gets every step"


def test_a_terminal_that_was_closed_is_done_without_and_python_ends_without_a_word(tmp_path):
    """The other end of a pseudo-terminal goes: writing to it fails with EIO, on standard error, too."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom tunix_lite.tracking.console import Console\n"
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        f"console = Console(Path({str(tmp_path / 'train.log')!r}), max_steps=2)\n"
        "console.busy('compiling…'); console.say('one'); sys.stdin.readline()\n"
        "for text in ('two', 'three'): console.say(text)\n"
        "console.log(1, {'train/loss': 1.0}); console.close()\n"
        "print('four', flush=True); print('five', file=sys.stderr, flush=True)\n"
    )
    ours, theirs = pty.openpty()
    call = [sys.executable, "-c", code]
    run = subprocess.Popen(call, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    seen = b""
    while b"one" not in seen and select.select([ours], [], [], 60)[0]:
        seen += os.read(ours, 1000)
    os.close(ours)
    try:
        run.communicate(b"go on\n", timeout=60)
    finally:
        run.kill()
    assert b"one" in seen
    assert run.returncode == 0
    said = [line.split(" ", 1)[1] for line in (tmp_path / "train.log").read_text().splitlines()]
    assert said == ["compiling…", "one", "two", "three", "step 1/2 50% | loss 1.0000"]


NASTY = "a\x1b[2J\x1b]0;owned\x07\r\x7f\x9b\u202eb\u2066\ud800\tc\nd é你🦜\u200d"
SHOWN = "a\\x1b[2J\\x1b]0;owned\\x07\\r\\x7f\\x9b\\u202eb\\u2066\\ud800\tc\nd é你🦜\u200d"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_text_that_acts_on_a_terminal_is_shown_as_what_it_is(tmp_path, is_terminal, monkeypatch):
    assert visible(NASTY) == SHOWN
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "400")
    console = Console(tmp_path / "train.log", max_steps=4, stream=stream)
    row = {"prompt": NASTY, "completion": NASTY, "extracted": NASTY, "correct": True, "reward": 1.0}
    console.panel(NASTY, [("data", NASTY)])
    console.samples([row])
    console.say(NASTY)
    console.busy(NASTY)
    console.close()
    for said in (stream.getvalue(), (tmp_path / "train.log").read_text(encoding="utf-8")):
        said = re.sub(r"\x1b\[\??\d*[a-zA-Z]", "", said.replace("\x1b[2J", "ESCAPED?")) if is_terminal else said
        assert "ESCAPED?" not in said and not set("\x07\x7f\x9b\u202e\ud800") & set(said)
        assert r"\x1b[2J\x1b]0;owned\x07\r\x7f\x9b\u202e" in said


def test_status_and_samples_are_json_that_everybody_reads(tmp_path):
    status = Status(RunDir(tmp_path))
    status.start(0)
    status.write("failed", error=NASTY)
    assert json.loads((tmp_path / "status.json").read_bytes())["error"] == SHOWN
    RunDir(tmp_path).write_samples(1, [{"completion": NASTY, "reward": 1.0}])
    (line,) = (tmp_path / "samples" / "step_000001.jsonl").read_bytes().decode().split("\n")[:-1]
    assert json.loads(line)["completion"] == NASTY.replace("\ud800", "\\ud800")


def test_what_a_run_writes_it_can_read_again(tmp_path):
    """Deep examples: each reader has a limit, and no writer passes it."""
    run_dir = RunDir(tmp_path)
    deep = eval("[" * 90 + "]" * 90)
    rows = [{"example": deep}, {"logprobs": [-0.123456789] * 90_000}]
    run_dir.write_samples(2, rows)
    cut, tokens = read_samples(tmp_path, 2, "step", [])
    assert "nested deeper than 64" in json.dumps(cut) and tokens == rows[1]

    # What identifies a run is refused rather than shortened, before the run has begun.
    for settings, message in [({"x": "é" * 3_000_000}, "at most"), ({"x": deep}, "nested too deep")]:
        with pytest.raises(ValueError, match=message):
            run_dir.write_json(run_dir.fingerprint, settings)
        assert not run_dir.fingerprint.exists()
    status = Status(run_dir)
    status.start(0)
    status.write("failed", error="é" * 3_000_000)
    assert read_status(run_dir.status)[3] == ""


def test_a_folder_that_is_no_run_is_refused_with_what_was_probably_meant(tmp_path):
    (tmp_path / "latest").mkdir()
    export = tmp_path / "full"
    export.mkdir()
    (export / "config.json").write_text("{}")
    for folder, message in {
        "lates": "there is no such folder",
        "elsewhere/x": "there is no such folder",
        "latest": "it has no model.json",
        "full": f"it holds a model; give model.weights={export} instead",
    }.items():
        with pytest.raises(ValueError, match="is not the folder of a run: ") as refused:
            RunDir(tmp_path / folder).read_model()
        assert str(refused.value).endswith(message), folder
