"""paged_attention against a float64 loop over single queries, for ragged batches over scattered pages."""

import random

import pytest
import torch

from pdserve.kernels.attention.gather_plan import GatherPlan
from pdserve.kernels.attention.paged_attention import paged_attention, plan_attention
from pdserve.kernels.backends.dispatch import Impl
from tests.kernels.numba_kernels import needs_numba
from tests.kernels.places import PLACES, each_of
from tests.kernels.poison import poisoned

CPU = torch.device("cpu")

everywhere = each_of(*PLACES, ("numba", "cpu"), ("triton", "cpu"))

# (query_len, kv_len) of each sequence
BATCHES = {
    "one decode": [(1, 1)],
    "decode alike": [(1, 17), (1, 17), (1, 17)],
    "decode ragged": [(1, 5), (1, 64), (1, 33), (1, 1), (1, 16), (1, 40)],
    "whole prompts": [(7, 7), (32, 32), (2, 2)],
    "later chunks": [(5, 30), (16, 48), (2, 3)],
    "mixed": [(1, 50), (9, 9), (1, 3), (4, 20), (1, 49), (1, 2)],
}


# several pieces and tiles, and both in one batch
LONG_BATCHES = {
    "decode in pieces": [(1, 4097)],
    "decode in pieces, ragged": [(1, 3000), (1, 1), (1, 640), (1, 64)],
    "several tiles": [(300, 300)],
    "several tiles of later chunks": [(200, 777), (129, 1000), (128, 256)],
    "everything": [(1, 2000), (257, 300), (1, 65), (2, 900), (130, 130)],
    "many tiles": [(3000, 3000), (64, 64), (65, 4161), (1000, 2001), (2, 2), (129, 129)],
}


def pools(
    pages: int, kv_heads: int, page_size: int, dim: int, dtype: torch.dtype, device: torch.device = CPU
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value views of the middle layer of a page-major pool full of NaN: invisible rows must not be read."""
    data = torch.full((pages, 3, 2, kv_heads, page_size, dim), torch.nan, dtype=dtype, device=device)
    return data[:, 1, 0], data[:, 1, 1]


def exact(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [L, Hq, D], key and value [T, Hkv, D], one query head at a time in float64."""
    length, heads, _ = query.shape
    group = heads // key.shape[1]
    position = torch.arange(len(key) - length, len(key), device=query.device)
    distance = position.unsqueeze(1) - torch.arange(len(key), device=query.device)
    hidden = (distance < 0) | (distance >= (window or len(key)))
    out = torch.empty_like(query, dtype=torch.float64)
    for head in range(heads):
        scores = query[:, head].double() @ key[:, head // group].double().T * scale
        weights = scores.masked_fill(hidden, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True) + (0.0 if sinks is None else sinks[head].double().exp())
        out[:, head] = weights / total @ value[:, head // group].double()
    return out


def check(
    lengths: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    dtype: torch.dtype,
    where: tuple[Impl, torch.device],
    window: int | None = None,
    with_sinks: bool = False,
) -> None:
    """Run (query_len, kv_len) sequences on scattered pages and compare with `exact`; pages before a window hold NaN."""
    impl, device = where
    scale = dim**-0.5
    generator = torch.Generator().manual_seed(7)
    sinks = 3 * torch.randn(heads, generator=generator).to(device) if with_sinks else None
    num_pages = sum(-(-kv_len // page_size) for _, kv_len in lengths) + 1
    free = random.Random(8).sample(range(num_pages), num_pages)
    unused = free.pop()
    key_pages, value_pages = pools(num_pages, kv_heads, page_size, dim, dtype, device)
    queries, tables, expected = [], [], []
    for query_len, kv_len in lengths:
        query = torch.randn(query_len, heads, dim, generator=generator).to(device, dtype)
        key, value = torch.randn(2, kv_len, kv_heads, dim, generator=generator).to(device, dtype)
        pages = [free.pop() for _ in range(-(-kv_len // page_size))]
        first = max(0, kv_len - query_len - (window or kv_len) + 1) // page_size * page_size
        slots = torch.arange(first, kv_len, device=device)
        page_ids = torch.tensor(pages, device=device)[slots // page_size]
        key_pages[page_ids, :, slots % page_size] = key[first:]
        value_pages[page_ids, :, slots % page_size] = value[first:]
        queries.append(query)
        tables.append([*pages, unused])  # a page reserved for growth, never read
        expected.append(exact(query, key, value, scale, window, sinks))
    plan = plan_attention(
        [query_len for query_len, _ in lengths],
        [kv_len for _, kv_len in lengths],
        tables,
        page_size=page_size,
        num_kv_heads=kv_heads,
        device=device,
        window=window,
        impl=impl,
    )
    with poisoned(impl):
        out = paged_attention(torch.cat(queries), key_pages, value_pages, plan, scale=scale, sinks=sinks)
    assert out.dtype == dtype
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(out.double(), torch.cat(expected), rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("batch", BATCHES)
def test_equals_float64(
    batch: str, heads: int, kv_heads: int, dtype: torch.dtype, anywhere: tuple[Impl, torch.device]
) -> None:
    check(BATCHES[batch], heads=heads, kv_heads=kv_heads, dim=16, page_size=8, dtype=dtype, where=anywhere)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size", "dtype"),
    [
        (8, 2, 128, 16, torch.bfloat16),
        (4, 4, 128, 64, torch.float16),
        (4, 1, 64, 32, torch.bfloat16),
        (6, 3, 24, 5, torch.float32),
        (2, 1, 128, 16, torch.float32),
        (2, 1, 256, 1, torch.bfloat16),
        (20, 1, 80, 128, torch.float16),
    ],
)
@pytest.mark.parametrize("batch", LONG_BATCHES)
@pytest.mark.parametrize("impl", ["triton", "auto"])
@pytest.mark.gpu
def test_long_sequences_equal_float64(
    batch: str, heads: int, kv_heads: int, dim: int, page_size: int, dtype: torch.dtype, impl: Impl
) -> None:
    """`auto` uses the CUDA kernel for heads of 128 16-bit elements on Hopper."""
    where = (impl, torch.device("cuda"))
    check(LONG_BATCHES[batch], heads=heads, kv_heads=kv_heads, dim=dim, page_size=page_size, dtype=dtype, where=where)


@pytest.mark.parametrize(("window", "with_sinks"), [(1, False), (8, False), (20, True), (None, True)])
def test_windows_and_sinks_equal_float64(
    window: int | None, with_sinks: bool, everywhere: tuple[Impl, torch.device]
) -> None:
    check(
        [(1, 50), (9, 9), (1, 3), (30, 60), (1, 49), (8, 150), (1, 50)],
        heads=4,
        kv_heads=2,
        dim=16,
        page_size=8,
        dtype=torch.float32,
        where=everywhere,
        window=window,
        with_sinks=with_sinks,
    )


@pytest.mark.parametrize("window", [100, 300])
def test_window_over_several_blocks_equals_float64(window: int, everywhere: tuple[Impl, torch.device]) -> None:
    """Blocks before the window, at its start, inside it and on the diagonal."""
    check([(200, 700)], heads=2, kv_heads=1, dim=16, page_size=16, dtype=torch.float32, where=everywhere, window=window)


@pytest.mark.parametrize("batch", LONG_BATCHES)
@pytest.mark.parametrize(("dim", "page_size", "window"), [(128, 16, 512), (64, 32, 128), (256, 64, 1000)])
@pytest.mark.gpu
def test_window_of_long_sequences_equals_float64(batch: str, dim: int, page_size: int, window: int) -> None:
    check(
        LONG_BATCHES[batch],
        heads=8,
        kv_heads=2,
        dim=dim,
        page_size=page_size,
        dtype=torch.bfloat16,
        where=("auto", torch.device("cuda")),
        window=window,
    )


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")  # rows after the last query
@pytest.mark.parametrize(("window", "with_sinks"), [(None, False), (300, False), (300, True)])
@pytest.mark.parametrize("dim", [16, 128])
def test_divided_tiles_equal_float64(
    dim: int,
    window: int | None,
    with_sinks: bool,
    everywhere: tuple[Impl, torch.device],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every part is one block of keys. Early queries of a tile do not see the keys of the last part."""
    monkeypatch.setattr("pdserve.kernels.attention.attention_plan.LEAST_PART_BLOCKS", 1)
    lengths = [(5, 700)] if dim == 128 else [(5, 700), (1, 9), (100, 260)]
    dtype = torch.float16 if everywhere[1].type == "cuda" else torch.float32
    check(
        lengths,
        heads=4,
        kv_heads=2,
        dim=dim,
        page_size=16,
        dtype=dtype,
        where=everywhere,
        window=window,
        with_sinks=with_sinks,
    )


@needs_numba
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size"), [(9, 3, 64, 16), (6, 3, 24, 5), (2, 1, 128, 16), (20, 1, 80, 128)]
)
def test_long_sequences_on_the_cpu_equal_float64(heads: int, kv_heads: int, dim: int, page_size: int) -> None:
    lengths = [(1, 1000), (1, 1), (1, 640), (1, 64), (2, 3)]
    check(
        lengths,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        page_size=page_size,
        dtype=torch.float32,
        where=("numba", torch.device("cpu")),
    )


@needs_numba
def test_numba_accepts_any_equal_strides() -> None:
    """A layer of a page-major pool, and pages in token-major order."""
    torch.manual_seed(0)
    pool = torch.randn(7, 3, 2, 2, 4, 8)
    plan = plan_attention(
        [1, 1], [9, 5], [[6, 0, 3], [2, 5]], page_size=4, num_kv_heads=2, device=torch.device("cpu"), impl="numba"
    )
    query = torch.randn(2, 4, 8)
    key_pages, value_pages = pool[:, 1, 0], pool[:, 1, 1]
    expected = paged_attention(query, key_pages, value_pages, plan, scale=0.3)
    keys, values = (pages.transpose(1, 2).contiguous().transpose(1, 2) for pages in (key_pages, value_pages))
    assert paged_attention(query, keys, values, plan, scale=0.3).equal(expected)
    with pytest.raises(ValueError, match="contiguous rows"):
        paged_attention(query, key_pages, value_pages.clone(), plan, scale=0.3)


@pytest.mark.gpu
def test_attention_handles_offsets_beyond_31_bits() -> None:
    """The last pages of a pool of more than 2^31 elements."""
    page_size, kv_heads, dim = 16, 8, 128
    num_pages = (1 << 31) // (2 * kv_heads * page_size * dim) + 64
    data = torch.zeros(num_pages, 1, 2, kv_heads, page_size, dim, dtype=torch.bfloat16, device="cuda")
    pages = list(range(num_pages - 8, num_pages))
    data[num_pages - 8 :] = torch.randn_like(data[num_pages - 8 :])
    query = torch.randn(101, 16, dim, dtype=torch.bfloat16, device="cuda")
    results = []
    for impl in ("reference", "triton"):
        plan = plan_attention(
            [1, 100],
            [128, 128],
            [pages, pages],
            page_size=page_size,
            num_kv_heads=kv_heads,
            device=query.device,
            impl=impl,
        )
        results.append(paged_attention(query, data[:, 0, 0], data[:, 0, 1], plan, scale=dim**-0.5))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=2e-2)


def test_short_sequences_are_not_padded_to_a_long_one() -> None:
    """31 short sequences beside one of 512 pages: at most twice the pages in use are gathered."""
    kv_lens = [8192] + [16 * (1 + index % 4) for index in range(31)]
    pages = [list(range(-(-kv_len // 16))) for kv_len in kv_lens]
    plan = plan_attention([1] * 32, kv_lens, pages, page_size=16, num_kv_heads=1, device=CPU)
    assert isinstance(plan, GatherPlan)
    gathered = sum(group.table.pages.numel() for group in plan.decode)
    assert gathered <= 2 * sum(len(ids) for ids in pages)
    rows = torch.cat([group.rows for group in plan.decode if group.rows is not None])
    assert sorted(rows.tolist()) == list(range(32))


def test_similar_decode_lengths_are_one_group() -> None:
    plan = plan_attention([1] * 4, [33, 40, 64, 50], [[0, 1, 2, 3]] * 4, page_size=16, num_kv_heads=1, device=CPU)
    assert isinstance(plan, GatherPlan)
    assert len(plan.decode) == 1


@pytest.mark.parametrize(("query_len", "kv_len", "pages"), [(0, 1, [0]), (3, 2, [0]), (1, 17, [0]), (1, 1, [])])
def test_sequences_that_do_not_fit_their_pages_are_refused(query_len: int, kv_len: int, pages: list[int]) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        plan_attention([query_len], [kv_len], [pages], page_size=16, num_kv_heads=1, device=CPU)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, 4, 16), torch.float32, "does not fit"),
        ((1, 3, 16), torch.float32, "does not fit"),
        ((1, 4, 8), torch.float32, "does not fit"),
        ((1, 4, 16), torch.float16, "query is"),
    ],
)
def test_wrong_queries_are_refused(shape: tuple[int, ...], dtype: torch.dtype, message: str) -> None:
    key_pages, value_pages = pools(2, 2, 8, 16, torch.float32)
    plan = plan_attention([1], [3], [[0]], page_size=8, num_kv_heads=2, device=CPU)
    with pytest.raises(ValueError, match=message):
        paged_attention(torch.zeros(shape, dtype=dtype), key_pages, value_pages, plan, scale=1.0)


@pytest.mark.parametrize("layout", ["page-major pool", "two tensors", "token-major"])
def test_gather_accepts_any_strides(layout: str) -> None:
    """Both planes of a page-major pool are gathered in one copy; separate keys and values give the same result."""
    torch.manual_seed(0)
    pool = torch.randn(7, 3, 2, 2, 4, 8)  # page, layer, plane, head, token, dim
    key_pages, value_pages = pool[:, 1, 0], pool[:, 1, 1]
    plan = plan_attention(
        [1, 1, 3],
        [9, 5, 7],
        [[6, 0, 3], [2, 5], [1, 4]],
        page_size=4,
        num_kv_heads=2,
        device=torch.device("cpu"),
        impl="reference",
    )
    query = torch.randn(5, 4, 8)
    expected = paged_attention(query, key_pages.clone(), value_pages.clone(), plan, scale=0.3)
    if layout == "two tensors":
        value_pages = value_pages.clone()
    elif layout == "token-major":
        key_pages, value_pages = (
            pages.transpose(1, 2).contiguous().transpose(1, 2) for pages in (key_pages, value_pages)
        )
    assert torch.equal(paged_attention(query, key_pages, value_pages, plan, scale=0.3), expected)
