"""docs/references/objectives.md is what its script makes, a section for each file of conf/algorithm."""

import importlib
import re
from pathlib import Path

import pytest

from tunix_lite.settings.compose import conf_dir

DOCS = Path(__file__).parent.parent / "docs"
NAMES = sorted(file.stem for file in conf_dir().glob("algorithm/*.yaml"))


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("objective_pages")


def parts(page: str) -> dict[str, str]:
    """{name: section} of the page, and what stands above them under ""."""
    top, *sections = page.split("\n## ")
    return {"": top} | {section.partition("\n")[0]: section.strip() for section in sections}


@pytest.mark.parametrize("name", NAMES)
def test_the_section_of_an_objective_is_what_the_script_makes(pages, name):
    assert parts(pages.PAGE.read_text())[name] == pages.section(name)[3:], "python docs/objective_pages.py"


def test_every_objective_has_a_section_that_the_overview_links(pages):
    found = parts(pages.PAGE.read_text())
    assert sorted(pages.WORDS) == NAMES and [*found] == ["", *pages.WORDS]
    assert found[""].strip() == pages.top(), "python docs/objective_pages.py"
    overview = (DOCS / "guide" / "objectives.md").read_text()
    for name in NAMES:
        assert f"[{name}]: ../references/objectives.md#{name}" in overview
        assert f"\n| [{name}] |" in overview


def test_the_figures_stand_in_the_log(pages):
    log = " ".join((DOCS / "log.md").read_text().split())
    for name, words in pages.WORDS.items():
        for figure in re.findall(r"\d+\.\d", words.seen + pages.BEFORE):
            assert figure in log, f"{name}: {figure}"


def test_a_setting_of_the_file_wins_over_the_common_one(pages):
    found = pages.settings("dapo")
    assert found["agreeing_groups"] == "replace" and found["max_rounds"] == "3"
    assert found["advantages"] == "standardise" and found["advantages.eps"] == "0.0001"
    assert found["kl_coef"] == "0"


def test_a_section_names_the_settings_that_grpo_has_otherwise(pages):
    """By hand, from the files in conf/algorithm."""
    found = parts(pages.PAGE.read_text())
    assert "`ratio: sequence_ratio`, `weighting: per_sequence`" in " ".join(found["gspo"].split())
    assert "`clip_low: 0.0003`, `clip_high: 0.0004`" in " ".join(found["gspo"].split())
    assert "Other than `grpo`: `agreeing_groups: replace`, `max_rounds: 3`" in found["dapo"]
    assert "Other than" not in found["grpo"]
    assert "`beta: 0.1`" in found["dpo"] and "`divergence: token`" in found["distill"]
