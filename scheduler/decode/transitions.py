"""The transitions of a request: each takes requests out of one room, changes their memory, and puts them into the next.

A room holds the requests of a state: `compiling`, the dispatcher's queue (QUEUED), `remote` (PREFILLING, VERIFYING),
`local` (LOADING, COMPUTING), the run queue (ARRIVED, OPENING, READY, RUNNING) and `retracted` (SAVING, SAVED). Rooms
never call this file. It is the only one that changes the state of a request. From which state a request may go where is
the table in messages/lifecycle.py.

Who gives up memory:

out of pages         Hot buffers return borrowed pages (HiSparse). Then one request of the lowest priority gives up all
                     its memory: the youngest that is not running, or else the youngest. Its KV is copied to host
                     memory, or computed again by prefill if that is cheaper or the host memory is full.
out of hot buffers   (HiSparse) For a request of a higher priority, one request gives up its hot buffer only. It becomes
                     ARRIVED again; its KV stays in its pages, which are in host memory.
"""

import collections
from collections.abc import Iterable, Iterator, Sequence

from ...common.errors import AbortedError, GrammarTooComplexError, RequestError, ServerError, UnavailableError
from ...common.sampling import JSON_RULES, TokenLogprob, pack_logprobs
from ...memory.index_spaces import KvPage
from ...memory.pages import PageGrant, pages_for
from ...memory.prefix_cache import InsertedPrefix
from ...transfer.protocol.messages import InstanceId, KvPath, PrefillDone, TransferFailed, TransferKey
from ..chunking.chunk_queue import Chunk
from ..chunking.grammar_queue import GrammarQueue
from ..messages.effects import SendToFrontend
from ..messages.frontend import FinishReason, Prefilled, Tokens
from ..messages.lifecycle import State
from ..messages.ranks import VerifyKv
from ..messages.step import StepResult
from ..store.kv_store import LEAST_TOKENS
from .deadlines import Deadlines, Lateness
from .memory.background_copies import Copy
from .memory.resources import Resources
from .requests.limits import MAX_ATTEMPTS
from .requests.request import Attempt, LocalPrompt, Prompt, Request
from .responses import failed, finished, grammar_failure
from .rooms.batch import RunQueue, WaitingQueue
from .rooms.dispatcher import PrefillDispatcher

READY_AHEAD = 4
"""READY requests that are enough to fill the next free places in the batch."""
PAGES_INSERTED = 256
"""Pages that one turn adds to the prefix cache: about 0.3 ms."""
_WITH_KV = (State.ARRIVED, State.OPENING, State.READY, State.RUNNING)
"""States in which the KV of all tokens but the newest is in the request's pages."""


class Transitions:
    """Owns the open requests."""

    def __init__(
        self,
        resources: Resources,
        eos_token_ids: frozenset[int],
        *,
        compiling: GrammarQueue[Prompt],
        dispatcher: PrefillDispatcher,
        run_queue: RunQueue,
        deadlines: Deadlines,
    ) -> None:
        self.requests: dict[str, Request] = {}
        """Requests without a terminal message, by rid."""
        self.retracted = WaitingQueue()
        """SAVING and SAVED requests, in the order in which they get pages."""
        self.starving = False
        """A running request waits for a page: the next free pages are for it."""
        self.lateness = Lateness(resources.limits, dispatcher.local, resources.counters)
        self._eos_token_ids = eos_token_ids
        self._limits = resources.limits
        self._cache = resources.cache
        self._memory = resources.memory
        self._store = resources.kv_store
        self._rates = resources.rates
        self._counters = resources.counters
        self._outbox = resources.outbox
        self._compiling = compiling
        self._dispatcher = dispatcher
        self._remote = dispatcher.remote
        self._run_queue = run_queue
        self._deadlines = deadlines
        self._verifying: dict[TransferKey, tuple[PrefillDone, PageGrant[KvPage]]] = {}
        """Transfers that the ranks verify, also those that were given up meanwhile, with holds of their pages."""
        self._uncached: collections.deque[Request] = collections.deque()
        """Requests whose prompts are not in the prefix cache yet; some may have ended or been retracted."""

    # -- into the queue ------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request], now: float) -> None:
        """Queue a new prompt with its requests, now or when its grammar is compiled."""
        prompt, grammar = requests[0].prompt, requests[0].sampling.grammar
        for request in requests:
            self.requests[request.rid] = request
            prompt.members.append(request)
            self._deadlines.watch(request)
        if grammar is None:
            self._dispatcher.enqueue(prompt, now)
        else:
            self._compiling.push(prompt, grammar)

    def compiled(self, prompt: Prompt, now: float) -> None:
        """The grammar of a prompt, which has left `compiling`, is compiled."""
        self._queue(prompt, now, again=False)

    def _requeue(self, prompt: Prompt, now: float) -> None:
        """Queue a prompt again whose pages were released or are in quarantine, before new prompts."""
        for request in prompt.waiting:
            self._memory.release(request)
        self._queue(prompt, now, again=True)

    def _queue(self, prompt: Prompt, now: float, *, again: bool) -> None:
        for request in prompt.waiting:
            request.lifecycle.advance(State.QUEUED, now)
            self._deadlines.watch(request)
        self._dispatcher.enqueue(prompt, now, again=again)

    # -- to a prefill server, or to be computed here -------------------------------------------------------------

    def dispatch(self, now: float, *, above: int | None) -> None:
        """Send the prompts that have a place and pages; with `above`, only those of a higher priority."""
        dispatcher = self._dispatcher
        for prompt, reservation, selection in dispatcher.placed(now, above=above, keep=self._pages_to_keep()):
            dispatcher.leave_queue(prompt, reservation, now)
            if selection is None:
                begun = dispatcher.compute(prompt, reservation, now)
                _advance(prompt, State.COMPUTING if begun else State.LOADING, now)
            else:
                _advance(prompt, State.PREFILLING, now)
                self._remote.send(prompt, reservation, selection, now)
            self.retracted.passed_by(prompt.priority)

    def _pages_to_keep(self) -> int:
        """Pages that new prompts must leave free. While enough requests are READY, this is all that running requests
        may still need: another request would only be retracted when they grow.
        """
        if len(self._run_queue.ready) < READY_AHEAD or not len(self._dispatcher.queue):
            return 0
        return sum(self._memory.unreserved_growth(request) for request in self._run_queue.running)

    # -- arrival: the KV of a prompt is here ---------------------------------------------------------------------

    def prefill_done(self, done: PrefillDone, now: float) -> None:
        """Prefill has written everything. When that is in its pages, and verified if it has to be, its requests are
        ARRIVED: now, after the last scatter, when it is `verified`, or after the copy of the cached prefix.
        """
        if self._remote.written(done):
            self.landed(done, now)

    def landed(self, done: PrefillDone, now: float) -> None:
        """All KV of a transfer is in its pages. Have the ranks verify it, unless the transfer was given up."""
        prompt = self._remote.prompts.get(done.key) if self._limits.verify_kv else None
        if prompt is None or prompt.attempt is None or prompt.grant is None:
            self._received(done, now)
            return
        self._verifying[done.key] = done, self._memory.commands.hold(prompt.grant)
        attempt = prompt.attempt
        self._outbox.append(VerifyKv(done.key, prompt.grant.pages, tuple(attempt.chunks), attempt.hot_pages))
        _advance(prompt, State.VERIFYING, now)

    def verified(self, key: TransferKey, problem: str | None, now: float) -> None:
        """All ranks have compared the KV of a transfer with what was sent."""
        done, grant = self._verifying.pop(key)
        self._memory.commands.release(grant)
        if problem is None or done.key not in self._remote.prompts:
            self._received(done, now)
            return
        self._counters["checksum_errors"] += 1
        self.transfer_failed(TransferFailed(done.key, problem, retryable=True, late_writes=True), now)

    def _received(self, done: PrefillDone, now: float) -> None:
        """All KV and the first token of every sample have arrived.

        If the cached prefix is still being copied into the hot buffer, they are LOADING, and this is called again when
        the copy has ended.
        """
        self._remote.writer_stopped(done.key, late_writes=False, now=now)  # our Abort may have crossed it
        prompt = self._remote.prompts.get(done.key)
        if prompt is None:
            self._counters["stale_messages"] += 1
            return
        attempt = prompt.attempt
        assert attempt is not None, f"prompt {prompt.prompt_id} arrived without an attempt"
        if self._memory.copies.of(attempt) is not None:
            attempt.held = done
            _advance(prompt, State.LOADING, now)
            return
        problem = self._remote.check_complete(prompt, done)
        if problem is not None:
            self.transfer_failed(TransferFailed(done.key, problem, retryable=True, late_writes=True), now)
            return
        if done.json_rules != JSON_RULES and prompt.has_json and self._dispatcher.can_compute_prompt(prompt):
            prompt.computed_here = True
            problem = "the prefill server has other grammars"
            self.transfer_failed(TransferFailed(done.key, problem, retryable=True), now)
            return
        samples = prompt.waiting
        path: KvPath = "device" if attempt.hot_pages or self._memory.hot is None else "host"
        self._count_transfer(attempt, prompt, done, path, now)
        self._dispatcher.pace.served(now)
        self._remote.leave(prompt)
        for request in samples:
            request.kv_path = path
        self._arrived(prompt, done, now, attempt if attempt.hot_pages else None)
        if attempt.hot_pages and samples[0].state is State.ARRIVED:
            self._run_queue.arrived.take(samples[0])
            self.admit(samples[0], now)  # prefill has written its hot buffer
        self.admit_arrived(now)

    def computed(self, chunk: Chunk[LocalPrompt], result: StepResult, seconds: float, now: float) -> None:
        """A step of `seconds` seconds has computed a chunk. The last chunk of a prompt brings the first tokens."""
        local, prompt = chunk.prompt, chunk.prompt.prompt
        if not self._dispatcher.local.computed(chunk, seconds):
            return
        local.input_logprobs += result.prompt_logprobs
        if self._memory.hot is None:
            assert prompt.grant is not None, f"prompt {prompt.prompt_id} is computed without pages"
            pages, freed = prompt.grant.pages, prompt.grant.freed
            self._cache.insert(prompt.token_ids, pages, local.inserted, end=chunk.end, freed=freed)
        self._memory.free_unseen(prompt, chunk.end)
        if not chunk.last:
            return
        self._dispatcher.local.remove(prompt)
        self._dispatcher.pace.served(now)
        self._count_prompt(prompt, local.cached - local.stored)
        done = PrefillDone(
            key=TransferKey(prompt.prompt_id, prompt.attempts),
            first_tokens=result.drawn,
            prompt_tokens=prompt.tokens,
            chunks=0,
            writes=0,
            bytes_written=0,
            queue_s=max(0.0, now - local.started_at - local.compute_s),
            compute_s=local.compute_s,
            transfer_tail_s=0.0,
            cached_tokens=local.cached,
            input_logprobs=pack_logprobs(local.input_logprobs),
            stored_tokens=local.stored,
        )
        samples = prompt.waiting
        for request in samples:
            request.kv_path = "local"
            if self._memory.hot is not None and request.done is None:
                request.host_tokens = local.cached
        self._arrived(prompt, done, now)
        if local.hot_slot is None:
            return
        # with HiSparse, one of them inherits its hot buffer
        heir = next((request for request in samples if request.state is State.ARRIVED), None)
        self._memory.pass_on_hot(local, heir)
        if heir is not None:
            self._run_queue.arrived.take(heir)
            self.admit(heir, now)

    def _arrived(self, prompt: Prompt, done: PrefillDone, now: float, received: Attempt | None = None) -> None:
        """The KV of a prompt is in its pages: its requests become ARRIVED, each with its first token. With `received`,
        the rows are in the hot buffer of that attempt instead, and the prompt has only one request.
        """
        grant = prompt.grant
        assert grant is not None, f"prompt {prompt.prompt_id} arrived without pages"
        prompt.grant = None
        samples = prompt.waiting
        for request in samples:
            request.lifecycle.advance(State.ARRIVED, now)
            request.received(done, now)
            if received is not None:
                self._memory.receive_rows(prompt, received, request)
            self._copy_tail(prompt, request, grant)
            if not prompt.output_tokens:
                prefilled = Prefilled(
                    request.rid, done.cached_tokens, done.input_logprobs, done.stored_tokens, request.host_tokens
                )
                self._outbox.append(SendToFrontend(prefilled))
            if not self._memory.unsaved(request) and request is samples[0]:
                self._uncached.append(request)
            self._run_queue.arrived.push(request)
            self.accept_token(request, done.first_tokens[request.sample], now)
        self._memory.release_grant(grant)

    def _copy_tail(self, prompt: Prompt, request: Request, grant: PageGrant[KvPage]) -> None:
        """Copy the last page of the prompt to a sample that has its own copy of that page. Samples share full pages;
        they write different tokens into the last one.
        """
        full, within = divmod(prompt.tokens, self._limits.page_size)
        if within and request.pages[full] != grant.pages[full]:
            self._memory.copy_page(grant.pages[full], request.pages[full])

    def _count_transfer(self, attempt: Attempt, prompt: Prompt, done: PrefillDone, path: KvPath, now: float) -> None:
        self._counters["transfers"] += 1
        self._counters["transfer_bytes"] += done.bytes_written
        self._counters[f"path_bytes_{path}"] += done.bytes_written
        self._counters["transfer_writes"] += done.writes
        self._count_prompt(prompt, attempt.prefix_tokens - attempt.unseen_tokens)
        if attempt.expected_cached is not None:
            self._counters["dispatch_tokens_reused"] += done.cached_tokens
        self._rates.prefilled_tokens.measured(done.prompt_tokens - done.cached_tokens, done.compute_s)
        self._rates.transfers.ended(now - attempt.sent_at - done.queue_s - done.compute_s, now)

    def _count_prompt(self, prompt: Prompt, reused: int) -> None:
        """Count the tokens of a prompt, and those that were `reused`: once, not again after a retraction."""
        if not prompt.output_tokens:
            self._counters["prompt_tokens"] += prompt.tokens
            self._counters["prefix_tokens_reused"] += reused

    def prefix_stored(self, local: LocalPrompt, tokens: int, now: float) -> None:
        """A load from the KV store has ended: the first `tokens` tokens of a prompt are in its pages; 0 if nothing was
        loaded. The rest is computed here. If the placement expected many more stored tokens, the prompt is queued and
        placed again, once: without them, a prefill server may be faster.
        """
        prompt, dispatcher = local.prompt, self._dispatcher
        expected = prompt.cached_estimate[1] if prompt.stored_estimate and prompt.cached_estimate is not None else 0
        if expected - max(tokens, local.cached) >= LEAST_TOKENS and dispatcher.peers.able(prompt):
            prompt.load_failed, prompt.stored_estimate, prompt.cached_estimate = True, 0, None
            self._memory.release_prompt(dispatcher.local.remove(prompt))
            self._requeue(prompt, now)
            return
        if tokens > local.cached:
            dispatcher.local.stored(local, tokens)
            self._counters["store_tokens_loaded"] += local.stored
        if dispatcher.start_local(local):
            _advance(prompt, State.COMPUTING, now)

    def copied(self, copy: Copy, seconds: float, now: float) -> None:
        """All ranks have made a background copy, which took `seconds`. Its owner may have ended meanwhile."""
        if copy.tokens:
            self.cache_answer(copy.tokens, copy.grant, InsertedPrefix())
        self._memory.release_copy(copy)
        if copy.kind == "save":
            self._rates.copied_pages.measured(copy.pages, seconds)
        request = copy.owner
        if isinstance(request, LocalPrompt):
            if request.prompt.local is request:
                self._dispatcher.local.loaded(request)
                _advance(request.prompt, State.COMPUTING, now)
        elif isinstance(request, Attempt):
            done, request.held = request.held, None
            if done is not None and not request.given_up:
                self._received(done, now)
        elif self.requests.get(request.rid) is request:
            match copy.kind:
                case "save":
                    request.lifecycle.advance(State.SAVED, now)
                case "restore":
                    request.lifecycle.advance(State.ARRIVED, now)
                    self._run_queue.arrived.push(request)
                    self.admit_arrived(now)
                case "open":
                    self._run_queue.opening.remove(request)
                    self.admit(request, now)
                case _:  # "write_back": all rows of the prompt are in host memory now
                    self._uncached.append(request)

    def insert_some(self) -> None:
        """Add a few pages of arrived prompts to the prefix cache. Call it when the ranks have their next step: to add
        all pages of a long prompt at once would delay its first token, and the tokens of others, by milliseconds.
        """
        while self._uncached and (self._uncached[0].grant is None or self._uncached[0].state not in _WITH_KV):
            self._uncached.popleft()
        if self._uncached:
            request = self._uncached[0]
            tokens, grant, inserted = request.prompt_ids, request.grant, request.inserted
            assert grant is not None, f"{request.rid} is {request.state.name} without pages"
            end = (max(inserted.pages, grant.freed) + PAGES_INSERTED) * self._limits.page_size
            self._cache.insert(tokens, grant.pages, inserted, end=end, freed=grant.freed)
            if end >= len(tokens) or request.inserted.complete:
                self._uncached.popleft()

    # -- admission: into the batch -------------------------------------------------------------------------------

    def admit(self, request: Request, now: float) -> None:
        """Admit a request whose KV is in its pages. This is the only transition into READY.

        With HiSparse, the request has its hot buffer already; if the buffer is fully resident, it holds all rows.
        """
        request.lifecycle.advance(State.READY, now)
        self._run_queue.ready.push(request)

    def admit_arrived(self, now: float) -> None:
        """Admit ARRIVED requests in order. If no hot buffer is free, a request of a lower priority loses its own."""
        run_queue = self._run_queue
        run_queue.paused = None
        while len(run_queue.arrived):
            request = run_queue.arrived.first
            if not self._memory.may_admit() and not self._free_hot_buffer_for(request, now):
                return
            run_queue.arrived.take(request)
            if self._memory.open_hot(request):
                self.admit(request, now)
            else:
                request.lifecycle.advance(State.OPENING, now)
                run_queue.opening.add(request)

    def fill_batch(self, now: float) -> None:
        """READY requests take the free places in the batch."""
        for request in self._run_queue.fill_batch():
            request.lifecycle.advance(State.RUNNING, now)

    def give_memory(self, now: float) -> None:
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
        while self._memory.may_admit() and self._restore(now):
            pass
        self.dispatch(now, above=self.retracted.first.priority if len(self.retracted) else None)

    def _reopen_hot(self, now: float) -> None:
        """Make one evicting request fully resident again, if pages are to spare: it loses its hot buffer, becomes
        ARRIVED, and gets a larger buffer. Others run while its rows are copied.
        """
        run_queue = self._run_queue
        if len(run_queue.arrived):
            return  # free hot pages are for ARRIVED requests
        request = self._memory.next_to_reopen(run_queue.running, len(self.requests))
        if request is None:
            return
        if request.in_flight:
            run_queue.paused = run_queue.paused or request
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

    def _free_hot_buffer_for(self, request: Request, now: float) -> bool:
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
        self._take_hot_buffer(victim, now)
        return self._memory.may_admit()

    def _saved(self, requests: Iterable[Request]) -> Iterator[Request]:
        """The requests that can give up memory. With HiSparse, all rows of such a request are in host memory."""
        return (request for request in requests if not self._memory.unsaved(request))

    def _take_hot_buffer(self, request: Request, now: float) -> None:
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
        first = self._memory.first_visible(request.kv_tokens)
        pages = pages_for(request.kv_tokens, self._limits.page_size) - first
        can_compute = request.kv_tokens + 1 <= self._dispatcher.largest_prompt(request.prompt.endpoint)
        if self._worth_saving(request, pages) or not can_compute:
            request.saved_pages = pages
            request.lifecycle.advance(State.SAVING, now)
            self.retracted.push(request)
            self._memory.save(request, first, pages)
        else:
            self._counters["retractions_recomputed"] += 1
            request.lifecycle.advance(State.QUEUED, now)
            self._dispatcher.recompute(request, now)
            self._memory.release(request)

    def _worth_saving(self, request: Request, pages: int) -> bool:
        """Whether host memory has room for a copy, and the copy is cheaper than prefill or no server can prefill."""
        saved = sum(request.saved_pages for request in self.retracted)
        cheaper = self._rates.copy_is_cheaper(pages, request.kv_tokens)
        absent = not self._dispatcher.can_prefill(request.prompt.endpoint, request.kv_tokens + 1)
        return saved + pages <= self._limits.retract_pages and (cheaper or absent)

    def _restore(self, now: float) -> bool:
        """Allocate pages for the first request of the queue and copy its KV back; it is ARRIVED when the copy has
        ended. Returns False if the queue is empty, if the request is still being saved, or if pages are short.
        """
        if not len(self.retracted) or self.retracted.first.state is State.SAVING:
            return False
        request = self.retracted.first
        most_tokens = min(request.most_kv_tokens, request.kv_tokens + 1 + self._limits.growth_tokens)
        first = self._memory.first_visible(request.kv_tokens)
        growth = self._memory.growth_pages(request.saved_pages, first, most_tokens)
        request.grant = self._memory.pages.grant(request.rid, request.saved_pages, growth, freed=first)
        if request.grant is None:
            return False
        self._memory.restore(request)
        self.retracted.take(request)
        request.lifecycle.advance(State.RESTORING, now)
        request.saved_pages = 0
        return True

    # -- retry: an attempt has failed ----------------------------------------------------------------------------

    def transfer_failed(self, failed: TransferFailed, now: float) -> None:
        """Prefill has stopped writing before the end, or has refused to begin. Stale keys are only counted."""
        prompt = self._remote.prompts.get(failed.key)
        self._counters["stale_messages" if prompt is None else "transfers_failed"] += 1
        if prompt is not None:
            self._remote.give_up(prompt, failed.reason, abort=False)
        self._remote.writer_stopped(failed.key, late_writes=failed.late_writes, now=now)
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
        """Retry the prompts that a lost prefill server has not finished. Their old pages are quarantined, because the
        server may still be writing.
        """
        for prompt in self._remote.of_peer(instance):
            self._remote.give_up(prompt, f"prefill server lost: {reason}", abort=True)
            self._retry_or_fail(prompt, now)

    def take_back(self, now: float) -> None:
        """Compute a prompt that a prefill server would bring late, and this server would not. One in a turn, because
        each makes the others wait here.
        """
        prompt = self._remote.first_late(now)
        if prompt is not None:
            self._remote.give_up(prompt, "the prefill server was late", abort=True)
            prompt.computed_here = True
            self._retry_or_fail(prompt, now)

    def break_off(self, key: TransferKey, instance: InstanceId, problem: str, now: float) -> None:
        """Messages of a prefill server about staged parts make no sense: fail the transfer."""
        prompt = self._remote.prompts.get(key)
        if prompt is not None and prompt in self._remote.of_peer(instance):
            self._remote.give_up(prompt, problem, abort=True)
            self.end_all(prompt, ServerError(f"prefill broke the protocol: {problem}"), now)

    def _retry_or_fail(self, prompt: Prompt, now: float) -> None:
        """After a failed attempt, queue the prompt again, before new prompts. When MAX_ATTEMPTS have failed, it is
        queued only if this server may compute it; otherwise it fails with an error that allows the client to retry.
        The pages of the attempt are in quarantine already.
        """
        begun = prompt.attempts - prompt.times_refused
        if begun >= MAX_ATTEMPTS and not self._dispatcher.can_compute_prompt(prompt):
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
        self._dispatcher.peers.refused(prompt.attempt.instance, now)
        if not full and prompt.refused_since is None:
            prompt.refused_since = now
        prompt.times_refused += 1
        self._queue_again(prompt, now)

    def _queue_again(self, prompt: Prompt, now: float) -> None:
        self._counters["redispatches"] += 1
        self._remote.leave(prompt)
        self._requeue(prompt, now)

    # -- output and end ------------------------------------------------------------------------------------------

    def accept_token(self, request: Request, token: TokenLogprob, now: float) -> None:
        """Send a sampled token to the frontend; end the request if it is the last one."""
        request.output_ids.append(token.token)
        self._counters["generation_tokens"] += 1
        self.lateness.token(request, now)
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
                self._run_queue.remove(request)
            case State.SAVING | State.SAVED:
                self._memory.drop_saved(request)
                self.retracted.remove(request)
                request.saved_pages = 0
            case State.RESTORING:
                pass
            case _ if request.prompt.waiting == [request]:  # no other sample waits
                self._withdraw(request.prompt, str(outcome), now)
        if isinstance(outcome, FinishReason) and request.state in _WITH_KV:
            tokens = request.prompt_ids + tuple(request.output_ids[:-1])
            copy = self._memory.copies.of(request)
            if copy is not None and copy.kind == "write_back":
                copy.tokens = tokens  # cached when the copy has ended: then all rows are in host memory
            else:
                assert request.grant is not None, f"{request.rid} is {request.state.name} without pages"
                self._share_inserted(request, request.grant, tokens)
                self.cache_answer(tokens, request.grant, request.inserted)
        self._memory.release(request)
        del self.requests[request.rid]
        request.lifecycle.advance(State.ENDED, now)
        if isinstance(outcome, RequestError):
            self._counters["grammars_too_complex"] += isinstance(outcome, GrammarTooComplexError)
            self._counters["requests_aborted" if isinstance(outcome, AbortedError) else "requests_failed"] += 1
            self._outbox.append(SendToFrontend(failed(request.rid, outcome)))
        else:
            self._counters["requests_finished"] += 1
            self._outbox.append(SendToFrontend(finished(request, outcome, now)))

    def _withdraw(self, prompt: Prompt, reason: str, now: float) -> None:
        """No request needs this prompt any more."""
        if prompt in self._compiling:
            self._compiling.remove(prompt)
        elif prompt.local is not None:
            self._memory.release_prompt(self._dispatcher.local.remove(prompt))  # free when steps in flight have ended
        else:
            self._dispatcher.withdraw(prompt, reason, now)

    def cache_answer(self, tokens: Sequence[int], grant: PageGrant[KvPage], inserted: InsertedPrefix) -> None:
        """Keep the full pages of a finished request in the prefix cache, and offer them to the KV store."""
        self._cache.insert(tokens, grant.pages, inserted, freed=grant.freed)
        if self._store is not None:
            self._store.offer(self._store.new_chain(), tokens, inserted)

    def _share_inserted(self, request: Request, grant: PageGrant[KvPage], tokens: Sequence[int]) -> None:
        """Add the pages of the prompt to the prefix cache, for all its samples: 16 samples of a prompt of 131,072
        tokens that ended at once held the loop for 0.2 s, because each looked for all pages of it. A sample that was
        retracted has other pages since.
        """
        prompt, inserted, last = request.prompt, request.inserted, request.prompt.inserted.node
        if last is not None and grant.pages[prompt.inserted.pages - 1] == last.page:
            inserted.continue_at(prompt.inserted)
        self._cache.insert(tokens, grant.pages, inserted, end=len(prompt.token_ids), freed=grant.freed)
        prompt.inserted.continue_at(inserted)


def _advance(prompt: Prompt, state: State, now: float) -> None:
    """Change the state of the requests that wait for a prompt."""
    for request in prompt.waiting:
        request.lifecycle.advance(state, now)


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
