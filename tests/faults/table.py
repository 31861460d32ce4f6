"""The whole table: `python -m tests.faults.table run` runs its cells, `write` puts them into docs/reliability.md.

Results are kept in a file, one line of JSON per cell, so that a run can be continued: cells that have passed are not
run again. `make faults` runs all cells and prints the table.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.cluster.servers import REPOSITORY
from tests.faults.catalog import CONFIGS, FAULTS, STATES, Cell, Config, Fault, State, cells, missing_because
from tests.faults.namespaces import why_no_iptables, why_no_netem, why_unavailable
from tests.faults.rig import Rig

DOCUMENT = REPOSITORY / "docs" / "reliability.md"
NOT_RUN = "not run"
BEGIN, END = "<!-- table of faults: begin -->\n", "<!-- table of faults: end -->\n"

Results = Mapping[str, Mapping[str, Any]]


def read_results(file: Path) -> dict[str, dict[str, Any]]:
    """The latest result of each cell, by its id."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {result["cell"]: result for result in map(json.loads, lines)}


def run(configs: list[Config], words: list[str], file: Path, *, unwritten: bool = False) -> int:
    """Run the cells whose ids have all `words`, or only those of them that the document says were not run; returns how
    many failed.
    """
    failures = 0
    results = read_results(file)
    before = written(DOCUMENT.read_text()) if unwritten else {}
    for config in configs:
        wanted = [
            cell
            for cell in cells(config)
            if "problem" in results.get(cell.id, {"problem": ""})
            and before.get((config.name, cell.fault.label, cell.state.label), NOT_RUN) == NOT_RUN
            and all(word in cell.id for word in words)
        ]
        if not wanted:
            continue
        with tempfile.TemporaryDirectory(prefix="faults-") as directory, Rig(config, Path(directory)) as rig:
            for cell in wanted:
                result = run_cell(rig, cell)
                failures += "problem" in result
                with file.open("a") as lines:
                    lines.write(json.dumps({"cell": cell.id, **result}) + "\n")
                print(f"{cell.id}: {result.get('problem') or shown(result)}", flush=True)
    return failures


def run_cell(rig: Rig, cell: Cell) -> dict[str, Any]:
    started = time.monotonic()
    try:
        result = dataclasses.asdict(rig.run(cell))
    except Exception as error:  # also errors of the harness itself: the next cell still runs
        text = f"{type(error).__name__}: {error}"
        result = {
            "problem": text if len(text) < 3000 else f"{text[:500]} ... {text[-2500:]}"
        }  # a log ends with its cause
    return {**result, "seconds": round(time.monotonic() - started, 1)}


def shown(result: Mapping[str, Any]) -> str:
    """A cell of the table."""
    if "problem" in result:
        return "**red**"
    answered = "" if result["answered_s"] is None else f" {result['answered_s']:.1f}"
    return f"{result['outcome']}{answered}; {result['freed_s']:.1f}"


def reasons() -> list[str]:
    """Why cells do not exist; their numbers in the table begin with 1."""
    found = {
        reason: None
        for config in CONFIGS
        for fault in FAULTS
        for state in STATES
        if (reason := missing_because(config, state, fault)) is not None
    }
    return list(found)


def columns(config: Config) -> list[State]:
    """The states of a configuration: those that exist with some fault."""
    return [state for state in STATES if any(missing_because(config, state, fault) is None for fault in FAULTS)]


def rows(config: Config) -> list[Fault]:
    return [fault for fault in FAULTS if any(missing_because(config, state, fault) is None for state in STATES)]


def written(text: str) -> dict[tuple[str, str, str], str]:
    """The cells of the tables in a document, by configuration, fault and state."""
    found: dict[tuple[str, str, str], str] = {}
    config, states = "", list[str]()
    _, _, rest = text.partition(BEGIN)
    for line in rest.partition(END)[0].splitlines():
        first, *others = (cell.strip() for cell in line.strip("|").split("|"))
        if first in {config.name for config in CONFIGS}:
            config, states = first, others
        elif others:
            found |= {(config, first, state): cell for state, cell in zip(states, others, strict=True)}
    return found


def table(config: Config, results: Results, before: Mapping[tuple[str, str, str], str]) -> Iterator[str]:
    """The lines of the table of one configuration. Cells without a result stay as they were before."""
    numbers = {reason: number for number, reason in enumerate(reasons(), 1)}
    states = columns(config)
    yield f"| {config.name} | {' | '.join(state.label for state in states)} |\n"
    yield f"|{'---|' * (1 + len(states))}\n"
    for fault in rows(config):
        shown_cells = []
        for state in states:
            missing = missing_because(config, state, fault)
            result = results.get(Cell(config, state, fault).id)
            if missing is not None:
                shown_cells.append(f"n/a {numbers[missing]}")
            elif result is not None:
                shown_cells.append(shown(result))
            else:
                shown_cells.append(before.get((config.name, fault.label, state.label), NOT_RUN))
        yield f"| {fault.label} | {' | '.join(shown_cells)} |\n"


def worst(results: Results) -> Iterator[str]:
    """The longest times of all cells."""
    held = [result for result in results.values() if "problem" not in result]
    for name, what in (
        ("noticed_s", "decode notices that prefill is lost"),
        ("answered_s", "the client has its answer"),
        ("freed_s", "all pages are free"),
    ):
        times = sorted(result[name] for result in held if result[name] is not None)
        if times:
            yield f"- {what}: median {times[len(times) // 2]:.1f} s, longest {times[-1]:.1f} s ({len(times)} cells)\n"


def document(text: str, results: Results) -> str:
    """The document with the tables of these results. What they do not have stays as it is."""
    before, _, rest = text.partition(BEGIN)
    tables, _, after = rest.partition(END)
    complete = all(cell.id in results for config in CONFIGS for cell in cells(config))
    lines = [*worst(results), "\n"] if complete else [tables.partition("|")[0]]
    for config in CONFIGS:
        lines += [*table(config, results, written(text)), "\n"]
    lines += ["n/a:\n\n", *(f"{number}. {reason}\n" for number, reason in enumerate(reasons(), 1))]
    return before + BEGIN + "".join(lines) + END + after


def network_tools() -> str:
    """Which of the network tests in `test_namespaces.py` run on this machine."""
    tools = {"namespaces": why_unavailable(), "netem": why_no_netem(), "iptables": why_no_iptables()}
    found = [f"{name}: {'yes' if reason is None else f'no ({reason})'}" for name, reason in tools.items()]
    return ", ".join(found) + " (tests/faults/test_namespaces.py)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["run", "print", "write"])
    parser.add_argument("words", nargs="*", help="parts of the ids of the cells to run")
    parser.add_argument("--config", action="append", choices=[config.name for config in CONFIGS])
    parser.add_argument("--unwritten", action="store_true", help="run only cells that the document says were not run")
    parser.add_argument("--results", type=Path, default=REPOSITORY / "build" / "faults.jsonl")
    options = parser.parse_intermixed_args()
    options.results.parent.mkdir(exist_ok=True)
    failures = 0
    if options.command == "run":
        print(f"links are TCP proxies; {network_tools()}", flush=True)
        configs = [config for config in CONFIGS if options.config is None or config.name in options.config]
        failures = run(configs, options.words, options.results, unwritten=options.unwritten)
    results = read_results(options.results)
    if options.command == "write":
        DOCUMENT.write_text(document(DOCUMENT.read_text(), results))
    elif not options.words:
        for config in CONFIGS:
            print(*table(config, results, {}), sep="")
        print(*worst(results), sep="")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
