"""Products of 16-bit matrices on the CPU, as torch computes them and expanded to float32."""

import time

import pytest
import torch

from pdserve.kernels.attention.paged_attention import paged_attention, plan_attention
from pdserve.kernels.backends import half_products
from pdserve.kernels.backends.half_products import computes_in, grouped_reference, linear_reference
from pdserve.kernels.head_linear.head_linear import head_linear

CPU = torch.device("cpu")
TOLERANCES = {torch.bfloat16: 2**-6, torch.float16: 2**-9}
USERS = [
    "pdserve.kernels.backends.half_products.computes_in",
    "pdserve.kernels.head_linear.head_linear.computes_in",
    "pdserve.kernels.attention.paged_attention.computes_in",
]

pytestmark = pytest.mark.parametrize("dtype", TOLERANCES)


@pytest.fixture(params=["in 16 bits", "in float32"], autouse=True)
def _compute_dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for user in USERS:
        monkeypatch.setattr(user, lambda dtype: torch.float32 if request.param == "in float32" else dtype)
    monkeypatch.setattr(half_products, "_PART_BYTES", 4 * 24 * 5)  # five rows of the weights below


def randn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).div(shape[-1] ** 0.25).to(dtype)


def check(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("out_size", [1, 5, 13])
def test_linear(dtype: torch.dtype, out_size: int) -> None:
    x, weight, bias = randn(dtype, 3, 24), randn(dtype, out_size, 24), randn(dtype, out_size)
    check(linear_reference(x, weight), x.double() @ weight.double().T, dtype)
    check(linear_reference(x, weight, bias), x.double() @ weight.double().T + bias.double(), dtype)


def test_groups(dtype: torch.dtype) -> None:
    rows, matrices = randn(dtype, 9, 16), randn(dtype, 4, 16, 24)
    ends = torch.tensor([2, 2, 7, 8], dtype=torch.int32)  # no row for the second matrix, the last row for none
    result = grouped_reference(rows, matrices, ends)
    for matrix, start, end in zip(matrices, (0, 2, 2, 7), ends.tolist(), strict=True):
        check(result[start:end], rows[start:end].double() @ matrix.double(), dtype)


def test_heads(dtype: torch.dtype) -> None:
    x, weight = randn(dtype, 5, 3, 16), randn(dtype, 3, 16, 8)
    out = x.new_empty(5, 3, 8)
    head_linear(x, weight, out)
    check(out, torch.einsum("thk,hkn->thn", x.double(), weight.double()), dtype)


def test_attention(dtype: torch.dtype) -> None:
    """A prompt of six tokens and one token of a decoding sequence."""
    pages = [[0, 1], [2]]
    query, keys, values = randn(dtype, 7, 2, 16), randn(dtype, 3, 2, 4, 16), randn(dtype, 3, 2, 4, 16)
    plan = plan_attention([6, 1], [6, 3], pages, page_size=4, num_kv_heads=2, device=CPU)
    result = paged_attention(query, keys, values, plan, scale=0.5)
    position = 0
    for ids, queries, length in zip(pages, (6, 1), (6, 3), strict=True):
        key, value = (part[ids].transpose(0, 1).reshape(2, -1, 16)[:, :length].double() for part in (keys, values))
        scores = torch.einsum("qhd,hkd->hqk", query[position : position + queries].double(), key) * 0.5
        hidden = torch.ones(queries, length, dtype=torch.bool).triu(length - queries + 1)
        expected = torch.einsum("hqk,hkd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)
        check(result[position : position + queries], expected, dtype)
        position += queries


def test_types_are_compared_on_one_thread(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two busy cores, the ratio of 16 bits to float32 was 4 with two threads, and 280 with one."""
    threads, times, seen = torch.get_num_threads(), iter([3.0, 1.0]), []

    def fastest_s(_: torch.Tensor) -> float:
        seen.append(torch.get_num_threads())
        return next(times)

    monkeypatch.setattr(half_products, "_fastest_s", fastest_s)
    try:
        torch.set_num_threads(2)
        assert not half_products._is_fast(dtype)
        assert (seen, torch.get_num_threads()) == ([1, 1], 2)
    finally:
        torch.set_num_threads(threads)


def test_products_take_about_as_long_as_in_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without expansion they take more than 200 times as long on Neoverse-N1."""
    monkeypatch.undo()
    times = {}
    for each in (torch.float32, dtype):
        x, weight = torch.ones(128, 256, dtype=each), torch.ones(256, 256, dtype=each)
        linear_reference(x, weight)  # the first call measures both types
        start = time.process_time()
        for _ in range(3):
            linear_reference(x, weight)
        times[each] = time.process_time() - start
    assert times[dtype] < 20 * times[torch.float32], computes_in(dtype)
