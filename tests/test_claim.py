"""Two runs do not write to one folder."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tunix_lite.parallel.claim import claim_of, claimed, is_claimed_by

HOLDS = "import sys, time; from pathlib import Path; from tunix_lite.parallel.claim import claimed\nwith claimed(Path(sys.argv[1]), 0):\n    print('has it', flush=True); time.sleep(60)"


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
    with pytest.raises(ValueError) as error, claimed(tmp_path / "run", 0.5):
        raise AssertionError
    assert 0.5 <= time.monotonic() - began < 5
    assert str(error.value) == (
        f"{tmp_path / 'run'} is in use by process {other.pid} of {socket.gethostname()}, and was for 0.5 s: "
        "end that run, or give this one another hydra.run.dir"
    )


def test_a_process_that_is_killed_leaves_it_to_the_one_that_waits(other, tmp_path):
    os.kill(other.pid, signal.SIGKILL)
    with claimed(tmp_path / "run", 5):
        assert claim_of(tmp_path / "run").startswith(f"process {os.getpid()} of {socket.gethostname()}, since ")
    with claimed(tmp_path / "run", 0):
        pass


def test_whoever_looks_into_another_folder_notices(tmp_path):
    with claimed(tmp_path / "run", 0):
        owner = claim_of(tmp_path / "run")
        assert is_claimed_by(owner, tmp_path / "run", 0)
        assert not is_claimed_by(owner, tmp_path / "not there", 0.3)
        with claimed(tmp_path / "another", 0):
            assert not is_claimed_by(owner, tmp_path / "another", 0)
