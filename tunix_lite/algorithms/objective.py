"""The settings of GRPO and its family: their checks, the variants of other frameworks, and the
formula that they come to.

`algorithm.variant=verl` changes one of our objectives to the default of the same name in that
framework, as far as losses, advantages and weights go. VARIANTS was read in the frameworks' code of
2026-07 and 2026-08 (docs/guide/objectives.md).
"""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tunix_lite.algorithms import advantages as adv
from tunix_lite.algorithms import corrections, kl, ratios, shaping, surrogates, weighting

Changes = dict[str, tuple[Any, Any]]

EPS_OF_VERL = {"advantages": (adv.standardise, partial(adv.standardise, eps=1e-6))}
OF_NEMO_RL = {"advantages": (adv.standardise, adv.leave_one_out_std)}
EPS_OF_OPENRLHF = {"advantages": (adv.standardise, partial(adv.standardise, eps=1e-9))}
OF_AREAL = {
    "advantages": (adv.standardise, partial(adv.batch_scaled, mean="batch", eps=1e-9)),
}
AROUND_ONE = {"clip_low": (None, 0.2), "clip_high": (4.0, 0.2)}
DUAL_OF_VERL = {"surrogate": (surrogates.clip, partial(surrogates.clip, dual=3.0))}
SYMMETRIC = {"clip_high": (0.28, 0.2)}
# objective -> framework -> what changes
VARIANTS: dict[str, dict[str, Changes]] = {
    "grpo": {
        "paper": SYMMETRIC | {"weighting": (weighting.per_token, weighting.per_sequence)},
        "trl": SYMMETRIC,
        "verl": SYMMETRIC | EPS_OF_VERL | DUAL_OF_VERL,
        "nemo_rl": SYMMETRIC | OF_NEMO_RL,
        "openrlhf": SYMMETRIC | EPS_OF_OPENRLHF,
        "areal": SYMMETRIC | OF_AREAL,
        "prime_rl": {
            "advantages": (adv.standardise, adv.centre),
            "surrogate": (surrogates.clip, partial(surrogates.binary_tv, log_square=1e-3)),
            "clip_low": (0.2, None),
            "clip_high": (0.28, None),
        },
    },
    "dapo": {"verl": EPS_OF_VERL | DUAL_OF_VERL},
    "gspo": {
        "trl": {"weighting": (weighting.per_sequence, weighting.per_token)},
        "verl": EPS_OF_VERL,
        "nemo_rl": OF_NEMO_RL,
    },
    "cispo": {
        "trl": {},
        "verl": EPS_OF_VERL | AROUND_ONE,
        "slime": EPS_OF_VERL | AROUND_ONE,
        "nemo_rl": OF_NEMO_RL | AROUND_ONE,
        "skyrl": EPS_OF_VERL | AROUND_ONE,
    },
    "dppo": {
        "prime_rl": {
            "advantages": (adv.standardise, adv.centre),
            "surrogate": (surrogates.binary_tv, partial(surrogates.binary_tv, log_square=1e-3)),
        },
        "verl": EPS_OF_VERL
        | {
            "surrogate": (surrogates.binary_tv, partial(surrogates.binary_tv, cap=3.0)),
            "old_logprobs": ("whole", "rescored"),
        },
    },
    "sapo": {"trl": {}, "verl": EPS_OF_VERL},
    "rloo": {
        "verl": {
            "ratio": (ratios.no_ratio, ratios.token_ratio),
            "surrogate": (surrogates.policy_gradient, partial(surrogates.clip, dual=3.0)),
            "clip_low": (None, 0.2),
            "clip_high": (None, 0.2),
            "weighting": (weighting.constant_length, weighting.per_token),
        },
    },
    "reinforce_pp": {"verl": DUAL_OF_VERL},
    "maxrl": {
        "prime_rl": {},
        "skyrl": {"advantages": (adv.max_likelihood, partial(adv.max_likelihood, eps=1e-6))},
        "trl": {"advantages": (adv.max_likelihood, partial(adv.max_likelihood, eps=1e-4))},
    },
}
# variants of the KL term, in every objective that has one
KL_VARIANTS = {
    "trl": {"kl_estimator": ("k3_exact", "k3")},
    "verl": {"kl_estimator": ("k3_exact", "k3")},
}

# the settings that decide which objective it is
DECIDING = ("surrogate", "advantages", "ratio", "agreeing_groups")
BY_SURROGATE = {
    surrogates.cispo: "cispo",
    surrogates.sapo: "sapo",
    surrogates.binary_tv: "dppo",
    surrogates.geometric_mean: "gmpo",
}
BY_ADVANTAGES = {
    adv.leave_one_out: "rloo",
    adv.whiten: "reinforce_pp",
    adv.max_likelihood: "maxrl",
    adv.centre: "dr_grpo",
    adv.batch_scaled: "scalerl",
    adv.per_reward: "gdpo",
}
CHOICES = {
    "old_logprobs": ("whole", "sampled", "rescored"),
    "agreeing_groups": ("keep", "drop", "replace"),
    "kl_estimator": (*kl.ESTIMATORS, kl.IN_REWARD),
}
LEAST = {
    **dict.fromkeys(("updates_per_rollout", "mini_batches", "max_rounds"), 1),
    **dict.fromkeys(("clip_low", "clip_high", "kl_coef", "entropy_coef"), 0),
    **dict.fromkeys(("off_policy_delta", "reference_every"), 0),
}
# functions of the ratio alone, which is 1 under no_ratio
OF_THE_RATIO = (surrogates.clip, surrogates.cispo, surrogates.sapo, surrogates.geometric_mean)
OLD_LOGPROBS = {
    "whole": "of the sampler, nothing cut off",
    "sampled": "of the sampler, as drawn from",
    "rescored": "of the trainer, before the first update",
}
# formulas of pieces, with their settings; {rho} is the ratio within its bounds
PIECES = {
    adv.standardise: "(r - mean_group) / (std_group + {eps:g})",
    adv.centre: "r - mean_group",
    adv.leave_one_out: "r - mean of the others of the group",
    adv.leave_one_out_std: "(r - mean of the others) / (std of the others + {eps:g}), "
    "undivided where that is 0",
    adv.max_likelihood: "(r - mean_group) / (mean_group + {eps:g}), 0 where mean_group = 0",
    adv.batch_scaled: "(r - mean_{mean}) / (std_batch + {eps:g})",
    adv.whiten: "(a - mean_batch(a)) / sqrt(var_batch(a) + {eps:g}) over {over}, a = {baseline}",
    adv.per_reward: "sum_k weight_k (r_k - mean_group) / (std_group + {eps:g}), standardised over "
    "the batch",
    weighting.per_token: "1 / tokens of the update",
    weighting.per_sequence: "1 / (completions of the update x tokens of the completion)",
    weighting.per_prompt: "1 / (prompts of the update x tokens of the prompt's completions)",
    weighting.constant_length: "1 / (completions of the update x {length})",
    ratios.token_ratio: "exp(lp - lp_old)",
    ratios.sequence_ratio: "exp(mean over the completion of lp - lp_old)",
    ratios.no_ratio: "exp(lp - sg[lp]) = 1",
    surrogates.cispo: "sg[{clipped}] A lp",
    surrogates.sapo: "(4 / tau) sigmoid(tau (rho - 1)) A, tau = {tau_positive:g} where A > 0, else "
    "{tau_negative:g}",
    surrogates.geometric_mean: "exp(mean over the completion of log rho, at most {log_clip:g} "
    "where A > 0, at least -{log_clip:g} where A < 0) A",
    surrogates.policy_gradient: "rho A",
    shaping.overlong: "- {factor:g} clip((tokens - {free:g}) / {over:g}, 0, 1)",
    corrections.truncate_tokens: "min(v, {cap:g})",
    corrections.mask_tokens: "v where {low:g} <= v <= {high:g}, else 0",
    corrections.mask_sequences: "1 where {low:g} <= exp(mean over the completion of log v) <= "
    "{high:g}, else 0",
}
KL_VALUES = {
    "k3_exact": "rho (exp(d) - d - 1) with the gradient of rho d^2 / 2",
    "k3": "exp(d) - d - 1",
    "k3_ratio": "rho (exp(d) - d - 1)",
    "k2": "d^2 / 2",
}


def function_of(piece: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, without the settings that are bound to it."""
    return piece.func if isinstance(piece, partial) else piece


def settings_of(piece: Callable[..., Any]) -> dict[str, Any]:
    """Every setting of a function that has a value, bound or by default."""
    parameters = inspect.signature(function_of(piece)).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return defaults | (piece.keywords if isinstance(piece, partial) else {})


def same(one: object, other: object) -> bool:
    """True if two values are equal; of functions, their settings too."""
    if callable(one) and callable(other):
        is_same_function = function_of(one) is function_of(other)
        return is_same_function and settings_of(one) == settings_of(other)
    return type(one) is type(other) and one == other


def name_of(piece: object) -> str:
    """`clip` or `clip(dual=3)` of a function, the value itself of anything else."""
    if not callable(piece):
        return str(piece)
    function = function_of(piece)
    name = getattr(function, "__name__", type(function).__name__)
    bound = piece.keywords if isinstance(piece, partial) else {}
    settings = ", ".join(f"{key}={value}" for key, value in bound.items())
    return f"{name}({settings})" if settings else name


def _objective_of(
    surrogate: Callable[..., Any],
    advantages: Callable[..., Any],
    ratio: Callable[..., Any],
    agreeing_groups: str,
) -> str:
    """Names the preset of these settings, by the values that only it has."""
    surrogate = function_of(surrogate)
    advantages = function_of(advantages)
    if advantages is adv.batch_scaled and surrogate is surrogates.cispo:
        return "scalerl"
    if surrogate in BY_SURROGATE:
        return BY_SURROGATE[surrogate]
    if function_of(ratio) is ratios.sequence_ratio:
        return "gspo"
    if advantages in BY_ADVANTAGES:
        return BY_ADVANTAGES[advantages]
    return "dapo" if agreeing_groups == "replace" else "grpo"


@dataclass(frozen=True)
class Objective:
    """The settings of algorithms.grpo.GRPO. Raises ValueError, in one line, for settings that are
    wrong by themselves, do not go together, or would change nothing.

    Example: GRPO(clip_high=0.3, surrogate=sapo) is refused, as sapo clips no ratio.
    """

    # Completions sampled for each prompt, called its group. At least 2.
    num_generations: int = 8
    # Optimizer updates made from one rollout, a multiple of mini_batches.
    updates_per_rollout: int = 1
    # Parts that a rollout is split into. Each update trains on the next part. 1 does not split it.
    mini_batches: int = 1
    advantages: Callable = adv.standardise  # rewards [P, G] -> advantages [P, G]
    # Limits every advantage to the range from -x to x. null sets no limit.
    advantage_clip: float | None = None
    weighting: Callable = weighting.per_token  # completion mask [B, T] -> loss weights [B, T]
    # log-ratios of tokens -> log-ratios (algorithms/ratios.py)
    ratio: Callable = ratios.token_ratio
    surrogate: Callable = (
        surrogates.clip
    )  # what is maximised per token (algorithms/surrogates.py)
    # Lower clip of the ratio, at 1 - clip_low. null does not clip it from below.
    clip_low: float | None = 0.2
    # Upper clip of the ratio, at 1 + clip_high. null does not clip it from above.
    clip_high: float | None = 0.28
    # Weight of the KL divergence from the reference model. 0 loads no reference.
    kl_coef: float = 0.0
    # Estimator of that KL: k3_exact, k3, k3_ratio or k2 in the loss, k1_reward in the reward.
    kl_estimator: str = "k3_exact"
    # Steps between two updates of the reference model. 0 keeps it as it was at the start.
    reference_every: int = 0
    # Share of the policy in an updated reference, from 0 to 1. 1 copies the policy.
    reference_mix: float = 1.0
    # Weight of the entropy bonus. 0 adds none.
    entropy_coef: float = 0.0
    # Old log-probabilities in the ratio: whole (sampler, full softmax), sampled (sampler, after
    # top_k, top_p and min_p) or rescored (computed again by the trainer).
    old_logprobs: str = "whole"
    # Function that reweights tokens where trainer and sampler differ. Needs old_logprobs=rescored.
    correction: Callable | None = None
    # Drops a completion with negative advantage whose mean log-probability fell by more than this,
    # in nats per token. null drops none.
    off_policy_delta: float | None = None
    # What happens to a group of equal rewards: keep, drop (weight 0) or replace (draw another
    # prompt).
    agreeing_groups: str = "keep"
    # Most draws of prompts for one batch, used by agreeing_groups=replace.
    max_rounds: int = 1
    # Function of completion lengths that is added to the rewards. null adds nothing.
    shaping: Callable | None = None
    # true gives no weight to completions that reached max_new_tokens without an end.
    mask_truncated: bool = False
    # Framework whose form of the objective is used, such as trl, verl or prime_rl. null uses ours.
    variant: str | None = None

    def __post_init__(self):
        self._apply_variant()
        self._check_values()
        self._check_functions()
        self._check_together()

    @property
    def objective(self) -> str:
        """The preset that has these settings, such as dapo."""
        return _objective_of(*(getattr(self, name) for name in DECIDING))

    @property
    def is_kl_reward(self) -> bool:
        """Whether the KL is a part of the reward, and not of the loss."""
        return self.kl_coef > 0 and self.kl_estimator == kl.IN_REWARD

    def _apply_variant(self) -> None:
        """Changes the settings to those of the variant. Raises ValueError if the framework defines
        no such objective, or no other one, or if a setting that it changes was changed already."""
        if self.variant is None:
            return
        name = self.objective
        offered = VARIANTS.get(name, {})
        changes = offered.get(self.variant)
        # A copy of settings that a variant has changed: its pieces may be of another objective. All
        # of the changes must be there, and what they replaced must have made the objective: dr_grpo
        # has the upper clip of grpo's trl by itself.
        for other, variants in VARIANTS.items() if changes is None else ():
            theirs = variants.get(self.variant, {})
            is_changed = all(same(getattr(self, k), new) for k, (_, new) in theirs.items())
            before = [theirs[k][0] if k in theirs else getattr(self, k) for k in DECIDING]
            if theirs and is_changed and _objective_of(*before) == other:
                name = other
                changes = theirs
        if changes is None:
            listed = ", ".join(offered) or "none"
            raise ValueError(
                f"variant={self.variant!r}: there is no such definition of {name}; there is "
                f"{listed}"
            )
        if self.kl_coef:
            changes = changes | KL_VARIANTS.get(self.variant, {})
        if not changes:
            raise ValueError(
                f"variant={self.variant} would change nothing: {self.variant} defines {name} as it "
                "is here; leave it out"
            )
        for setting, (ours, theirs) in changes.items():
            value = getattr(self, setting)
            # constant_length has a setting without a default
            is_any_length = ours is weighting.constant_length and function_of(value) is ours
            if not (same(value, ours) or is_any_length or same(value, theirs)):
                raise ValueError(
                    f"variant={self.variant} sets {setting}={name_of(theirs)}, and "
                    f"{setting}={name_of(value)} is given; leave out one of the two"
                )
            object.__setattr__(self, setting, theirs)

    def _check_values(self) -> None:
        if self.num_generations < 2:
            raise ValueError(
                f"num_generations={self.num_generations}: a completion is compared with the "
                "others of its group, so it takes at least 2 (8 is usual)"
            )
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                limit = f"be at least {least}" if least else "not be negative"
                raise ValueError(f"{name}={value} must {limit}")
        if self.clip_low is not None and self.clip_low >= 1:
            raise ValueError(
                f"clip_low={self.clip_low} would change nothing: no ratio is below 0; give a "
                "number below 1, or null"
            )
        if not 0 < self.reference_mix <= 1:
            raise ValueError(f"reference_mix={self.reference_mix} is above 0 and at most 1")
        if self.advantage_clip is not None and self.advantage_clip <= 0:
            raise ValueError(f"advantage_clip={self.advantage_clip} must be above 0")
        for name, value in settings_of(self.surrogate).items():
            least = {"dual": 1.0, "tau_positive": 0.0, "tau_negative": 0.0, "cap": 0.0}.get(name)
            if least is not None and value is not None and value <= least:
                raise ValueError(f"surrogate.{name}={value} must be above {least:g}")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                listed = f"{', '.join(choices[:-1])} or {choices[-1]}"
                raise ValueError(f"{name}={getattr(self, name)!r}; it is {listed}")

    def _check_functions(self) -> None:
        """Checks that functions take their arguments. Ours raise ValueError for wrong settings."""
        mask = np.ones((1, 2), bool)
        rewards = np.array([[0.0, 1.0]])
        whole = adv.WholeBatch(np.array([[1, 2]]), {"reward": rewards})
        arguments = {
            "advantages": [rewards],
            "weighting": [mask, np.zeros(1, int)][: 1 + weighting.takes_prompts(self.weighting)],
            "ratio": [None, None],
            "surrogate": [None, None][: 1 + surrogates.takes_bounds(self.surrogate)],
            "shaping": [np.array([1, 2])],
            "correction": [np.zeros((1, 2)), mask],
        }
        for name, values in arguments.items():
            function = getattr(self, name)
            if function is None:
                continue
            known = (
                {"whole": whole} if name == "advantages" and adv.takes_whole(function) else {}
            )
            try:
                inspect.signature(function).bind(*values, **known)
            except TypeError as error:
                raise ValueError(
                    f"{name} is called with {len(values)} arguments and its settings: {error}"
                ) from error
            is_ours = function_of(function).__module__.startswith("tunix_lite.algorithms.")
            if is_ours and name not in ("ratio", "surrogate"):
                function(*values, **known)

    def _check_together(self) -> None:
        if self.updates_per_rollout % self.mini_batches:
            raise ValueError(
                f"mini_batches={self.mini_batches} must divide "
                f"updates_per_rollout={self.updates_per_rollout}: every update learns from the "
                "next mini-batch, and each is learned from equally often"
            )
        if self.reference_every % self.updates_per_rollout:
            raise ValueError(
                f"reference_every={self.reference_every} must be a multiple of "
                f"updates_per_rollout={self.updates_per_rollout}: a rollout is scored once"
            )
        surrogate = name_of(self.surrogate)
        if function_of(self.ratio) is ratios.no_ratio:
            if self.updates_per_rollout > 1:
                raise ValueError(
                    f"ratio=no_ratio with updates_per_rollout={self.updates_per_rollout}: only the "
                    "first update of a rollout uses the policy that sampled; use token_ratio"
                )
            if function_of(self.surrogate) in OF_THE_RATIO:
                raise ValueError(
                    f"surrogate={surrogate} is a function of the ratio, which is 1 with "
                    "ratio=no_ratio; take surrogate=policy_gradient"
                )
        if self.correction is not None and self.old_logprobs != "rescored":
            raise ValueError(
                "correction compares the trainer with the sampler, so it needs the trainer's own "
                "log-probabilities: set old_logprobs=rescored"
            )
        if self.agreeing_groups == "replace" and self.max_rounds < 2:
            raise ValueError(
                "agreeing_groups=replace with max_rounds=1 replaces no group; raise "
                "max_rounds (3 is usual), or set agreeing_groups=drop"
            )
        is_shaped = self.shaping is not None or self.is_kl_reward
        if is_shaped and function_of(self.advantages) is adv.max_likelihood:
            raise ValueError(
                "advantages=max_likelihood takes rewards of 0 and 1 only: leave out shaping and "
                "kl_estimator=k1_reward"
            )

        # A setting that changes nothing is a mistake, too.
        idle: dict[str, str] = {}
        if not surrogates.takes_bounds(self.surrogate):
            idle |= dict.fromkeys(
                ("clip_low", "clip_high"), f"surrogate={surrogate} clips no ratio"
            )
        if not self.reference_every:
            idle["reference_mix"] = "reference_every=0, so the reference stays as it is"
        if not self.kl_coef:
            no_kl = "kl_coef=0, so there is no KL term"
            idle |= dict.fromkeys(("kl_estimator", "reference_every"), no_kl)
        if self.agreeing_groups != "replace":
            idle["max_rounds"] = "prompts are drawn once unless agreeing_groups=replace"
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in idle and value is not None and not same(value, field.default):
                raise ValueError(
                    f"{field.name}={name_of(value)} would change nothing: {idle[field.name]}; "
                    "leave it out"
                )

    def refusal_of_stale(self) -> str | None:
        """Explains why these settings cannot learn from tokens that earlier weights drew, and what
        to set. None: they can, since all that they compute of such a token has its importance
        weight."""
        if function_of(self.ratio) is ratios.no_ratio:
            return (
                "algorithm.ratio=no_ratio is right only for tokens of the current weights; set "
                "algorithm.ratio._target_=tunix_lite.algorithms.ratios.token_ratio"
            )
        if self.is_kl_reward or (self.kl_coef and self.kl_estimator == "k2"):
            return (
                f"algorithm.kl_estimator={self.kl_estimator} is right only for tokens of the "
                "current weights; set algorithm.kl_estimator=k3_exact"
            )
        if self.old_logprobs != "rescored":
            return None

        # The trainer's own are of the weights of now. Only a correction has the weight of such a
        # token, and only the gain is multiplied by it.
        masks = function_of(self.correction) is corrections.mask_sequences
        without = {
            "without algorithm.correction": self.correction is None,
            "with algorithm.correction=mask_sequences": masks,
            "with algorithm.kl_coef": self.kl_coef > 0,
            "with algorithm.off_policy_delta": self.off_policy_delta is not None,
        }
        reasons = [reason for reason, holds in without.items() if holds]
        if not reasons:
            return None
        remedy = "algorithm.old_logprobs=whole"
        if self.correction is not None:
            remedy += " algorithm.correction=null"
        if "old_logprobs" in VARIANTS.get(self.objective, {}).get(self.variant, {}):
            remedy += " algorithm.variant=null"
        return (
            f"algorithm.old_logprobs=rescored {reasons[0]} takes a token of earlier weights for "
            f"one of the current weights; set {remedy}"
        )

    @property
    def formula(self) -> list[str]:
        """The loss that is minimised, with its constants, in lines for the panel of a run.

        Example: "loss = - sum_t w min(rho A, clip(rho, 0.8, 1.28) A)", "rho = exp(lp - lp_old)".
        """
        in_loss = self.kl_coef and not self.is_kl_reward
        loss = f"loss = - sum_t w {'c ' if self.correction else ''}{self._gain()}"
        loss += f" + {self.kl_coef:g} sum_t w KL" if in_loss else ""
        loss += f" - {self.entropy_coef:g} sum_t w H" if self.entropy_coef else ""
        has_baseline = settings_of(self.advantages).get("group_baseline")
        advantage = _text(self.advantages, baseline="r - mean_group" if has_baseline else "r")
        if self.advantage_clip is not None:
            advantage += f", within +-{self.advantage_clip:g}"
        lines = [
            loss,
            f"rho = {_text(self.ratio)}; lp_old: {OLD_LOGPROBS[self.old_logprobs]}",
            f"A = {advantage}; w = {_text(self.weighting)}",
        ]
        if in_loss:
            lines.append(f"KL = {KL_VALUES[self.kl_estimator]}, d = lp_ref - lp")
        if self.reference_every:
            mix = self.reference_mix
            rest = f" + {1 - mix:g} reference" if mix < 1 else ""
            lines.append(f"every {self.reference_every} steps: reference = {mix:g} policy{rest}")

        # what the reward has beside that of the task
        if self.is_kl_reward or self.shaping is not None:
            terms = "r = reward of the task"
            if self.is_kl_reward:
                terms += f" - {self.kl_coef:g} sum over the completion of lp_old - lp_ref"
            if self.shaping is not None:
                settings = settings_of(self.shaping)
                over = settings.get("buffer", 0) * settings.get("length", 0)
                free = settings.get("length", 0) - over
                terms += f" {_text(self.shaping, free=free, over=over)}"
            lines.append(terms)
        if self.correction:
            lines.append(f"c = {_text(self.correction)}, v = exp(lp_old - lp of the sampler)")
        if self.off_policy_delta is not None:
            delta = self.off_policy_delta
            lines.append(f"gain 0 where A < 0 and mean of lp_old - lp > {delta:g}")
        if self.agreeing_groups == "drop":
            lines.append("groups of equal rewards have no weight")
        if self.agreeing_groups == "replace":
            rounds = f"with at most {self.max_rounds} rounds of prompts"
            lines.append(f"groups of equal rewards are replaced, {rounds}")
        if self.mask_truncated:
            lines.append("completions that ran out of length have no weight")
        if self.mini_batches > 1:
            times = self.updates_per_rollout // self.mini_batches
            lines.append(
                f"{self.mini_batches} mini-batches of a rollout, learned from {times} times"
            )
        if self.variant:
            lines.append(f"{self.objective} as {self.variant} defines it")
        return lines

    def _gain(self) -> str:
        match self.clip_low, self.clip_high:
            case None, None:
                clipped = "rho"
            case None, high:
                clipped = f"min(rho, {1 + high:g})"
            case low, None:
                clipped = f"max(rho, {1 - low:g})"
            case low, high:
                clipped = f"clip(rho, {1 - low:g}, {1 + high:g})"
        settings = settings_of(self.surrogate)
        function = function_of(self.surrogate)
        if function is surrogates.clip:
            text = f"min(rho A, {clipped} A)"
            dual = settings["dual"]
            return text if dual is None else f"max({text}, {dual:g} A where A < 0)"
        if function is not surrogates.binary_tv:
            return f"({_text(self.surrogate, clipped=clipped)})"
        cap = settings["cap"]
        factor = "rho A" if cap is None else f"sg[min(rho, {cap:g})] A lp"
        text = (
            f"{factor}, 0 where A > 0 and p - p_old > {settings['delta_high']:g} or A < 0 and "
            f"p - p_old < -{settings['delta_low']:g}"
        )
        square = settings["log_square"]
        return f"({text}; - {square:g} (lp - lp_old)^2)" if square else f"({text})"


def _text(piece: Callable[..., Any], **known: str | float) -> str:
    """The formula of a piece; of one that is not ours, its name."""
    template = PIECES.get(function_of(piece))
    if template is None:
        return f"{name_of(piece)}(...)"
    return template.format(**(settings_of(piece) | known))
