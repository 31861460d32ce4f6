"""Predicts the goodput of a load on some prefill and decode servers, and which side limits it."""

import math
from dataclasses import dataclass

from ....scheduler.simulation.cluster import Cluster, Outcome
from ...bench.client import RequestRecord
from ...bench.options import BenchOptions
from ...bench.summary import Goodput, Summary, meets, summarize
from .load import Load
from .options import Ratio
from .pair import MeasuredPair

NEARLY_BEST = 0.97
"""A ratio with fewer servers is chosen if its goodput is at least this share of the best."""
ENOUGH = 0.99
"""No side is the limit if this share of all requests meets its bounds."""

_PREFILL_STAGES = ("prefill_queue", "prefill", "transfer", "control")


@dataclass(frozen=True)
class Prediction:
    """The simulated run of a load on servers of one ratio."""

    ratio: Ratio
    summary: Summary
    goodput: Goodput
    prefill_busy: float
    decode_busy: float
    limit: str
    """`prefill`, `decode`, or `none` if nearly all requests meet their bounds."""


def predict(pair: MeasuredPair, load: Load, bench: BenchOptions, ratio: Ratio) -> Prediction:
    """Simulates the load on servers of this ratio, and computes the same figures as `pdserve bench`."""
    bounds = {"slo_ttft_ms": bench.slo_ttft_ms, "slo_itl_ms": bench.slo_itl_ms}
    cluster = Cluster(
        pair.server_settings({name: bound for name, bound in bounds.items() if bound is not None}),
        pair.times,
        prefills=ratio.prefills,
        decodes=ratio.decodes,
        cores=pair.machine_cores,
        hashes=load.shares_prefixes,
    )
    records = [_record(outcome, pair.times.response_s) for outcome in cluster.run(load.arrivals)]
    slo_ttft_s, slo_itl_s = (None if ms is None else ms / 1000 for ms in (bench.slo_ttft_ms, bench.slo_itl_ms))
    duration_s = max(record.started_s + record.e2e_s for record in records)
    summary = summarize(records, duration_s, slo_ttft_s=slo_ttft_s, slo_itl_s=slo_itl_s)
    assert summary.goodput is not None, "there is a bound"
    late = [record for record in records if not meets(record, slo_ttft_s, slo_itl_s)]
    prefill_busy, decode_busy = cluster.busy()
    limit = "none" if summary.goodput.share >= ENOUGH else _limit(late, slo_ttft_s, slo_itl_s)
    return Prediction(ratio, summary, summary.goodput, prefill_busy, decode_busy, limit)


def best_of(predictions: list[Prediction]) -> Prediction:
    """Returns the prediction with the fewest servers among those whose number of requests within their bounds is nearly
    the best. Counts requests and not their rate, because a rate also depends on how long the last request takes.
    """
    most = max(found.goodput.good for found in predictions)
    enough = [found for found in predictions if found.goodput.good >= NEARLY_BEST * most]
    return min(enough, key=lambda found: (found.ratio.prefills + found.ratio.decodes, -found.goodput.good))


def _record(outcome: Outcome, response_s: float) -> RequestRecord:
    """The record that the client of `pdserve bench` would have."""
    record = RequestRecord(
        outcome.at_s,
        e2e_s=(outcome.ended_s or outcome.at_s) - outcome.at_s + response_s,
        arrivals=[(at_s - outcome.at_s + response_s, count + 1) for count, at_s in enumerate(outcome.token_times_s)],
        prompt_tokens=outcome.prompt_tokens,
        cached_tokens=outcome.cached_tokens,
        timeline=outcome.timeline,
    )
    if outcome.failure is not None:
        record.fail(outcome.failure, "")
    return record


def _limit(late: list[RequestRecord], slo_ttft_s: float | None, slo_itl_s: float | None) -> str:
    """The side that limits the goodput. For each bound that a late request exceeds, the excess as a fraction of it
    counts for the side that caused it, and a failed request counts 1 for decode. Returns the side with the larger sum.
    """
    lost = {"prefill": 0.0, "decode": 0.0}
    for record in late:
        if not record.ok or record.ttft_s is None:
            lost["decode"] += 1.0
            continue
        if slo_itl_s is not None and record.tpot_s is not None and record.tpot_s > slo_itl_s:
            lost["decode"] += record.tpot_s / slo_itl_s - 1
        if slo_ttft_s is not None and record.ttft_s > slo_ttft_s:
            on_prefill = math.fsum(record.timeline.get(stage, 0.0) for stage in _PREFILL_STAGES)
            waiting = record.timeline.get("queue", 0.0)
            lost["prefill" if on_prefill >= waiting else "decode"] += record.ttft_s / slo_ttft_s - 1
    return max(lost, key=lambda side: lost[side])
