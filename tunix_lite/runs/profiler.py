"""training.profile_communication: a table of the bytes that an update sends, and a trace of a few
steps for xprof."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax

from tunix_lite.parallel.collectives import collectives, grouped

_TABLE = "communication.md"
_TRACE = "trace"
# of this invocation; number 0 compiles, and is traced only where there is no other
_TRACED_STEPS = slice(1, 4)


class Profile:
    """Traces the first steps after the one that compiles. Without a folder it does nothing."""

    def __init__(self, folder: Path | None, num_steps: int):
        """num_steps: of this invocation."""
        self.folder = folder
        self.is_tracing = False
        self.traced = range(num_steps)[_TRACED_STEPS] or range(num_steps)

    def write_table(self, compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh) -> None:
        """Writes communication.md: the bytes that this compiled update sends over the mesh."""
        if self.folder is None:
            return
        # read from the program itself, so that it is what runs
        ops = collectives(compiled.as_text(), dict(mesh.shape))
        sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
        lines = ["# What one update sends", ""]
        lines += [f"Mesh {sizes}. Bytes are those of one device in one update.", ""]
        if not ops:
            lines.append("Nothing: no device needs what another one has.")
        else:
            lines += [
                "| kind | axis | times | buffers, MB | sent, MB |",
                "|---|---|---|---|---|",
            ]
            lines += [
                f"| {g.kind} | {g.axis} | {g.count} | {g.total_bytes / 1e6:,.2f} | "
                f"{g.sent_bytes / 1e6:,.2f} |"
                for g in grouped(ops)
            ]
        (self.folder / _TABLE).write_text("\n".join([*lines, ""]))

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around step `number` of this invocation, from 0; rollout, reference and update are all in
        the trace."""
        if self.folder is None or number not in self.traced:
            yield
            return
        if number == self.traced[0]:
            jax.profiler.start_trace(self.folder / _TRACE)
            self.is_tracing = True
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            yield
        if number == self.traced[-1]:
            self.close()

    def close(self) -> None:
        """Ends the trace, if one is open, as when a run dies while it is."""
        if self.is_tracing:
            self.is_tracing = False
            jax.profiler.stop_trace()
