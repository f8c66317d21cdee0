"""Warns about a run's own numbers, each warning once: most groups teach nothing, or many
completions are cut off."""

from dataclasses import dataclass, field

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
class GroupsHint:
    """Looks at reward/groups_that_agree, and says if it stays high: once that the task is too easy,
    and once that it is too hard.

    A group whose rewards are all equal has no advantages, so nothing is learned from it.

    Example: after ten steps of which 80 % of the groups agreed, and 95 % of the completions were
    right, `line` returns "most groups teach nothing: in the last 10 steps 80% ... too easy ...".
    """

    # shares of each step since the last look or the start: groups that agree, right completions
    seen: list[tuple[float, float]] = field(default_factory=list)
    # the reasons that a hint has named
    said: set[str] = field(default_factory=set)

    def line(self, metrics: Metrics, num_generations: int) -> str | None:
        """Returns the hint that is due after this step; None without one.

        metrics: of a step; those without completions of their own are passed over.
        num_generations: of a group.
        """
        if "reward/groups_that_agree" not in metrics:
            return None
        correct = metrics.get("completions/correct", 0.0)
        self.seen.append((metrics["reward/groups_that_agree"], correct))
        count = len(self.seen)
        agree = sum(share for share, _ in self.seen) / count
        right = sum(share for _, share in self.seen) / count
        if count < WINDOW and not (count >= CLEAR and agree == 1.0):
            return None
        self.seen.clear()
        reason = "easy" if right >= EASY else "hard"
        if agree < MOST or reason in self.said:
            return None
        self.said.add(reason)
        return hint_text(count, agree, right, num_generations)


@dataclass
class CutHint:
    """Looks at completions/truncated, and says once if it stays high while few are right.

    Where half of the completions are right, those that are cut have answered: more tokens only cost
    time.

    Example: after ten steps in which 60 % of the completions ran out of tokens, `line` returns
    "many completions are cut off: ... Try generation.max_new_tokens=96".
    """

    # shares of each step since the last look or the start: completions cut off, and right
    seen: list[tuple[float, float]] = field(default_factory=list)
    is_done: bool = False

    def line(self, metrics: Metrics, max_new_tokens: int) -> str | None:
        """Returns the hint that is due after this step; None without one.

        metrics: of a step; those without completions of their own are passed over. max_new_tokens:
        of a completion.
        """
        if self.is_done or "completions/truncated" not in metrics:
            return None
        correct = metrics.get("completions/correct", 0.0)
        self.seen.append((metrics["completions/truncated"], correct))
        if len(self.seen) < WINDOW:
            return None
        cut = sum(share for share, _ in self.seen) / WINDOW
        right = sum(share for _, share in self.seen) / WINDOW
        self.seen.clear()
        self.is_done = cut >= MANY and right < EASY
        if not self.is_done:
            return None
        return (
            f"many completions are cut off: in the last {WINDOW} steps {cut:.0%} of them reached "
            f"generation.max_new_tokens={max_new_tokens} without an end. Try "
            f"generation.max_new_tokens={2 * max_new_tokens}"
        )


def hint_text(count: int, agree: float, right: float, num_generations: int) -> str:
    """Says why most groups teach nothing, and which override to try. count: of the steps looked
    at."""
    more = f"algorithm.num_generations={2 * num_generations}"
    others = (
        "algorithm.agreeing_groups=replace algorithm.max_rounds=4 to draw others in their place"
    )
    if right >= EASY:
        why = f"too easy ({right:.0%} right). Try harder examples, {more}, or {others}"
    else:
        why = f"too hard ({right:.0%} right). Try easier examples, {more}, or {others}; or warm up "
        why += "with algorithm=sft"
    return (
        f"most groups teach nothing: in the last {count} steps {agree:.0%} of them had equal "
        f"rewards; {why}"
    )
