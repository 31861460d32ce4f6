"""Attention plans: every key of every sequence exactly once, in pieces of about equal size and limited number."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kernels.attention.attention_plan import (
    COPY_TOKENS,
    PIECE_TOKENS,
    TILE_QUERIES,
    cut_decode,
    cut_prefill,
)


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=40),
    st.integers(1, 80),
)
def test_pieces_cover_every_key_once(lengths: list[int], spare: int) -> None:
    pieces, piece_starts = cut_decode(np.array(lengths, dtype=np.int32), len(lengths) + spare)
    assert pieces.shape[1] <= len(lengths) + spare
    assert piece_starts[-1] == pieces.shape[1]
    keys: list[list[int]] = [[] for _ in lengths]
    for sequence, start, end, number in pieces.T.tolist():
        assert start < end
        assert start % PIECE_TOKENS == 0
        assert piece_starts[sequence] <= number < piece_starts[sequence + 1]
        keys[sequence] += range(start, end)
    assert [sorted(found) for found in keys] == [list(range(length)) for length in lengths]
    assert sorted(pieces[3].tolist()) == list(range(pieces.shape[1]))


def test_long_sequence_is_split_evenly_and_comes_before_short_ones() -> None:
    pieces, _ = cut_decode(np.array([65536] + [1024] * 127, dtype=np.int32), 128 + 66)
    sizes = pieces[2] - pieces[1]
    assert sizes.max() < 2 * (65536 + 127 * 1024) / 66
    assert (np.diff(sizes) <= 0).all()


@pytest.mark.parametrize("query_len", [2, TILE_QUERIES, TILE_QUERIES + 1, 1000])
def test_tiles_cover_every_query_once_and_long_contexts_come_first(query_len: int) -> None:
    query_lens = np.array([query_len, 0, 300], dtype=np.int32)
    kv_lens = np.array([query_len, 50, 5000], dtype=np.int32)
    found, copies, copy_starts = cut_prefill(query_lens, kv_lens)
    tiles = found.T.tolist()
    covered: dict[int, list[int]] = {0: [], 2: []}
    for sequence, first in tiles:
        covered[sequence] += range(first, min(first + TILE_QUERIES, int(query_lens[sequence])))
    assert {key: sorted(queries) for key, queries in covered.items()} == {
        0: list(range(query_len)),
        2: list(range(300)),
    }
    assert tiles[0][0] == 2
    own = -(-query_len // COPY_TOKENS)  # blocks of the first sequence
    assert copies.T.tolist() == [[0, at * COPY_TOKENS] for at in range(own)] + [
        [2, at * COPY_TOKENS] for at in range(-(-5000 // COPY_TOKENS))
    ]
    assert copy_starts[[0, 2]].tolist() == [0, own * COPY_TOKENS]
