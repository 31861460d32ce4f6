"""Retraction: requests that give up memory so that others can run. Chooses them, saves their KV, and resumes them.

out of pages         Hot buffers return borrowed pages (HiSparse). Then one request of the lowest priority gives up all
                     its memory: the youngest that is not running, or else the youngest. Its KV is copied to host
                     memory, or computed again by prefill if that is cheaper or the host memory is full.
out of hot buffers   (HiSparse) For a request of a higher priority, one request gives up its hot buffer only. It becomes
                     ARRIVED again; its KV stays in its pages, which are in host memory.
"""

from collections.abc import Iterable, Iterator

from ...memory.pages import pages_for
from ..messages.lifecycle import State
from .dispatch.dispatcher import PrefillDispatcher
from .memory.resources import Resources
from .requests.request import Request
from .requests.waiting_queue import WaitingQueue
from .run_queue import RunQueue


class Retractions:
    """RETRACTED requests, which have no memory. `resume` gives them pages; `Admission.admit()` admits them."""

    def __init__(self, resources: Resources, run_queue: RunQueue, dispatcher: PrefillDispatcher) -> None:
        self._limits = resources.limits
        self._memory = resources.memory
        self._rates = resources.rates
        self._counters = resources.counters
        self._run_queue = run_queue
        self._dispatcher = dispatcher
        self.queue = WaitingQueue()

    # -- retract -----------------------------------------------------------------------------------------------

    def make_room(self, request: Request, now: float) -> bool:
        """Allocate memory for the row that the next step writes. If necessary, retract the least important request,
        which may be this one.

        Returns False if the request has to skip this step: pages are about to become free, the request to retract is
        still in a step, or rows have to be copied to host memory first. Other requests run meanwhile.
        """
        while not self._memory.grow(request):
            if self._memory.must_wait(request):
                return False
            if self._memory.reclaim_lent(self._run_queue.running):
                continue
            if self._memory.pages_pending:
                return False
            runs = self._run_queue
            victim = _least_important(self._saved((*runs.arrived, *runs.ready, *runs.running)))
            if victim is None:
                return False  # the rows of all requests are on their way to host memory
            if victim.in_flight:
                self._run_queue.paused = victim
                return False
            self._retract(victim, now)
            if victim is request:
                break
        return True

    def free_hot_buffer_for(self, request: Request, now: float) -> bool:
        """Take the hot buffer of a request of a lower priority. Returns whether `request` can be admitted now.

        A victim that is in a step is paused: it gets no further step, and a later call takes its buffer.
        """
        victim = _least_important(self._saved((*self._run_queue.ready, *self._run_queue.running)))
        if victim is None or victim.priority >= request.priority:
            return False
        if victim.in_flight:
            self._run_queue.paused = victim
            return False
        self._counters["retractions"] += 1
        self.take_hot_buffer(victim, now)
        return self._memory.may_admit()

    def _saved(self, requests: Iterable[Request]) -> Iterator[Request]:
        """The requests that can give up memory. With HiSparse, all rows of such a request are in host memory."""
        return (request for request in requests if not self._memory.unsaved(request))

    def take_hot_buffer(self, request: Request, now: float) -> None:
        """Take the hot buffer of a request that is in no step. It waits for another one; its KV stays in its pages."""
        self._run_queue.remove(request)
        self._memory.close_hot(request)
        request.lifecycle.advance(State.ARRIVED, now)
        self._run_queue.arrived.push(request)

    def _retract(self, request: Request, now: float) -> None:
        """Take all memory of a request. Its tokens are kept. Its KV is saved if a copy is cheaper than prefill, or if
        the sequence is too long for prefill now.
        """
        self._counters["retractions"] += 1
        self._run_queue.remove(request)
        request.lifecycle.advance(State.RETRACTED, now)
        first = self._memory.first_visible(request.kv_tokens)
        pages = pages_for(request.kv_tokens, self._limits.page_size) - first
        can_compute = request.kv_tokens + 1 <= self._dispatcher.largest_prompt(request.prompt.endpoint)
        if self._worth_saving(request, pages) or not can_compute:
            request.saved_pages = pages
            self.queue.push(request)
            self._memory.save(request, first, pages)
        else:
            self._counters["retractions_recomputed"] += 1
            request.lifecycle.advance(State.QUEUED, now)
            self._dispatcher.recompute(request, now)
            self._memory.release(request)

    def _worth_saving(self, request: Request, pages: int) -> bool:
        """Whether host memory has room for a copy, and the copy is cheaper than prefill or no server can prefill."""
        saved = sum(request.saved_pages for request in self.queue)
        cheaper = self._rates.copy_is_cheaper(pages, request.kv_tokens)
        absent = not self._dispatcher.can_prefill(request.prompt.endpoint, request.kv_tokens + 1)
        return saved + pages <= self._limits.retract_pages and (cheaper or absent)

    # -- resume ------------------------------------------------------------------------------------------------

    def resume(self) -> bool:
        """Allocate pages for the first request of the queue and copy its KV back; it is ARRIVED when the copy has
        ended. Returns False if the queue is empty, if the request is still being saved, or if pages are short.
        """
        if not len(self.queue) or self._memory.copies.of(self.queue.first) is not None:
            return False
        request = self.queue.first
        most_tokens = min(request.most_kv_tokens, request.kv_tokens + 1 + self._limits.growth_tokens)
        first = self._memory.first_visible(request.kv_tokens)
        growth = self._memory.growth_pages(request.saved_pages, first, most_tokens)
        request.grant = self._memory.pages.grant(request.rid, request.saved_pages, growth, freed=first)
        if request.grant is None:
            return False
        self._memory.load(request)
        self.queue.take(request)
        request.saved_pages = 0
        return True

    def loaded(self, request: Request, now: float) -> None:
        """The KV of a resumed request is in its pages again."""
        request.lifecycle.advance(State.ARRIVED, now)
        self._run_queue.arrived.push(request)

    def drop(self, request: Request) -> None:
        """Drop the saved KV of a request that has ended. A request that is being loaded has left the queue already."""
        if request in self.queue:
            self._memory.drop_saved(request)
            self.queue.remove(request)
            request.saved_pages = 0


def _least_important(requests: Iterable[Request]) -> Request | None:
    """Among the requests of the lowest priority: the youngest that is not running, or else the youngest."""
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
