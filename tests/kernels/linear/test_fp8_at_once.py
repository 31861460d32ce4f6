"""fp8 layers that fit into the shared memory of the GPU (csrc/linear/fp8_at_once.cu), against the reference."""

import pytest
import torch

from pdserve.kernels.backends.fp8_at_once_cuda import Division, divide, launch_at_once, suits_at_once
from pdserve.kernels.linear.fp8_linear import fp8_gated_linear, fp8_linear
from tests.kernels.fp8_matrices import draw_block_scaled, draw_row_scaled, moved
from tests.kernels.poison import poisoned

CUDA = torch.device("cuda", 0)
TOLERANCES = {torch.bfloat16: 2**-7, torch.float16: 2**-9}
SHARED_MEMORY = (227 << 10) - (13 << 10)
"""Bytes of a thread block on an H200, without the static shared memory of the kernel."""


@pytest.mark.parametrize(
    ("shape", "division"),
    [
        ((2240, 7168), Division(5, 4, 28)),
        ((8192, 1536), Division(4, 1, 128)),
        ((7168, 2048), Division(4, 1, 112)),
        ((512, 7168), Division(2, 4, 16)),
        ((7168, 2304), None),  # 64 clusters of two would need seven units
        ((512, 8320), None),  # four blocks have at most 8,192 columns
    ],
)
def test_layer_is_divided_so_that_all_blocks_run_at_once(shape: tuple[int, int], division: Division | None) -> None:
    assert divide(*shape, sms=132) == division


def test_blocks_cover_all_rows_and_fit_into_shared_memory() -> None:
    found = 0
    for rows in range(16, 13_000, 208):
        for columns in range(128, 8320, 384):
            division = divide(rows, columns, sms=132)
            if division is None:
                continue
            found += 1
            assert 16 * division.units * division.tiles >= rows
            assert division.cluster * division.tiles <= 132
            assert all(division.shared_bytes(columns, row_tiles) <= SHARED_MEMORY for row_tiles in (1, 2, 4))
    assert found > 500


def test_part_of_a_gpu_without_a_whole_gpc_has_no_clusters() -> None:
    """Multi-instance GPUs and MPS limits may leave a process fewer than 16 multiprocessors."""
    assert divide(512, 2048, sms=14) == Division(3, 1, 11)
    assert divide(4096, 2048, sms=14) is None
    assert divide(512, 7168, sms=14) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 27, 32])
@pytest.mark.parametrize(
    ("out_size", "in_size", "row_group", "gated"),
    [
        (8192, 1536, 128, False),  # one block for all columns, in two rounds
        (200, 2048, 8, False),  # partial tiles
        (1000, 3584, 64, False),  # clusters of two
        (2240, 7168, 64, False),  # clusters of four
        (512, 7168, 64, True),
        (72, 4736, None, True),  # 37 blocks of columns: the last member of the cluster has fewer
        (130, 8192, None, False),
    ],
)
def test_equals_the_reference(
    rows: int, out_size: int, in_size: int, row_group: int | None, gated: bool, dtype: torch.dtype
) -> None:
    """With and without a bias; rows of x have very different magnitude."""
    generator = torch.Generator().manual_seed(rows)
    if row_group is None:
        drawn = draw_row_scaled(out_size, in_size, generator=generator)
    else:
        drawn = draw_block_scaled(out_size, in_size, generator=generator, row_group=row_group)
    weight = moved(drawn, CUDA)
    x = torch.randn(rows, in_size, generator=generator)
    x[0, : in_size // 2] *= 2.0**-12
    x[-1] *= 8
    x = x.to(CUDA, dtype)
    linear = fp8_gated_linear if gated else fp8_linear
    for bias in (None, torch.randn(out_size, generator=generator).to(CUDA, dtype)):
        out = x.new_empty(rows, out_size // 2 if gated else out_size)
        with poisoned("triton"):
            launch_at_once(x, weight.values, weight.scales, bias, out, row_group=weight.row_group, gated=gated)
        expected = linear(x, weight, bias, impl="reference")
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.gpu
def test_layers_with_up_to_32_rows_suit_the_kernel() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = moved(draw_block_scaled(1000, 2048, generator=generator), CUDA)
    x = torch.randn(40, 2048, generator=generator).to(CUDA, torch.bfloat16)
    assert suits_at_once(x[:1], weight.values)
    assert suits_at_once(x[:32], weight.values)
    assert not suits_at_once(x[:33], weight.values)
    assert not suits_at_once(x[:0], weight.values)
    assert not suits_at_once(x[:1].float(), weight.values)
    assert not suits_at_once(x[:1, :256].contiguous(), weight.values[:, :256].contiguous())
    found = fp8_linear(x[:20], weight)
    torch.testing.assert_close(found, fp8_linear(x, weight)[:20], rtol=2**-6, atol=2**-5)
