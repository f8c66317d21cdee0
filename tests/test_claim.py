"""Two runs do not write to one folder."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tunix_lite.distributed.folder_lock import _lock_owner, lock_folder

ROOT = Path(__file__).parents[1]
HOLDS = "import sys, time; from pathlib import Path; from tunix_lite.distributed.folder_lock import lock_folder\nwith lock_folder(Path(sys.argv[1]), 0):\n    print('has it', flush=True); time.sleep(60)"


@pytest.fixture
def other(tmp_path):
    """Another process that has the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "has it\n"
    yield process
    process.kill()
    process.communicate()


def test_whoever_has_the_folder_is_named(other, tmp_path):
    began = time.monotonic()
    with pytest.raises(ValueError) as error, lock_folder(tmp_path / "run", 0.5):
        raise AssertionError
    assert 0.5 <= time.monotonic() - began < 5
    assert str(error.value) == (
        f"{tmp_path / 'run'} is in use by process {other.pid} of {socket.gethostname()}, and was for 0.5 s: "
        "end that run, or give this one another hydra.run.dir"
    )


def test_a_process_that_is_killed_leaves_it_to_the_one_that_waits(other, tmp_path):
    os.kill(other.pid, signal.SIGKILL)
    with lock_folder(tmp_path / "run", 5):
        assert _lock_owner(tmp_path / "run").startswith(f"process {os.getpid()} of {socket.gethostname()}, since ")
    with lock_folder(tmp_path / "run", 0):
        pass


def test_a_run_that_may_not_have_the_folder_leaves_it_as_it_is(other, tmp_path):
    settings = tmp_path / "run" / ".hydra" / "config.yaml"
    settings.parent.mkdir()
    settings.write_text("seed: 5\n")
    call = [sys.executable, ROOT / "run_training.py", "hydra.run.dir=run", "seed=7", "launch.timeout=1"]
    done = subprocess.run(
        call, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 1  # another try may find it free
    waited, said = done.stderr.splitlines()
    assert waited == f"waiting for run, which is in use by process {other.pid} of {socket.gethostname()}"
    assert said.startswith("error: run is in use by process ")
    assert {path.name for path in settings.parents[1].iterdir()} == {".hydra", ".lock"}
    assert [path.name for path in settings.parent.iterdir()] == ["config.yaml"] and settings.read_text() == "seed: 5\n"
