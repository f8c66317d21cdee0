"""Finds what may be wrong with a run that does not learn, from its files alone.

Each fault is a check with a weight: a cause weighs more than its symptoms. (A run at a temperature
of 5 has cut completions and no rewards, too.) A check takes the run. It returns evidence of the
fault and what to try; else None or False. A metric that a run lacks is nan: no bound holds for it.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tunix_lite.report.evidence import (
    EXAMPLE,
    MOST_NUMBER,
    UNREAD,
    Evidence,
    Series,
    excerpt,
    is_unread,
)
from tunix_lite.tracking.rows import is_number

# The evidence, and overrides to try; last, what the finding says in place of the fault's words.
Shown = tuple[list[str], list[str]] | tuple[list[str], list[str], str] | bool | None
Check = Callable[[Evidence], Shown]
AGREE = "reward/groups_that_agree"
CORRECT = "completions/correct"
CUT = "completions/truncated"
LENGTH = "completions/mean_length"
RATE = "optimizer.learning_rate"
# By name: the weight of each fault, its words and its check.
FAULTS: dict[str, tuple[int, str, Check]] = {}


@dataclass(frozen=True)
class Finding:
    """A fault, what shows it, and what to try.

    Example: Finding("learning_rate_zero", "nothing moves", ["train/learning_rate 0 in 60 steps"],
    ["optimizer.learning_rate=1e-6"], 98).
    """

    name: str
    what: str
    # numbers and steps
    evidence: list[str]
    # overrides of the command line; words where there is no setting
    overrides: list[str] = field(default_factory=list)
    weight: int = 0


def diagnose(run: Evidence) -> list[Finding]:
    """All findings, the heaviest first."""
    findings = []
    for name, (weight, what, check) in FAULTS.items():
        if shown := check(run):
            evidence, overrides, *other_words = shown
            words = other_words[0] if other_words else what
            findings.append(Finding(name, words, evidence, overrides, weight))
    return sorted(findings, key=lambda finding: -finding.weight)


def _fault(weight: int, what: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        FAULTS[check.__name__] = (weight, what, check)
        return check

    return register


def _times(run: Evidence, name: str, factor: float) -> list[str]:
    """A setting times a factor, as an override; nothing where it is not known."""
    number = run.number(name, 0) * factor
    written = f"{number:.0f}" if number == int(number) else f"{number:.3g}"
    return [f"{name}={written}"] if number else []


# ---- the update


@_fault(100, "updates are not finite, so they are not made")
def updates_skipped(run: Evidence) -> Shown:
    skipped = run.series("train/skipped")
    made = skipped.where(skipped.values > 0)
    if not made or (skipped.mean < 0.1 and not (skipped.last and len(skipped) > 1)):
        return None
    first = int(made.steps[0])
    shown = f"train/skipped is 1 in {len(made)} of {len(skipped)} steps, first in step {first}"
    return [shown], [*_times(run, RATE, 0.1), f"tunix-lite replay {run.folder} skipped={first}"]


@_fault(98, "the weights do not move")
def learning_rate_zero(run: Evidence) -> Shown:
    has_gradient = run.series("train/skipped").least != 1
    has_gradient &= run.series("train/grad_norm").largest != 0
    is_still = run.series("train/update_norm").largest == 0 and has_gradient
    shown = run.shown("train/learning_rate", "train/update_norm")
    overrides = [f"{RATE}=1e-4 (a small model), 1e-6 (a large one)"]
    return (is_still or run.series("train/learning_rate").largest == 0) and (shown, overrides)


@_fault(70, "the learning rate is still warming up")
def warm_up_not_over(run: Evidence) -> Shown:
    rates = run.series("train/learning_rate")
    steps = run.number("optimizer.warmup_steps")
    if not (5 <= run.num_steps < steps and 0 < rates.largest <= 0.2 * run.number(RATE)):
        return None
    shown = run.shown("train/learning_rate", RATE, "optimizer.warmup_steps")
    return shown, [f"optimizer.warmup_steps={max(run.num_steps // 10, 1)}"]


@_fault(54, "the learning rate fell to 0 long before the end")
def schedule_over(run: Evidence) -> Shown:
    rates = run.series("train/learning_rate")
    if not rates.largest > 0 or run.series("train/skipped").least == 1:
        return None
    trailing = len(rates) - 1 - int(np.flatnonzero(rates.values > 0)[-1])
    shown = f"train/learning_rate is 0 in the last {trailing} of {len(rates)} steps"
    return trailing >= max(3, len(rates) // 5) and ([shown], ["optimizer.schedule=constant"])


# What an update may move a weight, relative to a weight's usual size of 1 / sqrt(embed_dim). The
# quickstart moves 6e-4 at most, a model of billions at 1e-6 some 5e-5.
LARGE_STEP = 5e-3
SMALL_STEP = 2e-7


def relative_step(run: Evidence) -> Series:
    """Root mean square of an update's elements over that of weights, by step.

    Of adapters it is what they add to a weight over its size. `a` is drawn uniformly within 1 /
    sqrt(inputs) and `b` is 0, so an update of b by rms u adds alpha / rank * sqrt(rank / 3) u times
    1 / sqrt(inputs), the size of the weight.
    """
    moved = run.series("train/update_norm")
    rank = run.number("model.lora.rank", 0)
    alpha = run.number("model.lora.alpha", 0.0)
    count = run.status.get("trained_parameters" if rank else "parameters")
    width = run.architecture.get("embed_dim")
    known = [count, width, rank] if rank else [count, width]
    if not all(map(_is_count, known)) or (rank and alpha <= 0):
        return moved.where(np.zeros(len(moved), bool))
    factor = alpha / rank * np.sqrt(rank / 3 / count) if rank else np.sqrt(width / count)
    return Series("update / weights", moved.steps, moved.values * factor)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < MOST_NUMBER


@_fault(84, "the updates are so large that they destroy the policy")
def step_too_large(run: Evidence) -> Shown:
    # What the policy could do at first and cannot now.
    abilities = map(run.series, (CORRECT, "reward/mean", "eval/accuracy"))
    fell = [
        f"{series.name} {series.first:.3g} → {series.late:.3g}"
        for series in abilities
        if len(series) > 1 and series.first > 0.1 and series.late < 0.5 * series.first
    ]

    # Signs of a policy that was thrown far from where it was.
    outside = run.series("train/ratio_outside_clip")
    rises = [str(outside)] if len(outside) > 2 and outside.late > 0.3 else []
    entropy = run.series("train/entropy")
    if len(entropy) > 2 and entropy.first > 0:
        exploded = entropy.late > 5 * entropy.first and entropy.late > 0.5
        if exploded or entropy.late < 0.05 * entropy.first:
            rises.append(str(entropy))

    # Adapters are usually given steps ten times as large, and bear them.
    step = relative_step(run)
    enough = (16 if run.number("model.lora.rank", 0) else 4) * LARGE_STEP
    is_large = step.largest > (LARGE_STEP if fell or rises else enough)
    if not (is_large if step else fell and rises):
        return None
    shown = []
    if step:
        shown.append(
            f"an update moves a weight by {step.largest:.2%} of its usual size (step "
            f"{step.at_largest()}); {LARGE_STEP:.1%} is much"
        )
    return [*shown, *fell, *rises], _times(run, RATE, 0.01) or ["a smaller learning rate"]


@_fault(68, "the updates are so small that nothing moves")
def step_too_small(run: Evidence) -> Shown:
    step = relative_step(run)
    if run.num_steps < 5 or not 0 < step.largest < SMALL_STEP:
        return None
    gradient = run.series("train/grad_norm")
    clip = run.number("optimizer.max_grad_norm", 0.0)
    shown = [
        f"an update moves a weight by {step.largest:.2g} of its usual size at most; 1e-5 to 1e-3 "
        "is common"
    ]
    rate = run.number(RATE, 0.0) * SMALL_STEP / step.largest * 100
    overrides = [f"{RATE}={rate:.1g}"]
    if gradient and clip and np.median(gradient.values) > 100 * clip:
        shown.append(f"train/grad_norm {gradient.mean:.3g} is clipped to {clip:g}")
        overrides.insert(0, "optimizer.max_grad_norm=1")
    return shown, overrides


# ---- the sampler and the trainer


# nats a token. In float32 the gap is 1e-7, in bfloat16 on a GPU some 1e-2
LARGE_GAP = 0.05


@_fault(
    92, "sampler and trainer disagree on the same tokens: another temperature, place or token"
)
def sampler_gap(run: Evidence) -> Shown:
    gap = run.at_rollouts("train/sampler_gap")
    if not gap.first >= LARGE_GAP:
        return None
    shown = [
        f"train/sampler_gap {gap.first:.3g} nats a token in step {gap.steps[0]}, before anything "
        "was learned; rounding gives 1e-7 in float32 and 1e-2 in bfloat16"
    ]
    return shown + run.shown("train/sampler_gap_max"), [
        "algorithm.old_logprobs=whole",
        "rollout.cache=compute",
        "compare the log-probabilities of one sequence: they may be shifted by one",
    ]


@_fault(91, "the sampler does not have the weights that learn: the gap grows with the updates")
def sampler_stale(run: Evidence) -> Shown:
    gap = run.at_rollouts("train/sampler_gap")
    is_sound = len(gap) < 3 or gap.first >= LARGE_GAP or gap.late < max(30 * gap.first, 2e-3)
    tries = "give the sampler the weights of every step (policy.generate(params, ...))"
    return not is_sound and ([str(gap)], [tries])


@_fault(60, "the policy leaves the clip within a rollout, so many tokens have no gradient")
def outside_of_clip(run: Evidence) -> Shown:
    outside = run.series("train/ratio_outside_clip")
    accuracy = run.series("eval/accuracy") or run.series("reward/mean")
    fell = accuracy.last < accuracy.first - 0.05
    if not outside.largest >= 0.1 or (outside.late < 0.3 and not fell):
        return None
    updates = int(run.number("algorithm.updates_per_rollout", 1))
    fewer = [f"algorithm.updates_per_rollout={max(updates // 2, 1)}"] if updates > 1 else []
    shown = [f"{outside.name} {outside.largest:.0%} in step {outside.at_largest()}"]
    shown += run.shown("algorithm.updates_per_rollout", *([accuracy.name] if fell else []))
    return shown, fewer + _times(run, RATE, 0.1)


@_fault(66, "the KL term holds the policy where it began")
def kl_dominates(run: Evidence) -> Shown:
    coef = run.number("algorithm.kl_coef", 0.0)
    weight = coef * run.series("train/kl").late
    if coef < 0.5 or run.num_steps < 3:
        return None
    if run.series("reward/mean").rises() and not weight > 0.05:
        return None
    shown = [f"algorithm.kl_coef={coef:g}; 0 to 0.05 is common"]
    if weight > 0.05:
        shown.append(f"kl_coef x train/kl is {weight:.3g}, beside rewards of 0 to 1")
    return shown + run.shown("train/kl", "reward/mean"), ["algorithm.kl_coef=0.01"]


@_fault(64, "the policy is far from its reference")
def kl_large(run: Evidence) -> Shown:
    overrides = _times(run, "algorithm.kl_coef", 5) + _times(run, RATE, 0.1)
    return run.series("train/kl").late >= 1 and (run.shown("train/kl"), overrides)


# ---- rewards and groups


@_fault(96, "reward functions fail, and what they should have judged teaches nothing")
def rewards_fail(run: Evidence) -> Shown:
    kinds = [
        run.series(f"rewards/{k}") for k in ("errors", "timeouts", "crashes", "not_numbers")
    ]
    counted = [series for series in kinds if series.values.sum() > 0]
    dropped = run.share(lambda row: "reward" in row and row["reward"] is None)

    # Completions of a step, by the settings or else as samples/ has them.
    calls = int(run.number("training.prompts_per_step", 0)) * run.group_size
    if calls <= 0 or run.group_size < 2:
        calls = next((len(rows) for rows in run.samples.values()), 0)
    worst = max((series.mean for series in counted), default=0.0)
    is_common = calls and worst >= 0.05 * calls
    if not is_common and not dropped >= 0.05 and worst < 8:
        return None
    shown = [
        f"{series.name} {series.mean:.3g} a step, first in step "
        f"{series.steps[np.flatnonzero(series.values)[0]]}"
        for series in counted
    ]
    if calls and shown:
        shown[0] += f" (of {calls} completions)"
    if dropped > 0:
        shown.append(f"{dropped:.0%} of the completions in samples/ have no reward")
    overrides = []
    if any(series.name == "rewards/timeouts" for series in counted):
        overrides.append(f"rewards.timeout={3 * run.number('rewards.timeout', 10.0):g}")
    if run.setting("rewards.on_error") != "raise":
        overrides.append("rewards.on_error=raise (ends the run with the error of the function)")
    return shown, overrides or ["train.log has the errors"]


@_fault(94, "advantages are not those of the completions of one prompt")
def groups_mixed(run: Evidence) -> Shown:
    groups = run.all_groups()
    mixed = [step for step, group in groups if len({row.get("prompt") for row in group}) > 1]
    # Within a group equal rewards have equal advantages, and higher ones higher. That is so where
    # advantages follow one reward: of several, each may be normalised alone, and what an algorithm
    # adds to it is not in the files.
    adds = run.setting("algorithm.shaping") is not None
    adds = adds or run.setting("algorithm.kl_estimator") == "k1_reward"
    rewards = run.sampled[0].get("rewards") if run.sampled else None
    has_one = not adds and not (isinstance(rewards, dict) and len(rewards) > 1)
    wrong = [
        step for step, group in groups if has_one and _against_rewards(group, run.group_size)
    ]
    if len(mixed) + len(wrong) < max(2, len(groups) // 5):
        return None
    shown = []
    if mixed:
        shown.append(f"{len(mixed)} of {len(groups)} groups of samples/ hold different prompts")
    if wrong:
        shown.append(
            f"in {len(wrong)} of {len(groups)} groups the advantages do not follow the rewards, "
            f"such as two of one reward that differ (step {wrong[0]})"
        )
    return shown, [f"row p * {run.group_size} + g must be completion g of prompt p: see collect"]


def _against_rewards(group: list[dict], size: int) -> bool:
    """Whether two advantages of one reward differ, or the higher is that of the lower reward."""
    pairs = [(row.get("reward"), row.get("advantage")) for row in group]
    pairs = [pair for pair in pairs if all(map(is_number, pair))]
    if len(pairs) < 2:
        return False
    rewards, advantages = np.array(pairs, np.float64).T
    for reward in set(rewards):
        if np.ptp(advantages[rewards == reward]) > 1e-3 * (1 + np.ptp(advantages)):
            return True
    if np.ptp(rewards) < 1e-9:
        return len(pairs) == size and bool(np.abs(advantages).max() > 0.2)
    # Opposite signs, both of some size: baselines and scales of all kinds keep the order.
    apart = rewards[:, None] - rewards[None]
    order = apart * (advantages[:, None] - advantages[None])
    return bool((order < -0.1 * np.abs(apart) * np.ptp(advantages)).any())


@_fault(90, "the reward depends on the prompt alone, so it says nothing of a completion")
def reward_of_prompt(run: Evidence) -> Shown:
    mixed = []
    values = set()
    for _, group in run.all_groups():
        rewards = {row["reward"] for row in group if is_number(row.get("reward"))}
        values |= rewards
        if len({row.get("correct") for row in group}) > 1:
            mixed.append(len(rewards) == 1)
    if len(mixed) < 4 or not all(mixed) or len(values) < 2:
        return None
    shown = (
        f"in {len(mixed)} groups of samples/, partly right and partly wrong, all have one reward"
    )
    overrides = ["task.rewards: a function of (completion, example) that reads the completion"]
    return [shown], overrides


@_fault(89, "the reward is higher for what the task calls wrong")
def reward_sign(run: Evidence) -> Shown:
    pairs = [
        (row["reward"], row["correct"])
        for row in run.sampled
        if is_number(row.get("reward")) and type(row.get("correct")) is bool
    ]
    shown = []
    rewards, right = np.array(pairs, np.float64).reshape(-1, 2).T
    if len(pairs) >= 16 and 0 < right.mean() < 1:
        ours = rewards[right > 0]
        others = rewards[right == 0]
        noise = np.sqrt(ours.var() / len(ours) + others.var() / len(others))
        if ours.mean() < others.mean() - max(4 * noise, 1e-6):
            shown.append(
                f"in samples/ a right completion has the reward {ours.mean():.3g}, a wrong one "
                f"{others.mean():.3g}"
            )
    reward = run.series("reward/mean")
    correct = run.series(CORRECT)
    size = min(len(reward), len(correct))
    x, y = reward.values[:size], correct.values[:size]
    if (
        len(reward) >= 8
        and size >= 3
        and x.std() > 0
        and y.std() > 0
        and correct.values.std() > 0.01
    ):
        together = float(np.corrcoef(x, y)[0, 1])
        if together < -0.8:
            shown.append(f"reward/mean and {CORRECT} go against each other ({together:.2f})")
    if not shown:
        return None
    by_name = run.setting("task.rewards")
    negative = [
        f"task.rewards.{excerpt(name)}.weight=1.0"
        for name in (by_name if isinstance(by_name, dict) else ())
        if run.number(f"task.rewards.{name}.weight") < 0
    ]
    return shown, negative or ["the sign of the reward function, or task.rewards.<name>.weight"]


@_fault(87, "the reward climbs and right answers do not: it is earned without solving the task")
def reward_exploited(run: Evidence) -> Shown:
    reward = run.series("reward/mean")
    gained = reward.late - reward.early
    judges = [run.series(name) for name in (CORRECT, "eval/accuracy")]
    judges = [series for series in judges if len(series) > 1]
    # Where nearly all is right, other rewards are all that is left to gain.
    stands = [s.late - s.early < 0.2 * gained and s.late < 0.8 for s in judges]
    if len(reward) < 6 or not reward.rises() or gained < 0.05 or not stands or not all(stands):
        return None
    shown = [str(series) for series in (reward, *judges)]
    wrong = [row for row in run.sampled if row.get("correct") is False]
    if wrong := [row for row in wrong if is_number(row.get("reward"))]:
        best = max(wrong, key=lambda row: row["reward"])
        text = excerpt(best.get("completion", ""), 100)
        shown.append(f"a wrong completion with the reward {best['reward']:.3g}: {text}")
    best = "read the completions with the highest rewards in samples/"
    return shown, ["task.rewards: reward what task.correct calls right", best]


def _has_one_reward(run: Evidence) -> bool:
    """Whether all completions of all steps got one reward."""
    reward = run.series("reward/mean")
    return run.series("reward/std").largest <= 1e-9 and reward.largest - reward.least <= 1e-9


@_fault(88, "every completion has one reward, although they are not equally good")
def rewards_constant(run: Evidence) -> Shown:
    correct = run.series(CORRECT)
    is_flat = correct.least == correct.largest and correct.first in (0.0, 1.0)
    if not correct or is_flat or not _has_one_reward(run):
        return None
    value = run.series("reward/mean").first
    what = f"every completion has the reward {value:g}, right or wrong: nothing is to be learned"
    overrides = ["the function of task.rewards: call it with a right and a wrong completion"]
    return run.shown("reward/std", "reward/mean", CORRECT), overrides, what


@_fault(74, "no completion is right in any step")
def all_wrong(run: Evidence) -> Shown:
    correct = run.series(CORRECT)
    has_one = _has_one_reward(run)
    if not correct.largest <= 0 or (not has_one and len(correct) < 5):
        return None
    if reward_exploited(run) or run.series("eval/accuracy").largest > 0.02:
        return None
    shown = run.shown(CORRECT, "reward/mean", EXAMPLE)
    overrides = ["an easier task, or a model that is right now and then; algorithm=sft first"]
    group = ", so no group has anything to learn from" if has_one else ""
    return shown, overrides, f"no completion is right in any step{group}"


@_fault(73, "every completion is right from the first step on: there is nothing left to learn")
def all_right(run: Evidence) -> Shown:
    is_all = run.series(CORRECT).least >= 1 and _has_one_reward(run)
    return is_all and (run.shown(CORRECT, "reward/mean"), ["a harder task"])


@_fault(56, "most groups teach nothing: the task is too hard, or too easy")
def groups_agree(run: Evidence) -> Shown:
    agree = run.series(AGREE)
    correct = run.series(CORRECT) or run.series("reward/mean")
    if not correct or not agree.mean >= 0.7 or run.num_steps < 4:
        return None
    if _has_one_reward(run) or _has_learned(run):
        return None
    is_hard = correct.mean < 0.5
    more = _times(run, "algorithm.num_generations", 2) if run.group_size > 1 else []
    what = f"most groups teach nothing: the task is too {'hard' if is_hard else 'easy'}"
    overrides = [*more, "an easier task" if is_hard else "a harder task"]
    return [str(agree), str(correct)], overrides, what


def _has_learned(run: Evidence) -> bool:
    """Whether the run got good: then groups agree because they are right."""
    metrics = [run.series(name) for name in ("eval/accuracy", CORRECT, "reward/mean")]
    series = next((one for one in metrics if len(one) > 1), None)
    return series is not None and series.late > series.first + 0.1


@_fault(59, "completions agree on answers that are not the expected ones: is the data wrong?")
def expected_answers(run: Evidence) -> Shown:
    groups = [group for _, group in run.all_groups() if len(group) > 2]
    if not run.series(CORRECT).mean <= 0.1 or len(groups) < 8:
        return None
    # Half of the completions, not all one text, give one answer, and none is right.
    agreed = []
    for group in groups:
        answers = [str(row["extracted"]) for row in group if row.get("extracted") is not None]
        is_one_text = len({str(row.get("completion")) for row in group}) == 1
        if is_one_text or not answers or any(row.get("correct") for row in group):
            continue
        [(answer, count)] = Counter(answers).most_common(1)
        if count >= 0.5 * len(group):
            agreed.append((group[0], answer))
    if len(agreed) < 0.5 * len(groups):
        return None
    row, answer = agreed[0]
    shown = [
        f"in {len(agreed)} of {len(groups)} groups of samples/ half of the completions give "
        "one answer, and none is right",
        f"such as {excerpt(row.get('prompt'))}: {excerpt(answer, 40)}, where "
        f"{excerpt(row.get('expected'), 40)} is expected",
    ]
    return shown, ["compare `expected` and `extracted` in samples/; task.correct"]


# ---- sampling


@_fault(86, "the temperature is so high that completions are noise")
def temperature_high(run: Evidence) -> Shown:
    temperature = run.number("generation.temperature")
    entropy = run.series("train/entropy")
    is_noise = temperature > 1.2 and (entropy.first > 1.5 or (not entropy and temperature > 2))
    shown = run.shown("generation.temperature", "train/entropy", EXAMPLE)
    return is_noise and (shown, ["generation.temperature=1.0"])


@_fault(75, "the temperature is so low that the completions of a group hardly differ")
def temperature_low(run: Evidence) -> Shown:
    is_low = run.number("generation.temperature") <= 0.4 and run.series(AGREE).mean >= 0.5
    shown = run.shown("generation.temperature", AGREE)
    return is_low and (shown, ["generation.temperature=1.0"])


@_fault(77, "so many tokens are cut off that the completions of a group hardly differ")
def tokens_cut_off(run: Evidence) -> Shown:
    few = run.number("generation.top_k") in (1, 2) or run.number("generation.top_p") < 0.5
    few = few or run.number("generation.min_p") > 0.5
    shown = run.shown("generation.top_k", "generation.top_p", "generation.min_p", AGREE)
    overrides = ["generation.top_k=0", "generation.top_p=1.0", "generation.min_p=0.0"]
    return few and run.series(AGREE).mean >= 0.5 and (shown, overrides)


@_fault(77, "the repetition penalty takes away tokens that an answer needs more than once")
def repetition_penalty(run: Evidence) -> Shown:
    penalty = "generation.repetition_penalty"
    is_high = run.number(penalty) > 1.2 and run.series(CORRECT).mean <= 0.5
    shown = run.shown(penalty, CORRECT, EXAMPLE)
    return is_high and not _has_learned(run) and (shown, [f"{penalty}=1.0"])


# ---- completions


@_fault(
    82, "completions answer and go on until they are cut: the end-of-sequence token is missing"
)
def never_ends(run: Evidence) -> Shown:
    ends = "model.tokenizer: does it know the model's end tokens?"
    overrides = [ends, "generation.stop_token_ids=[...]"]
    goes_on = run.series(CUT).late >= 0.2 and _answers_and_goes_on(run)
    return goes_on and (run.shown(CUT, EXAMPLE), overrides)


@_fault(80, "completions are cut before they are done")
def truncated(run: Evidence) -> Shown:
    longest = "generation.max_new_tokens"
    shown = run.shown(CUT, "completions/max_length", longest, UNREAD)
    overrides = [*_times(run, longest, 2), "a prompt that asks for a short answer"]
    return run.series(CUT).late >= 0.2 and not _answers_and_goes_on(run) and (shown, overrides)


def _answers_and_goes_on(run: Evidence) -> bool:
    """Whether many completions that were cut hold the right answer all the same.

    The first steps count: later a run whose completions are cut has learned to answer shortly.
    """
    for step in sorted(run.samples):
        cut = [row for row in run.samples[step] if row.get("finish_reason") == "length"]
        if len(cut) > 0.2 * len(run.samples[step]):
            return float(np.mean([_holds_answer(row) for row in cut])) >= 0.25
    return False


def _holds_answer(row: dict) -> bool:
    """Whether the expected answer stands anywhere in a completion; where it is not known, whether
    the completion is right."""
    expected = row.get("expected")
    text = row.get("completion")
    if type(expected) not in (str, int, float) or not isinstance(text, str):
        return row.get("correct") is True
    whole = rf"(?<![\w.-]){re.escape(str(expected))}(?!\w)"
    return re.search(whole, text) is not None


@_fault(78, "no answer can be read out of the completions")
def parse_failures(run: Evidence) -> Shown:
    overrides = [
        "task.extract: a function that finds the answer",
        "task.prompt: ask for its form",
    ]
    return run.share(is_unread) >= 0.5 and (run.shown(UNREAD, EXAMPLE), overrides)


@_fault(79, "a stop text ends completions that have not answered yet")
def stop_text(run: Evidence) -> Shown:
    texts = run.setting("generation.stop")
    ended = [row for row in run.sampled if row.get("finish_reason") == "stop"]
    unread = [row for row in ended if is_unread(row)]
    if not texts or len(ended) < 16 or len(unread) < 0.1 * len(ended):
        return None
    shown = [
        f"{len(unread)} of the {len(ended)} completions in samples/ that a stop text ended "
        "have extracted: null",
        *run.shown("generation.stop", EXAMPLE),
    ]
    later = "generation.stop: a text that comes only after the answer"
    return shown, ["generation.stop=[]", later]


@_fault(76, "all completions of a group are the same text: they are sampled with one random key")
def completions_identical(run: Evidence) -> Shown:
    entropy = run.series("train/entropy")
    if not entropy.early >= 0.01 or _has_collapsed(entropy):
        return None
    if run.number("generation.temperature", 1.0) <= 0.4 or tokens_cut_off(run):
        return None
    groups = [{row.get("completion") for row in group} for _, group in run.all_groups()]
    same = sum(len(texts) == 1 for texts in groups)
    if not groups or same < 0.5 * len(groups):
        return None
    shown = [
        f"{same} of {len(groups)} groups of samples/ hold one text",
        f"train/entropy {entropy.early:.3g} nats a token says that they should differ",
    ]
    return shown, ["the random key must depend on the completion; algorithm.num_generations"]


@_fault(62, "the policy became certain without becoming right: all completions say the same")
def entropy_collapse(run: Evidence) -> Shown:
    entropy = run.series("train/entropy")
    correct = run.series(CORRECT) or run.series("reward/mean")
    if len(entropy) < 5 or not _has_collapsed(entropy) or not correct:
        return None
    if correct.late > 0.8 or correct.rises():
        return None
    overrides = ["algorithm.clip_high=0.28", "algorithm.kl_coef=0.01"]
    shown = run.shown("train/entropy", CORRECT, "reward/mean")
    return shown, _times(run, RATE, 0.2) + overrides


def _has_collapsed(entropy: Series) -> bool:
    return entropy.late < 0.2 * entropy.first and entropy.late < 0.02


@_fault(40, "the length of completions runs away and the reward does not rise")
def lengths(run: Evidence) -> Shown:
    length = run.series(LENGTH)
    reward = run.series("reward/mean")
    runs_away = length.late > 2 * length.early or length.late < 0.3 * length.early
    if len(length) < 6 or not runs_away or not reward or reward.rises() or _has_learned(run):
        return None
    overrides = ["algorithm=dr_grpo (a weight that does not depend on the length)"]
    return run.shown(LENGTH, "reward/mean"), overrides


# ---- data, evaluation, and the end


@_fault(72, "the same prompts come again and again")
def repeated_prompts(run: Evidence) -> Shown:
    counts = []
    for step in run.samples:
        prompts = [str(group[0].get("prompt")) for group in run.groups(step)]
        if len(prompts) >= 4:
            counts.append((len(set(prompts)), len(prompts), step))
    all_prompts = {str(row.get("prompt")) for row in run.sampled}
    groups = sum(total for _, total, _ in counts)
    shown = [
        f"{distinct} different prompts of {total} in step {step}"
        for distinct, total, step in counts
        if distinct <= 0.5 * total
    ]
    if not shown and not (len(counts) > 1 and len(all_prompts) <= 0.5 * groups):
        return None
    total = f"{len(all_prompts)} different prompts in {groups} groups of samples/"
    overrides = ["more rows in task.source", "training.prompts_per_step: as many as differ"]
    return [*shown[:2], total], overrides


@_fault(58, "held-out accuracy falls")
def evaluation_falls(run: Evidence) -> Shown:
    accuracy = run.series("eval/accuracy")
    if len(accuracy) < 2 or accuracy.first < 0.05:
        return None
    count = max(run.number("evaluation.num_examples", 256), 1)
    noise = 2 * np.sqrt(2 * accuracy.first * (1 - accuracy.first) / count)
    below = accuracy.largest - accuracy.last
    if accuracy.last > accuracy.first - noise and below < 0.15 + noise:
        return None
    shown = [
        f"eval/accuracy {accuracy.first:.1%} at first, {accuracy.largest:.1%} in step "
        f"{accuracy.at_largest()}, {accuracy.last:.1%} in step {accuracy.steps[-1]}"
    ]
    reward = run.series("reward/mean")
    if len(reward) < 4 or not reward.rises():
        return shown, ["training.keep_best_checkpoints=1", f"a smaller {RATE}"]
    shown.append(f"{reward}: the reward rises, so it is not what the task asks")
    what = "held-out accuracy falls while the reward rises"
    return shown, ["task.rewards: reward what task.correct calls right"], what


@_fault(57, "the run trains on examples that are held out, so its held-out accuracy is too high")
def held_out_in_train(run: Evidence) -> Shown:
    data = run.status.get("data")
    data = data if isinstance(data, dict) else {}
    both = data.get("held_out_in_train")
    count = data.get("held_out")
    if not _is_count(both) or not _is_count(count) or both > count:
        return None
    shown = (
        f"{both:,} of the {count:,} held-out prompts are training prompts ({both / count:.0%})"
    )
    return [shown], ["task.held_out: a file of rows that are not in task.train"]


@_fault(35, "a few steps take far longer: a program compiles in them, or the machine was busy")
def slow_steps(run: Evidence) -> Shown:
    seconds = run.series("time/step")
    # The first two steps compile what a run needs.
    if len(seconds) < 8:
        return None
    later = seconds.where(np.arange(len(seconds)) >= 2)
    usual = float(np.median(later.values))
    slow = later.where(later.values > 3 * usual)
    lost = float((slow.values - usual).sum())
    if lost <= 0 or lost < 0.1 * later.values.sum() or len(slow) > 0.2 * len(later):
        return None
    steps = ", ".join(str(step) for step in slow.steps[:5])
    shown = [
        f"time/step is {usual:.3g} s at the median, and {slow.largest:.3g} s in step "
        f"{slow.at_largest()}",
        f"{len(slow)} of {len(later)} steps (such as {steps}) took {lost:.0f} s more than "
        f"that, {lost / later.values.sum():.0%} of the time",
    ]
    kept = "runtime.program_cache keeps programs for the next run"
    return shown, ["train.log says what compiled", kept]


@_fault(30, "the run ended with an error")
def failed(run: Evidence) -> Shown:
    error = excerpt(run.status.get("error", ""), 200)
    return run.status.get("status") == "failed" and ([error], ["train.log says more"])
