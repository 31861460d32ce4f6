"""The PromQL queries of deploy/observability: those of dashboard panels and of alert rules."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "observability"
DASHBOARDS = sorted((FOLDER / "grafana" / "dashboards").glob("*.json"))


class Query(NamedTuple):
    where: str
    promql: str


def panel_queries(rate_interval: str = "1m") -> list[Query]:
    """The queries of all panels, with Grafana's variables replaced."""
    found = []
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", ()):
                promql = target["expr"].replace("$__rate_interval", rate_interval).replace("$instance", ".*")
                found.append(Query(f"{path.name}: {panel['title']}", promql))
    return found


# Any: YAML of a foreign schema
def rules() -> list[dict[str, Any]]:
    content = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))
    return [rule for group in content["groups"] for rule in group["rules"]]


def rule_queries() -> list[Query]:
    return [Query(f"alerts.yml: {rule['alert']}", rule["expr"]) for rule in rules()]
