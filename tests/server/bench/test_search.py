"""`pdserve bench --find-rate`: the search, against a server whose limit is known, and against the real frontend."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pdserve.server.bench.client import RequestRecord
from pdserve.server.bench.options import BenchOptions
from pdserve.server.bench.plot import draw_search
from pdserve.server.bench.report import BenchResult, encode
from pdserve.server.bench.search import Probe, best_of, search, search_document, verdict_of
from pdserve.server.bench.summary import summarize
from pdserve.server.text.tokenizer import Tokenizer
from tests.server.bench.test_bench import answering, bench_command, complete, finish
from tests.server.http_harness import load_byte_tokenizer

OPTIONS = BenchOptions(requests=100, concurrency=None, rate_per_s=1.0, find_rate=True, slo_ttft_ms=500.0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_byte_tokenizer(tmp_path_factory.mktemp("model"))


async def probes_of(limit_per_s: float, options: BenchOptions = OPTIONS, stop_after: int = 100) -> list[Probe]:
    """Of a server that answers in 100 ms up to a rate, and in 900 ms above it. Ctrl-C comes in run `stop_after`."""
    runs: list[BenchOptions] = []

    async def run(load: BenchOptions, misses: int) -> BenchResult:
        runs.append(load)
        assert load.rate_per_s is not None
        ttft_s = 0.1 if load.rate_per_s <= limit_per_s else 0.9
        count = load.requests if ttft_s < 0.5 else misses + 1
        records = [RequestRecord(0.0, 1.0, [(ttft_s, 1)], prompt_tokens=5) for _ in range(count)]
        summary = summarize(records, 1.0, unfinished=load.requests - count, slo_ttft_s=0.5)
        stopped = len(runs) > stop_after
        return BenchResult(load, "", datetime.now(UTC), {}, {}, records, summary, 0.1, interrupted=stopped)

    probes = [probe async for probe in search(options, run)]
    assert len({load.seed for load in runs}) == len(runs), "equal prompts would be cached"
    assert all(load.requests >= 15 * (load.rate_per_s or 0) for load in runs), "shorter than 15 s"
    return probes


@pytest.mark.parametrize("limit_per_s", [0.05, 0.7, 1.0, 1.3, 23.0])
async def test_search_comes_within_five_percent_below_the_limit(limit_per_s: float) -> None:
    best = best_of(await probes_of(limit_per_s))
    assert best is not None
    assert limit_per_s / 1.05 <= best.rate_per_s <= limit_per_s


async def test_server_that_keeps_the_limits_at_no_rate() -> None:
    probes = await probes_of(0.0)
    assert best_of(probes) is None
    assert verdict_of(probes) == "no rate kept the limits: 0.0156 requests/s is too high"
    assert all(len(probe.result.records) == probe.result.options.requests // 100 + 1 for probe in probes)


async def test_interrupted_search_keeps_what_it_has_found(tmp_path: Path) -> None:
    probes = await probes_of(23.0, stop_after=3)
    assert [probe.rate_per_s for probe in probes] == [1.0, 2.0, 4.0]
    assert verdict_of(probes) == "highest rate inside the limits: 4 requests/s"
    assert json.loads(encode(search_document(probes, "")))["highest_rate_per_s"] == 4.0
    draw_search(probes, OPTIONS, tmp_path / "plot.svg")
    assert "share of requests inside the limits" in (tmp_path / "plot.svg").read_text()


async def test_command_ends_too_high_rates_early(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """No request can meet a bound of a microsecond: each rate ends after the first, in a fraction of its time."""
    output = tmp_path / "search.json"
    async with answering(tokenizer, complete) as server:
        arguments = (
            "--url",
            f"http://127.0.0.1:{server.port}",
            "--find-rate",
            "--rate",
            "2",
            "--requests",
            "20",
            "--warmup",
            "1",
        )
        lengths = ("--input-len", "4", "--output-len", "2", "--input-sigma", "1", "--output", str(output))
        with bench_command(*arguments, *lengths, "--slo-ttft-ms", "0.001") as command:
            code, out, error = await finish(command)
    assert code == 1, error
    assert "no rate kept the limits: 0.0156 requests/s is too high" in out
    rates = json.loads(output.read_text())["rates"]
    assert [rate["rate_per_s"] for rate in rates] == [2 / 2**n for n in range(8)]
    assert all(rate["share"] == 0 and len(rate["requests"]) <= 3 for rate in rates)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--find-rate"], "--find-rate needs --slo-ttft-ms, --slo-itl-ms or both"),
        (["--find-rate", "--slo-ttft-ms", "5", "--concurrency", "3"], "--concurrency has no meaning with it"),
        (["--find-rate", "--slo-ttft-ms", "5", "--rate", "inf"], "--find-rate begins at --rate, which must be finite"),
        (["--input-sigma", "1", "--range-ratio", "0.5"], "--range-ratio is for uniform lengths"),
        (["--max-output-len", "9"], "--max-output-len is for lognormal lengths: give --output-sigma too"),
        (
            ["--input-sigma", "1", "--max-input-len", "9"],
            "--max-input-len 9 is below --input-len, the median, which is",
        ),
    ],
)
async def test_flags_that_do_not_fit_are_refused(flags: list[str], message: str) -> None:
    with bench_command(*flags) as command:
        code, _, error = await finish(command)
    assert code == 2
    assert message in error
