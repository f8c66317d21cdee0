"""Hints at the start of a run, where a setting is far from what is usual for its model."""

from tunix_lite.learner.defaults import AUTO, HIGH, REAL, usual_rate, what_trains
from tunix_lite.resolved.run import ResolvedRun, learns_from

# generation.max_new_tokens where neither the user nor the task says more: enough for the sums of
# the bundled model.
FEW_TOKENS = 48


def unusual_settings(resolved: ResolvedRun, num_params: int) -> list[str]:
    """One line for each such setting, with the override; [] where all is well.

    num_params: of the whole model.
    """
    run = resolved.run
    lines = []
    trains = what_trains(resolved.lora is not None, num_params)
    usual = usual_rate(run.optimizer, trains, learns_from(run))
    rate = run.optimizer.learning_rate
    if num_params >= REAL and rate > HIGH * usual:
        lines.append(
            f"optimizer.learning_rate={rate:g} is {rate / usual:.0f} times what is usual for "
            f"{trains}; optimizer.learning_rate={AUTO} takes {usual:g}"
        )
    is_sampled = not run.algorithm.needs.demonstrations
    if num_params >= REAL and is_sampled and run.generation.max_new_tokens == FEW_TOKENS:
        lines.append(
            f"generation.max_new_tokens={FEW_TOKENS} is for the sums of the bundled model; where "
            "a model is to show its working: generation.max_new_tokens=512"
        )
    return lines
