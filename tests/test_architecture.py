"""Which way imports go, and how the package reads (docs/decisions/0018)."""

import ast
import dataclasses
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import house
import pytest

from tunix_lite.settings.config import RunConfig

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tunix_lite"
SOURCES = house.package(ROOT)
ROOMS = {  # library -> the one file that may import it
    "orbax": "tracking/checkpoint.py",
    "tensorboardX": "tracking/tracker.py",
    "safetensors": "models/hf.py",
    "huggingface_hub": "models/hub.py",
    "datasets": "tasks/hub_rows.py",
    "grain": "tasks/sources.py",
    "hydra": "settings/compose.py",
    "omegaconf": "settings/compose.py",
}
HEAVY = {"torch", "transformers", "huggingface_hub", "datasets", "matplotlib", "wandb"}
# Rooms, and modules outside of rooms: each imports only from those above it, and no more arrows than the bar below has.
ORDER = [
    "basics", "workers", "algorithms", "rewards", "distributed", "launch.py", "parallel", "tracking", "report",
    "environments", "models", "kernels", "learner", "rollout", "tasks", "settings", "planning", "inference",
    "training_clients", "serving", "runs", "train.py", "commands", "__main__.py", "api.py",
]  # fmt: skip
FILES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def imports(file: Path) -> list[str]:
    found = []
    for node in house.read(file).nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("library", ROOMS)
def test_each_outside_library_is_imported_in_one_file(library):
    users = {f.relative_to(PACKAGE).as_posix() for f in FILES if any(i.split(".")[0] == library for i in imports(f))}
    assert users == {ROOMS[library]}


def top_imports(file: Path) -> set[str]:
    """The packages that a file imports when it is imported itself."""
    top = [node for node in house.read(file).tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
    return {
        name.partition(".")[0] for name in names | {node.module for node in top if isinstance(node, ast.ImportFrom)}
    }


def test_heavy_packages_are_not_imported_by_the_core():
    assert not [file for file in FILES if HEAVY & top_imports(file)]


def room_of(file: Path) -> str:
    """The room of a file; outside of rooms the file itself."""
    return file.relative_to(PACKAGE).parts[0]


def imports_of_ours(file: Path) -> set[Path]:
    """The files of the package that a file imports, inside of functions and for types too."""
    return {other for other in house.imported_files(house.read(file), ROOT) if PACKAGE in other.parents}


def test_a_room_imports_only_from_those_above_it():
    door = PACKAGE / "__init__.py"  # it imports what it shows when it is asked for
    assert {room_of(file) for file in FILES if file != door} == set(ORDER), "give a new room its place in ORDER"
    wrong = [
        f"{file.relative_to(PACKAGE)} imports {other.relative_to(PACKAGE)}"
        for file in FILES
        for other in imports_of_ours(file)
        if door not in (file, other) and ORDER.index(room_of(other)) > ORDER.index(room_of(file))
    ]
    assert not wrong, f"{wrong}: move what both need to a room above, or pass it as an argument"


def test_what_a_launcher_imports_starts_at_once():
    """At its top it imports Python's own library and what does the same, at any depth."""
    waiting, seen = [PACKAGE / "launch.py"], set()
    while waiting:
        file = waiting.pop()
        seen.add(file)
        waiting += imports_of_ours(file) - seen
        assert top_imports(file) <= {"tunix_lite", *sys.stdlib_module_names}, file


def test_a_wheel_carries_every_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    code = {".".join(file.parent.relative_to(ROOT).parts) for file in FILES}
    conf = {".".join(("tunix_lite", *file.parent.relative_to(ROOT).parts)) for file in (ROOT / "conf").rglob("*.yaml")}
    data = {"tunix_lite.models.bundled", "tunix_lite.models.presets"}
    assert set(settings["packages"]) == code | conf | data
    for package, names in settings["package-data"].items():
        folder = ROOT.joinpath(*package.split(".")) if package != "*" else ROOT / "conf"
        assert all(list(folder.glob(name)) for name in names), f"{package}: {names}"


def test_private_and_deprecated_jax_is_not_used():
    for file in FILES:
        text = file.read_text()
        for word in ("jax._src", "pmap", "with mesh:", "jax.experimental.shard_map", "tree_map(lambda x"):
            assert word not in text, f"{file}: {word}"


# ---- how the package reads: tests/house.py measures it, and `python tests/house.py --parts` says where


def test_the_loop_is_a_page():
    loop = house.definition(house.read(ROOT / house.LOOP[0]), house.LOOP[1])
    assert house.statements(loop) <= 20, "fit() is the loop: what is not learning goes into runs/watch.py"
    assert len(house.local_names(loop)) <= 15, "fit() holds too much at once: give a part of it a name of its own"


BARS = {  # measure -> the most there may be: what stands today, so that it only becomes less
    "tokens that a user loads": (lambda: house.num_tokens(house.closure()), 314_015),
    "public names": (lambda: len(house.public_names(SOURCES)), 1_144),
    "arrows between rooms": (lambda: len(house.arrows()[0]), 122),
    "circles of modules": (lambda: len(house.arrows()[1]), 0),
    "functions that take all settings": (lambda: len(house.functions_of_wholes(SOURCES)), 72),
    "parameters that are Any or Callable": (lambda: len(house.loose_parameters(SOURCES)), 30),
    "private functions that are named once": (lambda: len(house.called_once(SOURCES)[0]), 210),
    "names that say nothing": (lambda: len(house.empty_names(SOURCES)), 42),
}


@pytest.mark.parametrize("measure", BARS)
def test_the_house_becomes_no_larger(measure):
    count, most = BARS[measure]
    assert count() <= most, f"{measure}: python tests/house.py --parts says where"


def test_functions_are_short():
    long_ones = house.long_functions(SOURCES)
    assert not long_ones, f"{long_ones}: cut them where a comment stands above a paragraph"


def test_public_parameters_have_types():
    bare, parameters = house.unannotated_parameters(SOURCES)
    assert len(bare) <= 0.03 * parameters, f"write the type of each: {bare}"


def test_values_that_do_not_belong_together_are_not_packed():
    packed, assignments = house.packed_assignments(SOURCES)
    assert len(packed) <= 0.03 * assignments, f"one assignment a line: {packed}"


def test_code_is_not_dense():
    # 8.7 was wanted. What stands today, so that it only becomes less.
    assert house.tokens_per_line(SOURCES) <= 8.66, "one statement a line; a long expression gets names for its parts"


def test_comments_stand_above_what_they_explain():
    whys, lines = house.comments_that_say_why(SOURCES)
    assert whys >= 0.05 * lines, "a paragraph of a function gets a line that says why it is there"


def test_a_public_name_has_one_home():
    several = house.names_with_several_homes(SOURCES)
    assert len(several) <= 4, f"rename all but one of each: {several}"


def is_noun(node: ast.AST) -> bool:
    """A public dataclass or NamedTuple that is no class of settings: conf/ shows those."""
    if not isinstance(node, ast.ClassDef) or node.name.startswith("_") or node.name.endswith("Config"):
        return False
    words = [ast.unparse(part) for part in (*node.decorator_list, *node.bases)]
    return any("dataclass" in word or "NamedTuple" in word for word in words)


def test_nouns_show_themselves_in_an_example():
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
        for file in FILES
        if room_of(file) != "serving" and file.name != "hints.py"
        for node in house.read(file).tree.body
        if is_noun(node) and "Example" not in (ast.get_docstring(node) or "")
    ]
    assert not found, f"write an `Example: ` into the docstring, with values or how to get one: {found}"


def test_classes_of_settings_are_named_alike():
    """All that RunConfig is built of ends in Config; but an architecture is a model's, not a run's."""
    kinds, found = [RunConfig], set()
    while kinds:
        kind = kinds.pop()
        for field in dataclasses.fields(kind):
            for inner in (hint := field.type, *getattr(hint, "__args__", ())):
                if dataclasses.is_dataclass(inner) and inner not in found:
                    found.add(inner)
                    kinds.append(inner)
    names = {kind.__name__ for kind in found} - {"Architecture", "DeltaNet", "Experts"}
    names -= {"RopeScaling", "Yarn", "LongRope"}
    names -= {"Reward", "GroupReward"}
    assert not {name for name in names if not name.endswith("Config")}


# from the loop to the gradient, by issue 34
MOST_FUNCTIONS = 48
MOST_TOKENS = 3_900


@pytest.mark.wide
def test_a_step_enters_few_functions():
    """Traced from one `take` to the next: the path of house.TRACED."""
    done = subprocess.run(
        [sys.executable, "tests/house.py", "--traced"], capture_output=True, text=True, cwd=house.ROOT, check=True
    )
    [line] = [line for line in done.stdout.splitlines() if line.startswith("path:")]
    functions, tokens = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+(?= functions| tokens)", line))
    assert functions <= MOST_FUNCTIONS and tokens <= MOST_TOKENS, line
