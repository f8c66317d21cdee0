"""The settings of GRPO and its family, and their checks."""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from tunix_lite.algorithms import advantages as adv
from tunix_lite.algorithms import corrections, kl, ratios, surrogates, weighting
from tunix_lite.algorithms.algorithm import refuse
from tunix_lite.algorithms.pieces import function_of, settings_of, takes
from tunix_lite.basics.errors import check_choices, check_numbers

CHOICES = {
    "old_logprobs": ("whole", "sampled", "rescored"),
    "agreeing_groups": ("keep", "drop", "replace"),
    "kl_estimator": (*kl.ESTIMATORS, kl.IN_REWARD),
}
# settings of surrogates that must be above a number
ABOVE = {"dual": 1.0, "tau_positive": 0.0, "tau_negative": 0.0, "cap": 0.0}
# functions of the ratio alone, which is 1 under no_ratio
OF_THE_RATIO = (surrogates.clip, surrogates.cispo, surrogates.sapo, surrogates.geometric_mean)


def _name_of(piece: object) -> str:
    """`clip` or `clip(dual=3)` of a function, the value itself of anything else."""
    if not callable(piece):
        return str(piece)
    function = function_of(piece)
    name = getattr(function, "__name__", type(function).__name__)
    bound = piece.keywords if isinstance(piece, partial) else {}
    settings = ", ".join(f"{key}={value}" for key, value in bound.items())
    return f"{name}({settings})" if settings else name


def described(algorithm: object) -> str:
    """Names the pieces of an algorithm, and its settings that are not at their default; "" of one
    that is no dataclass.
    Example: described(GRPO(clip_high=0.3)) begins with "advantages=standardise, weighting="."""
    if not dataclasses.is_dataclass(algorithm):
        return ""
    values = {field: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm)}
    return ", ".join(
        f"{field.name}={_name_of(value)}"
        for field, value in values.items()
        if callable(value) or not (dataclasses.is_dataclass(value) or value == field.default)
    )


@dataclass(frozen=True)
class Objective:
    """The settings of algorithms.grpo.GRPO. Raises ValueError, in one line, for settings that are
    wrong by themselves, do not go together, or would change nothing.
    Example: GRPO(clip_high=0.3, surrogate=sapo) is refused, as sapo clips no ratio."""

    # conf/algorithm/parts/common.yaml explains each setting
    num_generations: int = 8
    updates_per_rollout: int = 1
    mini_batches: int = 1
    advantages: Callable = adv.standardise  # rewards [P, G] -> advantages [P, G]
    advantage_clip: float | None = None
    weighting: Callable = weighting.per_token  # completion mask [B, T] -> loss weights [B, T]
    ratio: Callable = ratios.token_ratio
    # what is maximised per token (algorithms/surrogates.py)
    surrogate: Callable = surrogates.clip
    # Lower clip of the ratio, at 1 - clip_low. null does not clip it from below.
    clip_low: float | None = 0.2
    # Upper clip of the ratio, at 1 + clip_high. null does not clip it from above.
    clip_high: float | None = 0.28
    kl_coef: float = 0.0
    kl_estimator: str = "k3_exact"
    entropy_coef: float = 0.0
    old_logprobs: str = "whole"
    correction: Callable | None = None
    off_policy_delta: float | None = None
    agreeing_groups: str = "keep"
    max_rounds: int = 1
    shaping: Callable | None = None
    mask_truncated: bool = False

    def __post_init__(self):
        counts = "updates_per_rollout mini_batches max_rounds"
        check_numbers(self, counts, lambda x: x >= 1, "must be at least 1")
        others = "clip_low clip_high kl_coef entropy_coef off_policy_delta"
        check_numbers(self, others, lambda x: x >= 0, "must not be negative")
        check_numbers(self, "advantage_clip", lambda x: x > 0, "must be above 0")
        check_choices(self, CHOICES)
        # What may be wrong with others, and with several together.
        surrogate = _name_of(self.surrogate)
        has_no_ratio = function_of(self.ratio) is ratios.no_ratio
        is_shaped = self.shaping is not None or self.is_kl_reward
        updates = f"updates_per_rollout={self.updates_per_rollout}"
        problems = {
            f"num_generations={self.num_generations}: a completion is compared with the others of "
            "its group, so it takes at least 2 (8 is usual)": self.num_generations < 2,
            f"clip_low={self.clip_low} would change nothing: no ratio is below 0; give a number "
            "below 1, or null": (self.clip_low or 0) >= 1,
        }
        for name, value in settings_of(self.surrogate).items():
            if name in ABOVE and value is not None:
                problem = f"surrogate.{name}={value} must be above {ABOVE[name]:g}"
                problems[problem] = value <= ABOVE[name]
        problems |= {
            f"mini_batches={self.mini_batches} must divide {updates}: every update learns from the "
            "next mini-batch, and each is learned from equally often": (
                self.updates_per_rollout % self.mini_batches > 0
            ),
            f"ratio=no_ratio with {updates}: only the first update of a rollout uses the policy "
            "that sampled; use token_ratio": has_no_ratio and self.updates_per_rollout > 1,
            f"surrogate={surrogate} is a function of the ratio, which is 1 with ratio=no_ratio; "
            "take surrogate=policy_gradient": (
                has_no_ratio and function_of(self.surrogate) in OF_THE_RATIO
            ),
            "correction compares the trainer with the sampler, so it needs the trainer's own "
            "log-probabilities: set old_logprobs=rescored": (
                self.correction is not None and self.old_logprobs != "rescored"
            ),
            "agreeing_groups=replace with max_rounds=1 replaces no group; raise max_rounds (3 is "
            "usual), or set agreeing_groups=drop": (
                self.agreeing_groups == "replace" and self.max_rounds < 2
            ),
            "advantages=max_likelihood takes rewards of 0 and 1 only: leave out shaping and "
            "kl_estimator=k1_reward": (
                is_shaped and function_of(self.advantages) is adv.max_likelihood
            ),
        }
        refuse(problems)
        self._check_functions()

        # A setting that changes nothing is a mistake, too.
        idle = {}
        if not takes(self.surrogate, "bounds"):
            why = f"surrogate={_name_of(self.surrogate)} clips no ratio"
            idle |= dict.fromkeys(("clip_low", "clip_high"), why)
        if not self.kl_coef:
            idle["kl_estimator"] = "kl_coef=0, so there is no KL term"
        if self.agreeing_groups != "replace":
            idle["max_rounds"] = "prompts are drawn once unless agreeing_groups=replace"
        for name, why in idle.items():
            value = getattr(self, name)
            if value not in (None, getattr(type(self), name)):
                problem = f"{name}={value} would change nothing"
                raise ValueError(f"{problem}: {why}; leave it out")

    @property
    def is_kl_reward(self) -> bool:
        """Whether the KL is a part of the reward, and not of the loss."""
        return self.kl_coef > 0 and self.kl_estimator == kl.IN_REWARD

    def _check_functions(self) -> None:
        """Checks that functions take their arguments. Ours raise ValueError for wrong settings."""
        # the smallest batch that there can be
        mask = np.ones((1, 2), bool)
        rewards = np.array([[0.0, 1.0]])
        whole = adv.WholeBatch(np.array([[1, 2]]), {"reward": rewards})
        arguments = {
            "advantages": [rewards],
            "weighting": [mask, np.zeros(1, int)][: 1 + takes(self.weighting, "prompt_B")],
            "ratio": [None, None],
            "surrogate": [None, None][: 1 + takes(self.surrogate, "bounds")],
            "shaping": [np.array([1, 2])],
            "correction": [np.zeros((1, 2)), mask],
        }
        for name, values in arguments.items():
            function = getattr(self, name)
            if function is None:
                continue
            sees_all = name == "advantages" and takes(function, "whole")
            known = {"whole": whole} if sees_all else {}
            try:
                inspect.signature(function).bind(*values, **known)
            except TypeError as error:
                raise ValueError(
                    f"{name} is called with {len(values)} arguments and its settings: {error}"
                ) from error
            # what others do when they are called is not known
            is_ours = function_of(function).__module__.startswith("tunix_lite.algorithms.")
            if is_ours and name not in ("ratio", "surrogate"):
                function(*values, **known)

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
        # The trainer's own are of the weights of now. Only a correction has the weight of such a
        # token, and only the gain is multiplied by it.
        masks = function_of(self.correction) is corrections.mask_sequences
        without = {
            "without algorithm.correction": self.correction is None,
            "with algorithm.correction=mask_sequences": masks,
            "with algorithm.kl_coef": self.kl_coef > 0,
            "with algorithm.off_policy_delta": self.off_policy_delta is not None,
        }
        reason = next((reason for reason, holds in without.items() if holds), None)
        if self.old_logprobs != "rescored" or reason is None:
            return None
        remedy = "algorithm.old_logprobs=whole"
        if self.correction is not None:
            remedy += " algorithm.correction=null"
        return (
            f"algorithm.old_logprobs=rescored {reason} takes a token of earlier weights for one of "
            f"the current weights; set {remedy}"
        )
