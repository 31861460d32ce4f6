"""Time to first token of short prompts, alone and under a load of long ones.

    python -m benchmarks.short_prompts
    python -m benchmarks.short_prompts --long-len 8000 --long-requests 12 --short-requests 120 --rate 4

Starts a pair on this machine; settings of the servers are those of `pdserve up`, such as `--threads 2`. A fixed number
of long prompts is in flight at any time, and short ones arrive at random (Poisson). All requests generate one token.
"""

import argparse
import asyncio
import io
import sys

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.serve import pair_on_free_ports
from pdserve.common.errors import PdserveError, StartupError
from pdserve.configs.flags import add_flags, given_flags
from pdserve.server.bench.command import measure
from pdserve.server.bench.options import BenchOptions
from pdserve.server.bench.report import BenchResult
from pdserve.server.launch.pair import PAIR_FIELDS
from pdserve.server.launch.up import running_pair


def main() -> int:
    options, server_flags = _parse()
    screen = Console(stderr=True, highlight=False)
    try:
        with (
            running_pair(pair_on_free_ports(server_flags), screen) as pair,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            pair.wait_ready()
            (alone,) = runner.run(_measure(_short(options, pair.url, seed=1)))
            short, long = runner.run(_measure(_short(options, pair.url, seed=2), _long(options, pair.url)))
    except PdserveError as error:
        screen.print(f"error: {error}", style="red", markup=False)
        return 2 if isinstance(error, StartupError) else 1
    results = {"short, alone": alone, "short, beside long": short, "long": long}
    Console(highlight=False, width=120).print(_table(results, options))
    return 1 if any(result.summary.failed for result in results.values()) else 0


def _parse() -> tuple[argparse.Namespace, dict[str, str | bool]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long-len", type=int, default=4000, help="tokens of a long prompt (default: 4000)")
    parser.add_argument("--long-requests", type=int, default=12, help="long prompts in all (default: 12)")
    parser.add_argument("--long-concurrency", type=int, default=3, help="long prompts at a time (default: 3)")
    parser.add_argument("--short-len", type=int, default=16, help="tokens of a short prompt (default: 16)")
    parser.add_argument("--short-requests", type=int, default=100, help="short prompts in all (default: 100)")
    parser.add_argument("--rate", type=float, default=2.0, help="short prompts a second (default: 2)")
    servers = parser.add_argument_group("settings of the two servers, as of 'pdserve up'")
    add_flags(servers, PAIR_FIELDS, PAIR_FIELDS)
    options = parser.parse_args()
    return options, given_flags(options, PAIR_FIELDS)


def _short(options: argparse.Namespace, url: str, *, seed: int) -> BenchOptions:
    return BenchOptions(
        url=url,
        requests=options.short_requests,
        concurrency=None,
        rate_per_s=options.rate,
        input_len=options.short_len,
        output_len=1,
        seed=seed,
    )


def _long(options: argparse.Namespace, url: str) -> BenchOptions:
    return BenchOptions(
        url=url,
        requests=options.long_requests,
        concurrency=options.long_concurrency,
        input_len=options.long_len,
        output_len=1,
        warmup=0,
    )


async def _measure(*loads: BenchOptions) -> list[BenchResult]:
    """Without progress bars: a terminal shows one at a time."""
    return await asyncio.gather(*(measure(load, Console(file=io.StringIO())) for load in loads))


def _table(results: dict[str, BenchResult], options: argparse.Namespace) -> Table:
    table = Table(title=f"{options.long_concurrency} x {options.long_len} tokens at a time, {options.short_len} short")
    columns = ("prompts", "ok", "failed", "seconds", "TTFT p50", "p95", "p99", "max", "behind others", "computing")
    for column in columns:
        table.add_column(column, justify="left" if column == "prompts" else "right", no_wrap=True)
    for name, result in results.items():
        summary = result.summary
        ttft, stages = summary.ttft_s, summary.stages_s
        times = [ttft.p50, ttft.p95, ttft.p99, ttft.max] if ttft is not None else []
        times += [stages[stage].mean for stage in ("prefill_queue", "prefill") if stage in stages]
        row = [f"{seconds * 1000:.0f}" for seconds in times] or ["-"] * 6
        table.add_row(name, str(summary.ok), str(summary.failed), f"{summary.duration_s:.1f}", *row)
    table.caption = "times in ms; the last two are means of the servers' own account"
    return table


if __name__ == "__main__":
    sys.exit(main())
