"""What a server with several data-parallel ranks reports."""

import pytest

from pdserve.scheduler.engine.snapshot import total_gauges


@pytest.mark.parametrize(("ranks", "server"), [((1.0, 1.0), 1.0), ((1.0, 0.0), 0.0), ((0.0, 0.0), 0.0)])
def test_store_is_available_if_all_ranks_use_it(ranks: tuple[float, ...], server: float) -> None:
    parts = [{"kv_store_available": value, "kv_pages": 8.0, "decode_step_seconds": 0.1} for value in ranks]
    assert total_gauges(parts) == {"kv_store_available": server, "kv_pages": 16.0, "decode_step_seconds": 0.1}
