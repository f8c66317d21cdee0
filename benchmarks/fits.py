"""What fits where: writes docs/references/fits.md, by the formulas of `tunix-lite plan analytic=true`.

python benchmarks/fits.py
"""

from pathlib import Path

from tunix_lite.commands.plan import PlanSettings, make_plans
from tunix_lite.commands.program import compose
from tunix_lite.config import ConfigError
from tunix_lite.planning.hardware import GiB

MODELS = ("gemma3_1b", "gemma3_4b", "gemma3_12b", "gemma3_27b", "qwen3_32b", "llama3.3_70b")
TARGETS = ("h100", "h100x2", "h100x8", "v5e-4", "v5e-16", "v5p-64", "v6e-256")
WAYS = {
    "all": ["training.mixed_precision=bf16_params"],
    "LoRA": ["training.mixed_precision=bf16", "model.lora.rank=16", "model.lora.base=bf16"],
}
WORKLOAD = [
    *("training.prompts_per_step=64", "algorithm.num_generations=8", "training.micro_batch_size=1"),
    *("generation.max_prompt_length=512", "generation.max_new_tokens=1024", "rollout.num_slots=64"),
    *("training.remat=block", "training.attention=xla"),
]
PAGE = Path(__file__).parents[1] / "docs" / "references" / "fits.md"
HEAD = f"""# What fits where

By formula, not by a compiler: `tunix-lite plan analytic=true mesh=all` for each cell, by `benchmarks/fits.py`. Peak
of a device in GiB on the best mesh, fsdp x tp; **bold** fits. [Planning](../guide/plan.md) says how far formulas were
from compiled programs; a plan without `analytic=true` asks the compiler.

64 prompts x 8 generations of 512 + 1024 tokens, one sequence per fsdp shard at a time, `remat=block`, 64 slots (or one
per fsdp shard), no KL term. All weights: weights and optimizer in bfloat16 (`bf16_params`). LoRA: adapters of rank 16
on a base in bfloat16.

| model | trains | {" | ".join(TARGETS)} |
|---|---|{"---|" * len(TARGETS)}
"""


def cell(model: str, way: str, target: str) -> str:
    """The best mesh's peak; what no mesh divides is a dash."""
    run = compose([f"model={model}", *WORKLOAD, *WAYS[way]])
    try:
        best = make_plans(run, PlanSettings(target=target, mesh="all", analytic=True), []).plans[0]
    except ConfigError:
        return "-"
    sizes = best.case.sizes
    text = f"{best.peak_bytes / GiB:,.1f}"
    return f"{f'**{text}**' if best.fits else text} {sizes['fsdp']}x{sizes['tp']}"


def main() -> None:
    rows = [
        f"|{model}|{way}|{'|'.join(cell(model, way, target) for target in TARGETS)}|"
        for model in MODELS
        for way in WAYS
    ]
    PAGE.write_text(HEAD + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
