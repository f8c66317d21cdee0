"""Counts that no machine changes, of a few tiny programs on CPU, against the values in benchmarks/gate.json.

    python benchmarks/gate.py            # 0: nothing is worse. 1: something is
    python benchmarks/gate.py --accept   # writes what is counted now, if nothing is worse
    python benchmarks/gate.py --accept --why 'a sort in each step'   # if something is, and docs/log.md says these words

Nothing is timed. Of each compiled program, on one device and on four pretend ones: FLOPs and bytes accessed (XLA's
count, which has a loop's body once), instructions that run as kernels (of a loop's body once), temporaries, arguments,
and collectives with the bytes that a device sends. Of a rollout with given lengths: decode steps, prefill tokens,
chunks and programs compiled. Of a short run of `train`: programs compiled, and arrays that cross between host and
device in one step.

The values belong to one minor version of jax, as XLA decides what is fused. Where gate.json has none for the jax that
is installed, the script says so, and ends with 0.
"""

import argparse
import io
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    # XLA divides kernels by the number of cores, and chooses them by the instructions that a core has.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ["JAX_PLATFORMS"] = "cpu"
    # The last two leave out what LLVM makes of a kernel, which no count sees and which takes half of the time.
    os.environ["XLA_FLAGS"] = (
        "--xla_force_host_platform_device_count=4 --xla_cpu_max_isa=AVX2 "
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

import jax
import numpy as np

from tunix_lite.models import decoder, weights
from tunix_lite.parallel.collectives import CallSite, callees_of, collectives, grouped, parse
from tunix_lite.parallel.mesh import make_mesh
from tunix_lite.planning.programs import lowered
from tunix_lite.rollout.generate import make_generate
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.runs.experience import TaskExperience
from tunix_lite.settings.compose import compose
from tunix_lite.settings.resolved_parts import abstract, mesh_of_run
from tunix_lite.settings.resolved_run import find_model, resolve_run
from tunix_lite.train import train

VALUES = Path(__file__).with_name("gate.json")
LOG = Path(__file__).parents[1] / "docs" / "log.md"
# What a count may grow by and still be the same: XLA's FLOPs and bytes are floating-point sums.
SAME = 1e-6
# Of these, more is better. Of all others, less.
MORE_IS_BETTER = ("slot_use",)

TINY = [
    *("model=random", "model.architecture.num_layers=2", "model.architecture.vocab_size=512"),
    *("training.prompts_per_step=4", "algorithm.num_generations=4", "evaluation.num_examples=0"),
    *("generation.max_prompt_length=32", "generation.max_new_tokens=32", "rollout.chunk=8", "rollout.num_slots=8"),
    *("algorithm.kl_coef=0.04", "training.packing=none", "training.gradient_accumulation_steps=2"),
]
PACKED = ["training.packing=prefix", "training.micro_batch_tokens=320", "training.gradient_accumulation_steps=null"]
# (settings beside TINY, fsdp, tp, programs)
PROGRAMS = {
    "plain": (["training.remat=none"], 1, 1, ("update", "scoring", "prefill", "decode")),
    "shared_prompts": (["training.remat=block", *PACKED], 1, 1, ("update", "scoring")),
    "lora": (
        ["training.mixed_precision=bf16", "model.lora.rank=4", "model.lora.base=nf4"],
        1,
        1,
        ("update",),
    ),
    "fsdp4": (["training.remat=none", "rollout.weights=gathered"], 4, 1, ("update", "decode")),
    "fsdp2_tp2": (["training.remat=none", "rollout.weights=sharded"], 2, 2, ("update", "decode")),
}
# What a loop's condition computes, and what only names values, is no kernel.
NO_KERNEL = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call"),
    *("after-all", "partition-id", "replica-id", "opt-barrier", "domain"),
}


def kernels(text: str) -> Counter:
    """Instructions that run one after the other, by operation, those of a loop's body once."""
    program, entry = parse(text)
    found = Counter()

    def visit(name: str) -> None:
        for instruction in program[name].instructions.values():
            if instruction.op not in NO_KERNEL:
                found[instruction.op] += 1
            if instruction.op not in ("while", "conditional", "call"):
                continue
            conditions = instruction.rest.split("condition=%")[1:]
            skipped = {text.split(",")[0].split(" ")[0] for text in conditions}
            for callee, _ in callees_of(instruction, program[name], CallSite(), program):
                if callee not in skipped:
                    visit(callee)

    visit(entry)
    return found


def of_program(lower: Callable, mesh_shape: dict[str, int]) -> dict[str, float]:
    """The counts of one program, compiled."""
    compiled = lower().compile()
    cost = compiled.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    sizes = compiled.memory_analysis()
    text = compiled.as_text()
    by_kind = kernels(text)
    found = {
        "flops": cost["flops"],
        "bytes": cost["bytes accessed"],
        "kernels": sum(by_kind.values()),
        "copies": by_kind["copy"] + by_kind["transpose"],
        "temporary_bytes": sizes.temp_size_in_bytes,
        "argument_bytes": sizes.argument_size_in_bytes,
    }
    if mesh_shape["fsdp"] * mesh_shape["tp"] > 1:
        groups = grouped(collectives(text, mesh_shape))
        found["collectives"] = sum(group.count for group in groups)
        found["sent_bytes"] = sum(group.sent_bytes for group in groups)
    return found


def programs() -> Iterator[tuple[str, dict[str, float]]]:
    """Each program of each setting, with its counts."""
    for name, (settings, fsdp, tp, wanted) in PROGRAMS.items():
        run = compose([*TINY, *settings])
        mesh_shape = {"fsdp": fsdp, "tp": tp}
        resolved = resolve_run(run, *find_model(run.model), mesh_shape, "cpu")
        resolved = replace(resolved, sampling_weights=run.rollout.weights.replace("auto", "gathered"))
        with mesh_of_run(resolved, jax.devices()[: fsdp * tp]):
            lowers = lowered(resolved, abstract(resolved))
            for program in wanted:
                yield f"{name}/{program}", of_program(lowers[program], mesh_shape)


@contextmanager
def counted() -> Iterator[Counter]:
    """Counts what is compiled, and which arrays cross between host and device, while it lasts."""
    counts = Counter()
    is_open = [True]

    def on_duration(event: str, seconds: float, **_: str) -> None:
        if is_open[0] and event == "/jax/core/compile/backend_compile_duration":
            counts["programs_compiled"] += 1

    jax.monitoring.register_event_duration_secs_listener(on_duration)
    kept = [(jax, "device_get"), (jax, "device_put"), (jax, "make_array_from_callback"), (np, "asarray")]
    kept = [(module, name, getattr(module, name)) for module, name in kept]

    def device_get(tree):
        counts["arrays_read"] += sum(isinstance(x, jax.Array) for x in jax.tree.leaves(tree))
        return kept[0][2](tree)

    def device_put(tree, *args, **options):
        counts["arrays_written"] += len(jax.tree.leaves(tree))
        return kept[1][2](tree, *args, **options)

    def make_array_from_callback(*args, **options):
        counts["arrays_written"] += 1
        return kept[2][2](*args, **options)

    def asarray(x, *args, **options):
        counts["arrays_read"] += isinstance(x, jax.Array)
        return kept[3][2](x, *args, **options)

    replaced = (device_get, device_put, make_array_from_callback, asarray)
    try:
        for (module, name, _), function in zip(kept, replaced, strict=True):
            setattr(module, name, function)
        yield counts
    finally:
        for module, name, function in kept:
            setattr(module, name, function)
        is_open[0] = False


def rollout() -> dict[str, float]:
    """24 requests of given lengths, long-tailed, in 4 slots."""
    run = compose(TINY)
    cfg, _ = find_model(run.model)
    generation = GenerationConfig(max_prompt_length=32, max_new_tokens=64)
    limits = [64 if i % 6 == 0 else 3 + i for i in range(24)]
    prompts = [[5] * (4 + 4 * p) for p in range(6)]
    with jax.set_mesh(make_mesh(((1, 1), ("fsdp", "tp")), jax.devices()[:1])):
        params = weights.init_params(decoder.weights(cfg), jax.random.key(0))
        # A token that is never drawn ends no completion: they end at their limits.
        generate = make_generate(cfg, generation, (cfg.vocab_size,), 0, rollout=RolloutConfig(num_slots=4, chunk=8))
        with counted() as counts:
            done = generate(params, prompts, jax.random.key(1), 4, limits=limits)
        with counted() as again:
            generate(params, prompts, jax.random.key(2), 4, limits=limits)
    assert np.array(done.completion_mask).sum() == sum(limits)
    return {
        "decode_steps": done.metrics["rollout/decode_steps"],
        "prefill_tokens": done.metrics["rollout/prefill_tokens"],
        "slot_use": done.metrics["rollout/slot_use"],
        "programs_compiled": counts["programs_compiled"],
        "programs_compiled_again": again["programs_compiled"],
        "arrays_read": again["arrays_read"],
        "arrays_written": again["arrays_written"],
    }


def run() -> dict[str, float]:
    """Four steps of a run whose completions all fit into one chunk, so that no token decides a count."""
    settings = ["generation.max_new_tokens=8", "training.max_steps=4", "rollout.num_slots=16"]
    at_step = []
    take = TaskExperience.take

    def noting(self, *args):
        at_step.append(Counter(counts))
        return take(self, *args)

    TaskExperience.take = noting
    try:
        # What the run prints is of no interest here.
        quiet = redirect_stdout(io.StringIO())
        with tempfile.TemporaryDirectory() as folder, quiet, counted() as counts:
            train(compose([*TINY, *settings, "model.mesh_shape=[[1,1],[fsdp,tp]]"]), folder)
    finally:
        TaskExperience.take = take
    a_step = {name: at_step[3][name] - at_step[2][name] for name in ("arrays_read", "arrays_written")}
    late = counts["programs_compiled"] - at_step[2]["programs_compiled"]
    return {"programs_compiled": counts["programs_compiled"], "programs_compiled_after_2_steps": late, **a_step}


def count_all() -> dict[str, dict[str, float]]:
    """All counts, by what they are of."""
    found = dict(programs())
    found["rollout"] = rollout()
    found["run"] = run()
    return found


def compare(known: dict, found: dict) -> tuple[list[str], list[str]]:
    """What is worse, and what is better or new, in words."""
    worse = []
    better = []
    for name in sorted({*known, *found}):
        for count in sorted({*known.get(name, {}), *found.get(name, {})}):
            old = known.get(name, {}).get(count)
            new = found.get(name, {}).get(count)
            if old is None or new is None:
                what = "is new" if old is None else "is gone"
                (better if old is None else worse).append(f"{name}: {count} {what}")
                continue
            if abs(new - old) <= SAME * abs(old):
                continue
            line = f"{name}: {count} {old:,.10g} -> {new:,.10g}"
            if old:
                line += f" ({new / old - 1:+.1%})"
            is_better = (new > old) == (count in MORE_IS_BETTER)
            (better if is_better else worse).append(line)
    return worse, better


def verdict(all_known: dict, found: dict, version: str) -> tuple[int, list[str]]:
    """The exit status, and what there is to say."""
    minor = ".".join(version.split(".")[:2])
    if minor not in all_known:
        there = ", ".join(sorted(all_known)) or "none"
        return 0, [
            f"gate: NOTHING WAS COMPARED: benchmarks/gate.json has no values for jax {minor} (it has {there}).",
            "gate: `python benchmarks/gate.py --accept` with this jax adds them.",
        ]
    known = all_known[minor]
    worse, better = compare(known["counts"], found)
    total = sum(map(len, found.values()))
    lines = [f"gate: better: {line}" for line in better]
    if better and not worse:
        lines.append("gate: `python benchmarks/gate.py --accept` keeps what is better.")
    if not worse:
        return 0, [*lines, f"gate: {total} counts of {len(found)} programs; none is worse (jax {version})."]
    lines += [f"gate: WORSE: {line}" for line in worse]
    if known["jax"] != version:
        lines.append(f"gate: the values are of jax {known['jax']}, and this is {version}: that may be all.")
    lines.append(
        "gate: undo what made it worse, or write into docs/log.md why it must be so and run "
        "`python benchmarks/gate.py --accept --why 'WORDS OF THAT ENTRY'`."
    )
    return 1, lines


def is_logged(words: str) -> bool:
    """Whether docs/log.md has these words, three at least, one after the other, line breaks or not."""
    return len(words.split()) >= 3 and " ".join(words.split()) in " ".join(LOG.read_text().split())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accept", action="store_true", help="write the counts of today into gate.json")
    parser.add_argument("--why", metavar="WORDS", help="words of docs/log.md that explain what is worse")
    args = parser.parse_args()
    if args.why is not None and not args.accept:
        parser.error("--why goes with --accept")
    if args.why is not None and not is_logged(args.why):
        parser.error(
            f"--why: docs/log.md does not say {args.why!r}; write there why it is worse, and repeat three words or more"
        )
    began = time.process_time()
    found = count_all()
    known = json.loads(VALUES.read_text()) if VALUES.exists() else {}
    status, lines = verdict(known, found, jax.__version__)
    print("\n".join(lines))
    print(f"gate: {time.process_time() - began:.0f} s of CPU time")
    if not args.accept:
        return status
    if status and args.why is None:
        print("gate: wrote nothing: what is worse is accepted with --why and words of docs/log.md alone.")
        return status
    minor = ".".join(jax.__version__.split(".")[:2])
    # The last explanation stays until there is another one.
    why = args.why or known.get(minor, {}).get("why")
    known[minor] = {"jax": jax.__version__, "counts": found} | ({"why": why} if why else {})
    VALUES.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    print(f"gate: wrote the counts for jax {minor} into {VALUES.name}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
