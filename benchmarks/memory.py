"""What the update takes of a device that need not be there, by its own compiler. One JSON line per arm.

    python benchmarks/memory.py --target v5e-4 --overrides model=gemma3_1b training.mixed_precision=bf16_params \
        --arms training.remat=none training.remat=block
    python benchmarks/memory.py --target v5e-16 --mesh 4 4 --overrides model=gemma3_1b ... --arms training.remat=block
    python benchmarks/memory.py --target attached --overrides model=bundled --arms training.packing=prefix

An arm is a list of overrides as on the command line of a run, separated by commas; --overrides go before all arms. The
batch is 8 sequences of 512 + 1024 tokens unless overrides say otherwise, without a KL term and with AdamW. Bytes are
those of one device; `temp_bytes` is what the compiler plans beside arguments and results. compile_seconds are of this
machine, with whatever else it does.
"""

import argparse
import json
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from tunix_lite.parallel.mesh import as_text, resolve_mesh_shape
from tunix_lite.planning.hardware import devices_of, find_machine
from tunix_lite.planning.plan import with_choices
from tunix_lite.planning.programs import DoesNotFit, compiled, lowered
from tunix_lite.settings.compose import compose
from tunix_lite.settings.resolved_parts import abstract, mesh_of_run
from tunix_lite.settings.resolved_run import find_model

WORKLOAD = (
    *("training.prompts_per_step=1", "algorithm.num_generations=8", "algorithm.kl_coef=0"),
    *("generation.max_prompt_length=512", "generation.max_new_tokens=1024", "model.weights=random"),
)


def measured(target: str, mesh_sizes: list[int] | None, overrides: list[str]) -> dict:
    run = compose([*overrides])
    machine = find_machine(target)
    shape = run.model.mesh_shape if mesh_sizes is None else (tuple(mesh_sizes), ("fsdp", "tp"))
    sizes = resolve_mesh_shape(shape, machine.num_devices)
    devices = devices_of(machine)
    resolved = with_choices(run, machine, *find_model(run.model), sizes)
    with mesh_of_run(resolved, devices):
        began = time.perf_counter()
        update = lowered(resolved, abstract(resolved))["update"]()
        lowering = time.perf_counter() - began
        try:
            done = update.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return {"does_not_fit": str(error).splitlines()[0][:300]}
        seconds = time.perf_counter() - began - lowering
        program = compiled("update", lambda: done, sizes)
    return {
        "mesh": as_text((tuple(sizes.values()), tuple(sizes))),
        "attention": resolved.attention,
        "argument_bytes": program.argument_bytes,
        "temp_bytes": program.temp_bytes,
        "alias_bytes": program.alias_bytes,
        "code_bytes": done.memory_analysis().generated_code_size_in_bytes,
        "lower_seconds": round(lowering, 1),
        "compile_seconds": round(seconds, 1),
        "collectives": {f"{g.kind} {g.axis}": [g.count, g.total_bytes] for g in program.collectives},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True, help="h100x4, v5e-4 ... or attached")
    parser.add_argument("--mesh", type=int, nargs=2, help="fsdp and tp; else as the overrides say")
    parser.add_argument("--overrides", nargs="*", default=[])
    parser.add_argument("--arms", nargs="+", default=[""])
    args = parser.parse_args()
    for arm in args.arms:
        own = [text for text in arm.split(",") if text]
        said = {"benchmark": "memory", "target": args.target, "overrides": [*args.overrides, *own]}
        try:
            said |= measured(args.target, args.mesh, [*WORKLOAD, *args.overrides, *own])
        except DoesNotFit as error:
            said |= {"does_not_fit": error.message}
        print(json.dumps(said | {"jax": jax.__version__}), flush=True)


if __name__ == "__main__":
    main()
