"""The update through cuDNN's attention on eight devices, with a kernel of the tests in cuDNN's place.

That kernel refuses what JAX's does: queries and keys whose heads are not divided alike, and a vmap. What it computes is
softmax attention by the formula, so the gradient must be the one that the formulas give in float64.
"""

from dataclasses import replace
from functools import cache, partial

import exactness_worker
import jax
import jax.numpy as jnp
import pytest
from exactness_worker import PLAIN, Model, Way
from test_exactness import Expected, difference

from tunix_lite.models import attention
from tunix_lite.parallel.mesh import parts_of


def not_batched(fn):
    """fn, to which a vmap is what it is to JAX's kernel with a mask that heads share."""
    alone = jax.custom_batching.custom_vmap(fn)

    @alone.def_vmap
    def refuse(*_):
        raise TypeError("cannot reshape array of shape ...")

    return alone


def by_the_formula(scale, q_BTNH, k_BSKH, v_BSKH, mask_BNTS):
    k_BSNH, v_BSNH = (jnp.repeat(x, q_BTNH.shape[2] // x.shape[2], axis=2) for x in (k_BSKH, v_BSKH))
    scores = jnp.where(mask_BNTS, scale * jnp.einsum("btnh,bsnh->bnts", q_BTNH, k_BSNH), -1e30)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v_BSNH)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def kernel(scale, *arrays):
    return not_batched(partial(by_the_formula, scale))(*arrays)


def pulled(scale, arrays, slope):
    *qkv, mask = arrays
    pull = not_batched(lambda slope, mask, *qkv: jax.vjp(lambda *x: by_the_formula(scale, *x, mask), *qkv)[1](slope))
    return *pull(slope, mask, *qkv), None


kernel.defvjp(lambda scale, *arrays: (kernel(scale, *arrays), arrays), pulled)


def strict(query, key, value, *, mask, scale, implementation):
    assert implementation == "cudnn" and mask.shape[1] == 1
    tp = parts_of("heads")
    if query.shape[2] % tp or key.shape[2] % tp:
        raise ValueError("Query, key and value should have same sharding.")
    return kernel(scale, query, key, value, mask)


HEADS = {"one": (8, 1), "two": (8, 2), "four": (8, 4), "six": (12, 6)}  # of queries and of keys


@cache
def expected(name: str) -> Expected:
    return Expected(model_of(name))


def model_of(name: str) -> Model:
    queries, keys = HEADS[name]
    return Model(replace(PLAIN, num_heads=queries, num_kv_heads=keys))


@pytest.mark.parametrize(
    "name, way",
    [
        ("one", Way(4, 2, parts=2, sync_every=2)),
        ("one", Way(2, 4, parts=2, packing="prefix", remat="save_qkv_out")),
        ("two", Way(2, 4, parts=4, sync_every=2, remat="block")),
        ("two", Way(4, 2, parts=2, packing="sequences", remat="dots", sync_every=2)),
        ("four", Way(1, 8)),
        ("four", Way(2, 4, parts=4, packing="prefix", sync_every=4, remat="save_qkv_out")),
        ("six", Way(2, 4, parts=2)),  # neither divides the other
    ],
    ids=str,
)
def test_the_gradient_through_a_kernel_that_wants_heads_divided_alike_is_that_of_the_formulas(name, way, monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", strict)
    monkeypatch.setattr(exactness_worker, "make_policy", partial(exactness_worker.make_policy, attend=attention.cudnn))
    wanted = expected(name)
    found = exactness_worker.update(model_of(name), way, wanted.batch)
    assert difference(found.grads, wanted.grads) < 1e-5
    assert found.metrics["train/loss"] == pytest.approx(wanted.loss, rel=2e-5)
