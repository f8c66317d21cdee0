"""What a run says of its own numbers while it goes on: that most of its groups teach nothing."""

from dataclasses import dataclass, field

from tunix_lite.types import Metrics

# steps with completions of their own that are looked at together; also the fewest between two hints
WINDOW = 10
# share of groups whose rewards are all equal, over those steps, from which on a hint is given
MOST = 0.7


@dataclass
class GroupsHint:
    """Looks at reward/groups_that_agree, and says once in WINDOW steps if it stays high.

    A group whose rewards are all equal has no advantages, so nothing is learned from it.

    Example: after ten steps of which 80 % of the groups agreed, and 95 % of the completions were
    right, `line` returns "most groups teach nothing: in the last 10 steps 80% ... too easy ...".
    """

    # of each step since the last hint or the start: groups that agree, completions that are right
    seen: list[tuple[float, float]] = field(default_factory=list)

    def line(self, metrics: Metrics, num_generations: int) -> str | None:
        """The hint that is due after this step; None: there is none.

        metrics: of a step; those without completions of their own are passed over.
        num_generations: of a group.
        """
        if "reward/groups_that_agree" not in metrics:
            return None
        correct = metrics.get("completions/correct", 0.0)
        self.seen.append((metrics["reward/groups_that_agree"], correct))
        if len(self.seen) < WINDOW:
            return None
        agree = sum(share for share, _ in self.seen) / WINDOW
        right = sum(share for _, share in self.seen) / WINDOW
        self.seen.clear()
        return hint_text(agree, right, num_generations) if agree >= MOST else None


def hint_text(agree: float, right: float, num_generations: int) -> str:
    """Why most groups teach nothing, and which override to try."""
    more = f"algorithm.num_generations={2 * num_generations}"
    others = (
        "algorithm.agreeing_groups=replace algorithm.max_rounds=4 to draw others in their place"
    )
    if right >= 0.5:
        why = f"too easy ({right:.0%} right). Try harder examples, {more}, or {others}"
    else:
        why = f"too hard ({right:.0%} right). Try easier examples, {more}, or {others}; or warm up "
        why += "with algorithm=sft"
    return (
        f"most groups teach nothing: in the last {WINDOW} steps {agree:.0%} of them had equal "
        f"rewards; {why}"
    )
