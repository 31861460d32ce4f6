"""Start a pair on this machine and load it at several concurrencies: one command, one table.

    python -m benchmarks.serve
    python -m benchmarks.serve --model DIR --concurrency 1,8,32 --requests 64 --input-len 512 --output-len 128

Settings of the servers are those of `pdserve up`, such as `--threads 2`. Everything is measured by the same
code as `pdserve bench`; `--output FILE` keeps the full results, one JSON document per line.
"""

import argparse
import asyncio
import os
import sys
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.servers import free_port
from pdserve.common.errors import PdserveError, StartupError
from pdserve.configs.flags import add_flags, given_flags
from pdserve.server.bench.command import measure
from pdserve.server.bench.options import BenchOptions
from pdserve.server.bench.report import BenchResult, to_json
from pdserve.server.launch.pair import PAIR_FIELDS, PairConfig, load_pair_config
from pdserve.server.launch.up import running_pair


def main() -> int:
    options, server_flags = _parse()
    screen = Console(stderr=True, highlight=False)
    results = []
    try:
        config = pair_on_free_ports(server_flags)
        with running_pair(config, screen) as pair, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            pair.wait_ready()
            for concurrency in options.concurrency:
                bench = BenchOptions(
                    url=pair.url,
                    requests=max(options.requests, concurrency),
                    concurrency=concurrency,
                    input_len=options.input_len,
                    output_len=options.output_len,
                    prefix_len=options.prefix_len,
                    seed=concurrency,  # new prompts in every round, so that the prefix cache has none of them
                )
                results.append(runner.run(measure(bench, screen, command=" ".join(sys.argv))))
    except KeyboardInterrupt:
        screen.print("interrupted; the rounds that ended:")
    except PdserveError as error:
        screen.print(f"error: {error}", style="red", markup=False)
        return 2 if isinstance(error, StartupError) else 1
    if options.output is not None:
        lines = [msgspec.json.format(to_json(result), indent=-1) for result in results]
        options.output.write_bytes(b"".join(line.strip() + b"\n" for line in lines))
    Console(highlight=False).print(_table(results, options))
    complete = len(results) == len(options.concurrency) and not any(result.summary.failed for result in results)
    return 0 if complete else 1


def _parse() -> tuple[argparse.Namespace, dict[str, str | bool]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--concurrency", type=_numbers, default=[1, 4, 8], metavar="N,N,...", help="requests at a time (default: 1,4,8)"
    )
    parser.add_argument("--requests", type=int, default=16, help="requests per round (default: 16)")
    parser.add_argument("--input-len", type=int, default=256, help="prompt tokens (default: 256)")
    parser.add_argument("--output-len", type=int, default=32, help="output tokens (default: 32)")
    parser.add_argument("--prefix-len", type=int, default=0, help="tokens that all prompts of a round share")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write full results, a JSON document per line")
    servers = parser.add_argument_group("settings of the two servers, as of 'pdserve up'")
    add_flags(servers, PAIR_FIELDS, PAIR_FIELDS)
    options = parser.parse_args()
    return options, given_flags(options, PAIR_FIELDS)


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 each, got {text!r}")
    return numbers


def pair_on_free_ports(flags: dict[str, str | bool]) -> PairConfig:
    """The pair, on free ports unless flags name ports."""
    ports = {name: str(free_port()) for name in ("port", "prefill_port", "bootstrap_port")}
    return load_pair_config(None, {**ports, **flags}, os.environ)


def _table(results: list[BenchResult], options: argparse.Namespace) -> Table:
    table = Table(title=f"{options.prefix_len + options.input_len} prompt tokens, {options.output_len} new tokens")
    columns = ("concurrency", "ok", "failed", "requests/s", "tokens/s", "TTFT p50", "p95", "ITL p50", "p95", "transfer")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        summary = result.summary
        ms = [
            f"{value * 1000:.1f}"
            for distribution in (summary.ttft_s, summary.itl_s)
            if distribution is not None
            for value in (distribution.p50, distribution.p95)
        ]
        share = summary.transfer_share_of_ttft
        table.add_row(
            str(result.options.concurrency),
            str(summary.ok),
            str(summary.failed),
            f"{summary.requests_per_s:.2f}",
            f"{summary.output_tokens_per_s:.1f}",
            *(ms or ["-"] * 4),
            "-" if share is None else f"{share:.1%}",
        )
    table.caption = "times in ms; transfer is its share of the time to first token"
    return table


if __name__ == "__main__":
    sys.exit(main())
