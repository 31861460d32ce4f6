"""Workers of pytest-xdist that collect only the files that they run.

With `--dist=loadfile`, every worker imports all test files and collects all tests, so that all have the same list; this
takes each of them 20 s of CPU time. Here a worker's list has one item per file. To run it, the worker imports the file,
collects its tests and runs them.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class WholeFile(pytest.Item):
    """All tests of a file, which is not imported yet."""

    def runtest(self) -> None:
        raise AssertionError("run_whole_file() runs the tests of the file instead")

    def tests(self) -> list[pytest.Item]:
        """Import the file and collect its tests. Pytest reports a file that cannot be imported."""
        parent = self.parent
        assert parent is not None
        module = pytest.Module.from_parent(parent.parent, path=self.path)
        with without_gc():
            tests = list(self.session.genitems(module))
        self.config.hook.pytest_collection_modifyitems(session=self.session, config=self.config, items=tests)
        return tests


class UnreadFile(pytest.File):
    """In place of the module of a file."""

    def collect(self) -> Iterator[WholeFile]:
        yield WholeFile.from_parent(self, name="all", path=self.path)


@contextmanager
def without_gc() -> Iterator[None]:
    """Imported modules stay: a search for garbage among them finds none."""
    gc.collect()  # of earlier tests: freeze() would keep it
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def collects_whole_files(config: pytest.Config) -> bool:
    """Whether this process is a worker of pytest-xdist that runs whole files."""
    return hasattr(config, "workerinput") and config.getoption("dist") == "loadfile"


def unread_file(path: Path, parent: pytest.Collector) -> UnreadFile:
    return UnreadFile.from_parent(parent, path=path)


def run_whole_file(file: WholeFile, next_file: pytest.Item | None) -> None:
    """Run the tests of a file, each at the place of the file in the list of the worker: pytest-xdist compares them."""
    session = file.session
    place = session.items.index(file)
    tests = file.tests()
    for test, following in zip(tests, [*tests[1:], next_file], strict=True):
        session.items[place] = test
        file.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
        if session.shouldfail or session.shouldstop:
            break
    session.items[place] = file
