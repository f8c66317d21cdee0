"""Writes every picture of the documentation: python docs/drawings/make.py"""

import inspect
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import diagrams
import plots

PICTURES = Path(__file__).parent.parent / "pictures"


def pictures() -> dict[str, str]:
    """{name: text of the SVG}, one for each public function of the two files."""
    made = {}
    for module in (diagrams, plots):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_"):
                made[name] = str(function())
    return made


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (PICTURES / f"{name}.svg").write_text(text)
        print(f"{name}.svg")
