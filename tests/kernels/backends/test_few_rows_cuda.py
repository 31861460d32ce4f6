"""How the kernels for few rows divide their work."""

import pytest

from pdserve.kernels.backends.few_rows_cuda import Format, Tiles, _fit


@pytest.mark.parametrize("limit", [99 << 10, 227 << 10])
@pytest.mark.parametrize("row_tiles", [1, 2, 4])
@pytest.mark.parametrize("step_bytes", [640, 2112, 2176])
@pytest.mark.parametrize("steps", [1, 2, 12, 100])
@pytest.mark.parametrize("count", [1, 132, 300, 4000])
def test_ring_buffers_of_a_block_fit_into_shared_memory(
    limit: int, row_tiles: int, step_bytes: int, steps: int, count: int
) -> None:
    form = Format("any", step_bytes, warps=(16, 8, 4))
    warps, stages, used = _fit(form, Tiles(), count, steps, 2, row_tiles, processors=132, limit=limit)
    assert 1 <= warps <= min(16, 2 * steps)
    assert stages >= 2
    assert used <= limit
    assert used == warps * 2 * (stages * step_bytes + row_tiles * 1024)
    if (limit, row_tiles, steps) == (227 << 10, 1, 100):
        assert warps == {1: 16, 132: 16, 300: 8, 4000: 4}[count]


def test_shared_memory_includes_x_and_its_sums() -> None:
    form = Format("any", 2176, x_rows=4, x_bytes=25_000)
    warps, stages, used = _fit(form, Tiles(), 132, 48, 2, 1, processors=132, limit=227 << 10)
    assert (warps, stages) == (16, 2)
    assert used == warps * 2 * (stages * 2176 + 512) + 25_000
