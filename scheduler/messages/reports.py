"""Reports that every rank makes: of a command, a copy, a verification, a chunk, a load or a write of the KV store."""

import collections
from collections.abc import Hashable, Iterable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Reports:
    """Collects the reports of each thing until all ranks have made theirs."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._open: collections.defaultdict[Hashable, list[object]] = collections.defaultdict(list)

    def add(self, kind: str, thing: Hashable, report: T) -> list[T] | None:
        """Add the report of one rank. Returns those of all ranks after the last."""
        reports: list[T] = self._open[kind, thing]  # type: ignore[assignment]
        reports.append(report)
        if len(reports) < self._ranks:
            return None
        del self._open[kind, thing]
        return reports


class _WithProblem(Protocol):
    @property
    def problem(self) -> str | None: ...


def first_problem(reports: Iterable[_WithProblem]) -> str | None:
    """The first problem that a rank has reported."""
    return next((report.problem for report in reports if report.problem is not None), None)
