"""`pdserve top`: a live view of running servers, from their /server_info."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...scheduler.messages.frontend import Status
from ..observability.activity import Activity, activity_between, byte_rate
from .options import NEEDS_KEY, WRONG_KEY, TopOptions
from .tls import describe, open_client

TIMEOUT_S = 2.0
BAR_WIDTH = 24
STAGES_WIDTH = 24
"""Width of the bars of recent requests; their table then fits 80 columns."""
RECENT = 10
STAGE_COLOURS = {
    "queue": "bright_black",
    "prefill_queue": "bright_black",
    "prefill": "blue",
    "transfer": "magenta",
    "control": "magenta",
    "admit": "bright_black",
    "retracted": "red",
    "decode": "green",
}
STATE_COLOURS = {"ready": "green", "paired": "green", "starting": "yellow", "connecting": "yellow"}


@dataclass(frozen=True)
class Sample:
    """One /server_info, or why there is none."""

    url: str
    info: Mapping[str, Any]  # Any: JSON from the server
    problem: str | None = None

    @property
    def status(self) -> Status:
        """The fields of the leader's latest Status that /server_info has."""
        gauges, counters, states = (self.info[name] for name in ("gauges", "counters", "states"))
        return Status(gauges, counters, (), states, taken_at=self.info["taken_at"] or 0.0, loop_age_s=0.0)

    @property
    def role(self) -> str:
        return str(self.info["disaggregation_mode"])


def run_top(options: TopOptions) -> int:
    headers = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
    console = Console(highlight=False)
    with open_client(options.urls, options.tls, headers, httpx.Timeout(TIMEOUT_S)) as client:
        earlier = [take_sample(client, url) for url in options.urls]
        time.sleep(options.interval_s)
        later = [take_sample(client, url) for url in options.urls]
        if options.once:
            console.print(frame(earlier, later))
            return 0 if any(sample.problem is None for sample in later) else 1
        with Live(frame(earlier, later), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(options.interval_s)
                earlier, later = later, [take_sample(client, url) for url in options.urls]
                live.update(frame(earlier, later), refresh=True)


def take_sample(client: httpx.Client, url: str) -> Sample:
    try:
        response = client.get(f"{url}/server_info")
        if response.status_code == httpx.codes.UNAUTHORIZED:
            return Sample(url, {}, WRONG_KEY if "Authorization" in client.headers else NEEDS_KEY)
        response.raise_for_status()
        info = response.json()
        return Sample(url, info) if "recent" in info else Sample(url, {}, "not a pdserve server of this release")
    except httpx.HTTPError as error:
        return Sample(url, {}, describe(error))
    except ValueError as error:
        return Sample(url, {}, str(error))


def frame(earlier: Sequence[Sample], later: Sequence[Sample]) -> Group:
    """All servers, then the last requests of the decode servers."""
    parts: list[RenderableType] = []
    for before, now in zip(earlier, later, strict=True):
        parts += [_heading(now), *(_server(before, now) if now.problem is None else ()), ""]
    recent = [request for sample in later if sample.problem is None for request in sample.info["recent"]]
    if recent:
        newest = sorted(recent, key=lambda request: request["ended_at"], reverse=True)[:RECENT]
        parts.append(_recent_table(newest))
    return Group(*parts)


def _heading(sample: Sample) -> Text:
    if sample.problem is not None:
        return Text.assemble((sample.url, "bold"), ("  no data: ", "red"), (sample.problem, "dim"))
    info = sample.info
    state = str(info["status"])
    ranks = "".join(f"  {name} {info[f'{name}_size']}" for name in ("tp", "pp", "dp") if info[f"{name}_size"] > 1)
    return Text.assemble(
        (f"{sample.role:<8}", "bold"),
        (sample.url, "bold"),
        f"  {info['served_model_name']}{ranks}  ",
        (state, STATE_COLOURS.get(state, "red")),
    )


def _server(earlier: Sample, later: Sample) -> Iterator[RenderableType]:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", width=9)
    table.add_column()
    if earlier.problem is None and earlier.role == later.role and earlier.status.taken_at < later.status.taken_at:
        for name, cells in _activity_rows(activity_between(later.role, earlier.status, later.status), later.role):
            table.add_row(name, cells)
    if "frontend_lag_s" in later.info:  # older servers do not report it
        engine_ms = 1000 * later.info["gauges"].get("loop_lag_seconds", 0.0)
        table.add_row("lag", f"{1000 * later.info['frontend_lag_s']:,.0f} ms HTTP   {engine_ms:,.0f} ms engine loop")
    for name, used, total, unit in _pools(later):
        shown = f"{used:,.0f} of {total:,.0f} {unit}"
        table.add_row(name, Text.assemble(_bar(used / total), f"  {used / total:>4.0%}  ", (shown, "dim")))
    for peer in later.info["peers"]:
        table.add_row("peer", _peer_line(peer))
    yield table


def _activity_rows(now: Activity, role: str) -> Iterator[tuple[str, str]]:
    if role == "decode":
        yield "requests", f"{now.running} running   {now.in_prefill} in prefill   {now.waiting} waiting"
        yield "tokens/s", f"{now.prompt_tokens_per_s:,.1f} in   {now.output_tokens_per_s:,.1f} out"
        yield "KV in", byte_rate(now.transfer_bytes_per_s)
    else:
        waiting = f"{now.waiting} waiting ({now.waiting_tokens:,} tokens to compute)"
        yield "prompts", f"{now.running} computing   {now.sending} sending   {waiting}"
        yield "tokens/s", f"{now.prompt_tokens_per_s:,.1f} computed"
        yield "KV out", byte_rate(now.transfer_bytes_per_s)
    shares = {"prefix": now.prefix_hits, "hot rows": now.hot_hits}
    if known := [f"{name} {share:.1%}" for name, share in shares.items() if share is not None]:
        yield "hits", "   ".join(known)


def _pools(sample: Sample) -> Iterator[tuple[str, float, float, str]]:
    gauges = sample.info["gauges"]
    pages, hot, ring = (gauges.get(name, 0) for name in ("kv_pages", "hot_pages", "staging_ring_bytes"))
    if pages:
        yield "KV pool", gauges["kv_pages_held"], pages, "pages"
        yield "cached", gauges["cached_pages"], pages, "pages"
    if hot:
        yield "hot pool", hot - gauges["hot_pages_available"], hot, "pages"
    if ring:
        yield "ring", gauges["staging_ring_bytes_granted"] / (1 << 20), ring / (1 << 20), "MiB"


def _peer_line(peer: Mapping[str, Any]) -> Text:
    state = str(peer["state"])
    at = f" at {peer['address']}" if peer.get("address") else ""  # older servers do not report it
    round_trip = "" if peer["round_trip_ms"] is None else f"  {peer['round_trip_ms']:.1f} ms"
    transports = ", ".join(sorted(set(peer["transports"].values())))
    detail = "" if state == "paired" else peer["detail"] or ""
    return Text.assemble(
        f"{peer['endpoint']}{at}  ",
        (state, STATE_COLOURS.get(state, "red")),
        f"{round_trip}  {transports}",
        (detail, "dim"),
    )


def _recent_table(requests: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, caption=_legend(), caption_justify="left")
    for name in ("request", "ended"):
        table.add_column(name, no_wrap=True)
    for name in ("prompt", "cached", "new", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("stages", no_wrap=True)
    longest = max(sum(request["timeline"].values()) for request in requests) or 1.0
    for request in requests:
        counts = [f"{request[name]:,}" for name in ("prompt_tokens", "cached_tokens", "completion_tokens")]
        outcome = Text(request["outcome"], "" if request["timeline"] else "red")
        bar = _stages(request["timeline"], longest)
        table.add_row(request["rid"][:8], outcome, *counts, f"{request['elapsed_s']:.2f}", bar)
    return table


def _legend() -> Text:
    shown = {"waiting": "queue", "prefill": "prefill", "transfer": "transfer", "decode": "decode"}
    return Text("  ").join(Text(name, STAGE_COLOURS[stage]) for name, stage in shown.items())


def _stages(timeline: Mapping[str, float], longest_s: float) -> Text:
    """The bar of a request, with its stages one after another. The bar of the longest request fills the width."""
    bar = Text()
    for stage, seconds in timeline.items():
        bar.append("█" * round(STAGES_WIDTH * seconds / longest_s), STAGE_COLOURS.get(stage, "cyan"))
    return bar


def _bar(share: float) -> Text:
    full = min(BAR_WIDTH, round(BAR_WIDTH * share))
    return Text.assemble(("█" * full, "blue"), ("░" * (BAR_WIDTH - full), "bright_black"))
