"""A pool of rows with scales (fp8 index keys): its layout, and copies between pools of different page sizes."""

import random

import pytest
import torch

from pdserve.memory.kv_pool import KvCache, KvPool
from pdserve.memory.page_store import PageStore
from pdserve.scheduler.ranks.transfers.announcement import layout_of
from pdserve.transfer.plan.copy_runs import expand_runs, expand_token_runs
from pdserve.transfer.protocol.checksum import block_sum

LAYERS, DIM, TOKENS = 3, 12, 50


def scaled_pool(page_size: int, num_pages: int = 60) -> KvPool:
    pool = KvPool(
        num_pages=num_pages,
        num_layers=LAYERS,
        num_heads=1,
        page_size=page_size,
        head_dim=DIM,
        dtype=torch.float8_e4m3fn,
        device=torch.device("cpu"),
        planes=("indexer",),
        scale_plane="indexer_scale",
    )
    pool.data.random_(0, 256, generator=torch.Generator().manual_seed(page_size))
    return pool


def pages_of(pool: KvPool, seed: int) -> list[int]:
    return random.Random(seed).sample(range(pool.num_pages), -(-TOKENS // pool.page_size))


def rows_of(pool: KvPool, pages: list[int], token: int) -> list[tuple[bytes, float]]:
    """Row and scale of one token, by layer, through the views that kernels use."""
    page, slot = pages[token // pool.page_size], token % pool.page_size
    views = [pool.layer(layer) for layer in range(LAYERS)]
    return [
        (bytes(rows[page, 0, slot].view(torch.uint8).tolist()), float(scales.view(torch.int32)[page, 0, slot, 0]))
        for rows, scales in views
    ]


def test_page_has_all_rows_of_a_layer_and_then_their_scales() -> None:
    pool = scaled_pool(8)
    assert pool.planes == ("indexer", "indexer_scale")
    assert pool.plane_token_bytes == (DIM, 4)
    assert pool.page_bytes == LAYERS * 8 * (DIM + 4)
    assert pool.size_bytes == 60 * pool.page_bytes
    assert pool.dtype_name == "float8_e4m3fn"
    layout = layout_of(pool)
    assert (layout.page_bytes, layout.size_bytes) == (pool.page_bytes, pool.size_bytes)
    rows, scales = pool.layer(1)
    assert (rows.shape, scales.shape) == ((60, 1, 8, DIM), (60, 1, 8, 1))
    assert (rows.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    start = pool.base_address + 7 * pool.page_bytes + layout.layer_bytes
    assert rows[7, 0, 3].data_ptr() == start + 3 * DIM
    assert scales[7, 0, 3].data_ptr() == start + layout.plane_offset(1) + 3 * 4 == start + 8 * DIM + 12


@pytest.mark.parametrize(("source_size", "target_size"), [(16, 16), (16, 4), (4, 16), (8, 7), (1, 16), (5, 1)])
@pytest.mark.parametrize("span", [(0, TOKENS), (13, TOKENS), (16, 33)])
def test_rows_and_scales_are_copied_between_page_sizes(
    source_size: int, target_size: int, span: tuple[int, int]
) -> None:
    """Copies of a transfer, by page and by token: checksums of both sides are equal, other tokens do not change."""
    source, start, end = scaled_pool(source_size), *span
    pages = pages_of(source, 1)
    for by_token in (False, True):
        target = scaled_pool(target_size)
        target_pages = pages_of(target, 2)
        before = [rows_of(target, target_pages, token) for token in range(TOKENS)]
        own_pages = pages[start // source_size :]
        if by_token:
            places = [target_pages[at // target_size] * target_size + at % target_size for at in range(start, end)]
            runs = expand_token_runs(layout_of(source), layout_of(target), own_pages, places, start, end)
        else:
            places = target_pages[start // target_size :]
            runs = expand_runs(layout_of(source), layout_of(target), own_pages, places, start, end)
        flat_source, flat_target = source.data.flatten(), target.data.view(-1)
        for from_offset, to_offset, length in zip(runs.source, runs.destination, runs.length, strict=True):
            flat_target[to_offset : to_offset + length] = flat_source[from_offset : from_offset + length]
        for token in range(start, end):
            assert rows_of(target, target_pages, token) == rows_of(source, pages, token)
        sums = [
            block_sum(pool.read_tokens(ids, start, end), layout_of(pool))
            for pool, ids in ((source, pages), (target, target_pages))
        ]
        assert sums[0] == sums[1]
        # with equal page sizes a last page that is partly filled is copied whole
        after = end if source_size != target_size or by_token else -(-end // target_size) * target_size
        for token in [*range(start), *range(after, TOKENS)]:
            assert rows_of(target, target_pages, token) == before[token]
        scales = target.layer(2)[1].view(torch.int32)
        last = end - 1
        scales[target_pages[last // target_size], 0, last % target_size, 0] ^= 1
        assert block_sum(target.read_tokens(target_pages, start, end), layout_of(target)) != sums[0]


def test_whole_page_is_one_copy() -> None:
    source, target = scaled_pool(16), scaled_pool(16)
    runs = expand_runs(layout_of(source), layout_of(target), [3, 9], [5, 1], 0, 32)
    assert runs.length.tolist() == [source.page_bytes] * 2


@pytest.mark.parametrize("stored_pages", [0, 8])
def test_saved_pages_are_restored(stored_pages: int) -> None:
    """With room in the store, and without: then memory is allocated for them."""
    pool = scaled_pool(4)
    store = PageStore(KvCache(pool), stored_pages)
    saved = pool.data[[7, 8, 2]].clone()
    store.save("r", [7, 8, 2])
    pool.data.zero_()
    store.load("r", [30, 4, 11, 5])
    assert pool.data[[30, 4, 11]].equal(saved)
    assert not pool.data[5].any()
    pool.copy_page(4, 5)
    assert pool.data[5].equal(saved[1])
