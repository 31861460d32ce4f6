"""Time to first token under load: without a KV store, with one, and with one whose master is killed after a third of
the requests. Then the store is started again, and the seconds until a prompt is loaded from it are measured.

    python -m benchmarks.store_outage --small
    python -m benchmarks.store_outage --concurrency 4 --requests 400 --input-len 256

Each case starts a pair on this machine; settings of the servers are those of `pdserve up`, such as `--threads 2`. All
cases have the same prompts. Exits with 1 if a request fails, if the outage raises p99 by more than TARGET_MS, or if the
store is not used BACK_S after its start.
"""

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.plan_check import SMALL_MODEL
from benchmarks.serve import pair_on_free_ports
from benchmarks.servers import write_model
from pdserve.common.errors import PdserveError, StartupError
from pdserve.configs.flags import add_flags, given_flags
from pdserve.server.bench.command import measure
from pdserve.server.bench.options import BenchOptions
from pdserve.server.bench.report import BenchResult
from pdserve.server.launch.pair import PAIR_FIELDS
from pdserve.server.launch.store_options import StoreOptions, take_local_store
from pdserve.server.launch.up import RunningPair, base_url, running_pair, store_command

TARGET_MS = 50.0
BACK_S = 15.0
MOST_BACK_S = 120.0
"""Then the benchmark gives up."""
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
    back_s = 0.0
    with tempfile.TemporaryDirectory() as folder:
        if options.small:
            write_model(Path(folder), SMALL_MODEL)
            flags |= {"model": folder, "load_format": "dummy"}
        try:
            for case in CASES:
                screen.print(f"{case.name} ...")
                results[case.name], back_s = _measure(case, options, dict(flags), screen)
        except PdserveError as error:
            screen.print(f"error: {error}", style="red", markup=False)
            return 2 if isinstance(error, StartupError) else 1
    out = Console(highlight=False, width=120)
    out.print(_table(results, options))
    before, after = (_p99_ms(results[case.name]) for case in (CASES[0], CASES[-1]))
    out.print(f"p99 with the master killed: {after - before:+.0f} ms (target: at most {TARGET_MS:+.0f} ms)")
    out.print(f"loaded from the store again {back_s:.1f} s after its start (target: at most {BACK_S:.0f} s)")
    failed = sum(result.summary.failed for result in results.values())
    return int(bool(failed) or after - before > TARGET_MS or back_s > BACK_S)


def _measure(
    case: Case, options: argparse.Namespace, flags: dict[str, str | bool], screen: Console
) -> tuple[BenchResult, float]:
    """The result of a case, and the seconds until the store was used again, if it was killed."""
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
        killed = store if case.is_killed else None
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(_load(bench, killed, pair, screen))
        return result, _time_until_back(killed, pair, options.input_len) if killed is not None else 0.0


async def _load(bench: BenchOptions, kill: "_Store | None", pair: RunningPair, screen: Console) -> BenchResult:
    killing = asyncio.ensure_future(_kill_after_a_third(kill, pair, bench.requests)) if kill is not None else None
    result = await measure(bench, screen, command=" ".join(sys.argv))
    if killing is not None:
        await killing
    return result


async def _kill_after_a_third(store: "_Store", pair: RunningPair, requests: int) -> None:
    async with httpx.AsyncClient(base_url=pair.url, trust_env=False) as client:
        while True:
            counters = (await client.get("/server_info")).json()["counters"]
            if counters["requests_finished"] >= requests / 3:
                break
            await asyncio.sleep(POLL_S)
    store.kill()


def _time_until_back(store: "_Store", pair: RunningPair, input_len: int) -> float:
    """Start the store again, and send prompts twice each, until a part of one comes from the store."""
    store.start()
    started, draw = time.monotonic(), random.Random(1)
    with pair.client(timeout_s=MOST_BACK_S) as client:
        while (seconds := time.monotonic() - started) < MOST_BACK_S:
            prompt = draw.choices(range(1000, 4000), k=max(input_len, 128))
            _ask(client, prompt)
            time.sleep(POLL_S)  # the prompt is written
            for server in (pair.config.prefill, pair.config.decode):
                client.post(f"{base_url(server)}/flush_cache").raise_for_status()
            if _ask(client, prompt)["storage"]:
                return time.monotonic() - started
    raise PdserveError(f"the store is not used {seconds:.0f} s after its start")


def _ask(client: httpx.Client, prompt: list[int]) -> dict[str, int]:
    """Send a prompt; returns its cached tokens by place."""
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "ignore_eos": True}}
    answer = client.post("/generate", json=body).raise_for_status().json()
    details: dict[str, int] = answer["meta_info"]["cached_tokens_details"]
    return details


class _Store:
    """`pdserve store`, which can be killed and started again at the same address."""

    def __init__(self, options: StoreOptions) -> None:
        self._options = options
        self.start()

    def start(self) -> None:
        command = store_command(self._options)
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=dict(os.environ))

    def kill(self) -> None:
        """Send SIGKILL to the store and to its master."""
        self._process.kill()
        self._process.wait()


@contextmanager
def _store(case: Case, flags: dict[str, str | bool]) -> Iterator[_Store | None]:
    """`pdserve store`, if the case has one; then `flags` name it."""
    if not case.has_store:
        yield None
        return
    flags["kv_store"] = "1GiB"
    options = take_local_store(flags)
    assert options is not None
    store = _Store(options)
    try:
        yield store
    finally:
        store.kill()


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
    parser.add_argument("--requests", type=int, default=200, help="requests of each case (default: 200)")
    parser.add_argument("--concurrency", type=int, default=2, help="requests at a time (default: 2)")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a prompt (default: 128)")
    parser.add_argument("--output-len", type=int, default=4, help="tokens of an answer (default: 4)")
    parser.add_argument("--small", action="store_true", help="use a tiny model with random weights")
    servers = parser.add_argument_group("settings of the two servers, as of 'pdserve up'")
    add_flags(servers, PAIR_FIELDS, PAIR_FIELDS)
    options = parser.parse_args()
    return options, {"local_prefill": "never", **given_flags(options, PAIR_FIELDS)}


if __name__ == "__main__":
    sys.exit(main())
