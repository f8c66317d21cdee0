"""GSM8K, conversations and preferences as tasks, on files that the tests make."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_task_files import json_lines
from test_tokenizer import FAMILIES

from tunix_lite.basics.errors import ConfigError
from tunix_lite.models.source import BUNDLED
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.runs.evaluate import held_out_examples
from tunix_lite.runs.setup import prepare
from tunix_lite.settings.compose import compose
from tunix_lite.tasks.chat import like_answer, same_as_answer
from tunix_lite.tasks.check_rows import check_all_rows, held_out_in_training
from tunix_lite.tasks.gsm8k import flexible, strict
from tunix_lite.tasks.task import Task
from tunix_lite.tracking.rundir import RunDir


def task_of(overrides: list[str], tokenizer) -> Task:
    return Task(compose(overrides).task, tokenizer, 256, 128)


# ---- GSM8K

NATALIA = {
    "question": "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many altogether?",
    "answer": "In May she sold 48/2 = <<48/2=24>>24.\nAltogether 48+24 = <<48+24=72>>72.\n#### 72",
}


def test_gsm8k_reads_the_number_and_the_solution(tmp_path, tokenizer):
    large = {"question": "How much?", "answer": "#### 1,024"}
    file = json_lines(tmp_path / "train.jsonl", [NATALIA, large])
    task = task_of(["task=gsm8k", f"task.train={file}", f"task.held_out={file}"], tokenizer)
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
        bad = json_lines(tmp_path / "bad.jsonl", [row])
        with pytest.raises(ValueError, match=says):
            _ = replace(task.config.source, train_file=str(bad)).train


@pytest.mark.parametrize(
    "completion, is_strict, is_flexible",
    [
        ("48 + 24 = 72\n#### 72", 1, 1),
        ("#### 7,2", 0, 0),  # no thousands separator stands there
        ("####72", 0, 1),  # the format wants a space
        ("The answer is 72.", 0, 1),
        ("72 altogether, 24 of them in May", 0, 0),  # the last number counts
        ("#### 24\n#### 72", 0, 0),  # the first mark counts
        ("48 + 24 = 72\n#### ", 0, 0),  # cut off
        ("", 0, 0),
    ],
)
def test_gsm8k_is_scored_strictly_or_flexibly(completion, is_strict, is_flexible):
    example = {"answer": "72"}
    assert (strict(completion, example), flexible(completion, example)) == (is_strict, is_flexible)


def test_gsm8k_comes_from_the_hub_where_no_file_is_given(tmp_path):
    """From a folder in the layout of the hub. tests/test_hub_rows.py reads names."""
    pytest.importorskip("datasets")
    (tmp_path / "main").mkdir()
    for split in ("train", "test"):
        json_lines(tmp_path / "main" / f"{split}-00000.jsonl", [NATALIA])
    name = f"hub:{tmp_path}:main"
    source = compose(["task=gsm8k", f"task.train={name}", f"task.held_out={name}"]).task.source
    card = "---\nconfigs:\n- config_name: main\n  data_dir: main\n---\n"
    (tmp_path / "README.md").write_text(card)
    assert source.held_out[0]["answer"] == "72" and len(source.train) == 1
    assert (source.train.file, source.held_out.file) == (f"{name}:train", f"{name}:test")
    assert compose(["task=gsm8k"]).task.source.train_file == "hub:openai/gsm8k:main"


# ---- conversations


def chat_of(*texts: str) -> dict:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


def test_a_conversation_is_evaluated_by_its_answer():
    example = chat_of("hi", "good morning to you", "bye", "see you")
    assert like_answer("good morning", example) == pytest.approx(2 * 1 * 0.5 / 1.5)  # precision 1, recall 2 of 4
    assert same_as_answer(" good morning to you\n", example) == 1 and same_as_answer("see you", example) == 0
    assert like_answer("see you", {"completion": chat_of("hi", "see you")["messages"]}) == 1
    with pytest.raises(ValueError, match="no assistant turn"):
        like_answer("hi", chat_of("hi"))


CUT = "generation.max_new_tokens=12"


def rows_of_kind(kind: str, count: int, long_at: set[int]) -> list[dict]:
    """Rows that differ, of which some have too much to learn from."""
    texts = ["x" * 40 if i in long_at else str(i) for i in range(count)]
    if kind == "chat":
        return [chat_of(f"q{i}", text) for i, text in enumerate(texts)]
    return [{"prompt": f"q{i}", "chosen": "yes", "rejected": text} for i, text in enumerate(texts)]


def small(file: Path, kind: str, *more: str) -> list[str]:
    name = {"chat": "sft", "preferences": "dpo"}[kind]
    given = [f"algorithm={name}", f"task={kind}", f"task.train={file}", f"task.held_out={file}", CUT]
    return [*given, "training.prompts_per_step=4", "evaluation.num_examples=2", *more]


@pytest.mark.parametrize("kind, what", [("chat", "completions"), ("preferences", "`rejected`")])
def test_what_is_too_long_to_learn_from_is_found_at_the_start(tmp_path, kind, what):
    """The last of 30 rows, whose turn would come after 14 updates; and what a batch that meets it says."""
    file = json_lines(tmp_path / "rows.jsonl", rows_of_kind(kind, 30, {29}))
    says = rf"1 of 30 training {what} are longer than generation.max_new_tokens=12; .* has 41 tokens \(.*line 30\)"
    with pytest.raises(
        ConfigError, match=f"{says}; raise it to at least 41, or set generation.long_prompts=truncate o"
    ):
        prepare(compose(small(file, kind)), RunDir(tmp_path / "run"))
    task = Task(compose(small(file, kind)).task, Tokenizer.load(BUNDLED), 48, 12)
    name = "rejected" if kind == "preferences" else "completion"
    with pytest.raises(ValueError, match="rows.jsonl, line 30: the .* has 41 tokens, more than generation.max_new_tok"):
        task.demonstrations(task.config.source.train[29:], name)


@pytest.mark.parametrize(
    "kind, setting", [("chat", "task.on_error=skip"), ("preferences", "generation.long_prompts=drop")]
)
def test_rows_that_are_too_long_to_learn_from_are_left_out_and_counted(tmp_path, kind, setting):
    file = json_lines(tmp_path / "rows.jsonl", rows_of_kind(kind, 12, {1, 4, 11}))
    parts = prepare(compose(small(file, kind, setting)), RunDir(tmp_path / "run"))
    assert f"3 of 12 training {'completions' if kind == 'chat' else '`rejected`'} are longer than" in parts.data
    assert f"and are left out ({setting})" in parts.data
    batches = [parts.task.batch(3, 0, step) for step in range(3)]
    for batch in batches:
        parts.task.demonstrations(batch, parts.task.learned[-1])
    asked = sorted(int(parts.task.text.ask(row)[1:]) for batch in batches for row in batch)
    assert asked == [0, 2, 3, 5, 6, 7, 8, 9, 10]


def test_on_error_skip_leaves_out_what_the_template_refuses_and_what_has_nothing_to_learn(tmp_path):
    """The bundled template has no form for tools; line 3 ends with the user."""
    bad = [{**chat_of("hi", "ho"), "tools": TOOLS}, chat_of("a", "b", "c")]
    file = json_lines(tmp_path / "rows.jsonl", [chat_of("q0", "0"), *bad, *rows_of_kind("chat", 5, {3})[1:]])
    held_out = json_lines(tmp_path / "held_out.jsonl", rows_of_kind("chat", 2, set()))
    given = small(file, "chat", "task.learned_turns=last", f"task.held_out={held_out}")
    with pytest.raises(ConfigError, match="rows.jsonl, line 2: the row has `tools`, and the chat template of .* no"):
        prepare(compose(given), RunDir(tmp_path / "run"))
    parts = prepare(compose([*given, "task.on_error=skip"]), RunDir(tmp_path / "run"))
    found = [parts.task.text.ask(row) for step in range(2) for row in parts.task.batch(2, 0, step)]
    assert sorted(found)[:3] == ["q0", "q1", "q2"]
    says = "2 of 7 training examples cannot be taken and are left out (task.on_error=skip), the first:"
    assert says in parts.data


@pytest.mark.parametrize(
    "turns, row, says",
    [
        ("last", chat_of("a", "b", "c"), "`messages` end with a turn of the user, and task.learned_turns=last learns"),
        ("all", chat_of("a"), "`messages` have no turn of the assistant to learn from"),
        ("all", {"prompt": "a", "completion": 4}, "a `completion` is a text, or a list of messages; this one is 4"),
    ],
)
def test_a_row_without_an_answer_to_learn_from_says_what_is_right(tmp_path, tokenizer, turns, row, says):
    file = json_lines(tmp_path / "rows.jsonl", [row])
    task = task_of(
        ["task=chat", f"task.train={file}", f"task.learned_turns={turns}", f"task.held_out={file}"], tokenizer
    )
    with pytest.raises(ValueError, match=f"rows.jsonl, line 1: {says}"):
        check_all_rows(task, True, 0)


def test_sft_of_a_file_needs_no_reward_and_an_evaluation_no_file_to_train_on(tmp_path):
    file = json_lines(tmp_path / "rows.jsonl", [{"prompt": "1 + 1?", "completion": "2"}] * 2)
    given = ["task=jsonl", f"task.held_out={file}", "evaluation.num_examples=2"]
    task = compose(["algorithm=sft", *given, f"task.train={file}"]).task
    assert task.correct(" 2", task.source.train[0]) == 1 and task.correct("3", task.source.train[0]) == 0
    with pytest.raises(ConfigError, match="task: reward is missing: give task.reward=module.function"):
        compose([*given, f"task.train={file}"])
    run = compose([*given, "task.reward=tunix_lite.rewards.math.correct"])
    assert len(held_out_examples(run, Tokenizer.load(BUNDLED), 2, None)[1]) == 2
    with pytest.raises(ConfigError, match="train is missing: give task.train=FILE"):
        prepare(run, RunDir(tmp_path / "run"))


# ---- all that a message holds

TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"type": "function", "function": {"name": "lookup", "arguments": '{"city": "Paris", "n": null}'}}
WEATHER = {
    "messages": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "18", "tool_call_id": "x", "name": "lookup"},
        {"role": "assistant", "content": "It is 18.", "reasoning_content": "18 it says"},
    ],
    "tools": TOOLS,
}
# written by hand from the templates in test_tokenizer.py
QWEN_25 = (
    "<|im_start|>system\nYou help.\n\n# Tools\n<tools>\n"
    '{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}\n'
    '</tools> {"name": <name>, "arguments": <args>}<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n'
    "<|im_start|>assistant\n",
    '<tool_call>\n{"name": "lookup", "arguments": {"city": "Paris", "n": null}}\n</tool_call><|im_end|>',
    "\n<|im_start|>user\n<tool_response>\n18\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "It is 18.<|im_end|>",
)


def without_reasoning(row: dict) -> dict:
    messages = [{k: v for k, v in one.items() if k != "reasoning_content"} for one in row["messages"]]
    return {**row, "messages": messages}


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    return {name: make(folder / name, template) for name, (make, template) in FAMILIES.items()}


def learned_of(row: dict, folder: Path, tmp_path: Path, learned_turns: str = "last", kind: str = "chat", *more) -> Task:
    file = json_lines(tmp_path / "rows.jsonl", [row])
    given = [f"task={kind}", f"task.train={file}", f"task.held_out={file}", f"task.learned_turns={learned_turns}"]
    return replace(task_of([*given, *more], Tokenizer.load(folder)), max_prompt_length=4096, max_new_tokens=4096)


def pieces(task: Task, name: str = "completion") -> list[str]:
    """The prompt as text, and the turns after it in pieces that are learned and that are not."""
    example = task.config.source.train[0]
    tokens, learned = task.text.demonstration(example, name)
    places = [i for i in range(1, len(tokens)) if learned[i] != learned[i - 1]]
    parts = [tokens[a:b] for a, b in zip([0, *places], [*places, len(tokens)])]
    return [task.tokenizer.decode(ids, skip_special=False) for ids in (task.text.prompt(example), *parts)]


def test_tool_calls_and_tools_of_a_row_are_written_as_the_template_writes_them(tmp_path, families):
    row = without_reasoning(WEATHER)
    assert pieces(learned_of(row, families["qwen2.5"], tmp_path, "all")) == list(QWEN_25)
    last = pieces(learned_of(row, families["qwen2.5"], tmp_path, "last"))
    assert last == ["".join(QWEN_25[:3]), QWEN_25[3]]
    as_text = {**row, "tools": json.dumps(TOOLS)}
    assert pieces(learned_of(as_text, families["qwen2.5"], tmp_path)) == last
    # what a run of RL or an evaluation asks: the conversation up to the last answer
    task = learned_of(row, families["qwen2.5"], tmp_path, "last", "jsonl", "task.reward=test_task_files.near")
    assert task.tokenizer.decode(task.prompts(task.held_out(1))[0], skip_special=False) == last[0]
    # a prompt of a column: its tools reach the template, too, unless the prompt writes them
    asked = ["task.prompt='{q}'", "task.reward=test_task_files.near"]
    task = learned_of({"q": "Weather?", "tools": TOOLS}, families["qwen2.5"], tmp_path, "last", "jsonl", *asked)
    assert task.tokenizer.decode(task.prompts(task.held_out(1))[0], skip_special=False) == QWEN_25[0]


def test_parquet_gives_the_text_that_json_lines_give(tmp_path, families):
    """Arrow fills every struct up with the fields of all others, and null: they are absent, at any depth."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    calls = [{"type": "function", "function": {"name": "lookup", "arguments": {"city": "Paris"}}}]
    other = [{"type": "function", "function": {"name": "add", "arguments": {"a": [1, None], "b": {"c": 2}}}}]
    adds = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "required": ["a"]}}}]
    looks_up = [{"type": "function", "function": {"name": "lookup", "parameters": {"properties": {"city": {"a": 1}}}}}]
    rows = [
        {"messages": [*WEATHER["messages"][:1], {"role": "assistant", "tool_calls": calls}], "tools": looks_up},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": other}], "tools": adds},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "name": "z"}]},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    lines = json_lines(tmp_path / "rows.jsonl", rows)
    tokenizer = Tokenizer.load(families["qwen2.5"])
    found = []
    for file in (lines, tmp_path / "rows.parquet"):
        task = task_of(["task=chat", f"task.train={file}", f"task.held_out={file}"], tokenizer)
        train = task.config.source.train
        found.append([(task.text.prompt(row), task.text.demonstration(row)) for row in train])
    assert found[0] == found[1]
    said = tokenizer.decode(found[1][1][1][0], skip_special=False)
    assert said == '<tool_call>\n{"name": "add", "arguments": {"a": [1, null], "b": {"c": 2}}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize(
    "family, change, says",
    [
        ("gemma", {"tools": None}, "line 1: a message of the assistant has the key 'tool_calls', which the chat temp"),
        ("gemma", {"messages": WEATHER["messages"][:1]}, "line 1: the row has `tools`, and the chat template of .* no"),
        ("qwen2.5", {}, "line 1: a message of the assistant has the key 'reasoning_content', which the chat template"),
        (
            "qwen3",
            {"messages": [{"role": "user", "content": "x", "mood": "bad"}]},
            "line 1: .* user has the key 'mood'",
        ),
        ("qwen2.5", {"tools": "a hammer"}, "line 1: `tools` is 'a hammer'; the chat template takes a list of objects"),
        ("qwen2.5", {"messages": [{"role": "user", "content": None}]}, "line 1: `messages` holds .* which is text"),
    ],
)
def test_what_would_be_dropped_is_an_error_that_names_it(tmp_path, families, family, change, says):
    with pytest.raises(ValueError, match=rf"rows.jsonl, {says}"):
        task = learned_of({**WEATHER, **change}, families[family], tmp_path)
        check_all_rows(task, len(task.config.source.train[0]["messages"]) > 1, 1)


@pytest.mark.parity
@pytest.mark.parametrize("family", ["gemma", "qwen2.5", "qwen3", "llama3"])
def test_rows_are_the_tokens_of_transformers(tmp_path, families, family):
    """Prompt, answer and mask, of what transformers makes of the messages with arguments as objects."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(families[family])
    parsed = [json.loads(json.dumps(one)) for one in WEATHER["messages"]]
    parsed[1]["tool_calls"][0]["function"]["arguments"] = {"city": "Paris", "n": None}
    plain = [*chat_of("hi", "ho", "?")["messages"], {"role": "assistant", "content": "y", "name": "z"}]
    cases = [(plain, None)]
    if family == "qwen3":
        cases.append((parsed[:1] + parsed[3:], TOOLS))
    elif family != "gemma":
        cases += [(parsed[:2], None), (parsed[:2], TOOLS)]
    for messages, tools in cases:
        row = {"messages": messages} | ({"tools": tools} if tools else {})
        if messages == parsed[:2]:
            row = {**row, "messages": WEATHER["messages"][:2]}
        task = learned_of(row, families[family], tmp_path)
        example = task.config.source.train[0]
        given = {"tools": tools, "tokenize": True, "return_dict": False}
        asked = theirs.apply_chat_template(messages[:-1], add_generation_prompt=True, **given)
        whole = theirs.apply_chat_template(messages, **given)
        answer, learned = task.text.demonstration(example)
        assert task.text.prompt(example) == asked and all(learned)
        # as texts: a tokenizer may join the last token of a prompt with what follows
        said, theirs_said = (task.tokenizer.decode(ids, skip_special=False) for ids in ([*asked, *answer], whole))
        assert said == theirs_said.removesuffix("\n")


# ---- preferences

PAIR = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}


def test_preferences_are_pairs_of_answers_to_one_prompt(tmp_path, tokenizer):
    same_prompt = [{"role": "user", "content": "3 + 3?"}]
    as_chats = {
        "chosen": [*same_prompt, {"role": "assistant", "content": "6"}],
        "rejected": [*same_prompt, {"role": "assistant", "content": "7"}],
    }
    file = json_lines(tmp_path / "pairs.jsonl", [PAIR, as_chats])
    task = task_of(["task=preferences", f"task.train={file}", f"task.held_out={file}"], tokenizer)
    pairs = list(task.config.source.train)
    assert [[pair[name] for name in ("chosen", "rejected", "completion")] for pair in pairs] == [[*"454"], [*"676"]]
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
    ],
)
def test_a_row_that_is_no_preference_is_named(tmp_path, row, says):
    file = json_lines(tmp_path / "pairs.jsonl", [PAIR, row])
    given = ["task=preferences", f"task.train={file}", f"task.held_out={file}"]
    with pytest.raises(ValueError, match=f"pairs.jsonl, line 2: {says}"):
        _ = compose(given).task.source.train
    kept = compose([*given, "task.on_error=skip"]).task.source.train
    assert len(kept) == 1 and kept.skipped == 1 and "line 2" in kept.first_skipped
