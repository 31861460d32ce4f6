"""The decode server's decisions: who gets memory, which prefill serves whom, who is in the batch, who has ended.

Pure: integers in, effects out; `now` is a parameter. One thread calls it, between model steps.

    submit -> QUEUED -> RESERVED -> PREFILLING -> ARRIVED --admit()--> READY -> RUNNING -> DRAINING -> FREED
                                                   ^  ^-- out of hot buffers --'    |
                                                   '--- RETRACTED <-- out of pages -'

Three rules carry the safety of the whole thing:
- **One door.** `admit()` is the only edge into READY: after a transfer, after a retraction, after being parked.
- **One terminal event.** `_end()` is the only place that sends Finished or Failed, and it is the edge into DRAINING.
- **A page that a remote writer may still write is not free.** The pages of an attempt that was given up go behind a
  fence (`quarantine.py`) until the writer has stopped.

Memory is over-committed on purpose: a request reserves its prompt and some growth, not all it might ever generate. When
the pool runs dry, somebody is retracted (`retraction.py`) and goes on later with the same tokens.
"""

import collections
import math
from collections.abc import Iterable, Sequence

import msgspec

from ...configs.errors import AbortedError, RequestError, ServerError, UnavailableError
from ...configs.sampling import TokenLogprob
from ...memory.index_spaces import KvPage
from ...memory.pages import PageAllocator, PageGrant
from ...memory.prefix_cache import PrefixCache
from ...transfer.plan.staged_regions import StagedRegion
from ...transfer.protocol.messages import (
    ChunkArrived,
    InstanceId,
    Load,
    PrefillDone,
    StageArrived,
    StagePart,
    StageRequest,
    StageStopped,
    TransferKey,
)
from ..messages.counters import DECODE_COUNTERS
from ..messages.effects import ConnectPeer, CopyPage, Effect, SendToFrontend
from ..messages.frontend import FinishReason, Prefilled, Submit, Tokens
from ..messages.lifecycle import State
from .deadlines import Deadlines
from .dispatch.dispatcher import DecodeLimits, PrefillDispatcher
from .dispatch.staging import RankRing
from .memory.background_copies import CopyKind
from .memory.hot_buffers import HotLimits
from .memory.request_memory import RequestMemory
from .requests.request import Prompt, Request
from .responses import failed, finished, overloaded, refusal, too_long
from .retraction import Retractions
from .run_queue import DecodeRow, DecodeStep, RunQueue

MAX_ATTEMPTS = 2
"""One try and one retry, into fresh pages, on another prefill server where there is one."""
READY_AHEAD = 4
"""Requests that wait for places in the batch, so that one which becomes free is taken at once."""
_WITH_KV = (State.ARRIVED, State.READY, State.RUNNING)
"""States in which the KV of all tokens but the newest is in the request's pages."""


class DecodeScheduler:
    """Owns every request, the page allocator and the batch of one decode server."""

    def __init__(
        self,
        limits: DecodeLimits,
        pages: PageAllocator[KvPage],
        eos_token_ids: Iterable[int],
        hot_limits: HotLimits | None = None,
        rings: Sequence[RankRing] = (),
    ) -> None:
        """With `hot_limits` KV is in host memory, and running requests have hot buffers (HiSparse). `rings` are the
        staging rings of the ranks, if they have them.
        """
        self.limits = limits
        self.pages = pages
        self.cache = PrefixCache(pages, limits.page_size, enabled=limits.prefix_cache)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.requests: dict[str, Request] = {}
        """Requests whose client has no answer yet, by rid."""
        self.counters: collections.Counter[str] = collections.Counter(dict.fromkeys(DECODE_COUNTERS, 0))
        self.dispatcher = PrefillDispatcher(limits, pages, self.cache, self.counters, rings)
        self._effects = self.dispatcher.effects  # one list for all, so that the order is kept
        self.memory = RequestMemory(pages, limits.page_size, hot_limits, self._effects)
        self.commands = self.memory.commands
        self.hot = self.memory.hot
        self.runs = RunQueue(stages=limits.stages, overlap=limits.overlap, most_running=limits.max_running_requests)
        self.retracted = Retractions(limits, self.memory, self.runs, self.dispatcher, self.counters)
        self._deadlines = Deadlines(self.dispatcher)
        self._starving = False
        """A running request waits for a page: what becomes free is for it."""
        self._draining: set[Request] = set()
        self._accepting = True
        self._call: str | None = None
        """The first prompt of the last call that was let in (`Submit.follows`)."""
        self._peers_changed = False
        """Since the last turn, so that prompts in the queue may have become too long."""

    # -- what happens: events from clients ---------------------------------------------------------------------

    def submit(self, submit: Submit, now: float) -> None:
        """Queue a prompt with all its samples, or answer at once why not."""
        rids = (submit.rid, *submit.more_rids)
        error = self._refusal(submit, now)
        if error is not None:
            self.counters["requests_refused"] += len(rids)
            self._effects += [SendToFrontend(failed(rid, error)) for rid in rids]
            return
        deadline = now + min(submit.timeout_s or math.inf, self.limits.request_timeout_s)
        prompt = self.dispatcher.new_prompt(
            submit.prompt_ids, endpoint=submit.endpoint, room=submit.room, priority=submit.priority, now=now
        )
        for index, rid in enumerate(rids):
            sampling = msgspec.structs.replace(submit.sampling, seed=submit.sampling.seed + index)
            self.requests[rid] = request = Request(
                rid, prompt, sampling, deadline=deadline, now=now, sample=index, logprobs=submit.logprobs
            )
            prompt.members.append(request)
            self._deadlines.watch(request)
        self.counters["requests"] += len(rids)
        self.dispatcher.enqueue(prompt, now)
        if prompt.endpoint is not None:
            self._effects.append(ConnectPeer(prompt.endpoint, submit.client))

    def cancel(self, rid: str, now: float, *, stopped: bool = False) -> None:
        """The client has gone or, with `stopped`, has all it wants. Unknown rids have ended already."""
        request = self.requests.get(rid)
        if request is not None:
            self._end(request, FinishReason("stop") if stopped else AbortedError("the client aborted the request"), now)

    def stop_accepting(self) -> None:
        """Refuse new requests from now on (shutdown)."""
        self._accepting = False

    def fail_all(self, error: RequestError, now: float) -> None:
        """Give every open request this answer (shutdown deadline)."""
        for request in list(self.requests.values()):
            self._end(request, error, now)

    # -- what happens: events from prefill servers -------------------------------------------------------------

    def peer_up(
        self,
        instance: InstanceId,
        endpoint: str,
        staged: Iterable[StagedRegion] = (),
        *,
        capacity: float = math.inf,
    ) -> None:
        """A prefill server paired, which stages these links."""
        self.dispatcher.peers.up(instance, endpoint, capacity)
        self.dispatcher.staging.peer_up(instance, staged)
        for prompt in self.dispatcher.queue:
            prompt.refused_since = None  # not by this one
        self._peers_changed = True

    def peer_alias(self, instance: InstanceId, endpoint: str) -> None:
        self.dispatcher.peers.alias(instance, endpoint)
        self._peers_changed = True

    def peer_load(self, instance: InstanceId, load: Load) -> None:
        self.dispatcher.peers.report(instance, load)

    def peer_leaving(self, instance: InstanceId, now: float) -> None:
        """It gets no more prompts. Those that it has it may finish."""
        self.dispatcher.peers.leaving(instance, now)

    def peer_lost(self, instance: InstanceId, reason: str, now: float) -> None:
        """What it has not finished goes elsewhere, or waits a moment for it to return. It may still be writing."""
        self.dispatcher.peers.lost(instance, now)
        self.counters["peers_lost"] += 1
        for prompt in self.dispatcher.of_peer(instance):
            self.dispatcher.give_up(prompt, f"prefill server lost: {reason}", tell=True)
            self._retry_or_fail(prompt, now)
        self._peers_changed = True

    def peer_closed(self, instance: InstanceId, now: float) -> None:
        self.dispatcher.quarantine.writer_closed(instance, now)
        self.dispatcher.staging.peer_closed(instance, now)

    def chunk_arrived(self, chunk: ChunkArrived) -> None:
        self.counters["chunks" if self.dispatcher.chunk_arrived(chunk) else "stale_messages"] += 1

    def prompt_of(self, key: TransferKey) -> Prompt | None:
        """The prompt this transfer serves now; None for a stale or unknown key."""
        return self.dispatcher.prefilling.get(key)

    def prefill_done(self, done: PrefillDone, now: float) -> None:
        """All KV and the first token of every sample are here."""
        self.dispatcher.writer_stopped(done.key, late_writes=False, now=now)  # our Abort may have crossed it
        prompt = self.dispatcher.prefilling.get(done.key)
        if prompt is None:
            self.counters["stale_messages"] += 1
            return
        problem = self.dispatcher.check_complete(prompt, done)
        if problem is not None:
            self.transfer_failed(done.key, problem, retryable=True, late_writes=True, now=now)
            return
        self._count_transfer(prompt, done)
        self.dispatcher.pace.served(now)
        self.dispatcher.leave(prompt)
        grant = prompt.grant
        assert grant is not None, f"prompt {prompt.prompt_id} arrived without pages"
        prompt.grant = None
        self.cache.insert(prompt.token_ids, grant.pages)
        for request in prompt.waiting:
            request.lifecycle.advance(State.ARRIVED, now)
            request.done = request.done or done
            self._copy_tail(prompt, request, grant)
            if not prompt.output_tokens:
                self._effects.append(SendToFrontend(Prefilled(request.rid, done.cached_tokens, done.input_logprobs)))
            self.runs.arrived.push(request)
            self._accept_token(request, done.first_tokens[request.sample], now)
        self.commands.release(grant)
        self._admit_arrived(now)

    def transfer_failed(
        self,
        key: TransferKey,
        reason: str,
        *,
        retryable: bool,
        late_writes: bool,
        now: float,
        refused: bool = False,
        full: bool = False,
    ) -> None:
        """The writer has stopped without having finished, or has `refused` to begin because it is `full` or shuts down.
        Nobody may be waiting any more.
        """
        prompt = self.dispatcher.prefilling.get(key)
        self.counters["stale_messages" if prompt is None else "transfers_failed"] += 1
        if prompt is not None:
            self.dispatcher.give_up(prompt, reason, tell=False)
        self.dispatcher.writer_stopped(key, late_writes=late_writes, now=now)
        if prompt is None:
            return
        if retryable and refused:
            self._refused(prompt, now, full=full)
        elif retryable:
            self._retry_or_fail(prompt, now)
        else:
            self._end_all(prompt, ServerError(f"prefill refused the request: {reason}"), now)

    def abort_acked(self, key: TransferKey, late_writes: bool, now: float) -> None:
        self.dispatcher.writer_stopped(key, late_writes=late_writes, now=now)

    def stage_message(
        self, instance: InstanceId, message: StageRequest | StageArrived | StageStopped, now: float
    ) -> None:
        """Prefill asks for room in a staging ring, has filled it or will not. One that asks for nonsense is refused."""
        problem = self.dispatcher.staging.receive(instance, message, now)
        prompt = self.dispatcher.prefilling.get(message.part.key)
        if problem is not None and prompt is not None and prompt in self.dispatcher.of_peer(instance):
            self.dispatcher.give_up(prompt, problem, tell=True)
            self._end_all(prompt, ServerError(f"prefill broke the protocol: {problem}"), now)

    def part_scattered(self, part: StagePart) -> PrefillDone | None:
        """A rank has scattered a staged part. Returns the PrefillDone that waited for it, if it was the last one."""
        return self.dispatcher.staging.scattered(part)

    # -- the one door ------------------------------------------------------------------------------------------

    def admit(self, request: Request, now: float) -> None:
        """Let a request whose KV is here run: after its transfer, with or without PP, and after a retraction.

        This is the only edge into READY. What a running request needs it has by now: with HiSparse its hot buffer, with
        all its rows where it is resident.
        """
        request.lifecycle.advance(State.READY, now)
        self.runs.ready.push(request)

    # -- decisions ---------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Everything that is due: deadlines, fences, memory for those that wait. Call once per loop turn."""
        if self._peers_changed:
            self._end_too_long(now)
        for request, error in self._deadlines.passed(self.requests.values(), now):
            self._end(request, error, now)
        self.dispatcher.staging.due(now)
        for quarantined in self.dispatcher.quarantine.take_due(now, scattering=self.dispatcher.staging.scattering):
            self.pages.release(quarantined.grant)
            self._free_drained(quarantined.prompt, now)
        self._admit_arrived(now)
        self._let_in(now)
        while self.memory.call_in([*self.runs.ready, *self.runs.running]):
            self._let_in(now)
        self._reopen_hot(now)

    def next_step(self, now: float) -> DecodeStep | None:
        """The next decode step to give to the ranks; None when there is none to give, for now or at all."""
        if not self.runs.may_give_step():
            return None
        for request in self.runs.fill():
            request.lifecycle.advance(State.RUNNING, now)
        batch = self.runs.next_batch()
        # one that lacks a page is left out until there is one
        able = {
            request for request in batch if request.state is State.RUNNING and self.retracted.make_room(request, now)
        }
        self._starving = any(request.state is State.RUNNING and request not in able for request in batch)
        batch = [
            request
            for request in batch
            if request in able and request.state is State.RUNNING and request is not self.runs.held_back
        ]
        return self.runs.give(batch, self.commands.next(), self.hot) if batch else None

    def step_done(self, command_id: int, tokens: list[TokenLogprob], now: float) -> None:
        """The sampled token of each row. Those of requests that ended during the step are dropped."""
        self.counters["decode_steps"] += 1
        for row, token in zip(self._take_step(command_id), tokens, strict=True):
            if row.request.state is State.RUNNING:
                self._accept_token(row.request, token, now)

    def step_failed(self, command_id: int, reason: str, now: float) -> None:
        """The model could not run this step: its requests fail, the server goes on."""
        self.counters["steps_failed"] += 1
        for row in self._take_step(command_id):
            if row.request.state is State.RUNNING:
                self._end(row.request, ServerError(f"the decode step failed: {reason}"), now)

    def command_done(self, command_id: int) -> None:
        """All ranks have copied a page to another."""
        self.commands.done(command_id)

    def copy_done(self, number: int, now: float) -> None:
        """All ranks have made a copy beside the steps. Its request may have ended."""
        copy = self.memory.copy_done(number)
        request = copy.request
        if self.requests.get(request.rid) is not request:
            return
        match copy.kind:
            case "load":
                self.retracted.loaded(request, now)
                self._admit_arrived(now)
            case "open":
                self.admit(request, now)
            case "save":
                pass  # it waits in line for pages

    def take_effects(self) -> list[Effect]:
        """Everything decided since the last call, in order."""
        effects = self._effects[:]
        self._effects.clear()
        return effects

    # -- what can be seen --------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """No request anywhere, not even one that drains, and nothing under way."""
        under_way = len(self.commands) or self.commands.resting or len(self.memory.copies)
        return not (self.requests or self._draining or len(self.dispatcher.quarantine) or under_way)

    @property
    def running(self) -> int:
        return len(self.runs.running)

    def state_counts(self) -> dict[str, int]:
        counts = {state.value: 0 for state in State if state is not State.FREED}
        for request in [*self.requests.values(), *self._draining]:
            counts[request.state.value] += 1
        return counts

    def load(self) -> Load:
        return Load(
            waiting_requests=len(self.dispatcher.queue),
            running_requests=len(self.runs.running),
            waiting_tokens=self.dispatcher.queue.tokens,
        )

    def check_integrity(self) -> None:
        """Every page accounted for, every request in exactly the place its state says."""
        self.memory.check_integrity(self.requests, idle=self.idle)
        self.dispatcher.staging.check_integrity(idle=self.idle)
        for request in self.requests.values():
            prompt = request.prompt
            places = {
                State.QUEUED: prompt in self.dispatcher.queue and request in prompt.waiting,
                State.PREFILLING: prompt in self.dispatcher.prefilling.values() and request in prompt.waiting,
                State.ARRIVED: request in self.runs.arrived or self._is_copied(request, "open"),
                State.READY: request in self.runs.ready,
                State.RUNNING: request in self.runs.running,
                State.RETRACTED: request in self.retracted.line or self._is_copied(request, "load"),
            }
            assert [state for state, there in places.items() if there] == [request.state], (request.rid, request.state)

    def _is_copied(self, request: Request, kind: CopyKind) -> bool:
        copy = self.memory.copies.of(request)
        return copy is not None and copy.kind == kind

    # -- refusing ----------------------------------------------------------------------------------------------

    def _refusal(self, submit: Submit, now: float) -> RequestError | None:
        """Why this prompt is not let in. A call with several prompts is let in as a whole, if there is room for its
        first one: with room for each alone, it would rarely find that for all at once.
        """
        if not self._accepting:
            return UnavailableError("the server is shutting down")
        prefill_tokens = self.dispatcher.peers.largest_prompt(submit.endpoint)
        error = refusal(submit, self.requests, self.pages.num_pages, prefill_tokens, self.limits.page_size)
        if error is not None or (submit.follows is not None and submit.follows == self._call):
            return error
        if len(self.dispatcher.queue) >= self.limits.max_queued_requests:
            self._call = None
            return overloaded(self.limits.max_queued_requests, self.dispatcher.expected_wait_s(now))
        self._call = submit.rid
        return None

    def _end_too_long(self, now: float) -> None:
        """End those in the queue that none of the prefill servers there are now can hold."""
        self._peers_changed = False
        for prompt in list(self.dispatcher.queue):
            most_tokens = self.dispatcher.peers.largest_prompt(prompt.endpoint)
            if prompt.tokens > most_tokens:
                self._end_all(prompt, too_long(prompt.tokens, prompt.output_tokens, most_tokens), now)

    # -- letting in --------------------------------------------------------------------------------------------

    def _count_transfer(self, prompt: Prompt, done: PrefillDone) -> None:
        self.counters["transfers"] += 1
        self.counters["transfer_bytes"] += done.bytes_written
        self.counters["transfer_writes"] += done.writes
        self.counters["prompt_tokens"] += prompt.tokens
        self.counters["prefix_tokens_reused"] += prompt.attempt.prefix_tokens if prompt.attempt is not None else 0
        self.retracted.rates.prefilled_tokens.measured(done.prompt_tokens - done.cached_tokens, done.compute_s)

    def _copy_tail(self, prompt: Prompt, request: Request, grant: PageGrant[KvPage]) -> None:
        """A sample that has its own last prompt page gets what prefill wrote into the prompt's."""
        full = prompt.tokens // self.limits.page_size
        if prompt.tokens % self.limits.page_size and request.pages[full] != grant.pages[full]:
            self._effects.append(CopyPage(self.commands.next(), grant.pages[full], request.pages[full]))

    def _let_in(self, now: float) -> None:
        """Those that wait for pages: who had some before goes first, unless somebody of a higher priority waits. What
        becomes free is for one that starves.
        """
        if self._starving:
            return
        while self.memory.may_admit() and self.retracted.resume():
            pass
        waits = self.retracted.line
        above = waits.first.priority if len(waits) else None
        for priority in self.dispatcher.dispatch(now, above=above, keep=self._growth()):
            waits.passed_by(priority)

    def _growth(self) -> int:
        """Pages to be left for those that run, while enough wait for a place in the batch: one more of those would only
        be retracted for them.
        """
        if len(self.runs.ready) < READY_AHEAD or not len(self.dispatcher.queue):
            return 0
        return sum(self.memory.growth(request) for request in self.runs.running)

    def _admit_arrived(self, now: float) -> None:
        """In line; one that finds no hot buffer takes that of a request of a lower priority."""
        self.runs.held_back = None
        while len(self.runs.arrived):
            request = self.runs.arrived.first
            if not self.memory.may_admit() and not self.retracted.park_for(request, now):
                return
            self.runs.arrived.take(request)
            if self.memory.open_hot(request):
                self.admit(request, now)

    def _reopen_hot(self, now: float) -> None:
        """Take a request whose hot buffer cycles out of the batch, so that it comes back resident. The others go on
        while its rows are copied.
        """
        if len(self.runs.arrived):
            return  # what room there is, is theirs
        request = self.memory.to_reopen(self.runs.running, len(self.requests))
        if request is None:
            return
        if request.in_flight:
            self.runs.held_back = self.runs.held_back or request
            return
        self.retracted.park(request, now)
        self._admit_arrived(now)

    def _take_step(self, command_id: int) -> list[DecodeRow]:
        rows = self.runs.take(command_id)
        self.commands.done(command_id)
        return rows

    # -- retry -------------------------------------------------------------------------------------------------

    def _retry_or_fail(self, prompt: Prompt, now: float) -> None:
        """After an attempt that was lost, and may succeed another time: back to the head of the queue once, otherwise
        the end, and the client may try again. Its pages are fenced already.
        """
        begun = prompt.attempts - prompt.times_refused
        if begun >= MAX_ATTEMPTS:
            message = f"failed after {begun} attempts: {prompt.last_problem}"
            self._end_all(prompt, UnavailableError(message, retry_after_s=1), now)
            return
        prompt.refused_since = None
        if prompt.attempt is not None and prompt.attempt.begun:
            prompt.waits_since = now
        self._queue_again(prompt, now)

    def _refused(self, prompt: Prompt, now: float, *, full: bool) -> None:
        """A prefill server is full or shutting down. That was no attempt: another may take it, or this one later. One
        that is full is there, so its prompts wait as if they had not been sent.
        """
        assert prompt.attempt is not None, f"prompt {prompt.prompt_id} was refused by nobody"
        self.dispatcher.peers.refused(prompt.attempt.instance, now)
        if not full and prompt.refused_since is None:
            prompt.refused_since = now
        prompt.times_refused += 1
        self._queue_again(prompt, now)

    def _queue_again(self, prompt: Prompt, now: float) -> None:
        self.counters["redispatches"] += 1
        self.dispatcher.leave(prompt)
        for request in prompt.waiting:
            self.memory.release(request)
            request.lifecycle.advance(State.QUEUED, now)
            self._deadlines.watch(request)
        self.dispatcher.enqueue(prompt, now, again=True)

    # -- tokens and endings ------------------------------------------------------------------------------------

    def _accept_token(self, request: Request, token: TokenLogprob, now: float) -> None:
        request.output_ids.append(token.token)
        self.counters["generation_tokens"] += 1
        logprobs = (token,) if request.logprobs is not None else ()
        self._effects.append(SendToFrontend(Tokens(request.rid, (token.token,), logprobs)))
        reason = request.finish_reason(self.eos_token_ids)
        if reason is not None:
            self._end(request, reason, now)

    def _end_all(self, prompt: Prompt, error: RequestError, now: float) -> None:
        for request in prompt.waiting:
            self._end(request, error, now)

    def _end(self, request: Request, outcome: FinishReason | RequestError, now: float) -> None:
        """The one terminal event of a request. Its memory follows as soon as nobody can write it."""
        match request.state:
            case State.QUEUED | State.PREFILLING if request.prompt.waiting == [request]:  # the last takes it along
                self.dispatcher.withdraw(request.prompt, str(outcome), now)
            case State.ARRIVED if self._is_copied(request, "open"):
                pass  # it is in no line
            case State.ARRIVED | State.READY | State.RUNNING:
                self.runs.remove(request)
            case State.RETRACTED:
                self.retracted.drop(request)
            case _:
                pass
        if isinstance(outcome, FinishReason) and request.state in _WITH_KV:
            self.cache.insert((*request.prompt_ids, *request.output_ids[:-1]), request.pages)
        self.memory.release(request)
        del self.requests[request.rid]
        self._draining.add(request)
        request.lifecycle.advance(State.DRAINING, now)
        if isinstance(outcome, RequestError):
            self.counters["requests_aborted" if isinstance(outcome, AbortedError) else "requests_failed"] += 1
            self._effects.append(SendToFrontend(failed(request.rid, outcome)))
        else:
            self.counters["requests_finished"] += 1
            self._effects.append(SendToFrontend(finished(request, outcome, now)))
        self._free_drained(request.prompt, now)

    def _free_drained(self, prompt: Prompt, now: float) -> None:
        """Requests that have ended are gone for good once no page of their prompt can be written any more."""
        if prompt.quarantined == 0:
            for request in [request for request in prompt.members if request in self._draining]:
                request.lifecycle.advance(State.FREED, now)
                self._draining.remove(request)
