"""deploy/observability: queries parse and use only metrics and labels that servers export."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import pytest
import yaml

from tests.deploy.queries import DASHBOARDS, FOLDER, Query, panel_queries, rule_queries, rules
from tests.server.exported_metrics import exported_series

OF_PROMETHEUS = {"up": {"job", "instance"}}
QUERIES = [*panel_queries(), *rule_queries()]


def selectors(node: object) -> Iterator[promql_parser.VectorSelector]:
    """All vector selectors of a query."""
    match node:
        case promql_parser.VectorSelector():
            yield node
        case promql_parser.MatrixSelector():
            yield from selectors(node.vector_selector)
        case promql_parser.BinaryExpr():
            yield from selectors(node.lhs)
            yield from selectors(node.rhs)
        case promql_parser.Call():
            for argument in node.args:
                yield from selectors(argument)
        case promql_parser.AggregateExpr() | promql_parser.ParenExpr() | promql_parser.UnaryExpr():
            yield from selectors(node.expr)
        case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
            pass
        case _:
            raise AssertionError(f"unexpected part of a query: {type(node).__name__}")


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)
def test_queries_use_exported_metrics_and_their_labels(query: Query) -> None:
    known = exported_series() | OF_PROMETHEUS
    found = list(selectors(promql_parser.parse(query.promql)))
    assert found
    for selector in found:
        assert selector.name in known, f"{query.where} uses {selector.name}, which is not exported"
        used = {matcher.name for matcher in selector.matchers.matchers}
        assert used <= known[selector.name] | {"instance", "job"}, f"{query.where}: {selector.name} has no such label"


def test_dashboards_are_current() -> None:
    script = FOLDER / "write_dashboards.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_panels_do_not_overlap(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    cells = [
        (x, y)
        for panel in content["panels"]
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert len({panel["id"] for panel in content["panels"]}) == len(content["panels"])


def test_alerts_have_a_severity_and_a_summary() -> None:
    found = rules()
    assert len({rule["alert"] for rule in found}) == len(found) > 10
    for rule in found:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]


def test_unit_tests_of_alerts_name_existing_alerts() -> None:
    content = yaml.safe_load((FOLDER / "alerts_test.yml").read_text(encoding="utf-8"))
    tested = {case["alertname"] for test in content["tests"] for case in test["alert_rule_test"]}
    assert tested <= {rule["alert"] for rule in rules()}
