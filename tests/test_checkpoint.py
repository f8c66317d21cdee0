"""Which checkpoints are kept, and that a save which was cut short is no checkpoint."""

import logging
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_lite.checkpoint import Checkpoints
from tunix_lite.commands import train
from tunix_lite.parallel.mesh import make_mesh, put
from tunix_lite.types import TrainState


@pytest.fixture(autouse=True)
def mesh():
    jax.set_mesh(make_mesh(((4, 1), ("fsdp", "tp"))))


def state_of(step: int) -> TrainState:
    params = {"w": put(np.full((8, 2), step, np.float32), "embed", "mlp")}
    return TrainState(put(np.int32(step)), params, {"m": put(np.arange(3.0), "norm")})


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def saved(folder, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep=len(steps))
    for step in steps:
        checkpoints.save(state_of(step), skipped=step - 1)
    checkpoints.close()
    return checkpoints


def test_the_newest_and_the_best_are_kept(tmp_path):
    """Accuracies .9 .1 .5 and none: the newest one, and of the measured ones the two best."""
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best=2)
    for step, accuracy in enumerate((0.9, 0.1, 0.5, None), 1):
        checkpoints.save(state_of(step), accuracy)
    checkpoints.close()
    assert Checkpoints(tmp_path).steps() == [1, 3, 4]


def test_a_save_that_was_cut_short_is_no_checkpoint_and_is_cleared_away(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state_of(2))
    checkpoints.close()
    half = tmp_path / "4.orbax-checkpoint-tmp"
    (half / "default").mkdir(parents=True)
    (half / "default" / "something").write_text("half")
    again = Checkpoints(tmp_path)
    assert again.latest_step() == 2 and again.steps() == [2] and again.skipped_in_a_row(2) == 0
    restored = again.restore(jax.tree.map(jnp.zeros_like, state_of(0)))
    np.testing.assert_array_equal(restored.params["w"], np.full((8, 2), 2))
    assert again.restore_params(shapes(state_of(0).params))[0] == 2
    assert (half / "default" / "something").exists(), "perhaps a run is writing it: who only looks leaves it"
    again.save(state_of(4))
    again.close()
    assert Checkpoints(tmp_path).steps() == [2, 4] and not half.exists()


DAMAGE = {
    "its manifest is gone": lambda step: (step / "default" / "manifest.ocdbt").unlink(),
    "its description is gone": lambda step: (step / "default" / "_METADATA").unlink(),
    "an empty folder": lambda step: [shutil.rmtree(step), step.mkdir()],
    "empty files": lambda step: [os.truncate(file, 0) for file in (step / "default" / "d").iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_cannot_be_read_is_told_and_not_skipped(damage, tmp_path, caplog):
    checkpoints = saved(tmp_path, 8, 9)
    DAMAGE[damage](tmp_path / "9")
    said = rf"^step 9 cannot be read \(.+\); remove {tmp_path}/9 to go on from step 8$"
    with pytest.raises(ValueError, match=said):
        checkpoints.restore(state_of(0))
    with pytest.raises(ValueError, match=said):
        checkpoints.restore_params(shapes(state_of(0).params))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    shutil.rmtree(tmp_path / "8")
    with pytest.raises(ValueError, match="to begin anew: there is no earlier one$"):
        checkpoints.restore(state_of(0))


def test_what_does_not_fit_is_told_by_its_shapes(tmp_path):
    checkpoints, state = saved(tmp_path, 9), state_of(0)
    wide = state.replace(params={"w": put(np.zeros((8, 4), np.float32), "embed", "mlp")})
    said = rf"^step 9 of {tmp_path} does not fit this model or optimizer: "
    with pytest.raises(ValueError, match=said + r"params/w: \(8, 4\) here, \(8, 2\) there$"):
        checkpoints.restore(wide)
    with pytest.raises(ValueError, match=said + r"opt_state/v: \(3,\) here, None there; opt_state/m: None here, "):
        checkpoints.restore(state.replace(opt_state={"v": state.opt_state["m"]}))


def test_how_many_updates_were_skipped_is_kept(tmp_path):
    checkpoints = saved(tmp_path, 1, 3)
    assert [checkpoints.skipped_in_a_row(step) for step in (1, 3)] == [0, 2]
    (tmp_path / "3" / "about.json").unlink()
    assert checkpoints.skipped_in_a_row(3) == 0, "a copy may have lost it"
    (tmp_path / "3" / "about.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=rf"^step 3 cannot be read \(.+\); remove {tmp_path}/3 to go on from step 1$"):
        checkpoints.skipped_in_a_row(3)


def test_the_last_line_of_a_run_names_the_command_that_talks_to_it(tmp_path):
    assert train.next_command(tmp_path / "empty") == ""
    (tmp_path / "my run").mkdir()
    saved(tmp_path / "my run" / "checkpoints", 1)
    assert train.next_command(tmp_path / "my run") == f"talk to it: tunix-lite generate '{tmp_path}/my run'\n"
