"""How much memory jax takes, decided before jax starts: of a GPU, and of the host's allocator."""

import ctypes
import os
import sys

# The names of glibc's settings, with the numbers from mallopt(3).
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_MAX = -4
M_ARENA_MAX = -8

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
    """Makes glibc keep and reuse large blocks that were freed. Returns whether it took effect.

    Call it at the start of a program, before jax. XLA's CPU backend allocates its temporaries anew
    in every call. By default glibc maps and unmaps them each time, and the page faults took a third
    of an update (docs/log.md, 2026-11-21). The price: the process never gives memory back.
    """
    if not sys.platform.startswith("linux"):
        return False
    # musl, another C library, has no mallopt.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, 64 << 20))
    return all([mallopt(name, value) == 1 for name, value in settings])
