"""Which checkpoints are kept; a save that was cut short is none; and disks that get full, turn read-only or vanish."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_train
from conftest import rows_of

from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.basics.best import Best
from tunix_lite.basics.errors import ConfigError
from tunix_lite.basics.types import TrainState
from tunix_lite.commands import program
from tunix_lite.commands.train import next_command
from tunix_lite.parallel.mesh import make_mesh, put
from tunix_lite.settings.compose import compose
from tunix_lite.tracking.checkpoint import Checkpoints
from tunix_lite.tracking.disk import DiskError, trouble
from tunix_lite.train import train


@pytest.fixture(autouse=True)
def mesh():
    jax.set_mesh(make_mesh(((4, 1), ("fsdp", "tp"))))


def state_of(step: int) -> TrainState:
    params = {"w": put(np.full((8, 2), step, np.float32), "embed", "mlp")}
    return TrainState(put(np.int32(step)), params, {"m": put(np.arange(3.0), "norm")})


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def saved(folder, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep=len(steps))
    for step in steps:
        checkpoints.save(state_of(step), skipped=step - 1)
    checkpoints.close()
    return checkpoints


def test_the_newest_and_the_best_are_kept(tmp_path):
    """Accuracies .9 .1 .5 and none: the newest one, and of the measured ones the two best. A manager that is opened
    later knows them, too, as the run does; of a metric where less is better they are others; of equals the first."""

    def saved_by(best, start, values):
        folder = tmp_path / "checkpoints"
        checkpoints = Checkpoints(folder, keep=1, keep_best=2, best=best)
        for step, value in enumerate(values, start):
            if value is not None:
                best.take(step, value)
            checkpoints.save(state_of(step))
        checkpoints.close()
        (tmp_path / "status.json").write_text(json.dumps({"best": best.first(10)}))
        return Checkpoints(folder)

    best = Best("eval/accuracy", is_lower_better=False)
    after = saved_by(best, 1, (0.9, 0.1, 0.5, None))
    assert after.steps() == [1, 3, 4] and after.chosen_step("best") == 1 and after.chosen_step(None) == 4
    again = saved_by(best, 5, (0.9, 0.2))
    assert again.steps() == [1, 5, 6] and best.first(9, again.steps()) == [1, 5, 6]
    other = saved_by(Best("eval/loss", is_lower_better=True), 7, (1.0, 2.0, 1.5, 3.0))
    assert other.steps() == [7, 9, 10] and other.chosen_step("best") == 7
    state = jax.tree.map(jnp.zeros_like, state_of(0))
    assert other.restore_params(shapes(state.params), "best")[0] == 7
    shutil.rmtree(tmp_path / "checkpoints" / "7")
    assert other.chosen_step("best") == 9, "the best that is there"


@pytest.mark.parametrize("status", [None, "{}", '{"best": 4}', '{"best": [3, "4", null]}'])
def test_without_a_measurement_no_checkpoint_is_best(status, tmp_path):
    checkpoints = saved(tmp_path / "checkpoints", 2, 4)
    if status is not None:
        (tmp_path / "status.json").write_text(status)
    with pytest.raises(ValueError, match=r"no checkpoint of .* is the best by .*; give the number of one: step=4$"):
        checkpoints.chosen_step("best")


def test_a_save_that_was_cut_short_is_no_checkpoint_and_is_cleared_away(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state_of(2))
    checkpoints.close()
    half = tmp_path / "4.orbax-checkpoint-tmp"
    (half / "default").mkdir(parents=True)
    (half / "default" / "something").write_text("half")
    again = Checkpoints(tmp_path)
    assert again.latest_step() == 2 and again.steps() == [2] and again.skipped(2) == 0
    restored = again.restore(jax.tree.map(jnp.zeros_like, state_of(0)))
    np.testing.assert_array_equal(restored.params["w"], np.full((8, 2), 2))
    assert again.restore_params(shapes(state_of(0).params))[0] == 2
    assert (half / "default" / "something").exists(), "perhaps a run is writing it: who only looks leaves it"
    again.save(state_of(4))
    again.close()
    assert Checkpoints(tmp_path).steps() == [2, 4] and not half.exists()


MEMORY = r"""
import re, sys
from functools import partial
from pathlib import Path
import jax, numpy as np
from tunix_lite.basics.types import TrainState
from tunix_lite.tracking.checkpoint import Checkpoints

def mb(name):
    return int(re.search(name + r":\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024 / 1e6

@partial(jax.jit, donate_argnums=0)
def update(state):
    return jax.tree.map(lambda x: x + 1, state)

draws = np.random.default_rng(0)
state = TrainState(np.int32(1), {name: draws.random((4096, 4096), np.float32) for name in "abcdef"}, {})
# the first takes numpy's arrays, and the others the arrays of the one before
for _ in range(3):
    state = jax.block_until_ready(update(state))
checkpoints = Checkpoints(sys.argv[1])
Path("/proc/self/clear_refs").write_text("5")
before = mb("VmRSS")
checkpoints.save(state)
saving = mb("VmHWM") - before
jax.block_until_ready(update(state))
checkpoints.close()
print(saving, mb("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux says what a process held at most")
def test_a_large_state_is_saved_in_little_memory_and_the_next_update_finds_room(tmp_path):
    """Six arrays of 67 MB on a CPU, 403 MB. Saved compressed they would be in memory once more; and if an update ran
    beside the save it would make six new arrays, as orbax still reads the old ones."""
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "checkpoints")]
    # glibc gives an array's pages back when it is freed
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    ended = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    saving, updating = map(float, ended.stdout.split())
    assert saving < 100 and updating < 100, (saving, updating)


def test_what_does_not_fit_is_told_by_its_shapes(tmp_path):
    checkpoints, state = saved(tmp_path, 9), state_of(0)
    wide = state.replace(params={"w": put(np.zeros((8, 4), np.float32), "embed", "mlp")})
    said = rf"^step 9 of {tmp_path} does not fit this model or optimizer: "
    with pytest.raises(ValueError, match=said + r"params/w: \(8, 4\) here, \(8, 2\) there$"):
        checkpoints.restore(wide)
    with pytest.raises(ValueError, match=said + r"opt_state/v: \(3,\) here, None there; opt_state/m: None here, "):
        checkpoints.restore(state.replace(opt_state={"v": state.opt_state["m"]}))


def test_the_last_line_of_a_run_names_the_command_that_talks_to_it(tmp_path):
    (tmp_path / "my run").mkdir()
    saved(tmp_path / "my run" / "checkpoints", 1)
    assert next_command(tmp_path / "my run") == f"talk to it: tunix-lite generate '{tmp_path}/my run'\n"


# ---- a disk that gets full, turns read-only or vanishes


SHORT = [*test_train.SHORT, "tracking.tensorboard=false", "evaluation.num_examples=0"]
SIZE = 4_000_000  # of a disk: one checkpoint of a short run takes 3 MB


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

    def batch_of(self, *arguments):
        self.seen.append(1)
        if len(self.seen) == 3:
            until = time.monotonic() + 30
            while not self.checkpoint.is_dir() and time.monotonic() < until:
                time.sleep(0.01)
            self.strike()
        return super().batch_of(*arguments)


def test_a_full_disk_is_one_line_and_with_more_room_the_same_command_goes_on(disk, monkeypatch, capfd):
    """There is room for the checkpoint of step 2, and not for that of step 4. The command ends without the usual exit,
    which would wait for the thread that still writes."""
    folder = disk / "run"
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as end:
        program._or_exit(lambda: train(compose(SHORT), folder))
    printed = capfd.readouterr()
    said = [line for line in printed.err.splitlines() if not line.startswith(("WARNING", "W0", "I0"))]
    assert end.value.code == 1 and len(said) == 1 and "Traceback" not in printed.out + printed.err, printed.err
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
    steps = [row["step"] for row in rows_of(folder)]
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


def megabyte_of(step: int) -> TrainState:
    """1 MB that cannot be made smaller."""
    values = np.random.default_rng(step).normal(size=(512, 512)).astype(np.float32)
    return TrainState(put(np.int32(step)), {"w": put(values, "embed", "mlp")}, {})


def test_the_only_checkpoint_outlives_the_one_that_was_to_replace_it(disk):
    checkpoints = Checkpoints(disk / "checkpoints", keep=1)
    checkpoints.save(megabyte_of(1))
    checkpoints.close()
    fill(disk, 500_000)
    checkpoints.save(megabyte_of(2))
    until = time.monotonic() + 30
    with pytest.raises(OSError, match="No space left on device") as caught:
        while time.monotonic() < until:  # asking all the time is no reason to think that all went well
            checkpoints.check()
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(disk / "checkpoints")
    checkpoints.close()
    (disk / "filler").unlink()
    again = Checkpoints(disk / "checkpoints", keep=1)
    assert again.steps() == [1] and again.latest_step() == 1
    restored = again.restore(jax.tree.map(jnp.zeros_like, megabyte_of(0)))
    np.testing.assert_array_equal(restored.params["w"], megabyte_of(1).params["w"])
    again.save(megabyte_of(2))
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
