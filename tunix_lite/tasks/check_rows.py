"""The check of all rows before a run starts: each must make a prompt, and must not be too long."""

from collections.abc import Iterable, Sequence

from tunix_lite.tasks.row_files import Rows, RowsOnDisk, hash_of, where
from tunix_lite.tasks.row_stream import RowStream
from tunix_lite.tasks.task import Task

# examples of a split that become tokens before the start; of more, so many of them
MEASURED = 10_000
# and of those that are not in memory
MEASURED_LAZILY = 200


def check_all_rows(task: Task, demonstrates: bool, num_held_out: int) -> str:
    """Checks all examples in memory before the start. Returns a summary of them for people; "" if
    they are not in memory and there is nothing to note.

    Each must make a prompt and, if `demonstrates`, have a completion; MEASURED of each split must
    not be too long, if that is an error. Raises ValueError with the place of the first that is
    wrong, or with how many are too long.
    """
    if num_held_out and not len(task.config.source.held_out):
        raise ValueError("no example is held out; set evaluation.num_examples=0")
    found = [_known(task, demonstrates, num_held_out), _evaluated(task, num_held_out)]
    return "; ".join(part for part in found if part)


def _evaluated(task: Task, num_held_out: int) -> str:
    """A note if there are fewer held-out examples than evaluation.num_examples."""
    count = len(task.config.source.held_out)
    if count >= num_held_out:
        return ""
    return f"all {count:,} held-out examples are evaluated (evaluation.num_examples={num_held_out})"


def _known(task: Task, demonstrates: bool, num_held_out: int) -> str:
    """What `_check` found; of a file that was checked in the same way, what it found then."""
    train = task.config.source.train
    held_out = task.config.source.held_out
    if isinstance(train, RowStream):
        first = train.first(MEASURED_LAZILY)
        _measure(task, first, len(first), "training", [], demonstrates)
        counts = f"{len(train.files):,} files to train on, read in order"
        shuffled = f"{train.buffer:,} rows shuffled at a time, {len(held_out):,} held out"
        said = [f"{counts}, {shuffled}", train.news(), *_left_out(held_out)]
        return "; ".join(part for part in said if part)
    if not isinstance(train, list | tuple) or not isinstance(held_out, list | tuple):
        # made or read one by one, and perhaps very many
        _measure(task, train, len(train), "training", [], demonstrates, MEASURED_LAZILY)
        if not isinstance(train, RowsOnDisk):
            return ""
        counts = f"{len(train):,} examples to train on, read from disk, {len(held_out):,} held out"
        return "; ".join([counts, *_left_out(train, held_out), *_in_both(task, train, held_out)])
    if not isinstance(train, Rows):
        return _check(task, demonstrates, num_held_out)
    settings = (
        task.config.template,
        task.config.special_tokens_in_data,
        task.long_prompts,
        demonstrates,
        num_held_out,
    )
    asked = (
        settings,
        str(task.tokenizer.folder),
        task.max_prompt_length,
        task.max_new_tokens,
        id(held_out),
    )
    # a start asks twice
    if asked not in train.known:
        train.known[asked] = _check(task, demonstrates, num_held_out)
    return train.known[asked]


def _check(task: Task, demonstrates: bool, num_held_out: int) -> str:
    train = task.config.source.train
    held_out = task.config.source.held_out
    asked, special = _read(task, train, demonstrates)
    _measure(task, train, len(train), "training", special, demonstrates)
    asked_then, special_then = _read(task, held_out, False)
    _measure(task, held_out, num_held_out, "held-out", special_then, False)

    # what people are to know
    said = [f"{len(train):,} examples to train on, {len(held_out):,} held out"]
    said += _left_out(train, held_out)
    both = _count(asked_then, asked)
    if isinstance(train, Rows):
        train.known[_of_both(task)] = both
    said += _coinciding(both)
    if count := len(special) + (0 if held_out is train else len(special_then)):
        taken = {"text": "as mere text", "control": "as control tokens"}[
            task.config.special_tokens_in_data
        ]
        said.append(
            f"special tokens in {count:,} examples are taken {taken} (task.special_tokens_in_data)"
        )
    return "; ".join(said)


def held_out_in_training(task: Task) -> int | None:
    """How many of the held-out prompts are training prompts, too; None where examples are made, and
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
    """What `held_out_in_training` depends on, beside the training examples."""
    return "both", task.config.template, id(task.config.source.held_out)


def _hashes(task: Task, examples: Sequence) -> list[int]:
    return [hash_of(task.config.template.messages(example)) for example in examples]


def _count(hashes: list[int], among: Iterable[int]) -> int:
    """How many of these hashes are among those."""
    both = {*hashes}.intersection(among)
    return sum(prompt in both for prompt in hashes)


def _in_both(task: Task, train: RowsOnDisk, held_out: Sequence) -> list[str]:
    """What a start says of held-out prompts that a file on disk has, too."""
    return _coinciding(_count(_hashes(task, held_out), train.prompts))


def _coinciding(both: int) -> list[str]:
    return [f"{both:,} of the held-out prompts are training prompts, too"] if both else []


def _left_out(*splits: Sequence) -> list[str]:
    """What a start says of rows that were left out."""
    return [
        f"{rows.skipped:,} malformed rows of {rows.file} are left out, the first: "
        f"{rows.first_skipped}"
        for rows in splits
        if isinstance(rows, Rows | RowsOnDisk) and rows.skipped
    ]


def _read(task: Task, examples: Sequence, demonstrates: bool) -> tuple[list[int], list[int]]:
    """A hash of each prompt, and the examples whose fields spell special tokens."""
    asked = []
    special = []
    for i, example in enumerate(examples):
        try:
            task.text.template.check(example)
            spells = task.text.spells_special(example, demonstrates)
        except ValueError as error:
            raise ValueError(f"{where(examples, i)}: {error}") from error
        asked.append(hash_of(task.text.template.messages(example)))
        if spells:
            special.append(i)
    return asked, special


def _measure(
    task: Task,
    examples: Sequence,
    most: int,
    which: str,
    special: list[int],
    demonstrates: bool,
    limit: int | None = None,
) -> None:
    """Raises ValueError: how many of the first `most` are too long; or the place of one that cannot
    be tokens. limit: examples that become tokens, evenly spread; None: MEASURED."""
    count = min(most, len(examples))
    limit = MEASURED if limit is None else limit
    places = (
        range(count) if count <= limit else [i * (count - 1) // (limit - 1) for i in range(limit)]
    )
    looked = (
        f"{count:,}" if len(places) == count else f"the {len(places):,} (of {count:,}) looked at"
    )
    lengths = {i: task.text.length(examples[i]) for i in special[:MEASURED] if i < count}
    if task.long_prompts == "error":
        lengths |= {i: task.text.length(examples[i]) for i in places if i not in lengths}
        _check_lengths(
            lengths,
            task.max_prompt_length,
            f"of {looked} {which} prompts are longer than generation.max_prompt_length",
            ", or set generation.long_prompts=truncate or drop",
            examples,
        )
    if demonstrates:
        measured = {*places, *special[:MEASURED]}
        _check_lengths(
            {i: len(task.text.demonstration(examples[i])[0]) for i in measured},
            task.max_new_tokens,
            f"of {looked} {which} completions are longer than generation.max_new_tokens",
            "",
            examples,
        )


def _check_lengths(
    lengths: dict[int, int], limit: int, what: str, remedy: str, examples: Sequence
) -> None:
    """lengths: tokens, by the number of the example."""
    too_long = {i: length for i, length in lengths.items() if length > limit}
    if too_long:
        longest = max(too_long, key=too_long.get)
        raise ValueError(
            f"{len(too_long):,} {what}={limit}; the longest has {too_long[longest]:,} tokens "
            f"({where(examples, longest)}); raise it to at least {too_long[longest]}{remedy}"
        )
