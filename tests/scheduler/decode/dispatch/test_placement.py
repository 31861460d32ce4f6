"""The decision where a prompt is computed."""

from typing import Any

import msgspec
import pytest

from pdserve.scheduler.decode.dispatch.placement import Costs, Placement, PlacementInputs, place
from pdserve.scheduler.messages.counters import DECODE_COUNTERS

COSTS = Costs(local_tokens_per_s=1000.0, remote_tokens_per_s=2000.0, overhead_s=0.06, step_s=0.01)
"""A prompt of 100 tokens takes 0.11 s in both places."""


def placed(mode: str = "auto", tokens: int = 100, costs: Costs = COSTS, **changes: Any) -> Placement:
    return place(PlacementInputs(mode, tokens, costs, **changes))  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mode": "never"}, ("remote", "never")),
        ({"mode": "never", "remote_open": False}, ("wait", "never")),
        ({"mode": "always"}, ("local", "always")),
        ({"mode": "always", "local_open": False}, ("wait", "always")),
        ({"paired": False}, ("local", "absent")),
        ({"paired": False, "expected": True}, ("wait", "pairing")),
        ({"paired": False, "expected": True, "failed": True}, ("local", "failed")),
        ({"failed": True}, ("local", "failed")),
        ({"refused": True}, ("remote", "faster")),
        ({"refused": True, "remote_open": False}, ("local", "refused")),
        ({"tokens": 99}, ("local", "short")),
        ({"tokens": 101}, ("remote", "faster")),
        ({"tokens": 101, "remote_open": False}, ("wait", "faster")),
        ({"tokens": 99, "local_open": False}, ("wait", "short")),
        ({"tokens": 99, "local_ahead": 10}, ("remote", "faster")),
        ({"tokens": 3000, "remote_ahead": 2000}, ("remote", "faster")),
        ({"tokens": 3000, "remote_ahead": 4000}, ("local", "queue")),
        ({"tokens": 3000, "remote_ahead": 4000, "local_ahead": 1000}, ("remote", "faster")),
        ({"tokens": 300, "local_shared": 250, "local_ahead": 200}, ("remote", "faster")),
        ({"tokens": 300, "local_shared": 250, "local_ahead": 100}, ("local", "short")),
        ({"tokens": 300, "local_shared": 250}, ("local", "short")),
        ({"tokens": 99, "remote_shared": 10}, ("remote", "faster")),
        ({"tokens": 3000, "shared_cpu": True}, ("local", "shared_cpu")),
        ({"tokens": 3000, "shared_cpu": True, "local_open": False}, ("wait", "shared_cpu")),
        ({"tokens": 3000, "shared_cpu": True, "local_room": False}, ("remote", "hot_rows")),
        ({"shared_cpu": True, "paired": False}, ("local", "absent")),
        ({"shared_cpu": True, "costs": Costs(1000.0, None, None)}, ("remote", "unmeasured")),
        ({"costs": Costs(1000.0, None, None)}, ("remote", "unmeasured")),
        ({"costs": Costs(1000.0, 2000.0, None)}, ("remote", "unmeasured")),
        ({"costs": Costs(None, 2000.0, 0.06)}, ("remote", "unmeasured")),
    ],
)
def test_decision(changes: dict[str, Any], expected: tuple[str, str]) -> None:
    placement = placed(**changes)
    assert placement == expected
    if placement.where != "wait":
        assert f"{placement.where}_prefill_{placement.reason}" in DECODE_COUNTERS


@pytest.mark.parametrize(
    ("costs", "tokens"),
    [
        (COSTS, 100),
        (Costs(1000.0, 2000.0, 0.005, step_s=0.01), 0),
        (Costs(2000.0, 2000.0, 0.06), float("inf")),
        (Costs(2000.0, 2000.0, 0.06, step_s=0.1), 0),
        (Costs(4000.0, 2000.0, 0.06), float("inf")),
        (Costs(None, 2000.0, 0.06), None),
        (Costs(1000.0, None, 0.06), None),
    ],
)
def test_crossover(costs: Costs, tokens: float | None) -> None:
    assert costs.crossover_tokens == (tokens if tokens is None else pytest.approx(tokens))


def test_decision_changes_at_the_crossover() -> None:
    crossover = msgspec.convert(COSTS.crossover_tokens, float)
    assert placed(tokens=int(crossover) - 1).where == "local"
    assert placed(tokens=int(crossover) + 1).where == "remote"
