"""More clients than a pair can serve: `make overload`. Prints goodput, waiting times, and how exact Retry-After is.

Every round runs each workload at its peak (as many clients as there are slots, and twice as many) and with 20 times
more clients, one after the other, so that other programs affect all of them. The figures are medians of the rounds.
Refused clients try again after Retry-After. Fails if a request ends with anything but its tokens or 429, if goodput is
below 90 % of the peak, if a wait is longer than stated, or if the servers do not recover.
"""

import argparse
import bisect
import contextlib
import dataclasses
import functools
import http.client
import json
import random
import select
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.checkpoints import load_reference, make_checkpoint, reference_greedy
from tests.cluster.servers import Cluster, Server, body, cluster, wait_until

SLOTS = 4
QUEUE = 48
FACTOR = 20
KEPT = 0.9
"""The share of its peak that goodput must keep in an overload."""
WAIT_FACTOR = 2.0
WAIT_BASE_S = 5.0
"""An accepted request is answered within the time that the queue takes at the measured rate, times WAIT_FACTOR, and
WAIT_BASE_S."""
RECOVERED_S = 5.0
TRUE_FACTOR = 2.0
"""The median Retry-After may be wrong by this factor; its unit is a second."""
BURST_S = 2.0
NEW_TOKENS = 64
REQUEST_S = 120.0
JSON = {"Content-Type": "application/json"}
COMMON = ("--page-size", "8", "--no-prefix-cache", "--shutdown-timeout-s", "1")
PREFILL = (*COMMON, "--kv-tokens", "512", "--chunk-size", "64")
DECODE = (
    *COMMON,
    *("--kv-tokens", "640", "--growth-tokens", "8", "--max-running-requests", str(SLOTS)),
    *("--max-queued-requests", str(QUEUE), "--queue-timeout-s", "60"),
)


@dataclasses.dataclass(frozen=True)
class Work:
    prompt: list[int]
    expected: list[int]

    @functools.cached_property
    def body(self) -> str:
        return json.dumps(body(self.prompt, len(self.expected)))


@dataclasses.dataclass
class Tally:
    """The responses that the clients of a phase have received."""

    served_at: list[float] = dataclasses.field(default_factory=list)
    waits_s: list[float] = dataclasses.field(default_factory=list)
    """Of accepted requests, until they are answered."""
    refused: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    """When, and the Retry-After."""
    wrong: list[str] = dataclasses.field(default_factory=list)

    def errors_of_retry_after(self) -> list[float]:
        """Retry-After divided by the time in which as many requests ended as the queue holds. Both are a second at
        least. Refusals near the end of the phase have no such time.
        """
        found = []
        for at, promised_s in self.refused:
            later = bisect.bisect_right(self.served_at, at) + QUEUE - 1
            if later < len(self.served_at):
                found.append(promised_s / max(1.0, self.served_at[later] - at))
        return found


@dataclasses.dataclass(frozen=True)
class Figures:
    """Results of one phase."""

    goodput: float
    """Output tokens of complete responses in a second."""
    longest_wait_s: float
    bound_s: float
    refused: int
    retry_after_error: float | None
    wrong: tuple[str, ...]


class Overload:
    """A pair whose pools hold a few requests."""

    def __init__(self, servers: Cluster, directory: Path) -> None:
        model = make_checkpoint(directory / "model", "llama", max_position_embeddings=512)
        self.prefill = servers.add("prefill", model, *PREFILL)
        self.decode = servers.add("decode", model, *DECODE, "--prefill", self.prefill.endpoint)
        reference = load_reference(model)

        def work(length: int, new_tokens: int, first: int) -> Work:
            prompt = [(first + 7 * index) % 251 for index in range(length)]
            return Work(prompt, reference_greedy(reference, prompt, new_tokens))

        self.short, self.long = work(40, NEW_TOKENS, 1), work(300, NEW_TOKENS, 2)
        for server in (self.prefill, self.decode):
            server.wait_ready(peers=1)
        self.decode.generate(self.short.prompt, NEW_TOKENS)

    def run(self, clients: int, seconds: float, *, bursts: bool, seed: int = 0) -> Figures:
        """One phase. With `bursts`, all prompts of an eighth of the time are long ones, every BURST_S."""
        begin, tally = time.monotonic(), Tally()
        ends_at = begin + seconds
        threads = [
            threading.Thread(target=Client(self, ends_at, tally, bursts, f"{seed}-{number}").run)
            for number in range(clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tally.served_at.sort()
        rate = bisect.bisect_right(tally.served_at, ends_at) / seconds
        errors = tally.errors_of_retry_after()
        return Figures(
            goodput=rate * NEW_TOKENS,
            longest_wait_s=max(tally.waits_s, default=0.0),
            bound_s=WAIT_BASE_S + WAIT_FACTOR * (QUEUE + SLOTS) / rate if rate else 0.0,
            refused=len(tally.refused),
            retry_after_error=statistics.median(errors) if errors else None,
            wrong=tuple(tally.wrong),
        )

    def abandon(self) -> float:
        """All clients of an overload leave at the same moment; returns the seconds until both servers are idle and the
        next request is answered.
        """
        connections = [http.client.HTTPConnection(self.decode.host, self.decode.port) for _ in range(FACTOR * SLOTS)]
        for number, connection in enumerate(connections):
            connection.request("POST", "/generate", (self.short, self.long)[number % 2].body, JSON)
        answered, *_ = select.select([connection.sock for connection in connections], [], [], REQUEST_S)
        assert answered, "no request was served or refused"
        for connection in connections:
            connection.close()
        left_at = time.monotonic()

        def served() -> bool:
            answer = self.decode.post(self.short.prompt, len(self.short.expected))
            assert answer.status_code in (200, 429), answer.text
            return answer.status_code == 200 and bool(answer.json()["output_ids"] == self.short.expected)

        wait_until(served, 20 * RECOVERED_S, "the next request is served")
        for server in (self.decode, self.prefill):
            wait_until(server.idle, 20 * RECOVERED_S, f"{server.role} idle: {server.info()['states']}")
        return time.monotonic() - left_at

    def check_clean(self) -> None:
        servers: tuple[Server, ...] = (self.prefill, self.decode)
        for server in servers:
            server.check_clean()


class Client:
    """Sends one request after the other over its own connection, on a thread. httpx would take several milliseconds
    of CPU time per request with so many connections.
    """

    def __init__(self, overload: Overload, ends_at: float, tally: Tally, bursts: bool, seed: str) -> None:
        self._ends_at, self._tally, self._bursts = ends_at, tally, bursts
        self._short, self._long = overload.short, overload.long
        self._connection = http.client.HTTPConnection(overload.decode.host, overload.decode.port, timeout=REQUEST_S)
        self._draw = random.Random(seed)

    def run(self) -> None:
        with contextlib.closing(self._connection):
            while (now := time.monotonic()) < self._ends_at:
                burst = self._bursts and now % BURST_S < BURST_S / 8
                pause_s = self._send(self._long if burst else self._short)
                time.sleep(max(0.0, min(pause_s * self._draw.uniform(1.0, 1.2), self._ends_at - time.monotonic())))

    def _send(self, work: Work) -> float:
        """Send one request; returns the seconds until the client may send the next one."""
        tally, started = self._tally, time.monotonic()
        try:
            self._connection.request("POST", "/generate", work.body, JSON)
            answer = self._connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            tally.wrong.append(f"no answer after {time.monotonic() - started:.1f} s: {error!r}")
            self._connection.close()
            return 1.0
        now = time.monotonic()
        if answer.status == 429:
            retry_after = int(answer.headers["Retry-After"])
            tally.refused.append((now, retry_after))
            return float(retry_after)
        if answer.status != 200 or json.loads(data)["output_ids"] != work.expected:
            tally.wrong.append(f"{answer.status}: {data[:200]!r}")
            return 1.0
        tally.served_at.append(now)
        tally.waits_s.append(now - started)
        return 0.0


def measure(overload: Overload, rounds: int, seconds: float) -> list[str]:
    """All rounds; prints the figures and returns what does not hold."""
    problems = []
    for name, bursts in (("short prompts", False), ("bursts of long prompts", True)):
        peaks, overloaded = [], []
        for number in range(rounds):
            few = [overload.run(SLOTS * factor, seconds, bursts=bursts, seed=number) for factor in (1, 2)]
            peaks.append(max(figures.goodput for figures in few))
            overloaded.append(overload.run(FACTOR * SLOTS, seconds, bursts=bursts, seed=number))
            problems += [wrong for figures in (*few, overloaded[-1]) for wrong in figures.wrong]
        kept = statistics.median(each.goodput / peak for each, peak in zip(overloaded, peaks, strict=True))
        waited = max(overloaded, key=lambda figures: figures.longest_wait_s / figures.bound_s)
        errors = [each.retry_after_error for each in overloaded if each.retry_after_error is not None]
        print(
            f"{name}: peak {statistics.median(peaks):.0f} tokens/s; with {FACTOR} times more clients than slots "
            f"{100 * kept:.0f} %; longest wait {waited.longest_wait_s:.1f} s (bound {waited.bound_s:.1f} s); "
            f"{sum(each.refused for each in overloaded)} refused, Retry-After is "
            f"{statistics.median(errors) if errors else float('nan'):.2f} times the wait",
            flush=True,
        )
        if kept < KEPT:
            problems.append(f"{name}: goodput is {100 * kept:.0f} % of its peak")
        if waited.longest_wait_s > waited.bound_s:
            problems.append(f"{name}: a request waited {waited.longest_wait_s:.1f} s")
        if not errors or not 1 / TRUE_FACTOR <= statistics.median(errors) <= TRUE_FACTOR:
            problems.append(f"{name}: Retry-After is wrong: {errors}")
    recovered_s = max(overload.abandon() for _ in range(rounds))
    print(f"after all clients have left: idle, and the next request answered, within {recovered_s:.1f} s")
    if recovered_s > RECOVERED_S:
        problems.append(f"recovery took {recovered_s:.1f} s")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each phase")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="overload-") as directory, cluster(Path(directory)) as servers:
        overload = Overload(servers, Path(directory))
        problems = measure(overload, options.rounds, options.seconds)
        overload.check_clean()
    print(*problems, f"{len(problems)} problems", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
