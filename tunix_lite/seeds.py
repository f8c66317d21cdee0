"""Seeds: their allowed values, and those of single calls."""

import zlib
from numbers import Integral

# JAX silently drops the bits above 32: it would draw the same for the seeds 2**32 + 1 and 1.
MAX_SEED = 2**32 - 1


def check_seed(seed: int) -> int:
    """`seed` as an int. Raises ValueError unless it is a whole number of 32 bits."""
    is_number = isinstance(seed, Integral) and not isinstance(seed, bool)
    if not is_number or not 0 <= seed <= MAX_SEED:
        raise ValueError(
            f"seed={str(seed)[:80]}; a seed is a whole number from 0 to {MAX_SEED} (2**32-1)"
        )
    return int(seed)


def seed_of_call(base: int, call: int, prompt: int) -> int:
    """A seed for a prompt of a call that gave none: another one for each of them."""
    return zlib.crc32(f"{base} {call} {prompt}".encode())
