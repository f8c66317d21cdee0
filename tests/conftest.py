"""Four pretend devices for every test, a tiny model, and fixtures that compile once and are shared."""

import gc
import importlib.util
import json
import os
import signal
from importlib.metadata import version
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Workers and programs that tests start keep what Python compiled, whatever the environment says: to compile the package
# and to rewrite the assertions of tests again is half of what each worker does before its first test.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Compiling is what the suite costs: what one test or the run before has compiled is taken from disk, in programs that
# tests start, too. The key is the program, so nothing stale is ever used. Programs of several devices are not kept: see
# distributed.join.disable_compilation_cache.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # half of a small one is the compiler
# Code is compiled for how long that takes, not for how fast it runs: half the time of the suite. The last two flags are
# some that a later XLA may not know, and then it would not start; libtpu, which -m aot needs, does not know them. One
# part of code in place of 32 takes a third less to compile.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        f"--xla_force_host_platform_device_count={os.environ.get('TUNIX_LITE_TEST_DEVICES', 4)}",
        "--xla_backend_optimization_level=0",
        *(
            ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
            if version("jaxlib").startswith("0.10.") and importlib.util.find_spec("libtpu") is None
            else []
        ),
    ]
)
import composed_once  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import programs_once
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tunix_lite.learner.policy import make_policy
from tunix_lite.models import attention, decoder, layer_by_layer
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.source import BUNDLED
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.parallel.mesh import make_mesh, put
from tunix_lite.rollout.generate import make_generate
from tunix_lite.rollout.programs import Programs, SamplerSpec
from tunix_lite.rollout.settings import GenerationConfig

collect_ignore = [] if "TUNIX_LITE_TEST_DEVICES" in os.environ else ["eight_devices"]  # test_eight_devices.py runs them
PROMPT, NEW = 10, 12
EOS = (1, 3)
USES_DISK = jax.config.jax_enable_compilation_cache
# Files that take ten seconds and more begin first, or one of two cores would wait for the other's last file.
LONG_FILES = "train language_model reward_models routes experts rounding ppo held_out_loss gemma4 lora plan qwen3_5 "
LONG_FILES += "sampling docs mixtures step fused_kernels objectives rollout arithmetic text preferences attention "
LONG_FILES += "distributed serve conformance hf hub_rows extend_model trainer few_programs gguf leaving real_layers "
LONG_FILES += "reward_pool conversations agents overlap rollout_processes checkpoint optimizers tinker reference "
LONG_FILES += "mesh bad_input hostile_folders promises comparison launch config relatives sequence_losses "
LONG_FILES += "reward_code damage compiling resume"
LONG_FILES = [f"test_{name}.py" for name in LONG_FILES.split()]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONG_FILES.index(item.path.name) if item.path.name in LONG_FILES else len(LONG_FILES))


def pytest_collection_finish():
    """Modules and tests stay until the end, so the garbage collector need not walk through them again and again. With
    the usual bound of 700 new objects it takes a seventh of the suite."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


def set_mesh(fsdp: int, tp: int):
    """Make a mesh over the first fsdp * tp pretend devices the current one."""
    mesh = make_mesh(((fsdp, tp), ("fsdp", "tp")), jax.devices()[: fsdp * tp])
    jax.set_mesh(mesh)
    return mesh


@pytest.fixture(autouse=True)
def one_device():
    """Tests start on a mesh of one device; those about meshes set their own."""
    jax.config.update("jax_enable_compilation_cache", USES_DISK)
    compilation_cache.reset_cache()  # it would keep what it was told before
    return set_mesh(1, 1)


@pytest.fixture
def programs_anew():
    """For claims about tracing and compiling: no program of a test before this one is used."""
    with programs_once.anew():
        yield


@pytest.fixture
def programs_with_names(programs_anew):
    """For claims about names in the text of a program, which the cache on the disk does not compare."""
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The one of the bundled model."""
    return Tokenizer.load(BUNDLED)


@pytest.fixture(scope="session")
def cfg() -> Architecture:
    """Three layers, local, global, and one left over; the window is shorter than a sequence."""
    return Architecture(
        vocab_size=32,
        num_layers=3,
        embed_dim=16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_dim=24,
        pattern=("local", "global"),
        window=5,
        query_scale=8,
    )


def random_params(cfg: Architecture, seed: int = 0, scale: float = 0.3):
    """Weights large enough that the model has opinions, norms included; on the current mesh."""
    rng, table = np.random.default_rng(seed), decoder.weights(cfg)
    return jax.tree.map(lambda w: put(rng.normal(0, scale, w.shape).astype(np.float32), *w.axes), table)


def logits_of(params, cfg: Architecture, tokens, dtype=jnp.float32) -> np.ndarray:
    """The logits [B, T, V] of rows that are full of tokens."""

    @jax.jit
    def run(params):
        meta = attention.one_sequence_per_row(jnp.ones_like(tokens, bool))
        return decoder.logits(params, cfg, decoder.forward(params, cfg, tokens, meta, dtype)[0])

    return np.asarray(run(params))


@pytest.fixture(scope="session")
def params(cfg):
    set_mesh(1, 1)
    return random_params(cfg)


@pytest.fixture(scope="session")
def generate(cfg):
    set_mesh(1, 1)
    return make_generate(cfg, GenerationConfig(PROMPT, NEW), EOS, pad_id=0)


@pytest.fixture(scope="session")
def policy(cfg, generate):
    return make_policy(cfg, generate, temperature=1.0)


def decode_random(cfg: Architecture, lengths: list[int] | None = None, **how: bool) -> tuple:
    """(tokens, log-probabilities, those under the full distribution, slots) of two decode steps of four slots that hold
    random hidden states, and keys and values of so many tokens. how: on_cpu, or fused, by kernels of our own, which are
    interpreted."""
    rng = np.random.default_rng(0)

    def normal(x, scale: float = 1.0) -> np.ndarray:
        return rng.normal(0, scale, x.shape).astype(np.float32)

    params = jax.tree.map(lambda w: put(normal(w, 0.3), *w.axes), decoder.weights(cfg))
    last = cfg.vocab_size - 1
    spec = SamplerSpec(
        cfg, GenerationConfig(6, 64), (last,), 0, jnp.float32, 2, interpret=how.get("fused", False), **how
    )
    programs = Programs(spec)
    empty = programs.make_slots(4)

    def at_home(x, like: jax.Array) -> jax.Array:
        return jax.device_put(x, like.sharding)

    filled = empty.replace(
        cache=jax.tree.map(lambda x: at_home(normal(x), x), empty.cache),
        hidden=at_home(normal(empty.hidden), empty.hidden),
        lengths=at_home(np.array(lengths or [0] * 4, np.int32), empty.lengths),
        keys=at_home(jax.random.split(jax.random.key(3), 4), empty.keys),
        limits=at_home(np.full(4, 99, np.int32), empty.limits),
        running=at_home(np.full(4, True), empty.running),
    )
    after, chunk = programs.decode(filled, layer_by_layer.per_layer_params(params, cfg, jnp.float32), np.float32(0.8))
    return jax.device_get((chunk.tokens, chunk.logprobs, chunk.full_logprobs, (after.cache, after.hidden)))


def rows_of(folder: Path) -> list[dict]:
    """The metrics of a run, step by step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def ragged_prompts(count: int, vocab_size: int = 32, width: int = PROMPT, seed: int = 0) -> list[list[int]]:
    """Prompts of every length from 1 to the width."""
    rng = np.random.default_rng(seed)
    lengths = [1 + i * (width - 1) // max(count - 1, 1) for i in range(count)]
    return [row[width - n :].tolist() for n, row in zip(lengths, rng.integers(4, vocab_size, (count, width)))]


@pytest.fixture(scope="session")
def rollout(generate, params):
    """Five ragged prompts, four completions each."""
    set_mesh(1, 1)
    return jax.tree.map(jnp.asarray, generate(params, ragged_prompts(5), jax.random.key(7), 4))


@pytest.fixture(autouse=True)
def broken_pipes_stay_errors():
    """A command that only shows something ends at a closed pipe without a word. Tests call commands in this process,
    which would die of the next pipe that breaks."""
    before = signal.getsignal(signal.SIGPIPE)
    yield
    signal.signal(signal.SIGPIPE, before)
