"""Prefill and decode on GPUs of their own, simulated: where prompts are computed, and what that does to gaps.

    python -m benchmarks.separate_servers                     # --record: into benchmarks/results
    python -m benchmarks.separate_servers --rates 40 --seconds 60 --ratios 1:1

The real schedulers with step times of an H200 (first_tokens.py), the same requests for each `--local-prefill`: Poisson,
lognormal lengths (median 600 in, 150 out). A request is good if its first token comes within 500 ms and its mean time
per token is at most 1.5 decode steps, a step being the median gap with `never`. With `--faults`, the first prefill
server dies or slows down.
"""

import argparse
import dataclasses
import itertools
import math
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.first_tokens import H200, OUTSIDE_S, arrivals_of, percentile, server_settings
from benchmarks.results import RESULTS, figure_of_this_run, record
from pdserve.configs.setting_types import LocalPrefillSetting
from pdserve.scheduler.simulation.cluster import Cluster, Outcome
from pdserve.scheduler.simulation.step_times import StepTimes

MODES: tuple[LocalPrefillSetting, ...] = ("never", "always", "auto")
RATES = (12, 20, 30)
RATIOS = ((1, 1), (2, 2))
TTFT_S = 0.5
STEPS_PER_TOKEN = 1.5
MOST_GAP = 1.2
"""Target: the gap p99 of `auto` is at most this many times that of `never`."""
FAULT_AT = 1 / 3
"""When the fault happens, as a part of the run."""
FIGURE = "gap p99 of auto / never, separate H200s, simulated: the worst of six loads"
SLOWNESS = {"none": 1.0, "slow 3 x": 3.0, "slow 30 x": 30.0}


@dataclasses.dataclass(frozen=True)
class Run:
    """What the clients of one run see."""

    ttft_s: list[float]
    """Infinite for a request that failed."""
    gaps_s: list[float]
    tpot_s: list[float]
    """Mean time per token after the first, of each request."""
    local: int
    """Prompts that decode computed."""

    def good(self, step_s: float) -> float:
        """The share of requests inside both bounds, if a decode step takes `step_s`."""
        requests = zip(self.ttft_s, self.tpot_s, strict=True)
        return sum(ttft <= TTFT_S and tpot <= STEPS_PER_TOKEN * step_s for ttft, tpot in requests) / len(self.ttft_s)

    @property
    def on_time(self) -> float:
        """The share of first tokens within their limit."""
        return sum(seconds <= TTFT_S for seconds in self.ttft_s) / len(self.ttft_s)


def simulate(
    mode: LocalPrefillSetting,
    rate: float,
    ratio: tuple[int, int] = (1, 1),
    *,
    fault: str = "none",
    seconds: float = 40.0,
    seed: int = 0,
    times: StepTimes = H200,
) -> Run:
    """A run of one mode. `rate` is that of each decode server."""
    prefills, decodes = ratio
    cluster = Cluster(server_settings(mode), times, prefills=prefills, decodes=decodes)
    if fault == "dies":
        cluster.kill(0, FAULT_AT * seconds)
    elif SLOWNESS[fault] != 1:
        cluster.slow_down(0, FAULT_AT * seconds, SLOWNESS[fault])
    outcomes = cluster.run(arrivals_of(f"poisson:{decodes * rate}", seed, seconds))
    counters = cluster.counters()
    local = sum(count for name, count in counters.items() if name.startswith("local_prefill_"))
    return _run_of(outcomes, local)


def _run_of(outcomes: Sequence[Outcome], local: int) -> Run:
    ttft_s, gaps_s, tpot_s = [], [], []
    for outcome in outcomes:
        tokens = outcome.token_times_s
        if outcome.failure is not None or not tokens:
            ttft_s.append(math.inf)
            tpot_s.append(math.inf)
            continue
        ttft_s.append(OUTSIDE_S + tokens[0] - outcome.at_s)
        gaps_s += [after - before for before, after in itertools.pairwise(tokens)]
        tpot_s.append((tokens[-1] - tokens[0]) / max(1, len(tokens) - 1))
    return Run(ttft_s, gaps_s, tpot_s, local)


def main() -> int:
    options = _parse()
    console, table = Console(highlight=False, width=160), Table(title="simulated H200s: times in ms")
    for column in ("load", "mode", "TTFT p50", "p90", "p99", "on time", "gap p50", "p99", "max", "good", "on decode"):
        table.add_column(column, justify="right")
    gaps: list[float] = []
    worse = 0
    for ratio in options.ratios:
        for fault in options.faults:
            for rate in options.rates:
                runs = {
                    mode: simulate(mode, rate, ratio, fault=fault, seconds=options.seconds, seed=options.seed)
                    for mode in MODES
                }
                load = f"{ratio[0]} and {ratio[1]}, {rate * ratio[1]:g} requests a second"
                load += "" if fault == "none" else f", a prefill server {fault}"
                for mode, run in runs.items():
                    table.add_row(load, mode, *_cells(run, percentile(runs["never"].gaps_s, 50)))
                never, always, auto = (runs[mode] for mode in MODES)
                step_s = percentile(never.gaps_s, 50)
                if fault == "none":
                    gaps.append(percentile(auto.gaps_s, 99) / percentile(never.gaps_s, 99))
                    worse += auto.good(step_s) < max(never.good(step_s), always.good(step_s))
    console.print(table)
    if options.record:
        figure = figure_of_this_run(FIGURE, max(gaps), "x", target=MOST_GAP)
        record(RESULTS / "scheduling.json", "", [figure])
    return int(worse > 0 or max(gaps, default=1.0) > MOST_GAP)


def _cells(run: Run, step_s: float) -> list[str]:
    first = [percentile(run.ttft_s, part) for part in (50, 90, 99)]
    gaps = [percentile(run.gaps_s, part) for part in (50, 99, 100)]
    return [
        *(f"{1000 * seconds:.0f}" for seconds in first),
        f"{100 * run.on_time:.1f} %",
        *(f"{1000 * seconds:.1f}" for seconds in gaps),
        f"{100 * run.good(step_s):.1f} %",
        f"{run.local} of {len(run.ttft_s)}",
    ]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=lambda text: [float(part) for part in text.split(",")], default=list(RATES))
    parser.add_argument(
        "--ratios",
        type=lambda text: [tuple(map(int, part.split(":"))) for part in text.split(",")],
        default=list(RATIOS),
        help="prefill:decode servers",
    )
    parser.add_argument(
        "--faults", type=lambda text: text.split(","), default=["none"], help="none, dies, slow 3 x, slow 30 x"
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
