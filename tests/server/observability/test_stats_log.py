"""The stats line: rates, requests and pools in the log while there is work, and nothing when the server is idle."""

import logging

import pytest

from pdserve.configs.schema import DecodeConfig
from pdserve.scheduler.messages.frontend import Status
from pdserve.scheduler.messages.lifecycle import PrefillState, State
from pdserve.server.observability.activity import byte_rate
from pdserve.server.observability.stats_log import StatsLog
from pdserve.server.text.tokenizer import Tokenizer
from tests.server.http_harness import running_server

START = 1_800_000_000.0


def report(after_s: float, states: dict[str, int] | None = None, held: int = 0, **counters: float) -> Status:
    gauges = {"kv_pages": 200.0, "kv_pages_held": float(held), "waiting_tokens": 640.0}
    return Status(gauges, counters, peers=(), states=states or {}, taken_at=START + after_s, loop_age_s=0.0)


def test_decode_line_has_rates_requests_and_pools() -> None:
    stats = StatsLog("decode", 10)
    assert stats.line(report(0, prompt_tokens=100, generation_tokens=7)) is None, "nothing to compare with"
    states = {state.value: number for number, state in enumerate(State)}
    later = report(
        10, states, 43, prompt_tokens=1300, generation_tokens=2012, prefix_tokens_reused=300, transfer_bytes=2.5e10
    )
    assert stats.line(later) == (
        "stats: in 120.0 tokens/s, out 200.5 tokens/s; running 9, waiting 55, in prefill 14; KV pool 21.5%, "
        "prefix hits 25.0%, KV received 2.50 GB/s"
    )


def test_decode_line_shows_hits_of_hot_rows_with_hisparse() -> None:
    stats = StatsLog("decode", 1)
    stats.line(report(0, hot_hits=10, hot_misses=10))
    line = stats.line(report(1, {"running": 1}, hot_hits=985, hot_misses=35))
    assert line is not None
    assert line.endswith("prefix hits -, hot row hits 97.5%")


def test_prefill_line_has_queue_and_transfers() -> None:
    stats = StatsLog("prefill", 10)
    stats.line(report(0))
    states = {state.value: number for number, state in enumerate(PrefillState)}
    assert stats.line(report(20, states, 50, prompt_tokens=8000, prefix_tokens_reused=2000, transfer_bytes=6.8e9)) == (
        "stats: prompts 400.0 tokens/s; computing 3, waiting 3 (640 tokens to compute), sending 4; KV sent 340 MB/s, "
        "KV pool 25.0%, prefix hits 20.0%"
    )


def test_no_line_within_an_interval_and_none_when_idle() -> None:
    stats = StatsLog("decode", 10)
    assert stats.line(report(0)) is None
    assert stats.line(report(9.75, {"running": 1}, generation_tokens=9)) is None
    assert stats.line(report(10, {"running": 0}, generation_tokens=9)) is not None, "work since the last line"
    assert stats.line(report(20, {"running": 0}, held=8, generation_tokens=9)) is None
    assert stats.line(report(29, {"queued": 1}, generation_tokens=9)) is None
    assert stats.line(report(30, {"queued": 1}, generation_tokens=9)) is not None, "a queue is work"


def test_clock_that_was_set_back_begins_a_new_interval() -> None:
    stats = StatsLog("decode", 10)
    stats.line(report(100))
    assert stats.line(report(50, {"running": 1})) is None
    line = stats.line(report(60, {"running": 1}, generation_tokens=10))
    assert line is not None
    assert "out 1.0 tokens/s" in line


@pytest.mark.parametrize(
    ("bytes_per_s", "shown"),
    [(0, "0 kB/s"), (12_345, "12 kB/s"), (999_400, "999 kB/s"), (999_999, "1 MB/s"), (1.2e9, "1.20 GB/s")],
)
def test_byte_rates_are_rounded(bytes_per_s: float, shown: str) -> None:
    assert byte_rate(bytes_per_s) == shown


@pytest.mark.parametrize(("interval_s", "lines"), [(10.0, 1), (0.0, 0)])
async def test_server_logs_stats_at_the_interval(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, interval_s: float, lines: int
) -> None:
    caplog.set_level(logging.INFO, "pdserve")
    async with running_server(tokenizer, DecodeConfig(log_stats_interval_s=interval_s)) as server:
        for after_s in (0, 5, 10):
            await server.report(report(after_s, {"running": 1}))
    assert [record.getMessage()[:6] for record in caplog.records] == ["stats:"] * lines
