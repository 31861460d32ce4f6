"""What has become of the mutations: outcome.json, and its figures in benchmarks/results/correctness.json."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

OUTCOMES = Path(__file__).with_name("outcome.json")


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Of one mutation."""

    name: str
    result: Literal["killed", "survived", "stuck", "does not fit"]
    by: str = ""
    """The test that failed with the mutation and passed without."""
    by_make_test: bool = False
    """Whether `make test` runs the file of this test."""
    seconds: int = 0

    def line(self) -> str:
        tier = "make test" if self.by_make_test else "make test-all" if self.by else ""
        return f"{self.name:32} {self.result:9} {self.seconds:5} s  {tier:13} {self.by}"


def read_outcomes(path: Path = OUTCOMES) -> dict[str, Outcome]:
    if not path.exists():
        return {}
    return {outcome.name: outcome for outcome in msgspec.json.decode(path.read_bytes(), type=list[Outcome])}


def record(outcomes: Sequence[Outcome], path: Path = OUTCOMES) -> None:
    """Each replaces the one of the same name."""
    known = read_outcomes(path) | {outcome.name: outcome for outcome in outcomes}
    path.write_bytes(msgspec.json.format(msgspec.json.encode([*known.values()]), indent=1) + b"\n")


def record_figures() -> None:
    """Put the counts of all outcomes into benchmarks/results."""
    from benchmarks.results import RESULTS, figure_of_this_run  # not where only tests are: test_mutations.py
    from benchmarks.results import record as record_rows

    outcomes = read_outcomes().values()
    counts = {
        "mutations of product code that tests notice, of 40": sum(one.result == "killed" for one in outcomes),
        "mutations that make test notices, of 40": sum(one.by_make_test for one in outcomes),
    }
    rows = [figure_of_this_run(name, count, "", better="higher") for name, count in counts.items()]
    command = "make mutations ARGS=--record"
    record_rows(RESULTS / "correctness.json", "", [msgspec.structs.replace(row, command=command) for row in rows])


def report(outcomes: Sequence[Outcome]) -> str:
    killed = [outcome for outcome in outcomes if outcome.result == "killed"]
    by_test = sum(outcome.by_make_test for outcome in killed)
    minutes = sum(outcome.seconds for outcome in outcomes) / 60
    return f"{len(killed)} of {len(outcomes)} killed, {by_test} by make test, in {minutes:.0f} minutes"
