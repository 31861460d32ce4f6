"""Computes the summary of a run from its records. No I/O."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .client import RequestRecord


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of seconds. Percentiles interpolate linearly between the two nearest values, as numpy's do."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Distribution | None":
        """None for no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(
            count=len(ordered),
            mean=math.fsum(ordered) / len(ordered),
            p50=percentile(ordered, 0.50),
            p90=percentile(ordered, 0.90),
            p95=percentile(ordered, 0.95),
            p99=percentile(ordered, 0.99),
            max=ordered[-1],
        )


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met the latency bounds, out of all that ended; a failed request does not."""

    slo_ttft_s: float | None
    slo_itl_s: float | None
    good: int
    share: float
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Latencies and token counts are those of successful requests alone; `duration_s` is of the whole run."""

    ok: int
    failed: int
    unfinished: int
    """Requests that Ctrl-C has interrupted."""
    failures: dict[str, int]
    duration_s: float
    requests_per_s: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft_s: Distribution | None
    itl_s: Distribution | None
    tpot_s: Distribution | None
    e2e_s: Distribution | None
    stages_s: dict[str, Distribution]
    """By stage of the server's timeline, in order."""
    transfer_share_of_ttft: float | None
    """The share of transfers in the time to first token, summed over all requests."""
    goodput: Goodput | None


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the sorted values lie."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(
    records: Sequence[RequestRecord],
    duration_s: float,
    *,
    unfinished: int = 0,
    slo_ttft_s: float | None = None,
    slo_itl_s: float | None = None,
) -> Summary:
    ok = [record for record in records if record.ok]
    failures = Counter(record.failure for record in records if record.failure is not None)
    ttfts = [record.ttft_s for record in ok if record.ttft_s is not None]
    input_tokens = sum(record.prompt_tokens for record in ok)
    output_tokens = sum(record.output_tokens for record in ok)
    stages = {stage: None for record in ok for stage in record.timeline}
    distributions = {
        stage: Distribution.of(record.timeline[stage] for record in ok if stage in record.timeline) for stage in stages
    }
    transfer_s = math.fsum(record.timeline.get("transfer", 0.0) for record in ok)

    def rate(count: int) -> float:
        return count / duration_s if duration_s > 0 else 0.0

    return Summary(
        ok=len(ok),
        failed=len(records) - len(ok),
        unfinished=unfinished,
        failures=dict(failures.most_common()),
        duration_s=duration_s,
        requests_per_s=rate(len(ok)),
        input_tokens=input_tokens,
        cached_tokens=sum(record.cached_tokens for record in ok),
        output_tokens=output_tokens,
        input_tokens_per_s=rate(input_tokens),
        output_tokens_per_s=rate(output_tokens),
        ttft_s=Distribution.of(ttfts),
        itl_s=Distribution.of(gap for record in ok for gap in record.itl_s),
        tpot_s=Distribution.of(record.tpot_s for record in ok if record.tpot_s is not None),
        e2e_s=Distribution.of(record.e2e_s for record in ok),
        stages_s={stage: found for stage, found in distributions.items() if found is not None},
        transfer_share_of_ttft=transfer_s / math.fsum(ttfts) if "transfer" in stages and ttfts else None,
        goodput=_goodput(records, duration_s, slo_ttft_s, slo_itl_s),
    )


def _goodput(
    records: Sequence[RequestRecord], duration_s: float, slo_ttft_s: float | None, slo_itl_s: float | None
) -> Goodput | None:
    if slo_ttft_s is None and slo_itl_s is None:
        return None
    good = sum(_meets(record, slo_ttft_s, slo_itl_s) for record in records)
    return Goodput(
        slo_ttft_s,
        slo_itl_s,
        good=good,
        share=good / len(records) if records else 0.0,
        requests_per_s=good / duration_s if duration_s > 0 else 0.0,
    )


def _meets(record: RequestRecord, slo_ttft_s: float | None, slo_itl_s: float | None) -> bool:
    """An output of a single token has no inter-token latency and meets its bound."""
    if not record.ok or record.ttft_s is None:
        return False
    in_time = slo_ttft_s is None or record.ttft_s <= slo_ttft_s
    steady = slo_itl_s is None or record.tpot_s is None or record.tpot_s <= slo_itl_s
    return in_time and steady
