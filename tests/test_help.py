"""What shows something and runs nothing: help, versions, completion, unknown commands, dry runs."""

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from flax.traverse_util import flatten_dict

from tunix_lite import __main__ as entry
from tunix_lite.commands import help as help_pages
from tunix_lite.commands import program, train
from tunix_lite.settings.compose import compose_values

ROOT = Path(__file__).parents[1]
COMMANDS = help_pages.COMMANDS


@pytest.fixture(autouse=True)
def logging_as_it_was():
    """Hydra sets up Python's logging."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def said(monkeypatch, capsys, main, *words) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of a program in this process."""
    monkeypatch.setattr(sys, "argv", ["tunix-lite", *words])
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code or 0
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("words", [[], ["algorithm=dapo", "sharding=data_parallel"], ["model=gemma3_1b", "task=jsonl"]])
def test_help_shows_the_settings_that_hydra_composes(words, monkeypatch, capsys):
    shown = said(monkeypatch, capsys, entry.main, "train", *words, "--help=all")[1]
    for leaf in flatten_dict(compose_values(words), keep_empty_nodes=True, sep="."):
        assert any(re.search(rf"\b{name}:", shown) for name in leaf.split(".")[-2:]), leaf


def test_the_short_help_names_commands_groups_and_settings(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = said(monkeypatch, capsys, entry.main, "--help")
    assert code == 0 and len(out.splitlines()) < 100 and max(map(len, out.splitlines())) <= 92
    known = {*flatten_dict(compose_values([]), keep_empty_nodes=True, sep="."), "resume"}
    assert help_pages.OFTEN in out and set(help_pages.OFTEN.replace(",", " ").split()) <= known
    assert all(f"\n  {name} " in out for name in [*COMMANDS, "model", "algorithm", "task", "optimizer"])
    assert said(monkeypatch, capsys, program_main, "--help")[1] == out
    assert said(monkeypatch, capsys, entry.main, "train", "-h")[1] == out


def program_main():
    program.main(lambda run, folder, found: None, lambda run, folder: None)


def test_all_of_help_is_all_and_a_part_is_a_part(monkeypatch, capsys):
    out = said(monkeypatch, capsys, entry.main, "--help=all")[1]
    assert said(monkeypatch, capsys, program_main, "--help", "all")[1] == out
    part = said(monkeypatch, capsys, entry.main, "--help", "optimizer")[1]
    assert "optimizer= is one of adafactor, adamw" in part and "  learning_rate: auto  # Peak" in part
    assert "max_steps:" not in part and said(monkeypatch, capsys, entry.main, "--help", "optimizer.schedule")[1] == part
    assert "\nseed: 0  # Seed" in out
    # the options of a line are those that are described
    out = said(monkeypatch, capsys, entry.main, "train", "optimizer=muon", "--help", "optimizer")[1]
    assert "  ns_steps: 5  # Number" in out
    code, _, err = said(monkeypatch, capsys, entry.main, "--help", "optimiser")
    assert code == 2 and err == "error: --help optimiser: there is no such group of settings\n"


@pytest.mark.parametrize(
    "words, message",
    [
        # the value of a run that is named after its settings
        (["model.weights=ckpts/lr=1e-6/step=100"], """write 'model.weights="ckpts/lr=1e-6/step=100"'"""),
        (["resume=out/lr=1/run"], """write 'resume.folder="out/lr=1/run"'"""),
        (["hydra.run.dir=out/lr=1"], """write 'hydra.run.dir="out/lr=1"'"""),
        (["hydra.run.dir=" + "a" * 5_000], "error: hydra.run.dir: 'aaaa"),
        # words behind a flag of Hydra, and mistakes where the settings are only shown
        (["optimizer=x", "--cfg", "job", "seed=1"], "optimizer=x: there is no such optimizer"),
        (["--cfg", "job", "training.max_stepz=1"], "did you mean 'training.max_steps'"),
    ],
)
def test_a_word_that_hydra_refuses_is_one_line_with_what_to_write(monkeypatch, capsys, words, message):
    code, out, err = said(monkeypatch, capsys, program_main, *words)
    assert code == 2 and not out and message in err and err.count("\n") == 1, err


def test_choices_stand_in_the_help_of_what_has_them():
    from tunix_lite.settings.config import CHOICES

    for name, choices in CHOICES.items():
        text = (ROOT / "conf" / "training" / "default.yaml").read_text()
        about = re.search(rf"((?:^# .*\n)*)^{name}: .*", text, re.MULTILINE)[0]
        assert all(choice in about for choice in choices), f"training.{name}: {about}"


def test_the_version_names_what_the_package_stands_on(monkeypatch, capsys):
    for main in (entry.main, program_main):
        code, out, _ = said(monkeypatch, capsys, main, "--version")
        assert code == 0 and out.startswith("tunix_lite 0.1.0 (python 3.")
        assert "hydra-core 1.3" in out and "jax 0." in out


def test_help_imports_neither_jax_nor_hydra():
    code = (
        "import sys; import tunix_lite.__main__; from tunix_lite.commands import help\n"
        "help.help_on(''); help.help_on('optimizer')\n"
        "assert not {'jax', 'hydra', 'numpy', 'flax'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ---- what Hydra shows


def test_the_settings_and_their_files_can_be_shown(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, _ = said(monkeypatch, capsys, program_main, "--cfg", "job", "seed=4", "--package", "optimizer")
    assert code == 0 and "learning_rate: auto" in out
    code, out, _ = said(monkeypatch, capsys, program_main, "--info", "defaults-tree", "algorithm=dapo")
    assert code == 0 and "algorithm: dapo" in out and "parts/common" in out
    assert not list(tmp_path.iterdir())


# ---- a dry run


def test_a_dry_run_checks_plans_and_leaves_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    main = train.main
    code, out, err = said(monkeypatch, capsys, main, "runtime.dry_run=true", "training.micro_batch_size=16")
    assert code == 0 and not err
    assert "a dry run" in out and "= 16 micro_batch_size x " in out and "attached: fits: peak " in out
    assert out.endswith("nothing was run, nothing was written\n")
    code, out, err = said(monkeypatch, capsys, main, "runtime.dry_run=true", "training.micro_batch_size=5")
    assert code == 2 and "cannot make 128" in err and not out
    assert not list(tmp_path.iterdir())


def test_a_sweep_over_meshes_is_checked_run_by_run(monkeypatch, capsys, tmp_path):
    """Four pretend devices: a mesh of fewer takes the first ones, one of more is refused before the first run."""
    monkeypatch.chdir(tmp_path)
    sweep = "model.mesh_shape=[[1,1],[fsdp,tp]],[[2,2],[fsdp,tp]]"
    code, out, err = said(monkeypatch, capsys, train.main, "--multirun", "runtime.dry_run=true", sweep)
    assert code == 0 and out.count("nothing was run") == 2, err
    assert "1 of 4, the first ones" in out and "fsdp=2, tp=2 from [[2,2],[fsdp,tp]]" in out
    code, out, err = said(monkeypatch, capsys, train.main, "--multirun", f"{sweep},[[8,1],[fsdp,tp]]")
    assert code == 2 and "[[8,1],[fsdp,tp]] needs 8 devices, but jax sees 4" in err
    assert not list(tmp_path.iterdir())


# ---- commands beside training


@pytest.mark.parametrize("command", ["evaluate", "export", "generate", "doctor"])
def test_the_folder_of_a_run_may_come_first(command, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, err = said(monkeypatch, capsys, entry.main, command, "nowhere")
    assert code == 2 and "nowhere" in err and "override" not in err
