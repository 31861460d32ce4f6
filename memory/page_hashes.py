"""Chained hashes of pages of tokens: the hash of a page identifies its tokens and all tokens before them.

They are equal in every process and on every host, so servers can compare what they have cached without sending tokens.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

HASH_BYTES = 32
ROOT = bytes(HASH_BYTES)
"""The parent of first pages. Another root gives hashes that have nothing in common with these."""


def page_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a page with these tokens, which follows the page with the hash `parent`."""
    return _hash(parent, _as_bytes(tokens))


def page_hashes(tokens: Sequence[int] | npt.NDArray[np.int32], page_size: int, root: bytes = ROOT) -> list[bytes]:
    """The hashes of all full pages of a sequence, in order."""
    raw, size, parent = _as_bytes(tokens), 4 * page_size, root
    found: list[bytes] = []
    for start in range(0, len(raw) - size + 1, size):
        parent = _hash(parent, raw[start : start + size])
        found.append(parent)
    return found


def short_hash(page: bytes) -> int:
    """The first 64 bits of a hash: enough for hints and events, where a collision costs time and not correctness."""
    return int.from_bytes(page[:8], "little")


def pack_short_hashes(pages: Iterable[bytes]) -> bytes:
    """The short hashes of pages as little-endian 64-bit integers."""
    return b"".join([page[:8] for page in pages])


def unpack_hashes(packed: bytes) -> tuple[int, ...]:
    """The short hashes that were packed; an incomplete last one is ignored."""
    count = len(packed) // 8
    return struct.unpack_from(f"<{count}Q", packed)


def _hash(parent: bytes, raw: bytes) -> bytes:
    return hashlib.blake2b(parent + raw, digest_size=HASH_BYTES).digest()


def _as_bytes(tokens: Sequence[int] | npt.NDArray[np.int32]) -> bytes:
    """Little-endian int32, on every host."""
    if isinstance(tokens, np.ndarray):
        return tokens.astype("<i4", copy=False).tobytes()
    return struct.pack(f"<{len(tokens)}i", *tokens)  # twice as fast as an array for the tokens of a page
