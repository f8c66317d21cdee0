"""Makes what the pages show of the output of programs, by running the programs:

    python docs/captures.py               # all of it: some ten minutes on two cores
    python docs/captures.py sweep check  # some of it

A block that shows output stands under `<!-- captured: NAME -->`, and NAME is a function here.
tests/test_captures.py compares pages and programs: a message word by word, a run without the
figures that differ from machine to machine.
"""

import dataclasses
import errno
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")


from tunix_lite.basics.errors import ConfigError
from tunix_lite.distributed.agreement import ProcessInfo, mismatch_error
from tunix_lite.learner import optim
from tunix_lite.models import families, source
from tunix_lite.settings.compose import compose
from tunix_lite.tracking.disk import DiskError, disk_errors_explained

DOCS = Path(__file__).parent
ROOT = DOCS.parent
QUICK_START = DOCS / "getting_started" / "quick_start_output.txt"
MARKED = re.compile(r"(<!-- captured: (\w+) -->\n```text\n)(.*?)(\n```)", re.DOTALL)
WIDTH = 119


# ---- messages: made in this process, at once


def foreign_flags() -> str:
    words = ["learning_rate=1e-5", "bf16=true"]
    try:
        compose(words)
    except ConfigError as error:
        return f"$ python run_training.py {' '.join(words)}\n" + _filled(f"error: {error}")
    raise AssertionError("words of others are refused")


def optimizer_line() -> str:
    run = compose(["optimizer=sgd", "optimizer.learning_rate=0.1", "optimizer.schedule=linear",
                   "optimizer.momentum=0.9"])  # fmt: skip
    return f"optimizer  {optim.describe(run.optimizer)}, {run.training.max_steps} steps"


def odd_process() -> str:
    steps = {0: "60", 1: "5", 2: "60", 3: "60"}
    reports = {
        p: ProcessInfo({"training.max_steps": steps[p]}, host=f"gpu{p + 1}") for p in range(4)
    }
    return _filled(f"error: {mismatch_error(reports)}")


def other_architecture() -> str:
    """The llama_tiny of docs/extend, with a folder of two layers where three are chosen."""
    conf = str(DOCS / "extend" / "example" / "conf")
    with tempfile.TemporaryDirectory() as folder:
        run = compose(["model=llama_tiny", f"model.weights={folder}"], conf)
        three = dataclasses.replace(run.model.architecture, num_layers=3)
        config = families.config_json(three, families.FAMILIES["llama"])
        (Path(folder) / "config.json").write_text(json.dumps(config))
        try:
            source.locate(run.model)
        except ValueError as error:
            return _filled(str(error).replace(folder, "/path/to/a/llama"))
    raise AssertionError("a folder of another architecture is refused")


def full_disk() -> str:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "fingerprint.json").touch()
        full = OSError(errno.ENOSPC, "No space left on device", f"{folder}/checkpoints")
        try:
            with disk_errors_explained(
                Path(folder), lambda: "after step 60", lambda: [20, 40]
            ):
                raise full
        except DiskError as error:
            return _filled(f"error: {error}".replace(folder, "/runs/7"))
    raise AssertionError("a full disk is explained")


def _filled(message: str) -> str:
    return textwrap.fill(message, WIDTH, break_long_words=False, break_on_hyphens=False)


# ---- runs: in a folder that they share


def quick_start(folder: Path) -> str:
    return _first_run(folder).strip()


def first_answer(folder: Path) -> str:
    _first_run(folder)
    asked = ["generate", "checkpoint=outputs/first", "prompt=What is 12 + 7 - 3?"]
    return _command(folder, *asked).strip()


def before_and_after(folder: Path) -> str:
    _first_run(folder)
    rows = {}
    for step in (0, 60):
        file = folder / f"outputs/first/samples/evaluation_{step:06d}.jsonl"
        rows[step] = json.loads(file.read_text().splitlines()[0])
    after = rows[60]["completion"].replace("\n", "\n        ")
    return f"{rows[0]['prompt']}\nbefore: {rows[0]['completion']}\nafter:  {after}"


def exported(folder: Path) -> str:
    _first_run(folder)
    printed = _command(folder, "export", "checkpoint=outputs/first")
    return re.sub(r"outputs/\S+/export/full", "outputs/latest/export/full", printed.strip())


def four_devices(folder: Path) -> str:
    words = ["model.mesh_shape=[[2,2],[fsdp,tp]]", "hydra.run.dir=outputs/four"]
    less = ["training.max_steps=1", "evaluation.num_examples=0"]
    printed = _run(folder, *words, *less, devices=4)
    lines = [line.strip() for line in printed.splitlines()]
    return "\n".join(
        line for line in lines if line.split(" ")[0] in ("devices", "mesh", "batch")
    )


def check(folder: Path) -> str:
    return _command(folder, "check", "devices=4").strip()


def damaged_checkpoint(folder: Path) -> str:
    _short_run(folder)
    data = folder / "outputs/short/checkpoints/5/default/d"
    file = max(data.iterdir(), key=lambda file: file.stat().st_size)
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    printed = _run(
        folder, "hydra.run.dir=outputs/short", *SHORT, "training.max_steps=6", fails=True
    )
    file.write_bytes(good)
    [line] = [line for line in printed.splitlines() if line.startswith("error: ")]
    return _filled(re.sub(r"\S*/outputs/short", "/runs/7", line))


def sweep(folder: Path) -> str:
    words = [
        "--multirun",
        "seed=0,1,2",
        "training.max_steps=3",
        "training.prompts_per_step=16",
    ]
    words += ["hydra.sweep.dir=outputs/sweep"]
    _run(folder, *words, "evaluation.num_examples=32", "evaluation.num_samples=0")
    return _command(folder, "doctor", "outputs/sweep").strip()


def finding(folder: Path) -> str:
    words = [
        "optimizer.learning_rate=1e-2",
        "training.max_steps=25",
        "hydra.run.dir=outputs/steep",
    ]
    _run(folder, *words, "evaluation.num_examples=128", "evaluation.num_samples=0")
    lines = _command(folder, "doctor", "outputs/steep").splitlines()
    first = [i for i, line in enumerate(lines) if re.match(r"2\. ", line)] or [len(lines)]
    return "\n".join(line.rstrip() for line in lines[: first[0]]).strip()


NO_RUN = (foreign_flags, optimizer_line, odd_process, other_architecture, full_disk)
MESSAGES: dict[str, Callable[[], str]] = {each.__name__: each for each in NO_RUN}


def trainer_loop(folder: Path) -> str:
    """The first block of Python on the page about Trainer."""
    page = (DOCS / "guide" / "trainer.md").read_text()
    program = page.partition("```python\n")[2].partition("```")[0]
    return _printed(folder, ["-c", program]).strip()


RUNS: dict[str, Callable[[Path], str]] = {
    each.__name__: each
    for each in (quick_start, first_answer, before_and_after, exported, four_devices, check,
                 damaged_checkpoint, sweep, finding, trainer_loop)
}  # fmt: skip
SHORT = ["algorithm.kl_coef=0.1", "training.prompts_per_step=4", "training.save_interval_steps=4",
         "evaluation.num_examples=0"]  # fmt: skip


@cache
def _first_run(folder: Path) -> str:
    printed = _run(folder)
    [made] = (folder / "outputs" / "tunix_lite").glob("*/*")
    (folder / "outputs" / "first").symlink_to(made)
    return printed


@cache
def _short_run(folder: Path) -> str:
    return _run(folder, "hydra.run.dir=outputs/short", "training.max_steps=5", *SHORT)


def _run(folder: Path, *words: str, devices: int = 1, fails: bool = False) -> str:
    return _printed(folder, [str(ROOT / "run_training.py"), *words], devices, fails)


def _command(folder: Path, *words: str) -> str:
    return _printed(folder, ["-m", "tunix_lite", *words])


def _printed(folder: Path, words: list[str], devices: int = 1, fails: bool = False) -> str:
    """What a program prints into a pipe, in order; it runs in the folder."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    for name in ("COLUMNS", "XLA_FLAGS"):
        environment.pop(name, None)
    if devices > 1:
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
    )
    assert (done.returncode != 0) == fails, done.stdout
    # Paths as a reader has them, who is in the folder.
    printed = done.stdout.replace(f"{folder}/", "")
    return re.sub(r"at \S+/bin/python\S*", "at .venv/bin/python", printed)


# ---- pages


def pages() -> list[Path]:
    """Files that may hold captured blocks. The template of coming_from.md is one of them."""
    found = [page for page in DOCS.rglob("*.md") if "_build" not in page.parts]
    return sorted([*found, DOCS / "coming_from_template.txt", ROOT / "README.md"])


def shown() -> dict[str, list[str]]:
    """What stands in the pages: name -> its blocks."""
    found = {"quick_start": [QUICK_START.read_text().rstrip()]}
    for page in pages():
        for _, name, body, _ in MARKED.findall(page.read_text()):
            found.setdefault(name, []).append(body)
    return found


def masked(text: str) -> str:
    """Without what differs from run to run: paths, dates, figures, bars, samples, and lines of
    progress, which come by the clock."""
    progress = r"sampled \d+ of \d+ .* left|sampled \d+ completions in"
    progress += "|writing the |wrote the |reading back |read back the "
    text = re.sub(rf"^(?:{progress}).*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^  (?:right|wrong|cut) .*$", "  a sample", text, flags=re.MULTILINE)
    text = re.sub(r"\S*(?:outputs|runs)/[^\s)]*|default/d/\w+", "PATH", text)
    text = re.sub(r"\d+h\d+m|\d+m\d+s", "#s", text)
    text = re.sub(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?", "#", text)
    text = re.sub(r"[▁▂▃▄▅▆▇█]+", "▁", re.sub("[↗↘→]", "→", text))
    return "\n".join(
        " ".join(re.sub("[─-╿]", " ", line).split()) for line in text.splitlines()
    )


def main(names: list[str]) -> None:
    made = {name: make() for name, make in MESSAGES.items() if not names or name in names}
    with tempfile.TemporaryDirectory() as folder:
        for name, make in RUNS.items():
            if not names or name in names:
                made[name] = make(Path(folder))
                print(f"{name}\n{made[name]}\n", flush=True)
    for page in pages():
        text = page.read_text()
        fresh = MARKED.sub(lambda m: m[1] + made.get(m[2], m[3]) + m[4], text)
        if fresh != text:
            page.write_text(fresh)
    if "quick_start" in made:
        QUICK_START.write_text(made["quick_start"] + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
