"""A pytest plugin: `--tier` selects test files, and their order.

`check`  files that start no server
`test`   FIXED, then the test files that reach a file changed since the merge base with main, nearest first (on main:
         since the commit before; without a history: FIXED only)
`rest`   the files that the last run of `test` left out: because they are not selected, or because its time was over

After `test`, the files that were left out are printed, and listed in LEFT_OUT for `rest`.
"""

import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.import_graph import ROOT, reached_from

CHECK = (
    *("common", "configs", "memory", "models/config", "models/sampling", "mutations"),
    *("server/api", "server/observability"),
    *("transfer/plan", "transfer/protocol", "test_docs.py", "test_layers.py"),
    *("scheduler/decode", "scheduler/messages", "scheduler/prefill", "scheduler/simulation", "scheduler/test_rates.py"),
)
"""Folders and files of tests that start no server."""
PAIRS = tuple(
    f"cluster/test_{name}.py"
    for name in (
        *("hisparse_pair", "failures", "grammars", "store_servers", "kv_paths", "requests", "local_prefill_servers"),
        *("dp_pair", "staging_pair", "formats", "window_pair", "parity", "smollm2_pair", "prefix_dispatch"),
        *("changing_roles", "traced_pair"),
    )
)
"""Pairs of servers: each feature at least once. The longest ones come first."""
FIXED = (*CHECK, *PAIRS, "kernels")
"""What every run of the tier `test` starts with, in this order."""
LEFT_OUT = ROOT / "build" / "left_out.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=("check", "test", "rest"), help="select test files: see tests/tiers.py")


def pytest_configure(config: pytest.Config) -> None:
    tier = config.getoption("--tier")
    if tier == "check":
        config.pluginmanager.register(Tier(files_in(CHECK)))
    elif tier == "test":
        changed = reaching(changed_files(ROOT), ROOT)
        config.pluginmanager.register(MainTier(list(dict.fromkeys([*files_in(FIXED), *changed]))))
    elif tier == "rest":
        if not LEFT_OUT.exists():
            raise pytest.UsageError("the tier `test` has to run first")
        names = LEFT_OUT.read_text(encoding="utf-8").split()
        config.pluginmanager.register(Tier([ROOT / name for name in names]))


class Tier:
    """Collects these test files only, and runs them in this order."""

    def __init__(self, files: list[Path]) -> None:
        self._place = {file: number for number, file in enumerate(files)}

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        return True if is_test(collection_path) and collection_path not in self._place else None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self._place[item.path])

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:  # the tier may be empty
            session.exitstatus = pytest.ExitCode.OK


class MainTier(Tier):
    """Also says which test files did not run."""

    def __init__(self, files: list[Path]) -> None:
        super().__init__(files)
        self._started: set[str] = set()
        LEFT_OUT.unlink(missing_ok=True)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._started.add(nodeid.partition("::")[0])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        names = [file.relative_to(ROOT).as_posix() for file in files_in([""])]
        left_out = [name for name in names if name not in self._started]
        LEFT_OUT.parent.mkdir(exist_ok=True)
        LEFT_OUT.write_text("".join(f"{name}\n" for name in left_out), encoding="utf-8")
        by_folder = defaultdict(list)
        for name in left_out:
            folder, _, file = name.rpartition("/")
            by_folder[folder].append(file.removeprefix("test_").removesuffix(".py"))
        terminalreporter.section(f"{len(self._started)} test files ran, {len(left_out)} left out: make test-rest")
        for folder, files in by_folder.items():
            terminalreporter.write_line(f"{folder}: {' '.join(files)}")


def is_test(path: Path) -> bool:
    return path.name.startswith("test_") and path.suffix == ".py"


def files_in(places: Iterable[str]) -> list[Path]:
    """All test files in these files and folders of tests/."""
    paths = [ROOT / "tests" / place for place in places]
    return [file for path in paths for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])]


def reaching(changed: list[Path], root: Path) -> list[Path]:
    """Test files that reach one of these files: at first those in the folders of tests/ that mirror theirs, then by the
    number of imports between them, those with servers last.
    """
    distance = reached_from(changed, root)
    mirrored = {root / "tests" / path.parent.relative_to(root) for path in changed if path.parent != root}
    found = [path for path in distance if is_test(path)]
    return sorted(found, key=lambda path: (path.parent not in mirrored, distance[path], "cluster" in path.parts, path))


def changed_files(root: Path) -> list[Path]:
    """Files that differ from the merge base with main, or on main from the commit before; without that, none."""
    head = _git(root, "rev-parse", "HEAD")
    base = _git(root, "merge-base", "HEAD", "main") or _git(root, "merge-base", "HEAD", "origin/main")
    if not head or base in (None, head):
        base = _git(root, "rev-parse", "HEAD~1")
    if base is None:
        return []
    committed = _git(root, "diff", "--name-only", base) or ""
    new = _git(root, "ls-files", "--others", "--exclude-standard") or ""
    return [root / name for name in dict.fromkeys([*committed.splitlines(), *new.splitlines()])]


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints. None if it fails, or is not there."""
    try:
        done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
