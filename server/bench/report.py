"""The results of `pdserve bench`: tables on the terminal, JSON in a file."""

import os
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..observability.stages import STAGES
from ..observability.versions import package_version
from .client import RequestRecord
from .options import BenchOptions
from .summary import Distribution, Summary

BUSY_CLIENT_SHARE = 0.7
"""Share of a core; a client that uses more may limit the result."""

_LATENCY_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
_LENGTH_COLUMNS = ("p50", "p90", "p99", "max")
_STAGE_COLUMNS = ("mean", "p50", "p95")


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One run: options, records and summary. `client_cpu_s` is the CPU time of this process."""

    options: BenchOptions
    command: str
    started_at: datetime
    model_info: Mapping[str, object]
    server_info: Mapping[str, object]
    records: Sequence[RequestRecord]
    summary: Summary
    client_cpu_s: float
    interrupted: bool

    @property
    def client_share(self) -> float:
        return self.client_cpu_s / self.summary.duration_s if self.summary.duration_s > 0 else 0.0


def report(result: BenchResult) -> Iterator[RenderableType]:
    """The tables and remarks, in the order to print them."""
    yield _overview(result)
    if result.summary.e2e_s is not None:
        yield _latencies(result.summary)
    if len(result.summary.ttft_by_length_s) > 1:
        yield _lengths(result.summary)
    if result.summary.stages_s:
        yield _stages(result.summary)
    if result.client_share > BUSY_CLIENT_SHARE:
        yield Text(f"This client used {result.client_share:.0%} of a core: it may limit the result.", "yellow")
    for failure, count in result.summary.failures.items():
        example = next(record.detail for record in result.records if record.failure == failure)
        yield Text(f"{count} failed: {failure}: {example}", "red")
    if result.interrupted:
        missing = result.options.requests - len(result.records)
        yield Text(f"Interrupted: {missing} of {result.options.requests} requests have no result.", "yellow")


def to_json(result: BenchResult) -> bytes:
    """The whole run, from which the plot can be drawn again."""
    return encode(document_of(result))


def encode(content: Mapping[str, object]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content, enc_hook=str), indent=1) + b"\n"


def document_of(result: BenchResult) -> dict[str, object]:
    api_key = None if result.options.api_key is None else "set"
    return {
        "command": result.command,
        "date": result.started_at.astimezone(UTC).isoformat(timespec="seconds"),
        "host": {
            "name": socket.gethostname(),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "pdserve": package_version(),
        },
        "options": replace(result.options, api_key=api_key),
        "interrupted": result.interrupted,
        "client_cpu_s": result.client_cpu_s,
        "summary": result.summary,
        "model_info": result.model_info,
        "server_info": result.server_info,
        "requests": [_request(record) for record in result.records],
    }


def _request(record: RequestRecord) -> dict[str, object]:
    return {
        "started_s": round(record.started_s, 6),
        "ttft_s": record.ttft_s and round(record.ttft_s, 6),
        "e2e_s": round(record.e2e_s, 6),
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "itl_s": [round(gap, 6) for gap in record.itl_s],
        "timeline": record.timeline,
        "failure": record.failure,
        "detail": record.detail,
    }


def _overview(result: BenchResult) -> Table:
    summary, options = result.summary, result.options
    table = Table(title=f"{options.dataset} data, {options.load}, {options.url}", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    failed = Text(str(summary.failed), "red" if summary.failed else "")
    table.add_row("requests ok", str(summary.ok))
    table.add_row("requests failed", failed)
    if summary.unfinished:
        table.add_row("requests cut off", str(summary.unfinished))
    table.add_row("duration", f"{summary.duration_s:.2f} s")
    table.add_row("requests", f"{summary.requests_per_s:.2f} /s")
    cached = f", {summary.cached_tokens / summary.input_tokens:.0%} cached" if summary.cached_tokens else ""
    table.add_row(f"input tokens ({summary.input_tokens}{cached})", f"{summary.input_tokens_per_s:.1f} /s")
    table.add_row(f"output tokens ({summary.output_tokens})", f"{summary.output_tokens_per_s:.1f} /s")
    if (goodput := summary.goodput) is not None:
        bounds = (("TTFT", goodput.slo_ttft_s), ("mean ITL", goodput.slo_itl_s))
        within = ", ".join(f"{name} <= {bound * 1000:g} ms" for name, bound in bounds if bound is not None)
        table.add_row(f"goodput ({within})", f"{goodput.requests_per_s:.2f} /s ({goodput.share:.0%})")
    table.add_row("client CPU", f"{result.client_share:.0%} of a core")
    return table


def _latencies(summary: Summary) -> Table:
    table = statistics_table("latency, ms", "", _LATENCY_COLUMNS)
    rows = (
        ("time to first token", summary.ttft_s),
        ("inter-token latency", summary.itl_s),
        ("time per output token", summary.tpot_s),
        ("end to end", summary.e2e_s),
    )
    for name, distribution in rows:
        if distribution is not None:
            table.add_row(name, *milliseconds_of(distribution, _LATENCY_COLUMNS))
    return table


def _lengths(summary: Summary) -> Table:
    table = statistics_table("time to first token by prompt length, ms", "tokens", _LENGTH_COLUMNS)
    table.add_column("requests", justify="right")
    for name, distribution in summary.ttft_by_length_s.items():
        table.add_row(name, *milliseconds_of(distribution, _LENGTH_COLUMNS), str(distribution.count))
    return table


def _stages(summary: Summary) -> Table:
    table = statistics_table("where the time goes, ms", "stage", _STAGE_COLUMNS)
    table.add_column("share", justify="right")
    table.add_column("what it is", style="dim")
    total_s = sum(stage.mean * stage.count for stage in summary.stages_s.values())
    for name, stage in summary.stages_s.items():
        share = f"{stage.mean * stage.count / total_s:.1%}" if total_s > 0 else ""
        table.add_row(name.replace("_", " "), *milliseconds_of(stage, _STAGE_COLUMNS), share, STAGES.get(name, ""))
    if summary.transfer_share_of_ttft is not None:
        table.caption = f"transfer is {summary.transfer_share_of_ttft:.1%} of the time to first token"
    return table


def statistics_table(title: str, first: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def milliseconds_of(distribution: Distribution, columns: Sequence[str]) -> list[str]:
    """At most six characters up to a quarter of an hour, so that the tables fit 80 columns."""
    values = [getattr(distribution, column) * 1000 for column in columns]
    return [f"{value:.1f}" if value < 9999.95 else f"{value:.0f}" for value in values]
