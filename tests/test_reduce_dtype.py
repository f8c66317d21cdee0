"""Gradients of what is computed in bfloat16 are summed in float32, over tokens and over the mesh."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_params, set_mesh

from tunix_lite.models import attention, decoder
from tunix_lite.models.weights import Lora, Weight, for_compute, project
from tunix_lite.parallel.mesh import put

ROWS, EMBED, HEADS, SIZE = 64, 8, 2, 4
WEIGHT = Weight((EMBED, HEADS, SIZE), ("embed", "heads", "head_dim"))


def off(got, wanted) -> float:
    return np.linalg.norm(np.asarray(got, np.float64) - wanted) / np.linalg.norm(wanted)


def of_a_projection(reduce_dtype: str) -> tuple[jax.Array, np.ndarray, float]:
    """The gradient of a weight over four shards, the same in float64, and how far that of its input is from float64."""
    set_mesh(4, 1)
    rng = np.random.default_rng(0)
    x = np.asarray(jnp.asarray(rng.normal(size=(ROWS, EMBED)), jnp.bfloat16))
    slope = np.asarray(jnp.asarray(rng.normal(size=(ROWS, HEADS, SIZE)), jnp.bfloat16))
    w = jnp.asarray(rng.normal(size=WEIGHT.shape), "float32")

    def product(w, x):
        return project(x, for_compute(w, WEIGHT, jnp.bfloat16, jnp.dtype(reduce_dtype)))

    placed = put(np.asarray(w), *WEIGHT.axes), put(x, "batch", "act_embed")
    pull = jax.jit(lambda w, x, slope: jax.vjp(product, w, x)[1](slope))
    of_w, of_x = pull(*placed, put(slope, "batch", "heads", "head_dim"))
    x, slope, used = (np.asarray(a, np.float64) for a in (x, slope, jnp.asarray(w, jnp.bfloat16)))
    wanted_x = np.einsum("rhk,ehk->re", slope, used)
    return of_w, np.einsum("re,rhk->ehk", x, slope), off(of_x, wanted_x)


def test_the_gradient_of_a_projection_is_summed_in_float32():
    wide, wanted, of_x = of_a_projection("float32")
    assert off(wide, wanted) < 3e-7 and of_x < 4e-3 and wide.dtype == jnp.float32
    rounded, _, of_x_too = of_a_projection("bfloat16")
    assert off(rounded, wanted) > 1e-3 and of_x_too == of_x


def test_adapters_hear_their_gradient_in_float32_and_a_frozen_base_has_no_way_for_one():
    leaf = Lora(*(jnp.ones(shape, jnp.float32) for shape in (WEIGHT.shape, (EMBED, 2), (2, HEADS, SIZE))))
    ready = for_compute(leaf, WEIGHT, jnp.bfloat16)
    assert [part.master.dtype for part in (ready.a, ready.b)] == [jnp.float32] * 2
    assert isinstance(ready.base, jax.Array) and ready.base.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "stored, reduce_dtype, narrow",
    [("bfloat16", "float32", set()), ("float32", "bfloat16", {"dot_general", "reduce_sum"})],
)
def test_no_gradient_of_a_layer_is_summed_in_bfloat16(cfg, stored, reduce_dtype, narrow):
    """Unless it is asked for. Read from the program before any compiler sees it: what comes of tokens and is of none."""
    cfg = replace(cfg, qkv_bias=True)
    params = jax.tree.map(lambda x: x.astype(stored), random_params(cfg))
    tokens, meta = np.ones((4, 9), np.int32), attention.one_sequence_per_row(np.ones((4, 9), bool))

    def loss(params):
        hidden = decoder.forward(params, cfg, tokens, meta, jnp.bfloat16, reduce_dtype=jnp.dtype(reduce_dtype))
        return jnp.sum(hidden.astype(jnp.float32))

    sums = {}

    def of_tokens(x) -> bool:
        return x.shape[:2] == (4, 9) or x.shape[:1] == (36,)

    def look(jaxpr):
        live, used = set(jaxpr.outvars), []
        for equation in reversed(jaxpr.eqns):  # what nobody uses is never computed: compilers leave it out
            if live & set(equation.outvars):
                used.append(equation)
                live |= {v for v in equation.invars if not hasattr(v, "val")}
        for equation in used:
            for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    look(inner)
            if equation.primitive.name in ("dot_general", "reduce_sum", "scatter-add"):
                out = equation.outvars[0].aval
                if any(of_tokens(v.aval) for v in equation.invars) and not of_tokens(out):
                    sums.setdefault(equation.primitive.name, set()).add(str(out.dtype))

    look(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
    assert set(sums) == {"dot_general", "reduce_sum", "scatter-add"}
    assert {name for name, dtypes in sums.items() if "bfloat16" in dtypes} == narrow
