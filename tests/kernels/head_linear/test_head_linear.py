"""head_linear against a float64 product, with weights and outputs as MLA has them."""

import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl
from pdserve.kernels.head_linear.head_linear import head_linear
from tests.kernels.places import each_of

Where = tuple[Impl, torch.device, torch.dtype]

where = each_of(
    ("auto", "cpu", torch.float32),
    ("triton", "cpu", torch.float32),
    ("triton", "cuda", torch.float32),
    ("triton", "cuda", torch.bfloat16),
    ("auto", "cuda", torch.bfloat16),
)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "columns", "outputs"),
    [
        pytest.param(1, 2, 16, 24, id="one-token"),
        pytest.param(20, 3, 40, 80, id="odd"),
        pytest.param(70, 2, 8, 16, id="tokens-in-two-tiles"),
        pytest.param(32, 2, 128, 512, id="queries"),
    ],
)
def test_product_per_head(tokens: int, heads: int, columns: int, outputs: int, transposed: bool, where: Where) -> None:
    """x and out are slices of wider rows; the rest of `out` does not change."""
    impl, device, dtype = where
    generator = torch.Generator().manual_seed(tokens + outputs)
    wide = torch.randn(tokens, heads, columns + 8, generator=generator).to(device, dtype)
    if transposed:
        weight = torch.randn(heads, outputs, columns, generator=generator).to(device, dtype).transpose(1, 2)
    else:
        weight = torch.randn(heads, columns, outputs, generator=generator).to(device, dtype)
    out = torch.full((tokens, heads, outputs + 8), 7.0, dtype=dtype, device=device)
    head_linear(wide[:, :, :columns], weight, out[:, :, :outputs], impl=impl)
    expected = torch.einsum("thk,hkn->thn", wide[:, :, :columns].double(), weight.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(out[:, :, :outputs].double(), expected, rtol=tolerance, atol=tolerance * columns**0.5)
    assert (out[:, :, outputs:] == 7.0).all()


def test_tensors_that_do_not_fit_are_refused() -> None:
    x, weight, out = torch.zeros(3, 2, 8), torch.zeros(2, 8, 4), torch.zeros(3, 2, 4)
    with pytest.raises(ValueError, match="do not match"):
        head_linear(x, weight[:1], out)
    with pytest.raises(ValueError, match="do not match"):
        head_linear(x, weight, out[:, :, :3])
    with pytest.raises(ValueError, match=r"weight torch\.float16"):
        head_linear(x, weight.half(), out)
