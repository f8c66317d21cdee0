"""Runs that are spoilt on purpose, and sound ones; does `tunix-lite doctor` know which is which?

    python benchmarks/spoilt_runs.py OUT [NAME ...] [seed=7 ...]
    python benchmarks/spoilt_runs.py OUT --record tests/recorded_doctor.json

Each is a real run of some ten updates on the bundled model with one fault, in OUT/NAME; a run that
is there already is not made again. Prints a table: the fault, the first finding, whether it is the
right one; and writes OUT/verdicts.json. `--record` keeps what the doctor reads of the runs in OUT,
cut short, for tests/test_doctor.py.
"""

import contextlib
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import numpy as np
import yaml

from tunix_lite.basics.errors import RunFailed
from tunix_lite.report.evidence import read_evidence
from tunix_lite.report.findings import diagnose
from tunix_lite.rewards import math
from tunix_lite.rollout.generate import GenerateFunction
from tunix_lite.runs import separate_sampling
from tunix_lite.settings.compose import compose_values
from tunix_lite.settings.config import RunConfig, build
from tunix_lite.train import train

SMALL = [
    "training.max_steps=12",
    "training.prompts_per_step=8",
    "training.save_interval_steps=0",
    "optimizer.learning_rate=1e-4",
    "optimizer.schedule=linear",
    "optimizer.warmup_steps=2",
    "evaluation.num_examples=64",
    "evaluation.num_samples=0",
    "evaluation.interval_steps=6",
    "tracking.samples_interval_steps=4",
    "tracking.samples_shown=0",
    "tracking.tensorboard=false",
    # what a fault replaces by a function of this file need not be found by a worker
    "rewards.workers=0",
]


@dataclass(frozen=True)
class Case:
    """A run, and the findings of which one should come first; none: the run is sound."""

    right: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    # what no setting does: to the built settings, or around the run
    spoil: Callable[[RunConfig], RunConfig] = lambda run: run
    around: Callable[[], contextlib.AbstractContextManager] = field(default=contextlib.nullcontext)


# ---- faults in functions of the user's


def with_reward(fn: Callable) -> Callable[[RunConfig], RunConfig]:
    def spoil(run: RunConfig) -> RunConfig:
        rewards = {name: replace(reward, fn=fn) for name, reward in run.task.rewards.items()}
        return replace(run, task=replace(run.task, rewards=rewards))

    return spoil


def always_0(completion: str, example: dict) -> float:
    return 0.0


def always_1(completion: str, example: dict) -> float:
    return 1.0


def of_the_prompt(completion: str, example: dict) -> float:
    """Whether the question is an easy one: nothing of the completion."""
    return float(len(example["answer"]) % 2)


def coin(completion: str, example: dict) -> float:
    """A number that has to do with nothing, the same for the same text."""
    return float(zlib.crc32(f"{example['question']} {completion}".encode()) % 2)


def short(completion: str, example: dict) -> float:
    return -len(completion) / 50


def brief(completion: str, example: dict) -> float:
    """1 for nothing, 0 for 40 characters: what a model soon learns where it cannot answer."""
    return max(0.0, 1 - len(completion) / 40)


def fails_often(completion: str, example: dict) -> float:
    if len(completion) % 2:
        raise KeyError("answer")
    return math.correct(completion, example)


def no_answer(completion: str) -> None:
    return None


def without_extract(run: RunConfig) -> RunConfig:
    return replace(run, task=replace(run.task, extract=no_answer))


# ---- faults of the machinery


@contextlib.contextmanager
def generating(change: Callable) -> Iterator[None]:
    """Inside, completions come from change(generate), or from a sampler of other arguments."""
    make = separate_sampling.make_generate
    with mock.patch.object(separate_sampling, "make_generate", lambda *args: change(make, *args)):
        yield


def changed_rollout(change: Callable) -> Callable[[], contextlib.AbstractContextManager]:
    """Every rollout that is learned from goes through `change`; graded when it is over."""

    def wrapped(make: Callable, *args: object) -> GenerateFunction:
        generate = make(*args)

        def spoilt(*given: object, on_finished: Callable | None = None, **more: object) -> object:
            if more.get("temperature") == 0.0:
                return generate(*given, on_finished=on_finished, **more)
            return change(generate(*given, **more))

        return GenerateFunction(spoilt, generate.compile_ahead)

    return lambda: generating(wrapped)


def shifted(rollout: object) -> object:
    """Log-probabilities at the place of the next token."""
    moved = {name: np.roll(np.asarray(getattr(rollout, name)), 1, axis=1) for name in ("logprobs", "full_logprobs")}
    return rollout.replace(**moved)


def not_a_number(rollout: object) -> object:
    return rollout.replace(full_logprobs=np.full_like(rollout.full_logprobs, np.nan))


def no_end_token() -> contextlib.AbstractContextManager:
    """The sampler takes an unused token for the one that ends a completion."""

    def wrapped(make: Callable, cfg: object, generation: object, eos: object, *rest: object):
        return make(cfg, generation, (cfg.vocab_size - 1,), *rest)

    return generating(wrapped)


def trainer_at_temperature_1() -> contextlib.AbstractContextManager:
    return mock.patch.object(RunConfig, "learning_temperature", 1.0)


SPOILT = {
    "shifted log-probabilities": Case(("sampler_gap",), around=changed_rollout(shifted)),
    "another temperature in the trainer": Case(
        ("sampler_gap",), ("generation.temperature=1.5",), around=trainer_at_temperature_1
    ),
    "learning rate x 100": Case(("step_too_large",), ("optimizer.learning_rate=1e-2",)),
    "learning rate 0": Case(("learning_rate_zero",), ("optimizer.learning_rate=0.0",)),
    "learning rate of a giant": Case(("step_too_small",), ("optimizer=sgd", "optimizer.learning_rate=1e-7")),
    "warm-up longer than the run": Case(("step_too_small",), ("optimizer.warmup_steps=100000",)),
    "rewards always 0": Case(("rewards_constant",), spoil=with_reward(always_0)),
    "rewards always 1": Case(("rewards_constant",), spoil=with_reward(always_1)),
    "wrong reward sign": Case(("reward_sign",), ("task.rewards.correct.weight=-1.0",)),
    "reward of another thing": Case(
        ("reward_sign", "reward_exploited", "evaluation_falls"),
        ("optimizer.learning_rate=3e-4",),
        spoil=with_reward(short),
    ),
    "rewards that raise": Case(("rewards_fail",), ("rewards.on_error=drop",), spoil=with_reward(fails_often)),
    "cut completions": Case(("truncated",), ("generation.max_new_tokens=6",)),
    "lost end token": Case(("never_ends",), around=no_end_token),
    "answers that are not found": Case(("parse_failures",), spoil=without_extract),
    "huge temperature": Case(("temperature_high",), ("generation.temperature=4.0",)),
    "numbers that are not finite": Case(("updates_skipped",), around=changed_rollout(not_a_number)),
    "task too hard": Case(
        ("all_wrong", "groups_agree"),
        (
            "task.source.min_terms=7",
            "task.source.max_terms=7",
            "task.source.max_value=99",
            "generation.max_new_tokens=96",
            "generation.max_prompt_length=48",
        ),
    ),
    "a reward that is exploited": Case(
        ("reward_exploited",),
        (
            "task.source.min_terms=7",
            "task.source.max_terms=7",
            "task.source.max_value=99",
            "generation.max_new_tokens=96",
            "generation.max_prompt_length=48",
            "optimizer.learning_rate=3e-4",
        ),
        spoil=with_reward(brief),
    ),
    "task that the base never saw": Case(("groups_agree",), ("task.source.min_terms=2", "task.source.max_terms=2")),
    "many updates of one rollout": Case(
        ("outside_of_clip", "step_too_large"),
        ("algorithm.updates_per_rollout=6", "optimizer.learning_rate=1e-3"),
    ),
}
# faults that no check was written for, run once before any check was changed by them
UNSEEN = {
    "reward of the prompt alone": Case(("rewards_constant",), spoil=with_reward(of_the_prompt)),
    "reward of a coin": Case(("reward_sign", "reward_noise", "evaluation_falls"), spoil=with_reward(coin)),
    "a stop text that cuts": Case(("parse_failures", "truncated"), ("generation.stop=['er']",)),
    "weight decay of 1000": Case(("step_too_large",), ("optimizer.weight_decay=1000.0",)),
    "adapters, learning rate x 100": Case(("step_too_large",), ("model.lora.rank=8", "optimizer.learning_rate=0.2")),
}
SOUND = {
    "sound: seed 1": Case((), ("seed=1",)),
    "sound: seed 2, 16 prompts": Case((), ("seed=2", "training.prompts_per_step=16")),
    "sound: dr_grpo": Case((), ("algorithm=dr_grpo",)),
    "sound: adapters": Case((), ("model.lora.rank=8", "optimizer.learning_rate=2e-3")),
    "sound: sft": Case((), ("algorithm=sft", "optimizer.learning_rate=3e-4")),
    "sound: lion": Case((), ("optimizer=lion",)),
    "sound: KL term, two updates": Case((), ("algorithm.kl_coef=0.01", "algorithm.updates_per_rollout=2")),
}


def make(folder: Path, case: Case, more: list[str]) -> None:
    """Makes the run, with its settings where Hydra would keep them."""
    values = compose_values([*SMALL, *case.overrides, *more])
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(values))
    run = case.spoil(build(RunConfig, values))
    with case.around(), contextlib.suppress(FloatingPointError, RunFailed):
        train(run, folder)


def main(out: Path, words: list[str]) -> None:
    more = [word for word in words if "=" in word]
    chosen = [word for word in words if word not in more]
    verdicts = {}
    for name, case in (SPOILT | UNSEEN | SOUND).items():
        if chosen and name not in chosen:
            continue
        folder = out / folder_name(name)
        began = time.perf_counter()
        if not folder.exists():
            make(folder, case, more)
        names = [finding.name for finding in diagnose(read_evidence(folder))]
        is_right = names[0] in case.right if case.right and names else not (case.right or names)
        verdicts[name] = {"right": is_right, "expected": case.right, "found": names}
        mark = "right" if is_right else f"WRONG, expected {' or '.join(case.right) or 'none'}"
        seconds = time.perf_counter() - began
        print(f"{name:<36}{(names or ['none'])[0]:<24}{mark}  ({seconds:.0f} s)", flush=True)
    for title, group in (("spoilt", SPOILT), ("unseen", UNSEEN), ("sound", SOUND)):
        done = [verdicts[name]["right"] for name in group if name in verdicts]
        print(f"{title}: {sum(done)} of {len(done)} right")
    (out / "verdicts.json").write_text(json.dumps(verdicts, indent=2) + "\n")


# ---- what the tests keep of them

SETTINGS = (
    "algorithm.num_generations",
    "algorithm.updates_per_rollout",
    "algorithm.kl_coef",
    "evaluation.num_examples",
    "generation.max_new_tokens",
    "generation.temperature",
    "model.lora.rank",
    "optimizer.learning_rate",
    "optimizer.max_grad_norm",
    "optimizer.warmup_steps",
    "rewards.on_error",
    "training.prompts_per_step",
)
KEYS = ("prompt", "completion", "extracted", "correct", "reward", "advantage", "group", "expected")
# findings that need more than metrics
OF_SAMPLES = {
    "reward_sign",
    "never_ends",
    "truncated",
    "parse_failures",
}
# beside rewards/, which says what failed
METRICS = {
    "completions/correct",
    "completions/max_length",
    "completions/mean_length",
    "completions/truncated",
    "eval/accuracy",
    "reward/groups_that_agree",
    "reward/mean",
    "reward/std",
    "train/entropy",
    "train/grad_norm",
    "train/kl",
    "train/learning_rate",
    "train/ratio_outside_clip",
    "train/sampler_gap",
    "train/sampler_gap_max",
    "train/skipped",
    "train/update_norm",
}


def record(out: Path, file: Path) -> None:
    """Writes what there is to know of each run in OUT, a few KB each."""
    kept = {}
    for name, case in (SPOILT | UNSEEN | SOUND).items():
        if not (out / folder_name(name)).exists():
            continue
        run = read_evidence(out / folder_name(name))
        columns: dict = {"step": []}
        rows = {row["step"]: row for row in (*run.evaluations, *run.rows)}
        names = {k for row in rows.values() for k in row if k in METRICS or k.startswith("rewards/")}
        for step in sorted(rows):
            columns["step"].append(step)
            for metric in sorted(names):
                value = rows[step].get(metric)
                short = value if value is None else float(f"{value:.4g}")
                columns.setdefault(metric, []).append(short)
        needs_samples = not case.right or set(case.right) & OF_SAMPLES
        samples = [*run.samples.items()][: 1 if needs_samples else 0]
        kept[name] = {
            "right": case.right,
            "settings": {key: run.setting(key) for key in SETTINGS},
            "weights": [k for k, r in run.setting("task.rewards").items() if r["weight"] < 0],
            "metrics": columns,
            "samples": {step: sample_of(rows) for step, rows in samples},
            "parameters": run.status["parameters"],
            "embed_dim": run.architecture["embed_dim"],
        }
    lines = [f"{json.dumps(name)}: {json.dumps(case)}" for name, case in kept.items()]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def sample_of(rows: list[dict]) -> list[dict]:
    """Three completions of each group."""
    counts: dict = {}
    found = []
    for i, row in enumerate(rows):
        # files of earlier versions do not say it
        group = row.get("group", i // 8)
        counts[group] = counts.get(group, 0) + 1
        if counts[group] <= 3:
            short = {key: row[key] for key in (*KEYS, "finish_reason") if key in row}
            found.append(short | {"completion": row["completion"][:60], "group": group})
    return found


def folder_name(name: str) -> str:
    return name.replace(" ", "_").replace(":", "")


if __name__ == "__main__" and "--record" in sys.argv:
    record(Path(sys.argv[1]), Path(sys.argv[3]))
elif __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
