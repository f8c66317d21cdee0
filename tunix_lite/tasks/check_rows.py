"""The check of all rows before a run starts: each must make a prompt, and must not be too long."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tunix_lite.tasks.fitting import TRUNCATE
from tunix_lite.tasks.row_files import Rows, RowStream, place_of
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
    learned = (task.learned or ("completion",)) if demonstrates else ()
    task = replace(task, learned=learned)
    train = task.config.source.train
    held_out = task.config.source.held_out
    if num_held_out and not len(held_out):
        raise ValueError("no example is held out; set evaluation.num_examples=0")
    if isinstance(train, RowStream):
        first = train.first(MEASURED_LAZILY)
        said = [
            f"{len(train.files):,} files to train on, read in order, {train.buffer:,} rows "
            f"shuffled at a time, {len(held_out):,} held out",
            *_measure(task, first, "training", range(len(first))),
            train.news(),
            *_left_out(held_out),
        ]
    elif not isinstance(train, list | tuple) or not isinstance(held_out, list | tuple):
        # made one by one, and perhaps very many
        said = _measure(task, train, "training", _spread(len(train), MEASURED_LAZILY))
    else:
        # a start asks twice
        known = train.known if isinstance(train, Rows) else {}
        key = (
            task.limits,
            task.config.template,
            task.config.special_tokens_in_data,
            num_held_out,
            str(task.tokenizer.folder),
            id(held_out),
        )
        if key not in known:
            known[key] = _check_in_memory(task, num_held_out)
        said = [known[key]]

    # fewer held-out examples than evaluation.num_examples
    count = len(held_out)
    if count < num_held_out:
        if task.leaves_out:
            count = len(task.held_out(num_held_out))
        said.append(
            f"all {count:,} held-out examples are evaluated "
            f"(evaluation.num_examples={num_held_out})"
        )
    return "; ".join(part for part in said if part)


def _check_in_memory(task: Task, num_held_out: int) -> str:
    train = task.config.source.train
    held_out = task.config.source.held_out
    hashes, special = _read(task, train)
    places = {*_spread(len(train), MEASURED), *special[:MEASURED]}
    unfit = _measure(task, train, "training", sorted(places), special)

    evaluated = replace(task, learned=())
    hashes_then, special_then = _read(evaluated, held_out)
    count = min(num_held_out, len(held_out))
    places = {*_spread(count, MEASURED), *(i for i in special_then[:MEASURED] if i < count)}
    unfit += _measure(evaluated, held_out, "held-out", sorted(places), special_then, count)

    said = [f"{len(train):,} examples to train on, {len(held_out):,} held out"]
    said += [*unfit, *_left_out(train, held_out)]
    if both := _count(hashes_then, hashes):
        said.append(f"{both:,} of the held-out prompts are training prompts, too")
    if (different := len({*hashes})) < len(hashes):
        said.append(f"different prompts to train on: {different:,}")
    if count := len(special) + (0 if held_out is train else len(special_then)):
        setting = task.config.special_tokens_in_data
        taken = {"text": "as mere text", "control": "as control tokens"}[setting]
        said.append(
            f"special tokens in {count:,} examples are taken {taken} (task.special_tokens_in_data)"
        )
    return "; ".join(said)


def held_out_in_training(task: Task) -> int | None:
    """Counts the held-out prompts that are training prompts, too. None where examples are made."""
    train = task.config.source.train
    held_out = task.config.source.held_out
    if not isinstance(train, list | tuple) or not isinstance(held_out, list | tuple):
        return None
    hash_of = task.config.template.hash
    return _count(list(map(hash_of, held_out)), map(hash_of, train))


def _count(hashes: list[int], among: Iterable[int]) -> int:
    """Counts the hashes that are in `among`."""
    both = {*hashes}.intersection(among)
    return sum(prompt in both for prompt in hashes)


def _left_out(*splits: Sequence) -> list[str]:
    return [
        f"{rows.skipped:,} malformed rows of {rows.file} are left out, the first: "
        f"{rows.first_skipped}"
        for rows in splits
        if isinstance(rows, Rows) and rows.skipped
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
            raise ValueError(f"{place_of(example) or f'example {i}'}: {error}") from error
        hashes.append(task.text.template.hash(example))
        if spells:
            special.append(i)
    return hashes, special


def _measure(
    task: Task,
    examples: Sequence,
    which: str,
    places: Sequence[int],
    special: Sequence[int] = (),
    count: int | None = None,
) -> list[str]:
    """Describes the examples at `places` that are too long or cannot be taken, and what becomes of
    them. Raises ValueError if they are an error. count: examples for which they stand; None: all.
    """
    # number of tokens, by field and number of the example
    limits = task.limits
    cuts = limits.long_prompts == "truncate"
    lengths: dict[str, dict[int, int]] = {name: {} for name in ("prompt", *task.learned)}
    refused = []
    for i in places:
        try:
            if not cuts or i in special:
                lengths["prompt"][i] = task.text.length(examples[i])
            for name in task.learned:
                lengths[name][i] = len(task.text.demonstration(examples[i], name)[0])
        except ValueError as error:
            if not limits.skips:
                raise
            refused.append(str(error))

    said = []
    count = len(examples) if count is None else count
    looked = f"{count:,}"
    if len(places) < count:
        looked = f"the {len(places):,} (of {count:,}) looked at"
    for name, token_counts in lengths.items():
        setting, most = "generation.max_new_tokens", limits.max_new_tokens
        if name == "prompt":
            setting, most = "generation.max_prompt_length", limits.max_prompt_length
        too_long = {i: length for i, length in token_counts.items() if length > most}
        # a run counts the prompts that it cuts
        if not too_long or (cuts and name == "prompt"):
            continue
        what = f"{name}s" if name in ("prompt", "completion") else f"`{name}`"
        begins = f"{len(too_long):,} of {looked} {which} {what} are longer than {setting}={most}"
        if not cuts and not limits.leaves_out:
            longest = max(too_long, key=too_long.get)
            raise ValueError(
                f"{begins}; the longest has {too_long[longest]:,} tokens "
                f"({place_of(examples[longest]) or f'example {longest}'}); raise it to at least "
                f"{too_long[longest]}, {TRUNCATE}"
            )
        how = (
            "cut (generation.long_prompts=truncate)" if cuts else f"left out ({limits.setting})"
        )
        said.append(f"{begins} and are {how}")
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
