"""Pairs of the bundled arithmetic for `algorithm=reward_model` or `dpo`, in a file: the worked
answer is chosen, a wrong number without steps or the answer to another problem is rejected.

    python examples/arithmetic_pairs.py pairs.jsonl 8000
"""

import json
import sys
from pathlib import Path

import numpy as np

from tunix_lite.tasks.sources import Arithmetic

OFF_BY = (-10, -3, -2, -1, 1, 2, 3, 10)


def main(file: Path, count: int) -> None:
    """Writes a pair of each of the first `count` problems."""
    rng = np.random.default_rng(5)
    problems = Arithmetic(worked=1.0).train
    with file.open("w") as out:
        for i in range(count):
            problem = problems[i]
            other = problems[i + count]
            wrong = f"The answer is {int(problem['answer']) + int(rng.choice(OFF_BY))}."
            if rng.random() < 0.5 and other["answer"] != problem["answer"]:
                wrong = other["completion"]
            pair = {"chosen": problem["completion"], "rejected": wrong}
            row = {"prompt": f"What is {problem['question']}?"} | pair
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3 or not sys.argv[2].isdecimal():
        sys.exit("usage: python examples/arithmetic_pairs.py FILE COUNT")
    main(Path(sys.argv[1]), int(sys.argv[2]))
