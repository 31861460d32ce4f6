"""The states of a request on each server, the legal transitions, and the time spent in each state.

A transition that is not in the table raises. On decode, only `decode/transitions.py` changes the state.
"""

import enum
from collections.abc import Mapping
from typing import Generic, TypeVar

from ...common.errors import PdserveError


class State(enum.StrEnum):
    """A request on a decode server."""

    COMPILING = "compiling"  # waits until its grammar is compiled
    QUEUED = "queued"  # waits for memory and for a prefill server
    PREFILLING = "prefilling"  # a prefill server has the page ids and may write the pages at any time
    VERIFYING = "verifying"  # all KV has arrived; the ranks compare it with what was sent (verify_kv)
    LOADING = "loading"  # KV that was stored or cached before is copied to where the prompt needs it
    COMPUTING = "computing"  # this server computes the prompt itself, in chunks
    ARRIVED = "arrived"  # all KV and the first token have arrived; waits for a hot buffer (HiSparse)
    OPENING = "opening"  # its rows are copied into its hot buffer (HiSparse)
    READY = "ready"  # admitted; waits for a place in the batch
    RUNNING = "running"  # in the decode batch
    SAVING = "saving"  # retracted: its KV is copied to host memory
    SAVED = "saved"  # has no pages; waits for some
    RESTORING = "restoring"  # has pages again; its KV is copied back
    ENDED = "ended"  # the terminal message was sent


class PrefillState(enum.StrEnum):
    """A request on a prefill server."""

    COMPILING = "compiling"  # waits until its grammar is compiled
    WAITING = "waiting"  # waits for pages
    LOADING = "loading"  # has pages; a part of its KV is loaded from the KV store
    COMPUTING = "computing"  # has pages; chunks are computed, and sent when they are ready
    SENDING = "sending"  # all computed; the last writes are in flight
    CLOSING = "closing"  # failed or aborted; waits for its writes to end
    CLOSED = "closed"


DECODE_TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.COMPILING: frozenset({State.QUEUED, State.ENDED}),
    State.QUEUED: frozenset({State.COMPILING, State.PREFILLING, State.LOADING, State.COMPUTING, State.ENDED}),
    State.PREFILLING: frozenset({State.VERIFYING, State.LOADING, State.ARRIVED, State.QUEUED, State.ENDED}),
    State.VERIFYING: frozenset({State.LOADING, State.ARRIVED, State.QUEUED, State.ENDED}),
    State.LOADING: frozenset({State.COMPUTING, State.ARRIVED, State.QUEUED, State.ENDED}),
    State.COMPUTING: frozenset({State.ARRIVED, State.ENDED}),
    State.ARRIVED: frozenset({State.OPENING, State.READY, State.SAVING, State.QUEUED, State.ENDED}),
    State.OPENING: frozenset({State.READY, State.ENDED}),
    State.READY: frozenset({State.RUNNING, State.ARRIVED, State.SAVING, State.QUEUED, State.ENDED}),
    State.RUNNING: frozenset({State.ARRIVED, State.SAVING, State.QUEUED, State.ENDED}),
    State.SAVING: frozenset({State.SAVED, State.ENDED}),
    State.SAVED: frozenset({State.RESTORING, State.ENDED}),
    State.RESTORING: frozenset({State.ARRIVED, State.ENDED}),
    State.ENDED: frozenset(),
}

PREFILL_TRANSITIONS: Mapping[PrefillState, frozenset[PrefillState]] = {
    PrefillState.COMPILING: frozenset({PrefillState.WAITING, PrefillState.CLOSING}),
    PrefillState.WAITING: frozenset({PrefillState.LOADING, PrefillState.COMPUTING, PrefillState.CLOSING}),
    PrefillState.LOADING: frozenset({PrefillState.COMPUTING, PrefillState.CLOSING}),
    PrefillState.COMPUTING: frozenset({PrefillState.SENDING, PrefillState.CLOSING}),
    PrefillState.SENDING: frozenset({PrefillState.CLOSING, PrefillState.CLOSED}),
    PrefillState.CLOSING: frozenset({PrefillState.CLOSED}),
    PrefillState.CLOSED: frozenset(),
}


class IllegalTransitionError(PdserveError):
    """A transition that is not in the table: a bug in the scheduler."""


S = TypeVar("S", bound=enum.Enum)


class Lifecycle(Generic[S]):
    """The state of one request, since when, and the time spent in each state."""

    def __init__(self, table: Mapping[S, frozenset[S]], first: S, now: float) -> None:
        self._table = table
        self.state = first
        self.since = now
        self.started = now
        self._spent: dict[S, float] = {}

    def enter(self, state: S, now: float) -> None:
        """Move to `state`, or raise IllegalTransitionError."""
        if state not in self._table[self.state]:
            raise IllegalTransitionError(f"{self.state.name} -> {state.name}")
        self._spent[self.state] = self._spent.get(self.state, 0.0) + now - self.since
        self.state = state
        self.since = now

    def spent(self, *states: S, now: float) -> float:
        """Seconds in these states so far, over all visits."""
        current = now - self.since if self.state in states else 0.0
        return sum([self._spent.get(state, 0.0) for state in states]) + current
