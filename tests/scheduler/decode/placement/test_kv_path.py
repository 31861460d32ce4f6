"""Where prefill writes the KV rows of a prompt: every rule of the decision."""

import dataclasses
from typing import Any

import pytest

from pdserve.scheduler.decode.placement.kv_path import PathInputs, choose_path

RESIDENT = PathInputs(
    peer_writes_both=True,
    samples=1,
    new_tokens=2,
    pages=5,
    first_pages=3,
    free_pages=5 + 2 * 3,
    free_slots=3,
    ahead=2,
    settled=True,
)


@pytest.mark.parametrize(
    ("changes", "choice"),
    [
        ({}, ("device", "resident")),
        ({"peer_writes_both": False}, ("host", "peer")),
        ({"samples": 2}, ("host", "samples")),
        ({"new_tokens": 1}, ("host", "one_token")),
        ({"pages": 6}, ("host", "hot_rows")),
        ({"pages": 1, "free_pages": 2 + 2 * 3}, ("host", "hot_rows")),
        ({"ahead": 3, "free_pages": 99}, ("host", "hot_rows")),
        ({"settled": False}, ("host", "in_use")),
    ],
)
def test_rows_go_to_the_gpu_if_one_request_will_be_fully_resident(
    changes: dict[str, Any], choice: tuple[str, str]
) -> None:
    assert choose_path(dataclasses.replace(RESIDENT, **changes)) == choice


@pytest.mark.parametrize(
    ("free_slots", "ahead", "free_pages", "path"),
    [
        (1, 0, 5, "device"),
        (1, 0, 4, "host"),
        (2, 0, 5 + 3, "device"),
        (2, 0, 4 + 3, "host"),
        (20, 0, 5 + 8 * 3, "device"),
        (20, 0, 4 + 8 * 3, "host"),
        (20, 4, 5 + 12 * 3, "device"),
        (20, 4, 4 + 12 * 3, "host"),
    ],
)
def test_first_pages_of_requests_on_their_way_and_of_some_more_stay_free(
    free_slots: int, ahead: int, free_pages: int, path: str
) -> None:
    """The prompt needs five pages. Three first pages stay free for each other free slot: for eight slots at most, and
    for one more per request ahead.
    """
    inputs = dataclasses.replace(RESIDENT, free_slots=free_slots, ahead=ahead, free_pages=free_pages)
    assert choose_path(inputs).path == path
