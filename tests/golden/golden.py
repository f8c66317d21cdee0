"""What must not change unless somebody means it: texts, settings, the API and memory plans, as golden.json has them.

    python tests/golden/golden.py                 compares; exits with 1 and lists what differs
    python tests/golden/golden.py --write         writes golden.json
    python tests/golden/golden.py --runs COMMIT   makes the runs of recorded_runs.py at that commit and here, and compares
    python tests/golden/golden.py --stablehlo DIR writes the programs that are lowered, one file each, to compare them

Nothing in golden.json depends on a machine: numbers of plans are formulas, and programs are the StableHLO that JAX
makes before any compiler sees them. Equal StableHLO is the same program. It belongs to one version of jax; with another
it is not compared. Runs are compared with those of an older state on the same machine, to the bit.
"""

import argparse
import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import recorded_runs  # noqa: E402
from forked import called  # noqa: E402

FILE = Path(__file__).with_name("golden.json")
LINES = Path(__file__).with_name("wrong_lines.txt")

PLANS = (
    "model=gemma3_1b target=h100x1",
    "model=gemma3_4b target=h100x8 model.lora.rank=16",
    "model=gemma3_27b target=v5e-64",
    "model=qwen3_14b target=h100x8 model.lora.rank=8 model.lora.base=nf4",
    "model=llama3.1_8b target=v5e-16 model.mesh_shape=[[4,4],[fsdp,tp]]",
    "model=qwen2.5_7b target=h100x4 training.packing=prefix",
    "model=gemma2_9b target=v5e-32 training.mixed_precision=bf16_params",
    "model=qwen3_0.6b target=h100x1 rollout.overlap=carry",
)

TINY = [
    *("model=random", "model.architecture.num_layers=2", "model.architecture.vocab_size=512"),
    *("training.prompts_per_step=4", "evaluation.num_examples=0"),
    *("generation.max_prompt_length=32", "generation.max_new_tokens=32", "rollout.chunk=8", "rollout.num_slots=8"),
]
# name -> (settings beside TINY, fsdp, tp, programs)
PROGRAMS = {
    "grpo": (["training.packing=none", "algorithm.kl_coef=0.04"], 1, 1, ("update", "scoring", "prefill", "decode")),
    "prefix": (["training.packing=prefix", "training.micro_batch_tokens=320"], 1, 1, ("update",)),
    "sft": (["algorithm=sft", "training.packing=sequences", "training.micro_batch_tokens=320"], 1, 1, ("update",)),
    "lora_nf4": (
        ["training.packing=none", "model.lora.rank=4", "model.lora.base=nf4"],
        1,
        1,
        ("update", "prefill", "decode"),
    ),
    "fsdp4": (["training.packing=none", "rollout.weights=gathered"], 4, 1, ("update", "decode")),
    "fsdp2_tp2": (["training.packing=none", "rollout.weights=sharded"], 2, 2, ("update", "prefill", "decode")),
}


def told(line: str, folder: Path) -> tuple[int | None, str]:
    """(exit code, all that it prints) of `tunix-lite LINE`."""
    done = called(line.split(), folder, JAX_PLATFORMS="cpu", COLUMNS="120", LC_ALL="C.UTF-8", NO_COLOR="1")
    return done.code, plain(done.out + done.err, folder)


def plain(text: str, folder: Path) -> str:
    places = {folder: "FOLDER", ROOT: "REPOSITORY", Path(sys.prefix): "PYTHON", Path.home(): "HOME"}
    for path, shown in places.items():
        text = text.replace(str(path), shown)
    return re.sub(r"\d{4}-\d\d-\d\d[_T ]\d\d[:-]\d\d[:-]\d\d", "DATE", text).strip()


def leaves(value: object, path: str = "") -> list[str]:
    """The settings with their defaults, one a line."""
    if isinstance(value, dict) and value:
        return [line for key, inner in value.items() for line in leaves(inner, f"{path}.{key}" if path else str(key))]
    return [f"{path}={json.dumps(value)}"]


def plans(folder: Path) -> dict[str, dict]:
    """Bytes a device of each target, by formulas."""
    found = {}
    for line in PLANS:
        out = folder / "plan"
        code, text = told(f"plan {line} analytic=true out={out}", folder)
        assert code in (0, 1), text
        (plan,) = json.loads((out / "plan.json").read_text())["plans"][:1]
        found[line] = {
            name: value for name, value in plan.items() if name.endswith("_bytes") and "capacity" not in name
        }
        shutil.rmtree(out)
    return found


def stablehlo() -> dict[str, str]:
    """The text of each program of PROGRAMS. Wants four devices."""
    import jax

    from tunix_lite.planning.programs import lowered
    from tunix_lite.settings.compose import compose
    from tunix_lite.settings.resolved_parts import abstract, mesh_of_run
    from tunix_lite.settings.resolved_run import find_model, resolve_run

    texts = {}
    for name, (settings, fsdp, tp, wanted) in PROGRAMS.items():
        run = compose([*TINY, *settings])
        resolved = resolve_run(run, *find_model(run.model), {"fsdp": fsdp, "tp": tp}, "cpu")
        with mesh_of_run(resolved, jax.devices()[: fsdp * tp]):
            lowers = lowered(resolved, abstract(resolved))
            texts |= {f"{name}_{program}": lowers[program]().as_text() for program in wanted}
    return texts


def programs(folder: Path) -> dict[str, str]:
    """A digest of each program. They are lowered in a process with four devices, which plans have not."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    subprocess.run([sys.executable, __file__, "--stablehlo", str(folder)], check=True, env=env)
    return {file.stem: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in sorted(folder.glob("*.mlir"))}


def recorded() -> dict:
    import jax
    import yaml

    import tunix_lite.api

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [line for line in LINES.read_text().splitlines() if line and not line.startswith("#")]
        return {
            "api": sorted(name for name in dir(tunix_lite.api) if not name.startswith("_")),
            "settings": leaves(yaml.safe_load(told("train --cfg job", folder)[1])),
            "plans": plans(folder),
            "programs": {"jax": jax.__version__, **programs(folder / "programs")},
            "errors": {line: list(told(line, folder)) for line in lines},
        }


def compare_runs(commit: str) -> int:
    """Makes all runs at a commit and here, one after the other. Returns the exit code of the comparison."""
    with tempfile.TemporaryDirectory() as name:
        then = Path(name) / "then"
        subprocess.run(["git", "worktree", "add", "--detach", str(then), commit], cwd=ROOT, check=True)
        try:
            script = Path(recorded_runs.__file__)
            shutil.copy(script, then / "tests" / script.name)
            records = []
            for where in (then, ROOT):
                records.append(Path(name) / f"{len(records)}.json")
                subprocess.run([sys.executable, str(where / "tests" / script.name), str(records[-1])], check=True)
            return recorded_runs.compare(*records)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(then)], cwd=ROOT, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--runs", metavar="COMMIT")
    parser.add_argument("--stablehlo", metavar="DIR", type=Path)
    args = parser.parse_args()
    if args.stablehlo:
        args.stablehlo.mkdir(parents=True, exist_ok=True)
        for name, text in stablehlo().items():
            (args.stablehlo / f"{name}.mlir").write_text(text)
        return
    if args.runs:
        sys.exit(compare_runs(args.runs))
    now = recorded()
    if args.write:
        FILE.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")
        return
    before = json.loads(FILE.read_text())
    if before["programs"]["jax"] != now["programs"]["jax"]:
        print(f"Programs are not compared: those in {FILE.name} are of jax {before['programs']['jax']}.")
        before["programs"] = now["programs"]
    one, other = (json.dumps(value, indent=1, sort_keys=True).splitlines() for value in (before, now))
    if lines := list(difflib.unified_diff(one, other, FILE.name, "now", lineterm="", n=2)):
        print(*lines, sep="\n")
        sys.exit("It differs. If that is meant: python tests/golden/golden.py --write, and the message says why.")


if __name__ == "__main__":
    main()
