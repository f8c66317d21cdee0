"""What a compiled program communicates, read from its optimised HLO text (`compiled.as_text()`).

The compiler decides what is gathered, reduced and sent; its text is the only place that says so.
`collectives` walks it from the entry through loops, branches, fusions and calls, and lists each
collective with the mesh axis it goes over, its bytes, and how often it runs. It reads what XLA
writes for CPU, GPU and TPU.
"""

import math
import operator
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# of a loop that is played through to count its turns
MAX_TURNS = 100_000
SCALARS = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}
SCALARS |= {name: lambda x: x for name in ("copy", "bitcast", "convert")}
SCALARS |= {
    f"compare {name}": getattr(operator, name.lower())
    for name in ("LT", "LE", "GT", "GE", "EQ", "NE")
}

COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*-> .*\{$")
INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
CALLS = re.compile(r"\b(calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%[\w.-]+)")
ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,<=]*)\]")
# {{0,1},{2,3}}; {} is everybody
GROUP_LIST = re.compile(r"replica_groups=\{(.*?)\}(?=, |$)")
# [2,2]<=[2,2]T(1,0)
GROUP_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=(\S+?)(?=, |$)")
# mesh['a'=2,'b'=2] {'b'}
GROUP_MESH = re.compile(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}")


@dataclass(frozen=True)
class Collective:
    """One collective instruction of a program."""

    kind: str  # one of KINDS
    axis: str  # of the mesh: "fsdp", "tp", "fsdp+tp"; "other" if its groups are not along axes
    count: int  # how often it runs in one call of the program
    # of the whole buffer on one device, each time: what is gathered, or is about to be reduced
    num_bytes: int
    shapes: str  # "bf16[1152,6912]"; where there are several, one collective carries them all
    in_loop: bool
    source: str  # the operation it comes from, as far as the text says
    group_size: int  # devices that take part together
    # False: in a loop whose turns cannot be read (taken as one), or in a branch (as taken)
    count_known: bool = True

    @property
    def total_bytes(self) -> int:
        return self.count * self.num_bytes


@dataclass(frozen=True)
class CollectiveTotal:
    """All collectives of one kind over one axis."""

    kind: str
    axis: str
    count: int
    total_bytes: int
    sent_bytes: int
    count_known: bool


def collectives(text: str, mesh_shape: dict[str, int]) -> list[Collective]:
    """Every collective of the program, in the order in which the walk comes to it.

    Raises ValueError if the program is for another number of devices than the mesh has.
    """
    partitions = re.match(r"HloModule .*\bnum_partitions=(\d+)", text)
    if partitions and int(partitions[1]) != math.prod(mesh_shape.values()):
        raise ValueError(
            f"the program is for {partitions[1]} devices, but the mesh is {mesh_shape}"
        )
    program, entry = parse(text)
    found: list[Collective] = []

    def visit(name: str, site: CallSite) -> None:
        for instruction in program[name].instructions.values():
            if instruction.op.removesuffix("-start") in KINDS:
                found.extend(read_collective(instruction, program[name], site, mesh_shape))
            # they name what async-start has called
            elif instruction.op not in (
                "async-update",
                "async-done",
            ):
                for callee, there in callees_of(instruction, program[name], site, program):
                    visit(callee, there)

    visit(entry, CallSite())
    return found


def grouped(found: list[Collective]) -> list[CollectiveTotal]:
    """Summed by kind and axis, and apart where the count is not known; most bytes first."""
    groups = defaultdict(list)
    for c in found:
        groups[c.kind, c.axis, c.count_known].append(c)
    sums = []
    for (*key, known), cs in groups.items():
        count, total, sent = (
            sum(numbers) for numbers in zip(*((c.count, c.total_bytes, sent_bytes(c)) for c in cs))
        )
        sums.append(CollectiveTotal(*key, count, total, sent, known))
    return sorted(sums, key=lambda group: -group.total_bytes)


def sent_bytes(c: Collective, axis_size: int | None = None) -> int:
    """What one device sends, all runs together, where the devices form a ring."""
    n = axis_size or c.group_size
    # n-th parts of the buffer
    parts = {"all-reduce": 2 * (n - 1), "collective-permute": n}
    return c.total_bytes * parts.get(c.kind, n - 1) // n


# ---- the walk


@dataclass(frozen=True)
class Instruction:
    name: str
    type: str
    op: str
    operands: list[str]
    rest: str  # of the line, from the operands on


@dataclass
class Computation:
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""


@dataclass(frozen=True)
class CallSite:
    """What is known of a computation from its callers."""

    times: int = 1
    count_known: bool = True
    in_loop: bool = False
    fused: bool = False
    source: str = ""
    # split collectives that this loop body (branch, entry) has shown
    chains: set[str] = field(default_factory=set)


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """The computations by name, and the name of the entry."""
    program, entry, current = {}, "", Computation()
    for line in text.splitlines():
        if match := INSTRUCTION.match(line):
            root, name, type_, op, rest = match.groups()
            operands = re.findall(r"%([\w.-]+)", rest.split("), ")[0])
            current.instructions[name] = Instruction(name, type_, op, operands, rest)
            current.root = name if root else current.root
        elif match := COMPUTATION.match(line):
            current = program[match[2]] = Computation()
            entry = match[2] if match[1] else entry
    return program, entry


def callees_of(instruction: Instruction, caller: Computation, site: CallSite, program):
    """The computations that an instruction runs, each with the site it stands at."""
    calls = CALLS.findall(instruction.rest)
    callees = [(key, name) for key, names in calls for name in re.findall(r"%([\w.-]+)", names)]
    site = replace(
        site, fused=instruction.op == "fusion", source=op_name(instruction) or site.source
    )
    if not site.fused:
        site = replace(
            site, chains=set(), count_known=site.count_known and instruction.op != "conditional"
        )
    if instruction.op != "while":
        yield from ((callee, site) for _, callee in callees)
        return
    turns = count_turns(instruction, dict(callees), caller, program)
    for key, callee in callees:
        # asked once more than the body runs
        runs = 1 if turns is None else turns + (key == "condition")
        known = site.count_known and turns is not None
        yield callee, replace(site, times=site.times * runs, count_known=known, in_loop=True)


def read_collective(
    instruction: Instruction, computation: Computation, site: CallSite, mesh_shape
) -> list[Collective]:
    """The collective that an instruction is; none where a device is alone, or where it has been
    seen before."""
    kind = instruction.op.removesuffix("-start")
    axis, size = axis_of(instruction.rest, mesh_shape)
    # TPU spreads a collective over several fusions, to hide it behind their work. Each shows it,
    # with its chain's name.
    chain = re.search(r'chain_id="[^"]*"', instruction.rest)
    if size == 1 or (chain and chain[0] in site.chains):
        return []
    if chain:
        site.chains.add(chain[0])
    if kind == "all-reduce" and site.fused and is_sliced(instruction, computation):
        # how TPU writes it: no device ever holds the whole sum
        kind = "reduce-scatter"
    arrays = ARRAY.findall(buffer(instruction, kind, computation))
    num_bytes = sum(array_bytes(bits, dims) for _, bits, dims in arrays)
    shapes = ", ".join(f"{dtype}[{dims}]" for dtype, _, dims in arrays)
    source = short(op_name(instruction) or site.source)
    return [
        Collective(
            kind,
            axis,
            site.times,
            num_bytes,
            shapes,
            site.in_loop,
            source,
            size,
            site.count_known,
        )
    ]


def is_sliced(reduced: Instruction, computation: Computation) -> bool:
    """Whether each device goes on with a slice of the result."""
    names = {reduced.name}
    for instruction in computation.instructions.values():
        if names & set(instruction.operands[:1]):
            if instruction.op == "dynamic-slice":
                return True
            if instruction.op in ("get-tuple-element", "bitcast", "copy"):
                names.add(instruction.name)
    return False


def buffer(instruction: Instruction, kind: str, computation: Computation) -> str:
    """The type of the whole buffer. What starts a collective has (operands, results, ...) as its
    type."""
    if (
        kind in ("all-gather", "all-to-all", "reduce-scatter", "collective-permute")
        and "-start" in instruction.op
    ):
        return tuple_types(instruction.type)[kind in ("all-gather", "all-to-all")]
    if instruction.op == "reduce-scatter":
        return " ".join(computation.instructions[name].type for name in instruction.operands)
    return instruction.type


def tuple_types(type_: str) -> list[str]:
    """The types in a tuple's."""
    parts, depth = [""], 0
    for c in type_[1:-1]:
        depth += (c in "([{") - (c in ")]}")
        parts = [*parts, ""] if c == "," and depth == 0 else [*parts[:-1], parts[-1] + c]
    return parts


def array_bytes(bits: str, dims: str) -> int:
    size = math.prod(int(n) for n in re.findall(r"\d+", dims))
    # pred has no number in its name
    return -(-size * int(bits or 8) // 8)


def op_name(instruction: Instruction) -> str:
    match = re.search(r'op_name="([^"]*)"', instruction.rest)
    return match[1] if match else ""


def short(name: str) -> str:
    """Without jit(main) and the loops around it, which the reader knows."""
    parts = name.split("/")
    return "/".join(
        part for part in parts[len(parts) > 1 :] if part not in ("while", "body", "closed_call")
    )


# ---- loops: TPU's text does not say how often one turns, so its counter is played through


def count_turns(
    loop: Instruction, callees: dict[str, str], caller: Computation, program
) -> int | None:
    """How often the body runs; None if the text does not tell, as when the data decides."""
    if told := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(told[1])
    state = value(loop.operands[0], caller, program, [])
    condition, body = program[callees["condition"]], program[callees["body"]]
    for turn in range(MAX_TURNS):
        goes_on = value(condition.root, condition, program, [state])
        if not goes_on:
            return None if goes_on is None else turn
        state = value(body.root, body, program, [state])
    return None


def value(name: str, computation: Computation, program, args: list):
    """The whole number that an instruction makes (a list, of a tuple); None for all that the text
    does not tell."""
    known: dict = {}

    def of(name: str):
        if name not in known:
            known[name] = work(computation.instructions[name])
        return known[name]

    def work(i: Instruction):
        literal = i.rest.split(")")[0]
        if not re.match(r"\(|(pred|[su]\d+)\[\]", i.type):
            return None
        if i.op == "parameter":
            return args[int(literal)] if args else None
        if i.op == "constant":
            return {"true": 1, "false": 0}.get(literal) if literal.isalpha() else int(literal)
        values = [of(operand) for operand in i.operands]
        if i.op == "tuple":
            return values
        if i.op == "get-tuple-element":
            return values[0] and values[0][int(re.search(r"index=(\d+)", i.rest)[1])]
        if i.op == "fusion":
            inner = program[re.search(r"calls=%([\w.-]+)", i.rest)[1]]
            return value(inner.root, inner, program, values)
        direction = re.search(r" direction=(\w+)", i.rest)
        work = SCALARS.get(f"{i.op} {direction[1]}" if direction else i.op)
        return work(*values) if work and None not in values else None

    return of(name)


# ---- groups: who talks to whom. Ids count the devices of the mesh, last axis fastest


def axis_of(rest: str, mesh_shape: dict[str, int]) -> tuple[str, int]:
    """The axis of the mesh that a collective goes over, and how many devices stand along it."""
    sizes = tuple(mesh_shape.values())
    coords = np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes), -1)
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", rest)
    groups = id_lists(pairs[1]) if pairs else replica_groups(rest, len(coords))
    crossed = [tuple(np.ptp(coords[group], axis=0) > 0) for group in groups]
    # an axis counts if any pair goes along it
    if pairs:
        crossed = [tuple(np.any(crossed, axis=0))]
    size = math.prod(n for n, is_crossed in zip(sizes, crossed[0]) if is_crossed)
    axis = "+".join(name for name, is_crossed in zip(mesh_shape, crossed[0]) if is_crossed)
    if len(set(crossed)) == 1 and (pairs or {len(group) for group in groups} == {size}):
        return axis, size
    return "other", max(len(group) for group in groups)


def replica_groups(rest: str, num_devices: int) -> list[list[int]]:
    if match := GROUP_MESH.search(rest):
        sizes = [int(n) for n in re.findall(r"=(\d+)", match[1])]
        ids = permuted(match[2]) if match[2] else list(range(num_devices))
        names = re.findall(r"([^,=]+)=", match[1])
        keys = np.stack(np.unravel_index(np.arange(len(ids)), sizes), -1)
        for name, before, part in re.findall(r"([^,:]+)(?::\((\d+)\)(\d+))?", match[3]):
            # 'a':(2)3 is the part of size 3 of an axis, after one of size 2
            axis = names.index(name)
            inner = sizes[axis] // (int(before) * int(part)) if part else 1
            keys[:, axis] -= keys[:, axis] // inner % int(part or sizes[axis]) * inner
        groups = defaultdict(list)
        for device, key in zip(ids, keys.tolist()):
            groups[tuple(key)].append(device)
        return list(groups.values())
    if match := GROUP_IOTA.search(rest):
        return np.reshape(permuted(match[2]), [int(n) for n in match[1].split(",")]).tolist()
    match = GROUP_LIST.search(rest)
    return id_lists(match[1] if match else "") or [list(range(num_devices))]


def permuted(text: str) -> list[int]:
    """[2,2]T(1,0) is 0,2,1,3: device ids counted up, laid out in that shape and transposed."""
    shape, *order = ([int(n) for n in part.split(",")] for part in re.findall(r"[\d,]+", text))
    if not text.startswith("["):
        return shape
    return np.arange(math.prod(shape)).reshape(shape).transpose(*order).ravel().tolist()


def id_lists(text: str) -> list[list[int]]:
    return [[int(n) for n in part.split(",")] for part in re.findall(r"\d[\d,]*", text)]
