"""Measured rates: the median of the last measurements, by which KV is copied or computed again."""

from unittest.mock import Mock

import pytest

from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.scheduler.decode.scheduler import DecodeScheduler
from pdserve.scheduler.messages.ranks import CopyDone
from pdserve.scheduler.rates import SAMPLES, Rate, RateBySize, Rates
from tests.scheduler.simulation.simulator import Simulator
from tests.scheduler.simulation.timed_simulator import decode_limits


def rate(*samples: tuple[int, float]) -> Rate:
    measured = Rate()
    for units, seconds in samples:
        measured.measured(units, seconds)
    return measured


@pytest.mark.parametrize("seconds", [0.001, 10.0], ids=["fast", "slow"])
@pytest.mark.parametrize("when", [0, 2, 4])
def test_one_outlier_does_not_change_the_rate(seconds: float, when: int) -> None:
    samples = [(1000, 0.1 + 0.001 * number) for number in range(4)]
    samples.insert(when, (1000, seconds))
    found = rate(*samples).per_s
    assert found is not None
    assert 1000 / 0.103 <= found <= 1000 / 0.1


def test_short_measurements_do_not_outvote_a_long_one() -> None:
    """The fixed cost is 50 ms: a prompt that was almost fully cached does not show the rate of a long one."""
    assert rate((8000, 1.0), *[(16, 0.05)] * 8).per_s == 8000


def test_rate_follows_a_lasting_change() -> None:
    measured = rate(*[(100, 1.0)] * SAMPLES)
    for _ in range(SAMPLES // 2 + 1):
        measured.measured(100, 0.1)
    assert measured.per_s == 1000
    for _ in range(SAMPLES // 2):
        measured.measured(100, 4.0)
    assert measured.per_s == 25, "half of the measurements are slow: the lower median"


def test_empty_measurements_are_ignored() -> None:
    assert rate().per_s is None
    assert rate((0, 1.0), (5, 0.0)).per_s is None


def test_kv_is_copied_unless_prefill_is_known_to_be_cheaper() -> None:
    """Ten pages are copied out and back, or 160 tokens are computed."""
    rates = Rates()
    assert rates.copy_is_cheaper(10, 160)
    rates.copied_pages.measured(10, 1.0)
    assert rates.copy_is_cheaper(10, 160), "two seconds, but the rate of prefill is unknown"
    rates.prefilled_tokens.measured(160, 1.9)
    assert not rates.copy_is_cheaper(10, 160)
    rates.prefilled_tokens.measured(1000, 1000 / 160 * 2.1)
    assert rates.copy_is_cheaper(10, 160)


def test_prefill_rate_counts_computed_and_not_cached_tokens() -> None:
    simulator = Simulator(prefix_cache=False)
    simulator.kill(1)
    for tokens in (9, 19):
        simulator.submit(tokens, 0, 1, 1, None, 0)
        while simulator.decode.requests:
            simulator.decode_turn()
            simulator.deliver(0, up=False)
            simulator.prefill_turn(0)
            simulator.pass_time(0.01)  # the step takes time
            simulator.end_write(0, ok=True, late=False)
            simulator.deliver(0, up=True)
    done = list(simulator.decode.rates.prefilled_tokens._samples)
    assert [tokens for _, tokens in done] == [9, 11], "four pages of the second prompt were cached"
    simulator.finish()


def test_copy_rate_is_measured_when_all_ranks_have_reported() -> None:
    scheduler = DecodeScheduler(decode_limits(ranks=2), PageAllocator[KvPage](9), ())
    grant = scheduler.allocator.grant("saved", 3)
    assert grant is not None
    copy = scheduler.memory.copies.begin("save", Mock(), grant)
    copy.pages = 3
    scheduler.handle(CopyDone(1, copy.number, 0.25), 0.0)
    assert scheduler.rates.copied_pages.per_s is None
    scheduler.handle(CopyDone(0, copy.number, 0.5), 0.0)
    assert scheduler.rates.copied_pages.per_s == 6


def test_rate_by_size_is_unknown_beyond_small_sizes() -> None:
    rate = RateBySize()
    rate.measured(16, 0.006)
    assert rate.at(20) == rate.at(1) == pytest.approx(16 / 0.006)
    assert rate.at(4096) is None, "16 tokens take as long as 100"
    rate.measured(200, 0.008)
    assert rate.at(4096) == rate.at(100) == pytest.approx(200 / 0.008)
    rate.measured(8192, 0.2)
    assert rate.at(4096) == rate.at(100_000) == pytest.approx(8192 / 0.2)
