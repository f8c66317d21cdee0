"""README's blocks run one after the other, as they are printed, in a copy. `make train` trains to its end; other runs are
one step of few examples."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from test_docs import ROOT, SHELL, blocks, of_readme

TINY = "training.max_steps=1 training.prompts_per_step=4 evaluation.num_examples=4 evaluation.num_samples=0"
# What `make` installs is installed, and nothing is tested again; `tunix-lite` is this checkout's.
PROGRAMS = {
    "make": f'[ "$1" = test ] || exec "{sys.executable}" run_training.py',
    "python": f'exec "{sys.executable}" "$@" {TINY}',
    "tunix-lite": f'case "$1" in launch|train) set -- "$@" {TINY};; esac; exec "{sys.executable}" -m tunix_lite "$@"',
}


@pytest.mark.wide
def test_every_block_of_the_readme_runs_as_printed(tmp_path):
    copy = tmp_path / "tunix_lite"
    for folder in ("conf", "tunix_lite"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "run_training.py", copy)
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name, body in PROGRAMS.items():
        (bin_ / name).write_text(f"#!/bin/bash\n{body}\n")
        (bin_ / name).chmod(0o755)
    (copy / ".venv" / "bin").mkdir(parents=True)
    (copy / ".venv" / "bin" / "activate").touch()
    (copy / "my_rewards.py").write_text(of_readme("python"))
    (copy / "conf" / "model" / "deep.yaml").write_text(of_readme("yaml"))
    environment = os.environ | {"PATH": f"{bin_}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(copy)}
    environment.pop("XLA_FLAGS", None)
    for language, _, body in blocks(ROOT / "README.md"):
        if language not in SHELL:
            continue
        call = ["bash", "-euo", "pipefail", "-c", body]
        asked = {"input": "What is 2 + 3?\n/exit\n", "capture_output": True, "text": True, "timeout": 500}
        done = subprocess.run(call, cwd=copy, env=environment, **asked)
        # a plan that does not fit says what would, and ends with 1, so that a script does not go on
        fits = "does not fit" not in done.stdout
        assert done.returncode == (0 if fits else 1), f"{body}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        if "generate" in body:
            assert re.search(r"^The answer is 16\.$", done.stdout, re.MULTILINE), done.stdout[-500:]
