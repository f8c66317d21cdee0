"""The table of a `Precompiled` normalizer in a tokenizer.json, looked through before the library
uses it.

SentencePiece compiles its rules into it: which texts, of a few bytes each, are replaced by which.
The library takes its numbers as they are, and panics in the middle of a text where one of them
leads outside.
"""

import numpy as np

# bytes of a text that is replaced: the library looks up characters, and clusters of less than 6
# bytes
LEVELS = 16
# set in a unit that holds a value; in any other one the lowest 8 bits are a byte of the text
LEAF = 1 << 31
HAS_LEAF = 1 << 8


def longest_replacement(charsmap: bytes) -> int:
    """Characters of the longest text that a table puts in the place of another. Raises ValueError
    if it is damaged.

    The table: the size of what follows in 4 bytes, a double array of units of 4 bytes (darts-clone
    writes it), and the replacements, each ended by a byte 0.
    """
    size = int.from_bytes(charsmap[:4], "little")
    if len(charsmap) < 4 or not size or size % 4 or 4 + size > len(charsmap):
        raise ValueError("its table of characters has another size than it says")
    units = np.frombuffer(charsmap[4 : 4 + size], "<u4").astype(np.int64)
    replacements = charsmap[4 + size :]
    # raises ValueError
    replacements.decode("utf-8")
    places = np.unique(_places(units))
    if places.size and places[-1] > len(replacements):
        raise ValueError("its table of characters leads outside of it")
    # No place may be inside of a character, whose other bytes are 0x80 to 0xbf.
    starts = [replacements[place : place + 1] for place in places]
    if any(b"\x80" <= start <= b"\xbf" for start in starts):
        raise ValueError("its table of characters leads into the middle of a character")
    return max((len(text) for text in replacements.decode("utf-8").split("\0")), default=0)


def _places(units: np.ndarray) -> np.ndarray:
    """Where in the replacements any text can lead. Raises ValueError if one leads outside of the
    units, [N]."""
    # The low bit of 1 << 9 scales an offset by 256. A unit of label b below the position p stands
    # at p ^ b.
    offsets = (units >> 10) << ((units & (1 << 9)) >> 6)
    index = np.arange(len(units))
    labels = np.where(units & LEAF, 0, units & 0xFF)
    above = index ^ labels
    below = index ^ offsets
    positions = offsets[:1]
    found = []
    for _ in range(LEVELS):
        # Any byte can follow: all 256 units around a position must be there.
        if np.any(positions | 0xFF >= len(units)):
            raise ValueError("its table of characters leads outside of it")
        is_open = np.zeros(len(units), bool)
        is_open[positions] = True
        reached = np.flatnonzero((labels > 0) & is_open[np.minimum(above, len(units) - 1)])
        positions = np.unique(below[reached])
        with_leaf = below[reached[(units[reached] & HAS_LEAF) > 0]]
        if np.any(with_leaf >= len(units)):
            raise ValueError("its table of characters leads outside of it")
        found.append(units[with_leaf] & (LEAF - 1))
        if not reached.size:
            break
    return np.concatenate(found)
