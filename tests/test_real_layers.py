"""A real model from its file to an answer over HTTP: two of its layers here, the whole of it with `make test-real`."""

import json
import os
import shutil
import urllib.request
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import logits_of
from server_thread import in_thread

from tunix_lite.inference.export import export
from tunix_lite.inference.language_model import load
from tunix_lite.inference.live import live_engine
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.serving.app import Server, ServerSettings
from tunix_lite.serving.calls import Limits
from tunix_lite.settings.compose import compose
from tunix_lite.tracking.checkpoint import Checkpoints
from tunix_lite.train import train

pytest.importorskip("gguf", reason="needs the gguf extra")

TWO_LAYERS = Path(__file__).parent / "two_layers"
WHOLE = Path(os.environ.get("TUNIX_LITE_REAL", "nowhere")) / "gguf" / "smollm2-135m-instruct-q4_1.gguf"
ONE_DEVICE = ((1, 1), ("fsdp", "tp"))
# Two updates of `make real`. Its reward would find nothing in what two layers write, so shorter words pay, too.
SETTINGS = [
    *("experiment=smollm2", "model.architecture=null", "model.mesh_shape=[[1,1],[fsdp,tp]]", "model.lora.rank=4"),
    *("training.max_steps=2", "training.prompts_per_step=2", "algorithm.num_generations=4"),
    "training.save_interval_steps=1",
    "generation.max_prompt_length=96",  # in single letters, mostly
    *("evaluation.num_examples=0", "optimizer.warmup_steps=0", "rewards.workers=0"),
    "+task.rewards.short={fn: {_target_: tunix_lite.rewards.text.brevity}, weight: 1.0}",
]


@pytest.fixture(
    scope="module",
    params=[
        "two layers",
        pytest.param(
            "the whole",
            marks=[
                pytest.mark.real,
                pytest.mark.skipif(not WHOLE.is_file(), reason="TUNIX_LITE_REAL names no folder with SmolLM2"),
            ],
        ),
    ],
)
def run(request, tmp_path_factory):
    """A run of two updates: its settings, its folder and its last state."""
    file = TWO_LAYERS / "model.gguf" if request.param == "two layers" else WHOLE
    settings = compose([*SETTINGS, f"model.weights={file}"])
    folder = tmp_path_factory.mktemp("real") / "run"
    return settings, folder, train(settings, folder)


@pytest.fixture(scope="module")
def trained(run):
    _, folder, _ = run
    return load(folder, dtype="fp32", mesh_shape=ONE_DEVICE)


def test_two_layers_compute_what_transformers_computes():
    """tests/two_layers/cut.py wrote what to expect."""
    model = load(TWO_LAYERS / "model.gguf", dtype="fp32", mesh_shape=ONE_DEVICE)
    expected = np.load(TWO_LAYERS / "expected.npz")
    for i, text in enumerate(["The capital of France is", "Q: What is 12 + 30?\nA:"]):
        prompt, greedy = expected[f"prompt{i}"].tolist(), expected[f"greedy{i}"].tolist()
        assert model.tokenizer.prompt(text) == prompt
        with jax.set_mesh(model.mesh):
            logits = logits_of(model.params, model.cfg, np.array([prompt + greedy]))[0, len(prompt) - 1 : -1]
        np.testing.assert_allclose(logits, expected[f"logits{i}"], rtol=0, atol=1e-4)
        # Transformers went on after an end token.
        [made] = model.generate(text, GenerationConfig(256, 32, temperature=0.0))
        ends = [place for place, token in enumerate(greedy, start=1) if token in model.tokenizer.eos_ids]
        assert made.tokens == greedy[: min(ends, default=32)]
    assert not ends, "of the second prompt all 32 tokens were compared"


def test_two_updates_move_the_adapters_and_sampler_and_trainer_agree(run):
    _, folder, _ = run
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["train/grad_norm"] > 0 and row["reward/std"] > 0
        assert row["train/sampler_gap"] < 1e-3


@pytest.mark.wide
def test_a_run_of_a_real_model_goes_on_as_if_it_had_not_stopped(run, tmp_path):
    settings, folder, state = run
    again = tmp_path / "run"
    shutil.copytree(folder, again)
    assert Checkpoints(again / "checkpoints").steps() == [1, 2]
    shutil.rmtree(again / "checkpoints" / "2")
    jax.tree.map(np.testing.assert_array_equal, train(settings, again), state)


@pytest.mark.wide
def test_what_is_trained_leaves_as_gguf_and_as_a_folder_and_writes_the_same(trained, tmp_path):
    prompt, greedy = "Which word is the last: a, b?", GenerationConfig(96, 12, temperature=0.0)
    [expected] = trained.generate(prompt, greedy)
    export(trained, tmp_path / "gguf", "gguf", gguf_type="f32")
    export(trained, tmp_path / "folder", "merged", "fp32")
    for written in ("gguf", "folder"):
        [read] = load(tmp_path / written, dtype="fp32", mesh_shape=ONE_DEVICE).generate(prompt, greedy)
        assert read.tokens == expected.tokens


@pytest.mark.wide
def test_what_is_trained_answers_over_http(trained):
    pytest.importorskip("aiohttp")
    prompt = "Which word is the last: a, b?"
    generation = GenerationConfig(96, 12, temperature=0.0)
    [expected] = trained.generate(prompt, generation)
    engine = live_engine(trained, generation, RolloutConfig(num_slots=1, chunk=12))
    server = Server(engine, trained.tokenizer, Limits("real", 96, 12, 108), ServerSettings(port=0))
    body = {"model": "real", "messages": [{"role": "user", "content": prompt}], "temperature": 0}
    try:
        with in_thread(server.application()) as address:
            call = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode())
            call.add_header("Content-Type", "application/json")
            answer = json.load(urllib.request.urlopen(call, timeout=120))
    finally:
        engine.close()
    assert answer["choices"][0]["message"]["content"] == expected.text
