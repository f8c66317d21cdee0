"""A run that fits can be resumed: what a checkpoint holds is never on the devices twice."""

import contextlib
import gc
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import MagicMock

import jax
import numpy as np
import pytest

from tunix_lite.planning.hardware import Machine
from tunix_lite.planning.plan import estimated
from tunix_lite.runs.learner import build_learner
from tunix_lite.runs.setup import prepare
from tunix_lite.settings.compose import compose
from tunix_lite.settings.resolved_run import find_model
from tunix_lite.tracking.checkpoint import Checkpoints
from tunix_lite.tracking.rundir import RunDir

BUNDLED = ["evaluation.num_examples=0", "model.mesh_shape=[[2,2],[fsdp,tp]]"]


def live_bytes() -> int:
    """Of all buffers that are on the first device now; arrays that share one count once.

    orbax puts an array together of pieces that it has restored, and for a moment both stand for the same bytes.
    """
    first = jax.devices()[0]
    found = {}
    for x in jax.live_arrays():
        for piece in x.addressable_shards if not x.is_deleted() else ():
            if piece.device == first:
                found[piece.data.unsafe_buffer_pointer()] = piece.data.nbytes
    return sum(found.values())


@contextlib.contextmanager
def peak_of_live_bytes() -> Iterator[list[int]]:
    """[the most bytes that were live inside, what was there before not counted], looked at every few milliseconds."""
    before, seen, ends = live_bytes(), [0], threading.Event()

    def look() -> None:
        while not ends.wait(0.004):
            with contextlib.suppress(RuntimeError):  # deleted between two looks
                seen[0] = max(seen[0], live_bytes() - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        ends.set()
        thread.join()


def begun(run, folder):
    """What a run holds when it has been loaded, or resumed: (state, frozen base, policy)."""
    parts = prepare(run, RunDir(folder))
    jax.set_mesh(parts.mesh)
    stopping = SimpleNamespace(check_between_chunks=lambda: None)
    session = SimpleNamespace(
        run=parts.resolved.run, parts=parts, run_dir=RunDir(folder), console=MagicMock(), stopping=stopping
    )
    learner = build_learner(session)
    return parts, session.state, learner.frozen, learner.policy


@pytest.mark.parametrize(
    "settings",
    [
        [*BUNDLED],
        pytest.param([*BUNDLED, "algorithm.kl_coef=0.1"], marks=pytest.mark.wide),
        pytest.param([*BUNDLED, "model.lora.rank=8"], marks=pytest.mark.wide),
    ],
    ids=["bundled", "with a reference", "adapters"],
)
def test_a_resumed_state_is_never_held_twice(settings, tmp_path):
    """At most what is live once the run goes on, which is less than what is live in a step; before: 2.0 times."""
    run = compose(settings)
    parts, state, *_ = begun(run, tmp_path)
    wanted = jax.tree.map(np.asarray, state)
    checkpoints = Checkpoints(RunDir(tmp_path).checkpoints)
    checkpoints.save(state.replace(step=state.step + 1))
    checkpoints.close()
    parts.write_fingerprint(RunDir(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    del state
    # What other tests have left is freed whenever Python collects garbage.
    gc.collect()
    before = live_bytes()
    with peak_of_live_bytes() as peak:
        parts, state, frozen, policy = begun(run, tmp_path)
        time.sleep(0.01)
    there = live_bytes() - before
    assert (frozen is None) == (parts.model.lora is None) and policy is not None, "they count, and are held until here"
    assert int(state.step) == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, wanted.params)
    assert there <= peak[0] <= 1.05 * there
    sizes = dict(parts.mesh.shape)
    planned = estimated(run, Machine("attached", "cpu", 4, None, 2**40, ""), *find_model(run.model), sizes)
    assert peak[0] == pytest.approx(planned.resume_bytes, rel=0.05)
