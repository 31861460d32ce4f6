"""Write the Grafana dashboards of this folder; with --check, only say whether they are current.

A panel is a title, a unit and its queries; everything else of a dashboard follows from these.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "grafana" / "dashboards"
COLUMNS, HEIGHT = 3, 8
ON = '{instance=~"$instance"}'
"""Selects the servers that the user has chosen."""


SERVERS_BY_MODEL = "sum by (role, model_name) (pdserve_role * on (instance) group_left (model_name) pdserve_model_info)"


class Panel(NamedTuple):
    """A graph. `queries` maps legends, with labels in braces, to PromQL."""

    title: str
    unit: str
    queries: Mapping[str, str]
    help: str = ""


class Row(NamedTuple):
    """A headline and the panels below it."""

    title: str
    panels: Sequence[Panel]


def quantiles(metric: str, by: str = "") -> dict[str, str]:
    """Median, p95 and p99 of a histogram; by a label, only p95."""
    rates = f"sum by (le{', ' + by if by else ''}) (rate({metric}_bucket{ON}[$__rate_interval]))"
    if by:
        return {"{{" + by + "}}": f"histogram_quantile(0.95, {rates})"}
    return {f"p{q * 100:g}": f"histogram_quantile({q}, {rates})" for q in (0.5, 0.95, 0.99)}


def rate(metric: str, by: str = "instance", where: str = "") -> str:
    selector = f'{{instance=~"$instance", {where}}}' if where else ON
    return f"sum by ({by}) (rate({metric}{selector}[$__rate_interval]))"


def legend(*labels: str) -> str:
    return " ".join("{{" + label + "}}" for label in labels)


REUSED = rate("pdserve_prefix_tokens_reused_total")
PROMPTS = rate("pdserve_prompt_tokens_total")
OF_ROLE = '(pdserve_role{role="%s"} == 1)'


REQUESTS = (
    Row(
        "Latency",
        [
            Panel("Time to first token", "s", quantiles("pdserve_time_to_first_token_seconds")),
            Panel("Inter-token latency", "s", quantiles("pdserve_inter_token_latency_seconds")),
            Panel("End-to-end latency", "s", quantiles("pdserve_e2e_request_latency_seconds")),
            Panel(
                "Stages, mean",
                "s",
                {
                    legend("stage"): rate("pdserve_request_stage_seconds_sum", "stage")
                    + " / "
                    + rate("pdserve_request_stage_seconds_count", "stage")
                },
                "docs/operations.md (Sizes) names the remedy for each stage.",
            ),
            Panel("Stages, p95", "s", quantiles("pdserve_request_stage_seconds", "stage")),
            Panel("Time in queues", "s", quantiles("pdserve_request_queue_time_seconds")),
        ],
    ),
    Row(
        "Throughput",
        [
            Panel("Output tokens per second", "short", {legend("instance"): rate("pdserve_generation_tokens_total")}),
            Panel("Prompt tokens per second", "short", {legend("instance"): rate("pdserve_prompt_tokens_total")}),
            Panel("Ended requests per second", "reqps", {legend("outcome"): rate("pdserve_requests_total", "outcome")}),
            Panel(
                "Refused requests per second",
                "reqps",
                {legend("code"): rate("pdserve_requests_refused_total", "code")},
                "HTTP requests that did not reach the engine.",
            ),
            Panel("Prompt tokens of a request", "short", quantiles("pdserve_request_prompt_tokens")),
            Panel("Output tokens of a request", "short", quantiles("pdserve_request_generation_tokens")),
        ],
    ),
    Row(
        "Load",
        [
            Panel("Requests by state", "short", {legend("state"): f"sum by (state) (pdserve_requests_in_state{ON})"}),
            Panel("Waiting requests", "short", {legend("instance"): f"pdserve_num_requests_waiting{ON}"}),
            Panel("KV memory in use", "percentunit", {legend("instance"): f"pdserve_kv_cache_usage_ratio{ON}"}),
        ],
    ),
)

SERVERS = (
    Row(
        "Pairs",
        [
            Panel(
                "Servers",
                "short",
                {legend("role", "model_name"): SERVERS_BY_MODEL},
            ),
            Panel("Peers paired", "short", {legend("instance", "endpoint"): f"pdserve_peer_paired{ON}"}),
            Panel("Round trip to peers", "s", {legend("instance", "endpoint"): f"pdserve_peer_round_trip_seconds{ON}"}),
            Panel(
                "Transfers per second",
                "ops",
                {
                    legend("instance"): rate("pdserve_transfers_total"),
                    "failed " + legend("instance"): rate("pdserve_transfers_failed_total"),
                },
            ),
            Panel(
                "KV transferred",
                "Bps",
                {legend("instance", "path"): rate("pdserve_path_bytes_total", "instance, path")},
            ),
            Panel(
                "Prompts by place and reason",
                "ops",
                {legend("place", "reason"): rate("pdserve_prefill_placements_total", "place, reason")},
            ),
        ],
    ),
    Row(
        "Prefill",
        [
            Panel("Prompt tokens that wait", "short", {legend("instance"): f"pdserve_waiting_tokens{ON}"}),
            Panel(
                "Prompt tokens found in the prefix cache",
                "percentunit",
                {
                    "decode " + legend("instance"): f"{REUSED} / {PROMPTS} and on (instance) {OF_ROLE % 'decode'}",
                    "prefill " + legend("instance"): (
                        f"{REUSED} / ({REUSED} + {PROMPTS}) and on (instance) {OF_ROLE % 'prefill'}"
                    ),
                },
                "Of all tokens of prompts. A prefill server counts only those that it computes as prompt tokens.",
            ),
            Panel("Prefill steps per second", "ops", {legend("instance"): rate("pdserve_prefill_steps_total")}),
        ],
    ),
    Row(
        "Decode",
        [
            Panel("Running requests", "short", {legend("instance"): f"pdserve_running_requests{ON}"}),
            Panel("Decode steps per second", "ops", {legend("instance"): rate("pdserve_decode_steps_total")}),
            Panel("Retractions per second", "ops", {legend("instance"): rate("pdserve_retractions_total")}),
            Panel("Cached pages", "short", {legend("instance"): f"pdserve_cached_pages{ON}"}),
            Panel("Pages in quarantine", "short", {legend("instance"): f"pdserve_quarantined_pages{ON}"}),
            Panel("Last step", "s", {legend("instance"): f"pdserve_last_step_seconds{ON}"}),
        ],
    ),
    Row(
        "Processes",
        [
            Panel(
                "Busy share of ranks",
                "percentunit",
                {legend("instance", "rank"): rate("pdserve_rank_busy_seconds_total", "instance, rank")},
            ),
            Panel(
                "CPU",
                "percentunit",
                {
                    "frontend " + legend("instance"): rate("process_cpu_seconds_total"),
                    "leader " + legend("instance"): rate("pdserve_leader_process_cpu_seconds_total"),
                },
            ),
            Panel(
                "Resident memory",
                "bytes",
                {
                    "frontend " + legend("instance"): f"process_resident_memory_bytes{ON}",
                    "leader " + legend("instance"): f"pdserve_leader_process_resident_memory_bytes{ON}",
                },
            ),
            Panel("Age of the engine loop", "s", {legend("instance"): f"pdserve_loop_age_seconds{ON}"}),
            Panel(
                "Lag of event loops",
                "s",
                {
                    "HTTP " + legend("instance"): f"pdserve_frontend_lag_seconds{ON}",
                    "engine " + legend("instance"): f"pdserve_loop_lag_seconds{ON}",
                },
            ),
            Panel(
                "Errors per second",
                "ops",
                {
                    name + " " + legend("instance"): rate(f"pdserve_{name}_total")
                    for name in (
                        *("integrity_errors", "steps_failed", "event_errors", "effect_errors"),
                        "control_authentication_failures",
                    )
                },
            ),
            Panel(
                "Lost peers and new attempts per second",
                "ops",
                {
                    "lost " + legend("instance"): rate("pdserve_peers_lost_total"),
                    "attempts " + legend("instance"): rate("pdserve_redispatches_total"),
                },
            ),
        ],
    ),
    Row(
        "HiSparse",
        [
            Panel(
                "Hit rate",
                "percentunit",
                {
                    legend("instance"): f"{rate('pdserve_hot_hits_total')} / "
                    f"({rate('pdserve_hot_hits_total')} + {rate('pdserve_hot_misses_total')})"
                },
            ),
            Panel("Swapped in", "Bps", {legend("instance"): rate("pdserve_hot_swapped_in_bytes_total")}),
            Panel(
                "Hot pool in use",
                "percentunit",
                {legend("instance"): f"1 - pdserve_hot_pages_available{ON} / pdserve_hot_pages{ON}"},
            ),
        ],
    ),
)


def dashboard(title: str, uid: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Grafana's model of a dashboard."""
    return {
        "uid": uid,
        "title": title,
        "tags": ["pdserve"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_data_source(), _instances()]},
        "panels": list(_panels(rows)),
    }


def _data_source() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _instances() -> dict[str, Any]:
    query = "label_values(pdserve_role, instance)"
    return {
        "name": "instance",
        "label": "Server",
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": "instances"},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _panels(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    width, y, number = 24 // COLUMNS, 0, 1
    for row in rows:
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
            "panels": [],
        }
        y, number = y + 1, number + 1
        for index, panel in enumerate(row.panels):
            place = {"x": index % COLUMNS * width, "y": y + index // COLUMNS * HEIGHT, "w": width, "h": HEIGHT}
            yield _panel(panel, number, place)
            number += 1
        y += -(-len(row.panels) // COLUMNS) * HEIGHT


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": query, "legendFormat": shown}
        for index, (shown, query) in enumerate(panel.queries.items())
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def main() -> int:
    files = {
        "requests.json": dashboard("pdserve: requests", "pdserve-requests", REQUESTS),
        "servers.json": dashboard("pdserve: servers", "pdserve-servers", SERVERS),
    }
    for name, content in files.items():
        path, text = FOLDER / name, json.dumps(content, indent=1) + "\n"
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{name} is not current; run: make format", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
