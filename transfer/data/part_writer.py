"""The staged path on a prefill rank: gathers a part into a buffer of its own and hands it to the sender, in one piece.

There are two buffers for each decode rank, so that the next part is gathered while one is on the wire. A thread per
decode rank gathers; on a GPU it does so on a stream of its own, which nothing else waits for.
"""

import collections
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from ...kernels.backends.streams import use_own_stream
from ...kernels.staging.kv_stage import kv_gather, warm_up_kv_stage
from ..mooncake.sockets import Region
from ..plan.copy_runs import CopyRuns
from ..plan.ring import aligned
from ..protocol.layout import KvLayout, Plane
from ..protocol.messages import Pool, StageRing, TransferKey
from .chunks import PartWrite, PartWritten
from .sender import PeerSender, PoolPair, SendJob, SendResult

log = logging.getLogger(__name__)

BUFFERS: Final = 2


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PartJob(SendJob):
    """A part in one of the buffers. The sender's owner passes its result to `ended`."""

    order: PartWrite
    ended: Callable[[SendResult], None]


@dataclass(slots=True, eq=False)
class _Gathering:
    order: PartWrite
    cancelled: bool = False


def gather_bytes(part_bytes: int) -> int:
    """What StageBuffers take for parts of at most `part_bytes`."""
    return BUFFERS * aligned(part_bytes)


def warm_up_gather(pool: torch.Tensor) -> None:
    """Compile the kernel of PartWriter, which is made when requests are about to come."""
    warm_up_kv_stage(pool)


class StageBuffers:
    """The memory that parts for one decode rank are gathered in: two slots, each for a part of at most `part_bytes`."""

    def __init__(self, part_bytes: int, ring: StageRing, device: torch.device) -> None:
        memory = torch.empty(gather_bytes(part_bytes) + ring.probe_bytes, dtype=torch.uint8, device=device)
        self.data, probe = memory[: gather_bytes(part_bytes)], memory[gather_bytes(part_bytes) :]
        self.slot_bytes = len(self.data) // BUFFERS
        row = KvLayout((Plane("ring", 1),), 0, 1, 0, 1, 1, ring.size_bytes, "uint8")
        target = Pool(row, ring.base_address, ring.size_bytes, ring.memory, ring.probe_address, ring.probe_bytes)
        self.pair = PoolPair(Region(memory.data_ptr(), len(memory)), target, probe)

    def slot(self, index: int, size_bytes: int) -> torch.Tensor:
        return self.data[index * self.slot_bytes :][:size_bytes]


class PartWriter:
    """Writes parts of one pool into the ring of one decode rank, in order. Owns a thread; close() before the sender's.

    `on_written` is called once for each write(), on this thread or the sender's.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        layout: KvLayout,
        buffers: StageBuffers,
        sender: PeerSender,
        *,
        on_written: Callable[[PartWritten], None],
    ) -> None:
        self._pool = pool
        self._layout = layout
        self._buffers = buffers
        self.sender = sender
        self._on_written = on_written
        self._changed = threading.Condition()
        self._queue: collections.deque[PartWrite] = collections.deque()
        self._free = list(range(BUFFERS))
        self._gathering: _Gathering | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=f"gather-{sender.session}", daemon=True)
        self._thread.start()

    def write(self, order: PartWrite) -> None:
        """Gather and send a part as soon as a buffer is free."""
        with self._changed:
            if not self._closing:
                self._queue.append(order)
                self._changed.notify_all()
                return
        self._on_written(_stopped(order, "the decode server is gone"))

    def cancel(self, key: TransferKey) -> None:
        """Stop the parts of a transfer that the sender does not have yet; each still reports its end."""
        with self._changed:
            stopped = [order for order in self._queue if order.part.key == key]
            for order in stopped:
                self._queue.remove(order)
            if self._gathering is not None and self._gathering.order.part.key == key:
                self._gathering.cancelled = True
        for order in stopped:
            self._on_written(_stopped(order, "cancelled"))

    def close(self) -> None:
        """End the thread; what the sender has not got is reported as stopped. May be called twice."""
        with self._changed:
            self._closing = True
            if self._gathering is not None:
                self._gathering.cancelled = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        use_own_stream(self._pool.device)
        while (taken := self._take()) is not None:
            gathering, slot = taken
            order = gathering.order
            try:
                ready = self._gather(order, slot)
            except Exception as error:
                self._let_go(slot)
                self._on_written(_stopped(order, f"the part could not be gathered: {error!r}"))
                continue
            self._submit(gathering, slot, ready)
        with self._changed:
            left = list(self._queue)
            self._queue.clear()
        for order in left:
            self._on_written(_stopped(order, "cancelled"))

    def _take(self) -> tuple[_Gathering, int] | None:
        """The next part and a buffer for it; None at the end."""
        with self._changed:
            self._gathering = None
            self._changed.wait_for(lambda: self._closing or (self._queue and self._free))
            if self._closing:
                return None
            self._gathering = _Gathering(self._queue.popleft())
            return self._gathering, self._free.pop()

    def _gather(self, order: PartWrite, slot: int) -> Callable[[], None] | None:
        """Start filling the buffer; what to call to wait for it, where it is not full yet."""
        part, layout = order.part, self._layout
        kv_gather(
            self._pool,
            torch.tensor(order.pages, dtype=torch.int32, device=self._pool.device),
            self._buffers.slot(slot, order.size_bytes),
            start=order.start,
            end=order.start + part.tokens,
            layers=range(part.block.layer_start - layout.layer_start, part.block.layer_end - layout.layer_start),
            heads=range(part.block.head_start - layout.head_start, part.block.head_end - layout.head_start),
        )
        if self._pool.device.type != "cuda":
            return None
        gathered = torch.cuda.Event()  # type: ignore[no-untyped-call]
        gathered.record(torch.cuda.current_stream(self._pool.device))
        return gathered.synchronize

    def _submit(self, gathering: _Gathering, slot: int, ready: Callable[[], None] | None) -> None:
        order = gathering.order
        span = (slot * self._buffers.slot_bytes, order.offset, order.size_bytes)
        job = PartJob(
            key=order.part.key,
            runs=CopyRuns(*(np.array([number], dtype=np.int64) for number in span)),
            ready=ready,
            pools=self._buffers.pair,
            order=order,
            ended=lambda result: self._sent(order, slot, result),
        )
        with self._changed:  # so that cancel() finds it either here or with the sender
            reason = "cancelled" if gathering.cancelled else None
            if reason is None:
                try:
                    self.sender.submit(job)
                except Exception as error:  # the ring is smaller than what was granted
                    reason = str(error)
        if reason is not None:
            try:
                if ready is not None:
                    ready()  # the buffer is not free before it is full
            except Exception:
                log.exception("gathering a part for %s that is not wanted any more", self.sender.session)
            self._let_go(slot)
            self._on_written(_stopped(order, reason))

    def _sent(self, order: PartWrite, slot: int, result: SendResult) -> None:
        self._let_go(slot)
        reason = "" if result.ok else result.reason or "cancelled"
        self._on_written(
            PartWritten(
                order.instance,
                order.part,
                result.ok,
                reason,
                result.late_writes,
                result.writes,
                result.bytes_written,
            )
        )

    def _let_go(self, slot: int) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()


def _stopped(order: PartWrite, reason: str) -> PartWritten:
    return PartWritten(order.instance, order.part, ok=False, reason=reason)
