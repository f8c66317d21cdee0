"""The formula that a run minimises, with its constants, in a few lines of text."""

from collections.abc import Callable
from typing import Any

from tunix_lite.algorithms import advantages as adv
from tunix_lite.algorithms import corrections, kl, ratios, shaping, surrogates, weighting
from tunix_lite.algorithms.pieces import function_of, name_of, settings_of
from tunix_lite.algorithms.variants import objective_of

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


def formula_of(a: Any) -> list[str]:
    """The lines for settings of algorithms.grpo.GRPO.

    Example: "loss = - sum_t w min(rho A, clip(rho, 0.8, 1.28) A)", "rho = exp(lp - lp_old), ...".
    """
    in_loss = a.kl_coef and a.kl_estimator != kl.IN_REWARD
    terms = [f"loss = - sum_t w {'c ' if a.correction else ''}{_gain(a)}"]
    terms += [f"+ {a.kl_coef:g} sum_t w KL"] if in_loss else []
    terms += [f"- {a.entropy_coef:g} sum_t w H"] if a.entropy_coef else []
    lines = [" ".join(terms)]
    lines.append(f"rho = {_text(a.ratio)}; lp_old: {_whose(a)}")
    lines.append(f"A = {_advantages(a)}; w = {_text(a.weighting)}")
    if in_loss:
        lines.append(f"KL = {KL_VALUES[a.kl_estimator]}, d = lp_ref - lp")
    if a.reference_every:
        mix = a.reference_mix
        rest = f" + {1 - mix:g} reference" if mix < 1 else ""
        lines.append(f"every {a.reference_every} steps: reference = {mix:g} policy{rest}")
    lines += _rewards(a)
    if a.correction:
        lines.append(f"c = {_text(a.correction)}, v = exp(lp_old - lp of the sampler)")
    if a.off_policy_delta is not None:
        lines.append(f"gain 0 where A < 0 and mean of lp_old - lp > {a.off_policy_delta:g}")
    lines += _groups(a)
    if a.variant:
        lines.append(f"{objective_of(a)} as {a.variant} defines it")
    return lines


def _text(piece: Callable, **known: Any) -> str:
    """The formula of a piece; of one that is not ours, its name."""
    template = PIECES.get(function_of(piece))
    if template is None:
        return f"{name_of(piece)}(...)"
    return template.format(**(settings_of(piece) | known))


def _gain(a: Any) -> str:
    clipped = _clipped(a.clip_low, a.clip_high)
    settings = settings_of(a.surrogate)
    function = function_of(a.surrogate)
    if function is surrogates.clip:
        text = f"min(rho A, {clipped} A)"
        dual = settings["dual"]
        return text if dual is None else f"max({text}, {dual:g} A where A < 0)"
    if function is surrogates.binary_tv:
        factor = "rho A"
        if settings["cap"] is not None:
            factor = f"sg[min(rho, {settings['cap']:g})] A lp"
        text = (
            f"{factor}, 0 where A > 0 and p - p_old > {settings['delta_high']:g} or A < 0 and "
            f"p - p_old < -{settings['delta_low']:g}"
        )
        square = settings["log_square"]
        return f"({text}; - {square:g} (lp - lp_old)^2)" if square else f"({text})"
    return f"({_text(a.surrogate, clipped=clipped)})"


def _clipped(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return "rho"
    if low is None:
        return f"min(rho, {1 + high:g})"
    if high is None:
        return f"max(rho, {1 - low:g})"
    return f"clip(rho, {1 - low:g}, {1 + high:g})"


def _whose(a: Any) -> str:
    return {
        "whole": "of the sampler, nothing cut off",
        "sampled": "of the sampler, as drawn from",
        "rescored": "of the trainer, before the first update",
    }[a.old_logprobs]


def _advantages(a: Any) -> str:
    known = {}
    if function_of(a.advantages) is adv.whiten:
        has_baseline = settings_of(a.advantages)["group_baseline"]
        known["baseline"] = "r - mean_group" if has_baseline else "r"
    text = _text(a.advantages, **known)
    if a.advantage_clip is None:
        return text
    return f"{text}, within +-{a.advantage_clip:g}"


def _rewards(a: Any) -> list[str]:
    """Writes the terms of the reward beside the rewards of the task."""
    terms = []
    if a.kl_coef and a.kl_estimator == kl.IN_REWARD:
        terms.append(f"- {a.kl_coef:g} sum over the completion of lp_old - lp_ref")
    if a.shaping is not None:
        settings = settings_of(a.shaping)
        known = {}
        if function_of(a.shaping) is shaping.overlong:
            over = settings["buffer"] * settings["length"]
            known = {"free": settings["length"] - over, "over": over}
        terms.append(_text(a.shaping, **known))
    return [f"r = reward of the task {' '.join(terms)}"] if terms else []


def _groups(a: Any) -> list[str]:
    lines = []
    if a.agreeing_groups == "drop":
        lines.append("groups of equal rewards have no weight")
    if a.agreeing_groups == "replace":
        lines.append(
            f"groups of equal rewards are replaced, with at most {a.max_rounds} rounds of prompts"
        )
    if a.mask_truncated:
        lines.append("completions that ran out of length have no weight")
    if a.mini_batches > 1:
        lines.append(
            f"{a.mini_batches} mini-batches of a rollout, learned from "
            f"{a.updates_per_rollout // a.mini_batches} times"
        )
    return lines
