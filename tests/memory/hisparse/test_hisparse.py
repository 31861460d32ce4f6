"""HiSparseCache: invalid sizes, opening of hot buffers, copies of rows, integrity checks."""

from collections.abc import Callable, Iterable

import pytest
import torch

from pdserve.common.errors import StartupError
from pdserve.memory import pinned
from pdserve.memory.hisparse.cache import HiSparseCache, HiSparseError
from pdserve.memory.hisparse.shared_pool import PoolOverlay
from pdserve.memory.index_spaces import HotPage, KvPage, RequestSlot
from pdserve.memory.kv_pool import KvPool, zeroed
from pdserve.memory.pinned import PinnedMemory
from tests.memory.hisparse.hot_buffer import open_loaded

PAGE_SIZE, LAYERS, ROW_SIZE, KEY_SIZE = 4, 3, 6, 4


def pool(
    num_pages: int,
    plane: str = "latent",
    *,
    pinned: bool = False,
    device: str = "cpu",
    memory: torch.Tensor | None = None,
) -> KvPool:
    return KvPool(
        num_pages=num_pages,
        num_layers=LAYERS,
        num_heads=1,
        page_size=PAGE_SIZE,
        head_dim=ROW_SIZE if plane == "latent" else KEY_SIZE,
        dtype=torch.float32,
        device=torch.device(device),
        planes=(plane,),
        pinned=pinned,
        memory=memory,
    )


def make_cache(
    *, hot_pages: int = 20, hot_rows: int = 8, top_k: int = 4, slots: int = 3, max_context: int = 64
) -> HiSparseCache:
    return HiSparseCache(
        pool(30, pinned=True),
        pool(30, "indexer"),
        pool(hot_pages),
        slots=slots,
        hot_rows=hot_rows,
        max_context=max_context,
        top_k=top_k,
        groups=[0, 0, 1],
    )


def make_shared_cache(own_pages: int, device: str = "cpu") -> HiSparseCache:
    """31 pages of keys, which overlap 20 2/3 hot pages: ten units of two, and a rest. All bytes are NaN."""
    memory = zeroed((21 + own_pages) * 4 * LAYERS * PAGE_SIZE * ROW_SIZE, torch.device(device))
    memory.fill_(255)
    return HiSparseCache(
        pool(31, pinned=True),
        pool(31, "indexer", device=device, memory=memory),
        pool(21 + own_pages, device=device, memory=memory),
        slots=3,
        hot_rows=8,
        max_context=64,
        top_k=4,
        groups=[0, 0, 1],
    )


def open_buffer(
    cache: HiSparseCache, slot: int, hot_pages: Iterable[int], pages: Iterable[int], *, tokens: int, capacity: int
) -> None:
    hot, held = [HotPage(page) for page in hot_pages], [KvPage(page) for page in pages]
    open_loaded(cache, RequestSlot(slot), hot, held, tokens, capacity)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"hot_rows": 10}, "hot_rows = 10 must be a multiple of page_size = 4"),
        (
            {"hot_pages": 2},
            "the hot pool has 2 pages of 4 rows: one buffer of hot_rows = 8 and the newest token takes 3",
        ),
        ({"top_k": 9}, r"HiSparse cannot run with these sizes: top_k must be in \[1, 8\], got 9"),
        ({"hot_rows": 32768, "hot_pages": 8193}, r"hot_rows must be in \[1, 32767\], got 32768"),
        ({"slots": 0}, "requests must be in .*, got 0"),
    ],
)
def test_incompatible_sizes_are_refused(sizes: dict[str, int], sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence):
        make_cache(**sizes)


def test_smallest_valid_cache_is_accepted() -> None:
    make_cache(hot_pages=3, top_k=8, slots=1)


@pytest.mark.parametrize("tokens", [0, 1, 4, 11, 24])
@pytest.mark.parametrize("pages", [[3, 4, 5, 9, 8, 7], [29, 0, 1, 2, 20, 21]])
@pytest.mark.parametrize("hot_pages", [[10, 11, 12, 0, 1, 2], [5, 9, 2, 19, 18, 17]])
def test_fully_resident_request_starts_with_its_rows(tokens: int, pages: list[int], hot_pages: list[int]) -> None:
    cache = make_cache()
    cache.host.data.copy_(torch.rand(cache.host.data.shape))
    cache.hot.data.fill_(torch.nan)
    open_buffer(cache, 2, hot_pages, pages, tokens=tokens, capacity=24)
    for position in range(tokens):
        index, offset = divmod(position, PAGE_SIZE)
        expected = cache.host.data[pages[index], :, :, :, offset]
        assert cache.hot.data[hot_pages[index], :, :, :, offset].equal(expected)
    touched = (~cache.hot.data.isnan()).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert touched == sorted(hot_pages[: -(-tokens // PAGE_SIZE)])
    assert cache.tables.capacity.tolist() == [8, 8, 24]
    cache.check_integrity()


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 8), (4, 11), (6, 11), (8, 24)])
@pytest.mark.parametrize("pages", [[3, 4, 5, 9, 8, 7], [29, 0, 1, 2, 20, 21]])
def test_received_rows_are_copied_to_host_memory_up_to_their_end(start: int, end: int, pages: list[int]) -> None:
    """From the start of the page, but not after `end`: a step may write the next rows at the same time."""
    cache, hot_pages = make_cache(), [10, 11, 12, 0, 1, 2]
    cache.hot.data.copy_(torch.rand(cache.hot.data.shape))
    cache.host.data.fill_(torch.nan)
    cache.write_back_rows([HotPage(page) for page in hot_pages], [KvPage(page) for page in pages], start, end)
    first = start // PAGE_SIZE * PAGE_SIZE
    for position in range(first, end):
        index, offset = divmod(position, PAGE_SIZE)
        expected = cache.hot.data[hot_pages[index], :, :, :, offset]
        assert cache.host.data[pages[index], :, :, :, offset].equal(expected)
    assert int((~cache.host.data.isnan()).sum()) == (end - first) * LAYERS * ROW_SIZE, "no other row is written"


def test_exact_copy_of_a_prefix_leaves_the_rest_of_its_last_page() -> None:
    """Prefill may write the rest of that page at the same time."""
    cache = make_cache()
    cache.host.data.copy_(torch.rand(cache.host.data.shape))
    cache.hot.data.fill_(torch.nan)
    cache.load_rows([HotPage(7), HotPage(2)], [KvPage(3), KvPage(9)], 6, exact=True)
    assert cache.hot.data[7].equal(cache.host.data[3])
    assert cache.hot.data[2, :, :, :, :2].equal(cache.host.data[9, :, :, :, :2])
    assert bool(cache.hot.data[2, :, :, :, 2:].isnan().all())


def test_evicting_request_starts_with_an_empty_buffer() -> None:
    cache = make_cache()
    cache.hot.data.fill_(torch.nan)
    open_buffer(cache, 1, [4, 5, 6], range(10), tokens=40, capacity=8)
    assert cache.hot.data.isnan().all()
    assert (cache.tables.token_slots[:, 1] == -1).all()
    open_buffer(cache, 1, [4, 5, 6], range(10), tokens=8, capacity=8)
    assert cache.tables.token_slots[1, 1, :9].tolist() == [*range(8), -1]


def test_buffer_with_too_few_or_invalid_pages_is_refused() -> None:
    cache = make_cache()
    with pytest.raises(AssertionError, match="2 hot pages of 4 rows do not hold 9"):
        open_buffer(cache, 0, [1, 2], range(10), tokens=40, capacity=8)
    with pytest.raises(AssertionError, match="2 hot pages of 4 rows do not hold 10"):
        open_buffer(cache, 0, [1, 2], range(10), tokens=9, capacity=12)
    with pytest.raises(AssertionError, match=r"hot pages are \[1, 2, 20\]"):
        open_buffer(cache, 0, [1, 2, 20], range(10), tokens=9, capacity=12)


def test_keys_and_hot_rows_share_one_allocation() -> None:
    cache = make_shared_cache(own_pages=9)
    _, keys = cache.pools
    assert cache.own_hot_pages == range(21, 30)
    assert keys.base_address == cache.hot.base_address
    assert cache.device_bytes == cache.hot.size_bytes + cache.tables.size_bytes
    assert keys.size_bytes < 21 * cache.hot.page_bytes
    with pytest.raises(StartupError, match="the hot pool has 2 pages of 4 rows: one buffer"):
        make_shared_cache(own_pages=2)


def test_unit_serves_as_keys_or_hot_rows_without_changing_others() -> None:
    """One unit serves as hot pages, as pages of keys and as hot pages again; the units around it do not change."""
    cache = make_shared_cache(own_pages=9)
    cache.host.data.copy_(torch.rand(cache.host.data.shape))
    _, keys = cache.pools
    overlay = PoolOverlay.of(keys.num_pages, kv_page_bytes=keys.page_bytes, hot_page_bytes=cache.hot.page_bytes)
    assert (overlay.kv_pages, overlay.hot_pages, overlay.count, overlay.covered) == (3, 2, 10, 21)
    pages = [KvPage(page) for page in (12, 13, 14)]
    borrowed = overlay.hot_pages_under(pages)
    around = [page for page in range(keys.num_pages) if page not in pages]
    own = cache.own_hot_pages
    for number in range(3):
        before = keys.data[around].clone(), cache.hot.data[own.start + 3 :].clone()
        open_buffer(cache, 0, [*own[:3], *borrowed], range(5), tokens=20, capacity=20)
        assert cache.hot.data[borrowed].equal(cache.host.data[3:5])
        cache.resize(RequestSlot(0), [HotPage(page) for page in own[:3]], 8)
        arrived = torch.rand(keys.data[pages].shape)
        keys.load(arrived, pages)
        assert keys.data[pages].equal(arrived)
        assert not cache.hot.data[borrowed].equal(cache.host.data[3:5])
        for was, now in zip(before, (keys.data[around], cache.hot.data[own.start + 3 :]), strict=True):
            assert was.view(torch.uint8).equal(now.view(torch.uint8)), f"round {number}"
    cache.check_integrity()


def repeat_slot(cache: HiSparseCache) -> None:
    cache.tables.eviction_order[1, 2, 0] = 3


def fill_slot_of_next_token(cache: HiSparseCache) -> None:
    cache.tables.slot_tokens[0, 2, 8], cache.tables.token_slots[0, 2, 30] = 30, 8


def hold_token_twice(cache: HiSparseCache) -> None:
    cache.tables.slot_tokens[1, 2, 5] = 6


def keep_entry_of_evicted_token(cache: HiSparseCache) -> None:
    cache.tables.token_slots[0, 2, 40] = 1


@pytest.mark.parametrize(
    ("break_it", "problem"),
    [
        (repeat_slot, "index group 1, request slot 2: the eviction order does not list every slot once"),
        (fill_slot_of_next_token, "index group 0, request slot 2: the slot kept for the next token holds another"),
        (hold_token_twice, "index group 1, request slot 2: a token is in two slots"),
        (keep_entry_of_evicted_token, "index group 0, request slot 2: a token has an entry but is in no slot"),
    ],
)
def test_broken_tables_are_detected(break_it: Callable[[HiSparseCache], None], problem: str) -> None:
    cache = make_cache()
    open_buffer(cache, 2, [1, 2, 3], range(10), tokens=8, capacity=8)
    cache.check_integrity()
    break_it(cache)
    with pytest.raises(HiSparseError, match=problem):
        cache.check_integrity()


def test_missing_host_memory_is_refused_with_sizes_in_gib() -> None:
    with pytest.raises(StartupError, match=r"asks for 1048576\.00 GiB, \d+\.\d\d GiB are available"):
        PinnedMemory(1 << 50)


def test_pinned_memory_is_zeroed_and_outlives_its_pinning() -> None:
    memory = PinnedMemory(3 << 20)
    assert memory.data.shape == (3 << 20,)
    assert not memory.data.any()
    memory.data[5] = 7
    memory.close()
    memory.close()
    assert memory.data[5] == 7


def test_chunks_are_whole_units_and_whole_memory_pages() -> None:
    assert PinnedMemory(100, unit_bytes=96).chunk_bytes % 96 == 0
    assert PinnedMemory(100, unit_bytes=96).chunk_bytes % 4096 == 0
    assert PinnedMemory(100, unit_bytes=96).chunk_bytes <= pinned.CHUNK_BYTES
    assert PinnedMemory(100, unit_bytes=(5 << 30) + 4096).chunk_bytes == (5 << 30) + 4096
    assert pool(30, pinned=True).pages_per_chunk * 4 * LAYERS * ROW_SIZE * PAGE_SIZE <= pinned.CHUNK_BYTES
    assert pool(30).pages_per_chunk == 30


@pytest.mark.gpu
def test_gpu_copies_pages_of_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy run crosses several chunks of 128 pages, of 288 bytes each, which are registered separately."""
    monkeypatch.setattr(pinned, "CHUNK_BYTES", 4096)
    cuda = torch.device("cuda", 0)
    host, indexer, hot = pool(600, pinned=True), pool(600, "indexer", device="cuda"), pool(600, device="cuda")
    assert host.pages_per_chunk == 128
    assert host.data.is_pinned()
    assert host.data[-1].is_pinned()
    cache = HiSparseCache(host, indexer, hot, slots=1, hot_rows=8, max_context=2400, top_k=4, groups=[0, 0, 1])
    host.data.copy_(torch.rand(host.data.shape))
    open_buffer(cache, 0, range(600), range(600), tokens=2400, capacity=2400)
    torch.cuda.synchronize(cuda)
    assert hot.data.cpu().equal(host.data)
    host.data.zero_()
    numbers = range(600)
    cache.write_back_rows([HotPage(page) for page in numbers], [KvPage(page) for page in numbers], 0, 2399)
    torch.cuda.synchronize(cuda)
    copied = hot.data.cpu()
    copied[-1, :, :, :, -1] = 0
    assert host.data.equal(copied)
    cache.close()
    assert not host.data.is_pinned()
