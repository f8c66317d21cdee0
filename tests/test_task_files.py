"""Tasks of files of one's own, from the command line alone."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tunix_lite.basics.errors import ConfigError
from tunix_lite.runs.setup import check_fields, check_in_memory, prepare
from tunix_lite.settings.compose import compose
from tunix_lite.tasks.check_rows import check_all_rows, held_out_in_training
from tunix_lite.tasks.row_files import Rows
from tunix_lite.tasks.sources import FileRows
from tunix_lite.tasks.task import Task
from tunix_lite.tracking.rundir import RunDir

REWARD = "task.reward=tunix_lite.rewards.math.correct"


def near(completion, example) -> float:
    return float(completion.strip() == example["answer"])


def words(config: list[str], tokenizer=None, **settings) -> Task:
    run = compose([*config, "evaluation.num_examples=4"])
    return Task(run.task, tokenizer, 48, 16, **settings)


def json_lines(file: Path, rows: list) -> Path:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def test_a_file_of_ones_own_is_a_task_in_one_command(tmp_path):
    """Newcomer.md 5: a prompt with columns, a system prompt, a reward by its path; a small held-out file is used whole."""
    rows = [{"word": f"w{i}", "answer": str(i), "hint": "h"} for i in range(20)]
    json_lines(tmp_path / "train.jsonl", rows)
    json_lines(tmp_path / "held_out.jsonl", [{"word": "x", "answer": "3", "hint": ""}] * 3)
    files = [f"task.{name}={tmp_path / name}.jsonl" for name in ("train", "held_out")]
    texts = ["task.prompt='Spell {word}!'", "task.system='Be kind.'", "task.reward=test_task_files.near"]
    sizes = ["training.prompts_per_step=2", "generation.max_prompt_length=48"]
    run = compose(["task=jsonl", *files, *texts, *sizes])
    assert list(run.task.rewards) == ["near"] and run.task.correct is near
    assert run.task.rewards["near"].fn("3 ", rows[3]) == 1 and run.task.extract(" 3\n") == "3"
    parts = prepare(run, RunDir(tmp_path / "run"))
    said = dict(parts.summary(RunDir(tmp_path / "run"))[1])["data"]
    assert said == (
        "20 examples to train on, 3 held out; all 3 held-out examples are evaluated (evaluation.num_examples=256)"
    )
    text = parts.model.tokenizer.decode(parts.task.prompts(rows[:1])[0], skip_special=False)
    assert text.endswith("<start_of_turn>user\nSpell w0!<end_of_turn>\n<start_of_turn>model\n") and "Be kind." in text
    assert [e["hint"] for e in parts.task.held_out(256)] == [""] * 3


def test_without_a_held_out_file_every_tenth_row_is_held_out(tmp_path, tokenizer):
    file = json_lines(tmp_path / "rows.jsonl", [{"prompt": str(i), "answer": "1"} for i in range(25)])
    task = words(["task=jsonl", f"task.train={file}", REWARD], tokenizer)
    assert [e["prompt"] for e in task.config.source.held_out] == ["9", "19"]
    assert len(task.config.source.train) == 23 and task.config.source.train[9].place.endswith("line 11")
    assert held_out_in_training(task) == 0, "before it was looked for, and afterwards"
    assert check_all_rows(task, False, 2) == "23 examples to train on, 2 held out"
    assert held_out_in_training(task) == 0


BAD = ["{oops", {"answer": "1"}, "[1]", {"question": "\ud800"}]


def test_malformed_rows_are_left_out_and_counted_or_refused(tmp_path, tokenizer):
    good = [{"question": f"{i} + 1", "answer": str(i + 1)} for i in range(4)]
    train = json_lines(tmp_path / "train.jsonl", [good[0], *BAD, *good[1:]])
    held_out = json_lines(tmp_path / "held_out.jsonl", [{"question": "9", "answer": "9"}])
    given = ["task=jsonl", f"task.train={train}", f"task.held_out={held_out}", "task.prompt='{question}?'", REWARD]
    task = words([*given, "task.on_error=skip"], tokenizer)
    assert [*task.config.source.train] == good and task.config.source.train[1].place.endswith("line 6")
    assert check_all_rows(task, False, 1) == (
        f"4 examples to train on, 1 held out; 4 malformed rows of {train} are left out, the first: {train}, line 2: not "
        "JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))"
    )
    for bad, says in zip(BAD, ("not JSON", "task.prompt names 'question', but", "not an object", "half of a char")):
        json_lines(train, [good[0], bad])
        with pytest.raises(ValueError, match=rf"train.jsonl, line 2: {says}"):
            _ = FileRows(str(train), None, "raise", task.config.template).train
    with pytest.raises(ValueError, match="no.jsonl is not a file"):
        _ = FileRows(str(tmp_path / "no.jsonl"), None, "raise", task.config.template).train
    json_lines(train, BAD)
    with pytest.raises(ValueError, match="holds no examples; all 4 rows were left out, the first: .*line 1: not JSON"):
        _ = FileRows(str(train), None, "skip", task.config.template).train


@pytest.mark.parametrize(
    "overrides, says",
    [
        ([], "task: train is missing: give task.train=FILE"),
        (["task.train=a"], "task: reward is missing: give task.reward=module.function"),
        (["task.train=a", REWARD, "task.prompt=''"], "task: prompt='' is the same for every example; write"),
        (["task.train=a", "task.reward=near"], "task.reward._target_: 'near' has no module; write module.near, as in"),
        (
            ["task.train=a", REWARD, "+task.rewards.correct={fn: tunix_lite.rewards.text.brevity}"],
            "task: reward and rewards.correct have the same name",
        ),
    ],
)
def test_a_wrong_task_of_files_is_named(overrides, says):
    with pytest.raises(ConfigError) as failed:
        compose(["task=jsonl", *overrides])
    assert says in str(failed.value)


@pytest.mark.parametrize(
    "learned, where, shown",
    [((), "word", 4), (("completion",), "completion", 2), (("chosen", "rejected"), "rejected", 2)],
)
def test_a_row_that_needs_a_token_without_an_embedding_is_named_at_the_start(
    tmp_path, tokenizer, learned, where, shown
):
    """JAX would take the last embedding there is, when the turn of the row comes, perhaps after hours."""
    beyond = max(i for i in tokenizer.vocabulary.values() if tokenizer.decode([i]).isalnum())
    rows = [{"word": "a", "completion": "b", "chosen": "b", "rejected": "c", "answer": "1"} for _ in range(6)]
    rows[shown - 1 if shown == 2 else 3][where] = tokenizer.decode([beyond])
    for name in ("train", "held_out"):
        json_lines(tmp_path / f"{name}.jsonl", rows if (name == "train") == (shown == 2) else rows[:1])
    paths = [f"task.{name}={tmp_path / name}.jsonl" for name in ("train", "held_out")]
    config = ["task=jsonl", *paths, "task.prompt={word}", REWARD]
    check_in_memory(words(config, tokenizer), learned)
    with pytest.raises(
        ValueError, match=rf"jsonl, line {shown}: a text holds .*, token {beyond} .* for {beyond} tokens"
    ):
        check_in_memory(words(config, replace(tokenizer, vocab_size=beyond)), learned)


def test_the_mark_of_a_windows_editor_is_no_part_of_the_first_row(tmp_path):
    (tmp_path / "marked.jsonl").write_bytes(b'\xef\xbb\xbf{"q": "1"}\n{"q": "2"}\n')
    assert list(Rows(str(tmp_path / "marked.jsonl"))) == [{"q": "1"}, {"q": "2"}]


@pytest.mark.parametrize(
    "reward, says",
    [
        (
            "{_target_: tunix_lite.rewards.similarity.RougeL, field: no}",
            "rewards.t: field=no, and an example has prompt",
        ),
        (
            "{_target_: tunix_lite.rewards.text.Tags}, group: true",
            "takes one completion; set task.rewards.t.group=false",
        ),
        ("{_target_: faulty_rewards.ranked}, group: true", None),
        ("{_target_: tunix_lite.rewards.similarity.RougeL, field: answer}", None),
    ],
)
def test_a_reward_that_could_not_be_called_is_refused_before_anything_is_compiled(reward, says):
    run = compose([f"+task.rewards.t={{fn: {reward}}}"])
    examples = [{"prompt": "1"}, {"prompt": "2", "answer": "3"}]
    with pytest.raises(ValueError, match=says) if says else contextlib.nullcontext():
        check_fields(run.task.rewards, examples)
