"""Loss on held-out demonstrations: nats per token of the solutions, as sft counts it in training.

    python examples/held_out_loss.py MODEL experiment=smollm2_gsm8k_sft [key=value ...]

MODEL is the folder of a run or what model.weights takes. The settings say which task, and
evaluation.num_examples how many of its held-out examples.
"""

import sys

import numpy as np

from tunix_lite.api import Task, compose, load


def held_out_loss(name: str, settings: list[str]) -> float:
    """The mean over all tokens of all solutions, the end of the turn included."""
    run = compose(settings)
    model = load(name, dtype="fp32")
    lengths = run.generation
    task = Task(
        run.task,
        model.tokenizer,
        lengths.max_prompt_length,
        lengths.max_new_tokens,
        lengths.long_prompts,
    )
    examples = task.held_out(run.evaluation.num_examples)
    prompts = []
    for example in examples:
        messages = run.task.template.messages(example)
        prompts.append([{"role": one.role, "content": one.text} for one in messages])
    scores = model.score(prompts, [example["completion"] for example in examples])
    return -float(np.concatenate(scores).mean())


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("error: give a model and settings, such as experiment=smollm2_gsm8k_sft")
    print(f"held-out loss {held_out_loss(sys.argv[1], sys.argv[2:]):.4f}")
