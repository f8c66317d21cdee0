"""Options that only the compiler of some platform knows: who gets them, and what happens where they are not known."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from conftest import set_mesh

from tunix_lite.parallel.compiler_options import FOR_DECODING, JitByPlatform, known_options
from tunix_lite.parallel.mesh import make_mesh
from tunix_lite.planning.hardware import devices_of, find_machine

KNOWN = {"xla_cpu_enable_fast_math": False}
OF_TPU = dict(FOR_DECODING["tpu"])


@pytest.fixture(autouse=True)
def nothing_known():
    known_options.cache_clear()
    yield
    known_options.cache_clear()


def test_only_the_platform_of_the_mesh_gets_options(monkeypatch):
    set_mesh(2, 2)
    given = []
    jit = jax.jit
    monkeypatch.setattr(jax, "jit", lambda f, compiler_options=None, **k: given.append(compiler_options) or jit(f, **k))
    for_tpu = JitByPlatform(jnp.sin, FOR_DECODING)
    assert for_tpu(jnp.zeros(3)).tolist() == [0, 0, 0] and given == [None], "they are not those of a CPU"
    given.clear()
    for_cpu = JitByPlatform(jnp.cos, {"cpu": KNOWN})
    assert for_cpu(jnp.zeros(3)).tolist() == [1, 1, 1] and for_cpu(jnp.zeros(2)).tolist() == [1, 1]
    assert given == [KNOWN, KNOWN], "one program that asks the compiler, and one that is used"


@pytest.mark.parametrize("fsdp", [1, 4])
def test_an_option_that_the_compiler_does_not_know_is_left_out_with_a_warning(fsdp):
    set_mesh(fsdp, 1)
    program = JitByPlatform(jnp.cos, {"cpu": OF_TPU})
    with pytest.warns(UserWarning, match="compiler for cpu does not know xla_tpu_msa_inefficient_use_to_copy_ratio, "):
        assert program(jnp.float32(0)) == 1


@pytest.mark.aot
def test_the_compiler_for_a_tpu_names_the_option_that_it_does_not_know():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs the extra plan-tpu")
    jax.set_mesh(make_mesh(((4, 1), ("fsdp", "tp")), devices_of(find_machine("v5e-4"))))
    with pytest.warns(UserWarning, match="compiler for tpu does not know xla_tpu_no_such_option, "):
        assert known_options("tpu", (("xla_tpu_no_such_option", "1"),)) == {}
    assert known_options("tpu", tuple(OF_TPU.items())) == OF_TPU
