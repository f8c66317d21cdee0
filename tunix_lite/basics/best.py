"""The best value of a metric over a run: which step has it, and for how long nothing was better."""

import math
from dataclasses import dataclass
from typing import NamedTuple

# last parts of the names of metrics, or their beginnings, of which less or more is better
_LOWEST = (
    "loss",
    "dpo_loss",
    "perplexity",
    "teacher_",
    "truncated",
    "sampled_truncated",
    "failed",
)
_HIGHEST = (
    "accuracy",
    "token_accuracy",
    "pair_accuracy",
    "margin",
    "reward",
    "sampled_reward",
)
_HIGHEST += ("avg_at_", "pass_at_", "maj_at_", "rouge_", "exact_match", "correct")
# metrics of eval/ that come of the loss of held-out rows; the others come of completions
OF_LOSS = ("loss", "dpo_loss", "perplexity", "token_accuracy", "margin", "pair_accuracy")
OF_LOSS += ("teacher_kl", "teacher_divergence")
# parts of metrics that depend on the clock or the machine
_OF_THE_MACHINE = ("time", "perf", "memory")


def is_lower_better(metric: str, best_is: str = "auto") -> bool:
    """Returns whether less of a metric is better. best_is: highest, lowest, or auto: by its name.
    Raises ValueError for a name that says nothing, or that is of the clock.
    Example: is_lower_better("eval/loss") is true."""
    part, _, name = metric.partition("/")
    if not part or not name or part in _OF_THE_MACHINE:
        raise ValueError(
            f"best_metric={metric!r} is no metric of learning; write it as metrics.jsonl does, "
            "such as training.best_metric=eval/loss"
        )
    if best_is != "auto":
        return best_is == "lowest"
    if part == "reward" or name.startswith(_HIGHEST):
        return False
    if not name.startswith(_LOWEST):
        raise ValueError(
            f"best_metric={metric}: its name does not say what is better; add "
            "training.best_is=highest or training.best_is=lowest"
        )
    return True


class Ranked(NamedTuple):
    """A metric of a checkpoint. Example: Ranked("eval/loss", 1.25, is_lower_better=True)."""

    metric: str
    value: float
    is_lower_better: bool


@dataclass
class Best:
    """The best value of a metric so far. Example: after best.take(10, 1.5) and best.take(20, 1.75)
    of a loss, best.step is 10 and best.since is 1."""

    metric: str
    is_lower_better: bool
    # of the first step that has it; None: there is none yet
    step: int | None = None
    value: float = math.nan
    # measurements after it
    since: int = 0

    def take(self, step: int, value: float) -> bool:
        """Takes the value of a step. Returns whether it is a new best; one that is not finite is
        none."""
        sign = -1 if self.is_lower_better else 1
        is_new = math.isfinite(value) and not sign * value <= sign * self.value
        if is_new:
            self.step = step
            self.value = value
        self.since = 0 if is_new else self.since + 1
        return is_new

    def ended_by(self, patience: int | None) -> str:
        """Tells why the run ends here; "": it goes on. patience: measurements without a new best
        that end it; None: none do."""
        if patience is None or self.since < patience:
            return ""
        at = (
            "was never a number"
            if self.step is None
            else f"{self.value:.6g} at step {self.step}"
        )
        return (
            f"early stopping: the best {self.metric} is {at}, and {self.since} later measurements "
            f"were no better (training.early_stopping_patience={patience})"
        )
