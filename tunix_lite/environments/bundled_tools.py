"""Tools that come with the package: a calculator, and Python with limits."""

import ast
import dataclasses
import math
import operator
import sys
from dataclasses import dataclass

from tunix_lite.workers.sandbox import STOPPED, run_job

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
# characters of an expression, and bits of a number in it
_LONGEST = 500
_MOST_BITS = 4096


def calculator(expression: str) -> str:
    """Work out an arithmetic expression of numbers with + - * / // % ** and brackets.

    Args:
        expression: The expression, such as 12 * (3 + 4).
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has more than {_LONGEST} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    # 6 / 2 reads better as 3, and below 1e15 a float is exact
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _value(node: ast.AST) -> int | float:
    """The value of numbers and operators. Raises ValueError for names, calls and all else."""
    # The type itself, as True is an int to isinstance.
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _checked(node.value)
    kind = _OPERATORS.get(type(getattr(node, "op", None)))
    if isinstance(node, ast.UnaryOp) and kind is not None:
        return kind(_value(node.operand))
    if isinstance(node, ast.BinOp) and kind is not None:
        left = _value(node.left)
        right = _value(node.right)
        # 9**9**9 would fill the memory before anybody could stop it
        is_large = isinstance(left, int) and isinstance(right, int) and kind is operator.pow
        if is_large and left.bit_length() * abs(right) > _MOST_BITS:
            raise ValueError("the number is too large")
        return _checked(kind(left, right))
    raise ValueError("an expression has numbers, + - * / // % ** and brackets alone")


def _checked(value: int | float | complex) -> int | float:
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError("the value is no finite real number")
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError("the number is too large")
    return value


@dataclass(frozen=True)
class Python:
    """A tool that runs code in a process of its own, with limits. It needs Linux, and is no
    security boundary (workers/sandbox.py).
    Example: Python()("print(2 + 2)") == "4"."""

    # Seconds that the code may take.
    seconds: float = 5.0
    # Memory that it may take, in MiB.
    memory_mib: int = 1024
    # Bytes that it may print.
    output_bytes: int = 16 * 1024

    def __post_init__(self):
        if min(self.seconds, self.memory_mib, self.output_bytes) <= 0:
            raise ValueError("seconds, memory_mib and output_bytes must be above 0")
        if sys.platform != "linux":
            raise ValueError(
                "environments.bundled_tools.Python limits code by means of Linux only"
            )

    def __call__(self, code: str) -> str:
        """Run Python code and return what it prints.

        Args:
            code: The program. Only what it prints is returned.
        """
        limits = dataclasses.asdict(self)
        verdict = run_job(code, None, **limits)
        printed = verdict["printed"].rstrip("\n")
        if verdict["status"] != "ended":
            why = STOPPED.get(verdict["status"], verdict["status"])
            raise RuntimeError(f"the code {why}")
        if not verdict["is_done"]:
            # the last line of a traceback says what a model can mend
            why = [*verdict["why"].strip().splitlines()[-1:], "the code did not end by itself"]
            raise RuntimeError(f"{printed}\n{why[0]}".strip())
        return printed or "(the code printed nothing)"
