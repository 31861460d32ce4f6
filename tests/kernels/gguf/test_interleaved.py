"""Interleaved GGUF blocks: their bits against those of the file, products against float64 with the rounded x."""

import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl, has_interleaved_kernels
from pdserve.kernels.gguf.blocks import GgufBlocks, GgufRows
from pdserve.kernels.gguf.gguf_linear import FEW_ROWS, gguf_gated_linear, gguf_linear, gguf_rows
from pdserve.kernels.gguf.interleaved import LARGEST, SMALLEST, TILE_COLUMNS, interleave, plain_rows
from tests.kernels.numba_kernels import needs_numba
from tests.kernels.poison import poisoned
from tests.kernels.random_blocks import random_rows

needs_interleaved = pytest.mark.skipif(
    not has_interleaved_kernels(), reason="needs AVX2, AVX-512 or NEON with dot products"
)
types = pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q8_0"])
TOLERANCE = 2e-6


def gated_linear(
    x: torch.Tensor, weight: GgufBlocks, bias: torch.Tensor | None = None, *, gelu: bool = False, impl: Impl
) -> torch.Tensor:
    found = gguf_gated_linear(x, weight, bias, gelu=gelu, impl=impl)
    assert found is not None, "interleaved blocks have one kernel"
    return found


def round_x(x: torch.Tensor) -> torch.Tensor:
    """The x that interleaved blocks are multiplied with."""
    parts = torch.unflatten(x, -1, (-1, TILE_COLUMNS))
    largest = parts.abs().amax(-1, keepdim=True)
    # `LARGEST / x` would be rounded twice; below SMALLEST it would be infinite
    factor = torch.where(largest < SMALLEST, 0, torch.tensor(float(LARGEST)) / largest)
    return ((parts * factor).round() * (largest / LARGEST)).flatten(-2)


def draw_interleaved(rows: int, columns: int, type_name: str, seed: int = 0) -> tuple[GgufBlocks, torch.Tensor]:
    """A random interleaved matrix, and its weights in float32."""
    stored = random_rows(rows, columns, type_name, seed)
    blocks = stored.blocks.clone()
    interleave(blocks, type_name)
    return GgufBlocks((GgufRows(blocks, type_name, interleaved=True),), columns), stored.expanded()


@types
def test_rows_are_those_of_the_file(type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more groups than are rearranged at a time."""
    monkeypatch.setattr("pdserve.kernels.gguf.interleaved._CHUNK_GROUPS", 2)
    stored = random_rows(80, 96, type_name)
    blocks = stored.blocks.clone()
    interleave(blocks, type_name)
    assert not blocks.equal(stored.blocks)
    indices = torch.tensor([79, 0, 17, 17, 40])
    assert plain_rows(blocks, type_name, indices).equal(stored.blocks[indices])
    matrix = GgufBlocks((GgufRows(blocks, type_name, interleaved=True),), 96)
    assert matrix.expanded().equal(stored.expanded())
    assert gguf_rows(matrix, indices).equal(stored.expanded()[indices])
    assert matrix[16:48].expanded().equal(stored.expanded()[16:48])


@needs_numba
@needs_interleaved
@types
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 9, 16, FEW_ROWS, FEW_ROWS + 13, 130])
def test_products_equal_float64_of_rounded_x(rows: int, type_name: str) -> None:
    matrix, weights = draw_interleaved(112, 576, type_name, seed=rows)
    x, bias = torch.randn(rows, 576) / 24, torch.randn(112)
    x[0, :32] = 0
    expected = round_x(x).double() @ weights.double().T
    with poisoned("numba"):
        plain, shifted = gguf_linear(x, matrix, impl="numba"), gguf_linear(x, matrix, bias, impl="numba")
    torch.testing.assert_close(plain.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(shifted.double(), expected + bias, rtol=TOLERANCE, atol=TOLERANCE)


@needs_numba
@needs_interleaved
@types
@pytest.mark.parametrize("rows", [1, 6, FEW_ROWS + 13, 130])
def test_gated_products_equal_float64_of_rounded_x(rows: int, type_name: str) -> None:
    matrix, weights = draw_interleaved(96, 512, type_name)
    x, bias = torch.randn(rows, 512) / 512**0.5, torch.randn(96)
    gate, up = (round_x(x).double() @ weights.double().T + bias).chunk(2, dim=1)
    with poisoned("numba"):
        silu = gated_linear(x, matrix, bias, impl="numba")
        gelu = gated_linear(x, matrix, bias, gelu=True, impl="numba")
    torch.testing.assert_close(silu.double(), gate * gate.sigmoid() * up, rtol=1e-5, atol=1e-5)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(gelu.double(), expected, rtol=1e-5, atol=1e-5)


def test_x_is_rounded_to_sixteen_bits() -> None:
    x = torch.randn(3, 64) * torch.tensor([1e-20, 1.0, 1e20]).unsqueeze(1)
    error = (round_x(x) - x).abs().view(3, 2, 32)
    assert (error <= x.view(3, 2, 32).abs().amax(-1, keepdim=True) * 0.51 / 32767).all()
    assert round_x(torch.zeros(1, 32)).equal(torch.zeros(1, 32))


@needs_numba
@needs_interleaved
@pytest.mark.parametrize("gated", [False, True])
def test_results_do_not_depend_on_the_number_of_threads(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread packs some rows of x, and all threads multiply all of them."""
    monkeypatch.setattr("pdserve.kernels.numba.openmp._THREAD_ELEMENTS", 1)
    matrix, _ = draw_interleaved(96, 4096, "Q4_1")
    x, compute = torch.randn(7, 4096), gated_linear if gated else gguf_linear
    alone = compute(x, matrix, impl="numba")
    torch.set_num_threads(3)
    try:
        together = [compute(x, matrix, impl="numba") for _ in range(20)]
    finally:
        torch.set_num_threads(1)
    assert all(found.equal(alone) for found in together)


@needs_numba
@needs_interleaved
def test_tiny_x_is_rounded_to_zero() -> None:
    matrix, weights = draw_interleaved(16, 64, "Q4_1")
    x = torch.randn(1, 64)
    x[:, :32] *= 1e-36
    expected = round_x(x).double() @ weights.double().T
    assert expected.isfinite().all()
    torch.testing.assert_close(gguf_linear(x, matrix, impl="numba").double(), expected, rtol=1e-5, atol=1e-5)


@needs_numba
@needs_interleaved
def test_nan_reaches_the_result() -> None:
    matrix, _ = draw_interleaved(16, 64, "Q4_1")
    x = torch.randn(2, 64)
    x[1, 40] = torch.nan
    found = gguf_linear(x, matrix, impl="numba")
    assert found[0].isfinite().all()
    assert found[1].isnan().all()
