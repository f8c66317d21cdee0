"""GRPO, step by step from Python, on the primitives of Trainer.

    python examples/trainer_grpo.py [key=value ...]

The model, the task, the lengths and the optimizer are those of the settings.
"""

import json
import sys

import numpy as np

from tunix_lite.api import Datum, Trainer, compose

run = compose(sys.argv[1:])
task = run.task
G = run.algorithm.num_generations
P = run.training.prompts_per_step

with Trainer(run) as trainer:
    client = trainer.adapter() if run.model.lora.rank else trainer.full()
    for step in range(run.training.max_steps):
        # G completions of each of P prompts
        rows = [task.source.train[i] for i in range(step * P, (step + 1) * P)]
        prompts = [trainer.tokenizer.prompt(task.prompt.format(**row)) for row in rows]
        settings = {"max_tokens": run.generation.max_new_tokens}
        samples = client.sample(prompts, num_samples=G, settings=settings)

        # rewards, compared within each group
        texts = [trainer.tokenizer.decode(one.tokens) for one in samples]
        scores = [task.correct(text, rows[one.prompt]) for text, one in zip(texts, samples)]
        rewards = np.reshape(scores, (P, G))
        means = rewards.mean(axis=1, keepdims=True)
        advantages = (rewards - means) / (rewards.std(axis=1, keepdims=True) + 1e-4)

        # a mean over all tokens that were sampled
        weight = 1 / sum(len(one.tokens) for one in samples)
        data = []
        for one, advantage in zip(samples, advantages.ravel()):
            tokens = [*prompts[one.prompt], *one.tokens]
            before = [0.0] * (len(prompts[one.prompt]) - 1)
            count = len(one.tokens)
            data.append(
                Datum(
                    tokens[:-1],
                    tokens[1:],
                    weights=before + [weight] * count,
                    logprobs=before + one.logprobs,
                    advantages=before + [advantage] * count,
                )
            )
        output = client.forward_backward(data, "ppo", {"clip_high_threshold": 1.28})
        update = client.optim_step(optimizer=trainer.run.optimizer)
        numbers = {"reward/mean": float(rewards.mean())} | output.metrics | update
        print(json.dumps({"step": step + 1, **numbers}))
    client.save("outputs/trainer_grpo")
