"""The races on real weights read real rows."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import pytest

RACE = Path(__file__).parents[1] / "benchmarks" / "real" / "race.py"


@pytest.fixture(scope="module")
def race():
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("real_race", RACE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def test_a_race_reads_rows_of_gsm8k_and_asks_as_the_model_is_asked(race, tmp_path):
    rows = tmp_path / "train.jsonl"
    row = {"question": "2 and 3?", "answer": "They are <<2+3=5>>5.\n#### 5"}
    rows.write_text("".join(json.dumps(row) + "\n" for _ in range(9)))
    args = argparse.Namespace(rows=rows, models=tmp_path, gguf=None)
    for model, cell in (("smollm2", "sft smollm2 16 rows"), ("gemma3", "grpo gemma3 4 x 8 x 64, LoRA")):
        work = race.with_files(race.cells()[cell] | {"prompts": 2}, args, tmp_path)
        example = work["examples"][0]
        assert example["completion"] == "They are 5.\n#### 5"
        asked = {"smollm2": "2 and 3?", "gemma3": "Question: 2 and 3?\nAnswer:"}[model]
        assert work["template"].format(**example) == asked
