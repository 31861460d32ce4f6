"""Measured values of `make test-rdma`: tests print them in the machine, and the host keeps the largest of each."""

import json
from typing import Final, NamedTuple

import msgspec

from benchmarks.results import RESULTS, figure_of_this_run, read_results, record

_MARK: Final = "figure of this run: "


class Measured(NamedTuple):
    """A value, and the largest that it may be."""

    figure: str
    value: float
    target: float | None
    unit: str = "s"

    def line(self) -> str:
        return _MARK + json.dumps(self)


def report(figure: str, value: float, target: float) -> None:
    """Called by a test: seconds, and how many they may be."""
    print(Measured(figure, value, target).line())


def largest(output: str) -> list[Measured]:
    """The figures in the output of tests, each with its largest value."""
    found: dict[str, Measured] = {}
    for line in output.splitlines():
        if line.startswith(_MARK):
            measured = Measured(*json.loads(line.removeprefix(_MARK)))
            found[measured.figure] = max(measured, found.get(measured.figure, measured), key=lambda one: one.value)
    return list(found.values())


def keep(figures: list[Measured], command: str) -> None:
    """Put those that have a row into benchmarks/results."""
    path = RESULTS / "scheduling.json"
    targets = {row.figure: row.target for row in read_results(path).rows}
    named = {f"SoftRoCE: {one.figure}": one for one in figures}
    rows = [
        figure_of_this_run(figure, one.value, one.unit, target=targets[figure])
        for figure, one in named.items()
        if figure in targets
    ]
    record(path, "", [msgspec.structs.replace(row, command=command) for row in rows])
