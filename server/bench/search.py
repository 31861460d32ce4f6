"""The highest rate of requests at which a server keeps given limits: runs at rates that double, then close in.

A run ends early when too many requests have missed the limits. Each has prompts of its own, so that none finds those of
an earlier run in the prefix cache.
"""

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from .options import BenchOptions
from .report import BenchResult, document_of, milliseconds_of, statistics_table

LEAST_DURATION_S = 15.0
"""A rate is sent for at least this long: a queue that grows shows only with time."""
CLOSE = 1.05
"""The search ends when the lowest rate that is too high is at most this multiple of the highest that is not."""
LEAST_RATE_PER_S = 0.01
_TTFT_COLUMNS = ("p50", "p90", "p99")

Measure = Callable[[BenchOptions, int], Awaitable[BenchResult]]
"""Runs a load that ends when more than this number of requests have missed the limits."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A rate, and the share of its requests that stayed inside the limits; the share so far if the run ended early."""

    rate_per_s: float
    share: float
    kept: bool
    result: BenchResult


async def search(options: BenchOptions, measure: Measure) -> AsyncIterator[Probe]:
    """The rates in the order in which they were tried. Ends after a run that Ctrl-C has interrupted."""
    kept: float | None = None
    missed: float | None = None
    rate_per_s = options.rate_per_s or 1.0
    number = 0
    while True:
        requests = max(options.requests, math.ceil(rate_per_s * LEAST_DURATION_S))
        run = replace(options, rate_per_s=rate_per_s, requests=requests, seed=options.seed + number)
        misses = int(requests * (1 - options.keep))
        result = await measure(run, misses)
        if result.interrupted:
            return
        assert result.summary.goodput is not None, "checked with the flags"
        good, ended = result.summary.goodput.good, len(result.records)
        probe = Probe(rate_per_s, good / ended if ended else 0.0, good >= requests - misses, result)
        yield probe
        if probe.kept:
            kept = rate_per_s
        else:
            missed = rate_per_s
        if missed is None:
            rate_per_s = 2 * rate_per_s
        elif kept is None:
            rate_per_s = rate_per_s / 2
            if rate_per_s < LEAST_RATE_PER_S:
                return
        elif missed / kept <= CLOSE:
            return
        else:
            rate_per_s = math.sqrt(kept * missed)
        number += 1


def best_of(probes: Sequence[Probe]) -> Probe | None:
    """The highest rate below all that were too high; None if none was kept."""
    limit = min((probe.rate_per_s for probe in probes if not probe.kept), default=math.inf)
    return max((p for p in probes if p.kept and p.rate_per_s < limit), key=lambda p: p.rate_per_s, default=None)


def describe(probe: Probe) -> str:
    """One line, for the progress of a search."""
    stopped = "" if probe.kept or not probe.result.summary.unfinished else ", ended early"
    verdict = "inside" if probe.kept else "too high"
    return f"{probe.rate_per_s:.3g} requests/s: {probe.share:.1%} inside the limits{stopped}: {verdict}"


def table_of(probes: Sequence[Probe], options: BenchOptions) -> Table:
    """All rates, lowest first."""
    bounds = zip(("TTFT", "mean ITL"), (options.slo_ttft_ms, options.slo_itl_ms), strict=True)
    limits = ", ".join(f"{name} <= {bound:g} ms" for name, bound in bounds if bound is not None)
    table = statistics_table(f"{limits}, for {options.keep:.1%} of requests", "requests/s", ())
    for column in ("inside", "tokens/s", *(f"TTFT {name}" for name in _TTFT_COLUMNS), "ITL p50", "ITL p99"):
        table.add_column(column, justify="right", no_wrap=True)
    best = best_of(probes)
    for probe in sorted(probes, key=lambda probe: probe.rate_per_s):
        summary = probe.result.summary
        ttft = milliseconds_of(summary.ttft_s, _TTFT_COLUMNS) if summary.ttft_s else ["", "", ""]
        itl = milliseconds_of(summary.itl_s, ("p50", "p99")) if summary.itl_s else ["", ""]
        style = "bold" if probe is best else "" if probe.kept else "dim"
        cells = (f"{probe.share:.1%}", f"{summary.output_tokens_per_s:.0f}", *ttft, *itl)
        table.add_row(f"{probe.rate_per_s:.3g}", *cells, style=style)
    return table


def verdict_of(probes: Sequence[Probe]) -> str:
    best = best_of(probes)
    if best is None:
        lowest = min((probe.rate_per_s for probe in probes), default=0.0)
        return f"no rate kept the limits: {lowest:.3g} requests/s is too high"
    above = min((probe.rate_per_s for probe in probes if probe.rate_per_s > best.rate_per_s), default=None)
    too_high = f"; {above:.3g} is too high" if above is not None else ""
    return f"highest rate inside the limits: {best.rate_per_s:.3g} requests/s{too_high}"


def search_document(probes: Sequence[Probe], command: str) -> dict[str, object]:
    best = best_of(probes)
    return {
        "command": command,
        "highest_rate_per_s": best.rate_per_s if best is not None else None,
        "rates": [
            {"rate_per_s": probe.rate_per_s, "share": probe.share, "kept": probe.kept, **document_of(probe.result)}
            for probe in probes
        ],
    }
