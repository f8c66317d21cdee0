"""What guides of other projects promise, row by row: it works, or somebody who types it is told, or limits.md says so.

The guides are about distributed training by JAX, pmap, accelerate, DeepSpeed and torchrun. Each row is what their reader
types or looks for; those that simply work as printed are in tests/test_docs.py.
"""

import subprocess

import pytest
from test_docs import ROOT, of_a_program, of_a_run

from tunix_lite.config import plain
from tunix_lite.settings.compose import compose, compose_values

# What now does what the guide wants: the command -> a setting that says so.
WORKS = [
    ("run_training.py model.mesh_shape=[[8,2],[fsdp,tp]]", "model.mesh_shape", [[8, 2], ["fsdp", "tp"]]),
    ("run_training.py training.micro_batch_size=auto", "training.micro_batch_size", "auto"),
    ("run_training.py training.gradient_accumulation_steps=null", "training.gradient_accumulation_steps", None),
    ("run_training.py optimizer.scale_lr_with_devices=true", "optimizer.scale_lr_with_devices", True),
    ("run_training.py optimizer=sgd optimizer.momentum=0.9", "optimizer.momentum", 0.9),
    ("run_training.py task.system='Answer briefly.'", "task.system", "Answer briefly."),
    ("run_training.py model=gemma3_4b model.mesh_shape=[[8,2],[fsdp,tp]]", "model.weights", "google/gemma-3-4b-it"),
    ("run_training.py model.lora.rank=32 model.lora.alpha=64 model.lora.base=nf4", "model.lora.base", "nf4"),
    ("run_training.py project_name=tunix-grpo", "project_name", "tunix-grpo"),
    ("run_training.py launch.timeout=300", "launch.timeout", 300),
    ("tunix-lite check devices=4", "devices", 4),
    ("tunix-lite evaluate checkpoint=outputs/x evaluate.reference=answer", "evaluate.reference", "answer"),
    ("tunix-lite generate checkpoint=outputs/x step=60 prompt=Hi", "step", 60),
]


@pytest.mark.parametrize("command, key, value", WORKS, ids=[command for command, *_ in WORKS])
def test_what_a_guide_promises_can_be_typed(command, key, value):
    words = command.replace("'", "").split(" ") if "'" not in command else _quoted(command)
    if words[0] == "tunix-lite":
        name, overrides = of_a_program(words)
        settings = compose_values(overrides, of=(f"+command={name}",))
    else:
        settings = plain(compose(of_a_run(["python", *words])))
    for part in key.split("."):
        settings = settings[part]
    assert (list(map(list, settings)) if isinstance(value, list) else settings) == value


def _quoted(command: str) -> list[str]:
    """The words of a command in which one value stands in quotes, as Hydra gets them."""
    before, text, _ = command.split("'")
    *words, last = before.split()
    return [*words, f'{last}"{text}"']


def test_make_refuses_settings_that_the_program_would_never_see():
    """`make train hydra.run.dir=X` set a variable of make, and a new run began without a word."""
    call = ["make", "-n", "--no-print-directory", "train"]
    refused = subprocess.run([*call, "seed=1", "PYTHON=python3"], cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 2 and "settings go into ARGS: make train ARGS='seed=1'" in refused.stderr
    taken = subprocess.run([*call, "ARGS=seed=1 resume=none"], cwd=ROOT, capture_output=True, text=True)
    assert taken.returncode == 0 and taken.stdout.splitlines()[-1].endswith("run_training.py seed=1 resume=none")
