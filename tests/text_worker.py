"""A run on text: which rows it took, and what was learned."""

import json
from pathlib import Path

import jax
import numpy as np

from tunix_lite.settings.compose import compose
from tunix_lite.tasks.text import TextTask
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


def learn(corpus: str, folder: str) -> dict:
    """Trains into `folder` on one device."""
    batches = []
    batch = TextTask.batch

    def taken(task, *arguments):
        made = batch(task, *arguments)
        batches.append([row["row"] for row in made])
        return made

    TextTask.batch = taken
    try:
        places = [f"task.train={corpus}", f"task.cache={folder}-cache", "model.mesh_shape=[[1,1],[fsdp,tp]]"]
        state = train(compose([*RUN, *places]), Path(folder))
    finally:
        TextTask.batch = batch
    return {"batches": batches, "params": jax.tree.map(np.asarray, state.params)}
