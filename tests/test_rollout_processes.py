"""Several hosts draw what one host with the same devices draws."""

import json

import jax
import numpy as np
import overlap_worker
import pytest
from processes import run_together


def test_two_processes_draw_what_one_draws_and_both_see_all_of_it(tmp_path):
    first, second = run_together(overlap_worker.__file__, 2, 4, tmp_path, "draw_queue")
    assert first["devices"] == second["devices"] == [4, 2]
    assert first == second, "to the bit"
    assert len(jax.devices()) == 4
    alone = overlap_worker.draw_queue()
    for what in ("tokens", "reasons", "took"):
        assert first[what] == alone[what]
    np.testing.assert_allclose(np.concatenate(first["logprobs"]), np.concatenate(alone["logprobs"]), atol=1e-5)
    assert {"eos", "length"} == set(first["reasons"]) and len({tuple(row) for row in first["tokens"]}) == 10


@pytest.mark.wide
def test_two_processes_carry_over_updates_what_one_carries(tmp_path):
    """Of rollouts that overlap with learning, an update stands between chunks, and all know which."""
    first, second = run_together(overlap_worker.__file__, 2, 4, tmp_path, "draw")
    assert first == second, "to the bit"
    alone = json.loads(json.dumps(overlap_worker.draw(), default=np.ndarray.tolist))
    for overlap in ("carry", "one_step", "conversations"):
        for what in ("tokens", "versions", "examples", "turns"):
            assert first[overlap][what] == alone[overlap][what], (overlap, what)
        np.testing.assert_allclose(first[overlap]["logprobs"], alone[overlap]["logprobs"], atol=1e-4)
        ages = {
            step - version
            for step, rows in enumerate(alone[overlap]["versions"])
            for row in rows
            for version in row
            if version >= 0
        }
        assert {0, 1} <= ages, "some tokens are of earlier weights"
