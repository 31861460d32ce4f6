"""Where prefill writes the KV rows of a prompt: every rule of the decision, and the room that it is given."""

import dataclasses
from typing import Any

import pytest

from pdserve.scheduler.decode.dispatch.kv_path import PathInputs, choose_path
from pdserve.scheduler.decode.memory.hot_buffers import HotBuffers, HotLimits

RESIDENT = PathInputs(
    hisparse=True,
    peer_writes_both=True,
    samples=1,
    new_tokens=2,
    pages=5,
    room=5,
    free_slots=3,
    ahead=2,
    settled=True,
)


@pytest.mark.parametrize(
    ("changes", "choice"),
    [
        ({}, ("gpu", "resident")),
        ({"hisparse": False, "peer_writes_both": False, "room": 0}, ("gpu", "plain")),
        ({"peer_writes_both": False}, ("host", "peer")),
        ({"samples": 2}, ("host", "samples")),
        ({"new_tokens": 1}, ("host", "one_token")),
        ({"pages": 6}, ("host", "hot_rows")),
        ({"ahead": 3}, ("host", "hot_rows")),
        ({"settled": False}, ("host", "in_use")),
    ],
)
def test_rows_go_to_the_gpu_if_one_request_will_be_fully_resident(
    changes: dict[str, Any], choice: tuple[str, str]
) -> None:
    assert choose_path(dataclasses.replace(RESIDENT, **changes)) == choice


def test_room_leaves_the_first_pages_of_every_other_free_slot() -> None:
    """Three slots with first pages of three pages each, in a hot pool of 14 pages."""
    hot = HotBuffers(HotLimits(num_pages=14, page_size=4, hot_rows=8, slots=3))
    assert hot.room_for_rows == 14 - 2 * 3
    hot.open("a", 4 * 4)
    assert hot.room_for_rows == 10 - 3
    hot.open("b", 4 * 7)
    assert hot.room_for_rows == 3
    hot.open("c", 1)
    assert (hot.room_for_rows, hot.free_slots) == (0, 0)


def test_room_is_zero_if_the_first_pages_are_not_free() -> None:
    hot = HotBuffers(HotLimits(num_pages=5, page_size=4, hot_rows=8, slots=2))
    assert hot.room_for_rows == 3
    hot.open("a", 4 * 3)
    assert (hot.room_for_rows, hot.free_slots) == (0, 1)
