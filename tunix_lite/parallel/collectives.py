"""Lists the communication of a compiled program, from its optimised HLO text
(`compiled.as_text()`)."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from tunix_lite.parallel.hlo import (
    ARRAY,
    Computation,
    Instruction,
    Program,
    array_bytes,
    called,
    count_turns,
    parse,
    tuple_types,
)

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# {{0,1},{2,3}}; {} is all devices
_GROUP_LIST = re.compile(r"replica_groups=\{(.*?)\}(?=, |$)")
# [2,2]<=[2,2]T(1,0)
_GROUP_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=(\S+?)(?=, |$)")
# mesh['a'=2,'b'=2] {'b'}
_GROUP_MESH = re.compile(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}")


@dataclass(frozen=True)
class _Collective:
    """One collective instruction of a program."""

    kind: str  # one of KINDS
    axis: str  # mesh axis: "fsdp", "tp", "fsdp+tp"; "other" if its groups are not along axes
    count: int  # how often it runs in one call of the program
    # the whole buffer on one device, each time: the gathered result, or the input of a reduction
    num_bytes: int
    shapes: str  # "bf16[1152,6912]"; several, if one collective carries several arrays
    in_loop: bool
    group_size: int  # devices that take part together
    # False: it is in a loop whose turns cannot be read (counted as one turn), or in a branch
    # (of several that which sends most is counted)
    count_known: bool = True

    @property
    def total_bytes(self) -> int:
        """Bytes of all runs together."""
        return self.count * self.num_bytes


@dataclass(frozen=True)
class CollectiveTotal:
    """All collectives of one kind over one axis, in one call of the program.
    Example: CollectiveTotal("all-gather", "fsdp", 12, 4_800, 3_600, True) on 4 shards."""

    kind: str
    axis: str
    count: int
    total_bytes: int
    sent_bytes: int  # bytes that one device sends
    count_known: bool


def collectives(text: str, mesh_shape: dict[str, int]) -> list[_Collective]:
    """Every collective of the program, in the order of a walk from its entry. mesh_shape: size by
    axis, first axis first. Raises ValueError if the program is for another number of devices."""
    partitions = re.match(r"HloModule .*\bnum_partitions=(\d+)", text)
    if partitions and int(partitions[1]) != math.prod(mesh_shape.values()):
        raise ValueError(
            f"the program is for {partitions[1]} devices, but the mesh is {mesh_shape}"
        )
    program, entry = parse(text)

    def of_computation(name: str, site: CallSite) -> list[_Collective]:
        ops = []
        for instruction in program[name].instructions.values():
            if instruction.op.removesuffix("-start") in KINDS:
                one = _read_collective(instruction, program[name], site, mesh_shape)
                ops += [] if one is None else [one]
            # These two name again what async-start has called.
            elif instruction.op not in ("async-update", "async-done"):
                callees = callees_of(instruction, program[name], site, program)
                of_callees = [of_computation(*callee) for callee in callees]
                # of branches one runs: the one that sends most is counted
                if instruction.op == "conditional":
                    of_callees = [max(of_callees, key=_sent, default=[])]
                for of_callee in of_callees:
                    ops += of_callee
        return ops

    return of_computation(entry, CallSite())


def _sent(ops: list[_Collective]) -> int:
    return sum(map(sent_bytes, ops))


def grouped(ops: list[_Collective]) -> list[CollectiveTotal]:
    """Sums by kind and axis, separately where the count is not known; most bytes first."""
    # Whole numbers of Python, which stay exact at any size.
    sums: dict[tuple, np.ndarray] = defaultdict(lambda: np.zeros(3, object))
    for c in ops:
        numbers = [c.count, c.total_bytes, sent_bytes(c)]
        # a sum with a guess in it would be a guess
        sums[c.kind, c.axis, c.count_known] += numbers
    totals = [
        CollectiveTotal(kind, axis, *numbers, count_known)
        for (kind, axis, count_known), numbers in sums.items()
    ]
    return sorted(totals, key=lambda total: -total.total_bytes)


def sent_bytes(c: _Collective) -> int:
    """Bytes that one device sends, all runs together, if the devices form a ring."""
    n = c.group_size
    # In parts of the buffer, which has n of them.
    parts = {"all-reduce": 2 * (n - 1), "collective-permute": n}
    return c.total_bytes * parts.get(c.kind, n - 1) // n


# ---- the walk


@dataclass(frozen=True)
class CallSite:
    """Facts about a computation that its callers give.
    Example: CallSite(times=12, in_loop=True) for the body of a scan over 12 layers."""

    times: int = 1  # runs in one call of the program
    count_known: bool = True
    in_loop: bool = False
    fused: bool = False
    # ids of the split collectives that this loop body (branch, entry) has shown already
    chains: set[str] = field(default_factory=set)


def callees_of(
    instruction: Instruction, caller: Computation, site: CallSite, program: Program
) -> Iterator[tuple[str, CallSite]]:
    """Lists the computations that an instruction of `caller` runs, each with the facts about the
    call."""
    callees = called(instruction)
    site = replace(site, fused=instruction.op == "fusion")
    if not site.fused:
        site = replace(
            site,
            chains=set(),
            count_known=site.count_known and instruction.op != "conditional",
        )
    if instruction.op != "while":
        yield from ((callee, site) for _, callee in callees)
        return

    # A loop runs its body once a turn, and its condition once more.
    turns = count_turns(instruction, dict(callees), caller, program)
    for key, callee in callees:
        runs = 1 if turns is None else turns + (key == "condition")
        known = site.count_known and turns is not None
        yield callee, replace(site, times=site.times * runs, count_known=known, in_loop=True)


def _read_collective(
    instruction: Instruction,
    computation: Computation,
    site: CallSite,
    mesh_shape: dict[str, int],
) -> _Collective | None:
    """The collective that an instruction is; None if it goes over a single device, or was read
    before."""
    kind = instruction.op.removesuffix("-start")
    axis, size = _axis_of(instruction.rest, mesh_shape)

    # XLA for TPU spreads a collective over several fusions, to hide it behind their work. Each
    # of them shows it, with the id of the chain.
    chain = re.search(r'chain_id="[^"]*"', instruction.rest)
    if size == 1 or (chain and chain[0] in site.chains):
        return None
    if chain:
        site.chains.add(chain[0])
    if kind == "all-reduce" and site.fused and _is_sliced(instruction, computation):
        # So XLA for TPU writes it: no device ever holds the whole sum.
        kind = "reduce-scatter"

    # The type of the whole buffer. That of a -start instruction is (operands, results, ...).
    type_ = instruction.type
    if kind != "all-reduce" and instruction.op.endswith("-start"):
        type_ = tuple_types(type_)[kind in ("all-gather", "all-to-all")]
    elif instruction.op == "reduce-scatter":
        type_ = " ".join(computation.instructions[name].type for name in instruction.operands)
    arrays = ARRAY.findall(type_)

    return _Collective(
        kind=kind,
        axis=axis,
        count=site.times,
        num_bytes=sum(array_bytes(bits, dims) for _, bits, dims in arrays),
        shapes=", ".join(f"{dtype}[{dims}]" for dtype, _, dims in arrays),
        in_loop=site.in_loop,
        group_size=size,
        count_known=site.count_known,
    )


def _is_sliced(reduced: Instruction, computation: Computation) -> bool:
    """Returns whether each device uses only a slice of the result."""
    names = {reduced.name}
    # One pass is enough: in the text of a program users stand below what they use.
    for instruction in computation.instructions.values():
        if names & set(instruction.operands[:1]):
            if instruction.op == "dynamic-slice":
                return True
            if instruction.op in ("get-tuple-element", "bitcast", "copy"):
                names.add(instruction.name)
    return False


# ---- groups: which devices communicate. Ids count the devices of the mesh, last axis fastest


def _axis_of(rest: str, mesh_shape: dict[str, int]) -> tuple[str, int]:
    """The axis of the mesh that a collective goes over, and how many devices are along it."""
    sizes = tuple(mesh_shape.values())
    ids = np.arange(math.prod(sizes))
    coords = np.stack(np.unravel_index(ids, sizes), -1)
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", rest)
    groups = _id_lists(pairs[1]) if pairs else _replica_groups(rest, len(coords))

    # Along which axes each group extends. Of pairs, an axis counts if any pair goes along it.
    crossed = [tuple(np.ptp(coords[group], axis=0) > 0) for group in groups]
    if pairs:
        crossed = [tuple(np.any(crossed, axis=0))]
    names = [name for name, is_crossed in zip(mesh_shape, crossed[0]) if is_crossed]
    size = math.prod(mesh_shape[name] for name in names)
    # a group may cover only a part of an axis
    group_sizes = [len(group) for group in groups]
    if len(set(crossed)) == 1 and (pairs or set(group_sizes) == {size}):
        return "+".join(names), size
    return "other", max(group_sizes)


def _replica_groups(rest: str, num_devices: int) -> list[list[int]]:
    """The ids of the devices of each group, in any of the three forms that XLA writes."""
    if match := _GROUP_MESH.search(rest):
        sizes = [int(n) for n in re.findall(r"=(\d+)", match[1])]
        ids = _permuted(match[2]) if match[2] else list(range(num_devices))
        names = re.findall(r"([^,=]+)=", match[1])
        keys = np.stack(np.unravel_index(np.arange(len(ids)), sizes), -1)
        for name, before, part in re.findall(r"([^,:]+)(?::\((\d+)\)(\d+))?", match[3]):
            # 'a':(2)3 is the part of size 3 of an axis that comes after a part of size 2.
            axis = names.index(name)
            inner = sizes[axis] // (int(before) * int(part)) if part else 1
            keys[:, axis] -= keys[:, axis] // inner % int(part or sizes[axis]) * inner
        groups = defaultdict(list)
        for device, key in zip(ids, keys.tolist()):
            groups[tuple(key)].append(device)
        return list(groups.values())
    if match := _GROUP_IOTA.search(rest):
        return np.reshape(_permuted(match[2]), _numbers(match[1])).tolist()
    match = _GROUP_LIST.search(rest)
    groups = _id_lists(match[1]) if match else []
    return groups or [list(range(num_devices))]


def _permuted(text: str) -> list[int]:
    """[2,2]T(1,0) is 0,2,1,3: device ids counted up, laid out in that shape and transposed."""
    parts = re.findall(r"[\d,]+", text)
    shape, *order = map(_numbers, parts)
    if not text.startswith("["):
        return shape
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose(*order).ravel().tolist()


def _id_lists(text: str) -> list[list[int]]:
    """The lists of numbers in {0,1},{2,3}."""
    return list(map(_numbers, re.findall(r"\d[\d,]*", text)))


def _numbers(text: str) -> list[int]:
    """The numbers in 0,1,2."""
    return [int(number) for number in text.split(",")]
