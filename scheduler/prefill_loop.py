"""The engine loop of a prefill server."""

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable

import numpy as np

from ..configs.schema import TransportSetting
from ..memory.kv_pool import KvPool
from ..transfer.checksum import checksum
from ..transfer.events import LoadReported, MessageReceived, PeerClosed, PeerLost, PeerRefused, PeerUp, SendFailed
from ..transfer.layout import KvLayout
from ..transfer.messages import Abort, Hello, InstanceId, KvDestination, Pool
from ..transfer.prefill_control import PrefillControl
from ..transfer.runs import PlanError, Runs, expand_runs, expand_token_runs
from ..transfer.sender import PeerSender, SendJob, SendResult
from ..transfer.transports import choose_route
from .effects import CancelChunks, Effect, SendChunk, SendToPeer
from .executor import Draw, Executor, StepRow
from .front import Cancel, FlushCache, Observe
from .front_link import FrontLink
from .loop import EngineLoop
from .prefill import PrefillScheduler
from .transfer import ChunkOutcome, PrefillRow

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkEnded:
    """A sender thread reports the end of a chunk."""

    chunk: SendChunk
    outcome: ChunkOutcome


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ChunkJob(SendJob):
    """A chunk in the hands of a sender; `checksum` is filled on its thread, before the first byte leaves."""

    chunk: SendChunk
    checksum: list[int]


@dataclasses.dataclass(slots=True)
class Route:
    """How KV gets to one decode instance: its pool and the thread that writes there."""

    pool: Pool
    sender: PeerSender


class PrefillLoop(EngineLoop[PrefillScheduler]):
    """Turns decode's requests into chunks of KV and sends them while the next ones compute."""

    def __init__(
        self,
        scheduler: PrefillScheduler,
        front: FrontLink,
        inbox: "queue.SimpleQueue[object]",
        *,
        executor: Executor,
        control: PrefillControl,
        layout: KvLayout,
        send_window: int,
        transport: TransportSetting,
    ) -> None:
        super().__init__(scheduler, front, inbox)
        self._executor = executor
        self._control = control
        self._layout = layout
        self._send_window = send_window
        self._transport = transport
        self._routes: dict[InstanceId, Route] = {}
        self._kv_ready: Callable[[], None] | None = None

    def close(self) -> None:
        """End the sender threads."""
        for instance in list(self._routes):
            self._routes.pop(instance).sender.close()

    def problems(self) -> list[str]:
        stalled = [
            f"the sender to {route.sender.session} has made no progress for {route.sender.stalled_s():.0f} s"
            for route in list(self._routes.values())
            if route.sender.stalled_s() > 30
        ]
        return super().problems() + stalled

    def _handle(self, event: object, now: float) -> None:
        scheduler = self.scheduler
        match event:
            case Observe(rid=rid, room=room):
                scheduler.observe(rid, room, now)
            case Cancel(rid=rid):
                scheduler.cancel_observer(rid, now)
            case FlushCache():
                log.info("prefix cache flushed: %d pages", scheduler.cache.flush())
            case MessageReceived(instance=instance, message=KvDestination() as message, arrays=(prompt, indices)):
                scheduler.receive(instance, message, prompt.tolist(), indices.tolist(), now)
            case MessageReceived(instance=instance, message=Abort() as message):
                scheduler.abort(instance, message, now)
            case ChunkEnded(chunk=chunk, outcome=outcome):
                ref = (chunk.instance, chunk.key)
                scheduler.chunk_sent(ref, chunk.token_start, chunk.token_end, outcome, now)
            case PeerUp(instance=instance, introduction=Hello() as hello):
                self._open_route(instance, hello)
            case PeerLost(instance=instance, reason=reason):
                scheduler.peer_lost(instance, reason, now)
            case PeerClosed(instance=instance):
                self._close_route(instance)
            case LoadReported() | PeerRefused() | SendFailed():
                pass  # nothing to decide; the control plane logs what is wrong
            case _:
                raise TypeError(f"unexpected event: {event!r}")

    def _open_route(self, instance: InstanceId, hello: Hello) -> None:
        (rank,) = hello.ranks
        (pool,) = rank.pools
        if instance not in self._routes:
            source: KvPool = self._executor.pool
            transport, session = choose_route(self._transport, rank, on_gpu=source.data.device.type == "cuda")
            log.info("KV for decode %s goes to %s (%s)", instance, session, transport)
            sender = PeerSender(
                session,
                pool,
                source.base_address,
                source.size_bytes,
                window=self._send_window,
                on_result=self._report,
                transport=transport,
            )
            self._routes[instance] = Route(pool, sender)
        self.scheduler.peer_up(instance, pool.layout.num_pages, pool.layout.page_size)

    def _close_route(self, instance: InstanceId) -> None:
        route = self._routes.pop(instance, None)
        if route is not None:  # closing waits for the writes in flight: not on this thread
            threading.Thread(target=route.sender.close, name=f"close-{route.sender.session}").start()

    def _perform(self, effect: Effect) -> None:
        match effect:
            case SendToPeer(instance=instance, message=message, arrays=arrays):
                self._control.send(instance, message, *(np.asarray(a, dtype=np.int32) for a in arrays))
            case SendChunk():
                self._send_chunk(effect)
            case CancelChunks(instance=instance, key=key):
                if instance in self._routes:
                    self._routes[instance].sender.cancel(key)
            case _:
                raise TypeError(f"unexpected effect on prefill: {effect!r}")

    def _send_chunk(self, chunk: SendChunk) -> None:
        """Hand a chunk to its sender. Whatever goes wrong becomes the chunk's outcome."""
        route = self._routes.get(chunk.instance)
        if route is None:
            self._inbox.put(ChunkEnded(chunk, ChunkOutcome(False, "the decode server is gone")))
            return
        pool, kv_ready, sums = self._executor.pool, self._kv_ready, list[int]()

        def ready() -> None:
            if kv_ready is not None:
                kv_ready()
            if chunk.verify:
                sums.append(checksum(pool.read_tokens(chunk.source_pages, chunk.token_start, chunk.token_end)))

        try:
            runs = _plan(chunk, self._layout, route.pool.layout)
            route.sender.submit(ChunkJob(key=chunk.key, runs=runs, ready=ready, chunk=chunk, checksum=sums))
        except PlanError as error:
            self._inbox.put(ChunkEnded(chunk, ChunkOutcome(False, str(error))))

    def _report(self, result: SendResult) -> None:
        """A sender's thread: put the end of a chunk into the inbox."""
        job = result.job
        assert isinstance(job, ChunkJob), f"not a chunk: {job!r}"
        outcome = ChunkOutcome(
            ok=result.ok,
            reason=result.reason or "",
            late_writes=result.late_writes,
            writes=result.writes,
            bytes_written=result.bytes_written,
            checksum=job.checksum[0] if job.checksum else None,
        )
        self._inbox.put(ChunkEnded(job.chunk, outcome))

    def _step(self, now: float) -> bool:  # noqa: ARG002
        rows = self.scheduler.next_step()
        if not rows:
            return False
        try:
            results = self._executor.run([_step_row(row) for row in rows])
            self._kv_ready = self._executor.kv_ready()
        except Exception as error:
            self.scheduler.step_failed(rows, self._step_failed(error), time.monotonic())
            return True
        self._failed_steps = 0
        self.scheduler.step_done(
            rows, [result.drawn for result in results], [result.prompt_logprobs for result in results], time.monotonic()
        )
        return True

    def _gauges(self) -> dict[str, float]:
        load = self.scheduler.load()
        return {
            "waiting_requests": load.waiting_requests,
            "running_requests": load.running_requests,
            "waiting_tokens": load.waiting_tokens,
            "cached_pages": len(self.scheduler.cache),
        }

    def _give_up(self, now: float) -> None:
        self.scheduler.fail_all("the prefill server was shut down", now)

    def _answered(self) -> bool:
        return self.scheduler.idle


def _step_row(row: PrefillRow) -> StepRow:
    """Of the ids decode sent, the last `output_tokens` are output already: they count as such for penalties."""
    ids, wanted = row.transfer.prompt, row.transfer.destination
    prompt, output = ids[: len(ids) - wanted.output_tokens], ids[len(ids) - wanted.output_tokens :]
    return StepRow(
        token_ids=ids[row.start : row.end],
        start=row.start,
        pages=row.pages,
        draws=tuple(Draw(sampling, len(output), output) for sampling in row.samplings()),
        prompt_ids=prompt,
        top_logprobs=wanted.logprobs.top if wanted.logprobs is not None else None,
        prompt_logprobs_from=wanted.logprobs.start if wanted.logprobs is not None and not output else None,
    )


def _plan(chunk: SendChunk, source: KvLayout, destination: KvLayout) -> Runs:
    """The copies of one chunk. Destination indices start at the first token that decode lacks."""
    if chunk.granularity == "token":
        rows = [0] * chunk.prefix_tokens + list(chunk.destination_indices)
        return expand_token_runs(source, destination, chunk.source_pages, rows, chunk.token_start, chunk.token_end)
    pages = [0] * (chunk.prefix_tokens // destination.page_size) + list(chunk.destination_indices)
    return expand_runs(source, destination, chunk.source_pages, pages, chunk.token_start, chunk.token_end)
