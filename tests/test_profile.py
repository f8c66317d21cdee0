"""benchmarks/profile.py: what it makes of a trace and of the text of a program, by hand-made ones."""

from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TEXT = """HloModule jit_update

%fused.1 (x: f32[8,16], w: f32[16,4]) -> f32[8,4] {
  %x = f32[8,16]{1,0} parameter(0)
  %w = f32[16,4]{1,0} parameter(1)
  %dot.1 = f32[8,4]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %tanh.1 = f32[8,4]{1,0} tanh(%dot.1)
}

%fused.2 (y: f32[8,4]) -> f32[8,4] {
  %y = f32[8,4]{1,0} parameter(0)
  ROOT %exponential.1 = f32[8,4]{1,0} exponential(%y)
}

%fused.3 (z: f32[8,4]) -> f32[4,8] {
  %z = f32[8,4]{1,0} parameter(0)
  ROOT %transpose.1 = f32[4,8]{1,0} transpose(%z), dimensions={1,0}
}

ENTRY %main (a: f32[8,16], b: f32[16,4]) -> f32[4,8] {
  %a = f32[8,16]{1,0} parameter(0)
  %b = f32[16,4]{1,0} parameter(1)
  %first = f32[8,4]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused.1
  %second = f32[8,4]{1,0} fusion(%first), kind=kLoop, calls=%fused.2
  ROOT %third = f32[4,8]{1,0} fusion(%second), kind=kLoop, calls=%fused.3
}
"""


@pytest.fixture
def step_profile(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import step_profile

    return step_profile


def event(name: str, start: float, duration: float, **stats) -> SimpleNamespace:
    return SimpleNamespace(name=name, start_ns=start, duration_ns=duration, stats=stats.items())


def traced(*threads: list) -> SimpleNamespace:
    return SimpleNamespace(planes=[SimpleNamespace(lines=[SimpleNamespace(events=events) for events in threads])])


def test_an_operation_that_goes_on_after_its_event_lasts_until_its_end(step_profile):
    of = {"hlo_module": "jit_update", "hlo_op": "first"}
    events = [
        event("first", 1000, 100, _p=1, **of),
        event("end: first", 5000, 0, _c=1),
        event("first", 9000, 700, _p=2, **of),
        event("python", 0, 10**6),
    ]
    Span = step_profile.Span
    found = step_profile.spans_of(traced(events))
    assert found == {("jit_update", "first"): [Span(1000, 5000, True), Span(9000, 9700, False)]}


def test_time_is_divided_among_what_runs_and_copies_that_wait_get_what_nothing_else_has(step_profile):
    Span = step_profile.Span
    spans = {
        "a": [Span(0, 1000, False), Span(2000, 3000, True)],
        "b": [Span(500, 1500, True)],
        "waits": [Span(200, 1800, True)],
        "copies": [Span(2500, 3500, False)],
    }
    found = step_profile.seconds_by_operation(spans, copies={"waits", "copies"})
    # a: 500 alone, half of 500 beside b, 500 alone, half of 500 beside the copy that ends with its event
    assert found == pytest.approx({"a": 1500e-9, "b": 750e-9, "waits": 300e-9, "copies": 750e-9})
    # 0 to 1800, and 2000 to 3500
    assert sum(found.values()) == pytest.approx(3300e-9)


def test_classes_shapes_and_flops_are_those_of_the_text(step_profile, tmp_path):
    (tmp_path / "module_0001.jit_update.cpu_after_optimizations.txt").write_text(TEXT)
    (tmp_path / "module_0002.jit_update.cpu_after_optimizations.txt").write_text(
        "HloModule jit_update, of other shapes"
    )
    # 2 microseconds each, one after the other, two times
    spans = {
        ("jit_update", name): [step_profile.Span(2000 * i + at, 2000 * (i + 1) + at, False) for at in (0, 50_000)]
        for i, name in enumerate(("first", "second", "third"))
    }
    found = {each.kernel.name: each for each in step_profile.found_operations(spans, tmp_path, repeats=2)}
    assert {name: each.label for name, each in found.items()} == {
        "first": "matmul",
        "second": "attention, but its products",
        "third": "copies, slices, transposes",
    }
    assert found["first"].shape == "8x16 · 16x4 -> 8x4"
    assert found["first"].flops == 2 * 8 * 16 * 4 and found["first"].seconds == pytest.approx(2e-6)
    assert found["first"].moved_bytes == 4 * (8 * 16 + 16 * 4 + 8 * 4)
    lines = step_profile.table_of_classes("update", 1e-5, [*found.values()], peak=1.0)
    # 2 + 2 + 2 microseconds, and what all three move: read and written, in float32
    [*_, row] = step_profile.table_of_programs([("update", each) for each in found.values()], peak=1.0)
    assert row == "| update | update | 0.0000 | 0.0 | 0 | 17% | 0.00 |"
    # 1,024 FLOPs in 2 microseconds are 0.512 GFLOP/s
    assert "| matmul | 0.0000 | 33.3% | 1 | 0.0 | 1 | 51% | 0.00 |" in lines
