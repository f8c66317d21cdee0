"""`tunix-lite launch --nprocs=4 key=value ...`: the same as `python -m tunix_lite.launch`."""

from tunix_lite.distributed.launcher import main

__all__ = ["main"]
