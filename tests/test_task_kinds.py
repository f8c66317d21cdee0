"""GSM8K, conversations, preferences and reasoning-gym as tasks, on files that the tests make."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tunix_lite.algorithms.sft import SFT
from tunix_lite.commands.program import compose
from tunix_lite.errors import ConfigError
from tunix_lite.models import hub
from tunix_lite.models.source import BUNDLED
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.rewards.pool import check_portable
from tunix_lite.runs.setup import prepare
from tunix_lite.tasks.chat import like_answer, same_as_answer
from tunix_lite.tasks.check_rows import check_all_rows, held_out_in_training
from tunix_lite.tasks.gsm8k import flexible, strict
from tunix_lite.tasks.task import Task
from tunix_lite.tracking.rundir import RunDir


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(BUNDLED)


def written(file: Path, rows: list) -> Path:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def task_of(overrides: list[str], tokenizer) -> Task:
    return Task(compose(overrides).task, tokenizer, 256, 128)


# ---- GSM8K

NATALIA = {
    "question": "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many altogether?",
    "answer": "In May she sold 48/2 = <<48/2=24>>24.\nAltogether 48+24 = <<48+24=72>>72.\n#### 72",
}


def test_gsm8k_reads_the_number_and_the_solution(tmp_path, tokenizer):
    large = {"question": "How much?", "answer": "#### 1,024"}
    file = written(tmp_path / "train.jsonl", [NATALIA, large])
    task = task_of(["task=gsm8k", f"task.source.train_file={file}", f"task.source.held_out_file={file}"], tokenizer)
    first, second = task.config.source.train
    assert (first["answer"], second["answer"]) == ("72", "1024")
    assert first["completion"] == "In May she sold 48/2 = 24.\nAltogether 48+24 = 72.\n#### 72"
    assert task.config.correct(first["completion"], first) == strict(first["completion"], first) == 1
    assert task.text.ask(second) == "How much?\nThink step by step, and end with #### and the number."
    assert check_all_rows(task, True, 2).startswith("2 examples to train on, 2 held out; 2 of the held-out prompts are")
    assert held_out_in_training(task) == 2
    assert task.text.place(second).endswith("train.jsonl, line 2: ")
    for row, says in (
        ({"question": "x", "answer": "72"}, "line 1: the answer ends in '72', not in `#### 72`"),
        ({"question": "x", "answer": "#### many"}, "not in `#### 72`"),
        ({"problem": "x"}, "a row of GSM8K has a text `question`; this one has problem"),
    ):
        bad = written(tmp_path / "bad.jsonl", [row])
        with pytest.raises(ValueError, match=says):
            _ = replace(task.config.source, train_file=str(bad)).train


@pytest.mark.parametrize(
    "completion, is_strict, is_flexible",
    [
        ("48 + 24 = 72\n#### 72", 1, 1),
        ("#### 72.", 1, 1),
        ("#### 72.00", 1, 1),
        ("#### -72", 0, 0),
        ("#### 7,2", 0, 0),  # no thousands separator stands there
        ("####72", 0, 1),  # the format wants a space
        ("The answer is 72.", 0, 1),
        ("she sold $72", 0, 1),
        ("72 altogether, 24 of them in May", 0, 0),  # the last number counts
        ("#### 24\n#### 72", 0, 0),  # the first mark counts
        ("#### 72\nNext: 5 apples", 1, 1),
        ("", 0, 0),
        ("seventy-two", 0, 0),
    ],
)
def test_gsm8k_is_scored_strictly_or_flexibly(completion, is_strict, is_flexible):
    example = {"answer": "72"}
    assert (strict(completion, example), flexible(completion, example)) == (is_strict, is_flexible)


def test_gsm8k_comes_from_the_hub_where_no_file_is_given(tmp_path, monkeypatch):
    asked = []

    def folder(name, patterns):
        asked.append((name, patterns))
        return tmp_path

    monkeypatch.setattr("tunix_lite.tasks.gsm8k.dataset_folder", folder)
    source = compose(["task=gsm8k"]).task.source
    with pytest.raises(ValueError, match=r"openai/gsm8k has 0 files main/train-\*.parquet, not one; give task.source"):
        _ = source.train
    assert asked == [("openai/gsm8k", ("main/train-*.parquet", "main/test-*.parquet"))]
    (tmp_path / "main").mkdir()
    if importlib.util.find_spec("pyarrow"):
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist([NATALIA]), tmp_path / "main" / "test-00000-of-00001.parquet")
        assert source.held_out[0]["answer"] == "72"


def test_a_data_set_is_asked_of_the_hub_as_one(tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked = []

    def snapshot_download(**wanted):
        asked.append(wanted)
        return tmp_path

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert hub.dataset_folder("org/data@v1", ("main/*.parquet",)) == tmp_path
    assert asked[0]["repo_type"] == "dataset" and asked[0]["revision"] == "v1" and asked[0]["local_files_only"]
    assert asked[1]["allow_patterns"] == ["main/*.parquet"] and "local_files_only" not in asked[1]  # it was not whole


# ---- conversations


def chat_of(*texts: str) -> dict:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


def test_sft_learns_from_all_turns_of_the_assistant_or_from_the_last(tmp_path, tokenizer):
    file = written(tmp_path / "chats.jsonl", [chat_of("hi", "ho", "1 + 1?", "2"), chat_of("9?", "nine")])
    given = ["task=chat", f"task.train={file}", f"task.held_out={file}"]
    learned = {}
    for turns in ("all", "last"):
        task = task_of([*given, f"task.learned_turns={turns}"], tokenizer)
        assert check_all_rows(task, True, 2).startswith("2 examples to train on")
        batch, _, _ = SFT().collect(None, task, None, list(task.config.source.train), None)
        learned[turns] = [
            tokenizer.decode(row[weight > 0], skip_special=False)
            for row, weight in zip(batch.tokens, batch.loss_weight)
        ]
        np.testing.assert_allclose(batch.loss_weight.sum(), 1, atol=1e-6)
    assert learned == {
        "all": ["ho<end_of_turn>2<end_of_turn>", "nine<end_of_turn>"],
        "last": ["2<end_of_turn>", "nine<end_of_turn>"],
    }


@pytest.mark.parametrize("algorithm, task, rows", [("sft", "chat", "chats"), ("dpo", "preferences", "pairs")])
def test_a_run_on_conversations_or_pairs_is_ready_to_start(tmp_path, algorithm, task, rows):
    made = {"chats": [chat_of("hi", "ho", "1?", "2")], "pairs": [{"prompt": "1?", "chosen": "2", "rejected": "3"}]}
    file = written(tmp_path / "rows.jsonl", made[rows] * 4)
    given = [f"algorithm={algorithm}", f"task={task}", f"task.train={file}", f"task.held_out={file}"]
    parts = prepare(compose([*given, "training.prompts_per_step=4"]), RunDir(tmp_path / "run"))
    assert parts.data.startswith("4 examples to train on, 4 held out; 4 of the held-out prompts are training prompts")


def test_a_conversation_is_evaluated_by_its_answer():
    example = chat_of("hi", "good morning to you", "bye", "see you")
    assert like_answer("good morning", example) == pytest.approx(2 * 1 * 0.5 / 1.5)  # precision 1, recall 2 of 4
    assert like_answer("see you", example, turn="last") == 1 and same_as_answer(" see you\n", example, turn="last") == 1
    assert same_as_answer("see you", example) == 0
    with pytest.raises(ValueError, match="no assistant turn"):
        like_answer("hi", chat_of("hi"))


# ---- preferences

PAIR = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}


def test_preferences_are_pairs_of_answers_to_one_prompt(tmp_path, tokenizer):
    same_prompt = [{"role": "user", "content": "3 + 3?"}]
    as_chats = {
        "chosen": [*same_prompt, {"role": "assistant", "content": "6"}],
        "rejected": [*same_prompt, {"role": "assistant", "content": "7"}],
    }
    file = written(tmp_path / "pairs.jsonl", [PAIR, as_chats])
    task = task_of(["task=preferences", f"task.train={file}", f"task.held_out={file}"], tokenizer)
    pairs = list(task.config.source.train)
    assert [(pair["chosen"], pair["rejected"], pair["completion"]) for pair in pairs] == [
        ("4", "5", "4"),
        ("6", "7", "6"),
    ]
    assert [task.text.ask(pair) for pair in pairs] == ["2 + 2?", "3 + 3?"]
    assert task.config.correct("4 ", pairs[0]) == 1 and task.config.correct("5", pairs[0]) == 0
    assert check_all_rows(task, True, 2).startswith("2 examples to train on")
    assert task.config.source.train[0] is pairs[0] and task.text.place(pairs[1]).endswith("line 2: ")


@pytest.mark.parametrize(
    "row, says",
    [
        ({"prompt": "x", "chosen": "a"}, "a preference needs `rejected`; this one has prompt, chosen"),
        ({**PAIR, "rejected": "4"}, "`chosen` and `rejected` are the same: '4'"),
        (
            {"chosen": "a", "rejected": "b"},
            "a preference needs a `prompt`, or `chosen` and `rejected` as conversations",
        ),
        ({**PAIR, "chosen": [{"role": "user", "content": "a"}]}, "`chosen` does not end with the assistant"),
        ({**PAIR, "chosen": 4}, "`messages` is 4; it is a list"),
    ],
)
def test_a_row_that_is_no_preference_is_named(tmp_path, row, says):
    file = written(tmp_path / "pairs.jsonl", [PAIR, row])
    given = ["task=preferences", f"task.train={file}", f"task.held_out={file}"]
    with pytest.raises(ValueError, match=f"pairs.jsonl, line 2: {says}"):
        _ = compose(given).task.source.train
    kept = compose([*given, "task.on_error=skip"]).task.source.train
    assert len(kept) == 1 and kept.skipped == 1 and "line 2" in kept.first_skipped


# ---- reasoning-gym


def test_without_reasoning_gym_one_line_says_what_to_install(tmp_path):
    if importlib.util.find_spec("reasoning_gym"):
        pytest.skip("reasoning-gym is installed")
    run = compose(["task=reasoning_gym"])
    with pytest.raises(ConfigError, match=r"^task: task=reasoning_gym needs .*pip install 'tunix_lite\[gym\]'"):
        prepare(run, RunDir(tmp_path))


def test_tasks_of_reasoning_gym_are_mixed_and_verified_by_themselves():
    pytest.importorskip("reasoning_gym")
    names = ["basic_arithmetic", "leg_counting", "countdown"]
    task = compose(
        [
            "task=reasoning_gym",
            f"task.source.tasks=[{','.join(names)}]",
            "task.source.weights=[6,3,1]",
            "+task.source.settings.basic_arithmetic={min_terms: 2, max_terms: 2}",
        ]
    ).task
    check_portable(task.functions())
    train = [task.source.train[i] for i in range(400)]
    held_out = [task.source.held_out[i] for i in range(100)]
    counts = [sum(e["task"] == name for e in train) for name in names]
    assert abs(counts[0] - 240) < 40 and abs(counts[1] - 120) < 40 and abs(counts[2] - 40) < 25
    assert not {e["question"] for e in train} & {e["question"] for e in held_out}
    assert train[:3] == [task.source.train[i] for i in range(3)] and json.dumps(train)
    for example in train[:60]:
        assert task.correct(example["completion"], example) == 1
        assert task.correct("<answer>no</answer>", example) == 0
    simple = next(e for e in train if e["task"] == "basic_arithmetic")
    assert len([w for w in simple["question"].split() if w.strip(".").isdigit()]) <= 2
    for override, says in (
        ("task.source.tasks=[nothing]", "reasoning-gym refuses nothing"),
        ("task.source.weights=[1,2]", r"weights=\[1.0, 2.0\]: one above 0 for each of 1 tasks"),
        ("+task.source.settings.leg_counting={a: 1}", "settings of leg_counting, which is not in tasks"),
        ("+task.source.settings.basic_arithmetic={nothing: 1}", "reasoning-gym refuses basic_arithmetic with"),
    ):
        with pytest.raises(ConfigError, match=says):
            compose(["task=reasoning_gym", override])
