"""The scripts of benchmarks/: the gate, the cells of accelerators, a GPU's parts, and the race of frameworks."""

import ast
import functools
import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest
from test_hardware import needs_compiler

from tunix_lite.planning.hardware import devices_of, find_machine

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
sys.path.extend([str(BENCHMARKS), str(BENCHMARKS / "peers"), str(ROOT / "docs")])


def script_of(name: str) -> ModuleType:
    """A fresh module of this script."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


accelerators = script_of("accelerators")
Cell, TARGETS = accelerators.Cell, accelerators.TARGETS


@pytest.fixture(scope="module")
def gate():
    return script_of("gate")


def test_scripts_import_names_that_are_there():
    """Also those inside of functions, which no test calls."""
    scripts = [*BENCHMARKS.rglob("*.py"), *(ROOT / "examples").glob("*.py"), *(ROOT / "docs").glob("*.py")]
    for script in scripts:
        for node in ast.walk(ast.parse(script.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tunix_lite"):
                module = importlib.import_module(node.module)
                for name in (alias.name for alias in node.names):
                    is_there = hasattr(module, name) or importlib.util.find_spec(f"{node.module}.{name}")
                    assert is_there, f"{script.name}: {node.module} has no {name}"


# ---- the gate fails at what is worse, and says what to do


KNOWN = {"0.10": {"jax": "0.10.2", "counts": {"a/update": {"flops": 100.0, "kernels": 7}, "run": {"slot_use": 0.5}}}}


def counts(flops: float = 100.0, kernels: int = 7, slot_use: float = 0.5) -> dict:
    return {"a/update": {"flops": flops, "kernels": kernels}, "run": {"slot_use": slot_use}}


@pytest.mark.parametrize(
    "found, status, said",
    [
        (counts(), 0, "3 counts of 2 programs; none is worse"),
        (counts(kernels=8), 1, "WORSE: a/update: kernels 7 -> 8 (+14.3%)"),
        (counts(slot_use=0.25), 1, "WORSE: run: slot_use 0.5 -> 0.25 (-50.0%)"),
        ({"a/update": counts()["a/update"]}, 1, "WORSE: run: slot_use is gone"),
    ],
    ids=["same", "worse", "less-use", "gone"],
)
def test_a_worse_count_fails_and_a_better_one_is_named(gate, found, status, said):
    code, lines = gate.verdict(KNOWN, found, "0.10.2")
    assert code == status and said in "\n".join(lines)
    # what fails says what to do
    assert ("docs/log.md" in lines[-1] and "gate.py --accept" in lines[-1]) == bool(status)


def test_the_committed_counts_are_of_all_programs(gate):
    known = json.loads(gate.VALUES.read_text())
    wanted = {f"{name}/{program}" for name, (_, _, _, programs) in gate.PROGRAMS.items() for program in programs}
    for values in known.values():
        assert set(values["counts"]) == {*wanted, "rollout", "run"}


# ---- what training chooses on a GPU or TPU, its compiler takes: families x attention x tp x sync x packing x remat


@functools.cache
def refusals(target: str) -> dict:
    platform = find_machine(target).hardware.platform
    return {cell: accelerators.refusal(cell, platform) for cell in accelerators.cells(target)}


@pytest.mark.parametrize(
    "target, refused, said, count",
    [
        ("h100x8", {"attention": "cudnn", "family": "gemma2"}, "it has no soft cap", 4 * 3 * 9),
        ("v5e-8", {"attention": "splash", "packing": "prefix"}, "it knows no branches", 5 * 4 * 9),
    ],
)
def test_training_refuses_what_a_kernel_cannot_do_and_nothing_else(target, refused, said, count):
    """No tp and no sync_gradients_every is refused: soft caps with cuDNN, and shared prompts with Splash."""
    found = refusals(target)
    for cell, words in found.items():
        assert (words is not None) == (refused.items() <= asdict(cell).items()), cell.name
        assert words is None or said in words
    assert len([words for words in found.values() if words]) == count


def test_the_committed_page_is_what_the_verdicts_say_and_its_cells_are_todays():
    """If this fails, `python benchmarks/accelerators.py --page` writes it anew, from verdicts of a run of the script."""
    counts = json.loads(accelerators.COUNTS.read_text())
    assert accelerators.PAGE.read_text() == accelerators.page(counts)
    for target in TARGETS:
        totals = accelerators.totals(counts, target)
        found = refusals(target)
        # 5 families x 2 kernels x 4 tp x 3 packings x (2 syncs x 4 remats, and scoring), and 5 x 4 x 2 x 2 x 2 programs
        assert len(found) == 5 * 2 * 4 * 3 * (2 * 4 + 1) + 5 * 4 * 2 * 2 * 2
        assert totals["refused"] == len([words for words in found.values() if words])
        assert totals["failed"] == 0 and sum(totals.values()) == len(found)


def compiles(target: str, cell, tmp_path):
    found = find_machine(target)
    needs_compiler(found)
    assert accelerators.ask(cell, devices_of(found), accelerators.options_of(target, tmp_path)) is None


@pytest.mark.aot
@pytest.mark.parametrize(
    "target, cell",
    [
        ("h100x8", Cell("update", "gemma3", 2, "cudnn", 1, "prefix", "block")),  # one key head, over two shards of tp
        ("h100x8", Cell("update", "llama3", 2, "cudnn", 2, "none", "save_qkv_out")),  # each shard of the batch apart
        ("v5e-8", Cell("update", "qwen2.5", 4, "splash", 2, "sequences", "dots")),  # two key heads, over four
    ],
    ids=str,
)
def test_what_training_chooses_compiles(target, cell, tmp_path):
    compiles(target, cell, tmp_path)


@pytest.mark.aot
@pytest.mark.wide
@pytest.mark.parametrize("target", TARGETS)
def test_programs_compile_in_which_every_two_settings_meet(target, tmp_path):
    for cell in accelerators.covering([cell for cell, words in refusals(target).items() if not words], 2):
        compiles(target, cell, tmp_path)


# ---- the race against other frameworks


def step(whole, rollout=1.0, reference=1.0):
    return {"rollout": rollout, "reference": reference, "update": whole - rollout - reference, "step": whole}


def test_a_ratio_is_the_median_of_the_rounds_not_the_ratio_of_medians():
    arithmetic = importlib.import_module("arithmetic")
    # rounds: 8/4 = 2, 9/3 = 3, 20/5 = 4; the medians would give 9/4
    found = arithmetic.ratios([step(8.0), step(9.0), step(20.0)], [step(4.0), step(3.0), step(5.0)])
    assert found["step"] == 3.0
    with pytest.raises(ValueError, match="shorter"):
        arithmetic.ratios([step(8.0), step(9.0)], [step(4.0)])


def test_a_step_of_the_fixed_workload_needs_what_pencil_and_paper_say():
    workloads = importlib.import_module("workloads")
    # a layer: q and o 256 x 256, k and v 256 x 64, gate, up, down 256 x 1024
    layer = 2 * 256 * 256 + 2 * 256 * 64 + 3 * 256 * 1024
    one = 6 * (2 * layer * 96 + 4 * 256 * 96 * 97 / 2) + 2 * 256 * 512 * 64
    assert workloads.step_flops(workloads.workload("fixed")) == 5 * 64 * one
    # the frozen weights of LoRA get no gradient
    assert workloads.step_flops(workloads.workload("lora")) == 4 * 64 * one


def test_the_page_is_what_the_results_give_and_they_name_no_paths_and_no_addresses():
    page = importlib.import_module("benchmarks_page")
    assert page.PAGE.read_text() == page.render(), "python docs/benchmarks_page.py"
    for file in (ROOT / "benchmarks" / "results").rglob("*.json"):
        text = file.read_text()
        assert not [part for part in ("://", "/work", "/home") if part in text], file.name


def test_a_loss_stands_on_the_page_as_plainly_as_a_win(tmp_path):
    """A peer that takes half of our time, and one that failed."""
    page, run, workloads = (importlib.import_module(name) for name in ("benchmarks_page", "run", "workloads"))
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

    # Of another machine the same is said.
    (tmp_path / "small_machine").mkdir()
    (tmp_path / "peers_fixed.json").rename(tmp_path / "small_machine" / "peers_fixed.json")
    text = page.render(tmp_path)
    assert "another machine: small_machine" in text and "| fixed lengths | - | 0.50 | - | - |" in text
    assert "Fixed lengths: Tunix gave no figures: it ended" in text
