"""Trains a tokenizer on texts. It reads bytes, so it knows every character, and each digit is a
token of its own, so that sums can be learned."""

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from tunix_lite.models.tokenizer import Tokenizer

_KINDS = {
    "bpe": (models.BPE, trainers.BpeTrainer),
    "unigram": (models.Unigram, trainers.UnigramTrainer),
}
END = "<|endoftext|>"
_PAD = "<|padding|>"
# END also stands between documents; model.chat_template=chatml writes the last two
SPECIAL = (END, _PAD, "<|im_start|>", "<|im_end|>")
# the special ones, one for each byte, and one that is learned
_FEWEST = len(SPECIAL) + 256 + 1


def train_tokenizer(
    texts: Iterable[str], folder: Path, kind: str, vocab_size: int
) -> Tokenizer:
    """Trains one of `kind`, writes it into the folder, and reads it from there. vocab_size: tokens,
    the special ones included; of few texts there may be fewer. Raises ValueError."""
    if kind not in _KINDS:
        raise ValueError(f"kind={kind!r}; it is {' or '.join(_KINDS)}")
    if vocab_size < _FEWEST:
        raise ValueError(f"vocab_size={vocab_size} must be at least {_FEWEST}")
    model, trainer = _KINDS[kind]
    backend = tokenizers.Tokenizer(model())
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, by_bytes])
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    alphabets = {"special_tokens": list(SPECIAL), "initial_alphabet": alphabet}
    learner = trainer(vocab_size=vocab_size, show_progress=False, **alphabets)
    backend.train_from_iterator(texts, learner)
    if kind == "unigram":
        # the trainer leaves pieces that are as likely in any order
        pieces = [
            (text, score) for text, score in json.loads(backend.to_str())["model"]["vocab"]
        ]
        learned = sorted(pieces[len(SPECIAL) :])
        backend.model = models.Unigram([*pieces[: len(SPECIAL)], *learned])

    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    names = {"eos_token": END, "pad_token": _PAD, "tokenizer_class": "PreTrainedTokenizerFast"}
    text = json.dumps(names | {"clean_up_tokenization_spaces": False}, indent=2)
    (folder / "tokenizer_config.json").write_text(f"{text}\n", encoding="utf-8")
    return Tokenizer.load(folder)
