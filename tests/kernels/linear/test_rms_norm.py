"""rms_norm and add_rms_norm against float64."""

import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl
from pdserve.kernels.linear.rms_norm import add_rms_norm, rms_norm
from tests.kernels.places import each_of
from tests.kernels.poison import poisoned

everywhere = each_of(
    ("reference", "cpu", torch.float16),
    ("reference", "cpu", torch.bfloat16),
    ("triton", "cpu", torch.float16),  # the interpreter does not round to bfloat16
    ("triton", "cuda", torch.float16),
    ("triton", "cuda", torch.bfloat16),
)

# a 16-bit result has at most two roundings: of the quotient and of the product
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return weight.double() * wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("rows", "size"), [(1, 4096), (3, 64), (5, 576), (7, 1), (130, 96)])
def test_both_equal_float64(rows: int, size: int, dtype: torch.dtype, anywhere: tuple[Impl, torch.device]) -> None:
    impl, device = anywhere
    generator = torch.Generator().manual_seed(rows * size)
    x, y = (3 * torch.randn(2, rows, size, generator=generator)).to(device, dtype)
    weight = torch.randn(size, generator=generator).to(device, dtype)
    tolerance = TOLERANCES[dtype]
    with poisoned(impl):
        alone = rms_norm(x, weight, 1e-2, impl=impl)
        total, normed = add_rms_norm(x, y, weight, 1e-2, impl=impl)
    torch.testing.assert_close(alone.double(), exact(x, weight, 1e-2), rtol=tolerance, atol=1e-6)
    assert total.equal(x + y)
    torch.testing.assert_close(normed.double(), exact(total, weight, 1e-2), rtol=tolerance, atol=1e-6)


def test_float32_weights_are_rounded_once(everywhere: tuple[Impl, torch.device, torch.dtype]) -> None:
    """Two roundings would be up to twice as far from the exact result."""
    impl, device, dtype = everywhere
    x = (3 * torch.randn(5, 96, generator=torch.Generator().manual_seed(0))).to(device, dtype)
    weight = 1 + torch.randn(96, generator=torch.Generator().manual_seed(1)).to(device)
    with poisoned(impl):
        found = rms_norm(x, weight, 1e-2, impl=impl)
    assert found.dtype == dtype
    half_a_step = 1.001 * torch.finfo(dtype).eps / 2
    torch.testing.assert_close(found.double(), exact(x, weight, 1e-2), rtol=half_a_step, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_triton_rounds_as_the_reference_does(dtype: torch.dtype) -> None:
    """Equal except the last bit, which depends on the order of a float32 sum."""
    x, y = torch.randn(2, 64, 4096, device="cuda").to(dtype)
    weight = torch.randn(4096, device="cuda").to(dtype)
    expected = rms_norm(x, weight, 1e-6, impl="reference")
    found = rms_norm(x, weight, 1e-6, impl="triton")
    assert (found != expected).double().mean() < (1e-3 if dtype.itemsize == 2 else 0.5)
    assert add_rms_norm(x, y, weight, 1e-6, impl="triton")[0].equal(x + y)


@pytest.mark.gpu
def test_invalid_arguments_are_refused() -> None:
    x, weight = torch.zeros(2, 8, device="cuda"), torch.zeros(8, device="cuda")
    with pytest.raises(ValueError, match="must be contiguous rows"):
        rms_norm(x.t(), weight, 1e-6)
    with pytest.raises(ValueError, match="must be contiguous rows"):
        rms_norm(x, weight.half(), 1e-6)
    with pytest.raises(ValueError, match="cannot add"):
        add_rms_norm(x, x[:1], weight, 1e-6)


def test_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match="impl must be"):
        rms_norm(torch.zeros(1, 8), torch.zeros(8), 1e-6, impl="fast")  # type: ignore[arg-type]
