"""The update through cuDNN's attention on eight devices, with a kernel of the tests in cuDNN's place.

That kernel is as strict as JAX's (strict_kernel), and what it computes is the formula: the gradient must be the one that
the formulas give in float64.
"""

from dataclasses import replace
from functools import cache, partial

import exactness_worker
import jax
import pytest
import strict_kernel
from exactness_worker import PLAIN, Model, Way
from test_exactness import Expected, difference

from tunix_lite.models import attention

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
        ("one", Way(2, 4, parts=2, packing="prefix", remat="save_qkv_out")),
        ("two", Way(2, 4, parts=4, sync_every=2, remat="block")),
        ("four", Way(1, 8)),
        ("six", Way(2, 4, parts=2)),  # neither divides the other
    ],
    ids=str,
)
def test_the_gradient_through_a_kernel_that_wants_heads_divided_alike_is_that_of_the_formulas(name, way, monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", strict_kernel.dot_product_attention)
    monkeypatch.setattr(exactness_worker, "make_policy", partial(exactness_worker.make_policy, attend=attention.cudnn))
    wanted = expected(name)
    found = exactness_worker.update(model_of(name), way, wanted.batch)
    assert difference(found.grads, wanted.grads) < 1e-5
    assert found.metrics["train/loss"] == pytest.approx(wanted.loss, rel=2e-5)
