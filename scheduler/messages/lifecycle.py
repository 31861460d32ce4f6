"""The life of a request as data: states, the transitions that exist, and the time spent in each.

A decode server walks `REQUEST` (design: one door into the run queue, `admit()`, is the only edge into READY), a prefill
server walks `TRANSFER`. Both are plain tables: what is not listed cannot happen, and raises.
"""

import enum
from collections.abc import Mapping
from typing import Generic, TypeVar

from ...configs.errors import PdserveError


class State(enum.Enum):
    """A request on a decode server."""

    QUEUED = "queued"  # waits for memory and for a prefill server
    RESERVED = "reserved"  # owns its pages
    PREFILLING = "prefilling"  # a prefill server knows the pages and may write them at any time
    ARRIVED = "arrived"  # all KV and at least the first token are here; waits for what it needs beside its pages
    READY = "ready"  # admitted; waits for a place in the batch
    RUNNING = "running"  # in the decode batch
    RETRACTED = "retracted"  # gave its device memory up; keeps its tokens
    DRAINING = "draining"  # the client has its answer; pages wait until nobody can write them
    FREED = "freed"


class TransferState(enum.Enum):
    """A request on a prefill server."""

    WAITING = "waiting"  # queued for pages
    COMPUTING = "computing"  # owns pages; chunks are computed, and sent as they are ready
    SENDING = "sending"  # all computed; the last writes are on their way
    CLOSING = "closing"  # failed or aborted; waits for its writes to stop
    CLOSED = "closed"


REQUEST: Mapping[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.RESERVED, State.DRAINING}),
    State.RESERVED: frozenset({State.PREFILLING}),
    State.PREFILLING: frozenset({State.ARRIVED, State.QUEUED, State.DRAINING}),
    State.ARRIVED: frozenset({State.READY, State.RETRACTED, State.DRAINING}),
    State.READY: frozenset({State.RUNNING, State.ARRIVED, State.RETRACTED, State.DRAINING}),
    State.RUNNING: frozenset({State.ARRIVED, State.RETRACTED, State.DRAINING}),
    State.RETRACTED: frozenset({State.ARRIVED, State.QUEUED, State.DRAINING}),
    State.DRAINING: frozenset({State.FREED}),
    State.FREED: frozenset(),
}

TRANSFER: Mapping[TransferState, frozenset[TransferState]] = {
    TransferState.WAITING: frozenset({TransferState.COMPUTING, TransferState.CLOSING}),
    TransferState.COMPUTING: frozenset({TransferState.SENDING, TransferState.CLOSING}),
    TransferState.SENDING: frozenset({TransferState.CLOSING, TransferState.CLOSED}),
    TransferState.CLOSING: frozenset({TransferState.CLOSED}),
    TransferState.CLOSED: frozenset(),
}


class IllegalTransitionError(PdserveError):
    """A transition that the table does not have: a bug in the scheduler."""


S = TypeVar("S", bound=enum.Enum)


class Lifecycle(Generic[S]):
    """Where one request is, since when, and how long it stayed in each state before."""

    def __init__(self, table: Mapping[S, frozenset[S]], first: S, now: float) -> None:
        self._table = table
        self.state = first
        self.since = now
        self.started = now
        self._spent: dict[S, float] = {}

    def advance(self, state: S, now: float) -> None:
        """Move to `state`, or raise IllegalTransitionError."""
        if state not in self._table[self.state]:
            raise IllegalTransitionError(f"{self.state.name} -> {state.name}")
        self._spent[self.state] = self.spent(self.state, now)
        self.state = state
        self.since = now

    def spent(self, state: S, now: float) -> float:
        """Seconds in `state` so far, over all visits."""
        current = now - self.since if state is self.state else 0.0
        return self._spent.get(state, 0.0) + current
