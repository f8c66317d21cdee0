"""A run on text, of one process or of several: which rows each took and read, and what was learned.

As a script, it is one of the processes that `processes.run_together` starts.
"""

import json
from pathlib import Path

import jax
import processes
from jax.experimental.multihost_utils import process_allgather

from tunix_lite.settings.compose import compose
from tunix_lite.tasks.text import TextTask
from tunix_lite.tasks.token_files import TokenRows
from tunix_lite.train import train

RUN = [
    *("algorithm=sft", "task=text", "task.row_tokens=16", "training.prompts_per_step=4", "training.epochs=3"),
    *("training.last_batch=keep", "training.save_interval_steps=4", "tracking.tensorboard=false"),
    *(
        "optimizer.learning_rate=1e-3",
        "optimizer.schedule=linear",
        "optimizer.warmup_steps=0",
        "task.held_out_every=3",
    ),
]


def write(file: Path) -> Path:
    """A corpus of 48 documents, of which a third is held out: more rows than an update has."""
    file.write_text("".join(json.dumps({"text": f"{i} + {i} is {i + i}."}) + "\n" for i in range(48)))
    return file


def learn(corpus: str, folder: str, mesh: str) -> dict:
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
        state = train(compose([*RUN, *places]), Path(folder))
    finally:
        TextTask.batch, TokenRows.tokens = batch, tokens
    params = jax.tree_util.tree_leaves_with_path(process_allgather(state.params, tiled=True))
    return {
        "batches": batches,
        "reads": reads,
        "params": {jax.tree_util.keystr(path): x.ravel()[:: max(1, x.size // 50)] for path, x in params},
    }


if __name__ == "__main__":
    processes.answer(learn)
