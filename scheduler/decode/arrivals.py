"""What becomes of dispatched prompts: their KV arrives, or the attempt fails and is retried."""

import collections

from ...configs.errors import ServerError, UnavailableError
from ...configs.sampling import JSON_RULES, pack_logprobs
from ...memory.index_spaces import KvPage
from ...memory.pages import PageGrant
from ...transfer.protocol.messages import (
    InstanceId,
    KvPath,
    PrefillDone,
    StageArrived,
    StagePart,
    StageRequest,
    StageStopped,
    TransferFailed,
    TransferKey,
)
from ..chunking.chunk_queue import Chunk
from ..messages.effects import SendToFrontend
from ..messages.frontend import Prefilled
from ..messages.lifecycle import State
from ..messages.ranks import KvVerified, VerifyKv
from ..messages.step import StepResult
from ..store.kv_store import LEAST_TOKENS
from .deadlines import Deadlines
from .dispatch.dispatcher import PrefillDispatcher
from .endings import WITH_KV, Endings
from .memory.resources import Resources
from .requests.limits import MAX_ATTEMPTS
from .requests.request import Attempt, LocalPrompt, Prompt, Request
from .responses import grammar_failure
from .run_queue import RunQueue
from .verification import Verifications

PAGES_INSERTED = 256
"""Pages that one turn adds to the prefix cache: about 0.3 ms."""


class Arrivals:
    """Moves requests from PREFILLING or COMPUTING to VERIFYING and ARRIVED, or back to QUEUED, or ends them."""

    def __init__(
        self,
        resources: Resources,
        *,
        dispatcher: PrefillDispatcher,
        run_queue: RunQueue,
        endings: Endings,
        deadlines: Deadlines,
    ) -> None:
        self._page_size = resources.limits.page_size
        self._memory = resources.memory
        self._cache = resources.cache
        self._rates = resources.rates
        self._counters = resources.counters
        self._outbox = resources.outbox
        self._dispatcher = dispatcher
        self._remote = dispatcher.remote
        self._run_queue = run_queue
        self._endings = endings
        self._deadlines = deadlines
        self._verifies = resources.limits.verify_kv
        self._verifications = Verifications(resources.limits.ranks)
        self._uncached: collections.deque[Request] = collections.deque()
        """Requests whose prompts are not in the prefix cache yet; some may have ended or been retracted."""

    def prefill_done(self, done: PrefillDone, now: float) -> Request | None:
        """Prefill has written everything. When that is in its pages, and verified if it has to be, its requests are
        ARRIVED: now, after the last scatter (`part_scattered`), after `kv_verified`, or after `prefix_loaded`. Each of
        these returns the ARRIVED request whose hot buffer prefill has written (HiSparse), if there is one.
        """
        return self._landed(done, now) if self._remote.written(done) else None

    def part_scattered(self, part: StagePart, now: float) -> Request | None:
        """A rank has copied a staged part to its pages."""
        done = self._remote.staging.scattered(part)
        return self._landed(done, now) if done is not None else None

    def kv_verified(self, report: KvVerified, now: float) -> Request | None:
        """A rank has compared the KV of a transfer with what was sent."""
        self._counters["chunks_verified"] += report.chunks
        ended = self._verifications.reported(report)
        if ended is None:
            return None
        done, problem = ended
        # the pages of a transfer that was given up may have a new owner: then a difference means nothing
        if problem is None or done.key not in self._remote.prompts:
            return self._received(done, now)
        self._counters["checksum_errors"] += 1
        self.transfer_failed(TransferFailed(done.key, problem, retryable=True, late_writes=True), now)
        return None

    def _landed(self, done: PrefillDone, now: float) -> Request | None:
        """All KV of a transfer is in its pages. Have the ranks verify it, unless the transfer was given up."""
        prompt = self._remote.prompts.get(done.key) if self._verifies else None
        if prompt is None or prompt.attempt is None or prompt.grant is None:
            return self._received(done, now)
        self._verifications.begin(done)
        attempt = prompt.attempt
        self._outbox.append(VerifyKv(done.key, prompt.grant.pages, tuple(attempt.chunks), attempt.hot_pages))
        for request in prompt.waiting:
            request.lifecycle.advance(State.VERIFYING, now)
        return None

    def _received(self, done: PrefillDone, now: float) -> Request | None:
        """All KV and the first token of every sample have arrived.

        If the cached prefix is still being copied into the hot buffer, only `done` is kept: `prefix_loaded` calls this
        again when the copy has ended.
        """
        self._remote.writer_stopped(done.key, late_writes=False, now=now)  # our Abort may have crossed it
        prompt = self._remote.prompts.get(done.key)
        if prompt is None:
            self._counters["stale_messages"] += 1
            return None
        attempt = prompt.attempt
        assert attempt is not None, f"prompt {prompt.prompt_id} arrived without an attempt"
        if self._memory.copies.of(attempt) is not None:
            attempt.held = done
            return None
        problem = self._remote.check_complete(prompt, done)
        if problem is not None:
            self.transfer_failed(TransferFailed(done.key, problem, retryable=True, late_writes=True), now)
            return None
        if done.json_rules != JSON_RULES and prompt.has_json and self._dispatcher.can_compute_prompt(prompt):
            prompt.computed_here = True
            problem = "the prefill server has other grammars"
            self.transfer_failed(TransferFailed(done.key, problem, retryable=True), now)
            return None
        samples = prompt.waiting
        path: KvPath = "device" if attempt.hot_pages or self._memory.hot is None else "host"
        self._count_transfer(attempt, prompt, done, path, now)
        self._dispatcher.pace.served(now)
        self._remote.leave(prompt)
        for request in samples:
            request.kv_path = path
        self._arrived(prompt, done, now, attempt if attempt.hot_pages else None)
        return samples[0] if attempt.hot_pages and samples[0].state is State.ARRIVED else None

    def prefix_loaded(self, attempt: Attempt, now: float) -> Request | None:
        """The cached prefix of a prompt is in the hot buffer that prefill writes the rest to: finish `prefill_done`."""
        done, attempt.held = attempt.held, None
        return self._received(done, now) if done is not None and not attempt.given_up else None

    def written_back(self, request: Request) -> None:
        """The rows that prefill wrote to a hot buffer are in host memory now: the prompt may enter the prefix cache."""
        self._uncached.append(request)

    def computed(self, chunk: Chunk[LocalPrompt], result: StepResult, seconds: float, now: float) -> Request | None:
        """A step of `seconds` seconds has computed a chunk. The last chunk of a prompt brings the first tokens. Returns
        the ARRIVED request that inherits the hot buffer of the prompt (HiSparse), if there is one.
        """
        local, prompt = chunk.prompt, chunk.prompt.prompt
        if not self._dispatcher.local.computed(chunk, seconds):
            return None
        local.input_logprobs += result.prompt_logprobs
        if self._memory.hot is None:
            assert prompt.grant is not None, f"prompt {prompt.prompt_id} is computed without pages"
            pages, freed = prompt.grant.pages, prompt.grant.freed
            self._cache.insert(prompt.token_ids, pages, local.inserted, end=chunk.end, freed=freed)
        self._memory.free_unseen(prompt, chunk.end)
        if not chunk.last:
            return None
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
            return None
        heir = next((request for request in samples if request.state is State.ARRIVED), None)
        self._memory.pass_on_hot(local, heir)
        return heir

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
            self._endings.end_all(prompt, grammar_failure(failed.reason, too_complex=True), now)
        else:
            self._endings.end_all(prompt, ServerError(f"prefill refused the request: {failed.reason}"), now)

    def peer_lost(self, instance: InstanceId, reason: str, now: float) -> None:
        """Retry the prompts that a lost prefill server has not finished. Their old pages are quarantined, because the
        server may still be writing.
        """
        for prompt in self._remote.of_peer(instance):
            self._remote.give_up(prompt, f"prefill server lost: {reason}", abort=True)
            self._retry_or_fail(prompt, now)

    def stage_message(
        self, instance: InstanceId, message: StageRequest | StageArrived | StageStopped, now: float
    ) -> None:
        """A message about a staged part. A request that breaks the protocol fails its transfer."""
        problem = self._remote.staging.receive(instance, message, now)
        prompt = self._remote.prompts.get(message.part.key)
        if problem is not None and prompt is not None and prompt in self._remote.of_peer(instance):
            self._remote.give_up(prompt, problem, abort=True)
            self._endings.end_all(prompt, ServerError(f"prefill broke the protocol: {problem}"), now)

    def _arrived(self, prompt: Prompt, done: PrefillDone, now: float, received: Attempt | None = None) -> None:
        """The KV of a prompt is in its pages: its requests become ARRIVED, each with its first token. With `received`,
        the rows are in the hot buffer of that attempt instead, and the prompt has only one request.
        """
        grant = prompt.grant
        assert grant is not None, f"prompt {prompt.prompt_id} arrived without pages"
        prompt.grant = None
        samples = prompt.waiting
        for request in samples:
            request.arrived(done, now)
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
            self._endings.accept_token(request, done.first_tokens[request.sample], now)
        self._memory.release_grant(grant)

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
        dispatcher.start_local(local)

    def insert_some(self) -> None:
        """Add a few pages of arrived prompts to the prefix cache. Call it when the ranks have their next step: to add
        all pages of a long prompt at once would delay its first token, and the tokens of others, by milliseconds.
        """
        while self._uncached and (self._uncached[0].grant is None or self._uncached[0].state not in WITH_KV):
            self._uncached.popleft()
        if self._uncached:
            request = self._uncached[0]
            tokens, grant, inserted = request.prompt_ids, request.grant, request.inserted
            assert grant is not None, f"{request.rid} is {request.state.name} without pages"
            end = (max(inserted.pages, grant.freed) + PAGES_INSERTED) * self._page_size
            self._cache.insert(tokens, grant.pages, inserted, end=end, freed=grant.freed)
            if end >= len(tokens) or request.inserted.complete:
                self._uncached.popleft()

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

    def _copy_tail(self, prompt: Prompt, request: Request, grant: PageGrant[KvPage]) -> None:
        """Copy the last page of the prompt to a sample that has its own copy of that page. Samples share full pages;
        they write different tokens into the last one.
        """
        full, within = divmod(prompt.tokens, self._page_size)
        if within and request.pages[full] != grant.pages[full]:
            self._memory.copy_page(grant.pages[full], request.pages[full])

    # -- retry -------------------------------------------------------------------------------------------------

    def _retry_or_fail(self, prompt: Prompt, now: float) -> None:
        """After a failed attempt, queue the prompt again, before new prompts. When MAX_ATTEMPTS have failed, it is
        queued only if this server may compute it; otherwise it fails with an error that allows the client to retry.
        The pages of the attempt are in quarantine already.
        """
        begun = prompt.attempts - prompt.times_refused
        if begun >= MAX_ATTEMPTS and not self._dispatcher.can_compute_prompt(prompt):
            message = f"failed after {begun} attempts: {prompt.last_problem}"
            self._endings.end_all(prompt, UnavailableError(message, retry_after_s=1), now)
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

    def _requeue(self, prompt: Prompt, now: float) -> None:
        for request in prompt.waiting:
            self._memory.release(request)
            request.lifecycle.advance(State.QUEUED, now)
            self._deadlines.watch(request)
        self._dispatcher.enqueue(prompt, now, again=True)
