"""`pdserve bench`: send load to a running decode server; report its speed and the time of each stage.

options.py   what to send and how fast
prompts.py   the prompts
client.py    one request over HTTP, with the time of every arrival
summary.py   percentiles, throughput, goodput
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

from ...configs.errors import StartupError
from ...configs.gc_tuning import kept_for_now
from ..terminal.options import NEEDS_KEY, SYSTEM_TLS, WRONG_KEY, TlsOptions
from ..terminal.tls import describe, verification
from .client import BenchClient, RequestRecord
from .options import BenchOptions
from .plot import check_plot, draw
from .prompts import BenchPrompt, ModelLimits, Workload, make_workload
from .report import BenchResult, report, to_json
from .summary import summarize

INFO_TIMEOUT_S = 10.0
PROGRESS_PER_S = 4


def run_bench(options: BenchOptions, arguments: Sequence[str]) -> int:
    """Run the command. Returns 0 when every request succeeded, 1 when one failed, 130 on Ctrl-C."""
    if options.plot is not None:
        check_plot(options.plot)
    screen = Console(stderr=True)
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


async def measure(options: BenchOptions, screen: Console, *, command: str = "") -> BenchResult:
    """Run one load against the server and summarize it. Cancellation (Ctrl-C) ends the load, not the summary.

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
            run = _Run(client, options, progress)
            await run.carry_out(workload)
    finally:
        client.close()
    slo_ttft_s, slo_itl_s = (None if ms is None else ms / 1000 for ms in (options.slo_ttft_ms, options.slo_itl_ms))
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


class _Run:
    """The load while it runs."""

    def __init__(self, client: BenchClient, options: BenchOptions, progress: Progress) -> None:
        self.records: list[RequestRecord] = []
        self.sent = 0
        self.duration_s = self.cpu_s = 0.0
        self.interrupted = False
        self._client = client
        self._options = options
        self._progress = progress
        self._task = progress.add_task("", total=options.requests, failed=0, tokens=0)
        self._failed = 0

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
                async with asyncio.TaskGroup() as tasks:
                    if self._options.rate_per_s is not None:
                        await self._send_at_rate(workload.measured, started, tasks)
                    else:
                        waiting = iter(workload.measured)
                        for _ in range(min(self._options.concurrency or 1, len(workload.measured))):
                            tasks.create_task(self._send_in_turn(waiting, started))
            finally:
                self.duration_s = time.perf_counter() - started
                self.cpu_s = time.process_time() - cpu_started_s
        except asyncio.CancelledError:
            self.interrupted = True

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
