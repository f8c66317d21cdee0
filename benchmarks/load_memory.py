"""How much memory loading a checkpoint takes beside the weights themselves. Prints one JSON line.

    python benchmarks/load_memory.py [--layers 24] [--folder FOLDER]

Writes a Llama-shaped model of random bfloat16 numbers (24 layers, embed 2048, mlp 8192, vocabulary 32000: 3.2 GB in
files of 1 GB) and loads it with `hf.load_params`, each case in a process of its own. `peak_gb` is what the process held
at most while loading, above what it held before (jax imported, mesh made, one program compiled): the kernel's own high
water mark (VmHWM, reset before loading), mapped pages of the files included. `peak_anon_gb` is without those, which are
page cache; sampled every 5 ms from outside. `shards_gb` is the bytes of the loaded arrays on all devices of the
process, `ratio` is peak_gb / shards_gb, and `over_in_tensors` is what the peak has beyond the shards, in units of the
largest tensor as float32. `GB_per_s` counts bytes of the files, which are in the page cache where memory allows.
`reuse` says whether glibc keeps freed memory, as the programs ask it to (tunix_lite/distributed/host_memory.py).
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

CASES = [("fp32", (1, 1)), ("bf16", (1, 1)), ("int8", (1, 1)), ("nf4", (1, 1)), ("bf16", (4, 1)), ("bf16", (2, 2))]
GB = 1e9


def write_model(folder: Path, layers: int) -> None:
    """The checkpoint. Holds one file's tensors at a time."""
    import jax.numpy as jnp
    import numpy as np

    from tunix_lite.models import hf
    from tunix_lite.models.architecture import Architecture
    from tunix_lite.models.families import LLAMA, config_json

    flags = LLAMA.flags | {"query_scale": 64, "tied": False}
    cfg = Architecture(32_000, layers, 2048, 32, 8, 64, 8192, **flags)
    shapes = hf.hf_shapes(cfg, LLAMA)

    def tensor(name: str):
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        return (0.02 * rng.standard_normal(shapes[name], np.float32)).astype(jnp.bfloat16)

    folder.mkdir(parents=True, exist_ok=True)
    hf._SHARD_BYTES = 10**9  # several files
    hf.write_shards(folder, {name: 2 * int(np.prod(shape)) for name, shape in shapes.items()}, tensor)
    (folder / "config.json").write_text(json.dumps(config_json(cfg, LLAMA)))


def memory(pid: int | str, *names: str) -> list[int]:
    """Fields of /proc/<pid>/status, in bytes."""
    fields = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return [int(fields[name].split()[0]) * 1024 for name in names]


def load(folder: Path, storage: str, mesh: tuple[int, int], reuse: bool) -> None:
    """Loads in this process, and prints what it saw of itself."""
    from tunix_lite.distributed.host_memory import keep_freed_memory

    if reuse:
        assert keep_freed_memory()
    import jax
    import jax.numpy as jnp
    import numpy as np

    from tunix_lite.models import hf
    from tunix_lite.models.families import read_config
    from tunix_lite.parallel.mesh import make_mesh

    jax.set_mesh(make_mesh((mesh, ("fsdp", "tp"))))
    jax.jit(lambda x: x + 1)(jnp.zeros(4)).block_until_ready()
    cfg, family = read_config(folder)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is held now
    (before,), (anon,) = memory("self", "VmHWM"), memory("self", "RssAnon")
    began = time.monotonic()
    params = jax.block_until_ready(hf.load_params(folder, cfg, family, storage))
    ended = time.monotonic()
    (peak,), (after,) = memory("self", "VmHWM"), memory("self", "VmRSS")
    buffers = {
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes
        for leaf in jax.tree.leaves(params)
        for shard in leaf.addressable_shards
    }
    largest = 4 * max(int(np.prod(shape)) for shape in hf.hf_shapes(cfg, family).values())
    seen = {"began": began, "ended": ended, "anon": anon, "peak": peak - before, "after": after - before}
    print(json.dumps(seen | {"shards": sum(buffers.values()), "largest": largest}))


def measure(folder: Path, storage: str, mesh: tuple[int, int], reuse: bool) -> dict:
    """One case, in a child."""
    devices = f"--xla_force_host_platform_device_count={mesh[0] * mesh[1]}"
    env = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {devices}"}
    case = json.dumps([str(folder), storage, mesh, reuse])
    child = subprocess.Popen([sys.executable, __file__, "--case", case], env=env, stdout=subprocess.PIPE, text=True)
    samples = []
    while child.poll() is None:
        with contextlib.suppress(OSError, KeyError):  # it has just ended, or not quite begun
            samples.append((time.monotonic(), *memory(child.pid, "RssAnon")))
        time.sleep(0.005)
    if child.returncode:
        raise SystemExit(f"{case} failed")
    seen = json.loads(child.stdout.read())
    anon = max(size for at, size in samples if seen["began"] <= at <= seen["ended"]) - seen["anon"]
    seconds, files = seen["ended"] - seen["began"], sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    return {
        "storage": storage,
        "mesh": list(mesh),
        "reuse": reuse,
        "shards_gb": round(seen["shards"] / GB, 3),
        "peak_gb": round(seen["peak"] / GB, 3),
        "peak_anon_gb": round(anon / GB, 3),
        "after_gb": round(seen["after"] / GB, 3),
        "ratio": round(seen["peak"] / seen["shards"], 3),
        "over_in_tensors": round((seen["peak"] - seen["shards"]) / seen["largest"], 2),
        "seconds": round(seconds, 1),
        "GB_per_s": round(files / seconds / GB, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written and stays; used again if there")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # of a child
    args = parser.parse_args()
    if args.case:
        folder, storage, mesh, reuse = json.loads(args.case)
        return load(Path(folder), storage, tuple(mesh), reuse)

    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        if not (folder / "config.json").is_file():
            write_model(folder, args.layers)
        cases = [measure(folder, *case, reuse) for reuse in (True, False) for case in CASES]
        files = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    import jax

    line = {"benchmark": "load_memory", "files_gb": round(files / GB, 3), "cases": cases, "jax": jax.__version__}
    print(json.dumps(line | {"device": jax.devices()[0].device_kind, "cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
