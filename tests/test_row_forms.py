"""Rows as other projects write them: each form, with the row that a task reads of it, written by hand."""

import json

import pytest
from test_task_files import json_lines

from tunix_lite.models.source import BUNDLED
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.settings.compose import compose
from tunix_lite.tasks.check_rows import check_all_rows
from tunix_lite.tasks.row_forms import FORMS, formed
from tunix_lite.tasks.task import Task

HI, HELLO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
SYSTEM = {"role": "system", "content": "be brief"}
# name of the form -> (row of the file, columns that the form adds)
CASES = {
    "messages": [({"messages": [HI, HELLO]}, {})],
    "prompt, completion": [({"prompt": "hi", "completion": "hello"}, {})],
    "prompt, chosen, rejected": [({"prompt": "hi", "chosen": "hello", "rejected": "go away"}, {})],
    "conversations chosen, rejected": [({"chosen": [HI, HELLO], "rejected": [HI, HI]}, {})],
    "question, chosen, rejected": [
        ({"system": "", "question": "hi", "chosen": "hello", "rejected": "no"}, {"prompt": "hi"}),
        ({"system": "be brief", "question": "hi", "chosen": "a", "rejected": "b"}, {"prompt": [SYSTEM, HI]}),
    ],
    "Alpaca": [
        ({"instruction": "Add.", "input": "1 and 2", "output": "3"}, {"prompt": "Add.\n\n1 and 2", "completion": "3"}),
        ({"instruction": "Say 3.", "input": "", "output": "3"}, {"prompt": "Say 3.", "completion": "3"}),
        ({"instruction": "Say 3.", "output": "3", "text": "x"}, {"prompt": "Say 3.", "completion": "3"}),
    ],
    "ShareGPT": [
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
            {"messages": [HI, HELLO]},
        ),
        (
            {"system": "be brief", "conversations": [{"from": "user", "value": "hi"}], "id": "7"},
            {"messages": [SYSTEM, HI]},
        ),
        ({"conversations": [{"from": "system", "value": "be brief"}]}, {"messages": [SYSTEM]}),
    ],
    "verl": [
        (
            {
                "data_source": "openai/gsm8k",
                "prompt": [HI],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": "72"},
                "extra_info": {"index": 0},
            },
            {"answer": "72"},
        )
    ],
    "": [
        ({"question": "1 + 2", "answer": "3"}, {}),
        ({"messages": None, "prompt": "hi"}, {}),  # Parquet has a null for each column of other rows
        ({"instruction": "hi", "output": None}, {}),
        ({"prompt": "hi", "reward_model": "a/name"}, {}),
    ],
}


def test_every_form_has_a_case():
    assert {form.name for form in FORMS} == CASES.keys() - {""}


@pytest.mark.parametrize("name", CASES)
def test_a_form_gives_the_columns_that_tasks_read(name):
    for row, added in CASES[name]:
        before = json.dumps(row)
        assert formed(row) == (name, row | added)
        assert json.dumps(row) == before


def test_a_form_never_replaces_a_column_of_the_file():
    row = {"instruction": "Add.", "output": "3", "prompt": "mine", "completion": "mine, too"}
    assert formed(row)[1] == row


def test_fields_give_columns_other_names():
    row = {"problem": "1 + 2", "level": 5}
    assert formed(row, (("question", "problem"),)) == ("", {"question": "1 + 2", "level": 5})
    # and with them a form
    row = {"ask": "hi", "reply": "hello"}
    fields = (("prompt", "ask"), ("completion", "reply"))
    assert formed(row, fields) == ("prompt, completion", {"prompt": "hi", "completion": "hello"})
    with pytest.raises(
        ValueError, match=r"task.fields=\{question: problem\}, and the row has no 'problem': ask, reply"
    ):
        formed(row, (("question", "problem"),))
    with pytest.raises(ValueError, match=r"task.fields=\{reply: ask\}, and the row has a 'reply' already"):
        formed(row, (("reply", "ask"),))


def task_of(*words: str) -> Task:
    config = compose(list(words)).task
    return Task(config, Tokenizer.load(BUNDLED), 64, 64, learned=("completion",))


def test_a_file_in_a_form_trains_as_it_is_and_the_start_says_which(tmp_path):
    alpaca = [{"instruction": f"Say {i}.", "input": "", "output": str(i)} for i in range(20)]
    task = task_of("algorithm=sft", "task=jsonl", f"task.train={json_lines(tmp_path / 'a.jsonl', alpaca)}")
    assert "; rows as Alpaca" in check_all_rows(task, True, 2)
    tokens, mask, learned = task.demonstrations(task.config.source.train[:1])
    assert task.tokenizer.decode(tokens[0][mask[0]]).count("Say 0.") == 1
    assert task.tokenizer.decode(tokens[0][learned[0]]) == "0"


def test_a_wrong_turn_of_sharegpt_is_named_with_its_line(tmp_path):
    rows = [{"conversations": [{"from": "human", "value": "hi"}]}, {"conversations": [{"from": "bot", "value": "x"}]}]
    task = task_of("algorithm=sft", "task=chat", f"task.train={json_lines(tmp_path / 's.jsonl', rows)}")
    with pytest.raises(ValueError, match=r"s.jsonl, line 2: `conversations` holds .*'bot'.* has `from` \(human, gpt"):
        _ = task.config.source.train


def test_the_first_rows_of_a_file_can_be_taken(tmp_path):
    rows = [{"prompt": f"q{i}", "completion": str(i)} for i in range(30)]
    file = json_lines(tmp_path / "rows.jsonl", rows)
    words = ["algorithm=sft", "task=jsonl", f"task.train={file}", "task.max_rows=20"]
    source = compose(words).task.source
    assert [row["prompt"] for row in source.held_out] == ["q9", "q19"] and len(source.train) == 18
    with pytest.raises(ValueError, match="max_rows=0 must be at least 1, or null for all"):
        compose([*words, "task.max_rows=0"])


def test_fields_are_given_on_the_command_line(tmp_path):
    file = json_lines(tmp_path / "rows.jsonl", [{"problem": str(i)} for i in range(20)])
    words = ["algorithm=sft", "task=jsonl", f"task.train={file}", "task.fields={question: problem}"]
    assert compose([*words, "task.prompt={question}?"]).task.source.train[0] == {"question": "0"}
