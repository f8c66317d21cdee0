"""Words of other projects are answered with the setting that was meant, or with none: never with another one."""

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest
from flax.traverse_util import flatten_dict

from tunix_lite.basics.errors import ConfigError
from tunix_lite.commands import program
from tunix_lite.settings.batch_size import plan_batch
from tunix_lite.settings.compose import compose, compose_values, conf_dir
from tunix_lite.settings.hints import HYDRA, check_values, flags_first, foreign_words, wrong_override

ROOT = Path(__file__).parents[1]
WORDS, FAMILIES = foreign_words()
LINES = (ROOT / "tests" / "foreign_names.txt").read_text().split("## traps")


def rows(text: str) -> list[tuple[str, str]]:
    found = [line.rpartition(" | ") for line in text.splitlines() if " | " in line and not line.startswith("#")]
    return [(typed.strip(), meant.strip()) for typed, _, meant in found]


NAMES, TRAPS = rows(LINES[0]), rows(LINES[1])
HELD = {}
GROUPS = [folder.name for folder in conf_dir().iterdir() if folder.is_dir()]


def settings_of(words: tuple[str, ...]) -> list[str]:
    if words not in HELD:
        HELD[words] = list(flatten_dict(compose_values(list(words)), keep_empty_nodes=True, sep="."))
    return HELD[words]


def without_dashes(words: list[str]) -> list[str]:
    """The command line with the settings that the program says in place of foreign flags."""
    if not words[0].startswith("-"):
        return words
    with pytest.raises(ConfigError) as error:
        flags_first(words, HYDRA)
    return shlex.split(str(error.value).partition("without dashes: ")[2])


def answer(typed: str) -> str:
    """What the program says to a command line: the message of its error."""
    words = shlex.split(typed) if typed.startswith("--") else typed.split()
    chosen = tuple(word for word in words[1:] if re.fullmatch(r"(task|algorithm)=(jsonl|parquet|sapo)", word))
    known = settings_of(chosen)
    words = without_dashes(words)
    with pytest.raises(ConfigError) as error:
        check_values(words)
        key, _, value = words[0].partition("=")
        if message := wrong_override(key, value, known, GROUPS):
            raise ConfigError(message)
        compose(words)
    return str(error.value)


def offered(message: str) -> str:
    """The overrides that a message says to write, as one reads them; "" if it says none."""
    found = re.search(r"(?:; write it as|write it as|; write|dashes:|did you mean) (.*)", message)
    if not found:
        return ""
    text = re.split(r"(?<=[^,]) \((?!q\|)|; (?![^{]*\})|\? There is ", found[1])[0].strip().rstrip("?")
    if "did you mean" in message and "=" not in text:
        return text.strip("'")
    return " ".join(shlex.split(text))


def is_right(typed: str, meant: str) -> bool:
    given = offered(answer(typed))
    word = without_dashes(shlex.split(typed))[0] if typed.startswith("-") else typed
    value = word.partition("=")[2]
    return meant in (given, f"{given}={value}")


def test_people_from_other_projects_get_the_right_override():
    wrong = {typed: answer(typed) for typed, meant in NAMES if not is_right(typed, meant)}
    assert len(NAMES) >= 100
    assert len(wrong) <= 0.05 * len(NAMES), wrong
    # what is not right is silence: no other setting is offered
    assert not {typed: text for typed, text in wrong.items() if offered(text)}


def test_a_name_that_means_another_thing_gets_no_override():
    for typed, sentence in TRAPS:
        message = answer(typed)
        assert not offered(message), f"{typed}: {message}"
        assert sentence == "-" or sentence in message, f"{typed}: {message}"


def by_the_program(words: list[str]) -> str:
    """The message that the program ends with."""
    options = [word for word in words if word.startswith("algorithm=")]
    words = without_dashes(words)
    with pytest.raises(ConfigError) as error:
        compose([*words, *(word for word in options if word not in words)])
    return str(error.value)


def test_the_chosen_algorithm_decides_what_a_word_means_and_a_negative_number_is_a_value():
    assert offered(by_the_program(["--beta", "0.1", "algorithm=dpo"])) == "algorithm.beta=0.1"
    assert offered(by_the_program(["--beta", "0.1"])) == "algorithm.kl_coef=0.1"
    assert offered(by_the_program(["--top_k", "-1", "--seed", "3"])) == "generation.top_k=0"
    assert offered(by_the_program(["tracking.wandb=true"])) == "tracking=wandb"
    assert offered(by_the_program(["training.remat=true"])) == "training.remat=block"
    assert offered(by_the_program(["ici_tensor_parallelism=-1"])) == "model.mesh_shape=[[1,-1],[fsdp,tp]]"


def test_no_name_stands_in_the_table_twice_with_two_meanings():
    seen = {}
    for each in WORDS:
        for project, name in each.all_names():
            assert seen.setdefault(name.lower(), each) is each or project == "ours", name
    assert len(seen) >= 80


NEEDS = {"surrogate.tau": "algorithm=sapo", "algorithm.beta=": "algorithm=dpo", "task.": "task=jsonl"}
NEEDS |= dict.fromkeys(("algorithm.value_", "algorithm.gae", "algorithm.gamma", "algorithm.critic"), "algorithm=ppo")


def test_everything_that_the_table_says_to_write_can_be_written():
    """Each setting is one of those that there are, and each option is a file."""
    for each in WORDS:
        for template in (*each.ours, *filter(None, each.values.values())):
            words = template.replace("{}", "1").split()
            chosen = [word for word in words if (conf_dir() / word.partition("=")[0]).is_dir()]
            chosen += [needs for part, needs in NEEDS.items() if any(part in word for word in words)]
            known = settings_of(tuple(dict.fromkeys(chosen)))
            for word in words:
                key, _, option = word.lstrip("~").partition("=")
                if (conf_dir() / key).is_dir():
                    assert (conf_dir() / key / f"{option}.yaml").is_file(), word
                elif not word.startswith("+"):
                    is_there = any(name == key or name.startswith(f"{key}.") for name in known)
                    assert is_there or key.startswith("hydra."), f"{template}: {key}"


def test_the_page_for_people_from_other_projects_is_the_table(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    page = importlib.import_module("coming_from")
    assert page.PAGE.read_text() == page.render(), "python docs/coming_from.py"


def test_flags_are_answered_with_the_settings_that_they_would_be():
    with pytest.raises(ConfigError) as error:
        flags_first(["--lr", "1e-5", "--fp16", "--tp=2", "seed=3", "--batch-size", "-1", "--x", "a b"], HYDRA)
    assert str(error.value) == (
        "settings are written key=value, without dashes: lr=1e-5 fp16=true tp=2 batch_size=-1 'x=a b'"
    )
    assert flags_first(["seed=3", "--cfg", "job", "--multirun", "a=1,2"], HYDRA) == [
        "--cfg", "job", "--multirun", "seed=3", "a=1,2"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "words, message",
    [
        (["model=org/name"], "did you mean model.weights=org/name"),
        # settings that went: top_k is one of generation, and train_file a word of verl for another task
        (["algorithm=distill", "algorithm.top_k=5"], "setting: algorithm.divergence compares all tokens"),
        (["task=gsm8k", "task.source.train_file=my.jsonl"], "write task.train=my.jsonl"),
        (["--config-dir", "{tmp}", "--config-name", "mine", "training.lr=1"], "write optimizer.learning_rate=1"),
        (["--config-dir", "{tmp}", "--config-name", "mine", "+seed.x=1"], "seed"),
        (["--config-dir", "{tmp}", "--config-name", "min"], "--config-name=min: there is no min.yaml in "),
    ],
)
def test_a_foreign_word_ends_the_program_with_one_line(words, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\nseed: 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run_training.py", *(word.format(tmp=tmp_path) for word in words)])
    with pytest.raises(SystemExit) as ended:
        program.main(lambda run, folder, found: None, lambda run, folder: None)
    told = capsys.readouterr().err
    assert ended.value.code == 2 and told.startswith("error: ") and told.count("\n") == 1 and message in told, told
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


@pytest.mark.parametrize(
    "overrides, line",
    [
        # 128 sequences on one shard in parts of 2, and not 2 of them
        (["training.micro_batch_size=2", "training.gradient_accumulation_steps=2"],
         "training.gradient_accumulation_steps=null makes it 64"),
        # 5 does not divide 128: the size nearest below that does
        (["training.micro_batch_size=5"], "training.micro_batch_size=4 does"),
        (["training.gradient_accumulation_steps=3"], "training.micro_batch_size=128 training.gradient_accumulation_steps=null does"),
        (["training.prompts_per_step=null", "training.micro_batch_size=12"], "training.micro_batch_size=16 would do"),
        (["training.micro_batch_size=32", "training.sync_gradients_every=3"], "training.sync_gradients_every=2 does"),
        (["training.packing=prefix", "training.prompts_per_step=null"], "training.prompts_per_step=16"),
    ],
)  # fmt: skip
def test_arithmetic_that_does_not_work_out_names_a_line_that_does(overrides, line):
    run = compose(overrides)
    with pytest.raises(ConfigError) as error:
        plan_batch(run, 1)
    assert line in str(error.value)
    keys = dict(word.split("=", 1) for word in line.split() if word.startswith("training."))
    again = {word.split("=", 1)[0]: word.split("=", 1)[1] for word in overrides} | keys
    plan_batch(compose([f"{key}={value}" for key, value in again.items()]), 1)


def test_many_words_of_other_projects_have_a_line_each():
    words = ["lr=1e-5", "num_train_epochs=3", "per_device_train_batch_size=4", "max_seq_length=512", "warmup_ratio=0.1"]
    with pytest.raises(ConfigError) as failed:
        compose(words)
    lines = str(failed.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [word.partition("=")[0] for word in words]
