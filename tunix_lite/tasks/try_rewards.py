"""Calls the plain functions of a user's rewards once before a run compiles anything, in a process
that ends with the calls. Objects, such as a judge, may talk to a server, and are not called."""

import inspect
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial

from tunix_lite.rewards.scores import CompletionText
from tunix_lite.tasks.task import TaskConfig
from tunix_lite.workers.pool import Pool, RewardsConfig, check_portable

# The second one has the marks that rewards look for. A function that fails on both fails on all.
COMPLETIONS = (
    "I think that the answer is 7.",
    "<think>\n3 + 4 = 7\n</think>\n<answer>7</answer>\nThe answer is \\boxed{7}.\n#### 7",
)
# until the calls must have ended; a function that is not done by then is not judged
SECONDS = 5.0
# failures that stay; a call that takes long may take less the next time
FOR_GOOD = ("error", "not_number", "crash")


def failing_functions(
    config: TaskConfig, example: dict, group: int, settings: RewardsConfig
) -> str:
    """Describes the user's functions that fail on made-up completions of this example; "" if none
    does, or none could be called. group: completions of an example. settings: of the run.
    Example: `reward 'near' failed with KeyError: 'anser' (my_rewards.py, line 3) for the completion
    'I think that the answer is 7.'`."""
    called = {}
    for name, fn in config.functions().items():
        plain = fn.args[0]
        while isinstance(plain, partial):
            plain = plain.func
        is_ours = (getattr(plain, "__module__", "") or "").startswith("tunix_lite.")
        if inspect.isfunction(plain) and not is_ours:
            with suppress(ValueError):
                check_portable({name: fn})
                called[name] = fn
    if not called:
        return ""
    limit = min(settings.timeout, SECONDS)
    # With zero, a failure comes back as an outcome and raises nothing.
    own = replace(settings, on_error="zero", workers=1, timeout=limit)
    texts = [CompletionText(text, len(text.split())) for text in COMPLETIONS]
    groups = set(config.group_names)
    failures = []
    # A worker that does not start says so when the run itself needs one.
    with suppress(ValueError, TimeoutError), closing(Pool(called, own)) as pool:
        for name in called:
            shown = [[text] * group if name in groups else text for text in texts]
            outcomes = [
                pool.submit(completions, example, [name]).result(SECONDS)[name]
                for completions in shown
            ]
            if all(kind in FOR_GOOD for kind, _ in outcomes):
                failures.append(pool.describe_failure(name, outcomes[0], shown[0]))
        return "; ".join(failures)
    return ""
