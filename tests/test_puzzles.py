"""Countdown: what is right, by hand; difficulty; and that held-out problems are never trained on."""

import pytest

from tunix_lite.settings.compose import compose
from tunix_lite.tasks.puzzles.countdown import Countdown, reaches_target

GIVEN = {"numbers": [3, 7, 7, 50], "target": 64, "use_all": False}
ALL = GIVEN | {"use_all": True}

BY_HAND = [
    (GIVEN, "50 + 7 + 7", 1),
    (GIVEN, "The answer is 7 * (3 + 7) - 50 + 44.", 0),  # 44 is not given
    (GIVEN, "<answer>50 + (7 + 7) = 64</answer>", 1),
    (GIVEN, "50 + 7 + 7 + 3 - 3", 0),  # 3 twice
    (GIVEN, "50 \u00d7 7 / 7 + 7 + 7", 0),  # 7 four times
    (ALL, "50 + 3 * 7 - 7", 1),
    (ALL, "50 + 7 + 7", 0),  # without the 3
    (GIVEN, "50 / (7 - 7)", 0),
    (GIVEN, "__import__('os').getpid()", 0),
    (GIVEN, "50 + 14.0", 0),
    ({"numbers": [1, 3, 8], "target": 24, "use_all": False}, "8 / (1 / 3)", 1),  # exactly, by fractions
    (GIVEN, "(" * 300 + "50" + ")" * 300, 0),
]


@pytest.mark.parametrize("example, completion, right", BY_HAND)
def test_right_and_wrong_by_hand(example, completion, right):
    assert reaches_target(completion, example) == right


def test_problems_are_right_and_the_held_out_ones_are_never_trained_on():
    run = compose(["task=countdown"])
    source = run.task.source
    train = [source.train[i] for i in range(200)]
    held_out = [source.held_out[i] for i in range(len(source.held_out))]
    assert train[:5] == [source.train[i] for i in range(5)] and len(source.train) == 1_000_000
    assert len(source.held_out) == 256 and len({e["question"] for e in train}) > 150
    for example in train:
        assert run.task.correct(example["completion"], example) == run.task.correct(example["answer"], example) == 1
        assert run.task.correct("The answer is 1234567.", example) == 0
    # a space so small that an overlap would show
    few = compose(["task=countdown", "task.source.max_value=9", "task.source.max_numbers=3"]).task.source
    assert not {few.train[i]["question"] for i in range(400)} & {few.held_out[i]["question"] for i in range(200)}
    assert held_out[0]["question"] not in {e["question"] for e in train}


def test_settings_that_leave_too_little_are_named():
    for settings, says in (
        ({"min_numbers": 9}, "min_numbers=9, max_numbers=4: need 2 <= min_numbers <= max_numbers"),
        ({"max_numbers": 9}, "max_numbers=9 must be at most 8"),
    ):
        with pytest.raises(ValueError) as failed:
            Countdown(**settings)
        assert says in str(failed.value)
