"""The committed table of what fits where is what its script would write today."""

import importlib.util
import json
from pathlib import Path

import pytest

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
