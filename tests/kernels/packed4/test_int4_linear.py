"""Linear layers with 4-bit weights: every method against float64 products with the expanded weights."""

from typing import Any

import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl
from pdserve.kernels.backends.few_rows_cuda import Tiles
from pdserve.kernels.packed4.group_format import GroupScaled, group_in_memory
from pdserve.kernels.packed4.int4_linear import expanded_rows, int4_gated_linear, int4_linear, output_parts
from pdserve.kernels.packed4.int4_linear_cuda import suits_cuda
from tests.kernels.group_scaled import draw_group_scaled
from tests.kernels.places import each_of
from tests.kernels.poison import poisoned

here = each_of(
    ("reference", "cpu", torch.float32),
    ("triton", "cpu", torch.float32),
    ("reference", "cuda", torch.bfloat16),
    ("triton", "cuda", torch.bfloat16),
    ("triton", "cuda", torch.float16),
)
kernels = each_of(
    ("triton", "cpu", torch.float32), ("triton", "cuda", torch.bfloat16), ("triton", "cuda", torch.float16)
)
Place = tuple[Impl, torch.device, torch.dtype]
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2**-9, torch.bfloat16: 2**-7}
"""Relative to results of order 1: one rounding."""


def drawn(place: Place, rows: int, out_size: int, in_size: int, group: int) -> tuple[torch.Tensor, GroupScaled, Any]:
    _, device, dtype = place
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, in_size, generator=generator).to(device, dtype)
    weight = draw_group_scaled(out_size, in_size, generator=generator, group=group, dtype=dtype, device=device)
    bias = torch.randn(out_size, generator=generator).to(device, dtype)
    return x, weight, bias


def tolerance(place: Place) -> dict[str, Any]:
    return {"rtol": TOLERANCES[place[2]], "atol": TOLERANCES[place[2]]}


@pytest.mark.parametrize(
    ("rows", "out_size", "in_size", "group"),
    [
        (1, 64, 1280, 128),
        (3, 130, 384, 128),  # an odd number of groups, and a number of outputs that the CUDA kernel does not support
        (3, 144, 384, 128),  # a partial tile of outputs
        (16, 64, 64, 32),
        (33, 96, 192, 64),
        (70, 32, 256, 128),  # several tiles of rows
        (2, 48, 1056, 32),
        (20, 96, 1152, 128),
    ],
)
def test_products(here: Place, rows: int, out_size: int, in_size: int, group: int) -> None:
    impl, device, dtype = here
    x, weight, bias = drawn(here, rows, out_size, in_size, group)
    expected = x.double() @ weight.expanded().double().T
    on_cuda = impl == "triton" and suits_cuda(x, weight)
    assert on_cuda == (impl == "triton" and device.type == "cuda" and dtype.itemsize == 2 and out_size % 16 == 0)
    for tiles in (None, *((Tiles(outputs=32, warps=4, stages=3), Tiles(outputs=16)) if on_cuda else ())):
        with poisoned(impl):
            plain = int4_linear(x, weight, tiles=tiles, impl=impl)
            biased = int4_linear(x, weight, bias, tiles=tiles, impl=impl)
        torch.testing.assert_close(plain.double(), expected, **tolerance(here))
        torch.testing.assert_close(biased.double(), expected + bias.double(), **tolerance(here))
        if not on_cuda:
            return
        with poisoned(impl):
            gated = int4_gated_linear(x, weight, bias, tiles=tiles)
        gate, up = (expected + bias.double()).chunk(2, dim=-1)
        limits = {name: 4 * value for name, value in tolerance(here).items()}
        torch.testing.assert_close(gated.double(), gate * gate.sigmoid() * up, **limits)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 20])
def test_thread_blocks_compute_several_tiles(rows: int) -> None:
    """There are more tiles of outputs than a GPU runs at a time."""
    place: Place = ("triton", torch.device("cuda"), torch.bfloat16)
    x, weight, bias = drawn(place, rows, 24_000, 640, 128)
    found = int4_linear(x, weight, bias, method="cuda")
    expected = x.double() @ weight.expanded().double().T + bias.double()
    torch.testing.assert_close(found.double(), expected, **tolerance(place))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_x_as_integers(group: int, dtype: torch.dtype) -> None:
    """x has groups of columns of very different magnitude, a few large columns among small ones, and the largest
    mantissa.
    """
    place: Place = ("triton", torch.device("cuda"), dtype)
    x, weight, _ = drawn(place, 2, 256, 1024, group)
    x *= torch.logspace(-3, 1.5, 1024, device=x.device).to(dtype)[torch.randperm(1024)]
    x[:, ::97] *= 30
    x[1, 512:640] = torch.tensor(0x53FF if dtype == torch.float16 else 0x427F, dtype=torch.int16).view(dtype)
    x[1, 640:768] = 0
    products = x.double()[:, None] * weight.expanded().double()
    found = int4_linear(x, weight)
    error = (found.double() - products.sum(-1)).abs()
    # one rounding of the result, and one of x to 2^-14 of the largest of its group
    largest = x.double().abs().reshape(2, -1, group).amax(-1).repeat_interleave(group, dim=1)
    rounding = 2**-15 * 1.01 * largest @ weight.expanded().double().abs().T
    limit = TOLERANCES[dtype] / 2 * products.sum(-1).abs() + rounding
    assert float((error / limit).max()) < 1


@pytest.mark.gpu
def test_nan_and_infinity_give_no_finite_result() -> None:
    place: Place = ("triton", torch.device("cuda"), torch.bfloat16)
    x, weight, _ = drawn(place, 2, 64, 512, 128)
    x[0, 300] = float("nan")
    x[1, 5] = float("inf")
    assert not int4_linear(x, weight).isfinite().any()


@pytest.mark.parametrize(("out_size", "in_size", "group"), [(40, 384, 128), (133, 64, 32), (300, 128, 64)])
def test_expanded_products(kernels: Place, out_size: int, in_size: int, group: int) -> None:
    """Weights are expanded some rows at a time, also rows that begin inside a matrix."""
    impl, _, dtype = kernels
    x, weight, bias = drawn(kernels, 5, out_size, in_size, group)
    with poisoned(impl):
        assert expanded_rows(weight[7:30], dtype).equal(weight.expanded()[7:30].to(dtype))
        found = int4_linear(x, weight, method="expand", scratch_bytes=16 * in_size * dtype.itemsize, impl=impl)
        biased = int4_linear(x, weight, bias, method="expand", impl=impl)
    expected = x.double() @ weight.expanded().to(dtype).double().T
    torch.testing.assert_close(found.double(), expected, **tolerance(kernels))
    torch.testing.assert_close(biased.double(), expected + bias.double(), **tolerance(kernels))


def test_parts_are_about_equal_and_within_the_scratch_memory() -> None:
    """Outputs of gate_up, and bytes of an output: Qwen3-30B-A3B, Mixtral-8x7B, gpt-oss-20b, and two small cases."""
    for outputs, output_bytes, expected in (
        (768, 2 * 128 * 2048 * 2, [384, 384]),
        (14336, 2 * 8 * 4096 * 2, [3584] * 4),
        (2880, 2 * 32 * 2880 * 2, [1024, 1024, 832]),
        (160, 1 << 30, [128, 32]),
        (160, 1, [160]),
    ):
        parts = list(output_parts(outputs, output_bytes, 512 << 20))
        assert [part.stop - part.start for part in parts] == expected
        assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]


def test_rows_of_a_matrix_are_multiplied(kernels: Place) -> None:
    x, weight, _ = drawn(kernels, 2, 48, 256, 64)
    with poisoned(kernels[0]):
        found = int4_linear(x, weight[8:40], impl=kernels[0])
    expected = x.double() @ weight.expanded()[8:40].double().T
    torch.testing.assert_close(found.double(), expected, **tolerance(kernels))


def test_values_are_where_the_format_says() -> None:
    """As group_format.py defines it."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(16, (3, 192), generator=generator, dtype=torch.uint8)
    scales, zeros = torch.rand(3, 6, generator=generator), torch.randint(17, (3, 6), generator=generator)
    weight = GroupScaled.allocate(3, 192, group=32, dtype=torch.float32, device=torch.device("cpu"))
    weight.fill(values, scales, zeros)
    for row in range(3):
        for column in range(192):
            pair, half, at = column // 64, column // 32 % 2, column % 32
            assert int(weight.packed[row, pair * 32 + at]) >> 4 * half & 15 == int(values[row, column])
            expected = (int(values[row, column]) - zeros[row, column // 32]) * scales[row, column // 32]
            assert float(weight.expanded()[row, column]) == pytest.approx(float(expected))
    assert weight[1:].expanded().equal(weight.expanded()[1:])
    assert weight.nbytes == 3 * 96 + 2 * 6 * 3 * 4


def test_groups_in_memory_divide_those_of_a_checkpoint() -> None:
    assert group_in_memory(128, 4096) == 128
    assert group_in_memory(4096, 4096) == 128  # a scale per row
    assert group_in_memory(128, 4736, first_column=4736) == 128
    assert group_in_memory(128, 1088, first_column=1088) == 64
    assert group_in_memory(128, 80, first_column=80) is None


def test_unsuitable_arguments_are_refused() -> None:
    weight = draw_group_scaled(64, 128, generator=torch.Generator().manual_seed(3))
    with pytest.raises(ValueError, match="as long as those of weight"):
        int4_linear(torch.zeros(2, 64), weight)
    with pytest.raises(ValueError, match="an element for each row"):
        int4_linear(torch.zeros(2, 128), weight, torch.zeros(63))
