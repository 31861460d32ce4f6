"""Computes the summary of a run from its records. No I/O."""

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .client import RequestRecord

_LENGTH_EDGES = (128, 512, 2048, 8192, 32768)
LENGTH_CLASSES = (
    f"below {_LENGTH_EDGES[0]}",
    *(f"{least} to {above - 1}" for least, above in itertools.pairwise(_LENGTH_EDGES)),
    f"{_LENGTH_EDGES[-1]} and more",
)
"""Classes of prompt tokens."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of seconds."""

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
        given = list(values)
        if not given:
            return None
        p50, p90, p95, p99 = np.percentile(given, (50, 90, 95, 99)).tolist()
        return cls(len(given), math.fsum(given) / len(given), p50, p90, p95, p99, max(given))


@dataclass(frozen=True, slots=True)
class Goodput:
    """The requests that met the latency bounds, of all that ended. A failed request has not met them."""

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
    """Requests that were interrupted: by Ctrl-C, or at the end of a rate that is too high."""
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
    ttft_by_length_s: dict[str, Distribution]
    """By class of prompt length (`length_class`), shortest first."""
    stages_s: dict[str, Distribution]
    """By stage of the server's timeline, in order."""
    transfer_share_of_ttft: float | None
    """The share of transfers in the time to first token, summed over all requests."""
    goodput: Goodput | None


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
    stages: dict[str, list[float]] = {}
    for record in ok:
        for stage, seconds in record.timeline.items():
            stages.setdefault(stage, []).append(seconds)
    transfer_s = math.fsum(stages.get("transfer", ()))

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
        ttft_by_length_s=_by_length(ok),
        stages_s={stage: found for stage, spent in stages.items() if (found := Distribution.of(spent)) is not None},
        transfer_share_of_ttft=transfer_s / math.fsum(ttfts) if "transfer" in stages and ttfts else None,
        goodput=None if slo_ttft_s is slo_itl_s is None else _goodput(records, rate, slo_ttft_s, slo_itl_s),
    )


def length_class(prompt_tokens: int) -> int:
    """The index in LENGTH_CLASSES of a prompt."""
    return bisect.bisect_right(_LENGTH_EDGES, prompt_tokens)


def _by_length(ok: Iterable[RequestRecord]) -> dict[str, Distribution]:
    classes: list[list[float]] = [[] for _ in LENGTH_CLASSES]
    for record in ok:
        if record.ttft_s is not None:
            classes[length_class(record.prompt_tokens)].append(record.ttft_s)
    named = zip(LENGTH_CLASSES, map(Distribution.of, classes), strict=True)
    return {name: found for name, found in named if found is not None}


def _goodput(
    records: Sequence[RequestRecord], rate: Callable[[int], float], slo_ttft_s: float | None, slo_itl_s: float | None
) -> Goodput:
    good = sum(meets(record, slo_ttft_s, slo_itl_s) for record in records)
    return Goodput(slo_ttft_s, slo_itl_s, good, good / len(records) if records else 0.0, rate(good))


def meets(record: RequestRecord, slo_ttft_s: float | None, slo_itl_s: float | None) -> bool:
    """Whether a request met the bounds. An output of a single token has no inter-token latency and meets its bound."""
    if not record.ok or record.ttft_s is None:
        return False
    in_time = slo_ttft_s is None or record.ttft_s <= slo_ttft_s
    steady = slo_itl_s is None or record.tpot_s is None or record.tpot_s <= slo_itl_s
    return in_time and steady
