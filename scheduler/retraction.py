"""Requests that gave up memory so that others can go on: who does, what becomes of its KV, and how it comes back.

out of pages         hot buffers give back what they have borrowed (HiSparse). Then the youngest of the lowest priority
                     gives up all it has: its KV is copied to host memory, or computed anew by prefill where that is
                     cheaper or host memory is used up
out of hot buffers   (HiSparse) only for somebody of a higher priority, and only the buffer: the KV of the one that
                     is parked stays in its pages, which are in host memory anyway
"""

import collections
import dataclasses

from .effects import DropPages, Effect, LoadPages, SavePages
from .intake import DecodeLimits, Intake
from .lifecycle import State
from .request import Request
from .request_memory import RequestMemory
from .reservation import pages_for
from .run_queue import RunQueue


@dataclasses.dataclass(slots=True)
class Rates:
    """What was measured of the two ways to bring a retracted request back; None until it was."""

    copied_pages_per_s: float | None = None
    prefilled_tokens_per_s: float | None = None

    def copy_is_cheaper(self, pages: int, tokens: int) -> bool:
        """Out to host memory and back, or computed by prefill. Copying until both are known: it rarely loses."""
        if self.copied_pages_per_s is None or self.prefilled_tokens_per_s is None:
            return True
        return 2 * pages / self.copied_pages_per_s <= tokens / self.prefilled_tokens_per_s


class Retractions:
    """RETRACTED requests in the order in which they went. `resume` finds who can go on; letting it in is `admit()`'s
    business.
    """

    def __init__(
        self,
        limits: DecodeLimits,
        memory: RequestMemory,
        runs: RunQueue,
        intake: Intake,
        counters: "collections.Counter[str]",
    ) -> None:
        self.rates = Rates()
        self._limits = limits
        self._memory = memory
        self._runs = runs
        self._intake = intake
        self._counters = counters
        self._effects: list[Effect] = intake.effects
        self._requests: collections.deque[Request] = collections.deque()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    # -- giving up ---------------------------------------------------------------------------------------------

    def make_room(self, request: Request, now: float) -> bool:
        """A place for the row that the next step writes, if need be at the cost of the request that matters least,
        which may be this one.

        False when there is none before the orders under way are done: then loans are back, or somebody is retracted.
        """
        while not self._memory.grow(request):
            if self._memory.call_in(self._runs.running):
                continue
            if len(self._memory.orders) or self._memory.orders.unsettled:
                return False
            victim = self._least()
            assert victim is not None, f"{request.rid} wants to step and nobody runs"
            self._retract(victim, now)
            if victim is request:
                break
        return True

    def park_for(self, request: Request, now: float) -> bool:
        """Take the hot buffer of a running request for one of a higher priority; whether that can be let in then.

        One that is in a step is held back from the next and parked when it is out.
        """
        victim = self._least()
        if victim is None or victim.prompt.priority >= request.prompt.priority:
            return False
        if victim.in_flight:
            self._runs.held_back = victim
            return False
        self._stop(victim, now)
        self._memory.close_hot(victim)
        self._requests.append(victim)
        return self._memory.may_admit()

    def _least(self) -> Request | None:
        """Of those that run, the youngest of the lowest priority."""
        return min(reversed(self._runs.running), key=lambda request: request.prompt.priority, default=None)

    def _retract(self, request: Request, now: float) -> None:
        """Take all its memory. It keeps its tokens, and its KV where copying is cheaper than computing, or where it has
        become too long for prefill to compute.
        """
        self._stop(request, now)
        pages = pages_for(request.kv_tokens, self._limits.page_size)
        can_compute = self._intake.peers.can_compute(request.prompt.endpoint, request.kv_tokens + 1)
        if self._worth_saving(pages, request.kv_tokens) or not can_compute:
            request.saved_pages = pages
            self._requests.append(request)
            self._effects.append(SavePages(self._memory.orders.next(), request.rid, tuple(request.pages[:pages])))
        else:
            self._counters["retractions_recomputed"] += 1
            request.life.to(State.QUEUED, now)
            self._intake.compute_anew(request)
        self._memory.release(request)

    def _stop(self, request: Request, now: float) -> None:
        self._counters["retractions"] += 1
        self._runs.remove(request)
        request.life.to(State.RETRACTED, now)

    def _worth_saving(self, pages: int, tokens: int) -> bool:
        """There is room for a copy, and copying is cheaper than computing the tokens anew."""
        saved = sum(request.saved_pages for request in self._requests)
        return saved + pages <= self._limits.retract_pages and self.rates.copy_is_cheaper(pages, tokens)

    # -- coming back -------------------------------------------------------------------------------------------

    def resume(self) -> Request | None:
        """The next that can go on, with its memory and no longer here; None when nobody is or can.

        In the order in which they went, but one that has kept its pages goes before others, who may lack just those.
        """
        if not self._requests or not self._memory.may_admit():
            return None
        parked = (request for request in self._requests if request.grant is not None)
        request = next(parked, self._requests[0])
        if request.grant is None:
            most_tokens = min(request.most_kv_tokens, request.kv_tokens + 1 + self._limits.growth_tokens)
            growth = pages_for(most_tokens, self._limits.page_size) - request.saved_pages
            request.grant = self._memory.pages.grant(request.rid, request.saved_pages, growth)
            if request.grant is None:
                return None
            self._effects.append(LoadPages(self._memory.orders.next(), request.rid, tuple(request.pages)))
        self._remove(request)
        return request

    def drop(self, request: Request) -> None:
        """It has ended: what was saved of it is forgotten. The caller releases what it holds."""
        if request.grant is None:
            self._effects.append(DropPages(self._memory.orders.next(), request.rid))
        self._remove(request)

    def _remove(self, request: Request) -> None:
        self._requests.remove(request)
        request.saved_pages = 0
