"""What becomes of the seconds: whose turn it is, medians, spread, ratios and shares. Standard library alone."""

import statistics
from collections.abc import Iterator

PHASES = ("rollout", "reference", "update", "step")


def turns(frameworks: list[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, framework), in turns: A B C, A B C ... so that what the machine does beside them meets all alike."""
    for number in range(rounds):
        for framework in frameworks:
            yield number, framework


def summary(steps: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Of each phase: the median of its seconds, the least and the most."""
    return {
        phase: {
            "median": round(statistics.median(step[phase] for step in steps), 4),
            "least": round(min(step[phase] for step in steps), 4),
            "most": round(max(step[phase] for step in steps), 4),
        }
        for phase in PHASES
    }


def ratios(steps: list[dict[str, float]], ours: list[dict[str, float]]) -> dict[str, float]:
    """How many times longer a framework takes than ours: the median, over the rounds, of the quotients of the two
    steps of one round. Above 1 ours is faster."""
    pairs = list(zip(steps, ours, strict=True))
    return {phase: round(statistics.median(a[phase] / b[phase] for a, b in pairs), 3) for phase in PHASES}


def spread(steps: list[dict[str, float]]) -> float:
    """(most - least) / median of whole steps."""
    whole = [step["step"] for step in steps]
    return round((max(whole) - min(whole)) / statistics.median(whole), 3)


def compile_seconds(first: float, steps: list[dict[str, float]]) -> float:
    """What the first step took beyond a median one."""
    return round(first - statistics.median(step["step"] for step in steps), 2)


def share_of_peak(flops: float, seconds: float, peak_gflops: float) -> float:
    """The share of the matmul peak at which the useful work was done."""
    return round(flops / seconds / (peak_gflops * 1e9), 4)


def tokens_per_second(new_tokens: int, seconds: float) -> float:
    return round(new_tokens / seconds, 1)
