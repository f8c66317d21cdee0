"""`tunix-lite check`: what is in order, what must be mended and how, and that nothing waits for ever."""

import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from tunix_lite.commands import check

ROOT = Path(__file__).parents[1]


def run(*words: str, before: str = "pass") -> subprocess.CompletedProcess:
    """The command in a process of its own, which it ends."""
    code = f"{before}\nfrom tunix_lite.commands import check\nimport sys\nsys.argv[0] = 'check'\ncheck.main()"
    call = [sys.executable, "-c", code, *words]
    return subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_the_command_of_the_page_runs_and_four_pretend_devices_sum():
    done = run("devices=4")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert all(line.startswith("ok   ") for line in lines)
    assert "4 x cpu" in lines[1] and "right over 4 devices" in lines[-1]
    page = (ROOT / "docs/guide/check.md").read_text()
    assert all(f"| `{line.split()[1]}` |" in page for line in lines), "the page has a row for every line"


def test_a_sum_that_is_wrong_is_seen(monkeypatch):
    right = jax.lax.psum
    assert jax.config.jax_enable_compilation_cache
    assert check.reduce_over(jax.devices(), 4096)[1] is None
    assert not jax.config.jax_enable_compilation_cache, "a program of four devices is not read from disk"
    monkeypatch.setattr(jax.lax, "psum", lambda x, axis_name: right(x, axis_name) + 1)
    assert check.reduce_over(jax.devices(), 4096)[1] == 4 * 5 / 2 + 1


def test_a_device_that_hangs_is_a_line_after_the_time_out():
    began = time.monotonic()
    done = run("devices=1", "timeout=1", before="import jax, time; jax.devices = lambda: time.sleep(600)")
    assert time.monotonic() - began < 60 and done.returncode == 1
    assert "FAIL devices    no answer in 1 s\n                -> end the program that holds" in done.stdout


def test_a_plugin_of_another_version_is_named(monkeypatch):
    versions = {"jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda12-plugin": "0.9.0"}
    monkeypatch.setattr(check, "installed_version", versions.get)
    with pytest.raises(ValueError, match="jaxlib 0.10.2, jax-cuda12-plugin 0.9.0: they must be of one version"):
        check._versions()


@pytest.mark.wide
def test_processes_under_the_launcher_meet():
    words = [sys.executable, "-m", "tunix_lite.launch", "--nprocs=2", "check", "devices=2"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 met in " in done.stdout and "right over 4 devices" in done.stdout
    assert done.stdout.count("ok   versions") == 1
