"""Measures what reading costs a run on plain text: tokens made a second, memory over the file, and the share of a step
that waits for rows.

    python benchmarks/text_reading.py --megabytes 1000 --steps 20

It writes a file of made-up stories, makes its tokens, reads every row once in the order of a run, and then trains the
bundled model for some steps. Memory is that of the process (VmRSS), so it counts what Python, jax and buffers hold.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from tunix_lite.runs.setup import find_parts
from tunix_lite.settings.compose import compose
from tunix_lite.train import train

TEXT = (
    "the a little dog cat girl boy tree house sun rain river bird song and or but then once upon time was were went "
    "ran saw found gave took said happy sad big small red blue green old new very to from with under over day night"
)


def write(file: Path, megabytes: float) -> int:
    """Stories of 20 to 400 words; returns how many."""
    rng = np.random.default_rng(0)
    stories = 0
    with open(file, "w") as out:
        while out.tell() < megabytes * 1e6:
            words = rng.choice(TEXT.split(), int(rng.integers(20, 400)))
            out.write(json.dumps({"text": " ".join(words) + "."}) + "\n")
            stories += 1
    return stories


def resident_mb() -> float:
    """Megabytes of this process in memory."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("settings", nargs="*", help="of the run, such as model=smollm2_135m")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.jsonl")
        print(f"{write(corpus, arguments.megabytes):,} stories, {corpus.stat().st_size / 1e6:,.0f} MB")
        settings = [
            *("algorithm=sft", "task=text", f"task.train={corpus}", f"task.cache={folder}", "task.row_tokens=512"),
            *(f"training.max_steps={arguments.steps}", "tracking.tensorboard=false"),
            *arguments.settings,
        ]
        run = compose(settings)

        before, began = resident_mb(), time.perf_counter()
        parts = find_parts(run)
        seconds = time.perf_counter() - began
        print(parts.data)
        speed = corpus.stat().st_size / 1e6 / seconds
        print(f"tokens made in {seconds:.1f} s, {speed:.1f} MB/s; {before:.0f} -> {resident_mb():.0f} MB resident")

        began = time.perf_counter()
        find_parts(run)
        print(f"found again in {time.perf_counter() - began:.1f} s")

        # every row once, in the order of an epoch
        size, seen = parts.batch.prompts, []
        steps = len(parts.task.config.source.train) // size
        began = time.perf_counter()
        for step in range(steps):
            examples = parts.task.batch(size, run.seed, step)
            parts.task.demonstrations(examples)
            parts.task.segments(examples)
            if step % (1 + steps // 20) == 0:
                seen.append(resident_mb())
        each = (time.perf_counter() - began) / steps
        change = max(seen) - min(seen)
        print(
            f"{steps:,} batches of {size} rows, {1e3 * each:.2f} ms each; resident {seen[0]:.0f} to {seen[-1]:.0f} MB",
            end="",
        )
        print(f", at most {change:.0f} MB apart")

        train(run, Path(folder, "run"))
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()][1:]
        waits, takes = (sum(row[f"time/{name}"] for row in rows) for name in ("collect", "step"))
        print(
            f"collecting took {waits / takes:.2%} of {len(rows)} steps, {1e3 * waits / len(rows):.1f} ms each", end=""
        )
        print(f"; {np.mean([row['perf/tokens_per_second'] for row in rows]):,.0f} tokens/s")


if __name__ == "__main__":
    main()
