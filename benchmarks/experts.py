"""The product of experts beside a dense one of the same FLOPs and beside lax.ragged_dot, and a whole mixture beside a
dense feed-forward of the same FLOPs: forward, and with gradients.

python -m benchmarks.experts [--tokens 2048] [--experts 64] [--per-token 8] [--width 512] [--inner 256] [--block 64]

`--compile h100 v5e-1` times nothing. It compiles the mixture in bfloat16 for devices that need not be there, and
counts what its products do, beside the least that they could do: FLOPs of pairs, no block filled up; weights of
reached experts once, and pairs once in and out; on a GPU a kernel for each product, on a TPU one for each block, and
one for each matrix that several blocks share.
"""

import argparse
import dataclasses
import re
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tunix_lite.models import decoder, experts, groups
from tunix_lite.models.architecture import Architecture, Experts
from tunix_lite.models.attention import AttentionMeta
from tunix_lite.models.grouped import grouped_product
from tunix_lite.models.layer_kind import Surroundings
from tunix_lite.models.weights import for_compute
from tunix_lite.parallel.mesh import make_mesh
from tunix_lite.planning.hardware import devices_of, find_machine
from tunix_lite.planning.kernels import kernels


def seconds(functions: dict, rounds: int) -> dict[str, float]:
    """The median of the seconds of each function, which take turns."""
    for fn in functions.values():
        jax.block_until_ready(fn())
    taken = {name: [] for name in functions}
    for _ in range(rounds):
        for name, fn in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(fn())
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def layer(cfg: Architecture, dtype: str):
    """(its weights, the mixture of a layer or its dense feed-forward, the gradient of both inputs)."""
    table = decoder.layer_weights(cfg)
    table = {n: w for n, w in table.items() if n in ("gate", "up", "down", "router") or n.startswith("expert_")}

    def fed(w, x):
        w = {n: for_compute(leaf, table[n], jnp.dtype(dtype)) for n, leaf in w.items()}
        if cfg.experts is None:
            return experts.dense_feed_forward(x, w, cfg, decoder.Products())
        sequences = AttentionMeta(None, jnp.ones(x.shape[:2]))
        around = Surroundings(decoder.Products(), (), None, sequences=sequences)
        return experts.feed_forward(x, x, w, cfg, around)[0]

    gradient = jax.grad(lambda w, x: jnp.sum(jnp.sin(fed(w, x).astype(jnp.float32))), argnums=(0, 1))
    return table, jax.jit(fed), jax.jit(gradient)


def count(target: str, cfg: Architecture, N: int) -> None:
    """Prints what the compiled products of N tokens do on a target. Few tokens are those of one step of decoding."""
    machine = find_machine(target)
    chip = machine.hardware
    E, k, D, F = cfg.experts.count, cfg.experts.per_token, cfg.embed_dim, cfg.experts.mlp_dim
    pairs = N * k
    made = partial(groups.group, experts=E, block=groups.block_of(pairs, E))
    reached = jax.eval_shape(made, jax.ShapeDtypeStruct((N, k), jnp.int32)).expected_touched
    few = N <= 512
    mesh = make_mesh(((1, 1), ("fsdp", "tp")), devices_of(machine)[:1])
    with jax.set_mesh(mesh):
        placed = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
        table, *programs = layer(cfg, "bfloat16")
        for name, program in zip(("forward", "with gradients"), programs[: 1 if few else 2]):
            has_gradients = name != "forward"
            dtypes = {n: jnp.float32 if n == "router" or has_gradients else jnp.bfloat16 for n in table}
            w = {n: placed(weight.shape, dtypes[n]) for n, weight in table.items()}
            x = placed((N, 1, D) if few else (1, N, D), jnp.bfloat16)
            every = kernels(program.lower(w, x).compile().as_text())
            is_ours = re.compile("_by_expert|_of_weight|grouped_")
            ours = [one for one in every if is_ours.search(one.source) and one.kind != "host"]
            rest = [one for one in every if one not in ours and one.kind not in ("host", "prefetch")]
            # 3 products; backward 3 of rows, and 3 of weights, whose results are in float32
            products = 9 if has_gradients else 3
            least_flops = products * 2 * pairs * D * F
            least_bytes = products * pairs * (D + F) * 2 + (6 if has_gradients else 3) * reached * D * F * 2
            least_bytes += 3 * E * D * F * 4 if has_gradients else 0
            flops, moved = sum(one.times * one.flops for one in ours), bytes_of(ours)
            blocks = pairs / groups.block_of(pairs, E)
            of_product = reached + blocks if blocks > reached else reached
            least_kernels = products * (1 if chip.platform == "cuda" else of_product)
            started = sum(one.times for one in ours)
            print(f"{target}, {N} tokens, {name}: {flops / 1e9:,.1f} GFLOP, {flops / least_flops:.2f} of the least")
            print(f"  {moved / 1e9:.2f} GB, {moved / least_bytes:.2f}; {started} kernels,", end="")
            print(f" {started / least_kernels:.2f}")
            ridge = chip.peak_flops / chip.memory_bandwidth
            print(f"  {flops / moved:.0f} FLOPs a byte, where {ridge:.0f} would take as long as the bytes", end="")
            print(f"; the rest of the layer: {sum(one.times for one in rest)} kernels, {bytes_of(rest) / 1e9:.2f} GB")


def bytes_of(every: list) -> int:
    return sum(one.times * (one.read_bytes + one.written_bytes) for one in every)


def main() -> None:
    """Prints a row for each pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"tokens": 2048, "experts": 64, "per-token": 8, "width": 512, "inner": 256, "block": 0, "rounds": 7}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--ragged", action="store_true", help="also lax.ragged_dot, which takes gigabytes on a CPU")
    parser.add_argument("--compile", nargs="*", metavar="TARGET")
    a = parser.parse_args()
    N, E, k, D, F = a.tokens, a.experts, a.per_token, a.width, a.inner
    cfg = Architecture(64, 1, D, 4, 4, 16, k * F, ("global",), activation="silu", experts=Experts(E, k, F))
    if a.compile:
        for target in a.compile:
            count(target, cfg, N)
        return
    jax.set_mesh(make_mesh(((1, 1), ("fsdp", "tp")), jax.devices()[:1]))
    if a.block:
        groups.block_of = experts.block_of = lambda *_: a.block

    # One product.
    rng = np.random.default_rng(0)
    ids = jnp.asarray(np.argsort(rng.normal(size=(N, E)), axis=1)[:, :k])
    made = jax.jit(partial(groups.group, experts=E, block=groups.block_of(N * k, E)))(ids)
    rows, weight, matrix = (jnp.float32(rng.normal(size=s)) for s in ((len(made.pair), D), (E, D, F), (D, F)))
    sorted_rows, counts = rows[: N * k], jnp.bincount(ids.ravel(), length=E)
    product, dense = jax.jit(grouped_product), jax.jit(jnp.matmul)
    compared = {"grouped": lambda: product(rows, weight, made), "dense": lambda: dense(sorted_rows, matrix)}
    found = seconds(compared, a.rounds)
    if a.ragged:
        # by itself: what it leaves of memory and caches slows the others down
        ragged = jax.jit(jax.lax.ragged_dot)
        found |= seconds({"ragged_dot": lambda: ragged(sorted_rows, weight, counts.astype(jnp.int32))}, 2)
    print(f"one product, block {made.block}: " + ", ".join(f"{n} {1e3 * s:.1f} ms" for n, s in found.items()))
    print(f"  of a dense product's speed: {found['dense'] / found['grouped']:.2f}", end="")
    print(f"; lax.ragged_dot takes {found['ragged_dot'] / found['grouped']:.1f} times as long" if a.ragged else "")

    # A layer: the router, sorting, three products, and the sum; beside k * F columns of a dense one.
    x, made = jnp.float32(rng.normal(size=(1, N, D))), []
    for which in (cfg, dataclasses.replace(cfg, experts=None)):
        table, *programs = layer(which, "float32")
        w = {n: jnp.float32(rng.normal(0, 0.05, weight.shape)) for n, weight in table.items()}
        made.append([partial(program, w, x) for program in programs])
    for name, ours, theirs in zip(("forward", "with gradients"), *made):
        found = seconds({"mixture": ours, "dense": theirs}, a.rounds)
        print(f"layer, {name}: " + ", ".join(f"{n} {1e3 * s:.1f} ms" for n, s in found.items()), end="")
        print(f"; {found['dense'] / found['mixture']:.2f} of a dense layer's speed")


if __name__ == "__main__":
    main()
