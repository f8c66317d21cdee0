"""What tests/house.py measures, by files small enough to count by hand."""

import ast
from textwrap import dedent

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
OTHER = """\
def shown() -> None:
    pass


def main() -> None: ...


def _private(x): ...
"""


@pytest.fixture
def sources(tmp_path):
    files = {"run_training.py": "", "tunix_lite/one.py": ONE, "tunix_lite/room/other.py": OTHER}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return house.package(tmp_path)


def function(text: str) -> ast.AST:
    return ast.parse(dedent(text)).body[0]


def test_tokens_are_counted_without_comments_docstrings_and_layout(sources):
    one, _ = sources
    # import os, a line of 2 tokens; text: str = "typed", a line of 5; two comments and two docstrings count nowhere.
    assert [word.string for word in one.code_words if word.start[0] == 3] == ["import", "os"]
    assert [word.string for word in one.code_words if word.start[0] == 11] == ["text", ":", "str", "=", '"typed"']
    tokens = {3: 2, 6: 18, 9: 7, 10: 10, 11: 5, 13: 6, 14: 14, 16: 2, 19: 3, 20: 8, 21: 5, 23: 8, 24: 2}
    assert one.code_lines == tokens.keys()
    assert house.tokens_per_line([one]) == pytest.approx(sum(tokens.values()) / 13)


def test_only_a_tuple_assigned_to_a_tuple_is_packed(sources):
    places, total = house.packed_assignments(sources)
    assert [place.rsplit(":")[-1] for place in places] == ["9"]
    assert total == 3, "lines 9, 10 and 21; an annotated assignment does not count"


def test_comments_at_the_end_of_a_line_are_not_on_their_own(sources):
    assert house.own_line_comments(sources) == (1, 16 + 4), "lines that are not blank: 16 and 4"


def test_parameters_of_public_functions_need_types(sources):
    places, total = house.unannotated_parameters(sources)
    found = {place.split()[-1] for place in places}
    assert found == {"shown(first)", "shown(third)", "inner(free)", "method(value)"}
    assert total == 5, "those four and shown(second); not self, *rest, **more, nor those of private functions"


def test_a_public_name_has_one_home(sources):
    assert {name: len(files) for name, files in house.names_with_several_homes(sources).items()} == {"shown": 2}


def test_lines_and_functions_are_long_beyond_a_limit(sources):
    assert [place.split()[-1] for place, _ in house.long_functions(sources, limit=10)] == ["shown"]
    assert house.long_functions(sources, limit=10)[0][1] == 11, "lines 6 to 16"
    assert house.long_functions(sources, limit=11) == []
    places, total = house.long_lines(sources, limit=60)
    assert ([place.rsplit(":")[-1] for place in places], total) == (["10"], 13 + 4)


def test_statements_and_locals_are_counted_at_any_depth(sources):
    shown = house.definition(sources[0], "shown")
    assert house.statements(shown) == 6, "three assignments, a def and two returns"
    assert house.local_names(shown) == {"first", "second", "one", "two", "text", "each", "kept"}
    assert house.statements(function("def f():\n    with a as b:\n        for c in d:\n            pass")) == 3


def test_a_path_counts_each_line_once_and_names_what_moved(sources, tmp_path):
    whole, method = ("tunix_lite/one.py", "Noun"), ("tunix_lite/one.py", "Noun.method")
    assert house.path_size([method], tmp_path) == house.Size(lines=2, code=2, tokens=8 + 5, files=1)
    assert house.path_size([whole, method], tmp_path) == house.Size(6, 5, 3 + 8 + 5 + 8 + 2, 1), "line 22 is blank"
    assert house.path_size([method, ("tunix_lite/room/other.py", "")], tmp_path).files == 2
    shown = house.path_size([("tunix_lite/one.py", "shown")], tmp_path)
    assert (shown.lines, shown.code) == (11, 7), "a docstring, a comment and two blank lines are no code"
    with pytest.raises(LookupError, match="one.py has no Noun.gone any more: correct the table"):
        house.path_size([("tunix_lite/one.py", "Noun.gone")], tmp_path)
    with pytest.raises(LookupError, match="gone.py is not there any more: correct the table"):
        house.path_size([("tunix_lite/gone.py", "")], tmp_path)


def test_the_tables_name_what_is_there():
    """Whoever moves a function of a path corrects the table in the same commit."""
    strict, honest = house.path_size(house.STRICT_PATH), house.path_size(house.HONEST_PATH)
    assert strict.tokens < honest.tokens and strict.files <= honest.files
