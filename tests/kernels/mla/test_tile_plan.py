"""Tiles and pieces of latent attention: every query sees every key once, and the plan fits into a CUDA graph."""

import itertools
import random

import numpy as np
import pytest
import torch

from pdserve.kernels.mla.tile_plan import (
    BLOCK_KEYS,
    cut_tiles,
    most_partials,
    most_pieces,
    most_splits,
    plan_tiles,
    tile_tokens,
    tiles_at_once,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("at_once", [0, 1, 5, 66])
@pytest.mark.parametrize("size", [1, 4])
def test_pieces_cover_all_keys_of_all_queries(at_once: int, size: int) -> None:
    draw = random.Random(at_once + size)
    for _ in range(30):
        batch = draw.randint(1, 12)
        queries = [draw.choice([1, 1, 2, 7, 64]) for _ in range(batch)]
        keys = [query + draw.choice([0, 1, 63, 500, 9000]) for query in queries]
        queries[-1], keys[-1] = draw.choice([(queries[-1], keys[-1]), (5, 0), (0, 0)])  # the last may be padding
        pieces, splits = cut_tiles(
            *(np.array(values, dtype=np.int32) for values in (queries, keys, [100 * at for at in range(batch)])),
            tile_tokens=size,
            at_once=at_once,
        )
        assert (np.diff(pieces[5] - pieces[4]) <= 0).all(), "not the longest first"
        seen: dict[int, list[tuple[int, int]]] = {}
        partials: dict[int, list[int]] = {}
        for first_page, row, count, visible, start, end, partial in pieces.T.tolist():
            sequence = first_page // 100
            assert 1 <= count <= size
            assert start % BLOCK_KEYS == 0
            own = row - sum(queries[:sequence])
            assert own >= 0
            assert own + count <= queries[sequence]
            assert visible == (keys[sequence] - queries[sequence] + own + 1 if keys[sequence] else 0)
            for query in range(row, row + count):
                seen.setdefault(query, []).append((start, min(end, visible + query - row)))
            if partial >= 0:
                partials.setdefault(row, []).append(partial)
        assert sorted(seen) == list(range(sum(queries)))
        ends = [
            key - query + at + 1 if key else 0 for query, key in zip(queries, keys, strict=True) for at in range(query)
        ]
        for query, parts in seen.items():
            parts.sort()
            assert parts[0][0] == 0
            assert all(before[1] == after[0] or after[1] <= after[0] for before, after in itertools.pairwise(parts))
            assert max(end for _, end in parts) == ends[query]
        found = {row: list(range(first, last)) for row, _, first, last in splits.T.tolist()}
        assert {row: sorted(numbers) for row, numbers in partials.items()} == found
        tiles = sum(-(-query // size) for query in queries)
        assert pieces.shape[1] <= most_pieces(tiles, at_once)
        assert splits.shape[1] <= most_splits(tiles, at_once)
        assert sum(map(len, found.values())) <= most_partials(tiles, at_once)


@pytest.mark.parametrize("batch", [1, 2, 8, 32, 64, 100, 200])
def test_long_decode_batches_keep_all_programs_busy(batch: int) -> None:
    """128 heads on 132 SMs, 32k context: the programs, longest first, end within 15 % of an even division."""
    at_once, context = 66, 32768
    ones, keys = np.ones(batch, np.int32), np.full(batch, context, np.int32)
    pieces, _ = cut_tiles(ones, keys, 0 * ones, tile_tokens=1, at_once=at_once)
    ends = [0] * at_once
    for length in (pieces[5] - pieces[4]).tolist():
        ends[ends.index(min(ends))] += length
    assert max(ends) <= 1.15 * batch * context / at_once + BLOCK_KEYS


def test_short_contexts_are_not_cut_into_tiny_pieces() -> None:
    one = np.ones(1, np.int32)
    pieces, splits = cut_tiles(one, one * 100, 0 * one, tile_tokens=1, at_once=66)
    assert (pieces.shape[1], splits.shape[1]) == (1, 0)


def test_tiles_fill_the_rows_of_a_program() -> None:
    assert [tile_tokens(heads, decode_only=False, at_once=9) for heads in (128, 64, 48, 16)] == [1, 1, 1, 4]
    assert tile_tokens(16, decode_only=True, at_once=9) == 1
    assert tiles_at_once(128, CPU) == 0  # the CPU computes whole tiles


def test_sequences_that_do_not_fit_their_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="1 queries and 9 keys does not fit 2 pages of 4"):
        plan_tiles([1], [9], [[3, 1]], page_size=4, heads=4, device=CPU)
    with pytest.raises(ValueError, match="5 queries and 4 keys does not fit"):
        plan_tiles([5], [4], [[3, 1]], page_size=4, heads=4, device=CPU)
