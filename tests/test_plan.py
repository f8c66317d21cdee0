"""What fits and how fast it can be: a plan is compared with what runs, and with numbers worked out by hand."""

import functools
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_params, set_mesh
from test_hardware import needs_compiler

from tunix_lite.basics.errors import ConfigError
from tunix_lite.basics.types import Batch
from tunix_lite.commands import plan as command
from tunix_lite.commands.plan import PlanConfig, make_plans
from tunix_lite.distributed.host_memory import prepare_gpu
from tunix_lite.learner.rows import at_every_width
from tunix_lite.models import attention, decoder, source
from tunix_lite.models.architecture import Architecture
from tunix_lite.planning import at_start, plan
from tunix_lite.planning.advice import advice
from tunix_lite.planning.estimate import MemoryEstimate
from tunix_lite.planning.hardware import GiB, Machine, attached_machine, devices_of, find_machine
from tunix_lite.planning.plan import Plan
from tunix_lite.planning.plans import Plans
from tunix_lite.planning.programs import Compiled, DoesNotFit, compiled
from tunix_lite.runs.profiler import Profile
from tunix_lite.settings.compose import compose
from tunix_lite.settings.resolved_parts import scored_batch_shapes
from tunix_lite.settings.resolved_run import ResolvedRun, find_model, resolve_run
from tunix_lite.train import train

SMALL = [
    "training.packing=none",
    "training.prompts_per_step=2",
    "algorithm.num_generations=4",
    "evaluation.num_examples=0",
]
WIDE = pytest.mark.wide
LENGTHS = ["generation.max_prompt_length=10", "generation.max_new_tokens=12", "rollout.chunk=4"]


def case_of(cfg, overrides=(), fsdp=2, tp=2) -> ResolvedRun:
    """A run of the tests' tiny architecture."""
    run = compose(["model=random", *SMALL, *LENGTHS, *overrides])
    run = replace(run, model=replace(run.model, architecture=cfg))
    return resolve_run(run, *find_model(run.model), {"fsdp": fsdp, "tp": tp}, "cpu")


# Rows times columns, 35, divides the size of no weight.
ODD = Architecture(64, 2, 22, 3, 1, 16, 44, query_scale=16, pattern=("global",), window=None)


@pytest.mark.parametrize("precision, off", [("fp32", 0.05), ("bf16", 0.2)])
def test_what_save_all_keeps_of_tokens_is_near_what_jax_keeps(precision, off):
    cfg = replace(ODD, mlp_dim=172)
    case = case_of(cfg, ["training.remat=save_all", f"training.mixed_precision={precision}"], 1, 1)
    rows, width = 5, 7
    meta = attention.one_sequence_per_row(jnp.ones((rows, width), bool))

    def kept(params):
        tokens = np.zeros((rows, width), np.int32)
        hidden = partial(decoder.forward, cfg=cfg, tokens_BT=tokens, meta=meta, dtype=case.dtype)
        return jax.vjp(partial(hidden, remat="save_all", scan_layers=False), params)[1]

    set_mesh(1, 1)
    residuals = {id(x): x.aval for x in jax.make_jaxpr(kept)(random_params(cfg)).jaxpr.outvars}
    floats = [x for x in residuals.values() if jnp.issubdtype(x.dtype, jnp.floating)]
    of_tokens = [x.size * x.dtype.itemsize for x in floats if x.size % (rows * width) == 0]
    matrices = cfg.num_layers * MemoryEstimate(case).layer_elements() * jnp.dtype(case.dtype).itemsize
    assert MemoryEstimate(case).kept_layers(rows, width) - matrices == pytest.approx(sum(of_tokens), rel=off)


def test_save_most_keeps_no_scores_and_no_output_of_attention():
    """Of 35 tokens: in each of 2 layers 7 scores for each of 3 heads, and 22 numbers of the output, in float32."""
    rows, width = 5, 7
    meta = attention.one_sequence_per_row(jnp.ones((rows, width), bool))
    set_mesh(1, 1)

    def kept(remat, params):
        hidden = partial(decoder.forward, cfg=ODD, tokens_BT=np.zeros((rows, width), np.int32), meta=meta, remat=remat)
        return jax.vjp(hidden, params)[1]

    def of_jax(remat):
        residuals = jax.eval_shape(partial(kept, remat), random_params(ODD))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(residuals))

    def by_formula(remat):
        return MemoryEstimate(case_of(ODD, [f"training.remat={remat}"], 1, 1)).kept_layers(rows, width)

    fewer = 4 * rows * width * 2 * (3 * 7 + 22)
    assert of_jax("none") - of_jax("save_most") == by_formula("none") - by_formula("save_most") == fewer


def machine(capacity: int | None, devices: int = 4, hardware=None) -> Machine:
    return Machine("attached", "cpu", devices, hardware, capacity, "by decree")


# ---- batches


@pytest.mark.parametrize("packing", ["none", "sequences", "prefix"])
def test_a_batch_is_foreseen_as_it_is_laid_out(cfg, packing):
    """Every completion at its longest. Of packed rows the plan has as many tokens that count as there could be."""
    set_mesh(2, 2)
    case = case_of(cfg, [f"training.packing={packing}"])
    tokens, counts = np.ones((8, 22), np.int32), np.arange(22) >= np.full((8, 1), 10)
    batch, _ = case.rows.lay_out(Batch(tokens, tokens > 0, counts.astype(np.float32)))
    foreseen = scored_batch_shapes(case)
    assert jax.tree.structure(foreseen) == jax.tree.structure(batch)
    for name, array in vars(batch).items():
        shape = getattr(foreseen, name)
        if name in ("prefix_columns", "lane_columns", "max_micro_batches", "streams"):
            assert shape == array
        elif array is not None:
            assert (shape.shape, shape.dtype, shape.sharding) == (array.shape, array.dtype, array.sharding), name


@pytest.mark.parametrize("prompt", [3, 10])
def test_rows_of_every_width_are_foreseen(cfg, prompt):
    set_mesh(2, 2)
    case = case_of(cfg, ["training.packing=prefix"])
    case = replace(case, rows=replace(case.rows, shape=replace(case.rows.shape, narrows=True)))
    columns = np.tile(np.arange(22), (8, 1))
    batch, packed = case.rows.lay_out(
        Batch(np.ones((8, 22), np.int32), columns >= 10 - prompt, columns / 22 * (columns > 9))
    )
    assert packed.row_shape == case.rows.shape.prefixes[prompt == 3]
    foreseen = at_every_width(scored_batch_shapes(case), case.rows)
    assert len(foreseen) == 2 and jax.tree.structure(batch) in map(jax.tree.structure, foreseen)
    shapes = [[(x.shape, x.sharding) for x in jax.tree.leaves(rows)] for rows in foreseen]
    assert [(x.shape, x.sharding) for x in jax.tree.leaves(batch)] in shapes


# ---- by hand: elements / shards x bytes. Of the tiny architecture on fsdp=2, tp=2, a device has, of one layer,
# q 16*4*8/4, k and v 16*2*8/4 each, o as q, gate, up and down 16*24/4 each, and 4*16 + 2*8 of norms, whole.

LAYER, NORMS, EMBED = 128 + 64 + 64 + 128 + 3 * 96, 80, 32 * 16 // 4
MATRICES, SCALES = 3 * LAYER + EMBED, 3 * NORMS + 16


def test_what_is_resident_is_what_the_shards_hold(cfg):
    held = MATRICES + SCALES
    assert MemoryEstimate(case_of(cfg)).resident() == {"parameters": 4 * held, "optimizer": 8 * held}
    half = case_of(cfg, ["training.mixed_precision=bf16_params"])
    assert MemoryEstimate(half).resident() == {"parameters": 2 * held, "optimizer": 4 * held}
    with_reference = case_of(cfg, ["training.mixed_precision=bf16", "algorithm.kl_coef=0.1"])
    assert MemoryEstimate(with_reference).resident()["reference"] == 2 * MATRICES + 4 * SCALES


def test_a_plan_for_a_cpu_has_room_for_the_process(cfg):
    """Libraries and a tokenizer of 32 tokens are there from the start, programs once they are compiled."""
    count = jax.local_device_count()
    of_process = replace(machine(None), process_bytes=700, compiler_bytes=50)
    there, with_it = (plan.assemble_plan(one, case_of(cfg), {}) for one in (machine(None), of_process))
    # 3 layers; prompts of up to 10 tokens are read in one width, and the cache has 22 columns: two programs
    process, programs = 700 + 32 * 280 // count, (80_000_000 + 3 * 2 * 2_400_000) // count
    assert with_it.resident == there.resident | {"process": process, "programs": programs}
    assert with_it.peak_bytes == there.peak_bytes + process + programs
    assert with_it.resume_bytes == there.resume_bytes + process
    here = attached_machine()
    assert (here.process_bytes, here.compiler_bytes) == (350_000_000 // count, 310_000_000 // count)


def test_a_phase_takes_what_the_compiler_has_freed(cfg):
    there = plan.assemble_plan(machine(None), case_of(cfg), {})
    rollout, update = (added(there, name) for name in ("rollout", "update"))
    between = plan.assemble_plan(replace(machine(None), compiler_bytes=update - 30), case_of(cfg), {})
    assert rollout < update - 30 and added(between, "update") == update and added(between, "rollout") == update - 30
    most = plan.assemble_plan(replace(machine(None), compiler_bytes=update + 9), case_of(cfg), {})
    assert [phase.adds.get("freed by the compiler") for phase in most.phases] == [update + 9 - rollout, 9]


def test_an_evaluation_makes_its_weights_of_those_that_were_loaded(cfg):
    """The loaded ones are gone before its programs are compiled."""
    parts = {"parameters": 100, "optimizer": 200, "process": 30, "programs": 7}
    for cache, peak in ((60, 30 + 90 + 100), (160, 30 + 90 + 7 + 5 + 160)):
        phase = plan.Phase("rollout", "estimate", {"weights to sample": 90, "cache": cache, "prompts": 5})
        made = plan.Plan(machine(None), case_of(cfg), parts, (phase,))
        assert made.evaluation_bytes == peak


def test_a_head_that_adds_in_place_has_no_second_table_on_one_cpu(cfg):
    """Its float32 table of 32 tokens and the gradient of it are 2 x 4 x 32 x 16 bytes elsewhere."""
    tables = 2 * 4 * 32 * 16
    two_parts = "training.micro_batch_size=4"
    one = MemoryEstimate(case_of(cfg, [two_parts], 1, 1))
    assert one.resolved.rows.num_micro_batches > 1 and one.adds_in_place()
    # one shard has nothing to sync
    assert MemoryEstimate(case_of(cfg, [two_parts, "training.sync_gradients_every=2"], 1, 1)).adds_in_place()
    assert one._head_at_work(2) - one._head_at_work(2, without_table=True) == tables
    others = ["training.mixed_precision=bf16_params", "model.lora.rank=4"]
    for other in others:
        assert not MemoryEstimate(case_of(cfg, [two_parts, other], 1, 1)).adds_in_place(), other
    whole = case_of(cfg, ["training.micro_batch_size=8"], 1, 1)
    assert whole.rows.num_micro_batches == 1 and not MemoryEstimate(whole).adds_in_place()
    on_gpu = replace(one.resolved, platform="cuda")
    assert not MemoryEstimate(on_gpu).adds_in_place() and not MemoryEstimate(case_of(cfg)).adds_in_place()


def test_xla_for_cpus_widens_a_bfloat16_base_once_and_its_table_twice(cfg):
    """Whole, a layer has 2 x 16*4*8 + 2 x 16*2*8 + 3 x 16*24 elements, and the table of 32 tokens 32*16."""
    layers, norms, table = 3 * (1024 + 512 + 1152), SCALES, 512
    lora = ["model.lora.rank=4", "training.micro_batch_size=4"]
    bf16, fp32, int8 = (
        MemoryEstimate(case_of(cfg, [*lora, f"model.lora.base={base}"], 1, 1)) for base in ("bf16", "fp32", "int8")
    )
    assert bf16.widened_base() == 4 * (layers + norms + 2 * table)
    assert fp32.widened_base() == MemoryEstimate(case_of(cfg, lora[1:], 1, 1)).widened_base() == 0
    assert int8.widened_base() == 4 * (norms + 2 * table)
    assert MemoryEstimate(replace(bf16.resolved, platform="cuda")).widened_base() == 0
    # 4 rows of 22 tokens: a layer at work is more than the head
    assert bf16.update()["activations"] - fp32.update()["activations"] == bf16.widened_base()


def test_under_lora_the_base_is_resident_and_adapters_train(cfg):
    # rank 4: q a 16*4/2, b 4*4*8/2; k, v a 32, b 4*2*8/2; o a 4*8*4/2, b 4*16/2; gate, up a 32, b 4*24/2; down 48, 32
    adapters = 3 * ((32 + 64) + 2 * (32 + 32) + (64 + 32) + 2 * (32 + 48) + (48 + 32))
    case = case_of(cfg, ["model.lora.rank=4", "algorithm.kl_coef=0.1"])
    held = {"parameters": 4 * adapters, "optimizer": 8 * adapters, "frozen base": 2 * (MATRICES + SCALES)}
    assert MemoryEstimate(case).resident() == held
    lora = replace(case.run.model.lora, adapter="/my/sft")
    from_adapters = replace(case, run=replace(case.run, model=replace(case.run.model, lora=lora)))
    assert MemoryEstimate(from_adapters).resident() == held | {"reference": 4 * adapters}
    # int8: a byte an element, and float32 scales: one for blocks of up to 128 inputs of an output, powers of two that
    # divide them: 16 of D, 8 of H (o) and 8 of F (down). Per layer q 32, k, v 16, gate, up 24 each /2 (tp; one block of D
    # is not divided over fsdp); o: 4 * 1 * 16 / 4; down: 24 / 8 = 3 blocks, which tp does not divide, * 16 / 2 (fsdp)
    scales = 3 * (32 // 2 + 2 * 16 // 2 + 2 * 24 // 2 + 4 * 16 // 4 + 3 * 16 // 2)
    int8 = case_of(cfg, ["model.lora.rank=4", "model.lora.base=int8"])
    assert MemoryEstimate(int8).resident()["frozen base"] == 3 * LAYER + 4 * scales + 2 * (EMBED + SCALES)


def test_the_cache_holds_windows_and_whole_lengths(cfg):
    # 8 slots / 2, one of 2 heads, 8 elements; layers local, global, local: 5 + 22 + 5 columns; keys and values
    assert MemoryEstimate(case_of(cfg)).rollout()["cache"] == 2 * 4 * 1 * 8 * (5 + 22 + 5) * 4
    int8 = case_of(cfg, ["rollout.cache=int8"])
    assert MemoryEstimate(int8).rollout()["cache"] == 2 * 4 * 1 * (8 + 4) * (5 + 22 + 5)


def test_sampling_has_a_copy_of_the_weights_whole_over_fsdp(cfg):
    case = case_of(cfg, ["training.mixed_precision=bf16"])
    whole = 2 * MATRICES  # of a tp shard
    assert MemoryEstimate(case).rollout()["weights to sample"] == 2 * whole + 4 * SCALES
    sharded = MemoryEstimate(replace(case, sampling_weights="sharded"))
    assert sharded.rollout()["weights to sample"] == 2 * MATRICES + 4 * SCALES


def test_gradients_are_as_the_weights_and_summed_in_float32(cfg):
    held = MATRICES + SCALES
    assert MemoryEstimate(case_of(cfg)).gradient_bytes() == 4 * held
    case = case_of(cfg, ["training.mixed_precision=bf16_params", "training.micro_batch_size=1"])
    assert case.rows.num_micro_batches == 4
    assert MemoryEstimate(case).gradient_bytes() == (2 + 4) * held


# ---- rollouts that overlap with learning


def added(found, name):
    return next(phase.added_bytes for phase in found.phases if phase.name == name)


def test_one_step_holds_what_sampling_and_the_update_need_at_once(cfg):
    apart = plan.assemble_plan(machine(None), case_of(cfg), {})
    both = plan.assemble_plan(machine(None), case_of(cfg, ["rollout.overlap=one_step"]), {})
    assert added(both, "update") == added(apart, "update") + added(apart, "rollout")
    assert added(both, "rollout") == added(apart, "rollout") and not both.apart


def test_a_device_that_only_samples_has_the_weights_and_the_cache_and_no_optimizer(cfg):
    # as above, whole: embedding, three layers, their norms; all 8 slots, both heads
    own = ["rollout.overlap=one_step", "rollout.mesh_shape=[[1,1],[fsdp,tp]]", "evaluation.num_examples=0"]
    found = plan.assemble_plan(machine(None), case_of(cfg, own), {})
    assert [phase.name for phase in found.phases] == ["update"]
    whole = 3 * (2 * 16 * 4 * 8 + 2 * 16 * 2 * 8 + 3 * 16 * 24) + 32 * 16 + SCALES
    sizes = found.apart
    assert sizes.keys() == {"parameters", "weights to sample", "cache", "prompts", "temporary"}
    assert sizes["parameters"] == sizes["weights to sample"] == 4 * whole
    assert sizes["cache"] == 2 * 8 * 2 * 8 * (5 + 22 + 5) * 4
    small = replace(found, machine=machine(sum(sizes.values()) - 1))
    with pytest.raises(ConfigError, match=r"^rollout.mesh_shape: sampling needs .* on a device of its own"):
        at_start.check_fits(small, print)
    assert "on one that only samples" in at_start.memory_line(small)
    assert Plans((small,)).as_dict()["plans"][0]["device_that_only_samples"] == sizes
    with pytest.raises(ConfigError, match="^rollout.mesh_shape: weight .* is not a multiple of the mesh's tp=3"):
        case_of(cfg, [own[0], "rollout.mesh_shape=[[1,3],[fsdp,tp]]"])


# ---- verdicts


def of_sizes(cfg, capacity, programs=(), refused=()):
    case = case_of(cfg, ["algorithm.kl_coef=0.1"])
    return plan.assemble_plan(machine(capacity), case, {p.name: p for p in programs}, refused)


def test_the_peak_is_what_is_resident_and_the_phase_that_adds_most(cfg):
    held = 4 * (MATRICES + SCALES)  # parameters, twice as much of the optimizer, and the reference
    update = Compiled("update", 3 * held + 700, 3 * held + 100, 3 * held, 500_000, 0)
    found = of_sizes(cfg, 4 * held + 700 + 100 + 500_000, [update])
    assert (found.peak_bytes, found.fits, found.fullest.name) == (4 * held + 500_800, True, "update")
    assert found.fullest.adds == {"batch": 700, "gradients": held, "activations": 500_100 - held}
    assert found.source == "estimate"  # of the other phases
    assert of_sizes(cfg, 4 * held + 700 + 100 + 499_999, [update]).fits is False
    assert of_sizes(cfg, None, [update]).fits is None


@pytest.mark.parametrize(
    "said",
    [
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 17.14G of 15.75G hbm.",
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (17.14G) exceeds available HBM (15.75G).",
    ],
)
def test_what_the_compiler_refuses_does_not_fit(cfg, said):
    def refuse():
        raise jax.errors.JaxRuntimeError(said)

    with pytest.raises(DoesNotFit, match=r"update: 17\.14 GiB of 15\.75 GiB") as caught:
        compiled("update", refuse, {"fsdp": 1, "tp": 1})
    found = of_sizes(cfg, 100 * GiB, refused=[caught.value])
    assert found.fits is False
    assert found.peak_bytes == int(17.14 * GiB)
    assert Plans((found,)).short_form()[-1] == "  update: 17.14 GiB of 15.75 GiB"


def test_a_run_asks_for_the_share_of_a_gpu_that_a_plan_counts_on(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(os, "environ", {})
    prepare_gpu()
    assert os.environ == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):  # jax takes only one of the two
        monkeypatch.setattr(os, "environ", {name: "0.5"})
        prepare_gpu()
        assert os.environ == {name: "0.5"}


def test_a_run_asks_for_kernels_of_a_gpu_that_repeat_their_bits(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "jax_cuda13_plugin" or None)
    same = "--xla_gpu_exclude_nondeterministic_ops=true"
    other, strict = "--xla_gpu_autotune_level=0", "--xla_gpu_deterministic_ops=true"
    for before, after in (("", same), (other, f"{other} {same}"), (strict, strict)):
        monkeypatch.setattr(os, "environ", {"XLA_FLAGS": before})
        prepare_gpu()
        assert os.environ["XLA_FLAGS"] == after


# ---- meshes, advice, micro-batches


def planned(overrides, words=(), **settings):
    return make_plans(compose(list(overrides)), PlanConfig(analytic=True, **settings), list(words))


def test_all_meshes_are_ranked_what_fits_first_and_then_the_smallest():
    found = planned(["model=gemma3_1b"], target="v5e-16", mesh="all")
    assert [p.resolved.mesh_shape for p in found.plans if p.fits] == [p.resolved.mesh_shape for p in found.plans]
    peaks = [p.peak_bytes for p in found.plans]
    assert peaks == sorted(peaks)
    assert [sizes for sizes, _ in found.refused] == [{"fsdp": 2, "tp": 8}, {"fsdp": 1, "tp": 16}]  # 4 heads
    lines = [line for line in found.short_form() if "cannot be" in line]
    assert [line.strip().partition(":")[0] for line in lines] == ["fsdp=2 tp=8 cannot be", "fsdp=1 tp=16 cannot be"]
    assert "heads=4 is not a multiple of the mesh's tp=8" in lines[0]
    large = planned(["model=gemma3_12b", "training.mixed_precision=bf16"], target="v5e-16", mesh="all")
    assert [p.fits for p in large.plans] == sorted((p.fits for p in large.plans), reverse=True)


def test_what_would_fit_is_tried_and_is_a_command():
    words = shlex.split("model=gemma3_4b target=v5e-4 training.remat=dots")
    found = planned(words[:1], words, target="v5e-4")
    assert found.plans[0].fits is False
    overrides = shlex.split(found.command)[2:]
    assert overrides[:2] == ["model=gemma3_4b", "target=v5e-4"]
    again = dict(word.split("=", 1) for word in overrides)
    target = again.pop("target")
    assert planned([f"{key}={value}" for key, value in again.items()], target=target).plans[0].fits is True


def as_compiled(estimated: Plan) -> Plan:
    """The same bytes, as if the compiler had said them: then the last byte may be taken."""
    return replace(estimated, phases=tuple(replace(phase, source=plan.COMPILED) for phase in estimated.phases))


def sampling_is_the_peak(cfg, slots: int) -> Plan:
    """Of many layers under LoRA gradients are small, and sampling has a copy of the base; one device divides none. XLA
    for CPUs widens no float32 base."""
    lora = ["model.lora.rank=1", "model.lora.base=fp32"]
    small = [*lora, "training.micro_batch_size=1", "training.remat=block", f"rollout.num_slots={slots}"]
    found = plan.assemble_plan(machine(1), case_of(replace(cfg, num_layers=12), small, fsdp=1, tp=1), {})
    assert found.fullest.name == "rollout"
    return replace(found, machine=machine(found.peak_bytes - 1))


@pytest.mark.parametrize("slots, first", [(8, "rollout.num_slots=4"), (1, "rollout.cache=int8")])
def test_where_sampling_is_the_peak_its_slots_are_halved_or_its_cache_is_int8(cfg, slots, first):
    full = sampling_is_the_peak(cfg, slots)
    overrides, found = advice(full, as_compiled)
    assert overrides == (first,)
    assert found.fits
    assert found.peak_bytes < full.peak_bytes


def test_where_nothing_fits_the_advice_is_the_least_that_was_reached(cfg):
    full = plan.assemble_plan(machine(10), case_of(cfg, fsdp=4, tp=1), {})
    overrides, least = advice(full)
    assert least.fits is False
    assert least.peak_bytes < full.peak_bytes
    assert "training.remat=block" in overrides
    line = command._advised(Plans((full,)), PlanConfig(analytic=True), []).change
    said = f"{least.peak_bytes / GiB:.2f} of 0.00 GiB, an estimate, with {' '.join(overrides)}"
    assert line == f"nothing that was tried fits, and a larger target is needed: the least is {said}"


def test_what_an_estimate_says_fits_is_looked_at_more_closely(cfg):
    """A compiler that refuses the first change: the second is advised, and its numbers are those of the closer look."""
    looks = iter([{"refused": ("decode: too large",)}, {"resident": {"all": 7}}])
    overrides, found = advice(sampling_is_the_peak(cfg, 8), lambda found: replace(found, **next(looks)))
    assert overrides == ("rollout.num_slots=2",)
    assert found.resident == {"all": 7}


# ---- what goes wrong


@pytest.mark.parametrize(
    "overrides, settings, said",
    [
        ([], {"target": "v5e-12"}, "target: 'v5e-12' is no TPU slice; v5e-8 would do"),
        (["model.mesh_shape=[[9,1],[fsdp,tp]]"], {"target": "h100x8"}, "model.mesh_shape: .*needs 9 devices, but target h100x8 has 8 devices; [^;]*$"),
        (["model.mesh_shape=[[5,1],[fsdp,tp]]"], {}, "model.mesh_shape: .*needs 5 devices, but jax sees 4; "),
        (["training.attention=cudnn"], {"target": "h100x8"}, "attention=cudnn: it computes in bfloat16 only"),
        (["training.prompts_per_step=3", "algorithm.num_generations=3"], {"target": "h100x8"}, "do not divide over fsdp=8"),
        (["model.weights=google/gemma-3-1b-it"], {}, "a plan does not ask the hub"),
        (["training.prompts_per_step=1", "algorithm.num_generations=7", "model=gemma3_1b"], {"target": "h100x16", "mesh": "all"}, "no mesh of 16 devices divides"),
    ],
)  # fmt: skip
def test_mistakes_are_said_in_one_line(overrides, settings, said):
    with pytest.raises(ConfigError, match=said) as error:
        planned(overrides, **settings)
    assert "\n" not in str(error.value)


def test_a_mesh_that_is_smaller_than_the_target_is_planned_for_its_devices_alone():
    (plan,) = planned(["model.mesh_shape=[[2,1],[fsdp,tp]]"], target="h100x8").plans
    (alone,) = planned([], target="h100x2").plans
    assert plan.machine.num_devices == 2 and plan.peak_bytes == alone.peak_bytes


# ---- what is written


def test_a_plan_is_one_screen_and_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["tunix-lite", "model=gemma3_1b"])
    settings = PlanConfig(target="v5e-16", mesh="all", analytic=True, out=str(tmp_path))
    command.plan(compose(["model=gemma3_1b", "algorithm.kl_coef=0.04"]), settings)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert any(line.startswith("v5e-16: fits: peak") and "an estimate" in line for line in lines)
    said = json.loads((tmp_path / "plan.json").read_text())
    assert said.keys() >= {"version", "target", "hardware", "devices", "capacity_bytes", "plans", "refused"}
    assert (said["target"], said["hardware"], said["devices"]) == ("v5e-16", "v5e", 16)
    best = said["plans"][0]
    assert best.keys() >= {"mesh", "source", "fits", "peak_bytes", "phases", "programs"}
    assert [phase["name"] for phase in best["phases"]] == ["rollout", "scoring", "update"]
    most = max(sum(phase["adds"].values()) for phase in best["phases"])
    assert best["peak_bytes"] == sum(best["resident_bytes"].values()) + most
    assert {"fsdp": 16, "tp": 1} in [one["mesh"] for one in said["plans"]] and said["refused"]


def test_supervised_learning_samples_only_to_evaluate(cfg):
    run = compose(["model=random", "algorithm=sft", "training.packing=none", *LENGTHS, "evaluation.num_examples=4"])
    case = resolve_run(replace(run, model=replace(run.model, architecture=cfg)), cfg, None, {"fsdp": 2, "tp": 2}, "cpu")
    found = plan.assemble_plan(machine(GiB, 4, find_machine("h100x4").hardware), case, {})
    assert [phase.name for phase in found.phases] == ["rollout", "update"]


# ---- at the start of a run


STARTS = [
    *("model=random", "model.architecture.num_layers=1", "training.max_steps=2", "training.prompts_per_step=2"),
    *("algorithm.num_generations=4", "algorithm.kl_coef=0.1", "generation.max_new_tokens=8"),
    *("evaluation.num_examples=0", "tracking.tensorboard=false", "model.mesh_shape=[[1,1],[fsdp,tp]]"),
]


@pytest.fixture
def compiled_programs(monkeypatch):
    """How often each program is compiled, and the first memory_analysis of each, by its name in plans."""
    counts, sizes, compile_one = Counter(), {}, jax.stages.Lowered.compile

    def counting(self, *args, **kwargs):
        name = re.search(r"module @jit_*(\w+)", self.as_text())[1].replace("score", "scoring")
        done = compile_one(self, *args, **kwargs)
        counts[name] += 1
        sizes.setdefault(name, done.memory_analysis())
        return done

    monkeypatch.setattr(jax.stages.Lowered, "compile", counting)
    return counts, sizes


@pytest.mark.parametrize("fsdp", [1, pytest.param(2, marks=WIDE)])
def test_a_packed_run_of_one_step_has_the_plan_of_its_programs_a_trace_and_a_table(fsdp, tmp_path, compiled_programs):
    """What the plan compiles is what the run runs: each program is compiled once, and takes the bytes that it says."""
    counts, real = compiled_programs

    more = ["training.packing=sequences", "training.max_steps=1", "training.profile_communication=true"]
    run = compose([*STARTS, *more, f"model.mesh_shape=[[{fsdp},1],[fsdp,tp]]", "training.mixed_precision=bf16"])
    train(run, tmp_path)
    phases = json.loads((tmp_path / "plan.json").read_text())["plans"][0]["phases"]
    sources = {phase["name"]: phase["source"] for phase in phases}
    assert sources == {"rollout": "estimate", "scoring": "compiled", "update": "compiled"}
    assert counts["update"] == counts["scoring"] == 1
    real = dict(real)
    assert " GiB a device at most (plan.json)" in (tmp_path / "train.log").read_text()
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))
    assert ("| all-reduce | " in (tmp_path / "communication.md").read_text()) == (fsdp > 1)

    planned = plan.estimated(run, machine(GiB), *find_model(run.model), {"fsdp": fsdp, "tp": 1})
    planned = plan.with_compiled(planned, jax.devices()[:fsdp])
    assert planned.source == "compiled" and len(planned.programs) == 4
    for name, program in planned.programs.items():
        sizes = real[name]
        assert program.argument_bytes == pytest.approx(sizes.argument_size_in_bytes, rel=0.01), name
        assert program.alias_bytes == pytest.approx(sizes.alias_size_in_bytes, rel=0.01), name
        peak = program.argument_bytes + program.temp_bytes
        assert peak == pytest.approx(sizes.argument_size_in_bytes + sizes.temp_size_in_bytes, rel=0.1), name


@functools.cache
def qwen(*overrides: str) -> Plan:
    """Qwen 3 14B on 8 H100, 64 x 8 sequences of 1024 + 4096 tokens: with the optimizer there, weights whole are too much
    (22 GB of parameters and moments, 30 of weights, 27 of cache and 11 of prompts: 89 GB)."""
    settings = ["model=qwen3_14b", "training.mixed_precision=bf16", "training.remat=block"]
    settings += [
        "training.micro_batch_size=1",
        "training.prompts_per_step=64",
        "algorithm.num_generations=8",
        "generation.max_prompt_length=1024",
    ]
    run = compose([*settings, "generation.max_new_tokens=4096", *overrides])
    return plan.estimated(run, find_machine("h100x8"), *find_model(run.model), {"fsdp": 8, "tp": 1})


def test_a_run_that_does_not_fit_stops_and_says_what_would():
    found = qwen("rollout.weights=gathered")
    peak, room = found.peak_bytes / GiB, found.machine.capacity / GiB
    said = (
        rf"^the run does not fit: {peak:.2f} GiB of {room:.2f} a device, {peak - room:.2f} too much .*for rollout\); "
    )
    with pytest.raises(ConfigError, match=f"{said}it would fit, by an estimate of .* with rollout.weights=sharded; or"):
        at_start.check_fits(found, print)
    told = []
    at_start.check_fits(qwen("rollout.weights=gathered", "training.memory_check=warn"), told.append)
    assert len(told) == 1 and told[0].endswith("it starts all the same, as training.memory_check=warn says")
    # weights to sample with are chosen beside the optimizer and the prompts that wait
    assert qwen().resolved.sampling_weights == "sharded"
    at_start.check_fits(qwen(), told.append)
    assert len(told) == 1
    with pytest.raises(
        ConfigError, match="nothing that was tried fits here, the least by an estimate is .* GiB, with "
    ):
        at_start.check_fits(replace(found, machine=replace(found.machine, name="attached", capacity=GiB)), print)


def test_of_packed_rows_only_what_is_sure_to_come_stops_a_run(cfg):
    found = plan.assemble_plan(machine(GiB), case_of(cfg, ["training.packing=sequences"]), {})
    phases = tuple(replace(phase, adds={"all": GiB if phase.name == "update" else 1}) for phase in found.phases)
    at_start.check_fits(replace(found, phases=phases), print)
    assert "DOES NOT FIT with rows at their fullest" in at_start.memory_line(replace(found, phases=phases))
    with pytest.raises(ConfigError, match="the run does not fit"):
        at_start.check_fits(replace(found, machine=machine(1000)), print)


def test_a_run_that_cannot_fit_stops_before_it_loads_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(at_start, "attached_machine", lambda: machine(10**5))
    monkeypatch.setattr(source, "load_weights", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(ConfigError, match="the run does not fit: .* GiB of 0.00 a device"):
        train(compose([*STARTS]), tmp_path)


# ---- training.profile_communication


@pytest.mark.parametrize("num_steps, expected", [(1, [0]), (2, [1]), (3, [1, 2]), (9, [1, 2, 3])])
def test_the_trace_is_of_the_steps_after_the_first_or_of_the_only_one(num_steps, expected, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    profile = Profile(tmp_path, num_steps)
    for number in range(num_steps):
        with profile.step(number):
            calls.extend([number] if profile.is_tracing else [])
    profile.close()
    assert calls == ["start", *expected, "stop"]


# ---- with the compilers of devices that are not there


TWO_LAYERS = [
    "model=random",
    *(f"model.architecture.{name}" for name in ("num_layers=2", "embed_dim=256", "mlp_dim=1024", "vocab_size=8192")),
    *(f"model.architecture.{name}" for name in ("num_heads=4", "num_kv_heads=2", "head_dim=128")),
    "generation.max_prompt_length=256",
    "generation.max_new_tokens=256",
]


@pytest.mark.aot
@pytest.mark.parametrize(
    "target, overrides",
    [
        ("v5e-4", "training.mixed_precision=bf16_params training.remat=block"),
        ("h100x4", "training.mixed_precision=bf16 training.remat=dots training.packing=sequences model.lora.rank=16"),
    ],
)
def test_estimates_are_near_what_the_compiler_says(target, overrides):
    needs_compiler(find_machine(target))
    run = compose([*TWO_LAYERS, "algorithm.kl_coef=0.04", *overrides.split()])
    where = find_machine(target)
    guess = plan.estimated(run, where, *find_model(run.model), {"fsdp": 2, "tp": 2})
    found = plan.with_compiled(guess, devices_of(where))
    assert found.source == "compiled"
    assert found.fits is True
    assert guess.peak_bytes == pytest.approx(found.peak_bytes, rel=0.25)
    assert any(group.axis == "fsdp" for group in found.programs["update"].collectives)


@pytest.mark.aot
@pytest.mark.parametrize("target", ["h100x1", "v5e-1"])
def test_a_newcomer_plans_without_a_device_and_without_setting_jax_platforms(target, tmp_path):
    """jax's CUDA package looks for a driver unless CUDA is none of the platforms that jax may use."""
    needs_compiler(find_machine(target))
    own = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    call = [sys.executable, "-m", "tunix_lite", "plan", f"target={target}", f"out={tmp_path}", "model=random"]
    done = subprocess.run(
        call, cwd=tmp_path, env=own | {"PYTHONPATH": str(Path(__file__).parents[1])}, capture_output=True, text=True
    )
    assert done.returncode == 0 and f"\n{target}: fits" in done.stdout, done.stderr[-2000:]
