"""The host's memory: keep what was freed instead of giving it back to the system after every step."""

import ctypes
import sys

# glibc's names for its settings (mallopt(3))
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> bool:
    """Makes glibc reuse large blocks. Call it at the start of a program, before jax; returns whether it took effect.

    XLA's CPU backend asks for its temporaries anew in every call. By default glibc maps and unmaps them each time,
    and the page faults took a third of an update (docs/log.md, 2026-11-21). The price: the process stays at its peak.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    settings = ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, 64 << 20))
    return all([mallopt(name, value) == 1 for name, value in settings])
