"""The same load against any server with OpenAI's API: first tokens, gaps, throughput, goodput.

    python -m benchmarks.load URL MODEL SCENARIO [--vocab 150000] [--procs 4] [--record FILE]

single                  first tokens by prompt length, one request at a time, then one stream of 256 tokens
burst64                 64 clients, three requests each of 1,024 tokens in and 256 out
closed256               256 clients, two requests each of 512 in and 256 out
closed:CLIENTS:IN:OUT:TIMES
poisson:RATE:SECONDS    prompts of 600 tokens in the median, 16 to 8,000; outputs of 150, 10 to 800; both lognormal
long                    32 streams, and beside them a prompt of 32,000 tokens from each process

Each client process writes to raw sockets, because a client library would take more CPU time than a fast server.
"""

import argparse
import asyncio
import itertools
import json
import math
import multiprocessing
import random
import statistics
import sys
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.results import Figure, figure_of_this_run, record

LINE_BYTES = 1 << 22
SHORT_TOKENS = 500
SLO_TTFT_S, SLO_TPOT_S = 0.5, 0.02
SINGLE_LENGTHS = (16, 128, 512, 1024, 2048, 4096, 8192)
WARM_UP, MEASURED = 3, 6
LONG_TOKENS = 32_000
CLOSED = {"burst64": (64, 1024, 256, 3), "closed256": (256, 512, 256, 2)}


@dataclass
class Answer:
    """One streamed answer. Times are those of `time.perf_counter`, which processes share."""

    prompt_tokens: int
    wanted: int
    started: float
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    ended: float = 0.0
    failure: str = ""

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.started

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tpot_s(self) -> float:
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, self.tokens - 1)


class Client:
    """Sends random prompts. The seed decides their tokens and, for `poisson`, lengths and times."""

    def __init__(self, url: str, model: str, vocab: int, seed: int) -> None:
        address = urllib.parse.urlsplit(url)
        assert address.hostname is not None, f"{url} has no host"
        self._host, self._port = address.hostname, address.port or 80
        self._model, self._vocab = model, vocab
        self.random = random.Random(seed)

    def prompt(self, tokens: int) -> list[int]:
        return [self.random.randrange(10, self._vocab) for _ in range(tokens)]

    async def ask(self, prompt: list[int], tokens: int) -> Answer:
        fields = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body = json.dumps(fields).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        answer = Answer(len(prompt), tokens, time.perf_counter())
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, limit=LINE_BYTES)
            writer.write(head.encode() + body)
            await self._read(reader, answer)
            writer.close()
        except (OSError, ValueError, IndexError) as error:
            answer.failure = repr(error)[:80]
        answer.ended = time.perf_counter()
        return answer

    async def _read(self, reader: asyncio.StreamReader, answer: Answer) -> None:
        status = (await reader.readline()).split()[1]
        if status != b"200":
            answer.failure = status.decode()
        async for line in reader:
            if not line.startswith(b"data:"):
                continue
            now = time.perf_counter()
            if b"[DONE]" in line:
                return
            event = json.loads(line[5:])
            if event.get("choices"):
                answer.arrivals.append(now)
            elif event.get("usage"):
                answer.tokens = event["usage"]["completion_tokens"]


async def single(client: Client) -> list[str]:
    """One request at a time."""
    medians = []
    for length in SINGLE_LENGTHS:
        times = []
        for _ in range(WARM_UP + MEASURED):
            times.append((await client.ask(client.prompt(length), 1)).ttft_s)
            await asyncio.sleep(0.03)
        medians.append(f"{length}: {1e3 * statistics.median(times[WARM_UP:]):.1f} ms")
    stream = await client.ask(client.prompt(1024), 256)
    return [*medians, f"one stream: {1e3 * statistics.median(stream.gaps_s):.2f} ms a token"]


async def closed(client: Client, clients: int, prompt: int, output: int, times: int) -> list[Answer]:
    """Each client sends its next request when it has the answer to the last one."""

    async def one() -> list[Answer]:
        return [await client.ask(client.prompt(prompt), output) for _ in range(times)]

    return list(itertools.chain.from_iterable(await asyncio.gather(*(one() for _ in range(clients)))))


async def poisson(client: Client, rate: float, seconds: float) -> list[Answer]:
    """Requests at random times, whether or not earlier ones have ended."""
    plan = []
    at = client.random.expovariate(rate)
    while at < seconds:
        length = int(min(8000, max(16, client.random.lognormvariate(math.log(600), 1.0))))
        output = int(min(800, max(10, client.random.lognormvariate(math.log(150), 0.7))))
        plan.append((at, length, output))
        at += client.random.expovariate(rate)
    prompts = [client.prompt(length) for _, length, _ in plan]
    asked, began = [], time.perf_counter()
    for (at, _, output), prompt in zip(plan, prompts, strict=True):
        await asyncio.sleep(began + at - time.perf_counter())
        asked.append(asyncio.ensure_future(client.ask(prompt, output)))
    return await asyncio.gather(*asked)


async def beside_streams(client: Client, streams: int) -> list[Answer]:
    running = [asyncio.ensure_future(client.ask(client.prompt(512), 400)) for _ in range(streams)]
    await asyncio.sleep(1.5)
    return [await client.ask(client.prompt(LONG_TOKENS), 1), *(await asyncio.gather(*running))]


async def part_of(client: Client, scenario: str, procs: int) -> list[Answer]:
    """The part of a scenario that one of `procs` processes has."""
    kind, *numbers = scenario.split(":")
    if kind == "poisson":
        rate, seconds = map(float, numbers)
        return await poisson(client, rate / procs, seconds)
    if kind == "long":
        return await beside_streams(client, 32 // procs)
    clients, prompt, output, times = CLOSED[kind] if kind in CLOSED else map(int, numbers)
    return await closed(client, clients // procs, prompt, output, times)


def run_process(options: argparse.Namespace, number: int, start_at: float) -> list[Answer]:
    client = Client(options.url, options.model, options.vocab, 1000 + number)
    time.sleep(max(0.0, start_at - time.time()))
    return asyncio.run(part_of(client, options.scenario, options.procs))


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else math.nan


def figures_of(scenario: str, answers: Sequence[Answer]) -> list[Figure]:
    """Latencies of answers that did not fail; of `long`, without those of the long prompts, which have their own."""
    ok = [answer for answer in answers if not answer.failure and answer.arrivals]
    long = [answer for answer in ok if answer.prompt_tokens == LONG_TOKENS]
    usual = [answer for answer in ok if answer.prompt_tokens != LONG_TOKENS]
    seconds = max(answer.ended for answer in answers) - min(answer.started for answer in answers)
    several = [answer for answer in usual if answer.tokens > 1]
    good = [answer for answer in several if answer.ttft_s <= SLO_TTFT_S and answer.tpot_s <= SLO_TPOT_S]
    short = [answer.ttft_s for answer in usual if answer.prompt_tokens < SHORT_TOKENS]
    milliseconds = {
        "first token": [answer.ttft_s for answer in usual],
        f"first token of prompts below {SHORT_TOKENS} tokens": short,
        "gap": [gap for answer in usual for gap in answer.gaps_s],
        "time per token": [answer.tpot_s for answer in several],
    }
    figures = [
        ("answers that failed", float(len(answers) - len(ok)), ""),
        ("answers with another number of tokens", float(sum(answer.tokens != answer.wanted for answer in ok)), ""),
        ("throughput in tokens", sum(answer.tokens for answer in ok) / seconds, "tokens/s"),
        ("throughput in requests", len(ok) / seconds, "requests/s"),
        ("within 500 ms and 20 ms a token", 100 * len(good) / len(answers), "%"),
        *((f"first token of {LONG_TOKENS} tokens", 1e3 * answer.ttft_s, "ms") for answer in long[:1]),
    ]
    for name, values in milliseconds.items():
        figures += [(f"{name} p{percent}", 1e3 * percentile(values, percent), "ms") for percent in (50, 90, 99)]
    higher = ("tokens/s", "requests/s", "%")
    return [
        figure_of_this_run(f"{scenario}: {name}", value, unit, better="higher" if unit in higher else "lower")
        for name, value, unit in figures
        if not math.isnan(value)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of the server, such as http://127.0.0.1:8200")
    parser.add_argument("model", help="the name that the server expects")
    parser.add_argument("scenario", help="see above")
    parser.add_argument("--vocab", type=int, default=150_000, help="token ids are below this (default: 150000)")
    parser.add_argument("--procs", type=int, default=4, help="client processes (default: 4)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="put the figures into this file of results")
    options = parser.parse_args()
    if options.scenario == "single":
        print(*asyncio.run(single(Client(options.url, options.model, options.vocab, 7))), sep="\n")
        return 0
    start_at = time.time() + 1.0
    with multiprocessing.Pool(options.procs) as pool:
        parts = pool.starmap(run_process, [(options, number, start_at) for number in range(options.procs)], chunksize=1)
    figures = figures_of(options.scenario, list(itertools.chain.from_iterable(parts)))
    for figure in figures:
        print(f"{figure.figure}: {figure.value:g} {figure.unit}")
    if options.record is not None:
        record(options.record, "First tokens and gaps under load", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
