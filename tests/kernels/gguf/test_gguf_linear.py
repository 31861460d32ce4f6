"""Weights in GGUF blocks: unpacked weights against the `gguf` library, products against float64."""

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from pdserve.kernels.backends.dispatch import Impl, launcher
from pdserve.kernels.gguf import gguf_linear as module
from pdserve.kernels.gguf.blocks import PACKED_TYPES, GgufBlocks, GgufRows, block_size
from pdserve.kernels.gguf.gguf_linear import FEW_ROWS, gguf_gated_linear, gguf_linear, gguf_rows
from pdserve.kernels.linear.swiglu import swiglu
from tests.kernels.numba_kernels import needs_numba
from tests.kernels.places import each_of
from tests.kernels.poison import poisoned
from tests.kernels.random_blocks import random_rows

where = each_of(("reference", "cpu"), ("numba", "cpu"))
TOLERANCE = 2e-5


def gated_linear(
    x: torch.Tensor, weight: GgufBlocks, bias: torch.Tensor, *, gelu: bool = False, impl: Impl
) -> torch.Tensor:
    found = gguf_gated_linear(x, weight, bias, gelu=gelu, impl=impl)
    return swiglu(gguf_linear(x, weight, bias, impl=impl), gelu=gelu) if found is None else found


def matrix(*parts: GgufRows) -> GgufBlocks:
    return GgufBlocks(parts, parts[0].columns)


def library_rows(rows: GgufRows) -> torch.Tensor:
    """Dequantised row by row."""
    kind = gguf.GGMLQuantizationType[rows.type_name]
    return torch.from_numpy(np.stack([dequantize(row, kind) for row in rows.blocks.numpy()]))


@pytest.mark.parametrize("type_name", PACKED_TYPES)
def test_unpacked_weights_equal_the_library_bit_by_bit(type_name: str, where: tuple[Impl, torch.device]) -> None:
    impl, _ = where
    rows = random_rows(37, 768, type_name)
    indices = torch.tensor([36, 0, 5, 5, 11])
    with poisoned(impl):
        found = gguf_rows(matrix(rows), indices, impl=impl)
    assert found.equal(library_rows(rows)[indices])
    assert rows.expanded().equal(library_rows(rows))


@pytest.mark.parametrize("type_name", PACKED_TYPES)
@pytest.mark.parametrize("rows", [1, 3, 4, 8, 16, FEW_ROWS, 40])
def test_products_equal_float64(rows: int, type_name: str, where: tuple[Impl, torch.device]) -> None:
    """The numbers of outputs do not fill tiles. With and without a bias."""
    impl, _ = where
    generator = torch.Generator().manual_seed(rows)
    for out_size, in_size in ((7, 256), (102, 1024)):
        stored = random_rows(out_size, in_size, type_name, seed=rows)
        x = torch.randn(rows, in_size, generator=generator) / in_size**0.5
        bias = torch.randn(out_size, generator=generator)
        expected = x.double() @ library_rows(stored).double().T
        with poisoned(impl):
            plain = gguf_linear(x, matrix(stored), impl=impl)
            shifted = gguf_linear(x, matrix(stored), bias, impl=impl)
        torch.testing.assert_close(plain.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(shifted.double(), expected + bias.double(), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("types", [("Q4_1", "Q4_1"), ("Q4_K", "Q6_K")])
@pytest.mark.parametrize("rows", [1, 6, 40])
def test_gated_products_equal_float64(rows: int, types: tuple[str, str], where: tuple[Impl, torch.device]) -> None:
    """Gate and up have the same type, or two types."""
    impl, _ = where
    gate_rows, up_rows = (random_rows(22, 512, name, seed=at) for at, name in enumerate(types))
    stored = matrix(gate_rows, up_rows)
    if types[0] == types[1]:
        stored = matrix(GgufRows(torch.cat([gate_rows.blocks, up_rows.blocks]), types[0]))
    x, bias = torch.randn(rows, 512) / 512**0.5, torch.randn(44)
    gate, up = (x.double() @ stored.expanded().double().T + bias.double()).chunk(2, dim=1)
    with poisoned(impl):
        silu = gated_linear(x, stored, bias, impl=impl)
        gelu = gated_linear(x, stored, bias, gelu=True, impl=impl)
    torch.testing.assert_close(silu.double(), gate * gate.sigmoid() * up, rtol=2 * TOLERANCE, atol=2 * TOLERANCE)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(gelu.double(), expected, rtol=2 * TOLERANCE, atol=2 * TOLERANCE)


@pytest.mark.parametrize("rows", [2, 40])
def test_parts_of_several_types_are_one_matrix(rows: int, where: tuple[Impl, torch.device]) -> None:
    impl, _ = where
    parts = [random_rows(size, 256, name) for size, name in ((9, "Q4_K"), (3, "Q6_K"), (5, "Q8_0"))]
    stored, x, bias = matrix(*parts), torch.randn(rows, 256), torch.randn(17)
    assert stored.shape == (17, 256)
    expected = x @ torch.cat([library_rows(part) for part in parts]).T + bias
    torch.testing.assert_close(gguf_linear(x, stored, bias, impl=impl), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        gguf_linear(x, stored[4:13], impl=impl), (expected - bias)[:, 4:13], rtol=1e-4, atol=1e-4
    )


@needs_numba
def test_weights_are_unpacked_a_few_rows_at_a_time_for_many_rows_of_x(monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = []

    def record(module_name: str, name: str) -> Callable[..., None]:
        launch = launcher(module_name, name)

        def launch_and_record(rows: GgufRows, out: torch.Tensor) -> None:
            unpacked.append(len(out))
            launch(rows, out)

        return launch_and_record

    monkeypatch.setattr(module, "SCRATCH_BYTES", 10 * 4 * 256)
    monkeypatch.setattr(module, "launcher", record)
    stored, x = random_rows(33, 256, "Q5_1"), torch.randn(40, 256)
    expected = x @ library_rows(stored).T
    torch.testing.assert_close(gguf_linear(x, matrix(stored), impl="numba"), expected, rtol=1e-4, atol=1e-4)
    assert unpacked == [10, 10, 10, 3]


def test_adjacent_parts_of_one_type_are_merged_and_memory_is_that_of_the_blocks() -> None:
    stored = GgufBlocks.allocate([(4, "Q4_0"), (2, "Q4_0"), (2, "Q6_K")], 512, device=torch.device("cpu"))
    assert [(len(part.blocks), part.type_name) for part in stored.parts] == [(6, "Q4_0"), (2, "Q6_K")]
    assert stored.nbytes == 6 * 16 * 18 + 2 * 2 * 210
    assert [part.columns for part in stored.parts] == [512, 512]
    assert block_size("Q6_K") == (256, 210)
    assert stored[3:3].shape == (0, 512)
    assert [len(part.blocks) for part in stored[5:7].parts] == [1, 1]


def test_wrong_shapes_are_refused() -> None:
    stored = matrix(random_rows(4, 64, "Q8_0"))
    with pytest.raises(ValueError, match="must be contiguous float32 rows"):
        gguf_linear(torch.zeros(1, 32), stored)
    with pytest.raises(ValueError, match="must be contiguous float32 rows"):
        gguf_linear(torch.zeros(1, 64, dtype=torch.bfloat16), stored)
    with pytest.raises(ValueError, match="an element for each row"):
        gguf_linear(torch.zeros(1, 64), stored, torch.zeros(5))
