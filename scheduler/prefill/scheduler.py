"""The prefill server's decisions: which prompts get pages, what the next step computes, when a transfer has ended.

Pure: integers in, effects out; `now` is a parameter. One thread calls it, between model steps.

    KvDestination -> WAITING -> COMPUTING -> SENDING -> CLOSED        (PrefillDone)
                        any of them -> CLOSING -> CLOSED              (TransferFailed or AbortAck)

A chunk is handed to the sender as soon as it is computed and is on the wire while the next one computes. Pages are
released, and decode is told, only after every chunk that was handed out has reported its end.
"""

import collections
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...configs.sampling import TokenLogprob
from ...memory.index_spaces import KvPage
from ...memory.pages import PageAllocator, pages_for
from ...memory.prefix_cache import PrefixCache
from ...transfer.data.chunks import ChunkWritten, PartWritten
from ...transfer.plan.staged_regions import StagedRegion
from ...transfer.protocol.messages import (
    Abort,
    AbortAck,
    ChunkArrived,
    InstanceId,
    KvDestination,
    Load,
    PrefillDone,
    StageFree,
    StageGrant,
    TransferFailed,
)
from ..messages.counters import PREFILL_COUNTERS
from ..messages.effects import CancelChunks, Effect, SendToPeer
from ..messages.lifecycle import TransferState
from .chunk_writes import chunk_order
from .compute_queue import ComputeQueue
from .fair_queue import FairQueue
from .limits import PrefillLimits
from .request import PageSpace, PrefillRequest, PrefillStep, TransferRef
from .staging import StagedSends

MAX_MISFITS = 8
"""Transfers that find no pages before a turn stops looking for one that does."""
BEGUN_AFTER_S = 1.0
"""Decode is told of a step that takes longer before its chunks are there, and does not take its prompts for waiting."""
ROUND_TRIP_S = 0.1
"""The next prompt comes within this long after decode has heard of the end of another, on a machine with much to do."""


class Refusal(NamedTuple):
    """Why a transfer is not taken, and whether another try may help. With `full` there are too many."""

    reason: str
    retryable: bool
    full: bool = False


class PrefillScheduler:
    """Owns every transfer and the page allocator of one prefill server."""

    def __init__(self, limits: PrefillLimits, pages: PageAllocator[KvPage]) -> None:
        self.limits = limits
        self.pages = pages
        self.cache = PrefixCache(pages, limits.page_size, enabled=limits.prefix_cache)
        self.counters: collections.Counter[str] = collections.Counter(dict.fromkeys(PREFILL_COUNTERS, 0))
        self.transfers: dict[TransferRef, PrefillRequest] = {}
        self._waiting = FairQueue()
        self._computing = ComputeQueue(limits)
        self._spaces: dict[InstanceId, PageSpace] = {}
        self._look_at = math.inf
        """Before that no transfer is due: they are not looked at in every turn."""
        self._effects: list[Effect] = []
        self.staging = StagedSends(limits.page_size, self.counters, self._effects)
        self._accepting = True

    # -- what happens ------------------------------------------------------------------------------------------

    def peer_up(self, instance: InstanceId, pages: PageSpace, staged: Iterable[StagedRegion] = ()) -> None:
        """A decode server paired; these are the pages of its pools, and the links that are staged to it."""
        self._spaces[instance] = pages
        self.staging.peer_up(instance, staged)

    def peer_lost(self, instance: InstanceId, reason: str, now: float) -> None:
        """Nobody waits for its transfers any more."""
        self._spaces.pop(instance, None)
        for transfer in [t for t in self.transfers.values() if t.instance == instance]:
            self._close(transfer, f"prefill lost the decode server: {reason}", now)
        self.staging.peer_lost(instance)

    def peer_closed(self, instance: InstanceId) -> None:
        """A lost decode server is not coming back."""
        self.staging.peer_closed(instance)

    def receive(
        self,
        instance: InstanceId,
        destination: KvDestination,
        prompt: Sequence[int],
        indices: list[int],
        now: float,
    ) -> None:
        """Queue a transfer, or answer at once why not."""
        transfer = PrefillRequest(instance, destination, prompt, indices, now)
        if transfer.ref in self.transfers:
            self.counters["stale_messages"] += 1
            return
        if len(self._waiting) >= self.limits.max_queued_requests:
            self._start_waiting(now)  # many may come in one turn
        refusal = self._refusal(transfer)
        if refusal is not None:
            self.counters["requests_refused"] += 1
            failed = TransferFailed(
                transfer.key,
                refusal.reason,
                refusal.retryable,
                refused=True,
                leaving=not self._accepting,
                full=refusal.full,
            )
            self._tell(transfer, failed)
            return
        self.counters["requests"] += 1
        self.transfers[transfer.ref] = transfer
        self._look_at = min(self._look_at, transfer.deadline)
        self._waiting.push(transfer)

    def abort(self, instance: InstanceId, message: Abort, now: float) -> None:
        """Decode gives a transfer up. One that we do not know has ended: nothing of it is being written."""
        transfer = self.transfers.get((instance, message.key))
        if transfer is None:
            self._effects.append(SendToPeer(instance, AbortAck(message.key)))
        else:
            self._close(transfer, message.reason, now, aborted=True)

    def stop_accepting(self) -> None:
        """Refuse new transfers from now on; decode servers are told to look elsewhere (shutdown, a lost rank)."""
        self._accepting = False

    def fail_all(self, reason: str, now: float) -> None:
        """End every transfer (shutdown deadline)."""
        for transfer in list(self.transfers.values()):
            self._close(transfer, reason, now)

    # -- decisions ---------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Everything that is due: deadlines, and pages for the queue. Call once per loop turn."""
        if now >= self._look_at:
            self._expire(now)
        self.staging.due(now)
        self._take_ended_chunks(now)
        self._start_waiting(now)
        self._say_what_has_begun(now)

    def next_step(self, now: float) -> PrefillStep | None:
        """The next step to give to the ranks; None when there is nothing to do, or enough is under way. Room for what
        it will compute is asked for, so that it is there when the step is done.
        """
        step = self._computing.next_step(now)
        for row in step.rows if step is not None else ():
            transfer = row.transfer
            self.staging.request(transfer.ref, max(row.start, transfer.destination.prefix_tokens), row.end, now)
        return step

    def step_done(
        self,
        command_id: int,
        first_tokens: Sequence[tuple[TokenLogprob, ...]],
        input_logprobs: Sequence[tuple[TokenLogprob, ...]],
        now: float,
    ) -> None:
        """The KV of these slices is in our pages, or will be once the chunk's ready event fires; send it.

        One entry per row: the first token of each sample for a prompt's last slice, and the logprobs of prompt tokens
        that the slice yields.
        """
        self.counters["prefill_steps"] += 1
        for row, tokens, logprobs in zip(
            self._computing.take(command_id, now), first_tokens, input_logprobs, strict=True
        ):
            transfer = row.transfer
            if transfer.state is not TransferState.COMPUTING:
                continue
            self.counters["prompt_tokens"] += row.end - row.start
            transfer.computed = row.end
            transfer.input_logprobs += logprobs
            self._send(transfer, row.start, row.end, now)
            if row.last:
                transfer.first_tokens = tokens
                self.cache.insert(transfer.prompt, row.pages)
                self._computing.remove(transfer)
                transfer.lifecycle.advance(TransferState.SENDING, now)
                self._finish_if_sent(transfer, now)

    def step_failed(self, command_id: int, reason: str, now: float) -> None:
        """The model could not run this step: its transfers fail, the server goes on."""
        self.counters["steps_failed"] += 1
        for row in self._computing.take(command_id, now):
            if row.transfer.state is TransferState.COMPUTING:
                self._close(row.transfer, f"the prefill step failed: {reason}", now)

    def chunk_written(self, written: ChunkWritten, now: float) -> None:
        """The direct writes of a chunk that was handed out have ended on all ranks, one way or the other."""
        self.staging.chunk_written(written, now)
        self._take_ended_chunks(now)

    def part_written(self, written: PartWritten, now: float) -> None:
        """A staged part has ended on its rank, one way or the other."""
        self.staging.part_written(written, now)
        self._take_ended_chunks(now)

    def stage_message(self, instance: InstanceId, message: StageGrant | StageFree, now: float) -> None:
        """Decode grants room for a staged part, or is done with it."""
        self.staging.receive(instance, message, now)
        self._take_ended_chunks(now)

    def take_effects(self) -> list[Effect]:
        """Everything decided since the last call, in order."""
        effects = self._effects[:]
        self._effects.clear()
        return effects

    # -- what can be seen --------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not (self.transfers or self._computing.steps)

    def state_counts(self) -> dict[str, int]:
        """Those that have their pages and stand behind others for the next step are waiting, too."""
        counts = {state.value: 0 for state in TransferState if state is not TransferState.CLOSED}
        for transfer in self.transfers.values():
            counts[transfer.state.value] += 1
        behind_others = len(self._computing) - self._running
        counts[TransferState.COMPUTING.value] -= behind_others
        counts[TransferState.WAITING.value] += behind_others
        return counts

    def load(self) -> Load:
        backlog, running, limits = [*self._waiting, *self._computing], self._running, self.limits
        on_the_way = ROUND_TRIP_S * (self._computing.rate.per_s or 0.0)
        return Load(
            waiting_requests=len(backlog) - running,
            running_requests=running,
            waiting_tokens=sum(transfer.prompt_tokens - transfer.computed for transfer in backlog),
            accepting=self._accepting,
            window_tokens=2 * (limits.steps_in_flight * limits.chunk_size + int(on_the_way)),
        )

    def check_integrity(self) -> None:
        """Every page accounted for; all free when there is no transfer."""
        self.pages.check_integrity(idle=not self.transfers)

    # -- inside ------------------------------------------------------------------------------------------------

    @property
    def _running(self) -> int:
        """Transfers of which something is being computed."""
        return sum(transfer.state is TransferState.COMPUTING for transfer in self._computing.running)

    def _refusal(self, transfer: PrefillRequest) -> Refusal | None:
        if not self._accepting:
            return Refusal("the prefill server is shutting down", retryable=True)
        if len(self._waiting) >= self.limits.max_queued_requests:
            reason = f"prefill has {len(self._waiting)} requests queued (max_queued_requests)"
            return Refusal(reason, retryable=True, full=True)
        if transfer.instance not in self._spaces:
            return Refusal("the decode server is not paired", retryable=True)
        problem = self.limits.describe_problem(transfer, self._spaces[transfer.instance], self.pages.num_pages)
        return Refusal(problem, retryable=False) if problem is not None else None

    def _expire(self, now: float) -> None:
        """End transfers whose time is up."""
        open_ones = [t for t in self.transfers.values() if t.state is not TransferState.CLOSING]
        self._look_at = min((t.deadline for t in open_ones if t.deadline > now), default=math.inf)
        for transfer in [t for t in open_ones if t.deadline <= now]:
            transfer.retryable = False
            self._close(transfer, f"not done within the {transfer.destination.timeout_s:.1f} s it was given", now)

    def _say_what_has_begun(self, now: float) -> None:
        for transfer in self._computing.computing_for(BEGUN_AFTER_S, now):
            if transfer.said_begun or transfer.state is not TransferState.COMPUTING or transfer.destination.verify:
                continue
            transfer.said_begun = True
            start = transfer.destination.prefix_tokens
            self._tell(transfer, ChunkArrived(transfer.key, start, start))

    def _start_waiting(self, now: float) -> None:
        while self._start_next(now):
            pass

    def _start_next(self, now: float) -> bool:
        """Give the first that finds enough pages its own. Smaller ones may pass one that does not until it is due; then
        pages gather for it.
        """
        for transfer in itertools.islice(self._waiting, MAX_MISFITS):
            if self._start(transfer, now):
                self._waiting.take(transfer)
                return True
            if self._waiting.oldest_is_due:
                return False
        return False

    def _start(self, transfer: PrefillRequest, now: float) -> bool:
        """Give a transfer its pages: those of the cached prefix, and new ones. The last token is always computed."""
        if transfer.no_room_at == self.pages.chances:
            return False
        most = transfer.prompt_tokens - 1
        wanted = transfer.destination.logprobs
        if wanted is not None and wanted.start is not None:
            most = min(most, max(0, wanted.start - 1))  # logits at the position before the first one asked for
        prefix = self.cache.match(transfer.prompt, most)
        pages = self._pages_for(transfer.prompt_tokens)
        grant = self.pages.grant(transfer.destination.rid, pages - len(prefix), shared=prefix)
        if grant is None:
            transfer.no_room_at = self.pages.chances
            return False
        transfer.grant = grant
        transfer.cached = transfer.computed = transfer.given = len(prefix) * self.limits.page_size
        self.counters["prefix_tokens_reused"] += transfer.cached
        transfer.lifecycle.advance(TransferState.COMPUTING, now)
        self._computing.add(transfer)
        # checksums are made of a whole chunk in host memory: not of a cached prefix of any length
        span = self.limits.chunk_size if transfer.destination.verify else max(1, transfer.cached)
        for start in range(0, transfer.cached, span):
            self._send(transfer, start, min(start + span, transfer.cached), now)
        return True

    def _send(self, transfer: PrefillRequest, start: int, end: int, now: float) -> None:
        assert transfer.grant is not None, f"{transfer.ref} sends without pages"
        chunk = chunk_order(
            transfer,
            transfer.grant,
            start,
            end,
            page_size=self.limits.page_size,
            theirs=self._spaces[transfer.instance],
        )
        if chunk is not None:
            transfer.sending += 1
            self._effects.append(chunk)
            self.staging.send(chunk, now)

    def _take_ended_chunks(self, now: float) -> None:
        for written in self.staging.take_ended():
            self._chunk_ended(written, now)

    def _chunk_ended(self, written: ChunkWritten, now: float) -> None:
        """All that was to be written of a chunk has been, or will not be."""
        transfer = self.transfers.get((written.instance, written.key))
        if transfer is None:
            self.counters["stale_messages"] += 1
            return
        transfer.sending -= 1
        transfer.late_writes |= written.late_writes
        transfer.writes += written.writes
        transfer.bytes_written += written.bytes_written
        self.counters["transfer_writes"] += written.writes
        self.counters["transfer_bytes"] += written.bytes_written
        if transfer.state is TransferState.CLOSING:
            self._conclude_if_drained(transfer, now)
        elif written.ok:
            transfer.chunks += 1
            self.counters["chunks"] += 1
            self._tell(transfer, ChunkArrived(transfer.key, written.token_start, written.token_end, written.checksums))
            self._finish_if_sent(transfer, now)
        else:
            self._close(transfer, written.reason, now)

    def _finish_if_sent(self, transfer: PrefillRequest, now: float) -> None:
        if transfer.state is not TransferState.SENDING or transfer.sending:
            return
        assert transfer.first_tokens, f"{transfer.ref} was computed without a first token"
        before_s = transfer.lifecycle.spent(TransferState.WAITING, now) + transfer.lifecycle.spent(
            TransferState.COMPUTING, now
        )
        self._tell(
            transfer,
            PrefillDone(
                key=transfer.key,
                first_tokens=transfer.first_tokens,
                prompt_tokens=transfer.prompt_tokens,
                chunks=transfer.chunks,
                writes=transfer.writes,
                bytes_written=transfer.bytes_written,
                queue_s=max(0.0, before_s - transfer.compute_s),
                compute_s=transfer.compute_s,
                transfer_tail_s=transfer.lifecycle.spent(TransferState.SENDING, now),
                cached_tokens=transfer.cached,
                input_logprobs=tuple(transfer.input_logprobs),
            ),
        )
        self.counters["requests_finished"] += 1
        self._release(transfer, now)

    def _close(self, transfer: PrefillRequest, reason: str, now: float, *, aborted: bool = False) -> None:
        """Stop: no further chunk is computed or handed out; what is on its way is cancelled and waited for."""
        transfer.aborted |= aborted
        if transfer.state is TransferState.CLOSING:
            return
        if transfer.state is TransferState.WAITING:
            self._waiting.remove(transfer)
        elif transfer.state is TransferState.COMPUTING:
            self._computing.remove(transfer)
        transfer.failure = reason
        transfer.lifecycle.advance(TransferState.CLOSING, now)
        if transfer.sending:
            self._effects.append(CancelChunks(transfer.instance, transfer.key))
        self.staging.abort(transfer.ref, reason, now)
        self._conclude_if_drained(transfer, now)

    def _conclude_if_drained(self, transfer: PrefillRequest, now: float) -> None:
        if transfer.sending:
            return
        reason = transfer.failure or "unknown"
        if transfer.aborted:
            self.counters["requests_aborted"] += 1
            self._tell(transfer, AbortAck(transfer.key, transfer.late_writes))
        else:
            self.counters["requests_failed"] += 1
            leaving = not self._accepting
            self._tell(
                transfer,
                TransferFailed(transfer.key, reason, transfer.retryable, transfer.late_writes, leaving=leaving),
            )
        self._release(transfer, now)

    def _release(self, transfer: PrefillRequest, now: float) -> None:
        transfer.lifecycle.advance(TransferState.CLOSED, now)
        del self.transfers[transfer.ref]
        if transfer.grant is not None:
            self.pages.release(transfer.grant)
            transfer.grant = None

    def _tell(self, transfer: PrefillRequest, message: ChunkArrived | PrefillDone | TransferFailed | AbortAck) -> None:
        self._effects.append(SendToPeer(transfer.instance, message))

    def _pages_for(self, tokens: int) -> int:
        return pages_for(tokens, self.limits.page_size)
