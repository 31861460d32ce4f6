"""The requests of a prefill server: sends their KV to decode in chunks, and ends them.

A request ends with one message to decode. It is sent, and the pages are released, only after all chunks in flight have
reported their end.
"""

import collections
from collections.abc import Callable

from ...configs.sampling import JSON_RULES, pack_logprobs
from ...memory.index_spaces import KvPage
from ...memory.pages import PageAllocator, first_visible_page, pages_holding
from ...transfer.data.chunks import ChunkWrite, ChunkWritten
from ...transfer.protocol.messages import AbortAck, ChunkArrived, InstanceId, PrefillDone, TransferFailed
from ..messages.effects import Outbox, SendToFrontend, SendToPeer
from ..messages.lifecycle import PrefillState
from ..messages.ranks import CancelChunks
from .limits import PrefillLimits
from .request import PageSpace, PrefillRequest, TransferRef, prompt_sent
from .staging import StagedSends


class Transfers:
    """Owns the requests, from their arrival to their last message."""

    def __init__(
        self,
        limits: PrefillLimits,
        pages: PageAllocator[KvPage],
        counters: collections.Counter[str],
        outbox: Outbox,
        *,
        withdraw: Callable[[PrefillRequest], None],
    ) -> None:
        """`withdraw` removes a request that fails or is aborted from its queue."""
        self.requests: dict[TransferRef, PrefillRequest] = {}
        self.spaces: dict[InstanceId, PageSpace] = {}
        """The pages of paired decode servers."""
        self.staging = StagedSends(limits.page_size, counters, outbox)
        self.leaving = False
        """The server accepts no requests any more."""
        self._page_size = limits.page_size
        self._window = limits.window
        self._pages = pages
        self._counters = counters
        self._outbox = outbox
        self._withdraw = withdraw

    def send(self, request: PrefillRequest, start: int, end: int, now: float, *, after: int | None = None) -> None:
        """Send the tokens [start, end) that decode does not have; if `after` is given, once that step is done."""
        destination, theirs = request.destination, self.spaces[request.instance]
        prefix = destination.prefix_tokens
        start = max(start, prefix)  # decode has [0, prefix)
        if start >= end:
            return

        def part(indices: list[int]) -> list[int]:
            if destination.granularity == "token":
                return indices[start - prefix : end - prefix]
            # the prefix ends on a page boundary of decode
            return pages_holding(indices, theirs.page_size, start - prefix, end - prefix)[0]

        to_hot_pool = theirs.hot_pages > 0 and request.path == "device"
        chunk = ChunkWrite(
            instance=request.instance,
            key=request.key,
            token_start=start,
            token_end=end,
            source_pages=pages_holding(request.granted.pages, self._page_size, start, end)[0],
            indices=part(request.indices),
            granularity=destination.granularity,
            verify=destination.verify,
            after=after,
            hot_indices=part(request.hot_indices) if to_hot_pool else [],
        )
        request.unsent.append(start)
        self._outbox.append(chunk)
        self.staging.send(chunk, now)

    def take_ended_chunks(self, now: float) -> None:
        """Handle the chunks whose writes have ended."""
        for written in self.staging.take_ended():
            self._chunk_ended(written, now)

    def _chunk_ended(self, written: ChunkWritten, now: float) -> None:
        """All writes of a chunk have ended, or failed."""
        request = self.requests.get((written.instance, written.key))
        if request is None:
            self._counters["stale_messages"] += 1
            return
        request.unsent.remove(written.token_start)
        request.late_writes |= written.late_writes
        request.writes += written.writes
        request.bytes_written += written.bytes_written
        self._counters["transfer_writes"] += written.writes
        self._counters["transfer_bytes"] += written.bytes_written
        self._counters[f"path_bytes_{request.path}"] += written.bytes_written
        for transport, size_bytes in written.transport_bytes.items():
            self._counters[f"transport_bytes_{transport}"] += size_bytes
        if request.state is PrefillState.CLOSING:
            self._conclude_if_drained(request, now)
        elif written.ok:
            request.chunks += 1
            self._counters["chunks"] += 1
            self.reply(request, ChunkArrived(request.key, written.token_start, written.token_end, written.checksums))
            self.free_unseen(request)
            self.finish_if_sent(request, now)
        else:
            self.close(request, written.reason, now)

    def free_unseen(self, request: PrefillRequest) -> None:
        """Free the pages of a request that its next chunk does not see (sliding window) and that have been sent."""
        if self._window is None:
            return
        end = first_visible_page(request.computed, self._window, self._page_size)
        if request.unsent:
            end = min(end, min(request.unsent) // self._page_size)
        if request.granted.freed < end:
            self._pages.release(self._pages.split(request.granted, end))

    def finish_if_sent(self, request: PrefillRequest, now: float) -> None:
        """End a request that is computed and sent."""
        if request.state is not PrefillState.SENDING or request.sending:
            return
        assert request.first_tokens, f"{request.ref} was computed without a first token"
        before = (PrefillState.WAITING, PrefillState.LOADING, PrefillState.COMPUTING)
        before_s = sum(request.lifecycle.spent(state, now) for state in before)
        done = PrefillDone(
            key=request.key,
            first_tokens=request.first_tokens,
            prompt_tokens=request.prompt_tokens,
            chunks=request.chunks,
            writes=request.writes,
            bytes_written=request.bytes_written,
            queue_s=max(0.0, before_s - request.compute_s),
            compute_s=request.compute_s,
            transfer_tail_s=request.lifecycle.spent(PrefillState.SENDING, now),
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
        self._withdraw(request)
        request.failure = reason
        request.lifecycle.advance(PrefillState.CLOSING, now)
        if request.sending:
            self._outbox.append(CancelChunks(request.instance, request.key))
        self.staging.abort(request.ref, reason, now)
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
        request.lifecycle.advance(PrefillState.CLOSED, now)
        del self.requests[request.ref]
        if request.grant is not None:
            self._pages.release(request.grant)
            request.grant = None

    def reply(self, request: PrefillRequest, message: ChunkArrived | PrefillDone | TransferFailed | AbortAck) -> None:
        """Send a message to the decode server of a request."""
        self._outbox.append(SendToPeer(request.instance, message))
