"""What training chooses on a GPU or TPU, its compiler takes: families x attention x tp x sync x packing x remat."""

import importlib.util
import itertools
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from test_hardware import needs_compiler

from tunix_lite.planning.hardware import devices_of, find_machine

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "accelerators.py"
spec = importlib.util.spec_from_file_location("accelerators", SCRIPT)
accelerators = importlib.util.module_from_spec(spec)
spec.loader.exec_module(accelerators)
Cell, TARGETS = accelerators.Cell, accelerators.TARGETS


def refusals(target: str) -> dict:
    platform = find_machine(target).hardware.platform
    return {cell: accelerators.refusal(cell, platform) for cell in accelerators.cells(target)}


@pytest.mark.parametrize("target", TARGETS)
def test_the_cells_are_the_product(target):
    """5 families x 2 kernels x 4 tp x 3 packings x (2 syncs x 4 remats, and scoring), and 5 x 4 x 2 x 2 x 2 programs."""
    found = accelerators.cells(target)
    assert len(found) == len({cell.name for cell in found}) == 5 * 2 * 4 * 3 * (2 * 4 + 1) + 5 * 4 * 2 * 2 * 2
    assert {cell.attention for cell in found} == {*TARGETS[target], None}


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


def test_the_first_cells_asked_hold_every_two_settings_that_meet():
    asked = [cell for cell, words in refusals("h100x8").items() if not words]
    first = accelerators.covering(asked, 2)
    assert len(first) < 50
    pairs = lambda cells: {pair for cell in cells for pair in itertools.combinations(asdict(cell).items(), 2)}  # noqa: E731
    assert pairs(first) == pairs(asked)
    assert accelerators.in_order(asked)[: len(first)] == first and set(accelerators.in_order(asked)) == set(asked)


def test_the_committed_page_is_what_the_verdicts_say_and_its_cells_are_todays():
    """If this fails, `python benchmarks/accelerators.py --page` writes it anew, from verdicts of a run of the script."""
    counts = json.loads(accelerators.COUNTS.read_text())
    assert accelerators.PAGE.read_text() == accelerators.page(counts)
    for target in TARGETS:
        totals = accelerators.totals(counts, target)
        found = refusals(target)
        assert totals["refused"] == len([words for words in found.values() if words])
        assert totals["failed"] == 0 and sum(totals.values()) == len(found)


# ---- with the compilers


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


def pairs_of(target: str) -> list:
    return accelerators.covering([cell for cell, words in refusals(target).items() if not words], 2)


@pytest.mark.aot
@pytest.mark.wide
@pytest.mark.parametrize("target", TARGETS)
def test_programs_compile_in_which_every_two_settings_meet(target, tmp_path):
    for cell in pairs_of(target):
        compiles(target, cell, tmp_path)
