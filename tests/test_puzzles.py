"""Tasks of our own that are generated: what is right, by hand; difficulty; and that held-out problems are never trained on."""

import pytest

from tunix_lite.settings.compose import compose
from tunix_lite.tasks.puzzles.countdown import Countdown, reaches_target
from tunix_lite.tasks.puzzles.sorting import Sorting, is_sorted_right

NAMES = ("sorting", "countdown")
NUMBERS = {"answer": "3, 14, 20"}
WORDS = {"answer": "abc, abd, b"}
GIVEN = {"numbers": [3, 7, 7, 50], "target": 64, "use_all": False}
ALL = GIVEN | {"use_all": True}

BY_HAND = [
    (is_sorted_right, NUMBERS, "The answer is 3, 14, 20.", 1),
    (is_sorted_right, NUMBERS, "3 14 20", 1),
    (is_sorted_right, NUMBERS, "[3,14,20]", 1),
    (is_sorted_right, NUMBERS, "<answer>3, 14, 20</answer>", 1),
    (is_sorted_right, NUMBERS, "20, 3, 14\nso: \\boxed{3, 14, 20}", 1),
    (is_sorted_right, NUMBERS, "3, 20, 14", 0),
    (is_sorted_right, NUMBERS, "3, 14", 0),
    (is_sorted_right, NUMBERS, "3, 14, 14, 20", 0),
    (is_sorted_right, NUMBERS, "", 0),
    (is_sorted_right, NUMBERS, "3, 14, 20\nThe answer is 20, 14, 3.", 0),
    (is_sorted_right, WORDS, "The answer is ABC, abd, b.", 1),
    (is_sorted_right, WORDS, "abd, abc, b", 0),
    (reaches_target, GIVEN, "50 + 7 + 7", 1),
    (reaches_target, GIVEN, "The answer is 7 * (3 + 7) - 50 + 44.", 0),  # 44 is not given
    (reaches_target, GIVEN, "<answer>50 + (7 + 7) = 64</answer>", 1),
    (reaches_target, GIVEN, "50 + 7 + 7 = 65", 0),
    (reaches_target, GIVEN, "50 + 7 + 7 + 3 - 3", 0),  # 3 twice
    (reaches_target, GIVEN, "64", 0),
    (reaches_target, GIVEN, "50 \u00d7 7 / 7 + 7 + 7", 0),  # 7 four times
    (reaches_target, GIVEN, "50 + 3 * 7 - 7", 1),
    (reaches_target, ALL, "50 + 3 * 7 - 7", 1),
    (reaches_target, ALL, "50 + 7 + 7", 0),  # without the 3
    (reaches_target, GIVEN, "50 + 7 +", 0),
    (reaches_target, GIVEN, "50 / (7 - 7)", 0),
    (reaches_target, GIVEN, "__import__('os').getpid()", 0),
    (reaches_target, GIVEN, "50 ** 7", 0),
    (reaches_target, GIVEN, "50 + 14.0", 0),
    (reaches_target, GIVEN, "", 0),
    (reaches_target, {"numbers": [1, 3, 8], "target": 24, "use_all": False}, "8 / (1 / 3)", 1),  # exactly, by fractions
    (reaches_target, GIVEN, "(" * 300 + "50" + ")" * 300, 0),
]


@pytest.mark.parametrize("check, example, completion, right", BY_HAND)
def test_right_and_wrong_by_hand(check, example, completion, right):
    assert check(completion, example) == right


def in_order(question: str) -> str:
    """The answer of a list by Python's own sorted."""
    order, _, items = question.removeprefix("Sort in ").partition(" order: ")
    listed = items.split(", ")
    key = int if listed[0].isdigit() else str
    return ", ".join(sorted(listed, key=key, reverse=order == "descending"))


@pytest.mark.parametrize("name", NAMES)
def test_problems_are_right_and_the_held_out_ones_are_never_trained_on(name):
    run = compose([f"task={name}"])
    source = run.task.source
    train = [source.train[i] for i in range(200)]
    held_out = [source.held_out[i] for i in range(len(source.held_out))]
    assert train[:5] == [source.train[i] for i in range(5)] and len(source.train) == 1_000_000
    assert len(source.held_out) == 256 and len({e["question"] for e in train}) > 150
    for example in train:
        assert run.task.correct(example["completion"], example) == run.task.correct(example["answer"], example) == 1
        assert run.task.correct("The answer is 1234567.", example) == 0
        if name == "sorting":
            assert example["answer"] == in_order(example["question"])
    # a space so small that an overlap would show
    small = ["task.source.max_value=9", f"task.source.max_{'items' if name == 'sorting' else 'numbers'}=3"]
    few = compose([f"task={name}", *small])
    few = few.task.source
    assert not {few.train[i]["question"] for i in range(400)} & {few.held_out[i]["question"] for i in range(200)}
    assert held_out[0]["question"] not in {e["question"] for e in train}


def test_settings_that_leave_too_little_are_named():
    for kind, settings, says in (
        (Sorting, {"max_value": 5}, "max_value=5 leaves too few numbers for max_items=6; use at least 12"),
        (Sorting, {"min_items": 9}, "min_items=9, max_items=6: need 2 <= min_items <= max_items"),
        (Sorting, {"kind": "cats"}, "kind='cats'; it is numbers or words"),
        (Countdown, {"max_numbers": 9}, "max_numbers=9 must be at most 8"),
        (Sorting, {"num_train": 0}, "both must be at least 1"),
    ):
        with pytest.raises(ValueError) as failed:
            kind(**settings)
        assert says in str(failed.value)
