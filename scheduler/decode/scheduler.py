"""The scheduler of a decode server: decides on memory, prefill servers, batches and the end of requests.

Pure: integers in, effects out; `now` is a parameter. One thread calls it, between model steps.

Events change what is known, a turn (`advance`) gives memory to whatever waits for it, and `next_step` fills the batch.
The states of a request are in messages/lifecycle.py, the rooms that hold its requests in rooms/rooms.py.

Three invariants:
- `Transitions.admit()` is the only transition into READY: after a transfer, a retraction, or the loss of a hot buffer.
- `Transitions.end()` is the only place that sends Finished or Failed, and the only transition into ENDED.
- A page that a remote writer may still write is not free: the pages of an attempt that was given up are quarantined
  until the writer has stopped (memory/holds.py).

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
from ..messages.counters import DECODE_COUNTERS
from ..messages.effects import Effect, Outbox, SendToFrontend
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
from .memory.hisparse_memory import HisparseMemory
from .memory.hot_buffers import HotLimits
from .memory.request_memory import RequestMemory
from .memory.resources import Resources
from .placement.peers import PrefillPeer, PrefillPeers
from .placer import Placer
from .requests.limits import DecodeLimits
from .requests.request import LocalPrompt, Prompt, Request
from .responses import failed, grammar_failure
from .rooms.batch import DecodeStep
from .rooms.rooms import Rooms
from .rooms.staging import RankRing
from .rooms.turns import Turns
from .submissions import Submissions
from .transitions import Transitions

log = logging.getLogger(__name__)

_COUNTED_STATES = tuple(state.value for state in State if state is not State.ENDED)


class DecodeScheduler:
    """Owns the requests, the page allocator and the batch of one decode server."""

    def __init__(
        self,
        limits: DecodeLimits,
        allocator: PageAllocator[KvPage],
        eos_token_ids: Iterable[int],
        hot_limits: HotLimits | None = None,
        rings: Sequence[RankRing] = (),
        store_limits: StoreLimits | None = None,
    ) -> None:
        """With `hot_limits`, KV is in host memory and running requests have hot buffers (HiSparse). `rings` are the
        staging rings of the ranks, if any. With `store_limits` there is a KV store.
        """
        self.limits = limits
        self.allocator = allocator
        self.cache = PrefixCache(allocator, limits.page_size, enabled=limits.prefix_cache, window=limits.window)
        self.counters: collections.Counter[str] = collections.Counter(dict.fromkeys(DECODE_COUNTERS, 0))
        self._outbox = Outbox()
        self.kv_store: KvStore[LocalPrompt] | None = (
            KvStore(store_limits, allocator, self.cache, self.counters, self._outbox)
            if store_limits is not None
            else None
        )
        uses = limits, allocator, self.cache, self.kv_store, self._outbox
        self.memory = RequestMemory(*uses) if hot_limits is None else HisparseMemory(*uses, hot_limits)
        resources = Resources(
            limits, allocator, self.cache, self.memory, self.kv_store, counters=self.counters, outbox=self._outbox
        )
        self.rates = resources.rates
        self.peers = PrefillPeers(limits.dispatch)
        self.rooms = rooms = Rooms(resources, rings, self.peers)
        self.placer = Placer(resources, rooms, self.peers)
        self._deadlines = Deadlines(resources, rooms, self.peers, self.placer)
        self.transitions = Transitions(
            resources, rooms, self.peers, self.placer, self._deadlines, frozenset(eos_token_ids)
        )
        self.requests = self.transitions.requests
        self._turns = Turns(limits, self.peers, rooms.computing.times)
        self.pause_s = 0.0
        """How long the next step waits while prefill computes on the same GPU; inf until the step in flight ends."""
        self._submissions = Submissions(resources, rooms, self.placer, self.requests)
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
        peers, transitions = self.peers, self.transitions
        match event:
            case Submit():
                self._submit(event, now)
            case Cancel(rid=rid, stopped=stopped):
                self.fail(rid, FinishReason("stop") if stopped else AbortedError("the client aborted the request"), now)
            case GrammarReady(number=number, problem=problem, slow=slow):
                transitions.compiled(number, problem, now, slow=slow)
            case MaskReady(number=number, problem=problem):
                request = self.rooms.batch.slow_masks.ready(number, slow=event.slow)
                if request is not None and problem is not None:
                    transitions.end(request, grammar_failure(problem, event.too_complex), now)
            case CommandDone(command_id=command_id):
                if self._reports.add("command", command_id, event) is not None:
                    self.memory.holds.completed(command_id)
            case CopyDone(copy=number, seconds=seconds):
                if self._reports.add("copy", number, event) is not None:
                    transitions.copied(self.memory.copies.end(number), seconds, now)
            case KvVerified(key=key, chunks=chunks):
                self.counters["chunks_verified"] += chunks
                if (reports := self._reports.add("verification", key, event)) is not None:
                    transitions.verified(key, first_problem(reports), now)
            case PartScattered(part=part) if self.rooms.prefilling.staging is not None:
                self.rooms.prefilling.staging.scattered(part)
                transitions.arrive(part.key, now)
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
                self.rooms.prefilling.peer_closed(instance, now)
            case PeersUnreachable(reasons=reasons):
                peers.unreachable = reasons
            case PeerRefused():
                pass  # logged by the control plane
            case _:
                raise TypeError(f"unexpected event: {event!r}")

    def _handle_message(self, instance: InstanceId, message: object, now: float) -> None:
        prefilling = self.rooms.prefilling
        self.peers.heard(instance, now)
        match message:
            case ChunkArrived():
                self.counters["chunks" if prefilling.chunk_arrived(message) else "stale_messages"] += 1
            case PrefillDone():
                self.transitions.prefill_done(message, now)
            case TransferFailed(key=key, reason=reason):
                log.log(logging.DEBUG if message.full else logging.WARNING, "transfer %s failed: %s", key, reason)
                if message.leaving:
                    self.peers.leaving(instance, now)
                self.transitions.transfer_failed(message, now)
            case AbortAck(key=key, late_writes=late_writes):
                prefilling.writer_stopped(key, late_writes=late_writes, now=now)
            case StageRequest() | StageArrived() | StageStopped():
                problem = prefilling.receive_staged(instance, message, now)
                if problem is not None:
                    self.transitions.break_off(message.part.key, instance, problem, now)
            case CachedPrefixes():
                self.peers.take_cache_report(instance, message)
            case _:
                raise TypeError(f"unexpected message from prefill: {message!r}")

    def _submit(self, submit: Submit, now: float) -> None:
        """Accept a prompt with all its samples, or refuse it at once."""
        error = self._submissions.refusal(submit, now)
        if error is None:
            self.transitions.submit(submit, now)
            return
        rids = (submit.rid, *submit.more_rids)
        self.counters["requests_refused"] += len(rids)
        self._outbox += [SendToFrontend(failed(rid, error)) for rid in rids]

    def peer_up(self, peer: PrefillPeer, staged: Iterable[StagedRegion] = ()) -> None:
        """A prefill server paired. `staged` are the regions that go through the staging rings."""
        self.peers.up(peer)
        if self.rooms.prefilling.staging is not None:
            self.rooms.prefilling.staging.peer_up(peer.instance, staged)
        for prompt in self.rooms.queued:
            prompt.refused_since = None  # the new server has not refused it
        self._peers_changed = True

    def fail(self, rid: str, outcome: FinishReason | RequestError, now: float) -> bool:
        """End a request before its last token. Returns False if it has ended."""
        request = self.requests.get(rid)
        if request is not None:
            self.transitions.end(request, outcome, now)
        return request is not None

    def fail_prompt(self, key: TransferKey, error: RequestError, now: float) -> None:
        """Fail the requests of this transfer. Unknown transfers have ended."""
        prompt = self.rooms.prefilling.prompts.get(key)
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
        prompt = self.rooms.queued.first
        if prompt is None or prompt.refusal is None or prompt.attempts or prompt.output_tokens:
            return None
        return prompt

    def hand_over(self, prompt: Prompt, to: "DecodeScheduler", now: float) -> None:
        """Move a queued prompt and its requests to the scheduler of another data-parallel rank."""
        self.rooms.queued.leave(prompt, now)
        self.counters["prompts_moved"] += 1
        for request in prompt.waiting:
            del self.requests[request.rid]
        to.transitions.adopt(prompt, now)

    def share_calls(self, other: "DecodeScheduler") -> None:
        """Share the record of accepted calls with the scheduler of another data-parallel rank: prompts of one call may
        go to different ranks, and are accepted or refused together.
        """
        self._submissions.calls = other._submissions.calls

    def flush_cache(self) -> int:
        """Drop all cached prefixes, also those of ended requests that are still to be added; returns the number of
        cached pages. Pages in use are freed when their requests end.
        """
        self.memory.inserts.drop_ended()
        if self.kv_store is not None:
            self.kv_store.stored.withdraw()
        return self.cache.flush()

    # -- decisions ---------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Handle what is due: deadlines, quarantine, memory for waiting requests. Call once per loop turn."""
        self.rooms.computing.times.running = ceil_div(len(self.rooms.batch.running), self.limits.stages)
        if self._peers_changed:
            self._peers_changed = False
            self.transitions.peers_changed(now)
        for request, error in self._deadlines.passed(self.requests, now):
            self.transitions.end(request, error, now)
        if self.memory.holds.quarantined:
            self.memory.release_due(now)
        if self.rooms.prefilling.staging is not None:
            self.rooms.prefilling.staging.due(now)
        self.transitions.take_back(now)
        self.transitions.give_memory(now)
        if self.kv_store is not None:
            self.kv_store.send_next(now)
        self._take_turns(now)

    def resumed(self, absent_s: float, now: float) -> None:
        """This process was stopped or starved for `absent_s`. That time does not count, neither for the wait for a
        prefill server nor for quarantines: the process could not pair, and received bytes are still in kernel buffers.
        Call before `advance`.
        """
        self._deadlines.resumed(now)
        self.rooms.prefilling.resumed(absent_s, now)

    def next_step(self, now: float) -> DecodeStep | None:
        """The next decode step for the ranks, if one can start now."""
        step = self._next_step(now) if self.may_start_step() else None
        if step is None:
            self.use_waiting_time()
        else:
            self._take_turns(now)
        return step

    def _take_turns(self, now: float) -> None:
        """Let prefill compute before the next step, if it does so on the same device."""
        self.pause_s = self._turns.pause_s(self.rooms.batch.running, now) if self.peers.any_beside else 0.0

    def _next_step(self, now: float) -> DecodeStep | None:
        self.transitions.fill_batch(now)
        self._ask_for_masks()
        able: list[Request] = []
        lacking: list[Request] = []
        for request in self.rooms.batch.next_batch():
            if request.state is State.RUNNING:  # make_room() for another request may have retracted it
                (able if self.transitions.make_room(request, now) else lacking).append(request)
        self.transitions.starving = any(request.state is State.RUNNING for request in lacking)
        paused = self.rooms.batch.paused
        batch = [request for request in able if request.state is State.RUNNING and request is not paused]
        apart = self.memory.fetches(batch)
        rows_next = apart and self._rows_waited
        chunks = []
        if (
            self.rooms.computing.prompts and not rows_next
        ):  # without rows, other requests may wait for the end of this step: their rows are in flight
            beside = batch or self.rooms.batch.continuing
            chunks = self.rooms.computing.next_chunks(beside, now, apart=apart or not batch)
        self._rows_waited = apart and bool(chunks)
        if self._rows_waited:
            batch = []
        if not batch and not chunks:
            return None
        self.rooms.computing.times.started(len(batch), sum(chunk.end - chunk.start for chunk in chunks), now)
        return self.rooms.batch.start_step(batch, self.memory.holds.next_id(), chunks)

    def may_start_step(self) -> bool:
        """Whether the ranks take another step."""
        return not self.pause_s and self.rooms.batch.may_start_step()

    def use_waiting_time(self) -> None:
        """Do work that would delay a step: call it when no step can start."""
        if self.memory.write_backs:
            self.memory.send_write_backs()
        if (inserts := self.memory.inserts).of_arrived or inserts.of_ended:
            inserts.add_some(running=bool(self.rooms.batch.running))

    @property
    def adds_pages(self) -> bool:
        """Whether further turns add pages of ended requests to the prefix cache. Until then these pages are held, and
        prompts may wait for them. While requests run, their steps bring enough turns.
        """
        return bool(self.memory.inserts.of_ended) and not self.rooms.batch.running

    def step_done(self, command_id: int, results: Sequence[StepResult], now: float) -> None:
        """Take the sampled token of each row, then the results of chunks. Results of requests that ended during the
        step are dropped.
        """
        step, seconds = self._finish_step(command_id, now)
        self.counters["decode_steps"] += bool(step.rows)
        self._deadlines.step_ended(prompts=bool(step.chunks))
        for row, result in zip(step.rows, results, strict=False):
            if row.request.state is not State.RUNNING:
                continue
            if result.problem is None:
                self.transitions.accept_token(row.request, result.drawn[0], now)
                if result.slow_mask and row.request.state is State.RUNNING:
                    self.rooms.batch.slow_masks.add(row.request)
            else:
                self.transitions.end(row.request, grammar_failure(result.problem, result.too_complex), now)
        self._ask_for_masks()
        for chunk, result in zip(step.chunks, results[len(step.rows) :], strict=True):
            if result.problem is not None and chunk.owner in self.rooms.computing.queue:
                error = grammar_failure(result.problem, result.too_complex)
                self.transitions.end_all(chunk.owner.prompt, error, now)
            self.transitions.computed(chunk, result, seconds, now)
        if step.chunks:
            self.transitions.admit_arrived(now)

    def _ask_for_masks(self) -> None:
        if self.rooms.batch.slow_masks.masks:
            self.counters["masks_prepared"] += self.rooms.batch.slow_masks.ask()

    def step_failed(self, command_id: int, reason: str, now: float) -> None:
        """The model could not run this step: its requests fail, the server continues."""
        self.counters["steps_failed"] += 1
        step, _ = self._finish_step(command_id, now)
        for row in step.rows:
            if row.request.state is State.RUNNING:
                self.transitions.end(row.request, ServerError(f"the decode step failed: {reason}"), now)
        for prompt in {chunk.owner.prompt for chunk in step.chunks if chunk.owner in self.rooms.computing.queue}:
            self.transitions.end_all(prompt, ServerError(f"the step that computed the prompt failed: {reason}"), now)

    def _finish_step(self, command_id: int, now: float) -> tuple[DecodeStep, float]:
        """The step that has ended, and how long it took."""
        step = self.rooms.batch.finish_step(command_id)
        self.memory.holds.completed(command_id)
        return step, self.rooms.computing.times.ended(now)

    def take_effects(self) -> list[Effect]:
        """Everything decided since the last call, in order."""
        effects, self._outbox[:] = self._outbox[:], []
        return effects

    # -- state -------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """No request, and nobody else may touch pages: no command, copy, verification or remote writer."""
        staging = self.rooms.prefilling.staging
        busy = self.requests or (staging is not None and not staging.idle)
        return not busy and self.memory.idle and (self.kv_store is None or not self.kv_store.busy)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the prompts in the queue."""
        return self.rooms.queued.tokens

    def gauges(self) -> dict[str, float]:
        """Occupancy, for the metrics."""
        return {
            **self.memory.gauges(),
            **self.rooms.prefilling.gauges(),
            **self.placer.gauges(),
            "running_requests": len(self.rooms.batch.running),
            "waiting_for_pages": self._waiting_for_pages(),
            "saved_requests": len(self.rooms.retracted.requests),
        }

    def _waiting_for_pages(self) -> int:
        """Requests of prompts in the queue, if the first one waits for pages: the others are behind it."""
        queue = self.rooms.queued
        first = queue.first
        return 0 if first is None or first.refusal is None else sum(len(prompt.waiting) for prompt in queue)

    def state_counts(self) -> dict[str, int]:
        counts = dict.fromkeys(_COUNTED_STATES, 0)
        for request in self.requests.values():
            counts[request.state] += 1
        return counts

    def load(self) -> Load:
        return Load(
            waiting_requests=len(self.rooms.compiling) + len(self.rooms.queued),
            running_requests=len(self.rooms.batch.running),
            waiting_tokens=self.waiting_tokens,
            cache_reports=self.peers.compares_caches,
        )

    def check_integrity(self) -> None:
        """Raise unless every page is accounted for and every request is in exactly the queue of its state."""
        self.memory.check_integrity(self.requests, idle=self.idle)
        if self.rooms.prefilling.staging is not None:
            self.rooms.prefilling.staging.check_integrity(idle=self.idle)
        for request in self.requests.values():
            assert self.rooms.states_of(request, self.memory) == [request.state], (request.rid, request.state)
