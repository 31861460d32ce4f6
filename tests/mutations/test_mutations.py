"""The table of mutations fits the code, and `make mutations` tells which tests notice one. The runner works in a
repository of a few small files, with copies of the tools.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.import_graph import ROOT
from tests.mutations.outcome import Outcome, read_outcomes, record, report
from tests.mutations.table import Mutation, MutationError, read_table, sources_of

TABLE = read_table()
HALF = Mutation("half", "", "memory/sizes.py", "Sizes.half", "return size // 2", "return size // 3")
SOURCE = """
class Sizes:
    def half(self, size):
        return size // 2

    def twice(self, size):
        return 2 * size
"""
TOOLS = (
    *("forked_workers.py", "import_graph.py", "processes.py", "source_copy.py", "tiers.py"),
    *("mutations/__main__.py", "mutations/outcome.py", "mutations/table.py"),
)
ENTRIES = """
[half]
breaks = "half of a size"
file = "memory/sizes.py"
function = "Sizes.half"
old = "return size // 2"
new = "return size // 3"

[twice]
breaks = "twice a size"
file = "memory/sizes.py"
function = "Sizes.twice"
old = "return 2 * size"
new = "return 3 * size"

[gone]
breaks = "code that has changed since"
file = "memory/sizes.py"
function = "Sizes.half"
old = "return size >> 1"
new = "return size >> 2"
"""
TESTS = """
from pdserve.memory.sizes import Sizes

def test_that_always_fails():
    assert False

def test_half():
    assert Sizes().half(6) == 3
"""


def test_the_table_has_40_mutations_of_every_layer() -> None:
    assert len(TABLE) == 40
    folders = {mutation.file.split("/")[0] for mutation in TABLE}
    assert folders == {"server", "scheduler", "models", "memory", "transfer", "kernels", "configs"}


@pytest.mark.parametrize("mutation", TABLE, ids=[mutation.name for mutation in TABLE])
def test_the_mutation_fits_the_code(mutation: Mutation) -> None:
    before, after = sources_of(mutation)
    assert before != after
    assert mutation.breaks


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"old": "return"}, r"half: memory/sizes.py has 'return' 2 times, and not once"),
        ({"old": "return size >> 1"}, r"half: memory/sizes.py has 'return size >> 1' 0 times, and not once"),
        ({"function": "Sizes.twice"}, r"half: memory/sizes.py:4 is not in Sizes.twice, lines 6 to 7"),
        ({"function": "Sizes.third"}, r"half: memory/sizes.py has no Sizes.third"),
        ({"new": "return (size"}, r"half: memory/sizes.py is not Python after it: .*"),
        ({"new": "return (size // 2)"}, r"half: memory/sizes.py means the same after it"),
        ({"file": "memory/other.py"}, r"half: there is no memory/other.py"),
    ],
)
def test_a_mutation_that_does_not_fit_is_refused(tmp_path: Path, changed: dict[str, str], message: str) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "sizes.py").write_text(SOURCE)
    mutation = msgspec.structs.replace(HALF, **changed)
    with pytest.raises(MutationError, match=f"^{message}$"):
        sources_of(mutation, tmp_path)


def test_record_replaces_the_outcome_of_the_same_name(tmp_path: Path) -> None:
    path = tmp_path / "outcome.json"
    record([Outcome("half", "survived"), Outcome("twice", "survived")], path)
    killed = Outcome("half", "killed", by="tests/test_sizes.py::test_half", by_make_test=True, seconds=60)
    record([killed], path)
    found = read_outcomes(path)
    assert found == {"half": killed, "twice": Outcome("twice", "survived")}
    assert report([*found.values()]) == "1 of 2 killed, 1 by make test, in 1 minutes"


def test_recorded_outcomes_are_those_of_the_table() -> None:
    """All are killed, at least 36 by a test file that `make test` runs."""
    outcomes = read_outcomes()
    assert outcomes.keys() == {mutation.name for mutation in TABLE}
    assert {outcome.name for outcome in outcomes.values() if outcome.result != "killed"} == set()
    assert sum(outcome.by_make_test for outcome in outcomes.values()) >= 36


@pytest.mark.slow
def test_each_mutation_is_killed_by_a_test_that_passes_without_it_or_survives(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    (tests / "mutations").mkdir(parents=True)
    (tests / "memory").mkdir()
    (tmp_path / "memory").mkdir()
    (tmp_path / ".dev" / "pdserve").mkdir(parents=True)
    (tmp_path / ".dev" / "pdserve" / "memory").symlink_to("../../memory")
    sizes = tmp_path / "memory" / "sizes.py"
    sizes.write_text(SOURCE)
    for name in TOOLS:
        shutil.copy(ROOT / "tests" / name, tests / name)
    (tests / "mutations" / "table.toml").write_text(ENTRIES)
    (tests / "memory" / "test_sizes.py").write_text(TESTS)
    (tmp_path / ".gitignore").write_text("__pycache__/\nbuild/\n")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)

    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "tests.mutations", "--workers=1"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    lines = [" ".join(line.split()[:2]) for line in done.stdout.splitlines()]
    assert lines == [
        *("half: tests/memory/test_sizes.py::test_that_always_fails", "half killed"),
        *("twice: tests/memory/test_sizes.py::test_that_always_fails", "twice survived"),
        *("gone: memory/sizes.py", "gone does"),
        "1 of",
    ], done.stdout + done.stderr
    assert "make test " in done.stdout.splitlines()[1]
    assert done.stdout.splitlines()[1].endswith("tests/memory/test_sizes.py::test_half")
    assert done.stdout.splitlines()[-1].startswith("1 of 3 killed, 1 by make test, in")
    assert done.returncode == 1
    assert sizes.read_text() == SOURCE
