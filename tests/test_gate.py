"""benchmarks/gate.py fails at what is worse, and says what to do."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def gate():
    spec = importlib.util.spec_from_file_location("gate", ROOT / "benchmarks" / "gate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KNOWN = {"0.10": {"jax": "0.10.2", "counts": {"a/update": {"flops": 100.0, "kernels": 7}, "run": {"slot_use": 0.5}}}}


def counts(flops: float = 100.0, kernels: int = 7, slot_use: float = 0.5) -> dict:
    return {"a/update": {"flops": flops, "kernels": kernels}, "run": {"slot_use": slot_use}}


@pytest.mark.parametrize(
    "found, status, said",
    [
        (counts(), 0, "3 counts of 2 programs; none is worse"),
        (counts(kernels=8), 1, "WORSE: a/update: kernels 7 -> 8 (+14.3%)"),
        (counts(kernels=6, flops=101), 1, "WORSE: a/update: flops 100 -> 101 (+1.0%)"),
        (counts(slot_use=0.25), 1, "WORSE: run: slot_use 0.5 -> 0.25 (-50.0%)"),
        ({"a/update": counts()["a/update"]}, 1, "WORSE: run: slot_use is gone"),
    ],
    ids=["same", "worse", "both", "less-use", "gone"],
)
def test_a_worse_count_fails_and_a_better_one_is_named(gate, found, status, said):
    code, lines = gate.verdict(KNOWN, found, "0.10.2")
    assert code == status and said in "\n".join(lines)
    # what fails says what to do
    assert ("docs/log.md" in lines[-1] and "gate.py --accept" in lines[-1]) == bool(status)


def test_kernels_are_what_runs_and_a_loop_counts_once(gate):
    text = """HloModule m
%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %n = f32[4]{0} negate(%p)
}
%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %t = (s32[], f32[4]{0}) parameter(0)
  %j = s32[] get-tuple-element(%t), index=0
  %one = s32[] constant(1)
  %i = s32[] add(%j, %one)
  %x = f32[4]{0} get-tuple-element(%t), index=1
  %f = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused
  %c = f32[4]{0} copy(%f)
  ROOT %r = (s32[], f32[4]{0}) tuple(%i, %c)
}
%cond (t: (s32[], f32[4])) -> pred[] {
  %t = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %k = s32[] constant(3)
  ROOT %lt = pred[] compare(%i, %k), direction=LT
}
ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %z = s32[] constant(0)
  %d = f32[4]{0} dot(%a, %a)
  %t0 = (s32[], f32[4]{0}) tuple(%z, %d)
  %w = (s32[], f32[4]{0}) while(%t0), condition=%cond, body=%body
  ROOT %out = f32[4]{0} get-tuple-element(%w), index=1
}
"""
    assert gate.kernels(text) == {"dot": 1, "fusion": 1, "copy": 1, "add": 1}


def test_the_committed_counts_are_of_all_programs(gate):
    known = json.loads(gate.VALUES.read_text())
    wanted = {f"{name}/{program}" for name, (_, _, _, programs) in gate.PROGRAMS.items() for program in programs}
    for values in known.values():
        assert set(values["counts"]) == {*wanted, "rollout", "run"}


@pytest.mark.parametrize(
    "arguments, kernels, code, is_written",
    [
        (["--accept"], 6, 0, True),
        (["--accept"], 8, 1, False),
        (["--accept", "--why", "one sort more"], 8, 0, True),
        (["--accept", "--why", "no such words"], 8, 2, False),
    ],
    ids=["better", "worse", "explained", "not in the log"],
)
def test_what_is_worse_is_accepted_only_with_words_of_the_log(
    gate, arguments, kernels, code, is_written, tmp_path, monkeypatch
):
    monkeypatch.setattr(gate, "VALUES", tmp_path / "gate.json")
    monkeypatch.setattr(gate, "LOG", tmp_path / "log.md")
    minor = ".".join(gate.jax.__version__.split(".")[:2])
    gate.VALUES.write_text(json.dumps({minor: KNOWN["0.10"] | {"jax": gate.jax.__version__}}))
    gate.LOG.write_text("## Today\n\nA step has one sort\nmore, as top_p asks.\n")
    monkeypatch.setattr(gate, "count_all", lambda: counts(kernels=kernels))
    monkeypatch.setattr("sys.argv", ["gate.py", *arguments])
    before = gate.VALUES.read_text()
    try:
        status = gate.main()
    except SystemExit as ended:
        status = ended.code
    assert (status, gate.VALUES.read_text() != before) == (code, is_written)
    if is_written:
        written = json.loads(gate.VALUES.read_text())[minor]
        assert written["counts"]["a/update"]["kernels"] == kernels
        assert written.get("why") == (arguments[2] if "--why" in arguments else None)
