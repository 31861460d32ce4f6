"""Estimates how easily a cluster key can be guessed. A hostile listener that a server connects to can test guesses."""

import itertools
import math
import string

MIN_GUESSES_BITS = 50
"""With a derivation of 0.2 s (`transfer/control/curve.py`), 2^50 guesses take a million cores seven years."""
HOW_TO_MAKE_ONE = "make one with: openssl rand -hex 32"
_CLASSES = (string.digits, string.ascii_lowercase, string.ascii_uppercase, string.punctuation + " ")
_WORD_BITS = 2.2
"""Bits of a letter in a key without digits, which may be made of words."""


def describe_weak_key(key: str) -> str | None:
    """One sentence, without the key, if `key` is too easy to guess; else None."""
    bits = _guess_bits(key)
    if bits < MIN_GUESSES_BITS:
        return (
            f"is too weak: about 2^{bits:.0f} guesses find it, the minimum is 2^{MIN_GUESSES_BITS}; {HOW_TO_MAKE_ONE}"
        )
    return None


def _guess_bits(key: str) -> float:
    """By length and classes of characters. Only the first period of a repeated text counts, and a character that
    repeats the one before it or continues a sequence (abc, 321) counts one bit.
    """
    has_digits = any(character.isdigit() for character in key)
    alphabet = sum(len(members) for members in _CLASSES if not set(members).isdisjoint(key))
    bits = math.log2(max(2, alphabet)) if has_digits else _WORD_BITS
    period = next((length for length in range(1, len(key)) if key[length:] == key[:-length]), len(key))
    steps = [ord(after) - ord(before) for before, after in itertools.pairwise(key[:period])]
    return bits + sum(1 if abs(step) <= 1 else bits for step in steps)
