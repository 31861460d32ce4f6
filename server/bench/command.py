"""`pdserve bench`: send load to a running decode server; report its speed and the time of each stage.

options.py   what to send and how fast
prompts.py   the prompts
client.py    one request over HTTP, with the time of every arrival
summary.py   percentiles, throughput, goodput
search.py    the highest rate that keeps the limits: several runs
report.py    tables and JSON
plot.py      the picture
"""

import asyncio
import random
import shlex
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import httpx
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ...common.errors import StartupError
from ...common.gc_tuning import kept_for_now
from ..terminal.options import NEEDS_KEY, SYSTEM_TLS, WRONG_KEY, TlsOptions
from ..terminal.tls import describe, verification
from .client import BenchClient, RequestRecord
from .options import BenchOptions
from .plot import check_plot, draw, draw_search
from .prompts import BenchPrompt, ModelLimits, Workload, make_workload
from .report import BenchResult, encode, report, to_json
from .search import Probe, best_of, search, search_document, table_of, verdict_of
from .search import describe as describe_probe
from .summary import meets, summarize

INFO_TIMEOUT_S = 10.0
PROGRESS_PER_S = 4


def run_bench(options: BenchOptions, arguments: Sequence[str]) -> int:
    """Run the command. Returns 0 when every request succeeded, 1 when one failed, 130 on Ctrl-C."""
    if options.plot is not None:
        check_plot(options.plot)
    screen = Console(stderr=True)
    if options.find_rate:
        return _run_search(options, screen, shlex.join(["pdserve", "bench", *arguments]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(measure(options, screen, command=shlex.join(["pdserve", "bench", *arguments])))
    out = Console(highlight=False)
    for part in report(result):
        out.print(part)
    if options.output is not None:
        options.output.write_bytes(to_json(result))
    if options.plot is not None:
        draw(result, options.plot)
    if result.interrupted:
        return 130
    return 1 if result.summary.failed or not result.summary.ok else 0


def _run_search(options: BenchOptions, screen: Console, command: str) -> int:
    """Returns 0 when a rate kept the limits, 1 when none did, 130 on Ctrl-C."""
    probes: list[Probe] = []
    interrupted = False

    async def run(load: BenchOptions, misses: int) -> BenchResult:
        nonlocal interrupted
        result = await measure(load, screen, command=command, misses=misses)
        interrupted = result.interrupted
        return result

    async def find() -> None:
        async for probe in search(options, run):
            probes.append(probe)
            screen.print(describe_probe(probe), highlight=False)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(find())
    out = Console(highlight=False)
    if probes:
        out.print(table_of(probes, options))
        out.print(verdict_of(probes))
    if options.output is not None:
        options.output.write_bytes(encode(search_document(probes, command)))
    if options.plot is not None and probes:
        draw_search(probes, options, options.plot)
    if interrupted:
        return 130
    return 0 if best_of(probes) is not None else 1


async def measure(
    options: BenchOptions, screen: Console, *, command: str = "", misses: int | None = None
) -> BenchResult:
    """Run one load against the server and summarize it. Cancellation (Ctrl-C) ends the load, not the summary; so do
    more than `misses` requests that fail or are outside the bounds.

    Raises StartupError when the server does not respond, or cannot hold the requested lengths.
    """
    model_info = await ask_server(options.url, "model_info", options.api_key, options.tls)
    server_info = await ask_server(options.url, "server_info", options.api_key, options.tls)
    if server_info.get("disaggregation_mode") == "prefill":
        raise StartupError(f"{options.url} is a prefill server: give the URL of the decode server")
    workload = make_workload(
        options,
        ModelLimits(
            vocab_size=model_info["vocab_size"],
            special_token_ids=frozenset(model_info["eos_token_ids"]),
            max_total_tokens=min(model_info["context_length"], server_info["pool"]["max_total_tokens"]),
        ),
    )
    client = BenchClient(options.url, api_key=options.api_key, timeout_s=options.timeout_s, tls=options.tls)
    started_at = datetime.now(UTC)
    try:
        # kept_for_now(): the GC skips the prompts, which are millions of objects in a long run
        with kept_for_now(), _progress(screen) as progress:
            run = _Run(client, options, progress, misses)
            await run.carry_out(workload)
    finally:
        client.close()
    slo_ttft_s, slo_itl_s = options.bounds_s
    return BenchResult(
        options=options,
        command=command,
        started_at=started_at,
        model_info=model_info,
        server_info=server_info,
        records=run.records,
        summary=summarize(
            run.records,
            run.duration_s,
            unfinished=run.sent - len(run.records),
            slo_ttft_s=slo_ttft_s,
            slo_itl_s=slo_itl_s,
        ),
        client_cpu_s=run.cpu_s,
        interrupted=run.interrupted,
    )


class _TooManyMissesError(Exception):
    """The share of requests that must meet the bounds is out of reach."""


class _Run:
    """The load while it runs."""

    def __init__(
        self, client: BenchClient, options: BenchOptions, progress: Progress, misses: int | None = None
    ) -> None:
        self.records: list[RequestRecord] = []
        self.sent = 0
        self.duration_s = self.cpu_s = 0.0
        self.interrupted = False
        self._client = client
        self._options = options
        self._progress = progress
        self._task = progress.add_task("", total=options.requests, failed=0, tokens=0)
        self._failed = 0
        self._misses_left = misses

    async def carry_out(self, workload: Workload) -> None:
        """Returns when every request has ended, or on cancellation; `records` has the requests that have ended."""
        try:
            for prompt in workload.warmup:
                record = await self._request(prompt, time.perf_counter())
                if not record.ok:
                    raise StartupError(f"a warm-up request failed: {record.failure}: {record.detail}")
            self._client.tokens = 0
            started, cpu_started_s = time.perf_counter(), time.process_time()
            try:
                await self._send(workload.measured, started)
            except* _TooManyMissesError:
                pass
            finally:
                self.duration_s = time.perf_counter() - started
                self.cpu_s = time.process_time() - cpu_started_s
        except asyncio.CancelledError:
            self.interrupted = True

    async def _send(self, prompts: Sequence[BenchPrompt], started: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            if self._options.rate_per_s is not None:
                await self._send_at_rate(prompts, started, tasks)
            else:
                waiting = iter(prompts)
                for _ in range(min(self._options.concurrency or 1, len(prompts))):
                    tasks.create_task(self._send_in_turn(waiting, started))

    async def _send_in_turn(self, waiting: Iterator[BenchPrompt], started: float) -> None:
        for prompt in waiting:
            await self._measure(prompt, started)

    async def _send_at_rate(self, prompts: Sequence[BenchPrompt], started: float, tasks: asyncio.TaskGroup) -> None:
        """Sends each prompt at its arrival time, without waiting for responses: the latencies of an overloaded server
        grow.
        """
        for prompt, at_s in zip(prompts, arrival_times_s(len(prompts), self._options), strict=True):
            await asyncio.sleep(max(0.0, started + at_s - time.perf_counter()))
            tasks.create_task(self._measure(prompt, started))

    async def _measure(self, prompt: BenchPrompt, started: float) -> None:
        self.sent += 1
        record = await self._request(prompt, started)
        self.records.append(record)
        self._failed += not record.ok
        self._progress.update(self._task, advance=1, failed=self._failed, tokens=self._client.tokens)
        if self._misses_left is not None and not meets(record, *self._options.bounds_s):
            self._misses_left -= 1
            if self._misses_left < 0:
                raise _TooManyMissesError

    async def _request(self, prompt: BenchPrompt, started: float) -> RequestRecord:
        expected = prompt.output_len if self._options.ignore_eos else None
        return await self._client.generate(prompt.body(self._options), started, expected_tokens=expected)


def arrival_times_s(count: int, options: BenchOptions) -> list[float]:
    """Arrival times of a Poisson process of `rate_per_s`; the first is 0."""
    assert options.rate_per_s is not None
    source = random.Random(f"arrivals {options.seed}")
    times_s = [0.0]
    while len(times_s) < count:
        times_s.append(times_s[-1] + source.expovariate(options.rate_per_s))
    return times_s


async def ask_server(url: str, route: str, api_key: str | None, tls: TlsOptions = SYSTEM_TLS) -> dict[str, Any]:
    """The response of an information route. Raises StartupError if there is none."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        async with httpx.AsyncClient(
            headers=headers, timeout=INFO_TIMEOUT_S, trust_env=False, verify=verification(tls)
        ) as http:
            return dict((await http.get(f"{url}/{route}")).raise_for_status().json())
    except httpx.HTTPStatusError as error:
        response = error.response
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise StartupError(f"{url} {NEEDS_KEY if api_key is None else WRONG_KEY}") from None
        raise StartupError(f"{error.request.url} returned {response.status_code}: {response.text}") from None
    except (httpx.HTTPError, ValueError, TypeError) as error:
        reason = describe(error) if isinstance(error, httpx.HTTPError) else str(error)
        raise StartupError(f"{url}: no response from a pdserve server there: {reason}") from None


def _progress(screen: Console) -> Progress:
    """A live line on a terminal, nothing elsewhere."""
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
        console=screen,
        refresh_per_second=PROGRESS_PER_S,
        transient=True,
        disable=not screen.is_terminal,
    )
