"""rope_attention equals rope_kv_write and paged_attention in torch; nothing else in the pool changes."""

import random
from typing import NamedTuple

import pytest
import torch

from pdserve.kernels.attention.attention_plan import WorkPlan
from pdserve.kernels.attention.paged_attention import paged_attention, plan_attention
from pdserve.kernels.attention.rope_attention import rope_attention
from pdserve.kernels.attention.rope_decode_cuda import most_sequences
from pdserve.kernels.attention.rope_kv_write import rope_kv_write
from pdserve.kernels.backends.dispatch import Impl
from tests.kernels.places import each_of
from tests.kernels.poison import poisoned

Where = tuple[Impl, torch.device, torch.dtype]

where = each_of(
    ("triton", "cpu", torch.float32),
    ("auto", "cpu", torch.float32),
    ("triton", "cuda", torch.float32),
    ("triton", "cuda", torch.bfloat16),
    ("triton", "cuda", torch.float16),
)
FP8 = torch.float8_e4m3fn
EPS = 1e-3


class Geometry(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    page_size: int


SMALL = Geometry(6, 2, 24, 8)
WIDE = Geometry(8, 1, 128, 16)
"""The CUDA kernel supports it."""
GEOMETRIES = [SMALL, Geometry(4, 4, 16, 4), Geometry(3, 1, 64, 16), WIDE, Geometry(2, 1, 64, 1)]
both = pytest.mark.parametrize("geometry", [SMALL, WIDE], ids=str)
RAGGED = [5, 64, 33, 1, 65, 16, 130, 17]


def check(
    kv_lens: list[int],
    geometry: Geometry,
    where: Where,
    *,
    query_lens: list[int] | None = None,
    norm_dtype: torch.dtype | None = None,
    pages_dtype: torch.dtype | None = None,
    window: int | None = None,
    with_sinks: bool = False,
) -> None:
    """A step of sequences of these lengths on scattered pages, which hold NaN where nothing may be read."""
    heads, kv_heads, dim, page_size = geometry
    impl, device, dtype = where
    query_lens = query_lens or [1] * len(kv_lens)
    tokens, scale = sum(query_lens), dim**-0.5
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    num_pages = sum(-(-kv_len // page_size) for kv_len in kv_lens)
    free = random.Random(8).sample(range(num_pages), num_pages)
    pool = torch.full((num_pages, 3, 2, kv_heads, page_size, dim), torch.nan, dtype=pages_dtype or dtype, device=device)
    tables, page_ids, offsets = [], [], []
    for query_len, kv_len in zip(query_lens, kv_lens, strict=True):
        pages = [free.pop() for _ in range(-(-kv_len // page_size))]
        for token in range(kv_len):
            if token < kv_len - query_len:
                pool[pages[token // page_size], 1, :, :, token % page_size] = draw(2, kv_heads, dim).to(pool.dtype)
            else:
                page_ids.append(pages[token // page_size])
                offsets.append(token % page_size)
        tables.append(pages)
    angles = 10 * torch.rand(tokens, dim // 2, generator=generator)
    qkv = draw(tokens, (heads + 2 * kv_heads) * dim)
    if pages_dtype == FP8 and impl == "triton" and device.type == "cpu":  # the interpreter rounds to fp8 wrongly
        qkv, angles = qkv.to(FP8).to(dtype), torch.zeros_like(angles)
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(device, dtype)
    signed_sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(device, dtype)
    norms = (None, None) if norm_dtype is None else (draw(dim).to(norm_dtype), draw(dim).to(norm_dtype))
    sinks = 3 * torch.randn(heads, generator=generator).to(device) if with_sinks else None
    rotation = cos, signed_sin
    slots = torch.tensor(page_ids, device=device), torch.tensor(offsets, device=device)

    expected_pool, plans = pool.clone(), {}
    for method in (impl, "reference"):
        plans[method] = plan_attention(
            query_lens,
            kv_lens,
            tables,
            page_size=page_size,
            num_kv_heads=kv_heads,
            device=device,
            window=window,
            impl=method,
        )
    key, value = expected_pool[:, 1, 0], expected_pool[:, 1, 1]
    q_norm, k_norm = norms
    query = rope_kv_write(qkv, *rotation, key, value, *slots, q_norm=q_norm, k_norm=k_norm, eps=EPS, impl="reference")
    expected = paged_attention(query, key, value, plans["reference"], scale=scale, sinks=sinks)
    assert isinstance(plans[impl], WorkPlan) == (impl == "triton")
    with poisoned(impl):
        out = rope_attention(
            qkv,
            *rotation,
            pool[:, 1, 0],
            pool[:, 1, 1],
            *slots,
            plans[impl],
            scale=scale,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=EPS,
            sinks=sinks,
            impl=impl,
        )
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    if pages_dtype == FP8:
        tolerance = 0.1  # a key that is nearly between two values of fp8 may become either
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
    written, reference = (each[slots[0], 1, :, :, slots[1]].float() for each in (pool, expected_pool))
    step = {FP8: 2**-3, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}[pool.dtype]
    torch.testing.assert_close(written, reference, rtol=step, atol=step)
    assert written[:, 1].equal(reference[:, 1]), "values are copied"
    pool[slots[0], 1, :, :, slots[1]] = expected_pool[slots[0], 1, :, :, slots[1]]
    assert pool.view(torch.uint8).equal(expected_pool.view(torch.uint8)), "something else was written"


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_decode_steps(geometry: Geometry, normed: bool, where: Where) -> None:
    check(RAGGED, geometry, where, norm_dtype=where[2] if normed else None)


@both
@pytest.mark.parametrize("kv_len", [1, 2, 17, 64, 65, 128, 129, 700])
def test_one_sequence(kv_len: int, geometry: Geometry, where: Where) -> None:
    """With and without keys before the newest one; in one piece, and in several."""
    check([kv_len], geometry, where, norm_dtype=where[2])


@pytest.mark.parametrize(("window", "with_sinks"), [(1, False), (8, True), (70, False), (None, True)])
@both
def test_windows_and_sinks(geometry: Geometry, window: int | None, with_sinks: bool, where: Where) -> None:
    check(RAGGED, geometry, where, window=window, with_sinks=with_sinks)


@both
def test_norms_in_float32_and_fp8_pages(geometry: Geometry, where: Where) -> None:
    check(RAGGED, geometry, where, norm_dtype=torch.float32)
    check(RAGGED, geometry, where, pages_dtype=FP8)


def test_prompts(where: Where) -> None:
    """With several queries of a sequence, in two kernels."""
    check([9, 50, 20], SMALL, where, query_lens=[9, 1, 4], norm_dtype=where[2])


@pytest.mark.gpu
@pytest.mark.parametrize("kv_lens", [[4097], [8192], [8193], [3000, 1, 640, 64], [1] * 40, [2000] * 9], ids=str)
def test_long_sequences(kv_lens: list[int]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check(kv_lens, Geometry(16, 2, 128, 64), ("triton", torch.device("cuda"), dtype), norm_dtype=dtype)


@pytest.mark.gpu
def test_padded_rows_write_nothing() -> None:
    """A sequence of no tokens, as graphs have them."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    pool = torch.randn(4, 2, 2, 16, 128, device=device, dtype=dtype)
    before, qkv = pool.clone(), torch.randn(2, 6 * 128, device=device, dtype=dtype)
    angle, zero = torch.rand(2, 128, device=device).to(dtype), torch.zeros(2, dtype=torch.long, device=device)
    plan = plan_attention([1, 1], [5, 3], [[1], [2]], page_size=16, num_kv_heads=2, device=device)
    assert isinstance(plan, WorkPlan)
    assert plan.few_keys
    assert most_sequences(1, pool[:, 0], dtype) >= 2
    plan.kv_lens[1] = 0
    rope_attention(qkv, angle, angle, pool[:, 0], pool[:, 1], zero, zero, plan, scale=0.1)
    changed = (pool != before).any(-1)
    assert changed[1, :, :, 4].all()
    assert changed.sum() == 2 * 2  # planes, heads
