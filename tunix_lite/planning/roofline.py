"""What a compiled program costs one device in all, and the time that takes by a stated machine
model.

The model: kernels run one after the other, and each takes

    launch + max(FLOPs / peak, bytes / bandwidth, bytes sent / links)

with the figures of `planning.hardware`. No kernel misses its peak in it, so it is a forecast of a
well-tuned program, and no device has confirmed it yet. How kernels are counted, and what a cache
saves: `planning.kernels`.
"""

from collections import defaultdict
from dataclasses import dataclass

from tunix_lite.planning.hardware import Hardware
from tunix_lite.planning.kernels import Kernel, kernels


@dataclass(frozen=True)
class Counts:
    """All kernels of a program, or of a part of it, together.

    Example: count(kernels(text)).kernels.
    """

    kernels: float = 0
    # kernels by kind
    by_kind: dict[str, float] | None = None
    read_bytes: float = 0
    written_bytes: float = 0
    flops: float = 0
    sent_bytes: float = 0
    # times that the host must answer before the device goes on
    host_waits: float = 0

    def as_dict(self) -> dict[str, float]:
        """By name, for JSON; kinds as kernels/matmul."""
        by_kind = {f"kernels/{kind}": n for kind, n in sorted((self.by_kind or {}).items())}
        names = ("kernels", "read_bytes", "written_bytes", "flops", "sent_bytes", "host_waits")
        return {name: getattr(self, name) for name in names} | by_kind


def counts(text: str, mesh_shape: dict[str, int] | None = None) -> dict[str, float]:
    """What a program does on one device, by name, given its HLO text. mesh_shape: size by axis;
    None: of one device."""
    return count(kernels(text, mesh_shape)).as_dict()


def count(found: list[Kernel], calls: float = 1) -> Counts:
    """The kernels together. calls: what to divide by, such as the steps of a decode program."""
    by_kind: dict[str, float] = defaultdict(float)
    for kernel in found:
        by_kind[kernel.kind] += kernel.times / calls
    waits = by_kind.pop("host", 0.0)
    real = [kernel for kernel in found if kernel.kind != "host"]

    def total(name: str) -> float:
        return sum(k.times * getattr(k, name) for k in real) / calls

    return Counts(
        kernels=sum(n for kind, n in by_kind.items() if kind != "prefetch"),
        by_kind=dict(by_kind),
        read_bytes=total("read_bytes"),
        written_bytes=total("written_bytes"),
        flops=total("flops"),
        sent_bytes=total("sent_bytes"),
        host_waits=waits,
    )


def predicted_seconds(found: list[Kernel], hardware: Hardware) -> float:
    """What the machine model says that one call of the program takes."""

    def seconds(k: Kernel) -> float:
        moved = (k.read_bytes + k.written_bytes) / hardware.memory_bandwidth
        sent = k.sent_bytes / hardware.link_bandwidth
        launch = 0.0 if k.kind == "prefetch" else hardware.launch_seconds
        return launch + max(k.flops / hardware.peak_flops, moved, sent)

    return sum(k.times * seconds(k) for k in found if k.kind != "host")


def copies(found: list[Kernel], least_bytes: int, in_loop: bool = True) -> list[Kernel]:
    """The copies and transposes of at least so many bytes."""
    return [
        k
        for k in found
        if k.kind == "copy" and k.written_bytes >= least_bytes and (k.turns > 1 or not in_loop)
    ]
