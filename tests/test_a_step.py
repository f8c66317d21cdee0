"""docs/guide/a_step.md, the page that follows a batch through a step, is what docs/a_step.py writes today."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NUMBER = re.compile(r"[-+]?\d+\.\d+")


@pytest.mark.wide
def test_the_page_of_a_step_has_the_values_of_this_code():
    code = "import a_step; print(a_step.text(), end='')"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "docs", capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    page = (ROOT / "docs/guide/a_step.md").read_text()
    assert NUMBER.sub("#", ended.stdout) == NUMBER.sub("#", page), "run python docs/a_step.py"
    here, there = ([float(x) for x in NUMBER.findall(text)] for text in (ended.stdout, page))
    assert here == pytest.approx(there, abs=2e-3)
