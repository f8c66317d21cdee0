"""Checks the settings of an objective: a setting that would change nothing is refused, too."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tunix_lite.algorithms import kl
from tunix_lite.algorithms.advantages import WholeBatch, max_likelihood
from tunix_lite.algorithms.corrections import mask_sequences
from tunix_lite.algorithms.dropped import takes_prompts
from tunix_lite.algorithms.pieces import function_of, name_of, same, settings_of
from tunix_lite.algorithms.ratios import no_ratio
from tunix_lite.algorithms.surrogates import cispo, clip, geometric_mean, sapo, takes_bounds
from tunix_lite.algorithms.variants import VARIANTS, objective_of

CHOICES = {
    "old_logprobs": ("whole", "sampled", "rescored"),
    "agreeing_groups": ("keep", "drop", "replace"),
    "kl_estimator": (*kl.ESTIMATORS, kl.IN_REWARD),
}
# functions of the ratio alone, which is 1 under no_ratio
OF_THE_RATIO = (clip, cispo, sapo, geometric_mean)


def check_objective(algorithm: Any) -> None:
    """Raises ValueError, in one line, for settings of algorithms.grpo.GRPO that are wrong by
    themselves, do not go together, or would change nothing."""
    _check_numbers(algorithm)
    for name, choices in CHOICES.items():
        if getattr(algorithm, name) not in choices:
            listed = f"{', '.join(choices[:-1])} or {choices[-1]}"
            raise ValueError(f"{name}={getattr(algorithm, name)!r}; it is {listed}")
    _check_calls(algorithm)
    _check_together(algorithm)
    for names, reason in _without_effect(algorithm):
        for name in names:
            value = getattr(algorithm, name)
            if value is not None and not same(value, _default(algorithm, name)):
                raise ValueError(
                    f"{name}={name_of(value)} would change nothing: {reason}; leave it out"
                )


def _check_numbers(a: Any) -> None:
    if a.num_generations < 2:
        raise ValueError(
            f"num_generations={a.num_generations}: a completion is compared with the "
            "others of its group, so it takes at least 2 (8 is usual)"
        )
    for name in ("updates_per_rollout", "mini_batches", "max_rounds"):
        if getattr(a, name) < 1:
            raise ValueError(f"{name}={getattr(a, name)} must be at least 1")
    for name in ("clip_low", "clip_high", "kl_coef", "entropy_coef", "off_policy_delta"):
        value = getattr(a, name)
        if value is not None and value < 0:
            raise ValueError(f"{name}={value} must not be negative")
    if a.clip_low is not None and a.clip_low >= 1:
        raise ValueError(
            f"clip_low={a.clip_low} would change nothing: no ratio is below 0; give a number below "
            "1, or null"
        )
    if a.reference_every < 0 or not 0 < a.reference_mix <= 1:
        raise ValueError(
            f"reference_every={a.reference_every} must not be negative, and "
            f"reference_mix={a.reference_mix} is above 0 and at most 1"
        )
    if a.advantage_clip is not None and a.advantage_clip <= 0:
        raise ValueError(f"advantage_clip={a.advantage_clip} must be above 0")
    for name, value in settings_of(a.surrogate).items():
        least = {"dual": 1.0, "tau_positive": 0.0, "tau_negative": 0.0, "cap": 0.0}.get(name)
        if least is not None and value is not None and value <= least:
            raise ValueError(f"surrogate.{name}={value} must be above {least:g}")


def _check_calls(a: Any) -> None:
    """Checks that the functions take their arguments; ours raise ValueError if their settings are
    wrong."""
    lengths = np.array([[1, 2]])
    rewards = np.array([[0.0, 1.0]])
    mask = np.ones((1, 2), bool)
    _check_call("advantages", a.advantages, "one array and its settings", rewards)
    prompts = [np.zeros(1, int)] if takes_prompts(a.weighting) else []
    _check_call("weighting", a.weighting, "one array and its settings", mask, *prompts)
    _check_call("ratio", a.ratio, "(log-ratios, batch) and its settings", None, None)
    arguments = [None, None] if takes_bounds(a.surrogate) else [None]
    _check_call("surrogate", a.surrogate, "(terms, bounds) and its settings", *arguments)
    if a.shaping is not None:
        _check_call("shaping", a.shaping, "one array and its settings", lengths[0])
    if a.correction is not None:
        arguments = [np.zeros((1, 2)), mask]
        _check_call("correction", a.correction, "two arrays and its settings", *arguments)

    # ours raise ValueError for settings of theirs that are wrong
    if "whole" in inspect.signature(a.advantages).parameters and _is_ours(a.advantages):
        a.advantages(rewards, whole=WholeBatch(lengths, {"reward": rewards}))


def _check_call(name: str, function: Callable, called_with: str, *values: Any) -> None:
    try:
        inspect.signature(function).bind(*values)
    except TypeError as error:
        raise ValueError(f"{name} is called with {called_with}: {error}") from error
    if _is_ours(function) and name in ("weighting", "shaping", "correction"):
        function(*values)


def _is_ours(function: Callable) -> bool:
    return function_of(function).__module__.startswith("tunix_lite.algorithms.")


def _check_together(a: Any) -> None:
    if a.updates_per_rollout % a.mini_batches:
        raise ValueError(
            f"mini_batches={a.mini_batches} must divide "
            f"updates_per_rollout={a.updates_per_rollout}: every update learns from the next "
            "mini-batch, and each is learned from equally often"
        )
    if a.reference_every % a.updates_per_rollout:
        raise ValueError(
            f"reference_every={a.reference_every} must be a multiple of "
            f"updates_per_rollout={a.updates_per_rollout}: a rollout is scored once"
        )
    if function_of(a.ratio) is no_ratio:
        if a.updates_per_rollout > 1:
            raise ValueError(
                f"ratio=no_ratio with updates_per_rollout={a.updates_per_rollout}: only the first "
                "update of a rollout uses the policy that sampled; use token_ratio"
            )
        if function_of(a.surrogate) in OF_THE_RATIO:
            raise ValueError(
                f"surrogate={name_of(a.surrogate)} is a function of the ratio, which is 1 with "
                "ratio=no_ratio; take surrogate=policy_gradient"
            )
    if a.correction is not None and a.old_logprobs != "rescored":
        raise ValueError(
            "correction compares the trainer with the sampler, so it needs the trainer's own "
            "log-probabilities: set old_logprobs=rescored"
        )
    if a.agreeing_groups == "replace" and a.max_rounds < 2:
        raise ValueError(
            "agreeing_groups=replace with max_rounds=1 replaces no group; raise "
            "max_rounds (3 is usual), or set agreeing_groups=drop"
        )
    is_shaped = a.shaping is not None or (a.kl_coef and a.kl_estimator == kl.IN_REWARD)
    if is_shaped and function_of(a.advantages) is max_likelihood:
        raise ValueError(
            "advantages=max_likelihood takes rewards of 0 and 1 only: leave out shaping and "
            "kl_estimator=k1_reward"
        )


def refusal_of_stale(a: Any) -> str | None:
    """Explains why these settings cannot learn from tokens that earlier weights drew, and what to
    set. None: they can, since all that they compute of such a token has its importance weight."""
    if function_of(a.ratio) is no_ratio:
        return (
            "algorithm.ratio=no_ratio is right only for tokens of the current weights; set "
            "algorithm.ratio._target_=tunix_lite.algorithms.ratios.token_ratio"
        )
    if a.kl_coef and a.kl_estimator in ("k2", kl.IN_REWARD):
        return (
            f"algorithm.kl_estimator={a.kl_estimator} is right only for tokens of the current "
            "weights; set algorithm.kl_estimator=k3_exact"
        )
    if a.old_logprobs != "rescored":
        return None

    # The trainer's own are of the weights of now. Only a correction has the weight of such a token,
    # and only the gain is multiplied by it.
    without = {
        "without algorithm.correction": a.correction is None,
        "with algorithm.correction=mask_sequences": function_of(a.correction) is mask_sequences,
        "with algorithm.kl_coef": a.kl_coef > 0,
        "with algorithm.off_policy_delta": a.off_policy_delta is not None,
    }
    reasons = [reason for reason, holds in without.items() if holds]
    if not reasons:
        return None
    remedy = "algorithm.old_logprobs=whole"
    if a.correction is not None:
        remedy += " algorithm.correction=null"
    if "old_logprobs" in VARIANTS.get(objective_of(a), {}).get(a.variant, {}):
        remedy += " algorithm.variant=null"
    return (
        f"algorithm.old_logprobs=rescored {reasons[0]} takes a token of earlier weights for one of "
        f"the current weights; set {remedy}"
    )


def _without_effect(a: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """(settings, why they change nothing)."""
    if not takes_bounds(a.surrogate):
        yield ("clip_low", "clip_high"), f"surrogate={name_of(a.surrogate)} clips no ratio"
    if not a.kl_coef:
        yield ("kl_estimator", "reference_every"), "kl_coef=0, so there is no KL term"
    if not a.reference_every:
        yield ("reference_mix",), "reference_every=0, so the reference stays as it is"
    if a.agreeing_groups != "replace":
        yield ("max_rounds",), "prompts are drawn once unless agreeing_groups=replace"


def _default(algorithm: Any, name: str) -> Any:
    return next(f.default for f in dataclasses.fields(algorithm) if f.name == name)
