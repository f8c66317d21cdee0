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
from tunix_lite.checkpoint import Checkpoints
from tunix_lite.errors import ConfigError
from tunix_lite.parallel.mesh import put
from tunix_lite.settings.compose import compose
from tunix_lite.tracking.disk import DiskError, trouble
from tunix_lite.tracking.rundir import RunDir
from tunix_lite.train import train
from tunix_lite.types import TrainState

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

    def collect(self, *arguments):
        self.seen.append(1)
        if len(self.seen) == 3:
            until = time.monotonic() + 30
            while not self.checkpoint.is_dir() and time.monotonic() < until:
                time.sleep(0.01)
            self.strike()
        return super().collect(*arguments)


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
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert Checkpoints(folder / "checkpoints").steps() == [2, 4] and steps == [1, 2, 3, 4]


def test_a_folder_that_vanishes_ends_the_run_at_once(tmp_path):
    """Not at the next checkpoint, which orbax would write into a folder that it makes in its place."""
    folder = tmp_path / "run"
    algorithm = Strikes(4, seen=[], strike=lambda: shutil.rmtree(folder), checkpoint=folder / "checkpoints" / "2")
    said = f"the folder is gone or cannot be reached: {folder}. The run ended after step 3"
    with pytest.raises(DiskError, match=said):
        train(replace(compose(SHORT), algorithm=algorithm), folder)
    assert not folder.exists()


@pytest.mark.parametrize("is_full", [True, False])
def test_a_disk_that_cannot_be_written_is_found_before_a_run(disk, is_full):
    if is_full:
        fill(disk)
    else:
        shell(f"mount -o remount,ro {disk}")
    why = f"hydra.run.dir: {disk} cannot be written to: the disk is {'full' if is_full else 'read-only'}"
    with pytest.raises(ConfigError, match=why):
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


def os_error(number: int, *file) -> OSError:
    return OSError(number, os.strerror(number), *map(str, file))


@pytest.mark.parametrize(
    "error, words",
    [
        (os_error(errno.ENOSPC), "the disk is full: RUN"),
        (os_error(errno.EDQUOT, "RUN/status.json.tmp"), "the disk quota is used up: RUN/status.json.tmp"),
        (os_error(errno.ESTALE, "RUN"), "the folder is gone or cannot be reached: RUN"),
        (os_error(errno.EACCES, "/elsewhere/data.jsonl"), None),
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
