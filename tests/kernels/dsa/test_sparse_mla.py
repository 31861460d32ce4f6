"""sparse_mla against a float64 loop over tokens and heads, with a pool that is NaN except in the selected rows."""

import math
from typing import Any

import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl
from pdserve.kernels.dsa.sparse_mla import SparseMlaImpl, sparse_mla
from pdserve.kernels.dsa.sparse_mla_cuda import num_shares
from tests.kernels.places import each_of
from tests.kernels.poison import poisoned

LAYERS, LAYER = 3, 1
Where = tuple[Impl, torch.device, torch.dtype]

# Triton 3.6's interpreter converts an array of one element for a loop whose bound it loaded
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

where = each_of(
    ("auto", "cpu", torch.float32),
    ("triton", "cpu", torch.float32),
    ("reference", "cuda", torch.bfloat16),
    ("triton", "cuda", torch.float32),
    ("triton", "cuda", torch.bfloat16),
)


def random_rows(tokens: int, k: int, num_rows: int, generator: torch.Generator) -> torch.Tensor:
    """Distinct rows for each token; later tokens have fewer and the last has none, with gaps in between."""
    rows = torch.stack([torch.randperm(num_rows, generator=generator)[:k] for _ in range(tokens)]).int()
    for token in range(tokens):
        rows[token, k - k * token // max(tokens - 1, 1) :] = -1
        rows[token, torch.randperm(k, generator=generator)[: k // 5]] = -1
    return rows


def exact(
    query: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor, *, scale: float, value_dim: int
) -> torch.Tensor:
    out = torch.zeros(*query.shape[:2], value_dim, dtype=torch.float64)
    query, pages, page_size = query.double().cpu(), pages.double().cpu(), pages.shape[1]
    for token, chosen in enumerate(rows.tolist()):
        cache = [pages[row // page_size, row % page_size] for row in chosen if row >= 0]
        if not cache:
            continue
        matrix = torch.stack(cache)
        for head, one in enumerate(query[token]):
            weights = ((matrix @ one) * scale).exp()
            out[token, head] = (weights / weights.sum()) @ matrix[:, :value_dim]
    return out


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "value_dim", "k"),
    [
        pytest.param(4, 4, 48, 32, 40, id="small"),
        pytest.param(1, 16, 48, 32, 150, id="one-token"),
        pytest.param(3, 20, 40, 24, 33, id="odd"),
        pytest.param(2, 3, 32, 32, 7, id="all-of-a-row-is-value"),
        pytest.param(12, 5, 24, 16, 50, id="many-tokens"),
        pytest.param(3, 128, 48, 32, 70, id="heads-in-several-tiles"),
    ],
)
def test_attention_over_selected_rows_equals_float64(
    tokens: int, heads: int, dim: int, value_dim: int, k: int, page_size: int, where: Where
) -> None:
    impl, device, dtype = where
    generator = torch.Generator().manual_seed(tokens * heads + page_size)
    num_pages = 256 // page_size
    rows = random_rows(tokens, k, 256, generator)
    pool = torch.full((num_pages, LAYERS, page_size, dim), torch.nan, dtype=dtype)
    used = rows[rows >= 0].long()
    content = torch.randn(len(used), dim, generator=generator).to(dtype)
    pool[used // page_size, LAYER, used % page_size] = content
    query = torch.randn(tokens, heads, dim, generator=generator).to(dtype)
    scale = 1 / math.sqrt(dim) * 3
    with poisoned(impl):
        out = sparse_mla(
            query.to(device),
            pool.to(device)[:, LAYER],
            rows.to(device),
            scale=scale,
            value_dim=value_dim,
            impl=impl,
        )
    assert out.dtype == dtype
    # bfloat16: weights and the result are rounded to 8 bits; values are of order 1
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    expected = exact(query, pool[:, LAYER], rows, scale=scale, value_dim=value_dim)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    if tokens > 1:
        assert not out[-1].any()  # no rows: zeros, not NaN


def test_scores_far_from_zero_do_not_overflow(where: Where) -> None:
    impl, device, dtype = where
    pages = torch.tensor([[[100.0] * 16], [[-100.0] * 16], [[100.0] * 8 + [50.0] * 8]], device=device).to(dtype)
    rows = torch.tensor([[1, 0, -1, 2], [1, -1, -1, -1]], dtype=torch.int32, device=device)
    query = torch.full((2, 2, 16), 10.0, device=device).to(dtype)
    out = sparse_mla(query, pages, rows, scale=1.0, value_dim=16, impl=impl)
    assert (out[0] == 100.0).all()  # 16,000 against 12,000 and -16,000
    assert (out[1] == -100.0).all()


def test_strided_queries_are_supported(where: Where) -> None:
    """Queries as a projection outputs them: heads beside other data."""
    impl, device, dtype = where
    generator = torch.Generator().manual_seed(5)
    wide = torch.randn(3, 4, 80, generator=generator).to(device, dtype)
    pages = torch.randn(8, 4, 48, generator=generator).to(device, dtype)
    rows = torch.randint(0, 32, (3, 12), dtype=torch.int32, generator=generator).to(device)
    out = sparse_mla(wide[:, :, 16:64], pages, rows, scale=0.2, value_dim=32, impl=impl)
    expected = sparse_mla(wide[:, :, 16:64].contiguous(), pages, rows, scale=0.2, value_dim=32, impl="reference")
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


def test_invalid_arguments_are_refused() -> None:
    query, pages, rows = torch.zeros(2, 4, 16), torch.zeros(3, 4, 16), torch.zeros(2, 5, dtype=torch.int32)
    with pytest.raises(ValueError, match="do not hold rows for"):
        sparse_mla(query, pages[:, :, :8], rows, scale=1.0, value_dim=8)
    with pytest.raises(ValueError, match="do not hold rows for"):
        sparse_mla(query, pages.half(), rows, scale=1.0, value_dim=8)
    with pytest.raises(ValueError, match="are not the int32 rows of 2 tokens"):
        sparse_mla(query, pages, rows[:1], scale=1.0, value_dim=8)
    with pytest.raises(ValueError, match="are not the int32 rows of 2 tokens"):
        sparse_mla(query, pages, rows.long(), scale=1.0, value_dim=8)
    with pytest.raises(ValueError, match="value_dim must be between 1 and the row's 16, got 17"):
        sparse_mla(query, pages, rows, scale=1.0, value_dim=17)


def test_unsupported_device_is_reported_by_the_cuda_kernel() -> None:
    query, pages, rows = torch.zeros(2, 64, 576), torch.zeros(3, 4, 576), torch.zeros(2, 5, dtype=torch.int32)
    with pytest.raises(ValueError, match="does not support this: it needs a GPU of compute capability 9"):
        sparse_mla(query, pages, rows, scale=1.0, value_dim=512, impl="cuda")


@pytest.mark.parametrize(
    ("tiles", "blocks", "shares"), [(2, 32, 8), (16, 32, 4), (17, 32, 2), (66, 32, 2), (67, 32, 1)]
)
def test_shares_fit_the_gpu(tiles: int, blocks: int, shares: int) -> None:
    assert num_shares(tiles, blocks, 132) == shares
    assert num_shares(tiles, 1, 132) == 1


@pytest.fixture
def hopper() -> torch.device:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    ("tokens", "heads", "k"),
    [
        pytest.param(1, 64, 1, id="one-row"),
        pytest.param(5, 64, 64, id="one-block"),
        pytest.param(4, 128, 65, id="a-row-more"),
        pytest.param(2, 192, 1000, id="8-shares"),
        pytest.param(8, 128, 2048, id="4-shares"),
        pytest.param(33, 128, 777, id="2-shares"),
        pytest.param(70, 128, 300, id="more-than-one-round"),
    ],
)
def test_cuda_kernel_equals_the_reference(
    tokens: int, heads: int, k: int, page_size: int, dtype: torch.dtype, hopper: torch.device
) -> None:
    """Gaps anywhere, a token without rows, NaN in all other rows, strided pages and queries."""
    generator = torch.Generator().manual_seed(tokens * k + page_size)
    num_rows = 4096
    rows = random_rows(tokens, k, num_rows, generator)
    used = rows[rows >= 0].long()
    pool = torch.full((num_rows // page_size, LAYERS, page_size, 576), torch.nan, dtype=dtype)
    pool[used // page_size, LAYER, used % page_size] = torch.randn(len(used), 576, generator=generator).to(dtype)
    pages = pool.to(hopper)[:, LAYER]
    wide = torch.full((tokens, heads, 584), torch.nan, dtype=dtype)
    wide[..., 8:] = torch.randn(tokens, heads, 576, generator=generator)
    query = wide.to(hopper)[..., 8:]
    with poisoned("auto"):
        out = sparse_mla(query, pages, rows.to(hopper), scale=0.1, value_dim=512, impl="cuda")
    expected = sparse_mla(query, pages, rows.to(hopper), scale=0.1, value_dim=512, impl="reference")
    tolerance = 2**-6 if dtype == torch.bfloat16 else 2**-9
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    if tokens > 1:
        assert not out[-1].any()  # no rows: zeros, not NaN


@pytest.mark.gpu
def test_cuda_kernel_rescales_when_scores_grow(hopper: torch.device) -> None:
    """Scores grow between blocks by more than the threshold of the online softmax, then decrease again."""
    k = 640
    pages = torch.randn(10, 64, 576, device=hopper).to(torch.bfloat16)
    rows = torch.arange(k, dtype=torch.int32, device=hopper).expand(2, k).contiguous()
    query = torch.randn(2, 64, 576, device=hopper).to(torch.bfloat16)
    query[..., 575] = 1.0
    pages[..., 575] = torch.tensor([0, 20, 40, 60, 30, 90, 0, 91, 130, 10], device=hopper)[:, None]
    for part in (slice(0, k), slice(0, 64), slice(256, 512)):
        out = sparse_mla(query, pages, rows[:, part], scale=1.0, value_dim=512, impl="cuda")
        expected = sparse_mla(query, pages, rows[:, part], scale=1.0, value_dim=512, impl="reference")
        torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-6)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 32}, "32 heads are not a multiple of 64"),
        ({"dim": 512}, "rows have 512 elements and 512 values, not 576 and 512"),
        ({"dtype": torch.float32}, "float32 is neither bfloat16 nor float16"),
        ({"scale": -1.0}, "scale -1.0 is not positive"),
        ({"first": 4}, "query has rows that do not start at multiples of 16 bytes"),
    ],
)
def test_triton_computes_what_the_cuda_kernel_does_not_support(
    change: dict[str, object], message: str, hopper: torch.device
) -> None:
    case: dict[str, Any] = {"heads": 64, "dim": 576, "dtype": torch.bfloat16, "scale": 0.1, "first": 0, **change}
    wide = torch.randn(8, case["heads"], case["dim"] + 8, device=hopper).to(case["dtype"])
    query = wide[..., case["first"] : case["first"] + case["dim"]]
    pages = torch.randn(4, 64, case["dim"], device=hopper).to(case["dtype"])
    rows = torch.arange(0, 200, dtype=torch.int32, device=hopper).expand(8, 200).contiguous()
    with pytest.raises(ValueError, match=message):
        sparse_mla(query, pages, rows, scale=case["scale"], value_dim=512, impl="cuda")
    out = sparse_mla(query, pages, rows, scale=case["scale"], value_dim=512)
    expected = sparse_mla(query, pages, rows, scale=case["scale"], value_dim=512, impl="reference")
    torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-6)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 33, 200])
@pytest.mark.parametrize(("heads", "impl"), [(16, "triton"), (128, "triton"), (128, "cuda"), (128, "auto")])
def test_real_geometry_equals_the_reference(tokens: int, heads: int, impl: SparseMlaImpl) -> None:
    """Latent rows of 512 + 64, 2,048 of them; a pool of more than 2^31 elements, and rows at its far end."""
    device, k, page_size, layers = torch.device("cuda"), 2048, 64, 61
    pool = torch.empty(1000, layers, page_size, 576, dtype=torch.bfloat16, device=device)
    pages = pool[:, 60]
    pages.normal_()
    rows = torch.stack([torch.randperm(64000, device=device)[:k] for _ in range(tokens)]).int()
    rows[0, -1] = 64000 - 1
    rows[-1, 1000:] = -1
    query = torch.randn(tokens, heads, 576, device=device).to(torch.bfloat16)
    with poisoned("auto"):
        out = sparse_mla(query, pages, rows, scale=576**-0.5, value_dim=512, impl=impl)
    expected = sparse_mla(query, pages, rows, scale=576**-0.5, value_dim=512, impl="reference")
    error = (out.float() - expected.float()).norm() / expected.float().norm()
    assert error < 6e-3  # rounding the result alone is 1.7e-3


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "cuda"])
@pytest.mark.parametrize("tokens", [3, 40])
def test_graph_reads_the_current_rows(tokens: int, impl: SparseMlaImpl) -> None:
    device = torch.device("cuda")
    pages = torch.randn(100, 64, 576, device=device).to(torch.bfloat16)
    query = torch.randn(tokens, 128, 576, device=device).to(torch.bfloat16)
    rows = torch.full((tokens, 2048), -1, dtype=torch.int32, device=device)
    sparse_mla(query, pages, rows, scale=0.05, value_dim=512, impl=impl)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sparse_mla(query, pages, rows, scale=0.05, value_dim=512, impl=impl)
    for seen in (2048, 700, 0):
        rows.copy_(torch.randint(0, 6400, rows.shape, device=device))
        rows[:, seen:] = -1
        out.fill_(torch.nan)
        graph.replay()
        expected = sparse_mla(query, pages, rows, scale=0.05, value_dim=512, impl="reference")
        torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-6)
