"""The engine loop of a decode server."""

import logging
import queue
import time

import numpy as np
import torch

from ..configs.errors import UnavailableError
from ..transfer.checksum import checksum
from ..transfer.decode_control import DecodeControl
from ..transfer.events import (
    LoadReported,
    MessageReceived,
    PeerAlias,
    PeerClosed,
    PeerLost,
    PeerRefused,
    PeerUp,
    SendFailed,
)
from ..transfer.messages import (
    AbortAck,
    ChunkArrived,
    InstanceId,
    KvDestination,
    PrefillDone,
    TransferFailed,
    TransferKey,
)
from .decode import DecodeRow, DecodeScheduler
from .effects import ConnectPeer, CopyPage, DropPages, Effect, LoadPages, SavePages, SendToPeer
from .executor import Draw, Executor, StepRow
from .front import Cancel, FlushCache, Submit
from .front_link import FrontLink
from .loop import EngineLoop

log = logging.getLogger(__name__)


class DecodeLoop(EngineLoop[DecodeScheduler]):
    """Turns clients' requests into transfers and steps."""

    def __init__(
        self,
        scheduler: DecodeScheduler,
        front: FrontLink,
        inbox: "queue.SimpleQueue[object]",
        *,
        executor: Executor,
        control: DecodeControl,
        verify_kv: bool,
    ) -> None:
        super().__init__(scheduler, front, inbox)
        self._executor = executor
        self._control = control
        self._verify_kv = verify_kv
        self._step_seconds = 0.0
        self._saved: dict[str, torch.Tensor] = {}
        """KV of retracted requests, in host memory."""

    def _handle(self, event: object, now: float) -> None:
        scheduler = self.scheduler
        match event:
            case Submit():
                scheduler.submit(event, now)
            case Cancel(rid=rid, stopped=stopped):
                scheduler.cancel(rid, now, stopped=stopped)
            case FlushCache():
                log.info("prefix cache flushed: %d pages", scheduler.cache.flush())
            case MessageReceived(message=message):
                self._handle_message(message, now)
            case LoadReported(instance=instance, load=load):
                scheduler.peer_load(instance, load)
            case PeerUp(instance=instance, endpoint=endpoint):
                assert endpoint is not None, "decode connects by endpoint"
                scheduler.peer_up(instance, endpoint)
            case PeerAlias(endpoint=endpoint, instance=instance):
                scheduler.peer_alias(instance, endpoint)
            case PeerLost(instance=instance, reason=reason):
                scheduler.peer_lost(instance, reason, now)
            case PeerClosed(instance=instance):
                scheduler.peer_closed(instance, now)
            case SendFailed(message=KvDestination() as message, reason=reason):
                scheduler.transfer_failed(message.key, reason, retryable=True, late_writes=False, now=now)
            case PeerRefused() | SendFailed():
                pass  # the control plane has logged it and shows it in its peers
            case _:
                raise TypeError(f"unexpected event: {event!r}")

    def _handle_message(self, message: object, now: float) -> None:
        scheduler = self.scheduler
        match message:
            case ChunkArrived():
                scheduler.chunk_arrived(message)
            case PrefillDone():
                problem = self._verify(message.key) if self._verify_kv else None
                if problem is None:
                    scheduler.prefill_done(message, now)
                else:
                    scheduler.counters["checksum_errors"] += 1
                    scheduler.transfer_failed(message.key, problem, retryable=True, late_writes=True, now=now)
            case TransferFailed(key=key, reason=reason, retryable=retryable, late_writes=late_writes):
                log.warning("transfer %s failed: %s", key, reason)
                scheduler.transfer_failed(key, reason, retryable=retryable, late_writes=late_writes, now=now)
            case AbortAck(key=key, late_writes=late_writes):
                scheduler.abort_acked(key, late_writes, now)
            case _:
                raise TypeError(f"unexpected message from prefill: {message!r}")

    def _verify(self, key: TransferKey) -> str | None:
        """Compare what landed with what was sent, chunk by chunk; None when it is the same, or nobody waits for it."""
        prompt = self.scheduler.prompt_of(key)
        if prompt is None or prompt.attempt is None or prompt.grant is None:
            return None
        for chunk in prompt.attempt.chunks:
            if chunk.checksum is None:
                return f"prefill sent no checksum for tokens [{chunk.token_start}, {chunk.token_end})"
            rows = self._executor.pool.read_tokens(prompt.grant.pages, chunk.token_start, chunk.token_end)
            if checksum(rows) != chunk.checksum:
                return f"KV checksum differs for tokens [{chunk.token_start}, {chunk.token_end})"
            self.scheduler.counters["chunks_verified"] += 1
        return None

    def _perform(self, effect: Effect) -> None:
        match effect:
            case SendToPeer(instance=instance, message=message, arrays=arrays):
                self._control.send(InstanceId(instance), message, *(np.asarray(a, dtype=np.int32) for a in arrays))
            case ConnectPeer(endpoint=endpoint):
                self._control.connect(endpoint)
            case CopyPage(source=source, destination=destination):
                self._executor.pool.copy_page(source, destination)
            case SavePages(rid=rid, pages=pages):
                self._save(rid, pages)
            case LoadPages(rid=rid, pages=pages):
                self._executor.pool.load(self._saved.pop(rid), pages)
            case DropPages(rid=rid):
                del self._saved[rid]
            case _:
                raise TypeError(f"unexpected effect on decode: {effect!r}")

    def _save(self, rid: str, pages: tuple[int, ...]) -> None:
        started = time.monotonic()
        self._saved[rid] = self._executor.pool.save(pages)
        self.scheduler.retracted.rates.copied_pages_per_s = len(pages) / (time.monotonic() - started)

    def _step(self, now: float) -> bool:
        rows = self.scheduler.next_step(now)
        self._carry_out()  # pages that were retracted are copied before somebody else writes them
        if not rows:
            return False
        try:
            results = self._executor.run([_step_row(row) for row in rows])
        except Exception as error:
            self.scheduler.step_failed(rows, self._step_failed(error), time.monotonic())
            return True
        self._failed_steps = 0
        done = time.monotonic()
        self._step_seconds = done - now
        self.scheduler.step_done(rows, [result.drawn[0] for result in results], done)
        return True

    def _gauges(self) -> dict[str, float]:
        return {
            "running_requests": self.scheduler.running,
            "fenced_pages": self.scheduler.intake.fences.pages,
            "cached_pages": len(self.scheduler.cache),
            "saved_requests": len(self._saved),
            "last_step_seconds": self._step_seconds,
        }

    def _give_up(self, now: float) -> None:
        self.scheduler.fail_all(UnavailableError("the server was shut down before the request was done"), now)

    def _answered(self) -> bool:
        return not self.scheduler.requests


def _step_row(row: DecodeRow) -> StepRow:
    request = row.request
    return StepRow(
        token_ids=(row.token,),
        start=row.position,
        pages=row.pages,
        draws=(Draw(request.sampling, len(request.output_ids), request.output_ids),),
        prompt_ids=request.prompt_ids,
        top_logprobs=request.logprobs.top if request.logprobs is not None else None,
    )
