"""swiglu against float64."""

import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl
from pdserve.kernels.linear.swiglu import swiglu
from tests.kernels.poison import poisoned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size"), [(1, 12288), (3, 96), (7, 1), (33, 1500)])
def test_equals_float64(rows: int, size: int, dtype: torch.dtype, anywhere: tuple[Impl, torch.device]) -> None:
    impl, device = anywhere
    generator = torch.Generator().manual_seed(rows * size)
    gate_up = (4 * torch.randn(rows, 2 * size, generator=generator)).to(device, dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    with poisoned(impl):
        out, gelu = swiglu(gate_up, impl=impl), swiglu(gate_up, gelu=True, impl=impl)
    assert out.dtype == gelu.dtype == dtype
    # two roundings in 16 bits; float32 exp is good to a few ulp
    tolerance = 2e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(out.double(), gate * gate.sigmoid() * up, rtol=tolerance, atol=1e-6)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(gelu.double(), expected, rtol=tolerance, atol=2e-6)


@pytest.mark.gpu
def test_large_gates_do_not_overflow() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 2.0, 3.0]], device="cuda", dtype=torch.bfloat16)
    assert swiglu(gate_up, impl="triton").tolist() == [[0.0, swiglu(gate_up, impl="reference")[0, 1].item()]]


@pytest.mark.gpu
def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="even size"):
        swiglu(torch.zeros(2, 7, device="cuda"))
    with pytest.raises(ValueError, match="contiguous"):
        swiglu(torch.zeros(2, 16, device="cuda")[:, :8])
