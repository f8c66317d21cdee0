"""The tokenizer that the metadata of a GGUF file describe: `llama`, as SentencePiece makes them, or
`gpt2`, of bytes (transformers' gguf_tokenizer_mapping.py; llama.cpp's src/llama-vocab.cpp)."""

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from tunix_lite.basics.plain_text import escaped, shown
from tunix_lite.models.gguf_file import GgufFile, open_gguf
from tunix_lite.models.gguf_metadata import small_object

# Types of tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> the pattern by which a text is cut before merges; DIGITS, GPT2: as there
DIGITS, GPT2 = "each digit alone", "as GPT-2"
PATTERNS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _LLAMA3.replace("{1,3}", ""),
    "deepseek-r1-qwen": _LLAMA3.replace("{1,3}", ""),
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "refact": DIGITS,
    "gpt-2": GPT2,
}
# Derived merges per token, at most. SentencePiece vocabularies have 2.
_MOST_MERGES = 8
# Characters of a token whose merges are derived, at most: finding them takes their square. Gemma's
# longest has 31.
_LONGEST_MERGED = 256


def gguf_tokenizer(path: str) -> tokenizers.Tokenizer:
    """The tokenizer of a GGUF file. Raises ValueError, or an Exception of the tokenizers
    library."""
    file = open_gguf(Path(path))
    kind = file.value("tokenizer.ggml.model", str)
    if kind not in ("llama", "gpt2"):
        raise ValueError(
            f"{path}: tokenizer.ggml.model={shown(kind)} is not supported; supported is llama or "
            "gpt2"
        )
    num_tokens = small_object(file.path, "config.json")["vocab_size"]
    tokens = file.array("tokenizer.ggml.tokens", str, num_tokens)
    types = file.array("tokenizer.ggml.token_type", int, num_tokens)
    # Gemma's runs of spaces are spelled with spaces, and are merged as others are.
    is_gemma = kind == "llama" and file.value("general.architecture", str).startswith("gemma")
    if is_gemma:
        tokens = ["▁" * len(t) if t and not t.strip(" ") else t for t in tokens]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    for i, token in enumerate(tokens):
        if vocabulary[token] == i:
            continue
        raise ValueError(
            f"{path}: tokenizer.ggml.tokens[{i}] and [{vocabulary[token]}] are both {shown(token)}"
        )
    # Rows of the embedding that stand for no token are called so.
    for i, token in enumerate(tokens):
        if types[i] == UNUSED and token == f"[PAD{i}]":
            del vocabulary[token]
    config = small_object(file.path, "tokenizer_config.json")
    if kind == "gpt2":
        made = _bytes_tokenizer(file, vocabulary)
    else:
        made = _sentencepiece_tokenizer(file, vocabulary, is_gemma, config.get("unk_token"))
    for special, number in ((True, CONTROL), (False, USER_DEFINED)):
        made.add_tokens(
            [
                tokenizers.AddedToken(token, normalized=False, special=special)
                for token, own in zip(tokens, types)
                if own == number and not (is_gemma and token.strip("▁") == "")
            ]
        )

    # What is added to each text.
    adds_bos = kind == "llama" or PATTERNS[file.value("tokenizer.ggml.pre", str)] is _LLAMA3
    ids = {}
    for name, default in (("bos", adds_bos), ("eos", False)):
        is_added = file.value(f"tokenizer.ggml.add_{name}_token", bool, default)
        if is_added and f"{name}_token" in config:
            ids[name] = config[f"{name}_token"]
    if ids:
        single = [token for token in (ids.get("bos"), "$A", ids.get("eos")) if token]
        # Both are syntax of such a template.
        if any(":" in token or "$" in token for token in ids.values()):
            raise ValueError(
                f"{path}: {shown(ids)} cannot be added to texts: they hold : or $"
            )
        made.post_processor = processors.TemplateProcessing(
            single=single,
            special_tokens=[(token, vocabulary[token]) for token in ids.values()],
        )
    return made


def _bytes_tokenizer(file: GgufFile, vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    """A BPE tokenizer of bytes, whose text is first cut as tokenizer.ggml.pre says."""
    pre = file.value("tokenizer.ggml.pre", str)
    if pre not in PATTERNS:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.pre={shown(pre)} is not supported; supported is "
            f"{', '.join(PATTERNS)}"
        )
    pattern = PATTERNS[pre]
    # The tokenizer of Llama 3 takes a word that is a token as that token.
    made = tokenizers.Tokenizer(
        models.BPE(vocabulary, _merges(file), ignore_merges=pattern is _LLAMA3)
    )
    is_cut_by_pattern = pattern not in (DIGITS, GPT2)
    before = []
    if pattern is DIGITS:
        before = [pre_tokenizers.Digits(individual_digits=True)]
    elif is_cut_by_pattern:
        before = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")]
    of_bytes = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=not is_cut_by_pattern
    )
    made.pre_tokenizer = pre_tokenizers.Sequence([*before, of_bytes])
    # The other patterns are Qwen's, whose tokenizers compose characters first.
    if is_cut_by_pattern and pattern is not _LLAMA3:
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    return made


def _sentencepiece_tokenizer(
    file: GgufFile, vocabulary: dict[str, int], is_gemma: bool, unknown: str | None
) -> tokenizers.Tokenizer:
    """A BPE tokenizer of characters, with spaces as ▁ and a token for each byte."""
    if "tokenizer.ggml.merges" in file.values:
        merges = _merges(file)
    elif is_gemma:
        # Gemma's scores are not the order of its merges, and the numbers of its tokens are.
        merges = _derived_merges(file, vocabulary, None)
    else:
        scores = file.array("tokenizer.ggml.scores", float)
        if len(scores) <= max(vocabulary.values()):
            raise ValueError(
                f"{file.path}: tokenizer.ggml.scores has {len(scores)} items, too few"
            )
        merges = _derived_merges(file, vocabulary, scores)
    made = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if is_gemma:
        made.normalizer = normalizers.Replace(" ", "▁")
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        has_prefix = file.value("tokenizer.ggml.add_space_prefix", bool, True)
        scheme = "first" if has_prefix else "never"
        made.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
        decoding += [decoders.Strip(" ", 1, 0)] if has_prefix else []
    made.decoder = decoders.Sequence(decoding)
    return made


def _merges(file: GgufFile) -> list[tuple[str, ...]]:
    merges = [tuple(text.split(" ")) for text in file.array("tokenizer.ggml.merges", str)]
    for i, merge in enumerate(merges):
        if len(merge) != 2:
            text = escaped(" ".join(merge))
            raise ValueError(f"{file.path}: tokenizer.ggml.merges[{i}]={text!r} is no pair")
    return merges


def _derived_merges(
    file: GgufFile, vocabulary: dict[str, int], scores: list[float] | None
) -> list[tuple[str, str]]:
    """The merges that a vocabulary implies, as in transformers: each cut of a token into two, by
    its score and the length of the first part, both falling. scores: None: the first token has the
    highest."""
    # The merges share these texts: a copy of each part would take far more memory.
    same = {token: token for token in vocabulary}
    merges = []
    for token, number in vocabulary.items():
        if len(token) > _LONGEST_MERGED or len(merges) > _MOST_MERGES * len(vocabulary):
            raise ValueError(
                f"{file.path}: tokenizer.ggml.tokens: {shown(token)} is too long to be merged, or "
                "the tokens can be merged in too many ways"
            )
        for i in range(1, len(token)):
            left = same.get(token[:i])
            if left is not None and (right := same.get(token[i:])) is not None:
                merges.append(
                    (-number if scores is None else scores[number], i, len(right), left, right)
                )
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in merges]
