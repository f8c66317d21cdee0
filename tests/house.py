"""Measures the house: its size as a program reaches it, what a step enters, names, arrows and how the code reads.

    python tests/house.py           this checkout
    python tests/house.py FOLDER    another one, such as an older state of the code
    python tests/house.py --traced  also runs two GRPO steps and counts the functions of ours that one of them enters
    python tests/house.py --parts   also what the figures are made of: each function, arrow, name ...

Everything is counted in the syntax tree, in Python's own tokens, over the closure of imports, or by tracing a run: so
moving code to another file, or breaking a line, improves no figure. Limits stand in test_architecture.py.
"""

import argparse
import ast
import functools
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONG_FUNCTION = 100  # lines
SAME_EVERYWHERE = {"main"}  # public names that may have many homes: each program has one

# where a program begins; commands are imported by their names, and conf/ names classes and functions
DOORS = ("tunix_lite/api.py", "tunix_lite/__main__.py", "run_training.py", "tunix_lite/commands/*.py")
LOOP = ("tunix_lite/train.py", "fit")
# The trace of a step by what its functions are for. "path" is what the first measurement (4,800 tokens at 68dc782)
# was of, and what the bars of 48 functions and 3,900 tokens are for: from the loop to the gradient, without the watch,
# the task with its grader, and the ground that all rooms stand on. The sampler and the model's forward pass are apart.
# Bin packing is apart from it too: 68dc782 trained on padded rows, and training.packing=auto packs them now.
TRACED = {
    "packing": ("learner/packing.py",),
    "path": ("train.py", "runs/experience.py", "runs/learner.py", "algorithms", "learner"),
    "task": ("tasks", "rewards", "workers", "environments"),
    "watch": ("runs", "tracking", "planning", "report", "settings", "distributed"),
    "ground": ("parallel", "basics"),
    "apart": ("rollout", "models", "kernels"),
}
# settings as a whole, which only the set-up of a run should take
WHOLES = {"RunConfig", "ResolvedRun"}
# names that say nothing of what they hold
EMPTY_WORDS = {"found", "asked", "given", "kept", "told", "words"}

LAYOUT = {  # tokens that are not words of the program
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
WITH_DOCSTRING = (*FUNCTIONS, ast.ClassDef, ast.Module)


# ---- one file


@dataclass(frozen=True)
class Source:
    """A file, its syntax tree and its tokens, which are made when somebody asks for them."""

    path: Path
    text: str

    @functools.cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @functools.cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        return list(tokenize.generate_tokens(io.StringIO(self.text).readline))

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the tree."""
        return list(ast.walk(self.tree))

    @functools.cached_property
    def words(self) -> list[tokenize.TokenInfo]:
        """The tokens without comments and layout. A docstring is one token."""
        return [token for token in self.tokens if token.type not in LAYOUT]

    @functools.cached_property
    def docstring_lines(self) -> set[int]:
        """The numbers of all lines of docstrings."""
        found = [docstring(node) for node in self.nodes if isinstance(node, WITH_DOCSTRING)]
        return {line for node in found if node for line in range(node.lineno, node.end_lineno + 1)}

    @functools.cached_property
    def code_words(self) -> list[tokenize.TokenInfo]:
        """The tokens without comments, layout and docstrings."""
        return [token for token in self.words if token.start[0] not in self.docstring_lines]

    @functools.cached_property
    def code_lines(self) -> set[int]:
        """The numbers of the lines that hold such tokens; of a text over several lines all."""
        return {line for token in self.code_words for line in range(token.start[0], token.end[0] + 1)}

    @functools.cached_property
    def own_line_comments(self) -> list[int]:
        """The numbers of the lines that hold a comment and nothing else."""
        comments = [token.start for token in self.tokens if token.type == tokenize.COMMENT]
        return [line for line, column in comments if not self.lines[line - 1][:column].strip()]


def docstring(node: ast.AST) -> ast.Expr | None:
    """The statement that is the docstring of a module, a class or a function."""
    first = node.body[0] if node.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return first
    return None


@functools.cache
def read(path: Path) -> Source:
    return Source(path, path.read_text(encoding="utf-8"))


def package(root: Path = ROOT) -> list[Source]:
    """All files of the package."""
    return [read(path) for path in sorted((root / "tunix_lite").rglob("*.py"))]


def functions(sources: Iterable[Source]) -> Iterator[tuple[Source, ast.AST]]:
    """All functions and methods, those inside of others too, each with its file."""
    return ((source, node) for source in sources for node in source.nodes if isinstance(node, FUNCTIONS))


def parameters(node: ast.AST) -> list[ast.arg]:
    """Those of a function, without *args and **kwargs."""
    return node.args.posonlyargs + node.args.args + node.args.kwonlyargs


def public_definitions(sources: Iterable[Source]) -> Iterator[tuple[Source, ast.AST]]:
    """Functions and classes at the top of modules without an underscore, each with its file."""
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_"):
                yield source, node


# ---- how dense


def tokens_per_line(sources: Iterable[Source]) -> float:
    """Tokens a line of code. Docstrings, comments and blank lines count neither above nor below."""
    sources = list(sources)
    tokens = sum(len(source.code_words) for source in sources)
    return tokens / sum(len(source.code_lines) for source in sources)


def packed_assignments(sources: Iterable[Source]) -> tuple[list[str], int]:
    """Where `a, b = x, y` stands: a tuple assigned to a tuple; and the number of all `=` statements.

    Unpacking one value, `a, b = f()`, is not counted; neither are `a: int = 1` and `a += 1` among all.
    """
    places = []
    total = 0
    for source in sources:
        assigned = [node for node in source.nodes if isinstance(node, ast.Assign)]
        total += len(assigned)
        for node in assigned:
            targets = [type(target) for target in node.targets]
            if targets == [ast.Tuple] and isinstance(node.value, ast.Tuple):
                places.append(f"{source.path}:{node.lineno}")
    return places, total


# ---- names and types


def unannotated_parameters(sources: Iterable[Source]) -> tuple[list[str], int]:
    """Parameters of public functions that have no annotation, as file:line function(parameter); and all of them.

    Public is what has no leading underscore: functions and methods, those inside other functions too. Special methods,
    self, cls, *args and **kwargs do not count.
    """
    places = []
    total = 0
    for source, node in functions(sources):
        if node.name.startswith("_"):
            continue
        counted = [one for one in parameters(node) if one.arg not in ("self", "cls")]
        total += len(counted)
        bare = [one for one in counted if one.annotation is None]
        places += [f"{source.path}:{node.lineno} {node.name}({one.arg})" for one in bare]
    return places, total


def names_with_several_homes(sources: Iterable[Source]) -> dict[str, list[Path]]:
    """Public functions and classes at the top of more than one file: {name: those files}."""
    homes = defaultdict(list)
    for source, node in public_definitions(sources):
        homes[node.name].append(source.path)
    return {name: paths for name, paths in homes.items() if len(paths) > 1 and name not in SAME_EVERYWHERE}


# ---- size


def num_lines(node: ast.AST) -> int:
    """From `def` or `class` to the last line, docstring and blank lines included, decorators not."""
    return node.end_lineno - node.lineno + 1


def long_functions(sources: Iterable[Source], limit: int = LONG_FUNCTION) -> list[tuple[str, int]]:
    """Functions of more than `limit` lines: (file:line name, lines)."""
    return [
        (f"{source.path}:{node.lineno} {node.name}", num_lines(node))
        for source, node in functions(sources)
        if num_lines(node) > limit
    ]


def definition(source: Source, name: str) -> ast.AST:
    """The function, class or method of this name, as in `GRPO.loss`. Raises LookupError if it is not there."""
    found = source.tree
    for part in name.split("."):
        inside = [node for node in found.body if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node.name == part]
        if not inside:
            raise LookupError(f"{source.path} has no {name} any more")
        found = inside[0]
    return found


def statements(node: ast.AST) -> int:
    """All statements inside a function, at any depth; its docstring is none."""
    inside = sum(isinstance(found, ast.stmt) for found in ast.walk(node)) - 1
    return inside - (docstring(node) is not None)


def local_names(node: ast.AST) -> set[str]:
    """The names that a function assigns, in what it nests too: by =, for, with, := and in comprehensions.

    Its parameters and the names of nested functions do not count.
    """
    names = [found for found in ast.walk(node) if isinstance(found, ast.Name)]
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


# ---- what a user loads


def module_of(file: Path, root: Path) -> str:
    """tunix_lite.learner.update for tunix_lite/learner/update.py; a package for its __init__.py."""
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def file_of(module: str, root: Path) -> Path | None:
    """The file of a module of this repository; None: it is of somebody else."""
    base = root.joinpath(*module.split("."))
    found = [base.with_suffix(".py"), base / "__init__.py"]
    return next((file for file in found if file.is_file()), None)


def imported_files(source: Source, root: Path) -> set[Path]:
    """The files of this repository that a file imports anywhere, inside of functions and for types too."""
    files = set()
    for node in source.nodes:
        if isinstance(node, ast.Import):
            files |= {file_of(alias.name, root) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from package import module` imports the module
            inner = [file_of(f"{node.module}.{alias.name}", root) for alias in node.names]
            files |= {file or file_of(node.module, root) for file in inner}
    return files - {None}


def named_in_settings(root: Path) -> set[Path]:
    """The files of what conf/ names by `_target_` or as a function."""
    texts = [file.read_text() for file in (root / "conf").rglob("*.yaml")]
    names = {name.rpartition(".")[0] for text in texts for name in re.findall(r"tunix_lite\.[\w.]+", text)}
    return {file for name in names if (file := file_of(name, root)) is not None}


def closure(root: Path = ROOT, doors: Sequence[str] = DOORS) -> list[Source]:
    """Every file that the doors import, at any depth, wherever it lies in the repository."""
    waiting = [file for door in doors for file in root.glob(door)]
    waiting += named_in_settings(root)
    seen: set[Path] = set()
    while waiting:
        file = waiting.pop()
        if file not in seen:
            seen.add(file)
            waiting += imported_files(read(file), root)
    return [read(file) for file in sorted(seen)]


def num_tokens(sources: Iterable[Source]) -> int:
    """Tokens without comments, layout and docstrings."""
    return sum(len(source.code_words) for source in sources)


# ---- names, arrows, parameters


def public_names(sources: Iterable[Source]) -> list[str]:
    """Functions and classes at the top of modules without an underscore, as file:name."""
    return [f"{source.path}:{node.name}" for source, node in public_definitions(sources)]


def called_once(sources: Iterable[Source]) -> tuple[list[str], int]:
    """Private functions and methods that their file names in one place; and all functions."""
    places = []
    total = 0
    for source in sources:
        named = Counter(
            node.id if isinstance(node, ast.Name) else node.attr
            for node in source.nodes
            if isinstance(node, ast.Name | ast.Attribute)
        )
        for _, node in functions([source]):
            total += 1
            is_private = node.name.startswith("_") and not node.name.startswith("__")
            if is_private and named[node.name] == 1:
                places.append(f"{source.path}:{node.lineno} {node.name}")
    return places, total


def arrows(root: Path = ROOT) -> tuple[set[tuple[str, str]], list[list[str]]]:
    """(which room imports which, imports for types included; circles of modules)."""
    edges = {
        module_of(source.path, root): {module_of(file, root) for file in imported_files(source, root)}
        for source in package(root)
        # a door of the package, which imports what it shows when it is asked for
        if source.path != root / "tunix_lite" / "__init__.py"
    }
    rooms = {
        (room_of(one), room_of(other))
        for one, others in edges.items()
        for other in others
        if room_of(one) != room_of(other)
    }
    return rooms, circles(edges)


def room_of(module: str) -> str:
    """learner of tunix_lite.learner.update; train of tunix_lite.train."""
    return [*module.split("."), ""][1]


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, however far around; each circle sorted."""
    reach = {module: set(others) for module, others in edges.items()}
    for middle in edges:
        for others in reach.values():
            if middle in others:
                others |= reach[middle]
    found = {tuple(sorted(other for other in reach[one] if one in reach.get(other, ()))) for one in edges}
    return sorted(list(each) for each in found if len(each) > 1)


def annotated(sources: Iterable[Source]) -> Iterator[tuple[Source, ast.AST, ast.arg]]:
    """Every annotated parameter, with its function and file."""
    for source, node in functions(sources):
        yield from ((source, node, one) for one in parameters(node) if one.annotation is not None)


def functions_of_wholes(sources: Iterable[Source]) -> list[str]:
    """Functions that take a RunConfig or a ResolvedRun whole."""
    found = []
    for source, node, one in annotated(sources):
        names = {part.id for part in ast.walk(one.annotation) if isinstance(part, ast.Name)}
        if names & WHOLES:
            found.append(f"{source.path}:{node.lineno} {node.name}")
    return sorted(set(found))


def loose_parameters(sources: Iterable[Source]) -> list[str]:
    """Parameters annotated `Any`, or `Callable` without what it takes and gives."""
    return [
        f"{source.path}:{node.lineno} {node.name}({one.arg})"
        for source, node, one in annotated(sources)
        if isinstance(one.annotation, ast.Name) and one.annotation.id in ("Any", "Callable")
    ]


def empty_names(sources: Iterable[Source]) -> list[str]:
    """Where a name of EMPTY_WORDS is bound: assigned, a parameter, a loop's or a field's."""
    places = []
    for source in sources:
        for node in source.nodes:
            is_bound = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in EMPTY_WORDS
            if is_bound or (isinstance(node, ast.arg) and node.arg in EMPTY_WORDS):
                places.append(f"{source.path}:{node.lineno}")
    return places


def comments_that_say_why(sources: Iterable[Source]) -> tuple[int, int]:
    """Comments of their own line inside of functions, above a statement; and lines of code. A legend above a field or
    a constant, and a bar of dashes, do not count."""
    whys = 0
    lines = 0
    for source in sources:
        lines += len(source.code_lines)
        inside = {line for _, node in functions([source]) for line in range(node.lineno, node.end_lineno + 1)}
        texts = {line: source.lines[line - 1].strip() for line in source.own_line_comments}
        whys += sum(line in inside and not text.startswith("# --") for line, text in texts.items())
    return whys, lines


# ---- what a step enters


def part_of_trace(file: Path, root: Path) -> str:
    """The part of TRACED that a file belongs to, the first one that names it or its room."""
    inside = file.relative_to(root / "tunix_lite").as_posix()
    return next(part for part, rooms in TRACED.items() if inside.startswith(rooms))


def traced(root: Path = ROOT) -> dict[tuple[str, str], int]:
    """The functions of ours that one default GRPO step enters: (part of TRACED, file and name) -> tokens.

    A step goes from one `take` of experience to the next, on one device; the update counts once, as it is traced when
    it compiles. A function inside of another one counts with that. By sys.setprofile, in all threads.
    """
    import sys
    import tempfile
    import threading

    from tunix_lite.api import compose, train

    seen: set[tuple[str, str, int]] = set()
    takes = Counter()
    # threads that trace the update now: others may compile the sampler beside it
    tracing: set[int] = set()
    home = str(root / "tunix_lite")

    def look(frame, event, _):
        code = frame.f_code
        if not code.co_filename.startswith(home) or event not in ("call", "return"):
            return
        if code.co_qualname == "TrainStep.update":
            (tracing.add if event == "call" else tracing.discard)(threading.get_ident())
        if event == "call":
            takes[code.co_qualname] += code.co_qualname == "TaskExperience.take"
            if takes["TaskExperience.take"] == 2 or threading.get_ident() in tracing:
                seen.add((code.co_filename, code.co_qualname, code.co_firstlineno))

    settings = ["training.max_steps=3", "evaluation.num_examples=0", "rewards.workers=0"]
    with tempfile.TemporaryDirectory() as folder:
        threading.setprofile(look)
        sys.setprofile(look)
        try:
            train(compose(settings), folder)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    sizes = {}
    for file, name, line in sorted(seen):
        if name.rpartition(".")[2].startswith("<") or "<locals>" in name:
            continue
        source = read(Path(file))
        nodes = [node for node in source.nodes if isinstance(node, FUNCTIONS) and first_line(node) == line]
        if nodes:
            span = range(nodes[0].lineno, nodes[0].end_lineno + 1)
            label = f"{Path(file).relative_to(root)} {name}"
            part = part_of_trace(Path(file), root)
            sizes[part, label] = sum(word.start[0] in span for word in source.code_words)
    return sizes


def first_line(node: ast.AST) -> int:
    """Where Python says that a function begins: at its first decorator."""
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


# ---- the table


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} % ({part} of {whole:,})"


def table(root: Path) -> Iterator[tuple[str, str, str, str]]:
    """(measure, at commit 68dc782, wanted, now)."""
    sources = package(root)
    loop = definition(read(root / LOOP[0]), LOOP[1])
    packed, assignments = packed_assignments(sources)
    bare, all_parameters = unannotated_parameters(sources)
    once, all_functions = called_once(sources)
    rooms, rings = arrows(root)
    several = names_with_several_homes(sources)
    yield "lines of the package", "66,988", "45,000", f"{sum(len(source.lines) for source in sources):,}"
    yield "tokens that the doors import", "390k", "265k", f"{num_tokens(closure(root)):,}"
    yield "public names", "1,819", "1,150", f"{len(public_names(sources)):,}"
    yield "private functions named once", "19 %", "9 %", share(len(once), all_functions)
    yield "arrows between rooms", "187", "125", f"{len(rooms)}"
    yield "circles of modules", "3", "0", f"{len(rings)}"
    yield "functions with whole settings", "211", "95", f"{len(functions_of_wholes(sources))}"
    yield "parameters Any or Callable", "292", "90", f"{len(loose_parameters(sources))}"
    yield "comments that say why", "2.5 %", "5 %", share(*comments_that_say_why(sources))
    yield "found asked given kept told words", "658", "130", f"{len(empty_names(sources))}"
    yield "tokens a line", "8.6", "8.7", f"{tokens_per_line(sources):.2f}"
    yield "tuple-packed assignments", "", "3 %", share(len(packed), assignments)
    yield "public parameters without a type", "", "3 %", share(len(bare), all_parameters)
    yield "public names with several homes", "", "4", f"{len(several)}: {', '.join(sorted(several))}"
    yield f"functions over {LONG_FUNCTION} lines", "0", "0", f"{len(long_functions(sources))}"
    yield "fit: statements", "14", "20", f"{statements(loop)}"
    yield "fit: locals", "6", "15", f"{len(local_names(loop))}"


def parts(root: Path) -> Iterator[str]:
    """What the figures of the table are made of, in lines to print."""
    sources = package(root)
    rooms, rings = arrows(root)
    for title, places in (
        ("private functions named once", called_once(sources)[0]),
        ("arrows between rooms", [f"{one} -> {other}" for one, other in sorted(rooms)]),
        ("circles", [", ".join(ring) for ring in rings]),
        ("functions with whole settings", functions_of_wholes(sources)),
        ("parameters Any or Callable", loose_parameters(sources)),
        ("found asked given kept told words", empty_names(sources)),
        ("public names with several homes", sorted(names_with_several_homes(sources))),
    ):
        yield f"\n{title}"
        yield from (place.replace(f"{root}/", "") for place in places)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT, help="a checkout")
    parser.add_argument("--parts", action="store_true", help="list what the figures are made of")
    parser.add_argument("--traced", action="store_true", help="run two steps, and list what one of them enters")
    options = parser.parse_args()
    root = options.folder.resolve()
    for measure, before, wanted, now in [("measure", "68dc782", "wanted", "now"), *table(root)]:
        print(f"{measure:34} {before:>8} {wanted:>9}  {now}")
    if options.parts:
        print("\n".join(parts(root)))
    if options.traced:
        sizes = traced(root)
        print(
            f"\na step enters {len(sizes)} functions of {sum(sizes.values()):,} tokens; of the path 48 and 3,900 wanted"
        )
        for part in TRACED:
            own = {label: size for (of, label), size in sizes.items() if of == part}
            print(f"\n{part}: {len(own)} functions, {sum(own.values()):,} tokens ({', '.join(TRACED[part])})")
            for label, size in sorted(own.items(), key=lambda item: -item[1]):
                print(f"{size:6,}  {label}")


if __name__ == "__main__":
    main()
