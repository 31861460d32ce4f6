"""Indexer keys and queries in fp8: quantisation, pages of keys, and the selection of tokens."""

import math

import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl
from pdserve.kernels.dsa.fp8_rows import FP8, quantize_rows_reference
from pdserve.kernels.dsa.index_plan import IndexPlan, IndexScales
from pdserve.kernels.dsa.index_topk import index_scores_reference, index_topk
from pdserve.kernels.dsa.key_write import KeyWrite
from pdserve.kernels.dsa.latent_write import latent_write
from pdserve.kernels.dsa.rotate_queries import rotate_queries
from pdserve.memory.kv_pool import KvPool
from tests.kernels.attention.test_fp8_pages import nearest
from tests.kernels.places import each_of
from tests.kernels.poison import poisoned

PAGES, LAYERS, LAYER = 6, 3, 1
Where = tuple[Impl, torch.device, torch.dtype]

where = each_of(
    ("auto", "cpu", torch.float32),
    ("triton", "cpu", torch.float32),
    ("triton", "cuda", torch.float32),
    ("triton", "cuda", torch.bfloat16),
)


def index_pool(device: torch.device, page_size: int, dim: int, *, pages: int = PAGES) -> KvPool:
    """A pool of fp8 keys whose bytes are all NaN."""
    pool = KvPool(
        num_pages=pages,
        num_layers=LAYERS,
        num_heads=1,
        page_size=page_size,
        head_dim=dim,
        dtype=FP8,
        device=device,
        planes=("indexer",),
        scale_plane="indexer_scale",
    )
    pool.data.fill_(0x7F)
    return pool


def is_interpreter(where: Where) -> bool:
    """Triton's interpreter cannot round to fp8: tests use numbers that need no rounding there."""
    return where[0] == "triton" and where[1].type == "cpu"


def test_rows_are_rounded_to_the_nearest_fp8_with_a_power_of_two_as_scale() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(60, 40, generator=generator) * torch.logspace(-6, 6, 60)[:, None]
    x[:4] = 0
    x[1, 3], x[2, 3], x[3, 3] = 448 * 2.0**-9, 448 * 2.0**-9 * (1 + 2**-22), -447 * 2.0**-9
    fp8, scales = quantize_rows_reference(x)
    assert (fp8.dtype, scales.dtype, scales.shape) == (FP8, torch.float32, (60,))
    for row, values, scale in zip(x.double(), fp8.double(), scales.tolist(), strict=True):
        assert math.frexp(scale)[0] == 0.5, "not a power of two"
        largest = max(float(row.abs().max()), 1e-4)
        assert 224 * scale < largest <= 448 * scale * (1 + 1e-9)
        assert values.equal(nearest(row / scale))
    assert scales[1:4].tolist() == [2.0**-9, 2.0**-8, 2.0**-9]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rope_dim", "page_size"), [(128, 64, 16), (32, 16, 1), (12, 12, 4), (40, 16, 7)])
def test_written_keys_equal_quantised_keys(
    dim: int, rope_dim: int, page_size: int, interleaved: bool, where: Where
) -> None:
    """latent_write quantises the keys that it would otherwise store, and changes no other byte of the pool."""
    impl, device, dtype = where
    generator, tokens, q_rank, kv_rank = torch.Generator().manual_seed(dim + page_size), 5, 8, 16

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x = draw(tokens, q_rank + kv_rank + rope_dim + dim)
    norm, bias = draw(dim), draw(dim) * 100
    cos, signed_sin = draw(tokens, rope_dim), draw(tokens, rope_dim)
    if is_interpreter(where):
        norm.zero_()
        bias = torch.randint(-15, 16, (dim,), generator=generator) / 4
        cos, signed_sin = (torch.full((tokens, rope_dim), value) for value in (2.0, 0.0))
    rows = torch.randperm(PAGES * page_size, generator=generator)[:tokens].int()
    rows[1] = -1
    rows = rows.to(device)
    latent = draw(PAGES, page_size, kv_rank + rope_dim)
    plain = torch.zeros(PAGES, page_size, dim, dtype=dtype, device=device)
    pool = index_pool(device, page_size, dim)
    before = pool.data.clone()
    keys, scales = pool.layer(LAYER)
    for key in (
        KeyWrite(norm, bias, plain, rows, interleaved),
        KeyWrite(norm, bias, keys.squeeze(1), rows, interleaved, scales[:, 0, :, 0]),
    ):
        latent_write(x, draw(q_rank), draw(kv_rank), cos, signed_sin, latent, rows, eps=1e-6, key=key, impl=impl)

    real = rows[rows >= 0].long()
    page, slot = real // page_size, real % page_size
    expected, expected_scales = quantize_rows_reference(plain[page, slot])
    assert keys[page, 0, slot].view(torch.uint8).equal(expected.view(torch.uint8))
    assert scales[page, 0, slot, 0].equal(expected_scales)
    # a page has all keys, then all scales
    for at, row, scale in zip(real.tolist(), expected, expected_scales, strict=True):
        layer, offset = before[at // page_size, LAYER], at % page_size
        layer[offset * dim : (offset + 1) * dim] = row.view(torch.uint8)
        start = page_size * dim + 4 * offset
        layer[start : start + 4] = scale[None].view(torch.uint8)
    assert pool.data.equal(before)


@pytest.mark.parametrize(
    ("heads", "index_heads", "index_dim", "rope_dim"), [(4, 64, 128, 64), (3, 5, 12, 12), (0, 17, 24, 8)]
)
def test_rotated_index_queries_equal_quantised_queries(
    heads: int, index_heads: int, index_dim: int, rope_dim: int, where: Where
) -> None:
    impl, device, dtype = where
    generator, tokens, head_dim = torch.Generator().manual_seed(index_dim), 3, 72
    shape = tokens, heads * head_dim + index_heads * index_dim
    cos, signed_sin = torch.randn(2, tokens, rope_dim, generator=generator).unbind()
    if is_interpreter(where):
        sizes = 2.0 ** torch.randint(-6, 7, (tokens, 1), generator=generator)
        x = torch.randint(-15, 16, shape, generator=generator) * sizes
        cos, signed_sin = torch.full_like(cos, 2.0), torch.zeros_like(cos)
    else:
        x = torch.randn(shape, generator=generator) * torch.logspace(-3, 3, shape[1])
    x, cos, signed_sin = (tensor.to(device, dtype) for tensor in (x, cos, signed_sin))
    results = []
    for fp8 in (False, True):
        query = torch.zeros(tokens, heads, rope_dim + 8, device=device, dtype=dtype)
        with poisoned(impl):
            rotated = rotate_queries(
                x,
                cos,
                signed_sin,
                query,
                head_dim=head_dim,
                index_dim=index_dim,
                interleaved=False,
                fp8=fp8,
                impl=impl,
            )
        assert rotated is not None
        results.append(rotated)
    plain, (values, scales) = results
    expected, expected_scales = quantize_rows_reference(plain.values)
    assert scales is not None
    assert values.dtype == FP8
    assert values.view(torch.uint8).equal(expected.view(torch.uint8))
    assert scales.equal(expected_scales)


class Sequences:
    """Random fp8 keys of two sequences in a pool that is NaN elsewhere, and queries of their last tokens."""

    def __init__(self, device: torch.device, lens: list[int], queries: list[int], *, page_size: int, dim: int) -> None:
        generator = torch.Generator().manual_seed(sum(lens))
        self.keys = [torch.randn(length, dim, generator=generator) for length in lens]
        needed = [-(-length // page_size) for length in lens]
        ids = torch.randperm(sum(needed), generator=generator)
        pages = [part.tolist() for part in torch.split_with_sizes(ids, needed)]
        pool = index_pool(device, page_size, dim, pages=sum(needed))
        self.pages, scales = pool.layer(LAYER)
        for own, keys in zip(pages, self.keys, strict=True):
            page = torch.tensor(own)[torch.arange(len(keys)) // page_size].to(device)
            slot = (torch.arange(len(keys)) % page_size).to(device)
            rows, row_scales = quantize_rows_reference(keys)
            self.pages.view(torch.uint8)[page, 0, slot] = rows.view(torch.uint8).to(device)
            scales[page, 0, slot, 0] = row_scales.to(device)
        self.plan = IndexPlan.build(queries, lens, pages, page_size=page_size, device=device)
        self.plain_query = torch.randn(sum(queries), 64, dim, generator=generator).to(device)
        self.query, query_scales = quantize_rows_reference(self.plain_query)
        self.weights = torch.randn(sum(queries), 64, generator=generator).to(device)
        self.scales = IndexScales(query_scales, scales)

    def topk(self, k: int, impl: Impl) -> torch.Tensor:
        with poisoned(impl):
            return index_topk(self.query, self.weights, self.pages, self.plan, k, scales=self.scales, impl=impl)

    def check(self, found: torch.Tensor, k: int, tolerance: float) -> None:
        """Every row has the k best scores; scores within the tolerance of the k-th best may be exchanged."""
        scores = index_scores_reference(self.query, self.weights, self.pages, self.plan, self.scales)
        bound = scores.topk(k, dim=1).values[:, -1:]
        margin = tolerance * scores.masked_fill(scores.isinf(), 0).abs().amax(dim=1, keepdim=True)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, found.long(), True)
        assert (chosen.sum(dim=1) == k).all()
        assert (scores[chosen].view(-1, k) >= bound - margin).all()
        assert (~chosen | (scores >= bound - margin)).all()
        assert (chosen | (scores <= bound + margin)).all()


@pytest.mark.parametrize("page_size", [1, 16, 7])
def test_selection_from_fp8_pages_equals_selection_by_dequantised_keys(
    page_size: int, where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 arithmetic on the dequantised keys selects the same tokens; the original keys select most of them."""
    impl, device, _ = where
    case, k = Sequences(device, [150, 90], [3, 1], page_size=page_size, dim=32), 24
    for few in (64, 0):
        if impl == "triton":
            monkeypatch.setattr("pdserve.kernels.dsa.index_topk_triton._FEW_TOKENS", few)
        found = case.topk(k, impl)
        case.check(found, k, 2e-3 if device.type == "cuda" else 1e-6)
    overlaps = []
    for token, (sequence, visible) in enumerate([(0, 148), (0, 149), (0, 150), (1, 90)]):
        keys = case.keys[sequence][:visible].double()
        products = torch.relu(case.plain_query[token].cpu().double() @ keys.T)
        exact = (case.weights[token].cpu().double() @ products).topk(k).indices
        overlaps.append(len(set(exact.tolist()) & set(found[token].tolist())) / k)
    assert sum(overlaps) / len(overlaps) > 0.9, overlaps


@pytest.mark.gpu
def test_gpu_selection_of_the_real_geometry_equals_the_reference() -> None:
    """64 heads of 128, k = 2048, a decode step and a chunk; tensor cores sum fp8 products with about 14 bits."""
    device = torch.device("cuda")
    for lens, queries in (([9000, 5000], [1, 1]), ([9000, 5000], [300, 1])):
        case = Sequences(device, lens, queries, page_size=64, dim=128)
        case.check(case.topk(2048, "triton"), 2048, 2e-3)
