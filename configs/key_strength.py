"""Estimates how easily a cluster key can be guessed. A hostile listener that a server connects to can test guesses."""

import math

MIN_GUESSES_BITS = 50
"""With a derivation of 0.2 s (`transfer/control/curve.py`), 2^50 guesses take a million cores seven years."""
HOW_TO_MAKE_ONE = "make one with: openssl rand -hex 32"
_MAX_CHARACTERS = 72  # limit of zxcvbn, whose time grows with the square of the length


def describe_weak_key(key: str) -> str | None:
    """One sentence, without the key, if `key` is too easy to guess; else None."""
    from zxcvbn import zxcvbn  # here, because it loads 15 MB of word lists

    bits = math.log2(zxcvbn(key[:_MAX_CHARACTERS])["guesses"])
    if bits < MIN_GUESSES_BITS:
        return (
            f"is too weak: about 2^{bits:.0f} guesses find it, the minimum is 2^{MIN_GUESSES_BITS}; {HOW_TO_MAKE_ONE}"
        )
    return None
