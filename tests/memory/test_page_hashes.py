"""Chained page hashes."""

import hashlib
import struct

import numpy as np

from pdserve.memory.page_hashes import ROOT, page_hash, page_hashes, short_hash


def test_hashes_do_not_depend_on_the_process_or_the_host() -> None:
    """Servers of different versions compare these values, so they must never change."""
    first = hashlib.blake2b(bytes(32) + struct.pack("<2i", 1, 70000), digest_size=32).digest()
    second = hashlib.blake2b(first + struct.pack("<2i", 3, 4), digest_size=32).digest()
    assert page_hashes((1, 70000, 3, 4), 2) == [first, second]
    assert short_hash(first) == 0xE89E2B23E33CD20C


def test_only_full_pages_have_hashes() -> None:
    assert page_hashes([], 4) == page_hashes([1, 2, 3], 4) == []
    assert len(page_hashes(range(11), 4)) == 2


def test_hash_of_a_page_depends_on_the_tokens_before_it() -> None:
    one, other = page_hashes([1, 2, 3, 4], 2), page_hashes([9, 2, 3, 4], 2)
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert page_hashes([1, 2, 8, 8], 2)[0] == one[0]


def test_pages_can_be_hashed_one_by_one() -> None:
    tokens = [5, 6, 7, 8, 9, 10]
    hashes = page_hashes(tokens, 3)
    assert page_hash(ROOT, tokens[:3]) == hashes[0]
    assert page_hash(hashes[0], tokens[3:]) == hashes[1]


def test_arrays_and_sequences_have_the_same_hashes() -> None:
    tokens = tuple(range(100, 164))
    assert page_hashes(np.array(tokens, np.int32), 16) == page_hashes(tokens, 16)


def test_another_root_has_other_hashes() -> None:
    assert not set(page_hashes(range(64), 16)) & set(page_hashes(range(64), 16, root=b"model"))
