"""docs/hisparse.md names tests and metrics that exist."""

import re
from pathlib import Path

from pdserve.scheduler.counters import DECODE_COUNTERS
from pdserve.scheduler.hot_buffers import HotBuffers, HotLimits

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "hisparse.md").read_text(encoding="utf-8")


def test_every_test_that_it_names_exists() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"^ *(?:async )?def (test_\w+)\(", sources, re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 30
    assert named - defined == set()


def test_every_known_failure_has_its_row() -> None:
    rows = re.findall(r"^\| (\d+) \| ", PAGE, re.MULTILINE)
    assert rows == [str(number) for number in range(1, 37)]


def test_every_metric_that_it_names_exists() -> None:
    gauges = HotBuffers(HotLimits(3, 4, 8, slots=1)).gauges().keys() | {
        "kv_pages",
        "kv_pages_held",
        "kv_pages_available",
    }
    exported = {f"pdserve_{name}_total" for name in DECODE_COUNTERS} | {f"pdserve_{name}" for name in gauges}
    named = set(re.findall(r"pdserve_\w+", PAGE)) - {"pdserve_requests_in_state"}
    assert named - exported == set()
    assert {f"pdserve_{name}" for name in gauges} <= named, "an undocumented gauge"
    assert {name for name in exported if name.startswith("pdserve_hot_")} <= named
