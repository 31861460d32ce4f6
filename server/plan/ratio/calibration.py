"""Measures the step times of a running pair with a few requests, through its HTTP interface.

Prompts of several lengths, one at a time, show the time of prefill steps, of transfers and of messages; batches of
requests show the time of decode steps. Nothing else may use the two servers meanwhile.
"""

import asyncio
import random
import statistics
from collections.abc import Sequence

import msgspec
from rich.console import Console

from ....common.arithmetic import ceil_div
from ....common.errors import StartupError
from ....scheduler.simulation.step_times import StepTimes
from ...bench.client import BenchClient, RequestRecord
from ...bench.command import ask_server
from ...bench.options import BenchOptions
from ...bench.prompts import BenchPrompt
from ...observability.stages import AFTER_FIRST_TOKEN
from .fit import fit_nonnegative
from .pair import MeasuredPair, server_of

REPEATS = 3
DECODE_STEPS = 40
BATCHES = (1, 2, 4, 8, 16, 32, 64)
SHORT_PROMPT = 16
REQUEST_TIMEOUT_S = 300.0


class RandomRequests:
    """Sends prompts of random tokens to a decode server. Each `seed` gives different prompts, because cached ones take
    no time.
    """

    def __init__(
        self, client: BenchClient, vocab_size: int, special: frozenset[int] = frozenset(), *, seed: int = 0
    ) -> None:
        self._client = client
        self._random = random.Random(seed)
        self._vocabulary = [token for token in range(vocab_size) if token not in special]

    async def send(self, prompt: int, output: int) -> RequestRecord:
        """Send a prompt of `prompt` tokens and generate `output` tokens. Raises StartupError if the request fails."""
        tokens = self._random.choices(self._vocabulary, k=prompt)
        body = BenchPrompt(tokens, output).body(BenchOptions())
        record = await self._client.generate(body, 0.0, expected_tokens=output)
        if not record.ok:
            raise StartupError(f"a request of the calibration failed: {record.failure}: {record.detail}")
        return record


class Calibration:
    """The measurements of one pair."""

    def __init__(self, client: BenchClient, pair_info: "PairInfo", most_running: int, screen: Console) -> None:
        self._send = RandomRequests(client, pair_info.vocab_size, pair_info.special).send
        self._info = pair_info
        self._most_running = most_running
        self._screen = screen

    async def measure(self) -> StepTimes:
        await self._send(SHORT_PROMPT, DECODE_STEPS)  # warm-up
        samples = await self._prompts()
        rows, seconds = [], []
        for record in samples:
            tokens = record.prompt_tokens
            rows.append((ceil_div(tokens, self._info.chunk_size), tokens, tokens * tokens / 2))
            seconds.append(record.timeline["prefill"])
        prefill_step_s, prefill_token_s, prefill_pair_s = fit_nonnegative(rows, seconds)
        last = [record.prompt_tokens % self._info.chunk_size or self._info.chunk_size for record in samples]
        write_s, kv_token_s = fit_nonnegative(
            [(1, tokens) for tokens in last], [record.timeline["transfer"] for record in samples]
        )
        steps, pair_s = await self._decode_steps()
        return StepTimes(
            prefill_token_s=prefill_token_s,
            prefill_step_s=prefill_step_s,
            prefill_pair_s=prefill_pair_s,
            decode_steps=tuple(steps),
            decode_pair_s=pair_s,
            write_s=write_s,
            kv_token_s=kv_token_s,
            message_s=statistics.median(record.timeline["control"] for record in samples) / 2,
            response_s=max(0.0, statistics.median(_outside_s(record) for record in samples)),
        )

    async def _prompts(self) -> list[RequestRecord]:
        """Prompts of several lengths that prefill computed, one at a time."""
        chunk = self._info.chunk_size
        lengths = [SHORT_PROMPT, chunk // 4, chunk // 2, chunk, 2 * chunk]
        records: list[RequestRecord] = []
        for length in sorted({max(1, min(length, self._info.max_total_tokens - DECODE_STEPS)) for length in lengths}):
            records += [await self._send(length, 2) for _ in range(REPEATS)]
            spent = statistics.median(record.timeline["prefill"] for record in records[-REPEATS:])
            self._screen.print(f"prompt of {length:,} tokens: {1000 * spent:.1f} ms")
        remote = [record for record in records if record.timeline["transfer"] > 0]
        if len({record.prompt_tokens for record in remote}) < 2:
            raise StartupError("decode computes most prompts itself: measure a pair with --local-prefill never")
        return _medians(remote)

    async def _decode_steps(self) -> tuple[list[tuple[int, float]], float]:
        """Times of batches of short contexts, and the time per request and token of context."""
        steps: list[tuple[int, float]] = []
        context = SHORT_PROMPT + DECODE_STEPS // 2  # on average
        for size in BATCHES:
            if size <= self._most_running:
                step_s = statistics.median([await self._batch_step_s(size, SHORT_PROMPT) for _ in range(REPEATS)])
                steps.append((size, max(step_s, steps[-1][1] if steps else 0.0)))
                self._screen.print(f"decode step of {size} requests: {1000 * step_s:.1f} ms")
        # only one request: with several long prompts, the first would end before the last is computed
        prompt = min(2 * self._info.chunk_size, self._info.max_total_tokens - DECODE_STEPS)
        long_s = await self._batch_step_s(1, prompt)
        self._screen.print(f"decode step with a context of {prompt:,} tokens: {1000 * long_s:.1f} ms")
        pair_s = max(0.0, long_s - steps[0][1]) / max(1, prompt - SHORT_PROMPT)
        return [(count, max(0.0, seconds - pair_s * count * context)) for count, seconds in steps], pair_s

    async def _batch_step_s(self, size: int, prompt: int) -> float:
        """The time of a step while all `size` requests run: from the first token of the last one to start until the
        first one ends.
        """
        records = await asyncio.gather(*(self._send(prompt, DECODE_STEPS) for _ in range(size)))
        found = mean_step_s(records, *running_together(records))
        # `found` is None if the first request ended before the last began: then the requests did not run together
        return found or statistics.median(record.tpot_s or 0.0 for record in records)


class PairInfo(msgspec.Struct):
    """What the calibration needs to know about a pair."""

    chunk_size: int
    max_total_tokens: int
    vocab_size: int
    special: frozenset[int]


async def calibrate(
    url: str, prefill_url: str, screen: Console, *, api_key: str | None = None, machine_cores: int | None = None
) -> MeasuredPair:
    """Measure a running pair. Raises StartupError if a server does not respond, or computes with other settings than
    the simulation has.
    """
    decode_info = await ask_server(url, "server_info", api_key)
    model_info = await ask_server(url, "model_info", api_key)
    prefill_info = await ask_server(prefill_url, "server_info", api_key)
    for info, role, where in ((decode_info, "decode", url), (prefill_info, "prefill", prefill_url)):
        if info["disaggregation_mode"] != role:
            raise StartupError(f"{where} is not a {role} server")
    decode, prefill = server_of(decode_info), server_of(prefill_info)
    pair_info = PairInfo(
        chunk_size=prefill.settings["chunk_size"],
        max_total_tokens=min(decode_info["pool"]["max_total_tokens"], prefill_info["pool"]["max_total_tokens"]),
        vocab_size=model_info["vocab_size"],
        special=frozenset(model_info["eos_token_ids"]),
    )
    device = str(decode_info["ranks"][0]["device"])
    threads = decode_info["config"]["threads"]
    step_cores = min(threads or machine_cores or 1, machine_cores or threads or 1)
    client = BenchClient(url, api_key=api_key, timeout_s=REQUEST_TIMEOUT_S)
    try:
        most_running = decode.settings["max_running_requests"]
        times = await Calibration(client, pair_info, most_running, screen).measure()
    finally:
        client.close()
    return MeasuredPair(
        model=decode_info["served_model_name"],
        device=device.partition(":")[0],
        context_length=pair_info.max_total_tokens,
        vocab_size=pair_info.vocab_size,
        prefill=prefill,
        decode=decode,
        step_cores=step_cores,
        machine_cores=machine_cores,
        times=times,
    )


def running_together(records: Sequence[RequestRecord]) -> tuple[float, float]:
    """The interval in which all requests run: from the last first token to the first end."""
    begin = max(record.started_s + record.arrivals[0][0] for record in records)
    return begin, min(record.started_s + record.arrivals[-1][0] for record in records)


def mean_step_s(records: Sequence[RequestRecord], begin: float, end: float) -> float | None:
    """The mean time between tokens in this interval. The median of the gaps would be wrong: a client that waits for a
    core gets several tokens at once.
    """
    means = []
    for record in records:
        inside = [(record.started_s + at_s, count) for at_s, count in record.arrivals]
        inside = [(time, count) for time, count in inside if begin <= time <= end]
        if len(inside) >= 2 and inside[-1][1] > inside[0][1]:
            means.append((inside[-1][0] - inside[0][0]) / (inside[-1][1] - inside[0][1]))
    return statistics.median(means) if means else None


def _outside_s(record: RequestRecord) -> float:
    """The part of the time to first token that is in no stage of the server: HTTP, tokenizer, client."""
    stages = sum(seconds for stage, seconds in record.timeline.items() if stage not in AFTER_FIRST_TOKEN)
    return (record.ttft_s or 0.0) - stages


def _medians(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """For each prompt length, the request with the median time on prefill."""
    by_length: dict[int, list[RequestRecord]] = {}
    for record in records:
        by_length.setdefault(record.prompt_tokens, []).append(record)
    found = []
    for same in by_length.values():
        same.sort(key=lambda record: record.timeline["prefill"])
        found.append(same[len(same) // 2])
    return found
