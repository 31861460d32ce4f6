"""Write the table in docs/metrics.md from the code; with --check, only say whether it is true."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / ".dev"), str(Path(__file__).parent)]

from generated_section import update_section  # type: ignore[import-not-found]  # noqa: E402
from prometheus_client.metrics_core import Metric  # noqa: E402

from pdserve.scheduler.messages.counters import DECODE_COUNTERS, PREFILL_COUNTERS, STORE_COUNTERS  # noqa: E402
from pdserve.scheduler.messages.frontend import (  # noqa: E402
    DpRankStatus,
    Failed,
    Finished,
    FinishReason,
    ModelInfo,
    PeerStatus,
    Ready,
    Status,
)
from pdserve.server.observability.catalog import COUNTERS, GAUGES  # noqa: E402
from pdserve.server.observability.metrics import Metrics  # noqa: E402

PAGE = ROOT / "docs" / "metrics.md"
ROLES: tuple[Literal["decode", "prefill"], ...] = ("decode", "prefill")
BEGIN = "<!-- metrics: written by docs/metrics_table.py -->"
END = "<!-- end of metrics -->"

OF_PREFILL = {"waiting_requests", "waiting_tokens", "staging_parts"}
OF_BOTH = {"kv_pages", "kv_pages_held", "kv_pages_available", "cached_pages", "running_requests", "last_step_seconds"}
OF_BOTH |= {"loop_lag_seconds"}
OF_PROCESS = ("log_lines_dropped",)
OF_BOTH |= {name for name in GAUGES if name.startswith("kv_store_")}


def families(role: Literal["decode", "prefill"]) -> Iterable[Metric]:
    """All metric families that a server of this role can have, each with a sample."""
    own = (*(DECODE_COUNTERS if role == "decode" else PREFILL_COUNTERS), *STORE_COUNTERS, *OF_PROCESS)
    counters = {name: 1.0 for name in COUNTERS if name in own or name.startswith("control_")}
    gauges = {name: 1.0 for name in GAUGES if name in OF_BOTH or (name in OF_PREFILL) == (role == "prefill")}
    status = Status(
        gauges={**gauges, "rank_0_busy_seconds": 1.0},
        counters=counters,
        peers=(
            PeerStatus("prefill:8998", "paired", "i", round_trip_ms=1.0, address="10.0.0.5")
            if role == "decode"
            else PeerStatus("10.0.0.7", "paired", "i", round_trip_ms=1.0, unusable_transports={"rdma": "down"}),
        ),
        states={"running": 1},
        taken_at=0.0,
        loop_age_s=0.0,
        dp_ranks=(DpRankStatus(0, gauges, {"running": 1}),),
    )
    model = ModelInfo("m", "/m", "LlamaForCausalLM", 1, 1, (0,), "f", "bfloat16", "cuda")
    leader = SimpleNamespace(ready=Ready(model, "i", 16, 1, 16), status=status, loop_age_s=0.0)
    metrics = Metrics()
    metrics.watch_leader(lambda: leader, os.getpid)
    metrics.set_role(role)
    metrics.request_refused("invalid_request")
    metrics.role_switch_ended(role, "done")
    metrics.request_ended(Failed("a", 503, "unavailable", "it failed"), 1.0, first_sample=True)
    metrics.request_ended(Finished("b", FinishReason("stop"), 1, 2, 0, {}), 1.0, first_sample=True)
    return [family for family in metrics.families() if family.samples]


def table() -> str:
    """Markdown rows: name, type, labels, servers, meaning."""
    found = {role: {family.name: family for family in families(role)} for role in ROLES}
    lines = ["| metric | type | labels | servers | meaning |", "|---|---|---|---|---|"]
    for name, family in sorted((found["decode"] | found["prefill"]).items()):
        roles = [role for role in found if name in found[role]]
        full_name = f"{name}_total" if family.type == "counter" else name
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        cells = (
            f"`{full_name}`",
            family.type,
            ", ".join(f"`{label}`" for label in labels),
            "both" if len(roles) == 2 else roles[0],
            family.documentation,
        )
        if name.startswith("pdserve_dp_rank_") and name != "pdserve_dp_rank_requests_in_state":
            continue  # one for each gauge
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(update_section(PAGE, BEGIN, END, table()))
