"""Prompts are asked by their pass rates: what is drawn, what is kept with a checkpoint, and that a run goes on with it."""

import json
import shutil
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest

from tunix_lite.checkpoint import Checkpoints
from tunix_lite.errors import ConfigError
from tunix_lite.runs.curriculum import RunCurriculum
from tunix_lite.runs.fingerprint import check_same_run
from tunix_lite.settings.compose import compose
from tunix_lite.tasks.curriculum import (
    CurriculumConfig,
    CurriculumState,
    draw_prompts,
    is_asked,
    pass_rate,
    record_groups,
    source_of_level,
    state_metrics,
)
from tunix_lite.tasks.processes import Processes
from tunix_lite.tasks.sources import Arithmetic, batch_at
from tunix_lite.train import train

ROWS = [{"question": str(i)} for i in range(10)]
DROP = CurriculumConfig(drop_at=0.9, min_completions=8)


def numbers(examples: list[dict]) -> list[int]:
    return [int(example["question"]) for example in examples]


def draws(settings, state, num: int, count: int = 4, rows: list[dict] = ROWS) -> list[list[int]]:
    """The numbers of the examples of so many batches, one after the other."""
    found = []
    for _ in range(num):
        drawn = draw_prompts(settings, state, rows, count, 0, "0.0")
        state = replace(state, positions={"0.0": drawn.position})
        found.append(numbers(drawn.examples))
    return found


def test_while_nothing_is_known_the_batches_are_those_without_a_curriculum():
    assert draws(DROP, CurriculumState(), 6, 5) == [numbers(batch_at(ROWS, 5, 0, step)) for step in range(6)]


def test_solved_prompts_are_dropped_and_nothing_else_changes():
    """7 of 8 is below 0.9, 9 of 10 is not, and 7 of 7 are too few completions to tell."""
    groups = [(ROWS[0], 7, 8), (ROWS[1], 9, 10), (ROWS[2], 7, 7), (ROWS[3], 4, 4), (ROWS[3], 4, 4)]
    state = record_groups(DROP, CurriculumState(), groups)
    assert sorted(state.rates.values()) == [(7, 7), (7, 8), (8, 8), (9, 10)]
    order = [i for step in range(5) for i in numbers(batch_at(ROWS, 4, 0, step))]
    kept = [i for i in order if i not in (1, 3)]
    assert [*chain(*draws(DROP, state, 4))] == kept[:16], "two whole epochs of the eight others"
    assert state_metrics(DROP, state, len(ROWS)) == {"curriculum/dropped": 0.2}


def test_a_batch_that_cannot_be_filled_takes_what_it_passed_over_and_counts_it():
    state = record_groups(DROP, CurriculumState(), [(row, 8, 8) for row in ROWS[2:]])
    drawn = draw_prompts(DROP, state, ROWS, 4, 0, "0.0")
    assert {0, 1} < set(numbers(drawn.examples)) and len(set(numbers(drawn.examples))) == 4
    assert (drawn.passed_over, drawn.refilled, drawn.position) == (8, 2, 10)
    few = draw_prompts(DROP, state, ROWS[8:], 4, 0, "0.0")
    assert sorted(numbers(few.examples)) == [8, 8, 9, 9] and few.refilled == 4


def test_prompts_outside_of_the_band_are_asked_a_share_of_the_times():
    """0, 0.1, 0.9 and 1 are outside: a quarter of 2,000 positions, within 4 standard deviations; each has its own."""
    settings = CurriculumConfig(band=(0.2, 0.8), outside=0.25)
    groups = [(row, right, 10) for row, right in zip(ROWS, (0, 1, 9, 10, 2, 5, 8))]
    state = record_groups(settings, CurriculumState(), groups)
    for row in ROWS[:4:3]:
        asked = sum(is_asked(settings, state, row, 0, position) for position in range(2000))
        assert abs(asked - 500) < 4 * np.sqrt(2000 * 0.25 * 0.75)
    for row in ROWS[4:]:
        assert all(is_asked(settings, state, row, 0, position) for position in range(50))
    assert [is_asked(settings, state, ROWS[1], 0, i) for i in range(50)] != [
        is_asked(settings, state, ROWS[1], 1, i) for i in range(50)
    ]
    assert draws(settings, state, 2, 7) == draws(settings, state, 2, 7), "by chance, and the same each time"


def test_a_level_ends_when_its_newest_prompts_are_solved():
    """Of the newest two: 1/2 and 1/2, then 1/2 and 2/2: 0.75. The last level does not end."""
    settings = CurriculumConfig(levels=({"max_terms": 5}, {"max_terms": 6}), rise_at=0.75, over_prompts=2)
    state = record_groups(settings, CurriculumState(), [(ROWS[0], 2, 2)])
    assert (state.level, state.recent, state.rates) == (0, ((2, 2),), {}), "two prompts are needed"
    state = record_groups(settings, CurriculumState(), [(ROWS[0], 1, 2), (ROWS[1], 1, 2)])
    assert state.level == 0 and pass_rate(state.recent) == 0.5
    state = record_groups(settings, state, [(ROWS[2], 2, 2)])
    assert (state.level, state.recent) == (1, ())
    state = record_groups(settings, state, [(ROWS[2], 2, 2), (ROWS[3], 2, 2)])
    assert state_metrics(settings, state, 10) == {"curriculum/level": 2, "curriculum/level_pass_rate": 1.0}
    source = source_of_level(Arithmetic(), settings, state.level)
    assert (source.min_terms, source.max_terms) == (4, 6)


def task_of(share=lambda value: [value]):
    processes = Processes(0, len(share(0)), share)
    source = SimpleNamespace(train=ROWS)
    text = SimpleNamespace(length=lambda example: 1)
    return SimpleTask(SimpleNamespace(source=source), text, processes)


class SimpleTask(SimpleNamespace):
    def __init__(self, config, text, processes):
        super().__init__(config=config, text=text, processes=processes, leaves_out=False)


def rollout_of(curriculum: RunCurriculum, task: SimpleTask, step: int) -> list[int]:
    """One rollout, in which even questions are solved; the numbers of its examples."""
    curriculum.before, curriculum.began = curriculum.state, step
    curriculum.groups.clear()
    curriculum.counts.clear()
    examples, _ = curriculum.batch(task, 4, 0)
    repeated = [example for example in examples for _ in range(4)]
    right = np.array([int(example["question"]) % 2 == 0 for example in repeated])
    curriculum.record(SimpleNamespace(examples=repeated, correct=right, dropped=np.zeros(16, bool), num_generations=4))
    curriculum.end(print)
    return numbers(examples)


def test_the_state_of_any_step_gives_the_prompts_that_follow():
    """Through JSON, as a checkpoint has it; a rollout that was cut short leaves the state before it."""
    settings = CurriculumConfig(drop_at=0.9, min_completions=4)
    straight = RunCurriculum(settings, CurriculumState(), CurriculumState())
    asked, states = [], []
    for step in range(6):
        asked.append(rollout_of(straight, task_of(), step))
        before = states[-1] if states else CurriculumState().as_json()
        assert json.dumps(straight.at(step)) == json.dumps(before)
        states.append(json.loads(json.dumps(straight.at(step + 1))))
    assert asked[:2] == [numbers(batch_at(ROWS, 4, 0, step)) for step in (0, 1)], "of one epoch"
    assert [i % 2 for i in asked[4] + asked[5]] == [1] * 8, "the even ones are solved, and dropped"
    for step in (1, 3, 5):
        state = CurriculumState.from_json(states[step - 1], 0)
        again = RunCurriculum(settings, state, state)
        assert [rollout_of(again, task_of(), s) for s in range(step, 6)] == asked[step:]


def test_processes_that_know_other_pass_rates_stop_the_run():
    curriculum = RunCurriculum(DROP, CurriculumState(), CurriculumState())
    same = task_of(lambda value: [value, value])
    assert rollout_of(curriculum, same, 0) == numbers(batch_at(ROWS, 4, 0, 0))
    other = task_of(lambda value: [value, ["another", None]])
    with pytest.raises(ValueError, match="process 1 took other examples than process 0"):
        curriculum.batch(other, 4, 0)


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"level": -1},
        {"recent": [[1]]},
        {"recent": [[1, 2.5]]},
        {"rates": {"a": ["1", 2]}},
        {"positions": [1]},
        {"level": 2},
    ],
    ids=str,
)
def test_a_damaged_state_is_refused(found):
    whole = {"level": 0, "recent": [[1, 2]], "positions": {"0.0": 4}, "rates": {"ab": [1, 2]}}
    assert CurriculumState.from_json(whole, 2).rates == {"ab": (1, 2)}
    with pytest.raises(ValueError, match="not the state of a curriculum|level 3 of a curriculum with 2 levels"):
        CurriculumState.from_json({**whole, **found} if found else {}, 2)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["curriculum.drop_at=0"], "curriculum: drop_at=0.0 is a pass rate above 0, at most 1"),
        (["curriculum.band=[0.8,0.2]"], r"curriculum: band=\[0.8, 0.2\]: two pass rates, such as"),
        (["curriculum.outside=2"], "curriculum: outside=2.0 is a share"),
        (["curriculum.rise_at=0"], "curriculum: rise_at=0.0 is a pass rate"),
        (["curriculum.outside=0.5"], "outside=0.5 would change nothing without band"),
        (["curriculum.min_completions=4"], "min_completions=4 would change nothing without drop_at or band"),
        (["curriculum.drop_at=0.9", "curriculum.rise_at=0.5"], "rise_at=0.5 would change nothing without levels"),
        (["curriculum.over_prompts=0"], "curriculum: over_prompts=0 must be at least 1"),
        (
            ["curriculum.drop_at=0.9", "algorithm=sft"],
            "pass rates are of completions, and this algorithm learns from demon",
        ),
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
    "curriculum.levels=[{min_terms: 2, max_terms: 2, operators: [+]}, {max_value: 9}]",
    "curriculum.drop_at=0.5",
    "curriculum.min_completions=2",
    "curriculum.over_prompts=4",
    "curriculum.rise_at=0.01",
]


@pytest.mark.wide
def test_a_run_goes_on_with_the_curriculum_of_its_checkpoint(tmp_path):
    """Killed after its second step: then the same prompts and numbers as a run that was never stopped."""
    run = compose(RUN)
    train(run, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "killed", symlinks=True)
    shutil.rmtree(tmp_path / "killed" / "checkpoints" / "4")
    known = Checkpoints(tmp_path / "killed" / "checkpoints").curriculum(2)
    assert known["level"] == 1 and known["rates"], "the first level ended before the checkpoint, or this shows little"
    train(run, tmp_path / "killed")

    rows = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "killed")]
    whole, killed = ([json.loads(line) for line in lines] for lines in rows)
    assert [row["curriculum/level"] for row in whole][1:] == [2, 2, 2] and {
        "curriculum/dropped",
        "curriculum/refilled",
    } < {*whole[0]}
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
