"""Short runs on a mesh of some devices, of one process or of several: what is left of each.

As a script, it is one of the processes that `processes.run_together` starts.
"""

import json
import os
import signal
from pathlib import Path

import jax
import numpy as np
import processes
from jax.experimental.multihost_utils import process_allgather

from tunix_lite.basics.errors import RunFailed
from tunix_lite.distributed.stopping import Stopping
from tunix_lite.settings.compose import compose
from tunix_lite.tasks import check_rows
from tunix_lite.tasks.text import TextTask
from tunix_lite.tasks.token_files import TokenRows
from tunix_lite.tracking.checkpoint import Checkpoints
from tunix_lite.train import train

RUN = [
    *("training.max_steps=2", "training.prompts_per_step=4", "training.packing=prefix", "rollout.num_slots=8"),
    *("algorithm.num_generations=4", "algorithm.kl_coef=0.04", "generation.max_new_tokens=8"),
    *("evaluation.num_examples=8", "evaluation.num_samples=0", "tracking.samples_interval_steps=1"),
    *("optimizer.learning_rate=1e-3", "tracking.tensorboard=false", "training.save_interval_steps=1"),
    "+task.rewards.short={fn: {_target_: tunix_lite.rewards.text.brevity}, weight: 1.0}",
]
TEXT = [
    *("algorithm=sft", "task=text", "task.row_tokens=16", "training.prompts_per_step=4", "training.epochs=3"),
    *("training.last_batch=keep", "training.save_interval_steps=4", "tracking.tensorboard=false"),
    *("optimizer.learning_rate=1e-3", "optimizer.schedule=linear", "optimizer.warmup_steps=0", "task.held_out_every=3"),
]
STEPS = ["training.max_steps=3", "training.save_interval_steps=0", "rollout.chunk=2"]


def params_of(state) -> dict:
    """The parameters that a run leaves, some 50 values of each, by path."""
    params = jax.tree_util.tree_leaves_with_path(process_allgather(state.params, tiled=True))
    return {"params": {jax.tree_util.keystr(path): x.ravel()[:: max(1, x.size // 50)] for path, x in params}}


def learn(folder: str, mesh: str) -> dict:
    """Two steps into `folder` on [[fsdp, tp]] given as "2,2"."""
    return params_of(train(compose([*RUN, f"model.mesh_shape=[[{mesh}],[fsdp,tp]]"]), Path(folder)))


def write(file: Path) -> Path:
    """A corpus of 48 documents, of which a third is held out: more rows than an update has."""
    file.write_text("".join(json.dumps({"text": f"{i} + {i} is {i + i}."}) + "\n" for i in range(48)))
    return file


def learn_text(corpus: str, folder: str, mesh: str) -> dict:
    """Trains into `folder` on [[fsdp, tp]] given as "2,1"."""
    batches, reads = [], []
    batch, tokens = TextTask.batch, TokenRows.tokens

    def taken(task, *arguments):
        made = batch(task, *arguments)
        batches.append([row["row"] for row in made])
        return made

    def read(rows, row):
        reads.extend([row] if rows.split == "train" else [])
        return tokens(rows, row)

    TextTask.batch, TokenRows.tokens = taken, read
    try:
        places = [f"task.train={corpus}", f"task.cache={folder}-cache", f"model.mesh_shape=[[{mesh}],[fsdp,tp]]"]
        state = train(compose([*TEXT, *places]), Path(folder))
    finally:
        TextTask.batch, TokenRows.tokens = batch, tokens
    return params_of(state) | {"batches": batches, "reads": reads}


def end(folder: str) -> dict:
    """What the run has kept when only process 1 was asked to stop; then that of a run with a bad row in step 3."""
    from test_leaving import of_rows

    run = compose([*RUN, *STEPS, "model.mesh_shape=[[2,1],[fsdp,tp]]"])
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
    processes.answer(learn, learn_text, end)
