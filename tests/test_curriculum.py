"""Prompts are asked by their pass rates: what is drawn, what is kept with a checkpoint, and that a run goes on with it."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from tunix_lite.checkpoint import Checkpoints
from tunix_lite.errors import ConfigError
from tunix_lite.runs.fingerprint import check_same_run
from tunix_lite.settings.compose import compose
from tunix_lite.tasks.curriculum import Curriculum, CurriculumConfig, CurriculumState, draw_prompts
from tunix_lite.tasks.processes import Processes
from tunix_lite.tasks.sources import batch_at, digest
from tunix_lite.train import train

ROWS = [{"question": str(i)} for i in range(10)]
DROP = CurriculumConfig(drop_at=0.9, min_completions=8)


def numbers(examples: list[dict]) -> list[int]:
    return [int(example["question"]) for example in examples]


def rates_of(*rates: tuple[int, int]) -> dict:
    """What is known of the first rows: (right, all) completions."""
    return {digest(row): rate for row, rate in zip(ROWS, rates)}


def draws(settings, rates, num: int, count: int = 4) -> list[list[int]]:
    """The numbers of the examples of so many batches, one after the other."""
    found, position = [], 0
    for _ in range(num):
        drawn = draw_prompts(settings, rates, position, ROWS, count, 0)
        position = drawn.position
        found.append(numbers(drawn.examples))
    return found


def test_while_nothing_is_known_the_batches_are_those_without_a_curriculum():
    assert draws(DROP, {}, 6, 5) == [numbers(batch_at(ROWS, 5, 0, step)) for step in range(6)]


def test_solved_prompts_are_dropped_and_nothing_else_changes():
    """7 of 8 is below 0.9, 9 of 10 is not, and 7 of 7 are too few completions to tell."""
    order = [i for step in range(5) for i in numbers(batch_at(ROWS, 4, 0, step))]
    kept = [i for i in order if i not in (1, 3)]
    found = draws(DROP, rates_of((7, 8), (9, 10), (7, 7), (8, 8)), 4)
    assert [i for batch in found for i in batch] == kept[:16], "two whole epochs of the eight others"


def test_a_batch_that_cannot_be_filled_takes_what_it_passed_over_and_counts_it():
    solved = rates_of((0, 0), (0, 0), *[(8, 8)] * 8)
    drawn = draw_prompts(DROP, solved, 0, ROWS, 4, 0)
    assert {0, 1} < set(numbers(drawn.examples)) and len(set(numbers(drawn.examples))) == 4
    assert (drawn.passed_over, drawn.refilled, drawn.position) == (8, 2, 10)
    few = draw_prompts(DROP, solved, 0, ROWS[8:], 4, 0)
    assert sorted(numbers(few.examples)) == [8, 8, 9, 9] and few.refilled == 4


def test_prompts_outside_of_the_band_are_asked_a_share_of_the_times():
    """The first is outside: in a quarter of some 50 epochs it is drawn, within 3 standard deviations; by chance, and the
    same each time."""
    settings = CurriculumConfig(band=(0.2, 0.8), outside=0.25)
    rates = rates_of((1, 10), (2, 10), (8, 10))
    found = draws(settings, rates, 150, 3)
    counts = np.bincount(np.ravel(found), minlength=10)
    epochs = counts[1:].mean()
    assert abs(counts[1:] - epochs).max() < 3
    assert abs(counts[0] - epochs / 4) < 3 * np.sqrt(epochs * 0.25 * 0.75)
    assert found[:20] == draws(settings, rates, 20, 3)


def task_of(share=lambda value: [value]):
    config = SimpleNamespace(source=SimpleNamespace(train=ROWS))
    return SimpleNamespace(config=config, processes=Processes(0, len(share(0)), share), leaves_out=False)


def rollout_of(curriculum: Curriculum, task: SimpleNamespace, step: int) -> list[int]:
    """One rollout, in which even questions are solved; the numbers of its examples."""
    curriculum.before, curriculum.began = curriculum.state, step
    curriculum.groups.clear()
    curriculum.draws.clear()
    examples, _ = curriculum.batch(task, 4, 0)
    repeated = [example for example in examples for _ in range(4)]
    right = np.array([int(example["question"]) % 2 == 0 for example in repeated])
    curriculum.record(SimpleNamespace(examples=repeated, correct=right, dropped=np.zeros(16, bool), num_generations=4))
    metrics = curriculum.end()
    solved = [rate for rate in curriculum.state.rates.values() if curriculum.settings.drops(*rate)]
    assert metrics["curriculum/dropped"] == len(solved) / 10
    return numbers(examples)


def test_the_state_of_any_step_gives_the_prompts_that_follow():
    """Through JSON, as a checkpoint has it; a rollout that was cut short leaves the state before it."""
    settings = CurriculumConfig(drop_at=0.9, min_completions=4)
    straight = Curriculum(settings, CurriculumState())
    asked, states = [], [{"positions": {}, "rates": {}}]
    for step in range(6):
        asked.append(rollout_of(straight, task_of(), step))
        assert json.loads(json.dumps(straight.at(step))) == states[-1]
        states.append(json.loads(json.dumps(straight.at(step + 1))))
    assert asked[:2] == [numbers(batch_at(ROWS, 4, 0, step)) for step in (0, 1)], "of one epoch"
    assert [i % 2 for i in asked[4] + asked[5]] == [1] * 8, "the even ones are solved, and dropped"
    for step in (1, 3, 5):
        again = Curriculum(settings, CurriculumState.from_json(states[step]))
        assert [rollout_of(again, task_of(), s) for s in range(step, 6)] == asked[step:]


def test_processes_that_know_other_pass_rates_stop_the_run():
    curriculum = Curriculum(DROP, CurriculumState())
    same = task_of(lambda value: [value, value])
    assert rollout_of(curriculum, same, 0) == numbers(batch_at(ROWS, 4, 0, 0))
    other = task_of(lambda value: [value, ["another", None, False]])
    with pytest.raises(ValueError, match="process 1 took other examples than process 0"):
        curriculum.batch(other, 4, 0)


@pytest.mark.parametrize(
    "found",
    [{"rates": None}, {"rates": {"a": ["1", 2]}}, {"rates": {"a": [1]}}, {"positions": [1]}, {"positions": {"0": -1}}],
    ids=str,
)
def test_a_damaged_state_is_refused(found):
    whole = {"positions": {"0": 4}, "rates": {"ab": [1, 2]}}
    assert CurriculumState.from_json(whole).rates == {"ab": (1, 2)}
    with pytest.raises(ValueError, match="not the state of a curriculum"):
        CurriculumState.from_json(whole | found)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["curriculum.drop_at=0"], "curriculum: drop_at=0.0 is a pass rate above 0, at most 1"),
        (["curriculum.band=[0.8,0.2]"], r"curriculum: band=\[0.8, 0.2\]: two pass rates, such as"),
        (["curriculum.outside=2"], "curriculum: outside=2.0 is a share"),
        (["curriculum.min_completions=0"], "curriculum: min_completions=0 must be at least 1"),
        (["curriculum.outside=0.5"], "outside=0.5 would change nothing without band"),
        (["curriculum.min_completions=4"], "min_completions=4 would change nothing without drop_at or band"),
        (["curriculum.drop_at=0.9", "algorithm=sft"], "are of completions, and this algorithm learns from demonstr"),
        (["curriculum.levels=[{}]"], "curriculum.levels: .*train a run for each level"),
    ],
)
def test_a_wrong_curriculum_is_named(overrides, message):
    with pytest.raises(ConfigError, match=message):
        compose(overrides)


RUN = [
    "model.mesh_shape=[[1,1],[fsdp,tp]]",
    "training.max_steps=4",
    "training.prompts_per_step=4",
    "training.save_interval_steps=2",
    "algorithm.num_generations=4",
    "generation.max_new_tokens=12",
    "evaluation.num_examples=0",
    "tracking.samples_interval_steps=1",
    "tracking.tensorboard=false",
    "rewards.workers=0",
    "task.source.num_train=12",
    "task.source.max_terms=2",
    "task.source.min_terms=2",
    "curriculum.drop_at=0.5",
    "curriculum.min_completions=2",
]


@pytest.mark.wide
def test_a_run_goes_on_with_the_curriculum_of_its_checkpoint(tmp_path):
    """Killed after its second step: then the same prompts and numbers as a run that was never stopped."""
    run = compose(RUN)
    train(run, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "killed", symlinks=True)
    shutil.rmtree(tmp_path / "killed" / "checkpoints" / "4")
    known = Checkpoints(tmp_path / "killed" / "checkpoints").curriculum(2)
    assert any(right for right, _ in known["rates"].values()), "something was solved, or this shows little"
    train(run, tmp_path / "killed")

    rows = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "killed")]
    whole, killed = ([json.loads(line) for line in lines] for lines in rows)
    assert {"curriculum/dropped", "curriculum/refilled"} < {*whole[0]}
    machine = ("time/", "perf/", "memory/")
    assert [{k: x for k, x in row.items() if not k.startswith(machine)} for row in killed] == [
        {k: x for k, x in row.items() if not k.startswith(machine)} for row in whole
    ]
    for step in (3, 4):
        name = f"samples/step_{step:06d}.jsonl"
        assert (tmp_path / "killed" / name).read_text() == (tmp_path / "whole" / name).read_text()
    assert "curriculum" in (tmp_path / "whole" / "train.log").read_text()
    kept = json.loads((tmp_path / "whole" / "fingerprint.json").read_text())
    with pytest.raises(ValueError, match="curriculum"):
        check_same_run({key: x for key, x in kept.items() if key != "curriculum"}, kept, tmp_path, False)
