"""rope_kv_write against float64 for computed rows, bitwise for copied ones; nothing else in the pool changes."""

import pytest
import torch

from pdserve.kernels.attention.rope_kv_write import rope_kv_write
from pdserve.kernels.backends.dispatch import Impl
from tests.kernels.numba_kernels import needs_numba
from tests.kernels.poison import poisoned

PAGES, LAYERS, PAGE_SIZE, TOKENS = 6, 3, 4, 9


def exact(
    x: torch.Tensor, norm: torch.Tensor | None, eps: float, cos: torch.Tensor, signed_sin: torch.Tensor
) -> torch.Tensor:
    """x [tokens, heads, D], one coordinate pair at a time."""
    x = x.double()
    if norm is not None:
        x = norm.double() * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for i in range(half):
        c, s = cos[:, i, None].double(), signed_sin[:, half + i, None].double()
        out[:, :, i] = x[:, :, i] * c - x[:, :, half + i] * s
        out[:, :, half + i] = x[:, :, half + i] * c + x[:, :, i] * s
    return out


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (6, 2, 24), (32, 8, 128), (9, 3, 64), (3, 1, 32)])
def test_queries_keys_and_values_equal_float64(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, normed: bool, anywhere: tuple[Impl, torch.device]
) -> None:
    impl, device = anywhere
    generator = torch.Generator().manual_seed(heads + dim)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    qkv = random(TOKENS, (heads + 2 * kv_heads) * dim)
    q_norm, k_norm = (random(dim), random(dim)) if normed else (None, None)
    angles = 10 * torch.rand(TOKENS, dim // 2, generator=generator)
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(device, dtype)
    signed_sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(device, dtype)
    pool = random(PAGES, LAYERS, 2, kv_heads, PAGE_SIZE, dim)
    before = pool.clone()
    slots = torch.randperm(PAGES * PAGE_SIZE, generator=generator)[:TOKENS].to(device)
    page_ids, offsets = slots // PAGE_SIZE, slots % PAGE_SIZE

    with poisoned(impl):
        query = rope_kv_write(
            qkv,
            cos,
            signed_sin,
            pool[:, 1, 0],
            pool[:, 1, 1],
            page_ids,
            offsets,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=1e-3,
            impl=impl,
        )

    q, k, v = qkv.view(TOKENS, -1, dim).split_with_sizes([heads, kv_heads, kv_heads], dim=1)
    # in 16 bits: norm and weight, the products and the sum are rounded; values are of order 1, up to about 10
    tolerance = 1e-5 if dtype == torch.float32 else 2**-5
    torch.testing.assert_close(
        query.double(), exact(q, q_norm, 1e-3, cos, signed_sin), rtol=tolerance / 4, atol=tolerance
    )
    written = pool[page_ids, 1, :, :, offsets]  # [tokens, plane, head, dim]
    torch.testing.assert_close(
        written[:, 0].double(), exact(k, k_norm, 1e-3, cos, signed_sin), rtol=tolerance / 4, atol=tolerance
    )
    assert written[:, 1].equal(v)
    before[page_ids, 1, :, :, offsets] = written
    assert pool.equal(before)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, marks=needs_numba),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_padded_rows_write_nothing(device: str, dtype: torch.dtype) -> None:
    pool = torch.randn(PAGES, LAYERS, 2, 2, PAGE_SIZE, 32, device=device, dtype=dtype)
    qkv = torch.randn(5, 8 * 32, device=device, dtype=dtype)
    angle = torch.rand(5, 32, device=device).to(dtype)
    before = pool.clone()
    page_ids = torch.tensor([3, 1, 0, 0, 0], device=device)
    offsets = torch.tensor([2, 0, 0, 0, 0], device=device)
    live = torch.tensor([2], dtype=torch.int32, device=device)
    rope_kv_write(qkv, angle, angle, pool[:, 1, 0], pool[:, 1, 1], page_ids, offsets, live_rows=live)
    changed = (pool != before).flatten(5).any(-1)
    assert changed[3, 1, :, :, 2].all()
    assert changed[1, 1, :, :, 0].all()
    assert changed.sum() == 2 * 2 * 2  # tokens, planes, heads


def test_invalid_arguments_are_refused() -> None:
    pages = torch.zeros(2, 2, 4, 8)
    one, angle = torch.zeros(1, dtype=torch.long), torch.zeros(1, 8)
    with pytest.raises(ValueError, match="does not hold the heads"):
        rope_kv_write(torch.zeros(1, 4 * 8), angle, angle, pages, pages, one, one)
    with pytest.raises(ValueError, match="do not fit"):
        rope_kv_write(torch.zeros(1, 5 * 8), angle[:, :4], angle, pages, pages, one, one)
    with pytest.raises(ValueError, match="qkv is"):
        rope_kv_write(torch.zeros(1, 5 * 8).half(), angle, angle, pages, pages, one, one)
    with pytest.raises(ValueError, match="must be given together"):
        rope_kv_write(torch.zeros(1, 5 * 8), angle, angle, pages, pages, one, one, q_norm=torch.zeros(8))
