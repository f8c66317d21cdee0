"""Options that only the compiler of some platform knows: who gets them, and what happens where they are not known."""

import importlib.util

import jax
import pytest
from conftest import set_mesh

from tunix_lite.parallel.compiler_options import FOR_DECODING, options_of_mesh
from tunix_lite.parallel.mesh import make_mesh
from tunix_lite.planning.hardware import devices_of, find_machine

KNOWN = {"xla_cpu_enable_fast_math": False}


@pytest.mark.parametrize("fsdp", [1, 4])
def test_only_a_compiler_that_knows_an_option_gets_it(fsdp):
    set_mesh(fsdp, 1)
    assert options_of_mesh(FOR_DECODING) is None, "they are not those of a CPU"
    assert options_of_mesh({"cpu": KNOWN}) == KNOWN
    with pytest.warns(UserWarning, match=f"compiler for cpu does not know xla_unknown_{fsdp}, "):
        assert options_of_mesh({"cpu": {f"xla_unknown_{fsdp}": "1"}}) is None


@pytest.mark.aot
def test_the_compiler_for_a_tpu_names_the_option_that_it_does_not_know():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs the extra plan-tpu")
    jax.set_mesh(make_mesh(((4, 1), ("fsdp", "tp")), devices_of(find_machine("v5e-4"))))
    with pytest.warns(UserWarning, match="compiler for tpu does not know xla_tpu_no_such_option, "):
        assert options_of_mesh({"tpu": {"xla_tpu_no_such_option": "1"}}) is None
    assert options_of_mesh(FOR_DECODING) == FOR_DECODING["tpu"]
