"""tunix-lite tokenizer: what it writes encodes every text, is as large as asked, and trains a model."""

import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunix_lite import __main__ as entry
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.models.tokenizer_training import END, SPECIAL, train_tokenizer
from tunix_lite.runs.setup import prepare
from tunix_lite.settings.compose import compose
from tunix_lite.tracking.rundir import RunDir

STORIES = [f"Once upon a time there was a {pet} who had {i} balls. It was happy." for i in range(40)
           for pet in ("dog", "cat", "bird", "frog")]  # fmt: skip


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def made(request, tmp_path_factory):
    return train_tokenizer(STORIES, tmp_path_factory.mktemp(request.param), request.param, 320)


def kind_of(made: Tokenizer) -> str:
    return made.folder.name.rstrip("0123456789")


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_every_text_comes_back(made, text):
    text = text.replace("<|", "")  # special tokens are not read as text here
    assert made.decode(made.encode(text)) == text


def test_it_is_as_large_as_asked_and_names_its_end(made):
    assert 261 <= made.num_tokens <= 320 and [made.vocabulary[token] for token in SPECIAL] == [0, 1, 2, 3]
    assert made.special["eos_token"] == END and made.eos_ids == (0,) and made.pad_id == 1 and made.start_ids == ()
    story = STORIES[5]
    # of so few words unigram learns hardly any
    assert len(made.encode(story)) < len(story) / (3 if kind_of(made) == "bpe" else 1)
    assert len(made.encode("12345")) == 5, "each digit is a token"
    again = Tokenizer.load(made.folder)
    assert again.encode(story) == made.encode(story) and again.vocabulary == made.vocabulary


def test_the_same_texts_give_the_same_tokenizer(made, tmp_path):
    again = train_tokenizer(STORIES, tmp_path, kind_of(made), 320)
    assert again.vocabulary == made.vocabulary and again.encode(STORIES[7]) == made.encode(STORIES[7])


def test_a_wrong_size_or_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match="vocab_size=260 must be at least 261"):
        train_tokenizer(STORIES, tmp_path, "bpe", 260)
    with pytest.raises(ValueError, match="kind='words'; it is bpe or unigram"):
        train_tokenizer(STORIES, tmp_path, "words", 300)


def command(monkeypatch, capsys, *words) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["tunix-lite", "tokenizer", *words])
    code = 0
    try:
        entry.main()
    except SystemExit as ended:
        code = ended.code or 0
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("out, wrong", [("new", "there is no text to learn from"), ("empty.txt", "is a file")])
def test_nothing_to_learn_from_and_a_file_for_a_folder_are_refused(out, wrong, tmp_path, monkeypatch, capsys):
    (tmp_path / "empty.txt").touch()
    words = ["task=text", f"task.train={tmp_path}/empty.txt", f"out={tmp_path / out}"]
    code, _, err = command(monkeypatch, capsys, *words)
    assert code == 2 and wrong in err
    assert not (tmp_path / "new").exists()


def test_a_model_trains_with_the_tokenizer_of_its_task(tmp_path, monkeypatch, capsys):
    rows = [{"prompt": story[:20], "completion": story[20:]} for story in STORIES]
    file, folder = tmp_path / "stories.jsonl", tmp_path / "tokenizer"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["task=jsonl", f"task.train={file}", f"out={folder}", "vocab_size=300"]
    code, out, err = command(monkeypatch, capsys, *words)
    assert code == 0, err
    # 16 of the 160 rows are held out
    assert "300 tokens; one stands for" in out and f"model.tokenizer={folder}" in out
    code, _, err = command(monkeypatch, capsys, *words)
    assert code == 2 and f"out: {folder} has a tokenizer; overwrite=true replaces it" in err
    model = ["model=random", "model.target_params=150K", f"model.tokenizer={folder}", "model.chat_template=chatml"]
    more = ["training.prompts_per_step=2", "evaluation.num_examples=0", "algorithm=sft"]
    more += ["generation.max_prompt_length=40", "model.mesh_shape=[[1,1],[fsdp,tp]]"]
    run_dir = RunDir(tmp_path / "run")
    parts = prepare(compose([*words[:2], *model, *more]), run_dir)
    run_dir.path.mkdir()
    parts.write_fingerprint(run_dir)
    kept = json.loads((run_dir.path / "model.json").read_text())["model"]
    assert kept["architecture"]["vocab_size"] == 384 and kept["tokenizer"] == str(folder)
    assert "shape" in dict(parts.summary(run_dir)[1])
    tokens, *_ = parts.task.demonstrations(parts.task.batch(2, 0, 0))
    assert tokens.max() < parts.model.tokenizer.num_tokens <= 384
