"""linear and gated_linear against float64."""

import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl
from pdserve.kernels.linear.linear import FEW_CPU_ROWS, FEW_ROWS, gated_linear, linear
from tests.kernels.numba_kernels import needs_numba
from tests.kernels.poison import poisoned

# inputs and results are of order 1: one rounding in 16 bits, a float32 sum in 32
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "out_size", "in_size"),
    [
        (1, 6144, 4096),
        (3, 192, 576),
        (16, 64, 128),
        (FEW_ROWS, 100, 200),
        (2, 2, 7),
        (7, 38, 80),
        (1, 6, 15),
        (3, 100, 2200),  # several programs divide the columns of an output
        (8, 100, 64),
        (5, 38, 1024),
    ],
)
def test_both_equal_float64(
    rows: int, out_size: int, in_size: int, bias: bool, dtype: torch.dtype, anywhere: tuple[Impl, torch.device]
) -> None:
    impl, device = anywhere
    if impl == "numba":
        rows = min(rows, FEW_CPU_ROWS)
    if device.type == "cpu" and out_size > 768:  # the float64 product of the largest matrix takes seconds
        out_size, in_size = 768, 1024
    generator = torch.Generator().manual_seed(out_size + in_size)
    x = torch.randn(rows, in_size, generator=generator).to(device, dtype)
    weight = (torch.randn(out_size, in_size, generator=generator) / in_size**0.5).to(device, dtype)
    offset = torch.randn(out_size, generator=generator).to(device, dtype) if bias else None
    expected = x.double() @ weight.double().T
    if offset is not None:
        expected = expected + offset.double()
    with poisoned(impl):
        plain, gated = linear(x, weight, offset, impl=impl), gated_linear(x, weight, offset, impl=impl)
        gelu_gated = gated_linear(x, weight, offset, gelu=True, impl=impl)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(plain.double(), expected, rtol=tolerance, atol=tolerance)
    gate, up = expected.chunk(2, dim=-1)
    torch.testing.assert_close(gated.double(), gate * gate.sigmoid() * up, rtol=2 * tolerance, atol=2 * tolerance)
    gelu = torch.nn.functional.gelu(gate, approximate="tanh")
    torch.testing.assert_close(gelu_gated.double(), gelu * up, rtol=2 * tolerance, atol=2 * tolerance)


@needs_numba
@pytest.mark.parametrize("rows", range(1, FEW_CPU_ROWS + 1))
def test_numba_linear_is_exact_for_any_few_rows(rows: int) -> None:
    """Rows and outputs that do not fill tiles, with values whose sums are exact."""
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randint(-8, 9, (size, 50), generator=generator).float() for size in (rows, 10 + rows))
    with poisoned("numba"):
        assert linear(x, weight, impl="numba").equal(x @ weight.T)


@needs_numba
def test_arguments_that_numba_does_not_support_are_refused() -> None:
    x, weight = torch.zeros(FEW_CPU_ROWS + 1, 8), torch.zeros(4, 8)
    with pytest.raises(ValueError, match="must be 1 to"):
        linear(x, weight, impl="numba")
    with pytest.raises(ValueError, match="must be 1 to"):
        linear(x[:1, :7], weight, impl="numba")
    with pytest.raises(ValueError, match="contiguous rows"):
        linear(x[:1].half(), weight.half(), impl="numba")
    with pytest.raises(ValueError, match="contiguous rows"):
        gated_linear(x[:1], torch.zeros(8, 4).t(), impl="numba")


@pytest.mark.gpu
def test_many_rows_are_computed_by_torch() -> None:
    x = torch.randn(FEW_ROWS + 1, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    assert linear(x, weight).equal(linear(x, weight, impl="reference"))
    with pytest.raises(ValueError, match="at most"):
        linear(x, weight, impl="triton")
