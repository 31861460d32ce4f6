"""The CUDA kernels for few rows (csrc/linear/few_rows.cuh) on the CPU (fibers.py): all weight formats, and experts."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.kernels.backends import few_rows_cuda
from pdserve.kernels.backends.few_rows_cuda import Tiles
from pdserve.kernels.linear import fp8_linear, linear
from pdserve.kernels.linear.fp8_format import Fp8Matrix
from pdserve.kernels.linear.swiglu import swiglu_reference
from pdserve.kernels.moe.experts import experts_reference
from pdserve.kernels.moe.token_experts_cuda import launch_token_experts
from pdserve.kernels.nvfp4 import nvfp4
from pdserve.kernels.nvfp4.nvfp4 import Nvfp4Matrix
from pdserve.kernels.packed4.group_format import GroupScaled
from pdserve.kernels.packed4.int4_linear_cuda import launch_int4_linear_cuda
from tests.kernels.fibers import COMPILER, FiberKernels
from tests.kernels.fp8_matrices import draw_block_scaled, draw_row_scaled
from tests.kernels.group_scaled import draw_group_scaled, draw_packed_experts
from tests.kernels.nvfp4_weights import draw_nvfp4

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
BF16 = torch.bfloat16
LIMIT = 2**-7
"""Relative to results of order 1: one rounding."""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> FiberKernels:
    return FiberKernels(tmp_path_factory.mktemp("fibers"))


@pytest.fixture(autouse=True)
def on_fibers(kernels: FiberKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fibers(monkeypatch, kernels)


def use_fibers(monkeypatch: pytest.MonkeyPatch, kernels: FiberKernels) -> None:
    """Two multiprocessors, so that a block has several tiles; the smallest shared memory that the kernels support."""
    monkeypatch.setattr(few_rows_cuda, "load_kernel", kernels.load)
    monkeypatch.setattr(few_rows_cuda, "multiprocessors", lambda _: 2)
    monkeypatch.setattr(few_rows_cuda, "shared_memory", lambda _: 99 << 10)


def draw(kind: str, *shape: int) -> Any:
    generator = torch.Generator().manual_seed(sum(shape))
    match kind:
        case "plain":
            plain: torch.Tensor = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            return plain.to(BF16)
        case "fp8":
            blocks = draw_block_scaled(*shape, generator=generator, row_group=32)
            blocks.scales.nan_to_num_(nan=0.0)
            return blocks
        case "fp8 by row":
            return draw_row_scaled(*shape, generator=generator)
        case "nvfp4":
            return draw_nvfp4(*shape, generator=generator)
    drawn = draw_group_scaled if len(shape) == 2 else draw_packed_experts
    group = int(kind.rpartition(" ")[2])
    return drawn(*shape, generator=generator, group=group, dtype=BF16, device=torch.device("cpu"))


def launch(
    x: torch.Tensor, weight: Any, bias: torch.Tensor | None, *, gated: bool, tiles: Tiles | None = None
) -> torch.Tensor:
    out = x.new_empty(len(x), weight.shape[0] // (2 if gated else 1))
    if isinstance(weight, GroupScaled):
        launch_int4_linear_cuda(x, weight, bias, out, gated=gated, tiles=tiles)
    elif isinstance(weight, Nvfp4Matrix):
        nvfp4._launch_cuda(x, weight, bias, out, gated=gated, tiles=tiles)
    elif isinstance(weight, Fp8Matrix):
        fp8_linear._launch_cuda(x, weight, bias, out, gated=gated)
    else:
        assert isinstance(weight, torch.Tensor)
        linear._launch_cuda(x, weight, bias, out, gated=gated)
    return out


def products(x: torch.Tensor, weight: Any, bias: torch.Tensor) -> torch.Tensor:
    matrix = weight if isinstance(weight, torch.Tensor) else weight.expanded()
    return x.double() @ matrix.double().T + bias.double()


@pytest.mark.parametrize(
    ("kind", "rows", "columns", "gated"),
    [
        ("plain", 5, 192, False),
        ("plain", 1, 64, True),
        ("fp8", 3, 256, True),
        ("fp8 by row", 1, 384, False),
        ("int4 of 128", 1, 1152, False),  # x as integers; an odd number of groups
        ("int4 of 64", 3, 256, True),
        ("int4 of 32", 4, 320, False),
        ("int4 of 128", 6, 384, True),  # x in its dtype
        ("int4 of 32", 11, 64, False),  # two row tiles
        ("nvfp4", 1, 512, False),
        ("nvfp4", 11, 336, True),  # steps of 128 columns, the last partial
    ],
)
def test_products(kind: str, rows: int, columns: int, *, gated: bool) -> None:
    """There are more tiles than blocks, and the last tile is partial."""
    weight = draw(kind, 80, columns)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator).to(BF16)
    bias = torch.randn(80, generator=generator).to(BF16)
    found, expected = launch(x, weight, bias, gated=gated), products(x, weight, bias)
    if gated:
        torch.testing.assert_close(found, swiglu_reference(expected.to(BF16)), rtol=4 * LIMIT, atol=4 * LIMIT)
    else:
        torch.testing.assert_close(found.double(), expected, rtol=LIMIT, atol=LIMIT)


@pytest.mark.parametrize(
    ("kind", "tokens", "first"), [("plain", 1, 0), ("fp8", 3, 2), ("int4 of 128", 2, 0), ("int4 of 32", 3, 2)]
)
def test_experts(kind: str, tokens: int, first: int) -> None:
    """All chosen experts are on this rank, or some of them. There is a shared expert."""
    experts, per_token, hidden, width = 6, 3, 128, 256
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator).to(BF16)
    weights = torch.rand(tokens, per_token, generator=generator)
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:per_token] for _ in range(tokens)])
    gate_up, down = draw(kind, experts, 2 * width, hidden)[first:], draw(kind, experts, hidden, width)[first:]
    found, shared = torch.empty_like(x), torch.randn(x.shape, generator=generator).to(BF16)
    launch_token_experts(x, weights, chosen, gate_up, down, found, first=first, shared=partial(torch.clone, shared))
    expected = experts_reference(x, weights, chosen, gate_up, down, first=first, exact=True)
    torch.testing.assert_close(found, expected + shared, rtol=2 * LIMIT, atol=8 * LIMIT)


def test_x_as_integers_keeps_large_and_small_columns() -> None:
    weight = draw("int4 of 128", 32, 512)
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(2)).to(BF16)
    x[:, ::50] *= 40
    x[0, :128] *= 1e-4
    x[1, 128:256] = 127.5  # the largest mantissa
    x[1, 256:384] = 0
    expected = products(x, weight, torch.zeros(32))
    found = launch(x, weight, None, gated=False).double()
    assert isinstance(weight, GroupScaled)
    largest = x.double().abs().reshape(2, 4, 128).amax(-1).repeat_interleave(128, dim=1)
    rounding = 2**-15 * 1.01 * largest @ weight.expanded().double().abs().T
    assert float(((found - expected).abs() / (2**-8 * expected.abs() + rounding)).max()) < 1


def test_x_with_nan_or_infinity_gives_nan() -> None:
    weight = draw("int4 of 64", 16, 128)
    x = torch.zeros(2, 128, dtype=BF16)
    x[0, 3], x[1, 100] = float("inf"), float("nan")
    assert launch(x, weight, None, gated=False).isnan().all()


def test_tiles_of_all_sizes_agree() -> None:
    weight, x = draw("int4 of 64", 64, 512), torch.randn(2, 512, generator=torch.Generator().manual_seed(1)).to(BF16)
    found = [
        launch(x, weight, None, gated=False, tiles=Tiles(outputs, stages, warps))
        for outputs, stages, warps in ((16, 2, 1), (16, 5, 4), (32, 3, 8))
    ]
    torch.testing.assert_close(found[1], found[0], rtol=LIMIT, atol=LIMIT)
    torch.testing.assert_close(found[2], found[0], rtol=LIMIT, atol=LIMIT)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("plain", ("step * (kColumns * 2)", "step * kColumns")),
        ("int4 of 64", ("above[i] = numbers[i] + 128;", "above[i] = numbers[i];")),
        ("nvfp4", ("word << 2 & 0x80c080c0u", "word << 2 & 0x80808080u")),
        ("int4 of 64", ("if (!exists) return;", "")),  # writes the last part of x again, with another scale
    ],
)
def test_wrong_kernel_is_detected(
    kind: str, change: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fibers(monkeypatch, FiberKernels(tmp_path, dict([change])))
    weight, x = draw(kind, 32, 128), torch.randn(1, 128, generator=torch.Generator().manual_seed(1)).to(BF16)
    x[:, -8:] /= 16
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            launch(x, weight, None, gated=False).double(), products(x, weight, torch.zeros(32)), rtol=LIMIT, atol=LIMIT
        )
