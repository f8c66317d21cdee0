"""What tests/house.py measures, by files small enough to count by hand."""

import re
import subprocess
import sys

import house
import pytest

ONE = '''\
"""A module."""

import os


def shown(first, second: int, *rest, third, **more):
    """Docstrings are no code."""
    # Why the two are swapped.
    first, second = second, first
    one, two = divmod(first, second)  # not packed: one value
    text: str = "typed"

    def inner(free):
        return [each for each in free if (kept := each)]

    return inner


class Noun:
    def method(self, value):
        self.value = value

    def _own(self, value):
        return None
'''


@pytest.fixture
def one(tmp_path):
    (tmp_path / "one.py").write_text(ONE)
    return house.read(tmp_path / "one.py")


def test_tokens_are_counted_without_comments_docstrings_and_layout(one):
    # text: str = "typed" is a line of 5; two comments and two docstrings count nowhere
    assert [word.string for word in one.code_words if word.start[0] == 11] == ["text", ":", "str", "=", '"typed"']
    tokens = {3: 2, 6: 18, 9: 7, 10: 10, 11: 5, 13: 6, 14: 14, 16: 2, 19: 3, 20: 8, 21: 5, 23: 8, 24: 2}
    assert one.code_lines == tokens.keys()
    assert house.tokens_per_line([one]) == pytest.approx(sum(tokens.values()) / 13)


WORLD = {
    "run_training.py": "from tunix_lite.commands import train\n",
    "conf/task.yaml": "rewards: {fn: tunix_lite.rewards.mine}\n",
    "tunix_lite/__init__.py": "def __getattr__(name):\n    from tunix_lite import run\n    return run\n",
    "tunix_lite/run.py": "from tunix_lite.learner import step\nif TYPE_CHECKING:\n    import tunix_lite.learner.rows\n",
    "tunix_lite/rewards.py": "def mine(text: str) -> float:\n    return len(text)\n",
    "tunix_lite/unused.py": "def nobody(): ...\n",
    "tunix_lite/commands/__init__.py": "",
    "tunix_lite/commands/train.py": "def main(run: RunConfig | None) -> None:\n    from tunix_lite import run\n",
    "tunix_lite/learner/__init__.py": "",
    "tunix_lite/learner/step.py": "from tunix_lite.learner.rows import laid_out\n",
    "tunix_lite/learner/rows.py": """\
def laid_out(found: Any, make: Callable, of: Callable[[int], Any]):
    def inner():
        import tunix_lite.learner.step
    # Why it is read twice.
    given = _once(found)
    # ---- a bar
    return _twice(given) + _twice(given)


# above a constant
WIDTH = 3


def _once(x): ...


def _twice(x): ...
""",
}


@pytest.fixture
def world(tmp_path):
    for name, text in WORLD.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_user_loads_what_is_imported_at_any_depth_or_named_in_settings(world):
    files = {source.path.relative_to(world).as_posix() for source in house.closure(world)}
    expected = {name for name in WORLD if name.endswith(".py")} - {"tunix_lite/unused.py"}
    # Packages are loaded with their modules, but hold nothing here.
    assert files | {name for name in expected if name.endswith("__init__.py")} == expected


def test_arrows_count_imports_for_types_and_circles_go_through_any_number_of_modules(world):
    rooms, rings = house.arrows(world)
    assert rooms == {("run", "learner"), ("commands", "run")}
    assert rings == [["tunix_lite.learner.rows", "tunix_lite.learner.step"]]


def test_names_and_parameters_are_counted_where_they_are_bound(world):
    sources = house.package(world)
    public = {place.rpartition(":")[2] for place in house.public_names(sources)}
    assert public == {"mine", "nobody", "main", "laid_out"}
    once, functions = house.called_once(sources)
    assert [place.split()[-1] for place in once] == ["_once"] and functions == 8
    assert [place.split()[-1] for place in house.functions_of_wholes(sources)] == ["main"]
    assert [place.split()[-1] for place in house.loose_parameters(sources)] == ["laid_out(found)", "laid_out(make)"]
    assert len(house.empty_names(sources)) == 2, "the parameter found, and given"
    assert house.comments_that_say_why(sources)[0] == 1, "neither the bar nor the legend"


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
