"""Pairs for `algorithm=reward_model` or `dpo`, in a file: of each problem of the bundled
arithmetic, a right and a wrong completion of the bundled model.

    python examples/sampled_pairs.py pairs.jsonl 4000
"""

import json
import sys
from pathlib import Path

from tunix_lite.api import load
from tunix_lite.rewards.math import correct
from tunix_lite.rollout.settings import GenerationConfig
from tunix_lite.tasks.sources import Arithmetic

SAMPLES = 6  # of each problem
SAMPLED = GenerationConfig(max_prompt_length=64, max_new_tokens=64, temperature=1.0)


def main(file: Path, num_problems: int) -> None:
    """Writes the pairs; problems whose samples are all right, or all wrong, make none."""
    problems = [Arithmetic().train[i] for i in range(num_problems)]
    prompts = [f"What is {problem['question']}?" for problem in problems]
    model = load("bundled")
    completions = model.generate(prompts, SAMPLED, num_generations=SAMPLES, batch_size=256)
    # by problem, and without repetitions
    sampled: list[dict[str, bool]] = [{} for _ in problems]
    for one in completions:
        sampled[one.prompt][one.text] = correct(one.text, problems[one.prompt]) > 0

    with file.open("w") as out:
        for prompt, texts in zip(prompts, sampled):
            right = [text for text, is_right in texts.items() if is_right]
            wrong = [text for text, is_right in texts.items() if not is_right]
            for chosen, rejected in zip(right, wrong):
                row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
