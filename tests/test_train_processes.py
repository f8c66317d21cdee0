"""A run of several hosts is the run of one host with the same devices: same samples, same numbers, one folder."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import run_worker
from processes import LIMIT, own_lines, run_together
from recorded_runs import metrics_of

ROOT = Path(__file__).parents[1]


def kept(folder) -> tuple[list[dict], dict[str, list[dict]]]:
    """The metrics that do not depend on the clock, and all samples, file by file."""
    files = sorted((folder / "samples").iterdir())
    return metrics_of(folder), {
        file.name: [json.loads(line) for line in file.read_text().splitlines()] for file in files
    }


# What is computed on the mesh, where sums are rounded in another order.
COMPUTED = ("logprobs", "old_logprobs", "ref_logprobs", "entropy")


def assert_same(one, other, name: str = "") -> None:
    """All but what is computed on the mesh is equal: examples, tokens, rewards, advantages, texts."""
    if isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in other:
            assert_same(one[key], other[key], key)
    elif name in COMPUTED:
        np.testing.assert_allclose(np.asarray(one, float), np.asarray(other, float), atol=1e-4, err_msg=name)
    elif isinstance(other, list):
        assert len(one) == len(other)
        for x, y in zip(one, other):
            assert_same(x, y, name)
    else:
        assert one == other, name


GRID = [(count, mesh) for mesh in ("4,1", "2,2", "1,4") for count in (1, 2, 4)]
IN_CI = (2, "2,2")  # both axes cross between processes or between devices of one; the others: pytest -m long


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process with four devices, which is what the others must be: its folder, and the parameters afterwards."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, run_worker.learn(str(folder), "4,1")["params"]


@pytest.mark.parametrize(
    "count, mesh",
    [
        pytest.param(*IN_CI, marks=pytest.mark.wide),
        *(pytest.param(*c, marks=pytest.mark.long) for c in GRID if c != IN_CI),
    ],
)
def test_processes_train_as_one_does_on_every_mesh(count, mesh, alone, tmp_path):
    together, (folder, params) = tmp_path / "together", alone
    said = run_together(run_worker.__file__, count, 4, tmp_path, "learn", together, mesh, limit=LIMIT * count)
    assert [one["devices"] for one in said] == [[4, 4 // count]] * count
    for one in said[1:]:
        assert one["params"] == said[0]["params"]
    for name, values in params.items():
        np.testing.assert_allclose(said[0]["params"][name], values, atol=1e-5, err_msg=name)
    (rows, samples), (expected_rows, expected_samples) = kept(together), kept(folder)
    assert_same(samples, expected_samples)
    assert [row.keys() for row in rows] == [row.keys() for row in expected_rows]
    for row, expected in zip(rows, expected_rows):
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    logs = {"train.log", *(f"train.p{i}.log" for i in range(1, count))}
    assert {path.name for path in together.glob("train*.log")} == logs
    names = {path.name for path in together.iterdir()}
    assert {"metrics.jsonl", "status.json", "checkpoints"} <= names
    assert json.loads((together / "status.json").read_text())["status"] == "completed"


@pytest.mark.parametrize(
    "count, mesh", [pytest.param(1, "1,4", marks=pytest.mark.wide), pytest.param(2, "2,2", marks=pytest.mark.long)]
)
def test_a_run_goes_on_with_other_processes_on_another_mesh(count, mesh, alone, tmp_path):
    folder, params = alone
    together = tmp_path / "together"
    shutil.copytree(folder, together)
    shutil.rmtree(together / "checkpoints" / "2")
    said = run_together(run_worker.__file__, count, 4, tmp_path, "learn", together, mesh, limit=LIMIT * count)
    assert "resumed from step 1" in (together / "train.log").read_text()
    for name, values in params.items():
        np.testing.assert_allclose(said[0]["params"][name], values, atol=1e-5, err_msg=name)
    assert_same(kept(together)[1], kept(folder)[1])


@pytest.mark.wide
def test_two_processes_evaluate_as_one_with_their_devices_does(tmp_path):
    """The same bytes: tables, numbers, and every completion with its log-probabilities."""
    words = ["evaluate.num_examples=12", "evaluate.num_samples=2", "generation.max_new_tokens=16"]
    asked = ["evaluate", *words, "model.mesh_shape=[[2,1],[fsdp,tp]]"]
    said = {}
    for count, call in ((1, ["tunix_lite"]), (2, ["tunix_lite.launch", "--nprocs=2"])):
        environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}
        environment |= {"JAX_NUM_CPU_DEVICES": str(2 // count), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", *call, *asked, f"out=results{count}"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        assert done.returncode == 0, done.stderr
        said[count] = own_lines(done.stdout)
    assert said[1] == said[2] and "accuracy" in "".join(said[1])
    names = sorted(file.name for file in (tmp_path / "results1").iterdir())
    assert names == ["model.arithmetic.jsonl", "results.json", "results.md"]
    for name in names:
        assert (tmp_path / "results1" / name).read_bytes() == (tmp_path / "results2" / name).read_bytes()
    assert not (tmp_path / "outputs").exists(), "an evaluation is no run"
