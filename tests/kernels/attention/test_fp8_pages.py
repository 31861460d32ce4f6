"""Pages of float8_e4m3fn with wider compute dtypes: rounded when written, widened when read.

Triton's interpreter loses the carry when it rounds to fp8 (1.99 becomes 1.0), so rounding is tested on the GPU, and
everything else in the interpreter.
"""

import itertools
import random

import pytest
import torch

from pdserve.kernels.attention.kv_write import kv_write_reference
from pdserve.kernels.attention.paged_attention import paged_attention, plan_attention
from pdserve.kernels.attention.rope_kv_write import rope_kv_write
from pdserve.kernels.backends.dispatch import Impl
from tests.kernels.places import each_of

FP8 = torch.float8_e4m3fn
Where = tuple[Impl, torch.device]

PAGES, LAYERS, PAGE_SIZE, TOKENS, HEADS, KV_HEADS, DIM = 40, 3, 5, 9, 6, 2, 24

where = each_of(
    ("reference", "cpu"),
    ("triton", "cpu"),
    ("reference", "cuda"),
    ("triton", "cuda"),
)


def fp8_values() -> torch.Tensor:
    """All finite values of e4m3, from its definition: 4 bits of exponent with bias 7, 3 of mantissa."""
    magnitudes = [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    magnitudes += [
        (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        for exponent, mantissa in itertools.product(range(1, 16), range(8))
        if (exponent, mantissa) != (15, 7)  # NaN
    ]
    return torch.tensor(sorted({*magnitudes, *(-value for value in magnitudes)}), dtype=torch.float64)


def nearest(x: torch.Tensor) -> torch.Tensor:
    """The nearest value of e4m3, ties to even; the largest one for values out of range."""
    values = fp8_values().to(x.device)
    x = x.double().clamp(-448, 448)
    above = torch.searchsorted(values, x).clamp(1, len(values) - 1)
    low, high = values[above - 1], values[above]
    halfway = (x - low) == (high - x)
    zero = len(values) // 2  # its mantissa is even, and that of every second value on both sides
    upper = torch.where(halfway, (above - zero) % 2 == 0, (x - low) > (high - x))
    return torch.where(upper, high, low)


def pool(device: torch.device) -> torch.Tensor:
    return torch.full((PAGES, LAYERS, 2, KV_HEADS, PAGE_SIZE, DIM), 3.0, device=device).to(FP8)


def slots(generator: torch.Generator, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = torch.randperm(PAGES * PAGE_SIZE, generator=generator)[:TOKENS].to(device)
    return chosen // PAGE_SIZE, chosen % PAGE_SIZE


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_rows_are_rounded_to_the_nearest_and_saturate(tokens: int) -> None:
    generator = torch.Generator().manual_seed(1)
    scale = 10.0 ** torch.linspace(-4, 5, tokens * KV_HEADS * DIM).view(tokens, KV_HEADS, DIM)
    key, value = torch.randn(2, tokens, KV_HEADS, DIM, generator=generator) * scale
    key[0, 0, :4] = torch.tensor([17.0, 19.0, -1e30, 448.0])  # two ties (to 16 and 20), and the end of the range
    page_ids, offsets = (part[:tokens] for part in slots(generator, key.device))
    data = pool(key.device)
    before = data.clone()
    kv_write_reference(data[:, 1, 0], data[:, 1, 1], key, value, page_ids, offsets)
    written = data[page_ids, 1, :, :, offsets].double()  # [tokens, plane, head, dim]
    assert written[:, 0].equal(nearest(key))
    assert written[:, 1].equal(nearest(value))
    before[page_ids, 1, :, :, offsets] = data[page_ids, 1, :, :, offsets]
    assert data.view(torch.uint8).equal(before.view(torch.uint8)), "something else was written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_are_computed_in_the_model_dtype_then_rounded(dtype: torch.dtype, where: Where) -> None:
    impl, device = where
    interpreted = impl == "triton" and device.type == "cpu"
    if interpreted and dtype == torch.bfloat16:
        pytest.skip("the interpreter does not round to bfloat16")
    generator = torch.Generator().manual_seed(2)
    qkv = 3 * torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * DIM, generator=generator)
    qkv[3] *= 1000  # beyond the range of e4m3
    angles = 10 * torch.rand(TOKENS, DIM // 2, generator=generator)
    if interpreted:
        qkv, angles = nearest(qkv).float(), torch.zeros_like(angles)
        qkv[3] *= 1000
    qkv = qkv.to(device, dtype)
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(device, dtype)
    signed_sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(device, dtype)
    page_ids, offsets = slots(generator, device)
    exact = torch.zeros(PAGES, LAYERS, 2, KV_HEADS, PAGE_SIZE, DIM, dtype=dtype, device=device)
    arguments = (qkv, cos, signed_sin)
    expected_query = rope_kv_write(*arguments, exact[:, 1, 0], exact[:, 1, 1], page_ids, offsets, impl=impl)
    data = pool(device)
    before = data.clone()
    query = rope_kv_write(*arguments, data[:, 1, 0], data[:, 1, 1], page_ids, offsets, impl=impl)
    assert query.equal(expected_query)
    written = data[page_ids, 1, :, :, offsets]
    assert written.double().equal(nearest(exact[page_ids, 1, :, :, offsets]))
    assert written.double().abs().max() == 448
    before[page_ids, 1, :, :, offsets] = written
    assert data.view(torch.uint8).equal(before.view(torch.uint8)), "something else was written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[(1, 37)], [(1, 50), (9, 9), (1, 3), (4, 20), (1, 49), (1, 1)]], ids=str)
def test_attention_over_fp8_pages_equals_attention_over_wide_pages(
    lengths: list[tuple[int, int]], dtype: torch.dtype, where: Where
) -> None:
    impl, device = where
    generator = torch.Generator().manual_seed(3)
    data = (2 * torch.randn(PAGES, LAYERS, 2, KV_HEADS, PAGE_SIZE, DIM, generator=generator)).to(device).to(FP8)
    free = iter(random.Random(4).sample(range(PAGES), PAGES))
    tables = [[next(free) for _ in range(-(-kv_len // PAGE_SIZE))] for _, kv_len in lengths]
    plan = plan_attention(
        [query_len for query_len, _ in lengths],
        [kv_len for _, kv_len in lengths],
        tables,
        page_size=PAGE_SIZE,
        num_kv_heads=KV_HEADS,
        device=device,
        impl=impl,
    )
    query = torch.randn(plan.tokens, HEADS, DIM, generator=generator).to(device, dtype)
    wide = data.to(dtype)
    expected = paged_attention(query, wide[:, 1, 0], wide[:, 1, 1], plan, scale=0.2)
    out = paged_attention(query, data[:, 1, 0], data[:, 1, 1], plan, scale=0.2)
    assert out.dtype == dtype
    assert out.equal(expected)
    assert out.abs().max() > 0.5


def test_other_combinations_of_dtypes_are_refused() -> None:
    half = torch.zeros(2, 2, 4, 8, dtype=torch.half)
    plan = plan_attention([1], [3], [[0]], page_size=4, num_kv_heads=2, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"the pages are torch\.float16"):
        paged_attention(torch.zeros(1, 4, 8), half, half, plan, scale=1.0)
    with pytest.raises(ValueError, match=r"the pages are torch\.float8_e4m3fn and torch\.float16"):
        paged_attention(torch.zeros(1, 4, 8), half.to(FP8), half, plan, scale=1.0)
