"""What benchmarks/profile.py does: the seconds of a GRPO step by class of operation."""

import argparse
import collections
import itertools
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path

import arguments
import grpo_step
import jax

from tunix_lite.models import decoder
from tunix_lite.parallel.hlo import Computation, Instruction, Program, called, parse
from tunix_lite.planning.kernels import Kernel, kernels

# A class, and operations of HLO that only its kernels hold; the first that fits counts.
BY_OPERATION = {
    "sampling": {"sort", "rng-bit-generator", "shift-right-logical", "xor", "topk"},
    "attention, but its products": {"exponential"},
    "activation": {"tanh", "logistic", "erf"},
    "norms": {"rsqrt"},
}
# The class of kernels that hold only MOVES.
COPIES = "copies, slices, transposes"
MOVES = {
    "slice",
    "dynamic-slice",
    "dynamic-update-slice",
    "concatenate",
    "pad",
    "broadcast",
    "gather",
    "scatter",
    "iota",
}
MOVES |= {"copy", "transpose", "bitcast", "reshape", "parameter", "constant", "tuple", "get-tuple-element", "reverse"}


@dataclass
class Operation:
    """What one operation of a program took in one run of a phase."""

    program: str
    kernel: Kernel
    label: str  # the class
    shape: str  # of a product, or of the result
    seconds: float
    times: float

    @property
    def flops(self) -> float:
        return self.kernel.flops * self.times

    @property
    def moved_bytes(self) -> float:
        return (self.kernel.read_bytes + self.kernel.written_bytes) * self.times


def main() -> None:
    parser = argparse.ArgumentParser(description="Where the seconds of a GRPO step go, by class of operation.")
    parser.add_argument("--packing", choices=["none", "prefix"], default="none", help="prefix shares prompts")
    parser.add_argument("--remat", choices=decoder.REMAT, default="none", help="what the update computes again")
    parser.add_argument("--unroll", action="store_true", help="training.scan_layers=false")
    parser.add_argument("--repeats", type=arguments.count, default=5, help="runs of each phase")
    parser.add_argument("--rows", type=arguments.count, default=30, help="of the table of slowest operations")
    parser.add_argument("--threads", type=int, choices=[1], help="1: one thread computes; without it all do")
    parser.add_argument("--out", type=arguments.new_file, help="a file that gets the tables, too")
    args = parser.parse_args()
    # XLA writes the text of each program that it compiles into a folder.
    with tempfile.TemporaryDirectory(prefix="tunix_lite_profile_") as dump:
        flags = [os.environ.get("XLA_FLAGS", ""), f"--xla_dump_to={dump}", "--xla_dump_hlo_as_text"]
        flags += ["--xla_cpu_multi_thread_eigen=false"] if args.threads == 1 else []
        os.environ["XLA_FLAGS"] = " ".join(flags)
        text = "\n".join(tables(args, Path(dump)))
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


def tables(args: argparse.Namespace, dump: Path) -> list[str]:
    """Runs the phases, and returns their tables."""
    work = grpo_step.FixedWork.make(args.packing, args.remat, scan_layers=not args.unroll)
    batch = work.reference(work.judged(work.rollout(0)))
    work.update(batch)
    phases: dict[str, Callable[[int], object]] = {
        "rollout": lambda step: work.rollout(step + 1),
        "reference": lambda step: work.reference(batch),
        "update": lambda step: work.update(batch),
    }
    # Before and after, the better one: on a busy machine one moment says little.
    peak = grpo_step.matmul_peak()
    timed = [(name, *traced(run, args.repeats)) for name, run in phases.items()]
    peak = max(peak, grpo_step.matmul_peak())
    device = jax.devices()[0].device_kind
    setting = f"packing={args.packing} remat={args.remat} scan_layers={not args.unroll}"
    lines = [f"Matmul peak {peak:,.0f} GFLOP/s; {setting}; jax {jax.__version__}; {device}.", ""]
    found = []
    for name, wall, spans in timed:
        operations = [*found_operations(spans, dump, args.repeats)]
        lines += [*table_of_classes(name, wall, operations, peak), ""]
        found += [(name, operation) for operation in operations]
    lines += [*table_of_programs(found, peak), ""]
    return lines + table_of_operations(found, peak, args.rows)


# ---- when each operation ran, from the trace


@dataclass(frozen=True)
class Span:
    """One run of an operation, in nanoseconds. goes_on: whether it ended after its event."""

    began: float
    ended: float
    goes_on: bool


Spans = dict[tuple[str, str], list[Span]]  # by (program, operation)


def traced(run: Callable[[int], object], repeats: int) -> tuple[float, Spans]:
    """Seconds of one run, and when its operations ran; of all repeats."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            began = time.perf_counter()
            for step in range(repeats):
                run(step)
            wall = (time.perf_counter() - began) / repeats
        file = next(Path(folder).rglob("*.xplane.pb"))
        return wall, spans_of(jax.profiler.ProfileData.from_file(str(file)))


def spans_of(data: jax.profiler.ProfileData) -> Spans:
    """When each operation ran.

    On a CPU an operation may go on after its event: then there is another event, `end: NAME`, that points to it. It
    counts in the thread of the operation. In another thread it often comes long after other operations have read the
    result, but for copies, of which no other end is known.
    """
    began: dict[int, tuple[float, tuple[str, str], float, object]] = {}
    ended: dict[int, tuple[float, object]] = {}
    found = collections.defaultdict(list)
    lines = enumerate(line for plane in data.planes for line in plane.lines)
    events = ((thread, event) for thread, line in lines for event in line.events)
    for number, (thread, event) in enumerate(events):
        stats = dict(event.stats)
        if "hlo_op" in stats and "hlo_module" in stats:
            key = (str(stats["hlo_module"]), str(stats["hlo_op"]))
            began[stats.get("_p", -number)] = (event.start_ns, key, event.start_ns + event.duration_ns, thread)
        elif event.name.startswith("end: ") and "_c" in stats:
            ended[stats["_c"]] = (event.start_ns, thread)
    for number, (start, key, end_of_event, thread) in began.items():
        end, thread_of_end = ended.get(number, (end_of_event, thread))
        if thread_of_end != thread and not key[1].startswith("copy"):
            end = end_of_event
        found[key].append(Span(start, max(end, end_of_event), goes_on=end > end_of_event))
    return found


def seconds_by_operation(spans: dict[Hashable, list[Span]], copies: set[Hashable]) -> dict[Hashable, float]:
    """The seconds of each operation, by key. Their sum is the time in which any of them ran.

    Where several run at the same time, each gets an equal part of it. A copy that goes on after its event may only wait
    for a thread. So it gets the time in which no other operation runs.
    """
    edges = []
    for key, of_key in spans.items():
        for number, span in enumerate(of_key):
            is_copy = key in copies and span.goes_on
            edges += [(span.began, 1, key, number, is_copy), (span.ended, 0, key, number, is_copy)]
    # A span may have no length. So at one moment what begins comes first.
    edges.sort(key=lambda edge: (edge[0], not edge[1]))
    found = dict.fromkeys(spans, 0.0)
    running: dict[bool, set] = {False: set(), True: set()}
    for (moment, begins, key, number, is_copy), (following, *_) in itertools.pairwise(edges):
        (running[is_copy].add if begins else running[is_copy].discard)((key, number))
        counted = running[False] or running[True]
        for of_key, _ in counted:
            found[of_key] += (following - moment) / len(counted) / 1e9
    return found


# ---- what each operation is, from the text of its program


def found_operations(spans: Spans, dump: Path, repeats: int) -> Iterator[Operation]:
    """The operations of a phase; loops and calls, which only hold others, are left out. dump: texts of the programs."""
    by_program = collections.defaultdict(set)
    for program, name in spans:
        by_program[program].add(name)
    described_by_key = {}
    for program, names in by_program.items():
        text = text_of(dump, program, names)
        instructions, _ = parse(text)
        known = {kernel.name: kernel for kernel in kernels(text)}
        for name in names & set(known):
            described_by_key[program, name] = known[name], *described(instructions, name, known[name])
    copies = {key for key, (_, label, _) in described_by_key.items() if label == COPIES}
    seconds = seconds_by_operation({key: spans[key] for key in described_by_key}, copies)
    for (program, name), (kernel, label, shape) in described_by_key.items():
        of_all_repeats = seconds[program, name]
        yield Operation(program, kernel, label, shape, of_all_repeats / repeats, len(spans[program, name]) / repeats)


def text_of(dump: Path, program: str, names: set[str]) -> str:
    """The text of the compiled program of this name that has these operations."""
    texts = [file.read_text() for file in sorted(dump.glob(f"*.{program}.*after_optimizations.txt"))]
    if not texts:
        sys.exit(f"XLA has written no text of {program} to {dump}")
    return max(texts, key=lambda text: sum(f"%{name} = " in text for name in names))


def described(program: Program, name: str, kernel: Kernel) -> tuple[str, str]:
    """The class of an operation, and its shape."""
    home = next(c for c in program.values() if name in c.instructions)
    instruction = home.instructions[name]
    inner = [*inside(program, instruction)]
    operations = {i.op for _, i in inner}
    products = [(c, i) for c, i in inner if i.op == "dot"]
    if products:
        is_attention = all("lhs_batch_dims={0" in i.rest for _, i in products)
        shapes = dict.fromkeys(product_shape(c, i) for c, i in products)
        return ("attention, its products" if is_attention else "matmul"), " and ".join(shapes)
    shape = dims(instruction.type)
    if kernel.kind == "collective":
        return "collectives", shape
    label = next((label for label, only in BY_OPERATION.items() if operations & only), None)
    if label is None:
        label = COPIES if operations <= MOVES else "other elementwise and sums"
    return label, shape


def inside(program: Program, instruction: Instruction) -> Iterator[tuple[Computation, Instruction]]:
    """The instructions of a fusion and of the fusions in it; of others the instruction itself."""
    if instruction.op != "fusion":
        home = next(c for c in program.values() if instruction.name in c.instructions)
        yield home, instruction
        return
    computation = program[called(instruction)[0][1]]
    for each in computation.instructions.values():
        if each.op == "fusion":
            yield from inside(program, each)
        else:
            yield computation, each


def dims(type_: str) -> str:
    """`64x1024` of `f32[64,1024]{1,0}`."""
    found = re.search(r"\[([\d,]*)\]", type_)
    return found[1].replace(",", "x") if found else ""


def product_shape(computation: Computation, dot: Instruction) -> str:
    left, right = (dims(computation.instructions[name].type) for name in dot.operands[:2])
    return f"{left} · {right} -> {dims(dot.type)}"


# ---- tables


def ratio(amount: float, of: float) -> float:
    """0 where nothing is divided by nothing: a copy that only waited has no seconds."""
    return amount / of if of else 0.0


def table_of_classes(phase: str, wall: float, operations: list[Operation], peak: float) -> list[str]:
    """The classes of a phase, the slowest first, and what is left for the host."""
    sums = collections.defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    for each in operations:
        for i, value in enumerate((each.seconds, each.flops, each.moved_bytes, each.times)):
            sums[each.label][i] += value
    lines = [f"| {phase}: {wall:.3f} s a run | s | share | runs | GFLOP | GFLOP/s | of the peak | GB moved |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    busy = sum(seconds for seconds, *_ in sums.values())
    for label, (seconds, flops, moved, times) in sorted(sums.items(), key=lambda item: -item[1][0]):
        rate = ratio(flops, seconds) / 1e9
        lines.append(
            f"| {label} | {seconds:.4f} | {ratio(seconds, busy):.1%} | {times:,.0f} | {flops / 1e9:.1f} | "
            f"{rate:,.0f} | {rate / peak:.0%} | {moved / 1e9:.2f} |"
        )
    flops = sum(each.flops for each in operations)
    lines.append(
        f"| while any operation runs | {busy:.4f} | | | {flops / 1e9:.1f} | {ratio(flops, busy) / 1e9:,.0f} | "
        f"{ratio(flops, busy) / 1e9 / peak:.0%} | |"
    )
    lines.append(f"| the phase | {wall:.4f} | | | | {flops / wall / 1e9:,.0f} | {flops / wall / 1e9 / peak:.0%} | |")
    return lines


def table_of_programs(found: list[tuple[str, Operation]], peak: float) -> list[str]:
    """The operations of each program together, such as prefill and decode of a rollout."""
    sums = collections.defaultdict(lambda: [0.0, 0.0, 0.0])
    for phase, each in found:
        for i, value in enumerate((each.seconds, each.flops, each.moved_bytes)):
            sums[phase, each.program][i] += value
    lines = ["| phase | program | s | GFLOP | GFLOP/s | of the peak | GB moved |", "|---|---|---|---|---|---|---|"]
    for (phase, program), (seconds, flops, moved) in sorted(sums.items(), key=lambda item: -item[1][0]):
        rate = ratio(flops, seconds) / 1e9
        lines.append(
            f"| {phase} | {program.removeprefix('jit_')} | {seconds:.4f} | {flops / 1e9:.1f} | {rate:,.0f} | "
            f"{rate / peak:.0%} | {moved / 1e9:.2f} |"
        )
    return lines


def table_of_operations(found: list[tuple[str, Operation]], peak: float, most: int) -> list[str]:
    """The slowest operations of all phases; those of one shape are one row."""
    rows = collections.defaultdict(list)
    for phase, each in found:
        rows[phase, each.label, each.shape].append(each)
    ranked = sorted(rows.items(), key=lambda item: -sum(each.seconds for each in item[1]))
    lines = [
        "| phase | class | shape | ms | runs | GFLOP/s | of the peak | GB/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (phase, label, shape), group in ranked[:most]:
        seconds, times = sum(each.seconds for each in group), sum(each.times for each in group)
        rate = ratio(sum(each.flops for each in group), seconds) / 1e9
        moved = ratio(sum(each.moved_bytes for each in group), seconds) / 1e9
        lines.append(
            f"| {phase} | {label} | {shape} | {1000 * seconds:.1f} | {times:,.0f} | {rate:,.0f} | "
            f"{rate / peak:.0%} | {moved:,.1f} |"
        )
    return lines
