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
    """Names of the series of both roles, as in PromQL, and names of histograms without a suffix."""
    all_families = [family for role in ROLES for family in exported(role)]
    histograms = {family.name for family in all_families if family.type == "histogram"}
    return histograms | {sample.name for family in all_families for sample in family.samples}


def exported_series() -> dict[str, set[str]]:
    """The labels of every series of both roles, by its name."""
    found: dict[str, set[str]] = {}
    for sample in (sample for role in ROLES for family in exported(role) for sample in family.samples):
        found.setdefault(sample.name, set()).update(sample.labels)
    return found
