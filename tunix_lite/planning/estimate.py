"""The memory of a run by formulas: what plan says where nothing is compiled. Bytes are those of one
device.

What lies on a device between the programs, and sampling's copy of the weights, cache and shelf, are
exact. Temporaries are modelled: the formulas name what must exist at once, and were compared with
what XLA plans for TPUs and GPUs (docs/guide/plan.md says how far off they were). Sizes, in the
letters of types.py: D embed, N heads, K key/value heads, H head size, F feed-forward, V vocabulary,
L layers; n tokens of a micro-batch on a device; b bytes of an element as computed.
"""

import math

import jax
import jax.numpy as jnp

from tunix_lite.models import attention, decoder, vocabulary
from tunix_lite.models.weights import is_quantized, is_weight
from tunix_lite.parallel.mesh import current_rules, use_rules
from tunix_lite.planning.resolved import Case, shelf
from tunix_lite.planning.sizes import elements, num_bytes, tables
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout import memory

# of free memory that whole weights, the cache and waiting prompts may take
FREE_SHARE = memory.USABLE


def resident(case: Case) -> dict[str, int]:
    """What stays on a device from step to step.

    parameters: those that train, as stored. optimizer: Adam's two moments of each, stored alike.
    frozen base: under LoRA. reference: for a KL term without LoRA, the weights once more in the
    type of the computation; with it, the adapters that training starts from, if any.
    """
    table, sizes = tables(case), case.sizes
    trained = num_bytes(table.trained, sizes)
    found = {"parameters": trained, "optimizer": 2 * trained}
    if table.frozen is not None:
        found["frozen base"] = num_bytes(table.frozen, sizes)
    if case.copies_reference:
        found["reference"] = num_bytes(table.trained, sizes, case.dtype, keep_norms=True)
    elif case.copies_adapters:
        found["reference"] = trained
    return found


# ---- sampling


def rollout(case: Case) -> dict[str, int]:
    """What sampling adds: its copy of the weights, the cache of its slots, prompts on the shelf,
    temporaries.

    Temporaries while decoding: scores of all slots over the vocabulary, float32, as they are,
    scaled and drawn from, 3 x 4 x slots x V; where weights stay sharded, the head and a layer
    gathered, and the next one on its way. Or while reading prompts, whichever is more: see
    `prefill`.
    """
    block, width, room = shelf(case)
    with use_rules("rollout"):
        cache = cache_bytes(case, case.slots, sum(case.lengths), "batch")
        waiting = cache_bytes(case, room, case.lengths[0], "prompts")
        decoding = 12 * elements((case.slots, case.cfg.vocab_size), ("batch", "vocab"), case.sizes)
        decoding += gathered_at_once(case) if case.weights == "sharded" else 0
        temporary = max(decoding, prefill(case, block, width))
    copy = sampling_copy(case, case.weights == "gathered")
    return {"weights to sample": copy, "cache": cache, "prompts": waiting, "temporary": temporary}


def sampling_copy(case: Case, is_gathered: bool) -> int:
    """The weights by layer: matrices as computed, norms and quantised codes as stored; whole over
    fsdp if gathered."""
    found = tables(case)
    leaves = jax.tree.leaves(
        (found.trained, found.frozen), is_leaf=lambda x: is_weight(x) or is_quantized(x)
    )

    def size(w, dtype) -> int:
        return elements(w.shape, w.axes, case.sizes, is_gathered) * jnp.dtype(dtype).itemsize

    def of(leaf) -> int:
        if is_quantized(leaf):
            return size(leaf.codes, leaf.codes.dtype) + size(leaf.scales, leaf.scales.dtype)
        return size(leaf, leaf.dtype if len(leaf.shape) - leaf.is_stacked < 2 else case.dtype)

    return sum(map(of, leaves))


def cache_bytes(case: Case, rows: int, length: int, rows_axis: str) -> int:
    """Keys and values: 2 x rows x K x C x H of each layer, C the window where it slides; int8 with
    a scale a head."""
    cfg, tp, int8 = case.cfg, case.sizes["tp"], case.run.rollout.cache == "int8"
    copies = tp // cfg.num_kv_heads if tp > cfg.num_kv_heads and tp % cfg.num_kv_heads == 0 else 1
    total = 0
    for kind in cfg.kinds:
        shape = rows, cfg.num_kv_heads * copies, kv_cache.num_columns(cfg, kind, length)
        of_a_head = cfg.head_dim + 4 if int8 else cfg.head_dim * jnp.dtype(case.dtype).itemsize
        total += 2 * elements(shape, (rows_axis, "kv_heads", "seq"), case.sizes) * of_a_head
    return total


def prefill(case: Case, block: int, width: int) -> int:
    """Temporaries of reading prompts: one layer at work on their tokens, and its scores."""
    rows = -(-block // case.sizes["fsdp"])
    return layer_at_work(case, rows * width) + scores_at_work(case, rows, width)


def gathered_at_once(case: Case) -> int:
    """The head, or two layers, whole over fsdp in the type of the computation."""
    cfg, b = case.cfg, jnp.dtype(case.dtype).itemsize
    head = cfg.vocab_size * cfg.embed_dim // case.sizes["tp"]
    return b * max(head, 2 * layer_elements(case))


def layer_elements(case: Case) -> int:
    """Elements of one layer's matrices on a device, whole over fsdp."""
    layer = decoder.layer_weights(case.cfg).values()
    return sum(elements(w.shape, w.axes, case.sizes, without_fsdp=True) for w in layer)


# ---- scoring and updating


def tokens_at_once(case: Case) -> tuple[int, int]:
    """Rows of a micro-batch on a device, and their width."""
    if case.rows.packing != "none":
        return case.rows.rows_per_part, case.rows.width
    return case.batch.micro_batch_size, sum(case.lengths)


def scoring(case: Case) -> dict[str, int]:
    """What the reference pass adds: its batch, one layer at work with its weights gathered, or the
    head's scores."""
    rows, width = tokens_at_once(case)
    at_work = (
        layer_at_work(case, rows * width)
        + scores_at_work(case, rows, width)
        + gathered_layers(case, 1)
    )
    return {"batch": batch_bytes(case), "temporary": max(at_work, head_at_work(case, rows))}


def update(case: Case) -> dict[str, int]:
    """What the update adds: its batch, gradients, and activations with all else that is temporary.

    gradients: as the weights are stored; of several micro-batches their float32 sum, too.
    activations: what is kept of every layer, and the larger of one layer at work (recomputed
    forward, and backward) and the head's scores.
    """
    rows, width = tokens_at_once(case)
    layer = (
        2 * layer_at_work(case, rows * width)
        + 2 * scores_at_work(case, rows, width)
        + gathered_layers(case, 2)
    )
    layer += widened_gradient(case)
    activations = kept_layers(case, rows, width) + max(layer, head_at_work(case, rows))
    return {
        "batch": batch_bytes(case),
        "gradients": gradient_bytes(case),
        "activations": activations,
    }


def batch_bytes(case: Case) -> int:
    """Rows of a batch: some ten numbers of four bytes a token."""
    width = case.rows.width if case.rows.packing != "none" else sum(case.lengths)
    packed = case.rows.rows_per_part * case.rows.num_parts
    return (
        4
        * 8
        * width
        * (packed if case.rows.packing != "none" else case.batch.sequences // case.sizes["fsdp"])
    )


def gradient_bytes(case: Case) -> int:
    """Gradients as the weights are stored, and with several micro-batches the float32 sum of them
    beside; with sync_gradients_every, one that is not divided over fsdp, too."""
    trained, sizes = tables(case).trained, case.sizes
    summed = num_bytes(trained, sizes, jnp.float32) if case.rows.num_parts > 1 else 0
    if case.run.training.sync_gradients_every > 1 and sizes["fsdp"] > 1:
        summed += num_bytes(trained, sizes | {"fsdp": 1}, jnp.float32)
    return num_bytes(trained, sizes) + summed


def kept_layers(case: Case, rows: int, width: int) -> int:
    """What the backward pass finds of every layer: its input, nD, and what training.remat keeps
    beside it.

    block: nothing. save_qkv_out: q, k, v and what attention gives, n(2N + 2K)H. dots: q, k, v, the
    output and the feed-forward's three products, n((N + 2K)H + 2D + 2F). none: those, what
    attention gives, and its scores in float32 where they are made all at once.
    """
    cfg, tp, n = case.cfg, case.sizes["tp"], rows * width
    heads, kv_heads = cfg.num_heads // tp, -(-cfg.num_kv_heads // tp)
    qkv, D, F, NH = (
        (heads + 2 * kv_heads) * cfg.head_dim,
        cfg.embed_dim,
        cfg.mlp_dim // tp,
        heads * cfg.head_dim,
    )
    residual = D // tp if current_rules()["residual_seq"] == "tp" else D
    products = qkv + 2 * residual + 2 * F
    of_a_token = {"block": 0, "save_qkv_out": qkv + NH, "dots": products, "none": products + NH}
    kept = n * (residual + of_a_token[case.run.training.remat]) * jnp.dtype(case.dtype).itemsize
    if case.run.training.remat == "none" and case.attention == "xla":
        scores = (heads * math.prod(part) for part in attended(case, rows, width))
        kept += 4 * sum(count for count in scores if count <= attention.SCORES_AT_ONCE)
    return cfg.num_layers * kept


def layer_at_work(case: Case, n: int) -> int:
    """One layer's values that exist at once: b n (4D + (N + 2K)H + 2F), heads and feed-forward over
    tp."""
    cfg, tp = case.cfg, case.sizes["tp"]
    heads = (cfg.num_heads // tp + 2 * -(-cfg.num_kv_heads // tp)) * cfg.head_dim
    return jnp.dtype(case.dtype).itemsize * n * (4 * cfg.embed_dim + heads + 2 * cfg.mlp_dim // tp)


def scores_at_work(case: Case, rows: int, width: int) -> int:
    """Attention's scores, float32, and their softmax: of as many queries as are taken at once; none
    by a kernel."""
    if case.attention != "xla":
        return 0

    def of(count: int, queries: int, keys: int) -> int:
        per_query = max(1, count * case.cfg.num_heads // case.sizes["tp"] * keys)
        at_once = max(
            attention.SCORES_AT_ONCE // per_query, -(-queries // attention.MOST_PIECES), 1
        )
        return 2 * 4 * per_query * min(queries, at_once)

    return max(of(*part) for part in attended(case, rows, width))


def attended(case: Case, rows: int, width: int) -> list[tuple[int, int, int]]:
    """What attention multiplies of so many rows: (how many, queries, keys); lanes apart from the
    lead that they see."""
    if case.rows.packing != "prefix":
        return [(rows, width, width)]
    shape = case.rows.shape
    return [
        (rows, shape.prefix_columns, shape.prefix_columns),
        (rows * shape.num_lanes, shape.lane_columns, shape.prefix_columns + shape.lane_columns),
    ]


def gathered_layers(case: Case, count: int) -> int:
    """Matrices of `count` layers, whole over fsdp as computed, and the next one's on their way."""
    if case.sizes["fsdp"] == 1:
        return layer_elements(case) * jnp.dtype(case.dtype).itemsize
    return (count + 1) * layer_elements(case) * jnp.dtype(case.dtype).itemsize


def widened_gradient(case: Case) -> int:
    """What the gradient of one layer takes more than its matrices, before it is divided over fsdp:
    it is float32 where training.reduce_dtype says so."""
    is_wide = case.run.training.reduce_dtype == "float32" and case.lora is None
    return max(0, 4 - jnp.dtype(case.dtype).itemsize) * layer_elements(case) if is_wide else 0


def head_at_work(case: Case, rows: int) -> int:
    """The head: a block of float32 scores, twice; the hidden states and their sum of slopes, 6nD;
    the table, as it is stored, regrouped into blocks, and its gradient or, where it has none, the
    copy that a loop over blocks keeps."""
    cfg, tp = case.cfg, case.sizes["tp"]
    packed = case.rows.shape and case.rows.shape.width - case.rows.shape.prefix_columns
    scored = rows * (packed or case.rows.num_scored)
    blocks = vocabulary.num_blocks(cfg.vocab_size // tp, scored)
    scores = 2 * 4 * scored * cfg.vocab_size // (tp * blocks)
    table = elements((cfg.vocab_size, cfg.embed_dim), ("vocab", "embed"), case.sizes)
    stored_as = 2 if case.run.training.mixed_precision == "bf16_params" or case.lora else 4
    return scores + 6 * scored * cfg.embed_dim + 2 * stored_as * table


# ---- the choice that a run makes itself


def choose_weights(case: Case, capacity: int | None) -> str:
    """gathered or sharded, by the rule of rollout.memory.choose_weights: beside all that stays on a
    device."""
    asked = case.run.rollout.weights
    if asked != "auto" or case.sizes["fsdp"] == 1 or capacity is None:
        return "gathered" if asked == "auto" else asked
    with use_rules("rollout"):
        cache = cache_bytes(case, case.slots, sum(case.lengths), "batch")
        waiting = cache_bytes(case, shelf(case)[2], case.lengths[0], "prompts")
    fits = sampling_copy(case, True) + cache + waiting <= FREE_SHARE * (
        capacity - sum(resident(case).values())
    )
    return "gathered" if fits else "sharded"
