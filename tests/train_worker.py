"""A short run on a mesh of four devices, of one process or of several: what is left of it.

As a script, it is one of the processes that `processes.run_together` starts.
"""

from pathlib import Path

import jax
import processes
from jax.experimental.multihost_utils import process_allgather

from tunix_lite.settings.compose import compose
from tunix_lite.train import train

RUN = [
    *("training.max_steps=2", "training.prompts_per_step=4", "training.packing=prefix", "rollout.num_slots=8"),
    *("algorithm.num_generations=4", "algorithm.kl_coef=0.04", "generation.max_new_tokens=8"),
    *("evaluation.num_examples=8", "evaluation.num_samples=0", "tracking.samples_interval_steps=1"),
    *("optimizer.learning_rate=1e-3", "tracking.tensorboard=false", "training.save_interval_steps=1"),
    "+task.rewards.short={fn: {_target_: tunix_lite.rewards.text.brevity}, weight: 1.0}",
]


def learn(folder: str, mesh: str) -> dict:
    """Two steps into `folder` on [[fsdp, tp]] given as "2,2": the parameters afterwards, by path."""
    state = train(compose([*RUN, f"model.mesh_shape=[[{mesh}],[fsdp,tp]]"]), Path(folder))
    params = jax.tree_util.tree_leaves_with_path(process_allgather(state.params, tiled=True))
    return {"params": {jax.tree_util.keystr(path): x.ravel()[:: max(1, x.size // 50)] for path, x in params}}


if __name__ == "__main__":
    processes.answer(learn)
