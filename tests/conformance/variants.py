"""What each framework means by a name: one row for each (objective, framework)."""

from dataclasses import replace
from typing import Any

from conformance import formulas as f
from conformance.formulas import objective
from conformance.rows import LONGEST, Variant, advantage, correction, grpo, ratio, surrogate, weighting

# settings of ours that several rows have
STD = advantage("standardise", eps=1e-4)
STD_VERL = advantage("standardise", eps=1e-6)
STD_NEMO = advantage("leave_one_out_std", eps=1e-6)
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
CONSTANT = weighting("constant_length", length=LONGEST)
SEQUENCES = weighting("per_sequence")
PLAIN = {"surrogate": surrogate("policy_gradient")}
TIS = correction("truncate_tokens", cap=2.0)

# the same as formulas
A_TRL = f.group_std(1e-4)
A_VERL = f.group_std(1e-6)
A_NEMO = f.peers_std(1e-6)
CLIPPED = f.clipped(0.2, 0.2)
CLIPPED_HIGHER = f.clipped(0.2, 0.28)

# ---- advantages by groups, ratios of tokens, clipped

_GROUPS = [
    # Who divides by which std, and over what the loss is a mean.
    Variant(
        "grpo",
        "paper",
        "- min(rho A, clip(rho, 0.8, 1.2) A); A = (r - mean) / std of the group; mean over completions of token means",
        objective(f.group_std(1e-4), CLIPPED, f.mean_of_completions),
        grpo(advantages=STD, weighting=SEQUENCES, **CLIP),
        "the std has G - 1, and 1e-4 is added, which the paper leaves open",
    ),
    Variant(
        "grpo_default",
        "trl",
        "loss_type not given: token mean; clip 0.2",
        objective(A_TRL, CLIPPED),
        grpo(advantages=STD, **CLIP),
        "what TRL calls GRPO unless loss_type=grpo is given",
    ),
    Variant(
        "grpo",
        "verl",
        "std + 1e-6; token mean; dual clip at 3: where A < 0 the gain is not below 3 A",
        objective(A_VERL, f.clipped(0.2, 0.2, dual=3.0)),
        grpo(advantages=STD_VERL, surrogate=surrogate("clip", dual=3.0), **CLIP),
        "no gradient where A < 0 and rho > 3",
    ),
    Variant(
        "grpo",
        "nemo_rl",
        "A = (r - mean of the others) / (std of the others + 1e-6), undivided where that std is 0; token mean",
        objective(A_NEMO, CLIPPED),
        grpo(advantages=STD_NEMO, **CLIP),
        "in a group of 0 and seven of 0.95 the one is not divided and the seven are; rounding "
        "in their one-pass variance gives -2000",
    ),
    Variant(
        "grpo",
        "prime_rl",
        "A = r - mean of the group, no std; otherwise DPPO (see dppo)",
        objective(f.less_group_mean, f.tv_masked(0.2, log_square=1e-3, drops_zero=True)),
        grpo(surrogate=surrogate("binary_tv", log_square=1e-3)),
        sampled="sampler",
    ),
    Variant(
        "grpo",
        "areal",
        "A = (r - mean) / (std + 1e-9), both of the batch; token mean",
        objective(f.batch_std(1e-9, mean="batch"), CLIPPED),
        grpo(advantages=advantage("batch_scaled", mean="batch", eps=1e-9), **CLIP),
        "the page's formula has the group's statistics; a batch of easy and hard prompts gets "
        "advantages for being easy",
    ),
    Variant(
        "grpo",
        "openrlhf",
        "group mean and std + 1e-9; token mean",
        objective(f.group_std(1e-9), CLIPPED),
        grpo(advantages=advantage("standardise", eps=1e-9), **CLIP),
    ),
    Variant(
        "grpo",
        "tinker",
        "A = r - mean of the group; - rho A against the sampler, summed over tokens",
        objective(f.less_group_mean, f.importance(f.ratio_to_sampler)),
        grpo(**PLAIN),
        "their sum is our mean times the number of tokens",
        sampled="sampler",
    ),
    Variant(
        "grpo",
        "tunix",
        "std + 1e-6; clip 0.2; mean over completions that are not empty; + 0.04 k1 as a loss",
        objective(A_VERL, CLIPPED, f.mean_of_nonempty, kl=f.kl_k1, kl_coef=0.04),
        None,
        "k1 as a loss has no expected gradient: the penalty regularises nothing",
    ),
    # What the constant is.
    Variant(
        "dr_grpo",
        "paper",
        "A = r - mean; clip 0.2; sum over tokens / (completions * longest allowed)",
        objective(f.less_group_mean, CLIPPED, f.over_longest_allowed),
        grpo(weighting=CONSTANT, **CLIP),
    ),
    Variant(
        "dr_grpo",
        "verl",
        "seq-mean-token-sum-norm without loss_scale_factor: divided by the padded width",
        objective(f.less_group_mean, f.clipped(0.2, 0.2, dual=3.0), f.over_padded_width),
        None,
        "the divisor is the longest completion of the batch, so it changes from batch to batch",
    ),
    # A higher upper bound, and every token counts the same.
    Variant(
        "dapo",
        "paper",
        "clip 0.2 below and 0.28 above; A as in GRPO; token mean",
        objective(f.group_std(1e-4), CLIPPED_HIGHER),
        grpo(advantages=STD, clip_low=0.2, clip_high=0.28),
    ),
    Variant(
        "dapo",
        "verl",
        "clip_ratio_high=0.28; std + 1e-6; dual clip at 3",
        objective(A_VERL, f.clipped(0.2, 0.28, dual=3.0)),
        grpo(advantages=STD_VERL, surrogate=surrogate("clip", dual=3.0), clip_low=0.2, clip_high=0.28),
    ),
    Variant(
        "dapo",
        "tunix",
        "epsilon_high=0.28; std + 1e-6; token mean",
        objective(A_VERL, CLIPPED_HIGHER),
        grpo(advantages=STD_VERL, clip_low=0.2, clip_high=0.28),
        "its dynamic sampling is not there, and overlong shaping counts characters",
    ),
    # A bound on what the lower clip lets through.
    Variant(
        "two_sided_clip",
        "trl",
        "delta=4: rho is at most 4 on the unclipped branch",
        objective(A_TRL, f.clipped(0.2, 0.2, dual=4.0)),
        grpo(advantages=STD, surrogate=surrogate("clip", dual=4.0), **CLIP),
    ),
    # The ratio to the trainer, weighted for the sampler.
    Variant(
        "decoupled_ppo",
        "areal",
        "w min(rho A, clip(rho) A), w = exp(old - sampler) without gradient",
        objective(f.less_group_mean, CLIPPED, correction=f.truncate(1e30)),
        grpo(old_logprobs="rescored", correction=correction("truncate_tokens", cap=1e30), **CLIP),
        sampled="sampler",
    ),
]

# ---- ratios of completions

GSPO_LOW = 3e-4
GSPO_HIGH = 4e-4
GSPO_BOUNDS = {"clip_low": GSPO_LOW, "clip_high": GSPO_HIGH}
GSPO_OURS = grpo(advantages=STD, weighting=SEQUENCES, ratio=ratio("sequence_ratio"), **GSPO_BOUNDS)
GSPO_OURS_VERL = GSPO_OURS | {"advantages": STD_VERL}
GSPO = f.clipped(GSPO_LOW, GSPO_HIGH, f.ratio_of_completions)
GSPO_BY_TOKEN = f.clipped(GSPO_LOW, GSPO_HIGH, f.completion_ratio_by_token)
_COMPLETION_RATIOS = [
    # One ratio for a completion; some give each token its own gradient.
    Variant(
        "gspo",
        "paper",
        "s = exp(mean_t log rho); - min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A); mean over completions",
        objective(A_TRL, GSPO, f.mean_of_completions),
        GSPO_OURS,
    ),
    Variant(
        "gspo",
        "verl",
        "s_t = exp(sg[log s] + lp - sg[lp]): the token's own gradient; mean over completions of token means",
        objective(A_VERL, GSPO_BY_TOKEN, f.mean_of_completions),
        GSPO_OURS_VERL,
        "another form of the same gradient, since A is the same for all tokens",
    ),
    Variant(
        "gspo",
        "nemo_rl",
        "sequence_level_importance_ratios, with their advantages",
        objective(f.peers_std(1e-6), GSPO, f.mean_of_completions),
        GSPO_OURS | {"advantages": STD_NEMO},
        "the advantages are those of grpo@nemo_rl",
    ),
    Variant(
        "gspo",
        "openrlhf",
        "with a sampler correction: s against the sampler, not against the old policy",
        objective(
            f.group_std(1e-9), f.clipped(GSPO_LOW, GSPO_HIGH, f.completion_ratio_to_sampler), f.mean_of_completions
        ),
        GSPO_OURS | {"advantages": advantage("standardise", eps=1e-9)},
        sampled="sampler",
    ),
    Variant(
        "gspo",
        "tunix",
        "loss_algo=gspo-token: the form of verl; mean over completions that are not empty",
        objective(A_VERL, GSPO_BY_TOKEN, f.mean_of_nonempty),
        None,
        "equal to ours but where a completion is empty",
    ),
    # The same with a mean over tokens, where long completions weigh more.
    Variant(
        "gspo_token_mean",
        "trl",
        "importance_sampling_level=sequence with the default loss_type=dapo: token mean",
        objective(A_TRL, GSPO),
        GSPO_OURS | {"weighting": weighting("per_token")},
        "long completions weigh more, which TRL warns of",
    ),
    # The same with a sum over tokens.
    Variant(
        "luspo",
        "trl",
        "s A summed over the tokens of a completion, mean over completions",
        objective(A_TRL, GSPO, f.sum_of_completions),
        None,
        "a weight by length that we have no name for",
    ),
    # Token ratios are bounded before their geometric mean is taken.
    Variant(
        "gmpo",
        "paper",
        "exp(mean_t of log rho, at most 0.4 where A > 0, at least -0.4 where A < 0) A",
        objective(A_TRL, f.geometric_ratio(0.4), f.mean_of_completions),
        grpo(advantages=STD, weighting=SEQUENCES, surrogate=surrogate("geometric_mean", log_clip=0.4)),
    ),
    Variant(
        "gmpo",
        "verl",
        "geo_mean, with clip_ratio 0.4 on logarithms; std + 1e-6",
        objective(A_VERL, f.geometric_ratio(0.4), f.mean_of_completions),
        grpo(advantages=STD_VERL, weighting=SEQUENCES, surrogate=surrogate("geometric_mean", log_clip=0.4)),
    ),
]

# ---- the ratio as a weight, gates and masks

WEIGHTED = {"surrogate": surrogate("cispo")}
WEIGHTED_AROUND_ONE = WEIGHTED | CLIP
WEIGHTED_UP_TO_5 = {"clip_low": None, "clip_high": 4.0} | WEIGHTED
TV = surrogate("binary_tv")
TV_LOG_SQUARE = surrogate("binary_tv", log_square=1e-3)
_TOKEN_RATIOS = [
    # Bounds around 1, or the bounds themselves; to the trainer, or to the sampler.
    Variant(
        "cispo",
        "paper",
        "- sg[min(rho, 1 + eps)] A lp; token mean; no lower bound; eps = 0.2",
        objective(A_TRL, f.bounded_weight(None, 1.2)),
        grpo(advantages=STD, clip_low=None, clip_high=0.2, **WEIGHTED),
    ),
    Variant(
        "cispo",
        "trl",
        "- sg[min(rho, eps_high)] A lp: eps_high is the cap itself; 5 as ScaleRL recommends",
        objective(A_TRL, f.bounded_weight(None, 5.0)),
        grpo(advantages=STD, **WEIGHTED_UP_TO_5),
        "left at its default the cap is 0.2: nearly all tokens have that one weight",
    ),
    Variant(
        "cispo_default",
        "trl",
        "epsilon_high not given: the cap is 0.2",
        objective(A_TRL, f.bounded_weight(None, 0.2)),
        None,
        "nearly all tokens have the one weight 0.2; we refuse a cap below 1",
    ),
    Variant(
        "cispo",
        "verl",
        "- sg[clip(rho, 0.8, 1.2)] A lp",
        objective(A_VERL, f.bounded_weight(0.8, 1.2)),
        grpo(advantages=STD_VERL, **WEIGHTED_AROUND_ONE),
    ),
    Variant(
        "cispo",
        "nemo_rl",
        "as verl, with their advantages",
        objective(f.peers_std(1e-6), f.bounded_weight(0.8, 1.2)),
        grpo(advantages=STD_NEMO, **WEIGHTED_AROUND_ONE),
        "the advantages are those of grpo@nemo_rl",
    ),
    Variant(
        "cispo",
        "skyrl",
        "cispo_anchor=rollout: rho against the sampler, within 0.8 and 1.2",
        objective(A_VERL, f.bounded_weight(0.8, 1.2, f.ratio_to_sampler)),
        grpo(advantages=STD_VERL, **WEIGHTED_AROUND_ONE),
        sampled="sampler",
    ),
    Variant(
        "cispo",
        "tinker",
        "clip_low_threshold=0.8 and clip_high_threshold=1.2 are the bounds themselves; A = r - mean",
        objective(f.less_group_mean, f.bounded_weight(0.8, 1.2, f.ratio_to_sampler)),
        grpo(**WEIGHTED_AROUND_ONE),
        sampled="sampler",
    ),
    # What else ScaleRL changes beside the cap.
    Variant(
        "scalerl",
        "paper",
        "CISPO with cap 5; A = (r - group mean) / std of the batch; mean over prompts of token means",
        objective(f.batch_std(1e-4), f.bounded_weight(None, 5.0), f.prompt_mean),
        grpo(advantages=advantage("batch_scaled"), weighting=weighting("per_prompt"), **WEIGHTED_UP_TO_5),
    ),
    # Anchored at the sampler with the gradient of the ratio, or at the trainer without.
    Variant(
        "dppo",
        "paper",
        "- rho A against the sampler, 0 where A > 0 and p - p_gen > 0.2 or A < 0 and p - p_gen < -0.2",
        objective(f.less_group_mean, f.tv_masked(0.2)),
        grpo(surrogate=TV),
        sampled="sampler",
    ),
    Variant(
        "dppo",
        "prime_rl",
        "the same, + 1e-3 (lp - lp_gen)^2 on all tokens",
        objective(f.less_group_mean, f.tv_masked(0.2, log_square=1e-3, drops_zero=True)),
        grpo(surrogate=TV_LOG_SQUARE),
        "where A = 0 it may drop a token, which changes nothing",
        sampled="sampler",
    ),
    Variant(
        "dppo",
        "skyrl",
        "as the paper; group std + 1e-6",
        objective(A_VERL, f.tv_masked(0.2)),
        grpo(advantages=STD_VERL, surrogate=TV),
        sampled="sampler",
    ),
    Variant(
        "dppo",
        "verl",
        "- keep sg[min(rho, 20)] A lp, rho and p against the old policy",
        objective(A_VERL, f.tv_masked(0.2, anchor="old", cap=20.0)),
        grpo(advantages=STD_VERL, surrogate=surrogate("binary_tv", cap=20.0)),
    ),
    # A gate in place of a clip.
    Variant(
        "sapo",
        "paper",
        "- (4 / tau) sigmoid(tau (rho - 1)) A; tau 1 for A > 0, 1.05 else; mean over completions",
        objective(A_TRL, f.soft_gate(1.0, 1.05), f.mean_of_completions),
        grpo(advantages=STD, weighting=SEQUENCES, surrogate=surrogate("sapo")),
    ),
    Variant(
        "sapo",
        "verl",
        "the same; std + 1e-6",
        objective(A_VERL, f.soft_gate(1.0, 1.05), f.mean_of_completions),
        grpo(advantages=STD_VERL, weighting=SEQUENCES, surrogate=surrogate("sapo")),
    ),
]

# ---- other baselines

K1_REWARD = {"kl_coef": 0.05, "kl_estimator": "k1_reward"}
MAXRL_OURS = grpo(advantages=advantage("max_likelihood"), **PLAIN)
_BASELINES = [
    # The mean of the others as baseline.
    Variant(
        "rloo",
        "paper",
        "A = r - mean of the others; - rho A; token mean",
        objective(f.less_others_mean, f.importance()),
        grpo(advantages=advantage("leave_one_out"), **PLAIN),
    ),
    Variant(
        "rloo",
        "trl",
        "r is less 0.05 sum_t (old - ref); A = r - mean of the others; clip 0.2 on the ratio of tokens",
        objective(f.with_k1(f.less_others_mean, 0.05), f.clipped(0.2, 0.2)),
        grpo(advantages=advantage("leave_one_out"), **CLIP, **K1_REWARD),
        "their ratio is that of whole completions, a product over tokens",
    ),
    Variant(
        "rloo",
        "verl",
        "A = G / (G - 1) (r - mean)",
        objective(f.less_others_mean, f.clipped(0.2, 0.2, dual=3.0)),
        grpo(advantages=advantage("leave_one_out"), surrogate=surrogate("clip", dual=3.0), **CLIP),
    ),
    Variant(
        "rloo",
        "tunix",
        "A = r - mean of the others; clip 0.2; mean over completions that are not empty",
        objective(f.less_others_mean, f.clipped(0.2, 0.2), f.mean_of_nonempty),
        None,
        "equal to ours but where a completion is empty",
    ),
    # Statistics of the whole batch.
    Variant(
        "reinforce_pp",
        "verl",
        "A = r, whitened over the tokens of the batch",
        objective(f.whitened(False), f.clipped(0.2, 0.2, dual=3.0)),
        grpo(
            advantages=advantage("whiten", over="tokens", group_baseline=False),
            surrogate=surrogate("clip", dual=3.0),
            **CLIP,
        ),
    ),
    Variant(
        "reinforce_pp_baseline",
        "paper",
        "A = r - group mean, whitened over the completions of the batch",
        objective(f.whitened(True, over="samples"), f.clipped(0.2, 0.2)),
        grpo(advantages=advantage("whiten", over="samples"), **CLIP),
    ),
    Variant(
        "reinforce_pp_baseline",
        "verl",
        "the same over tokens: long completions weigh more in mean and std",
        objective(f.whitened(True), f.clipped(0.2, 0.2, dual=3.0)),
        grpo(advantages=advantage("whiten", over="tokens"), surrogate=surrogate("clip", dual=3.0), **CLIP),
    ),
    Variant(
        "reinforce_pp_baseline",
        "nemo_rl",
        "over tokens, with the variance of a population",
        objective(f.whitened(True, ddof=0), f.clipped(0.2, 0.2)),
        None,
        "differs from verl by sqrt(n / (n - 1)) of the tokens",
    ),
    # The mean of the group, the std of the batch.
    Variant(
        "batch_scaled",
        "trl",
        "scale_rewards=batch: (r - group mean) / (std of the batch + 1e-4)",
        objective(f.batch_std(1e-4), f.clipped(0.2, 0.2)),
        grpo(advantages=advantage("batch_scaled", eps=1e-4), **CLIP),
    ),
    # A success rate in the denominator; what stands beside it where the rate is 0.
    Variant(
        "maxrl",
        "paper",
        "A = (r - mean) / mean, 0 where the mean is 0; - rho A; rewards of 0 and 1",
        objective(f.over_mean(), f.importance()),
        MAXRL_OURS,
        binary=True,
    ),
    Variant(
        "maxrl",
        "prime_rl",
        "as the paper, with their DPPO",
        objective(f.over_mean(), f.tv_masked(0.2, log_square=1e-3, drops_zero=True)),
        grpo(advantages=advantage("max_likelihood"), surrogate=surrogate("binary_tv", log_square=1e-3)),
        binary=True,
        sampled="sampler",
    ),
    Variant(
        "maxrl",
        "skyrl",
        "A = (r - mean) / (mean + 1e-6)",
        objective(f.over_mean(1e-6), f.importance()),
        MAXRL_OURS,
        "for rewards of 0 and 1 within 4e-6 of the paper; negative rewards turn the sign",
        binary=True,
    ),
    Variant(
        "maxrl",
        "trl",
        "pull request 5026: A = (r - mean) / (mean + 1e-4)",
        objective(f.over_mean(1e-4), f.importance()),
        None,
        "4e-4 from the paper at a success rate of 1 in 4",
        binary=True,
    ),
    # Several rewards, each on a scale of its own.
    Variant(
        "gdpo",
        "trl",
        "normalise_then_sum: each reward (r - mean) / (std + 1e-4) in its group, the sum again over the batch + 1e-4",
        objective(f.each_reward(1e-4, 1e-4), f.clipped(0.2, 0.2)),
        grpo(advantages=advantage("per_reward", eps=1e-4), **CLIP),
    ),
    Variant(
        "gdpo",
        "nemo_rl",
        "the same without anything added at the end",
        objective(f.each_reward(1e-6, 0.0), f.clipped(0.2, 0.2)),
        None,
        "divides 0 by 0 where all agree",
    ),
    # A baseline weighted by lengths.
    Variant(
        "opo",
        "verl",
        "A = r - sum(L r) / sum(L) of the group, L the length",
        objective(f.length_weighted, f.clipped(0.2, 0.2, dual=3.0)),
        None,
        "not offered",
    ),
    # No ratio at all.
    Variant(
        "reinforce",
        "verl",
        "gpg: - A lp, A = r - group mean",
        objective(f.less_group_mean, f.plain_logprob),
        grpo(ratio=ratio("no_ratio"), **PLAIN),
        "our value is of A rather than of A lp, which says nothing either",
        gradient_only=True,
    ),
    Variant(
        "reinforce",
        "nemo_rl",
        "disable_ppo_ratio: - A lp, with their advantages",
        objective(f.peers_std(1e-6), f.plain_logprob),
        grpo(advantages=STD_NEMO, ratio=ratio("no_ratio"), **PLAIN),
        "the advantages are those of grpo@nemo_rl",
        gradient_only=True,
    ),
]


# ---- what trainer and sampler disagree about


def with_factor(factor: Any, ours: dict | None, name: str, by: str, formula: str, why: str = "") -> Variant:
    """Centred rewards and a clip of 0.2, whose gain is multiplied by the factor."""
    settings = None if ours is None else grpo(old_logprobs="rescored", correction=ours, **CLIP)
    loss = objective(f.less_group_mean, CLIPPED, correction=factor)
    return Variant(name, by, formula, loss, settings, why, sampled="sampler")


GEOMETRIC = "mask_sequences"
_CORRECTIONS = [
    with_factor(f.truncate(2.0), TIS, "tis_token", "verl", "min(w, 2), w = exp(old - sampler)"),
    with_factor(
        f.truncate(3.0), correction("truncate_tokens", cap=3.0), "tis_token", "trl", "token_truncate: min(w, 3)"
    ),
    with_factor(
        f.truncate(2.0, "sequence"),
        None,
        "tis_sequence",
        "verl",
        "min(product over the completion of w, 2)",
        "a product over tokens grows with the length",
    ),
    with_factor(f.truncate(5.0, "sequence"), None, "tis_sequence", "skyrl", "min(product of w, 5)", "as verl"),
    with_factor(
        f.mask_outside(0.0, 3.0, "sequence"),
        None,
        "sequence_mask",
        "trl",
        "the default: the product of w, 0 above 3",
        "leaves out long completions: a gap of 1e-3 a token is e^2 over 2,000 tokens",
    ),
    with_factor(
        f.mask_outside(0.5, 5.0),
        correction("mask_tokens", low=0.5, high=5.0),
        "icepop",
        "nemo_rl",
        "w within 0.5 and 5, else 0",
    ),
    with_factor(
        f.mask_outside(0.0, 3.0),
        correction("mask_tokens", low=0.0, high=3.0),
        "icepop",
        "trl",
        "token_mask: w up to 3, else 0",
    ),
    with_factor(
        f.mask_outside(0.5, 2.0, keep=False),
        None,
        "token_mask",
        "skyrl",
        "1 where w is within 0.5 and 2, else 0",
        "the same name, without the weight",
    ),
    with_factor(
        f.geometric_mask(0.99, 1.01),
        correction(GEOMETRIC, low=0.99, high=1.01),
        "geometric_mask",
        "skyrl",
        "1 for a completion whose geometric mean of w is within 0.99 and 1.01, else 0",
    ),
    with_factor(
        f.geometric_mask(0.999, 1.002, True),
        None,
        "geometric_mask",
        "nemo_rl",
        "seq-mask-tis: the same within 0.999 and 1.002, times the w of each token",
        "two corrections in one",
    ),
    # Away from whom.
    Variant(
        "off_policy_mask",
        "trl",
        "off_policy_mask_threshold=0.5: 0 for a completion with A < 0 and mean(sampler - lp) > 0.5",
        objective(f.less_group_mean, CLIPPED, correction=f.off_policy_mask(0.5)),
        None,
        "theirs is away from the sampler, beside a ratio to the trainer; ours has one anchor",
        sampled="sampler",
    ),
    Variant(
        "off_policy_mask",
        "paper",
        "0 for a completion with A < 0 and mean(old - lp) > 0.5",
        objective(f.less_group_mean, CLIPPED, correction=f.off_policy_mask(0.5, "old")),
        grpo(off_policy_delta=0.5, **CLIP),
    ),
]


# ---- the KL to the reference


def penalised(estimate: Any, ours: str | None, by: str, name: str, formula: str, why: str = "") -> Variant:
    """Centred rewards and a clip of 0.2, with 0.1 times the estimate in the loss."""
    settings = None if ours is None else grpo(kl_coef=0.1, kl_estimator=ours, **CLIP)
    loss = objective(f.less_group_mean, CLIPPED, kl=estimate, kl_coef=0.1)
    return Variant(name, by, formula, loss, settings, why)


NO_GRADIENT = "as a loss its expected gradient is 0"
_KL = [
    penalised(f.kl_k1, None, "verl", "kl_k1", "kl: lp - ref", NO_GRADIENT),
    penalised(f.kl_k2, "k2", "verl", "kl_k2", "mse: (lp - ref)^2 / 2"),
    penalised(f.kl_k3, "k3", "trl", "kl_k3", "exp(d) - d - 1, d = ref - lp"),
    penalised(
        f.kl_k3_clamped,
        None,
        "verl",
        "kl_k3",
        "low_var_kl: d within [-20, 20], the result within [-10, 10]",
        "no gradient exactly where the KL is largest",
    ),
    penalised(
        f.kl_k3_ratio,
        "k3_exact",
        "trl",
        "kl_k3_ratio",
        "use_bias_correction_kl, on by default in 1.16: rho (exp(d) - d - 1)",
        "its two gradients add up to - rho d, as in kl_k3_exact",
    ),
    penalised(
        f.kl_k3_with_k2_gradient,
        None,
        "verl",
        "kl_k3_exact",
        "k3+: the value of k3, the gradient of k2",
        "ours has the ratio besides, so that it is right off policy; equal at rho = 1",
    ),
    penalised(
        f.kl_k3_exact,
        "k3_exact",
        "paper",
        "kl_k3_exact",
        "sg[rho] times the value of k3 with the gradient of k2: the gradient of the KL",
    ),
    # Beside it, and added as it is.
    Variant(
        "entropy_bonus",
        "paper",
        "- 0.01 H, H = - sum_v p_v log p_v over the tokens that could have been drawn",
        objective(f.less_group_mean, CLIPPED, kl=f.less_entropy, kl_coef=0.01),
        grpo(entropy_coef=0.01, **CLIP),
        "arXiv:1602.01783; its gradient is that of H, not of an estimate by the drawn token",
    ),
]

# ---- preferences, a teacher, demonstrations

DPO_OURS = {"_target_": "tunix_lite.algorithms.dpo.DPO", "beta": 0.1, "pairs": "sampled"}
DISTILL_OURS = {
    "_target_": "tunix_lite.algorithms.distill.Distill",
    "teacher": {"_target_": "tunix_lite.models.source.TeacherConfig", "weights": "bundled"},
}
SIGMOID = "- log sigmoid(0.1 (s_chosen - s_rejected)), s = sum_t (lp - ref), mean over pairs"
FORWARD = "KL(q || p) = sum_v q_v (log q_v - log p_v)"
REVERSE = "KL(p || q) = sum_v p_v (log p_v - log q_v)"
MIXTURE = "0.25 KL(q || m) + 0.75 KL(p || m), m = 0.25 q + 0.75 p"


def between_models(name: str, apart: Any, formula: str, top_k: int = 0) -> Variant:
    """A divergence of policy and teacher with its own gradient, no rewards."""
    settings = DISTILL_OURS | {"divergence": name} | ({"top_k": top_k} if top_k else {})
    if name == "jensen_shannon":
        settings["mix"] = 0.25
    over = "all tokens; arXiv:2306.13649"
    if top_k:
        over = f"the {top_k} likeliest tokens of q and one bin for all others; arXiv:2601.20802"
    objective = f"distill_{name}" + ("_top_k" if top_k else "")
    return Variant(objective, "paper", f"{formula} over {over}", f.divergence(apart, top_k), settings)


AS_REWARD = "A_t = - sg[lp - lp_teacher] of each token; - rho A"
_DEMONSTRATIONS = [
    # All agree.
    Variant("dpo", "paper", SIGMOID, f.preferences(0.1), DPO_OURS),
    Variant(
        "ipo",
        "trl",
        "loss_type=ipo: (s_chosen - s_rejected - 1 / (2 beta))^2, s a mean over tokens",
        f.preferences(0.1, length_mean=True, ipo=True),
        None,
        "not offered",
    ),
    # The gap to the teacher as a reward of each token.
    Variant("distill", "verl", f"policy gradient: {AS_REWARD}", f.distillation(), DISTILL_OURS),
    Variant(
        "distill_direct",
        "verl",
        "lp - lp_teacher as a loss",
        objective(f.less_group_mean, lambda terms: -f.kl_k1(terms)),
        None,
        "there is no teacher in its gradient, as verl's page warns",
    ),
    # The distributions of both, p of the policy and q of the teacher.
    between_models("forward", f.forward_kl, FORWARD),
    between_models("reverse", f.reverse_kl, REVERSE),
    between_models("jensen_shannon", f.jensen_shannon(0.25), MIXTURE),
    between_models("forward", f.forward_kl, FORWARD, top_k=2),
    between_models("reverse", f.reverse_kl, REVERSE, top_k=2),
    between_models("jensen_shannon", f.jensen_shannon(0.25), MIXTURE, top_k=2),
    # All agree.
    Variant("sft", "trl", "- lp; token mean", f.likelihood(), {"_target_": "tunix_lite.algorithms.sft.SFT"}),
]


# rows that are another one by another name: what their framework says of it, and why, if that is not the same
SAME = {
    "grpo@trl": ("grpo@paper", "loss_type=grpo: as the paper; std with G - 1, + 1e-4", ""),
    "dr_grpo@trl": ("dr_grpo@paper", "loss_type=dr_grpo, scale_rewards=none: as the paper", ""),
    "dr_grpo@tunix": ("dr_grpo@verl", "sequence-mean-token-scale: divided by the padded width", "as verl"),
    "dapo@trl": ("dapo@paper", "loss_type=dapo, epsilon_high=0.28; std + 1e-4", ""),
    "gspo@trl": ("gspo@paper", "importance_sampling_level=sequence, loss_type=grpo: as the paper", ""),
    "cispo@slime": ("cispo@verl", "as verl; group std + 1e-6", ""),
    "sapo@trl": ("sapo@paper", "loss_type=sapo: as the paper", ""),
    "tis_token@skyrl": ("tis_token@verl", "min(w, 2)", ""),
    "tis_token@tunix": ("tis_token@verl", "sampler_is=token: min(w, 2)", ""),
    "icepop@openrlhf": ("icepop@nemo_rl", "w within 0.5 and 5, else 0", ""),
    "geometric_mask@openrlhf": (
        "geometric_mask@nemo_rl",
        "seq-mask-tis: as NeMo-RL; its comment says that the token weights are bounded",
        "two corrections in one",
    ),
    "kl_k1@tunix": ("kl_k1@verl", "kl_loss_mode=kl, the default", "as a loss its expected gradient is 0"),
    "kl_k2@tunix": ("kl_k2@verl", "mse_kl", ""),
    "kl_k3@tunix": ("kl_k3@trl", "low_var_kl", ""),
    "kl_k3_ratio@paper": (
        "kl_k3_ratio@trl",
        "rho (exp(d) - d - 1), both factors with their gradients (DeepSeek-V3.2)",
        "the same; kl_estimator=k3_ratio is as written, and float32 loses it where d is 18",
    ),
    "dpo@trl": ("dpo@paper", "loss_type=sigmoid: as the paper", ""),
    "dpo@nemo_rl": ("dpo@paper", "as the paper", ""),
    "dpo@tunix": ("dpo@paper", "as the paper", ""),
    "distill@slime": ("distill@verl", "A_t = - sg[lp - lp_teacher] of each token; - rho A", ""),
    "distill@nemo_rl": ("distill@verl", "MOPD: A_t = - sg[lp - lp_teacher] of each token; - rho A", ""),
    "sft@verl": ("sft@trl", "- lp; token mean", ""),
    "sft@nemo_rl": ("sft@trl", "- lp; token mean", ""),
}

VARIANTS = {
    variant.name: variant
    for family in (_GROUPS, _COMPLETION_RATIOS, _TOKEN_RATIOS, _BASELINES, _CORRECTIONS, _KL, _DEMONSTRATIONS)
    for variant in family
}
for name, (of, formula, why) in SAME.items():
    VARIANTS[name] = replace(VARIANTS[of], by=name.partition("@")[2], formula=formula, why=why)
