"""docs/hisparse.md names only tests and metrics that exist, and marks the tests that need a GPU."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.scheduler.decode.memory.holds import Holds
from pdserve.scheduler.decode.memory.hot_buffers import HotBuffers, HotLimits
from pdserve.scheduler.messages.counters import DECODE_COUNTERS
from pdserve.server.observability.catalog import COUNTERS
from tests.scheduler.simulation.simulator import NO_UNITS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "hisparse.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`(test_\w+)`", PAGE))


@functools.cache
def all_tests() -> list[tuple[str, bool]]:
    """All tests of the files that have a test which the page names, and whether each is marked `gpu`, or its file is.
    Other files are not parsed: that takes two seconds.
    """
    return list(_all_tests())


def _all_tests() -> Iterator[tuple[str, bool]]:
    named = re.compile(rf"\bdef ({'|'.join(NAMED)})\(")
    for path in (ROOT / "tests").rglob("test_*.py"):
        source = path.read_text(encoding="utf-8")
        if named.search(source) is None:
            continue
        module = ast.parse(source)
        marked = any(isinstance(node, ast.Assign) and _is_gpu_marker(node.value) for node in module.body)
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield node.name, marked or any(map(_is_gpu_marker, node.decorator_list))


def _is_gpu_marker(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.gpu"


def test_every_named_test_exists() -> None:
    assert len(NAMED) > 30
    assert NAMED - {name for name, _ in all_tests()} == set()


def test_every_known_failure_has_its_row_and_a_test() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", PAGE, re.MULTILINE)
    assert [number for number, _ in rows] == [str(number) for number in range(1, 37)]
    assert [number for number, tests in rows if "test_" not in tests] == ["16"], (
        "a failure without a test; mypy checks 16"
    )


def test_asterisk_marks_exactly_the_gpu_tests() -> None:
    """A test has an asterisk if and only if it needs a GPU."""
    without = {name for name, needs_gpu in all_tests() if not needs_gpu}
    rows = re.findall(r"^\| \d+ \|.*\| (.*) \|$", PAGE, re.MULTILINE)
    starred = [(name, bool(star)) for cell in rows for name, star in re.findall(r"`(test_\w+)`( \*)?", cell)]
    assert [name for name, needs_gpu in starred if needs_gpu == (name in without)] == []


def test_every_named_metric_exists() -> None:
    pages = PageAllocator[KvPage](1)
    hot = HotBuffers(HotLimits(3, 4, 8, slots=1, overlay=NO_UNITS), pages, Holds(pages))
    gauges = hot.gauges().keys() | {
        "kv_pages",
        "kv_pages_held",
        "kv_pages_available",
    }
    exported = {f"pdserve_{COUNTERS[name].name}_total" for name in DECODE_COUNTERS}
    exported |= {f"pdserve_{name}" for name in gauges}
    named = set(re.findall(r"pdserve_\w+", PAGE)) - {"pdserve_requests_in_state"}
    assert named - exported == set()
    assert {f"pdserve_{name}" for name in gauges} <= named, "an undocumented gauge"
    assert {name for name in exported if name.startswith("pdserve_hot_")} <= named
