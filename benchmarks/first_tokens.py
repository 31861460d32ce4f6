"""First tokens and gaps under load, simulated: the real schedulers, with a model of the step times of an H200.

    python -m benchmarks.first_tokens
    python -m benchmarks.first_tokens --only poisson:20 --limit-ms 20 --step-ms 25
    python -m benchmarks.first_tokens --one-gpu --only poisson:12,poisson:20,closed:64:1024:256:3

Loads: `poisson:RATE` (lognormal lengths, median 600 in and 150 out), `long` (32 streams, then four prompts of 32,000
tokens), `closed:CLIENTS:IN:OUT:TIMES`. Compare rules for the size of steps with it; a GPU has the last word.
"""

import argparse
import math
import random
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from pdserve.configs.setting_types import LocalPrefillSetting
from pdserve.scheduler.decode.requests.limits import DecodeLimits
from pdserve.scheduler.prefill.limits import PrefillLimits
from pdserve.scheduler.simulation.cluster import Arrival, Cluster, Outcome, ServerSettings
from pdserve.scheduler.simulation.step_times import StepTimes

LOADS = ("poisson:12", "poisson:20", "poisson:30", "long", "closed:64:1024:256:3", "closed:256:512:256:2")
SECONDS = 40.0
OUTSIDE_S = 0.005
"""Of a first token: from the client to the scheduler, and back."""
H200 = StepTimes(
    prefill_step_s=0.0022,
    prefill_token_s=20e-6,
    prefill_pair_s=1.2e-9,
    decode_steps=((1, 0.0038), (32, 0.0045), (64, 0.0055), (256, 0.0105), (512, 0.0185)),
    decode_pair_s=30e-9,
    message_s=0.0005,
    write_s=0.0005,
)
"""At Qwen3-8B. First tokens alone: 16 tokens 9.6 ms, 512 17, 1,024 26.6, 8,192 211."""
PAGE_SIZE = 16


def main() -> int:
    options = _parse()
    table = Table(title="simulated: times in ms")
    for column in ("load", "TTFT p50", "p90", "p99", "below 500 tokens p99", "gap p99", "max", "TPOT p50", "p99"):
        table.add_column(column, justify="right")
    for column in ("in bounds", "tokens/s", "last"):
        table.add_column(column, justify="right")
    for load in options.only:
        table.add_row(load, *_figures(_simulate(load, options), options.seeds))
    Console(highlight=False, width=140).print(table)
    return 0


def _simulate(load: str, options: argparse.Namespace) -> list[Outcome]:
    scale = options.step_ms / 1000 / H200.decode_steps[0][1]
    times = StepTimes(
        prefill_step_s=H200.prefill_step_s * scale,
        prefill_token_s=H200.prefill_token_s * scale,
        prefill_pair_s=H200.prefill_pair_s * scale,
        decode_steps=tuple((rows, seconds * scale) for rows, seconds in H200.decode_steps),
        decode_pair_s=H200.decode_pair_s * scale,
        message_s=H200.message_s,
        write_s=H200.write_s,
    )
    prefills = 1 if options.one_gpu else options.prefills
    mode: LocalPrefillSetting = "never" if options.one_gpu else "auto" if prefills else "always"
    settings = server_settings(mode, options.limit_ms)

    def run(seed: int) -> list[Outcome]:
        cluster = Cluster(settings, times, prefills=prefills, decodes=1, one_gpu=options.one_gpu)
        return cluster.run(arrivals_of(load, seed))

    return [outcome for seed in range(options.seeds) for outcome in run(seed)]


def server_settings(local_prefill: LocalPrefillSetting, limit_ms: float | None = None) -> ServerSettings:
    """The defaults on a GPU, with much memory."""
    limits = DecodeLimits(
        page_size=PAGE_SIZE,
        max_running_requests=256,
        max_queued_requests=4096,
        growth_tokens=128,
        retract_pages=1 << 14,
        queue_timeout_s=600.0,
        prefill_wait_s=3.0,
        prefill_timeout_s=600.0,
        request_timeout_s=6000.0,
        quarantine_s=6.0,
        overlap=True,
        local_prefill=local_prefill,
        max_step_tokens=6144,
        slo_itl_s=limit_ms / 1000 if limit_ms is not None else None,
    )
    prefill = PrefillLimits(
        page_size=PAGE_SIZE,
        chunk_size=8192,
        max_queued_requests=4096,
        context_length=1 << 17,
        vocab_size=1 << 31,
        steps_in_flight=2,
    )
    pages = (1 << 20) // PAGE_SIZE
    return ServerSettings(limits, pages, prefill, pages)


def arrivals_of(load: str, seed: int, seconds: float = SECONDS) -> list[Arrival]:
    draw = random.Random(seed)
    found: list[Arrival] = []

    def add(at_s: float, tokens: int, output: int, follows: int | None = None) -> None:
        found.append(Arrival(at_s, (len(found),) * tokens, output, follows))

    match load.split(":"):
        case ["poisson", rate]:
            at = draw.expovariate(float(rate))
            while at < seconds:
                tokens = int(min(8000, max(16, draw.lognormvariate(math.log(600), 1.0))))
                add(at, tokens, int(min(800, max(10, draw.lognormvariate(math.log(150), 0.7)))))
                at += draw.expovariate(float(rate))
        case ["long"]:
            for _ in range(32):
                add(0.0, 512, 400)
            for _ in range(4):
                add(1.5, 32_000, 1)
        case ["closed", clients, tokens, output, times]:
            for number in range(int(clients) * int(times)):
                add(0.0, int(tokens), int(output), None if number < int(clients) else number - int(clients))
        case _:
            raise SystemExit(f"unknown load: {load}")
    return found


def _figures(outcomes: Sequence[Outcome], seeds: int) -> list[str]:
    assert not any(outcome.failure for outcome in outcomes), [
        outcome.failure for outcome in outcomes if outcome.failure
    ]
    found = [outcome for outcome in outcomes if outcome.prompt_tokens < 32_000] or list(outcomes)
    ttft = {id(outcome): OUTSIDE_S + outcome.token_times_s[0] - outcome.at_s for outcome in outcomes}
    gaps = [
        after - before
        for outcome in found
        for before, after in zip(outcome.token_times_s, outcome.token_times_s[1:], strict=False)
    ]
    tpot = {
        id(outcome): (outcome.token_times_s[-1] - outcome.token_times_s[0]) / (len(outcome.token_times_s) - 1)
        for outcome in found
        if len(outcome.token_times_s) > 1
    }
    first = [ttft[id(outcome)] for outcome in found]
    short = [ttft[id(outcome)] for outcome in found if outcome.prompt_tokens < 500]
    good = sum(ttft[id(outcome)] <= 0.5 and tpot.get(id(outcome), 0.0) <= 0.02 for outcome in found)
    ended = max(outcome.ended_s or 0.0 for outcome in outcomes)
    tokens = sum(len(outcome.token_times_s) for outcome in outcomes)
    times = [
        *(percentile(first, part) for part in (50, 90, 99)),
        percentile(short, 99),
        percentile(gaps, 99),
        max(gaps, default=math.nan),
    ]
    row = [f"{1000 * seconds:.0f}" for seconds in times]
    row += [f"{1000 * percentile(tpot.values(), part):.1f}" for part in (50, 99)]
    return [
        *row,
        f"{100 * good / len(found):.0f} %",
        f"{tokens / ended / seeds:,.0f}",
        f"{1000 * max(ttft.values()):,.0f}",
    ]


def percentile(values: Iterable[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part / 100))] if ordered else math.nan


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(LOADS), help="loads, with commas")
    parser.add_argument("--prefills", type=int, default=0, help="prefill servers, each with a GPU of its own")
    parser.add_argument("--one-gpu", action="store_true", help="a pair on one GPU, with --local-prefill never")
    parser.add_argument("--step-ms", type=float, default=3.8, help="scale all step times to this decode step")
    parser.add_argument("--limit-ms", type=float, help="limit on the time between tokens (default: automatic)")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each load")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
