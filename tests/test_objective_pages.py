"""The pages of docs/references/objectives are what their script makes, one for each file of conf/algorithm."""

import importlib
from pathlib import Path

import pytest

from tunix_lite.algorithms.formula import PIECES
from tunix_lite.commands.program import conf_dir

DOCS = Path(__file__).parent.parent / "docs"
NAMES = sorted(file.stem for file in conf_dir().glob("algorithm/*.yaml"))


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("objective_pages")


@pytest.mark.parametrize("name", NAMES)
def test_the_page_of_an_objective_is_what_the_script_makes(pages, name):
    assert (pages.FOLDER / f"{name}.md").read_text() == pages.render(name), "python docs/objective_pages.py"


def test_every_objective_has_a_page_that_the_overview_links(pages):
    assert sorted(pages.WORDS) == NAMES == sorted(page.stem for page in pages.FOLDER.glob("*.md"))
    overview = (DOCS / "guide" / "objectives.md").read_text()
    for name in NAMES:
        assert f"[{name}]: ../references/objectives/{name}.md" in overview
        assert f"\n| [{name}] |" in overview


def test_the_figures_stand_in_the_log(pages):
    log = " ".join((DOCS / "log.md").read_text().split())
    for words in pages.WORDS.values():
        for figure in pages.re.findall(r"\d+\.\d", words.seen):
            assert figure in log, f"{words.title}: {figure}"


def test_only_pieces_with_a_formula_are_drawn(pages):
    clipping = {pages.surrogates.clip, pages.surrogates.binary_tv}
    assert set(pages.TEX) <= set(PIECES) | clipping


def test_a_setting_of_the_file_wins_over_the_common_one(pages):
    found = {setting.key: setting for setting in pages.settings("dapo")}
    assert found["agreeing_groups"].default == "replace" and found["max_rounds"].default == "3"
    assert found["advantages"].default == "standardise" and found["advantages.eps"].default == "1.0e-4"
    assert found["kl_coef"].comment.startswith("Weight of the KL divergence")
