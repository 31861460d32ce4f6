"""Output tokens of requests, and their ends: the terminal message, then the release of all memory."""

from collections.abc import Sequence

from ...configs.errors import AbortedError, GrammarTooComplexError, RequestError
from ...configs.sampling import TokenLogprob
from ...memory.index_spaces import KvPage
from ...memory.pages import PageGrant
from ...memory.prefix_cache import InsertedPrefix
from ..chunking.grammar_queue import GrammarQueue
from ..messages.effects import SendToFrontend
from ..messages.frontend import FinishReason, Tokens
from ..messages.lifecycle import State
from .dispatch.dispatcher import PrefillDispatcher
from .lateness import Lateness
from .memory.resources import Resources
from .requests.request import Prompt, Request
from .responses import failed, finished
from .retraction import Retractions
from .run_queue import RunQueue

WITH_KV = (State.ARRIVED, State.READY, State.RUNNING)
"""States in which the KV of all tokens but the newest is in the request's pages."""


class Endings:
    """Owns the open requests and those that have ended but still have pages in quarantine."""

    def __init__(
        self,
        resources: Resources,
        eos_token_ids: frozenset[int],
        *,
        run_queue: RunQueue,
        retracted: Retractions,
        dispatcher: PrefillDispatcher,
        compiling: GrammarQueue[Prompt],
    ) -> None:
        self.requests: dict[str, Request] = {}
        """Requests without a terminal message, by rid."""
        self.draining: set[Request] = set()
        self._eos_token_ids = eos_token_ids
        self._cache = resources.cache
        self._memory = resources.memory
        self._store = resources.kv_store
        self._counters = resources.counters
        self._outbox = resources.outbox
        self._run_queue = run_queue
        self._retracted = retracted
        self._dispatcher = dispatcher
        self._compiling = compiling
        self.lateness = Lateness(resources.limits, dispatcher.local, resources.counters)

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
        """Send the terminal message of a request and release its memory. Pages in quarantine follow later."""
        match request.state:
            case State.COMPILING if request.prompt.waiting == [request]:
                self._compiling.remove(request.prompt)
            # no other sample waits
            case State.QUEUED | State.PREFILLING | State.VERIFYING if request.prompt.waiting == [request]:
                self._dispatcher.withdraw(request.prompt, str(outcome), now)
            case State.COMPUTING if request.prompt.waiting == [request]:
                # its pages are free when steps in flight have ended
                self._memory.release_prompt(self._dispatcher.local.remove(request.prompt))
            case State.ARRIVED if self._memory.copies.is_in(request, "open"):
                pass  # its rows are being copied into its hot buffer: it is in no queue
            case State.ARRIVED | State.READY | State.RUNNING:
                self._run_queue.remove(request)
            case State.RETRACTED:
                self._retracted.drop(request)
            case _:
                pass
        if isinstance(outcome, FinishReason) and request.state in WITH_KV:
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
        self.draining.add(request)
        request.lifecycle.advance(State.DRAINING, now)
        if isinstance(outcome, RequestError):
            self._counters["grammars_too_complex"] += isinstance(outcome, GrammarTooComplexError)
            self._counters["requests_aborted" if isinstance(outcome, AbortedError) else "requests_failed"] += 1
            self._outbox.append(SendToFrontend(failed(request.rid, outcome)))
        else:
            self._counters["requests_finished"] += 1
            self._outbox.append(SendToFrontend(finished(request, outcome, now)))
        self.free_drained(request.prompt, now)

    def cache_answer(self, tokens: Sequence[int], grant: PageGrant[KvPage], inserted: InsertedPrefix) -> None:
        """Keep the full pages of a finished request in the prefix cache, and offer them to the KV store."""
        self._cache.insert(tokens, grant.pages, inserted, freed=grant.freed)
        if self._store is not None:
            self._store.offer(self._store.new_chain(), tokens, inserted)

    def _share_inserted(self, request: Request, grant: PageGrant[KvPage], tokens: Sequence[int]) -> None:
        """Add the pages of the prompt to the prefix cache, for all its samples: 16 samples of a prompt of 131,072
        tokens that ended at once held the loop for 0.2 s, because each looked for all pages of it.
        """
        prompt, inserted = request.prompt, request.inserted
        inserted.continue_at(prompt.inserted)
        self._cache.insert(tokens, grant.pages, inserted, end=len(prompt.token_ids), freed=grant.freed)
        prompt.inserted.continue_at(inserted)

    def free_drained(self, prompt: Prompt, now: float) -> None:
        """Free ended requests when no page of their prompt is in quarantine any more."""
        if prompt.quarantined == 0:
            for request in [request for request in prompt.members if request in self.draining]:
                request.lifecycle.advance(State.FREED, now)
                self.draining.remove(request)
