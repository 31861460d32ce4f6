"""Attention plans: they have every visible key once, in a limited number of pieces of about equal size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kernels.attention.attention_plan import (
    COPY_TOKENS,
    LEAST_PART_BLOCKS,
    PIECE_TOKENS,
    TILE_QUERIES,
    cut_copies,
    cut_decode,
    cut_tiles,
)


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=40),
    st.integers(1, 80),
    st.none() | st.integers(1, 3000),
)
def test_pieces_cover_every_visible_key_once(lengths: list[int], spare: int, window: int | None) -> None:
    pieces, piece_starts = cut_decode(np.array(lengths, dtype=np.int32), len(lengths) + spare, window)
    firsts = [max(0, length - (window or length)) for length in lengths]
    assert pieces.shape[1] <= len(lengths) + spare
    assert piece_starts[-1] == pieces.shape[1]
    keys: list[list[int]] = [[] for _ in lengths]
    for sequence, start, end, number in pieces.T.tolist():
        assert start < end
        assert (start - firsts[sequence]) % PIECE_TOKENS == 0
        assert piece_starts[sequence] <= number < piece_starts[sequence + 1]
        keys[sequence] += range(start, end)
    assert [sorted(found) for found in keys] == [
        list(range(first, length)) for first, length in zip(firsts, lengths, strict=True)
    ]
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
    found, splits = cut_tiles(query_lens, kv_lens, 1)
    assert splits.shape == (4, 0)
    copies, copy_starts = cut_copies(query_lens, kv_lens)
    tiles = found.T.tolist()
    covered: dict[int, list[int]] = {0: [], 2: []}
    for sequence, first, first_block, end_block, part in tiles:
        position = kv_lens[sequence] - query_lens[sequence] + first
        last_key = min(position + TILE_QUERIES, kv_lens[sequence]) - 1
        assert (first_block, end_block, part) == (0, last_key // COPY_TOKENS + 1, -1)
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


@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 40_000)), min_size=1, max_size=6),
    st.integers(1, 20),
    st.booleans(),
    st.none() | st.integers(1, 5000),
)
def test_parts_cover_every_visible_key_of_their_tile_once(
    lengths: list[tuple[int, int]], most_parts: int, last_only: bool, window: int | None
) -> None:
    query_lens = np.array([queries for queries, _ in lengths], dtype=np.int32)
    kv_lens = query_lens + np.array([cached for _, cached in lengths], dtype=np.int32)
    entries, splits = cut_tiles(query_lens, kv_lens, most_parts, last_only=last_only, window=window)
    copied = {tuple(copy) for copy in cut_copies(query_lens, kv_lens, window)[0].T.tolist()}
    blocks: dict[tuple[int, int], list[int]] = {}
    parts: dict[tuple[int, int], list[int]] = {}
    for sequence, first, first_block, end_block, part in entries.T.tolist():
        assert first_block < end_block
        blocks.setdefault((sequence, first), []).extend(range(first_block, end_block))
        if part >= 0:
            assert end_block - first_block >= LEAST_PART_BLOCKS
            parts.setdefault((sequence, first), []).append(part)
    expected = {
        (sequence, first)
        for sequence, queries in enumerate(query_lens.tolist())
        for first in range(0, queries, TILE_QUERIES)
        if not last_only or first + TILE_QUERIES >= queries
    }
    assert blocks.keys() == expected
    for (sequence, first), found in blocks.items():
        position = int(kv_lens[sequence] - query_lens[sequence]) + first
        first_key, last_key = 0, min(position + TILE_QUERIES, kv_lens[sequence]) - 1
        if window is not None:
            first_key = max(0, position - window + 1)
        assert sorted(found) == list(range(first_key // COPY_TOKENS, last_key // COPY_TOKENS + 1))
        assert {(sequence, block * COPY_TOKENS) for block in found} <= copied
    assert {(sequence, first): list(range(start, end)) for sequence, first, start, end in splits.T.tolist()} == {
        tile: sorted(numbers) for tile, numbers in parts.items()
    }
    used = sorted(part for numbers in parts.values() for part in numbers)
    assert used == list(range(len(used)))
    assert len(used) <= most_parts
