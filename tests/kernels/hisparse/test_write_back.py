"""write_back copies every byte of every layer's new rows, and changes nothing else in the host pool."""

import pytest
import torch

from pdserve.kernels.backends.nvrtc import CudaImpl
from pdserve.kernels.hisparse.slot_tables import HotRows, KvRows
from pdserve.kernels.hisparse.write_back import write_back
from tests.kernels.places import each_of

LAYERS, HOT_PAGES, PAGES, PAGE_SIZE = 3, 2, 4, 5

Where = tuple[CudaImpl, torch.device]

where = each_of(
    ("reference", "cpu"),
    ("auto", "cpu"),
    ("reference", "cuda"),
    ("cuda", "cuda"),
)


@pytest.mark.parametrize("padding", [[], [2, 3], [1], [0, 1, 2, 3]])
@pytest.mark.parametrize("row_bytes", [16, 1152, 656, 584, 24, 20, 1, 15, 17, 31, 47, 1161])
def test_rows_of_live_requests_are_written_back(row_bytes: int, padding: list[int], where: Where) -> None:
    impl, device = where
    generator = torch.Generator().manual_seed(row_bytes)
    hot, host = (
        torch.randint(256, (pages, LAYERS, PAGE_SIZE, row_bytes), dtype=torch.uint8, generator=generator)
        for pages in (HOT_PAGES, PAGES)
    )
    sources = [[0, 9, 2, 3], [5, 1, 4, 0], [3, 3, 6, 2]]
    targets = [(3, 4), (0, 0), (1, 2), (0, 1)]
    live = [row for row in range(4) if row not in padding]
    expected = host.clone()
    for row in live:
        for layer in range(LAYERS):
            page, offset = divmod(sources[layer][row], PAGE_SIZE)
            expected[targets[row][0], layer, targets[row][1]] = hot[page, layer, offset]
    if device.type == "cuda":
        host = host.pin_memory()
    flat = [page * PAGE_SIZE + offset if row in live else -1 for row, (page, offset) in enumerate(targets)]
    hot_rows = HotRows(torch.tensor(sources, dtype=torch.int32, device=device))
    hot_rows[:, padding] = -1
    host_rows = KvRows(torch.tensor(flat, dtype=torch.int32, device=device))
    write_back(hot.to(device), hot_rows, host, host_rows, impl=impl)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert host.equal(expected)


def test_invalid_arguments_are_refused() -> None:
    hot = torch.zeros(HOT_PAGES, LAYERS, PAGE_SIZE, 16, dtype=torch.uint8)
    host = torch.zeros(PAGES, LAYERS, PAGE_SIZE, 16, dtype=torch.uint8)
    hot_rows = HotRows(torch.zeros(LAYERS, 2, dtype=torch.int32))
    host_rows = KvRows(torch.arange(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="not pages of equal bytes"):
        write_back(hot[..., :8], hot_rows, host, host_rows)
    with pytest.raises(ValueError, match=r"do not fit hot_rows \[3, 2\]"):
        write_back(hot, hot_rows, host, KvRows(host_rows[:1]))
    with pytest.raises(ValueError, match="must be int32"):
        write_back(hot, HotRows(hot_rows.long()), host, host_rows)
    with pytest.raises(ValueError, match="must be contiguous"):
        write_back(hot[..., ::2], hot_rows, host[..., ::2], host_rows)
