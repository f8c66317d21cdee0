"""Damaged files of a run: one line with the file and the remedy, before anything is overwritten; never a traceback."""

import json
import logging
import os
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import rows_of
from test_checkpoint import state_of

from tunix_lite.basics.errors import ConfigError
from tunix_lite.commands.train import _look_at as look_at
from tunix_lite.runs.setup import prepare
from tunix_lite.settings.compose import compose
from tunix_lite.tracking.checkpoint import Checkpoints
from tunix_lite.tracking.disk import DiskError, disk_errors_explained
from tunix_lite.tracking.rows import check_rows
from tunix_lite.tracking.rundir import RunDir, Status
from tunix_lite.tracking.tracker import JsonLines

RUN = ["evaluation.num_examples=0", "training.max_steps=10", "model.mesh_shape=[[4,1],[fsdp,tp]]"]
BRACKETS = "[" * 100_000
LAST = 8  # the newest checkpoint; metrics.jsonl goes on to 9


def row(step: int, **more) -> str:
    return json.dumps({"step": step, **more})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run as it is after step 9, with checkpoints of steps 4 and 8; of a model of 16 weights."""
    folder = RunDir(tmp_path_factory.mktemp("whole") / "run")
    folder.path.mkdir(parents=True, exist_ok=True)
    run = compose(RUN)
    parts = prepare(run, folder)
    jax.set_mesh(parts.mesh)
    parts.write_fingerprint(folder)
    checkpoints = Checkpoints(folder.checkpoints)
    for step in (4, LAST):
        checkpoints.save(state_of(step))
    checkpoints.close()
    folder.metrics.write_text("".join(row(n, **{"eval/accuracy": n / 10}) + "\n" for n in range(10)))
    status = Status(folder)
    status.start(0)
    status.steps = LAST
    status.record({"eval/accuracy": 0.0})
    status.write("running")
    return folder.path


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


def test_a_dry_run_of_a_run_that_goes_on_compares_their_settings(folder, capsys):
    look_at(compose(RUN), folder)
    begins = f"from the checkpoint in {folder / 'checkpoints'}"
    assert f"{begins}\n" in capsys.readouterr().out
    other = [*RUN, "model.chat_template=plain", "generation.max_prompt_length=40"]
    with pytest.raises(ConfigError, match="this is not the run in .*: chat_template: .* resume.force=true"):
        look_at(compose(other), folder)
    look_at(compose([*other, "resume.force=true"]), folder)
    assert f"{begins}; what differs from its run: chat_template: " in capsys.readouterr().out


def prepared(folder: Path, *more: str):
    return prepare(compose([*RUN, *more]), RunDir(folder))


def everything(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def with_line(number: int, line: str | bytes | None):
    """What replaces that line of metrics.jsonl, from 1, by another one; None: it is gone."""

    def damage(run: RunDir) -> None:
        lines = run.metrics.read_bytes().split(b"\n")
        lines[number - 1 : number] = [] if line is None else [line if isinstance(line, bytes) else line.encode()]
        run.metrics.write_bytes(b"\n".join(lines))

    return damage


def flipped(run: RunDir, name: str) -> None:
    """One bit in the middle of a file of the newest checkpoint."""
    (file,) = (run.checkpoints / str(LAST)).glob(name)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


FORCE = r"\. Put the file back from a copy; or resume\.force=true goes on with the steps that can be read"
REFUSED = {  # what was done: (the damage, what is said)
    "[1]": (with_line(4, "[1]"), rf"line 4 of .*metrics.jsonl is not the metrics of a step{FORCE}"),
    "no UTF-8": (with_line(4, b'{"step": 3, "a": "\xff\xfe"}'), rf"line 4 of .* is not the metrics of a step{FORCE}"),
    "nested": (with_line(4, BRACKETS), rf"line 4 of .* is not the metrics of a step{FORCE}"),
    "a line is missing": (with_line(4, None), rf"line 4 of .* is of step 4, and the one before it of step 2{FORCE}"),
    "the beginning is missing": (
        lambda run: run.metrics.write_text(row(7) + "\n" + row(8) + "\n"),
        rf"metrics.jsonl begins with step 7, and the run with step 1{FORCE}",
    ),
    "the end is missing": (
        lambda run: run.metrics.write_text("".join(row(n) + "\n" for n in range(8))),
        rf"metrics.jsonl ends with 7, and the newest checkpoint is of step 8{FORCE}",
    ),
    "empty": (lambda run: os.truncate(run.metrics, 0), rf"metrics.jsonl holds no step, and .* of step 8{FORCE}"),
    "gone": (lambda run: run.metrics.unlink(), rf"metrics.jsonl is not there, and the newest .* of step 8{FORCE}"),
    "samples is a file": (lambda run: (run.path / "samples").touch(), "samples is no folder, and .*: move it away"),
    "fingerprint nested": (
        lambda run: run.fingerprint.write_text(BRACKETS),
        r"fingerprint.json is nested too deep: .*, so .* is not known; resume.force=true goes on",
    ),
    "fingerprint {}": (
        lambda run: run.fingerprint.write_text("{}"),
        r"fingerprint.json cannot be read \(it names no m",
    ),
    "99 is an empty folder": (
        lambda run: (run.checkpoints / "99").mkdir(),
        r"step 99 cannot be read \(its folder is empty\); remove .*/checkpoints/99 to go on from step 8$",
    ),
    "a file of a checkpoint is cut": (
        lambda run: os.truncate(run.checkpoints / "8" / "default" / "_sharding", 99),
        r"step 8 cannot be read \(default/_sharding is not as it was written\); remove .*/8 to go on from step 4$",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_run_does_not_go_on_from_a_damaged_folder_and_leaves_it_as_it_is(case, folder):
    damage, said = REFUSED[case]
    damage(RunDir(folder))
    before = everything(folder)
    with pytest.raises(ConfigError, match=said) as caught:
        prepared(folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert everything(folder) == before


STATUS = {  # what stands in status.json: what is said of it
    '{"eval": null}': "status.json cannot be read at eval: seconds are counted from now",
    '{"eval": {"first": {"accuracy": "x"}, "last": {"accuracy": 1}}}': "status.json cannot be read at eval",
    "[]": "status.json does not hold an object: seconds are counted from now",
    "": "status.json is not JSON (Expecting value: line 1 column 1 (char 0)): seconds are counted from now",
    BRACKETS: "status.json is nested too deep: more than 64 lists and objects in one another: seconds are counted",
}


@pytest.mark.parametrize("text", STATUS, ids=lambda text: text[:20])
def test_a_damaged_status_is_said_and_made_anew_from_the_metrics(text, folder):
    (folder / "status.json").write_text(text)
    assert STATUS[text] in prepared(folder).damaged
    status = Status(RunDir(folder))
    status.start(LAST)
    said = json.loads((folder / "status.json").read_text())
    assert said["eval"] == {"first": {"accuracy": 0.0}, "last": {"accuracy": 0.8}} and said["seconds"] < 100


# ---- metrics.jsonl


@pytest.mark.parametrize("tail", ["", '{"step": 9, "a', "\0" * 50, row(9) + "\n" + row(10), "text", "\n\n"])
def test_what_a_killed_run_wrote_after_its_last_checkpoint_is_no_damage(tail, tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(row(n) + "\n" for n in range(9)) + tail)
    check_rows(file, LAST, 0)
    JsonLines(file, resume_at=LAST).close()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [*range(9)]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_with_force_it_goes_on_and_nothing_is_lost(folder):
    """Line 4 cannot be read: the run goes on without it, and the file as it was stands beside."""
    with_line(4, "[1]")(RunDir(folder))
    before = (folder / "metrics.jsonl").read_bytes()
    parts = prepared(folder, "resume.force=true")
    assert "line 4 of" in parts.damaged and parts.differs == ""
    for _ in range(2):
        JsonLines(folder / "metrics.jsonl", resume_at=LAST).close()
    assert [row["step"] for row in rows_of(folder)] == [0, 1, 2, 4, 5, 6, 7, 8]
    assert (folder / "metrics.damaged-1.jsonl").read_bytes() == before
    assert not (folder / "metrics.damaged-2.jsonl").exists()


# ---- checkpoints


@pytest.mark.parametrize("name", ["about.json", "default/_METADATA", "default/_sharding", "default/d/*"])
def test_a_flipped_bit_is_named_and_the_checkpoint_before_it_offered(name, folder, caplog):
    run = RunDir(folder)
    flipped(run, name)
    prepared(folder)  # reads no array
    checkpoints, like = Checkpoints(run.checkpoints), state_of(0)
    where = rf"\({name.replace('*', '.*')} was changed after it was written, by the sha256 in digests.json\)"
    said = rf"^step 8 cannot be read {where}; remove {run.checkpoints}/8 to go on from step 4$"
    with pytest.raises(ValueError, match=said):
        checkpoints.restore(like)
    with pytest.raises(ValueError, match=said):
        checkpoints.restore_params(like.params)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], "orbax says nothing of its own"
    shutil.rmtree(run.checkpoints / "8")
    np.testing.assert_array_equal(checkpoints.restore(like).params["w"], np.full((8, 2), 4))


def test_a_file_of_the_only_checkpoint_that_is_gone_is_named_and_to_begin_anew_offered(folder):
    (folder / "checkpoints" / "8" / "default" / "manifest.ocdbt").unlink()
    shutil.rmtree(folder / "checkpoints" / "4")
    with pytest.raises(ValueError, match=r"^step 8 cannot be read \(.+\); .* to begin anew: there is no earlier one$"):
        Checkpoints(folder / "checkpoints").restore(state_of(0))


def test_a_checkpoint_without_digests_is_still_read(folder):
    checkpoints = Checkpoints(folder / "checkpoints")
    assert checkpoints.has_digests(LAST)
    (folder / "checkpoints" / "8" / "digests.json").unlink()
    (folder / "checkpoints" / "8" / "about.json").unlink()
    assert not checkpoints.has_digests(LAST) and checkpoints.whole_steps() == [4, LAST]
    np.testing.assert_array_equal(checkpoints.restore(state_of(0)).params["w"], np.full((8, 2), LAST))
    assert checkpoints.skipped(LAST) == 0


# ---- a folder that is deleted while a checkpoint is written


@pytest.mark.parametrize("name", ["", "checkpoints"])
def test_a_folder_deleted_in_the_middle_of_a_save_is_not_called_whole(name, folder, monkeypatch):
    """It is deleted when checkpoint 9 has been written and has no name yet."""
    what, checkpoints = folder / name, Checkpoints(folder / "checkpoints", keep=3)
    really = Checkpoints._before_it_gets_its_name

    def struck(self):
        shutil.rmtree(what)
        really(self)

    monkeypatch.setattr(Checkpoints, "_before_it_gets_its_name", struck)
    said = f"the folder is gone or cannot be reached: {what}. The run ended after step 9; no whole checkpoint can be seen: "
    said += f"when the disk can be written, the same command with hydra.run.dir={folder} goes on from what is there, or"
    explained = disk_errors_explained(folder, lambda: "after step 9", checkpoints.whole_steps)
    with pytest.raises(DiskError, match=re.escape(said)), explained:
        checkpoints.save(state_of(9))
        checkpoints.close()
    assert Checkpoints(folder / "checkpoints").steps() == []
    assert prepared(folder).resume_from is None, "as was said: it begins anew"


def test_a_checkpoint_whose_run_is_gone_is_said_to_need_force(folder):
    (folder / "fingerprint.json").unlink()
    whole = Checkpoints(folder / "checkpoints").whole_steps
    said = "checkpoint 8 is whole, but fingerprint.json, which says what made it, is gone: with resume.force=true the"
    with pytest.raises(DiskError, match=said), disk_errors_explained(folder, lambda: "", whole):
        raise FileNotFoundError(2, "gone", str(folder / "status.json"))
    with pytest.raises(ConfigError, match="has no fingerprint.json"):
        prepared(folder)
    assert prepared(folder, "resume.force=true").resume_from == folder / "checkpoints"
