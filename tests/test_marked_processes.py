"""Processes are found by a mark in their environment, whatever they are doing."""

import subprocess
import sys

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
