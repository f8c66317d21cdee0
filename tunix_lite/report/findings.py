"""Finds what may be wrong with a run that does not learn, from its files alone.

BOUNDS is the table of the faults that metrics and settings over or under a bound show, CHECKS that
of all others. A check takes the run and the metrics that its row names. It gives what shows the
fault and what to try, or None. Its docstring is what the finding says, unless the check gives other
words. A metric that a run does not have shows nothing.
"""

import operator
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

# The evidence, and overrides to try; last, what the finding says in place of the docstring.
Shown = tuple[list[str], list[str]] | tuple[list[str], list[str], str] | None
AGREE = "reward/groups_that_agree"
CORRECT = "completions/correct"


@dataclass(frozen=True)
class Finding:
    """A fault, what shows it, and what to try.

    Example: Finding("learning_rate_zero", "nothing moves", ["train/learning_rate 0 in 60 steps"],
    ["optimizer.learning_rate=1e-6"]).
    """

    name: str
    what: str
    # numbers and steps
    evidence: list[str]
    # overrides of the command line; words where there is no setting
    overrides: list[str] = field(default_factory=list)

    @property
    def weight(self) -> int:
        return FAULTS[self.name]


@dataclass(frozen=True)
class BoundFault:
    """A fault that is there where all conditions hold.

    Example: BoundFault("kl_large", 64, "far away", ("train/kl late >= 1",), ("train/kl",)).
    """

    name: str
    weight: int
    what: str
    # `METRIC STATISTIC > NUMBER`, `SETTING > NUMBER`, a name of PREDICATES, or several with `or`
    when: tuple[str, ...]
    # metrics and settings
    shows: tuple[str, ...]
    # overrides; or a setting, and by how much to multiply it
    tries: tuple[str | tuple[str, float], ...] = ()

    def holds(self, run: Evidence) -> bool:
        """Whether the run has the fault."""
        choices = [condition.split(" or ") for condition in self.when]
        return all(any(_holds(run, one) for one in choice) for choice in choices)

    def finding(self, run: Evidence) -> Finding:
        """The finding of a run that has the fault."""
        overrides = []
        for override in self.tries:
            if isinstance(override, tuple):
                name, factor = override
                number = run.number(name, 0) * factor
                written = f"{number:.0f}" if number == int(number) else f"{number:.3g}"
                override = f"{name}={written}" if number else ""
            overrides.append(override)
        overrides = list(filter(None, overrides))
        return Finding(self.name, self.what, run.shown(*self.shows), overrides)


RELATIONS = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
}


def _holds(run: Evidence, condition: str) -> bool:
    """Whether one condition of a BoundFault holds; what is not known does not."""
    name, *words = condition.split()
    if name == "not":
        return not _holds(run, " ".join(words))
    if not words:
        return PREDICATES[name](run)
    if words == ["missing"]:
        return run.series(name) is None
    statistic = words.pop(0) if "/" in name else ""
    relation, bound, *times = words
    value = _value(run, name, statistic)
    limit = float(bound)
    if times:
        # `* early`: the bound is a multiple of another statistic.
        limit *= _value(run, name, times[-1]) or 0.0
    return value is not None and RELATIONS[relation](value, limit)


def _value(run: Evidence, name: str, statistic: str) -> float | None:
    if name == UNREAD:
        return run.share(is_unread)
    if "/" not in name:
        return run.number(name, None)
    series = run.series(name)
    return None if series is None else float(getattr(series, statistic))


def diagnose(run: Evidence) -> list[Finding]:
    """All findings, the heaviest first."""
    findings = [bound.finding(run) for bound in BOUNDS if bound.holds(run)]
    for _, check, *metrics in CHECKS:
        series = [run.series(metric) for metric in metrics]
        shown = None if any(one is None for one in series) else check(run, *series)
        if shown is not None:
            evidence, overrides, *what = shown
            words = " ".join(check.__doc__.split()).removesuffix(".")
            what = what or [words[0].lower() + words[1:]]
            findings.append(Finding(check.__name__, *what, evidence, overrides))
    return sorted(findings, key=lambda finding: -finding.weight)


# ---- the update


def updates_skipped(run: Evidence, skipped: Series) -> Shown:
    """Updates are not finite, so they are not made."""
    made = skipped.where(skipped.values > 0)
    if not len(made) or (skipped.mean < 0.1 and not (skipped.last and len(skipped) > 1)):
        return None
    first = int(made.steps[0])
    shown = f"train/skipped is 1 in {len(made)} of {len(skipped)} steps, first in step {first}"
    return [shown], [
        *_slower(run, 10),
        f"tunix-lite replay {run.folder} skipped={first}",
    ]


def _slower(run: Evidence, times: float) -> list[str]:
    """The learning rate over so many times; nothing where it is not known."""
    rate = run.number("optimizer.learning_rate", 0.0)
    return [f"optimizer.learning_rate={rate / times:.3g}"] if rate else []


def learning_rate_zero(run: Evidence) -> Shown:
    """The weights do not move."""
    rates = run.series("train/learning_rate")
    moved = run.series("train/update_norm")
    gradient = run.series("train/grad_norm")
    has_gradient = not _all_skipped(run) and (gradient is None or gradient.largest > 0)
    if rates is not None and rates.largest == 0:
        shown = f"train/learning_rate is 0 in all {len(rates)} steps"
    elif moved is not None and moved.largest == 0 and has_gradient:
        shown = f"train/update_norm is 0 in all {len(moved)} steps"
    else:
        return None
    return [shown], ["optimizer.learning_rate=1e-4 (a small model), 1e-6 (a large one)"]


def _all_skipped(run: Evidence) -> bool:
    skipped = run.series("train/skipped")
    return skipped is not None and skipped.values.all()


def warm_up_not_over(run: Evidence, rates: Series) -> Shown:
    """The learning rate is still warming up."""
    steps = run.number("optimizer.warmup_steps", 0)
    peak = run.number("optimizer.learning_rate", 0.0)
    if not peak or not 5 <= run.num_steps < steps or not 0 < rates.largest <= 0.2 * peak:
        return None
    shown = (
        f"train/learning_rate is {rates.largest:.3g} at most in {run.num_steps} steps, of "
        f"{peak:.3g}; optimizer.warmup_steps={steps:g}"
    )
    return [shown], [f"optimizer.warmup_steps={max(run.num_steps // 10, 1)}"]


def schedule_over(run: Evidence, rates: Series) -> Shown:
    """The learning rate fell to 0 long before the end."""
    if rates.largest == 0 or _all_skipped(run):
        return None
    trailing = len(rates) - 1 - int(np.flatnonzero(rates.values > 0)[-1])
    if trailing < max(3, len(rates) // 5):
        return None
    shown = f"train/learning_rate is 0 in the last {trailing} of {len(rates)} steps"
    return [shown], ["optimizer.schedule=constant"]


# What an update may move a weight, relative to a weight's usual size of 1 / sqrt(embed_dim). The
# quickstart moves 6e-4 at most, a model of billions at 1e-6 some 5e-5.
LARGE_STEP = 5e-3
SMALL_STEP = 2e-7


def relative_step(run: Evidence) -> Series | None:
    """Root mean square of an update's elements over that of weights, by step; None: not known.

    Of adapters it is what they add to a weight over its size. `a` is drawn uniformly within 1 /
    sqrt(inputs) and `b` is 0, so an update of b by rms u adds alpha / rank * sqrt(rank / 3) u times
    1 / sqrt(inputs), the size of the weight.
    """
    moved = run.series("train/update_norm")
    rank = run.number("model.lora.rank", 0)
    count = run.status.get("trained_parameters" if rank else "parameters")
    width = run.architecture.get("embed_dim")
    if moved is None or not _is_count(count) or not _is_count(width):
        return None
    factor = np.sqrt(width / count)
    if rank:
        alpha = run.number("model.lora.alpha", 0.0)
        if not _is_count(rank) or alpha <= 0:
            return None
        factor = alpha / rank * np.sqrt(rank / 3 / count)
    return Series("update / weights", moved.steps, moved.values * factor)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < MOST_NUMBER


def step_too_large(run: Evidence) -> Shown:
    """The updates are so large that they destroy the policy."""
    # What the policy could do at first and cannot now.
    fell = []
    for name in (CORRECT, "reward/mean", "eval/accuracy"):
        series = run.series(name)
        if series is None or len(series) < 2:
            continue
        if series.first > 0.1 and series.late < 0.5 * series.first:
            fell.append(f"{name} {series.first:.3g} → {series.late:.3g}")

    # Signs of a policy that was thrown far from where it was.
    rises = []
    outside = run.series("train/ratio_outside_clip")
    if outside is not None and len(outside) > 2 and outside.late > 0.3:
        rises.append(str(outside))
    entropy = run.series("train/entropy")
    if entropy is not None and len(entropy) > 2 and entropy.first > 0:
        exploded = entropy.late > 5 * entropy.first and entropy.late > 0.5
        if exploded or entropy.late < 0.05 * entropy.first:
            rises.append(str(entropy))

    step = relative_step(run)
    if step is None:
        shown = []
        is_lost = bool(fell and rises)
    else:
        # Adapters are usually given steps ten times as large, and bear them.
        enough = (16 if run.number("model.lora.rank", 0) else 4) * LARGE_STEP
        is_lost = step.largest > (LARGE_STEP if fell or rises else enough)
        shown = [
            f"an update moves a weight by {step.largest:.2%} of its usual size (step "
            f"{step.at_largest()}); {LARGE_STEP:.1%} is much"
        ]
    if not is_lost:
        return None
    return [*shown, *fell, *rises], _slower(run, 100) or ["a smaller learning rate"]


def step_too_small(run: Evidence) -> Shown:
    """The updates are so small that nothing moves."""
    step = relative_step(run)
    if step is None or run.num_steps < 5 or not 0 < step.largest < SMALL_STEP:
        return None
    rate = run.number("optimizer.learning_rate", 0.0)
    gradient = run.series("train/grad_norm")
    clip = run.number("optimizer.max_grad_norm", 0.0)
    shown = [
        f"an update moves a weight by {step.largest:.2g} of its usual size at most; 1e-5 to 1e-3 "
        "is common"
    ]
    overrides = [f"optimizer.learning_rate={rate * SMALL_STEP / step.largest * 100:.1g}"]
    if gradient is not None and clip and np.median(gradient.values) > 100 * clip:
        shown.append(f"train/grad_norm {gradient.mean:.3g} is clipped to {clip:g}")
        overrides.insert(0, "optimizer.max_grad_norm=1")
    return shown, overrides


# ---- the sampler and the trainer


# nats a token. In float32 the gap is 1e-7, in bfloat16 on a GPU some 1e-2
LARGE_GAP = 0.05


def sampler_gap(run: Evidence) -> Shown:
    """The sampler and the trainer disagree about the same tokens: other tokens, another
    temperature, or log-probabilities at another place."""
    gap = run.series("train/sampler_gap", at_rollouts=True)
    if gap is None or gap.first < LARGE_GAP:
        return None
    shown = [
        f"train/sampler_gap {gap.first:.3g} nats a token in step {gap.steps[0]}, before anything "
        "was learned; rounding gives 1e-7 in float32 and 1e-2 in bfloat16"
    ]
    widest = run.series("train/sampler_gap_max", at_rollouts=True)
    if widest is not None:
        shown.append(f"train/sampler_gap_max {widest.first:.3g}")
    return shown, [
        "algorithm.old_logprobs=whole",
        "rollout.cache=compute",
        "compare the log-probabilities of one sequence: they may be shifted by one",
    ]


def sampler_stale(run: Evidence) -> Shown:
    """The sampler does not have the weights that learn: the gap grows with the updates."""
    gap = run.series("train/sampler_gap", least=3, at_rollouts=True)
    if gap is None or gap.first >= LARGE_GAP or gap.late < max(30 * gap.first, 2e-3):
        return None
    overrides = ["give the sampler the weights of every step (policy.generate(params, ...))"]
    return [str(gap)], overrides


def outside_of_clip(run: Evidence, outside: Series) -> Shown:
    """The policy leaves the clip within a rollout, so many tokens have no gradient."""
    accuracy = run.series("eval/accuracy") or run.series("reward/mean")
    fell = accuracy is not None and accuracy.last < accuracy.first - 0.05
    if outside.largest < 0.1 or (outside.late < 0.3 and not fell):
        return None
    updates = int(run.number("algorithm.updates_per_rollout", 1))
    overrides = _slower(run, 10)
    if updates > 1:
        overrides.insert(0, f"algorithm.updates_per_rollout={max(updates // 2, 1)}")
    shown = [
        f"train/ratio_outside_clip {outside.largest:.0%} in step {outside.at_largest()}",
        f"algorithm.updates_per_rollout={updates}",
    ]
    if fell:
        shown.append(f"{accuracy.name} {accuracy.first:.3g} → {accuracy.last:.3g}")
    return shown, overrides


def kl_dominates(run: Evidence) -> Shown:
    """The KL term holds the policy where it began."""
    coef = run.number("algorithm.kl_coef", 0.0)
    reward = run.series("reward/mean")
    kl = run.series("train/kl")
    weighs = kl is not None and coef * kl.late > 0.05
    rises = reward is not None and _rises(reward)
    if coef < 0.5 or run.num_steps < 3 or (rises and not weighs):
        return None
    shown = [f"algorithm.kl_coef={coef:g}; 0 to 0.05 is common"]
    if weighs:
        shown.append(f"kl_coef x train/kl is {coef * kl.late:.3g}, beside rewards of 0 to 1")
    return shown + run.shown("train/kl", "reward/mean"), ["algorithm.kl_coef=0.01"]


# ---- rewards and groups


def rewards_fail(run: Evidence) -> Shown:
    """Reward functions fail, and what they should have judged teaches nothing."""
    counted = {}
    for kind in ("errors", "timeouts", "crashes", "not_numbers"):
        series = run.series(f"rewards/{kind}")
        if series is not None and series.values.sum() > 0:
            counted[kind] = series
    dropped = run.share(lambda row: "reward" in row and row["reward"] is None)

    # Completions of a step, by the settings or else as samples/ has them.
    calls = int(run.number("training.prompts_per_step", 0)) * run.group_size
    if calls <= 0 or run.group_size < 2:
        calls = next((len(rows) for rows in run.samples.values()), 0)
    worst = max((series.mean for series in counted.values()), default=0.0)
    is_common = calls and worst >= 0.05 * calls
    if not is_common and not (dropped is not None and dropped >= 0.05) and worst < 8:
        return None
    shown = [
        f"rewards/{kind} {series.mean:.3g} a step, first in step "
        f"{series.steps[np.flatnonzero(series.values)[0]]}"
        for kind, series in counted.items()
    ]
    if calls and shown:
        shown[0] += f" (of {calls} completions)"
    if dropped:
        shown.append(f"{dropped:.0%} of the completions in samples/ have no reward")
    overrides = []
    if "timeouts" in counted:
        overrides.append(f"rewards.timeout={3 * run.number('rewards.timeout', 10.0):g}")
    if run.setting("rewards.on_error") != "raise":
        overrides.append("rewards.on_error=raise (ends the run with the error of the function)")
    return shown, overrides or ["train.log has the errors"]


def _groups(run: Evidence) -> list[tuple[int, list[dict]]]:
    """All groups of samples/, with their step."""
    return [(step, group) for step in run.samples for group in run.groups(step)]


def groups_mixed(run: Evidence) -> Shown:
    """Advantages are not those of the completions of one prompt."""
    groups = _groups(run)
    mixed = [step for step, group in groups if len({row.get("prompt") for row in group}) > 1]
    # Within a group equal rewards have equal advantages, and higher ones higher. That is so where
    # advantages follow one reward: of several, each may be normalised alone, and what an algorithm
    # adds to it is not in the files.
    adds = run.setting("algorithm.shaping") is not None
    adds = adds or run.setting("algorithm.kl_estimator") == "k1_reward"
    rewards = run.sampled[0].get("rewards") if run.sampled else None
    has_one = not adds and not (isinstance(rewards, dict) and len(rewards) > 1)
    wrong = [step for step, group in groups if has_one and _against_rewards(group, run)]
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
    size = run.group_size
    return shown, [f"row p * {size} + g must be completion g of prompt p: see collect"]


def _against_rewards(group: list[dict], run: Evidence) -> bool:
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
        return len(pairs) == run.group_size and bool(np.abs(advantages).max() > 0.2)
    # Opposite signs, both of some size: baselines and scales of all kinds keep the order.
    apart = rewards[:, None] - rewards[None]
    order = apart * (advantages[:, None] - advantages[None])
    return bool((order < -0.1 * np.abs(apart) * np.ptp(advantages)).any())


def reward_of_prompt(run: Evidence) -> Shown:
    """The reward depends on the prompt alone, so it says nothing of a completion."""
    mixed = []
    values = set()
    for _, group in _groups(run):
        rewards = {row["reward"] for row in group if is_number(row.get("reward"))}
        values |= rewards
        if len({row.get("correct") for row in group}) > 1:
            mixed.append(len(rewards) == 1)
    if len(mixed) < 4 or not all(mixed) or len(values) < 2:
        return None
    shown = (
        f"in {len(mixed)} groups of samples/ some completions are right, some wrong, and all "
        "of a group have one reward"
    )
    return [shown], [
        "task.rewards: a function that reads the completion, (completion, example) -> number"
    ]


def reward_sign(run: Evidence) -> Shown:
    """The reward is higher for what the task calls wrong."""
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
    if reward is not None and correct is not None and len(reward) >= 8:
        size = min(len(reward), len(correct))
        x = reward.values[:size]
        y = correct.values[:size]
        varies = size >= 3 and x.std() > 0 and y.std() > 0 and correct.values.std() > 0.01
        together = float(np.corrcoef(x, y)[0, 1]) if varies else 0.0
        if together < -0.8:
            shown.append(
                f"reward/mean and completions/correct go against each other ({together:.2f})"
            )
    if not shown:
        return None
    rewards_by_name = run.setting("task.rewards")
    negative = [
        f"task.rewards.{excerpt(name)}.weight=1.0"
        for name, settings in (rewards_by_name.items() if isinstance(rewards_by_name, dict) else ())
        if isinstance(settings, dict)
        and is_number(settings.get("weight"))
        and settings["weight"] < 0
    ]
    return shown, negative or ["the sign of the reward function, or task.rewards.<name>.weight"]


def reward_exploited(run: Evidence) -> Shown:
    """The reward climbs and right answers do not: the policy earns it without solving the task."""
    reward = run.series("reward/mean", least=6)
    if reward is None or not _rises(reward):
        return None
    gained = reward.late - reward.early
    judges = [run.series(name, least=2) for name in (CORRECT, "eval/accuracy")]
    judges = [series for series in judges if series is not None]
    # Where nearly all is right, other rewards are all that is left to gain.
    stands = [s.late - s.early < 0.2 * gained and s.late < 0.8 for s in judges]
    if gained < 0.05 or not stands or not all(stands):
        return None
    shown = [str(series) for series in (reward, *judges)]
    wrong = [row for row in run.sampled if row.get("correct") is False]
    wrong = [row for row in wrong if is_number(row.get("reward"))]
    if wrong:
        best = max(wrong, key=lambda row: row["reward"])
        text = excerpt(best.get("completion", ""), 100)
        shown.append(f"a wrong completion with the reward {best['reward']:.3g}: {text}")
    return shown, [
        "task.rewards: reward what task.correct calls right",
        "read the completions with the highest rewards in samples/",
    ]


def _reward_is_constant(run: Evidence) -> float | None:
    """The reward that all completions of all steps got; None if they differ."""
    reward, spread = run.series("reward/mean"), run.series("reward/std")
    if reward is None or spread is None or spread.largest > 1e-9 or np.ptp(reward.values) > 1e-9:
        return None
    return reward.first


def rewards_constant(run: Evidence, correct: Series) -> Shown:
    """Every completion of every step has the same reward, although they are not equally good."""
    value = _reward_is_constant(run)
    is_flat = np.ptp(correct.values) == 0 and correct.first in (0.0, 1.0)
    if value is None or is_flat:
        return None
    shown = [
        f"reward/std is 0 in all {run.num_steps} steps, reward/mean {value:g}",
        f"completions/correct {correct.mean:.3g}",
    ]
    what = f"every completion has the reward {value:g}, right or wrong: nothing is to be learned"
    return (
        shown,
        ["the function of task.rewards: call it with a right and a wrong completion"],
        what,
    )


def all_wrong(run: Evidence, correct: Series) -> Shown:
    """No completion was ever right."""
    is_constant = _reward_is_constant(run) is not None
    accuracy = run.series("eval/accuracy")
    if correct.largest > 0 or (not is_constant and len(correct) < 5):
        return None
    if reward_exploited(run) is not None or (accuracy is not None and accuracy.largest > 0.02):
        return None
    shown = [f"{CORRECT} is 0 in all {len(correct)} steps", *run.shown("reward/mean", EXAMPLE)]
    overrides = ["an easier task, or a model that is right now and then; algorithm=sft first"]
    group = ", so no group has anything to learn from" if is_constant else ""
    return shown, overrides, f"no completion is right in any step{group}"


def groups_agree(run: Evidence, agree: Series) -> Shown:
    """Most groups teach nothing: too hard, or too easy."""
    correct = run.series(CORRECT) or run.series("reward/mean")
    if correct is None or agree.mean < 0.7 or _reward_is_constant(run) is not None:
        return None
    if run.num_steps < 4 or _has_learned(run):
        return None
    is_hard = correct.mean < 0.5
    size = run.group_size
    overrides = [f"algorithm.num_generations={2 * size}"] if size > 1 else []
    overrides.append("an easier task" if is_hard else "a harder task")
    what = f"most groups teach nothing: the task is too {'hard' if is_hard else 'easy'}"
    return [str(agree), str(correct)], overrides, what


def expected_answers(run: Evidence, correct: Series) -> Shown:
    """Completions agree on answers that are not the expected ones: the data may hold wrong ones."""
    groups = [group for _, group in _groups(run) if len(group) > 2]
    if correct.mean > 0.1 or len(groups) < 8:
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
    prompt = excerpt(row.get("prompt"), 60)
    expected = excerpt(row.get("expected"), 40)
    shown = [
        f"in {len(agreed)} of {len(groups)} groups of samples/ half of the completions give "
        "one answer, and none is right",
        f"such as {prompt}: {excerpt(answer, 40)}, where {expected} is expected",
    ]
    return shown, ["compare `expected` and `extracted` in samples/; task.correct"]


def _has_learned(run: Evidence) -> bool:
    """Whether the run got good: then groups agree because they are right."""
    for name in ("eval/accuracy", CORRECT, "reward/mean"):
        series = run.series(name)
        if series is not None and len(series) > 1:
            return series.late > series.first + 0.1
    return False


def _rises(series: Series) -> bool:
    """Whether the last third lies above the first by more than its noise."""
    third = len(series) // 3
    if third < 2:
        return series.last > series.first + 0.1
    noise = series.values[-third:].std() + series.values[:third].std()
    return series.late > series.early + max(noise / np.sqrt(third), 0.01)


# ---- completions


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


def stop_text(run: Evidence) -> Shown:
    """A stop text ends completions that have not answered yet."""
    texts = run.setting("generation.stop")
    ended = [row for row in run.sampled if row.get("finish_reason") == "stop"]
    unread = [row for row in ended if is_unread(row)]
    if not texts or len(ended) < 16 or len(unread) < 0.1 * len(ended):
        return None
    shown = [
        f"{len(unread)} of the {len(ended)} completions in samples/ that a stop text ended "
        "have extracted: null",
        f"generation.stop={excerpt(texts)}",
        *run.shown(EXAMPLE),
    ]
    return shown, [
        "generation.stop=[]",
        "generation.stop: a text that comes only after the answer",
    ]


def completions_identical(run: Evidence, entropy: Series) -> Shown:
    """All completions of a group are the same text: they are sampled with one random key."""
    is_cut = any(bound.name == "tokens_cut_off" and bound.holds(run) for bound in BOUNDS)
    if run.number("generation.temperature", 1.0) <= 0.4 or is_cut:
        return None
    groups = [{row.get("completion") for row in group} for _, group in _groups(run)]
    same = sum(len(texts) == 1 for texts in groups)
    if not groups or same < 0.5 * len(groups) or entropy.early < 0.01 or _collapsed(entropy):
        return None
    shown = [
        f"{same} of {len(groups)} groups of samples/ hold one text",
        f"train/entropy {entropy.early:.3g} nats a token says that they should differ",
    ]
    return shown, ["the random key must depend on the completion; algorithm.num_generations"]


def repeated_prompts(run: Evidence) -> Shown:
    """The same prompts come again and again."""
    counts = []
    for step in run.samples:
        prompts = [group[0].get("prompt") for group in run.groups(step)]
        if len(prompts) >= 4:
            counts.append((len(set(map(str, prompts))), len(prompts), step))
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
    return [*shown[:2], total], [
        "more rows in task.source",
        "training.prompts_per_step: as many as differ",
    ]


def _collapsed(entropy: Series) -> bool:
    return entropy.late < 0.2 * entropy.first and entropy.late < 0.02


def _has_reward_that_rises(run: Evidence) -> bool:
    reward = run.series("reward/mean")
    return reward is not None and _rises(reward)


def _is_right_or_gets_there(run: Evidence) -> bool:
    correct = run.series(CORRECT) or run.series("reward/mean")
    return correct is None or correct.late > 0.8 or _rises(correct)


def evaluation_falls(run: Evidence, accuracy: Series) -> Shown:
    """Held-out accuracy falls."""
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
    if reward is None or len(reward) < 4 or not _rises(reward):
        return shown, ["training.keep_best_checkpoints=1", "a smaller optimizer.learning_rate"]
    shown.append(f"{reward}: the reward rises, so it is not what the task asks")
    what = "held-out accuracy falls while the reward rises"
    return shown, ["task.rewards: reward what task.correct calls right"], what


def held_out_in_train(run: Evidence) -> Shown:
    """The run trains on examples that are held out, so its held-out accuracy is too high."""
    data = run.status.get("data")
    data = data if isinstance(data, dict) else {}
    both = data.get("held_out_in_train")
    count = data.get("held_out")
    if not _is_count(both) or not _is_count(count) or both > count:
        return None
    shown = f"{both:,} of the {count:,} held-out prompts are training prompts ({both / count:.0%})"
    return [shown], ["task.held_out: a file of rows that are not in task.train"]


def slow_steps(run: Evidence, seconds: Series) -> Shown:
    """A few steps take far longer than the others: a program compiles in them, or the machine was
    busy."""
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
    return shown, [
        "train.log says what compiled",
        "runtime.program_cache keeps programs for the next run",
    ]


def failed(run: Evidence) -> Shown:
    """The run ended with an error."""
    if run.status.get("status") != "failed":
        return None
    return [excerpt(run.status.get("error", ""), 200)], ["train.log says more"]


PREDICATES: dict[str, Callable[[Evidence], bool]] = {
    "answers_and_goes_on": _answers_and_goes_on,
    "has_learned": _has_learned,
    "has_one_reward": lambda run: _reward_is_constant(run) is not None,
    "is_right_or_gets_there": _is_right_or_gets_there,
    "reward_rises": _has_reward_that_rises,
}
BOUNDS = (
    BoundFault(
        "temperature_high",
        86,
        "the temperature is so high that completions are noise",
        (
            "generation.temperature > 1.2",
            "train/entropy first > 1.5 or train/entropy missing",
            "train/entropy first > 1.5 or generation.temperature > 2",
        ),
        ("generation.temperature", "train/entropy", EXAMPLE),
        ("generation.temperature=1.0",),
    ),
    BoundFault(
        "never_ends",
        82,
        "completions hold an answer and go on until they are cut: the end-of-sequence token is "
        "missing",
        ("completions/truncated late >= 0.2", "answers_and_goes_on"),
        ("completions/truncated", EXAMPLE),
        (
            "model.tokenizer: does it know the model's end tokens?",
            "generation.stop_token_ids=[...]",
        ),
    ),
    BoundFault(
        "truncated",
        80,
        "completions are cut before they are done",
        ("completions/truncated late >= 0.2", "not answers_and_goes_on"),
        (
            "completions/truncated",
            "completions/max_length",
            "generation.max_new_tokens",
            UNREAD,
        ),
        (("generation.max_new_tokens", 2), "a prompt that asks for a short answer"),
    ),
    BoundFault(
        "parse_failures",
        78,
        "no answer can be read out of the completions",
        (f"{UNREAD} mean >= 0.5",),
        (UNREAD, EXAMPLE),
        (
            "task.extract: a function that finds the answer",
            "task.prompt: ask for its form",
        ),
    ),
    BoundFault(
        "tokens_cut_off",
        77,
        "so many tokens are cut off that the completions of a group hardly differ",
        (
            "generation.top_k == 1 or generation.top_k == 2 or generation.top_p < 0.5 or "
            "generation.min_p > 0.5",
            f"{AGREE} mean >= 0.5",
        ),
        ("generation.top_k", "generation.top_p", "generation.min_p", AGREE),
        ("generation.top_k=0", "generation.top_p=1.0", "generation.min_p=0.0"),
    ),
    BoundFault(
        "repetition_penalty",
        77,
        "the repetition penalty takes away tokens that an answer needs more than once",
        (
            "generation.repetition_penalty > 1.2",
            f"{CORRECT} mean <= 0.5",
            "not has_learned",
        ),
        ("generation.repetition_penalty", CORRECT, EXAMPLE),
        ("generation.repetition_penalty=1.0",),
    ),
    BoundFault(
        "temperature_low",
        75,
        "the temperature is so low that the completions of a group hardly differ",
        ("generation.temperature <= 0.4", f"{AGREE} mean >= 0.5"),
        ("generation.temperature", AGREE),
        ("generation.temperature=1.0",),
    ),
    BoundFault(
        "all_right",
        73,
        "every completion is right from the first step on: there is nothing left to learn",
        (f"{CORRECT} least >= 1", "has_one_reward"),
        (CORRECT, "reward/mean"),
        ("a harder task",),
    ),
    BoundFault(
        "kl_large",
        64,
        "the policy is far from its reference",
        ("train/kl late >= 1",),
        ("train/kl",),
        (("algorithm.kl_coef", 5), ("optimizer.learning_rate", 0.1)),
    ),
    BoundFault(
        "entropy_collapse",
        62,
        "the policy became certain without becoming right: all completions say the same",
        (
            "train/entropy count >= 5",
            "train/entropy late < 0.2 * first",
            "train/entropy late < 0.02",
            "not is_right_or_gets_there",
        ),
        ("train/entropy", CORRECT, "reward/mean"),
        (
            ("optimizer.learning_rate", 0.2),
            "algorithm.clip_high=0.28",
            "algorithm.kl_coef=0.01",
        ),
    ),
    BoundFault(
        "lengths",
        40,
        "the length of completions runs away and the reward does not rise",
        (
            "completions/mean_length count >= 6",
            "completions/mean_length late > 2 * early or completions/mean_length late < 0.3 * "
            "early",
            "reward/mean count >= 1",
            "not reward_rises",
            "not has_learned",
        ),
        ("completions/mean_length", "reward/mean"),
        ("algorithm=dr_grpo (a weight that does not depend on the length)",),
    ),
)
# (weight, check, the metrics that it needs) each. A cause weighs more than its symptoms: a run at a
# temperature of 5 has cut completions and no rewards, too.
CHECKS = (
    (100, updates_skipped, "train/skipped"),
    (98, learning_rate_zero),
    (96, rewards_fail),
    (94, groups_mixed),
    (92, sampler_gap),
    (91, sampler_stale),
    (90, reward_of_prompt),
    (89, reward_sign),
    (88, rewards_constant, CORRECT),
    (87, reward_exploited),
    (84, step_too_large),
    (79, stop_text),
    (76, completions_identical, "train/entropy"),
    (74, all_wrong, CORRECT),
    (72, repeated_prompts),
    (70, warm_up_not_over, "train/learning_rate"),
    (68, step_too_small),
    (66, kl_dominates),
    (60, outside_of_clip, "train/ratio_outside_clip"),
    (59, expected_answers, CORRECT),
    (58, evaluation_falls, "eval/accuracy"),
    (57, held_out_in_train),
    (56, groups_agree, AGREE),
    (54, schedule_over, "train/learning_rate"),
    (35, slow_steps, "time/step"),
    (30, failed),
)
# By name: the weight of each fault.
FAULTS = {check.__name__: weight for weight, check, *_ in CHECKS}
FAULTS |= {bound.name: bound.weight for bound in BOUNDS}
