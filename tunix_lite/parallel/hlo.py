"""The optimised HLO text of a compiled program (`compiled.as_text()`) as Python objects."""

import math
import operator
import re
from dataclasses import dataclass, field
from typing import Any

# At most so many turns of a loop are executed here to count them.
_MAX_TURNS = 100_000
_SCALARS = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}
_SCALARS |= {name: lambda x: x for name in ("copy", "bitcast", "convert")}
_SCALARS |= {
    f"compare {name}": getattr(operator, name.lower())
    for name in ("LT", "LE", "GT", "GE", "EQ", "NE")
}

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*-> .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
_CALLS = re.compile(
    r"\b(calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%[\w.-]+)"
)
ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,<=]*)\]")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.
    Example: `%add.1 = f32[8]{0} add(%a, %b)`: name add.1, type f32[8]{0}, op add, operands [a,
    b]."""

    name: str
    type: str  # "f32[8,16]{1,0}", or a tuple of such
    op: str  # "all-gather-start"
    operands: list[str]
    rest: str  # the line from the operands on


@dataclass
class Computation:
    """A function of the program: the entry, the body of a loop, a fusion ...
    Example: Computation({"add.1": Instruction(...)}, root="add.1")."""

    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""  # the name of the instruction that is the result


# computations by name
Program = dict[str, Computation]


def parse(text: str) -> tuple[Program, str]:
    """The computations by name, and the name of the entry."""
    program = {}
    entry = ""
    current = Computation()
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            root, name, type_, op, rest = match.groups()
            # Attributes behind the operands name computations with % as well.
            operands = re.findall(r"%([\w.-]+)", rest.split("), ")[0])
            current.instructions[name] = Instruction(name, type_, op, operands, rest)
            if root:
                current.root = name
        elif match := _COMPUTATION.match(line):
            current = program[match[2]] = Computation()
            if match[1]:
                entry = match[2]
    return program, entry


def called(instruction: Instruction) -> list[tuple[str, str]]:
    """Lists the computations that an instruction calls, such as ("body", "region_1")."""
    return [
        (key, name)
        for key, names in _CALLS.findall(instruction.rest)
        for name in re.findall(r"%([\w.-]+)", names)
    ]


def tuple_types(type_: str) -> list[str]:
    """The types of the elements of a tuple, given its type."""
    parts = [""]
    depth = 0
    # no expression of its own: tuples stand in tuples, and layouts have commas, too
    for character in type_[1:-1]:
        depth += character in "([{"
        depth -= character in ")]}"
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def array_bytes(bits: str, dims: str) -> int:
    """Bytes of an array. bits: of its dtype, empty for pred, which has no number in its name."""
    size = math.prod(int(n) for n in re.findall(r"\d+", dims))
    return -(-size * int(bits or 8) // 8)


def op_name(instruction: Instruction) -> str:
    """Returns the path of JAX's name scopes, jit(main)/while/body/dot_general, if there is one."""
    match = re.search(r'op_name="([^"]*)"', instruction.rest)
    return match[1] if match else ""


# ---- loops. XLA's text for TPU does not say how often one turns, so its counter is executed here


def count_turns(
    loop: Instruction,
    callees: dict[str, str],
    caller: Computation,
    program: Program,
) -> int | None:
    """Counts how often the body runs; None if the text does not show it."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest)
    if known:
        return int(known[1])
    # Not every compiler writes the count, so a loop over numbers is run here.
    state = _value(loop.operands[0], caller, program, [])
    condition = program[callees["condition"]]
    body = program[callees["body"]]
    for turn in range(_MAX_TURNS):
        continues = _value(condition.root, condition, program, [state])
        if not continues:
            return None if continues is None else turn
        state = _value(body.root, body, program, [state])
    return None


def _value(name: str, computation: Computation, program: Program, args: list) -> Any:
    """The integer that an instruction computes, or a list of them; None: the text does not show
    it."""
    known = {}

    def of(name: str) -> Any:
        if name not in known:
            known[name] = evaluate(computation.instructions[name])
        return known[name]

    def evaluate(i: Instruction) -> Any:
        # Only scalars and tuples matter to a counter.
        literal = i.rest.split(")")[0]
        if not re.match(r"\(|(pred|[su]\d+)\[\]", i.type):
            return None
        if i.op == "parameter":
            return args[int(literal)] if args else None
        if i.op == "constant":
            if literal.isalpha():
                return {"true": 1, "false": 0}.get(literal)
            return int(literal)

        # What is computed from other values.
        values = [of(operand) for operand in i.operands]
        if i.op == "tuple":
            return values
        if i.op == "get-tuple-element":
            return values[0] and values[0][int(re.search(r"index=(\d+)", i.rest)[1])]
        if i.op == "fusion":
            inner = program[re.search(r"calls=%([\w.-]+)", i.rest)[1]]
            return _value(inner.root, inner, program, values)
        direction = re.search(r" direction=(\w+)", i.rest)
        operation = _SCALARS.get(f"{i.op} {direction[1]}" if direction else i.op)
        if operation and None not in values:
            return operation(*values)
        return None

    return of(name)
