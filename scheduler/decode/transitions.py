"""The transitions of a request: each takes requests out of one room, changes their memory, and puts them into the next.

Which room holds the requests of which state is said in rooms/rooms.py; rooms never call this file. It is the only one
that changes the state of a request: from which state it may go where is the table in messages/lifecycle.py. What
happens to the requests of a prefill server that dies: `peer_lost`.

Who gives up memory:

out of pages         Hot buffers return borrowed pages (HiSparse). Then one request of the lowest priority gives up all
                     its memory: the youngest that is not running, or else the youngest. Its KV is copied to host
                     memory, or computed again by prefill if that is cheaper or the host memory is full.
out of hot buffers   (HiSparse) For a request of a higher priority, one request gives up its hot buffer only. It becomes
                     ARRIVED again; its KV stays in its pages, which are in host memory.
"""

import itertools
from collections.abc import Iterable, Iterator

from ...common.errors import (
    AbortedError,
    ClientError,
    GrammarTooComplexError,
    RequestError,
    ServerError,
    UnavailableError,
)
from ...common.sampling import JSON_RULES, TokenLogprob
from ...transfer.protocol.messages import InstanceId, PrefillDone, TransferFailed, TransferKey
from ..chunking.chunk_queue import Chunk
from ..messages.effects import ConnectPeer, SendToFrontend
from ..messages.frontend import FinishReason, Prefilled, Submit, Tokens
from ..messages.lifecycle import State
from ..messages.ranks import VerifyKv
from ..messages.step import StepResult
from ..store.kv_store import LEAST_TOKENS
from .deadlines import Deadlines
from .memory.background_copies import Copy
from .memory.hisparse_memory import HisparseMemory
from .memory.prefix_inserts import WITH_KV
from .memory.resources import Resources
from .placement.peers import PrefillPeers
from .placer import Placer
from .requests.limits import MAX_ATTEMPTS
from .requests.request import Attempt, LocalPrompt, Prompt, Request, requests_of
from .responses import failed, finished, grammar_failure
from .rooms.rooms import Rooms

READY_AHEAD = 4
"""READY requests that are enough to fill the next free places in the batch."""


class Transitions:
    """Owns the open requests."""

    def __init__(
        self,
        resources: Resources,
        rooms: Rooms,
        peers: PrefillPeers,
        placer: Placer,
        deadlines: Deadlines,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.requests: dict[str, Request] = {}
        """Requests without a terminal message, by rid."""
        self.starving = False
        """A running request waits for a page: the next free pages are for it."""
        self._prompt_ids = itertools.count(1)
        self._eos_token_ids = eos_token_ids
        self._limits = resources.limits
        self._memory = resources.memory
        self._rates = resources.rates
        self._counters = resources.counters
        self._outbox = resources.outbox
        self._compiling = rooms.compiling
        self._queued = rooms.queued
        self._prefilling = rooms.prefilling
        self._computing = rooms.computing
        self._batch = rooms.batch
        self._retracted = rooms.retracted
        self._peers = peers
        self._placer = placer
        self._deadlines = deadlines

    # -- into the queue ------------------------------------------------------------------------------------------

    def submit(self, submit: Submit, now: float) -> None:
        """Queue a new prompt with all its samples, now or when its grammar is compiled."""
        requests = requests_of(submit, next(self._prompt_ids), self._limits.request_timeout_s, now)
        self._counters["requests"] += len(requests)
        self._take_in(requests[0].prompt, now)
        self._connect(requests[0].prompt, submit.client)

    def adopt(self, prompt: Prompt, now: float) -> None:
        """Queue a prompt that the scheduler of another data-parallel rank has given away. Our rank may not know its
        grammar yet.
        """
        prompt.prompt_id, prompt.moved_at = next(self._prompt_ids), now
        prompt.refusal = prompt.cached_estimate = prompt.awaited = None
        prompt.cached_at.clear()
        if prompt.waiting[0].sampling.grammar is not None:
            _enter(prompt, State.COMPILING, now)
        self._take_in(prompt, now)
        self._connect(prompt)

    def _take_in(self, prompt: Prompt, now: float) -> None:
        """Queue a prompt that is new here, now or when its grammar is compiled."""
        for request in prompt.waiting:
            self.requests[request.rid] = request
            self._deadlines.watch(request)
        grammar = prompt.waiting[0].sampling.grammar
        if grammar is None:
            self._queued.push(prompt, now)
        else:
            self._compiling.push(prompt, grammar)

    def _connect(self, prompt: Prompt, client: str = "") -> None:
        if prompt.endpoint is not None:
            self._outbox.append(ConnectPeer(prompt.endpoint, client))

    def compiled(self, number: int, problem: str | None, now: float, *, slow: bool) -> None:
        """A grammar is compiled: queue its prompt. Or end its requests, because it cannot be. `slow`: its masks are."""
        prompt = self._compiling.take(number)
        if prompt is None:
            return
        for request in prompt.waiting:
            request.slow_masks = slow
        self._queue(prompt, now, again=False)
        if problem is not None:
            self.end_all(prompt, ClientError(f"the grammar {problem}"), now)
        else:
            self._check_peers(prompt, now)

    def peers_changed(self, now: float) -> None:
        """End queued requests whose prompts none of the paired prefill servers can hold, and those that name several
        servers.
        """
        for prompt in list(self._queued):
            self._check_peers(prompt, now)

    def _check_peers(self, prompt: Prompt, now: float) -> None:
        error = self._placer.refusal(prompt.endpoint, prompt.tokens, prompt.output_tokens)
        if error is not None:
            self.end_all(prompt, error, now)

    def _requeue(self, prompt: Prompt, now: float) -> None:
        """Queue a prompt again whose pages were released or are in quarantine, before new prompts."""
        for request in prompt.waiting:
            self._memory.release(request)
        self._queue(prompt, now, again=True)

    def _queue(self, prompt: Prompt, now: float, *, again: bool) -> None:
        for request in prompt.waiting:
            request.enter(State.QUEUED, now)
            self._deadlines.watch(request)
        self._queued.push(prompt, now, again=again)

    # -- to a prefill server, or to be computed here -------------------------------------------------------------

    def dispatch(self, now: float, *, above: int | None) -> None:
        """Send the prompts that have a place and pages; with `above`, only those of a higher priority."""
        if not self._queued.lanes and self._queued.pace.waiting_since is None:
            return
        keep = self._pages_to_keep()
        for prompt, reservation, selection, blocked in self._placer.placed(now, above=above, keep=keep):
            self._queued.take(prompt, now, blocked)
            prompt.grant, prompt.inserted = reservation.prompt, reservation.inserted
            for request, grant in zip(prompt.waiting, reservation.members, strict=True):
                request.grant = grant
            if selection is not None:
                _enter(prompt, State.PREFILLING, now)
                self._prefilling.send(prompt, reservation, selection, now)
            else:
                self._compute(prompt, reservation.prefix_tokens, now)
            self._retracted.passed_by(prompt.priority)

    def _pages_to_keep(self) -> int:
        """Pages that new prompts must leave free. While enough requests are READY, this is all that running requests
        may still need: another request would only be retracted when they grow.
        """
        if len(self._batch.ready) < READY_AHEAD or not self._queued.lanes:
            return 0
        return sum(self._memory.unreserved_growth(request) for request in self._batch.running)

    def _compute(self, prompt: Prompt, cached: int, now: float) -> None:
        """Compute a prompt that has its pages on this server, when what is stored or cached of it is there."""
        local = self._computing.start(prompt, cached, now)
        self._memory.allocate_for_prompt(local)
        loads = self._memory.load_stored(local, prompt.most_cached, self._rates.local_tokens.per_s)
        if loads or not self._memory.open_for_prompt(local):
            _enter(prompt, State.LOADING, now)
        else:
            self._loaded(local, now)

    def _loaded(self, local: LocalPrompt, now: float) -> None:
        """The prompt has all that its chunks need."""
        self._computing.loaded(local)
        _enter(local.prompt, State.COMPUTING, now)

    def prefix_stored(self, local: LocalPrompt, tokens: int, now: float) -> None:
        """A load from the KV store has ended: the first `tokens` tokens of a prompt are in its pages; 0 if nothing was
        loaded. The rest is computed here. If the placement expected many more stored tokens, the prompt is queued and
        placed again, once: without them, a prefill server may be faster.
        """
        prompt = local.prompt
        expected = prompt.cached_estimate[1] if prompt.stored_estimate and prompt.cached_estimate is not None else 0
        if expected - max(tokens, local.cached) >= LEAST_TOKENS and self._peers.able(prompt):
            prompt.load_failed, prompt.stored_estimate, prompt.cached_estimate = True, 0, None
            self._memory.release_prompt(self._computing.remove(prompt))
            self._requeue(prompt, now)
            return
        if tokens > local.cached:
            self._computing.stored(local, tokens)
            self._counters["store_tokens_loaded"] += local.stored
        if self._memory.open_for_prompt(local):
            self._loaded(local, now)

    # -- arrival: the KV of a prompt is here ---------------------------------------------------------------------

    def prefill_done(self, done: PrefillDone, now: float) -> None:
        """Prefill has written everything."""
        prompt = self._prefilling.prompts.get(done.key)
        if prompt is None:
            self._prefilling.writer_stopped(done.key, late_writes=False, now=now)  # our Abort has crossed it
        if prompt is None or not self._prefilling.done(prompt, done):
            self._counters["stale_messages"] += 1
        else:
            self.arrive(done.key, now)

    def arrive(self, key: TransferKey, now: float) -> None:
        """The requests of a transfer are ARRIVED when prefill has written everything, it is in its pages, verified if
        it has to be, and the cached prefix is in the hot buffer. Called when one of these has come true.
        """
        prompt = self._prefilling.prompts.get(key)
        attempt = prompt.attempt if prompt is not None else None
        if prompt is None or attempt is None or (done := attempt.done) is None or not self._prefilling.landed(prompt):
            return
        if self._limits.verify_kv and not attempt.verified:
            if key not in self._memory.holds.verifying:
                self._verify(prompt, attempt, now)
            return
        if attempt.hot_pages and self._memory.copies.of(attempt) is not None:
            _enter(prompt, State.LOADING, now)
            return
        self._prefilling.writer_stopped(key, late_writes=False, now=now)
        problem = self._prefilling.missing(prompt, done)
        if problem is not None:
            self.transfer_failed(TransferFailed(key, problem, retryable=True, late_writes=True), now)
            return
        if done.json_rules != JSON_RULES and prompt.has_json and self._placer.can_compute(prompt):
            prompt.computed_here = True
            problem = "the prefill server has other grammars"
            self.transfer_failed(TransferFailed(key, problem, retryable=True), now)
            return
        samples, path = prompt.waiting, self._prefilling.path(attempt)
        self._prefilling.count(prompt, done, now)
        self._count_prompt(prompt, attempt.prefix_tokens - attempt.unseen_tokens)
        self._prefilling.leave(prompt)
        self._arrived(prompt, done, path, now, attempt if attempt.hot_pages else None)
        if attempt.hot_pages and samples[0].state is State.ARRIVED:
            self._batch.arrived.take(samples[0])
            self.admit(samples[0], now)  # prefill has written its hot buffer
        self.admit_arrived(now)

    def _verify(self, prompt: Prompt, attempt: Attempt, now: float) -> None:
        """Have the ranks compare the KV of a transfer with what was sent."""
        assert prompt.grant is not None, f"prompt {prompt.prompt_id} is verified without pages"
        self._memory.holds.verifying[attempt.key] = self._memory.holds.hold(prompt.grant)
        self._outbox.append(VerifyKv(attempt.key, prompt.grant.pages, tuple(attempt.chunks), attempt.hot_pages))
        _enter(prompt, State.VERIFYING, now)

    def verified(self, key: TransferKey, problem: str | None, now: float) -> None:
        """All ranks have compared the KV of a transfer with what was sent. It may have been given up meanwhile."""
        self._memory.holds.release(self._memory.holds.verifying.pop(key))
        prompt = self._prefilling.prompts.get(key)
        if prompt is None or prompt.attempt is None:
            self._counters["stale_messages"] += 1
        elif problem is None:
            prompt.attempt.verified = True
            self.arrive(key, now)
        else:
            self._counters["checksum_errors"] += 1
            self.transfer_failed(TransferFailed(key, problem, retryable=True, late_writes=True), now)

    def computed(self, chunk: Chunk[LocalPrompt], result: StepResult, seconds: float, now: float) -> None:
        """A step of `seconds` seconds has computed a chunk. The last chunk of a prompt brings the first tokens."""
        local, prompt = chunk.owner, chunk.owner.prompt
        if not self._computing.computed(chunk, seconds):
            return
        local.input_logprobs += result.prompt_logprobs
        self._memory.computed(local, chunk.end)
        if not chunk.last:
            return
        done = self._computing.finish(local, result.drawn, now)
        self._count_prompt(prompt, local.cached - local.stored)
        samples = prompt.waiting
        for request in samples:
            if self._memory.hot is not None and request.done is None:
                request.host_tokens = local.cached
        self._arrived(prompt, done, "local", now)
        if local.hot_slot is None:
            return
        # with HiSparse, one of them inherits its hot buffer
        heir = next((request for request in samples if request.state is State.ARRIVED), None)
        self._memory.pass_on_hot(local, heir)
        if heir is not None:
            self._batch.arrived.take(heir)
            self.admit(heir, now)

    def _arrived(
        self, prompt: Prompt, done: PrefillDone, path: str, now: float, received: Attempt | None = None
    ) -> None:
        """The KV of a prompt is in its pages: its requests become ARRIVED, each with its first token. With `received`,
        the rows are in the hot buffer of that attempt instead, and the prompt has only one request.
        """
        grant, prompt.grant = prompt.grant, None
        assert grant is not None, f"prompt {prompt.prompt_id} arrived without pages"
        self._queued.pace.served(now)
        samples = prompt.waiting
        for request in samples:
            request.kv_path = path
            request.enter(State.ARRIVED, now)
            request.received(done, now)
            if received is not None and isinstance(self._memory, HisparseMemory):
                self._memory.receive_rows(prompt, received, request)
            self._memory.copy_tail(prompt, request, grant)
            if not prompt.output_tokens:
                prefilled = Prefilled(
                    request.rid, done.cached_tokens, done.input_logprobs, done.stored_tokens, request.host_tokens
                )
                self._outbox.append(SendToFrontend(prefilled))
            if not self._memory.unsaved(request) and request is samples[0]:
                self._memory.inserts.arrived(request)
            self._batch.arrived.push(request)
            self.accept_token(request, done.first_tokens[request.sample], now)
        self._memory.holds.release(grant)

    def _count_prompt(self, prompt: Prompt, reused: int) -> None:
        """Count the tokens of a prompt, and those that were `reused`: once, not again after a retraction."""
        if not prompt.output_tokens:
            self._counters["prompt_tokens"] += prompt.tokens
            self._counters["prefix_tokens_reused"] += reused

    def copied(self, copy: Copy, seconds: float, now: float) -> None:
        """All ranks have made a background copy, which took `seconds`. Its owner may have ended meanwhile."""
        self._memory.release_copy(copy)
        if copy.kind == "save":
            self._rates.copied_pages.measured(copy.pages, seconds)
        request = copy.owner
        if isinstance(request, LocalPrompt):
            if request.prompt.local is request:
                self._loaded(request, now)
        elif isinstance(request, Attempt):
            self.arrive(request.key, now)
        elif self.requests.get(request.rid) is request:
            match copy.kind:
                case "save":
                    request.enter(State.SAVED, now)
                case "restore":
                    request.enter(State.ARRIVED, now)
                    self._batch.arrived.push(request)
                    self.admit_arrived(now)
                case "open":
                    self._batch.opening.remove(request)
                    self.admit(request, now)
                case _:  # "write_back": all rows of the prompt are in host memory now
                    self._memory.inserts.arrived(request)

    # -- admission: into the batch -------------------------------------------------------------------------------

    def admit(self, request: Request, now: float) -> None:
        """Admit a request whose KV is in its pages. This is the only transition into READY.

        With HiSparse, the request has its hot buffer already; if the buffer is fully resident, it holds all rows.
        """
        request.enter(State.READY, now)
        self._batch.ready.push(request)

    def admit_arrived(self, now: float) -> None:
        """Admit ARRIVED requests in order. If no hot buffer is free, a request of a lower priority loses its own."""
        batch = self._batch
        batch.paused = None
        while batch.arrived.requests:
            request = batch.arrived.first
            if not self._memory.may_admit() and not self._free_hot_buffer_for(request, now):
                return
            batch.arrived.take(request)
            if self._memory.open_hot(request):
                self.admit(request, now)
            else:
                request.enter(State.OPENING, now)
                batch.opening.add(request)

    def fill_batch(self, now: float) -> None:
        """READY requests take the free places in the batch."""
        for request in self._batch.fill():
            request.enter(State.RUNNING, now)

    def give_memory(self, now: float) -> None:
        """Give memory to whatever waits for it. Call once per loop turn.

        A failed allocation is recorded; `reclaim_lent` then takes lent pages back, and the allocation is tried again.
        """
        self.admit_arrived(now)
        self._allocate_waiting(now)
        while self._memory.reclaim_lent([*self._batch.ready, *self._batch.running]):
            self._allocate_waiting(now)
        self._reopen_hot(now)

    def _allocate_waiting(self, now: float) -> None:
        """Give pages to waiting requests: first to retracted ones, then to prompts. While a retracted request waits,
        only prompts of a higher priority get pages. While a running request lacks a page, nobody else gets one.
        """
        if self.starving:
            return
        retracted = self._retracted
        while retracted.requests and self._memory.may_admit() and self._restore(retracted.first, now):
            pass
        self.dispatch(now, above=retracted.first.priority if retracted.requests else None)

    def _reopen_hot(self, now: float) -> None:
        """Make one evicting request fully resident again, if pages are to spare: it loses its hot buffer, becomes
        ARRIVED, and gets a larger buffer. Others run while its rows are copied.
        """
        batch = self._batch
        if batch.arrived.requests:
            return  # free hot pages are for ARRIVED requests
        request = self._memory.next_to_reopen(batch.running, len(self.requests))
        if request is None:
            return
        if request.in_flight:
            batch.paused = batch.paused or request
            return
        self._take_hot_buffer(request, now)
        self.admit_arrived(now)

    # -- retraction: out of the batch ----------------------------------------------------------------------------

    def make_room(self, request: Request, now: float) -> bool:
        """Allocate memory for the row that the next step writes. If necessary, retract the least important request,
        which may be this one.

        Returns False if the request has to skip this step: pages are about to become free, the request to retract is
        still in a step, or rows have to be copied to host memory first. Other requests run meanwhile.
        """
        while not self._memory.grow(request):
            if self._memory.must_wait(request):
                return False
            if self._memory.reclaim_lent(self._batch.running):
                continue
            if self._memory.pages_pending:
                return False
            if self._memory.inserts.of_ended:
                self._memory.inserts.drop_ended()
                continue
            runs = self._batch
            victim = _least_important(self._able_to_yield((*runs.arrived, *runs.ready, *runs.running)))
            if victim is None:
                return False  # the rows of all requests are on their way to host memory
            if victim.in_flight:
                self._batch.paused = victim
                return False
            self._retract(victim, now)
            if victim is request:
                break
        return True

    def _free_hot_buffer_for(self, request: Request, now: float) -> bool:
        """Take the hot buffer of a request of a lower priority. Returns whether `request` can be admitted now.

        A victim that is in a step is paused: it gets no further step, and a later call takes its buffer.
        """
        victim = _least_important(self._able_to_yield((*self._batch.ready, *self._batch.running)))
        if victim is None or victim.priority >= request.priority:
            return False
        if victim.in_flight:
            self._batch.paused = victim
            return False
        self._counters["retractions"] += 1
        self._take_hot_buffer(victim, now)
        return self._memory.may_admit()

    def _able_to_yield(self, requests: Iterable[Request]) -> Iterator[Request]:
        """The requests that can give up memory. With HiSparse, all rows of such a request are in host memory."""
        return (request for request in requests if not self._memory.unsaved(request))

    def _take_hot_buffer(self, request: Request, now: float) -> None:
        """Take the hot buffer of a request that is in no step. It waits for another one; its KV stays in its pages."""
        self._batch.remove(request)
        self._memory.close_hot(request)
        request.enter(State.ARRIVED, now)
        self._batch.arrived.push(request)

    def _retract(self, request: Request, now: float) -> None:
        """Take all memory of a request. Its tokens are kept. Its KV is saved if a copy is cheaper than prefill, or if
        the sequence is too long for prefill now.
        """
        self._counters["retractions"] += 1
        self._batch.remove(request)
        pages = self._memory.pages_to_save(request)
        can_compute = request.kv_tokens + 1 <= self._placer.largest_prompt(request.prompt.endpoint)
        if self._worth_saving(request, pages) or not can_compute:
            request.saved_pages = pages
            request.enter(State.SAVING, now)
            self._retracted.push(request)
            self._memory.save(request)
        else:
            self._counters["retractions_recomputed"] += 1
            request.enter(State.QUEUED, now)
            request.recompute(next(self._prompt_ids), now)
            self._queued.push(request.prompt, now, again=True)
            self._connect(request.prompt)  # the connection may have been closed since
            self._memory.release(request)

    def _worth_saving(self, request: Request, pages: int) -> bool:
        """Whether host memory has room for a copy, and the copy is cheaper than prefill or no server can prefill."""
        saved = sum(request.saved_pages for request in self._retracted)
        cheaper = self._rates.copy_is_cheaper(pages, request.kv_tokens)
        absent = not self._placer.can_prefill(request.prompt.endpoint, request.kv_tokens + 1)
        return saved + pages <= self._limits.retract_pages and (cheaper or absent)

    def _restore(self, request: Request, now: float) -> bool:
        """Allocate pages for a retracted request and copy its KV back; it is ARRIVED when the copy has ended. Returns
        False if it is still being saved, or if pages are short.
        """
        if request.state is State.SAVING or not self._memory.restore(request):
            return False
        self._retracted.take(request)
        request.enter(State.RESTORING, now)
        return True

    # -- retry: an attempt has failed ----------------------------------------------------------------------------

    def transfer_failed(self, failed: TransferFailed, now: float) -> None:
        """Prefill has stopped writing before the end, or has refused to begin. Stale keys are only counted."""
        prompt = self._prefilling.prompts.get(failed.key)
        self._counters["stale_messages" if prompt is None else "transfers_failed"] += 1
        if prompt is not None:
            self._prefilling.give_up(prompt, failed.reason, abort=False)
        self._prefilling.writer_stopped(failed.key, late_writes=failed.late_writes, now=now)
        if prompt is None:
            return
        if failed.retryable and failed.refused:
            self._refused(prompt, now, full=failed.full)
        elif failed.retryable:
            self._retry_or_fail(prompt, now)
        elif failed.too_complex:
            self.end_all(prompt, grammar_failure(failed.reason, too_complex=True), now)
        else:
            self.end_all(prompt, ServerError(f"prefill refused the request: {failed.reason}"), now)

    def peer_lost(self, instance: InstanceId, reason: str, now: float) -> None:
        """Queue the prompts again that are PREFILLING at a lost server, and of which it has not said PrefillDone. Their
        old pages are quarantined, because the server may still be writing. After MAX_ATTEMPTS, and if this server
        cannot compute a prompt, its requests fail. No other request changes its state: from VERIFYING on it has all KV,
        and COMPILING or QUEUED it waits for a server that takes it (deadlines.py).
        """
        for prompt in self._prefilling.of_peer(instance):
            self._prefilling.give_up(prompt, f"prefill server lost: {reason}", abort=True)
            self._retry_or_fail(prompt, now)

    def take_back(self, now: float) -> None:
        """Compute a prompt that a prefill server would bring late, and this server would not. One in a turn, because
        each makes the others wait here.
        """
        prompt = self._placer.first_late(now)
        if prompt is not None:
            self._prefilling.give_up(prompt, "the prefill server was late", abort=True)
            prompt.computed_here = True
            self._retry_or_fail(prompt, now)

    def break_off(self, key: TransferKey, instance: InstanceId, problem: str, now: float) -> None:
        """Messages of a prefill server about staged parts make no sense: fail the transfer."""
        prompt = self._prefilling.prompts.get(key)
        if prompt is not None and prompt in self._prefilling.of_peer(instance):
            self._prefilling.give_up(prompt, problem, abort=True)
            self.end_all(prompt, ServerError(f"prefill broke the protocol: {problem}"), now)

    def _retry_or_fail(self, prompt: Prompt, now: float) -> None:
        """After a failed attempt, queue the prompt again, before new prompts. When MAX_ATTEMPTS have failed, it is
        queued only if this server may compute it; otherwise it fails with an error that allows the client to retry.
        The pages of the attempt are in quarantine already.
        """
        begun = prompt.attempts - prompt.times_refused
        if begun >= MAX_ATTEMPTS and not self._placer.can_compute(prompt):
            message = f"failed after {begun} attempts: {prompt.last_problem}"
            self.end_all(prompt, UnavailableError(message, retry_after_s=1), now)
            return
        prompt.refused_since = None
        if prompt.attempt is not None and prompt.attempt.begun:
            prompt.waits_since = now
        self._queue_again(prompt, now)

    def _refused(self, prompt: Prompt, now: float, *, full: bool) -> None:
        """A prefill server is full or shutting down. A refusal does not count as an attempt: another server may take
        the prompt, or this one later. `prefill_wait_s` starts now, unless the server is full: then the prompt waits as
        if it had not been sent.
        """
        assert prompt.attempt is not None, f"prompt {prompt.prompt_id} was refused without an attempt"
        self._peers.refused(prompt.attempt.instance, now)
        if not full and prompt.refused_since is None:
            prompt.refused_since = now
        prompt.times_refused += 1
        self._queue_again(prompt, now)

    def _queue_again(self, prompt: Prompt, now: float) -> None:
        self._counters["redispatches"] += 1
        self._prefilling.leave(prompt)
        self._requeue(prompt, now)

    # -- output and end ------------------------------------------------------------------------------------------

    def accept_token(self, request: Request, token: TokenLogprob, now: float) -> None:
        """Send a sampled token to the frontend; end the request if it is the last one."""
        request.output_ids.append(token.token)
        self._counters["generation_tokens"] += 1
        self._deadlines.token(request, now)
        logprobs = (token,) if request.logprobs is not None else ()
        self._outbox.append(SendToFrontend(Tokens(request.rid, (token.token,), logprobs)))
        reason = request.finish_reason(self._eos_token_ids)
        if reason is not None:
            self.end(request, reason, now)

    def end_all(self, prompt: Prompt, error: RequestError, now: float) -> None:
        """End all requests that wait for this prompt."""
        for request in prompt.waiting:
            self.end(request, error, now)

    def end(self, request: Request, outcome: FinishReason | RequestError, now: float) -> None:
        """Send the terminal message of a request and release its memory. Its pages may be in quarantine for longer."""
        match request.state:
            case State.ARRIVED | State.OPENING | State.READY | State.RUNNING:
                self._batch.remove(request)
            case State.SAVING | State.SAVED:
                self._memory.drop_saved(request)
                self._retracted.remove(request)
            case State.RESTORING:
                pass
            case _ if request.prompt.waiting == [request]:  # no other sample waits
                self._withdraw(request.prompt, str(outcome), now)
        if request.state in WITH_KV and isinstance(outcome, FinishReason):
            self._memory.insert_answer(request)
        self._memory.release(request)
        del self.requests[request.rid]
        request.enter(State.ENDED, now)
        if isinstance(outcome, RequestError):
            self._counters["grammars_too_complex"] += isinstance(outcome, GrammarTooComplexError)
            self._counters["requests_aborted" if isinstance(outcome, AbortedError) else "requests_failed"] += 1
            self._outbox.append(SendToFrontend(failed(request.rid, outcome)))
        else:
            self._counters["requests_finished"] += 1
            self._outbox.append(SendToFrontend(finished(request, outcome, now)))

    def _withdraw(self, prompt: Prompt, reason: str, now: float) -> None:
        """No request needs this prompt any more."""
        match prompt.waiting[0].state:
            case State.COMPILING:
                self._compiling.remove(prompt)
            case State.QUEUED:
                self._queued.remove(prompt)
            case _ if prompt.local is not None:  # its memory is free when steps in flight have ended
                self._memory.release_prompt(self._computing.remove(prompt))
            case _:
                self._prefilling.withdraw(prompt, reason, now)


def _enter(prompt: Prompt, state: State, now: float) -> None:
    """Change the state of the requests that wait for a prompt."""
    for request in prompt.waiting:
        request.enter(state, now)


def _least_important(requests: Iterable[Request]) -> Request | None:
    """Among the requests of the lowest priority: the youngest that is not running, or else the youngest."""
    return max(
        requests,
        key=lambda request: (
            -request.priority,
            request.state is not State.RUNNING,
            request.started,
            request.sample,
        ),
        default=None,
    )
