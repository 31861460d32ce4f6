"""When writes over RDMA count as stalled."""

import pytest

from pdserve.transfer.data.pace import Pace


def pace_of(*bytes_per_s: float) -> Pace:
    pace = Pace()
    for rate in bytes_per_s:
        pace.add(int(rate), 1.0)
    return pace


@pytest.mark.parametrize(
    ("rates", "size_bytes", "expected_s"),
    [
        ((), 1000, 1.0),
        ((), 100 << 20, 4 * (100 << 20) / 200e6),
        ((1e6,) * 3, 100 << 20, 4 * (100 << 20) / 200e6),  # too few
        ((1e6,) * 4, 2_000_000, 8.0),
        ((1e9, 1e9, 1e6, 1e9), 2_000_000, 8.0),  # the lowest counts
        ((1e6,) + (1e9,) * 16, 2_000_000, 1.0),  # the first one is forgotten
        ((1e10,) * 16, 1 << 30, 1.0),
        ((1.0,) * 16, 1 << 20, 60.0),
    ],
)
def test_the_limit_follows_the_lowest_of_the_last_rates(
    rates: tuple[float, ...], size_bytes: int, expected_s: float
) -> None:
    assert pace_of(*rates).stalled_after_s(size_bytes) == pytest.approx(expected_s)
