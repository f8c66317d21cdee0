"""The asserts of a test of code, cut in two: the process of the code evaluates what the code
returns, and this process, which the code cannot reach, compares it with what the test expects.

    assert add(1, 2) == 3   ->   there: __report__(0, (), add(1, 2));   here: is it 3?"""

import ast
import json
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

# the function that the code's process is given, by this name (workers/sandbox.py)
REPORT = "__report__"
OPERATORS: dict[type, tuple[str, Callable]] = {
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.Is: ("is", operator.is_),
    ast.IsNot: ("is not", operator.is_not),
    ast.In: ("in", lambda item, items: item in items),
    ast.NotIn: ("not in", lambda item, items: item not in items),
}
SINGLETONS = (None, True, False)


class _Opaque:
    """A value that is not plain: an object of a class of the code, or one that holds such."""


@dataclass(frozen=True)
class _CutAssert:
    """Comparison of one assert."""

    operators: list[str]
    # the operands that are written out, by their places among all
    literals: dict[int, Any]
    num_operands: int
    is_negated: bool = False
    # True: a test that came to its end must have passed this assert
    is_required: bool = True

    def holds(self, values: list[Any], own: bool | None) -> bool:
        """True if the assert holds for the values of the other operands. own: the verdict of the
        code's process, which counts where an object of the code is compared with another one."""
        has_opaque = any(isinstance(value, _Opaque) for value in values)
        if has_opaque and not self.literals:
            return bool(own) != self.is_negated
        remaining = iter(values)
        operands = [
            self.literals[place] if place in self.literals else next(remaining)
            for place in range(self.num_operands)
        ]
        if not self.operators:
            return bool(operands[0]) != self.is_negated
        pairs = zip(self.operators, operands, operands[1:], strict=False)
        return all(_compare(*pair) for pair in pairs) != self.is_negated


@dataclass(frozen=True)
class Checks:
    """A test as the code's process gets it, and its asserts, which are decided here.
    Example: checks_of("assert f(1) == 2") is Checks("__report__(0, (), f(1))", [CutAssert(...)]).
    """

    source: str
    checks: list[_CutAssert] = field(default_factory=list)

    def are_met(self, reports: list[str]) -> bool:
        """True if each report is right, and none is missing."""
        met = set()
        try:
            for report in reports:
                number, values, own = json.loads(report)
                check = self.checks[number]
                values = [_decoded(value) for value in values]
                if len(values) != check.num_operands - len(check.literals):
                    return False
                if not check.holds(values, own):
                    return False
                met.add(number)
        # the code may have written them
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
            return False
        return all(n in met for n, check in enumerate(self.checks) if check.is_required)


def checks_of(test: str) -> Checks:
    """Cuts a test in two. One that is no Python, or compares what cannot be compared, goes as it
    is: it will fail there."""
    try:
        tree = ast.parse(test)
        cutter = _Cutter(tree)
        source = ast.unparse(ast.fix_missing_locations(cutter.visit(tree)))
    except (SyntaxError, ValueError, TypeError, RecursionError):
        return Checks(test)
    return Checks(source, cutter.checks)


class _Cutter(ast.NodeTransformer):
    """Replaces each assert by a report."""

    def __init__(self, tree: ast.Module):
        self.checks: list[_CutAssert] = []
        # names of lists that are written out and not empty
        self._lists: set[str] = set()
        self._is_required = True
        self._used = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                self._used.add(node.id)
            elif isinstance(node, ast.Attribute):
                self._used.add(node.attr)

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        return [self._report(part) for part in _conjuncts(node.test)]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._visit_maybe(node, node.name in self._used)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if all(_literal(node.value)):
            self._lists |= {
                target.id for target in node.targets if isinstance(target, ast.Name)
            }
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        return self._visit_maybe(node, self._has_items(node.iter))

    def visit_Try(self, node: ast.Try) -> ast.AST:
        # its handlers may be there for an assert that fails
        return node

    visit_TryStar = visit_Try

    def visit_With(self, node: ast.With) -> ast.AST:
        # `aises` is in pytest.raises and assertRaises: there, an assert may be meant to fail.
        catches = any(
            word in ast.unparse(item) for item in node.items for word in ("aises", "suppress")
        )
        return node if catches else self._visit_maybe(node, True)

    def _has_items(self, items: ast.expr) -> bool:
        """True if a loop over `items` surely runs: they are written out, or a range of such."""
        if isinstance(items, ast.Name):
            return items.id in self._lists
        if isinstance(items, ast.Call) and isinstance(items.func, ast.Name):
            if items.func.id == "range":
                are_literals, values = zip(*map(_literal, items.args))
                return all(are_literals) and bool(range(*values))
            is_known = items.func.id in ("zip", "enumerate", "sorted", "reversed", "list")
            return is_known and all(map(self._has_items, items.args))
        is_literal, value = _literal(items)
        return is_literal and bool(value)

    def _visit_maybe(self, node: ast.AST, is_required: bool) -> ast.AST:
        before = self._is_required
        self._is_required = before and is_required
        self.generic_visit(node)
        self._is_required = before
        return node

    def _visit_branch(self, node: ast.AST) -> ast.AST:
        return self._visit_maybe(node, False)

    visit_If = visit_While = visit_Match = _visit_branch
    visit_ClassDef = visit_AsyncFor = visit_AsyncWith = _visit_branch

    def _report(self, test: ast.expr) -> ast.stmt:
        is_negated = False
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, is_negated = test.operand, not is_negated
        is_cut = isinstance(test, ast.Compare) and _can_be_cut(test)
        operands = [test.left, *test.comparators] if is_cut else [test]
        names = [OPERATORS[type(op)][0] for op in test.ops] if is_cut else []
        read = [_literal(operand) for operand in operands]
        literals = {place: value for place, (is_one, value) in enumerate(read) if is_one}
        left = [operand for place, operand in enumerate(operands) if place not in literals]

        check = _CutAssert(names, literals, len(operands), is_negated, self._is_required)
        if not left and check.holds([], None):
            # it looks at nothing of the code
            return ast.Pass()
        self.checks.append(check)
        # With a literal the verdict is made here alone, and the code's process need not know it.
        shown = [] if literals else names
        arguments = [ast.Constant(len(self.checks) - 1), ast.Constant(tuple(shown)), *left]
        return ast.Expr(ast.Call(ast.Name(REPORT, ast.Load()), arguments, []))


def _conjuncts(test: ast.expr) -> Iterator[ast.expr]:
    """The parts of `a and b and c`."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        for value in test.values:
            yield from _conjuncts(value)
    else:
        yield test


def _can_be_cut(test: ast.Compare) -> bool:
    """True if the test may be compared here: `is` of None, True and False only, and `in` only of a
    container that is written out, as others say themselves what they hold."""
    for op, item in zip(test.ops, test.comparators, strict=True):
        is_literal, value = _literal(item)
        if isinstance(op, ast.Is | ast.IsNot):
            if not is_literal or not any(value is one for one in SINGLETONS):
                return False
        elif isinstance(op, ast.In | ast.NotIn) and not is_literal:
            return False
    return True


def _literal(node: ast.expr) -> tuple[bool, Any]:
    """Tells if an expression is written out, and returns its value."""
    try:
        return True, ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False, None


def _compare(name: str, left: object, right: object) -> bool:
    if isinstance(left, _Opaque) or isinstance(right, _Opaque):
        # an object of the code is nothing that is written out
        return name in ("!=", "is not", "not in")
    functions = dict(OPERATORS.values())
    return bool(functions[name](left, right))


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "complex": lambda parts: complex(*map(_decoded, parts)),
    "bytes": bytes.fromhex,
    "tuple": lambda items: tuple(map(_decoded, items)),
    "set": lambda items: set(map(_decoded, items)),
    "dict": lambda items: {_decoded(key): _decoded(value) for key, value in items},
    "Fraction": lambda parts: Fraction(*map(_decoded, parts)),
    "Decimal": Decimal,
    "range": lambda parts: range(*map(_decoded, parts)),
    "opaque": lambda _: _Opaque(),
}


def _decoded(value: object) -> Any:
    """A plain value from how sandbox.encoded wrote it."""
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if isinstance(value, dict):
        ((kind, held),) = value.items()
        return _DECODERS[kind](held)
    return value
