"""The best value of a metric over a run: which step has it, and for how long nothing was better."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from tunix_lite.basics.plain_text import counted

# beginnings of the last part of the names of metrics of which less is better
_LOWEST = re.compile(r"(dpo_)?loss|perplexity|teacher_|(sampled_)?truncated|failed")
# metrics of eval/ that come of the loss of held-out rows; the others come of completions
OF_LOSS = ("loss", "dpo_loss", "perplexity", "token_accuracy", "margin", "pair_accuracy")
OF_LOSS += ("teacher_kl", "teacher_divergence")


def is_lower_better(metric: str, best_is: str = "auto") -> bool:
    """Returns whether less of a metric is better. best_is: highest, lowest, or auto: lowest of a
    loss and the like. Raises ValueError for a name that is no metric, or one of the clock.
    Example: is_lower_better("eval/loss") is true."""
    part, _, name = metric.partition("/")
    if not part or not name or part in ("time", "perf", "memory"):
        raise ValueError(
            f"best_metric={metric!r} is no metric of learning; write it as metrics.jsonl does, "
            "such as training.best_metric=eval/loss"
        )
    if best_is == "auto":
        return part != "reward" and _LOWEST.match(name) is not None
    return best_is == "lowest"


@dataclass
class Best:
    """The best value of a metric so far. Example: after best.take(10, 1.5) and best.take(20, 1.75)
    of a loss, best.step is 10 and best.since is 1."""

    metric: str
    is_lower_better: bool
    # measurements after the best
    since: int = 0
    # of all steps that have a finite one
    values: dict[int, float] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """The first step that has the best value; None: there is none yet."""
        return next(iter(self.first(1)), None)

    def take(self, step: int, value: float) -> bool:
        """Takes the value of a step. Returns whether it is a new best, which is a finite one."""
        is_first = step not in self.values
        if math.isfinite(value):
            self.values[step] = value
        is_new = is_first and self.step == step
        self.since = 0 if is_new else self.since + 1
        return is_new

    def first(self, count: int, steps: Iterable[int] | None = None) -> list[int]:
        """At most `count` of these steps, or of all: the best first, and of equals the earlier."""
        sign = 1 if self.is_lower_better else -1
        among = self.values if steps is None else self.values.keys() & {*steps}
        return sorted(among, key=lambda step: (sign * self.values[step], step))[:count]

    def ended_by(self, patience: int | None) -> str:
        """Tells why the run ends here; "": it goes on. patience: measurements; None: no end."""
        if patience is None or self.since < patience:
            return ""
        at = "was never a number"
        for best in self.first(1):
            at = f"is {self.values[best]:.6g} at step {best}"
        return (
            f"early stopping: the best {self.metric} {at}, and nothing was better in "
            f"{counted(self.since, 'measurement')} after it "
            f"(training.early_stopping_patience={patience})"
        )
