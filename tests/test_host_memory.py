"""How glibc's heap is set up: what was freed is kept, in huge pages where Linux has them."""

import ctypes
import os
import subprocess
import sys

import pytest

from tunix_lite.distributed import host_memory

# Prints whether the pages of a block of 128 MiB are ones that Linux was asked to make huge ("hg", proc(5)).
USED = """
import ctypes, re
from tunix_lite.distributed import host_memory
assert host_memory.keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
middle = libc.malloc(128 << 20) + (64 << 20)
inside = False
for line in open("/proc/self/smaps"):
    addresses = re.match("([0-9a-f]+)-([0-9a-f]+) ", line)
    if addresses:
        inside = int(addresses[1], 16) <= middle < int(addresses[2], 16)
    elif inside and line.startswith("VmFlags"):
        print("hg" in line.split())
"""


def printed(code: str, **variables: str) -> str:
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=os.environ | variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


asks = pytest.mark.skipif(
    not host_memory.can_reserve_addresses(), reason="this system has no huge pages of 2 MiB, or counts addresses"
)


@asks
def test_what_is_allocated_lies_in_huge_pages():
    assert printed(USED) == "True"


# A block of 1.5 GiB is used and freed, and a small one stays behind it. Prints MiB in use: before, while it is kept, and
# after it was given back.
GIVEN_BACK = """
import ctypes
from tunix_lite.distributed import host_memory
def resident():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * 4096 >> 20
assert host_memory.keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
start = resident()
block = libc.malloc(1536 << 20)
ctypes.memset(block, 1, 1536 << 20)
libc.malloc(1 << 20)
libc.free(block)
kept = resident()
given = host_memory.give_back_freed_memory()
print(kept - start, given, resident() - start, host_memory.give_back_freed_memory())
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2") or sys.platform != "linux", reason="glibc before 2.33, or none"
)
def test_a_large_block_that_was_freed_is_given_back_when_asked():
    kept, was_given, after, is_given_again = printed(GIVEN_BACK).split()
    assert int(kept) > 1400 and was_given == "True"
    assert int(after) < 300 and is_given_again == "False"
