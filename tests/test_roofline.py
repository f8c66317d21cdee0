"""What a compiled program starts, reads, writes and computes, counted by hand for small programs in XLA's text."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest

from tunix_lite.planning.hardware import COMPILERS, HARDWARE
from tunix_lite.planning.kernels import kernels, predicted_seconds

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from roofline import count, decode_step

H100 = HARDWARE["h100"]

# A loop of 5 turns that multiplies x [8, 16] with w [16, 4] in a fusion, writes the result into row i of a buffer
# [5, 8, 4], and transposes a copy of w, all in float32. The compiler has put a copy of the buffer before the loop.
LOOP = """HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%product (a: f32[8,16], b: f32[16,4]) -> f32[8,4] {
  %a = f32[8,16]{1,0} parameter(0)
  %b = f32[16,4]{1,0} parameter(1)
  %dot.1 = f32[8,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %tanh.1 = f32[8,4]{1,0} tanh(%dot.1)
}

%store (buffer: f32[5,8,4], new: f32[8,4], at: s32[]) -> f32[5,8,4] {
  %buffer = f32[5,8,4]{2,1,0} parameter(0)
  %new = f32[8,4]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,8,4]{2,1,0} bitcast(%new)
  ROOT %put = f32[5,8,4]{2,1,0} dynamic-update-slice(%buffer, %row, %at, %zero, %zero)
}

%turned (w0: f32[16,4]) -> f32[4,16] {
  %w0 = f32[16,4]{1,0} parameter(0)
  ROOT %transpose.1 = f32[4,16]{1,0} transpose(%w0), dimensions={1,0}
}

%next (i0: s32[]) -> s32[] {
  %i0 = s32[] parameter(0)
  %one = s32[] constant(1)
  ROOT %add.1 = s32[] add(%i0, %one)
}

%body (state: (s32[], f32[5,8,4], f32[8,16], f32[16,4])) -> (s32[], f32[5,8,4], f32[8,16], f32[16,4]) {
  %state = (s32[], f32[5,8,4]{2,1,0}, f32[8,16]{1,0}, f32[16,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %out = f32[5,8,4]{2,1,0} get-tuple-element(%state), index=1
  %x = f32[8,16]{1,0} get-tuple-element(%state), index=2
  %w = f32[16,4]{1,0} get-tuple-element(%state), index=3
  %fusion.1 = f32[8,4]{1,0} fusion(%x, %w), kind=kCustom, calls=%product, metadata={op_name="jit(f)/while/body/dot"}
  %fusion.2 = f32[5,8,4]{2,1,0} fusion(%out, %fusion.1, %i), kind=kLoop, calls=%store
  %fusion.3 = f32[4,16]{1,0} fusion(%w), kind=kInput, calls=%turned
  %fusion.4 = s32[] fusion(%i), kind=kLoop, calls=%next
  ROOT %tuple.1 = (s32[], f32[5,8,4]{2,1,0}, f32[8,16]{1,0}, f32[16,4]{1,0}) tuple(%fusion.4, %fusion.2, %x, %w)
}

%condition (state.1: (s32[], f32[5,8,4], f32[8,16], f32[16,4])) -> pred[] {
  %state.1 = (s32[], f32[5,8,4]{2,1,0}, f32[8,16]{1,0}, f32[16,4]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %five = s32[] constant(5)
  ROOT %less = pred[] compare(%i.1, %five), direction=LT
}

ENTRY %main (out.1: f32[5,8,4], x.1: f32[8,16], w.1: f32[16,4]) -> f32[5,8,4] {
  %out.1 = f32[5,8,4]{2,1,0} parameter(0), metadata={op_name="cache"}
  %x.1 = f32[8,16]{1,0} parameter(1), metadata={op_name="x"}
  %w.1 = f32[16,4]{1,0} parameter(2), metadata={op_name="params['w']"}
  %copy.1 = f32[5,8,4]{2,1,0} copy(%out.1)
  %zero.1 = s32[] constant(0)
  %tuple.2 = (s32[], f32[5,8,4]{2,1,0}, f32[8,16]{1,0}, f32[16,4]{1,0}) tuple(%zero.1, %copy.1, %x.1, %w.1)
  %while.1 = (s32[], f32[5,8,4]{2,1,0}, f32[8,16]{1,0}, f32[16,4]{1,0}) while(%tuple.2), condition=%condition, body=%body
  ROOT %result = f32[5,8,4]{2,1,0} get-tuple-element(%while.1), index=1
}
"""


def by_name(text: str) -> dict:
    return {kernel.name: kernel for kernel in kernels(text)}


def one(line: str, *others: str, of: str = "") -> dict:
    """The kernels of a program whose entry has these lines."""
    lines = "\n".join(f"  {text}" for text in (line, *others))
    return by_name(f"HloModule jit_g\n\n{of}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{lines}\n}}\n")


def test_a_loop_counts_as_often_as_it_turns_and_an_update_in_place_is_its_slice():
    found = by_name(LOOP)
    assert list(found) == ["copy.1", "fusion.1", "fusion.2", "fusion.3", "fusion.4"]
    product, stored, turned = found["fusion.1"], found["fusion.2"], found["fusion.3"]
    assert (product.kind, product.times, product.turns) == ("matmul", 5, 5)
    assert (product.read_bytes, product.written_bytes) == (4 * (8 * 16 + 16 * 4), 4 * 8 * 4)
    assert product.flops == 2 * 8 * 16 * 4
    # It reads the new row and where it goes, and writes the row, not 5 of them.
    assert (stored.kind, stored.read_bytes, stored.written_bytes) == ("fusion", 4 * 8 * 4 + 4, 4 * 8 * 4)
    assert (turned.kind, turned.read_bytes, turned.written_bytes) == ("copy", 256, 256)
    assert found["copy.1"].times == 1


def test_of_a_table_a_lookup_reads_the_rows_that_it_takes():
    looked_up = """%look (table: bf16[1000,64], ids: s32[8]) -> f32[8,64] {
  %table = bf16[1000,64]{1,0} parameter(0)
  %ids = s32[8]{0} parameter(1)
  %gather.1 = bf16[8,64]{1,0} gather(%table, %ids), offset_dims={1}
  ROOT %wide = f32[8,64]{1,0} convert(%gather.1)
}
"""
    found = one(
        "%p = bf16[1000,64]{1,0} parameter(0)",
        "%q = s32[8]{0} parameter(1)",
        "ROOT %fusion.9 = f32[8,64]{1,0} fusion(%p, %q), kind=kLoop, calls=%look",
        of=looked_up,
    )["fusion.9"]
    assert (found.read_bytes, found.written_bytes) == (2 * 8 * 64 + 4 * 8, 4 * 8 * 64)


def test_what_starts_and_is_done_later_counts_once_and_on_chip_memory_costs_nothing():
    found = one(
        "%p = bf16[128,128]{1,0:T(8,128)(2,1)} parameter(0)",
        "%copy-start.1 = (bf16[128,128]{1,0:T(8,128)(2,1)S(1)}, bf16[128,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) "
        "copy-start(%p)",
        "%copy-done.1 = bf16[128,128]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start.1)",
        "%slice-start.1 = ((bf16[128,128]{1,0:T(8,128)(2,1)}), bf16[32,128]{1,0:T(8,128)(2,1)S(1)}, s32[]{:S(2)}) "
        "slice-start(%p), slice={[0:32], [0:128]}",
        "%scalar = s32[]{:T(128)} add(%i, %i)",
        "ROOT %near = bf16[128,128]{1,0:T(8,128)(2,1)} negate(%copy-done.1)",
    )
    start, negated = found["copy-start.1"], found["near"]
    assert list(found) == ["copy-start.1", "slice-start.1", "near"]
    assert found["slice-start.1"].read_bytes == 2 * 32 * 128
    assert (start.kind, start.read_bytes, start.written_bytes) == ("prefetch", 2 * 128 * 128, 0)
    assert (negated.read_bytes, negated.written_bytes) == (0, 2 * 128 * 128)
    assert count(list(found.values())).kernels == 1


@pytest.mark.parametrize(
    "product, shape",
    [
        # [8, 32] x [32, 16]
        ("convolution(%p, %q), dim_labels=bf_io->bf", "f32[8,16]{1,0}"),
        # XLA for TPU writes 8 products [1, 32] x [32, 16] so: dim 0 is spatial, and of 8 x 8 positions 8 meet
        ("convolution(%r, %s), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf", "f32[8,1,16]{2,1,0}"),
    ],
)
def test_the_flops_of_a_product_that_is_written_as_a_convolution(product, shape):
    found = one(
        "%p = f32[8,32]{1,0} parameter(0)",
        "%q = f32[32,16]{1,0} parameter(1)",
        "%r = f32[8,1,32]{2,1,0} parameter(2)",
        "%s = f32[8,32,16]{2,1,0} parameter(3)",
        f"ROOT %c = {shape} {product}",
    )
    assert found["c"].flops == 2 * 8 * 32 * 16


def test_a_library_call_has_its_flops_in_its_settings_and_a_callback_waits_for_the_host():
    found = one(
        "%p = bf16[8,32]{1,0} parameter(0)",
        "%q = bf16[32,16]{1,0} parameter(1)",
        '%gemm = (bf16[8,16]{1,0}, s8[4096]{0}) custom-call(%p, %q), custom_call_target="__cublas$gemm", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}',
        'ROOT %back = f32[8]{0} custom-call(%p), custom_call_target="xla_ffi_python_gpu_callback"',
    )
    assert (found["gemm"].kind, found["gemm"].flops) == ("library", 2 * 8 * 32 * 16)
    together = count(list(found.values()))
    assert (together.kernels, together.host_waits) == (1, 1)


def test_the_time_is_a_launch_and_the_slowest_of_compute_memory_and_links_kernel_by_kernel():
    product = kernels(LOOP)[1]
    of_memory = dataclasses.replace(product, times=1, read_bytes=3_000_000, written_bytes=350_000, flops=0.0)
    assert predicted_seconds([of_memory], H100) == pytest.approx(2e-6 + 1e-6)
    of_compute = dataclasses.replace(of_memory, flops=989e12 * 5e-6)
    assert predicted_seconds([of_compute], H100) == pytest.approx(2e-6 + 5e-6)
    of_links = dataclasses.replace(of_compute, sent_bytes=450_000_000)
    assert predicted_seconds([of_links, of_memory], H100) == pytest.approx(2e-6 + 1e-3 + 3e-6)


def decoded(target: str, model: str, slots: int, *settings: str) -> dict:
    """What benchmarks/roofline.py finds, as XLA of jax 0.10.2 and libtpu 0.0.52 compile it."""
    platform = "cuda" if target == "h100" else "tpu"
    if not any(importlib.util.find_spec(module) for module in COMPILERS[platform]):
        pytest.skip(f"the compiler for {target} is not installed")
    return decode_step(target, model, slots, *[list(settings)] * bool(settings))


@pytest.mark.aot
@pytest.mark.parametrize("target", ["h100", "v5e-1"])
def test_a_decode_step_of_qwen_has_the_flops_of_the_model_and_no_more_kernels_than_before(target):
    found = decoded(target, "qwen3_0.6b", 64)
    assert found["flops_over_model"] == pytest.approx(1, abs=0.01)
    assert found["large_copies"] == 0
    assert {name: found[name] for name, most in COMMITTED[target].items() if found[name] > most} == {}


@pytest.mark.aot
def test_no_logits_reach_the_memory_of_an_h100_with_the_fused_kernels():
    """Without the kernel every byte is 1.161 times the floor."""
    found = decoded("h100", "qwen3_0.6b", 256, "rollout.kernels=fused")
    assert found["bytes_over_floor"] <= 1.14
    assert found["kernels_beside"] <= 10


@pytest.mark.aot
@pytest.mark.parametrize("slots, most", [(64, 1.05), (256, 1.15)])
def test_a_tpu_does_not_move_the_cache_into_its_chip_and_out_again(slots, most):
    """Without the option for decoding it is 1.351 and 1.498."""
    found = decoded("v5e-1", "gemma3_1b", slots)
    assert found["bytes_over_floor"] <= most and not found["extrapolated"]
    assert found["large_copies"] == 0


# python benchmarks/roofline.py --models qwen3_0.6b --slots 64 --programs decode
COMMITTED = {
    "h100": {"kernels_a_layer": 16.5, "bytes_over_floor": 1.21},
    "v5e-1": {"kernels_a_layer": 29, "bytes_over_floor": 1.031},
}
