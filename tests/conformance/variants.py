"""What each framework means by a name: one row for each (objective, framework)."""

from dataclasses import dataclass, replace
from typing import Any

from conformance import formulas as f
from conformance.formulas import Loss, objective
from conformance.rows import LONGEST, Variant, advantage, correction, grpo, ratio, surrogate, weighting


@dataclass(frozen=True)
class Piece:
    """A part of an objective as a formula, and settings of ours that give the same numbers; NOT_OURS: there are none."""

    formula: Any
    ours: dict[str, Any] | None


def piece(formula: Any, **ours: Any) -> Piece:
    return Piece(formula, ours)


NOT_OURS = Piece(None, None)

# baselines
STD = piece(f.group_std(1e-4), advantages=advantage("standardise", eps=1e-4))
STD_VERL = piece(f.group_std(1e-6), advantages=advantage("standardise", eps=1e-6))
STD_OPENRLHF = piece(f.group_std(1e-9), advantages=advantage("standardise", eps=1e-9))
STD_NEMO = piece(f.peers_std(1e-6), advantages=advantage("leave_one_out_std", eps=1e-6))
CENTRED = piece(f.less_group_mean)
OTHERS = piece(f.less_others_mean, advantages=advantage("leave_one_out"))
OVER_MEAN = piece(f.over_mean(), advantages=advantage("max_likelihood"))

# gains
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
CLIPPED = piece(f.clipped(0.2, 0.2), **CLIP)
CLIPPED_HIGHER = piece(f.clipped(0.2, 0.28), clip_low=0.2, clip_high=0.28)
DUAL = piece(f.clipped(0.2, 0.2, dual=3.0), surrogate=surrogate("clip", dual=3.0), **CLIP)
PLAIN = {"surrogate": surrogate("policy_gradient")}
IMPORTANCE = piece(f.importance(), **PLAIN)
LOGPROB = piece(f.plain_logprob, ratio=ratio("no_ratio"), **PLAIN)
GSPO_BOUNDS = {"clip_low": 3e-4, "clip_high": 4e-4}
GSPO_OURS = {"ratio": ratio("sequence_ratio")} | GSPO_BOUNDS
GSPO = piece(f.clipped(3e-4, 4e-4, f.ratio_of_completions), **GSPO_OURS)
GSPO_BY_TOKEN = piece(f.clipped(3e-4, 4e-4, f.completion_ratio_by_token), **GSPO_OURS)
GSPO_TO_SAMPLER = piece(f.clipped(3e-4, 4e-4, f.completion_ratio_to_sampler), **GSPO_OURS)
GMPO = piece(f.geometric_ratio(0.4), surrogate=surrogate("geometric_mean", log_clip=0.4))
CISPO = {"surrogate": surrogate("cispo")}
WEIGHT = piece(f.bounded_weight(None, 1.2), clip_low=None, clip_high=0.2, **CISPO)
WEIGHT_UP_TO_5 = piece(f.bounded_weight(None, 5.0), clip_low=None, clip_high=4.0, **CISPO)
WEIGHT_AROUND_1 = piece(f.bounded_weight(0.8, 1.2), **CISPO, **CLIP)
WEIGHT_TO_SAMPLER = piece(f.bounded_weight(0.8, 1.2, f.ratio_to_sampler), **CISPO, **CLIP)
TV = piece(f.tv_masked(0.2), surrogate=surrogate("binary_tv"))
LOG_SQUARE = {"surrogate": surrogate("binary_tv", log_square=1e-3)}
TV_PRIME_RL = piece(f.tv_masked(0.2, log_square=1e-3, drops_zero=True), **LOG_SQUARE)
SAPO = piece(f.soft_gate(1.0, 1.05), surrogate=surrogate("sapo"))

# weights
TOKENS = piece(f.token_mean)
SEQUENCES = piece(f.mean_of_completions, weighting=weighting("per_sequence"))
NONEMPTY = NOT_OURS
CONSTANT = piece(f.over_longest_allowed, weighting=weighting("constant_length", length=LONGEST))

# why it departs
SAMPLER = {"sampled": "sampler"}
EMPTY = "equal to ours but where a completion is empty"
NEMO = "the advantages are those of grpo@nemo_rl"


@dataclass(frozen=True)
class Row:
    """A variant without its words."""

    name: str
    loss: Loss | None
    ours: dict[str, Any] | None
    more: dict[str, Any]

    def says(self, formula: str, why: str = "") -> Variant:
        """formula: as a reader writes it. why: see Variant."""
        name, _, by = self.name.partition("@")
        return Variant(name, by, formula, self.loss, self.ours, why, **self.more)


def row(name: str, baseline: Piece, gain: Piece, weights: Piece = TOKENS, **more: Any) -> Row:
    """An objective of three pieces; in words alone where one piece is not ours."""
    pieces = (baseline, gain, weights)
    if NOT_OURS in pieces:
        return Row(name, None, None, more)
    settings = grpo(**baseline.ours | gain.ours | weights.ours)
    return Row(name, objective(*(each.formula for each in pieces)), settings, more)


# ---- advantages by groups, ratios of tokens, clipped

_GROUPS = [
    # Who divides by which std, and over what the loss is a mean.
    row("grpo@paper", STD, CLIPPED, SEQUENCES).says(
        "- min(rho A, clip(rho, 0.8, 1.2) A); A = (r - mean) / std of the group; mean over completions of token means",
        "the std has G - 1, and 1e-4 is added, which the paper leaves open",
    ),
    row("grpo_default@trl", STD, CLIPPED).says(
        "loss_type not given: token mean; clip 0.2", "what TRL calls GRPO unless loss_type=grpo is given"
    ),
    row("grpo@verl", STD_VERL, DUAL).says(
        "std + 1e-6; token mean; dual clip at 3: where A < 0 the gain is not below 3 A",
        "no gradient where A < 0 and rho > 3",
    ),
    row("grpo@nemo_rl", STD_NEMO, CLIPPED).says(
        "A = (r - mean of the others) / (std of the others + 1e-6), undivided where that std is 0; token mean",
        "in a group of 0 and seven of 0.95 the one is not divided and the seven are; rounding "
        "in their one-pass variance gives -2000",
    ),
    row("grpo@prime_rl", CENTRED, TV_PRIME_RL, **SAMPLER).says(
        "A = r - mean of the group, no std; otherwise DPPO (see dppo)"
    ),
    row(
        "grpo@areal",
        piece(f.batch_std(1e-9, mean="batch"), advantages=advantage("batch_scaled", mean="batch", eps=1e-9)),
        CLIPPED,
    ).says(
        "A = (r - mean) / (std + 1e-9), both of the batch; token mean",
        "the page's formula has the group's statistics; a batch of easy and hard prompts gets "
        "advantages for being easy",
    ),
    row("grpo@openrlhf", STD_OPENRLHF, CLIPPED).says("group mean and std + 1e-9; token mean"),
    row("grpo@tinker", CENTRED, piece(f.importance(f.ratio_to_sampler), **PLAIN), **SAMPLER).says(
        "A = r - mean of the group; - rho A against the sampler, summed over tokens",
        "their sum is our mean times the number of tokens",
    ),
    Variant(
        "grpo",
        "tunix",
        "std + 1e-6; clip 0.2; mean over completions that are not empty; + 0.04 k1 as a loss",
        None,
        None,
        "k1 as a loss has no expected gradient: the penalty regularises nothing",
    ),
    # What the constant is.
    row("dr_grpo@paper", CENTRED, CLIPPED, CONSTANT).says(
        "A = r - mean; clip 0.2; sum over tokens / (completions * longest allowed)"
    ),
    row("dr_grpo@verl", CENTRED, DUAL, NOT_OURS).says(
        "seq-mean-token-sum-norm without loss_scale_factor: divided by the padded width",
        "the divisor is the longest completion of the batch, so it changes from batch to batch",
    ),
    # A higher upper bound, and every token counts the same.
    row("dapo@paper", STD, CLIPPED_HIGHER).says("clip 0.2 below and 0.28 above; A as in GRPO; token mean"),
    row(
        "dapo@verl",
        STD_VERL,
        piece(f.clipped(0.2, 0.28, dual=3.0), surrogate=surrogate("clip", dual=3.0), clip_low=0.2, clip_high=0.28),
    ).says("clip_ratio_high=0.28; std + 1e-6; dual clip at 3"),
    row("dapo@tunix", STD_VERL, CLIPPED_HIGHER).says(
        "epsilon_high=0.28; std + 1e-6; token mean",
        "its dynamic sampling is not there, and overlong shaping counts characters",
    ),
    # A bound on what the lower clip lets through.
    row(
        "two_sided_clip@trl",
        STD,
        piece(f.clipped(0.2, 0.2, dual=4.0), surrogate=surrogate("clip", dual=4.0), **CLIP),
    ).says("delta=4: rho is at most 4 on the unclipped branch"),
    # The ratio to the trainer, weighted for the sampler.
    Variant(
        "decoupled_ppo",
        "areal",
        "w min(rho A, clip(rho) A), w = exp(old - sampler) without gradient",
        objective(f.less_group_mean, CLIPPED.formula, correction=f.truncate(1e30)),
        grpo(old_logprobs="rescored", correction=correction("truncate_tokens", cap=1e30), **CLIP),
        **SAMPLER,
    ),
]

# ---- ratios of completions

_COMPLETION_RATIOS = [
    # One ratio for a completion; some give each token its own gradient.
    row("gspo@paper", STD, GSPO, SEQUENCES).says(
        "s = exp(mean_t log rho); - min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A); mean over completions"
    ),
    row("gspo@verl", STD_VERL, GSPO_BY_TOKEN, SEQUENCES).says(
        "s_t = exp(sg[log s] + lp - sg[lp]): the token's own gradient; mean over completions of token means",
        "another form of the same gradient, since A is the same for all tokens",
    ),
    row("gspo@nemo_rl", STD_NEMO, GSPO, SEQUENCES).says(
        "sequence_level_importance_ratios, with their advantages", NEMO
    ),
    row("gspo@openrlhf", STD_OPENRLHF, GSPO_TO_SAMPLER, SEQUENCES, **SAMPLER).says(
        "with a sampler correction: s against the sampler, not against the old policy"
    ),
    row("gspo@tunix", STD_VERL, GSPO_BY_TOKEN, NONEMPTY).says(
        "loss_algo=gspo-token: the form of verl; mean over completions that are not empty", EMPTY
    ),
    # The same with a mean over tokens, where long completions weigh more.
    row("gspo_token_mean@trl", STD, GSPO).says(
        "importance_sampling_level=sequence with the default loss_type=dapo: token mean",
        "long completions weigh more, which TRL warns of",
    ),
    # The same with a sum over tokens.
    row("luspo@trl", STD, GSPO, NOT_OURS).says(
        "s A summed over the tokens of a completion, mean over completions",
        "a weight by length that we have no name for",
    ),
    # Token ratios are bounded before their geometric mean is taken.
    row("gmpo@paper", STD, GMPO, SEQUENCES).says(
        "exp(mean_t of log rho, at most 0.4 where A > 0, at least -0.4 where A < 0) A"
    ),
    row("gmpo@verl", STD_VERL, GMPO, SEQUENCES).says("geo_mean, with clip_ratio 0.4 on logarithms; std + 1e-6"),
]

# ---- the ratio as a weight, gates and masks

BATCH_SCALED = piece(f.batch_std(1e-4), advantages=advantage("batch_scaled"))
_TOKEN_RATIOS = [
    # Bounds around 1, or the bounds themselves; to the trainer, or to the sampler.
    row("cispo@paper", STD, WEIGHT).says("- sg[min(rho, 1 + eps)] A lp; token mean; no lower bound; eps = 0.2"),
    row("cispo@trl", STD, WEIGHT_UP_TO_5).says(
        "- sg[min(rho, eps_high)] A lp: eps_high is the cap itself; 5 as ScaleRL recommends",
        "left at its default the cap is 0.2: nearly all tokens have that one weight",
    ),
    row("cispo_default@trl", STD, NOT_OURS).says(
        "epsilon_high not given: the cap is 0.2",
        "nearly all tokens have the one weight 0.2; we refuse a cap below 1",
    ),
    row("cispo@verl", STD_VERL, WEIGHT_AROUND_1).says("- sg[clip(rho, 0.8, 1.2)] A lp"),
    row("cispo@nemo_rl", STD_NEMO, WEIGHT_AROUND_1).says("as verl, with their advantages", NEMO),
    row("cispo@skyrl", STD_VERL, WEIGHT_TO_SAMPLER, **SAMPLER).says(
        "cispo_anchor=rollout: rho against the sampler, within 0.8 and 1.2"
    ),
    row("cispo@tinker", CENTRED, WEIGHT_TO_SAMPLER, **SAMPLER).says(
        "clip_low_threshold=0.8 and clip_high_threshold=1.2 are the bounds themselves; A = r - mean"
    ),
    # What else ScaleRL changes beside the cap.
    row("scalerl@paper", BATCH_SCALED, WEIGHT_UP_TO_5, piece(f.prompt_mean, weighting=weighting("per_prompt"))).says(
        "CISPO with cap 5; A = (r - group mean) / std of the batch; mean over prompts of token means"
    ),
    # Anchored at the sampler with the gradient of the ratio, or at the trainer without.
    row("dppo@paper", CENTRED, TV, **SAMPLER).says(
        "- rho A against the sampler, 0 where A > 0 and p - p_gen > 0.2 or A < 0 and p - p_gen < -0.2"
    ),
    row("dppo@prime_rl", CENTRED, TV_PRIME_RL, **SAMPLER).says(
        "the same, + 1e-3 (lp - lp_gen)^2 on all tokens",
        "where A = 0 it may drop a token, which changes nothing",
    ),
    row("dppo@skyrl", STD_VERL, TV, **SAMPLER).says("as the paper; group std + 1e-6"),
    row(
        "dppo@verl",
        STD_VERL,
        piece(f.tv_masked(0.2, anchor="old", cap=20.0), surrogate=surrogate("binary_tv", cap=20.0)),
    ).says("- keep sg[min(rho, 20)] A lp, rho and p against the old policy"),
    # A gate in place of a clip.
    row("sapo@paper", STD, SAPO, SEQUENCES).says(
        "- (4 / tau) sigmoid(tau (rho - 1)) A; tau 1 for A > 0, 1.05 else; mean over completions"
    ),
    row("sapo@verl", STD_VERL, SAPO, SEQUENCES).says("the same; std + 1e-6"),
]

# ---- other baselines

K1_REWARD = {"kl_coef": 0.05, "kl_estimator": "k1_reward"}
_BASELINES = [
    # The mean of the others as baseline.
    row("rloo@paper", OTHERS, IMPORTANCE).says("A = r - mean of the others; - rho A; token mean"),
    row(
        "rloo@trl", Piece(f.with_k1(f.less_others_mean, 0.05), OTHERS.ours), piece(CLIPPED.formula, **CLIP, **K1_REWARD)
    ).says(
        "r is less 0.05 sum_t (old - ref); A = r - mean of the others; clip 0.2 on the ratio of tokens",
        "their ratio is that of whole completions, a product over tokens",
    ),
    row("rloo@verl", OTHERS, DUAL).says("A = G / (G - 1) (r - mean)"),
    row("rloo@tunix", OTHERS, CLIPPED, NONEMPTY).says(
        "A = r - mean of the others; clip 0.2; mean over completions that are not empty", EMPTY
    ),
    # Statistics of the whole batch.
    row(
        "reinforce_pp@verl",
        piece(f.whitened(False), advantages=advantage("whiten", over="tokens", group_baseline=False)),
        DUAL,
    ).says("A = r, whitened over the tokens of the batch"),
    row(
        "reinforce_pp_baseline@paper",
        piece(f.whitened(True, over="samples"), advantages=advantage("whiten", over="samples")),
        CLIPPED,
    ).says("A = r - group mean, whitened over the completions of the batch"),
    row(
        "reinforce_pp_baseline@verl", piece(f.whitened(True), advantages=advantage("whiten", over="tokens")), DUAL
    ).says("the same over tokens: long completions weigh more in mean and std"),
    row("reinforce_pp_baseline@nemo_rl", NOT_OURS, CLIPPED).says(
        "over tokens, with the variance of a population", "differs from verl by sqrt(n / (n - 1)) of the tokens"
    ),
    # The mean of the group, the std of the batch.
    row("batch_scaled@trl", piece(f.batch_std(1e-4), advantages=advantage("batch_scaled", eps=1e-4)), CLIPPED).says(
        "scale_rewards=batch: (r - group mean) / (std of the batch + 1e-4)"
    ),
    # A success rate in the denominator; what stands beside it where the rate is 0.
    row("maxrl@paper", OVER_MEAN, IMPORTANCE, binary=True).says(
        "A = (r - mean) / mean, 0 where the mean is 0; - rho A; rewards of 0 and 1"
    ),
    row("maxrl@prime_rl", OVER_MEAN, TV_PRIME_RL, binary=True, **SAMPLER).says("as the paper, with their DPPO"),
    row("maxrl@skyrl", Piece(f.over_mean(1e-6), OVER_MEAN.ours), IMPORTANCE, binary=True).says(
        "A = (r - mean) / (mean + 1e-6)",
        "for rewards of 0 and 1 within 4e-6 of the paper; negative rewards turn the sign",
    ),
    row("maxrl@trl", NOT_OURS, IMPORTANCE, binary=True).says(
        "pull request 5026: A = (r - mean) / (mean + 1e-4)", "4e-4 from the paper at a success rate of 1 in 4"
    ),
    # Several rewards, each on a scale of its own.
    row("gdpo@trl", piece(f.each_reward(1e-4, 1e-4), advantages=advantage("per_reward", eps=1e-4)), CLIPPED).says(
        "normalise_then_sum: each reward (r - mean) / (std + 1e-4) in its group, the sum again over the batch + 1e-4"
    ),
    row("gdpo@nemo_rl", NOT_OURS, CLIPPED).says(
        "the same without anything added at the end", "divides 0 by 0 where all agree"
    ),
    # A baseline weighted by lengths.
    row("opo@verl", NOT_OURS, DUAL).says("A = r - sum(L r) / sum(L) of the group, L the length", "not offered"),
    # No ratio at all.
    row("reinforce@verl", CENTRED, LOGPROB, gradient_only=True).says(
        "gpg: - A lp, A = r - group mean", "our value is of A rather than of A lp, which says nothing either"
    ),
    row("reinforce@nemo_rl", STD_NEMO, LOGPROB, gradient_only=True).says(
        "disable_ppo_ratio: - A lp, with their advantages", NEMO
    ),
]


# ---- what trainer and sampler disagree about


def with_factor(name: str, factor: Any = None, ours: dict | None = None) -> Row:
    """Centred rewards and a clip of 0.2, whose gain is multiplied by the factor; in words alone without one."""
    if ours is None:
        return Row(name, None, None, SAMPLER)
    loss = objective(f.less_group_mean, CLIPPED.formula, correction=factor)
    return Row(name, loss, grpo(old_logprobs="rescored", correction=ours, **CLIP), SAMPLER)


_CORRECTIONS = [
    with_factor("tis_token@verl", f.truncate(2.0), correction("truncate_tokens", cap=2.0)).says(
        "min(w, 2), w = exp(old - sampler)"
    ),
    with_factor("tis_token@trl", f.truncate(3.0), correction("truncate_tokens", cap=3.0)).says(
        "token_truncate: min(w, 3)"
    ),
    with_factor("tis_sequence@verl").says(
        "min(product over the completion of w, 2)", "a product over tokens grows with the length"
    ),
    with_factor("tis_sequence@skyrl").says("min(product of w, 5)", "as verl"),
    with_factor("sequence_mask@trl").says(
        "the default: the product of w, 0 above 3",
        "leaves out long completions: a gap of 1e-3 a token is e^2 over 2,000 tokens",
    ),
    with_factor("icepop@nemo_rl", f.mask_outside(0.5, 5.0), correction("mask_tokens", low=0.5, high=5.0)).says(
        "w within 0.5 and 5, else 0"
    ),
    with_factor("icepop@trl", f.mask_outside(0.0, 3.0), correction("mask_tokens", low=0.0, high=3.0)).says(
        "token_mask: w up to 3, else 0"
    ),
    with_factor("token_mask@skyrl").says("1 where w is within 0.5 and 2, else 0", "the same name, without the weight"),
    with_factor(
        "geometric_mask@skyrl", f.geometric_mask(0.99, 1.01), correction("mask_sequences", low=0.99, high=1.01)
    ).says("1 for a completion whose geometric mean of w is within 0.99 and 1.01, else 0"),
    with_factor("geometric_mask@nemo_rl").says(
        "seq-mask-tis: the same within 0.999 and 1.002, times the w of each token", "two corrections in one"
    ),
    # Away from whom.
    with_factor("off_policy_mask@trl").says(
        "off_policy_mask_threshold=0.5: 0 for a completion with A < 0 and mean(sampler - lp) > 0.5",
        "theirs is away from the sampler, beside a ratio to the trainer; ours has one anchor",
    ),
    Variant(
        "off_policy_mask",
        "paper",
        "0 for a completion with A < 0 and mean(old - lp) > 0.5",
        objective(f.less_group_mean, CLIPPED.formula, correction=f.off_policy_mask(0.5)),
        grpo(off_policy_delta=0.5, **CLIP),
    ),
]


# ---- the KL to the reference


def penalised(name: str, estimate: Any = None, ours: str | None = None) -> Row:
    """Centred rewards and a clip of 0.2, with 0.1 times the estimate in the loss; in words alone without one."""
    if ours is None:
        return Row(name, None, None, {})
    loss = objective(f.less_group_mean, CLIPPED.formula, kl=estimate, kl_coef=0.1)
    return Row(name, loss, grpo(kl_coef=0.1, kl_estimator=ours, **CLIP), {})


_KL = [
    penalised("kl_k1@verl").says("kl: lp - ref", "as a loss its expected gradient is 0"),
    penalised("kl_k2@verl", f.kl_k2, "k2").says("mse: (lp - ref)^2 / 2"),
    penalised("kl_k3@trl", f.kl_k3, "k3").says("exp(d) - d - 1, d = ref - lp"),
    penalised("kl_k3@verl").says(
        "low_var_kl: d within [-20, 20], the result within [-10, 10]",
        "no gradient exactly where the KL is largest",
    ),
    penalised("kl_k3_ratio@trl", f.kl_k3_ratio, "k3_exact").says(
        "use_bias_correction_kl, on by default in 1.16: rho (exp(d) - d - 1)",
        "its two gradients add up to - rho d, as in kl_k3_exact",
    ),
    penalised("kl_k3_exact@verl").says(
        "k3+: the value of k3, the gradient of k2",
        "ours has the ratio besides, so that it is right off policy; equal at rho = 1",
    ),
    penalised("kl_k3_exact@paper", f.kl_k3_exact, "k3_exact").says(
        "sg[rho] times the value of k3 with the gradient of k2: the gradient of the KL"
    ),
    # Beside it, and added as it is.
    Variant(
        "entropy_bonus",
        "paper",
        "- 0.01 H, H = - sum_v p_v log p_v over the tokens that could have been drawn",
        objective(f.less_group_mean, CLIPPED.formula, kl=f.less_entropy, kl_coef=0.01),
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


def between_models(name: str, apart: Any, formula: str) -> Variant:
    """A divergence of policy and teacher with its own gradient, no rewards."""
    settings = DISTILL_OURS | {"divergence": name}
    if name == "jensen_shannon":
        settings["mix"] = 0.25
    formula = f"{formula} over all tokens; arXiv:2306.13649"
    return Variant(f"distill_{name}", "paper", formula, f.divergence(apart), settings)


AS_REWARD = "A_t = - sg[lp - lp_teacher] of each token; - rho A"
_DEMONSTRATIONS = [
    # All agree.
    Variant("dpo", "paper", SIGMOID, f.preferences(0.1), DPO_OURS),
    Variant(
        "ipo",
        "trl",
        "loss_type=ipo: (s_chosen - s_rejected - 1 / (2 beta))^2, s a mean over tokens",
        None,
        None,
        "not offered",
    ),
    # The gap to the teacher as a reward of each token.
    Variant("distill", "verl", f"policy gradient: {AS_REWARD}", f.distillation(), DISTILL_OURS),
    Variant(
        "distill_direct",
        "verl",
        "lp - lp_teacher as a loss",
        None,
        None,
        "there is no teacher in its gradient, as verl's page warns",
    ),
    # The distributions of both, p of the policy and q of the teacher.
    between_models("forward", f.forward_kl, FORWARD),
    between_models("reverse", f.reverse_kl, REVERSE),
    between_models("jensen_shannon", f.jensen_shannon(0.25), MIXTURE),
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
