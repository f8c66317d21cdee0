"""Measures how the package reads: density, names, annotations, and the size of the path from `train` to the loss.

    python tests/house.py           this checkout
    python tests/house.py FOLDER    another one, such as an older state of the code
    python tests/house.py --parts   also what each function of the two paths comes to, each unannotated parameter ...

Everything is counted in the syntax tree and in Python's own tokens, so breaking a line or moving a function to another
file improves none of the figures in tokens. The printed table shows beside today's figures those of the review of
November 2026, which were counted in the same way. This file only measures: a limit belongs into test_architecture.py.
"""

import argparse
import ast
import functools
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONG_FUNCTION = 60  # lines
LONG_LINE = 100  # columns
SAME_EVERYWHERE = {"main"}  # public names that may have many homes: each program has one

# ---- the paths, the one place to edit when functions move: (file below the root, function, class or method; "": all)

# What runs in every step, from the command to the gradient.
STRICT_PATH = (
    ("run_training.py", ""),
    ("tunix_lite/commands/train.py", "main"),
    ("tunix_lite/commands/train.py", "start"),
    ("tunix_lite/train.py", "train"),
    ("tunix_lite/train.py", "fit"),
    ("tunix_lite/runs/experience.py", "FreshExperience.take"),
    ("tunix_lite/runs/experience.py", "FreshExperience._collect"),
    ("tunix_lite/runs/experience.py", "FreshExperience._lay_out"),
    ("tunix_lite/algorithms/grpo.py", "GRPO.collect"),
    ("tunix_lite/algorithms/groups.py", "sample_groups"),
    ("tunix_lite/algorithms/groups.py", "Groups.batch"),
    ("tunix_lite/algorithms/groups.py", "Groups.token_weights"),
    ("tunix_lite/algorithms/groups.py", "Groups.token_advantages"),
    ("tunix_lite/learner/rows.py", "RowLayout.lay_out"),
    ("tunix_lite/learner/rows.py", "RowLayout._unpacked"),
    ("tunix_lite/learner/step.py", "TrainStep.update"),
    ("tunix_lite/learner/step.py", "TrainStep.gradient"),
    ("tunix_lite/learner/micro_batches.py", "accumulate"),
    ("tunix_lite/learner/micro_batches.py", "_sum_parts"),
    ("tunix_lite/learner/policy.py", "batch_scores"),
    ("tunix_lite/learner/policy.py", "scored_hidden"),
    ("tunix_lite/algorithms/grpo.py", "GRPO.loss"),
    ("tunix_lite/algorithms/ratios.py", "token_terms"),
    ("tunix_lite/algorithms/surrogates.py", "gain_of"),
    ("tunix_lite/algorithms/surrogates.py", "clip"),
    ("tunix_lite/learner/optim.py", "apply_update"),
)
# The same without the command: from `train` to the loss.
LOOP_PATH = tuple(part for part in STRICT_PATH if not part[0].startswith(("run_training", "tunix_lite/commands/")))
# And what a reader must open to believe it: settings, set-up, the batch, the policy, prompts and rewards, the nouns.
HONEST_PATH = (
    *STRICT_PATH,
    ("tunix_lite/commands/train.py", "check"),
    ("tunix_lite/commands/program.py", "main"),
    ("tunix_lite/commands/program.py", "_check_runs"),
    ("tunix_lite/commands/program.py", "_run_of"),
    ("tunix_lite/commands/program.py", "compose_values"),
    ("tunix_lite/config.py", "RunConfig"),
    ("tunix_lite/config.py", "build"),
    ("tunix_lite/config.py", "_build_dataclass"),
    ("tunix_lite/config.py", "_build_target"),
    ("tunix_lite/config.py", "_find_target"),
    ("tunix_lite/runs/setup.py", "Parts"),
    ("tunix_lite/runs/setup.py", "prepare"),
    ("tunix_lite/runs/setup.py", "find_parts"),
    ("tunix_lite/runs/session.py", "open_run"),
    ("tunix_lite/runs/learner.py", "Learner"),
    ("tunix_lite/runs/learner.py", "build_learner"),
    ("tunix_lite/runs/learner.py", "sampler_of_run"),
    ("tunix_lite/runs/experience.py", "Experience"),
    ("tunix_lite/planning/batch_size.py", "BatchPlan"),
    ("tunix_lite/planning/batch_size.py", "plan_batch"),
    ("tunix_lite/planning/batch_size.py", "plan_rows"),
    ("tunix_lite/algorithms/algorithm.py", "Policy"),
    ("tunix_lite/learner/policy.py", "make_policy"),
    ("tunix_lite/learner/policy.py", "scatter_to_rows"),
    ("tunix_lite/learner/rows.py", "RowLayout"),
    ("tunix_lite/learner/step.py", "TrainStep"),
    ("tunix_lite/learner/micro_batches.py", "cut"),
    ("tunix_lite/tasks/task.py", "Task"),
    ("tunix_lite/tasks/task.py", "Grader"),
    ("tunix_lite/tasks/prompt_text.py", "PromptText.ask"),
    ("tunix_lite/tasks/prompt_text.py", "PromptText.prompt"),
    ("tunix_lite/tasks/prompt_text.py", "fitted_prompts"),
    ("tunix_lite/tasks/reward_calls.py", "RewardCalls.submit"),
    ("tunix_lite/tasks/reward_calls.py", "RewardCalls._call"),
    ("tunix_lite/tasks/reward_calls.py", "values_of"),
    ("tunix_lite/algorithms/grpo.py", "GRPO"),
    ("tunix_lite/runs/experience.py", "FreshExperience._examples"),
    ("tunix_lite/runs/experience.py", "FreshExperience._mini_batch"),
    ("tunix_lite/learner/policy.py", "_gathered"),
    ("tunix_lite/learner/optim.py", "round_to_kept"),
    ("tunix_lite/learner/micro_batches.py", "_by_shard"),
    ("tunix_lite/algorithms/advantages.py", "standardise"),
    ("tunix_lite/types.py", ""),
)
LOOP = ("tunix_lite/train.py", "fit")

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
    """A file, its syntax tree and its tokens."""

    path: Path
    lines: list[str]
    tree: ast.Module
    tokens: list[tokenize.TokenInfo]

    @functools.cached_property
    def words(self) -> list[tokenize.TokenInfo]:
        """The tokens without comments and layout. A docstring is one token."""
        return [token for token in self.tokens if token.type not in LAYOUT]

    @functools.cached_property
    def docstring_lines(self) -> set[int]:
        """The numbers of all lines of docstrings."""
        found = [docstring(node) for node in ast.walk(self.tree) if isinstance(node, WITH_DOCSTRING)]
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
    text = path.read_text(encoding="utf-8")
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    return Source(path, text.splitlines(), ast.parse(text), tokens)


def package(root: Path = ROOT) -> list[Source]:
    """All files of the package."""
    return [read(path) for path in sorted((root / "tunix_lite").rglob("*.py"))]


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
        assigned = [node for node in ast.walk(source.tree) if isinstance(node, ast.Assign)]
        total += len(assigned)
        for node in assigned:
            targets = [type(target) for target in node.targets]
            if targets == [ast.Tuple] and isinstance(node.value, ast.Tuple):
                places.append(f"{source.path}:{node.lineno}")
    return places, total


def own_line_comments(sources: Iterable[Source]) -> tuple[int, int]:
    """Comments on a line of their own, and all lines that are not blank, docstrings included."""
    sources = list(sources)
    comments = sum(len(source.own_line_comments) for source in sources)
    return comments, sum(1 for source in sources for line in source.lines if line.strip())


def long_lines(sources: Iterable[Source], limit: int = LONG_LINE) -> tuple[list[str], int]:
    """Lines of code, not of docstrings and comments, that are wider than `limit` columns; and all lines of code."""
    sources = list(sources)
    places = [
        f"{source.path}:{line}"
        for source in sources
        for line in sorted(source.code_lines)
        if len(source.lines[line - 1]) > limit
    ]
    return places, sum(len(source.code_lines) for source in sources)


# ---- names and types


def unannotated_parameters(sources: Iterable[Source]) -> tuple[list[str], int]:
    """Parameters of public functions that have no annotation, as file:line function(parameter); and all of them.

    Public is what has no leading underscore: functions and methods, those inside other functions too. Special methods,
    self, cls, *args and **kwargs do not count.
    """
    places = []
    total = 0
    for source in sources:
        for node in ast.walk(source.tree):
            if not isinstance(node, FUNCTIONS) or node.name.startswith("_"):
                continue
            given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            counted = [parameter for parameter in given if parameter.arg not in ("self", "cls")]
            total += len(counted)
            places += [
                f"{source.path}:{node.lineno} {node.name}({parameter.arg})"
                for parameter in counted
                if parameter.annotation is None
            ]
    return places, total


def names_with_several_homes(sources: Iterable[Source]) -> dict[str, list[Path]]:
    """Public functions and classes at the top of more than one file: {name: those files}."""
    homes = defaultdict(list)
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_"):
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
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, FUNCTIONS) and num_lines(node) > limit
    ]


def definition(source: Source, name: str) -> ast.AST:
    """The function, class or method of this name, as in `GRPO.loss`. Raises LookupError if it is not there."""
    found = source.tree
    for part in name.split("."):
        inside = [node for node in found.body if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node.name == part]
        if not inside:
            raise LookupError(f"{source.path} has no {name} any more: correct the table at the top of tests/house.py")
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


@dataclass(frozen=True)
class Size:
    lines: int  # with docstrings, comments and blank lines
    code: int  # lines of code, without them
    tokens: int  # without comments; a docstring as one
    files: int


def path_size(path: Sequence[tuple[str, str]], root: Path = ROOT) -> Size:
    """What the functions of a path come to. A line counts once, though a class and its method are both in the table."""
    wanted = defaultdict(set)
    for file, name in path:
        if not (root / file).is_file():
            raise LookupError(f"{root / file} is not there any more: correct the table at the top of tests/house.py")
        source = read(root / file)
        node = definition(source, name) if name else None
        wanted[source.path] |= set(range(node.lineno, node.end_lineno + 1) if node else range(1, len(source.lines) + 1))
    code = sum(len(lines & read(file).code_lines) for file, lines in wanted.items())
    words = sum(token.start[0] in lines for file, lines in wanted.items() for token in read(file).words)
    return Size(sum(map(len, wanted.values())), code, words, len(wanted))


# ---- the table


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} % ({part} of {whole:,})"


def table(root: Path) -> Iterator[tuple[str, str, str, str]]:
    """(measure, at the review of commit 412ac65, target of November 2026, now)."""
    sources = package(root)
    strict = path_size(STRICT_PATH, root)
    inner = path_size(LOOP_PATH, root)
    honest = path_size(HONEST_PATH, root)
    loop = definition(read(root / LOOP[0]), LOOP[1])
    packed, assignments = packed_assignments(sources)
    bare, parameters = unannotated_parameters(sources)
    wide, code_lines = long_lines(sources)
    several = names_with_several_homes(sources)
    long_ones = ", ".join(f"{place.split()[-1]} {lines}" for place, lines in long_functions(sources))

    with_command = [*sources, read(root / "run_training.py")]
    yield "files", "99", "", f"{len(with_command)}"
    yield "lines", "13,918", "", f"{sum(len(source.lines) for source in with_command):,}"
    yield "tokens a line", "10.7", "<= 8.5", f"{tokens_per_line(sources):.1f}"
    yield "tuple-packed assignments", "9.7 %", "<= 3 %", share(len(packed), assignments)
    yield "own-line comments", "0.9 %", ">= 5 %", share(*own_line_comments(sources))
    yield "public parameters without a type", "30 %", "<= 3 %", share(len(bare), parameters)
    yield "public names with several homes", "28", "<= 5", f"{len(several)}: {', '.join(sorted(several))}"
    yield f"functions over {LONG_FUNCTION} lines", "3", "", long_ones or "0"
    yield f"lines over {LONG_LINE} columns", "9.9 %", "", share(len(wide), code_lines)
    yield "fit: lines", "126", "", f"{num_lines(loop)}"
    yield "fit: statements", "", "<= 20", f"{statements(loop)}"
    yield "fit: locals", "50", "<= 15", f"{len(local_names(loop))}"
    yield "strict path: lines", "362", "", f"{strict.lines}"
    yield "strict path: lines of code", "", "", f"{strict.code}"
    yield "strict path: tokens", "3,703", "<= 2,700", f"{strict.tokens:,}"
    yield "strict path: files", "8", "", f"{strict.files}"
    yield "from train: lines", "", "<= 260", f"{inner.lines}"
    yield "from train: lines of code", "", "<= 260", f"{inner.code}"
    yield "from train: tokens", "", "<= 2,700", f"{inner.tokens:,}"
    yield "honest path: lines", "1,214", "", f"{honest.lines:,}"
    yield "honest path: lines of code", "", "", f"{honest.code:,}"
    yield "honest path: tokens", "10,531", "<= 7,500", f"{honest.tokens:,}"
    yield "honest path: files", "16", "<= 12", f"{honest.files}"


def parts(root: Path) -> Iterator[str]:
    """What the figures of the table are made of, in lines to print."""
    for title, path in (("strict path", STRICT_PATH), ("the rest of the honest path", HONEST_PATH[len(STRICT_PATH) :])):
        yield f"\n{title}: lines, of code, tokens"
        for file, name in path:
            size = path_size([(file, name)], root)
            yield f"{size.lines:6} {size.code:6} {size.tokens:6,}  {file} {name}"
    sources = package(root)
    for title, places in (
        ("tuple-packed assignments", packed_assignments(sources)[0]),
        ("public parameters without a type", unannotated_parameters(sources)[0]),
        (f"lines over {LONG_LINE} columns", long_lines(sources)[0]),
    ):
        yield f"\n{title}"
        yield from (place.removeprefix(f"{root}/") for place in places)
    yield "\npublic names with several homes"
    for name, files in sorted(names_with_several_homes(sources).items()):
        yield f"{name}: {', '.join(file.relative_to(root).as_posix() for file in files)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT, help="a checkout")
    parser.add_argument("--parts", action="store_true", help="list what the figures are made of")
    given = parser.parse_args()
    root = given.folder.resolve()
    rows = [("measure", "review", "target", "now"), *table(root)]
    for measure, review, target, now in rows:
        print(f"{measure:34} {review:>8} {target:>9}  {now}")
    if given.parts:
        print("\n".join(parts(root)))


if __name__ == "__main__":
    main()
