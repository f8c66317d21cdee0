"""How much memory jax takes, decided before jax starts: of a GPU, and of the host's allocator."""

import ctypes
import os
import sys
from pathlib import Path

# The names of glibc's settings, with the numbers from mallopt(3).
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_MAX = -4
M_ARENA_MAX = -8
# of madvise(2)
MADV_HUGEPAGE = 14
HUGE_PAGE = 2 << 20

# The share of a GPU's memory that a run takes, and that `tunix-lite plan` counts on.
GPU_SHARE = 0.92
# The variable that says so to jax: today's name, and the one of older versions.
FRACTION = (
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
)


def take_gpu_memory() -> None:
    """Lets jax take GPU_SHARE of each GPU's memory instead of its default, 75 %.

    A share that the user has set stays. Call it before the first device is used: jax reads the
    variable then.
    """
    if not any(name in os.environ for name in FRACTION):
        # All versions of jax read the old name.
        os.environ[FRACTION[1]] = str(GPU_SHARE)


def keep_freed_memory() -> bool:
    """Makes glibc keep and reuse large blocks that were freed, in pages of 2 MiB where Linux has
    them. Returns whether glibc took its settings.

    Call it at the start of a program, before jax. XLA's CPU backend allocates its temporaries anew
    in every call. By default glibc maps and unmaps them each time, and the page faults took a third
    of an update (docs/log.md, 2026-11-21). With pages of 4 KiB the processor searches its page
    tables for most of what a step reads. The price: the process never gives memory back.
    """
    if not sys.platform.startswith("linux"):
        return False
    # musl, another C library, has no mallopt.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, 64 << 20))
    is_set = all([mallopt(name, value) == 1 for name, value in settings])
    if is_set:
        ask_for_huge_pages(memory_of_machine() // 2)
    return is_set


def ask_for_huge_pages(size: int) -> bool:
    """Reserves addresses for `size` bytes of glibc's heap, and asks Linux for huge pages there.
    Returns whether Linux agreed.

    No memory is taken until it is used. The heap must keep what is freed (keep_freed_memory), and
    then serves later allocations from these addresses.
    """
    if _promises_are_counted():
        return False
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    block = libc.malloc(size)
    if not block:
        # a limit of the user's, such as ulimit -v
        return False
    first = -(-block // HUGE_PAGE) * HUGE_PAGE
    length = (block + size - first) // HUGE_PAGE * HUGE_PAGE
    has_agreed = length > 0 and libc.madvise(first, length, MADV_HUGEPAGE) == 0
    libc.free(block)
    return has_agreed


def memory_of_machine() -> int:
    """Bytes of memory that the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _promises_are_counted() -> bool:
    """Whether Linux counts reserved addresses as used memory (vm.overcommit_memory=2)."""
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        return True
