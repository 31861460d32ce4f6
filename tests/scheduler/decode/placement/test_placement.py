"""The decision where a prompt is computed."""

from typing import Any

import pytest

from pdserve.scheduler.decode.placement.place import MUCH_LATER, Placement, PlacementInputs, place
from pdserve.scheduler.messages.counters import DECODE_COUNTERS

UNMEASURED = {"remote_s": None}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"servers": "absent"}, ("local", "absent")),
        ({"servers": "expected"}, (None, "pairing")),
        ({"servers": "expected", "failed": "failed"}, ("local", "failed")),
        ({"failed": "failed"}, ("local", "failed")),
        ({"failed": "failed", "room": "never"}, ("remote", "hot_rows")),
        ({"failed": "refused"}, ("local", "refused")),
        ({}, ("remote", "on_time")),
        ({"remote_s": 0.4}, ("remote", "on_time")),
        ({"remote_s": 0.41, "local_s": 0.4}, ("local", "late")),
        ({"remote_s": 0.41, "local_s": 0.41}, ("remote", "late")),
        ({"remote_s": MUCH_LATER * 0.6, "local_s": 0.6}, ("local", "late")),
        ({"remote_s": MUCH_LATER * 0.59, "local_s": 0.6}, ("remote", "late")),
        ({"due_s": -3.0, "remote_s": 0.1, "local_s": 0.06}, ("remote", "late")),
        ({"due_s": -3.0, "remote_s": 0.1, "local_s": 0.04}, ("local", "late")),
        ({"remote_s": 9.0, "local_s": 0.1, "room": "later"}, ("remote", "hot_rows")),
        ({"short": True}, ("local", "short")),
        ({"short": True, "room": "later"}, ("remote", "hot_rows")),
        ({"shared_device": True}, ("local", "shared_device")),
        ({"shared_device": True, "room": "later"}, ("remote", "hot_rows")),
        ({"shared_device": True, "servers": "absent"}, ("local", "absent")),
        ({"shared_device": True, **UNMEASURED}, ("remote", "unmeasured")),
        (UNMEASURED, ("remote", "unmeasured")),
        ({"local_s": None, "short": True}, ("remote", "unmeasured")),
    ],
)
def test_decision(changes: dict[str, Any], expected: tuple[str | None, str]) -> None:
    known = {"due_s": 0.4, "remote_s": 0.03, "local_s": 0.02}
    placement = place(PlacementInputs(**{**known, **changes}))
    assert placement == Placement(*expected)  # type: ignore[arg-type]  # a literal
    if placement.where is not None:
        assert f"{placement.where}_prefill_{placement.reason}" in DECODE_COUNTERS
