"""Pages and pictures of the documentation are what their scripts write today."""

import importlib
import importlib.util
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tunix_lite.settings.compose import conf_dir

DOCS = Path(__file__).parents[1] / "docs"
PICTURES = sorted((DOCS / "pictures").glob("*.svg"))


def test_pictures_are_what_the_scripts_draw(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "drawings")
    drawn = importlib.import_module("make").pictures()
    assert len(drawn) >= 10
    assert {file.stem: file.read_text() for file in PICTURES} == drawn, "python docs/drawings/make.py"


def test_a_picture_says_in_words_what_it_shows_and_keeps_inside_its_card():
    kind = "{http://www.w3.org/2000/svg}"
    for root in (ET.parse(file).getroot() for file in PICTURES):
        assert len(root.find(f"{kind}title").text) > 10
        width, height = float(root.get("width")), float(root.get("height"))
        for text in root.iter(f"{kind}text"):
            x, y, classes = float(text.get("x")), float(text.get("y")), (text.get("class") or "").split()
            # a generous width of a letter, in pixels
            words = len(text.text) * (9.9 if "big" in classes else 6.6 if "small" in classes else 7.6)
            left = x - (words if "end" in classes else words / 2 if "mid" in classes else 0)
            assert left > -6 and left + words < width + 6 and 0 < y < height, text.text


# ---- a batch through a step


NUMBER = re.compile(r"[-+]?\d+\.\d+")


@pytest.mark.wide
def test_the_page_of_a_step_has_the_values_of_this_code():
    code = "import a_step; print(a_step.text(), end='')"
    ended = subprocess.run([sys.executable, "-c", code], cwd=DOCS, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    page = (DOCS / "guide/a_step.md").read_text()
    assert NUMBER.sub("#", ended.stdout) == NUMBER.sub("#", page), "run python docs/a_step.py"
    here, there = ([float(x) for x in NUMBER.findall(text)] for text in (ended.stdout, page))
    assert here == pytest.approx(there, abs=2e-3)


# ---- objectives


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("objective_pages")


def parts(page: str) -> dict[str, str]:
    """{name: section} of the page, and what stands above them under ""."""
    top, *sections = page.split("\n## ")
    return {"": top.strip()} | {section.partition("\n")[0]: section.strip() for section in sections}


def test_the_page_of_objectives_is_what_the_script_makes_and_the_overview_links_its_sections(pages):
    names = sorted(file.stem for file in conf_dir().glob("algorithm/*.yaml"))
    found = parts(pages.PAGE.read_text())
    assert sorted(pages.WORDS) == names and [*found] == ["", *pages.WORDS]
    made = {name: pages.section(name)[3:] for name in pages.WORDS}
    assert found == {"": pages.top()} | made, "python docs/objective_pages.py"
    overview = (DOCS / "guide" / "objectives.md").read_text()
    for name in names:
        assert f"[{name}]: ../references/objectives.md#{name}" in overview and f"\n| [{name}] |" in overview


def test_a_section_names_the_settings_that_grpo_has_otherwise(pages):
    """By hand, from the files in conf/algorithm."""
    found = parts(pages.PAGE.read_text())
    assert "`ratio: sequence_ratio`, `weighting: per_sequence`" in " ".join(found["gspo"].split())
    assert "`clip_low: 0.0003`, `clip_high: 0.0004`" in " ".join(found["gspo"].split())
    assert "Other than `grpo`: `agreeing_groups: replace`, `max_rounds: 3`" in found["dapo"]
    assert "Other than" not in found["grpo"]


# ---- the table of what fits where


SCRIPT = Path(__file__).parents[1] / "benchmarks" / "fits.py"


@pytest.fixture(scope="module")
def fits():
    spec = importlib.util.spec_from_file_location("fits", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "model, way",
    [
        ("gemma3_1b", "all"),
        *(pytest.param(*row, marks=pytest.mark.wide) for row in [("gemma3_27b", "LoRA"), ("llama3.3_70b", "all")]),
    ],
)
def test_rows_are_current(fits, model, way):
    """If this fails, `python benchmarks/fits.py` writes the table anew."""
    known = json.loads(fits.COMPILED.read_text()) if fits.COMPILED.exists() else {}
    assert fits.row(model, way, known) in fits.PAGE.read_text().splitlines()


def test_the_table_has_every_cell(fits):
    tables = (
        (fits.HEAD, fits.MODELS, fits.WAYS, fits.TARGETS),
        (fits.MIXTURE_HEAD, fits.MIXTURES, fits.MIXTURE_WAYS, fits.MIXTURE_TARGETS),
    )
    text = fits.PAGE.read_text()
    for part, (head, models, ways, targets) in zip(text.split(fits.MIXTURE_HEAD.split("\n\n")[0]), tables):
        rows = [line for line in part.splitlines() if line.startswith("|")]
        assert len(rows) == 2 + len(models) * len(ways)
        assert {line.count("|") for line in rows} == {len(targets) + 3}
        assert head.splitlines()[-2] in rows
