"""GSM8K (arXiv:2110.14168): grade-school problems in words, with solutions that end in `#### 72`.

Its data are not shipped. Give its files, or the name of a data set on the hub."""

import re
from dataclasses import dataclass

from tunix_lite.rewards.numbers import last_number, number_of
from tunix_lite.tasks.files import FilesTaskConfig
from tunix_lite.tasks.messages import fields_of
from tunix_lite.tasks.prompt_text import PromptTemplate

# pattern of the paper's reference code: the first match counts
HASHES = re.compile(r"#### (-?[0-9.,]+)")


@dataclass(frozen=True)
class _SolutionTemplate(PromptTemplate):
    """A prompt template for texts `question` and `answer`, which ends in `####` and a number."""

    def check(self, row: dict) -> dict:
        """The row with its number as `answer`, the solution as `completion`. Raises ValueError."""
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
        completion = f"{solution}\n#### {answer}".strip()
        return super().check({**row, "answer": answer, "completion": completion})


@dataclass(frozen=True)
class Gsm8kTaskConfig(FilesTaskConfig):
    """A task of rows `question` and `answer`, of files or of a data set on the hub.
    Example: task=gsm8k task.train=train.jsonl task.held_out=test.jsonl"""

    reads = _SolutionTemplate


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
    if last is None:
        return 0.0
    return float(last[1] == number_of(example["answer"]))
