"""Attention over packed rows against attention over the unpacked ones, fused and with a workspace."""

import math
from typing import Any

import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl
from pdserve.kernels.mla.packed_rows import pack_rows_reference, packed_bytes, unpack_rows_reference
from pdserve.kernels.mla.sparse_mla import sparse_mla
from pdserve.kernels.packed_mla.packed_attention import sparse_mla_packed
from tests.kernels.places import each_of
from tests.kernels.poison import poisoned

LAYERS, LAYER, PAGE_SIZE = 3, 1, 4
Where = tuple[Impl, torch.device, torch.dtype]

pytestmark = [
    # Triton 3.6's interpreter converts an array of one element for a loop whose bound it loaded
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    # the log-sum of a share without rows is -inf
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2:RuntimeWarning"),
]

where = each_of(
    ("auto", "cpu", torch.float32),
    ("triton", "cpu", torch.float32),
    ("triton", "cuda", torch.float32),
    ("triton", "cuda", torch.bfloat16),
)


@pytest.mark.parametrize("workspace_bytes", [1, 1 << 20])
def test_attention_over_packed_rows_equals_unpacked(
    where: Where, workspace_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts and at once, equal to attention over the unpacked rows."""
    monkeypatch.setattr("pdserve.kernels.packed_mla.packed_attention._WORKSPACE_BYTES", workspace_bytes)
    check_attention(where, tokens=3, heads=5, kv_rank=48, rope_dim=16, k=10, fused=False)


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_rank", "rope_dim", "k"),
    [
        pytest.param(3, 5, 48, 16, 10, id="small"),
        pytest.param(1, 16, 200, 32, 90, id="rows-in-shares"),
        pytest.param(9, 2, 128, 8, 40, id="rows-of-a-token-in-one-program"),
        pytest.param(2, 40, 48, 0, 33, id="heads-in-several-tiles"),
        pytest.param(1, 3, 512, 64, 33, id="deepseek"),
    ],
)
def test_fused_attention_over_packed_rows_equals_unpacked(
    where: Where, tokens: int, heads: int, kv_rank: int, rope_dim: int, k: int
) -> None:
    check_attention(where, tokens=tokens, heads=heads, kv_rank=kv_rank, rope_dim=rope_dim, k=k, fused=True)


def check_attention(where: Where, *, tokens: int, heads: int, kv_rank: int, rope_dim: int, k: int, fused: bool) -> None:
    """Equal to attention over the unpacked rows, with a pool that is NaN except in the selected rows."""
    impl, device, dtype = where
    generator = torch.Generator().manual_seed(tokens * heads + k)
    num_pages = 2 * k
    rows = torch.stack([torch.randperm(num_pages * PAGE_SIZE, generator=generator)[:k] for _ in range(tokens)]).int()
    rows[:, torch.randperm(k, generator=generator)[: k // 5]] = -1
    rows[0, k // 2 :] = -1
    if tokens > 1:
        rows[-1] = -1
    chosen = rows[rows >= 0].long()
    pool = torch.full((num_pages, LAYERS, PAGE_SIZE, packed_bytes(kv_rank, rope_dim)), 0x7F, dtype=torch.uint8)
    content = torch.randn(len(chosen), kv_rank + rope_dim, generator=generator)
    pool[chosen // PAGE_SIZE, LAYER, chosen % PAGE_SIZE] = pack_rows_reference(content, kv_rank)
    unpacked = unpack_rows_reference(pool[:, LAYER].flatten(0, 1), kv_rank, dtype).view(num_pages, PAGE_SIZE, -1)
    query = torch.randn(tokens, heads, kv_rank + rope_dim, generator=generator).to(dtype)
    settings: dict[str, Any] = {"scale": 2 / math.sqrt(kv_rank + rope_dim), "value_dim": kv_rank}
    expected = sparse_mla(query.float(), unpacked.float(), rows, **settings, impl="reference")
    with poisoned(impl):
        found = sparse_mla_packed(
            query.to(device), pool.to(device)[:, LAYER], rows.to(device), **settings, impl=impl, fused=fused
        )
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(found.float().cpu(), expected, rtol=tolerance, atol=tolerance)
    if tokens > 1:
        assert not found[-1].any()  # no rows: zeros, not NaN


def test_query_of_another_size_is_refused() -> None:
    rows = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="does not match rows \\[1, 1\\] of 48 \\+ 16 elements"):
        sparse_mla_packed(
            torch.zeros(1, 2, 48), torch.zeros(2, 4, 84, dtype=torch.uint8), rows, scale=1.0, value_dim=48
        )
