"""write_back is a copy: every byte of every layer's new rows, and nothing else in the host pool."""

import pytest
import torch

from pdserve.kernels.nvrtc import CudaImpl
from pdserve.kernels.write_back import write_back

LAYERS, ROWS, PAGES, PAGE_SIZE = 3, 7, 4, 5

Where = tuple[CudaImpl, torch.device]


@pytest.fixture(
    params=[
        pytest.param(("reference", "cpu"), id="reference-cpu"),
        pytest.param(("auto", "cpu"), id="auto-cpu"),
        pytest.param(("reference", "cuda"), id="reference-cuda", marks=pytest.mark.gpu),
        pytest.param(("cuda", "cuda"), id="cuda", marks=pytest.mark.gpu),
    ]
)
def where(request: pytest.FixtureRequest) -> Where:
    impl, device = request.param
    return impl, torch.device(device, 0) if device == "cuda" else torch.device(device)


@pytest.mark.parametrize("live", [None, 0, 2, 4])
@pytest.mark.parametrize("row_bytes", [16, 1152, 656, 584, 24, 20, 1, 15, 17, 31, 47, 1161])
def test_rows_of_live_requests_arrive(row_bytes: int, live: int | None, where: Where) -> None:
    impl, device = where
    generator = torch.Generator().manual_seed(row_bytes)
    hot = torch.randint(256, (LAYERS, ROWS, row_bytes), dtype=torch.uint8, generator=generator)
    host = torch.randint(256, (PAGES, LAYERS, PAGE_SIZE, row_bytes), dtype=torch.uint8, generator=generator)
    hot_rows = torch.tensor([[0, 6, 2, 3], [5, 1, 4, 0], [3, 3, 6, 2]], dtype=torch.int32)
    targets = [(3, 4), (0, 0), (1, 2), (0, 1)]
    expected = host.clone()
    for row, (page, offset) in enumerate(targets[:live]):
        for layer in range(LAYERS):
            expected[page, layer, offset] = hot[layer, hot_rows[layer, row]]
    if device.type == "cuda":
        host = host.pin_memory()
    host_rows = torch.tensor([page * PAGE_SIZE + offset for page, offset in targets], dtype=torch.int32, device=device)
    live_rows = None if live is None else torch.tensor([live], dtype=torch.int32, device=device)
    write_back(hot.to(device), hot_rows.to(device), host, host_rows, live_rows=live_rows, impl=impl)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert host.equal(expected)


def test_what_does_not_fit_is_refused() -> None:
    hot = torch.zeros(LAYERS, ROWS, 16, dtype=torch.uint8)
    host = torch.zeros(PAGES, LAYERS, PAGE_SIZE, 16, dtype=torch.uint8)
    hot_rows, host_rows = torch.zeros(LAYERS, 2, dtype=torch.int32), torch.arange(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="not rows of equal bytes"):
        write_back(hot[..., :8], hot_rows, host, host_rows)
    with pytest.raises(ValueError, match=r"do not fit hot_rows \[3, 2\]"):
        write_back(hot, hot_rows, host, host_rows[:1])
    with pytest.raises(ValueError, match="must be int32"):
        write_back(hot, hot_rows.long(), host, host_rows)
    with pytest.raises(ValueError, match="must be contiguous"):
        write_back(hot[..., ::2], hot_rows, host[..., ::2], host_rows)
