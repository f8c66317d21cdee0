"""The results of an evaluation, and their tables as Markdown."""

from dataclasses import dataclass, field

import numpy as np

from tunix_lite.report.statistics import Comparison, Estimate, compare, estimate

# scores that are shares, and are shown in percent; the others are plain numbers
_SHARES = ("accuracy", "truncated", "avg_at_", "pass_at_", "maj_at_", "rouge_", "exact_match")


@dataclass(frozen=True)
class _TaskResult:
    """Scores of one task."""

    num_examples: int
    # by the name of a model, "model" or "against", and the name of a score
    scores: dict[str, dict[str, Estimate]]
    # by the name of a score: the model minus the one it is compared with; empty: there is none
    comparison: dict[str, Comparison] = field(default_factory=dict)


def task_result(
    scores: dict[str, dict[str, np.ndarray]], level: float, seed: int
) -> _TaskResult:
    """The means and intervals of per-example scores [E] of one model, or of two and their
    comparison. scores: by the name of a model, "model" first, and of a score. An example whose
    score is nan, because a reward failed, does not count."""
    estimates = {
        model: {
            name: estimate(values[~np.isnan(values)], level, seed=seed)
            for name, values in of_model.items()
        }
        for model, of_model in scores.items()
    }
    num_examples = len(next(iter(scores["model"].values())))
    if len(scores) == 1:
        return _TaskResult(num_examples, estimates)
    ours, theirs = scores.values()
    comparison = {}
    for name in ours:
        if name not in theirs:
            continue
        both = ~np.isnan(ours[name] - theirs[name])
        comparison[name] = compare(ours[name][both], theirs[name][both], level, seed=seed)
    return _TaskResult(num_examples, estimates, comparison)


def as_markdown(models: dict, settings: dict, task: str, result: _TaskResult) -> str:
    """The results for people: which models, and the table of the task."""
    lines = ["# Evaluation", ""]
    for name, model in models.items():
        line = f"- {name}: {model['weights']}"
        if model.get("step") is not None:
            line += f", step {model['step']}"
        lines.append(line)
    level = settings["level"]
    samples = settings["num_samples"]
    drawn = (
        f"{samples} samples at temperature {settings['temperature']:g}" if samples else "none"
    )
    lines.append(f"- samples: {drawn}; seed {settings['seed']}")
    lines.append(f"- intervals hold {100 * level:g}%: bootstrap over the examples")
    lines += ["", f"## {task}: {result.num_examples:,} examples", ""]
    # A score a row: of one model its value, of two both and their difference.
    ours, *others = result.scores
    interval = f"{100 * level:g}% interval"
    if others:
        heads = ["score", ours, *others, "difference", interval, "p", "higher, lower"]
        rows = [
            [
                name,
                _shown(name, result.scores[ours][name].value),
                _shown(name, result.scores[others[0]][name].value),
                _shown(name, compared.difference.value, "+"),
                _interval(name, compared.difference, "+"),
                f"{compared.p_value:.3g}",
                f"{compared.better}, {compared.worse}",
            ]
            for name, compared in result.comparison.items()
        ]
    else:
        heads = ["score", "value", interval]
        rows = [
            [name, _shown(name, x.value), _interval(name, x)]
            for name, x in result.scores[ours].items()
        ]
    below_heads = ["---"] * len(heads)
    lines += [f"| {' | '.join(cells)} |" for cells in (heads, below_heads, *rows)]
    return "\n".join(lines) + "\n"


def _interval(name: str, estimated: Estimate, sign: str = "") -> str:
    return f"{_shown(name, estimated.low, sign)} to {_shown(name, estimated.high, sign)}"


def _shown(name: str, value: float, sign: str = "") -> str:
    if name.startswith(_SHARES):
        return f"{100 * value:{sign}.1f} %"
    return f"{value:{sign}.4g}"
