"""A run of several hosts is the run of one host with the same devices: same samples, same numbers, one folder."""

import json

import numpy as np
import pytest
import train_worker
from processes import run_together


def kept(folder) -> tuple[list[dict], dict[str, str]]:
    """The metrics that do not depend on the clock, and all samples."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "memory/"))} for row in rows]
    return rows, {file.name: file.read_text() for file in (folder / "samples").iterdir()}


@pytest.mark.parametrize("mesh", ["2,2"])
def test_two_processes_train_as_one_does(mesh, tmp_path):
    first, second = run_together(train_worker.__file__, 2, 4, tmp_path, tmp_path / "together", mesh)
    assert first["devices"] == second["devices"] == [4, 2]
    assert first["params"] == second["params"]
    alone = train_worker.learn(str(tmp_path / "alone"), mesh)
    for name, values in alone["params"].items():
        np.testing.assert_allclose(first["params"][name], values, atol=1e-5, err_msg=name)
    (rows, samples), (expected_rows, expected_samples) = kept(tmp_path / "together"), kept(tmp_path / "alone")
    assert samples == expected_samples
    assert [row.keys() for row in rows] == [row.keys() for row in expected_rows]
    for row, expected in zip(rows, expected_rows):
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    names = {path.name for path in (tmp_path / "together").iterdir()}
    assert {"train.log", "train.p1.log", "metrics.jsonl", "status.json", "checkpoints"} <= names
    assert json.loads((tmp_path / "together" / "status.json").read_text())["status"] == "completed"
