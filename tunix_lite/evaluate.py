"""How good is the policy: greedy completions of held-out prompts, judged by the task."""

import numpy as np

from tunix_lite.types import Metrics


def evaluate(policy, task, params, key, num_examples: int, rows: int) -> Metrics:
    """eval/accuracy and what goes with it, over the first `num_examples` of the held-out set.

    Prompts go `rows` at a time, the shape that training samples with, so that nothing new is compiled for decoding;
    the last part is filled up with repeats that do not count.
    """
    examples = task.held_out(num_examples)
    correct, rewards, lengths, finished = [], [], [], []
    for start in range(0, num_examples, rows):
        part = examples[start : start + rows]
        filled = part + [part[0]] * (rows - len(part))
        rollout = policy.generate(params, task.prompts(filled), key, 1, temperature=0.0)
        judged = task.judge(filled, rollout)
        correct.extend(judged.correct[: len(part)])
        rewards.extend(judged.rewards[: len(part)])
        lengths.extend(np.asarray(rollout.completion_mask).sum(axis=1)[: len(part)])
        finished.extend(np.asarray(rollout.finished)[: len(part)])
    return {
        "eval/accuracy": float(np.mean(correct)),
        "eval/reward": float(np.mean(rewards)),
        "eval/mean_length": float(np.mean(lengths)),
        "eval/truncated": float(1 - np.mean(finished)),
    }
