"""The transitions of a request on a prefill server, from its arrival to its last message.

A room holds the requests of a state: `compiling`, `waiting`, `loading` and `computing`. Rooms never call this file. It
is the only one that changes the state of a request.

A request ends with one message to decode. It is sent, and the pages are released, only after all chunks in flight have
reported their end.
"""

import collections
from collections.abc import Sequence

from ...common.sampling import JSON_RULES, pack_logprobs
from ...memory.index_spaces import KvPage
from ...memory.pages import PageAllocator, first_visible_page, pages_holding
from ...memory.prefix_cache import PrefixCache
from ...transfer.data.chunks import ChunkWrite, ChunkWritten, PartWritten
from ...transfer.protocol.messages import AbortAck, ChunkArrived, InstanceId, PrefillDone, TransferFailed
from ..chunking.fair_queue import FairQueue
from ..chunking.grammar_queue import GrammarQueue
from ..messages.effects import Outbox, SendToFrontend, SendToPeer
from ..messages.lifecycle import PrefillState
from ..messages.ranks import CancelChunks
from ..store.kv_store import KvStore
from .compute_queue import ComputeQueue
from .limits import PrefillLimits
from .request import PageSpace, PrefillRequest, TransferRef, prompt_sent
from .staging import StagedSends


class Transitions:
    """Owns the requests. Sends their KV to decode in chunks."""

    def __init__(
        self,
        limits: PrefillLimits,
        allocator: PageAllocator[KvPage],
        counters: collections.Counter[str],
        outbox: Outbox,
        *,
        compiling: GrammarQueue[PrefillRequest],
        waiting: FairQueue[PrefillRequest],
        computing: ComputeQueue,
        cache: PrefixCache,
        store: KvStore[PrefillRequest] | None,
    ) -> None:
        self.requests: dict[TransferRef, PrefillRequest] = {}
        self.spaces: dict[InstanceId, PageSpace] = {}
        """The pages of paired decode servers."""
        self.staging = StagedSends(limits.page_size, counters, outbox)
        self.loading: set[PrefillRequest] = set()
        self.leaving = False
        """The server accepts no requests any more."""
        self._limits = limits
        self._allocator = allocator
        self._counters = counters
        self._outbox = outbox
        self._compiling = compiling
        self._waiting = waiting
        self._computing = computing
        self._cache = cache
        self._store = store

    def receive(self, request: PrefillRequest) -> None:
        """Queue a request, now or when its grammar is compiled."""
        self.requests[request.ref] = request
        request.path = self.spaces[request.instance].path(request.destination)
        request.staged = request.instance in self.staging.regions
        grammar = request.destination.sampling.grammar
        if grammar is None:
            self._waiting.push(request)
        else:
            self._compiling.push(request, grammar)

    def compiled(self, request: PrefillRequest, now: float) -> None:
        """The grammar of a request, which has left `compiling`, is compiled."""
        request.lifecycle.enter(PrefillState.WAITING, now)
        self._waiting.push(request)

    def start(self, request: PrefillRequest, most: int, now: float) -> None:
        """A waiting request has its pages: load what the KV store has of its first `most` tokens, compute the rest."""
        self._waiting.take(request)
        if self._store is not None:
            request.chain = self._store.new_chain()
            if self._store.load(
                request,
                request.chain,
                request.token_ids,
                request.granted.pages,
                cached=request.cached,
                freed=request.granted.freed,
                most=most,
                tokens_per_s=self._computing.rate.per_s,
            ):
                self.loading.add(request)
                request.lifecycle.enter(PrefillState.LOADING, now)
                return
        self._compute(request, now)

    def loaded(self, request: PrefillRequest, tokens: int, now: float) -> None:
        """A load has ended: the KV of the first `tokens` tokens is in the pages, of a request that may have ended."""
        if request.state is not PrefillState.LOADING:
            return
        self.loading.remove(request)
        if tokens > request.cached:
            request.stored = tokens - request.cached
            request.cached = tokens
            self._counters["store_tokens_loaded"] += request.stored
            grant = request.granted
            self._cache.insert(request.token_ids, grant.pages, request.inserted, end=tokens, freed=grant.freed)
        self._compute(request, now)

    def _compute(self, request: PrefillRequest, now: float) -> None:
        """Queue a request to be computed, and send its cached prefix."""
        request.computed = request.scheduled = request.cached
        request.lifecycle.enter(PrefillState.COMPUTING, now)
        self._computing.add(request)
        # a checksum copies its whole chunk to host memory: a long cached prefix is sent in several chunks
        span = self._limits.chunk_size if request.destination.verify else max(1, request.cached)
        for start in range(0, request.cached, span):
            self.send(request, start, min(start + span, request.cached))

    def computed(self, request: PrefillRequest, now: float) -> None:
        """All of a prompt is computed, and its first tokens are sampled."""
        self._computing.remove(request)
        request.lifecycle.enter(PrefillState.SENDING, now)
        self._finish_if_sent(request, now)

    def send(self, request: PrefillRequest, start: int, end: int, *, after: int | None = None) -> None:
        """Send the tokens [start, end) that decode does not have; if `after` is given, once that step is done."""
        destination, theirs = request.destination, self.spaces[request.instance]
        prefix = destination.prefix_tokens
        start = max(start, prefix)  # decode has [0, prefix)
        if start >= end:
            return

        def part(indices: Sequence[int]) -> list[int]:
            if destination.granularity == "token":
                return list(indices[start - prefix : end - prefix])
            # the prefix ends on a page boundary of decode
            return pages_holding(indices, theirs.page_size, start - prefix, end - prefix)[0]

        to_hot_pool = theirs.hot_pages > 0 and request.path == "device"
        chunk = ChunkWrite(
            instance=request.instance,
            key=request.key,
            token_start=start,
            token_end=end,
            source_pages=pages_holding(request.granted.pages, self._limits.page_size, start, end)[0],
            indices=part(request.indices),
            granularity=destination.granularity,
            verify=destination.verify,
            after=after,
            hot_indices=part(request.hot_indices) if to_hot_pool else [],
        )
        request.unsent.append(start)
        self._outbox.append(chunk)
        if request.staged:
            self.staging.send(chunk)

    def chunk_written(self, written: ChunkWritten, now: float) -> None:
        """All ranks have ended their writes of a chunk; parts of it that are staged may go on."""
        request = self.requests[written.instance, written.key]
        ended = self.staging.chunk_written(written) if request.staged else written
        self._writes_ended(request, None if written.ok else written.reason, ended, now)

    def part_written(self, written: PartWritten, now: float) -> None:
        """The rank has ended its write of a staged part."""
        request = self.requests[written.instance, written.part.key]
        ended = self.staging.part_written(written)
        self._writes_ended(request, None if written.ok else written.reason, ended, now)

    def _writes_ended(
        self, request: PrefillRequest, failure: str | None, chunk: ChunkWritten | None, now: float
    ) -> None:
        """Writes of a request have ended, and with them maybe a chunk."""
        if chunk is not None:
            self._count(request, chunk)
        if request.state is PrefillState.CLOSING:
            self._conclude_if_drained(request, now)
        elif failure is not None:
            self.close(request, failure, now)
        elif chunk is not None:
            request.chunks += 1
            self._counters["chunks"] += 1
            self.reply(request, ChunkArrived(request.key, chunk.token_start, chunk.token_end, chunk.checksums))
            self.free_unseen(request)
            self._finish_if_sent(request, now)

    def _count(self, request: PrefillRequest, written: ChunkWritten) -> None:
        """All writes of a chunk have ended."""
        request.unsent.remove(written.token_start)
        request.late_writes |= written.late_writes
        request.writes += written.writes
        request.bytes_written += written.bytes_written
        self._counters["transfer_writes"] += written.writes
        self._counters["transfer_bytes"] += written.bytes_written
        self._counters[f"path_bytes_{request.path}"] += written.bytes_written
        for transport, size_bytes in written.transport_bytes.items():
            self._counters[f"transport_bytes_{transport}"] += size_bytes

    def free_unseen(self, request: PrefillRequest) -> None:
        """Free the pages of a request that its next chunk does not see (sliding window) and that have been sent."""
        if self._limits.window is None:
            return
        end = first_visible_page(request.computed, self._limits.window, self._limits.page_size)
        if request.unsent:
            end = min(end, min(request.unsent) // self._limits.page_size)
        if request.granted.freed < end:
            self._allocator.release(self._allocator.split(request.granted, end))

    def _finish_if_sent(self, request: PrefillRequest, now: float) -> None:
        """End a request that is computed and sent."""
        if request.state is not PrefillState.SENDING or request.sending:
            return
        assert request.first_tokens, f"{request.ref} was computed without a first token"
        before = (PrefillState.WAITING, PrefillState.LOADING, PrefillState.COMPUTING)
        before_s = request.lifecycle.spent(*before, now=now)
        done = PrefillDone(
            key=request.key,
            first_tokens=request.first_tokens,
            prompt_tokens=request.prompt_tokens,
            chunks=request.chunks,
            writes=request.writes,
            bytes_written=request.bytes_written,
            queue_s=max(0.0, before_s - request.compute_s),
            compute_s=request.compute_s,
            transfer_tail_s=request.lifecycle.spent(PrefillState.SENDING, now=now),
            cached_tokens=request.cached,
            input_logprobs=pack_logprobs(request.input_logprobs),
            stored_tokens=request.stored,
            json_rules=JSON_RULES,
        )
        self.reply(request, done)
        if request.traceparent is not None:
            self._outbox.append(SendToFrontend(prompt_sent(request, done, request.traceparent)))
        self._counters["requests_finished"] += 1
        self._release(request, now)

    def close(self, request: PrefillRequest, reason: str, now: float, *, aborted: bool = False) -> None:
        """Stop computing and sending a request; cancel its chunks in flight and wait for their end."""
        request.aborted |= aborted
        if request.state is PrefillState.CLOSING:
            return
        match request.state:
            case PrefillState.COMPILING:
                self._compiling.remove(request)
            case PrefillState.WAITING:
                self._waiting.remove(request)
            case PrefillState.COMPUTING:
                self._computing.remove(request)
            case PrefillState.LOADING:
                self.loading.remove(request)
            case _:
                pass
        request.failure = reason
        request.lifecycle.enter(PrefillState.CLOSING, now)
        if request.sending:
            self._outbox.append(CancelChunks(request.instance, request.key))
        for ended in self.staging.stop(request.ref) if request.staged else ():
            self._count(request, ended)
        self._conclude_if_drained(request, now)

    def _conclude_if_drained(self, request: PrefillRequest, now: float) -> None:
        if request.sending:
            return
        reason = request.failure or "unknown"
        if request.aborted:
            self._counters["requests_aborted"] += 1
            self.reply(request, AbortAck(request.key, request.late_writes))
        else:
            self._counters["requests_failed"] += 1
            failed = TransferFailed(
                request.key,
                reason,
                request.retryable,
                request.late_writes,
                leaving=self.leaving,
                too_complex=request.too_complex,
            )
            self.reply(request, failed)
        self._release(request, now)

    def _release(self, request: PrefillRequest, now: float) -> None:
        request.lifecycle.enter(PrefillState.CLOSED, now)
        del self.requests[request.ref]
        if request.grant is not None:
            self._allocator.release(request.grant)
            request.grant = None

    def reply(self, request: PrefillRequest, message: ChunkArrived | PrefillDone | TransferFailed | AbortAck) -> None:
        """Send a message to the decode server of a request."""
        self._outbox.append(SendToPeer(request.instance, message))
