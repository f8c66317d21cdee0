"""Finds what may be wrong with a run that does not learn, from its files alone. Each fault is a
check with a weight: a cause weighs more than its symptoms. A metric that a run lacks is nan, and no
bound holds for it."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

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

# The evidence, and overrides to try; None: the run does not have the fault.
_Shown = tuple[list[str], list[str]] | None
_AGREE = "reward/groups_that_agree"
_CORRECT = "completions/correct"
_CUT = "completions/truncated"
_RATE = "optimizer.learning_rate"
# What an update may move a weight, relative to a weight's usual size of 1 / sqrt(embed_dim). The
# quickstart moves 6e-4 at most, a model of billions at 1e-6 some 5e-5.
_LARGE_STEP = 5e-3
_SMALL_STEP = 2e-7
# nats a token. In float32 the gap is 1e-7, in bfloat16 on a GPU some 1e-2
_LARGE_GAP = 0.05


# By name: the weight of each fault, its words and its check.
FAULTS: dict[str, tuple[int, str, Callable[[Evidence], _Shown]]] = {}


@dataclass(frozen=True)
class Finding:
    """A fault, what shows it, and what to try.
    Example: Finding("learning_rate_zero", "nothing moves", ["train/learning_rate 0 in 60 steps"],
    ["optimizer.learning_rate=1e-6"], 98)."""

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
            findings.append(Finding(name, what, *shown, weight))
    return sorted(findings, key=lambda finding: -finding.weight)


def _overrides(run: Evidence, tries: tuple[str | tuple[str, float], ...]) -> list[str]:
    """What to type; a setting that is not known has no multiple."""
    texts = []
    for one in tries:
        if isinstance(one, str):
            texts.append(one)
            continue
        name, factor = one
        before = run.number(name, 0)
        number = before * factor
        # A count stays one.
        if type(before) is int:
            number = max(int(number), 1)
        if before and number != before:
            texts.append(
                f"{name}={number:.3g}" if type(number) is float else f"{name}={number}"
            )
    return texts


def _has_one_reward(run: Evidence) -> bool:
    """Whether all completions of all steps got one reward."""
    reward = run.series("reward/mean")
    return run.series("reward/std").largest <= 1e-9 and reward.largest - reward.least <= 1e-9


def _answers_and_goes_on(run: Evidence) -> bool:
    """Whether many completions that were cut hold the right answer all the same. The first steps
    count: later a run whose completions are cut has learned to answer shortly."""
    for step in sorted(run.samples):
        cut = [row for row in run.samples[step] if row.get("finish_reason") == "length"]
        if len(cut) > 0.2 * len(run.samples[step]):
            num_right = 0
            for row in cut:
                answer = re.escape(str(row.get("expected")))
                # Not as a part of another word or number.
                found = re.search(rf"(?<![\w.-]){answer}(?!\w)", str(row.get("completion")))
                num_right += row.get("correct") is True or found is not None
            return num_right >= 0.25 * len(cut)
    return False


def _fault(weight: int, what: str) -> Callable[[Callable], Callable]:
    def register(check: Callable[[Evidence], _Shown]) -> Callable[[Evidence], _Shown]:
        FAULTS[check.__name__.removeprefix("_")] = (weight, what, check)
        return check

    return register


@_fault(100, "updates are not finite, so they are not made")
def _updates_skipped(run: Evidence) -> _Shown:
    skipped = run.series("train/skipped")
    made = skipped.where(skipped.values > 0)
    if not made or (skipped.mean < 0.1 and not (skipped.last and len(skipped) > 1)):
        return None
    first = int(made.steps[0])
    shown = f"train/skipped is 1 in {len(made)} of {len(skipped)} steps, first in step {first}"
    return [shown], _overrides(run, ((_RATE, 0.1),))


def _relative_step(run: Evidence) -> Series:
    """Root mean square of an update's elements over that of weights, by step. Of adapters it is
    what they add to a weight over its size 1 / sqrt(inputs): `a` is drawn uniformly within that and
    `b` is 0, so an update of b by rms u adds alpha / rank * sqrt(rank / 3) u times it."""
    moved = run.series("train/update_norm")
    rank = run.number("model.lora.rank", 0)
    alpha = run.number("model.lora.alpha", 0.0)
    count = run.status.get("trained_parameters" if rank else "parameters")
    width = run.architecture.get("embed_dim")
    # files of a run may lack any of them
    known = [count, width, rank] if rank else [count, width]
    if not all(map(_is_count, known)) or (rank and alpha <= 0):
        return moved.where(np.zeros(len(moved), bool))
    factor = np.sqrt(width / count)
    if rank:
        factor = alpha / rank * np.sqrt(rank / 3 / count)
    return Series("update / weights", moved.steps, moved.values * factor)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value < MOST_NUMBER


@_fault(84, "the updates are so large that they destroy the policy")
def _step_too_large(run: Evidence) -> _Shown:
    # What the policy could do at first and cannot now.
    abilities = map(run.series, (_CORRECT, "reward/mean", "eval/accuracy"))
    fell = [
        f"{series.name} {series.first:.3g} → {series.late:.3g}"
        for series in abilities
        if len(series) > 1 and series.first > 0.1 and series.late < 0.5 * series.first
    ]

    # Signs of a policy that was thrown far from where it was.
    outside = run.series("train/ratio_outside_clip")
    thrown = [str(outside)] if len(outside) > 2 and outside.late > 0.3 else []
    entropy = run.series("train/entropy")
    if len(entropy) > 2 and entropy.first > 0:
        exploded = entropy.late > 5 * entropy.first and entropy.late > 0.5
        if exploded or entropy.late < 0.05 * entropy.first:
            thrown.append(str(entropy))

    step = _relative_step(run)
    is_large = fell and thrown
    if step:
        enough = _LARGE_STEP
        if not fell and not thrown:
            # Adapters are usually given steps ten times as large, and bear them.
            enough *= 16 if run.number("model.lora.rank", 0) else 4
        is_large = step.largest > enough
    if not is_large:
        return None
    shown = []
    if step:
        shown.append(
            f"an update moves a weight by {step.largest:.2%} of its usual size (step "
            f"{step.at_largest()}); {_LARGE_STEP:.1%} is much"
        )
    smaller = _overrides(run, ((_RATE, 0.01),))
    return [*shown, *fell, *thrown], smaller or ["a smaller learning rate"]


@_fault(68, "the updates are so small that nothing moves")
def _step_too_small(run: Evidence) -> _Shown:
    step = _relative_step(run)
    if run.num_steps < 5 or not 0 < step.largest < _SMALL_STEP:
        return None
    moves = f"an update moves a weight by {step.largest:.2g} of its usual size at most"
    # a hundred times the limit, which is within what is common
    rate = run.number(_RATE, 0.0) * _SMALL_STEP / step.largest * 100
    shown = run.shown("train/grad_norm", "optimizer.max_grad_norm", "optimizer.warmup_steps")
    return [f"{moves}; 1e-5 to 1e-3 is common", *shown], [f"{_RATE}={rate:.1g}"]


@_fault(
    92, "sampler and trainer disagree on the same tokens: another temperature, place or token"
)
def _sampler_gap(run: Evidence) -> _Shown:
    gap = run.sampler_gap()
    # Not `<`: without any steps it is nan.
    if not gap.first >= _LARGE_GAP:
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


@_fault(98, "the weights do not move")
def _learning_rate_zero(run: Evidence) -> _Shown:
    has_gradient = run.series("train/skipped").least != 1
    has_gradient &= run.series("train/grad_norm").largest != 0
    is_still = run.series("train/update_norm").largest == 0 and has_gradient
    if not is_still and run.series("train/learning_rate").largest != 0:
        return None
    shown = run.shown("train/learning_rate", "train/update_norm")
    return shown, [f"{_RATE}=1e-4 (a small model), 1e-6 (a large one)"]


@_fault(60, "the policy leaves the clip within a rollout, so many tokens have no gradient")
def _outside_of_clip(run: Evidence) -> _Shown:
    updates = "algorithm.updates_per_rollout"
    if not run.series("train/ratio_outside_clip").mean >= 0.05:
        return None
    shown = run.shown("train/ratio_outside_clip", updates, "eval/accuracy")
    return shown, _overrides(run, ((updates, 0.5), (_RATE, 0.1)))


@_fault(96, "reward functions fail, and what they should have judged teaches nothing")
def _rewards_fail(run: Evidence) -> _Shown:
    names = ("errors", "timeouts", "crashes", "not_numbers")
    counted = [run.series(f"rewards/{name}") for name in names]
    counted = [series for series in counted if series.values.sum() > 0]
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
        f"{series.name} {series.mean:.3g} a step of {calls or '?'} completions, first in step "
        f"{series.steps[np.flatnonzero(series.values)[0]]}"
        for series in counted
    ]
    if dropped > 0:
        shown.append(f"{dropped:.0%} of the completions in samples/ have no reward")
    overrides = ["rewards.on_error=raise (ends the run with the error of the function)"]
    if any(series.name == "rewards/timeouts" for series in counted):
        overrides[:0] = _overrides(run, (("rewards.timeout", 3.0),))
    return shown, overrides


@_fault(89, "the reward is higher for what the task calls wrong")
def _reward_sign(run: Evidence) -> _Shown:
    pairs = [
        (row["reward"], row["correct"])
        for row in run.sampled
        if is_number(row.get("reward")) and type(row.get("correct")) is bool
    ]
    rewards, right = np.array(pairs, np.float64).reshape(-1, 2).T
    if len(pairs) < 16 or not 0 < right.mean() < 1:
        return None
    ours, others = rewards[right > 0], rewards[right == 0]
    # a few samples may differ by chance
    noise = np.sqrt(ours.var() / len(ours) + others.var() / len(others))
    if ours.mean() >= others.mean() - max(4 * noise, 1e-6):
        return None
    shown = (
        f"in samples/ a right completion has the reward {ours.mean():.3g}, a wrong one "
        f"{others.mean():.3g}"
    )
    by_name = run.setting("task.rewards")
    negative = [
        f"task.rewards.{excerpt(name)}.weight=1.0"
        for name in (by_name if isinstance(by_name, dict) else ())
        if run.number(f"task.rewards.{name}.weight") < 0
    ]
    return [shown], negative or [
        "the sign of the reward function, or task.rewards.<name>.weight"
    ]


@_fault(
    87, "the reward climbs and right answers do not: it is earned without solving the task"
)
def _reward_exploited(run: Evidence) -> _Shown:
    reward = run.series("reward/mean")
    gained = reward.late - reward.early
    judges = [run.series(name) for name in (_CORRECT, "eval/accuracy")]
    judges = [series for series in judges if len(series) > 1]
    # Where nearly all is right, other rewards are all that is left to gain.
    stands = [s.late - s.early < 0.2 * gained and s.late < 0.8 for s in judges]
    climbs = len(reward) >= 6 and reward.rises() and not gained < 0.05
    if not climbs or not judges or not all(stands):
        return None
    shown = [str(series) for series in (reward, *judges)]
    wrong = [
        row
        for row in run.sampled
        if row.get("correct") is False and is_number(row.get("reward"))
    ]
    if wrong:
        best = max(wrong, key=lambda row: row["reward"])
        text = excerpt(best.get("completion", ""), 100)
        shown.append(f"a wrong completion with the reward {best['reward']:.3g}: {text}")
    best = "read the completions with the highest rewards in samples/"
    return shown, ["task.rewards: reward what task.correct calls right", best]


@_fault(88, "every completion has one reward, right or wrong: nothing is to be learned")
def _rewards_constant(run: Evidence) -> _Shown:
    correct = run.series(_CORRECT)
    is_flat = correct.least == correct.largest and correct.first in (0.0, 1.0)
    if not correct or is_flat or not _has_one_reward(run):
        return None
    call = "the function of task.rewards: call it with a right and a wrong completion"
    return run.shown("reward/std", "reward/mean", _CORRECT), [call]


@_fault(74, "no completion is right in any step")
def _all_wrong(run: Evidence) -> _Shown:
    correct = run.series(_CORRECT)
    is_long = _has_one_reward(run) or len(correct) >= 5
    if not (correct.largest <= 0 and is_long) or run.series("eval/accuracy").largest > 0.02:
        return None
    easier = "an easier task, or a model that is right now and then; algorithm=sft first"
    shown = run.shown(_CORRECT, "reward/mean", EXAMPLE)
    if _reward_exploited(run):
        return None
    return (shown, [easier])


@_fault(56, "most groups teach nothing: the task is too hard, or too easy")
def _groups_agree(run: Evidence) -> _Shown:
    is_most = run.num_steps >= 4 and run.series(_AGREE).mean >= 0.7
    # A run that got good has groups that agree because they are right.
    metrics = [run.series(name) for name in ("eval/accuracy", _CORRECT, "reward/mean")]
    series = next((one for one in metrics if len(one) > 1), None)
    if series is None or not is_most or series.late > series.first + 0.1:
        return None
    more = _overrides(run, (("algorithm.num_generations", 2),))
    return run.shown(_AGREE, _CORRECT, "reward/mean"), [*more, "a task of which half is right"]


@_fault(86, "the temperature is so high that completions are noise")
def _temperature_high(run: Evidence) -> _Shown:
    if not (
        run.number("generation.temperature") > 1.2 and run.series("train/entropy").first > 1.5
    ):
        return None
    shown = run.shown("generation.temperature", "train/entropy", EXAMPLE)
    return shown, ["generation.temperature=1.0"]


@_fault(
    82, "completions answer and go on until they are cut: the end-of-sequence token is missing"
)
def _never_ends(run: Evidence) -> _Shown:
    if not run.series(_CUT).late >= 0.2 or not _answers_and_goes_on(run):
        return None
    ends = "model.tokenizer: does it know the end tokens?"
    return run.shown(_CUT, EXAMPLE), [ends, "generation.stop_token_ids=[...]"]


@_fault(80, "completions are cut before they are done")
def _truncated(run: Evidence) -> _Shown:
    if not run.series(_CUT).late >= 0.2 or _answers_and_goes_on(run):
        return None
    longest = "generation.max_new_tokens"
    shown = run.shown(_CUT, "completions/max_length", longest, UNREAD)
    return shown, _overrides(run, ((longest, 2), "a prompt that asks for a short answer"))


@_fault(78, "no answer can be read out of the completions")
def _parse_failures(run: Evidence) -> _Shown:
    if not run.share(is_unread) >= 0.5:
        return None
    extract = "task.extract: a function that finds the answer"
    return run.shown(UNREAD, EXAMPLE), [extract, "task.prompt: ask for its form"]


@_fault(62, "the policy became certain without becoming right: all completions say the same")
def _entropy_collapse(run: Evidence) -> _Shown:
    entropy = run.series("train/entropy")
    correct = run.series(_CORRECT) or run.series("reward/mean")
    has_collapsed = len(entropy) >= 5 and entropy.late < min(0.2 * entropy.first, 0.02)
    # Not `>`: without any values it is nan.
    if not has_collapsed or not correct.late <= 0.8 or correct.rises():
        return None
    shown = run.shown("train/entropy", _CORRECT, "reward/mean")
    tries = ((_RATE, 0.2), "algorithm.clip_high=0.28", "algorithm.kl_coef=0.01")
    return shown, _overrides(run, tries)


@_fault(58, "held-out accuracy falls")
def _evaluation_falls(run: Evidence) -> _Shown:
    accuracy = run.series("eval/accuracy")
    if len(accuracy) < 2 or accuracy.first < 0.05:
        return None
    count = max(run.number("evaluation.num_examples", 256), 1)
    # two shares of so many examples differ by as much without any change
    noise = 2 * np.sqrt(2 * accuracy.first * (1 - accuracy.first) / count)
    below = accuracy.largest - accuracy.last
    if accuracy.last > accuracy.first - noise and below < 0.15 + noise:
        return None
    shown = [
        f"eval/accuracy {accuracy.first:.1%} at first, {accuracy.largest:.1%} in step "
        f"{accuracy.at_largest()}, {accuracy.last:.1%} in step {accuracy.steps[-1]}"
    ]
    return shown + run.shown("reward/mean"), [
        "training.keep_best_checkpoints=1",
        f"a smaller {_RATE}; where the reward rises, one that is what the task asks",
    ]


@_fault(
    57, "the run trains on examples that are held out, so its held-out accuracy is too high"
)
def _held_out_in_train(run: Evidence) -> _Shown:
    data = run.status.get("data")
    if not isinstance(data, dict):
        data = {}
    both = data.get("held_out_in_train")
    count = data.get("held_out")
    if not _is_count(both) or not _is_count(count) or both > count:
        return None
    shown = (
        f"{both:,} of the {count:,} held-out prompts are training prompts ({both / count:.0%})"
    )
    return [shown], ["task.held_out: a file of rows that are not in task.train"]
