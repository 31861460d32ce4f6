"""The transition tables: every state is reachable, unlisted transitions raise, and times add up."""

import enum
from collections.abc import Mapping

import pytest

from pdserve.scheduler.messages.lifecycle import (
    DECODE_TRANSITIONS,
    PREFILL_TRANSITIONS,
    IllegalTransitionError,
    Lifecycle,
    PrefillState,
    State,
)


@pytest.mark.parametrize(
    ("table", "first", "last"),
    [
        (DECODE_TRANSITIONS, State.COMPILING, State.ENDED),
        (PREFILL_TRANSITIONS, PrefillState.COMPILING, PrefillState.CLOSED),
    ],
)
def test_every_state_is_reachable_and_leads_to_the_final_state(
    table: Mapping[enum.Enum, frozenset[enum.Enum]], first: enum.Enum, last: enum.Enum
) -> None:
    def reach(start: enum.Enum) -> set[enum.Enum]:
        seen, todo = {start}, [start]
        while todo:
            for following in table[todo.pop()] - seen:
                seen.add(following)
                todo.append(following)
        return seen

    assert set(table) == set(type(first)) == reach(first)
    assert all(last in reach(state) for state in table)
    assert table[last] == frozenset()


def test_only_requests_whose_kv_has_arrived_become_ready() -> None:
    before = [state for state, following in DECODE_TRANSITIONS.items() if State.READY in following]
    assert before == [State.ARRIVED, State.OPENING]


def test_unlisted_transition_raises_and_changes_nothing() -> None:
    lifecycle = Lifecycle(DECODE_TRANSITIONS, State.QUEUED, now=1.0)
    with pytest.raises(IllegalTransitionError, match="QUEUED -> RUNNING"):
        lifecycle.enter(State.RUNNING, now=2.0)
    assert lifecycle.state is State.QUEUED
    assert lifecycle.since == 1.0


def test_time_in_states_adds_up_over_repeated_visits() -> None:
    lifecycle = Lifecycle(DECODE_TRANSITIONS, State.QUEUED, now=0.0)
    for state, at in [
        (State.PREFILLING, 1.5),
        (State.QUEUED, 4.0),
        (State.PREFILLING, 4.25),
        (State.VERIFYING, 6.25),
    ]:
        lifecycle.enter(state, at)
    assert lifecycle.spent(State.QUEUED, now=10.0) == 1.5 + 0.25
    assert lifecycle.spent(State.PREFILLING, now=10.0) == 2.5 + 2.0
    assert lifecycle.spent(State.VERIFYING, now=10.0) == 3.75
    assert sum(lifecycle.spent(state, now=10.0) for state in State) == 10.0
