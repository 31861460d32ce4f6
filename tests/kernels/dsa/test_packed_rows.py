"""Packed rows against a loop over their bytes, unpacking, and attention over packed rows."""

import functools
import struct

import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl
from pdserve.kernels.dsa.latent_write import latent_write
from pdserve.kernels.dsa.packed_rows import (
    pack_rows_reference,
    packed_bytes,
    sparse_mla_packed,
    unpack_pages,
    unpack_rows,
    unpack_rows_reference,
)
from pdserve.kernels.dsa.sparse_mla import SparseMlaImpl, sparse_mla
from pdserve.kernels.dsa.sparse_mla_cuda import num_packed_shares
from tests.kernels.places import each_of
from tests.kernels.poison import poisoned

GEOMETRIES = [(48, 16), (128, 8), (512, 64), (200, 32)]
PAGES, LAYERS, LAYER, PAGE_SIZE = 6, 3, 1, 4
Where = tuple[Impl, torch.device, torch.dtype]

pytestmark = [
    # Triton 3.6's interpreter converts an array of one element for a loop whose bound it loaded
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    # the log-sum of a share without rows is meant to be -inf
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2:RuntimeWarning"),
]

where = each_of(
    ("auto", "cpu", torch.float32),
    ("triton", "cpu", torch.float32),
    ("triton", "cuda", torch.float32),
    ("triton", "cuda", torch.bfloat16),
)


def e4m3(byte: int) -> float:
    """One sign bit, four of the exponent (bias 7), three of the mantissa; no infinities."""
    sign, exponent, mantissa = (-1.0 if byte & 0x80 else 1.0), byte >> 3 & 0xF, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def unpack_bytes(packed: bytes, kv_rank: int) -> list[float]:
    """Unpack a row byte by byte."""
    groups = -(-kv_rank // 128)
    scales = struct.unpack(f"<{groups}f", packed[kv_rank : kv_rank + 4 * groups])
    latent = [e4m3(packed[i]) * scales[i // 128] for i in range(kv_rank)]
    halves = struct.unpack(f"<{(len(packed) - kv_rank - 4 * groups) // 2}H", packed[kv_rank + 4 * groups :])
    return latent + [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves]


def random_rows(count: int, kv_rank: int, rope_dim: int) -> torch.Tensor:
    """Groups have very different magnitude; those of the second row are zero."""
    rows = torch.randn(count, kv_rank + rope_dim, generator=torch.Generator().manual_seed(kv_rank))
    rows[:, : min(128, kv_rank // 2)] *= 1000
    rows[1, :kv_rank] = 0
    return rows


def check_packed(packed: torch.Tensor, rows: torch.Tensor, kv_rank: int) -> None:
    """uint8 [N, bytes] equals rows [N, R + P] in fp8 with scales, and in bf16."""
    for found, row in zip(packed.cpu(), rows.double().cpu(), strict=True):
        values = torch.tensor(unpack_bytes(bytes(found.tolist()), kv_rank), dtype=torch.float64)
        for first in range(0, kv_rank, 128):
            group = slice(first, min(first + 128, kv_rank))
            # half a unit of the 3-bit mantissa, or half of the smallest number, 2^-9, times the scale, largest / 448
            largest = row[group].abs().max()
            bound = torch.maximum(row[group].abs() * 2**-4, largest / 448 * 2**-10) * 1.001
            assert ((values[group] - row[group]).abs() <= bound).all()
        torch.testing.assert_close(values[kv_rank:], row[kv_rank:], rtol=2**-8, atol=0)


@pytest.mark.parametrize(("kv_rank", "rope_dim"), GEOMETRIES)
def test_rows_are_packed_byte_by_byte(kv_rank: int, rope_dim: int) -> None:
    rows = random_rows(5, kv_rank, rope_dim)
    packed = pack_rows_reference(rows, kv_rank)
    assert packed.shape == (5, packed_bytes(kv_rank, rope_dim))
    check_packed(packed, rows, kv_rank)
    expected = torch.tensor([unpack_bytes(bytes(row.tolist()), kv_rank) for row in packed])
    assert unpack_rows_reference(packed, kv_rank, torch.float32).equal(expected)


def test_deepseeks_row_has_656_bytes() -> None:
    assert packed_bytes(512, 64) == 656
    with pytest.raises(ValueError, match="multiple of 4"):
        packed_bytes(510, 64)


@pytest.mark.parametrize(("kv_rank", "rope_dim"), GEOMETRIES)
def test_requested_rows_are_unpacked(kv_rank: int, rope_dim: int, where: Where) -> None:
    impl, device, dtype = where
    size = packed_bytes(kv_rank, rope_dim)
    pool = torch.full((PAGES, LAYERS, PAGE_SIZE, size), 0x7F, dtype=torch.uint8)  # NaN, in fp8 and in float32
    rows = torch.tensor([[5, -1, 22, 5], [-1, -1, -1, -1], [0, 9, -1, 23]], dtype=torch.int32)
    chosen = rows[rows >= 0].unique(sorted=True).long()  # type: ignore[no-untyped-call]
    packed = pack_rows_reference(random_rows(len(chosen), kv_rank, rope_dim), kv_rank)
    pool[chosen // PAGE_SIZE, LAYER, chosen % PAGE_SIZE] = packed

    unpacked, places = unpack_rows(pool.to(device)[:, LAYER], rows.to(device), kv_rank=kv_rank, dtype=dtype, impl=impl)

    assert unpacked.shape == (rows.numel(), 1, kv_rank + rope_dim)
    assert (places < 0).cpu().equal(rows < 0)
    for at in (rows >= 0).nonzero().tolist():
        row, place = int(rows[*at]), int(places[*at])
        expected = unpack_rows_reference(pool[row // PAGE_SIZE, LAYER, row % PAGE_SIZE][None], kv_rank, dtype)
        assert unpacked[place].cpu().equal(expected)
    real = places[places >= 0]
    assert len(set(real.tolist())) == len(real)


@pytest.mark.parametrize("page_size", [1, 4, 12])
@pytest.mark.parametrize(("kv_rank", "rope_dim"), GEOMETRIES)
def test_first_pages_are_unpacked(kv_rank: int, rope_dim: int, page_size: int, where: Where) -> None:
    """The number of pages is in device memory. Further ids are invalid; nothing is written for them."""
    impl, device, dtype = where
    rows = random_rows(PAGES * page_size, kv_rank, rope_dim)
    pool = torch.full((PAGES, LAYERS, page_size, packed_bytes(kv_rank, rope_dim)), 0x7F, dtype=torch.uint8)
    pool[:, LAYER] = pack_rows_reference(rows, kv_rank).view(PAGES, page_size, -1)
    expected = unpack_rows_reference(pool[:, LAYER].flatten(0, 1), kv_rank, dtype).view(PAGES, page_size, -1)
    sources = torch.tensor([5, 0, 3, 3, 1 << 30, -(1 << 30)], dtype=torch.int32, device=device)
    for used in (0, 1, 4):
        count = torch.tensor([used], dtype=torch.int32, device=device)
        with poisoned(impl):
            found = unpack_pages(pool.to(device)[:, LAYER], sources, count, kv_rank=kv_rank, dtype=dtype, impl=impl)
        assert found.shape == (6, page_size, kv_rank + rope_dim)
        assert found[:used].cpu().equal(expected[[5, 0, 3, 3][:used]])
        assert found[used:].isnan().all()


@pytest.mark.parametrize(("kv_rank", "rope_dim"), GEOMETRIES)
def test_written_rows_are_packed(kv_rank: int, rope_dim: int, where: Where) -> None:
    """latent_write packs the rows that it would otherwise write. Padding rows write nothing."""
    impl, device, dtype = where
    generator, tokens, q_rank = torch.Generator().manual_seed(rope_dim), 4, 16
    x = torch.randn(tokens, q_rank + kv_rank + rope_dim, generator=generator).to(device, dtype)
    x[2, q_rank : q_rank + kv_rank] = 0
    q_norm, kv_norm = torch.ones(q_rank, device=device, dtype=dtype), torch.ones(kv_rank, device=device, dtype=dtype)
    cos, signed_sin = torch.randn(2, tokens, rope_dim, generator=generator).to(device, dtype).unbind()
    rows = torch.tensor([7, 23, 1, -1], dtype=torch.int32, device=device)
    plain = torch.zeros(PAGES, LAYERS, PAGE_SIZE, kv_rank + rope_dim, dtype=dtype, device=device)
    packed = torch.full((PAGES, LAYERS, PAGE_SIZE, packed_bytes(kv_rank, rope_dim)), 0x7F, dtype=torch.uint8)
    packed = packed.to(device)
    before = packed.clone()
    for pages in (plain, packed):
        latent_write(x, q_norm, kv_norm, cos, signed_sin, pages[:, LAYER], rows, eps=1e-6, impl=impl)
    real = rows[:3].long()
    written = packed[real // PAGE_SIZE, LAYER, real % PAGE_SIZE]
    if impl == "auto" or device.type == "cuda":  # the interpreter of Triton 3.6 cannot round to fp8 nor to bf16
        check_packed(written, plain[real // PAGE_SIZE, LAYER, real % PAGE_SIZE], kv_rank)
    before[real // PAGE_SIZE, LAYER, real % PAGE_SIZE] = written
    assert packed.equal(before)


@pytest.mark.parametrize("workspace_bytes", [1, 1 << 20])
def test_attention_over_packed_rows_equals_unpacked(
    where: Where, workspace_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are unpacked into a workspace, some tokens at a time or all at once."""
    monkeypatch.setattr("pdserve.kernels.dsa.packed_rows._WORKSPACE_BYTES", workspace_bytes)
    impl, device, dtype = where
    generator = torch.Generator().manual_seed(2)
    packed = pack_rows_reference(torch.randn(24, 48 + 16, generator=generator), 48)
    unpacked = unpack_rows_reference(packed, 48, dtype).view(PAGES, PAGE_SIZE, -1).to(device)
    query = torch.randn(3, 5, 64, generator=generator).to(device, dtype)
    rows = torch.randint(-1, 24, (3, 10), dtype=torch.int32, generator=generator).to(device)
    expected = sparse_mla(query, unpacked, rows, scale=0.3, value_dim=48, impl="reference")
    pages = packed.view(PAGES, PAGE_SIZE, -1).to(device)
    found = sparse_mla_packed(query, pages, rows, scale=0.3, value_dim=48, impl=impl, fused=False)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_rank", "rope_dim", "k"),
    [
        pytest.param(1, 16, 512, 64, 150, id="one-token-in-shares"),
        pytest.param(12, 5, 48, 16, 50, id="many-tokens-alone"),
        pytest.param(3, 20, 200, 32, 33, id="heads-in-two-tiles"),
        pytest.param(2, 3, 128, 8, 7, id="fewer-rows-than-a-block"),
    ],
)
def test_rows_are_unpacked_in_registers(
    tokens: int, heads: int, kv_rank: int, rope_dim: int, k: int, page_size: int, where: Where
) -> None:
    """Gaps anywhere, a token without rows, NaN in all other rows, strided pages and queries."""
    impl, device, dtype = where
    generator = torch.Generator().manual_seed(tokens * k + page_size)
    num_rows, size = 256, packed_bytes(kv_rank, rope_dim)
    rows = torch.stack([torch.randperm(num_rows, generator=generator)[:k] for _ in range(tokens)]).int()
    rows[torch.rand(rows.shape, generator=generator) < 0.2] = -1
    rows[-1, k // 2 :] = -1
    if tokens > 1:
        rows[0] = -1
    pool = torch.full((num_rows // page_size, LAYERS, page_size, size), 0xFF, dtype=torch.uint8)
    used = rows[rows >= 0].unique().long()  # type: ignore[no-untyped-call]
    pool[used // page_size, LAYER, used % page_size] = pack_rows_reference(
        torch.randn(len(used), kv_rank + rope_dim, generator=generator), kv_rank
    )
    wide = torch.randn(tokens, heads, kv_rank + rope_dim + 16, generator=generator).to(device, dtype)
    query, pages = wide[..., 16:], pool.to(device)[:, LAYER]
    with poisoned(impl):
        found = sparse_mla_packed(query, pages, rows.to(device), scale=0.05, value_dim=kv_rank, impl=impl, fused=True)
    expected = sparse_mla_packed(query.cpu(), pages.cpu(), rows, scale=0.05, value_dim=kv_rank, impl="reference")
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)
    if tokens > 1:
        assert not found[0].any()  # no rows: zeros, not NaN


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 8, 32, 33, 140, 300])
@pytest.mark.parametrize(("impl", "heads"), [("triton", 8), ("triton", 16), ("triton", 32), ("cuda", 5), ("cuda", 16)])
def test_real_geometry_in_registers_equals_unpacked(impl: SparseMlaImpl, tokens: int, heads: int) -> None:
    """In 1 to 64 shares; a pool of more than 2^31 bytes, its first and last row, tokens without rows."""
    device, k, page_size, layers = torch.device("cuda"), 2048, 64, 61
    pool = torch.empty(1000, layers, page_size, 656, dtype=torch.uint8, device=device)
    packed = pack_rows_reference(torch.randn(1000 * page_size, 576, device=device), 512)
    pool[:, 60] = packed.view(1000, page_size, 656)
    rows = torch.stack([torch.randperm(64000, device=device)[:k] for _ in range(tokens)]).int()
    rows[0, :2] = torch.tensor([0, 64000 - 1], device=device)
    rows[-1, 1000:] = -1
    rows[tokens // 2, ::3] = -1
    if tokens > 2:
        rows[1] = -1
    query = torch.randn(tokens, heads, 576, device=device).to(torch.bfloat16)
    attend = functools.partial(sparse_mla_packed, query, pool[:, 60], rows, scale=576**-0.5, value_dim=512)
    with poisoned("auto"):
        found = attend(fused=True, impl=impl)
    torch.cuda.synchronize()
    expected = attend(impl="reference")
    assert relative_error(found, expected) < 6e-3  # rounding the result alone is 1.7e-3


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.cpu().double(), expected.cpu().double()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("k", [7, 64, 150])
@pytest.mark.parametrize(("latent", "query"), [(1.0, 1.0), (1e-2, 1e-4), (1e4, 1e-4), (1e-2, 1e4), (1.0, 1e4)])
def test_cuda_kernel_supports_numbers_of_any_magnitude(k: int, page_size: int, latent: float, query: float) -> None:
    """Latents and queries whose products would overflow float16 without scaling; NaN in all other rows.

    The largest latent of a group is at least 2e-4: csrc/dsa/packed_mla.cu says from which size on weights are precise.
    """
    device, generator = torch.device("cuda"), torch.Generator().manual_seed(k)
    rows = torch.stack([torch.randperm(256, generator=generator)[:k] for _ in range(3)]).int()
    rows[torch.rand(rows.shape, generator=generator) < 0.2] = -1
    rows[1] = -1
    pool = torch.full((256 // page_size, LAYERS, page_size, 656), 0xFF, dtype=torch.uint8)
    used = rows[rows >= 0].unique().long()  # type: ignore[no-untyped-call]
    content = torch.randn(len(used), 576, generator=generator)
    content[:, :512] *= latent * torch.logspace(-2, 0, 4).repeat_interleave(128)  # every group has its own scale
    pool[used // page_size, LAYER, used % page_size] = pack_rows_reference(content, 512)
    wide = torch.randn(3, 16, 592, generator=generator).to(torch.bfloat16) * query
    pages, scale = pool.to(device)[:, LAYER], 1 / (24 * max(latent * query, query))
    with poisoned("auto"):
        found = sparse_mla_packed(
            wide.to(device)[..., 16:], pages, rows.to(device), scale=scale, value_dim=512, impl="cuda"
        )
    expected = sparse_mla_packed(
        wide[..., 16:].float(), pages.cpu(), rows, scale=scale, value_dim=512, impl="reference"
    )
    for group in range(0, 512, 128):
        part = slice(group, group + 128)
        assert relative_error(found[..., part], expected[..., part]) < 6e-3
    assert not found[1].any()  # no rows: zeros, not NaN


def test_number_of_shares_keeps_all_multiprocessors_busy() -> None:
    """32 blocks of rows on 132 multiprocessors: one share per multiprocessor, or two if shares would be long."""
    found = [num_packed_shares(tokens, 32, 132) for tokens in (1, 4, 8, 16, 32, 64, 128, 132, 200, 1000)]
    assert found == [32, 32, 16, 8, 8, 4, 2, 2, 1, 1]
    assert num_packed_shares(1, 1, 132) == 1


@pytest.mark.gpu
def test_unsuitable_tensors_are_refused_by_the_cuda_kernel() -> None:
    device = torch.device("cuda")
    pages, rows = (
        torch.zeros(2, 4, 656, dtype=torch.uint8, device=device),
        torch.zeros(1, 4, dtype=torch.int32).to(device),
    )
    for heads, dtype, reason in ((17, torch.bfloat16, "17 heads"), (16, torch.float16, "float16 is not bfloat16")):
        query = torch.zeros(1, heads, 576, dtype=dtype, device=device)
        with pytest.raises(ValueError, match=reason):
            sparse_mla_packed(query, pages, rows, scale=1.0, value_dim=512, impl="cuda")


def test_unpacked_arguments_are_refused() -> None:
    rows = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="do not hold packed rows"):
        unpack_rows(torch.zeros(2, 4, 50, dtype=torch.uint8), rows, kv_rank=48, dtype=torch.float32)
    with pytest.raises(ValueError, match="do not hold packed rows"):
        unpack_rows(torch.zeros(2, 4, 84), rows, kv_rank=48, dtype=torch.float32)
    with pytest.raises(ValueError, match="not \\[tokens, k\\] of int32"):
        unpack_rows(torch.zeros(2, 4, 84, dtype=torch.uint8), rows.long(), kv_rank=48, dtype=torch.float32)
    with pytest.raises(ValueError, match="are not int32 \\[pages\\] and \\[1\\]"):
        unpack_pages(torch.zeros(2, 4, 84, dtype=torch.uint8), rows, rows[0], kv_rank=48, dtype=torch.float32)
