"""The scheduler of a prefill server: decides which prompts get pages, what the next step computes, when a request ends.

Pure: integers in, effects out; `now` is a parameter. One thread calls it, between model steps.

    KvDestination -> [COMPILING ->] WAITING -> [LOADING ->] COMPUTING -> SENDING -> CLOSED        (PrefillDone)
                        any of them -> CLOSING -> CLOSED              (TransferFailed or AbortAck)

A chunk is sent as soon as it is computed, while the next one computes. Pages are released, and decode gets the terminal
message, only after all chunks in flight have reported their end.
"""

import collections
import functools
import math
from array import array
from collections.abc import Iterable, Sequence

from ...memory.index_spaces import KvPage
from ...memory.pages import PageAllocator, pages_for
from ...memory.prefix_cache import PrefixCache
from ...transfer.control.events import (
    LoadReported,
    MessageReceived,
    PeerClosed,
    PeerLost,
    PeerRefused,
)
from ...transfer.data.chunks import joined
from ...transfer.plan.staged_regions import StagedRegion
from ...transfer.protocol.messages import (
    Abort,
    AbortAck,
    ChunkArrived,
    InstanceId,
    KvDestination,
    Load,
    StageFree,
    StageGrant,
    TransferFailed,
    TransferKey,
)
from ..chunking.fair_queue import MAX_MISFITS, FairQueue
from ..chunking.grammar_queue import GrammarQueue
from ..messages.counters import PREFILL_COUNTERS
from ..messages.effects import Effect, Outbox, SendToPeer
from ..messages.lifecycle import PrefillState
from ..messages.ranks import ChunkReport, GrammarReady, PartReport, StoreLoaded, StorePinged, StoreWritten
from ..messages.reports import Reports
from ..messages.step import StepResult
from ..store.kv_store import KvStore, StoreLimits
from .cache_reports import CacheReports
from .compute_queue import ComputeQueue
from .limits import PrefillLimits
from .request import PageSpace, PrefillRequest, PrefillStep
from .transitions import Transitions

_COUNTED_STATES = tuple(state.value for state in PrefillState if state is not PrefillState.CLOSED)
BEGUN_AFTER_S = 1.0
"""If a step takes longer than this, decode is informed, so that it does not count the prompts as waiting."""
ROUND_TRIP_S = 0.1
"""After the end of a prompt, the next one arrives from decode within this time, even on a loaded machine. The dispatch
window has enough tokens to keep the ranks busy for this long.
"""


class PrefillScheduler:
    """Owns the queues and the page allocator of one prefill server."""

    def __init__(
        self,
        limits: PrefillLimits,
        allocator: PageAllocator[KvPage],
        dp_rank: int = 0,
        store_limits: StoreLimits | None = None,
    ) -> None:
        """With `store_limits` there is a KV store."""
        self.limits = limits
        self.allocator = allocator
        self.cache = PrefixCache(allocator, limits.page_size, enabled=limits.prefix_cache, window=limits.window)
        self.counters: collections.Counter[str] = collections.Counter(dict.fromkeys(PREFILL_COUNTERS, 0))
        self._waiting: FairQueue[PrefillRequest] = FairQueue()
        self._computing = ComputeQueue(limits)
        self._expire_at = math.inf
        """No deadline passes before this time, so requests need not be scanned in every turn."""
        self._outbox = Outbox()
        self.reports = CacheReports(self.cache, limits.page_size, allocator.num_pages, dp_rank, self._outbox)
        self._compiling: GrammarQueue[PrefillRequest] = GrammarQueue(self._outbox)
        self.kv_store: KvStore[PrefillRequest] | None = None
        if store_limits is not None:
            self.kv_store = KvStore(store_limits, allocator, self.cache, self.counters, self._outbox)
        self._transitions = Transitions(
            limits,
            allocator,
            self.counters,
            self._outbox,
            compiling=self._compiling,
            waiting=self._waiting,
            computing=self._computing,
            cache=self.cache,
            store=self.kv_store,
        )
        self.requests = self._transitions.requests
        self.staging = self._transitions.staging
        self._chunk_reports = Reports(limits.ranks)

    # -- events ------------------------------------------------------------------------------------------------

    def handle(self, event: object, now: float) -> None:
        """Take an event: of a decode server, of a rank, or of the control thread."""
        transitions = self._transitions
        match event:
            case MessageReceived(instance=instance, message=KvDestination() as message, arrays=arrays):
                # to make lists of a million integers takes 0.1 s
                numbers = [array("i", frame.tobytes()) for frame in arrays]
                self.receive(PrefillRequest.received(instance, message, numbers, now), now)
            case MessageReceived(instance=instance, message=Abort(key=key, reason=reason)):
                if (aborted := self.requests.get((instance, key))) is not None:
                    transitions.close(aborted, reason, now, aborted=True)
                else:  # it has ended: none of its writes are in flight
                    self._outbox.append(SendToPeer(instance, AbortAck(key)))
            case MessageReceived(instance=instance, message=StageGrant() as message):
                if (problem := self.staging.granted(instance, message)) is not None:
                    transitions.close(self.requests[instance, message.part.key], problem, now)
            case MessageReceived(message=StageFree()):
                pass  # an answer to a final message, for earlier versions
            case ChunkReport(written=written):
                chunk = written.instance, written.key, written.token_start
                if (parts := self._chunk_reports.add("chunk", chunk, written)) is not None:
                    transitions.chunk_written(joined(parts), now)
            case PartReport(written=part):
                transitions.part_written(part, now)
            case GrammarReady(number=number, problem=problem):
                if (compiled := self._compiling.take(number)) is not None:
                    transitions.compiled(compiled, now)
                    if problem is not None:
                        compiled.retryable = False
                        transitions.close(compiled, f"the grammar {problem}", now)
            case StoreLoaded() | StoreWritten() | StorePinged() if self.kv_store is not None:
                if (loaded := self.kv_store.handle(event, now)) is not None:
                    transitions.loaded(loaded.owner, loaded.tokens, now)
            case LoadReported(instance=instance, load=load):
                if load.cache_reports and instance in transitions.spaces and self.limits.prefix_cache:
                    self.reports.subscribe(instance)
                elif not load.cache_reports:
                    self.reports.unsubscribe(instance)
            case PeerLost(instance=instance, reason=reason):
                transitions.spaces.pop(instance, None)
                self.reports.unsubscribe(instance)
                for request in [request for request in self.requests.values() if request.instance == instance]:
                    transitions.close(request, f"prefill lost the decode server: {reason}", now)
            case PeerClosed(instance=instance):
                self.staging.regions.pop(instance, None)
            case PeerRefused():
                pass  # logged by the control plane
            case _:
                raise TypeError(f"unexpected event: {event!r}")

    def peer_up(self, instance: InstanceId, pages: PageSpace, staged: Iterable[StagedRegion] = ()) -> None:
        """A decode server paired, with these pages; `staged` are the regions that go through its staging rings."""
        self._transitions.spaces[instance] = pages
        if regions := list(staged):
            self.staging.regions[instance] = regions

    def receive(self, request: PrefillRequest, now: float) -> None:
        """Queue a new request, now or when its grammar is compiled; or refuse it at once."""
        if request.ref in self.requests:
            self.counters["stale_messages"] += 1
            return
        if self._queued >= self.limits.max_queued_requests:
            self._start_waiting(now)  # many requests may arrive in one turn: make room before one is refused
        refusal = self._refusal(request)
        if refusal is not None:
            self.counters["requests_refused"] += 1
            self._transitions.reply(request, refusal)
            return
        self.counters["requests"] += 1
        self._expire_at = min(self._expire_at, request.deadline)
        self._transitions.receive(request)

    def fail(self, instance: InstanceId, key: TransferKey, reason: str, now: float) -> None:
        """Fail a transfer. Decode is told too if it has ended here: it waits for a message that cannot be sent."""
        request = self.requests.get((instance, key))
        if request is None:
            self._outbox.append(SendToPeer(instance, TransferFailed(key, reason, retryable=False)))
        else:
            request.retryable = False
            self._transitions.close(request, reason, now)

    def stop_accepting(self) -> None:
        """Refuse new requests from now on; decode servers use other prefill servers (shutdown, lost rank)."""
        self._transitions.leaving = True

    def fail_all(self, reason: str, now: float) -> None:
        """Fail every request (shutdown deadline, lost rank)."""
        for request in list(self.requests.values()):
            self._transitions.close(request, reason, now)

    def flush_cache(self) -> int:
        """Drop all cached prefixes; returns the number of pages. Pages in use are freed when their requests end."""
        if self.kv_store is not None:
            self.kv_store.stored.withdraw()
        return self.cache.flush()

    # -- decisions ---------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Handle what is due: deadlines, pages for waiting requests. Call once per loop turn."""
        if now >= self._expire_at:
            self._expire(now)
        if self.kv_store is not None:
            self.kv_store.send_next(now)
        self._start_waiting(now)
        for request in self._computing.computing_for(BEGUN_AFTER_S, now):
            self._report_begun(request)
        self.reports.due(now)

    def resumed(self, absent_s: float, now: float) -> None:
        """Nothing to do: a prefill scheduler does not wait for servers to pair, and no other server writes its pages,
        so it has no quarantine.
        """

    def next_step(self, now: float) -> PrefillStep | None:
        """The next step for the ranks, if one can start now.

        The commands to write its chunks are effects: the ranks get them before the step, and write a chunk as soon as
        it is computed. Chunks that are verified or staged are written only after `step_done`. Their staging regions are
        requested here, so that decode can grant them while the step runs.
        """
        step = self._computing.next_step(now)
        if step is None:
            return None
        for request, start, end in step.chunks:
            if request.staged:
                self.staging.request(request.ref, max(start, request.destination.prefix_tokens), end)
            elif not request.destination.verify:
                self._transitions.send(request, start, end, after=step.command_id)
                request.written = end
        return step

    def may_start_step(self) -> bool:
        """Whether the ranks take another step."""
        return self._computing.may_start_step()

    def use_waiting_time(self) -> None:
        """A prefill scheduler has nothing to do while no step can start."""

    def step_done(self, command_id: int, results: Sequence[StepResult], now: float) -> None:
        """The KV of the chunks of a step is in our pages: send what `next_step` has not sent. The last chunk of a
        prompt brings the first token of each sample.
        """
        self.counters["prefill_steps"] += 1
        for chunk, result in zip(self._computing.take(command_id, now), results, strict=True):
            request, start, end = chunk
            if request.state is not PrefillState.COMPUTING:
                continue
            if result.problem is not None:
                request.retryable = False
                request.too_complex = result.too_complex
                reason = result.problem if result.too_complex else f"the grammar cannot be followed: {result.problem}"
                self._transitions.close(request, reason, now)
                continue
            self.counters["prompt_tokens"] += end - start
            request.computed = end
            request.input_logprobs += result.prompt_logprobs
            if request.written < end:
                self._transitions.send(request, start, end)
            if end <= request.destination.prefix_tokens:
                self._report_begun(request)
            # after every chunk: to insert a long prompt all at once would delay its first token by milliseconds
            grant = request.granted
            self.cache.insert(request.token_ids, grant.pages, request.inserted, end=end, freed=grant.freed)
            self._computing.cached(request)
            if self.kv_store is not None and request.chain is not None:
                self.kv_store.offer(request.chain, request.token_ids, request.inserted)
            self._transitions.free_unseen(request)
            if chunk.last:
                request.first_tokens = result.drawn
                self._transitions.computed(request, now)

    def step_failed(self, command_id: int, reason: str, now: float) -> None:
        """The model could not run this step: its requests fail, the server continues."""
        self.counters["steps_failed"] += 1
        for request, _, _ in self._computing.take(command_id, now):
            if request.state is PrefillState.COMPUTING:
                self._transitions.close(request, f"the prefill step failed: {reason}", now)

    def take_effects(self) -> list[Effect]:
        """Everything decided since the last call, in order."""
        effects, self._outbox[:] = self._outbox[:], []
        return effects

    # -- state -------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not (self.requests or self._computing.steps)

    def state_counts(self) -> dict[str, int]:
        """Requests that have pages, but are in no step in flight, count as waiting."""
        counts = dict.fromkeys(_COUNTED_STATES, 0)
        for request in self.requests.values():
            counts[request.state] += 1
        in_no_step = len(self._computing) - self._running
        counts[PrefillState.COMPUTING] -= in_no_step
        counts[PrefillState.WAITING] += in_no_step
        return counts

    def gauges(self) -> dict[str, float]:
        """Occupancy, for the metrics."""
        load = self.load()
        return {
            "waiting_requests": load.waiting_requests,
            "running_requests": load.running_requests,
            "waiting_tokens": load.waiting_tokens,
            "cached_pages": len(self.cache),
            "staging_parts": self.staging.parts,
            **(self.kv_store.gauges() if self.kv_store is not None else {}),
        }

    @property
    def waiting_tokens(self) -> int:
        """Tokens that are not computed yet."""
        waiting = (*self._compiling, *self._waiting, *self._transitions.loading, *self._computing)
        return sum(request.prompt_tokens - request.computed for request in waiting)

    def load(self) -> Load:
        running, limits = self._running, self.limits
        tokens_per_s = self._computing.rate.per_s or 0.0
        return Load(
            waiting_requests=self._queued + len(self._transitions.loading) + len(self._computing) - running,
            running_requests=running,
            waiting_tokens=self.waiting_tokens,
            accepting=not self._transitions.leaving,
            window_tokens=2 * (limits.steps_in_flight * limits.chunk_size + int(ROUND_TRIP_S * tokens_per_s)),
            tokens_per_s=tokens_per_s,
        )

    def check_integrity(self) -> None:
        """Raise unless every page is accounted for. Without requests and store copies, every page must be free."""
        holds_pages = self.requests or (self.kv_store is not None and self.kv_store.busy)
        self.allocator.check_integrity(idle=not holds_pages)

    # -- requests ----------------------------------------------------------------------------------------------

    @property
    def _queued(self) -> int:
        """Requests that wait for their grammar or for pages."""
        return len(self._compiling) + len(self._waiting)

    @property
    def _running(self) -> int:
        """Requests that are in steps in flight."""
        return sum(request.state is PrefillState.COMPUTING for request in self._computing.running)

    def _refusal(self, request: PrefillRequest) -> TransferFailed | None:
        """The reply if a request is refused, or None. It is retryable if another server may take the request, or this
        one later.
        """
        refuse = functools.partial(TransferFailed, request.key, refused=True, leaving=self._transitions.leaving)
        if self._transitions.leaving:
            return refuse(reason="the prefill server is shutting down", retryable=True)
        if self._queued >= self.limits.max_queued_requests:
            reason = f"prefill has {self._queued} requests queued (max_queued_requests)"
            return refuse(reason=reason, retryable=True, full=True)
        if request.instance not in self._transitions.spaces:
            return refuse(reason="the decode server is not paired", retryable=True)
        problem = self.limits.describe_problem(
            request, self._transitions.spaces[request.instance], self.allocator.num_pages
        )
        return refuse(reason=problem, retryable=False) if problem is not None else None

    def _expire(self, now: float) -> None:
        """End requests whose deadline has passed."""
        still_open = [request for request in self.requests.values() if request.state is not PrefillState.CLOSING]
        self._expire_at = min((request.deadline for request in still_open if request.deadline > now), default=math.inf)
        for request in [request for request in still_open if request.deadline <= now]:
            request.retryable = False
            self._transitions.close(
                request, f"not done within its deadline of {request.destination.timeout_s:.1f} s", now
            )

    def _report_begun(self, request: PrefillRequest) -> None:
        """Tell decode that a prompt has begun, by an empty chunk, once. Needed if no chunk tells it soon: the step
        takes long, or has computed only tokens that decode has already.
        """
        if request.begun_reported or request.state is not PrefillState.COMPUTING or request.destination.verify:
            return
        request.begun_reported = True
        start = request.destination.prefix_tokens
        self._transitions.reply(request, ChunkArrived(request.key, start, start))

    def _start_waiting(self, now: float) -> None:
        while self._start_next(now):
            pass

    def _start_next(self, now: float) -> bool:
        """Start the first request that fits into the free pages. Smaller requests may overtake a larger one. When the
        oldest request was overtaken often enough (`oldest_is_due`), free pages are kept for it. A request that waits
        for a shared prefix delays no other.
        """
        misfits = 0
        for request in self._waiting:
            if request.awaits_prefix:
                continue
            if self._start(request, now):
                return True
            misfits += not request.awaits_prefix
            if misfits and (misfits == MAX_MISFITS or self._waiting.oldest_is_due):
                return False
        return False

    def _start(self, request: PrefillRequest, now: float) -> bool:
        """Allocate the pages of a request: cached ones for its prefix, and new ones. The last token is always computed,
        because its logits give the first output token. Returns False if pages are short, or if the request waits for
        another one that computes its prefix now.
        """
        if request.refused_at_chances == self.allocator.chances:
            return False
        most = request.prompt_tokens - 1
        logprobs = request.destination.logprobs
        if logprobs is not None and logprobs.start is not None and not request.destination.output_tokens:
            most = min(most, max(0, logprobs.start - 1))  # the first log-probability needs the logits before it
        first_sent = request.destination.prefix_tokens // self.limits.page_size
        prefix = self.cache.match(request.token_ids, most, first_sent)
        cached = len(prefix) * self.limits.page_size
        request.awaited = self._computing.prefixes.find(request.token_ids, cached, most, request.priority)
        if request.awaited is not None:
            self.counters["prefix_waits"] += 1
            return False
        freed = self.cache.first_needed(len(prefix), first_sent)
        pages = pages_for(request.prompt_tokens, self.limits.page_size)
        grant = self.allocator.grant(request.destination.rid, pages - len(prefix), shared=prefix[freed:], freed=freed)
        if grant is None:
            request.refused_at_chances = self.allocator.chances
            return False
        request.grant = grant
        request.cached = cached
        request.inserted = self.cache.after(prefix)
        self.counters["prefix_tokens_reused"] += request.cached
        self._transitions.start(request, most, now)
        return True
