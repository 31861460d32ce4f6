"""PageStore: `load` restores the pages that `save` stored, whatever is saved and dropped in between."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.common.errors import StartupError
from pdserve.memory import page_store
from pdserve.memory.kv_pool import KvCache, KvPool
from pdserve.memory.page_store import PageStore, copy_runs

CPU = torch.device("cpu")


def make_cache(device: torch.device = CPU, num_pages: int = 40) -> KvCache:
    """Two pools of different geometry that share page ids."""
    return KvCache(
        *(
            KvPool(
                num_pages=num_pages,
                num_layers=2,
                num_heads=1,
                page_size=4,
                head_dim=width,
                dtype=torch.float32,
                device=device,
                planes=(plane,),
            )
            for plane, width in (("latent", 24), ("indexer", 8))
        )
    )


def fill(cache: KvCache, page: int, value: float) -> None:
    for pool in cache.pools:
        pool.data[page] = value


def values(cache: KvCache, pages: list[int]) -> list[set[float]]:
    return [set(torch.cat([pool.data[page].flatten() for pool in cache.pools]).tolist()) for page in pages]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_random_saves_and_loads(device: str) -> None:
    numbers, cache = random.Random(3), make_cache(torch.device(device))
    store = PageStore(cache, 12)
    saved: dict[str, list[float]] = {}
    for step in range(200):
        if saved and numbers.random() < 0.5:
            name = numbers.choice(list(saved))
            expected = saved.pop(name)
            if numbers.random() < 0.3:
                store.drop(name)
                continue
            pages = numbers.sample(range(40), len(expected) + 1)
            fill(cache, pages[-1], -1.0)
            store.load(name, pages)
            assert values(cache, pages) == [*({value} for value in expected), {-1.0}]
        else:
            pages = numbers.sample(range(40), numbers.randrange(1, 6))
            if numbers.random() < 0.5:  # adjacent pages are copied together
                pages = list(range(pages[0] % 30, pages[0] % 30 + len(pages)))
            for index, page in enumerate(pages):
                fill(cache, page, 100.0 * step + index)
            name = f"r{step}"
            store.save(name, pages)
            saved[name] = [100.0 * step + index for index in range(len(pages))]
            for page in pages:
                fill(cache, page, -2.0)
    for name in saved:
        store.drop(name)
    assert len(store._free) == 12
    store.close()


def test_pages_that_do_not_fit_are_saved_in_pageable_memory() -> None:
    cache = make_cache()
    store = PageStore(cache, 2)
    for page in range(5):
        fill(cache, page, float(page))
    store.save("long", [0, 1, 2])
    store.save("short", [3, 4])
    assert len(store._free) == 0
    store.load("long", [10, 11, 12])
    store.load("short", [13, 14])
    assert values(cache, [10, 11, 12, 13, 14]) == [{0.0}, {1.0}, {2.0}, {3.0}, {4.0}]


def test_store_without_page_locked_memory_still_saves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise StartupError("the locked-memory limit is 64 KiB")

    cache = make_cache()
    assert len(PageStore.allocate(cache, 10 * sum(pool.page_bytes for pool in cache.pools))._free) == 10
    assert len(PageStore.allocate(cache, 1 << 40)._free) == cache.num_pages
    monkeypatch.setattr(page_store, "_host_pool", refuse)
    assert len(PageStore.allocate(cache, 1 << 20)._free) == 0
    assert "not page-locked: the locked-memory limit is 64 KiB" in caplog.text


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=40),
    st.integers(1, 8),
)
def test_copy_runs_cover_every_pair_once_and_stay_within_chunks(pairs: list[tuple[int, int]], chunk: int) -> None:
    found = list(copy_runs([pair[0] for pair in pairs], [pair[1] for pair in pairs], chunk))
    named = [(first + at, second + at) for first, second, length in found for at in range(length)]
    assert named == pairs
    for _, second, length in found:
        assert second // chunk == (second + length - 1) // chunk


def test_adjacent_pages_are_one_copy_run() -> None:
    assert list(copy_runs([5, 6, 7, 9], [0, 1, 2, 3], 100)) == [(5, 0, 3), (9, 3, 1)]
    assert list(copy_runs([5, 6, 7], [0, 1, 2], 2)) == [(5, 0, 2), (7, 2, 1)]
    assert list(copy_runs([], [], 4)) == []
