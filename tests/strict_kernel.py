"""A kernel in the place of cuDNN's, for machines without: softmax attention by the formula, and as strict as JAX's is.

JAX's refuses queries and keys whose heads are not divided alike, and, with a mask that heads share, a vmap.
"""

from functools import partial

import jax
import jax.numpy as jnp

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


def dot_product_attention(query, key, value, *, mask, scale, implementation):
    """In place of jax.nn.dot_product_attention."""
    assert implementation == "cudnn" and mask.shape[1] == 1
    tp = parts_of("heads")
    if query.shape[2] % tp or key.shape[2] % tp:
        raise ValueError("Query, key and value should have same sharding.")
    return kernel(scale, query, key, value, mask)
