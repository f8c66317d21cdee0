"""Change a word by instructions, one after the other."""

from dataclasses import dataclass

import numpy as np

from tunix_lite.tasks.generated import Split, answer_text, check_counts, check_range, example_of

LETTERS = "abcdefghijklmnopqrstuvwxyz"
# kind -> (its instruction, what it does); {a} is a letter of the word, {b} any letter
EDITS = {
    "reverse": ("reverse it", lambda word, a, b: word[::-1]),
    "remove": ("remove each {a}", lambda word, a, b: word.replace(a, "")),
    "replace": ("replace each {a} by {b}", lambda word, a, b: word.replace(a, b)),
    "double": ("write each {a} twice", lambda word, a, b: word.replace(a, a + a)),
    "move": ("move the first letter to the end", lambda word, a, b: word[1:] + word[:1]),
    "append": ("add {b} at the end", lambda word, a, b: word + b),
}


@dataclass(frozen=True)
class StringEdit:
    """Words of random letters with instructions, such as `Take abca: remove each a, reverse it`.

    Example: {"question": "Take qnhibb: remove each b", "answer": "qnhi", ...}.
    """

    # Fewest letters in a word.
    min_length: int = 4
    # Most letters in a word.
    max_length: int = 6
    # Fewest instructions in a problem.
    min_edits: int = 1
    # Most instructions in a problem.
    max_edits: int = 2
    # Kinds of instructions.
    edits: tuple[str, ...] = tuple(EDITS)
    # Problems in one pass of the training data.
    num_train: int = 1_000_000
    # Held-out problems, for evaluation.
    num_held_out: int = 256

    def __post_init__(self):
        check_range(self, 2, "min_length", "max_length")
        check_range(self, 1, "min_edits", "max_edits")
        if not self.edits or set(self.edits) - EDITS.keys():
            raise ValueError(f"edits={list(self.edits)}: choose from {', '.join(EDITS)}")
        check_counts(self)

    @property
    def train(self) -> Split:
        return Split(self, held_out=False, count=self.num_train)

    @property
    def held_out(self) -> Split:
        return Split(self, held_out=True, count=self.num_held_out)

    def make(self, rng: np.random.Generator) -> dict:
        """See generated.Generator."""
        while True:
            length = int(rng.integers(self.min_length, self.max_length + 1))
            word = "".join(LETTERS[i] for i in rng.integers(0, len(LETTERS), length))
            count = int(rng.integers(self.min_edits, self.max_edits + 1))
            told, edited = self._edited(rng, word, count)
            if edited:
                return example_of(f"Take {word}: {', then '.join(told)}", edited)

    def _edited(self, rng: np.random.Generator, word: str, count: int) -> tuple[list[str], str]:
        """Instructions for the word, and what they make of it; "" if they leave nothing."""
        told = []
        for _ in range(count):
            if not word:
                break
            instruction, edit = EDITS[self.edits[int(rng.integers(len(self.edits)))]]
            a = word[int(rng.integers(len(word)))]
            b = LETTERS[int(rng.integers(len(LETTERS)))]
            told.append(instruction.format(a=a, b=b))
            word = edit(word, a, b)
        return told, word


def is_edited_right(completion: str, example: dict) -> float:
    """1 if the completion's answer is the word `answer`, else 0. Quotes, a full stop and the case
    of letters do not count."""
    return float(answer_text(completion).strip(" .'\"`*").lower() == example["answer"])
