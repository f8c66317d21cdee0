"""The product of experts beside a dense one of the same FLOPs and beside lax.ragged_dot, and a whole mixture beside a
dense feed-forward of the same FLOPs: forward, and with gradients.

python -m benchmarks.experts [--tokens 2048] [--experts 64] [--per-token 8] [--width 512] [--inner 256] [--block 64]
"""

import argparse
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.models import decoder, experts, groups
from tunix_lite.models.architecture import Architecture, Experts
from tunix_lite.models.grouped import grouped_product
from tunix_lite.models.weights import for_compute
from tunix_lite.parallel.mesh import make_mesh


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


def main() -> None:
    """Prints a row for each pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"tokens": 2048, "experts": 64, "per-token": 8, "width": 512, "inner": 256, "block": 0, "rounds": 7}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--ragged", action="store_true", help="also lax.ragged_dot, which takes gigabytes on a CPU")
    a = parser.parse_args()
    N, E, k, D, F = a.tokens, a.experts, a.per_token, a.width, a.inner
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
    cfg = Architecture(64, 1, D, 4, 4, 16, k * F, ("global",), activation="silu", experts=Experts(E, k, F))
    plain = Architecture(64, 1, D, 4, 4, 16, k * F, ("global",), activation="silu")
    x = jnp.float32(rng.normal(size=(1, N, D)))

    def layer(which: Architecture):
        table = decoder.layer_weights(which)
        names = [n for n in table if n in ("gate", "up", "down", "router") or n.startswith("expert_")]
        w = {n: jnp.float32(rng.normal(0, 0.05, table[n].shape)) for n in names}

        def fed(w, x):
            w = {n: for_compute(leaf, table[n], jnp.float32) for n, leaf in w.items()}
            if which.experts is None:
                return experts.dense_feed_forward(x, w, which, decoder.Products())
            return experts.feed_forward(x, x, w, which, decoder.Products())[0]

        forward = jax.jit(fed)
        gradient = jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.sin(fed(w, x))), argnums=(0, 1)))
        return lambda: forward(w, x), lambda: gradient(w, x)

    of_mixture, of_dense = layer(cfg), layer(plain)
    for name, ours, theirs in zip(("forward", "with gradients"), of_mixture, of_dense):
        found = seconds({"mixture": ours, "dense": theirs}, a.rounds)
        print(f"layer, {name}: " + ", ".join(f"{n} {1e3 * s:.1f} ms" for n, s in found.items()), end="")
        print(f"; {found['dense'] / found['mixture']:.2f} of a dense layer's speed")


if __name__ == "__main__":
    main()
