"""Runs that are spoilt on purpose, and sound ones; does `tunix-lite doctor` know which is which?

    python benchmarks/spoilt_runs.py OUT [NAME ...]

Each is a real run of some ten updates on the bundled model with one fault, in OUT/NAME; a run that
is there already is not made again. Prints a table: the fault, the first finding, whether it is the
right one; and writes OUT/verdicts.json.
"""

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import yaml

from tunix_lite.algorithms import advantages
from tunix_lite.commands.program import compose_values
from tunix_lite.config import RunConfig, build
from tunix_lite.errors import RunFailed
from tunix_lite.rewards import math
from tunix_lite.runs import learner
from tunix_lite.runs.evidence import read_evidence
from tunix_lite.runs.findings import diagnose
from tunix_lite.train import train

SMALL = [
    "training.max_steps=12",
    "training.prompts_per_step=8",
    "training.save_interval_steps=0",
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


def short(completion: str, example: dict) -> float:
    return -len(completion) / 50


def fails_often(completion: str, example: dict) -> float:
    if len(completion) % 2:
        raise KeyError("answer")
    return math.correct(completion, example)


def no_answer(completion: str) -> None:
    return None


def without_extract(run: RunConfig) -> RunConfig:
    return replace(run, task=replace(run.task, extract=no_answer))


def of_wrong_groups(rewards_PG: np.ndarray, **settings: object) -> np.ndarray:
    """Rows taken as if generation g of prompt p stood in row g * P + p."""
    P, G = rewards_PG.shape
    return advantages.standardise(rewards_PG.reshape(G, P).T).T.reshape(P, G)


def wrong_groups(run: RunConfig) -> RunConfig:
    return replace(run, algorithm=replace(run.algorithm, advantages=of_wrong_groups))


# ---- faults of the machinery


@contextlib.contextmanager
def generating(change: Callable) -> Iterator[None]:
    """Inside, completions come from change(generate), or from make_generate of other arguments."""
    make = learner.make_generate
    with mock.patch.object(learner, "make_generate", lambda *args: change(make, *args)):
        yield


def changed_rollout(change: Callable) -> Callable[[], contextlib.AbstractContextManager]:
    """Every rollout that is learned from goes through `change`; graded when it is over."""

    def wrapped(make: Callable, *args: object) -> Callable:
        generate = make(*args)

        def spoilt(*given: object, on_finished: Callable | None = None, **more: object) -> object:
            if more.get("temperature") == 0.0:
                return generate(*given, on_finished=on_finished, **more)
            return change(generate(*given, **more))

        return spoilt

    return lambda: generating(wrapped)


def shifted(rollout: object) -> object:
    """Log-probabilities at the place of the next token."""
    moved = {name: np.roll(np.asarray(getattr(rollout, name)), 1, axis=1) for name in ("logprobs", "full_logprobs")}
    return rollout.replace(**moved)


def not_a_number(rollout: object) -> object:
    return rollout.replace(full_logprobs=np.full_like(rollout.full_logprobs, np.nan))


def one_key(rollout: object) -> object:
    """Each group holds its first completion eight times."""
    first = np.arange(len(rollout.tokens)) // 8 * 8
    same = {
        f.name: np.asarray(getattr(rollout, f.name))[first]
        for f in dataclasses.fields(rollout)
        if f.name not in ("metrics", "seconds") and getattr(rollout, f.name) is not None
    }
    return rollout.replace(**same)


def no_end_token() -> contextlib.AbstractContextManager:
    """The sampler takes an unused token for the one that ends a completion."""

    def wrapped(make: Callable, cfg: object, generation: object, eos: object, *rest: object):
        return make(cfg, generation, (cfg.vocab_size - 1,), *rest)

    return generating(wrapped)


def stale_weights() -> contextlib.AbstractContextManager:
    """The sampler keeps the weights of the first step."""

    def wrapped(make: Callable, *args: object) -> Callable:
        generate = make(*args)
        kept: list = []

        def spoilt(params: object, *given: object, **more: object) -> object:
            if not kept:
                kept.append(jax.tree.map(jnp.copy, params))
            return generate(kept[0], *given, **more)

        return spoilt

    return generating(wrapped)


def trainer_at_temperature_1() -> contextlib.AbstractContextManager:
    return mock.patch.object(RunConfig, "learning_temperature", 1.0)


SPOILT = {
    "wrong groups": Case(("groups_mixed",), spoil=wrong_groups),
    "shifted log-probabilities": Case(("sampler_gap",), around=changed_rollout(shifted)),
    "another temperature in the trainer": Case(
        ("sampler_gap",), ("generation.temperature=1.5",), around=trainer_at_temperature_1
    ),
    "learning rate x 100": Case(("step_too_large",), ("optimizer.learning_rate=1e-2",)),
    "learning rate 0": Case(("learning_rate_zero",), ("optimizer.learning_rate=0.0",)),
    "learning rate of a giant": Case(("step_too_small",), ("optimizer=sgd", "optimizer.learning_rate=1e-7")),
    "warm-up longer than the run": Case(("warm_up_not_over",), ("optimizer.warmup_steps=100000",)),
    "rewards always 0": Case(("rewards_constant",), spoil=with_reward(always_0)),
    "rewards always 1": Case(("rewards_constant",), spoil=with_reward(always_1)),
    "wrong reward sign": Case(("reward_sign",), ("task.rewards.correct.weight=-1.0",)),
    "reward of another thing": Case(
        ("reward_sign", "evaluation_falls"),
        ("optimizer.learning_rate=3e-4",),
        spoil=with_reward(short),
    ),
    "rewards that raise": Case(("rewards_fail",), ("rewards.on_error=drop",), spoil=with_reward(fails_often)),
    "cut completions": Case(("truncated",), ("generation.max_new_tokens=6",)),
    "lost end token": Case(("never_ends",), around=no_end_token),
    "answers that are not found": Case(("parse_failures",), spoil=without_extract),
    "stale adapter": Case(
        ("sampler_stale",),
        ("model.lora.rank=8", "optimizer.learning_rate=2e-3"),
        around=stale_weights,
    ),
    "huge temperature": Case(("temperature_high",), ("generation.temperature=4.0",)),
    "tiny temperature": Case(("temperature_low",), ("generation.temperature=0.05",)),
    "one random key": Case(("completions_identical",), around=changed_rollout(one_key)),
    "numbers that are not finite": Case(("updates_skipped",), around=changed_rollout(not_a_number)),
    "KL term of 50": Case(("kl_dominates",), ("algorithm.kl_coef=50.0",)),
    "two prompts": Case(("repeated_prompts",), ("task.source.num_train=2",)),
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
    "task too easy": Case(("all_right", "groups_agree"), ("task.source.min_terms=2", "task.source.max_terms=2")),
    "many updates of one rollout": Case(
        ("outside_of_clip", "step_too_large"),
        ("algorithm.updates_per_rollout=6", "optimizer.learning_rate=1e-3"),
    ),
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


def make(folder: Path, case: Case) -> None:
    """Makes the run, with its settings where Hydra would keep them."""
    values = compose_values([*SMALL, *case.overrides])
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(values))
    run = case.spoil(build(RunConfig, values))
    with case.around(), contextlib.suppress(FloatingPointError, RunFailed):
        train(run, folder)


def main(out: Path, chosen: list[str]) -> None:
    verdicts = {}
    for name, case in (SPOILT | SOUND).items():
        if chosen and name not in chosen:
            continue
        folder = out / name.replace(" ", "_").replace(":", "")
        began = time.perf_counter()
        if not folder.exists():
            make(folder, case)
        names = [finding.name for finding in diagnose(read_evidence(folder))]
        is_right = names[0] in case.right if case.right and names else not (case.right or names)
        verdicts[name] = {"right": is_right, "expected": case.right, "found": names}
        mark = "right" if is_right else f"WRONG, expected {' or '.join(case.right) or 'none'}"
        seconds = time.perf_counter() - began
        print(f"{name:<36}{(names or ['none'])[0]:<24}{mark}  ({seconds:.0f} s)", flush=True)
    for title, group in (("spoilt", SPOILT), ("sound", SOUND)):
        done = [verdicts[name]["right"] for name in group if name in verdicts]
        print(f"{title}: {sum(done)} of {len(done)} right")
    (out / "verdicts.json").write_text(json.dumps(verdicts, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
