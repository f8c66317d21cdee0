"""A run in which rewards and gradients fail at random moments: it learns, and every failure is counted."""

import json
import random
from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest
from faulty_rewards import fault
from test_train import NotFinite

from tunix_lite.checkpoint import Checkpoints
from tunix_lite.settings.compose import compose
from tunix_lite.train import train

STEPS = 20
SKIPPED = sorted(random.Random(6).sample(range(2, STEPS), 4))  # by number of the step, from 1
COUNTS = {
    "rewards/errors": "raise",
    "rewards/not_numbers": "nan",
    "rewards/crashes": "segfault",
    "rewards/timeouts": "loop",
}


@pytest.mark.long
@pytest.mark.parametrize("on_error", ["drop", "zero"])
def test_a_run_with_faults_learns_and_counts_them_all(on_error, tmp_path):
    run = compose(
        [
            *(f"training.max_steps={STEPS}", "training.save_interval_steps=1", f"training.keep_checkpoints={STEPS}"),
            *("tracking.samples_interval_steps=1", f"rewards.on_error={on_error}", "rewards.timeout=2"),
            *("optimizer.learning_rate=1e-4", "optimizer.schedule=linear", "evaluation.num_samples=0"),
            "+task.rewards.seldom={fn: {_target_: faulty_rewards.seldom}, weight: 1.0}",
        ]
    )
    algorithm = NotFinite(num_generations=run.algorithm.num_generations, rollouts=tuple(step - 1 for step in SKIPPED))
    last = train(replace(run, algorithm=algorithm), tmp_path)

    status = json.loads((tmp_path / "status.json").read_text())
    assert status["status"] == "completed"
    assert status["eval"]["last"]["accuracy"] > max(0.75, status["eval"]["first"]["accuracy"] + 0.25)
    rows = {
        row["step"]: row for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if (row := json.loads(line))
    }
    totals = Counter()
    for step in range(1, STEPS + 1):
        samples = (tmp_path / "samples" / f"step_{step:06d}.jsonl").read_text().splitlines()
        kinds = Counter(fault(json.loads(line)["completion"]) for line in samples)
        assert {name: rows[step][name] for name in COUNTS} == {name: kinds[kind] for name, kind in COUNTS.items()}, step
        failed = len(samples) - kinds[None]
        assert rows[step]["rewards/dropped"] == (failed if on_error == "drop" else 0)
        totals += kinds
    assert all(totals[kind] for kind in COUNTS.values()), totals
    assert [step for step in rows if step and rows[step]["train/skipped"]] == SKIPPED

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), last.params)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    params = {step: jax.tree.leaves(checkpoints.restore_params(shapes, step)[1]) for step in range(1, STEPS + 1)}
    checkpoints.close()
    for step in range(2, STEPS + 1):
        same = all(np.array_equal(a, b) for a, b in zip(params[step - 1], params[step]))
        assert same == (step in SKIPPED), step
