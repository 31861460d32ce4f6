"""`make mutations`: applies each mutation of table.toml to a copy of the sources, and runs the test files that reach
the mutated module until a test fails: at first those that `make test` runs, nearest first, then all others.

    python -m tests.mutations [NAME ...] [--tier test] [--workers N] [--record]

A failure counts if the same test passes without the mutation. `--record` keeps the outcome in outcome.json, and its
figures in benchmarks/results. Ends with 1 if a mutation has survived, or does not fit the code any more.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.util import cache_from_source
from pathlib import Path

from tests import tiers
from tests.import_graph import ROOT
from tests.mutations.outcome import Outcome, record, record_figures, report
from tests.mutations.table import TABLE, Mutation, MutationError, read_table, sources_of
from tests.source_copy import copy_sources

NEAREST = 12
"""`make test` begins with FIXED, and has time for some of the other files that reach a change: at least these."""
STAGES = (3, 12)
"""Files that run at first, and then, before all others: collecting test files takes as long as many tests."""
FILE_S = 60.0
"""A stage that takes this long per file does not end."""
LEAST_S = 600.0
INTERRUPT_S = 45.0
"""Time that interrupted tests have to stop their servers."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)
_OK, _NO_TESTS = 0, 5


class StuckError(Exception):
    """The tests did not end."""


class Runner:
    """Runs tests in a copy of the sources."""

    def __init__(self, copy: Path, workers: int) -> None:
        self._copy = copy
        self._workers = workers

    def kill(self, mutation: Mutation, *, tier_only: bool) -> Outcome:
        """Apply a mutation, look for a test that fails, and take the mutation back."""
        before, after = sources_of(mutation, self._copy)
        path = self._copy / mutation.file
        selected, rest = selection(mutation)
        began_s = time.monotonic()
        unsound: list[str] = []
        stages = [*_stages(selected), *([] if tier_only else _stages(rest))]
        for stage in stages:
            while True:
                _write(path, after)
                try:
                    failed = self._first_failure(stage, unsound)
                except StuckError:
                    return Outcome(mutation.name, "stuck", seconds=round(time.monotonic() - began_s))
                finally:
                    _write(path, before)
                if failed is None:
                    break
                if self._passes(failed):
                    file = failed.partition("::")[0]
                    return Outcome(
                        mutation.name,
                        "killed",
                        by=failed,
                        by_make_test=ROOT / file in selected,
                        seconds=round(time.monotonic() - began_s),
                    )
                print(f"{mutation.name}: {failed} fails without the mutation too", flush=True)
                unsound.append(failed)
        return Outcome(mutation.name, "survived", seconds=round(time.monotonic() - began_s))

    def _first_failure(self, files: Sequence[Path], unsound: Sequence[str]) -> str | None:
        names = [file.relative_to(ROOT).as_posix() for file in files]
        options = [f"--deselect={test}" for test in unsound if "::" in test]
        names = [name for name in names if name not in unsound]
        limit_s = max(LEAST_S, FILE_S * len(names))
        status, output = self._pytest(["-x", f"--workers={self._workers}", *options, *names], limit_s)
        if status in (_OK, _NO_TESTS):
            return None
        found = _FAILED.search(output)
        if found is None:
            raise RuntimeError(f"pytest ended with {status}, and names no test:\n{output[-4000:]}")
        return found[1]

    def _passes(self, test: str) -> bool:
        try:
            return self._pytest([test], LEAST_S)[0] == _OK
        except StuckError:
            return False

    def _pytest(self, arguments: Sequence[str], limit_s: float) -> tuple[int, str]:
        """The exit code and the output. Raises StuckError after `limit_s`."""
        plugins = ("-p", "no:cacheprovider", "-p", "tests.forked_workers")
        environment = {
            **os.environ,
            "PYTHONPATH": f"{self._copy / '.dev'}:{self._copy}",
            "NUMBA_CACHE_DIR": str(self._copy / "build" / "kernels"),
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-q", "--tb=short", *plugins, *arguments],
                cwd=self._copy,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(limit_s)
            except BaseException as reason:  # also Ctrl-C
                _end(process)
                if isinstance(reason, subprocess.TimeoutExpired):
                    raise StuckError from None
                raise
            output.seek(0)
            return status, output.read()


def _write(path: Path, source: str) -> None:
    """Also without its bytecode, which Python would use for another source of the same size and second."""
    path.write_text(source, encoding="utf-8")
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(INTERRUPT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def selection(mutation: Mutation) -> tuple[list[Path], list[Path]]:
    """The test files that reach a mutated file, nearest first: those that `make test` runs, and the others. But for the
    one that notices that the mutation fits no more.
    """
    reaching = [file for file in tiers.reaching([ROOT / mutation.file], ROOT) if file.parent != TABLE.parent]
    fixed = set(tiers.files_in(tiers.FIXED))
    others = [file for file in reaching if file not in fixed]
    near = {*fixed, *others[:NEAREST]}
    return [file for file in reaching if file in near], others[NEAREST:]


def _stages(files: Sequence[Path]) -> Iterator[Sequence[Path]]:
    start = 0
    for size in (*STAGES, len(files)):
        if stage := files[start : start + size]:
            yield stage
        start += size


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description="which tests notice a mutation")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="mutations of tests/mutations/table.toml; default: all"
    )
    parser.add_argument("--tier", choices=("test",), help="only the test files that `make test` runs")
    parser.add_argument("--workers", type=int, default=min(4, 2 * (os.cpu_count() or 1)), help="of pytest")
    parser.add_argument("--record", action="store_true", help="keep the outcome")
    options = parser.parse_args()
    table = {mutation.name: mutation for mutation in read_table()}
    unknown = [name for name in options.names if name not in table]
    if unknown:
        parser.error(f"NAME {', '.join(unknown)} is not in the table; it has {', '.join(table)}")
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="pdserve-mutations-") as folder:
        copy_sources(Path(folder))
        runner = Runner(Path(folder), options.workers)
        for name in options.names or table:
            try:
                outcome = runner.kill(table[name], tier_only=options.tier == "test")
            except MutationError as error:
                print(error, flush=True)
                outcome = Outcome(name, "does not fit")
            outcomes.append(outcome)
            print(outcome.line(), flush=True)
            if options.record:
                record([outcome])
    if options.record:
        record_figures()
    print(report(outcomes))
    return int(any(outcome.result != "killed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
