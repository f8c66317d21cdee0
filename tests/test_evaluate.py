"""Evaluation: while a run trains, and of any model by `tunix-lite evaluate`."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from conftest import set_mesh

from tunix_lite.inference import rollouts
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.runs.hints import WINDOW, RunHints
from tunix_lite.tasks.grading import group_metrics

# ---- what a run says of its groups


def hints(agree: list[float], right: float = 0.9) -> list[str | None]:
    hints = RunHints()
    rows = [{"reward/groups_that_agree": share, "completions/correct": right} for share in agree]
    return ["".join(hints.lines(row, 8, 48)) for row in rows]


def test_a_run_says_once_that_most_groups_teach_nothing():
    said = hints([0.75] * 25)
    assert [step for step, line in enumerate(said, 1) if line] == [10]
    assert said[9] == (
        "most groups teach nothing: in the last 10 steps 75% of them had equal rewards; too easy (90% right). "
        "Try harder examples, algorithm.num_generations=16, or algorithm.agreeing_groups=replace algorithm.max_rounds=4 "
        "to draw others in their place"
    )
    assert "too hard (10% right). Try easier examples, algorithm.num_generations=16" in hints([0.9] * 10, 0.1)[9]


def test_a_run_says_once_that_completions_are_cut_off_and_what_to_type():
    hints = RunHints()
    said = ["".join(hints.lines({"completions/truncated": share}, 8, 48)) for share in [0.4] * 10 + [0.6] * 30]
    assert [step for step, line in enumerate(said, 1) if line] == [20]
    assert said[19] == (
        "many completions are cut off: in the last 10 steps 60% of them reached generation.max_new_tokens=48 without an "
        "end. Try generation.max_new_tokens=96"
    )
    assert not any(RunHints().lines({"train/loss": 1.0}, 8, 48) for _ in range(3 * WINDOW)), "as in SFT"
    answered = RunHints()
    right = {"completions/truncated": 1.0, "completions/correct": 0.6}
    assert not any(answered.lines(right, 8, 16) for _ in range(3 * WINDOW)), "they answer, and go on until they are cut"


def test_a_run_whose_groups_differ_says_nothing():
    assert not any(hints([0.6] * 30)) and not any(hints([0.9] * 5 + [0.3] * 25))
    assert not any(RunHints().lines({"train/loss": 1.0}, 8, 48) for _ in range(3 * WINDOW)), "as in SFT"


def test_groups_are_counted_by_what_their_rewards_are():
    """By hand: all 0; all 1; mixed; all equal but neither; one kept of two; none kept."""
    total = np.array([0, 0, 1, 1, 0, 1, 0.5, 0.5, 1, 0, 0, 0.0])
    dropped = np.array([0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1], bool)
    found = group_metrics(total, dropped, [[i, i + 1] for i in range(0, 12, 2)])
    assert found == {
        "reward/groups_all_zero": 1 / 6,
        "reward/groups_all_one": 2 / 6,
        "reward/groups_mixed": 1 / 6,
    }


def test_every_setting_of_rollout_reaches_the_sampler(monkeypatch):
    """Of a model on one device. Only the number of slots and where the weights stay are chosen."""
    got = []
    monkeypatch.setattr(rollouts, "make_generate", lambda *arguments: got.append(arguments[5]))
    monkeypatch.setattr(rollouts.memory, "choose_weights", lambda *_: ("gathered", ""))
    tokenizer = SimpleNamespace(eos_ids=(1,), pad_id=0)
    monkeypatch.setattr(rollouts, "num_params", lambda table: 135_000_000)
    monkeypatch.setattr(rollouts.decoder, "weights", lambda cfg: None)
    model = SimpleNamespace(mesh=set_mesh(1, 1), params={}, cfg=None, dtype=None, tokenizer=tokenizer)
    asked = RolloutConfig(None, 7, "auto", "int8", kernels="fused", waiting="hold")
    rollouts.generate_of(model, GenerationConfig(), asked, [(4, 2)])
    assert got == [RolloutConfig(8, 7, "gathered", "int8", kernels="fused", waiting="hold")]

    # On a CPU, 160 slots of 135M weights took 9.8 GB, and nothing was graded before nearly all had ended.
    for num_slots, expected in ((None, 16), (40, 40)):
        rollouts.generate_of(model, GenerationConfig(), replace(asked, num_slots=num_slots), [(160, 1)])
        assert got[-1].num_slots == expected
