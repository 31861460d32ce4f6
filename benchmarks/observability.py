"""What scraping, tracing and the live page cost: decode throughput with and without them, in interleaved runs.

    python -m benchmarks.observability
    python -m benchmarks.observability --rounds 12 --concurrency 8 --output-len 96

Two pairs run on this machine: one as it is, one that sends traces (--otlp-endpoint) to a collector here, while a client
scrapes /metrics of both its servers and reads what the live page reads. Loads alternate between the pairs, so that only
one of them is busy at a time. The figure is the loss of output tokens per second, from the medians of all rounds.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.servers import free_port, running, wait_ready
from pdserve.common.errors import PdserveError
from pdserve.configs.schema import AnyServerConfig, DecodeConfig, PrefillConfig
from pdserve.server.bench.command import measure
from pdserve.server.bench.options import BenchOptions
from pdserve.server.launch.up import base_url

START_TIMEOUT_S = 600
ALLOWED_LOSS = 0.02
SCRAPE_S = 5.0
"""Twice as often as in deploy/observability/prometheus.yml."""
PAGE_S = 1.0
"""How often the live page asks for /server_info."""


class Collector(BaseHTTPRequestHandler):
    """Accepts traces (OTLP over HTTP) and counts them."""

    requests = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).requests += 1
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the default is a line per request."""


def main() -> int:
    options, screen = _parse(), Console(stderr=True, highlight=False)
    try:
        with _collector() as endpoint:
            plain, watched = _pair(options), _pair(options, otlp_endpoint=endpoint)
            named: dict[str, AnyServerConfig] = {
                f"{config.role} {config.port}": config for config in (*plain, *watched)
            }
            with running(named, screen) as children:
                wait_ready(children, list(named.values()), START_TIMEOUT_S)
                found = asyncio.run(_rounds(plain, watched, options, screen))
    except PdserveError as error:
        screen.print(f"error: {error}", style="red", markup=False)
        return 1
    if not Collector.requests:
        screen.print("error: no traces arrived", style="red")
        return 1
    plain_per_s, watched_per_s = found
    loss = 1 - statistics.median(watched_per_s) / statistics.median(plain_per_s)
    Console(highlight=False).print(_table(plain_per_s, watched_per_s, loss))
    return 0 if loss <= ALLOWED_LOSS else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="model (default: smollm2, the embedded one)")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of each pair (default: 10)")
    parser.add_argument("--requests", type=int, default=16, help="requests per round (default: 16)")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time (default: 8)")
    parser.add_argument("--input-len", type=int, default=16, help="prompt tokens (default: 16)")
    parser.add_argument("--output-len", type=int, default=64, help="output tokens (default: 64)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each server (default: 1)")
    parser.add_argument("--kv-tokens", type=int, default=16384, help="KV tokens of each server (default: 16384)")
    return parser.parse_args()


def _pair(options: argparse.Namespace, **settings: Any) -> "Pair":
    shared = {"model": options.model, "threads": options.threads, "kv_tokens": options.kv_tokens, **settings}
    prefill = PrefillConfig(**shared, port=free_port(), bootstrap_port=free_port())
    return prefill, DecodeConfig(**shared, port=free_port(), prefill=(f"127.0.0.1:{prefill.bootstrap_port}",))


Pair = tuple[PrefillConfig, DecodeConfig]


async def _rounds(
    plain: Pair, watched: Pair, options: argparse.Namespace, screen: Console
) -> tuple[list[float], list[float]]:
    """Output tokens per second of each round, of both pairs. The first round warms up; the pairs take turns in being
    first.
    """
    rates: tuple[list[float], list[float]] = ([], [])
    for number in range(options.rounds + 1):
        for pair in (plain, watched) if number % 2 else (watched, plain):
            bench = BenchOptions(
                url=base_url(pair[1]),
                requests=options.requests,
                concurrency=options.concurrency,
                input_len=options.input_len,
                output_len=options.output_len,
                seed=number,
            )
            async with _watch(pair) if pair is watched else contextlib.nullcontext():
                summary = (await measure(bench, screen)).summary
            if summary.failed:
                raise PdserveError(f"{summary.failed} requests failed: {summary.failures}")
            name = "watched" if pair is watched else "plain"
            screen.print(f"round {number}, {name}: {summary.output_tokens_per_s:.1f} output tokens/s")
            if number:
                rates[pair is watched].append(summary.output_tokens_per_s)
    return rates


@contextlib.asynccontextmanager
async def _watch(pair: Pair) -> AsyncIterator[None]:
    """Scrape both servers, and read what a live page of each reads."""
    async with httpx.AsyncClient(trust_env=False, timeout=30.0) as client:

        async def ask(url: str, every_s: float) -> None:
            while True:
                (await client.get(url)).raise_for_status()
                await asyncio.sleep(every_s)

        urls = [base_url(config) for config in pair]
        tasks = [asyncio.create_task(ask(f"{url}/metrics", SCRAPE_S)) for url in urls]
        tasks += [asyncio.create_task(ask(f"{url}/server_info", PAGE_S)) for url in urls]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(error, asyncio.CancelledError):
                    raise PdserveError(f"watching failed: {error!r}")


@contextlib.contextmanager
def _collector() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def _table(plain: list[float], watched: list[float], loss: float) -> Table:
    table = Table(title=f"output tokens per second, {len(plain)} rounds each, interleaved")
    for column in ("", "median", "lowest", "highest"):
        table.add_column(column, justify="right" if column else "left")
    for name, rates in (("plain", plain), ("scraped, traced, with the page", watched)):
        table.add_row(name, *(f"{value:.1f}" for value in (statistics.median(rates), min(rates), max(rates))))
    table.caption = f"loss {loss:.1%} (at most {ALLOWED_LOSS:.0%})"
    return table


if __name__ == "__main__":
    sys.exit(main())
