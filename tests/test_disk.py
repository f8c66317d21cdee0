"""A disk that gets full, turns read-only or vanishes: the run ends with one line, and its last checkpoint is whole.

Real small disks where mounting is allowed; elsewhere those tests are skipped, and /dev/full is what is full.
"""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_train

from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.basics.errors import ConfigError
from tunix_lite.basics.types import TrainState
from tunix_lite.parallel.mesh import put
from tunix_lite.runs import watch
from tunix_lite.settings.compose import compose
from tunix_lite.tracking.checkpoint import Checkpoints
from tunix_lite.tracking.disk import DiskError, trouble
from tunix_lite.tracking.rundir import RunDir
from tunix_lite.train import train

SHORT = [*test_train.OF_A_RUN, "tracking.tensorboard=false", "evaluation.num_examples=0"]
SIZE = 10_000_000  # of a disk: one checkpoint of a short run takes 7 MB


def shell(command: str) -> None:
    subprocess.run(command, shell=True, check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path):
    """A small disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        shell(f"mount -t tmpfs -o size={SIZE} tmpfs {folder}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"nothing can be mounted here: {error.stderr.decode().strip()}")
    yield folder
    while os.path.ismount(folder) or os.path.ismount(folder / "run"):
        shell(f"umount -l {folder / 'run'} || umount -l {folder}")


def fill(disk: Path, leave: int = 0) -> None:
    stat = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(stat.f_bavail * stat.f_frsize - leave))


@dataclass(frozen=True)
class Strikes(GRPO):
    """GRPO to whose run something happens when it is to collect for step 3; checkpoint 2 is whole by then."""

    seen: list = None
    strike: object = None
    checkpoint: Path = None
    advantage: float | None = None

    def collect(self, *arguments):
        batch, *rest = super().collect(*arguments)
        self.seen.append(1)
        if len(self.seen) == 3:
            until = time.monotonic() + 30
            while not self.checkpoint.is_dir() and time.monotonic() < until:
                time.sleep(0.01)
            self.strike()
            if self.advantage is not None:
                batch = batch.replace(advantages=np.full_like(batch.advantages, self.advantage))
        return batch, *rest


def struck(folder: Path, strike, *more: str, advantage: float | None = None) -> TrainState:
    """A run of four steps to which this happens during the third."""
    algorithm = Strikes(4, seen=[], strike=strike, checkpoint=folder / "checkpoints" / "2", advantage=advantage)
    return train(replace(compose([*SHORT, *more]), algorithm=algorithm), folder)


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


# ---- whole runs


def test_a_full_disk_is_one_line_and_with_more_room_the_same_command_goes_on(disk):
    """There is room for the checkpoint of step 2, and not for that of step 4."""
    folder = disk / "run"
    program = [sys.executable, Path(__file__).parents[1] / "run_training.py"]
    done = subprocess.run([*program, *SHORT, f"hydra.run.dir={folder}"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if not line.startswith(("WARNING", "W0", "I0"))]
    assert len(said) == 1 and "Traceback" not in done.stdout + done.stderr, done.stderr
    assert said[0] == (
        f"error: the disk is full: {folder}/checkpoints. The run ended after step 4; checkpoint 2 is whole: when the "
        f"disk can be written, the same command with hydra.run.dir={folder} goes on from it"
    )
    status = json.loads((folder / "status.json").read_text())
    assert status["status"] == "running" or "the disk is full" in status["error"], status  # if it could be written
    assert Checkpoints(folder / "checkpoints").steps() == [2]
    assert [path.name for path in (folder / "checkpoints").glob("4.*tmp")], "the other one is not whole"
    shell(f"mount -o remount,size={4 * SIZE} {disk}")
    train(compose(SHORT), folder)
    assert "resumed from step 2" in (folder / "train.log").read_text()
    assert Checkpoints(folder / "checkpoints").steps() == [2, 4] and steps_in(folder) == [1, 2, 3, 4]


@pytest.mark.wide
def test_a_metrics_file_on_a_full_disk_ends_the_run(tmp_path, monkeypatch):
    init = RunDir.__init__

    def with_a_full_disk(self, *arguments, **named):
        init(self, *arguments, **named)
        self.metrics = Path("/dev/full")

    monkeypatch.setattr(RunDir, "__init__", with_a_full_disk)
    with pytest.raises(
        DiskError, match=f"the disk is full: {tmp_path}. The run ended after step 0; no whole checkpoint"
    ):
        train(compose([*SHORT, "training.max_steps=2"]), tmp_path)
    assert "the disk is full" in json.loads((tmp_path / "status.json").read_text())["error"]


def test_a_folder_that_vanishes_ends_the_run_at_once(tmp_path):
    """Not at the next checkpoint, which orbax would write into a folder that it makes in its place."""
    folder = tmp_path / "run"
    with pytest.raises(
        DiskError, match=f"the folder is gone or cannot be reached: {folder}. The run ended after step 3"
    ):
        struck(folder, lambda: shutil.rmtree(folder))
    assert not folder.exists()


@pytest.mark.wide
def test_a_full_disk_does_not_hide_what_went_wrong_before(disk, monkeypatch):
    """It is full from the moment on in which the run finds that it diverged, so status.json cannot be written."""
    really = watch.diverged
    monkeypatch.setattr(watch, "diverged", lambda *arguments: fill(disk) or really(*arguments))
    with pytest.raises(FloatingPointError, match="step 3: train/loss nan"):
        struck(disk / "run", lambda: None, "training.max_skipped_in_a_row=1", advantage=float("nan"))
    assert json.loads((disk / "run" / "status.json").read_text())["status"] == "running"


# ---- before a run


def full(disk: Path) -> str:
    fill(disk)
    return "the disk is full"


def read_only(disk: Path) -> str:
    shell(f"mount -o remount,ro {disk}")
    return "the disk is read-only"


@pytest.mark.parametrize("strike", [full, read_only])
def test_a_disk_that_cannot_be_written_is_found_before_a_run(disk, strike):
    why = strike(disk)
    with pytest.raises(ConfigError, match=f"hydra.run.dir: {disk} cannot be written to: {why}"):
        train(compose(SHORT), disk / "a" / "run")
    assert not (disk / "a").exists()


def test_a_folder_without_permission_is_found_before_a_run(tmp_path, monkeypatch):
    """Root may write everywhere: for it the error is made up."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints").chmod(0o500)
    really = tempfile.TemporaryFile

    def refused(dir):
        if Path(dir).name == "checkpoints":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(dir))
        return really(dir=dir)

    if os.getuid() == 0:
        monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(ValueError, match="checkpoints cannot be written to: there is no permission to write"):
        RunDir(tmp_path / "run").check()


# ---- checkpoints


def state_of(step: int) -> TrainState:
    """1 MB that cannot be made smaller."""
    values = np.random.default_rng(step).normal(size=(512, 512)).astype(np.float32)
    return TrainState(put(np.int32(step)), {"w": put(values, "embed", "mlp")}, {})


def test_the_only_checkpoint_outlives_the_one_that_was_to_replace_it(disk):
    checkpoints = Checkpoints(disk / "checkpoints", keep=1)
    checkpoints.save(state_of(1))
    checkpoints.close()
    fill(disk, 500_000)
    checkpoints.save(state_of(2))
    until = time.monotonic() + 30
    with pytest.raises(OSError, match="No space left on device") as caught:
        while time.monotonic() < until:  # asking all the time is no reason to think that all went well
            checkpoints.check()
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(disk / "checkpoints")
    checkpoints.close()
    (disk / "filler").unlink()
    again = Checkpoints(disk / "checkpoints", keep=1)
    assert again.steps() == [1] and again.latest_step() == 1
    restored = again.restore(jax.tree.map(jnp.zeros_like, state_of(0)))
    np.testing.assert_array_equal(restored.params["w"], state_of(1).params["w"])
    again.save(state_of(2))
    again.close()
    assert again.steps() == [2]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("INTERNAL: Failed to write [os_error_code='28']"),
    ],
)
def test_an_error_of_a_write_names_the_folder(tmp_path, error):
    """Python's own writes name no file, and tensorstore gives the number only in its text."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    with pytest.raises(OSError, match="No space left on device") as caught, checkpoints._as_os_error():
        raise error
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(tmp_path / "checkpoints")


# ---- parts


def os_error(number: int, *file) -> OSError:
    return OSError(number, os.strerror(number), *map(str, file))


@pytest.mark.parametrize(
    "error, words",
    [
        (os_error(errno.ENOSPC), "the disk is full: RUN"),
        (os_error(errno.EDQUOT, "RUN/status.json.tmp"), "the disk quota is used up: RUN/status.json.tmp"),
        (os_error(errno.EACCES, "RUN/samples"), "there is no permission to write: RUN/samples"),
        (os_error(errno.ESTALE, "RUN"), "the folder is gone or cannot be reached: RUN"),
        (os_error(errno.EACCES, "/elsewhere/data.jsonl"), None),
        (ValueError("the disk is full"), None),
    ],
)
def test_what_is_said_of_an_error(error, words, tmp_path):
    error.filename = error.filename.replace("RUN", str(tmp_path)) if getattr(error, "filename", None) else None
    try:
        try:
            raise error
        finally:
            raise ValueError("a file is open")  # as closing a half-written zip file says
    except ValueError as outer:
        for seen in (error, outer):
            assert trouble(seen, tmp_path) == (words and re.sub("RUN", str(tmp_path), words))
