"""Warns about a run's own numbers, each warning once: most groups teach nothing, or many
completions are cut off."""

from dataclasses import dataclass, field

import numpy as np

from tunix_lite.types import Metrics

# steps with completions of their own that are looked at together
WINDOW = 10
# steps after which a hint is given where all groups of all of them agree
CLEAR = 3
# share of groups whose rewards are all equal, over those steps, from which on a hint is given
MOST = 0.7
# share of completions without an end, over those steps, from which on a hint is given
MANY = 0.5
# share of right completions from which on a task is too easy where groups agree, and from which on
# completions that are cut lack nothing
EASY = 0.5


@dataclass
class RunHints:
    """Looks at reward/groups_that_agree and completions/truncated, and says if they stay high.

    A group whose rewards are all equal has no advantages, so nothing is learned from it. Where half
    of the completions are right, those that are cut have answered: more tokens only cost time.

    Example: after ten steps of which 80 % of the groups agreed, and 95 % of the completions were
    right, `lines` returns ["most groups teach nothing: in the last 10 steps 80% ... too easy ..."].
    """

    # shares of each step since the last look or the start, each with that of right completions
    agreeing: list[tuple[float, float]] = field(default_factory=list)
    cut: list[tuple[float, float]] = field(default_factory=list)
    # the reasons that a hint has named
    said: set[str] = field(default_factory=set)

    def lines(self, metrics: Metrics, num_generations: int, max_new_tokens: int) -> list[str]:
        """Returns the hints that are due after this step. metrics: of a step; those without
        completions of their own are passed over."""
        lines = []
        correct = metrics.get("completions/correct", 0.0)
        if "reward/groups_that_agree" in metrics:
            self.agreeing.append((metrics["reward/groups_that_agree"], correct))
            count = len(self.agreeing)
            agree, right = np.mean(self.agreeing, axis=0)
            reason = "easy" if right >= EASY else "hard"
            if count >= WINDOW or (count >= CLEAR and agree == 1.0):
                self.agreeing.clear()
                if agree >= MOST and reason not in self.said:
                    self.said.add(reason)
                    other = "harder" if reason == "easy" else "easier"
                    warm_up = "" if reason == "easy" else "; or warm up with algorithm=sft"
                    lines.append(
                        f"most groups teach nothing: in the last {count} steps {agree:.0%} of them "
                        f"had equal rewards; too {reason} ({right:.0%} right). Try {other} "
                        f"examples, algorithm.num_generations={2 * num_generations}, or "
                        "algorithm.agreeing_groups=replace algorithm.max_rounds=4 to draw others "
                        f"in their place{warm_up}"
                    )
        if "completions/truncated" in metrics and "cut" not in self.said:
            self.cut.append((metrics["completions/truncated"], correct))
            if len(self.cut) == WINDOW:
                cut, right = np.mean(self.cut, axis=0)
                self.cut.clear()
                if cut >= MANY and right < EASY:
                    self.said.add("cut")
                    lines.append(
                        f"many completions are cut off: in the last {WINDOW} steps {cut:.0%} of "
                        f"them reached generation.max_new_tokens={max_new_tokens} without an end. "
                        f"Try generation.max_new_tokens={2 * max_new_tokens}"
                    )
        return lines
