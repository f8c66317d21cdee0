"""The kernels that a compiled program starts on one device, by its HLO text: fusions, library
calls, copies and collectives, with their bytes, FLOPs and how often they run; and their time.

- A kernel reads each operand once and writes its result once; where a fusion slices, gathers,
  updates a slice or scatters, it is the slices that count. Aliases move no bytes.
- A library call that updates an operand in place reads all of it, and writes no more into it than
  it reads of the others. The text does not show FLOPs of a Pallas kernel: they count as 0.
- A loop counts as often as it turns, and of branches the one with most bytes. Arrays in the on-chip
  memory of a TPU cost no bytes.
- The products of experts (models/grouped.py) write into the program what they will do where all
  experts are equally likely: turns of their loops; FLOPs and bytes of their kernels.

Kernels run one after the other, and each takes as long as on its roofline:

    launch + max(FLOPs / peak, bytes / bandwidth, bytes sent / links)"""

import itertools
import math
import re
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from tunix_lite.parallel.collectives import KINDS, collectives, sent_bytes
from tunix_lite.parallel.hlo import (
    ARRAY,
    Computation,
    Instruction,
    Program,
    array_bytes,
    called,
    count_turns,
    op_name,
    parse,
    tuple_types,
)
from tunix_lite.planning.hardware import LAUNCH_SECONDS, Hardware

# Instructions that start nothing on a device.
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"}
_FREE |= {"opt-barrier", "add-dependency", "partition-id", "replica-id", "domain"}
# Calls that only mark something for the compiler.
_MARKS = {"AllocateBuffer", "AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked"}
_MARKS |= {"ConcatBitcast", "SliceBitcast", "Sharding"}
# Moved beside the kernels, by engines of their own.
_PREFETCHES = {"copy-start", "slice-start", "dynamic-slice-start"}
# What passes each element on, perhaps elsewhere.
_MOVES = {"copy", "transpose", "bitcast", "reshape", "parameter", "tuple", "get-tuple-element"}
_SLICES = {"slice", "dynamic-slice", "gather", "slice-start", "dynamic-slice-start"}
_UPDATES = {"dynamic-update-slice", "scatter"}
_TO_HOST = {"infeed", "outfeed", "send", "recv"}
_EXPECTED_TURNS = re.compile(r".*expected_turns_([\d.]+)/while")
_EXPECTED_WORK = re.compile(r"expected_flops_([\d.]+)_read_([\d.]+)")
_LAYOUT_ARRAY = re.compile(ARRAY.pattern + r"(\{[^}]*\})?")


@dataclass(frozen=True)
class Kernel:
    """One thing that a program starts on a device.
    Example: Kernel("fusion.3", "matmul", 12, 2_654_208, 73_728, 1.7e8) runs 12 times."""

    name: str
    # matmul (a fusion with a product in it), fusion, library, copy, collective, or another op;
    # prefetch: a copy that runs beside the kernels, and is none; host: a wait for the host
    kind: str
    # in one call of the program
    times: int
    # each time, from and to the memory of the device
    read_bytes: int
    written_bytes: int
    flops: float = 0.0
    # of the loops around it the turns of the innermost one; 1: it is in no loop
    turns: int = 1
    # the operation of the model that it comes from
    source: str = ""
    sent_bytes: int = 0


def kernels(text: str, mesh_shape: dict[str, int] | None = None) -> list[Kernel]:
    """Everything that one call of the program starts on a device, in the order of the text.
    mesh_shape: size by axis; None: of one device."""
    program, entry = parse(text)
    # XLA for TPU writes tilings, :T(8,128); there scalars are computed beside the kernels.
    every = _Walk(program, ":T(" in text).of_computation(entry, 1, 1)
    if mesh_shape is None or np.prod(list(mesh_shape.values())) == 1:
        return every
    # Bytes over links are read where collectives are read, and spread over their kernels.
    total = sum(sent_bytes(c) for c in collectives(text, mesh_shape))
    moved = sum(k.times * k.read_bytes for k in every if k.kind == "collective")
    # On a TPU all of them may lie within fusions, and have no kernel.
    if total and not moved:
        return [*every, Kernel("links", "collective", 1, 0, 0, sent_bytes=total)]
    return [
        replace(k, sent_bytes=int(total * k.read_bytes / moved))
        if k.kind == "collective"
        else k
        for k in every
    ]


def predicted_seconds(every: list[Kernel], hardware: Hardware) -> float:
    """Seconds of one call of the program by the machine model."""
    total = 0.0
    between = LAUNCH_SECONDS[hardware.platform]
    for kernel in every:
        if kernel.kind != "host":
            moved = (kernel.read_bytes + kernel.written_bytes) / hardware.memory_bandwidth
            sent = kernel.sent_bytes / hardware.link_bandwidth
            launch = 0.0 if kernel.kind == "prefetch" else between
            computed = kernel.flops / hardware.peak_flops
            total += kernel.times * (launch + max(computed, moved, sent))
    return total


@dataclass(frozen=True)
class _Walk:
    """Of one program."""

    program: Program
    scalars_are_free: bool

    def of_computation(self, name: str, times: int, turns: int) -> list[Kernel]:
        computation = self.program[name]
        instructions = computation.instructions.values()
        kernels = [self.of_instruction(i, computation, times, turns) for i in instructions]
        return list(itertools.chain.from_iterable(kernels))

    def of_instruction(
        self, i: Instruction, computation: Computation, times: int, turns: int
    ) -> list[Kernel]:
        # Control flow: loops count as often as they turn, of branches the one that moves most.
        callees = called(i)
        if i.op in _FREE or i.op.endswith(("-done", "-update")):
            return []
        if i.op == "while":
            # Where the turns are known, nobody asks the condition.
            body = dict(callees)["body"]
            loops = count_turns(i, dict(callees), computation, self.program)
            expected = _EXPECTED_TURNS.fullmatch(op_name(i))
            turns = loops or (float(expected[1]) if expected else 1)
            inner = self.of_computation(body, round(times * turns), round(turns))
            return inner if loops else [*inner, Kernel(i.name, "host", times, 0, 0)]
        if i.op == "conditional":
            branches = [self.of_computation(name, times, turns) for _, name in callees]
            dearest = max(
                branches,
                key=lambda one: sum(k.times * (k.read_bytes + k.written_bytes) for k in one),
            )
            return [*dearest, Kernel(i.name, "host", times, 0, 0)]
        if i.op == "call" or (i.op == "async-start" and callees):
            return [k for _, name in callees for k in self.of_computation(name, times, turns)]

        # What is no work of the device.
        target = re.search(r'custom_call_target="([^"]*)"', i.rest)
        target = target[1] if target else ""
        is_scalar = i.op != "fusion" and _elements(i.type) <= 1
        if target in _MARKS or (self.scalars_are_free and is_scalar):
            return []
        if i.op in _TO_HOST or "callback" in target:
            return [Kernel(i.name, "host", times, 0, 0, turns=turns)]

        # A kernel.
        inner = self.inner(i)
        flops = self.flops(inner) if inner else _flops(i, computation)
        kind = "matmul" if flops else i.op
        if i.op == "custom-call":
            kind = "library"
        elif i.op.removesuffix("-start") in KINDS:
            kind = "collective"
        elif i.op in _PREFETCHES:
            kind = "prefetch"
        elif i.op in ("copy", "transpose") or (
            inner and {x.op for x in inner.instructions.values()} <= _MOVES
        ):
            kind = "copy"
        read = self.read_bytes(i, computation, inner)
        written = self.written_bytes(i, computation, inner)
        if kind == "library" and (work := _EXPECTED_WORK.search(op_name(i))):
            flops, read = (round(float(number)) for number in work.groups())
        return [Kernel(i.name, kind, times, read, written, flops, turns, op_name(i))]

    def inner(self, i: Instruction) -> Computation | None:
        """The computation of a fusion."""
        return self.program[called(i)[0][1]] if i.op == "fusion" else None

    def flops(self, computation: Computation) -> float:
        total = 0.0
        for i in computation.instructions.values():
            inner = self.inner(i)
            total += self.flops(inner) if inner else _flops(i, computation)
        return total

    def read_bytes(
        self, i: Instruction, computation: Computation, inner: Computation | None
    ) -> int:
        if inner:
            by_number = self.shares_by_number(inner)
        else:
            by_number = {n: self.part(i, n, computation) for n in range(len(i.operands))}
        total = 0.0
        for number, name in enumerate(i.operands):
            if inner is None and name in i.operands[:number]:
                # A library call that takes an array several times takes parts of it.
                continue
            if name in computation.instructions:
                share = min(1.0, by_number.get(number, 0.0))
                total += share * bytes_of(computation.instructions[name].type)
        return round(total)

    def written_bytes(
        self, i: Instruction, computation: Computation, inner: Computation | None
    ) -> int:
        types = tuple_types(i.type) if i.type.startswith("(") else [i.type]
        if i.op.endswith("-start"):
            # (operands, results, ...), but for a copy, which is (result, operand, ...)
            return bytes_of(types[0 if i.op == "copy-start" or len(types) == 1 else 1])
        # A library call may update operands in place: number of the result -> of the operand.
        aliases = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", i.rest)
        if i.op == "custom-call" and aliases:
            pairs = re.findall(r"\{(\d*)\}: \((\d+),", aliases[1])
            in_place = {int(result or 0): int(operand) for result, operand in pairs}
            taken = set(i.operands) - {i.operands[n] for n in in_place.values()}
            new = sum(bytes_of(computation.instructions[name].type) for name in taken)
            return sum(
                min(bytes_of(type_), new) if n in in_place else bytes_of(type_)
                for n, type_ in enumerate(types)
            )
        results = self.results(inner) if inner else [(i, computation)]
        if len(results) != len(types):
            return bytes_of(i.type)
        total = 0
        for (result, of), type_ in zip(results, types):
            size = bytes_of(type_)
            if result.op in _UPDATES:
                # scatter(buffers, indices, updates), as many updates as buffers
                new_values = result.operands[1 if result.op != "scatter" else -1]
                if update := of.instructions.get(new_values):
                    # What lies in on-chip memory stays free, whatever is written to it.
                    size = min(size, bytes_of(update.type))
            total += size
        return total

    def results(self, computation: Computation) -> list[tuple[Instruction, Computation]]:
        """What a fusion writes: its root, or the elements of its root."""
        results = []
        pending = [computation.root]
        while pending:
            i = computation.instructions[pending.pop(0)]
            if i.op in ("tuple", "bitcast"):
                pending = [*i.operands[: None if i.op == "tuple" else 1], *pending]
            else:
                inner = self.inner(i)
                results += self.results(inner) if inner else [(i, computation)]
        return results

    def shares_by_number(self, computation: Computation) -> dict[int, float]:
        """By number of a fusion's parameter, the share of its elements that the fusion needs."""
        shares: dict[str, float] = defaultdict(float)
        shares[computation.root] = 1.0
        # from the result back: whoever reads a part of it needs a part of its operands
        for i in reversed(computation.instructions.values()):
            for number, operand in enumerate(i.operands):
                if operand in computation.instructions:
                    part = self.part(i, number, computation)
                    shares[operand] = min(1.0, shares[operand] + shares[i.name] * part)
        return {
            int(i.rest.split(")")[0]): shares[name]
            for name, i in computation.instructions.items()
            if i.op == "parameter"
        }

    def part(self, i: Instruction, number: int, computation: Computation) -> float:
        """The share of an operand that an instruction needs."""
        operand = computation.instructions.get(i.operands[number])
        if operand is None:
            return 0.0
        if number == 0 and i.op in _SLICES:
            # The type of a -start instruction is (operands, result, ...).
            result = tuple_types(i.type)[1] if i.op.endswith("-start") else i.type
            return min(1.0, _elements(result) / max(1, _elements(operand.type)))
        if number == 0 and i.op in _UPDATES:
            return 0.0
        inner = self.inner(i)
        return self.shares_by_number(inner)[number] if inner else 1.0


def bytes_of(type_: str) -> int:
    """Bytes of the arrays of a type that lie in the device's own memory: XLA for TPU writes S(n) on
    those that lie elsewhere."""
    return sum(
        array_bytes(bits, dims)
        for _, bits, dims, layout in _LAYOUT_ARRAY.findall(type_)
        if not re.search(r"S\([1-9]", layout)
    )


def _elements(type_: str) -> int:
    return sum(array_bytes("8", dims) for _, _, dims in ARRAY.findall(type_))


def _flops(i: Instruction, computation: Computation) -> float:
    """Of a product; 0 for everything else, which is small beside them."""
    if i.op != "convolution":
        # As a dot writes its contracted dims, and as a library call does.
        names = {
            "dot": r"\blhs_contracting_dims=\{([\d,]*)\}",
            "custom-call": r'"lhs_contracting_dimensions":\[([^\]]*)\]',
        }
        contracted = re.search(names[i.op], i.rest) if i.op in names else None
        if contracted is None and i.op != "dot":
            return 0.0
        left = _dims(computation.instructions[i.operands[0]].type)
        chosen = re.findall(r"\d+", contracted[1]) if contracted else []
        result = tuple_types(i.type)[0] if i.type.startswith("(") else i.type
        return 2.0 * _elements(result) * math.prod(left[int(n)] for n in chosen)

    # XLA for TPU writes every product as a convolution; a dim of both operands then is a spatial
    # one, of which only positions that meet count.
    left, right, out = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.rest).groups()
    left_dims = _dims(computation.instructions[i.operands[0]].type)
    right_dims = _dims(computation.instructions[i.operands[1]].type)
    out_dims = _dims(i.type)
    window = re.search(r"window=\{([^}]*)\}", i.rest)
    settings = dict(re.findall(r"(\w+)=(\S+)", window[1])) if window else {}

    def nth(name: str, n: int, default: int) -> int:
        """pad=1_2x0_0 has 1 and 0 at the low ends."""
        return int(settings[name].split("x")[n].split("_")[0]) if name in settings else default

    # Of each spatial dim, the pairs of an output and a kernel position that meet an element.
    pairs = 1
    for n, label in enumerate(sorted(label for label in left if label.isdigit())):
        outputs = np.arange(out_dims[out.index(label)]) * nth("stride", n, 1)
        kernel = np.arange(right_dims[right.index(label)]) * nth("rhs_dilate", n, 1)
        at = outputs[:, None] + kernel - nth("pad", n, 0)
        dilation = nth("lhs_dilate", n, 1)
        last = (left_dims[left.index(label)] - 1) * dilation
        pairs *= int(((at % dilation == 0) & (at >= 0) & (at <= last)).sum())
    groups = re.search(r"batch_group_count=(\d+)", i.rest)
    batch = left_dims[left.index("b")] // (int(groups[1]) if groups else 1)
    inputs = right_dims[right.index("i")]
    return 2.0 * pairs * batch * inputs * out_dims[out.index("f")]


def _dims(type_: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", ARRAY.search(type_)[3])]
