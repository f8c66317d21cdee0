"""What is decided before jax starts: the memory of a GPU and of the host's allocator, and that a
GPU gives the same bits every time."""

import ctypes
import importlib.util
import os
import resource
import sys
from pathlib import Path

# The names of glibc's settings, with the numbers from mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
# of madvise(2)
_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2 << 20
_HUGE_PAGE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
# Addresses that are reserved for the heap, at most. A step on a CPU that needs more is rare.
_MOST_RESERVED = 64 << 30

# Bytes that a process may have beside what it uses of the heap, between the phases of a step.
_MOST_UNUSED = 512 << 20

# The share of a GPU's memory that a run takes, and that `tunix-lite plan` counts on.
GPU_SHARE = 0.92
# The variable that says so to jax: today's name, and the one that all versions read.
_FRACTION = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")

# Without it XLA adds up gradients of an embedding in any order, and a run that was killed does not
# go on with the same bits: 2e-6 of a weight in two steps (docs/log.md, 2026-11-26).
_SAME_BITS = "--xla_gpu_exclude_nondeterministic_ops=true"


def prepare_gpu() -> None:
    """Lets jax take GPU_SHARE of each GPU's memory instead of 75 %, and makes XLA use kernels for
    NVIDIA GPUs that give the same bits every time. What the user has set stays."""
    if not any(name in os.environ for name in _FRACTION):
        os.environ[_FRACTION[1]] = str(GPU_SHARE)
    # Other compilers may not know the flag.
    has_gpu = any(
        importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)
    )
    flags = os.environ.get("XLA_FLAGS", "")
    if has_gpu and "deterministic_ops" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_SAME_BITS}".strip()


def keep_freed_memory() -> bool:
    """Makes glibc keep and reuse large blocks that were freed, in huge pages where Linux has them.
    Returns whether glibc took its settings. The price: the process never gives memory back."""
    # XLA's CPU backend allocates its temporaries anew in every call. By default glibc maps and
    # unmaps them, and the page faults took a third of an update (docs/log.md, 2026-11-21).
    if not sys.platform.startswith("linux"):
        return False
    # musl, another C library, has no mallopt.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_MAX, 0),
        (_M_TRIM_THRESHOLD, -1),
        (_M_TOP_PAD, 64 << 20),
    )
    is_set = all([mallopt(name, value) == 1 for name, value in settings])
    if is_set and _can_reserve_addresses():
        _reserve_addresses()
    return is_set


def _reserve_addresses() -> None:
    """Reserves addresses of the heap, and asks Linux for huge pages there. The heap serves later
    blocks from them. Linux gives memory when an address is first written. calloc writes all that it
    gives from here, so a large array of zeros takes its memory at once."""
    of_machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = min(of_machine // 2, _MOST_RESERVED)
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    block = libc.malloc(size)
    if block:
        first = -(-block // _HUGE_PAGE) * _HUGE_PAGE
        length = (block + size - first) // _HUGE_PAGE * _HUGE_PAGE
        if length > 0:
            libc.madvise(first, length, _MADV_HUGEPAGE)
        libc.free(block)


class _Mallinfo2(ctypes.Structure):
    """glibc's report, mallinfo(3): the eighth is bytes in use of the heap, the fifth bytes in
    mappings."""

    _fields_ = [(f"number_{i}", ctypes.c_size_t) for i in range(1, 11)]


def give_back_freed_memory(most: int = _MOST_UNUSED, keeps_addresses: bool = False) -> bool:
    """Gives Linux the memory that was freed, if glibc keeps more than `most` bytes of it. Returns
    whether it did. keeps_addresses: reserves them again, as `keep_freed_memory` does."""
    libc = ctypes.CDLL(None)
    mallinfo2 = getattr(libc, "mallinfo2", None)
    # Other C libraries, and glibc before 2.33, have no such report.
    if mallinfo2 is None:
        return False
    mallinfo2.restype = _Mallinfo2
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    report = mallinfo2()
    unused = pages * os.sysconf("SC_PAGE_SIZE") - report.number_8 - report.number_5
    if unused <= most:
        return False
    # A small array in the place of a large block would keep the next call from taking it again.
    # This gives back the reserved addresses, too. Reserved again, they made the peak of the next
    # step 0.8 GB larger (docs/log.md, 27 November 2026).
    libc.malloc_trim(0)
    if keeps_addresses and _can_reserve_addresses():
        _reserve_addresses()
    return True


def _can_reserve_addresses() -> bool:
    """Whether reserved addresses cost nothing in this process, and huge pages have 2 MiB."""
    try:
        huge_page = int(_HUGE_PAGE_FILE.read_text())
        counts_addresses = Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
        of_glibc = ctypes.CDLL("libc.so.6").malloc
    except (OSError, ValueError, AttributeError):
        return False
    limits = [
        resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    ]
    # glibc then fills every block that it gives.
    is_filled = "MALLOC_PERTURB_" in os.environ or "perturb" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
    # Another allocator, such as tcmalloc, may stand in for glibc's.
    used, own = (
        ctypes.cast(f, ctypes.c_void_p).value for f in (ctypes.CDLL(None).malloc, of_glibc)
    )
    is_free = not counts_addresses and set(limits) == {resource.RLIM_INFINITY}
    return huge_page == _HUGE_PAGE and is_free and not is_filled and used == own
