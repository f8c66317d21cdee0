"""GSM8K (arXiv:2110.14168): grade-school problems in words, with solutions that end in `#### 72`.

Its data are not shipped. Give its files, or the name of a data set on the hub."""

import re
from dataclasses import dataclass

from tunix_lite.rewards.numbers import last_number, number_of
from tunix_lite.tasks.hub_rows import HUB
from tunix_lite.tasks.messages import fields_of
from tunix_lite.tasks.row_files import check_on_error
from tunix_lite.tasks.sources import FileSource

# pattern of the paper's reference code: the first match counts
HASHES = re.compile(r"#### (-?[0-9.,]+)")


@dataclass(frozen=True)
class _Solutions:
    """Makes the example of a row: texts `question` and `answer`, and `####` and a number end the
    latter."""

    def check(self, row: dict) -> dict:
        """The example of the row. Raises ValueError for a row that has none."""
        for name in ("question", "answer"):
            if not isinstance(row.get(name), str):
                raise ValueError(
                    f"a row of GSM8K has a text `{name}`; this one has {fields_of(row)}"
                )
        solution, marker, number = row["answer"].rpartition("####")
        if not marker or number_of(number.strip()) is None:
            raise ValueError(f"the answer ends in {row['answer'][-40:]!r}, not in `#### 72`")
        # <<48/2=24>> marks what a calculator would say; nobody reads it
        solution = re.sub(r"<<[^>]*>>", "", solution).strip()
        answer = number.strip().replace(",", "")
        return {**row, "answer": answer, "completion": f"{solution}\n#### {answer}".strip()}


@dataclass(frozen=True)
class Gsm8k(FileSource):
    """Rows `question` and `answer` of files, .jsonl or .parquet, or of a data set on the hub. An
    example has the number as `answer` and the whole solution as `completion`.
    Example: Gsm8k(train_file="train.jsonl", held_out_file="test.jsonl")."""

    # Training file, .jsonl or .parquet, with columns question and answer. null downloads `hub`.
    train_file: str | None = None
    # Held-out file of the same form. null downloads `hub`.
    held_out_file: str | None = None
    # Data set on the hub, as org/name or org/name@revision.
    hub: str = "openai/gsm8k"
    # For a row that is malformed or does not fit: raise stops, skip leaves it out and counts it.
    on_error: str = "raise"
    checker = _Solutions()

    def __post_init__(self):
        check_on_error(self.on_error)

    def file_of(self, split: str) -> str:
        """The file of a split; one that was not given is downloaded."""
        file = getattr(self, f"{split}_file")
        return f"{HUB}{self.hub}:main" if file is None else file


def strict(completion: str, example: dict) -> float:
    """1 if the number after the first `####` equals `answer`, as in the paper's code, else 0."""
    match = HASHES.search(completion)
    # The pattern takes the full stop of a sentence, too.
    number = None if match is None else number_of(match[1].rstrip("."))
    return float(number is not None and number == number_of(example["answer"]))


def flexible(completion: str, example: dict) -> float:
    """1 if the number after the first `####`, or without one the last number of the completion,
    equals `answer`, else 0. A completion that ends in `####` was cut off and gave no answer."""
    if HASHES.search(completion):
        return strict(completion, example)
    if completion.rstrip().endswith("####"):
        return 0.0
    last = last_number(completion)
    return 0.0 if last is None else float(last[1] == number_of(example["answer"]))
