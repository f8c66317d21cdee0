"""A teacher that reads the expected answer: alignment by hand, and a wrong column before anything is compiled."""

import numpy as np
import pytest
from conftest import rows_of
from model_checks import write_with_tokenizer
from test_held_out_loss import SMALL
from test_preferences import QUICK

from tunix_lite.algorithms.distill import after_prompts
from tunix_lite.basics.errors import ConfigError
from tunix_lite.basics.types import Batch
from tunix_lite.models.families import GEMMA3
from tunix_lite.runs.setup import find_parts
from tunix_lite.settings.compose import compose
from tunix_lite.train import train

TEACHER = ["algorithm=distill", "algorithm.teacher.storage=fp32"]


def test_completions_stand_after_other_prompts_by_hand():
    tokens = np.array([[0, 5, 7, 8], [5, 6, 9, 0]])
    mask = np.array([[False, True, True, True], [True, True, True, False]])
    weight = np.array([[0, 0, 0.25, 0.25], [0, 0, 0.5, 0]])
    found = after_prompts(Batch(tokens, mask, weight), 2, [[1, 2, 3], [4]])
    np.testing.assert_array_equal(found.tokens, [[1, 2, 3, 7, 8], [0, 0, 4, 9, 0]])
    np.testing.assert_array_equal(found.token_mask, [[1, 1, 1, 1, 1], [0, 0, 1, 1, 0]])
    np.testing.assert_array_equal(found.loss_weight, [[0, 0, 0, 0.25, 0.25], [0, 0, 0, 0.5, 0]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm.teacher.prompt='{question} is {result}'"], "algorithm.teacher: .*result"),
        (["algorithm.teacher.prompt='{question} is {answer}'", "algorithm.teacher.max_prompt_length=5"], "more than 5"),
        (["algorithm.teacher.weights=/no/teacher"], "^algorithm.teacher.weights: /no/teacher is not a folder"),
        (["generation.top_k=512"], "generation: top_k=512 would change nothing: it leaves no token out of vocab"),
    ],
)
def test_a_wrong_demonstration_or_teacher_is_refused_before_anything_is_compiled(settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        find_parts(compose([*TEACHER, *settings, *QUICK]))
    assert "\n" not in str(error.value)


def test_the_teacher_reads_the_answer_of_each_example():
    parts = find_parts(compose([*TEACHER, *QUICK]))
    examples = [{"question": "1 + 2", "answer": "3"}, {"question": "4 + 5", "answer": "9"}]
    found = parts.task.prompts_with(examples, "{question} is {answer}", 44)
    read = [parts.model.tokenizer.decode(tokens) for tokens in found]
    assert ["1 + 2 is 3" in read[0], "4 + 5 is 9" in read[1]] == [True, True]


def test_the_prompt_of_the_policy_as_demonstration_changes_nothing(tmp_path):
    """The same weights with the same message, in longer rows: nothing to learn."""
    folder = write_with_tokenizer(tmp_path / "model", SMALL, GEMMA3)
    weights = [f"model.weights={folder}", f"algorithm.teacher.weights={folder}"]
    asked = ["algorithm.teacher.prompt='What is {question}?'", "algorithm.teacher.max_prompt_length=44"]
    more = ["algorithm.divergence=reverse", "training.max_steps=1", "training.packing=prefix"]
    train(compose([*TEACHER, *weights, *asked, *more, *QUICK]), tmp_path / "run")
    (row,) = rows_of(tmp_path / "run")
    assert abs(row["train/teacher_divergence"]) <= 1e-6
