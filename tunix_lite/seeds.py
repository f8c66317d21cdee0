"""What a seed may be. JAX would drop the bits above 32 without a word: 2**32 + 1 and 1 would draw
the same."""

from numbers import Integral

MOST = 2**32 - 1


def check_seed(seed: int) -> int:
    """`seed` as an int. Raises ValueError unless it is a whole number of 32 bits."""
    if not isinstance(seed, Integral) or isinstance(seed, bool) or not 0 <= seed <= MOST:
        raise ValueError(
            f"seed={str(seed)[:80]}; a seed is a whole number from 0 to {MOST} (2**32-1)"
        )
    return int(seed)
