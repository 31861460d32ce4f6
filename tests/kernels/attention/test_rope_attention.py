"""rope_attention against float64 attention of queries and keys that torch rotated; nothing else in the pool changes."""

import random
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from pdserve.kernels.attention import rope_decode_cuda
from pdserve.kernels.attention.attention_plan import FEW_KEYS, WorkPlan, make_work_plan
from pdserve.kernels.attention.paged_attention import plan_attention
from pdserve.kernels.attention.rope_attention import rope_attention
from pdserve.kernels.attention.rope_decode_cuda import launch_rope_decode, most_sequences
from pdserve.kernels.attention.rope_kv_write import rope_kv_write
from pdserve.kernels.backends.dispatch import Impl
from tests.kernels.fibers import COMPILER, FiberKernels
from tests.kernels.places import each_of
from tests.kernels.poison import poisoned

Where = tuple[Impl, torch.device, torch.dtype]

where = each_of(
    ("triton", "cpu", torch.float32),
    ("auto", "cpu", torch.float32),
    ("triton", "cuda", torch.float32),
    ("triton", "cuda", torch.bfloat16),
    ("auto", "cuda", torch.bfloat16),
    ("auto", "cuda", torch.float16),
)
LAUNCHER = "pdserve.kernels.attention.rope_attention.launch_rope_decode"
BF16_ON_CPU: Where = ("auto", torch.device("cpu"), torch.bfloat16)
FP8 = torch.float8_e4m3fn
EPS = 1e-3
STEPS = {FP8: 2**-3, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}
"""Relative distance between adjacent numbers; for float32, the error of sums."""


class Geometry(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    page_size: int


SMALL = Geometry(6, 2, 24, 8)
WIDE = Geometry(8, 1, 128, 16)
"""The CUDA kernel supports it, and all others with heads of 64 or 128 elements."""
GEOMETRIES = [
    SMALL,
    Geometry(4, 4, 16, 4),
    WIDE,
    Geometry(3, 1, 64, 16),
    Geometry(5, 1, 128, 48),
    Geometry(2, 1, 64, 1),
    Geometry(16, 2, 64, 5),
]
three_geometries = pytest.mark.parametrize("geometry", [SMALL, WIDE, Geometry(8, 1, 64, 64)], ids=str)
RAGGED = [5, 64, 33, 1, 130, 17]
FEWER = [65, 16, 3]
"""For geometries with several KV heads: with two, the CUDA kernel supports half as many sequences."""


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
    on_fibers: bool = False,
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

    plan = plan_attention(
        query_lens,
        kv_lens,
        tables,
        page_size=page_size,
        num_kv_heads=kv_heads,
        device=device,
        window=window,
        impl=impl,
    )
    if on_fibers:
        plan = make_work_plan(
            query_lens,
            kv_lens,
            tables,
            page_size=page_size,
            num_kv_heads=kv_heads,
            num_heads=heads,
            device=device,
            window=window,
        )
    assert isinstance(plan, WorkPlan) == (impl == "triton" or device.type == "cuda" or on_fibers)
    q_norm, k_norm = norms
    norm_options: dict[str, Any] = {"q_norm": q_norm, "k_norm": k_norm, "eps": EPS}
    expected_pool = pool.clone()
    key, value = expected_pool[:, 1, 0], expected_pool[:, 1, 1]
    query = rope_kv_write(qkv, *rotation, key, value, *slots, **norm_options, impl="reference")
    expected: list[torch.Tensor] = []
    bound: list[torch.Tensor] = []
    for rows, table, kv_len in zip(query.split_with_sizes(query_lens), tables, kv_lens, strict=True):
        keys, values = (each[table].transpose(1, 2).flatten(0, 1)[:kv_len].to(dtype) for each in (key, value))
        results, spreads = exact(rows, keys, values, scale, window, sinks)
        expected += results
        bound += spreads

    with poisoned(impl), mock.patch(LAUNCHER, wraps=launch_rope_decode) as launch:
        out = rope_attention(
            qkv,
            *rotation,
            pool[:, 1, 0],
            pool[:, 1, 1],
            *slots,
            plan,
            scale=scale,
            **norm_options,
            sinks=sinks,
            impl=impl,
        )
    in_one_kernel = impl == "auto" and device.type == "cuda" and dim in (64, 128) and pages_dtype is None
    in_one_kernel = in_one_kernel and max(query_lens) == 1 and max(kv_lens) <= FEW_KEYS
    assert launch.called == (in_one_kernel or on_fibers)
    rounding = STEPS[dtype] / 2
    if pages_dtype == FP8:
        rounding = STEPS[FP8]  # a key almost in the middle of two fp8 values may be rounded to either
    allowed = rounding * torch.stack(expected).abs() + 4 * rounding * torch.stack(bound)
    assert ((out.double() - torch.stack(expected)).abs() <= allowed + 1e-6).all()
    written, reference = (each[slots[0], 1, :, :, slots[1]].float() for each in (pool, expected_pool))
    step = STEPS[pool.dtype]
    torch.testing.assert_close(written, reference, rtol=step, atol=step)
    assert written[:, 1].equal(reference[:, 1]), "values changed"
    pool[slots[0], 1, :, :, slots[1]] = expected_pool[slots[0], 1, :, :, slots[1]]
    assert pool.view(torch.uint8).equal(expected_pool.view(torch.uint8)), "something else was written"


def exact(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of query [L, Hq, D] to key and value [T, Hkv, D] in float64, and sqrt(sum(weights^2 values^2)): the
    error of the result, if the relative errors of the weights are independent and of order 1.
    """
    (length, heads, _), (tokens, kv_heads, _) = query.shape, key.shape
    position = torch.arange(tokens - length, tokens, device=query.device)
    distance = position.unsqueeze(1) - torch.arange(tokens, device=query.device)
    hidden = (distance < 0) | (distance >= (window or tokens))
    out, spread = torch.zeros(2, *query.shape, dtype=torch.float64, device=query.device)
    for head in range(heads):
        own = head // (heads // kv_heads)
        scores = query[:, head].double() @ key[:, own].double().T * scale
        weights = scores.masked_fill(hidden, -torch.inf).exp()
        weights /= weights.sum(-1, keepdim=True) + (0.0 if sinks is None else sinks[head].double().exp())
        values = value[:, own].double().nan_to_num()  # rows before the window
        out[:, head], spread[:, head] = weights @ values, (weights**2 @ values**2).sqrt()
    return out, spread


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_decode_steps(geometry: Geometry, normed: bool, where: Where) -> None:
    check(RAGGED if geometry.kv_heads == 1 else FEWER, geometry, where, norm_dtype=where[2] if normed else None)


@three_geometries
@pytest.mark.parametrize("kv_len", [1, 2, 17, 64, 65, 128, 129, 700])
def test_one_sequence(kv_len: int, geometry: Geometry, where: Where) -> None:
    """With and without keys before the newest one; in one piece, and in several."""
    check([kv_len], geometry, where, norm_dtype=where[2])


@pytest.mark.parametrize(("window", "with_sinks"), [(1, False), (8, True), (70, False), (None, True)])
@three_geometries
def test_windows_and_sinks(geometry: Geometry, window: int | None, with_sinks: bool, where: Where) -> None:
    check(RAGGED, geometry, where, window=window, with_sinks=with_sinks)


@pytest.mark.parametrize("geometry", [SMALL, Geometry(16, 2, 64, 16)], ids=str)
def test_sinks_of_several_kv_heads(geometry: Geometry, where: Where) -> None:
    check(FEWER, geometry, where, window=20, with_sinks=True)


@three_geometries
def test_norms_in_float32_and_fp8_pages(geometry: Geometry, where: Where) -> None:
    check(RAGGED, geometry, where, norm_dtype=torch.float32)
    check(RAGGED, geometry, where, pages_dtype=FP8)


def test_prompts(where: Where) -> None:
    """Sequences with several queries take two kernels."""
    check([9, 50, 20], SMALL, where, query_lens=[9, 1, 4], norm_dtype=where[2])


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
class TestOnFibers:
    """The CUDA kernel on a CPU."""

    @pytest.fixture(autouse=True)
    def kernels(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rope_decode_cuda, "load_kernel", FiberKernels(tmp_path, cluster=8).load)
        monkeypatch.setattr("pdserve.kernels.attention.rope_attention.most_sequences", lambda *_: 8)

    def test_decode_steps(self) -> None:
        check([1, 18, 130], WIDE, BF16_ON_CPU, norm_dtype=torch.bfloat16, on_fibers=True)

    def test_window_and_sinks(self) -> None:
        norm, geometry = torch.float32, Geometry(6, 2, 64, 5)
        check([1, 21, 300], geometry, BF16_ON_CPU, norm_dtype=norm, window=140, with_sinks=True, on_fibers=True)

    def test_odd_groups_and_pages(self) -> None:
        check([3, 150], Geometry(5, 1, 128, 48), BF16_ON_CPU, on_fibers=True)

    def test_check_detects_a_lost_key(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        changes = {"end = min(begin + share, newest);": "end = min(begin + share, newest - 1);"}
        monkeypatch.setattr(rope_decode_cuda, "load_kernel", FiberKernels(tmp_path, changes, cluster=8).load)
        with pytest.raises(AssertionError):
            check([700], Geometry(2, 1, 64, 16), BF16_ON_CPU, on_fibers=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_lens", [[4097], [FEW_KEYS], [FEW_KEYS + 1], [3000, 1, 640]], ids=str)
def test_long_sequences(kv_lens: list[int]) -> None:
    cuda, dtype = torch.device("cuda"), torch.bfloat16
    places: list[Where] = [("triton", cuda, torch.float32), ("triton", cuda, dtype), ("auto", cuda, dtype)]
    for place in places:
        check(kv_lens, Geometry(16, 2, 128, 64), place, norm_dtype=place[2])


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
