"""Which checkpoints are kept, and that a save which was cut short is no checkpoint."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_lite.checkpoint import Checkpoints
from tunix_lite.parallel.mesh import make_mesh, put
from tunix_lite.types import TrainState


@pytest.fixture(autouse=True)
def mesh():
    jax.set_mesh(make_mesh(((4, 1), ("fsdp", "tp"))))


def state_of(step: int) -> TrainState:
    params = {"w": put(np.full((8, 2), step, np.float32), "embed", "mlp")}
    return TrainState(put(np.int32(step)), params, {"m": put(np.arange(3.0), "norm")})


def test_the_newest_and_the_best_are_kept(tmp_path):
    """Accuracies .9 .1 .5 and none: the newest one, and of the measured ones the two best."""
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best=2)
    for step, accuracy in enumerate((0.9, 0.1, 0.5, None), 1):
        checkpoints.save(state_of(step), accuracy)
    checkpoints.close()
    assert Checkpoints(tmp_path).steps() == [1, 3, 4]


def test_without_accuracies_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(state_of(step), 0.5)
    checkpoints.close()
    assert Checkpoints(tmp_path).steps() == [2, 3]


def test_a_save_that_was_cut_short_is_no_checkpoint_and_is_cleared_away(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state_of(2))
    checkpoints.close()
    half = tmp_path / "4.orbax-checkpoint-tmp"
    (half / "default").mkdir(parents=True)
    (half / "default" / "something").write_text("half")
    again = Checkpoints(tmp_path)
    assert again.latest_step() == 2
    restored = again.restore(jax.tree.map(jnp.zeros_like, state_of(0)))
    np.testing.assert_array_equal(restored.params["w"], np.full((8, 2), 2))
    again.save(state_of(4))
    again.close()
    assert Checkpoints(tmp_path).steps() == [2, 4] and not half.exists()
