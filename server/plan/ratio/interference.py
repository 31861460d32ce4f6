"""Measures how servers of one machine slow each other down: their steps while several compute at once, compared with
the measured step times of a server that computes alone.
"""

import asyncio
import math
import statistics
from collections.abc import Sequence

import msgspec
from rich.console import Console

from ....scheduler.simulation.step_times import Interference
from ...bench.client import BenchClient, RequestRecord
from .calibration import REQUEST_TIMEOUT_S, SHORT_PROMPT, RandomRequests, mean_step_s, running_together
from .pair import MeasuredPair

TOGETHER = ((1, 1), (2, 0), (0, 2), (2, 1), (1, 2))
"""Prefill and decode servers that compute at once in a measurement."""
MOST_BATCH = 4
LEAST_STEPS, MOST_STEPS = 24, 256
SHORTEST_S = 1e-6
PROMPTS = 8
"""Prompts that a prefill server computes, one after another, in a measurement."""


async def measure_interference(
    pair: MeasuredPair, urls: Sequence[str], screen: Console, *, api_key: str | None = None
) -> MeasuredPair:
    """`urls` are the decode servers of one or two pairs with the settings of the measured one, on this machine. Each
    pair is separate: prompts that its decode server gets are computed by its prefill server.
    """
    assert pair.machine_cores is not None, "servers share a machine"
    clients = [BenchClient(url, api_key=api_key, timeout_s=REQUEST_TIMEOUT_S) for url in urls]
    try:
        work = _Work(pair, [RandomRequests(client, pair.vocab_size, seed=1) for client in clients])
        await work.warm_up()
        found = []
        for prefills, decodes in TOGETHER:
            if max(prefills, decodes) > len(clients):
                continue
            share = min(1.0, pair.machine_cores / (pair.step_cores * (prefills + decodes)))
            prompt_s, step_s = await work.run(prefills, decodes)
            prefill, decode = _factor(share, prompt_s, work.prompt_s), _factor(share, step_s, work.step_s)
            found.append(Interference(prefills, decodes, prefill, decode))
            parts = [f"prompts take {prefill / share:.2f} times as long"] * bool(prefills)
            parts += [f"decode steps take {decode / share:.2f} times as long"] * bool(decodes)
            screen.print(f"{prefills} prefill and {decodes} decode servers at once: {', '.join(parts)}")
    finally:
        for client in clients:
            client.close()
    return msgspec.structs.replace(pair, times=msgspec.structs.replace(pair.times, interference=tuple(found)))


class _Work:
    """Prompts and batches of the same sizes in each measurement, and their times on a server that computes alone."""

    def __init__(self, pair: MeasuredPair, servers: Sequence[RandomRequests]) -> None:
        self._servers = servers
        times, room = pair.times, pair.context_length - SHORT_PROMPT
        self._prompt = max(1, min(pair.prefill.settings["chunk_size"] // 4, room))
        self._batch = max(1, min(MOST_BATCH, pair.decode.settings["max_running_requests"] - 1))
        self.prompt_s = max(SHORTEST_S, times.prefill_s([(0, self._prompt)]))
        steps = PROMPTS * self.prompt_s / max(SHORTEST_S, times.decode_s([SHORT_PROMPT] * self._batch))
        self._steps = max(1, min(max(LEAST_STEPS, math.ceil(steps)), MOST_STEPS, room))
        self.step_s = max(SHORTEST_S, times.decode_s([SHORT_PROMPT + self._steps // 2] * self._batch))

    async def warm_up(self) -> None:
        await asyncio.gather(*(server.send(self._prompt, LEAST_STEPS) for server in self._servers))

    async def run(self, prefills: int, decodes: int) -> tuple[float | None, float | None]:
        """The mean time of a prompt on prefill, and of a decode step, while all these servers compute."""
        running = [
            asyncio.create_task(server.send(SHORT_PROMPT, self._steps))
            for server in self._servers[:decodes]
            for _ in range(self._batch)
        ]

        async def compute_prompts(server: RandomRequests) -> list[RequestRecord]:
            """Send prompts until a batch ends; without batches, PROMPTS of them."""
            records: list[RequestRecord] = []
            while not any(task.done() for task in running) if running else len(records) < PROMPTS:
                records.append(await server.send(self._prompt, 1))
            return records

        sequences = await asyncio.gather(*map(compute_prompts, self._servers[:prefills]))
        return times_together(sequences, [await task for task in running])


def times_together(
    sequences: Sequence[Sequence[RequestRecord]], batches: Sequence[RequestRecord]
) -> tuple[float | None, float | None]:
    """The mean time of a prompt on prefill, and of a decode step, while all servers compute: all sequences of prompts
    have begun and none has ended, and all requests of the batches run. None if there is no such prompt or step.
    """
    begins = [records[0].started_s for records in sequences]
    ends = [records[-1].started_s + records[-1].e2e_s for records in sequences]
    if batches:
        begin, end = running_together(batches)
        begins.append(begin)
        ends.append(end)
    begin, end = max(begins), min(ends)
    prompts = [
        record.timeline["prefill"]
        for records in sequences
        for record in records
        if begin <= record.started_s and record.started_s + record.e2e_s <= end
    ]
    return statistics.mean(prompts) if prompts else None, mean_step_s(batches, begin, end)


def _factor(share: float, together_s: float | None, alone_s: float) -> float:
    """By which factor a step takes longer than its share of the cores explains; 1 without a measurement."""
    return 1.0 if together_s is None else max(1.0, together_s / alone_s) * share
