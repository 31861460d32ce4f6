"""Block-scaled linear layers: every method against float64 products of the same activations and weights."""

from typing import Any

import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl
from pdserve.kernels.linear.fp8_format import Fp8Matrix, common_row_group, supports_fp8
from pdserve.kernels.linear.fp8_linear import (
    FEW_ROWS,
    Method,
    choose_method,
    fp8_gated_linear,
    fp8_linear,
    fp8_mlp,
)
from pdserve.kernels.linear.quantise import quantise, quantise_reference, swiglu_quantise
from pdserve.kernels.linear.swiglu import swiglu_reference
from tests.kernels.fp8_matrices import draw_block_scaled, draw_row_scaled, moved
from tests.kernels.places import each_of
from tests.kernels.poison import poisoned

here = each_of(
    ("reference", "cpu", torch.float32),
    ("triton", "cpu", torch.float32),
    ("reference", "cuda", torch.bfloat16),
    ("triton", "cuda", torch.bfloat16),
    ("triton", "cuda", torch.float16),
)
Place = tuple[Impl, torch.device, torch.dtype]
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2**-9, torch.bfloat16: 2**-7}
"""Relative to results of order 1: one rounding. Sums of fp8 products on tensor cores lose a little more."""


def tolerance(place: Place, method: Method) -> dict[str, Any]:
    extra = 2e-3 if method != "exact" and place[1].type == "cuda" else 0.0
    return {"rtol": TOLERANCES[place[2]], "atol": TOLERANCES[place[2]] + extra}


@pytest.mark.parametrize(
    ("rows", "out_size", "in_size", "row_group"),
    [
        (1, 64, 1152, 128),
        (3, 200, 576, 64),
        (16, 130, 72, 16),
        (33, 192, 256, 128),
        (FEW_ROWS, 64, 128, 8),
        (2, 130, 1096, None),
        (3, 200, 512, 64),  # from here on, up to 8 rows of whole blocks
        (8, 130, 1024, None),
        (5, 72, 128, 8),
    ],
)
def test_few_rows_are_exact(here: Place, rows: int, out_size: int, in_size: int, row_group: int | None) -> None:
    """With several programs per block of weights, partial blocks, rows of scales that repeat, and a scale per row."""
    impl, device, dtype = here
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, in_size, generator=generator).to(device, dtype)
    weight = _drawn(out_size, in_size, row_group, generator, device)
    expected = x.double() @ _expanded(weight).T
    assert choose_method(rows, weight) == "exact"
    bias = torch.randn(out_size, generator=generator).to(device, dtype) if rows % 2 else None
    with poisoned(impl):
        plain = fp8_linear(x, weight, bias, impl=impl)
        gated = fp8_gated_linear(x, weight, bias, impl=impl)
    expected = expected if bias is None else expected + bias.double()
    torch.testing.assert_close(plain.double(), expected, **tolerance(here, "exact"))
    gate, up = expected.chunk(2, dim=-1)
    limits = {name: 2 * value for name, value in tolerance(here, "exact").items()}
    torch.testing.assert_close(gated.double(), gate * gate.sigmoid() * up, **limits)


@pytest.mark.parametrize(
    ("rows", "out_size", "in_size", "row_group"),
    [(65, 128, 256, 128), (70, 200, 200, 64), (130, 136, 72, 8), (1, 64, 128, 128), (66, 130, 200, None)],
)
def test_many_rows_multiply_quantised_activations(
    here: Place, rows: int, out_size: int, in_size: int, row_group: int | None
) -> None:
    """The reference quantises x, because the interpreter rounds to fp8 wrongly."""
    impl, device, dtype = here
    generator = torch.Generator().manual_seed(rows)
    x = quantise_reference(torch.randn(rows, in_size, generator=generator).to(device, dtype))
    weight = _drawn(out_size, in_size, row_group, generator, device)
    expected = x.expanded().double() @ _expanded(weight).T
    bias = torch.randn(out_size, generator=generator).to(device, dtype) if rows % 2 else None
    with poisoned(impl):
        found = fp8_linear(x, weight, bias, method="triton", impl=impl)
    expected = expected if bias is None else expected + bias.double()
    torch.testing.assert_close(found.double(), expected, **tolerance(here, "triton"))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "out_size", "in_size"), [(65, 128, 128), (300, 7168, 2304), (1024, 2048, 7168)])
@pytest.mark.parametrize("method", ["cublas", "triton"])
def test_many_rows_on_a_gpu_equal_the_reference(method: Method, rows: int, out_size: int, in_size: int) -> None:
    """The whole path, including the quantisation of x. The padding of the scales has no effect on cuBLAS."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    device = torch.device("cuda", 0)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, in_size, generator=generator).to(device, torch.bfloat16)
    weight = moved(draw_block_scaled(out_size, in_size, generator=generator), device)
    weight.scales.nan_to_num_(nan=0.0)
    expected = quantise_reference(x).expanded().double() @ _expanded(weight).T
    found = fp8_linear(x, weight, method=method)
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(("rows", "out_size", "in_size"), [(65, 48, 64), (67, 144, 272), (1, 64, 128)])
def test_rowwise_products_have_a_scale_per_token(here: Place, rows: int, out_size: int, in_size: int) -> None:
    """The reference quantises x. torch's rowwise product and Triton multiply the same values and scales."""
    impl, device, dtype = here
    generator = torch.Generator().manual_seed(rows)
    drawn = torch.randn(rows, in_size, generator=generator) * 2.0 ** torch.randint(
        -3, 4, (rows, 1), generator=generator
    )
    x = quantise_reference(drawn.to(device, dtype), by_row=True)
    weight = _drawn(out_size, in_size, None, generator, device)
    bias = torch.randn(out_size, generator=generator).to(device, dtype) if rows != 67 else None
    expected = x.expanded().double() @ _expanded(weight).T
    expected = expected if bias is None else expected + bias.double()
    methods: tuple[Method, ...] = ("triton",) if dtype == torch.float16 else ("rowwise", "triton")
    for method in methods:
        found = fp8_linear(x, weight, bias, method=method, impl=impl)
        limits = {name: 8 * value for name, value in tolerance(here, method).items()}  # results are of order 8
        torch.testing.assert_close(found.double(), expected, **limits)


def test_reference_of_rowwise_products_quantises_by_row() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(FEW_ROWS + 1, 272, generator=generator)
    x[:, 0] = 50  # groups of columns have scales that differ from the row's
    weight = draw_row_scaled(48, 272, generator=generator)
    found = fp8_linear(x, weight, method="rowwise", impl="reference")
    expected = quantise_reference(x, by_row=True).expanded() @ weight.expanded().T
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(found, fp8_linear(x, weight, method="triton", impl="reference"), atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "out_size", "in_size", "biased"),
    [(65, 128, 128, True), (301, 7168, 2304, False), (1024, 2064, 7184, True)],
)
def test_many_rows_with_a_scale_per_row_are_rowwise_on_a_gpu(
    rows: int, out_size: int, in_size: int, *, biased: bool
) -> None:
    """The whole path, including the quantisation of x, of a linear layer and of an MLP."""
    device = torch.device("cuda", 0)
    if not supports_fp8(device):
        pytest.skip("needs a GPU of compute capability 8.9")
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, in_size, generator=generator).to(device, torch.bfloat16)
    weight = _drawn(out_size, in_size, None, generator, device)
    bias = torch.randn(out_size, generator=generator).to(device, torch.bfloat16) if biased else None
    assert choose_method(rows, weight, biased=biased) == "rowwise"
    assert choose_method(rows, weight, dtype=torch.float16) == "triton"
    assert choose_method(rows, _drawn(out_size + 8, in_size, None, generator, device)) == "triton"
    expected = quantise_reference(x, by_row=True).expanded().double() @ _expanded(weight).T
    expected = expected if bias is None else expected + bias.double()
    found = fp8_linear(x, weight, bias)
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2**-6)
    down = _drawn(in_size, out_size // 2, None, generator, device)
    gated = swiglu_reference(found)
    expected = gated.double() @ _expanded(down).T
    error = fp8_mlp(x, weight, down, bias).double() - expected
    assert error.norm() / expected.norm() < 0.05


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("columns", [16, 200, 384])
def test_rows_that_fp8_represents_are_quantised_exactly_by_row(here: Place, rows: int, columns: int) -> None:
    impl, device, dtype = here
    generator = torch.Generator().manual_seed(rows)
    x = torch.randint(-14, 15, (rows, columns), generator=generator).float() * 32
    x[:, -1] = -448  # so the scale of a row is the power of two by which it is multiplied next
    x *= 2.0 ** torch.randint(-3, 4, (rows, 1), generator=generator)
    x[0] = 0
    x = x.to(device, dtype)
    with poisoned(impl):
        found = quantise(x, by_row=True, impl=impl)
    assert found.expanded().equal(x.float())
    assert found.scales.shape == (len(found.values), 1)
    assert found.scales.stride() == (1, 1)
    assert len(found.values) % 4 == 0
    assert not found.values[rows:].float().any()
    assert bool(found.scales.isfinite().all())
    gate_up = torch.randn(rows, 2 * columns, generator=generator).to(device, dtype)
    expected = quantise_reference(swiglu_reference(gate_up), by_row=True)
    with poisoned(impl):
        gated = swiglu_quantise(gate_up, by_row=True, impl=impl)
    torch.testing.assert_close(gated.scales, expected.scales, rtol=TOLERANCES[dtype], atol=0)
    near = torch.isclose(gated.expanded(), expected.expanded(), rtol=2**-3, atol=1e-3)  # a step of fp8
    interpreted = impl == "triton" and device.type == "cpu"  # rounds up to a power of two wrongly
    assert near.float().mean() > (0.8 if interpreted else 0.99)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("columns", [128, 200, 384])
def test_rows_that_fp8_represents_are_quantised_exactly(here: Place, rows: int, columns: int) -> None:
    impl, device, dtype = here
    generator = torch.Generator().manual_seed(rows)
    x = torch.randint(-14, 15, (rows, columns), generator=generator).float() * 32
    x[:, ::128] = 448  # so the scale of a group is the power of two by which it is multiplied next
    x *= 2.0 ** torch.randint(-3, 4, (rows, 1), generator=generator)
    x[0, :128] = 0
    x = x.to(device, dtype)
    with poisoned(impl):
        found = quantise(x, impl=impl)
    assert found.expanded().equal(x.float())
    assert columns == 128 or found.scales.stride() == (1, found.values.shape[0])
    assert len(found.values) % 4 == 0
    assert not found.values[rows:].float().any()
    if impl == "reference" or device.type == "cuda":
        gate_up = torch.randn(rows, 2 * columns, generator=generator).to(device, dtype)
        expected = quantise_reference(swiglu_reference(gate_up)).expanded()
        with poisoned(impl):
            gated = swiglu_quantise(gate_up, impl=impl).expanded()
        torch.testing.assert_close(gated, expected, rtol=2**-3, atol=1e-3)  # a step of fp8
        assert (gated == expected).float().mean() > 0.97


def test_mlp_quantises_the_gate_of_many_rows() -> None:
    generator = torch.Generator().manual_seed(1)
    gate_up = draw_block_scaled(320, 192, generator=generator)
    down = draw_block_scaled(192, 160, generator=generator)
    for rows in (FEW_ROWS, FEW_ROWS + 1):
        x = torch.randn(rows, 192, generator=generator)
        if rows > FEW_ROWS:
            gated = quantise_reference(swiglu_reference(quantise_reference(x).expanded() @ gate_up.expanded().T))
            expected = gated.expanded() @ down.expanded().T
        else:
            expected = swiglu_reference(x @ gate_up.expanded().T) @ down.expanded().T
        torch.testing.assert_close(fp8_mlp(x, gate_up, down), expected, rtol=0, atol=1e-5)


def test_rows_of_a_matrix_keep_their_scales() -> None:
    weight = draw_block_scaled(192, 256, generator=torch.Generator().manual_seed(2), row_group=64)
    assert weight[64:160].expanded().equal(weight.expanded()[64:160])
    assert common_row_group((1536, 2112)) == 64
    with pytest.raises(AssertionError, match="inside a block"):
        weight[32:]


def test_unsuitable_arguments_are_refused() -> None:
    weight = draw_block_scaled(64, 128, generator=torch.Generator().manual_seed(3))
    x = torch.zeros(FEW_ROWS + 1, 128)
    with pytest.raises(ValueError, match="as long as those of weight"):
        fp8_linear(x[:, :64].contiguous(), weight)
    with pytest.raises(ValueError, match="at most 64 rows"):
        fp8_linear(x, weight, method="exact")
    with pytest.raises(ValueError, match="an element for each row"):
        fp8_linear(x, weight, torch.zeros(63))
    with pytest.raises(ValueError, match="cuBLAS takes no bias"):
        fp8_linear(x, weight, torch.zeros(64), method="cublas")
    with pytest.raises(ValueError, match="rowwise product takes"):
        fp8_linear(x, weight, method="rowwise")
    wide, grouped = draw_row_scaled(64, 256, generator=torch.Generator()), quantise_reference(torch.zeros(65, 256))
    with pytest.raises(ValueError, match="rowwise product takes"):
        fp8_linear(grouped, wide, method="rowwise")


def _drawn(
    out_size: int, in_size: int, row_group: int | None, generator: torch.Generator, device: torch.device
) -> Fp8Matrix:
    """Random weights; without `row_group`, with a scale per row."""
    if row_group is None:
        return moved(draw_row_scaled(out_size, in_size, generator=generator), device)
    return moved(draw_block_scaled(out_size, in_size, generator=generator, row_group=row_group), device)


def _expanded(weight: Fp8Matrix) -> torch.Tensor:
    return Fp8Matrix(weight.values, weight.scales.nan_to_num(nan=0.0), weight.row_group).expanded().double()
