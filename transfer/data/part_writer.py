"""The staged path on a prefill rank: gathers a part into a buffer, which the sender writes in one piece.

There are two buffers for each decode rank, so that the next part is gathered while the previous one is sent. One thread
per decode rank gathers; on a GPU it uses its own stream, which no other work waits for.
"""

import collections
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import torch

from ...kernels.backends.streams import use_own_stream
from ...kernels.staging.kv_stage import kv_gather
from ..mooncake.sockets import Region
from ..plan.copy_runs import CopyRuns
from ..plan.ring import aligned
from ..protocol.layout import KvLayout, Plane
from ..protocol.messages import Pool, StageRing, TransferKey
from .chunks import PartWrite, PartWritten
from .routed_engine import PoolPair
from .sender import PeerSender, SendJob, SendResult

log = logging.getLogger(__name__)

BUFFERS: Final = 2


def gather_bytes(part_bytes: int) -> int:
    """The size of StageBuffers for parts of at most `part_bytes`."""
    return BUFFERS * aligned(part_bytes)


class StageBuffers:
    """The gather buffers for one decode rank: two slots, each for a part of at most `part_bytes`."""

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
        self._gathering: PartWrite | None = None
        self._cancelled = False
        """Whether the part that is being gathered is cancelled."""
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=f"gather-{sender.session}", daemon=True)
        self._thread.start()

    def write(self, command: PartWrite) -> None:
        """Gather and send a part as soon as a buffer is free."""
        with self._changed:
            if not self._closing:
                self._queue.append(command)
                self._changed.notify_all()
                return
        self._on_written(_stopped(command, "the decode server is gone"))

    def cancel(self, key: TransferKey) -> None:
        """Cancel the parts of a transfer that are not submitted to the sender yet; each still reports its end."""
        with self._changed:
            stopped = [command for command in self._queue if command.part.key == key]
            for command in stopped:
                self._queue.remove(command)
            if self._gathering is not None and self._gathering.part.key == key:
                self._cancelled = True
        for command in stopped:
            self._on_written(_stopped(command, "cancelled"))

    def close(self) -> None:
        """End the thread; parts not submitted to the sender are reported as stopped. May be called twice."""
        with self._changed:
            self._closing = self._cancelled = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        use_own_stream(self._pool.device)
        while (taken := self._take()) is not None:
            command, slot = taken
            try:
                ready = self._gather(command, slot)
            except Exception as error:
                self._free_slot(slot)
                self._on_written(_stopped(command, f"gathering the part failed: {error!r}"))
                continue
            self._submit(command, slot, ready)
        with self._changed:
            left = list(self._queue)
            self._queue.clear()
        for command in left:
            self._on_written(_stopped(command, "cancelled"))

    def _take(self) -> tuple[PartWrite, int] | None:
        """The next part and a buffer for it; None when closing."""
        with self._changed:
            self._gathering = None
            self._changed.wait_for(lambda: self._closing or (self._queue and self._free))
            if self._closing:
                return None
            self._gathering, self._cancelled = self._queue.popleft(), False
            return self._gathering, self._free.pop()

    def _gather(self, command: PartWrite, slot: int) -> Callable[[], None] | None:
        """Start to fill the buffer. Returns a function that waits until it is full, or None if it is full already."""
        part, layout = command.part, self._layout
        kv_gather(
            self._pool,
            torch.tensor(command.pages, dtype=torch.int32, device=self._pool.device),
            self._buffers.slot(slot, command.size_bytes),
            start=command.start,
            end=command.start + part.tokens,
            layers=range(part.block.layer_start - layout.layer_start, part.block.layer_end - layout.layer_start),
            heads=range(part.block.head_start - layout.head_start, part.block.head_end - layout.head_start),
        )
        if self._pool.device.type != "cuda":
            return None
        gathered = torch.cuda.Event()  # type: ignore[no-untyped-call]
        gathered.record(torch.cuda.current_stream(self._pool.device))
        return gathered.synchronize

    def _submit(self, command: PartWrite, slot: int, ready: Callable[[], None] | None) -> None:
        span = (slot * self._buffers.slot_bytes, command.offset, command.size_bytes)
        job = SendJob(
            command.part.key,
            CopyRuns(*(np.array([number], dtype=np.int64) for number in span)),
            self._buffers.pair,
            partial(self._sent, command, slot),
            ready,
        )
        with self._changed:  # so that cancel() finds the part either here or in the sender
            reason = "cancelled" if self._cancelled else None
            if reason is None:
                try:
                    self.sender.submit(job)
                except Exception as error:  # the grant exceeds the ring
                    reason = str(error)
        if reason is not None:
            try:
                if ready is not None:
                    ready()  # the buffer is reused only after the gather has ended
            except Exception:
                log.exception("error while gathering a cancelled part for %s", self.sender.session)
            self._free_slot(slot)
            self._on_written(_stopped(command, reason))

    def _sent(self, command: PartWrite, slot: int, result: SendResult) -> None:
        self._free_slot(slot)
        self._on_written(
            PartWritten(
                command.instance,
                command.part,
                result.ok,
                result.reason,
                result.late_writes,
                result.writes,
                result.bytes_written,
                {result.transport: result.bytes_written},
            )
        )

    def _free_slot(self, slot: int) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()


def _stopped(command: PartWrite, reason: str) -> PartWritten:
    return PartWritten(command.instance, command.part, ok=False, reason=reason)
