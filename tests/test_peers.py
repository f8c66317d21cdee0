"""The race against other frameworks: its arithmetic, its workloads, the turns, and the page of its results."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.extend([str(ROOT / "benchmarks" / "peers"), str(ROOT / "docs")])


@pytest.fixture
def arithmetic():
    return importlib.import_module("arithmetic")


@pytest.fixture
def workloads():
    return importlib.import_module("workloads")


def step(whole, rollout=1.0, reference=1.0):
    return {"rollout": rollout, "reference": reference, "update": whole - rollout - reference, "step": whole}


def test_a_ratio_is_the_median_of_the_rounds_not_the_ratio_of_medians(arithmetic):
    # rounds: 8/4 = 2, 9/3 = 3, 20/5 = 4; the medians would give 9/4
    found = arithmetic.ratios([step(8.0), step(9.0), step(20.0)], [step(4.0), step(3.0), step(5.0)])
    assert found["step"] == 3.0
    with pytest.raises(ValueError, match="shorter"):
        arithmetic.ratios([step(8.0), step(9.0)], [step(4.0)])


def test_a_step_of_the_fixed_workload_needs_what_pencil_and_paper_say(workloads):
    # a layer: q and o 256 x 256, k and v 256 x 64, gate, up, down 256 x 1024
    layer = 2 * 256 * 256 + 2 * 256 * 64 + 3 * 256 * 1024
    one = 6 * (2 * layer * 96 + 4 * 256 * 96 * 97 / 2) + 2 * 256 * 512 * 64
    assert workloads.step_flops(workloads.workload("fixed")) == 5 * 64 * one
    # the frozen weights of LoRA get no gradient
    assert workloads.step_flops(workloads.workload("lora")) == 4 * 64 * one


def test_long_tails_have_a_quarter_of_the_longest_on_average(workloads):
    for rows, longest in ((64, 256), (64, 64), (32, 100), (8, 16)):
        lengths = workloads.long_tails(rows, longest)
        assert len(lengths) == rows
        assert sum(lengths) == rows * longest // 4
        assert max(lengths) == longest
        assert min(lengths) >= 1
        # a tail, not two lengths: the middle one is below the mean
        assert sorted(lengths)[rows // 2] < longest / 4


WORKER = """
import sys, time
sys.path.insert(0, {peers!r})
from turns import Turns
turns = Turns(lambda: 7.0)
print("what a framework prints")
turns.ready(import_seconds=0.0, setup_seconds=0.0, trained_parameters=1, versions={{}})
while turns.wait():
    with open({order!r}, "a") as order:
        order.write(sys.argv[1])
    for phase in ("rollout", "reference"):
        with turns.phase(phase):
            time.sleep(0.003)
    time.sleep(0.003)
    turns.lengths = [turns.work["new_tokens"] - (sys.argv[1] == "d")] * 64
    turns.done()
"""


def test_workers_take_turns_and_one_that_fails_is_left_out(tmp_path, monkeypatch, workloads):
    run = importlib.import_module("run")
    order = tmp_path / "order"
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(peers=str(ROOT / "benchmarks" / "peers"), order=str(order)))
    failing = tmp_path / "failing.py"
    failing.write_text("raise SystemExit('no such framework')")
    monkeypatch.setattr(
        run,
        "WORKERS",
        {"a": (script, ["a"]), "b": (script, ["b"]), "c": (failing, []), "d": (script, ["d"]), "ours": (script, ["o"])},
    )
    monkeypatch.setattr(run, "VENVS", tmp_path)
    monkeypatch.setattr(run, "python_of", lambda framework: sys.executable)

    found = run.race(workloads.workload("fixed"), ["a", "b", "c", "d", "ours"], 2)

    # the first step of each, then two rounds
    assert order.read_text() == "abdo" + "abo" * 2
    assert "no such framework" in found["frameworks"]["c"]["error"]
    assert "d sampled 4032 tokens in place of 4096" in found["frameworks"]["d"]["error"]
    assert len(found["frameworks"]["a"]["steps"]) == 2
    assert set(found["frameworks"]["a"]["times_ours"]) == {"rollout", "reference", "update", "step"}
    assert found["matmul_peak_gflops"] == [7.0, 7.0]


def test_the_page_of_benchmarks_is_what_the_results_give():
    page = importlib.import_module("benchmarks_page")
    assert page.PAGE.read_text() == page.render(), "python docs/benchmarks_page.py"


def test_results_name_no_paths_and_no_addresses():
    for file in (ROOT / "benchmarks" / "results").rglob("*.json"):
        text = file.read_text()
        assert "://" not in text, file.name
        assert "/work" not in text, file.name
        assert "/home" not in text, file.name


def test_a_loss_stands_on_the_page_as_plainly_as_a_win(tmp_path):
    """A peer that takes half of our time, and one that failed."""
    page = importlib.import_module("benchmarks_page")
    run = importlib.import_module("run")
    workloads = importlib.import_module("workloads")
    facts = {"import_seconds": 1.0, "setup_seconds": 1.0, "trained_parameters": 5, "versions": {"x": "1"}}
    found = {
        "tunix": {"error": "it ended"},
        "trl": {"facts": facts, "first_step": 9.0, "steps": [step(3.0)], "peak_rss_mb": 900},
        "ours": {"facts": facts, "first_step": 9.0, "steps": [step(6.0)], "peak_rss_mb": 1000},
    }
    machine = {"processor": "P", "cores": 2, "memory_gb": 8.0, "load_before": 3.0}
    about = {"date": "2026-11-22", "commit": "abc", "command": "c", "machine": machine}
    result = run.result(workloads.workload("fixed"), found, [200.0], 5.0)
    (tmp_path / "peers_fixed.json").write_text(json.dumps(about | result))
    text = page.render(tmp_path)
    assert "| fixed lengths | - | 0.50 | - | - |" in text
    assert "Tunix gave no figures: it ended" in text
    assert "3.0: **others computed, too**" in text

    # Of another machine the same is said, and a folder without races is left out.
    (tmp_path / "empty").mkdir()
    (tmp_path / "small_machine").mkdir()
    (tmp_path / "peers_fixed.json").rename(tmp_path / "small_machine" / "peers_fixed.json")
    text = page.render(tmp_path)
    assert "another machine: small_machine" in text and "another machine: empty" not in text
    assert "| fixed lengths | - | 0.50 | - | - |" in text and "| fixed lengths | - | 3.00 | 6.00 | - |" in text
    assert "Fixed lengths: Tunix gave no figures: it ended" in text
    assert "| fixed lengths | 200 | 3.0: **others computed, too** | 1 | 2026-11-22 | abc |" in text
