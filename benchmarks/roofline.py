"""Counts what an accelerator would do for decode and for an update, from the programs that its own compiler makes
without it, and predicts the time by the machine model of tunix_lite/planning/kernels.py.

    python benchmarks/roofline.py
    python benchmarks/roofline.py --targets h100 --models qwen3_0.6b --slots 64 --programs decode --kernels

Decode is compiled at two depths, one and two rounds of the pattern of layers (two layers at least): the difference is
what a layer costs, and the rest what stands beside the layers; both together give the whole model. XLA for TPU keeps
arrays in on-chip memory, and which ones depends on the depth. So for TPUs the whole model is compiled too, and the
numbers of a step are counted in it. `kernels_a_layer`, `kernels_beside` and `layer_over_floor` still come from the two
depths, and need not add up to the step. `extrapolated` is true on GPUs, and where the whole model does not fit into a
TPU: such a number of a TPU can be wrong by some percent. All numbers of decode are of one step, one token in every
slot. `floor` is every weight and the whole cache read once. Of the bytes over it, `bytes` has what each kernel reads
and writes, `memory` leaves out what stays in the L2 of a GPU. The update is one micro-batch of 8 sequences of 512
tokens with all its layers. `--kernels` lists the kernels of a decode step.
The plan-gpu and plan-tpu extras are needed. One JSON line per program, then a table per target.
"""

import argparse
import json
import os
from collections import defaultdict
from dataclasses import dataclass, replace

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import arguments
import jax

from tunix_lite.basics.errors import ConfigError
from tunix_lite.parallel.hlo import op_name, parse
from tunix_lite.parallel.mesh import resolve_mesh_shape
from tunix_lite.planning import flops
from tunix_lite.planning.hardware import Hardware, devices_of, find_machine
from tunix_lite.planning.kernels import Kernel, bytes_of, kernels, predicted_seconds
from tunix_lite.planning.plan import with_choices
from tunix_lite.planning.programs import lowered
from tunix_lite.settings.compose import compose
from tunix_lite.settings.resolved_parts import abstract, mesh_of_run
from tunix_lite.settings.resolved_run import ResolvedRun, find_model

LENGTHS = 256  # tokens of a prompt and of a completion
LARGE_COPY = 2**20  # bytes
WORKLOAD = (
    *("training.prompts_per_step=1", "algorithm.num_generations=8", "training.micro_batch_size=8"),
    *("algorithm.kl_coef=0", "training.mixed_precision=bf16", "model.weights=random", "evaluation.num_examples=0"),
    *(f"generation.max_prompt_length={LENGTHS}", f"generation.max_new_tokens={LENGTHS}"),
)


def argument_bytes(text: str, prefix: str) -> int:
    """Bytes of the program's arguments whose path begins so, on one device: args[1] are the weights
    of a decode program, args[0].cache its cache."""
    program, entry = parse(text)
    found = program[entry].instructions.values()
    chosen = [i for i in found if i.op == "parameter" and op_name(i).startswith(prefix)]
    return sum(bytes_of(i.type) for i in chosen)


@dataclass(frozen=True)
class Counts:
    """All kernels of a program, or of a part of it, together.

    Example: count(kernels(text)).kernels.
    """

    kernels: float = 0
    # kernels by kind
    by_kind: dict[str, float] | None = None
    read_bytes: float = 0
    written_bytes: float = 0
    flops: float = 0
    sent_bytes: float = 0
    # times that the host must answer before the device goes on
    host_waits: float = 0


def count(found: list[Kernel], calls: float = 1) -> Counts:
    """The kernels together. calls: what to divide by, such as the steps of a decode program."""
    by_kind: dict[str, float] = defaultdict(float)
    for kernel in found:
        by_kind[kernel.kind] += kernel.times / calls
    waits = by_kind.pop("host", 0.0)
    real = [kernel for kernel in found if kernel.kind != "host"]

    def total(name: str) -> float:
        return sum(k.times * getattr(k, name) for k in real) / calls

    return Counts(
        kernels=sum(n for kind, n in by_kind.items() if kind != "prefetch"),
        by_kind=dict(by_kind),
        read_bytes=total("read_bytes"),
        written_bytes=total("written_bytes"),
        flops=total("flops"),
        sent_bytes=total("sent_bytes"),
        host_waits=waits,
    )


def copies(found: list[Kernel], least_bytes: int, in_loop: bool = True) -> list[Kernel]:
    """The copies and transposes of at least so many bytes."""
    return [k for k in found if k.kind == "copy" and k.written_bytes >= least_bytes and (k.turns > 1 or not in_loop)]


def compiled_text(
    target: str, model: str, program: str, overrides: list[str], depth: int | None = None
) -> tuple[ResolvedRun, str]:
    """The run of a model cut to so many layers, and the text of one of its programs as compiled for the target."""
    run = compose([*WORKLOAD, f"model={model}", *overrides])
    if depth is not None:
        run = replace(run, model=replace(run.model, architecture=replace(run.model.architecture, num_layers=depth)))
    machine = find_machine(target)
    sizes = resolve_mesh_shape(run.model.mesh_shape, machine.num_devices)
    resolved = with_choices(run, machine, run.model.architecture, find_model(run.model)[1], sizes)
    with mesh_of_run(resolved, devices_of(machine)):
        text = lowered(resolved, abstract(resolved))[program]().compile().as_text()
    return resolved, text


def decode_step(target: str, model: str, slots: int, overrides: list[str] = ()) -> dict:
    """What one decode step of the whole model comes to, what of it is a layer's, and what the rest."""
    hardware = find_machine(target).hardware
    own = [*overrides, f"rollout.num_slots={slots}"]
    whole = compose([f"model={model}"]).model.architecture
    near = max(2, len(whole.pattern))
    parts = []
    for depth in (near, 2 * near):
        resolved, text = compiled_text(target, model, "decode", own, depth)
        parts.append(step_of(text, resolved, hardware))
    layer = {name: (parts[1][name] - parts[0][name]) / near for name in parts[0]}
    beside = {name: parts[0][name] - near * layer[name] for name in parts[0]}
    step = {name: beside[name] + whole.num_layers * layer[name] for name in layer}
    compiled = whole_step(target, model, own) if hardware.platform == "tpu" else None
    if compiled is not None:
        step = compiled

    # The model's own FLOPs, with every column of the cache attended to.
    columns = [resolved.cfg.window if kind == "local" else 2 * LENGTHS for kind in whole.kinds]
    attention = sum(4 * whole.num_heads * whole.head_dim * slots * min(n, 2 * LENGTHS) for n in columns)
    model_flops = flops.forward_flops(whole, slots, slots, attention)
    return {
        "target": target,
        "model": model,
        "program": "decode",
        "slots": slots,
        "kernels_a_layer": round(layer["kernels"], 2),
        "kernels_beside": round(beside["kernels"], 2),
        "kernels_a_step": round(step["kernels"]),
        "extrapolated": compiled is None,
        "bytes_over_floor": round(step["bytes"] / step["floor"], 3),
        "layer_over_floor": round(layer["bytes"] / layer["floor"], 3),
        "gigabytes": round(step["bytes"] / 1e9, 3),
        "flops_over_model": round(step["flops"] / model_flops, 3),
        "sent_megabytes": round(step["sent_bytes"] / 1e6, 3),
        "host_waits_a_token": round(step["host_waits"] + 1 / resolved.sampling_memory.chunk, 3),
        "large_copies": round(step["large_copies"]),
        "predicted_ms": round(1e3 * step["seconds"], 3),
        "floor_ms": round(1e3 * step["floor"] / hardware.memory_bandwidth, 3),
    }


def whole_step(target: str, model: str, overrides: list[str]) -> dict[str, float] | None:
    """Counts of one decode step of the whole model; None: it does not fit into the device's memory."""
    try:
        resolved, text = compiled_text(target, model, "decode", overrides)
    except jax.errors.JaxRuntimeError as error:
        said = str(error)
        if "RESOURCE_EXHAUSTED" not in said or "hbm" not in said.lower():
            raise
        return None
    return step_of(text, resolved, find_machine(target).hardware)


def step_of(text: str, resolved: ResolvedRun, hardware: Hardware) -> dict[str, float]:
    """Counts of one step of a decode program."""
    chunk = resolved.sampling_memory.chunk
    inside = [kernel for kernel in kernels(text, resolved.mesh_shape) if kernel.turns > 1]
    counted = count(inside, chunk)
    floor = argument_bytes(text, "args[1]") + argument_bytes(text, "args[0].cache")
    if not resolved.cfg.tied:
        floor -= argument_bytes(text, "args[1]['embed']")
    return {
        "kernels": counted.kernels,
        "bytes": counted.read_bytes + counted.written_bytes,
        "flops": counted.flops,
        "sent_bytes": counted.sent_bytes,
        "host_waits": counted.host_waits,
        "large_copies": sum(k.times for k in copies(inside, LARGE_COPY)) / chunk,
        "seconds": predicted_seconds(inside, hardware) / chunk,
        "floor": floor,
    }


def update(target: str, model: str, overrides: list[str] = ()) -> dict:
    """What one update comes to."""
    hardware = find_machine(target).hardware
    resolved, text = compiled_text(target, model, "update", list(overrides))
    found = kernels(text, resolved.mesh_shape)
    counted = count(found)
    tokens, scored = 8 * 2 * LENGTHS, 8 * LENGTHS
    attention = flops.attention_flops(resolved.cfg, [2 * LENGTHS] * 8)
    model_flops = flops.update_flops(resolved.cfg, tokens, scored, attention)
    num_devices = find_machine(target).num_devices
    seconds = predicted_seconds(found, hardware)
    return {
        "target": target,
        "model": model,
        "program": "update",
        "remat": resolved.run.training.remat,
        "attention": resolved.attention,
        "kernels_a_step": round(counted.kernels),
        "gigabytes": round((counted.read_bytes + counted.written_bytes) / 1e9, 3),
        "flops_over_model": round(counted.flops * num_devices / model_flops, 3),
        "sent_megabytes": round(counted.sent_bytes / 1e6, 3),
        "host_waits": counted.host_waits,
        "large_copies": round(sum(k.times for k in copies(found, LARGE_COPY))),
        "copied_gigabytes": round(sum(k.times * k.written_bytes for k in copies(found, LARGE_COPY)) / 1e9, 3),
        "predicted_ms": round(1e3 * seconds, 3),
        "predicted_mfu": round(model_flops / num_devices / hardware.peak_flops / seconds, 3),
    }


def kernels_of_step(target: str, model: str, slots: int, overrides: list[str] = (), depth: int = 2) -> list[Kernel]:
    """The kernels of one decode step of so many layers."""
    own = [*overrides, f"rollout.num_slots={slots}"]
    resolved, text = compiled_text(target, model, "decode", own, depth)
    chunk = resolved.sampling_memory.chunk
    return [replace(k, times=k.times // chunk) for k in kernels(text, resolved.mesh_shape) if k.turns > 1]


def table(rows: list[dict]) -> str:
    """Rows of one program, as Markdown."""
    names = [name for name in rows[0] if name not in ("target", "program")]
    lines = [names, ["---"] * len(names), *([str(row[name]) for name in names] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=["h100", "v5e-1"])
    parser.add_argument("--models", nargs="+", default=["gemma3_1b", "qwen3_0.6b"])
    parser.add_argument("--slots", type=arguments.count, nargs="+", default=[64, 256])
    parser.add_argument("--programs", nargs="+", default=["decode", "update"], choices=["decode", "update"])
    parser.add_argument("--overrides", nargs="*", default=[], help="of the run, as on the command line of train")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of a step of two layers instead")
    args = parser.parse_args()
    try:
        check(args.targets, args.models, args.overrides)
        print_counts(args)
    except ConfigError as error:
        raise SystemExit(f"roofline.py: {error}") from error


def check(targets: list[str], models: list[str], overrides: list[str]) -> None:
    """Raises ConfigError for names that are wrong and compilers that are missing, before anything is compiled."""
    for model in models:
        compose([*WORKLOAD, f"model={model}", *overrides])
    for target in targets:
        try:
            devices_of(find_machine(target))
        except ValueError as error:
            raise ConfigError(f"--targets {target}: {error}") from error


def print_counts(args: argparse.Namespace) -> None:
    """Compiles, and prints a line of JSON for each program and a table for each target."""
    for target in args.targets:
        found: dict[str, list[dict]] = {"decode": [], "update": []}
        for model in args.models:
            if args.kernels:
                for k in kernels_of_step(target, model, args.slots[0], args.overrides):
                    print(k.times, k.kind, k.name, k.read_bytes, k.written_bytes, f"{k.flops:.3g}", k.source[-60:])
                continue
            if "decode" in args.programs:
                found["decode"] += [decode_step(target, model, slots, args.overrides) for slots in args.slots]
            if "update" in args.programs:
                found["update"].append(update(target, model, args.overrides))
        for program, rows in found.items():
            for row in rows:
                print(json.dumps(row | {"jax": jax.__version__}), flush=True)
            if rows:
                print(f"\n{target}, {program}\n\n{table(rows)}\n", flush=True)


if __name__ == "__main__":
    main()
