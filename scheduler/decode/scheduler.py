"""The scheduler of a decode server: decides on memory, prefill servers, batches and the end of requests.

Pure: integers in, effects out; `now` is a parameter. One thread calls it, between model steps.

    submit -> QUEUED -> PREFILLING -> ARRIVED --admit()--> READY -> RUNNING -> ENDED
                '-----> COMPUTING -----^  ^-- out of hot buffers --'    |
                 RESTORING <- SAVED <- SAVING <------- out of pages ----'  (RESTORING -> ARRIVED)

A prompt with a grammar is COMPILING before it is QUEUED. A prompt is PREFILLING on a prefill server, or COMPUTING here,
in chunks beside the running requests. With `verify_kv`, it is VERIFYING between PREFILLING and ARRIVED. It is LOADING
while KV from the KV store is copied into its pages, or (HiSparse) its cached prefix into its hot buffer. A request is
OPENING while its rows are copied into its hot buffer, between ARRIVED and READY.

Three invariants:
- `Transitions.admit()` is the only transition into READY: after a transfer, a retraction, or the loss of a hot buffer.
- `Transitions.end()` is the only place that sends Finished or Failed, and the only transition into ENDED.
- A page that a remote writer may still write is not free: the pages of an attempt that was given up are quarantined
  (`Quarantine`) until the writer has stopped.

Memory is over-committed: a request reserves its prompt and some growth, not its `max_new_tokens`. When the pool is
empty, a request is retracted and continues later with the same tokens.
"""

import collections
import logging
from collections.abc import Iterable, Sequence

from ...common.arithmetic import ceil_div
from ...common.errors import AbortedError, RequestError, ServerError, UnavailableError
from ...memory.index_spaces import KvPage
from ...memory.pages import PageAllocator
from ...memory.prefix_cache import PrefixCache
from ...transfer.control.events import (
    LoadReported,
    MessageReceived,
    PeerAlias,
    PeerClosed,
    PeerLost,
    PeerRefused,
    PeersUnreachable,
)
from ...transfer.plan.staged_regions import StagedRegion
from ...transfer.protocol.messages import (
    AbortAck,
    CachedPrefixes,
    ChunkArrived,
    InstanceId,
    Load,
    PrefillDone,
    StageArrived,
    StageRequest,
    StageStopped,
    TransferFailed,
    TransferKey,
)
from ..chunking.grammar_queue import GrammarQueue
from ..messages.counters import DECODE_COUNTERS
from ..messages.effects import Effect, Outbox
from ..messages.frontend import Cancel, FinishReason, Submit
from ..messages.lifecycle import State
from ..messages.ranks import (
    CommandDone,
    CopyDone,
    GrammarReady,
    HotCounters,
    KvVerified,
    MaskReady,
    PartScattered,
    StoreLoaded,
    StorePinged,
    StoreWritten,
)
from ..messages.reports import Reports, first_problem
from ..messages.step import StepResult
from ..store.kv_store import KvStore, StoreLimits
from .deadlines import Deadlines
from .dispatch.dispatcher import PrefillDispatcher
from .dispatch.prefill_peers import PrefillPeer
from .dispatch.staging import RankRing
from .dispatch.turns import Turns
from .memory.hot_buffers import HotLimits
from .memory.request_memory import RequestMemory
from .memory.resources import Resources
from .requests.limits import DecodeLimits
from .requests.request import LocalPrompt, Prompt, Request
from .responses import grammar_failure
from .run_queue import DecodeStep, RunQueue, SlowMasks
from .submissions import Submissions
from .transitions import Transitions

log = logging.getLogger(__name__)

_COUNTED_STATES = tuple(state.value for state in State if state is not State.ENDED)


class DecodeScheduler:
    """Owns the requests, the page allocator and the batch of one decode server."""

    def __init__(
        self,
        limits: DecodeLimits,
        pages: PageAllocator[KvPage],
        eos_token_ids: Iterable[int],
        hot_limits: HotLimits | None = None,
        rings: Sequence[RankRing] = (),
        store_limits: StoreLimits | None = None,
    ) -> None:
        """With `hot_limits`, KV is in host memory and running requests have hot buffers (HiSparse). `rings` are the
        staging rings of the ranks, if any. With `store_limits` there is a KV store.
        """
        self.limits = limits
        self.pages = pages
        self.cache = PrefixCache(pages, limits.page_size, enabled=limits.prefix_cache, window=limits.window)
        self.counters: collections.Counter[str] = collections.Counter(dict.fromkeys(DECODE_COUNTERS, 0))
        self._outbox = Outbox()
        self.memory = RequestMemory(pages, limits.page_size, hot_limits, self._outbox, limits.window)
        self.kv_store: KvStore[LocalPrompt] | None = (
            KvStore(store_limits, pages, self.cache, self.counters, self._outbox) if store_limits is not None else None
        )
        resources = Resources(
            limits, pages, self.cache, self.memory, self.kv_store, counters=self.counters, outbox=self._outbox
        )
        self.rates = resources.rates
        self.compiling: GrammarQueue[Prompt] = GrammarQueue(self._outbox)
        self.dispatcher = PrefillDispatcher(resources, rings)
        self.run_queue = RunQueue(limits, SlowMasks(self._outbox))
        self._deadlines = Deadlines(self.dispatcher)
        self.transitions = Transitions(
            resources,
            frozenset(eos_token_ids),
            compiling=self.compiling,
            dispatcher=self.dispatcher,
            run_queue=self.run_queue,
            deadlines=self._deadlines,
        )
        self.requests = self.transitions.requests
        self._turns = Turns(limits, self.dispatcher.peers, self.dispatcher.local.times)
        self.pause_s = 0.0
        """How long the next step waits while prefill computes on the same device; inf until the step in flight ends."""
        self._submissions = Submissions(
            resources,
            compiling=self.compiling,
            dispatcher=self.dispatcher,
            run_queue=self.run_queue,
            transitions=self.transitions,
        )
        self._rows_waited = False
        """The last step had only chunks, so the next one has only requests. A step that fetches rows for an evicting
        request cannot compute chunks, so the two kinds of step alternate.
        """
        self._reports = Reports(limits.ranks)
        self._hot_counters: dict[int, dict[str, float]] = {}
        """Totals of the hot buffers of each stage, by its first rank, which reports them."""
        self._peers_changed = False
        """Prefill servers have changed since the last turn: queued prompts may be too long for the present ones."""

    # -- events ------------------------------------------------------------------------------------------------

    def handle(self, event: object, now: float) -> None:
        """Take an event: of a client, of a rank, or of the control thread. Unknown rids and keys have ended."""
        remote, peers, transitions = self.dispatcher.remote, self.dispatcher.peers, self.transitions
        match event:
            case Submit():
                self._submissions.submit(event, now)
            case Cancel(rid=rid, stopped=stopped):
                self.fail(rid, FinishReason("stop") if stopped else AbortedError("the client aborted the request"), now)
            case GrammarReady(number=number, problem=problem, slow=slow):
                self._submissions.grammar_ready(number, problem, now, slow=slow)
            case MaskReady(number=number, problem=problem):
                request = self.run_queue.slow_masks.ready(number, slow=event.slow)
                if request is not None and problem is not None:
                    transitions.end(request, grammar_failure(problem, event.too_complex), now)
            case CommandDone(command_id=command_id):
                if self._reports.add("command", command_id, event) is not None:
                    self.memory.command_done(command_id)
            case CopyDone(copy=number, seconds=seconds):
                if self._reports.add("copy", number, event) is not None:
                    transitions.copied(self.memory.copies.end(number), seconds, now)
            case KvVerified(key=key, chunks=chunks):
                self.counters["chunks_verified"] += chunks
                if (reports := self._reports.add("verification", key, event)) is not None:
                    transitions.verified(key, first_problem(reports), now)
            case PartScattered(part=part):
                if (done := remote.staging.scattered(part)) is not None:
                    transitions.landed(done, now)
            case HotCounters(rank=rank, counters=counters):
                self._hot_counters[rank] = counters
                for name in counters:
                    self.counters[f"hot_{name}"] = int(sum(of_rank[name] for of_rank in self._hot_counters.values()))
            case StoreLoaded() | StoreWritten() | StorePinged() if self.kv_store is not None:
                loaded = self.kv_store.handle(event, now)
                if loaded is not None and loaded.owner.prompt.local is loaded.owner:  # a request still needs the prompt
                    transitions.prefix_stored(loaded.owner, loaded.tokens, now)
            case MessageReceived(instance=instance, message=message):
                self._handle_message(instance, message, now)
            case LoadReported(instance=instance, load=load):
                peers.report(instance, load)
                if not load.accepting:
                    peers.leaving(instance, now)
            case PeerAlias(endpoint=endpoint, instance=instance):
                peers.alias(instance, endpoint)
                self._peers_changed = True
            case PeerLost(instance=instance, reason=reason):
                peers.lost(instance, now)
                self.counters["peers_lost"] += 1
                transitions.peer_lost(instance, reason, now)
                self._peers_changed = True
            case PeerClosed(instance=instance):
                remote.peer_closed(instance, now)
            case PeersUnreachable(reasons=reasons):
                peers.unreachable = reasons
            case PeerRefused():
                pass  # logged by the control plane
            case _:
                raise TypeError(f"unexpected event: {event!r}")

    def _handle_message(self, instance: InstanceId, message: object, now: float) -> None:
        remote = self.dispatcher.remote
        self.dispatcher.peers.heard(instance, now)
        match message:
            case ChunkArrived():
                self.counters["chunks" if remote.chunk_arrived(message) else "stale_messages"] += 1
            case PrefillDone():
                self.transitions.prefill_done(message, now)
            case TransferFailed(key=key, reason=reason):
                log.log(logging.DEBUG if message.full else logging.WARNING, "transfer %s failed: %s", key, reason)
                if message.leaving:
                    self.dispatcher.peers.leaving(instance, now)
                self.transitions.transfer_failed(message, now)
            case AbortAck(key=key, late_writes=late_writes):
                remote.writer_stopped(key, late_writes=late_writes, now=now)
            case StageRequest() | StageArrived() | StageStopped():
                problem = remote.staging.receive(instance, message, now)
                if problem is not None:
                    self.transitions.break_off(message.part.key, instance, problem, now)
            case CachedPrefixes():
                self.dispatcher.peers.take_cache_report(instance, message)
            case _:
                raise TypeError(f"unexpected message from prefill: {message!r}")

    def peer_up(self, peer: PrefillPeer, staged: Iterable[StagedRegion] = ()) -> None:
        """A prefill server paired. `staged` are the regions that go through the staging rings."""
        self.dispatcher.peer_up(peer, staged)
        self._peers_changed = True

    def fail(self, rid: str, outcome: FinishReason | RequestError, now: float) -> bool:
        """End a request before its last token. Returns False if it has ended."""
        request = self.requests.get(rid)
        if request is not None:
            self.transitions.end(request, outcome, now)
        return request is not None

    def fail_prompt(self, key: TransferKey, error: RequestError, now: float) -> None:
        """Fail the requests of this transfer. Unknown transfers have ended."""
        prompt = self.dispatcher.remote.prompts.get(key)
        if prompt is not None:
            self.transitions.end_all(prompt, error, now)

    def stop_accepting(self) -> None:
        """Refuse new requests from now on (shutdown)."""
        self._submissions.accepting = False

    def fail_all(self, reason: str, now: float) -> None:
        """Fail every open request (shutdown deadline, lost rank)."""
        for request in list(self.requests.values()):
            self.transitions.end(request, UnavailableError(reason), now)

    @property
    def first_without_memory(self) -> Prompt | None:
        """The first prompt of the queue, if it waits for pages and is new: no prefill attempt, no output. Another
        data-parallel rank may take it.
        """
        prompt = self.dispatcher.queue.first
        if prompt is None or prompt.refusal is None or prompt.attempts or prompt.output_tokens:
            return None
        return prompt

    def hand_over(self, prompt: Prompt, to: "DecodeScheduler", now: float) -> None:
        """Move a queued prompt and its requests to the scheduler of another data-parallel rank."""
        self.dispatcher.release(prompt, now)
        self.counters["prompts_moved"] += 1
        for request in prompt.waiting:
            to.requests[request.rid] = self.requests.pop(request.rid)
            to._deadlines.watch(request)
        to.dispatcher.adopt(prompt, now)

    def share_calls(self, other: "DecodeScheduler") -> None:
        """Share the record of accepted calls with the scheduler of another data-parallel rank: prompts of one call may
        go to different ranks, and are accepted or refused together.
        """
        self._submissions.calls = other._submissions.calls

    def flush_cache(self) -> int:
        """Drop all cached prefixes; returns the number of pages. Pages in use are freed when their requests end."""
        if self.kv_store is not None:
            self.kv_store.stored.withdraw()
        return self.cache.flush()

    # -- decisions ---------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Handle what is due: deadlines, quarantine, memory for waiting requests. Call once per loop turn."""
        self.dispatcher.local.times.running = ceil_div(len(self.run_queue.running), self.limits.stages)
        if self._peers_changed:
            self._peers_changed = False
            self._submissions.peers_changed(now)
        for request, error in self._deadlines.passed(self.requests, now):
            self.transitions.end(request, error, now)
        for quarantined in self.dispatcher.remote.take_released(now):
            self.memory.release_grant(quarantined.grant)  # a CopyPage in flight may still access a page of it
            if quarantined.hot_grant is not None and self.memory.hot is not None:
                self.memory.hot.release_quarantined(quarantined.hot_grant)
        self.transitions.take_back(now)
        self.transitions.give_memory(now)
        if self.kv_store is not None:
            self.kv_store.advance(now)
        self.pause_s = self._turns.pause_s(self.run_queue.running, now)

    def resumed(self, absent_s: float, now: float) -> None:
        """This process was stopped or starved for `absent_s`. That time does not count, neither for the wait for a
        prefill server nor for quarantines: the process could not pair, and received bytes are still in kernel buffers.
        Call before `advance`.
        """
        self._deadlines.resumed(now)
        self.dispatcher.remote.resumed(absent_s, now)

    def next_step(self, now: float) -> DecodeStep | None:
        """The next decode step for the ranks, if one can start now."""
        step = self._next_step(now) if self.may_start_step() else None
        if step is None:
            self.use_waiting_time()
        else:
            self.pause_s = self._turns.pause_s(self.run_queue.running, now)
        return step

    def _next_step(self, now: float) -> DecodeStep | None:
        self.transitions.fill_batch(now)
        self._ask_for_masks()
        able: list[Request] = []
        lacking: list[Request] = []
        for request in self.run_queue.next_batch():
            if request.state is State.RUNNING:  # make_room() for another request may have retracted it
                (able if self.transitions.make_room(request, now) else lacking).append(request)
        self.transitions.starving = any(request.state is State.RUNNING for request in lacking)
        paused = self.run_queue.paused
        batch = [request for request in able if request.state is State.RUNNING and request is not paused]
        apart = self.memory.fetches(batch)
        rows_next = apart and self._rows_waited
        chunks = []
        if not rows_next:  # without rows, other requests may wait for the end of this step: their rows are in flight
            beside = batch or self.run_queue.continuing
            chunks = self.dispatcher.local.next_chunks(beside, now, apart=apart or not batch)
        self._rows_waited = apart and bool(chunks)
        if self._rows_waited:
            batch = []
        if not batch and not chunks:
            return None
        self.dispatcher.local.times.started(len(batch), sum(chunk.end - chunk.start for chunk in chunks), now)
        return self.run_queue.start_step(batch, self.memory.next_command(), self.memory.hot_slot, chunks)

    def may_start_step(self) -> bool:
        """Whether the ranks take another step."""
        return not self.pause_s and self.run_queue.may_start_step()

    def use_waiting_time(self) -> None:
        """Do work that would delay a step: call it when no step can start."""
        self.memory.send_write_backs()
        self.transitions.insert_some()

    def step_done(self, command_id: int, results: Sequence[StepResult], now: float) -> None:
        """Take the sampled token of each row, then the results of chunks. Results of requests that ended during the
        step are dropped.
        """
        step, seconds = self._finish_step(command_id, now)
        self.counters["decode_steps"] += bool(step.rows)
        self.transitions.lateness.step_ended(prompts=bool(step.chunks))
        for row, result in zip(step.rows, results, strict=False):
            if row.request.state is not State.RUNNING:
                continue
            if result.problem is None:
                self.transitions.accept_token(row.request, result.drawn[0], now)
                if result.slow_mask and row.request.state is State.RUNNING:
                    self.run_queue.slow_masks.add(row.request)
            else:
                self.transitions.end(row.request, grammar_failure(result.problem, result.too_complex), now)
        self._ask_for_masks()
        for chunk, result in zip(step.chunks, results[len(step.rows) :], strict=True):
            if result.problem is not None and chunk.prompt in self.dispatcher.local.queue:
                error = grammar_failure(result.problem, result.too_complex)
                self.transitions.end_all(chunk.prompt.prompt, error, now)
            self.transitions.computed(chunk, result, seconds, now)
        if step.chunks:
            self.transitions.admit_arrived(now)

    def _ask_for_masks(self) -> None:
        self.counters["masks_prepared"] += self.run_queue.slow_masks.ask()

    def step_failed(self, command_id: int, reason: str, now: float) -> None:
        """The model could not run this step: its requests fail, the server continues."""
        self.counters["steps_failed"] += 1
        step, _ = self._finish_step(command_id, now)
        for row in step.rows:
            if row.request.state is State.RUNNING:
                self.transitions.end(row.request, ServerError(f"the decode step failed: {reason}"), now)
        for prompt in {chunk.prompt.prompt for chunk in step.chunks if chunk.prompt in self.dispatcher.local.queue}:
            self.transitions.end_all(prompt, ServerError(f"the step that computed the prompt failed: {reason}"), now)

    def _finish_step(self, command_id: int, now: float) -> tuple[DecodeStep, float]:
        """The step that has ended, and how long it took."""
        step = self.run_queue.finish_step(command_id)
        self.memory.command_done(command_id)
        return step, self.dispatcher.local.times.ended(now)

    def take_effects(self) -> list[Effect]:
        """Everything decided since the last call, in order."""
        return self._outbox.take_all()

    # -- state -------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """No request, no page in quarantine, no command and no copy in flight."""
        busy = self.requests or len(self.dispatcher.remote.quarantine)
        return not busy and self.memory.idle and (self.kv_store is None or not self.kv_store.busy)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the prompts in the queue."""
        return self.dispatcher.queue.tokens

    def gauges(self) -> dict[str, float]:
        """Occupancy, for the metrics."""
        return {
            **self.memory.gauges(),
            **self.dispatcher.remote.staging.gauges(),
            **self.dispatcher.placer.gauges(),
            "running_requests": len(self.run_queue.running),
            "waiting_for_pages": self._waiting_for_pages(),
            "quarantined_pages": self.dispatcher.remote.quarantine.pages,
            "quarantined_hot_pages": self.dispatcher.remote.quarantine.hot_pages,
            "cached_pages": len(self.cache),
            "saved_requests": len(self.transitions.retracted),
            **(self.kv_store.gauges() if self.kv_store is not None else {}),
        }

    def _waiting_for_pages(self) -> int:
        """Requests of prompts in the queue, if the first one waits for pages: the others are behind it."""
        queue = self.dispatcher.queue
        first = queue.first
        return 0 if first is None or first.refusal is None else sum(len(prompt.waiting) for prompt in queue)

    def state_counts(self) -> dict[str, int]:
        counts = dict.fromkeys(_COUNTED_STATES, 0)
        for request in self.requests.values():
            counts[request.state] += 1
        return counts

    def load(self) -> Load:
        return Load(
            waiting_requests=len(self.compiling) + len(self.dispatcher.queue),
            running_requests=len(self.run_queue.running),
            waiting_tokens=self.waiting_tokens,
            cache_reports=self.dispatcher.peers.compares_caches,
        )

    def check_integrity(self) -> None:
        """Raise unless every page is accounted for and every request is in exactly the queue of its state."""
        self.memory.check_integrity(self.requests, idle=self.idle)
        self.dispatcher.remote.staging.check_integrity(idle=self.idle)
        computing = set(self.dispatcher.local.queue)
        for request in self.requests.values():
            prompt = request.prompt
            in_transfer = prompt in self.dispatcher.remote.prompts.values() and request in prompt.waiting
            queued_as = (
                (State.COMPILING, prompt in self.compiling and request in prompt.waiting),
                (State.QUEUED, prompt in self.dispatcher.queue and request in prompt.waiting),
                (request.state, in_transfer and request.state in (State.PREFILLING, State.VERIFYING)),
                (State.LOADING, in_transfer and prompt.attempt is not None and prompt.attempt.held is not None),
                (State.LOADING, prompt.local in self.dispatcher.local.loading and request in prompt.waiting),
                (State.COMPUTING, prompt.local in computing and request in prompt.waiting),
                (State.ARRIVED, request in self.run_queue.arrived),
                (State.OPENING, request in self.run_queue.opening and self.memory.copies.is_in(request, "open")),
                (State.READY, request in self.run_queue.ready),
                (State.RUNNING, request in self.run_queue.running),
                (State.SAVING, request in self.transitions.retracted and self.memory.copies.is_in(request, "save")),
                (State.SAVED, request in self.transitions.retracted and self.memory.copies.of(request) is None),
                (State.RESTORING, self.memory.copies.is_in(request, "restore")),
            )
            found = [state for state, is_queued in queued_as if is_queued]
            assert found == [request.state], (request.rid, request.state)
