"""How glibc's heap is set up: what was freed is kept, in huge pages where Linux has them."""

import subprocess
import sys
from pathlib import Path

import pytest

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MIB = 1 << 20

USED = """
import ctypes
from tunix_lite.distributed import host_memory
assert host_memory.keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
block = libc.malloc(128 << 20)
ctypes.memset(block, 1, 128 << 20)
lines = open("/proc/self/smaps_rollup").read().splitlines()
print({line.split(":")[0]: int(line.split()[1]) << 10 for line in lines[1:]}["AnonHugePages"])
"""

LIMITED = """
import resource
from tunix_lite.distributed import host_memory
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
assert not host_memory.ask_for_huge_pages(2 << 30)
bytearray(64 << 20)
print("goes on")
"""


def printed(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text() or not sys.platform.startswith("linux"),
    reason="Linux gives no huge pages here",
)
def test_what_is_allocated_lies_in_huge_pages():
    assert int(printed(USED)) >= 120 * MIB


def test_a_limit_of_addresses_is_no_error():
    assert printed(LIMITED) == "goes on"
