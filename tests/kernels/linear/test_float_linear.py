"""float_linear against float64."""

import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl
from pdserve.kernels.backends.float_at_once_cuda import suits_float_at_once
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
    again = float_linear(x, weight, impl=impl)  # detects counters of divided sums that are not reset
    assert found.dtype == torch.float32
    assert torch.equal(found, again)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=2e-6, atol=3e-6)


def test_invalid_arguments_are_refused() -> None:
    x, weight = torch.zeros(FEW_ROWS + 1, 8), torch.zeros(4, 8)
    with pytest.raises(ValueError, match="at most 32 rows"):
        float_linear(x, weight, impl="triton")
    with pytest.raises(ValueError, match="float32"):
        float_linear(x, weight.half())
    with pytest.raises(ValueError, match="must be rows as long as those of weight"):
        float_linear(x[:, :7], weight)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 9, 17, 32])
@pytest.mark.parametrize(
    ("out_size", "in_size"),
    [
        (256, 7168),
        (64, 7168),
        (250, 2048),  # the last tile is partial
        (40, 1152),  # 9 groups of columns: some blocks have none
        (16, 16384),  # two rounds
    ],
)
def test_weights_in_shared_memory_equal_float64(out_size: int, in_size: int, rows: int) -> None:
    device, generator = torch.device("cuda", 0), torch.Generator().manual_seed(out_size + in_size + rows)
    x = torch.randn(rows, in_size, generator=generator).to(device, torch.bfloat16)
    weight = (torch.randn(out_size, in_size, generator=generator) / in_size**0.5).to(device)
    assert suits_float_at_once(x, weight)
    with poisoned("triton"):
        found = float_linear(x, weight)
    assert torch.equal(found, float_linear(x, weight))
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=2e-6, atol=3e-6)
    assert torch.equal(float_linear(x[:1], weight), found[:1]), "a row depends on the others"


@pytest.mark.gpu
def test_other_shapes_do_not_suit_the_kernel() -> None:
    device = torch.device("cuda", 0)
    x, weight = (
        torch.zeros(rows, 2048, dtype=dtype, device=device) for rows, dtype in ((32, torch.bfloat16), (256, None))
    )
    assert suits_float_at_once(x, weight)
    for other in (x.half(), torch.zeros(33, 2048, dtype=torch.bfloat16, device=device), x[:0]):
        assert not suits_float_at_once(other, weight)
    assert not suits_float_at_once(x, torch.zeros(257, 2048, device=device))
    assert not suits_float_at_once(x[:, :1000].contiguous(), weight[:, :1000].contiguous())
    assert not suits_float_at_once(x[:, :896].contiguous(), weight[:, :896].contiguous())
