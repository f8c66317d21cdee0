"""Memory, before jax starts: what the host's programs free is kept, and of a GPU's nearly all is
taken."""

import ctypes
import os
import sys

# glibc's names for its settings (mallopt(3))
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8

# of a GPU's memory for programs: what `tunix-lite plan` counts on, and a run asks for
GPU_SHARE = 0.92
# its name, and the one it had
FRACTION = (
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
)


def take_gpu_memory() -> None:
    """Lets jax have GPU_SHARE of each GPU, of which it takes 75 % by default. Whatever the user has
    set stays.

    Call it before the first device is used: that is when jax looks.
    """
    if not any(name in os.environ for name in FRACTION):
        # the old name: older versions of jax know only that
        os.environ[FRACTION[1]] = str(GPU_SHARE)


def keep_freed_memory() -> bool:
    """Makes glibc reuse large blocks. Call it at the start of a program, before jax; returns
    whether it took effect.

    XLA's CPU backend asks for its temporaries anew in every call. By default glibc maps and unmaps
    them each time, and the page faults took a third of an update (docs/log.md, 2026-11-21). The
    price: the process stays at its peak.
    """
    if not sys.platform.startswith("linux"):
        return False
    # musl has none
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, 64 << 20))
    return all([mallopt(name, value) == 1 for name, value in settings])
