"""float_linear against float64."""

import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl
from pdserve.kernels.linear.float_linear import float_linear
from pdserve.kernels.linear.linear import FEW_ROWS
from tests.kernels.places import PLACES, each_of
from tests.kernels.poison import poisoned

where = each_of(*PLACES, ("triton", "cpu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "out_size", "in_size"),
    [(1, 5, 7168), (5, 3, 7168), (20, 40, 1536), (FEW_ROWS, 3, 200), (7, 2, 1025), (0, 4, 16), (200, 70, 384)],
)
def test_equals_float64(
    rows: int, out_size: int, in_size: int, dtype: torch.dtype, where: tuple[Impl, torch.device]
) -> None:
    impl, device = where
    if impl == "triton" and dtype != torch.bfloat16:
        rows = min(rows, FEW_ROWS)
    generator = torch.Generator().manual_seed(out_size + in_size)
    x = torch.randn(rows, in_size, generator=generator).to(device, dtype)
    weight = (torch.randn(out_size, in_size, generator=generator) / in_size**0.5).to(device)
    with poisoned(impl):
        found = float_linear(x, weight, impl=impl)
    again = float_linear(x, weight, impl=impl)  # the counters of divided sums are 0 again
    assert found.dtype == torch.float32
    assert torch.equal(found, again)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=2e-6, atol=3e-6)


def test_invalid_arguments_are_refused() -> None:
    x, weight = torch.zeros(FEW_ROWS + 1, 8), torch.zeros(4, 8)
    with pytest.raises(ValueError, match="at most 32 rows"):
        float_linear(x, weight, impl="triton")
    with pytest.raises(ValueError, match="float32"):
        float_linear(x, weight.half())
    with pytest.raises(ValueError, match="are not rows"):
        float_linear(x[:, :7], weight)
