"""The memory of a run by formulas, in bytes of one device. What stays there, and sampling's
weights, cache and prompts, are exact; temporaries are modelled (docs/guide/plan.md says how well).
Letters as in types.py, and n tokens of a micro-batch on a device, b bytes of an element as
computed."""

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import traverse_util

from tunix_lite.learner.optim import state_layout
from tunix_lite.models import attention, decoder, gated_delta_net, vocabulary
from tunix_lite.models.groups import rows_needed
from tunix_lite.models.kernel_choice import PIECE
from tunix_lite.models.quantize import stored_table
from tunix_lite.models.routes import no_routes
from tunix_lite.models.weights import is_quantized, num_params
from tunix_lite.parallel.compiler_options import MANY_WEIGHTS
from tunix_lite.rollout.cache import column_sizes
from tunix_lite.rollout.engine import APPEND_WIDTHS, FEW_SLOTS, prompt_widths
from tunix_lite.rollout.memory import SamplingMemory, slots_that_fit, weights_that_fit
from tunix_lite.settings.resolved_parts import optimizer_of
from tunix_lite.settings.resolved_run import ResolvedRun


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of a run on a device, by part, in bytes.
    Example: `MemoryEstimate(resolved).update()["gradients"]`."""

    resolved: ResolvedRun

    def resident(self) -> dict[str, int]:
        """The bytes that stay on a device from step to step, by part; each frozen model is one.
        reference: for a KL term without LoRA the weights once more, with it the adapters that
        training starts from."""
        resolved = self.resolved
        table = resolved.tables
        trained = resolved.table_bytes(table.trained)
        parts = {"parameters": trained, "optimizer": 0}
        if table.critic is not None:
            parts["critic"] = resolved.table_bytes(table.critic)

        # The optimizer's state, counters left out.
        declared = traverse_util.flatten_dict(table.networks)
        shapes = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), table.networks)
        layout = state_layout(optimizer_of(resolved), shapes)
        for leaf in jax.tree.leaves(layout):
            if leaf.weight is not None:
                axes = tuple(declared[leaf.weight].axes[dim] for dim in leaf.dims)
                size = resolved.elements(leaf.shape.shape, axes) * leaf.shape.dtype.itemsize
                parts["optimizer"] += size

        # What does not train.
        if table.frozen is not None:
            parts["frozen base"] = resolved.table_bytes(table.frozen)
        if resolved.copies_reference:
            size = resolved.table_bytes(table.trained, resolved.dtype, keep_norms=True)
            parts["reference"] = size
        elif resolved.copies_adapters:
            parts["reference"] = trained
        for name, model in resolved.frozen_models.items():
            stored = stored_table(decoder.weights(model.cfg), model.storage)
            parts[name] = resolved.as_scorer(name).table_bytes(stored)
        return parts

    def code(self) -> int:
        """The bytes of all programs where they lie in the memory of the device, on TPUs: layers of
        prompts and of decoding stand there one by one. As libtpu made it of Gemma 3 270M, Gemma 4
        E2B and Qwen 3.5 0.8B (November 2026)."""
        if self.resolved.platform != "tpu":
            return 0
        kinds = self.resolved.cfg.kinds_of_weights
        return 150_000_000 + 6_000_000 * len(kinds) + 17_000_000 * kinds.count("delta")

    def code_in_process(self) -> int:
        """The bytes of all programs in the process of a CPU: the update, a loop over layers, and
        of sampling, with all layers, one for each width of prompts and number of columns. As XLA
        made them of SmolLM2 135M (docs/log.md, 28 November 2026)."""
        size = 80_000_000
        if self.resolved.has_rollouts:
            longest, new = self.resolved.lengths
            columns = column_sizes(longest + new, longest)
            count = len(prompt_widths(longest)) + len(columns)
            size += 2_400_000 * self.resolved.cfg.num_layers * count
        return size

    def tokenizer_bytes(self) -> int:
        """The bytes of a tokenizer in the process of a CPU: texts and merges by token."""
        return 280 * self.resolved.cfg.vocab_size

    # ---- sampling

    def rollout(self) -> dict[str, int]:
        """The bytes that sampling adds: its copy of the weights, the cache of its slots, prompts
        that wait, and the temporaries of decoding, reading prompts or appending to slots,
        whichever is most."""
        resolved = self.resolved
        memory = resolved.sampling_memory
        is_gathered = resolved.sampling_weights == "gathered"

        # Scores over the vocabulary in float32: as they are, scaled, and drawn from; or with fused
        # kernels five numbers for each slot and piece.
        cfg = resolved.cfg
        scores_shape = (resolved.slots, cfg.vocab_size)
        scores = resolved.elements(scores_shape, ("batch", "vocab"), rules=memory.rules)
        decoding = 5 * 4 * scores // PIECE if resolved.run.rollout.is_fused else 12 * scores
        if not is_gathered:
            # The head, or two layers, whole over fsdp.
            head = cfg.vocab_size * cfg.embed_dim // resolved.tp
            itemsize = resolved.itemsize
            decoding += itemsize * max(head, 2 * self.layer_elements())

        # One layer at work on the tokens of prompts, and its scores.
        block, width, _ = memory.prompt_cache
        rows = -(-block // resolved.fsdp)
        reading = self._layer_at_work(rows * width) + self._scores_at_work(rows, width)
        if resolved.platform == "tpu":
            # Layers are not in a loop there, and XLA keeps what each half of them adds to.
            hidden = resolved.itemsize * rows * width * cfg.embed_dim
            reading += 2 * cfg.num_layers * hidden
        return {
            "weights to sample": self.sampling_copy(is_gathered),
            "cache": memory.cache_bytes(),
            "prompts": memory.prompt_bytes(),
            "temporary": max(decoding, reading, self.appending()),
        }

    def sampling_copy(self, is_gathered: bool) -> int:
        """The weights by layer: matrices as computed, norms and quantised codes as stored; whole
        over fsdp if gathered."""
        resolved = self.resolved
        table = resolved.tables
        both = (table.trained, table.frozen)
        total = 0
        for leaf in jax.tree.leaves(both, is_leaf=is_quantized):
            dtype = None
            # norms and biases are computed with in float32, whatever the matrices are
            if not is_quantized(leaf) and len(leaf.shape) - leaf.is_stacked >= 2:
                dtype = None if leaf.is_exact else resolved.dtype
            total += resolved.table_bytes(leaf, dtype, is_gathered=is_gathered)
        return total

    def appending(self) -> int:
        """Temporaries of appending tokens to slots, or of reading carried completions again: a copy
        of the cache of the slots that are read together, unless these are all; one layer at work on
        a piece of each, and its scores."""
        resolved = self.resolved
        if not (resolved.carries or resolved.converses):
            return 0
        here = resolved.slots // resolved.fsdp
        rows = min(here, FEW_SLOTS) if resolved.fsdp == 1 else here
        piece = APPEND_WIDTHS[-1]
        copy = 0 if rows == here else resolved.sampling_memory.cache_bytes() * rows // here
        scores = self._score_bytes(rows, piece, sum(resolved.lengths) + piece)
        return copy + self._layer_at_work(rows * piece) + scores

    def layer_elements(self) -> int:
        """Elements of one layer's matrices on a device, whole over fsdp."""
        cfg = self.resolved.cfg
        return max(
            sum(
                self.resolved.elements(w.shape, w.axes, is_gathered=True)
                for w in decoder.layer_weights(cfg, kind).values()
            )
            for kind in set(cfg.kinds_of_weights)
        )

    def with_sampling_choices(
        self, capacity: int | None, beside: dict[str, int] | None = None
    ) -> ResolvedRun:
        """The run with gathered or sharded weights, and of rollout.num_slots=auto the most slots,
        by the rules of rollout.memory. capacity: bytes of a device; None: all is taken to fit.
        beside: what stays on it, where it is not `resident`."""
        resolved = self.resolved
        rollout = resolved.run.rollout
        # nobody knows what is free, and gathered is faster
        if capacity is None and rollout.weights == "auto":
            return replace(resolved, sampling_weights="gathered")
        free = (capacity or 0) - sum((self.resident() if beside is None else beside).values())

        def chosen(memory: SamplingMemory) -> str:
            copy = partial(self.sampling_copy, is_gathered=True)
            return weights_that_fit(memory, copy, lambda: free)[0]

        slots = resolved.slots
        if rollout.num_slots == "auto" and capacity is not None:
            memory = resolved.sampling_memory
            weights = chosen(replace(memory, num_slots=resolved.fsdp))
            copy = self.sampling_copy(weights == "gathered")
            slots = slots_that_fit(memory, copy, free)[0]
        resolved = replace(resolved, slots=slots)
        return replace(resolved, sampling_weights=chosen(resolved.sampling_memory))

    def apart(self, capacity: int | None) -> dict[str, int]:
        """The parts of memory of a device on which only sampling is done (rollout.mesh_shape): the
        weights as they were copied there, and what sampling adds; {} without such devices."""
        sampler = self.with_own_sampling_weights(capacity)
        if sampler is None:
            return {}
        estimate = MemoryEstimate(sampler)
        return estimate._weights_apart() | estimate.rollout()

    def with_own_sampling_weights(self, capacity: int | None) -> ResolvedRun | None:
        """`self.resolved.apart` with the choice of its sampling weights; capacity: of a device, if
        known."""
        if (sampler := self.resolved.apart) is None:
            return None
        estimate = MemoryEstimate(sampler)
        return estimate.with_sampling_choices(capacity, estimate._weights_apart())

    def _weights_apart(self) -> dict[str, int]:
        parts = self.resident()
        return {name: parts[name] for name in ("parameters", "frozen base") if name in parts}

    # ---- scoring and updating

    def _tokens_at_once(self) -> tuple[int, int]:
        """Rows of a micro-batch on a device, and their width."""
        resolved = self.resolved
        if resolved.rows.packing != "none":
            return resolved.rows.rows_per_micro_batch, resolved.rows.width
        return resolved.batch.micro_batch_size, sum(resolved.lengths)

    def scoring(self) -> dict[str, int]:
        """The bytes that the reference pass adds: its batch, one layer at work with its weights
        gathered, or the head's scores."""
        rows, width = self._tokens_at_once()
        layer = self._layer_at_work(rows * width) + self._scores_at_work(rows, width)
        layer += self._gathered_layers(1)
        temporary = max(layer, self._head_at_work(rows))
        return {"batch": self._batch_bytes(), "temporary": temporary}

    def describing(self, name: str) -> dict[str, int]:
        """The bytes that the pass of a teacher adds that the policy is compared with: those of
        scoring, and what is kept of all rows on every device, and of its own rows while it is
        made."""
        shards = 1 + self.resolved.fsdp
        return MemoryEstimate(self.resolved.as_scorer(name)).scoring() | {
            "kept": self._kept_of_teacher() * shards
        }

    def update(self) -> dict[str, int]:
        """The bytes that the update adds: its batch, gradients, and activations: what is kept of
        every layer, and the larger of one layer at work (recomputed forward, and backward) and the
        head's scores; or, on a CPU, the changes of the weights, if they are more and not made in
        place."""
        resolved = self.resolved
        rows, width = self._tokens_at_once()
        layer = 2 * self._layer_at_work(rows * width)
        layer += 2 * self._scores_at_work(rows, width)
        layer += self._gathered_layers(2)
        if resolved.run.training.reduce_dtype == "float32" and resolved.lora is None:
            # The gradient of one layer, before it is divided over fsdp, is float32.
            layer += max(0, 4 - resolved.itemsize) * self.layer_elements()
        widened = self.widened_base()
        head = self._head_at_work(rows, self.adds_in_place() or widened > 0)
        activations = self.kept_layers(rows, width) + max(layer, head) + widened
        if (critic := resolved.needs.critic) is not None and critic.is_own:
            # Its layers are kept beside the policy's, and one is at work.
            activations += self.kept_layers(rows, width) + layer
        if resolved.teacher is not None:
            # of the teacher: its blocks of scores, and its table in blocks.
            name = resolved.teacher.comparison.model
            activations += MemoryEstimate(resolved.as_scorer(name))._head_at_work(rows)
        count = num_params(resolved.tables.networks)
        if resolved.platform == "cpu" and count < MANY_WEIGHTS:
            # The changes of all weights are there before the first of them moves.
            changes = resolved.table_bytes(resolved.tables.networks, jnp.float32)
            activations = max(activations, changes)
        return {
            "batch": self._batch_bytes() + self._kept_of_teacher(),
            "gradients": self.gradient_bytes(),
            "activations": activations,
        }

    def adds_in_place(self) -> bool:
        """Whether each block of the head adds its gradient to the sum of the table's, on one CPU
        (vocabulary.gradients_added); XLA then makes no other table there."""
        resolved = self.resolved
        is_half = resolved.run.training.mixed_precision == "bf16_params"
        trains = resolved.lora is None and not is_half
        is_alone = resolved.platform == "cpu" and resolved.fsdp * resolved.tp == 1
        return is_alone and trains and resolved.rows.num_micro_batches > 1

    def widened_base(self) -> int:
        """The bytes of a bfloat16 base in float32, with its table twice where embedding and head
        read one: XLA for CPUs slices and gathers in float32, and widens all arrays before that."""
        resolved = self.resolved
        frozen = resolved.tables.frozen
        if frozen is None or resolved.platform != "cpu":
            return 0
        leaves = jax.tree.leaves(frozen)
        if resolved.cfg.tied:
            leaves.append(frozen["embed"])
        halves = [w for w in leaves if w.dtype == jnp.bfloat16]
        return resolved.table_bytes(halves, jnp.float32)

    def _kept_of_teacher(self) -> int:
        """The bytes kept of the teacher's distribution of each token of a shard, prompts included;
        0 without a comparison."""
        resolved = self.resolved
        if resolved.teacher is None:
            return 0
        of_a_token = resolved.teacher.embed_dim * jnp.dtype(resolved.dtype).itemsize
        return of_a_token * self._tokens_of_batch()

    def teacher_table(self) -> int:
        """The teacher's output embedding on a device, which the update is given; 0 where it is
        not."""
        resolved = self.resolved
        teacher = resolved.teacher
        if teacher is None:
            return 0
        model = resolved.frozen_models[teacher.comparison.model]
        table = decoder.output_table(
            stored_table(decoder.weights(model.cfg), model.storage), model.cfg
        )
        return resolved.table_bytes(table)

    def _batch_bytes(self) -> int:
        """Rows of a batch: some eight numbers of four bytes a token, and its recorded routes."""
        of_a_token = 4 * 8
        if self.resolved.replays_routes:
            of_a_token += no_routes(self.resolved.cfg).nbytes
        return of_a_token * self._tokens_of_batch()

    def _tokens_of_batch(self) -> int:
        """Columns of all rows of a batch on a device."""
        resolved = self.resolved
        rows = resolved.rows
        if rows.packing == "none":
            here = resolved.batch.sequences // resolved.fsdp
            return here * sum(resolved.lengths)
        return rows.rows_per_micro_batch * rows.num_micro_batches * rows.width

    def gradient_bytes(self) -> int:
        """Gradients as the weights are stored, and with several micro-batches their float32 sums:
        in their place if they are as wide, else beside; with sync_gradients_every, one that is not
        divided over fsdp, too."""
        resolved = self.resolved
        trained = resolved.tables.networks
        total = resolved.table_bytes(trained)
        is_per_shard = resolved.run.training.sync_gradients_every > 1 and resolved.fsdp > 1
        if resolved.rows.num_micro_batches > 1:
            sums = resolved.table_bytes(trained, jnp.float32)
            total = sums if total == sums and not is_per_shard else total + sums
        if is_per_shard:
            total += resolved.table_bytes(trained, jnp.float32, is_gathered=True)
        return total

    def kept_layers(self, rows: int, width: int) -> int:
        """The bytes that the backward pass finds of every layer: its input, nD, the layer's own
        input, if there is one, and what training.remat keeps beside them."""
        resolved = self.resolved
        cfg = resolved.cfg
        tp = resolved.tp
        remat = resolved.run.training.remat
        is_sequence_parallel = resolved.train_rules["residual_seq"] == "tp"
        residual = cfg.embed_dim // tp if is_sequence_parallel else cfg.embed_dim
        own = cfg.per_layer_dim
        total = 0
        for kind, count in Counter(cfg.kinds_of_weights).items():
            # Elements of one token of one layer on a device.
            qkv, attended_out = self._projected(kind)
            n = rows * width
            mlp = self._hidden(kind, n) / n
            products = qkv + 2 * residual + 2 * mlp + (own + residual if own else 0)

            # What remat keeps of them.
            heads_of_token = (qkv + attended_out) // 2
            of_a_token = {
                "block": 0,
                "save_qkv_out": qkv + attended_out,
                "dots": products,
                "save_most": products + attended_out - residual,
                "none": products + attended_out,
                "save_all": 3 * mlp + 4 * residual + 2 * heads_of_token,
            }
            elements = n * (residual + own + of_a_token[remat])
            size = round(elements) * resolved.itemsize
            if remat == "save_all":
                # the rows of experts, which their weights' gradients read
                size += resolved.itemsize * self._expert_rows(n) * cfg.embed_dim
                size += self.layer_elements() * resolved.itemsize
                size += 4 * rows * width * (14 * residual + 3 * heads_of_token)
            has_scores = kind != "delta" and resolved.attention == "xla"
            if remat in ("none", "save_all") and has_scores:
                heads = cfg.num_heads // tp
                times = 3 if remat == "save_all" else 1
                # Scores of long rows are computed again (attention.xla).
                scores = [
                    heads * math.prod((lanes, queries, keys))
                    for lanes, queries, keys in self.attended(rows, width)
                    if times > 1 or keys > queries or queries < 2 * attention.CAUSAL_PIECE
                ]
                at_once = [one for one in scores if one <= attention.SCORES_AT_ONCE]
                size += 4 * times * sum(at_once)
            total += count * size
        return total

    def _layer_at_work(self, n: int) -> int:
        """One layer's values that exist at once: b n (4D + (N + 2K)H + 2F), heads and F over tp,
        beside the inputs of all layers, if they have some. In a gated delta net it is what it
        projects, and in float32 what its chunks are made of."""
        resolved = self.resolved
        cfg = resolved.cfg
        tp = resolved.tp
        in_float32 = 0
        if (net := cfg.delta) is not None:
            of_head = 4 * net.key_dim + 4 * net.value_dim + 3 * gated_delta_net.CHUNK
            in_float32 = 4 * n * net.num_value_heads // tp * of_head
        kinds = set(cfg.kinds_of_weights)
        # layers run one after the other, so the largest counts
        heads = max(self._projected(kind)[0] for kind in kinds)
        inputs = cfg.num_layers * cfg.per_layer_dim
        elements = n * (4 * cfg.embed_dim + heads + inputs)
        elements += 2 * max(self._hidden(kind, n) for kind in kinds)
        # rows of experts, before and after
        elements += 2 * self._expert_rows(n) * cfg.embed_dim
        return resolved.itemsize * elements + in_float32

    def _hidden(self, kind: str, n: int) -> int:
        """Elements of n tokens between gate and down on a device: F each, and the inner width of
        experts for each of their rows."""
        elements = 0
        for name, w in decoder.layer_weights(self.resolved.cfg, kind).items():
            if name in ("gate", "shared_gate", "expert_gate"):
                rows = self._expert_rows(n) if "experts" in w.axes else n
                elements += rows * w.shape[-1]
        return elements // self.resolved.tp

    def _expert_rows(self, n: int) -> int:
        """Rows in which n tokens stand for their experts, blocks filled up; 0 without experts."""
        sizes = self.resolved.cfg.experts
        return 0 if sizes is None else rows_needed(n * sizes.per_token, sizes.count)

    def _projected(self, kind: str) -> tuple[int, int]:
        """Elements of one token of a layer of this kind on a device: what is projected to mix it
        with others, and what comes out. In attention these are (N + 2K)H and NH."""
        cfg = self.resolved.cfg
        tp = self.resolved.tp
        if kind == "delta":
            net = cfg.delta
            values = net.num_value_heads // tp * net.value_dim
            gates = 2 * net.num_value_heads // tp
            return net.num_key_heads // tp * sum(net.parts) + values + gates, values
        heads = cfg.num_heads // tp
        kv_heads, head_dim = cfg.kv_shape(kind)
        declared = decoder.layer_weights(cfg, kind)
        # heads that tp does not divide are repeated
        of_kv = -(-kv_heads // tp) * sum(name in declared for name in "kv")
        queries = 2 * heads if cfg.attn_gate else heads
        return (queries + of_kv) * head_dim, heads * head_dim

    def _scores_at_work(self, rows: int, width: int) -> int:
        """Attention's scores, float32, and their softmax, of the queries taken at once; a kernel
        has none. A gated delta net has as much for all tokens of a lane and the prompts that they
        share."""
        parts = self.attended(rows, width)
        of_prompts = 0
        if (net := self.resolved.cfg.delta) is not None:
            heads = net.num_value_heads // self.resolved.tp
            lanes, queries, keys = parts[-1]
            of_prompts = 2 * 4 * heads * lanes * queries * (keys - queries)
        if self.resolved.attention != "xla":
            return of_prompts
        return max(of_prompts, *(self._score_bytes(*part) for part in parts))

    def _score_bytes(self, rows: int, queries: int, keys: int) -> int:
        """The scores of so many queries of each row with so many keys, as `_scores_at_work` has."""
        heads = rows * self.resolved.cfg.num_heads // self.resolved.tp
        per_query = max(1, heads * keys)
        at_once = max(
            attention.SCORES_AT_ONCE // per_query, -(-queries // attention.MOST_PIECES), 1
        )
        return 2 * 4 * per_query * min(queries, at_once)

    def attended(self, rows: int, width: int) -> list[tuple[int, int, int]]:
        """The products of attention of so many rows: (how many, queries, keys); columns of
        completions apart from the shared prompts that they see."""
        if self.resolved.rows.packing != "prefix":
            return [(rows, width, width)]
        shape = self.resolved.rows.shape
        return [
            (rows, shape.prefix_columns, shape.prefix_columns),
            (
                rows * shape.num_lanes,
                shape.lane_columns,
                shape.prefix_columns + shape.lane_columns,
            ),
        ]

    def _gathered_layers(self, count: int) -> int:
        """Matrices of `count` layers, whole over fsdp as computed, and the next one's on their
        way."""
        # on one device nothing is gathered
        layers = 1 if self.resolved.fsdp == 1 else count + 1
        return layers * self.layer_elements() * self.resolved.itemsize

    def _head_at_work(self, rows: int, without_table: bool = False) -> int:
        """The head: a block of float32 scores, twice; the hidden states and their sum of gradients,
        6nD; unless without_table, the table, as it is stored, regrouped into blocks, and its
        gradient or, where it has none, the copy that a loop over blocks keeps."""
        resolved = self.resolved
        cfg = resolved.cfg
        if cfg.output != "logits":
            # one number a token, of hidden states that are there already
            return 0
        tp = resolved.tp

        # Tokens that are scored at once.
        shape = resolved.rows.shape
        in_a_row = shape.width - shape.prefix_columns if shape else 0
        scored = rows * (in_a_row or resolved.rows.num_scored)

        # the head runs over blocks of the vocabulary, as many as keep the scores small
        on_cpu = resolved.platform == "cpu"
        blocks = vocabulary.num_blocks(cfg.vocab_size // tp, scored, on_cpu)
        scores = 2 * 4 * scored * cfg.vocab_size // (tp * blocks)
        hidden = 6 * scored * cfg.embed_dim
        if without_table and cfg.vocab_size % blocks == 0:
            return scores + hidden
        table = resolved.elements((cfg.vocab_size, cfg.embed_dim), ("vocab", "embed"))
        is_half = (
            resolved.run.training.mixed_precision == "bf16_params" or resolved.lora is not None
        )
        return scores + hidden + 2 * (2 if is_half else 4) * table
