"""training.profile_communication: a table of the bytes that an update sends, and a trace of a few
steps for xprof."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax

from tunix_lite.parallel.collectives import collectives, grouped, sent_bytes

TABLE = "communication.md"
TRACE = "trace"
# of this invocation; number 0 compiles, and is traced only where there is no other
TRACED_STEPS = slice(1, 4)


def communication_table(text: str, mesh_shape: dict[str, int], program: str) -> str:
    """The collectives of a compiled program as a page in Markdown. text: its optimised HLO."""
    ops = collectives(text, mesh_shape)
    mesh = ", ".join(f"{axis}={size}" for axis, size in mesh_shape.items())
    lines = [
        f"# What one {program} sends",
        "",
        f"Mesh {mesh}. Bytes are those of one device in one {program}.",
        "",
    ]
    if not ops:
        return "\n".join([*lines, "Nothing: no device needs what another one has.", ""])
    lines += ["| kind | axis | times | buffers, MB | sent, MB |", "|---|---|---|---|---|"]
    for g in grouped(ops):
        lines.append(
            f"| {g.kind} | {g.axis} | {g.count} | {g.total_bytes / 1e6:,.2f} | "
            f"{g.sent_bytes / 1e6:,.2f} |"
        )
    lines += ["", "One by one, the largest first:", ""]
    lines += [
        "| kind | axis | times | buffer, MB | sent, MB | in a loop | shape | from |",
        "|" + "---|" * 8,
    ]
    for c in sorted(ops, key=lambda c: -c.total_bytes)[:60]:
        known = "" if c.count_known else " at least"
        cells = (
            f"{c.kind} | {c.axis} | {c.count}{known} | {c.num_bytes / 1e6:,.3f} | "
            f"{sent_bytes(c) / 1e6:,.3f} | "
            f"{'yes' if c.in_loop else 'no'} | `{c.shapes}` | `{c.source}`"
        )
        lines.append(f"| {cells} |")
    return "\n".join([*lines, ""])


class Profile:
    """Traces the first steps after the one that compiles. Without a folder it does nothing."""

    def __init__(self, folder: Path | None, num_steps: int):
        """num_steps: of this invocation."""
        self.folder = folder
        self.is_tracing = False
        self.traced = range(num_steps)[TRACED_STEPS] or range(num_steps)

    def write_table(self, compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh) -> None:
        """Writes communication.md: the bytes that this compiled update sends over the mesh."""
        if self.folder is not None:
            text = communication_table(compiled.as_text(), dict(mesh.shape), "update")
            (self.folder / TABLE).write_text(text)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around step `number` of this invocation, from 0; rollout, reference and update are all in
        the trace."""
        if self.folder is None or number not in self.traced:
            yield
            return
        if number == self.traced[0]:
            jax.profiler.start_trace(self.folder / TRACE)
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
