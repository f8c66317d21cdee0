"""The races on real weights: what they print of kept calls, whose turn it is, and who is left out."""

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


def call(seconds, tokens, **phases):
    return {"seconds": {"step": seconds} | phases, "tokens": tokens, "cpu_seconds": 2 * seconds, "peak_rss_mb": 1500.0}


def test_a_table_has_medians_of_rounds_and_names_who_is_not_measured(race, tmp_path):
    # ours makes 10, 20, 30 tokens a second, the peer 10, 5, 10: quotients 1, 4, 3
    ours = [call(1.0, 10, rollout=0.25, update=0.75), call(1.0, 20, rollout=0.5, update=0.5)]
    ours.append(call(2.0, 60, rollout=1.0, update=1.0))
    facts = {"prompt_tokens": 12, "versions": {"jax": "1"}}
    sides = {
        "ours": {"facts": facts, "first": call(4.0, 10), "without_programs": call(9.0, 10), "rounds": ours},
        "trl": {
            "facts": facts | {"prompt_tokens": 13, "versions": {"trl": "2"}},
            "first": call(6.0, 10),
            "rounds": [call(1.0, 10), call(2.0, 10), call(4.0, 40)],
        },
        "llama_cpp": {"not_measured": "no node-llama-cpp: npm install"},
    }
    about = {"date": "2026-11-27", "commit": "abc", "machine": {"processor": "P", "cores": 2, "load_before": 0.25}}
    (tmp_path / "real_grpo.json").write_text(json.dumps({"grpo smollm2 tiny": about | {"sides": sides}}))
    lines = race.table(tmp_path).splitlines()
    assert lines[2] == "| grpo smollm2 tiny | ours | 1.00 | 0.50 | 0.75 | 2.00 | 20 |  | 1.50 | 4.0, 9.0 |"
    assert lines[3] == "| grpo smollm2 tiny | trl | 2.00 |  |  | 4.00 | 10 | 3.00 | 1.50 | 6.0 |"
    assert lines[5:] == [
        "grpo smollm2 tiny, llama_cpp: not measured. no node-llama-cpp: npm install",
        "grpo smollm2 tiny: prompt_tokens differs, {'ours': 12, 'trl': 13}",
        "grpo: P, 2 cores, jax 1, trl 2; 3 rounds; load before 0.25 at most; 2026-11-27 abc",
    ]


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
