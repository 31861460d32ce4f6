"""Mixed traffic with random faults: `make soak MINUTES=60 SEED=1`. The same seed gives the same faults and requests.
With ARGS="--config hisparse --device cuda:0", the servers use HiSparse on a GPU.

Prints the outcomes with their longest times, the faults, and how memory, open files and threads of processes that lived
long enough have grown. Fails if a response is missing, if greedy tokens differ from those of transformers, or if memory
is not free in the end.
"""

import argparse
import collections
import contextlib
import dataclasses
import itertools
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.cluster.servers import HTTP, body
from tests.faults.catalog import CONFIGS, FAULTS, Config, Fault, Side
from tests.faults.injections import INJECTIONS, NoConnectionError
from tests.faults.rig import Rig

CLIENTS = 6
ANSWERED_S = 60.0
ALLOWED = {"200", "abort", "429", "499", "500", "503", "504", "closed", "left"}
"""A failed step causes 500, a killed frontend `closed`."""
OWN_CLIENT = {"client_gone", "client_slow", "fill_pools"}
"""Faults of the client of a cell. The traffic of a soak test has such clients anyway."""
GAPS_S = (1.0, 4.0)
SAMPLE_S = 1.0


@dataclasses.dataclass(frozen=True)
class ScheduledFault:
    """A fault, and the pause before it."""

    gap_s: float
    fault: Fault


def schedule_faults(seed: int, rig: Rig) -> list[ScheduledFault]:
    """The faults of a seed: ten thousand, more than any run needs."""
    draw = random.Random(seed)
    ranks: dict[Side | None, int] = {"decode": rig.config.decode_ranks, "prefill": rig.config.prefill_ranks}
    possible = [
        fault
        for fault in FAULTS
        if fault.name not in OWN_CLIENT
        and (fault.needs != "rank process" or ranks[fault.side] > 1)
        and not (rig.config.local and (fault.side == "prefill" or fault.needs == "link"))
    ]
    return [ScheduledFault(draw.uniform(*GAPS_S), draw.choice(possible)) for _ in range(10_000)]


class Traffic(threading.Thread):
    """A client that sends random requests, one after the other."""

    def __init__(self, rig: Rig, seed: int, number: int, stopping: threading.Event) -> None:
        super().__init__(daemon=True)
        self._rig, self._number, self._stopping = rig, number, stopping
        self._draw = random.Random(f"{seed}-{number}")
        self.longest_s: dict[str, float] = {}
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.start()

    def run(self) -> None:
        for count in itertools.count():
            if self._stopping.is_set():
                return
            started = time.monotonic()
            outcome = self._send(f"soak-{self._number}-{count}")
            took_s = time.monotonic() - started
            self.outcomes[outcome] += 1
            self.longest_s[outcome] = max(self.longest_s.get(outcome, 0.0), took_s)
            if outcome not in ALLOWED or took_s > ANSWERED_S:
                self.wrong.append(f"request {count} of client {self._number}: {outcome} after {took_s:.1f} s")
            if outcome != "200":
                self._stopping.wait(0.1)

    def _send(self, rid: str) -> str:
        draw = self._draw
        work = draw.choice(self._rig.works)
        tokens = draw.randint(1, work.new_tokens)
        greedy = draw.random() < 0.7
        extra: dict[str, Any] = {"rid": rid, "stream": draw.random() < 0.5, "priority": draw.randint(-1, 1)}
        ending = draw.choice(["read", "read", "read", "leave", "deadline", "abort"])
        patience_s = draw.choice([0.01, 0.1, 0.5])
        request = body(work.prompt, tokens, **extra)
        if not greedy:
            request["sampling_params"] |= {
                "temperature": draw.choice([0.7, 1.3]),
                "top_p": draw.choice([0.5, 1.0]),
                "top_k": draw.choice([5, 50]),
                "seed": draw.randrange(1000),
                "repetition_penalty": draw.choice([1.0, 1.2]),
                "n": draw.choice([1, 2, 3]),
            }
            request["return_logprob"] = draw.random() < 0.5
        if ending == "deadline":
            request["timeout_s"] = patience_s
        url = self._rig.servers["decode"].url
        if ending == "abort":
            threading.Timer(patience_s, _abort, (url, rid)).start()
        try:
            answer = HTTP.post(
                f"{url}/generate", json=request, timeout=patience_s if ending == "leave" else 2 * ANSWERED_S
            )
        except httpx.TimeoutException:
            return "left" if ending == "leave" else "no answer"
        except httpx.TransportError:
            return "closed"
        if answer.status_code != 200:
            return str(answer.status_code)
        return self._check(answer, work.expected[:tokens] if greedy else None)

    def _check(self, answer: httpx.Response, expected: Sequence[int] | None) -> str:
        """Compare greedy tokens; a stream ends with one terminal event and [DONE]."""
        if "text/event-stream" not in answer.headers["content-type"]:
            return self._compare(answer.json(), expected)
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        if not events or events[-1] != "[DONE]":
            return "closed"
        parts = [json.loads(event) for event in events[:-1]]
        if parts and "error" in parts[-1]:
            return {"unavailable": "503", "deadline": "504", "aborted": "499"}.get(parts[-1]["error"]["code"], "500")
        return self._compare(parts[-1], expected)

    def _compare(self, result: Any, expected: Sequence[int] | None) -> str:
        """`expected` is None if the request was not greedy; several samples are a list. An aborted request has the
        first of its tokens.
        """
        if expected is None:
            return "200"
        aborted = result["meta_info"]["finish_reason"]["type"] == "abort"
        found = result["output_ids"]
        if found != (expected[: len(found)] if aborted else expected):
            self.wrong.append(f"tokens {found} are not {expected}")
        return "abort" if aborted else "200"


def _abort(url: str, rid: str) -> None:
    with contextlib.suppress(httpx.TransportError):  # the server may be in a restart
        HTTP.post(f"{url}/abort_request", json={"rid": rid}, timeout=ANSWERED_S)


class Growth:
    """Samples of the memory, the open files and the threads of all processes of the servers."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._samples: dict[str, list[tuple[float, int, int, int]]] = collections.defaultdict(list)

    def sample(self) -> None:
        for side in self._rig.servers:
            for process in self._rig.hooks.find(side, "frontend", "leader", "rank"):
                path = Path(f"/proc/{process.pid}")
                try:
                    status = dict(line.split(":", 1) for line in (path / "status").read_text().splitlines())
                    files = len(list((path / "fd").iterdir()))
                    memory = int(status["VmRSS"].split()[0])
                except (OSError, KeyError):  # it has ended
                    continue
                name = f"{side} {process.process} {process.pid}"
                self._samples[name].append((time.monotonic(), memory, files, int(status["Threads"])))

    def lines(self) -> list[str]:
        """One line for each of the longest-lived processes of a kind: growth per minute, without its first quarter."""
        longest: dict[str, list[tuple[float, int, int, int]]] = {}
        for name, samples in self._samples.items():
            kind = name.rpartition(" ")[0]
            longest[kind] = max(longest.get(kind, []), samples, key=len)
        found = []
        for kind, samples in longest.items():
            later = samples[len(samples) // 4 :]
            minutes = (later[-1][0] - later[0][0]) / 60
            if minutes < 0.5:
                found.append(f"  {kind}: lived for {minutes:.1f} minutes only")
                continue
            growth = [(after - before) / minutes for before, after in zip(later[0][1:], later[-1][1:], strict=True)]
            memory, files, threads = growth
            found.append(
                f"  {kind}: {memory:+.0f} KiB, {files:+.2f} files, {threads:+.2f} threads a minute, over {minutes:.1f}"
            )
        return found


def soak(rig: Rig, seed: int, seconds: float, *, verbose: bool = True) -> list[str]:
    """Run traffic and faults; returns what was wrong."""
    for work in rig.works:
        list(work.expected)  # computes the tokens now, so that requests do not wait for it later
    rig.wait_ready()
    stopping = threading.Event()
    growth = Growth(rig)
    clients = [Traffic(rig, seed, number, stopping) for number in range(CLIENTS)]
    injected: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    ends_at = time.monotonic() + seconds
    try:
        for scheduled in schedule_faults(seed, rig):
            waits_until = time.monotonic() + scheduled.gap_s
            while time.monotonic() < min(waits_until, ends_at):
                growth.sample()
                time.sleep(min(SAMPLE_S, max(0.0, waits_until - time.monotonic())))
            if time.monotonic() >= ends_at:
                break
            rig.wait_ready()
            if verbose:
                print(f"{seconds - (ends_at - time.monotonic()):6.1f} s: {scheduled.fault.label}", flush=True)
            rig.begin_log()
            try:
                for _ in INJECTIONS[scheduled.fault.name](rig, scheduled.fault.side or "decode"):
                    pass
            except NoConnectionError:  # a server that has just started has no data connection yet
                injected["without effect"] += 1
            except Exception as error:  # the report includes it, and what was measured before
                wrong.append(f"{scheduled.fault.label}: {type(error).__name__}: {error}")
                break
            else:
                injected[scheduled.fault.label] += 1
    except KeyboardInterrupt:  # report what was measured until then
        wrong.append("interrupted")
    finally:
        stopping.set()
    for client in clients:
        client.join(3 * ANSWERED_S)
    wrong += [sentence for client in clients for sentence in client.wrong]
    wrong += ["a client has no answer" for client in clients if client.is_alive()]
    try:
        rig.check_after()
    except AssertionError as error:
        wrong.append(str(error))
    if verbose:
        _report(clients, injected, growth)
    return wrong


def _report(clients: list[Traffic], injected: collections.Counter[str], growth: Growth) -> None:
    outcomes = sum((client.outcomes for client in clients), collections.Counter[str]())
    print("outcome    requests   longest")
    for outcome, count in outcomes.most_common():
        longest_s = max(client.longest_s.get(outcome, 0.0) for client in clients)
        print(f"{outcome:10} {count:8} {longest_s:7.1f} s")
    print("faults:", ", ".join(f"{label} {count}" for label, count in injected.most_common()) or "none")
    print("growth of the processes that lived longest:", *growth.lines(), sep="\n")


def _on(device: str, config: Config) -> Config:
    """The configuration on a device. On a GPU, KV goes through TCP: the faults of the data link need it."""
    if device == "cpu":
        return config
    flags = ("--device", device, "--dtype", "float32", "--transport", "tcp")
    return dataclasses.replace(
        config, prefill_flags=config.prefill_flags + flags, decode_flags=config.decode_flags + flags
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", default="dense", choices=[config.name for config in CONFIGS])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda:0"])
    options = parser.parse_args()
    config = _on(options.device, next(config for config in CONFIGS if config.name == options.config))
    print(f"seed {options.seed}, {options.minutes:g} minutes, {config.name}, {options.device}", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as directory, Rig(config, Path(directory)) as rig:
        wrong = soak(rig, options.seed, 60 * options.minutes)
    print(*wrong, f"{len(wrong)} problems", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
