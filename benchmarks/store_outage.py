"""Time to first token under load: without a KV store, with one, and with one whose master is killed after a third.

    python -m benchmarks.store_outage
    python -m benchmarks.store_outage --concurrency 4 --requests 400 --input-len 256

Each case starts a pair on this machine; settings of the servers are those of `pdserve up`, such as `--threads 2`. All
cases have the same prompts. Exits with 1 if a request fails, or if the outage raises p99 by more than TARGET_MS.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import httpx
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.serve import pair_on_free_ports
from pdserve.configs.errors import PdserveError, StartupError
from pdserve.configs.flags import add_flags, given_flags
from pdserve.server.bench.command import measure
from pdserve.server.bench.options import BenchOptions
from pdserve.server.bench.report import BenchResult
from pdserve.server.launch.pair import PAIR_FIELDS
from pdserve.server.launch.store_options import take_local_store
from pdserve.server.launch.up import RunningPair, base_url, running_pair, store_command

TARGET_MS = 50.0
CONNECTED_S = 60.0
POLL_S = 0.1


class Case(NamedTuple):
    name: str
    has_store: bool
    is_killed: bool


CASES = (
    Case("no store", has_store=False, is_killed=False),
    Case("store", has_store=True, is_killed=False),
    Case("master killed", has_store=True, is_killed=True),
)


def main() -> int:
    options, flags = _parse()
    screen = Console(stderr=True, highlight=False)
    results: dict[str, BenchResult] = {}
    try:
        for case in CASES:
            screen.print(f"{case.name} ...")
            results[case.name] = _measure(case, options, dict(flags), screen)
    except PdserveError as error:
        screen.print(f"error: {error}", style="red", markup=False)
        return 2 if isinstance(error, StartupError) else 1
    out = Console(highlight=False, width=120)
    out.print(_table(results, options))
    before, after = (_p99_ms(results[case.name]) for case in (CASES[0], CASES[-1]))
    out.print(f"p99 with the master killed: {after - before:+.0f} ms (target: at most {TARGET_MS:+.0f} ms)")
    failed = sum(result.summary.failed for result in results.values())
    return int(bool(failed) or after - before > TARGET_MS)


def _measure(case: Case, options: argparse.Namespace, flags: dict[str, str | bool], screen: Console) -> BenchResult:
    with _store(case, flags) as store, running_pair(pair_on_free_ports(flags), screen) as pair:
        pair.wait_ready()
        if store is not None:
            _wait_connected(pair)
        bench = BenchOptions(
            url=pair.url,
            requests=options.requests,
            concurrency=options.concurrency,
            input_len=options.input_len,
            output_len=options.output_len,
        )
        kill = store if case.is_killed else None
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_load(bench, kill, pair, screen))


async def _load(
    bench: BenchOptions, kill: "subprocess.Popen[bytes] | None", pair: RunningPair, screen: Console
) -> BenchResult:
    killing = asyncio.ensure_future(_kill_after_a_third(kill, pair, bench.requests)) if kill is not None else None
    result = await measure(bench, screen, command=" ".join(sys.argv))
    if killing is not None:
        await killing
    return result


async def _kill_after_a_third(store: "subprocess.Popen[bytes]", pair: RunningPair, requests: int) -> None:
    async with httpx.AsyncClient(base_url=pair.url, trust_env=False) as client:
        while True:
            counters = (await client.get("/server_info")).json()["counters"]
            if counters["requests_finished"] >= requests / 3:
                break
            await asyncio.sleep(POLL_S)
    store.send_signal(signal.SIGKILL)  # its master gets one too


@contextmanager
def _store(case: Case, flags: dict[str, str | bool]) -> Iterator["subprocess.Popen[bytes] | None"]:
    """`pdserve store`, if the case has one; then `flags` name it."""
    if not case.has_store:
        yield None
        return
    flags["kv_store"] = "1GiB"
    store = take_local_store(flags)
    assert store is not None
    process = subprocess.Popen(store_command(store), stdout=subprocess.DEVNULL, env=dict(os.environ))
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_connected(pair: RunningPair) -> None:
    deadline = time.monotonic() + CONNECTED_S
    with httpx.Client(trust_env=False) as client:
        for server in (pair.config.prefill, pair.config.decode):
            while client.get(f"{base_url(server)}/health").json()["kv_store"]["state"] != "ok":
                if time.monotonic() > deadline:
                    raise PdserveError(f"the store is not used after {CONNECTED_S:.0f} s")
                time.sleep(POLL_S)


def _p99_ms(result: BenchResult) -> float:
    found = result.summary.ttft_s
    if found is None:
        raise PdserveError("no request succeeded")
    return 1000 * found.p99


def _table(results: dict[str, BenchResult], options: argparse.Namespace) -> Table:
    table = Table(
        title=f"time to first token in ms, {options.requests} prompts of {options.input_len} tokens, "
        f"{options.concurrency} at a time"
    )
    for column in ("", "ok", "failed", "p50", "p95", "p99", "max"):
        table.add_column(column, justify="right")
    for name, result in results.items():
        found = result.summary.ttft_s
        times = (found.p50, found.p95, found.p99, found.max) if found is not None else ()
        table.add_row(
            name, str(result.summary.ok), str(result.summary.failed), *(f"{1000 * value:.0f}" for value in times)
        )
    return table


def _parse() -> tuple[argparse.Namespace, dict[str, str | bool]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="of each case (default: 200)")
    parser.add_argument("--concurrency", type=int, default=2, help="requests at a time (default: 2)")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a prompt (default: 128)")
    parser.add_argument("--output-len", type=int, default=4, help="tokens of an answer (default: 4)")
    servers = parser.add_argument_group("settings of the two servers, as of 'pdserve up'")
    add_flags(servers, PAIR_FIELDS, PAIR_FIELDS)
    options = parser.parse_args()
    return options, {"local_prefill": "never", **given_flags(options, PAIR_FIELDS)}


if __name__ == "__main__":
    sys.exit(main())
