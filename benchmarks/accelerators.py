"""Asks the compilers of GPUs and TPUs about every program that a run can choose, at tiny shapes, without the devices.

    python benchmarks/accelerators.py --target h100x8
    python benchmarks/accelerators.py --target h100x8 --target v5e-8 --minutes 10 --page

The cells are the product of families, attention, tp (fsdp is the rest of the eight devices), sync_gradients_every,
packing and remat for an update; without remat and sync for scoring; of families, tp, weights and cache for prefill and
decode. A cell is `refused` by training, in words, before anything is compiled, or `compiled`, or it has `failed`: the
compiler said no to what training would have chosen. First come cells among which every two settings meet, then every
three, then the rest. Each verdict is kept as it comes, and a second call goes on
where the first was stopped. `--page` writes docs/references/accelerators.md.

That cuDNN is there is pretended. What is then compiled has its calls in it, divided over the mesh as JAX's partitioner
divides them; whether cuDNN itself takes them only a GPU can say. The plan-gpu and plan-tpu extras are needed.
"""

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax

from tunix_lite.basics.errors import ConfigError
from tunix_lite.models import attention
from tunix_lite.models.architecture import Architecture
from tunix_lite.parallel.mesh import make_mesh
from tunix_lite.planning.hardware import COMPILERS, devices_of, find_machine
from tunix_lite.planning.programs import lowered
from tunix_lite.settings.compose import compose
from tunix_lite.settings.config import RunConfig
from tunix_lite.settings.resolved_parts import abstract
from tunix_lite.settings.resolved_run import ResolvedRun, resolve_run

DEVICES = 8
TARGETS = {"h100x8": ("xla", "cudnn"), "v5e-8": ("xla", "splash")}
# Of each family its flags, in sizes as small as the kernels take them, with one to eight key heads: tp divides them,
# they divide tp, or neither, or there is one for all.
MODELS = {
    **{"gemma2": "gemma2_2b", "gemma3": "gemma3_1b", "llama3": "llama3.2_1b"},
    **{"qwen2.5": "qwen2.5_3b", "qwen3": "qwen3_0.6b"},
}
KEY_HEADS = {"gemma2": 4, "gemma3": 1, "llama3": 8, "qwen2.5": 2, "qwen3": 12}
HEADS = {"qwen3": 24}
TP = (1, 2, 4, 8)
UPDATES = {
    "sync": (1, 2),
    "packing": ("none", "sequences", "prefix"),
    "remat": ("none", "dots", "save_qkv_out", "block"),
}
SAMPLING = {"weights": ("gathered", "sharded"), "cache": ("compute", "int8")}
FOLDER = Path(__file__).parents[1] / "docs" / "references"
PAGE, COUNTS = FOLDER / "accelerators.md", FOLDER / "accelerators.json"
VERDICTS = ("compiled", "refused", "failed", "not asked")


@dataclass(frozen=True)
class Cell:
    """A program of a run. What does not concern it is None."""

    program: str
    family: str
    tp: int
    attention: str | None = None
    sync: int | None = None
    packing: str | None = None
    remat: str | None = None
    weights: str | None = None
    cache: str | None = None

    @property
    def name(self) -> str:
        """Its settings, between colons."""
        return ":".join(str(value) for value in asdict(self).values() if value is not None)


def cells(target: str) -> list[Cell]:
    """All there are for a target."""
    found = []
    for family, tp in itertools.product(MODELS, TP):
        for way, packing in itertools.product(TARGETS[target], UPDATES["packing"]):
            found.append(Cell("scoring", family, tp, way, packing=packing))
            for sync, remat in itertools.product(UPDATES["sync"], UPDATES["remat"]):
                found.append(Cell("update", family, tp, way, sync, packing, remat))
        for weights, kept in itertools.product(SAMPLING["weights"], SAMPLING["cache"]):
            found += [Cell(name, family, tp, weights=weights, cache=kept) for name in ("prefill", "decode")]
    return found


@cache
def run_of(family: str) -> RunConfig:
    """A run of a tiny model of this family."""
    run = compose(
        [
            f"model={MODELS[family]}",
            *("training.mixed_precision=bf16", "training.prompts_per_step=8", "algorithm.num_generations=4"),
            *("generation.max_prompt_length=64", "generation.max_new_tokens=64", "rollout.num_slots=8"),
            *("training.gradient_accumulation_steps=2", "algorithm.kl_coef=0.1", "evaluation.num_examples=0"),
            *("rollout.chunk=4",),
        ]
    )
    return replace(run, model=replace(run.model, architecture=tiny(run.model.architecture, family)))


def tiny(cfg: Architecture, family: str) -> Architecture:
    """Two layers, of both kinds where the family has both."""
    has_both = set(cfg.pattern) == {"local", "global"}
    return replace(
        cfg,
        **{"vocab_size": 256, "num_layers": 2, "embed_dim": 128, "mlp_dim": 128, "head_dim": 128, "query_scale": 128},
        num_heads=HEADS.get(family, 8),
        num_kv_heads=KEY_HEADS[family],
        pattern=("local", "global") if has_both else cfg.pattern,
        window=None if cfg.window is None else 48,
    )


def case_of(cell: Cell, platform: str) -> ResolvedRun:
    """The run of a cell on its mesh. Raises ConfigError with training's words, where training refuses it."""
    run = run_of(cell.family)
    packs = cell.packing not in (None, "none")
    changes = {
        "attention": cell.attention or "xla",
        "sync_gradients_every": cell.sync or 1,
        "packing": cell.packing or "none",
        "remat": cell.remat or "block",
        "gradient_accumulation_steps": None if packs else 2,
        "micro_batch_tokens": 192 if packs else None,
    }
    rollout = replace(run.rollout, cache=cell.cache or "compute")
    run = replace(run, training=replace(run.training, **changes), rollout=rollout)
    sizes = {"fsdp": DEVICES // cell.tp, "tp": cell.tp}
    case = resolve_run(run, run.model.architecture, None, sizes, platform)
    return replace(case, sampling_weights=cell.weights or "gathered")


def pretended_choice():
    """Inside, training believes that cuDNN is there."""
    return mock.patch.object(attention, "_cudnn_fails", lambda cfg, dtype: None)


@contextlib.contextmanager
def pretended_cudnn():
    """Inside, JAX believes so, too: in a version that has all that is asked of it."""
    names = [name for name in COMPILERS["cuda"] if importlib.util.find_spec(name)]
    versions = importlib.import_module(f"{names[0]}._versions")
    with pretended_choice(), mock.patch.object(versions, "cudnn_get_version", lambda: 91000):
        yield


def refusal(cell: Cell, platform: str) -> str | None:
    """Why training refuses this cell, in its words; None: it does not."""
    with pretended_choice():
        try:
            case_of(cell, platform)
        except ConfigError as error:
            return str(error)
    return None


def ask(cell: Cell, devices: list, options: dict) -> str | None:
    """What the compiler has against this cell's program; None: nothing."""
    mesh = make_mesh(((DEVICES // cell.tp, cell.tp), ("fsdp", "tp")), devices)
    platform = "cuda" if devices[0].platform in ("gpu", "cuda") else "tpu"
    with pretended_cudnn() if platform == "cuda" else contextlib.nullcontext(), jax.set_mesh(mesh):
        case = case_of(cell, platform)
        try:
            lowered(case, abstract(case))[cell.program]().compile(options)
        except Exception as error:  # whatever it is, a run would have died of it
            return f"{type(error).__name__}: {str(error).strip()[:400]}"
    return None


def options_of(target: str, out: Path) -> dict:
    """Of the compiler: for GPUs, kernels that were compiled for one cell are not compiled for the next."""
    if find_machine(target).hardware.platform == "tpu":
        return {}
    return {
        "xla_backend_optimization_level": 0,
        "xla_gpu_enable_llvm_module_compilation_parallelism": True,
        "xla_gpu_kernel_cache_file": str(out / "kernels"),
    }


def in_order(asked: list[Cell]) -> list[Cell]:
    """First few in which every two settings meet that meet at all, then every three, then kernels, then the rest."""
    rest = random.Random(0).sample(asked, len(asked))  # of every setting some, wherever it is stopped
    rest.sort(key=lambda cell: cell.attention in (None, "xla"))
    return list(dict.fromkeys([*covering(asked, 2), *covering(asked, 3), *rest]))


def covering(asked: list[Cell], strength: int) -> list[Cell]:
    """Few cells with all combinations of `strength` settings that occur in any, chosen one after the other."""
    combinations = {cell: set(itertools.combinations(asdict(cell).items(), strength)) for cell in asked}
    left, chosen = set().union(*combinations.values()), []
    while left:
        best = max(asked, key=lambda cell: len(combinations[cell] & left))
        chosen.append(best)
        left -= combinations[best]
    return chosen


def work(target: str, out: Path, only: str, until: float) -> None:
    """Asks about the cells of a target that nobody has asked about yet, until time.monotonic() is `until`."""
    out.mkdir(parents=True, exist_ok=True)
    file, found = out / f"{target}.jsonl", find_machine(target)
    known = {line["cell"] for line in read(file)}
    words, devices, options = set(only.split()), devices_of(found), options_of(target, out)
    refusals = {cell: refusal(cell, found.hardware.platform) for cell in cells(target)}
    asked = [
        *(cell for cell in refusals if refusals[cell]),
        *in_order([cell for cell in refusals if not refusals[cell]]),
    ]
    for number, cell in enumerate(asked):
        if cell.name in known or not words <= set(cell.name.split(":")):
            continue
        if time.monotonic() > until:
            break
        began, said = time.perf_counter(), refusals[cell]
        verdict = "refused"
        if not said:
            said = ask(cell, devices, options)
            verdict = "failed" if said else "compiled"
        line = {"cell": cell.name, "verdict": verdict, "said": said, "seconds": round(time.perf_counter() - began, 1)}
        with file.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
        if verdict != "refused":
            print(f"{target} {number + 1}/{len(asked)}", *line.values(), flush=True)
        if number % 20 == 0:
            jax.clear_caches()
    print(target, len(asked), dict(Counter(line["verdict"] for line in read(file))), flush=True)


def read(file: Path) -> list[dict]:
    """The verdicts so far."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def counted(out: Path) -> dict:
    """Verdicts by target and by group of cells: program, family and attention."""
    counts = {"jax": jax.__version__, "libtpu": version("libtpu")}
    for target in TARGETS:
        known = {line["cell"]: line["verdict"] for line in read(out / f"{target}.jsonl")}
        groups = {}
        for cell in cells(target):
            of_group = groups.setdefault(" ".join(filter(None, (cell.program, cell.attention, cell.family))), Counter())
            of_group[known.get(cell.name, "not asked")] += 1
        counts[target] = {group: dict(sorted(found.items())) for group, found in sorted(groups.items())}
    return counts


def totals(counts: dict, target: str) -> dict[str, int]:
    """Cells of a target by verdict."""
    return {verdict: sum(found.get(verdict, 0) for found in counts[target].values()) for verdict in VERDICTS}


def page(counts: dict) -> str:
    """docs/references/accelerators.md."""
    lines = [HEAD.format(**counts), f"| |{'|'.join(VERDICTS)}|cells|", "|---|" + "---|" * 5]
    for target in TARGETS:
        of_all = totals(counts, target).values()
        lines.append(f"|**{target}**|{'|'.join(f'**{number:,}**' for number in of_all)}|**{sum(of_all):,}**|")
        for group, found in counts[target].items():
            numbers = [found.get(verdict, 0) for verdict in VERDICTS]
            lines.append(f"|{group}|{'|'.join(str(number or '') for number in numbers)}|{sum(numbers)}|")
    return "\n".join(lines) + "\n"


HEAD = """# What compiles for accelerators

Cells are programs of a run at tiny shapes. In all of them the family and tp (1, 2, 4, 8) vary; fsdp is the rest of
eight devices.

- Update: also attention, `sync_gradients_every` (1, 2), `packing` and `remat`.
- Scoring by the reference: also attention and `packing`.
- Prefill and decode: also `rollout.weights` and `rollout.cache`.

*compiled*: the target's compiler took the program that training would run (jax {jax}, libtpu {libtpu}). No device was
there, and only a GPU can say whether cuDNN takes its calls. *refused*: training says before anything is compiled that
it cannot be; `training.attention=auto` then takes `xla`. *failed*: training would have chosen it, and the compiler did
not take it. *not asked*: there was no time.

`benchmarks/accelerators.py` writes this page. It asks first about some 150 cells, which contain every combination of
three settings. In the families tp divides the key heads, is a multiple of them, or neither.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS, action="append", default=[])
    parser.add_argument("--out", type=Path, default=Path("outputs/accelerators"), help="where verdicts are kept")
    parser.add_argument("--only", default="", help="words that must all be in a cell's name: 'update gemma3 cudnn'")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop then; the next call goes on")
    parser.add_argument("--page", action="store_true", help="write the page from all verdicts so far")
    arguments = parser.parse_args()
    until = time.monotonic() + 60 * arguments.minutes
    for target in arguments.target:
        work(target, arguments.out, arguments.only, until)
    if arguments.page:
        COUNTS.write_text(json.dumps(counted(arguments.out), indent=1) + "\n")
        PAGE.write_text(page(json.loads(COUNTS.read_text())))


if __name__ == "__main__":
    main()
