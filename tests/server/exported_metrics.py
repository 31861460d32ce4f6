"""The metrics that servers export, as docs/metrics_table.py lists them."""

from functools import cache
from typing import Literal

from prometheus_client.metrics_core import Metric

from docs.metrics_table import ROLES, families


@cache
def exported(role: Literal["decode", "prefill"]) -> tuple[Metric, ...]:
    """The metric families of a server."""
    return tuple(families(role))


def metric_names() -> set[str]:
    """Names of series of both roles, as PromQL uses them, and of histograms."""
    all_families = [family for role in ROLES for family in exported(role)]
    histograms = {family.name for family in all_families if family.type == "histogram"}
    return histograms | {sample.name for family in all_families for sample in family.samples}
