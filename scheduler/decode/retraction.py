"""Requests that gave up memory so that others can go on: who does, what becomes of its KV, and how it comes back.

out of pages         hot buffers give back what they have borrowed (HiSparse). Then one of the lowest priority gives up
                     all it has, of those the youngest that does not run, or else the youngest: its KV is copied to host
                     memory, or computed anew by prefill where that is cheaper or host memory is used up
out of hot buffers   (HiSparse) only for somebody of a higher priority, and only the buffer: the one that is parked is
                     ARRIVED again, with its KV in its pages, which are in host memory anyway
"""

import collections
from collections.abc import Iterable

from ...memory.pages import pages_for
from ..messages.effects import DropPages, Effect
from ..messages.lifecycle import State
from ..rates import Rates
from .dispatch.dispatcher import DecodeLimits, PrefillDispatcher
from .memory.request_memory import RequestMemory
from .requests.request import Request
from .requests.waiting_queue import WaitingQueue
from .run_queue import RunQueue


class Retractions:
    """RETRACTED requests in line: they have no memory. `resume` gives them some; letting in is `admit()`'s business."""

    def __init__(
        self,
        limits: DecodeLimits,
        memory: RequestMemory,
        runs: RunQueue,
        dispatcher: PrefillDispatcher,
        counters: "collections.Counter[str]",
    ) -> None:
        self.rates = Rates()
        self._limits = limits
        self._memory = memory
        self._runs = runs
        self._dispatcher = dispatcher
        self._counters = counters
        self._effects: list[Effect] = dispatcher.effects
        self.line = WaitingQueue()

    def __len__(self) -> int:
        return len(self.line)

    # -- giving up ---------------------------------------------------------------------------------------------

    def make_room(self, request: Request, now: float) -> bool:
        """A place for the row that the next step writes, if need be at the cost of the request that matters least,
        which may be this one.

        False when there is none for now: pages are coming, or somebody is in a step and will be retracted when it is
        out. Others go on meanwhile.
        """
        while not self._memory.grow(request):
            if self._memory.call_in(self._runs.running):
                continue
            if self._memory.pages_are_coming:
                return False
            victim = _least((*self._runs.arrived, *self._runs.ready, *self._runs.running))
            assert victim is not None, f"{request.rid} wants to step and nobody runs"
            if victim.in_flight:
                self._runs.held_back = victim
                return False
            self._retract(victim, now)
            if victim is request:
                break
        return True

    def park_for(self, request: Request, now: float) -> bool:
        """Take the hot buffer of a request of a lower priority; whether this one can be let in then.

        One that is in a step is held back from the next and parked when it is out.
        """
        victim = _least((*self._runs.ready, *self._runs.running))
        if victim is None or victim.priority >= request.priority:
            return False
        if victim.in_flight:
            self._runs.held_back = victim
            return False
        self._counters["retractions"] += 1
        self.park(victim, now)
        return self._memory.may_admit()

    def park(self, request: Request, now: float) -> None:
        """Take the hot buffer of a request that is in no step: it waits for another one, with its KV in its pages."""
        self._runs.remove(request)
        self._memory.close_hot(request)
        request.lifecycle.advance(State.ARRIVED, now)
        self._runs.arrived.push(request)

    def _retract(self, request: Request, now: float) -> None:
        """Take all its memory. It keeps its tokens, and its KV where copying is cheaper than computing, or where it has
        become too long for prefill to compute.
        """
        self._counters["retractions"] += 1
        self._runs.remove(request)
        request.lifecycle.advance(State.RETRACTED, now)
        pages = pages_for(request.kv_tokens, self._limits.page_size)
        can_compute = request.kv_tokens + 1 <= self._dispatcher.peers.largest_prompt(request.prompt.endpoint)
        if self._worth_saving(request, pages) or not can_compute:
            request.saved_pages = pages
            self.line.push(request)
            self._memory.save(request, pages)
        else:
            self._counters["retractions_recomputed"] += 1
            request.lifecycle.advance(State.QUEUED, now)
            self._dispatcher.compute_anew(request, now)
            self._memory.release(request)

    def _worth_saving(self, request: Request, pages: int) -> bool:
        """There is room for a copy, and copying is cheaper than computing the tokens anew, which nobody may be there
        to do.
        """
        saved = sum(request.saved_pages for request in self.line)
        cheaper = self.rates.copy_is_cheaper(pages, request.kv_tokens)
        absent = self._dispatcher.peers.absent_since(request.prompt.endpoint) is not None
        return saved + pages <= self._limits.retract_pages and (cheaper or absent)

    # -- coming back -------------------------------------------------------------------------------------------

    def resume(self) -> bool:
        """Give the first in line pages, and have its KV copied there; it is ARRIVED when that is done. False when
        nobody is in line, when it is still being saved, or when there are not enough pages for it.
        """
        if not len(self.line) or self._memory.copies.of(self.line.first) is not None:
            return False
        request = self.line.first
        most_tokens = min(request.most_kv_tokens, request.kv_tokens + 1 + self._limits.growth_tokens)
        growth = pages_for(most_tokens, self._limits.page_size) - request.saved_pages
        request.grant = self._memory.pages.grant(request.rid, request.saved_pages, growth)
        if request.grant is None:
            return False
        self._memory.load(request)
        self.line.take(request)
        request.saved_pages = 0
        return True

    def loaded(self, request: Request, now: float) -> None:
        """Its KV is in its pages again."""
        request.lifecycle.advance(State.ARRIVED, now)
        self._runs.arrived.push(request)

    def drop(self, request: Request) -> None:
        """It has ended: what was saved of it is forgotten. One that is being loaded is in no line any more."""
        if request in self.line:
            self._effects.append(DropPages(request.rid))
            self.line.remove(request)
            request.saved_pages = 0


def _least(requests: Iterable[Request]) -> Request | None:
    """Of the lowest priority the youngest that does not run, or else the youngest."""
    return max(
        requests,
        key=lambda request: (
            -request.priority,
            request.state is not State.RUNNING,
            request.lifecycle.started,
            request.sample,
        ),
        default=None,
    )
