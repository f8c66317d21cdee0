"""Mistakes on the command line: one clear message, a non-zero exit, in seconds, and nothing left behind."""

import pytest
from forked import called

MISTAKES = {
    "a misspelt key": (["training.micro_batchsize=4"], "did you mean 'training.micro_batch_size'?"),
    "a mesh that does not fit": (["model.mesh_shape=[[8,2],[fsdp,tp]]"], "needs 16 devices, but jax sees 4; 'model.mesh_shape=[[2,2],"),
    "a prompt that is too long": (["generation.max_prompt_length=8"], "raise it to at least"),
    "a mistake in a sweep": (["--multirun", "seed=0,1", "training.max_stepz=3"], "did you mean 'training.max_steps'?"),
    "a reward that lacks a setting": (["task.rewards.correct.fn._target_=tunix_lite.rewards.text.contains"],
                                      "rewards.correct.fn is called with (completion, example) and its settings: missing"),
    "nowhere to write": (["hydra.run.dir=docs/../a_file/run"], "a_file is a file; give a folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message_within_seconds(name, tmp_path):
    overrides, message = MISTAKES[name]
    (tmp_path / "docs").mkdir()
    (tmp_path / "a_file").touch()
    done = called(overrides, tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert done.code == 2, done
    assert done.err.startswith("error: ") and message in done.err, done.err
    assert len(done.err.strip().splitlines()) == 1 and not done.out
    assert not (tmp_path / "outputs").exists()
    # the clock of the processor, others may use the machine, too; importing takes some two seconds more
    assert done.seconds < 8, "5 seconds is the promise (docs/log.md)"
