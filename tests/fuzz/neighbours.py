"""What hostile requests do to other clients: each beside 8 ordinary streams, in turn with undisturbed windows.

    python -m tests.fuzz.neighbours                         # three rounds of 30 s for each case: half an hour
    python -m tests.fuzz.neighbours --parser pythonic       # only the cases of this tool parser, in their own server
    python -m tests.fuzz.neighbours --seconds 8 --record benchmarks/results/hostile.json
    python -m tests.fuzz.neighbours --generated 2000        # random requests instead, four at a time

Servers of the embedded model run here. Limits: /health answers within 0.5 s, the p99 of the others' gaps is at most
twice that of undisturbed windows plus 50 ms, no process takes 200 MB more, all cases once more take less than 20 MB,
and a case has its first byte within 10 s, with a status that is no 500.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec

from benchmarks.results import Figure, figure_of_this_run, record
from tests.cluster.servers import Server, cluster
from tests.fuzz.hostile_requests import Generator, Hostile, known

STREAMS = 8
HEALTH_S = 0.5
GAP_S = 0.05
ABOVE_MB = 200.0
ADDED_MB = 20.0
FIRST_BYTE_S = 10.0
SETTLE_S = 1.0
KV_TOKENS = 32768
FILLED_TOKENS = 4096
"""Of each prompt that fills the KV cache."""


@dataclass
class Window:
    """What was seen while a case ran."""

    health_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    above_mb: float = 0.0
    first_byte_s: float = 0.0
    statuses: set[int] = field(default_factory=set)
    sent: int = 0

    @property
    def gap_p99_s(self) -> float:
        return statistics.quantiles(self.gaps_s, n=100)[98] if len(self.gaps_s) > 1 else float("inf")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of a window (default: 30)")
    parser.add_argument("--rounds", type=int, default=3, help="windows of each case (default: 3)")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="only cases whose names begin so")
    parser.add_argument("--parser", help="only cases of this tool parser")
    parser.add_argument("--at-once", type=int, default=4, metavar="N", help="random requests at a time (default: 4)")
    parser.add_argument("--generated", type=int, default=0, metavar="N", help="send N random requests instead")
    parser.add_argument("--seed", type=int, default=0, help="of random requests (default: 0)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="keep the figures in a file of benchmarks/results")
    options = parser.parse_args()
    figures: list[Figure] = []
    if options.generated:
        with _server("qwen3-coder") as server:
            figures += asyncio.run(_send_generated(server, options.generated, options.seed, options.at_once))
    else:
        cases = [case for case in known() if not options.cases or case.name.startswith(tuple(options.cases))]
        cases = [case for case in cases if options.parser in (None, case.parser)]
        for tool_parser in dict.fromkeys(case.parser for case in cases):
            with _server(tool_parser) as server:
                chosen = [case for case in cases if case.parser == tool_parser]
                figures += _run_cases(server, chosen, options.seconds, options.rounds)
    if options.record:
        record(options.record, "Hostile requests beside ordinary ones", _worst(figures))
    missed = [figure for figure in figures if figure.misses]
    for figure in missed:
        print(f"over its limit: {figure.figure}: {figure.value:g} {figure.unit}, at most {figure.target:g}")
    return int(bool(missed))


@contextlib.contextmanager
def _server(tool_parser: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder)) as started:
        flags = ("--kv-tokens", str(KV_TOKENS), "--tool-parser", tool_parser)
        server = started.add("serve", "smollm2", *flags, forked=False).wait_ready()
        _fill_cache(server)
        yield server


def _fill_cache(server: Server) -> None:
    """Use every page of KV once: the memory of a page that was never used would count as that of a case."""
    tokens = itertools.cycle(range(1000, 40_000, 7))
    for _ in range(KV_TOKENS // FILLED_TOKENS + 1):
        body = {"prompt": list(itertools.islice(tokens, FILLED_TOKENS)), "max_tokens": 1}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status()


def _figure(figure: str, value: float, unit: str, target: float) -> Figure:
    command = f"python -m tests.fuzz.neighbours {' '.join(sys.argv[1:])}".strip()
    made = figure_of_this_run(figure, value, unit, target=float(f"{target:.4g}"))
    return Figure(**{name: getattr(made, name) for name in made.__struct_fields__} | {"command": command})


def _worst(figures: Sequence[Figure]) -> list[Figure]:
    """Of all cases, the figure that is nearest to its limit or furthest over it."""
    worst: dict[str, Figure] = {}
    for figure in figures:
        what = figure.figure.rpartition(": ")[2]
        if what not in worst or _of_limit(figure) > _of_limit(worst[what]):
            worst[what] = figure
    named = {f"hostile requests, the worst: {what}": each for what, each in worst.items()}
    return [msgspec.structs.replace(each, figure=name) for name, each in named.items()]


def _of_limit(figure: Figure) -> float:
    return figure.value / (figure.target or 1)


# -- known cases -----------------------------------------------------------------------------------------------------


def _run_cases(server: Server, cases: Sequence[Hostile], seconds: float, rounds: int) -> list[Figure]:
    undisturbed: list[Window] = []
    windows: dict[str, list[Window]] = {case.name: [] for case in cases}
    _window(server, None, SETTLE_S)
    after_first: dict[int, float] = {}
    for number in range(rounds):
        undisturbed.append(_window(server, None, seconds))
        _show("undisturbed", undisturbed[-1])
        for case in cases:
            windows[case.name].append(_window(server, case, seconds))
            _show(case.name, windows[case.name][-1])
        if number == 0:
            after_first = _memory_mb(server)
    grown = _memory_mb(server)
    usual_s = statistics.median(window.gap_p99_s for window in undisturbed)
    figures = []
    for name, seen in windows.items():
        for what, value, unit, target in (
            ("/health", 1e3 * statistics.median(window.health_s for window in seen), "ms", 1e3 * HEALTH_S),
            (
                *("gap of others, p99", 1e3 * statistics.median(window.gap_p99_s for window in seen)),
                *("ms", 1e3 * (2 * usual_s + GAP_S)),
            ),
            ("memory above", statistics.median(window.above_mb for window in seen), "MB", ABOVE_MB),
            ("first byte", statistics.median(window.first_byte_s for window in seen), "s", FIRST_BYTE_S),
            ("answers with 500", sum(500 in window.statuses for window in seen), "windows", 0),
        ):
            figures.append(_figure(f"{name}: {what}", value, unit, target))
    if rounds > 1:
        added = max((grown[pid] - after_first.get(pid, 0.0) for pid in grown), default=0.0) / (rounds - 1)
        figures.append(_figure(f"all cases once more ({cases[0].parser}): memory", added, "MB", ADDED_MB))
    return figures


def _show(name: str, window: Window) -> None:
    print(
        f"{name:24} /health {1e3 * window.health_s:5.0f} ms, gaps p99 {1e3 * window.gap_p99_s:5.0f} ms "
        f"({len(window.gaps_s)}), memory +{window.above_mb:4.0f} MB, first byte {window.first_byte_s:5.2f} s, "
        f"{window.sent} sent, {sorted(window.statuses)}",
        flush=True,
    )


def _window(server: Server, case: Hostile | None, seconds: float) -> Window:
    """Run the streams, and the case if there is one, for so long. Waits until the server is idle."""
    window, before = Window(), _memory_mb(server)
    sampling = threading.Event()
    thread = threading.Thread(target=_sample_memory, args=(server, before, window, sampling))
    thread.start()
    context = multiprocessing.get_context("spawn")  # its own process: its work must not delay what is measured here
    results = context.Queue()
    sender = context.Process(target=_attack, args=(server.url, case, seconds, results)) if case is not None else None
    if sender is not None:
        sender.start()
        results.get()  # it has imported everything
    asyncio.run(_watch(server.url, seconds, window))
    if sender is not None:
        window.first_byte_s, window.statuses, window.sent = results.get()
        sender.join()
    sampling.set()
    thread.join()
    ends_at = time.monotonic() + 60
    while not server.idle() and time.monotonic() < ends_at:
        time.sleep(0.1)
    time.sleep(SETTLE_S)
    return window


async def _watch(url: str, seconds: float, window: Window) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        tasks = [asyncio.create_task(_stream(client, number, window)) for number in range(STREAMS)]
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            began = time.monotonic()
            (await client.get("/health")).raise_for_status()
            window.health_s = max(window.health_s, time.monotonic() - began)
            await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _stream(client: httpx.AsyncClient, number: int, window: Window) -> None:
    body = {"prompt": f"Story {number}:", "max_tokens": 64, "ignore_eos": True, "stream": True}
    while True:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            before: float | None = None
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                if before is not None:
                    window.gaps_s.append(now - before)
                before = now


def _attack(url: str, case: Hostile, seconds: float, results: "multiprocessing.Queue[object]") -> None:
    async def send(client: httpx.AsyncClient, ends_at: float) -> tuple[float, set[int], int]:
        longest_s, statuses, sent = 0.0, set(), 0
        while time.monotonic() < ends_at:
            first_byte_s, status = await _send(client, case)
            longest_s, sent = max(longest_s, first_byte_s), sent + 1
            statuses.add(status)
        return longest_s, statuses, sent

    async def run() -> tuple[float, set[int], int]:
        ends_at = time.monotonic() + seconds
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)) as client:
            found = await asyncio.gather(*(send(client, ends_at) for _ in range(case.clients)))
        longest, statuses, sent = zip(*found, strict=True)
        return max(longest), set(itertools.chain(*statuses)), sum(sent)

    results.put(None)
    results.put(asyncio.run(run()))


async def _send(client: httpx.AsyncClient, case: Hostile) -> tuple[float, int]:
    """Returns when the first byte of the answer came, and its status; 500 for an error event that says so."""
    began = time.monotonic()
    headers = {"Content-Type": "application/json", **case.headers}
    try:
        async with client.stream("POST", case.route, content=case.body, headers=headers) as response:
            first_byte_s = time.monotonic() - began
            body = await response.aread()
    except httpx.TransportError:  # refused before the body was sent
        return time.monotonic() - began, 0
    return first_byte_s, 500 if b'"internal"' in body else response.status_code


def _memory_mb(server: Server) -> dict[int, float]:
    """Resident memory of the frontend and its children, by process."""
    assert server.process is not None
    pid = server.process.pid
    found = {}
    for process in (pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())):
        with contextlib.suppress(OSError):
            found[process] = int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096 / 1e6
    return found


def _sample_memory(server: Server, before: dict[int, float], window: Window, done: threading.Event) -> None:
    while not done.wait(0.1):
        for process, now_mb in _memory_mb(server).items():
            if process in before:  # the grammar compiler has a limit of its own, and may start now
                window.above_mb = max(window.above_mb, now_mb - before[process])


# -- random requests -------------------------------------------------------------------------------------------------


async def _send_generated(server: Server, count: int, seed: int, at_once: int) -> list[Figure]:
    generator, numbers = Generator(seed), iter(range(count))
    late, failed, longest_s = 0, 0, 0.0
    health = httpx.AsyncClient(base_url=server.url, timeout=60)
    sender = httpx.AsyncClient(base_url=server.url, timeout=120)

    async def send() -> None:
        nonlocal late, failed, longest_s
        for number in numbers:
            case = generator.next()
            window = Window()
            answered = asyncio.Event()
            watching = asyncio.create_task(_watch_health(health, window, answered))
            _, status = await _send(sender, case)
            answered.set()
            await watching
            late += window.health_s > HEALTH_S
            failed += status >= 500
            longest_s = max(longest_s, window.health_s)
            if window.health_s > HEALTH_S or status >= 500:
                start = case.body[:300].decode(errors="replace")
                print(
                    f"{number}: {case.route} {status}, /health {window.health_s:.2f} s, {len(case.body)} bytes: "
                    f"{json.dumps(start)}",
                    flush=True,
                )
            if number % 100 == 99:
                print(f"{number + 1} sent, longest /health {longest_s:.2f} s", flush=True)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(send())
    name = f"{count} random requests"
    return [
        _figure(f"{name}: those with /health over 0.5 s", late, "requests", 0),
        _figure(f"{name}: answers with 500", failed, "requests", 0),
        _figure(f"{name}: longest /health", 1e3 * longest_s, "ms", 1e3 * HEALTH_S),
    ]


async def _watch_health(client: httpx.AsyncClient, window: Window, answered: asyncio.Event) -> None:
    """Ask for /health until the request is answered. It is not cancelled: httpx would lose a connection each time."""
    while not answered.is_set():
        began = time.monotonic()
        await client.get("/health")
        window.health_s = max(window.health_s, time.monotonic() - began)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(answered.wait(), 0.02)


if __name__ == "__main__":
    sys.exit(main())
