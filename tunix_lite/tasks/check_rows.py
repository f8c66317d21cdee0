"""The check of all rows before a run starts: each must make a prompt, and must not be too long."""

from collections.abc import Sequence
from dataclasses import replace

from tunix_lite.tasks.hub_rows import is_hub
from tunix_lite.tasks.row_files import Rows, place_of
from tunix_lite.tasks.sources import spread
from tunix_lite.tasks.task import Task

# examples of a split that become tokens before the start; of more, so many of them
MEASURED = 10_000
# and of those that are not in memory
MEASURED_LAZILY = 200


def check_all_rows(task: Task, demonstrates: bool, num_held_out: int) -> str:
    """Checks all examples in memory before the start: each must make a prompt and, if
    `demonstrates`, have what is learned, and MEASURED of each split must not be too long. Returns a
    summary for people. Raises ValueError with the place of the first that is wrong."""
    learned = (task.learned or ("completion",)) if demonstrates else ()
    task = replace(task, learned=learned)
    train = task.config.source.train
    held_out = task.config.source.held_out
    if num_held_out and not len(held_out):
        raise ValueError("no example is held out; set evaluation.num_examples=0")
    if isinstance(train, list | tuple) and isinstance(held_out, list | tuple):
        said = [f"{len(train):,} examples to train on, {len(held_out):,} held out"]
        if isinstance(train, Rows):
            # with the commit
            said += [train.file] if is_hub(train.file) else []
            said += [f"rows as {' and '.join(train.forms)}"] if train.forms else []
        evaluated = replace(task, learned=())
        hashes = _hashes(task, train)
        hashes_then = _hashes(evaluated, held_out)
        count = min(num_held_out, len(held_out))
        said += _measure(task, train, "training", spread(len(train), MEASURED))
        said += _measure(evaluated, held_out, "held-out", spread(count, MEASURED), count)

        # once of a file that both are parts of
        said += dict.fromkeys(
            f"{rows.skipped:,} malformed rows of {rows.file} are left out, the first: "
            f"{rows.first_skipped}"
            for rows in (train, held_out)
            if isinstance(rows, Rows) and rows.skipped
        )
        shared = {*hashes_then}.intersection(hashes)
        if both := sum(prompt in shared for prompt in hashes_then):
            said.append(f"{both:,} of the held-out prompts are training prompts, too")
        if (different := len({*hashes})) < len(hashes):
            said.append(f"different prompts to train on: {different:,}")
    else:
        # made one by one, and perhaps very many
        said = _measure(task, train, "training", spread(len(train), MEASURED_LAZILY))

    # fewer held-out examples than evaluation.num_examples
    count = len(held_out)
    if count < num_held_out:
        if task.leaves_out:
            count = len(task.held_out(num_held_out))
        said.append(
            f"all {count:,} held-out examples are evaluated "
            f"(evaluation.num_examples={num_held_out})"
        )
    return "; ".join(said)


def held_out_in_training(task: Task) -> int | None:
    """Counts the held-out prompts that are training prompts, too. None where examples are made."""
    train = task.config.source.train
    held_out = task.config.source.held_out
    if not isinstance(train, list | tuple) or not isinstance(held_out, list | tuple):
        return None
    hash_of = task.config.template.hash
    hashes = list(map(hash_of, held_out))
    shared = {*hashes}.intersection(map(hash_of, train))
    return sum(prompt in shared for prompt in hashes)


def _hashes(task: Task, examples: Sequence[dict]) -> list[int]:
    """A hash of each prompt. Raises ValueError for a row that the chat template cannot read."""
    hashes = []
    for i, example in enumerate(examples):
        try:
            task.text.template.check(example)
            task.text.check(example, task.learned)
        except ValueError as error:
            # `_measure` says how many are left out
            if task.skips:
                continue
            raise ValueError(f"{place_of(example) or f'example {i}'}: {error}") from error
        # The texts of all prompts would take their memory once more.
        hashes.append(task.text.template.hash(example))
    return hashes


def _measure(
    task: Task,
    examples: Sequence[dict],
    which: str,
    places: Sequence[int],
    count: int | None = None,
) -> list[str]:
    """Describes the examples at `places` that are too long or cannot be taken, and what becomes of
    them. Raises ValueError if they are an error. count: examples for which they stand; None: all.
    """
    # number of tokens, by field and number of the example
    lengths: dict[str, dict[int, int]] = {name: {} for name in ("prompt", *task.learned)}
    refused = []
    for i in places:
        try:
            lengths["prompt"][i] = len(task.text.prompt(examples[i]))
            for name in task.learned:
                lengths[name][i] = len(task.text.demonstration(examples[i], name)[0])
        except ValueError as error:
            if not task.skips:
                raise
            refused.append(str(error))

    said = []
    setting = "task.on_error=skip" if task.skips else "generation.long_prompts=drop"
    if count is None:
        count = len(examples)
    looked = f"{count:,}"
    if len(places) < count:
        looked = f"the {len(places):,} (of {count:,}) looked at"
    cuts = task.long_prompts == "truncate"
    # a run counts the prompts that it cuts
    for name in task.learned if cuts else lengths:
        limit, most = "generation.max_new_tokens", task.max_new_tokens
        if name == "prompt":
            limit, most = "generation.max_prompt_length", task.max_prompt_length
        too_long = {i: length for i, length in lengths[name].items() if length > most}
        if not too_long:
            continue
        what = f"{name}s" if name in ("prompt", "completion") else f"`{name}`"
        begins = f"{len(too_long):,} of {looked} {which} {what} are longer than {limit}={most}"
        if not cuts and not task.leaves_out:
            longest = max(too_long, key=too_long.get)
            raise ValueError(
                f"{begins}; the longest has {too_long[longest]:,} tokens "
                f"({place_of(examples[longest]) or f'example {longest}'}); raise it to at least "
                f"{too_long[longest]}, {task.other_remedy}"
            )
        how = "cut (generation.long_prompts=truncate)" if cuts else f"left out ({setting})"
        said.append(f"{begins} and are {how}")
    if refused:
        said.append(
            f"{len(refused):,} of {looked} {which} examples cannot be taken and are left out "
            f"({setting}), the first: {refused[0]}"
        )
    return said


def measured_rows(task: Task) -> list[dict]:
    """The training examples that become tokens before the start, of those that a run takes."""
    train = task.fitting
    limit = MEASURED if isinstance(train, list | tuple) else MEASURED_LAZILY
    return [train[i] for i in spread(len(train), limit)]
