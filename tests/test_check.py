"""`tunix-lite check`: what is in order, what must be mended and how, and that nothing waits for ever."""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from tunix_lite.commands import check
from tunix_lite.commands.checks import devices, machine
from tunix_lite.commands.checks.machine import CheckLine
from tunix_lite.distributed.process_place import LaunchConfig

ROOT = Path(__file__).parents[1]
SMI = """#!/bin/sh
case "$1" in
  --query-gpu=*) echo "0, NVIDIA H100 80GB HBM3, {driver}, 4, 81559"
                 echo "1, NVIDIA H100 80GB HBM3, {driver}, {used}, 81559" ;;
esac
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Writes an nvidia-smi of two GPUs, and puts it first on the PATH."""

    def write(used=4):
        file = tmp_path / "nvidia-smi"
        file.write_text(SMI.format(driver="570.86.15", used=used))
        file.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return write


def test_the_commands_of_the_page_run_and_four_pretend_devices_sum():
    words = [sys.executable, "-m", "tunix_lite", "check", "devices=4", "json=true"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240)
    found = json.loads(done.stdout)
    by_name = {line["name"]: line for line in found["lines"]}
    assert done.returncode == 0 and found["ok"], found
    assert found["facts"]["devices"] == 4 and "right over 4 devices" in by_name["all-reduce"]["text"]
    page = (ROOT / "docs/guide/check.md").read_text()
    assert all(f"`{name}`" in page for name in by_name), "the page has a row for every line"


def test_a_sum_that_is_wrong_is_seen(monkeypatch):
    right = jax.lax.psum
    assert jax.config.jax_enable_compilation_cache
    assert devices.reduce_over(jax.devices(), 4096)[1] is None
    assert not jax.config.jax_enable_compilation_cache, "a program of four devices is not read from disk"
    monkeypatch.setattr(jax.lax, "psum", lambda x, axis_name: right(x, axis_name) + 1)
    assert devices.reduce_over(jax.devices(), 4096)[1] == 4 * 5 / 2 + 1


def run_probe(tmp_path, monkeypatch, body: str, timeout: float) -> list[CheckLine]:
    """What the parent says of a probe that does `body`."""
    spoilt = SPOILT.format(body=body)
    (tmp_path / "spoilt_probe.py").write_text(spoilt)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "spoilt_probe", raising=False)
    monkeypatch.setattr(devices, "_Probe", importlib.import_module("spoilt_probe").Probe)
    shown = []
    devices.look_at_devices(LaunchConfig(), tmp_path, timeout, None, shown.append)
    return shown


SPOILT = """
import os, sys, time

class Probe:
    def __init__(self, *settings):
        pass

    def __call__(self, stage):
        if stage == "all-reduce":
            {body}
        return [], {{}}
"""


def test_a_peer_or_a_device_that_hangs_is_a_line_after_the_time_out(tmp_path, monkeypatch):
    began = time.monotonic()
    shown = run_probe(tmp_path, monkeypatch, "time.sleep(600)", timeout=1)
    assert time.monotonic() - began < 20
    assert [line.state for line in shown] == ["fails"] and "all devices sum: no answer in 1 s" in shown[0].text


def test_a_probe_that_a_library_ends_is_a_line_with_its_last_words(tmp_path, monkeypatch):
    shown = run_probe(tmp_path, monkeypatch, "print('boom \\x1b[2J', file=sys.stderr); os.abort()", timeout=30)
    assert "SIGABRT; its last words: boom" in shown[0].text
    assert "\x1b" not in str(shown[0]) and "\n                   -> NCCL_DEBUG=INFO" in str(shown[0])


# ---- GPUs, by an nvidia-smi of ours


def test_gpus_their_driver_and_what_others_use_are_read(smi):
    smi()
    num_gpus, (driver, memory) = machine.gpu_lines({})
    assert num_gpus == 2 and driver.text == "NVIDIA 570.86.15; 2 x NVIDIA H100 80GB HBM3" and memory.state == "ok"
    smi(used=40000)
    line = machine.gpu_lines({})[1][1]
    assert (line.state, line.text) == ("warns", "others use GPU 1: 39.1 of 79.6 GiB")
    assert line.fix == "CUDA_VISIBLE_DEVICES=0"
    assert machine.gpu_lines({"CUDA_VISIBLE_DEVICES": "0"})[1][1].state == "ok"


# ---- launchers


def test_a_launch_that_cannot_be_is_a_line_of_the_json(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tunix-lite check", "json=true", "launch.coordinator=nowhere:1"])
    with pytest.raises(SystemExit) as end:
        check.main()
    (line,) = json.loads(capsys.readouterr().out)["lines"]
    assert end.value.code == 1 and "launch.num_processes is missing" in line["text"]


@pytest.mark.wide
def test_processes_under_the_launcher_meet_and_each_reports():
    words = [sys.executable, "-m", "tunix_lite.launch", "--nprocs=2", "check", "devices=2"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "process       1 on" in done.stdout and "right over 4 devices" in done.stdout
    assert done.stdout.count("ok   python ") == 1
