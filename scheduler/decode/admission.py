"""Admission on decode: gives pages to waiting requests, and admits those whose KV is in their pages."""

from collections.abc import Mapping

from ..messages.lifecycle import State
from .dispatch.dispatcher import PrefillDispatcher
from .memory.request_memory import RequestMemory
from .requests.request import Request
from .retraction import Retractions
from .run_queue import RunQueue

READY_AHEAD = 4
"""READY requests that are enough to fill the next free places in the batch."""


class Admission:
    """Decides which requests get memory next: running ones, retracted ones, arrived ones, then prompts."""

    def __init__(
        self,
        *,
        memory: RequestMemory,
        run_queue: RunQueue,
        retracted: Retractions,
        dispatcher: PrefillDispatcher,
        requests: Mapping[str, Request],
    ) -> None:
        self._memory = memory
        self._run_queue = run_queue
        self._retracted = retracted
        self._dispatcher = dispatcher
        self._requests = requests
        self.starving = False
        """A running request waits for a page: the next free pages are for it."""

    def admit(self, request: Request, now: float) -> None:
        """Admit a request whose KV is in its pages. This is the only transition into READY.

        With HiSparse, the request has its hot buffer already; if the buffer is fully resident, it holds all rows.
        """
        request.lifecycle.advance(State.READY, now)
        self._run_queue.ready.push(request)

    def admit_received(self, request: Request | None, now: float) -> None:
        """Admit an ARRIVED request that inherited the filled hot buffer of its prompt (HiSparse); None is ignored."""
        if request is not None:
            self._run_queue.arrived.take(request)
            self.admit(request, now)

    def admit_arrived(self, now: float) -> None:
        """Admit ARRIVED requests in order. If no hot buffer is free, a request of a lower priority loses its own."""
        run_queue = self._run_queue
        run_queue.paused = None
        while len(run_queue.arrived):
            request = run_queue.arrived.first
            if not self._memory.may_admit() and not self._retracted.free_hot_buffer_for(request, now):
                return
            run_queue.arrived.take(request)
            if self._memory.open_hot(request):
                self.admit(request, now)

    def advance(self, now: float) -> None:
        """Give memory to whatever waits for it. Call once per loop turn.

        A failed allocation is recorded; `reclaim_lent` then takes lent pages back, and the allocation is tried again.
        """
        self.admit_arrived(now)
        self._allocate_waiting(now)
        while self._memory.reclaim_lent([*self._run_queue.ready, *self._run_queue.running]):
            self._allocate_waiting(now)
        self._reopen_hot(now)

    def _allocate_waiting(self, now: float) -> None:
        """Give pages to waiting requests: first to retracted ones, then to prompts. While a retracted request waits,
        only prompts of a higher priority get pages. While a running request lacks a page, nobody else gets one.
        """
        if self.starving:
            return
        while self._memory.may_admit() and self._retracted.resume():
            pass
        retracted = self._retracted.queue
        above = retracted.first.priority if len(retracted) else None
        for priority in self._dispatcher.dispatch(now, above=above, keep=self._pages_to_keep()):
            retracted.passed_by(priority)

    def _pages_to_keep(self) -> int:
        """Pages that new prompts must leave free. While enough requests are READY, this is all that running requests
        may still need: another request would only be retracted when they grow.
        """
        if len(self._run_queue.ready) < READY_AHEAD or not len(self._dispatcher.queue):
            return 0
        return sum(self._memory.unreserved_growth(request) for request in self._run_queue.running)

    def _reopen_hot(self, now: float) -> None:
        """Make one evicting request fully resident again, if pages are to spare: it loses its hot buffer, becomes
        ARRIVED, and gets a larger buffer. Others run while its rows are copied.
        """
        run_queue = self._run_queue
        if len(run_queue.arrived):
            return  # free hot pages are for ARRIVED requests
        request = self._memory.next_to_reopen(run_queue.running, len(self._requests))
        if request is None:
            return
        if request.in_flight:
            run_queue.paused = run_queue.paused or request
            return
        self._retracted.take_hot_buffer(request, now)
        self.admit_arrived(now)
