"""The check of all rows before a run starts: each must make a prompt, and must not be too long."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tunix_lite.tasks.fitting import TRUNCATE
from tunix_lite.tasks.row_files import Rows, RowsOnDisk, RowStream, where
from tunix_lite.tasks.task import Task

# examples of a split that become tokens before the start; of more, so many of them
MEASURED = 10_000
# and of those that are not in memory
MEASURED_LAZILY = 200


def check_all_rows(task: Task, demonstrates: bool, num_held_out: int) -> str:
    """Checks all examples in memory before the start. Returns a summary of them for people; "" if
    they are not in memory and there is nothing to note.

    Each must make a prompt and, if `demonstrates`, have what is learned; MEASURED of each split
    must not be too long, if that is an error. Raises ValueError with the place of the first that is
    wrong, or with how many are too long.
    """
    if demonstrates and not task.learned:
        task = replace(task, learned=("completion",))
    if not demonstrates:
        task = replace(task, learned=())
    if num_held_out and not len(task.config.source.held_out):
        raise ValueError("no example is held out; set evaluation.num_examples=0")
    said = [_known(task, num_held_out)]

    # fewer held-out examples than evaluation.num_examples
    count = len(task.config.source.held_out)
    if count < num_held_out:
        if task.leaves_out:
            count = len(task.held_out(num_held_out))
        said.append(
            f"all {count:,} held-out examples are evaluated "
            f"(evaluation.num_examples={num_held_out})"
        )
    return "; ".join(part for part in said if part)


def _known(task: Task, num_held_out: int) -> str:
    """Returns what `_check` reports; a file that was already checked in the same way is not read
    again."""
    train = task.config.source.train
    held_out = task.config.source.held_out
    if isinstance(train, RowStream):
        first = train.first(MEASURED_LAZILY)
        unfit = _measure(task, first, len(first), "training", [])
        counts = f"{len(train.files):,} files to train on, read in order"
        shuffled = f"{train.buffer:,} rows shuffled at a time, {len(held_out):,} held out"
        said = [f"{counts}, {shuffled}", *unfit, train.news(), *_left_out(held_out)]
        return "; ".join(part for part in said if part)
    if not isinstance(train, list | tuple) or not isinstance(held_out, list | tuple):
        # made or read one by one, and perhaps very many
        unfit = _measure(task, train, len(train), "training", [], MEASURED_LAZILY)
        if not isinstance(train, RowsOnDisk):
            return "; ".join(unfit)
        counts = f"{len(train):,} examples to train on, read from disk, {len(held_out):,} held out"
        both = _count(_hashes(task, held_out), train.prompts)
        said = [counts, *unfit, *_left_out(train, held_out), *_of_prompts(both, train.prompts)]
        return "; ".join(said)
    if not isinstance(train, Rows):
        return _check(task, num_held_out)
    key = (
        task.limits,
        task.config.template,
        task.config.special_tokens_in_data,
        num_held_out,
        str(task.tokenizer.folder),
        id(held_out),
    )
    # a start asks twice
    if key not in train.known:
        train.known[key] = _check(task, num_held_out)
    return train.known[key]


def _check(task: Task, num_held_out: int) -> str:
    train = task.config.source.train
    held_out = task.config.source.held_out
    hashes, special = _read(task, train)
    unfit = _measure(task, train, len(train), "training", special)
    evaluated = replace(task, learned=())
    asked_then, special_then = _read(evaluated, held_out)
    unfit += _measure(evaluated, held_out, num_held_out, "held-out", special_then)

    # the lines for people
    said = [f"{len(train):,} examples to train on, {len(held_out):,} held out"]
    said += [*unfit, *_left_out(train, held_out)]
    both = _count(asked_then, hashes)
    if isinstance(train, Rows):
        train.known[_of_both(task)] = both
    said += _of_prompts(both, hashes)
    if count := len(special) + (0 if held_out is train else len(special_then)):
        setting = task.config.special_tokens_in_data
        taken = {"text": "as mere text", "control": "as control tokens"}[setting]
        said.append(
            f"special tokens in {count:,} examples are taken {taken} (task.special_tokens_in_data)"
        )
    return "; ".join(said)


def _of_prompts(both: int, hashes: Sequence[int]) -> list[str]:
    """Describes held-out prompts that are trained on, and prompts that come several times. hashes:
    of the training prompts."""
    said = []
    if both:
        said.append(f"{both:,} of the held-out prompts are training prompts, too")
    if (different := len({*hashes})) < len(hashes):
        said.append(f"different prompts to train on: {different:,}")
    return said


def held_out_in_training(task: Task) -> int | None:
    """Counts the held-out prompts that are training prompts, too. None where examples are made, and
    not looked through."""
    train = task.config.source.train
    held_out = task.config.source.held_out
    if not isinstance(held_out, list | tuple):
        return None
    if isinstance(train, RowsOnDisk):
        return _count(_hashes(task, held_out), train.prompts)
    if isinstance(train, Rows) and _of_both(task) in train.known:
        return train.known[_of_both(task)]
    if not isinstance(train, list | tuple):
        return None
    return _count(_hashes(task, held_out), _hashes(task, train))


def _of_both(task: Task) -> tuple:
    """Returns the inputs of `held_out_in_training` beside the training examples."""
    return "both", task.config.template, id(task.config.source.held_out)


def _hashes(task: Task, examples: Sequence) -> list[int]:
    return [task.config.template.hash(example) for example in examples]


def _count(hashes: list[int], among: Iterable[int]) -> int:
    """Counts the hashes that are in `among`."""
    both = {*hashes}.intersection(among)
    return sum(prompt in both for prompt in hashes)


def _left_out(*splits: Sequence) -> list[str]:
    """Describes the rows that were left out."""
    return [
        f"{rows.skipped:,} malformed rows of {rows.file} are left out, the first: "
        f"{rows.first_skipped}"
        for rows in splits
        if isinstance(rows, Rows | RowsOnDisk) and rows.skipped
    ]


def _read(task: Task, examples: Sequence) -> tuple[list[int], list[int]]:
    """A hash of each prompt, and the examples whose fields spell special tokens."""
    hashes = []
    special = []
    for i, example in enumerate(examples):
        try:
            task.text.template.check(example)
            spells = task.text.spells_special(example, task.learned)
        except ValueError as error:
            # `_measure` says how many are left out
            if task.limits.skips:
                continue
            raise ValueError(f"{where(examples, i)}: {error}") from error
        hashes.append(task.text.template.hash(example))
        if spells:
            special.append(i)
    return hashes, special


def _measure(
    task: Task,
    examples: Sequence,
    most: int,
    which: str,
    special: list[int],
    limit: int | None = None,
) -> list[str]:
    """Describes those of the first `most` examples that are too long, or that cannot be taken, and
    what becomes of them. limit: examples that become tokens, evenly spread; None: MEASURED.

    Raises ValueError, if they are an error: how many are too long; or the place of one that cannot
    be tokens.
    """
    count = min(most, len(examples))
    limit = MEASURED if limit is None else limit
    places = _spread(count, limit)
    looked = (
        f"{count:,}" if len(places) == count else f"the {len(places):,} (of {count:,}) looked at"
    )
    measured = sorted({*places, *(i for i in special[:MEASURED] if i < count)})

    # number of tokens, by field and number of the example
    limits = task.limits
    lengths: dict[str, dict[int, int]] = {name: {} for name in ("prompt", *task.learned)}
    refused = []
    for i in measured:
        try:
            if limits.long_prompts != "truncate" or i in special:
                lengths["prompt"][i] = task.text.length(examples[i])
            for name in task.learned:
                lengths[name][i] = len(task.text.demonstration(examples[i], name)[0])
        except ValueError as error:
            if not limits.skips:
                raise
            refused.append(str(error))

    said = []
    cuts = limits.long_prompts == "truncate"
    for name, token_counts in lengths.items():
        setting, most_tokens = "generation.max_new_tokens", limits.max_new_tokens
        if name == "prompt":
            setting, most_tokens = "generation.max_prompt_length", limits.max_prompt_length
        too_long = {i: length for i, length in token_counts.items() if length > most_tokens}
        # a run counts the prompts that it cuts
        if not too_long or (cuts and name == "prompt"):
            continue
        what = f"{name}s" if name in ("prompt", "completion") else f"`{name}`"
        longest = max(too_long, key=too_long.get)
        begins = f"{len(too_long):,} of {looked} {which} {what} are longer than "
        begins += f"{setting}={most_tokens}"
        if not cuts and not limits.leaves_out:
            raise ValueError(
                f"{begins}; the longest has {too_long[longest]:,} tokens "
                f"({where(examples, longest)}); raise it to at least {too_long[longest]}, "
                f"{TRUNCATE}"
            )
        if cuts:
            said.append(f"{begins} and are cut (generation.long_prompts=truncate)")
        else:
            said.append(f"{begins} and are left out ({limits.setting})")
    if refused:
        said.append(
            f"{len(refused):,} of {looked} {which} examples cannot be taken and are left out "
            f"({limits.setting}), the first: {refused[0]}"
        )
    return said


def _spread(count: int, limit: int) -> Sequence[int]:
    """Numbers of so many examples: all, or `limit` of them, evenly spread."""
    if count <= limit:
        return range(count)
    return [i * (count - 1) // (limit - 1) for i in range(limit)]


def measured_rows(task: Task) -> list[dict]:
    """The training examples that become tokens before the start, of those that a run takes."""
    train = task.config.source.train
    if isinstance(train, RowStream):
        rows = train.first(MEASURED_LAZILY)
    else:
        limit = MEASURED if isinstance(train, list | tuple) else MEASURED_LAZILY
        rows = [train[i] for i in _spread(len(train), limit)]
    return [row for row in rows if not task.leaves_out or task.look(row).fits]
