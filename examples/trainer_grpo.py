"""GRPO, step by step from Python: the loop of run_training.py on the primitives of Trainer.

    python examples/trainer_grpo.py [key=value ...]

The settings are those of the training. The numbers are those of run_training.py with the same ones.
"""

import json
import sys

from tunix_lite.api import Trainer, compose

settings = compose(sys.argv[1:])
with Trainer(settings) as trainer:
    client = trainer.adapter() if settings.model.lora.rank else trainer.full()
    for step in range(settings.training.max_steps):
        # completions, their rewards and advantages, as a batch
        batch, metrics, _ = client.collect(step)
        output = client.forward_backward(batch, settings.algorithm)
        metrics |= output.metrics | client.optim_step(optimizer=settings.optimizer)
        print(json.dumps({"step": step + 1, **{k: float(v) for k, v in metrics.items()}}))
    client.save("outputs/trainer_grpo")
