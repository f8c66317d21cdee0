"""Tools that come with the package: a calculator, Python with limits, and search in a folder."""

import ast
import math
import operator
import re
import sys
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tunix_lite.workers.sandbox import STOPPED, run_job

OPERATORS = {
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
LONGEST = 500
MOST_BITS = 4096
WORD = re.compile(r"\w+")
# constants of BM25, as in Robertson and Zaragoza (2009)
K1 = 1.2
B = 0.75
# bytes of all texts in a folder that are searched
MOST_BYTES = 64 * 2**20


def calculator(expression: str) -> str:
    """Work out an arithmetic expression of numbers with + - * / // % ** and brackets.

    Args:
        expression: The expression, such as 12 * (3 + 4).
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has more than {LONGEST} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _value(node: ast.AST) -> int | float:
    """The value of numbers and operators. Raises ValueError for names, calls and all else."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _checked(node.value)
    kind = OPERATORS.get(type(getattr(node, "op", None)))
    if isinstance(node, ast.UnaryOp) and kind is not None:
        return kind(_value(node.operand))
    if isinstance(node, ast.BinOp) and kind is not None:
        left = _value(node.left)
        right = _value(node.right)
        is_large = isinstance(left, int) and isinstance(right, int) and kind is operator.pow
        if is_large and left.bit_length() * abs(right) > MOST_BITS:
            raise ValueError("the number is too large")
        return _checked(kind(left, right))
    raise ValueError("an expression has numbers, + - * / // % ** and brackets alone")


def _checked(value: int | float | complex) -> int | float:
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError("the value is no finite real number")
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ValueError("the number is too large")
    return value


@dataclass(frozen=True)
class Python:
    """A tool that runs code in a process of its own, with limits. It needs Linux.

    It keeps honest mistakes from harming a run, and is no security boundary (workers/sandbox.py).

    Example: Python()("print(2 + 2)") == "4".
    """

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
            raise ValueError("environments.bundled_tools.Python limits code by means of Linux only")

    def __call__(self, code: str) -> str:
        """Run Python code and return what it prints.

        Args:
            code: The program. Only what it prints is returned.
        """
        job = {
            "kind": "stdin",
            "code": code,
            "test": "",
            "input": "",
            "seconds": self.seconds,
            "memory_mib": self.memory_mib,
            "output_bytes": self.output_bytes,
            "disk_mib": 16,
            "processes": 8,
        }
        verdict = run_job(job)
        printed = verdict["printed"].rstrip("\n")
        if verdict["status"] != "ended":
            why = STOPPED.get(verdict["status"], verdict["status"])
            raise RuntimeError(f"the code {why}")
        if not verdict["is_done"]:
            why = verdict["why"].strip().splitlines()[-1:] or ["the code did not end by itself"]
            raise RuntimeError("\n".join([*filter(None, [printed]), why[0]]))
        return printed or "(the code printed nothing)"


@dataclass(frozen=True)
class FolderSearch:
    """A tool that finds paragraphs in the texts of a folder by their words (BM25).

    Example: FolderSearch("notes/")("boiling point") is the best paragraphs, each with its file.
    """

    # Folder with .txt and .md files, searched with its subfolders.
    folder: str
    # Paragraphs that a search returns, at most.
    results: int = 3

    name = "search"

    def __post_init__(self):
        if self.results < 1:
            raise ValueError(f"results={self.results} must be at least 1")
        if not Path(self.folder).is_dir():
            raise ValueError(f"folder={self.folder!r} is no folder")

    def __call__(self, query: str) -> str:
        """Search a collection of texts and return the paragraphs that fit best.

        Args:
            query: Words to look for.
        """
        paragraphs = _index(self.folder).best(query, self.results)
        if not paragraphs:
            return "Nothing was found."
        return "\n\n".join(f"[{where}]\n{text}" for where, text in paragraphs)


@lru_cache(maxsize=8)
def _index(folder: str) -> "Index":
    """The index of a folder, made once in a process."""
    everything = sorted(Path(folder).rglob("*"))
    files = [path for path in everything if path.suffix in (".txt", ".md") and path.is_file()]
    size = sum(path.stat().st_size for path in files)
    if size > MOST_BYTES:
        raise ValueError(f"{folder} has {size:,} bytes of text; {MOST_BYTES:,} is the most")
    paragraphs = []
    for path in files:
        text = path.read_text(encoding="utf-8", errors="replace")
        where = str(path.relative_to(folder))
        paragraphs += [(where, part.strip()) for part in text.split("\n\n") if part.strip()]
    return Index(paragraphs)


class Index:
    """Paragraphs by their words, ranked by BM25.

    Example: Index([("a.txt", "Water boils."), ("b.txt", "Ice melts.")]).best("boils", 1).
    """

    def __init__(self, paragraphs: list[tuple[str, str]]):
        """paragraphs: (where it is from, text) each."""
        self.paragraphs = paragraphs
        counts = [Counter(WORD.findall(text.lower())) for _, text in paragraphs]
        self._lengths = [sum(count.values()) for count in counts]
        self._mean_length = sum(self._lengths) / max(1, len(counts))
        # word -> (paragraph, how often)
        self._places: dict[str, list[tuple[int, int]]] = {}
        for place, count in enumerate(counts):
            for word, times in count.items():
                self._places.setdefault(word, []).append((place, times))

    def best(self, query: str, count: int) -> list[tuple[str, str]]:
        """The paragraphs that fit best, the best first; of those that fit alike, the first."""
        scores: Counter = Counter()
        for word in set(WORD.findall(query.lower())):
            places = self._places.get(word, [])
            rarity = math.log(1 + (len(self.paragraphs) - len(places) + 0.5) / (len(places) + 0.5))
            for place, times in places:
                length = 1 - B + B * self._lengths[place] / self._mean_length
                scores[place] += rarity * times * (K1 + 1) / (times + K1 * length)
        ranked = sorted(scores, key=lambda place: (-scores[place], place))
        return [self.paragraphs[place] for place in ranked[:count]]
