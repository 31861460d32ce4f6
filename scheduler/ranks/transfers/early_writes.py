"""Chunk writes that a rank gets before their KV is computed: they start with the step, and read the KV when it is done.

So a chunk is sent as soon as it is computed, without a round trip to the leader.
"""

import threading
from collections.abc import Callable

from ....transfer.data.chunks import ChunkWrite, ChunkWritten
from ....transfer.protocol.messages import InstanceId, TransferKey


class EarlyWrites:
    """The waiting chunk writes of one rank. `write` starts a write. `report` reports the end of a write that was
    cancelled, or whose step failed, before it started. `add` and `cancel` may be called from any thread, the rest from
    the rank's.
    """

    def __init__(
        self, write: Callable[[ChunkWrite, Callable[[], None]], None], report: Callable[[ChunkWritten], None]
    ) -> None:
        self._write = write
        self._report = report
        self._lock = threading.Lock()
        self._waiting: dict[int, list[ChunkWrite]] = {}
        """By the command id of their step, which comes after them."""

    def add(self, chunk: ChunkWrite) -> None:
        assert chunk.after is not None
        with self._lock:
            self._waiting.setdefault(chunk.after, []).append(chunk)

    def step_started(self, command_id: int, wait: Callable[[], None]) -> None:
        """Start the writes of a step; `wait` returns when it is done."""
        for chunk in self._take(command_id):
            self._write(chunk, wait)

    def step_failed(self, command_id: int) -> None:
        for chunk in self._take(command_id):
            self._end(chunk, "the step failed")

    def cancel(self, instance: InstanceId, key: TransferKey) -> None:
        """End the waiting writes of a transfer."""
        cancelled = []
        with self._lock:
            for chunks in self._waiting.values():
                mine = [chunk for chunk in chunks if (chunk.instance, chunk.key) == (instance, key)]
                cancelled += mine
                chunks[:] = [chunk for chunk in chunks if chunk not in mine]
        for chunk in cancelled:
            self._end(chunk, "cancelled")

    def _take(self, command_id: int) -> list[ChunkWrite]:
        with self._lock:
            return self._waiting.pop(command_id, [])

    def _end(self, chunk: ChunkWrite, reason: str) -> None:
        self._report(
            ChunkWritten(chunk.instance, chunk.key, chunk.token_start, chunk.token_end, ok=False, reason=reason)
        )
