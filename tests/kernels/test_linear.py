"""linear and gated_linear against float64."""

import pytest
import torch

from pdserve.kernels.dispatch import Impl
from pdserve.kernels.linear import FEW_ROWS, gated_linear, linear

# inputs are of order 1, so are the results: one rounding in 16 bits, a float32 sum in 32
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "out_size", "in_size"), [(1, 6144, 4096), (3, 192, 576), (16, 64, 128), (FEW_ROWS, 100, 200), (2, 2, 7)]
)
def test_both_equal_float64(
    rows: int, out_size: int, in_size: int, bias: bool, dtype: torch.dtype, where: tuple[Impl, torch.device]
) -> None:
    impl, device = where
    generator = torch.Generator().manual_seed(out_size + in_size)
    x = torch.randn(rows, in_size, generator=generator).to(device, dtype)
    weight = (torch.randn(out_size, in_size, generator=generator) / in_size**0.5).to(device, dtype)
    offset = torch.randn(out_size, generator=generator).to(device, dtype) if bias else None
    expected = x.double() @ weight.double().T
    if offset is not None:
        expected = expected + offset.double()
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(linear(x, weight, offset, impl=impl).double(), expected, rtol=tolerance, atol=tolerance)
    gate, up = expected.chunk(2, dim=-1)
    torch.testing.assert_close(
        gated_linear(x, weight, offset, impl=impl).double(),
        gate * gate.sigmoid() * up,
        rtol=2 * tolerance,
        atol=2 * tolerance,
    )


@pytest.mark.gpu
def test_many_rows_are_left_to_torch() -> None:
    x = torch.randn(FEW_ROWS + 1, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    assert linear(x, weight).equal(linear(x, weight, impl="reference"))
    with pytest.raises(ValueError, match="at most"):
        linear(x, weight, impl="triton")
