"""Mistakes on the command line, a folder that another run has, processes by a mark, and `tunix-lite check`."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from forked import called

from tunix_lite.basics.locks import lock_owner
from tunix_lite.commands import check
from tunix_lite.distributed.folder_lock import lock_folder

MISTAKES = {
    "a misspelt key": (["training.micro_batchsize=4"], "did you mean 'training.micro_batch_size'?"),
    "a mesh that does not fit": (["model.mesh_shape=[[8,2],[fsdp,tp]]"], "needs 16 devices, but jax sees 4; 'model.mesh_shape=[[2,2],"),
    "a mistake in a sweep": (["--multirun", "seed=0,1", "training.max_stepz=3"], "did you mean 'training.max_steps'?"),
    "nowhere to write": (["hydra.run.dir=docs/../a_file/run"], "a_file is a file; give a folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message_within_seconds(name, tmp_path):
    overrides, message = MISTAKES[name]
    (tmp_path / "docs").mkdir()
    (tmp_path / "a_file").touch()
    done = called(overrides, tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert done.code == 2, done
    assert done.err.startswith("error: ") and message in done.err, done.err
    assert len(done.err.strip().splitlines()) == 1 and not done.out
    assert not (tmp_path / "outputs").exists()
    # the clock of the processor, others may use the machine, too; importing takes some two seconds more
    assert done.seconds < 8, "5 seconds is the promise (docs/log.md)"


# ---- two runs do not write to one folder

HOLDS = """
import sys, time; from pathlib import Path; from tunix_lite.distributed.folder_lock import lock_folder
with lock_folder(Path(sys.argv[1]), 0):
    print('has it', flush=True); time.sleep(60)
"""


@pytest.fixture
def other(tmp_path):
    """Another process that has the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "has it\n"
    yield process
    process.kill()
    process.communicate()


def test_a_process_that_is_killed_leaves_it_to_the_one_that_waits(other, tmp_path):
    os.kill(other.pid, signal.SIGKILL)
    with lock_folder(tmp_path / "run", 5):
        assert lock_owner(tmp_path / "run").startswith(f"process {os.getpid()} of {socket.gethostname()}, since ")
    with lock_folder(tmp_path / "run", 0):
        pass


def test_a_run_that_may_not_have_the_folder_leaves_it_as_it_is(other, tmp_path):
    settings = tmp_path / "run" / ".hydra" / "config.yaml"
    settings.parent.mkdir()
    settings.write_text("seed: 5\n")
    done = called(["hydra.run.dir=run", "seed=7", "launch.timeout=1"], tmp_path)
    assert done.code == 1  # another try may find it free
    in_use = f"run is in use by process {other.pid} of {socket.gethostname()}"
    waited, said = done.err.splitlines()
    assert waited == f"waiting for run, which {in_use.removeprefix('run ')}"
    assert said == f"error: {in_use}, and was for 1 s: end that run, or give this one another hydra.run.dir"
    assert {path.name for path in settings.parents[1].iterdir()} == {".hydra", ".lock"}
    assert [path.name for path in settings.parent.iterdir()] == ["config.yaml"] and settings.read_text() == "seed: 5\n"


# ---- processes are found by a mark in their environment

# A small process starts a program faster than the kernel loads it.
START_AND_LOOK = """
import os, subprocess
from tunix_lite.workers.process import find_marked
missed = 0
for number in range(100):
    value = f"{os.getpid()}.{number}"
    child = subprocess.Popen(["sleep", "60"], start_new_session=True, env=os.environ | {"TUNIX_LITE_TEST": value})
    # the kernel lets nobody look before the old program is gone; now it is gone, and the new one comes
    open(f"/proc/{child.pid}/environ", "rb").read()
    missed += find_marked(f"TUNIX_LITE_TEST={value}".encode()) != {child.pid}
    child.kill()
    child.wait()
print(missed)
"""


def test_a_process_is_found_while_the_kernel_still_loads_its_program():
    """For a moment such a process shows no environment; one of three was missed."""
    call = [sys.executable, "-c", START_AND_LOOK]
    assert subprocess.run(call, capture_output=True, text=True, timeout=60).stdout == "0\n"


# ---- tunix-lite check: what is in order, what must be mended and how, and that nothing waits for ever


ROOT = Path(__file__).parents[1]


def test_the_command_of_the_page_runs_and_four_pretend_devices_sum(tmp_path):
    done = called(["check", "devices=4"], tmp_path)
    assert done.code == 0, done
    lines = done.out.splitlines()
    assert all(line.startswith("ok   ") for line in lines)
    assert "4 x cpu" in lines[1] and "right over 4 devices" in lines[-1]
    page = (ROOT / "docs/guide/check.md").read_text()
    assert all(f"| `{line.split()[1]}` |" in page for line in lines), "the page has a row for every line"


def test_a_sum_that_is_wrong_is_seen(monkeypatch):
    right = jax.lax.psum
    assert jax.config.jax_enable_compilation_cache
    assert check._all_reduce().startswith("right over 4 devices, ")
    assert not jax.config.jax_enable_compilation_cache, "a program of four devices is not read from disk"
    monkeypatch.setattr(jax.lax, "psum", lambda x, axis_name: right(x, axis_name) + 1)
    with pytest.raises(ValueError, match=r"11.0 where 10 is right"):
        check._all_reduce()


def test_a_device_that_hangs_is_a_line_after_the_time_out():
    began = time.monotonic()
    code = "import jax, sys, time; jax.devices = lambda: time.sleep(600)\nfrom tunix_lite.commands import check\n"
    call = [sys.executable, "-c", f"{code}sys.argv[0] = 'check'\ncheck.main()", "devices=1", "timeout=1"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert time.monotonic() - began < 60 and done.returncode == 1
    assert "FAIL devices    no answer in 1 s\n                -> end the program that holds" in done.stdout


def test_a_plugin_of_another_version_is_named(monkeypatch):
    versions = {"jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda12-plugin": "0.9.0"}
    monkeypatch.setattr(check, "installed_version", versions.get)
    with pytest.raises(ValueError, match="jaxlib 0.10.2, jax-cuda12-plugin 0.9.0: they must be of one version"):
        check._versions()
