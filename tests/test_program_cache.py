"""Compiled programs are kept for the next start, where that is safe and nobody has said otherwise."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tunix_lite.parallel import compiling
from tunix_lite.parallel.compiling import keep_programs
from tunix_lite.parallel.mesh import make_mesh
from tunix_lite.settings.compose import compose

KEPT = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture
def nothing_kept(monkeypatch):
    """As if the environment said nothing; jax's settings come back afterwards."""
    before = {name: getattr(jax.config, name) for name in KEPT}
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compile_something():
    """A program that no other test compiles, and that takes longer than LEAST_SECONDS in no case."""
    return jax.jit(lambda x: x * 3.25 + 17).lower(jax.ShapeDtypeStruct((3, 7), "float32")).compile()


def test_programs_go_to_the_folder_and_come_from_there(nothing_kept, monkeypatch, tmp_path):
    monkeypatch.setattr(compiling, "LEAST_SECONDS", 0.0)
    folder = keep_programs(str(tmp_path))
    assert folder.parent == tmp_path and jax.config.jax_compilation_cache_dir == str(folder)
    compile_something()
    [written] = folder.glob("*-cache")
    # what is read back is what was written: nothing is written again
    at = written.stat().st_mtime_ns
    jax.clear_caches()
    found = compile_something()
    assert [file.stat().st_mtime_ns for file in folder.glob("*-cache")] == [at]
    assert found.memory_analysis().argument_size_in_bytes == 3 * 7 * 4


def test_auto_is_in_the_users_cache_folder_and_null_is_nowhere(nothing_kept, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compose([]).runtime.program_cache == "auto"
    assert keep_programs(None) is None and not jax.config.jax_compilation_cache_dir
    assert keep_programs("auto").parent == tmp_path / "tunix_lite"


def test_programs_of_several_cpu_devices_are_compiled_afresh_and_those_of_one_are_not(nothing_kept, tmp_path):
    keep_programs(str(tmp_path))
    make_mesh(((1, 1), ("fsdp", "tp")), jax.devices())
    assert jax.config.jax_enable_compilation_cache, "a mesh of one of four devices"
    make_mesh(((2, 1), ("fsdp", "tp")), jax.devices())
    assert not jax.config.jax_enable_compilation_cache
