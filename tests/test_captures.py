"""What pages show of the output of programs is what the programs print today (docs/captures.py makes it)."""

import importlib
import re
from collections import Counter

import pytest
from test_docs import DOCS, LIVING, ROOT, blocks

CAPTURED = r"<!-- captured: \w+ -->\n```text\n"
# Blocks of text that no program prints, or that another test compares: page -> (how many, why).
OTHERS = {
    "README.md": (1, "test_docs.py compares the lines with those of `tunix-lite plan`"),
    "docs/advanced/distributed_training.md": (2, "an identity, and arithmetic that test_docs.py computes"),
    "docs/getting_started/configuration.md": (2, "commands that need extras"),
    "docs/guide/a_step.md": (2, "test_written_pages.py compares the page with docs/a_step.py"),
    "docs/guide/coming_from.md": (12, "commands of other projects, and tables that test_hints.py compares"),
    "docs/guide/export.md": (5, "commands of vLLM, llama.cpp and Ollama"),
    "docs/guide/generate.md": (1, "a file of prompts"),
    "docs/guide/preferences_and_distillation.md": (4, "formulas"),
    "docs/guide/recipes.md": (1, "samples before and after 241 updates"),
    "docs/guide/serve.md": (1, "what the openai client prints after 60 updates"),
    "docs/guide/tinker.md": (1, "what a server prints, which the tests do not install"),
    "docs/tutorials/real_model.md": (1, "replies before and after `make real`"),
}


@pytest.fixture(scope="module")
def captures():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        yield importlib.import_module("captures")


def test_every_block_that_shows_output_says_which_program_made_it():
    found = Counter()
    for page in LIVING:
        every = sum(language == "text" for language, _, _ in blocks(page))
        if others := every - len(re.findall(CAPTURED, page.read_text())):
            found[str(page.relative_to(ROOT))] = others
    assert found == {page: count for page, (count, _) in OTHERS.items()}, "docs/captures.py makes such a block"


def test_every_name_of_a_capture_is_shown_and_every_shown_one_is_made(captures):
    assert captures.shown().keys() == captures.MESSAGES.keys() | captures.RUNS.keys()


NAMES = ("foreign_flags", "optimizer_line", "odd_process", "other_architecture", "full_disk")


@pytest.mark.parametrize("name", NAMES)
def test_a_message_that_a_page_shows_is_the_message(captures, name):
    assert captures.MESSAGES.keys() == set(NAMES)
    made = captures.MESSAGES[name]()
    for shown in captures.shown()[name]:
        assert shown == made, f"run `python docs/captures.py {name}`"


def test_a_mask_hides_figures_and_no_words(captures):
    line = "step 2/60 3% | eta 3m44s | loss -0.1911 | s/step 1.71 ▁▇▅ in outputs/a/b"
    assert captures.masked(line) == "step #/# #% | eta #s | loss # | s/step # ▁ in PATH"
    assert captures.masked("mean 1.5 ↗") != captures.masked("median 1.5 ↗")
    slow = "loaded\nsampled 253 of 1280 completions, 7,715 tokens/s, 2 s left\nsampled 1280 completions"
    assert captures.masked(slow) == "loaded\nsampled # completions"


# ---- runs: they share a folder, and the long one


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("captures")


RUN_NAMES = ("quick_start", "first_answer", "before_and_after", "exported", "four_devices", "check")
RUN_NAMES += ("damaged_checkpoint", "sweep", "finding", "trainer_loop")


@pytest.mark.wide
@pytest.mark.parametrize("name", RUN_NAMES)
def test_what_a_page_shows_of_a_run_is_what_a_run_shows(captures, folder, name):
    assert captures.RUNS.keys() == set(RUN_NAMES)
    made = captures.RUNS[name](folder)
    [shown] = captures.shown()[name]
    if name == "check":  # versions, devices and memory are of the machine
        assert [line.split()[1] for line in made.splitlines()] == [line.split()[1] for line in shown.splitlines()]
    elif name in ("first_answer", "before_and_after"):
        assert answer_of(made) == answer_of(shown)
    else:
        assert captures.masked(made) == captures.masked(shown), f"run `python docs/captures.py {name}`"
    if name == "quick_start":
        for before, after in zip(held_out(shown), held_out(made), strict=True):
            assert after == pytest.approx(before, abs=5), "percent of held-out problems"


def answer_of(text: str) -> str:
    return text.splitlines()[-1].strip()


def held_out(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"(?:held-out accuracy|avg@4) ([\d.]+)%", text)]
