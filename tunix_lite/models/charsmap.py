"""Checks the table of a `Precompiled` normalizer in a tokenizer.json, before the tokenizers library
uses it.

SentencePiece compiles its rules into it: which texts, of a few bytes each, are replaced by which.
The library does not check the numbers of the table, and panics in the middle of a text if one of
them points outside.
"""

import numpy as np

# Bytes of a text that is replaced. The library looks up characters, and clusters of less than 6
# bytes.
LEVELS = 16
# The bit of a unit that holds a value. In any other unit the lowest 8 bits are a byte of the text.
LEAF = 1 << 31
HAS_LEAF = 1 << 8


def longest_replacement(charsmap: bytes) -> int:
    """Characters of the longest replacement in a table. Raises ValueError if it is damaged.

    The table: the size of the units in 4 bytes; the units, a double array of 4 bytes each as
    darts-clone writes it; and the replacements, each ended by a byte 0.
    """
    size = int.from_bytes(charsmap[:4], "little")
    if len(charsmap) < 4 or not size or size % 4 or 4 + size > len(charsmap):
        raise ValueError("its table of characters has another size than it says")
    units = np.frombuffer(charsmap[4 : 4 + size], "<u4").astype(np.int64)
    replacements = charsmap[4 + size :]
    # Raises ValueError if they are no text.
    texts = replacements.decode("utf-8").split("\0")

    # Every offset must be in the replacements, and not inside of a character, whose other bytes are
    # 0x80 to 0xbf.
    offsets = np.unique(_replacement_offsets(units))
    if offsets.size and offsets[-1] > len(replacements):
        raise ValueError("its table of characters leads outside of it")
    first_bytes = [replacements[offset : offset + 1] for offset in offsets]
    if any(b"\x80" <= byte <= b"\xbf" for byte in first_bytes):
        raise ValueError("its table of characters leads into the middle of a character")
    return max((len(text) for text in texts), default=0)


def _replacement_offsets(units: np.ndarray) -> np.ndarray:
    """The offsets in the replacements that any text can lead to. Raises ValueError if one leads
    outside of the units, [N]."""
    # Bit 9 of a unit scales its offset by 256. The child with label b of position p is at p ^ b.
    offsets = (units >> 10) << ((units & (1 << 9)) >> 6)
    index = np.arange(len(units))
    labels = np.where(units & LEAF, 0, units & 0xFF)
    above = index ^ labels
    below = index ^ offsets

    # From the root, one byte of all possible texts at a time.
    positions = offsets[:1]
    reached_offsets = []
    for _ in range(LEVELS):
        # Any byte can follow, so all 256 units around a position must be there.
        if np.any(positions | 0xFF >= len(units)):
            raise ValueError("its table of characters leads outside of it")
        is_open = np.zeros(len(units), bool)
        is_open[positions] = True
        reached = np.flatnonzero((labels > 0) & is_open[np.minimum(above, len(units) - 1)])
        positions = np.unique(below[reached])
        with_leaf = below[reached[(units[reached] & HAS_LEAF) > 0]]
        if np.any(with_leaf >= len(units)):
            raise ValueError("its table of characters leads outside of it")
        reached_offsets.append(units[with_leaf] & (LEAF - 1))
        if not reached.size:
            break
    return np.concatenate(reached_offsets)
