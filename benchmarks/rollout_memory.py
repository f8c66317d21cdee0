"""What decoding Gemma 3 1B takes on a device that is not there, compiled for it ahead of time. Prints one JSON line.

    python benchmarks/rollout_memory.py --target v5e [--slots 128] [--prompt 1024] [--new 7168] [--fsdp 1] [--tp 1]
    python benchmarks/rollout_memory.py --target h100 --target-config h100.txtpb

The program is the engine's chunk of decoding in bfloat16, weights gathered over fsdp. cache_bytes are those of the
slots' keys and values on one device; temp_bytes is what the compiler needs beside arguments and results, and
alias_bytes what it updates in place: alias_is_cache says that no second cache is ever made. `collectives` counts them
in the compiled text, whose layers are written out, so those of one token. kv_ratio is the cache's bytes against those
of a cache in which every layer, the sliding ones too, keeps the whole length; kv_ratio_4096 the same for sequences of
4096 tokens.

Nothing runs: memory is what the compiler plans, and a GPU's compiler has not tuned its kernels. The file for h100 is
the text of XLA's GpuTargetConfigProto. On a machine that has the GPU, this prints it:

    import jax; from jaxlib import xla_client
    print(xla_client.get_topology_for_devices(jax.devices()).target_config)
"""

import argparse
import importlib.util
import json
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to ask who it is
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nor one to be taken by another process

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from tunix_lite.models import decoder, layer_by_layer, weights
from tunix_lite.models.architecture import Architecture
from tunix_lite.parallel.mesh import RULES, make_mesh
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout import memory
from tunix_lite.rollout.programs import Programs, SamplerSpec
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig

CFG = Architecture(262_144, 26, 1152, 4, 1, 256, 6912)
END_IDS = (1, 106)
NEEDED = {"h100": ("jax_cuda12_plugin", "jax-cuda12-plugin jax-cuda12-pjrt"), "v5e": ("libtpu", "libtpu")}
COLLECTIVE = r" (all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
V5E = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}  # topologies by chips


def target_devices(target: str, target_config: Path | None, count: int) -> list:
    """`count` devices that can be compiled for, and only that."""
    module, wheels = NEEDED[target]
    if importlib.util.find_spec(module) is None:
        sys.exit(f"--target {target}: its compiler is not installed; pip install --no-deps {wheels}")
    if target == "h100":
        options = {"topology": f"1x1x{count}", "target_config": target_config.read_text()}
        return topologies.get_topology_desc(platform="cuda", topology_name="", **options).devices
    chips = next(chips for chips in V5E if chips >= count)
    return topologies.get_topology_desc(platform="tpu", topology_name=f"v5e:{V5E[chips]}").devices[:count]


def weight_shapes(dtype):
    """What the engine's make_prepare makes of the weights, as shapes with places."""
    params = weights.shapes(decoder.weights(CFG), dtype)
    return layer_by_layer.per_layer_shapes(params, CFG, dtype, gather=True)


def placed(shapes, places):
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)


def kv_ratio(slots: int, length: int, dtype) -> float:
    """Bytes of the cache over those of one without windows."""

    def num_bytes(cfg):
        shapes = jax.eval_shape(lambda: kv_cache.empty_cache(cfg, slots, length, dtype, False))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))

    whole = Architecture(**{**vars(CFG), "pattern": ("global",)})
    return num_bytes(CFG) / num_bytes(whole)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", choices=NEEDED, required=True)
    parser.add_argument("--target-config", type=Path, help="for h100: the text of its GpuTargetConfigProto")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, default=7168, help="tokens of the longest completion")
    parser.add_argument("--chunk", type=int, default=16)
    parser.add_argument("--cache", choices=("compute", "int8"), default="compute")
    parser.add_argument("--fsdp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    args = parser.parse_args()
    if args.target == "h100" and args.target_config is None:
        parser.error("--target h100 needs --target-config FILE")

    dtype, count = jnp.bfloat16, args.fsdp * args.tp
    devices = target_devices(args.target, args.target_config, count)
    jax.set_mesh(make_mesh(((args.fsdp, args.tp), ("fsdp", "tp")), devices))
    generation, rollout = (
        GenerationConfig(args.prompt, args.new),
        RolloutConfig(args.slots, args.chunk, cache=args.cache),
    )
    spec = SamplerSpec(CFG, generation, END_IDS, 0, dtype, args.chunk, args.cache == "int8")
    programs = Programs(spec)
    made = programs.make_slots.lower(args.slots).compile().output_shardings
    slots = placed(jax.eval_shape(lambda: programs.make_slots(args.slots)), made)
    lowered = programs.decode.lower(slots, weight_shapes(dtype), jax.ShapeDtypeStruct((), jnp.float32))
    began = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - began

    planned = compiled.memory_analysis()
    mesh_shape = {"fsdp": args.fsdp, "tp": args.tp}
    sampling = memory.SamplingMemory(CFG, dtype, generation, rollout, args.slots, (), mesh_shape, RULES)
    cache = sampling.cache_bytes()
    print(
        json.dumps(
            {
                "benchmark": "rollout_memory",
                "target": args.target,
                "mesh": f"[[{args.fsdp},{args.tp}],[fsdp,tp]]",
                "slots": args.slots,
                "tokens": args.prompt + args.new,
                "chunk": args.chunk,
                "cache": args.cache,
                "cache_bytes": cache,
                "argument_bytes": planned.argument_size_in_bytes,
                "temp_bytes": planned.temp_size_in_bytes,
                "alias_bytes": planned.alias_size_in_bytes,
                "temp_over_cache": round(planned.temp_size_in_bytes / cache, 4),
                "alias_is_cache": planned.alias_size_in_bytes >= cache,
                "compile_seconds": round(seconds, 1),
                "collectives": Counter(re.findall(COLLECTIVE, compiled.as_text())),
                "kv_ratio": round(kv_ratio(args.slots, args.prompt + args.new, dtype), 4),
                "kv_ratio_4096": round(kv_ratio(args.slots, 4096, dtype), 4),
                "jax": jax.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
