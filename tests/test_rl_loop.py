"""examples/rl_loop.py, the loop by hand, learns what a run learns."""

import importlib.util
import json
from pathlib import Path

import jax
import pytest

from tunix_lite.api import GenerationConfig, make_mesh
from tunix_lite.settings.compose import compose
from tunix_lite.train import train

SMALL = ["training.prompts_per_step=4", "algorithm.num_generations=4", "model.mesh_shape=[[1,1],[fsdp,tp]]"]
SMALL += ["optimizer.schedule=constant", "optimizer.warmup_steps=0", "generation.max_new_tokens=16"]
FILE = Path(__file__).parents[1] / "examples" / "rl_loop.py"


def test_the_loop_by_hand_makes_the_steps_of_a_run(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("rl_loop", FILE)
    by_hand = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(by_hand)
    by_hand.PROMPTS = by_hand.GENERATIONS = 4
    by_hand.GENERATION = GenerationConfig(32, 16)
    # one device, whose programs come from disk
    by_hand.make_mesh = lambda shape: make_mesh(((1, 1), shape[1]), jax.devices()[:1])
    by_hand.main(2)
    printed = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    train(
        compose(["training.max_steps=2", "evaluation.num_examples=0", "tracking.tensorboard=false", *SMALL]), tmp_path
    )
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == len(printed) == 2
    for row, words in zip(rows, printed):
        assert float(words[3].rstrip(",")) == pytest.approx(row["reward/mean"], abs=6e-4)
        assert float(words[5]) == pytest.approx(row["train/loss"], abs=1e-4)
