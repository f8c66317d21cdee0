"""A model in the hand says the same however it is asked; commands and export say no before they write."""

import hashlib
import io
import json
import shutil
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from conftest import logits_of

from tunix_lite.api import EvaluateTaskConfig, GenerationConfig, compose, correct, evaluate_model, export, load, train
from tunix_lite.basics.errors import ConfigError
from tunix_lite.commands import generate as generate_command
from tunix_lite.inference import export as exporting
from tunix_lite.inference.language_model import open_model, run_settings
from tunix_lite.models import hf
from tunix_lite.models.families import read_config
from tunix_lite.models.lora import LoraConfig, pairs
from tunix_lite.models.source import BUNDLED, ModelConfig, locate
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.runs.fingerprint import _differences, check_same_run, fingerprint
from tunix_lite.settings.compose import compose_values
from tunix_lite.settings.config import build

SHORT = GenerationConfig(64, 12)
GREEDY = replace(SHORT, temperature=0.0)
QUESTIONS = ["What is 1 + 2?", "What is 12 + 7 - 3 + 5?", "What is 9 - 4?"]
TRAINING = ["training.max_steps=1", "training.prompts_per_step=2", "algorithm.num_generations=2",
            "generation.max_new_tokens=4", "evaluation.num_examples=0", "tracking.tensorboard=false",
            "optimizer.learning_rate=1e-2", "model.mesh_shape=[[1,1],[fsdp,tp]]",
            "+task.rewards.short={fn: {_target_: tunix_lite.rewards.text.brevity}, weight: 1.0}"]  # fmt: skip


SMALL = ["model=random", *(f"model.architecture.{size}" for size in (
    "num_layers=1", "embed_dim=32", "mlp_dim=48", "head_dim=8", "pattern=[global]"))]  # fmt: skip
TINY = None  # a folder with such a model and the bundled tokenizer: it says nothing sensible, and compiles fast


@pytest.fixture(scope="module", autouse=True)
def tiny(tmp_path_factory):
    global TINY
    TINY = tmp_path_factory.mktemp("models") / "tiny"
    export(load(compose([*SMALL, "model.mesh_shape=[[1,1],[fsdp,tp]]"])), TINY)
    return TINY


def one(model=None, **more):
    """On one device: programs of several are compiled again by each test."""
    return load(model or TINY, mesh_shape=[[1, 1], ["fsdp", "tp"]], **more)


@pytest.fixture(scope="module")
def model(tiny):
    return one(tiny)


@pytest.fixture(scope="module")
def bundled():
    return one("bundled")


ADAPTERS = ["model.lora.rank=4", "model.lora.base=nf4", 'model.lora.targets="layers/(q|down)"']


@pytest.fixture(scope="module")
def adapted(tiny, tmp_path_factory):
    """A run of one step that trained adapters on a base in nf4: its folder, and its last state."""
    folder = tmp_path_factory.mktemp("runs") / "adapted"
    return folder, train(compose([*TRAINING, f"model.weights={tiny}", *ADAPTERS]), folder)


def test_completions_do_not_depend_on_what_is_asked_beside_them_and_a_stream_is_one_in_pieces(model):
    together = model.generate(QUESTIONS, SHORT, num_generations=2, seed=3)
    in_parts = model.generate(QUESTIONS, SHORT, num_generations=2, seed=3, batch_size=1)
    assert [c.tokens for c in together] == [c.tokens for c in in_parts]
    assert [c.prompt for c in together] == [0, 0, 1, 1, 2, 2]
    assert [c.tokens for c in model.generate(QUESTIONS[0], SHORT, 2, seed=3)] == [c.tokens for c in together[:2]]
    assert len({tuple(c.tokens) for c in together}) > 3
    pieces = list(model.stream(QUESTIONS[1], SHORT, seed=3))
    assert len(pieces) > 2 and "".join(pieces) == model.generate(QUESTIONS[1], SHORT, seed=3)[0].text


@pytest.mark.parametrize("seed", [2**32, True])
def test_a_seed_is_a_whole_number_of_32_bits_wherever_it_is_given(model, seed):
    """jax.random.key drops the bits above."""
    words = rf"seed={seed}; a seed is a whole number from 0 to 4294967295 \(2\*\*32-1\)"
    with pytest.raises(ValueError, match=words):
        model.generate(QUESTIONS[0], SHORT, seed=seed)
    with pytest.raises(ValueError, match=words):
        next(model.stream(QUESTIONS[0], SHORT, seed=seed))
    with pytest.raises(ConfigError, match=words):
        open_model(ModelConfig(weights=str(TINY)), None, None, "fp32", seed)


def test_scores_are_those_of_the_tokens_that_were_said(bundled):
    said = bundled.generate(QUESTIONS[0], GREEDY)[0]
    assert said.finish_reason != "length"
    (scored,) = bundled.score(QUESTIONS[0], said.text)
    np.testing.assert_allclose(scored, said.logprobs, atol=1e-4)
    first, second = bundled.score(QUESTIONS[:2], [said.text, "7"])
    np.testing.assert_allclose(first, scored, atol=1e-5)
    assert first.dtype == np.float32 and second.shape == (2,)  # the digit and the end of the turn
    (again,) = bundled.score([{"role": "user", "content": QUESTIONS[0]}], said.text)
    np.testing.assert_allclose(again, scored, atol=1e-5)


def test_an_evaluation_from_python_counts_the_greedy_completions(model):
    run = compose(["generation.max_prompt_length=64", "generation.max_new_tokens=12"])
    scores = evaluate_model(model, run, EvaluateTaskConfig(num_examples=4))
    examples = [run.task.source.held_out[i] for i in range(4)]
    said = model.generate([f"What is {example['question']}?" for example in examples], GREEDY)
    right = [correct(completion.text, example) for completion, example in zip(said, examples)]
    assert scores["accuracy"].value == np.mean(right)
    assert scores["length"].value == np.mean([len(completion.tokens) for completion in said])
    with pytest.raises(ConfigError, match="of the command"):
        evaluate_model(model, run, EvaluateTaskConfig(against="bundled"))


def test_a_run_is_loaded_as_it_was_trained(adapted):
    folder, state = adapted
    loaded = one(folder)
    assert loaded.step == 1 and loaded.source.lora.rank == 4 and loaded.source.lora.base == "nf4"
    there = {path: leaf for path, leaf in hf.flatten(loaded.params).items() if path in pairs(state.params)}
    for path, (a, b) in pairs(state.params).items():
        np.testing.assert_array_equal(there[path].a, a)
        np.testing.assert_array_equal(there[path].b, b)


def test_generate_gives_the_likeliest_completion_where_one_is_asked_for():
    for given, temperature in ([], 0.7), (["prompt=a"], 0.0), (["prompt=a", "num_generations=4"], 0.7):
        assert compose_values(given, of=("+command=generate",))["generation"]["temperature"] == temperature


# ---- export


def logits(model):
    tokens = np.random.default_rng(0).integers(4, 400, (2, 20))
    with jax.set_mesh(model.mesh):
        return logits_of(model.params, model.cfg, tokens)


@pytest.mark.parametrize("kind, tolerance", [("merged", 0.02), ("adapter", 1e-5)])
def test_what_is_exported_says_what_the_run_says(adapted, tmp_path, kind, tolerance):
    ours = one(adapted[0])
    written = export(ours, tmp_path / "out", kind, dtype="fp32" if kind == "merged" else None)
    assert written.kind == kind and "vllm serve" in written.serve
    if kind == "merged":
        again, tolerance = one(tmp_path / "out"), 1e-4
    else:
        assert "--enable-lora --max-lora-rank 4" in written.serve
        lora = LoraConfig(adapter=str(tmp_path / "out"), base="nf4")
        again = one(ModelConfig(weights=str(TINY), lora=lora))
        assert again.source.lora.rank == 4 and again.source.lora.alpha == 32.0
    np.testing.assert_allclose(logits(again), logits(ours), atol=tolerance)
    about = json.loads((tmp_path / "out" / "tunix_lite.json").read_text())
    assert about["lora"]["rank"] == 4 and about["step"] == 1
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json", "tunix_lite.json"} <= names
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in (tmp_path / "out").iterdir()), "others serve it"


def test_a_model_that_was_not_trained_comes_out_bit_for_bit(model, tmp_path):
    export(model, tmp_path / "out")
    cfg, family = read_config(TINY)
    assert read_config(tmp_path / "out") == (cfg, family)
    before, after = hf.Tensors(TINY), hf.Tensors(tmp_path / "out")
    for name in before:
        whole = tuple(slice(None) for _ in before.shape(name))
        assert before.read(name, whole).tobytes() == after.read(name, whole).tobytes()
    asked = locate(ModelConfig(weights=str(tmp_path / "out"))).tokenizer
    assert asked.prompt("1 + 1") == model.tokenizer.prompt("1 + 1") and asked.eos_ids == (1, 106)


def test_a_template_of_a_file_and_every_end_of_a_completion_are_exported(tmp_path):
    base = shutil.copytree(TINY, tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    (base / "generation_config.json").write_text('{"eos_token_id": 1, "top_k": 5}')
    (tmp_path / "mine.jinja").write_text((TINY / "chat_template.jinja").read_text() + "{{ x }}")
    model = ModelConfig(weights=str(base), chat_template=str(tmp_path / "mine.jinja"), template={"x": "think"})
    export(one(model), tmp_path / "out")
    exported = (tmp_path / "out" / "chat_template.jinja").read_text()
    assert exported == "{% set x = x | default('think') %}\n" + (tmp_path / "mine.jinja").read_text()
    said = "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\nthink"
    for tokenizer in (locate(model).tokenizer, Tokenizer.load(tmp_path / "out")):
        assert tokenizer.prompt("hi") == tokenizer.encode(said)
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written == {"eos_token_id": [1, 106], "top_k": 5}
    with pytest.raises(ValueError, match="model.chat_template: nowhere.jinja is not a file"):
        locate(ModelConfig(chat_template="nowhere.jinja"))


def test_another_text_or_variable_of_the_template_is_another_run(tmp_path):
    def kept(text, *more):
        (tmp_path / "mine.jinja").write_text(text)
        run = compose([f"model.chat_template={tmp_path / 'mine.jinja'}", *more])
        return fingerprint(run, locate(run.model), 1)

    ours = fingerprint(compose([]), locate(ModelConfig()), 1)
    text = (BUNDLED / "chat_template.jinja").read_text()
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == ours["chat_template"]
    assert dict(_differences(kept(text), ours)) == {}, "it is the text that counts, wherever it is from"
    assert [*dict(_differences(kept("{{ messages }}{{ x }}"), ours))] == ["chat_template"]
    theirs = kept("{{ messages }}{{ x }}", "model.template.x=low")
    for x, said in (("high", "template.x: 'high' here, 'low' there"), ("low", "")):
        other = kept("{{ messages }}{{ x }}", f"model.template.x={x}")
        assert "; ".join(map(": ".join, _differences(other, theirs))) == said
    with pytest.raises(ValueError, match="not the run in old: chat_template: '.*' here, '.*' there. resume.force"):
        check_same_run(kept("{{ messages }}"), ours, "old", force=False)


def test_a_run_is_loaded_with_the_template_that_it_began_with(adapted, tmp_path):
    text = (BUNDLED / "chat_template.jinja").read_text()
    assert (adapted[0] / "chat_template.jinja").read_text() == text
    folder = tmp_path / "run"
    folder.mkdir()
    said = json.loads((adapted[0] / "model.json").read_text())
    said["model"] |= {"chat_template": "/gone/since.jinja", "template": {"x": 5}}
    (folder / "model.json").write_text(json.dumps(said))
    (folder / "chat_template.jinja").write_text(text + "{{ x }}")
    settings, _ = run_settings(folder)
    tokenizer = locate(build(ModelConfig, settings, "model")).tokenizer
    assert tokenizer.prompt("hi")[-1:] == tokenizer.encode("5")


def test_an_export_that_reads_back_wrongly_is_not_kept(model, tmp_path, monkeypatch):
    original = hf.save_params

    def damaged(params, *rest):
        original(jax.tree.map(lambda x: x[::-1] if x.ndim == 2 else x, params), *rest)

    monkeypatch.setattr(exporting.hf, "save_params", damaged)
    with pytest.raises(ConfigError, match="read back, gives other scores.*Nothing was kept"):
        export(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"kind": "adapter"}, "kind=adapter: the model has no adapters; give full"),
        ({"out": "full"}, "exists and is not empty; give another folder, or overwrite=true"),
        ({"out": "full", "overwrite": True}, "was not written by export .*so it is not replaced"),
    ],
)
def test_exports_that_cannot_be(model, tmp_path, settings, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a_file").write_text("mine")
    settings["out"] = tmp_path / settings.get("out", "new")
    with pytest.raises(ConfigError, match=message):
        export(model, **settings)
    assert (tmp_path / "full" / "a_file").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_overwriting_replaces_only_what_export_wrote(model, tmp_path):
    export(model, tmp_path / "out")
    (tmp_path / "out" / "old").write_text("old")
    (tmp_path / ".out.mine").mkdir()
    export(model, tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "old").exists() and (tmp_path / ".out.mine").is_dir()
    stands_on = one(ModelConfig(weights=str(tmp_path / "out"), lora=LoraConfig(rank=2, targets="layers/q")))
    with pytest.raises(ConfigError, match="is the folder of the base that the model is made from"):
        export(stands_on, tmp_path / "out", overwrite=True)


# ---- commands


def run_command(module, overrides, monkeypatch):
    arguments = ["tunix-lite", "generation.max_new_tokens=12", "model.mesh_shape=[[1,1],[fsdp,tp]]", *overrides]
    monkeypatch.setattr(sys, "argv", arguments)
    module.main()


def test_generate_answers_a_file_of_prompts(tmp_path, monkeypatch, capsys):
    lines = [{"prompt": QUESTIONS[0]}, {"messages": [{"role": "user", "content": QUESTIONS[1]}]}]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    overrides = [f"prompts={tmp_path}/asked.jsonl", "num_generations=2", f"out={tmp_path}/said.jsonl"]
    run_command(generate_command, overrides, monkeypatch)
    said = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    keys = "prompt generation text tokens logprobs full_logprobs finish_reason seconds"
    assert all(list(row) == keys.split() for row in said), "users read these files: their keys stay"
    assert [row["prompt"] for row in said] == [QUESTIONS[0]] * 2 + [lines[1]["messages"]] * 2
    assert all(row["text"] and len(row["tokens"]) == len(row["logprobs"]) <= 12 for row in said)
    with pytest.raises(SystemExit):
        run_command(generate_command, overrides, monkeypatch)
    assert "exists; give another file, or overwrite=true" in capsys.readouterr().err


def test_chat_remembers_what_was_said(bundled, monkeypatch, capsys):
    typed = f"{QUESTIONS[0]}\n{QUESTIONS[0]}\n/reset\n{QUESTIONS[0]}\nexit\nnot asked"
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    run_command(generate_command, ["generation.temperature=0"], monkeypatch)
    captured = capsys.readouterr()
    first, second, third = captured.out.splitlines()
    assert first == third
    talk = [{"role": "user", "content": QUESTIONS[0]}, {"role": "assistant", "content": first},
            {"role": "user", "content": QUESTIONS[0]}]  # fmt: skip
    assert second == bundled.generate(talk, GREEDY)[0].text
    assert "/reset begins anew" in captured.err and "the bundled model does sums" in captured.err


def test_prompts_are_taken_as_they_stand(model, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(generate_command.GenerateConfig, "open", lambda how, _: seen.append(how.prompt) or model)
    for said in ("prompt=12", "prompt=What is 1, 2?", "prompt='{quoted}'"):
        run_command(generate_command, [said, "generation.max_new_tokens=1"], monkeypatch)
    assert seen == ["12", "What is 1, 2?", "{quoted}"]
    lines = tmp_path / "asked.jsonl"
    lines.write_text('{"prompt": "1\u2028 + 2"}\n{"prompt": "3", "max_new_tokens": 2}\n', encoding="utf-8")
    assert generate_command.read_prompts(lines, 5) == (["1\u2028 + 2", "3"], [5, 2])
    lines.write_text('{"prompt": "3", "max_new_tokens": 6}\n')
    with pytest.raises(ConfigError, match="line 1: max_new_tokens=6; it is 1 to generation.max_new_tokens=5"):
        generate_command.read_prompts(lines, 5)
    for text, says in ((b'{"prompt": "1"}\n\xff', "line 2: not UTF-8"), (b"[" * 100_000, "line 1: nested too deep")):
        lines.write_bytes(text)
        with pytest.raises(ConfigError, match=f"prompts: .*asked.jsonl, {says}"):
            generate_command.read_prompts(lines, 5)


def test_what_a_model_says_acts_on_no_terminal_and_is_itself_in_a_file(monkeypatch):
    for is_terminal, shown in ((True, r"a\x1b[2J\u202e" + "\n"), (False, "a\x1b[2J\u202e\n")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda it=is_terminal: it, raising=False)
        assert generate_command.escape_for_terminal("a\x1b[2J\u202e\n") == shown


def test_limits_of_prompts_and_prompts_that_are_dropped(model):
    short, long = model.generate(QUESTIONS[:2], GREEDY, max_new_tokens=[2, 6])
    assert len(short.tokens) == 2 and short.finish_reason == "length" and len(long.tokens) > 2
    width = len(model.tokenizer.prompt("1"))
    kept = model.generate([QUESTIONS[0], "1", "1"], GenerationConfig(width, 6, long_prompts="drop"))
    assert [c.prompt for c in kept] == [1, 2]
    assert len(model.generate([QUESTIONS[0], "1"], GenerationConfig(width, 6, long_prompts="truncate"))) == 2
