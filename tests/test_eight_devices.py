"""The tests in eight_devices/ want eight pretend devices, and how many there are is fixed when jax starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.wide  # four minutes; test_mesh, test_step and test_packing have four devices
def test_what_wants_eight_devices_passes_on_them():
    environment = os.environ | {"TUNIX_LITE_TEST_DEVICES": "8", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", str(HERE / "eight_devices")]
    done = subprocess.run(command, env=environment, cwd=HERE.parent, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
