"""Variants of other frameworks: `algorithm.variant=verl` changes one of our objectives to the
default of the same name in that framework, as far as losses, advantages and weights go.

Read in the frameworks' code of 2026-07 and 2026-08 (docs/guide/objectives.md). Each entry is
{setting: (what it is in our preset, what it becomes)}.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

from tunix_lite.algorithms import advantages as adv
from tunix_lite.algorithms import ratios, surrogates, weighting
from tunix_lite.algorithms.pieces import function_of, name_of, same

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
# variants of frameworks that are known and not offered, with the reason
REFUSED: dict[str, dict[str, str]] = {
    "grpo": {
        "tunix": "its KL is k1 as a loss, which has no expected gradient",
        "tinker": "its ratio compares with the sampler, and its loss is a sum",
    },
    "dr_grpo": {
        "verl": "it divides by the padded width, which changes with the batch",
        "tunix": "it divides by the padded width, which changes with the batch",
    },
    "gspo": {
        "tunix": "it is the paper's, except for empty completions",
        "openrlhf": "its ratio compares with the sampler",
    },
    "cispo": {"tinker": "its ratio compares with the sampler, and its loss is a sum"},
    "rloo": {"tunix": "it is clipped and averages over completions that are not empty"},
    "reinforce_pp": {"nemo_rl": "its variance is that of a population"},
    "scalerl": {"paper": "the preset is that definition without a variant"},
}
# variants of the KL term, in every objective that has one
KL = {"trl": {"kl_estimator": ("k3_exact", "k3")}, "verl": {"kl_estimator": ("k3_exact", "k3")}}


def objective_of(algorithm: Any) -> str:
    """Names the preset of the settings, by the values that only it has."""
    by_surrogate = {
        surrogates.cispo: "cispo",
        surrogates.sapo: "sapo",
        surrogates.binary_tv: "dppo",
        surrogates.geometric_mean: "gmpo",
    }
    by_advantages = {
        adv.leave_one_out: "rloo",
        adv.whiten: "reinforce_pp",
        adv.max_likelihood: "maxrl",
        adv.centre: "dr_grpo",
        adv.batch_scaled: "scalerl",
        adv.per_reward: "gdpo",
    }
    surrogate = function_of(algorithm.surrogate)
    advantages = function_of(algorithm.advantages)
    if advantages is adv.batch_scaled and surrogate is surrogates.cispo:
        return "scalerl"
    if surrogate in by_surrogate:
        return by_surrogate[surrogate]
    if function_of(algorithm.ratio) is ratios.sequence_ratio:
        return "gspo"
    if advantages in by_advantages:
        return by_advantages[advantages]
    return "dapo" if algorithm.agreeing_groups == "replace" else "grpo"


def apply_variant(algorithm: Any) -> None:
    """Changes the settings of a GRPO that is being made to those of its variant. Raises ValueError
    if the framework defines no such objective, or no other one, or if a setting that it changes has
    been changed already.

    A GRPO that is made of the settings of another one has them changed already, which is fine.
    """
    if algorithm.variant is None:
        return
    name, changes = _changes(algorithm)
    if algorithm.kl_coef:
        changes = changes | KL.get(algorithm.variant, {})
    if not changes:
        raise ValueError(
            f"variant={algorithm.variant} would change nothing: {algorithm.variant} defines {name} "
            "as it is here; leave it out"
        )
    for setting, (ours, theirs) in changes.items():
        value = getattr(algorithm, setting)
        # constant_length has a setting without a default
        is_any_length = ours is weighting.constant_length and function_of(value) is ours
        is_ours = same(value, ours) or is_any_length
        if not is_ours and not same(value, theirs):
            raise ValueError(
                f"variant={algorithm.variant} sets {setting}={name_of(theirs)}, and "
                f"{setting}={name_of(value)} is given; leave out one of the two"
            )
        object.__setattr__(algorithm, setting, theirs)


def _was_changed(algorithm: Any, name: str, changes: Changes) -> bool:
    """True if the settings are those of objective `name` after the changes of a variant. Another
    preset may have the changed values by itself, as dr_grpo has the upper clip of grpo's trl."""
    if not all(same(getattr(algorithm, k), new) for k, (_, new) in changes.items()):
        return False
    looked_at = ("advantages", "surrogate", "ratio", "agreeing_groups")
    before = {k: changes[k][0] if k in changes else getattr(algorithm, k) for k in looked_at}
    return objective_of(SimpleNamespace(**before)) == name


def _changes(algorithm: Any) -> tuple[str, Changes]:
    """(objective, what the variant changes). Raises ValueError if there is no such variant."""
    name = objective_of(algorithm)
    known = VARIANTS.get(name, {})
    if algorithm.variant in known:
        return name, known[algorithm.variant]
    # made of the settings of one that was changed already: its pieces may be of another objective
    for other, variants in VARIANTS.items():
        changes = variants.get(algorithm.variant, {})
        if changes and _was_changed(algorithm, other, changes):
            return other, changes
    listed = ", ".join(known) or "none"
    reason = REFUSED.get(name, {}).get(algorithm.variant)
    why = "there is no such definition of" if reason is None else f"{reason}; not offered for"
    raise ValueError(f"variant={algorithm.variant!r}: {why} {name}; there is {listed}")
