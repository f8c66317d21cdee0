"""Two processes of one run, of which one is asked to stop in a rollout, and then a bad row: what is left of it.

As a script, it is one of the processes that `processes.run_together` starts.
"""

import os
import signal
from pathlib import Path

import jax
import numpy as np
import processes
import train_worker
from test_leaving import of_rows

from tunix_lite.basics.errors import RunFailed
from tunix_lite.distributed.stopping import Stopping
from tunix_lite.settings.compose import compose
from tunix_lite.tasks import check_rows
from tunix_lite.tracking.checkpoint import Checkpoints
from tunix_lite.train import train

STEPS = ["training.max_steps=3", "training.save_interval_steps=0", "rollout.chunk=2"]


def end(folder: str) -> dict:
    """What the run has kept when only process 1 was asked to stop; then that of a run with a bad row in step 3."""
    run = compose([*train_worker.RUN, *STEPS, "model.mesh_shape=[[2,1],[fsdp,tp]]"])
    really, chunks = Stopping.check_between_chunks, []

    def look(self):
        chunks.append(self.has_learned)
        if sum(chunks) == 2 and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        really(self)

    Stopping.check_between_chunks = look
    stopped = train(run, Path(folder))
    Stopping.check_between_chunks = really
    kept = Checkpoints(Path(folder) / "checkpoints").steps()
    whole = train(run, Path(folder))
    check_rows.MEASURED_LAZILY = 2  # the bad row is not among those that are looked at before the start
    bad = of_rows(True, "training.max_steps=4", "model.mesh_shape=[[2,1],[fsdp,tp]]")
    said = ""
    try:
        train(bad, Path(f"{folder}-bad"))
    except RunFailed as error:
        said = str(error)
    params = [np.asarray(x.addressable_data(0)).sum().item() for x in jax.tree.leaves(whole.params)]
    left = {"step": int(stopped.step), "kept": kept, "chunks": sum(chunks), "whole": int(whole.step), "params": params}
    return left | {"said": said, "bad": Checkpoints(Path(f"{folder}-bad") / "checkpoints").steps()}


if __name__ == "__main__":
    processes.answer(end)
