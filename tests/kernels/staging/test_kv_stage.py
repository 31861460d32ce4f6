"""kv_gather and kv_scatter, bitwise against a loop over tokens; everything else stays unchanged."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl
from pdserve.kernels.staging.kv_stage import block_bytes, kv_gather, kv_scatter, warm_up_kv_stage
from tests.kernels.places import each_of

Where = tuple[Impl, torch.device]

where = each_of(
    ("auto", "cpu"),
    ("triton", "cpu"),
    ("reference", "cuda"),
    ("triton", "cuda"),
)


def noise(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def rows_of(
    pool: torch.Tensor, pages: list[int], start: int, end: int, layers: range, heads: range
) -> Iterator[tuple[tuple[int, int, int, int, int], tuple[int, int, int, int]]]:
    """The location of each row in the pool and in the block, one at a time."""
    for l_index, layer in enumerate(layers):
        for plane in range(pool.shape[2]):
            for h_index, head in enumerate(heads):
                for token in range(start, end):
                    page, slot = pages[token // pool.shape[4]], token % pool.shape[4]
                    yield (page, layer, plane, head, slot), (l_index, plane, h_index, token - start)


CASES = [
    # planes, heads, page size, row bytes, start, end, layers, head slice
    pytest.param(2, 4, 4, 32, 0, 12, range(3), range(4), id="everything"),
    pytest.param(2, 4, 16, 256, 5, 43, range(1, 3), range(1, 3), id="middle-of-pages"),
    pytest.param(2, 8, 1, 64, 2, 9, range(3), range(6, 8), id="pages-of-one-token"),
    pytest.param(2, 3, 7, 48, 6, 30, range(1), range(2, 3), id="odd-page"),
    pytest.param(2, 2, 4, 40, 3, 11, range(3), range(2), id="rows-of-8-byte-words"),
    pytest.param(2, 2, 4, 12, 3, 11, range(3), range(2), id="rows-of-4-byte-words"),
    pytest.param(2, 2, 4, 6, 3, 11, range(3), range(2), id="rows-of-2-byte-words"),
    pytest.param(2, 2, 3, 7, 2, 8, range(3), range(2), id="rows-of-bytes"),
    pytest.param(1, 1, 4, 1152, 1, 10, range(2), range(1), id="one-latent-plane"),
    pytest.param(2, 2, 4, 32, 4, 5, range(2), range(1), id="one-token"),
    pytest.param(2, 2, 64, 128, 3, 150, range(2), range(2), id="large-pages"),
]


@pytest.mark.parametrize(("planes", "num_heads", "size", "row", "start", "end", "layers", "heads"), CASES)
def test_gather_and_scatter_move_exactly_these_rows(
    planes: int, num_heads: int, size: int, row: int, start: int, end: int, layers: range, heads: range, where: Where
) -> None:
    impl, device = where
    needed = -(-end // size)
    pool = noise((needed + 3, 3, planes, num_heads, size, row), seed=row)
    pages = torch.randperm(needed + 3, generator=torch.Generator().manual_seed(size))[:needed]
    length = block_bytes(pool, tokens=end - start, layers=len(layers), heads=len(heads))
    expected = np.zeros((len(layers), planes, len(heads), end - start, row), dtype=np.uint8)
    for in_pool, in_block in rows_of(pool, pages.tolist(), start, end, layers, heads):
        expected[in_block] = pool[in_pool].numpy()
    ring = noise((length + 32,), seed=2).to(device)  # the block lies inside a larger buffer
    frame = ring.clone()
    kv_gather(
        pool.to(device),
        pages.to(device, torch.int32),
        ring[16 : 16 + length],
        start=start,
        end=end,
        layers=layers,
        heads=heads,
        impl=impl,
    )
    assert (ring[16 : 16 + length].cpu().numpy() == expected.ravel()).all()
    assert ring[:16].equal(frame[:16])
    assert ring[-16:].equal(frame[-16:])

    block = noise((length,), seed=3)
    target = pool.to(device, copy=True)
    kv_scatter(block.to(device), target, pages.to(device), start=start, end=end, layers=layers, heads=heads, impl=impl)
    rows = block.view(expected.shape)
    for in_pool, in_block in rows_of(pool, pages.tolist(), start, end, layers, heads):
        pool[in_pool] = rows[in_block]
    assert target.cpu().equal(pool)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize(("from_size", "to_size"), [(16, 16), (16, 5), (1, 64), (64, 16)])
def test_heads_of_four_ranks_are_merged_into_pages_of_one(
    dtype: torch.dtype, from_size: int, to_size: int, where: Where
) -> None:
    """Four pools of two heads each become one of eight, with other pages and page size: every bit, including NaNs."""
    impl, device = where
    layers, ranks, heads, dim, start, end = 2, 4, 2, 32, 7, 75
    whole = noise((layers, 2, ranks * heads, end, dim * dtype.itemsize), seed=1).view(dtype)
    target = torch.full((-(-end // to_size) + 2, layers, 2, ranks * heads, to_size, dim), 3.0).to(device, dtype)
    before = target.clone()
    to_pages = torch.randperm(len(target), generator=torch.Generator().manual_seed(5))[: -(-end // to_size)].to(device)
    for rank in range(ranks):
        count = -(-end // from_size)
        pool = torch.zeros((count + 2, layers, 2, heads, from_size, dim)).to(dtype)
        pages = torch.randperm(count + 2, generator=torch.Generator().manual_seed(rank))[:count]
        for token in range(end):
            pool[pages[token // from_size], :, :, :, token % from_size] = whole[
                :, :, rank * heads : (rank + 1) * heads, token
            ]
        block = torch.empty(
            block_bytes(pool, tokens=end - start, layers=layers, heads=heads), dtype=torch.uint8, device=device
        )
        everything, mine = range(layers), range(rank * heads, (rank + 1) * heads)
        kv_gather(
            pool.to(device),
            pages.to(device),
            block,
            start=start,
            end=end,
            layers=everything,
            heads=range(heads),
            impl=impl,
        )
        kv_scatter(block, target, to_pages, start=start, end=end, layers=everything, heads=mine, impl=impl)
    for token in range(start, end):
        found = target[to_pages[token // to_size], :, :, :, token % to_size]
        assert found.view(torch.uint8).cpu().equal(whole[:, :, :, token].contiguous().view(torch.uint8)), token
        before[to_pages[token // to_size], :, :, :, token % to_size] = found
    assert target.view(torch.uint8).equal(before.view(torch.uint8))


def test_strided_planes_and_unaligned_addresses_are_copied(where: Where) -> None:
    """Keys of 24 and values of 10 bytes in one pool: a view of each plane. The pool starts at an odd address."""
    impl, device = where
    pages, layers, heads, size, key, value = 5, 2, 3, 4, 24, 10
    layer = heads * size * (key + value)
    buffer = noise((1 + pages * layers * layer,), seed=9)
    views = []
    for flat in (buffer, buffer.to(device)):
        keys = flat.as_strided(
            (pages, layers, 1, heads, size, key), (layers * layer, layer, layer, size * key, key, 1), 1
        )
        values = flat.as_strided(
            (pages, layers, 1, heads, size, value),
            (layers * layer, layer, layer, size * value, value, 1),
            1 + heads * size * key,
        )
        views.append((keys, values))
    order = torch.tensor([3, 0, 4], device=device)
    for host, device_view in zip(*views, strict=True):
        block = torch.zeros(block_bytes(host, tokens=9, layers=2, heads=2), dtype=torch.uint8, device=device)
        kv_gather(device_view, order, block, start=2, end=11, layers=range(2), heads=range(1, 3), impl=impl)
        expected = torch.zeros(2, 1, 2, 9, host.shape[-1], dtype=torch.uint8)
        for in_pool, in_block in rows_of(host, [3, 0, 4], 2, 11, range(2), range(1, 3)):
            expected[in_block] = host[in_pool]
        assert block.cpu().equal(expected.view(-1))


def test_empty_range_copies_nothing(where: Where) -> None:
    impl, device = where
    pool = noise((2, 1, 2, 2, 4, 16), seed=1).to(device)
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    pages = torch.zeros(1, dtype=torch.int32, device=device)
    before = pool.clone()
    kv_gather(pool, pages, nothing, start=3, end=3, layers=range(1), heads=range(2), impl=impl)
    kv_scatter(nothing, pool, pages, start=3, end=3, layers=range(1), heads=range(2), impl=impl)
    assert pool.equal(before)


@pytest.mark.gpu
def test_warm_up_compiles_for_blocks_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the warm-up nothing is compiled, for any tokens, layers, heads and position in the ring."""
    triton = pytest.importorskip("triton")
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **made: compiled.append(made["repr"]))
    pool = noise((40, 3, 2, 4, 13, 208), seed=6).cuda()  # no other test has rows and pages like these
    before = pool.clone()
    warm_up_kv_stage(pool)
    assert pool.equal(before)
    assert len(compiled) == 2  # one to gather, one to scatter
    ring = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
    for number, (start, end) in enumerate([(0, 1), (3, 5), (12, 14), (0, 16), (7, 260), (5, 520)]):
        layers, heads = range(number % 2, 3), range(number % 3, number % 3 + 1 + number % 2)
        pages = torch.randperm(40, dtype=torch.int32)[: -(-end // 13)].cuda()
        size = block_bytes(pool, tokens=end - start, layers=len(layers), heads=len(heads))
        block = ring[number * 256 :][:size]
        kv_gather(pool, pages, block, start=start, end=end, layers=layers, heads=heads)
        kv_scatter(block, pool, pages, start=start, end=end, layers=layers, heads=heads)
    assert pool.equal(before)
    assert len(compiled) == 2


def test_warm_up_has_no_effect_on_a_cpu() -> None:
    warm_up_kv_stage(torch.empty(0, 1, 2, 1, 16, 64))  # a warm-up would need a page


@pytest.mark.gpu
def test_staging_handles_offsets_beyond_32_bits() -> None:
    """A pool of 6 GiB and a block of 4.5: byte, word and element offsets all leave 32 bits."""
    pool = torch.empty((12, 32, 2, 8, 8192, 128), dtype=torch.uint8, device="cuda")
    pool.random_(0, 256)
    pages = torch.tensor([11, 0, 10, 1, 9, 2, 8, 3, 7], device="cuda")
    end = 9 * 8192
    block = torch.empty(block_bytes(pool, tokens=end, layers=32, heads=8), dtype=torch.uint8, device="cuda")
    kv_gather(pool, pages, block, start=0, end=end, layers=range(32), heads=range(8))
    expected = pool[pages].permute(1, 2, 3, 0, 4, 5).flatten()
    assert block.equal(expected)
    target = torch.zeros_like(pool)
    kv_scatter(block, target, pages, start=0, end=end, layers=range(32), heads=range(8))
    assert target[pages].equal(pool[pages])
    assert not target[[4, 5, 6]].any()


@pytest.mark.parametrize(
    ("start", "end", "layers", "heads", "message"),
    [
        (0, 9, range(1), range(4), "not in"),
        (5, 4, range(1), range(4), "not in"),
        (0, 4, range(2, 4), range(4), "layers"),
        (0, 4, range(1), range(3, 5), "heads"),
        (0, 4, range(1), range(0, 4, 2), "heads"),
        (0, 5, range(1), range(4), "1280 bytes"),
    ],
)
def test_invalid_arguments_are_refused(start: int, end: int, layers: range, heads: range, message: str) -> None:
    pool = torch.zeros(2, 3, 2, 4, 4, 8)
    pages, block = torch.zeros(2, dtype=torch.int32), torch.zeros(1024, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        kv_gather(pool, pages, block, start=start, end=end, layers=layers, heads=heads)
    with pytest.raises(ValueError, match=message):
        kv_scatter(block, pool, pages, start=start, end=end, layers=layers, heads=heads)


def test_incompatible_tensors_are_refused() -> None:
    pool = torch.zeros(2, 3, 2, 4, 4, 8)
    pages, block = torch.zeros(2, dtype=torch.int32), torch.zeros(1024, dtype=torch.uint8)
    kv_gather(pool, pages, block, start=0, end=4, layers=range(1), heads=range(4))
    with pytest.raises(ValueError, match="six dimensions"):
        kv_gather(pool.transpose(4, 5), pages, block, start=0, end=4, layers=range(1), heads=range(4))
    with pytest.raises(ValueError, match="int32 or int64"):
        kv_gather(pool, pages.float(), block, start=0, end=4, layers=range(1), heads=range(4))
    with pytest.raises(ValueError, match="uint8 block"):
        kv_gather(pool, pages, block.view(torch.int8), start=0, end=4, layers=range(1), heads=range(4))
