"""Compiled programs are kept for the next start; options only for who knows them; and how glibc's heap is set up."""

import ctypes
import importlib.util
import subprocess
import sys
from dataclasses import replace

import jax
import programs_once
import pytest
from conftest import set_mesh
from jax.experimental.compilation_cache import compilation_cache

from tunix_lite.distributed import host_memory
from tunix_lite.parallel import compiling
from tunix_lite.parallel.compiler_options import FOR_DECODING, for_updates, options_of_mesh
from tunix_lite.parallel.compiling import keep_programs
from tunix_lite.parallel.mesh import make_mesh
from tunix_lite.planning.hardware import devices_of, find_machine
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout.programs import Programs, SamplerSpec
from tunix_lite.rollout.settings import GenerationConfig
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


# ---- what programs_once.py takes again


def test_a_program_is_taken_again_only_where_all_that_it_holds_is_the_same(cfg, monkeypatch):
    spec = SamplerSpec(cfg, GenerationConfig(4, 8), (1,), 0, "float32", 3)
    again, other = (Programs(one).decode for one in (spec, replace(spec, chunk=4)))
    assert again is Programs(spec).decode is not other
    with programs_once.anew():
        assert Programs(spec).decode is not again
    set_mesh(2, 1)
    assert Programs(spec).decode is not again
    set_mesh(1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(kv_cache, "MIN_COLUMNS", 16)
        assert Programs(spec).decode is not again
    assert Programs(spec).decode is again


# ---- options that only the compiler of some platform knows


def test_only_a_compiler_that_knows_an_option_gets_it():
    set_mesh(4, 1)
    assert options_of_mesh(FOR_DECODING) is None, "they are not those of a CPU"
    known = {"xla_cpu_enable_fast_math": False}
    assert options_of_mesh({"cpu": known}) == known
    with pytest.warns(UserWarning, match="compiler for cpu does not know xla_unknown, "):
        assert options_of_mesh({"cpu": {"xla_unknown": "1"}}) is None


@pytest.mark.aot
def test_the_compiler_for_a_tpu_names_the_option_that_it_does_not_know():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs the extra plan-tpu")
    jax.set_mesh(make_mesh(((4, 1), ("fsdp", "tp")), devices_of(find_machine("v5e-4"))))
    with pytest.warns(UserWarning, match="compiler for tpu does not know xla_tpu_no_such_option, "):
        assert options_of_mesh({"tpu": {"xla_tpu_no_such_option": "1"}}) is None
    assert options_of_mesh(FOR_DECODING) == FOR_DECODING["tpu"]


# ---- the heap

# A block of 1.5 GiB is used and freed, and a small one stays behind it. Prints MiB in use while it is kept, and after it
# was given back; and whether its pages are ones that Linux was asked to make huge ("hg", proc(5)), and those of a block
# that is taken afterwards, too large for the place of the first.
GIVEN_BACK = """
import ctypes, re, sys
from tunix_lite.distributed import host_memory
def resident():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * 4096 >> 20
assert host_memory.keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
start = resident()
block = libc.malloc(1536 << 20)
ctypes.memset(block, 1, 1536 << 20)
def is_huge(block):
    inside = huge = False
    for line in open("/proc/self/smaps"):
        addresses = re.match("([0-9a-f]+)-([0-9a-f]+) ", line)
        if addresses:
            inside = int(addresses[1], 16) <= block + (64 << 20) < int(addresses[2], 16)
        elif inside and line.startswith("VmFlags"):
            huge = "hg" in line.split()
    return huge
huge = is_huge(block)
libc.malloc(1 << 20)
libc.free(block)
kept = resident()
given = host_memory.give_back_freed_memory(keeps_addresses=sys.argv[1] == "True")
print(kept - start, given, resident() - start, host_memory.give_back_freed_memory(), huge, is_huge(libc.malloc(2 << 30)))
"""


@pytest.mark.parametrize("keeps_addresses", [True, False])
@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2") or sys.platform != "linux", reason="glibc before 2.33, or none"
)
def test_what_is_allocated_lies_in_huge_pages_and_is_given_back_when_asked(keeps_addresses):
    command = [sys.executable, "-c", GIVEN_BACK, str(keeps_addresses)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    kept, was_given, after, is_given_again, *are_huge = done.stdout.split()
    assert int(kept) > 1400 and was_given == "True"
    assert int(after) < 300 and is_given_again == "False"
    # some systems have no huge pages of 2 MiB, or count addresses
    can = host_memory._can_reserve_addresses()
    assert are_huge == [str(can), str(can and keeps_addresses)]


def test_addresses_are_not_reserved_again_where_they_cost_memory(monkeypatch):
    reserved = []
    monkeypatch.setattr(host_memory, "_reserve_addresses", lambda: reserved.append(1))
    for can in (False, True):
        monkeypatch.setattr(host_memory, "_can_reserve_addresses", lambda can=can: can)
        assert host_memory.give_back_freed_memory(0, keeps_addresses=True)
        assert len(reserved) == can


def test_only_an_update_of_many_weights_runs_its_kernels_in_the_order_of_least_memory():
    assert for_updates(2**26 - 1) == {}
    assert for_updates(2**26)["cpu"] == {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
