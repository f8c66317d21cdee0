"""What fits where: writes docs/references/fits.md, by the formulas of `tunix-lite plan analytic=true`.

    python benchmarks/fits.py
    python benchmarks/fits.py --compile gemma3_1b:all:v5e-4 gemma3_12b:LoRA:h100x2

`--compile` asks the target's compiler about the best mesh of these cells, one after the other and minutes each, keeps
what it says in docs/references/fits.json and marks the cell. What was compiled on another mesh is forgotten.
"""

import argparse
import json
import time
from pathlib import Path

from tunix_lite.basics.errors import ConfigError
from tunix_lite.commands.plan import PlanConfig, make_plans
from tunix_lite.planning.hardware import GiB, devices_of
from tunix_lite.planning.plan import Plan, with_compiled
from tunix_lite.settings.compose import compose

MODELS = (
    *("gemma3_270m", "gemma3_1b", "gemma3_4b", "gemma3_12b", "gemma3_27b"),
    *("qwen3_0.6b", "qwen3_1.7b", "qwen3_32b", "qwen3.5_0.8b", "qwen3.5_4b", "qwen3.5_27b"),
    *("gemma4_e2b", "gemma4_e4b", "gemma4_31b", "ministral3_8b", "phi4_14b", "olmo3_7b"),
    *("llama3.2_1b", "llama3.3_70b"),
)
MIXTURES = ("qwen3_30b_a3b", "qwen3.5_35b_a3b", "gemma4_26b_a4b", "gpt_oss_20b")
TARGETS = ("h100", "h100x2", "h100x8", "v5e-4", "v5e-16", "v5p-64", "v6e-256")
WAYS = {
    "all": ["training.mixed_precision=bf16_params"],
    "LoRA": ["training.mixed_precision=bf16", "model.lora.rank=16", "model.lora.base=bf16"],
}
# Of mixtures of experts, whose base on one GPU is in a byte a weight.
MIXTURE_TARGETS = ("h100", "h100x8", "v5e-64")
MIXTURE_WAYS = {
    "all": WAYS["all"],
    "LoRA int8": ["training.mixed_precision=bf16", "model.lora.rank=16", "model.lora.base=int8"],
}
WORKLOAD = [
    *("training.prompts_per_step=64", "algorithm.num_generations=8", "training.micro_batch_size=1"),
    *("generation.max_prompt_length=512", "generation.max_new_tokens=1024", "rollout.num_slots=64"),
    *("training.remat=block", "training.attention=xla"),
]
FOLDER = Path(__file__).parents[1] / "docs" / "references"
PAGE, COMPILED = FOLDER / "fits.md", FOLDER / "fits.json"
HEAD = f"""# What fits where

Peak of a device in GiB on the mesh where it is smallest, fsdp x tp; **bold** fits. By formula,
`tunix-lite plan analytic=true mesh=all` for each cell. A star marks what the target's compiler says of all programs of
the run; what the formula says follows the stroke. A plan without `analytic=true` asks the compiler.
`benchmarks/fits.py` writes this page.

64 prompts x 8 generations of 512 + 1024 tokens, one sequence per fsdp shard at a time, `remat=block`, 64 slots (or one
per fsdp shard), no KL term. All weights: weights and optimizer in bfloat16 (`bf16_params`). LoRA: adapters of rank 16
on a base in bfloat16.

| model | trains | {" | ".join(TARGETS)} |
|---|---|{"---|" * len(TARGETS)}
"""
MIXTURE_HEAD = f"""
Mixtures of experts, the same; LoRA int8: adapters of rank 16 on a base in int8.

| model | trains | {" | ".join(MIXTURE_TARGETS)} |
|---|---|{"---|" * len(MIXTURE_TARGETS)}
"""


def best(model: str, way: str, target: str) -> Plan | None:
    """The plan of the mesh with the smallest peak, by formulas; None: no mesh divides model and batch."""
    run = compose([f"model={model}", *WORKLOAD, *(WAYS | MIXTURE_WAYS)[way]])
    try:
        return make_plans(run, PlanConfig(target=target, mesh="all", analytic=True), []).plans[0]
    except ConfigError:
        return None


def mesh_of(plan: Plan) -> str:
    return f"{plan.resolved.mesh_shape['fsdp']}x{plan.resolved.mesh_shape['tp']}"


def compiled(model: str, way: str, target: str) -> dict:
    """What the compiler says of the best mesh: its peak, which phase has it, and the seconds that asking took."""
    plan, began = best(model, way, target), time.perf_counter()
    if plan is None:
        raise SystemExit(f"{model} {way} on {target}: no mesh divides model and batch")
    found = with_compiled(plan, devices_of(plan.machine), lambda text: print(text, flush=True))
    seconds = round(time.perf_counter() - began)
    return {"mesh": mesh_of(found), "peak_bytes": found.peak_bytes, "fits": bool(found.fits), "seconds": seconds}


def cell(model: str, way: str, target: str, known: dict) -> str:
    plan = best(model, way, target)
    if plan is None:
        return "-"
    asked = known.get(f"{model}:{way}:{target}")
    if asked is None or asked["mesh"] != mesh_of(plan):
        text = f"{plan.peak_bytes / GiB:,.1f}"
        return f"{f'**{text}**' if plan.fits else text} {mesh_of(plan)}"
    text = f"{asked['peak_bytes'] / GiB:,.1f}"
    return f"{f'**{text}**' if asked['fits'] else text}*/{plan.peak_bytes / GiB:,.1f} {asked['mesh']}"


def row(model: str, way: str, known: dict) -> str:
    targets = MIXTURE_TARGETS if model in MIXTURES else TARGETS
    return f"|{model}|{way}|{'|'.join(cell(model, way, target, known) for target in targets)}|"


def rows(models: tuple[str, ...], ways: dict, known: dict) -> str:
    return "".join(row(model, way, known) + "\n" for model in models for way in ways)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", nargs="*", default=[], metavar="MODEL:WAY:TARGET")
    known = json.loads(COMPILED.read_text()) if COMPILED.exists() else {}
    for name in parser.parse_args().compile:
        known[name] = compiled(*name.split(":"))
        print(name, known[name], flush=True)
        COMPILED.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    dense, mixtures = rows(MODELS, WAYS, known), rows(MIXTURES, MIXTURE_WAYS, known)
    PAGE.write_text(HEAD + dense + MIXTURE_HEAD + mixtures)


if __name__ == "__main__":
    main()
